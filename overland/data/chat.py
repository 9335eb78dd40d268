"""Renders conversations with a chat template: finds which part of the text is the assistant's, and
keeps the names of special tokens in messages from becoming those tokens.

A template is a Jinja program that comes with a tokenizer. Here it writes exactly what transformers'
`apply_chat_template` writes. Two things are exact here that usually are not:

- Only the template writes special tokens. If a message contains `<|eot_id|>`, the template sees it,
  but what it writes of it is tokenized as ordinary text, unless `in_content` allows it.
- The assistant's text is known to the character: from the template's own `{% generation %}` marks,
  or else from *prefixes*: the conversation is written up to the start of a turn and up to its end,
  and the whole text must begin with both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from overland.data.chat_renderer import BEGIN, END, Endless, Rejected, renderer
from overland.errors import DataError
from overland.words import any_of

Message: TypeAlias = Mapping[str, Any]
"""A turn: `role`, `content`, and whatever else the template uses."""
Tools: TypeAlias = Sequence[Any] | None
Piece: TypeAlias = str | int
"""Input of the tokenizer: text without special tokens, or the id of a special token."""
Cut: TypeAlias = tuple[int, bool]
"""The beginning of a conversation: its number of turns, and whether to ask for an answer."""
ASSISTANT = "assistant"

# Code points that never stand for a character: text that contains one is rejected, so that they can
# serve as markers here.
NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
QUOTED = "\ufdd0"  # precedes a character of a name that is meant as text
STAND_INS = range(0xE000, 0xF900)  # for private use
LARGEST_TEMPLATE = 1_000_000  # characters; published ones have some thousands
DEEPEST = 32  # nesting of values in a message; templates recurse for each level
# Limit on turns × answers of a conversation without marks: for each answer, all turns before it are
# written twice, at about 10 µs each, so this is about half a minute.
MOST_PREFIXES = 2_000_000
MOST_AT_ONCE = 10_000  # turns of the texts that are requested together
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "range")
"""Variables that every template gets."""
MARKED = re.compile(r"\{%[-+]?\s*generation\b")
LOOPS_OVER_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+[^\s%]*\bcontent\b")
# What precedes and what follows a name in a string that a template looks for, and does not write.
LOOKS_FOR = re.compile(
    r"(?:[=!]=|\bin|[.|]\s*(?:r?split|r?partition|replace|startswith|endswith|r?find|r?index|count"
    r"|removeprefix|removesuffix)\()\s*['\"][^'\"]*\Z"
)
NEAR = 200  # characters before and after a name
IS_LOOKED_FOR = re.compile(r"[^'\"]*['\"]\s*(?:[=!]=|(?:not\s+)?in\b)")
# Roles that may be part of a special token's name, as in `'<|' + role + '|>'`.
ROLES = frozenset((
    "system", "developer", "user", "human", "assistant", "model", "tool", "function", "observation",
    "ipython", "environment", "context",
))  # fmt: skip


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
class RenderedChat:
    """A conversation as its template wrote it."""

    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]
    """The text to learn, in characters of all pieces; a special token counts as one."""
    num_quoted: int = 0
    """How many names of special tokens in messages were written as text."""


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
    in_content: frozenset[str] = frozenset()
    """The special tokens that messages may write by their names."""

    @property
    def is_marked(self) -> bool:
        """Whether it marks the assistant's text."""
        return MARKED.search(self.source) is not None

    @property
    def asks_for_date(self) -> bool:
        return "strftime_now" in self.source

    @property
    def takes_parts(self) -> bool:
        """Whether it writes contents that are lists of parts."""
        return LOOPS_OVER_CONTENT.search(self.source) is not None

    def check(self) -> None:
        """Raises an error unless this is a valid template."""
        if len(self.source) > LARGEST_TEMPLATE:
            raise DataError(
                f"{self.whose} has {len(self.source):,} characters; expected {LARGEST_TEMPLATE:,} "
                "at most: set sft.chat_template to use another one"
            )
        self._run(self.source, ([], None), [])

    def write(
        self, turns: Sequence[Message], weights: Sequence[float] | None = None, tools: Tools = None
    ) -> RenderedChat:
        """Writes a conversation. `weights` are the loss weights of the turns, which are 0 for all
        but the assistant's; without them, every token counts."""
        self._check_tools(turns, tools)
        cuts = [(len(turns), False)]
        if weights is not None and not self.is_marked:
            cuts += _cuts(weights)
        text, *prefixes = self._render(turns, tools, cuts)
        if weights is None:
            return self._split(f"{BEGIN}{_unmarked(text)}{END}", [1.0])
        said = [w for turn, w in zip(turns, weights, strict=True) if turn["role"] == ASSISTANT]
        if not self.is_marked:
            text = self._mark(text, prefixes, weights)
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

    def write_prompt(self, turns: Sequence[Message], tools: Tools = None) -> tuple[Piece, ...]:
        """Writes a conversation up to where the assistant answers."""
        self._check_tools(turns, tools)
        (text,) = self._render(turns, tools, [(len(turns), True)])
        return self._split(_unmarked(text), []).pieces

    def _check_tools(self, turns: Sequence[Message], tools: Tools) -> None:
        """Rejects what the template would silently leave out."""
        has_calls = any(turn.get("tool_calls") for turn in turns)
        for name, is_used in (("tools", tools), ("tool_calls", has_calls)):
            if is_used and name not in self.source:
                raise Undecided(
                    f"it has {name}, but {self.whose} does not write them: use one that does "
                    "(sft.chat_template), such as that of Qwen2.5-7B-Instruct or of "
                    "Llama-3.1-8B-Instruct"
                )

    def _mark(self, text: str, prefixes: Sequence[str], weights: Sequence[float]) -> str:
        """Puts marks around the turns that count, which it finds from prefixes of the text."""
        parts, done = [], 0
        for i, (asked, answered) in zip(
            (i for i, weight in enumerate(weights) if weight),
            zip(prefixes[::2], prefixes[1::2], strict=True),
            strict=True,
        ):
            if not text.startswith(answered):  # some templates end every conversation with EOS
                answered = self._last_special.sub("", answered)
            why = ""
            ways_out = "set sft.chat_template to one with {% generation %} marks around them"
            if not answered.startswith(asked):
                why = "differently than its generation prompt begins it"
            elif not text.startswith(answered):
                why = "differently once more turns follow (many drop earlier reasoning)"
                ways_out += ', or set sft.learn = "last"'
            if why:
                raise Undecided(
                    f"the chat template writes turn {i + 1} of {len(weights)} {why}, so it is "
                    f"unclear which tokens are the assistant's: {ways_out}"
                )
            parts += [text[done : len(asked)], BEGIN, text[len(asked) : len(answered)], END]
            done = len(answered)
        return "".join([*parts, text[done:]])

    def _render(self, turns: Sequence[Message], tools: Tools, cuts: Sequence[Cut]) -> list[str]:
        """Returns what the template writes, with its marks, if any, and with quotes for the names
        of special tokens that messages and tools contain."""
        found: set[str] = set()

        def find(text: str) -> str:
            check_text(text)
            found.update(self._names_in_content.findall(text))
            if text in self._insides:
                found.add(text)
            return text

        given = _changed((turns, tools), find)
        texts = self._run(self.source, given, cuts)
        return self._told_apart(texts, found, given, cuts) if found else texts

    def _told_apart(
        self, texts: list[str], found: Collection[str], given: Any, cuts: Sequence[Cut]
    ) -> list[str]:
        """Returns the texts with quotes for the names that come from messages and tools.

        They are found by writing the conversation again with other characters in their places, in
        messages as in those of the template's strings that it looks for, perhaps to split a message
        at `</think>`. If that gives the same texts otherwise, these show where the names are."""
        stand_ins = self._stand_ins(texts)
        originals = {one: own for own, one in stand_ins.items()}
        table = str.maketrans(stand_ins)
        stand_in = re.compile(
            rf"(?P<escape>\\u(?P<code>e\w{{3}}|f[0-8]\w\w))|[{''.join(originals)}]"
        )

        def restored(text: str, quote: str = "") -> str:
            def own(match: re.Match[str]) -> str:
                one = chr(int(match["code"], 16)) if match["escape"] else match[0]
                if one not in originals:
                    return match[0]
                escaped = json.dumps(originals[one])[1:-1] if match["escape"] else originals[one]
                return escaped if len(escaped) > 1 else quote + escaped

            return stand_in.sub(own, text)

        def replaced(text: str) -> str:
            if text in self._insides:
                return text.translate(table)
            return self._names_in_content.sub(lambda match: match[0].translate(table), text)

        def replaced_if_looked_for(match: re.Match[str]) -> str:
            start, stop = match.span()
            before, after = (
                self.source[max(0, start - NEAR) : start],
                self.source[stop : stop + NEAR],
            )
            is_looked_for = LOOKS_FOR.search(before) or IS_LOOKED_FOR.match(after)
            return match[0].translate(table) if is_looked_for else match[0]

        names = sorted(self.specials.keys() & found)
        source = any_name_of(names).sub(replaced_if_looked_for, self.source)
        try:
            written = self._run(source, _changed(given, replaced), cuts)
        except ChatError:
            written = []
        if [restored(text) for text in written] != texts:
            listed = ", ".join(map(json.dumps, names))
            raise Undecided(
                f"messages contain {any_of(sorted(found), 'and')}, and {self.whose} acts on names "
                "of special tokens, so it is unclear which of those that it writes are tokens: set "
                f"sft.special_tokens_in_content = [{listed}], or true, to make tokens of all"
            )
        return [restored(text, QUOTED) for text in written]

    def _stand_ins(self, texts: Sequence[str]) -> dict[str, str]:
        """Returns a character in place of each letter of the names, which does not occur in the
        texts. They are the same for most texts, so that changed templates need not be compiled
        again."""
        taken, letters = set(self.source).union(*texts), sorted(set("".join(self.specials)))
        free = (chr(code) for code in STAND_INS if chr(code) not in taken)
        found = dict(zip(letters, free, strict=False))
        if len(found) < len(letters):
            raise ChatError("it contains too many characters for private use")
        return found

    def _run(self, source: str, given: Sequence[Any], cuts: Sequence[Cut]) -> list[str]:
        """Returns what a template writes of turns and tools, for each of the cuts."""
        turns, tools = given
        values = {**self.named, **self.options, "tools": tools, "documents": None}
        groups: list[list[Cut]] = [[]]
        for cut in cuts:
            if sum(size for size, _ in groups[-1]) > MOST_AT_ONCE:
                groups.append([])
            groups[-1].append(cut)
        try:
            return [
                text
                for group in groups
                for text in renderer.render(source, values, self.date, turns, group)
            ]
        except Endless as error:
            raise Undecided(
                f"{self.whose} does not finish: {error}; set sft.chat_template to use another one"
            ) from None
        except Rejected as error:
            hint = ""
            if self.date is None and "strftime_now" in str(error):
                hint = "; it asks for today's date: set sft.date"
            raise ChatError(f"the chat template rejects the conversation: {error}{hint}") from None

    def _split(self, text: str, weights: Sequence[float]) -> RenderedChat:
        """Splits a text at its marks and special tokens, and removes quotes."""
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
                plain.append(part[1])
                place += 1
            elif part in self.specials:
                end_text()
                pieces.append(self.specials[part])
                place += 1
            elif part:
                plain.append(part)
                place += len(part)
        end_text()
        num_quoted = 0
        if QUOTED in text:
            num_named = len(self._names.findall(text.replace(QUOTED, "")))
            num_quoted = num_named - sum(isinstance(piece, int) for piece in pieces)
        return RenderedChat(tuple(pieces), tuple(span for span in spans if span.weight), num_quoted)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        return any_name_of(self.specials)

    @cached_property
    def _names_in_content(self) -> re.Pattern[str]:
        return any_name_of(self.specials.keys() - self.in_content)

    @cached_property
    def _insides(self) -> set[str]:
        """What special tokens have between their brackets, such as `im_end`: a template can make a
        name of it, unless it is a usual role, or one that the template knows."""
        names = self.specials.keys() - self.in_content
        found = {name.strip("<|>[]/") for name in names} - names - ROLES - {""}
        return {one for one in found if not re.search(rf"['\"]{re.escape(one)}['\"]", self.source)}

    @cached_property
    def _last_special(self) -> re.Pattern[str]:
        return re.compile(rf"(?:{self._names.pattern})\s*\Z")

    @cached_property
    def _parts(self) -> re.Pattern[str]:
        return re.compile(f"({BEGIN}|{END}|{QUOTED}.|{self._names.pattern})", re.DOTALL)


def any_name_of(specials: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the names, the longest of those that begin alike."""
    return re.compile("|".join(sorted(map(re.escape, specials), key=len, reverse=True)) or "(?!)")


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


def _cuts(weights: Sequence[float]) -> list[Cut]:
    """Returns the prefixes that show where the turns that count begin and end."""
    if len(weights) * sum(map(bool, weights)) > MOST_PREFIXES:
        raise Undecided(
            f"it has {len(weights):,} turns, and to find the assistant's tokens from prefixes, "
            "they would have to be written again for each answer: set sft.chat_template to one "
            "with {% generation %} marks around the assistant's turns"
        )
    counted = [i for i, weight in enumerate(weights) if weight]
    return [cut for i in counted for cut in ((i, True), (i + 1, False))]


def _changed(value: Any, change: Callable[[str], str], depth: int = -1) -> Any:
    """Returns the value with all of its texts changed, at any depth."""
    if depth > DEEPEST:
        raise ChatError(f"its values are nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _changed(item, change, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change, depth + 1) for item in value]
    return value


def _unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")
