"""Conversations as tokens: a chat template writes the turns, and we keep track of which part of the
text is the assistant's.

A template is a Jinja program that comes with a tokenizer. Here it writes exactly what transformers'
`apply_chat_template` writes. Two things are exact here that usually are not:

- Only the template writes special tokens. If a message contains `<|eot_id|>`, that is text, and it
  is tokenized as ordinary text.
- The assistant's text is known to the character: from the template's own `{% generation %}` marks,
  or else from *prefixes*: the conversation is written up to the start of a turn and up to its end,
  and the whole text must begin with both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from overland.data.chat_sandbox import BEGIN, END, LARGEST, Budget, TooMuch, compile_template
from overland.errors import DataError

if TYPE_CHECKING:
    from overland.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""A turn: `role`, `content`, and whatever else the template uses."""
Piece: TypeAlias = str | int
"""Input of the tokenizer: text without special tokens, or the id of a special token."""
ASSISTANT = "assistant"

# Code points that never stand for a character: text that contains one is rejected, so that they can
# serve as markers here.
NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
QUOTED = "\ufdd0"  # precedes the number of a special token whose name is meant as text
FIRST_NUMBER = 0xE000
DEEPEST = 32  # nesting of values in a message; templates recurse for each level
# Limit on turns × answers of a conversation without marks: for each answer, all turns before it are
# written twice, at about 10 µs each, so this is about half a minute.
MOST_PREFIXES = 2_000_000
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "range")
"""Variables that every template gets."""
MARKED = re.compile(r"\{%[-+]?\s*generation\b")

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- message['content'] + '<|im_end|>\\n' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# The prompt of Stanford's Alpaca. The tokenizer decides whether BOS precedes it.
ALPACA = """\
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- message['content'] -}}{{- eos_token -}}
        {%- endgeneration -%}
    {%- elif message['role'] == 'system' -%}
        {{- message['content'] + '\\n\\n' -}}
    {%- else -%}
        {%- if loop.first -%}
            {{- 'Below is an instruction that describes a task' -}}
            {%- if message['input'] -%}
                {{- ', paired with an input that provides further context' -}}
            {%- endif -%}
            {{- '. Write a response that appropriately completes the request.\\n\\n' -}}
        {%- endif -%}
        {{- '### Instruction:\\n' + (message['instruction'] or message['content']) -}}
        {%- if message['input'] -%}
            {{- '\\n\\n### Input:\\n' + message['input'] -}}
        {%- endif -%}
        {{- '\\n\\n### Response:\\n' -}}
    {%- endif -%}
{%- endfor -%}
"""
BUILT_IN = {"chatml": CHATML, "alpaca": ALPACA}


class ChatError(DataError):
    """Raised for a conversation that cannot be used."""


class Undecided(ChatError):
    """Raised for a conversation that needs a key of `[sft]` to be set; it is not a bad document."""


class Span(NamedTuple):
    """A range of characters in a written conversation, and its loss weight."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True)
class Written:
    """A conversation as its template wrote it."""

    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]
    """The text to learn, in characters of all pieces; a special token counts as one."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens of the tokenizer that it is used with."""

    source: str
    specials: Mapping[str, int]
    """Ids of special tokens by name."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by their role: `bos_token`, `eos_token`, …"""
    date: date | None = None
    """The date for templates that ask for today's date; None: they cannot ask for it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables, such as `enable_thinking`."""
    whose: str = "the tokenizer's chat template"
    """Its name in messages."""

    @property
    def is_marked(self) -> bool:
        """Whether it marks the assistant's text."""
        return MARKED.search(self.source) is not None

    @property
    def asks_for_date(self) -> bool:
        return "strftime_now" in self.source

    def check(self) -> None:
        """Raises an error unless this is a valid template."""
        self._compiled  # noqa: B018

    def write(
        self,
        turns: Sequence[Message],
        weights: Sequence[float] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Written:
        """Writes a conversation. `weights` are the loss weights of the turns, which are 0 for all
        but the assistant's; without them, every token counts."""
        self._check_tools(turns, tools)
        quoted, tools = self._quoted(turns), self._quoted(tools)
        text = self._render(quoted, tools)
        if weights is None:
            return self._split(f"{BEGIN}{_unmarked(text)}{END}", [1.0])
        said = [w for turn, w in zip(turns, weights, strict=True) if turn["role"] == ASSISTANT]
        if not self.is_marked:
            text = self._mark(text, quoted, tools, weights)
            return self._split(text, [weight for weight in said if weight])
        num_marks = text.count(BEGIN)
        if num_marks != len(said) and len(set(said)) == 1:  # whichever turn a mark belongs to
            said = said[:1] * num_marks
        if num_marks != len(said):
            raise ChatError(
                f"the chat template marks {num_marks} parts as the assistant's, but there are "
                f"{len(said)} assistant turns, so it is unclear which of them count: put one "
                "{% generation %} mark around each turn"
            )
        return self._split(text, said)

    def write_prompt(
        self, turns: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Piece, ...]:
        """Writes a conversation up to where the assistant answers."""
        text = self._render(self._quoted(turns), self._quoted(tools), asks=True)
        return self._split(_unmarked(text), []).pieces

    def _check_tools(self, turns: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Rejects what the template would silently leave out."""
        if tools and "tools" not in self.source:
            raise ChatError("it has tools, but the chat template does not write them")
        if "tool_calls" not in self.source and any(turn.get("tool_calls") for turn in turns):
            raise ChatError("it has tool calls, but the chat template does not write tool_calls")

    def _mark(
        self, text: str, turns: Sequence[Any], tools: Sequence[Any] | None, weights: Sequence[float]
    ) -> str:
        """Puts marks around the turns that count, which it finds from prefixes of the text."""
        if len(turns) * sum(map(bool, weights)) > MOST_PREFIXES:
            raise Undecided(
                f"it has {len(turns):,} turns, and to find the assistant's tokens from prefixes, "
                "they would have to be written again for each answer: set sft.chat_template to one "
                "with {% generation %} marks around the assistant's turns"
            )
        parts, done = [], 0
        for i, weight in enumerate(weights):
            if not weight:
                continue
            asked = self._render(turns[:i], tools, asks=True)
            answered = text if i + 1 == len(turns) else self._render(turns[: i + 1], tools)
            if not text.startswith(answered):  # some templates end every conversation with EOS
                answered = self._last_special.sub("", answered)
            why, ways_out = (
                "",
                "set sft.chat_template to one with {% generation %} marks around them",
            )
            if not answered.startswith(asked):
                why = "differently than its generation prompt begins it"
            elif not text.startswith(answered):
                why = "differently once more turns follow (many drop earlier reasoning)"
                ways_out += ', or set sft.learn = "last"'
            if why:
                raise Undecided(
                    f"the chat template writes turn {i + 1} of {len(turns)} {why}, so it is "
                    f"unclear which tokens are the assistant's: {ways_out}"
                )
            parts += [text[done : len(asked)], BEGIN, text[len(asked) : len(answered)], END]
            done = len(answered)
        return "".join([*parts, text[done:]])

    def _render(self, turns: Sequence[Any], tools: Sequence[Any] | None, asks: bool = False) -> str:
        """Returns what the template writes, with its marks, if any."""
        given = (turns, tools, None, asks, Budget().range)
        values = {**self.named, **self.options, **dict(zip(GIVEN, given, strict=True))}
        if self.date is not None:
            values["strftime_now"] = self.date.strftime
        parts, size = [], 0
        try:
            for part in self._compiled.generate(values):
                parts.append(part)
                size += len(part)
                if size > LARGEST:
                    raise TooMuch(f"it writes more than {LARGEST:,} characters")
        except RecursionError:
            raise ChatError("the chat template recurses without end") from None
        except TooMuch as error:
            raise ChatError(f"the chat template does not finish: {error}") from None
        except Exception as error:  # the template is an arbitrary program
            hint = ""
            if self.date is None and "strftime_now" in str(error):
                hint = "; it asks for today's date: set sft.date"
            why = str(error) or type(error).__name__
            raise ChatError(f"the chat template rejects the conversation: {why}{hint}") from None
        return "".join(parts)

    def _quoted(self, value: Any, depth: int = 0) -> Any:
        """Returns the value with all names of special tokens quoted, at any depth."""
        if depth > DEEPEST:
            raise ChatError(f"its values are nested more than {DEEPEST} levels deep")
        if isinstance(value, str):
            check_text(value)
            return self._names.sub(lambda match: QUOTED + self._numbers[match[0]], value)
        if isinstance(value, Mapping):
            return {
                self._quoted(str(key)): self._quoted(item, depth + 1) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._quoted(item, depth + 1) for item in value]
        return value

    def _split(self, text: str, weights: Sequence[float]) -> Written:
        """Splits a text at its marks and special tokens, and unquotes quoted names."""
        pieces: list[Piece] = []
        plain: list[str] = []
        spans: list[Span] = []
        place = start = 0

        def end_text() -> None:
            if plain:
                pieces.append("".join(plain))
                plain.clear()

        for part in self._parts.split(text):
            if part == BEGIN:
                start = place
            elif part == END:
                spans.append(Span(start, place, weights[len(spans)]))
            elif part.startswith(QUOTED):
                plain.append(self._quotes[part[1:]])
                place += len(plain[-1])
            elif part in self.specials:
                end_text()
                pieces.append(self.specials[part])
                place += 1
            elif part:
                plain.append(part)
                place += len(part)
        end_text()
        return Written(tuple(pieces), tuple(span for span in spans if span.weight))

    @cached_property
    def _compiled(self) -> Any:
        return compile_template(self.source)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        return any_name_of(self.specials)

    @cached_property
    def _last_special(self) -> re.Pattern[str]:
        return re.compile(rf"(?:{self._names.pattern})\s*\Z")

    @cached_property
    def _parts(self) -> re.Pattern[str]:
        return re.compile(f"({BEGIN}|{END}|{QUOTED}.|{self._names.pattern})", re.DOTALL)

    @cached_property
    def _numbers(self) -> dict[str, str]:
        return {name: chr(FIRST_NUMBER + i) for i, name in enumerate(self.specials)}

    @cached_property
    def _quotes(self) -> dict[str, str]:
        return {number: name for name, number in self._numbers.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the compiled template; another process compiles it again."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def encode(tokenizer: Tokenizer, written: Written) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the token ids of a written conversation, and the loss weight of each."""
    ids, starts, stops = tokenizer.encode_pieces(written.pieces)
    weights = np.zeros(len(ids), np.float32)
    for span in written.spans:
        inside = np.flatnonzero((starts < span.stop) & (stops > span.start))
        if len(inside):  # tokens in between may have no characters of their own
            weights[inside[0] : inside[-1] + 1] = span.weight
    return ids, weights


def split_specials(text: str, specials: Mapping[str, int]) -> tuple[Piece, ...]:
    """Splits a text in which the names of these special tokens stand for the tokens."""
    parts = re.split(f"({any_name_of(specials).pattern})", text)
    return tuple(specials.get(part, part) for part in parts if part)


def any_name_of(specials: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the names, the longest of those that begin alike."""
    return re.compile("|".join(sorted(map(re.escape, specials), key=len, reverse=True)) or "(?!)")


def length_of(pieces: Iterable[Piece]) -> int:
    """Returns the length in characters; a special token counts as one."""
    return sum(len(piece) if isinstance(piece, str) else 1 for piece in pieces)


def check_text(text: str) -> None:
    """Rejects strings that JSON allows but that are not valid text."""
    if text.isascii():
        return
    if found := NONCHARACTERS.search(text):
        raise ChatError(f"it contains U+{ord(found[0]):04X}, which is not a character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatError("it has half of a surrogate pair, so it is not UTF-8 text") from None


def _unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")
