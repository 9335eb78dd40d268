"""The verb: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.cli.convert import size_in_bytes
from overland.cli.main import app
from overland.errors import CheckpointError

from .samples import fixture, saved


def overland(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_a_conversion_says_what_it_did(tmp_path: Path) -> None:
    folder, _ = fixture("meta_llama3")
    code, said, _ = overland(saved(folder), tmp_path / "hf", "--to", "hf", "--dtype", "float32")
    assert code == 0
    assert "21 tensors" in said
    assert "meta to hf" in said
    assert "verified: 21 tensors" in said
    assert "peak memory" in said
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "float32"


def test_json_for_scripts(tmp_path: Path) -> None:
    folder, _ = fixture("deepspeed_z3_tied")
    code, said, _ = overland(saved(folder), tmp_path / "dcp", "--to", "dcp", "--json")
    summary = json.loads(said)
    assert code == 0
    assert summary["source_format"] == "deepspeed"
    assert summary["num_tensors"] == summary["verified"] == 62
    assert summary["peak_memory"] < summary["allowed_memory"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--to", "hff"], "--to hff is unknown; did you mean 'hf'?"),
        (["--to", "hf", "--dtype", "float"], "--dtype float is unknown"),
        (["--to", "hf", "--verify", "hashes"], "did you mean 'hash'?"),
        (["--to", "dcp", "--names", "titan"], "expected hf or torchtitan"),
        (["--to", "hf", "--max-shard-size", "big"], "write e.g. 500MB or 5GB"),
        (["--to", "hf", "--exclude", "lm_hed.weight"], "did you mean 'lm_head.weight'?"),
        (["--to", "hf", "--config", "nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    folder, _ = fixture("meta_llama3")
    code, _, error = overland(saved(folder), tmp_path / "out", *arguments)
    assert code == 2
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    code, _, error = overland(tmp_path / "notes", tmp_path / "out", "--to", "hf")
    assert code == 2
    assert "not a checkpoint in a known format" in error
    code, _, error = overland(tmp_path / "gone", tmp_path / "out", "--to", "hf")
    assert code == 2
    assert "does not exist" in error


def test_without_a_config_the_way_out_is_named(tmp_path: Path) -> None:
    folder, _ = fixture("deepspeed_z3_tied")
    code, _, error = overland(saved(folder), tmp_path / "out", "--to", "hf")
    assert code == 2
    assert "--config" in error


def test_sizes() -> None:
    assert size_in_bytes("5GB") == 5 * 10**9
    assert size_in_bytes("1.5 MiB") == 3 * 2**19
    assert size_in_bytes("700") == 700
    for text in ("0", "", "GB", "-5GB", "5 apples"):
        with pytest.raises(CheckpointError):
            size_in_bytes(text)
