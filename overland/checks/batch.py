"""The global batch is a whole number of local batches on every device."""

from __future__ import annotations

from collections.abc import Iterator

from overland.checks.parallelism import data_parallel_degree
from overland.config.errors import Problem
from overland.config.load import Loaded


def check_batch(loaded: Loaded, world_size: int | None) -> Iterator[Problem]:
    training = loaded.config.training
    size, local = training.global_batch_size, training.local_batch_size
    key = "training.global_batch_size"
    if size == 0:
        message = "expected -1 (one local batch per data-parallel device) or a positive number"
        yield Problem(message, loaded.where(key), key, size)
        return
    degree = data_parallel_degree(loaded.config, world_size) if world_size else None
    if size < 0 or degree is None or size % (local * degree) == 0:
        return
    unit = local * degree
    below, above = size // unit * unit, (size // unit + 1) * unit
    nearest = f"the nearest are {below} and {above}" if below else f"the least is {above}"
    share = size // degree
    if size % degree == 0:  # what other trainers do: the local batch as an upper bound
        fitting = max(n for n in range(1, min(local, share) + 1) if share % n == 0)
        sizes = f"{below} or {above}" if below else above
        nearest = f"training.local_batch_size = {fitting} keeps {size}, or set {key} = {sizes}"
    message = (
        f"expected a multiple of {unit} (local_batch_size {local} × data-parallel degree "
        f"{degree}); {nearest}"
    )
    yield Problem(message, loaded.where(key), key, size)
