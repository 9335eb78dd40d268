"""Makes room for `sft.new_tokens` in a model's vocabulary.

The tokenizer gives new tokens the ids after all others. If the model has no rows for them, its
vocabulary grows: `model.overrides.vocab_size` is set, so a run folder's config records it.
"""

from __future__ import annotations

from dataclasses import replace

from overland.config.errors import ConfigError, Problem
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.data.sft import tokenizer_for_chats
from overland.errors import DataError, ModelError
from overland.models.registry import model_config
from overland.words import any_of

KEY = "model.overrides.vocab_size"
# Tensor parallelism splits the rows evenly, so the new size is a multiple of the largest power of
# two, up to this, that divides the old one.
LARGEST_MULTIPLE = 128


def with_new_tokens(loaded: Loaded) -> Loaded:
    """Returns the config with room for the new tokens, and notes about them. Problems with the
    tokenizer or model are reported where they are opened."""
    config = loaded.config
    if not config.sft.new_tokens or config.sft.shape == "off" or not config.model.hf_assets_path:
        return loaded
    try:
        tokenizer = tokenizer_for_chats(config)
        size = model_config(config.model).vocab_size
    except (DataError, ModelError, AttributeError, OSError):
        return loaded
    first = tokenizer.vocab_size - len(tokenizer.new_tokens)
    ids = [f"{name} = {first + i:,}" for i, name in enumerate(tokenizer.new_tokens)]
    if not ids:
        note = "sft.new_tokens: the tokenizer already has all of them"
        return replace(loaded, notes=[*loaded.notes, note])
    room = "and the model already has rows for them"
    if tokenizer.vocab_size > size:
        if "vocab_size" in config.model.overrides:
            message = f"sft.new_tokens need {tokenizer.vocab_size:,}; remove it to grow as needed"
            problem = Problem(message, loaded.where("model.overrides"), KEY, size)
            raise ConfigError([problem], partial=loaded)
        grown = grown_size(size, tokenizer.vocab_size)
        config = with_vocabulary(config, grown)
        room = f"so the vocabulary grows from {size:,} to {grown:,} rows ({KEY})"
    note = (
        f"sft.new_tokens: {any_of(ids, 'and')} are new, {room}; their rows start as the mean of "
        "the others"
    )
    if config.lora.rank and "embed_tokens" not in config.lora.modules_to_save:
        note += (
            ", and stay so, since only adapters are trained; lora.modules_to_save = "
            '["embed_tokens", "lm_head"] trains them'
        )
    return replace(loaded, config=config, notes=[*loaded.notes, note])


def grown_size(size: int, needed: int) -> int:
    """Returns the size of a vocabulary with room for this many tokens."""
    multiple = min(size & -size, LARGEST_MULTIPLE)  # the largest power of two that divides it
    return -(-needed // multiple) * multiple


def with_vocabulary(config: JobConfig, size: int) -> JobConfig:
    overrides = {**config.model.overrides, "vocab_size": size}
    model = config.model.model_copy(update={"overrides": overrides})
    return config.model_copy(update={"model": model})
