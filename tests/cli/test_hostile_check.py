"""`overland check` on malicious files: exit code 2, one sentence for each, no traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.checkpoint.convert.test_budgets import torch_file
from tests.cli.processes import TINY, overland
from tests.data.sources.test_hostile import OFFSETS, TEXTS, arrow, changed, described
from tests.models.tiny import hf

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


def refused(folder: Path, *words: str) -> list[str]:
    done = overland("check", *words, cwd=folder, code=2)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return [line for line in lines if not re.fullmatch(r"[\w ,]+: \d+ s", line)]  # its progress


@pytest.mark.parametrize(
    ("name", "text"), [("deep.toml", "a = " + "[" * 5000 + "]" * 5000), ("bomb.yaml", BOMB)]
)
def test_a_config_that_is_deep_or_a_bomb(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    said = refused(tmp_path, name)
    assert len(said) == 1
    assert name in said[0]


def test_a_model_whose_config_has_other_types(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nconfig = "."\n[training]\ndataset = "stdlib"\n')
    (tmp_path / "config.json").write_text(json.dumps(hf("llama") | {"hidden_size": "32"}))
    said = refused(tmp_path, "run.toml")
    assert len(said) == 1
    assert "hidden_size" in said[0]


def test_data_and_weights_that_lie(tmp_path: Path) -> None:
    """Offsets beyond a file, a pickle that would end the process, a shape of 2⁶² bytes."""
    (tmp_path / "run.toml").write_text("")
    data = changed(arrow({"text": TEXTS}), OFFSETS["text"], 5, 10**8)
    (tmp_path / "a.arrow").write_bytes(data)
    (tmp_path / "a.npy").write_bytes(described(f"({2**70},)"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(16) + b"\xff\xff\xff\x7fPAR1")
    deep = b"\x80\x04)" + b"\x85" * 400_000 + b"\x8c\x01x\x93."
    torch_file(tmp_path / "a.pt", deep)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(deep)
    header = {"x": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    for data_file, weights in {
        "a.arrow": "a.pt",
        "a.npy": "a.safetensors",
        "a.parquet": "dcp",
    }.items():
        said = refused(
            tmp_path, "run.toml", *TINY, f"training.dataset_path={data_file}",
            f"checkpoint.initial_load_path={weights}",
        )  # fmt: skip
        assert len(said) == 2, said
        assert any(data_file in line for line in said), said
        assert any(weights in line for line in said), said
