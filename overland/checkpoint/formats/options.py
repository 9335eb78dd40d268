"""What can be chosen about a target."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SHARD_BYTES = 5 * 1000**3


@dataclass(frozen=True)
class Options:
    """`names` and `key_prefix` are for DCP; `partial`: tensors were left out on purpose."""

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    names: str = "hf"
    key_prefix: str | None = None
    partial: bool = False
