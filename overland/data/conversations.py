"""Converts records of fine-tuning datasets to conversations: detects their shape (`sft.shape`) from
the columns, and reads roles, turns, `tools`, pairs of answers (what both begin with is their
prompt), and weights of single turns.

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
from overland.data.sources.columns import ANSWERS, QUESTIONS, TURNS
from overland.errors import DataError
from overland.words import any_of

Record: TypeAlias = Mapping[str, Any]
Turn: TypeAlias = dict[str, Any]
Tools: TypeAlias = tuple[Any, ...] | None
Shape = Literal["messages", "sharegpt", "completion", "instruction", "text", "preference"]
WORDS: dict[Shape, str] = {
    "messages": "conversations",
    "sharegpt": "conversations in ShareGPT format",
    "completion": "prompts and completions",
    "instruction": "questions and answers",
    "text": "texts",
    "preference": "pairs of a chosen and a rejected answer",
}

BRACKETS = set("<|>[]")
NO_TOOLS = ("", "[]", "null")  # as JSON text
HEAVIEST = 1_000_000  # largest weight; sums stay exact in the type that stores them
FLAGS = ("weight", "train")  # of a turn: its loss weight, or whether to train on it
# The names that datasets in ShareGPT format use for roles.
NAMES_OF_ROLES = {
    "user": ("human", "user", "prompter"),
    "assistant": (
        "gpt", "assistant", "model", "bot", "chatgpt", "bing", "bard", "function_call",
    ),
    "system": ("system",),
    "developer": ("developer",),
    "tool": ("tool", "function", "observation", "function_response"),
}  # fmt: skip
SPEAKERS = {name: role for role, names in NAMES_OF_ROLES.items() for name in names}


@dataclass(frozen=True)
class Conversation:
    """Turns for a chat template, or two texts that need no template."""

    turns: tuple[Message, ...] = ()
    said: tuple[float | None, ...] = ()
    """The loss weight of each turn, if the turn specifies one."""
    num_given: int = 0
    """The number of turns at the beginning that form the prompt, which is not learned."""
    tools: Tools = None
    texts: tuple[str, str] | None = None
    """A prompt and what completes it."""


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
        asked = (self.system, self.prompt, self.input)
        names = [*filter(None, (*asked, self.turns, self.answer, self.rejected, self.tools))]
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
    question, answer, more = first(QUESTIONS), first(ANSWERS), first(("input",))
    for turns in [column] if column is not None else [name for name in TURNS if name in names]:
        items = listed(example(turns))
        if column is None or items:
            has_from = bool(items) and isinstance(items[0], Mapping) and "from" in items[0]
            shapes: list[Shape] = ["sharegpt", "messages"]
            for shape in shapes if has_from else reversed(shapes):  # the second one on request
                yield Columns(shape, turns, tools=tools, system=system)
    if column is not None:
        yield Columns("text", answer=column)
        return
    if {"chosen", "rejected"} <= set(names):
        known = ("prompt", "question", "query", "instruction")
        single = isinstance(example("chosen"), Mapping)  # one turn, which follows the prompt's
        prompt = first((*TURNS, *known) if single else known)
        given = more if prompt == "instruction" else ""
        yield Columns("preference", "", prompt, "chosen", "rejected", given, tools, system)
    if question and answer:
        given = more if question == "instruction" else ""
        plain = Columns("completion", "", question, answer, "", given, tools, system)
        asked = Columns("instruction", "", question, answer, "", more, tools, system)
        # These two names stand for plain texts; the others for a question that a template formats.
        is_plain = (question, answer) == ("prompt", "completion")
        yield from (plain, asked) if is_plain else (asked, plain)
    if "text" in names:
        yield Columns("text", answer="text")


def conversation(record: Record, columns: Columns) -> Conversation:
    """Converts a record to a conversation."""
    before, tools = _system(record, columns), _tools(record, columns)
    if columns.shape in ("messages", "sharegpt"):
        turns = turns_in(record, columns.turns, columns.shape == "sharegpt")
        return _told(turns if turns[0]["role"] == "system" else [*before, *turns], 0, tools)
    if columns.shape == "text":
        return Conversation(texts=("", _text(record, columns.answer)))
    if columns.shape == "instruction":
        asked, given = _text(record, columns.prompt), _text(record, columns.input, optional=True)
        question = {"role": "user", "content": asked}
        if given:  # a template may write the two separately
            question["content"] = f"{asked}\n\n{given}"
            question |= {"instruction": asked, "input": given}
        answer = {"role": ASSISTANT, "content": _text(record, columns.answer)}
        return _told([*before, question, answer], len(before) + 1, tools)
    return _completed(record, columns, before, tools)


def pair(record: Record, columns: Columns) -> tuple[Conversation, Conversation]:
    """Returns the chosen and the rejected answer of a record, each as a conversation that includes
    the prompt: that of its own column, or else what the two have in common at their beginning."""
    names, given = (columns.answer, columns.rejected), _value(record, columns.prompt)
    if isinstance(given, str | None) and all(_is_text(record.get(name)) for name in names):
        texts = [_text(record, name) for name in names]
        _check_texts(record, columns)
        if given and given.strip() and all(text.startswith(given) for text in texts):
            raise ChatError(
                f"its columns {names[0]} and {names[1]} both begin with the text of its column "
                f"{columns.prompt}, which would be written twice: remove that column"
            )
        size = _shared_text(*texts) if given is None else 0
        if given is None and not size:
            raise _no_prompt(columns, "text")
        prompt = texts[0][:size] if given is None else given
        one, other = (Conversation(texts=(prompt, text[size:])) for text in texts)
        return one, other
    before, tools = _system(record, columns), _tools(record, columns)
    asked, answers = _asked(record, columns.prompt), [turns_in(record, name) for name in names]
    pairs = list(zip(*answers, strict=False))
    size = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
    end = _end_of(asked, answers[0][:size])
    if not asked or (end and isinstance(given, str)):  # as in TRL
        end = min(size, len(pairs) - 1)
    if not asked and not end:
        raise _no_prompt(columns, "turns")
    if not end and isinstance(given, str) and answers[0][0]["role"] != ASSISTANT:
        raise ChatError(
            f"its columns {names[0]} and {names[1]} hold whole conversations, but none of the "
            f"turns that they begin with is the text of its column {columns.prompt}: remove that "
            "column, or the turns before the answers"
        )
    asked = answers[0][:end] if end else asked
    one, other = (_continued(before, asked, turns[end:], tools) for turns in answers)
    return one, other


def _shared_text(one: str, other: str) -> int:
    """Returns the length of the prompt that two texts begin with: all that they have in common, as
    in TRL, except for a space at its end. At least one character of each is the answer."""
    most = min(len(one), len(other)) - 1
    size = next((i for i in range(most) if one[i] != other[i]), most)
    return size - (one[size - 1 : size] == " ")


def _no_prompt(columns: Columns, what: str) -> ChatError:
    return ChatError(
        f"its columns {columns.answer} and {columns.rejected} begin with different {what}, so "
        "there is no prompt: add a column prompt"
    )


def _check_texts(record: Record, columns: Columns) -> None:
    """Rejects texts with more than a prompt and an answer, since no template writes the rest."""
    rest = (columns.system, columns.input, columns.tools if _tools(record, columns) else "")
    if found := [name for name in rest if _value(record, name)]:
        way_out = "turn the texts into lists of turns"
        if columns.shape == "completion":
            way_out = 'set sft.shape = "instruction" to use the template'
        raise Undecided(
            f"it has a column {found[0]}, but its texts are used as they are, without a chat "
            f"template that would write it: {way_out}, or remove that column"
        )


def _completed(record: Record, columns: Columns, before: list[Turn], tools: Tools) -> Conversation:
    prompt, answer = columns.prompt, columns.answer
    given = _value(record, prompt)
    if isinstance(given, str | None) and _is_text(record.get(answer)):
        _check_texts(record, columns)
        return Conversation(texts=(given or "", _text(record, answer)))
    asked, answered = _asked(record, prompt), turns_in(record, answer)
    end = _end_of(asked, answered) if asked else len(answered) - 1
    asked = answered[:end] if end else asked
    if end == len(answered):
        raise ChatError(f"its column {answer} adds no turn to the prompt")
    return _continued(before, asked, answered[end:], tools)


def _asked(record: Record, prompt: str) -> list[Turn]:
    """Returns the turns of a prompt; a text is what the user says."""
    given = _value(record, prompt)
    if isinstance(given, str) and not _is_talk(given):
        return [{"role": "user", "content": given}] if given else []
    return turns_in(record, prompt) if given else []


def _end_of(asked: Sequence[Message], turns: Sequence[Message]) -> int:
    """Returns where the prompt ends in turns that repeat it, perhaps after a system turn; 0 if they
    do not."""

    def stripped(turn: Message) -> Message:
        content = turn.get("content")
        return {**turn, "content": content.strip()} if isinstance(content, str) else turn

    size, asked, turns = len(asked), [*map(stripped, asked)], [*map(stripped, turns)]
    ends = range(size, len(turns) + 1) if size else ()
    return next((end for end in ends if turns[end - size : end] == asked), 0)


def _continued(
    before: list[Turn], asked: list[Turn], answered: list[Turn], tools: Tools
) -> Conversation:
    if asked and asked[0]["role"] == "system":
        before = []
    return _told([*before, *asked, *answered], len(before) + len(asked), tools)


def _told(turns: Sequence[Turn], num_given: int, tools: Tools) -> Conversation:
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


def turns_in(record: Record, column: str, renames: bool = False) -> list[Turn]:
    value = record.get(column)
    items = [value] if isinstance(value, Mapping) and value else listed(value)
    if not items:
        raise ChatError(f"its column {column} contains no turns")
    return [_turn(item, number, renames) for number, item in enumerate(items, start=1)]


def _turn(item: Any, number: int, renames: bool) -> Turn:
    """Returns a turn as it is, for a template to interpret. Only the keys `from` and `value` get
    their usual names, and roles with `from`."""
    if not isinstance(item, Mapping):
        raise ChatError(f"turn {number} is {type(item).__name__}; expected an object with a role")
    turn = {str(key): value for key, value in item.items()}
    renames = renames or turn.get("role") is None
    for ours, theirs in (("role", "from"), ("content", "value")):
        if turn.get(ours) is None and turn.get(theirs) is not None:
            turn[ours] = turn.pop(theirs)
    speaker = turn.get("role")
    # A template may put brackets around a role, which makes a special token of it.
    if not isinstance(speaker, str) or not speaker or set(speaker) & BRACKETS:
        raise ChatError(f"turn {number} has no valid role; expected a word, such as 'user'")
    turn["role"] = SPEAKERS.get(speaker.lower(), speaker) if renames else speaker
    if turn.get("content") is None:
        if turn.get("tool_calls") is None:
            raise ChatError(f"turn {number}, by {speaker!r}, has no content")
    elif not isinstance(turn["content"], str):
        _check_parts(turn["content"], number)
    return turn


def _check_parts(value: Any, number: int) -> None:
    """Rejects content other than texts."""
    for part in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(part.get("text") if isinstance(part, Mapping) else part, str):
            what = part.get("type", "object") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"turn {number} has content of type {what}; expected text")


def _system(record: Record, columns: Columns) -> list[Turn]:
    text = _text(record, columns.system, optional=True)
    return [{"role": "system", "content": text}] if text else []


def _tools(record: Record, columns: Columns) -> Tools:
    value = _value(record, columns.tools)
    if value in (None, [], ()) or (isinstance(value, str) and value.strip() in NO_TOOLS):
        return None
    tools = tuple(listed(value))
    if not tools:
        raise ChatError(f"its column {columns.tools} is not a list of tools: {value!r:.40}")
    return tools


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not _is_talk(value)


def _is_talk(text: str) -> bool:
    """Whether a text is a JSON list of turns; an answer can be some other list."""
    items = listed(text)
    return bool(items) and all("role" in item or "from" in item for item in items)


def listed(value: Any) -> list[Any]:
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


def _value(record: Record, column: str) -> Any:
    """Returns what a record has in a column, of which there may be none. A CSV file may have a
    column without a name, too."""
    return record.get(column) if column else None


def _text(record: Record, column: str, optional: bool = False) -> str:
    """Returns a text of a record; an optional one may be empty or absent."""
    value = _value(record, column)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"its column {column} is {type(value).__name__}; expected text")
    if not (optional or value.strip()):
        raise ChatError(f"its column {column} is empty")
    return value
