"""Turns any corpus into exact, reproducible batches.

`sources` read documents of any format, which become shards of tokens (`shard_maker.py`,
`shard.py`); `windows.py` permutes and packs them (`pack.py`), `order.py` and `mixture.py` put the
rows of a batch in order, and `sampler.py` returns batch *t* for a plan (`plan.py`). `prepare.py`
opens all of it for a config. Chats are rendered on the way in: `conversations.py`, `chat.py`,
`sft.py`.
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
