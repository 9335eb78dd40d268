"""Pairs of answers as samples: the chosen and the rejected one, each with the prompt before it.

A sample is both of them, one after the other, and has a row to itself. The channel `answers` says
which of the two a token belongs to; the second one begins a new document, so that neither attends
to the other. Weights distinguish the answer from the prompt, as for conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.config.schema import Preference
from overland.data.chat import Undecided
from overland.data.conversations import Columns, Record, pair
from overland.data.rows import ANSWERS, CHOSEN, REJECTED
from overland.data.shard import TOKENS, WEIGHTS
from overland.data.writer import Skipped, Writer


@dataclass(frozen=True)
class PairWriter:
    """Converts pairs to samples. Each answer gets half of a row."""

    writer: Writer
    settings: Preference

    def sample(self, record: Record, columns: Columns) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the arrays of a sample, and what was done to it, to be counted."""
        encoded = [self.writer.encoded(told) for told in pair(record, columns)]
        what = tuple({one: None for sample in encoded for one in sample.what})
        both = [(sample.tokens, sample.weights) for sample in encoded]
        for (ids, weights), which in zip(both, ("chosen", "rejected"), strict=True):
            if not weights[1:].any():
                raise Undecided(f"the {which} answer has no tokens: {self.writer.shown(ids)}")
        if self.room is not None and max(len(ids) for ids, _ in both) > self.room:
            what = (*what, self._about_length(max(len(ids) for ids, _ in both)))
            both = [self._cut(*one, self._room_for_prompt(both)) for one in both]
        sizes = [len(ids) for ids, _ in both]
        return {
            TOKENS: np.concatenate([ids for ids, _ in both]),
            WEIGHTS: np.concatenate([weights for _, weights in both]),
            ANSWERS: np.repeat([CHOSEN, REJECTED], sizes).astype(np.uint8),
        }, what

    @property
    def room(self) -> int | None:
        """The most tokens of a prompt with its answer."""
        seq_len = self.writer.seq_len
        return None if seq_len is None else (seq_len + 1) // 2

    @property
    def identity(self) -> dict[str, Any]:
        settings = self.settings
        keys = ("max_prompt", "prompt_side", "answer_side")
        return {
            **self.writer.identity,
            **{f"preference.{key}": getattr(settings, key) for key in keys},
        }

    def _about_length(self, length: int) -> str:
        too_long, room = self.writer.too_long, self.room
        if too_long == "drop":
            raise Skipped("too long")
        if too_long != "truncate":
            raise Undecided(
                f"a prompt with its answer has {length:,} tokens, but training.seq_len = "
                f"{self.writer.seq_len} has room for {room:,}, half of a row: raise it, or set "
                "sft.too_long to truncate or drop"
            )
        return "truncated"

    def _room_for_prompt(self, both: list[tuple[Any, Any]]) -> int:
        """Returns the most tokens of a prompt: all that the longer answer leaves, or its share."""
        assert self.room is not None
        longest = max(len(ids) - prompt_length(weights) for ids, weights in both)
        share = self.settings.max_prompt or self.room // 2
        return min(max(share, self.room - longest), self.room - 1)

    def _cut(
        self, ids: npt.NDArray[Any], weights: npt.NDArray[Any], for_prompt: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        assert self.room is not None
        border = prompt_length(weights)
        places = np.arange(len(ids))
        prompt = _kept(places[:border], for_prompt, self.settings.prompt_side)
        answer = _kept(places[border:], self.room - len(prompt), self.settings.answer_side)
        kept = np.concatenate([prompt, answer])
        return ids[kept], weights[kept]


def prompt_length(weights: npt.NDArray[Any]) -> int:
    """Returns the number of tokens before the first one that counts."""
    return int(np.flatnonzero(weights)[0])


def _kept(places: npt.NDArray[Any], room: int, lost: str) -> npt.NDArray[Any]:
    """Returns the places to keep, without those on the side that is cut off."""
    return places[max(0, len(places) - room) :] if lost == "left" else places[:room]
