"""`overland eval` of a run: on its validation data, saved next to its checkpoint, shown by
`watch`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.processes import TINY, overland, read_metrics
from tests.evaluation.texts import write_text_model

TEXTS = [f"def add_{n}(a, b):\n    return a + b + {n}\n" * (1 + n % 7) for n in range(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps documents out of training, and validates on another set too."""
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"text": one}) + "\n" for one in TEXTS]
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "notes.jsonl").write_text("".join(line.replace("add", "sum") for line in lines[:20]))
    settings = [
        "job.dump_folder=run", "data.folder=data", "training.dataset_path=texts.jsonl",
        "training.steps=3", "data.holdout=0.1", "validation.enable=true", "validation.steps=1",
        "validation.sets.notes.path=notes.jsonl", "validation.sets.notes.freq=2",
        "checkpoint.interval=2",
    ]  # fmt: skip
    tiny = [word for word in TINY if not word.startswith("data.folder")]
    overland("train", "llama3_debug", *tiny, *settings, cwd=folder, NGPU="1")
    return folder / "run"


def test_a_run_is_evaluated_on_what_it_validates_on(run: Path) -> None:
    held = [one for one in read_metrics(run / "metrics.jsonl") if "validation/notes/loss" in one]
    assert [one["step"] for one in held] == [2, 3]
    before = {one: one.stat().st_mtime_ns for one in (run / "checkpoint").rglob("*")}

    one = json.loads(overland("eval", "run", "--json", cwd=run.parent).stdout)
    assert [found["name"] for found in one] == ["texts.jsonl", "notes"]
    assert 10 < one[0]["documents"] < 60
    assert one[1]["documents"] == 20
    assert all(found["step"] == 3 for found in one)
    two = json.loads(
        overland("eval", "run", "--json", "--again", "--ranks", "2", cwd=run.parent).stdout
    )
    assert [found["summed_loss"] for found in two] == [found["summed_loss"] for found in one]
    earlier = overland("eval", "run/checkpoint/step_2", "--data", "notes.jsonl", cwd=run.parent)
    assert "notes.jsonl: each document separately, windows of 32 tokens every 16" in earlier.stdout

    kept = sorted((run / "evaluations").glob("*/*"))
    assert [file.parent.name for file in kept] == ["step_2", "step_3", "step_3"]
    assert before == {one: one.stat().st_mtime_ns for one in (run / "checkpoint").rglob("*")}
    seen = json.loads(overland("watch", "run", "--json", cwd=run.parent).stdout)
    shown = {found["name"]: found["step"] for found in seen["evaluations"]}
    assert shown == {"texts.jsonl": 3, "notes": 3, "notes.jsonl": 2}
    frame = overland("watch", "run", "--once", cwd=run.parent).stdout
    assert f"notes perplexity {one[1]['perplexity']:,.2f} at step 3" in frame


def test_a_run_that_validates_on_nothing_asks_for_data(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    text = (copy / "config.toml").read_text()
    text = text.replace("holdout = 0.1", "holdout = 0").partition("[validation")[0]
    (copy / "config.toml").write_text(text)
    said = overland("eval", "copy", cwd=tmp_path, code=2).stderr
    assert "has no validation data: give documents with --data" in said


def test_adapters_on_a_base_of_4_bits(run: Path, tmp_path: Path) -> None:
    """With all types left to the machine, as recipes leave them."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16}
    write_text_model(tmp_path / "base", **wide)
    texts = run.parent / "notes.jsonl"
    overland(
        "train", "llama3_debug", "model.from=base", "job.dump_folder=run", "data.folder=data",
        f"training.dataset_path={texts}", "training.seq_len=32", "training.local_batch_size=2",
        "training.steps=1", "lora.rank=4", "lora.base=nf4", cwd=tmp_path, NGPU="1",
    )  # fmt: skip
    asked = ("eval", "run", "--data", f"notes={texts}", "--json", "--output")
    (alone,) = json.loads(overland(*asked, "alone", cwd=tmp_path).stdout)
    words = (*asked, "sharded", "--ranks", "2", "--shard")
    (sharded,) = json.loads(overland(*words, cwd=tmp_path).stdout)
    assert sharded["summed_loss"] == alone["summed_loss"]
    words = (*asked, "split", "--ranks", "2", "--tensor-parallel", "2")
    assert "whose 4-bit weights share scales" in overland(*words, cwd=tmp_path, code=2).stderr
    assert overland("generate", "run", "def add", "--num-tokens", "4", cwd=tmp_path).stdout
