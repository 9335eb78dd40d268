"""What a model is given, whoever trains it: imported in the process that trains, it writes a line
for every batch that reaches a token embedding and for every loss that a model returns.

RECORD is the folder to write into; without it nothing is recorded. RECORD_SPLIT is the id of the
token between documents: then documents, not rows, are what is recorded.
RECORD_PAD is the id of the token that fills rows up.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODELS = ("LlamaForCausalLM", "GPT")
"""Classes of models that return their loss: transformers' Llama and nanochat's."""


def start(folder: Path) -> None:
    rank = os.environ.get("RANK", "0")
    split, pad = (int(os.environ.get(f"RECORD_{key}", "-1")) for key in ("SPLIT", "PAD"))
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{rank}.jsonl").open("a", buffering=1)

    last: list[torch.Tensor] = []  # a model may look the same tokens up in more than one table

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not isinstance(module, nn.Embedding) or not torch.is_grad_enabled():
            return
        if not (last and last[0] is inputs[0]):
            last[:] = [inputs[0]]
            samples = [hash_of(one) for row in inputs[0] for one in parts(row, split, pad)]
            file.write(json.dumps({"samples": samples}) + "\n")

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if type(module).__name__ in MODELS and torch.is_grad_enabled():
            last.clear()
            file.write(json.dumps({"loss": float(getattr(output, "loss", output))}) + "\n")

    nn.modules.module.register_module_forward_pre_hook(before)
    nn.modules.module.register_module_forward_hook(after)


def parts(row: torch.Tensor, split: int, pad: int) -> Iterator[list[int]]:
    """Yields what a row is made of, without padding."""
    tokens = row.tolist()
    while tokens and tokens[-1] == pad:
        tokens.pop()
    borders = [i for i, token in enumerate(tokens) if token == split]
    for before, after in zip([-1, *borders], [*borders, len(tokens)], strict=True):
        if after - before > 1:
            yield tokens[before + 1 : after]


def hash_of(tokens: list[int]) -> str:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


if "RECORD" in os.environ:
    start(Path(os.environ["RECORD"]))
