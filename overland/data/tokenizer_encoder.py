"""What the kinds of tokenizers have in common: the encoder that each is, and its package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overland.packages import need

Ids = npt.NDArray[np.int32]


class Encoder(Protocol):
    vocab_size: int
    specials: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    begins: bool
    """Whether a text begins with BOS by the convention of its kind."""
    convention: str
    """What says so, for people."""

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Ordinary tokens only. TypeError or UnicodeEncodeError for text that is not Unicode."""

    def decode(self, ids: list[int]) -> str:
        """Of ordinary tokens."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Of any ids below vocab_size."""


def need_for_text(package: str) -> Any:
    """A tokenizer's library."""
    return need(package, "text", "text", note=" (random tokens and token shards do without)")


def num_threads() -> int:
    """The cores of this process, or one: by the variable that Hugging Face's library obeys."""
    wish = os.environ.get("TOKENIZERS_PARALLELISM", "").lower()
    if wish in ("off", "false", "f", "no", "n", "0"):
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
