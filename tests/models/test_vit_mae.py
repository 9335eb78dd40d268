"""The masked autoencoder is Hugging Face's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ViTMAEConfig as TheirConfig
from transformers import ViTMAEForPreTraining

from overland.apps.convert import convert
from overland.errors import ModelError
from overland.models import build_model, resolve_config
from overland.models.init import init_buffers, init_weights
from overland.models.vit_mae import patches, places, uniform
from overland.models.vit_mae_config import ViTMAEConfig
from overland.models.weights import load_hf
from tests.cli.processes import ROOT

CPU = torch.device("cpu")


def built(**overrides: Any) -> Any:
    with torch.device("meta"):
        model = build_model(resolve_config("vit_mae", "debug", overrides=overrides))
    model.to_empty(device=CPU)
    init_buffers(model, CPU)
    init_weights(model, seed=3)
    return model


def theirs_with(model: Any, tmp_path: Path) -> ViTMAEForPreTraining:
    """Their model, read from a folder that has our names."""
    config = TheirConfig(**model.config.to_hf())
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path)
    network, report = ViTMAEForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return network.double()


# The document's image, grid and mask in the second: 1920² by 128, 225 patches, 56 seen.
CASES: dict[str, dict[str, Any]] = {
    "3 × 32², patch 8": {},
    "1 × 1920², patch 128": {"image_size": 1920, "patch_size": 128, "num_channels": 1},
    "norm_pix_loss": {"norm_pix_loss": True},
    "without qkv_bias, mask 0.5": {"qkv_bias": False, "mask_ratio": 0.5},
}
TOLERANCE = 1e-10  # in float64
TABLE = ROOT / "docs" / "evidence" / "vit_mae_parity.md"
measured: dict[str, tuple[float, ...]] = {}


@pytest.fixture(scope="module", autouse=True)
def evidence() -> Iterator[None]:
    yield
    if os.environ.get("OVERLAND_WRITE_EVIDENCE") != "1":
        return
    lines = [
        "# ViT-MAE: parity with transformers",
        "",
        f"Random small models in float64 on the CPU, transformers {transformers.__version__}, "
        f"torch {torch.__version__}: largest absolute difference of the loss, of the painted "
        f"pixels, and of the gradients of encoder and decoder. Bound: {TOLERANCE:g} for all.",
        "",
        "Made by `OVERLAND_WRITE_EVIDENCE=1 pytest tests/models/test_vit_mae.py`.",
        "",
        "| model | loss | painted | gradients of the encoder | of the decoder |",
        "|---|---|---|---|---|",
    ]
    for name, row in measured.items():
        lines.append(f"| {name} | " + " | ".join(f"{x:.1e}" for x in row) + " |")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_loss_painting_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    ours = built(**CASES[case])
    with torch.no_grad():  # fresh weights are so small that little of an image gets through
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(8)
    theirs = theirs_with(ours, tmp_path)
    ours.double()
    config = ours.config
    pixels = torch.randn(3, config.num_channels, *config.size, dtype=torch.float64)
    noise = torch.rand(3, config.num_patches)
    painted, _ = ours.paint(pixels, noise=noise)
    loss = ours(pixels, noise=noise) / 3
    expected = theirs(pixels, noise=noise)
    assert painted.abs().max() > 0.1  # a parity of zeros would prove nothing
    loss.backward()
    expected.loss.backward()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    embedding = ours.vit.embeddings.patch_embeddings.projection.weight
    assert embedding.grad.abs().max() > 1e-6  # it has come through all blocks of both
    differences = {"vit": 0.0, "decoder": 0.0}
    for name, parameter in ours.named_parameters():
        found = (parameter.grad - their_gradients[their_name(name)]).abs().max().item()
        part = name.partition(".")[0]
        differences[part] = max(differences[part], found)
    row = (
        abs(loss - expected.loss).item(),
        (painted - expected.logits).abs().max().item(),
        *differences.values(),
    )
    measured[case] = row
    assert max(row) < TOLERANCE, row


def their_name(name: str) -> str:
    """In memory, transformers 5 has other names than in files."""
    for ours, theirs in {
        "vit.encoder.layer": "vit.layers",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }.items():
        name = name.replace(ours, theirs)
    return name


def test_weights_of_transformers_load_and_compute_the_same(tmp_path: Path) -> None:
    config = resolve_config("vit_mae", "debug")
    theirs = ViTMAEForPreTraining(TheirConfig(**config.to_hf()))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    assert ViTMAEConfig.from_hf(tmp_path / "theirs") == config
    ours = built()
    load_hf(ours, tmp_path / "theirs")
    pixels, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    assert torch.isclose(ours(pixels, noise=noise) / 2, theirs(pixels, noise=noise).loss, rtol=1e-5)
    # Version 5 writes other names than 4: converted, all are ours.
    summary = convert(tmp_path / "theirs", tmp_path / "again", "hf", verify="logits")
    assert summary.logits_difference == 0
    assert (
        load_file(tmp_path / "again" / "model.safetensors").keys()
        >= dict(ours.named_parameters()).keys()
    )


def test_places_of_patches_are_those_of_transformers() -> None:
    ours = built()
    theirs = ViTMAEForPreTraining(TheirConfig(**ours.config.to_hf()))
    theirs.decoder.initialize_weights(num_patches=16)
    torch.testing.assert_close(
        ours.decoder.decoder_pos_embed, theirs.decoder.decoder_pos_embed.data
    )


def test_masks_are_a_function_of_seed_epoch_and_sample() -> None:
    def noise(seed: str, samples: list[int], epoch: int) -> Tensor:
        numbers = torch.tensor(samples)
        return uniform(seed, numbers, torch.full_like(numbers, epoch), 1000)

    together = noise("7", [5, 1 << 40, 6], 2)
    assert torch.equal(together[1:2], noise("7", [1 << 40], 2))
    for other in (noise("8", [5], 2), noise("7", [5], 3), noise("7", [6], 2)):
        assert abs(torch.corrcoef(torch.cat((together[:1], other)))[0, 1]) < 0.15
    assert 0 <= together.min() < 0.02
    assert 0.98 < together.max() < 1
    assert abs(together.mean() - 0.5) < 0.03


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("patch_size", 5, "patch_size 5 does not divide image_size 32"),
        ("image_size", [32, 20], "patch_size 8 does not divide image_size 32 × 20"),
        ("image_size", [32], "image_size must be a number, or height and width"),
        ("mask_ratio", 0.99, "must leave some of the 16 patches"),
        ("hidden_size", "64", "hidden_size = '64' is not of type int"),
        ("hidden_dropout_prob", 0.1, "dropout is not supported"),
        ("hiden_size", 64, "did you mean 'hidden_size'"),
        ("num_attention_heads", 7, "7 does not divide hidden_size 64"),
    ],
)
def test_what_cannot_be_is_refused(key: str, value: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        resolve_config("vit_mae", "debug", overrides={key: value})


def test_images_need_not_be_square() -> None:
    wide, square = places((2, 3), 16)[0], places((3, 3), 16)[0]
    assert torch.equal(wide, torch.cat((square[:1], square[1:7])))
    model = built(image_size=[16, 32], num_channels=1)
    assert model.config.grid == (2, 4)
    assert model.config.sample_fields()["pixel_values"][1] == (1, 16, 32)
    loss = model(torch.randint(0, 60_000, (2, 1, 16, 32)).to(torch.uint16))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    written = json.loads(json.dumps(model.config.to_hf()))
    assert ViTMAEConfig.from_hf(written) == model.config


def test_what_is_hidden_does_not_reach_the_encoder() -> None:
    """The loss does, and nothing else."""
    model, noise = built(), torch.rand(1, 16)
    pixels = torch.randn(1, 3, 32, 32)
    pieces = patches(pixels, 8)
    painted, is_hidden = model.paint(pixels, noise=noise)
    assert is_hidden.sum() == 12
    changed = torch.where(is_hidden[..., None], torch.randn_like(pieces), pieces)
    whole = changed.view(1, 4, 4, 8, 8, 3).permute(0, 5, 1, 3, 2, 4).reshape(1, 3, 32, 32)
    assert torch.equal(patches(whole, 8), changed)
    assert torch.equal(model.paint(whole, noise=noise)[0], painted)
