import json
from pathlib import Path

import pytest

from tests.cli.processes import overland


def test_prove_layout_prints_one_verdict_per_layout_and_keeps_a_table(tmp_path: Path) -> None:
    words = ["prove", "layout", "--layouts", "shard2 tp2", "--steps", "2", "--table", "table.md"]
    lines = overland(*words, "--json", cwd=tmp_path).stdout.splitlines()
    verdicts = [json.loads(line) for line in lines]
    assert [(v["layout"], v["ranks"], v["equal"]) for v in verdicts] == [
        ("shard2", 2, True),
        ("tp2", 2, True),
    ]
    assert max(v["loss_difference"] for v in verdicts) < 1e-12
    assert (tmp_path / "table.md").read_text().count("| equal |") == 2
    again = overland(*words, cwd=tmp_path)  # what the table holds is not run again
    assert "All 2 are in table.md already." in again.stdout
    words[words.index("2")] = "3"  # another proof
    refused = overland(*words, cwd=tmp_path, code=2)
    assert "was written with other settings" in refused.stderr


@pytest.mark.long
def test_prove_layout_takes_the_kind_of_model_from_a_config(tmp_path: Path) -> None:
    words = ["prove", "layout", "qwen3_0.6b", "--layouts", "tp2", "--steps", "1"]
    assert "1 of 1 layouts equal one process" in overland(*words, cwd=tmp_path).stdout


def test_no_layout_at_all_is_no_success(tmp_path: Path) -> None:
    for verb in ("layout", "resume"):
        done = overland("prove", verb, "--layouts", " ", cwd=tmp_path, code=2)
        assert "expected names of layouts" in done.stderr


def test_a_layout_that_is_none_ends_with_2(tmp_path: Path) -> None:
    done = overland("prove", "layout", "--layouts", "zz2", cwd=tmp_path, code=2)
    assert done.stderr.startswith("command line: --layouts: zz2: expected degrees such as pp2xtp2")
