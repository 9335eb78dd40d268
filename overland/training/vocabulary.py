"""Finds the vocabulary rows that are new to the model that a run starts from."""

from __future__ import annotations

from overland.config.schema import JobConfig
from overland.data.sft import tokenizer_for_chats
from overland.models.weights import NewRows


def new_rows_of(config: JobConfig) -> NewRows | None:
    """Returns the rows of those `sft.new_tokens` that the tokenizer did not have."""
    if not config.sft.new_tokens or config.sft.shape == "off":
        return None
    tokenizer = tokenizer_for_chats(config)
    stop = tokenizer.vocab_size
    return NewRows(stop - len(tokenizer.new_tokens), stop) if tokenizer.new_tokens else None
