"""Turns any corpus into exact, reproducible batches.

One way through it: `sources` read documents of any format, which become shards of tokens
(`shard_maker.py`, `shard.py`) in a corpus (`layout.py`, `corpus.py`). `windows.py` permutes them,
`blocks.py` packs them (`pack.py`) into a lane of rows (`lanes.py`), and `sampler.py` takes the rows
of batch *t* from the lanes, in the turns of a mixture (`order.py`), as the plan says (`plan.py`).
`batch.py` makes tensors of them.

`prepare.py` opens all of it for a config, with `corpora.py` and `wanted.py`. Chats are rendered on
the way in: `sft.py`, `conversations.py`, `learned_tokens.py`, `chat.py`.
"""

from __future__ import annotations

from typing import Any

from overland.plugins import plugin

__all__ = ["build_train_loader"]


def __getattr__(name: str) -> Any:
    """Finds the loader for users' own scripts, which the core itself does not need."""
    if name == "build_train_loader":
        return plugin("train_loader").build_train_loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
