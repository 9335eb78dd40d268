"""Settings that need one another."""

from __future__ import annotations

from collections.abc import Iterator

from overland.config.errors import Problem
from overland.config.load import Loaded


def check_moments(loaded: Loaded) -> Iterator[Problem]:
    key, dtype = "optimizer.bf16_moments", loaded.config.training.dtype
    if loaded.config.optimizer.bf16_moments and dtype != "float32":
        message = f"needs training.dtype = float32, not {dtype}"
        yield Problem(message, loaded.where(key), key, True)


def check_recompute(loaded: Loaded) -> Iterator[Problem]:
    option = loaded.config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        key = "activation_checkpoint.selective_ac_option"
        message = 'expected "op" or a positive whole number in quotes, such as "2"'
        yield Problem(message, loaded.where(key), key, option)


def check_needs_compile(loaded: Loaded) -> Iterator[Problem]:
    """What the compiler does cannot be had without it."""
    config = loaded.config
    wishes = {
        "activation_checkpoint.mode": config.activation_checkpoint.mode == "memory_budget",
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
    }
    for key, wished in wishes.items():
        if wished and not config.compile.enable:
            section, name = key.split(".")
            value = getattr(getattr(config, section), name)
            yield Problem("needs compile.enable = true", loaded.where(key), key, value)
