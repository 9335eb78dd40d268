"""Logits and gradients equal transformers' for every family and rope kind.

`OVERLAND_WRITE_EVIDENCE=1 pytest tests/models/test_parity.py` writes the measured table into
docs/evidence/model_parity.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.models import DecoderConfig, build_model

from .tiny import CASES

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
TABLE = Path(__file__).parents[2] / "docs" / "evidence" / "model_parity.md"
measured: dict[tuple[str, str], tuple[float, float, float]] = {}


def reference(contents: dict[str, Any]) -> Any:
    """transformers' model with random weights, biases and norms included."""
    kind = contents["model_type"]
    config = transformers.AutoConfig.for_model(
        **{k: dict(v) if isinstance(v, dict) else v for k, v in contents.items()}
    )
    assert config.model_type == kind
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def evidence() -> Iterator[None]:
    yield
    if os.environ.get("OVERLAND_WRITE_EVIDENCE") != "1":
        return
    lines = [
        "# Parity with transformers",
        "",
        f"Random tiny models in float32 on the CPU, transformers {transformers.__version__}, torch "
        f"{torch.__version__}: largest absolute difference of the logits, of the gradients of "
        "the mean loss, and of those relative to each parameter's largest. Bound: 1e-4 for all.",
        "",
        "Made by `OVERLAND_WRITE_EVIDENCE=1 pytest tests/models/test_parity.py`.",
        "",
        "| family | rope | logits | gradients | gradients, relative |",
        "|---|---|---|---|---|",
    ]
    for (family, rope), row in measured.items():
        lines.append(f"| {family} | {rope} | " + " | ".join(f"{x:.1e}" for x in row) + " |")
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("case", list(CASES), ids=" / ".join)
def test_logits_and_gradients_equal_transformers(case: tuple[str, str]) -> None:
    contents, seq_len = CASES[case]
    theirs = reference(contents)
    ours = build_model(DecoderConfig.from_hf(contents))
    ours.load_state_dict(theirs.state_dict())

    tokens_BS = torch.randint(0, contents["vocab_size"], (2, seq_len))
    labels_BS = torch.randint(0, contents["vocab_size"], (2, seq_len))
    labels_BS[:, ::5] = -100
    their_logits = theirs(tokens_BS).logits
    our_logits = ours(tokens_BS)
    logits_difference = (our_logits - their_logits).abs().max().item()
    assert our_logits.abs().max() > 0.5  # a parity of zeros would prove nothing

    # The mean over valid labels, which is transformers' own loss.
    torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels_BS.flatten()).backward()
    (ours(tokens_BS, labels_BS=labels_BS) / (labels_BS != -100).sum()).backward()
    our_gradients = {name: p.grad for name, p in ours.named_parameters()}
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    gradient_difference = relative_difference = 0.0
    for name, gradient in their_gradients.items():
        difference = (our_gradients[name] - gradient).abs().max().item()
        gradient_difference = max(gradient_difference, difference)
        relative_difference = max(relative_difference, difference / gradient.abs().max().item())

    measured[case] = (logits_difference, gradient_difference, relative_difference)
    assert logits_difference <= TOLERANCE
    assert gradient_difference <= TOLERANCE
    assert relative_difference <= TOLERANCE
