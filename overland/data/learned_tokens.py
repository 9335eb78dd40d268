"""Converts a conversation to token ids and the loss weight of each: decides which turns are learned
(`sft.learn`), what happens if it is too long, and how pairs of answers share a row.

A pair of answers is one sample, too: the chosen and the rejected one, each with the prompt before
it, one after the other. It has a row to itself. The channel `answers` says which of the two a token
belongs to; the second one begins a new document, so that neither attends to the other. Weights
distinguish the answer from the prompt, as for conversations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from overland.config.schema import Preference, Sft
from overland.data.chat import (
    ASSISTANT,
    ChatError,
    ChatTemplate,
    Message,
    Piece,
    RenderedChat,
    Span,
    Undecided,
    any_name_of,
    check_text,
)
from overland.data.conversations import SPEAKERS, Columns, Conversation, Record, conversation, pair
from overland.data.shard import ANSWERS, CHOSEN, REJECTED, TOKENS, WEIGHTS
from overland.data.sources.file_marks import digest_of
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.words import any_of

Array: TypeAlias = npt.NDArray[Any]
Changes: TypeAlias = dict[str, tuple[Any, Any]]
RULES = 2  # part of every fingerprint; increased when the same conversations give other tokens
SHOWN = 80  # tokens of a sample, in a message
OTHER_ROLES = (
    "without a turn by assistant, so without anything to learn (to rename roles such as gpt, set "
    'sft.shape = "sharegpt")'
)
QUOTED = "with names of special tokens encoded as text (sft.special_tokens_in_content)"


class Encoded(NamedTuple):
    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    what: tuple[str, ...] = ()
    """What was done to it, to be counted."""


Sample: TypeAlias = tuple[Mapping[str, Array], tuple[str, ...]]
"""The arrays of a sample, and what was done to it, to be counted."""


class Skipped(Exception):
    """Raised for a conversation that a key of the config leaves out; the message is the reason."""


class NoTemplate(DataError):
    """Raised when there are turns to write but no chat template."""

    def __init__(self) -> None:
        super().__init__(
            "the tokenizer has no chat template for conversations: set sft.chat_template to a "
            "file, or to chatml or alpaca, which are built in"
        )


@dataclass(frozen=True)
class Writer:
    """Converts conversations to samples, with one tokenizer and its chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None: only plain texts can be written."""
    tool_template: ChatTemplate | None
    """The template for conversations with tools, if the tokenizer has a separate one."""
    sft: Sft
    seq_len: int
    add_bos: bool
    add_eos: bool
    """Whether plain texts begin with BOS and end with EOS; a template writes its own."""
    length_key: str
    """The config key of the sequence length."""

    @property
    def channels(self) -> dict[str, str]:
        """The types of the channels of its samples."""
        return {WEIGHTS: "float32"}

    def sample(self, record: Record, columns: Columns) -> Sample:
        """Converts a record to a sample."""
        told = conversation(record, columns)
        ids, weights, quoted = self.encoded(told)
        what, longest = "", self.seq_len + 1
        if len(ids) > longest:
            what = self.about_length(len(ids))
        if what == "truncated":
            ids, weights = ids[:longest], weights[:longest]
        if not weights[1:].any():  # nothing predicts the first token
            why = "no assistant turn counts"
            roles = list(dict.fromkeys(turn["role"] for turn in told.turns))
            if self.sft.skip_unlearned:
                others = [role for role in roles if SPEAKERS.get(role.lower()) == ASSISTANT]
                is_renamed = bool(others) and ASSISTANT not in others
                raise Skipped(OTHER_ROLES if is_renamed else "without anything to learn")
            if roles and ASSISTANT not in roles:
                why = (
                    f"no turn's role is {ASSISTANT!r}, they are {any_of(roles, 'and')} (to rename "
                    'those of ShareGPT, such as human and gpt, set sft.shape = "sharegpt")'
                )
            if what == "truncated":
                why = f"the part that counts was cut off ({self.length_key} = {self.seq_len})"
            raise Undecided(
                f"there is nothing to learn in it: {why} (to skip such samples, set "
                f"sft.skip_unlearned = true): {self.shown(ids)}"
            )
        return {TOKENS: ids, WEIGHTS: weights}, (*quoted, what) if what else quoted

    def encoded(self, told: Conversation) -> Encoded:
        """Returns the ids and weights of a conversation of any length."""
        written = self._plain(*told.texts) if told.texts is not None else self._chat(told)
        return Encoded(*encode(self.tokenizer, written), (QUOTED,) if written.num_quoted else ())

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the tokens of a conversation except the tokenizer itself, by
        the keys of the config."""
        templates = [self.template, self.tool_template]
        about = [[one.source, dict(one.named)] for one in templates if one is not None]
        return {
            "rules": RULES,
            "sft.chat_template": digest_of(about)[:16] if about else None,
            "sft.template_options": dict(self.template.options) if self.template else {},
            "sft.date": str(self.template.date) if self.template and self.template.date else None,
            "sft.learn": self.sft.learn,
            "sft.too_long": self.sft.too_long,
            "sft.parse_specials": self.sft.parse_specials,
            "sft.special_tokens_in_content": sorted(self.template.in_content)
            if self.template
            else [],
            "sft.skip_unlearned": self.sft.skip_unlearned,
            "training.seq_len": self.seq_len,
            "data.add_bos": self.add_bos,
            "data.add_eos": self.add_eos,
        }

    def _chat(self, told: Conversation) -> RenderedChat:
        template = self.tool_template if told.tools and self.tool_template else self.template
        if template is None:
            raise NoTemplate
        turns = told.turns if template.takes_parts else joined(told.turns)
        return template.write(turns, weights_of(told, self.sft.learn), told.tools)

    def _plain(self, prompt: str, completion: str) -> RenderedChat:
        """Writes a prompt and its completion, with BOS before and EOS after them, unless the text
        already has them."""
        tokenizer = self.tokenizer
        before, after = self._pieces(prompt), self._pieces(completion)
        if self.add_bos and tokenizer.bos_id is not None:
            first = (*before, *after)[:1]
            before = before if first == (tokenizer.bos_id,) else (tokenizer.bos_id, *before)
        if self.add_eos and tokenizer.eos_id is not None and after[-1:] != (tokenizer.eos_id,):
            after = (*after, tokenizer.eos_id)
        start = 0 if self.sft.learn == "all" else length_of(before)
        span = Span(start, length_of(before) + length_of(after), 1.0)
        return RenderedChat((*before, *after), (span,))

    def _pieces(self, text: str) -> tuple[Piece, ...]:
        check_text(text)
        specials: Mapping[str, int] = self.tokenizer.specials
        if self.sft.parse_specials is None and (found := any_name_of(specials).search(text)):
            raise Undecided(
                f"its text contains {found[0]}, the name of a special token: set "
                "sft.parse_specials to true if it stands for the token, or to false if it is text"
            )
        return split_specials(text, specials if self.sft.parse_specials else {})

    def about_length(self, length: int) -> str:
        """Returns what to do with a sample that is too long."""
        if self.sft.too_long == "error":
            raise Undecided(
                f"it has {length:,} tokens, but {self.length_key} = {self.seq_len} has room for "
                f"{self.seq_len + 1:,}: raise it, or set sft.too_long to truncate, drop or "
                "split"
            )
        if self.sft.too_long == "drop":
            raise Skipped("too long")
        return "truncated" if self.sft.too_long == "truncate" else "split"

    def shown(self, ids: Array) -> str:
        """Returns the beginning of a sample, for messages."""
        more = " …" if len(ids) > SHOWN else ""
        return repr("".join(self.tokenizer.pieces(ids[:SHOWN].tolist()))) + more


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Returns the earlier and the later value of each key that differs between two identities."""
    values = {key: (before.get(key), after.get(key)) for key in dict.fromkeys((*before, *after))}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def in_words(changes: Changes) -> list[str]:
    """Returns a sentence for each key that has changed."""
    words = []
    for key, (old, new) in changes.items():
        if key == "sft.chat_template":
            words.append("conversations use another chat template (sft.chat_template)")
        elif key == "rules":
            words.append(
                "this version of Overland reads its records differently: finish the run with the "
                "version that began it"
            )
        elif "." in key or key == "the column":
            words.append(f"{key} is {new!r} and was {old!r}")
        else:
            words.append(f"records are read differently ({key})")
    return words


@dataclass(frozen=True)
class PairWriter(Writer):
    """Converts pairs to samples. Each answer gets half of a row."""

    settings: Preference

    @property
    def channels(self) -> dict[str, str]:
        return {**super().channels, ANSWERS: "uint8"}

    def sample(self, record: Record, columns: Columns) -> Sample:
        encoded = [self.encoded(told) for told in pair(record, columns)]
        what = tuple({one: None for answer in encoded for one in answer.what})
        both = [(answer.tokens, answer.weights) for answer in encoded]
        for (ids, weights), which in zip(both, ("chosen", "rejected"), strict=True):
            if not weights[1:].any():
                raise Undecided(f"the {which} answer has no tokens: {self.shown(ids)}")
        longest = max(len(ids) for ids, _ in both)
        if longest > self.room:
            what = (*what, self.about_length(longest))
            both = [self._cut(*one, self._room_for_prompt(both)) for one in both]
        sizes = [len(ids) for ids, _ in both]
        return {
            TOKENS: np.concatenate([ids for ids, _ in both]),
            WEIGHTS: np.concatenate([weights for _, weights in both]),
            ANSWERS: np.repeat([CHOSEN, REJECTED], sizes).astype(np.uint8),
        }, what

    @property
    def room(self) -> int:
        """The most tokens of a prompt with its answer."""
        return (self.seq_len + 1) // 2

    @property
    def identity(self) -> dict[str, Any]:
        keys = ("max_prompt", "prompt_side", "answer_side")
        own = {f"preference.{key}": getattr(self.settings, key) for key in keys}
        return {**super().identity, **own}

    def about_length(self, length: int) -> str:
        if self.sft.too_long in ("error", "split"):
            raise Undecided(
                f"a prompt with its answer has {length:,} tokens, but training.seq_len = "
                f"{self.seq_len} has room for {self.room:,}, half of a row: raise it, or set "
                "sft.too_long to truncate or drop"
            )
        return super().about_length(length)

    def _room_for_prompt(self, both: list[tuple[Any, Any]]) -> int:
        """Returns the most tokens of a prompt: all that the longer answer leaves, or its share."""
        longest = max(len(ids) - prompt_length(weights) for ids, weights in both)
        share = self.settings.max_prompt or self.room // 2
        return min(max(share, self.room - longest), self.room - 1)

    def _cut(self, ids: Array, weights: Array, for_prompt: int) -> tuple[Array, Array]:
        border = prompt_length(weights)
        places = np.arange(len(ids))
        prompt = _kept(places[:border], for_prompt, self.settings.prompt_side)
        answer = _kept(places[border:], self.room - len(prompt), self.settings.answer_side)
        kept = np.concatenate([prompt, answer])
        return ids[kept], weights[kept]


def prompt_length(weights: Array) -> int:
    """Returns the number of tokens before the first one that counts."""
    return int(np.flatnonzero(weights)[0])


def _kept(places: Array, room: int, lost: str) -> Array:
    """Returns the places to keep, without those on the side that is cut off."""
    return places[max(0, len(places) - room) :] if lost == "left" else places[:room]


def joined(turns: Sequence[Message]) -> list[Message]:
    """Returns the turns with the parts of each content joined to one text."""

    def text(content: Any) -> Any:
        parts = content if isinstance(content, list | tuple) else [content]
        texts = [part["text"] if isinstance(part, Mapping) else part for part in parts]
        return content if content is None else "".join(texts)

    return [{**turn, "content": text(turn["content"])} if "content" in turn else turn
            for turn in turns]  # fmt: skip


def split_specials(text: str, specials: Mapping[str, int]) -> tuple[Piece, ...]:
    """Splits a text in which the names of these special tokens stand for the tokens."""
    parts = re.split(f"({any_name_of(specials).pattern})", text)
    return tuple(specials.get(part, part) for part in parts if part)


def length_of(pieces: Iterable[Piece]) -> int:
    """Returns the length in characters; a special token counts as one."""
    return sum(len(piece) if isinstance(piece, str) else 1 for piece in pieces)


def weights_of(told: Conversation, learn: str) -> list[float] | None:
    """Returns the loss weight of each turn, or None if every token counts."""
    if learn == "all":
        other = [i for i, said in enumerate(told.said, start=1) if said not in (None, 1)]
        if other:
            raise Undecided(
                f'turn {other[0]} has its own weight or train flag, but with sft.learn = "all" '
                'every token counts: remove it, or set sft.learn = "assistant"'
            )
        return None
    own = [i for i, turn in enumerate(told.turns) if turn["role"] == ASSISTANT]
    learned = {i for i in own if i >= told.num_given}
    learned = learned if learn == "assistant" else set(sorted(learned)[-1:])
    weights = []
    for i, said in enumerate(told.said):
        if said and i not in own:
            raise ChatError(
                f"turn {i + 1}, by {told.turns[i]['role']!r}, is marked to be learned, but "
                'only assistant turns can be; to learn all turns, set sft.learn = "all"'
            )
        weights.append(float(i in learned) if said is None or i < told.num_given else said)
    return weights


def encode(tokenizer: Tokenizer, written: RenderedChat) -> tuple[Array, Array]:
    """Returns the token ids of a written conversation, and the loss weight of each."""
    ids, starts, stops = tokenizer.encode_pieces(written.pieces)
    weights = np.zeros(len(ids), np.float32)
    for span in written.spans:
        inside = np.flatnonzero((starts < span.stop) & (stops > span.start))
        if len(inside):  # tokens in between may have no characters of their own
            weights[inside[0] : inside[-1] + 1] = span.weight
    return ids, weights
