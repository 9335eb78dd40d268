"""Perplexity on C4's validation set: during training (`--eval_every`), or of any model.

overland fetch dataset allenai/c4 --include "en/c4-validation.*" --to data/c4_validation
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overland.apps.evaluation.documents import sets_of
from overland.apps.evaluation.parts import Cutter
from overland.apps.evaluation.perplexity import require_some, score, total
from overland.apps.evaluation.ranks import RankedModel
from overland.config.schema import DataSource
from overland.data.tokenizer import Tokenizer
from overland.training.callbacks import Callback, register_callback


def evaluate_c4_ppl(
    model: nn.Module,
    tokenizer_dir: str | Path,
    c4_dir: str | Path = "data/c4_validation",
    *,
    seq_len: int = 2048,
    batch: int = 8,
    limit: int | None = None,
) -> tuple[float, int]:
    """Returns the perplexity and the number of tokens: every token of the set once, in windows of
    `seq_len`. `model` is one of transformers, or any that returns logits; `limit` is the maximum
    number of documents."""
    (c4,) = sets_of([f"c4={c4_dir}"], None, DataSource())
    device = next(model.parameters()).device
    cutter = Cutter(Tokenizer(Path(tokenizer_dir)), seq_len, seq_len, None, False, None)
    was_training = model.training
    ranked = RankedModel(Logits(model.eval()), device)
    parts = cutter.parts(c4.documents(limit))
    sums = total(score(ranked, parts, batch_tokens=batch * seq_len))
    model.train(was_training)
    require_some(sums, str(c4_dir))
    return math.exp(sums.loss / sums.tokens), sums.tokens


class Logits(nn.Module):
    """Returns the logits of a transformers model as a plain tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        out = self.model(tokens)
        return out if isinstance(out, torch.Tensor) else out.logits


class C4Perplexity(Callback):
    """Also logs the perplexity under the playground's name, eval/c4_ppl."""

    def on_validation(self, run: Any, record: dict[str, Any]) -> None:
        if "validation/c4/perplexity" in record:
            record["eval/c4_ppl"] = record["validation/c4/perplexity"]


def register() -> None:
    register_callback(C4Perplexity)
