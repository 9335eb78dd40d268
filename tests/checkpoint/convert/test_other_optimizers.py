"""The state of optimizers other than AdamW survives every format that has a place for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from overland.apps.convert import convert
from overland.apps.convert.formats import FORMATS, LazyCheckpoint, Options, open_any
from overland.apps.convert.formats.lazy import held
from overland.models import DecoderConfig

from .samples import assert_same, contents, tiny_config, tiny_source


def source_of_muon(config: dict[str, object]) -> LazyCheckpoint:
    """A momentum and a scalar of every matrix, AdamW's moments of the rest."""
    source = tiny_source(config)
    tensors = dict(source.tensors)
    for name, shape in DecoderConfig.from_hf(config).parameter_shapes().items():
        if len(shape) == 2:
            del tensors[f"optimizer.{name}.exp_avg_sq"]
            tensors[f"optimizer.{name}.momentum"] = tensors.pop(f"optimizer.{name}.exp_avg")
            tensors[f"optimizer.{name}.scale"] = held(torch.tensor(0.5))
    return source.with_tensors(tensors)


@pytest.mark.parametrize("through", ["overland", "torch", "dcp", "torchtitan"])
def test_state_keeps_its_own_names(through: str, tmp_path: Path) -> None:
    config = tiny_config()
    source = source_of_muon(config)
    names = "torchtitan" if through == "torchtitan" else "hf"
    format_ = FORMATS["dcp" if through == "torchtitan" else through]
    start = tmp_path / through
    start.mkdir()
    format_.write(source, start, Options(names=names))
    assert_same(contents(open_any(start, config)), contents(source))


def test_a_parameter_is_left_out_with_its_state(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / "start").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config))
    FORMATS["overland"].write(source_of_muon(config), tmp_path / "start", Options())
    convert(
        tmp_path / "start", tmp_path / "end", "torch",
        exclude=["lm_head.weight"], config=tmp_path / "config.json",
    )  # fmt: skip
    found = open_any(tmp_path / "end", config).tensors
    assert not [name for name in found if "lm_head" in name]
    assert "optimizer.model.layers.0.mlp.up_proj.weight.momentum" in found
