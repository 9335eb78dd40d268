"""Tiny models with random weights as the engine takes them, and a tokenizer of single letters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overland.apps.evaluation.generate import Completion, GenerationRequest, Generator, PlainRows
from overland.apps.evaluation.model import OpenModel
from overland.apps.evaluation.sampling import Sampling
from overland.models import DecoderConfig, build_model
from overland.models.init import init_weights
from tests.models.tiny import hf

LENGTHS = (1, 7, 19)
GREEDY = Sampling()


class Letters:
    """A token is a letter; the first two are special."""

    specials: dict[str, int] = {"<end>": 0, "<turn>": 1}
    path = Path("letters")
    vocab_size = 96

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids if i > 1)


def opened(model: nn.Module, context: int = 256, **changes: Any) -> OpenModel:
    known: dict[str, Any] = {"tokenizer": Letters(), "config": None, "path": Path("tiny")}
    more: dict[str, Any] = {"step": None, "end_ids": (), "dtype": torch.float32}
    more["device"] = torch.device("cpu")
    return OpenModel(model=model, context=context, **{**known, **more, **changes})


def tiny(contents: dict[str, Any] | None = None, **changes: Any) -> nn.Module:
    contents = {**(contents or hf("llama")), "max_position_embeddings": 256, **changes}
    model = build_model(DecoderConfig.from_hf(contents))
    init_weights(model, seed=1)
    return model.eval()


def some_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(2, 96, (n,), generator=draw).tolist() for n in lengths]


def continued(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    batch_size: int = 8,
    cached: bool = True,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> list[Completion]:
    """What follows the prompts; without a cache, if that is asked for."""
    generator = Generator(opened(model), batch_size=batch_size, length=256)
    if not cached:
        generator.close()
        plain = PlainRows(model, batch_size, 256, torch.device("cpu"))
        generator.rows = generator.batch.rows = plain
    try:
        more = {name: options.pop(name) for name in ("end_ids", "stop") if name in options}
        asked = GenerationRequest(num_tokens, sampling, **more)
        return generator.generate(prompts, asked, **options)
    finally:
        generator.close()
