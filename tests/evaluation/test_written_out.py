"""The decoder written out for GPUs computes what the decoder does; here by the plain definitions of
its kernels, which the kernels themselves are compared with in tests/kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overland.apps.evaluation.cache import CachedDecoder, release
from overland.apps.evaluation.written_out import WrittenOut, can_write_out
from overland.models.decoder import Decoder
from tests.models.tiny import CASES

from .engines import some_prompts, tiny

FAMILIES = [
    ("Llama 3.2, tied", "llama3"),
    ("Mistral, window 8", "default"),
    ("Qwen2, layer_types", "default"),
    ("Qwen3, tied, biases", "yarn"),
]


@pytest.mark.parametrize("case", FAMILIES, ids=" / ".join)
def test_it_computes_what_the_decoder_does(case: tuple[str, str]) -> None:
    model, prompts = tiny(CASES[case][0]), some_prompts((3, 12, 1))
    wanted = logits(model, prompts, written_out=False)
    found = logits(model, prompts, written_out=True)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    assert torch.equal(logits(model, prompts, written_out=True), found)  # merged by now


def test_matrices_that_are_merged_are_held_once_and_stay_what_they_were() -> None:
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits(model, some_prompts((3,)), written_out=True)
    attention = model.model.layers["0"].self_attn
    storages = {getattr(attention, name).weight.untyped_storage().data_ptr()
                for name in ("q_proj", "k_proj", "v_proj")}  # fmt: skip
    assert len(storages) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_plain_matrices_in_16_bits_on_a_gpu_are_written_out() -> None:
    assert not can_write_out(tiny())  # on a CPU


@torch.no_grad()
def logits(model: Decoder, prompts: list[list[int]], written_out: bool) -> Tensor:
    """Of what follows the prompts, and four more tokens of each."""
    decoder = CachedDecoder(model, len(prompts))
    decoder.reserve(32)
    if written_out:
        decoder.written_out = WrittenOut(model, decoder.capacity, decoder.lengths_B)
    found = [decoder.start(prompts)]
    for _ in range(4):
        found.append(decoder.step(torch.arange(len(prompts)) + 7))
    release(model)
    return torch.stack(found)
