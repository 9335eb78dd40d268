"""Settings that need one another."""

from __future__ import annotations

from collections.abc import Iterator

from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.precision import settle_dtype
from overland.errors import ModelError
from overland.models.registry import model_config


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


def check_compiler(loaded: Loaded) -> Iterator[Problem]:
    config, key = loaded.config.compile, "compile.backend"
    if config.enable is False or config.backend == "inductor":
        return
    from torch._dynamo import list_backends

    backends = list_backends(exclude_tags=())
    if config.backend not in backends:
        message = f"this torch has no such compiler backend; it has {', '.join(backends)}"
        yield Problem(message, loaded.where(key), key, config.backend)


def check_profiling(loaded: Loaded) -> Iterator[Problem]:
    settings = loaded.config.profiling
    observed = settings.profiler_warmup + settings.profiler_active
    if settings.enable_profiling and settings.profile_freq < observed:
        key = "profiling.profile_freq"
        message = f"is less than profiler_warmup + profiler_active = {observed}"
        yield Problem(message, loaded.where(key), key, settings.profile_freq)


def check_attention(loaded: Loaded) -> Iterator[Problem]:
    """A backend that is named can compute this model's masks, on a GPU."""
    config, key = loaded.config, "model.attention"
    if config.model.attention in ("auto", "sdpa"):
        return
    import torch

    from overland.models.backend import choose_form

    try:
        window = getattr(model_config(config.model), "sliding_window", None)
    except (ModelError, OSError):
        return
    try:
        choose_form(
            config.model.attention,
            torch.device("cuda"),
            getattr(torch, settle_dtype(config.training, "cuda").mixed_precision_param),
            window,
            config.data.document_mask,
            config.parallelism.context_parallel_degree > 1,
            config.debug.deterministic,
        )
    except ModelError as error:
        yield Problem(str(error), loaded.where(key), key, config.model.attention)
        return
    if not torch.cuda.is_available():
        message = 'needs a GPU, and this machine shows none; use "auto" or "sdpa"'
        yield Problem(message, loaded.where(key), key, config.model.attention, kind="machine")
