"""Lets a model continue a text: a quick look, not a server (every token is a full forward pass)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from overland.errors import ModelError

Logits = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def generate(
    logits_of: Logits,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
    end_id: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Yields new tokens. Same seed, same text: sharded ranks call this together and stay together.

    The input keeps one length, `context`, padded behind the last token, which causal attention
    cannot see: so a compiled model compiles once.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-context:]
        padded = window + [0] * (context - len(window))
        logits_BSV = logits_of(torch.tensor([padded], device=device))
        logits = logits_BSV[0, len(window) - 1].double().cpu()
        if not logits.isfinite().all():
            raise ModelError(
                "the model predicts values that are not finite: its weights are broken"
            )
        if temperature == 0:
            token = int(logits.argmax())
        else:
            chances = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=draw))
        if token == end_id:
            return
        tokens.append(token)
        yield token
