"""Converts the records of fine-tuning datasets, whatever their shape, to conversations.

The shape of a dataset is detected from the columns of its records; `sft.shape` overrides it.

    messages      a list of turns: {"role": "user", "content": "…"}, optionally with `tools`
    sharegpt      a list of turns: {"from": "human", "value": "…"}
    completion    `prompt` and `completion`: two texts used without a template, or lists of turns
    instruction   `instruction`, optionally `input`, and `output`: a question and its answer
    text          one text that contains everything, including the markers of turns
    preference    `chosen` and `rejected`, optionally `prompt`, as texts or as lists of turns
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from overland.data.chat import ASSISTANT, ChatError, Message, Undecided
from overland.errors import DataError
from overland.words import any_of

Record: TypeAlias = Mapping[str, Any]
Learn = Literal["assistant", "last", "all"]
Shape = Literal["messages", "sharegpt", "completion", "instruction", "text", "preference"]
WORDS: dict[Shape, str] = {
    "messages": "conversations",
    "sharegpt": "conversations in ShareGPT format",
    "completion": "prompts and completions",
    "instruction": "questions and answers",
    "text": "texts",
    "preference": "pairs of a chosen and a rejected answer",
}

TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
QUESTIONS = ("instruction", "prompt", "question", "query")
ANSWERS = ("output", "completion", "response", "answer")
NO_TOOLS = ("", "[]", "null")  # as JSON text
HEAVIEST = 1_000_000  # largest weight; sums stay exact in the type that stores them
FLAGS = ("weight", "train")  # of a turn: its loss weight, or whether to train on it
# Roles, by the names that public datasets use for them.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}


@dataclass(frozen=True)
class Conversation:
    """Turns for a chat template, or two texts that need no template."""

    turns: tuple[Message, ...] = ()
    said: tuple[float | None, ...] = ()
    """The loss weight of each turn, if the turn specifies one."""
    num_given: int = 0
    """The number of turns at the beginning that form the prompt, which is not learned."""
    tools: tuple[Any, ...] | None = None
    texts: tuple[str, str] | None = None
    """A prompt and what completes it."""

    def weights(self, learn: Learn) -> list[float] | None:
        """Returns the loss weight of each turn, or None if every token counts."""
        if learn == "all":
            other = [i for i, said in enumerate(self.said, start=1) if said not in (None, 1)]
            if other:
                raise Undecided(
                    f'turn {other[0]} has its own weight or train flag, but with sft.learn = "all" '
                    'every token counts: remove it, or set sft.learn = "assistant"'
                )
            return None
        own = [i for i, turn in enumerate(self.turns) if turn["role"] == ASSISTANT]
        learned = {i for i in own if i >= self.num_given}
        learned = learned if learn == "assistant" else set(sorted(learned)[-1:])
        weights = []
        for i, said in enumerate(self.said):
            if said and i not in own:
                raise ChatError(
                    f"turn {i + 1}, by {self.turns[i]['role']!r}, is marked to be learned, but "
                    'only assistant turns can be; to learn all turns, set sft.learn = "all"'
                )
            weights.append(float(i in learned) if said is None or i < self.num_given else said)
        return weights


@dataclass(frozen=True)
class Columns:
    """The columns of a record, by what they hold."""

    shape: Shape
    turns: str = ""
    prompt: str = ""
    answer: str = ""
    rejected: str = ""
    input: str = ""
    tools: str = ""
    system: str = ""

    def __str__(self) -> str:
        named = (
            self.system, self.prompt, self.input, self.turns, self.answer, self.rejected, self.tools
        )  # fmt: skip
        names = [name for name in named if name]
        columns = "column" if len(names) == 1 else "columns"
        return f"{WORDS[self.shape]} in {columns} {any_of(names, 'and')}"


def recognize(
    where: object,
    records: Sequence[Record],
    wanted: Shape | None = None,
    column: str | None = None,
    pairs: bool = False,
) -> Columns:
    """Detects the shape of a dataset from some of its records. `column` names the column with the
    turns or the text. `pairs`: prefer pairs of answers, if there are any."""
    if not records:
        raise DataError(f"{where} is empty: it holds no records")
    names = list(dict.fromkeys(name for record in records for name in record))
    listed = f"its columns: {', '.join(map(str, names))}"
    if column is not None and column not in names:
        raise DataError(f"{where} has no column {column!r}; {listed}")
    found = list(_possible(names, records, column))
    found.sort(key=lambda one: (one.shape == "preference") != pairs)
    if wanted is not None:
        found = [one for one in found if one.shape == wanted]
        if not found:
            raise DataError(
                f"{where} does not contain {WORDS[wanted]} (sft.shape = {wanted!r}); {listed}"
            )
    if not found:
        raise DataError(
            f"{where} has no known columns to fine-tune on; {listed}. Expected messages, "
            "conversations, prompt and completion, instruction and output, or text; if the column "
            "with the turns or the text has another name, set training.column (or "
            "data.sources.NAME.column)"
        )
    if pairs and found[0].shape != "preference":
        raise DataError(
            f"{where} contains {found[0]}, but preference.loss needs {WORDS['preference']}: "
            "columns chosen and rejected"
        )
    if not pairs and found[0].shape == "preference":
        raise DataError(f"{where} contains {found[0]}: set preference.loss to learn from them")
    return found[0]


def _possible(
    names: Sequence[str], records: Sequence[Record], column: str | None
) -> Iterator[Columns]:
    """Yields the shapes that the records may have, the most likely first."""

    def first(known: Sequence[str]) -> str:
        return next((name for name in known if name in names), "")

    def example(name: str) -> Any:
        return next((record[name] for record in records if record.get(name)), None)

    tools, system = first(("tools",)), first(("system", "system_prompt"))
    question, answer = first(QUESTIONS), first(ANSWERS)
    for turns in [column] if column is not None else [name for name in TURNS if name in names]:
        items = _listed(example(turns))
        if column is None or items:
            has_from = bool(items) and isinstance(items[0], Mapping) and "from" in items[0]
            shape: Shape = "sharegpt" if has_from else "messages"
            yield Columns(shape, turns, tools=tools, system=system)
    if column is not None:
        yield Columns("text", answer=column)
        return
    if {"chosen", "rejected"} <= set(names):
        known = ("prompt", "question", "query", "instruction")
        single = isinstance(example("chosen"), Mapping)  # one turn, which follows the prompt's
        prompt = first((*TURNS, *known) if single else known)
        yield Columns("preference", "", prompt, "chosen", "rejected", "", tools, system)
    if question and answer:
        plain = Columns("completion", "", question, answer, tools=tools, system=system)
        asked = Columns("instruction", "", question, answer, "", first(("input",)), tools, system)
        # These two names stand for plain texts; the others for a question that a template formats.
        is_plain = (question, answer) == ("prompt", "completion")
        yield from (plain, asked) if is_plain else (asked, plain)
    if "text" in names:
        yield Columns("text", answer="text")


def conversation(record: Record, columns: Columns) -> Conversation:
    """Converts a record to a conversation."""
    before, tools = _system(record, columns), _tools(record, columns)
    if columns.shape in ("messages", "sharegpt"):
        turns = _turns(record, columns.turns)
        return _told(turns if turns[0]["role"] == "system" else [*before, *turns], 0, tools)
    if columns.shape == "text":
        return Conversation(texts=("", _text(record, columns.answer)))
    if columns.shape == "instruction":
        asked, given = _text(record, columns.prompt), _maybe_text(record, columns.input)
        question = {"role": "user", "content": asked}
        if given:  # a template may write the two separately
            question["content"] = f"{asked}\n\n{given}"
            question |= {"instruction": asked, "input": given}
        answer = {"role": ASSISTANT, "content": _text(record, columns.answer)}
        return _told([*before, question, answer], len(before) + 1, tools)
    return _completed(record, columns.prompt, columns.answer, before, tools)


def further_keys(records: Sequence[Record], columns: Columns) -> list[str]:
    """Returns the keys of turns other than the role, the content and the weight."""
    found: dict[str, None] = {}
    for column in {columns.turns, columns.prompt, columns.answer, columns.rejected} - {""}:
        for record in records:
            for turn in _listed(record.get(column)):
                given = turn.items() if isinstance(turn, Mapping) else ()
                found |= {str(key): None for key, value in given if value not in (None, "", [])}
    return [key for key in found if key not in (*FLAGS, "role", "content", "from", "value")]


def pair(record: Record, columns: Columns) -> tuple[Conversation, Conversation]:
    """Returns the chosen and the rejected answer of a record, each as a conversation that includes
    the prompt."""
    before, tools = _system(record, columns), _tools(record, columns)
    chosen, rejected = (
        _completed(record, columns.prompt, answer, before, tools)
        for answer in (columns.answer, columns.rejected)
    )
    return chosen, rejected


def _completed(
    record: Record,
    prompt: str,
    answer: str,
    before: list[dict[str, Any]],
    tools: tuple[Any, ...] | None,
) -> Conversation:
    given, value = record.get(prompt) if prompt else None, record.get(answer)
    if isinstance(value, str) and not _is_talk(value) and isinstance(given, str | None):
        return Conversation(texts=(given or "", _text(record, answer)))
    answered = _turns(record, answer)
    if isinstance(given, str) and not _is_talk(given):
        asked = [{"role": "user", "content": given}] if given else []
    else:
        asked = _turns(record, prompt) if given else []
    if asked and answered[: len(asked)] == asked:  # the answer repeats the whole conversation
        answered = answered[len(asked) :]
    if not asked:  # all but the last turn are the prompt
        asked, answered = answered[:-1], answered[-1:]
    if not answered:
        raise ChatError(f"its column {answer} adds no turn to the prompt")
    return _told([*before, *asked, *answered], len(before) + len(asked), tools)


def _told(
    turns: Sequence[dict[str, Any]], num_given: int, tools: tuple[Any, ...] | None
) -> Conversation:
    said = tuple(_said(turn, number) for number, turn in enumerate(turns, start=1))
    bare = tuple({k: v for k, v in turn.items() if k not in FLAGS} for turn in turns)
    return Conversation(bare, said, num_given, tools)


def _said(turn: Message, number: int) -> float | None:
    """Returns the loss weight that a turn specifies, if any."""
    flags = {flag: turn[flag] for flag in FLAGS if turn.get(flag) is not None}
    if len(flags) > 1:
        raise ChatError(f"turn {number} has both weight and train: remove one of them")
    for flag, value in flags.items():
        is_number = isinstance(value, bool | int | float)
        if not is_number or not 0 <= value <= HEAVIEST:
            raise ChatError(
                f"turn {number} has {flag} {value!r:.40}; expected true, false or a number from "
                f"0 to {HEAVIEST:,}"
            )
        return float(value)
    return None


def _turns(record: Record, column: str) -> list[dict[str, Any]]:
    value = record.get(column)
    items = [value] if isinstance(value, Mapping) and value else _listed(value)
    if not items:
        raise ChatError(f"its column {column} contains no turns")
    return [_turn(item, number) for number, item in enumerate(items, start=1)]


def _turn(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ChatError(f"turn {number} is {type(item).__name__}; expected an object with a role")
    turn = {str(key): value for key, value in item.items() if value is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in turn and theirs in turn:
            turn[ours] = turn.pop(theirs)
    speaker = turn.get("role")
    if not isinstance(speaker, str) or not speaker:
        raise ChatError(f"turn {number} has no valid role; expected a string, such as 'user'")
    turn["role"] = SPEAKERS.get(speaker.lower(), speaker)
    if "content" not in turn and "tool_calls" not in turn:
        raise ChatError(f"turn {number}, by {speaker!r}, has no content")
    if "content" in turn:  # templates write nothing if it is absent
        turn["content"] = _content(turn["content"], number)
    return turn


def _content(value: Any, number: int) -> str:
    """Returns the text, which some datasets store as a list of parts."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list | tuple) else [value]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            what = part.get("type", "object") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"turn {number} has content of type {what}; expected text")
        texts.append(text)
    return "".join(texts)


def _system(record: Record, columns: Columns) -> list[dict[str, Any]]:
    text = _maybe_text(record, columns.system)
    return [{"role": "system", "content": text}] if text else []


def _tools(record: Record, columns: Columns) -> tuple[Any, ...] | None:
    value = record.get(columns.tools) if columns.tools else None
    if value in (None, [], ()) or (isinstance(value, str) and value.strip() in NO_TOOLS):
        return None
    tools = tuple(_listed(value))
    if not tools:
        raise ChatError(f"its column {columns.tools} is not a list of tools: {value!r:.40}")
    return tools


def _is_talk(text: str) -> bool:
    """Whether a text is a JSON list of turns; an answer can be some other list."""
    items = _listed(text)
    return bool(items) and all("role" in item or "from" in item for item in items)


def _listed(value: Any) -> list[Any]:
    """Returns a list as it is, parses a text that is a JSON list of objects, and returns an empty
    list for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
        if not all(isinstance(item, dict) for item in value):  # an answer can be [1, 2]
            return []
    return list(value) if isinstance(value, list | tuple) else []


def _maybe_text(record: Record, column: str) -> str:
    """Returns an optional text of a record, or an empty string."""
    value = record.get(column) if column else None
    if not isinstance(value, str | None):
        raise ChatError(f"its column {column} is {type(value).__name__}; expected text")
    return value or ""


def _text(record: Record, column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        raise ChatError(f"its column {column} is {type(value).__name__}; expected text")
    if not value.strip():
        raise ChatError(f"its column {column} is empty")
    return value
