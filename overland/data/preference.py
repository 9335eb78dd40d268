"""Pairs of answers as samples: the chosen and the rejected one, each with the prompt before it.

A sample is both, one after the other, and fills a row by itself. The channel `answers` says which
of the two a token belongs to; where the second begins, so does a document, and neither sees the
other. Which tokens are answers and not prompt is said by the weights, as for conversations.
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
    """Makes samples of pairs. A row has as much room for one answer as for the other."""

    writer: Writer
    settings: Preference

    def sample(self, record: Record, columns: Columns) -> tuple[Mapping[str, Any], str]:
        """The arrays of a sample, and what was done to it that is counted."""
        both = [self.writer.encoded(told) for told in pair(record, columns)]
        for (ids, weights), which in zip(both, ("chosen", "rejected"), strict=True):
            if not weights[1:].any():
                raise Undecided(f"the {which} answer has no tokens: {self.writer.shown(ids)}")
        what = ""
        if self.room is not None and max(len(ids) for ids, _ in both) > self.room:
            what = self._about_length(max(len(ids) for ids, _ in both))
            both = [self._cut(*one, self._room_for_prompt(both)) for one in both]
        sizes = [len(ids) for ids, _ in both]
        return {
            TOKENS: np.concatenate([ids for ids, _ in both]),
            WEIGHTS: np.concatenate([weights for _, weights in both]),
            ANSWERS: np.repeat([CHOSEN, REJECTED], sizes).astype(np.uint8),
        }, what

    @property
    def room(self) -> int | None:
        """Tokens of a prompt with its answer."""
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
                f"a prompt with its answer has {length:,} tokens, and training.seq_len = "
                f"{self.writer.seq_len} has room for {room:,}, half of a row: raise that, or set "
                "sft.too_long to truncate or drop"
            )
        return "truncated"

    def _room_for_prompt(self, both: list[tuple[Any, Any]]) -> int:
        """What a prompt may take: all that the longer answer leaves, or its share."""
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
    """Tokens before the first that counts."""
    return int(np.flatnonzero(weights)[0])


def _kept(places: npt.NDArray[Any], room: int, lost: str) -> npt.NDArray[Any]:
    """So many places, without those on the side that is lost."""
    return places[max(0, len(places) - room) :] if lost == "left" else places[:room]
