"""Corpora and runs made by an earlier version can still be read, resumed and proven."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from overland.apps.data.build import build
from overland.apps.ledger import read_ledger
from overland.apps.proofs.data import prove_data
from overland.apps.proofs.pool import RankPool
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.data.layout import lay_out
from overland.data.plan import Plan
from overland.data.shard import open_shard
from overland.data.sources import open_source
from overland.data.tokenizer import Tokenizer
from overland.world import World
from tests.jobs import run_job

FIXTURE = Path(__file__).parents[1] / "fixtures" / "token_run"


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The run and its data, in another place."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "moved"))


def losses(world: World, config: JobConfig) -> list[float]:
    return run_job(world, config).losses


def config_of(folder: Path, *changes: str) -> JobConfig:
    ids = next((folder / "corpora").glob("ids*"))
    places = (
        f"job.dump_folder={folder / 'run'}",
        f"data.folder={folder / 'corpora'}",
        f"data.sources.text.path={folder / 'text.jsonl'}",
        f"data.sources.ids.path={ids}",
    )
    return load_config(str(folder / "run" / "config.toml"), [*places, *changes], env={}).config


@pytest.mark.parametrize(("before", "today"), [("tokens", "sequences"), ("rows", "documents")])
def test_a_run_folder_has_the_former_names_of_mixtures(
    moved: Path, before: str, today: str
) -> None:
    """Its config.toml is read with a note. Its plan keeps them: its fingerprint is made of them."""
    file, stored = moved / "run" / "config.toml", moved / "run" / "data" / "plan.json"
    for path, quoted in ((file, 'mixture = "tokens"'), (stored, '"mixture": "tokens"')):
        text = path.read_text()
        assert quoted in text
        path.write_text(text.replace(quoted, quoted.replace("tokens", before)))
    loaded = load_config(str(moved / "run"), env={})
    assert loaded.config.data.mixture == today
    (note,) = (one for one in loaded.notes if "mixture" in one)
    assert note.endswith(f'config.toml:133: data.mixture = "{before}" is now "{today}"')
    plan = Plan.from_json(json.loads(stored.read_text())["plan"])
    assert plan.mixture == today
    assert plan.to_json()["mixture"] == before


def test_a_run_of_before_resumes_with_the_same_rows(ranks: RankPool, moved: Path) -> None:
    (found,) = ranks.run(1, losses, config_of(moved, "training.steps=6"))
    ours, theirs = (
        read_ledger(path / "ledger.bin").fed for path in (moved / "run/data", moved / "expected")
    )
    assert list(ours) == list(theirs) == [1, 2, 3, 4, 5, 6]
    for step, expected in theirs.items():
        assert ours[step].batch == expected.batch
        np.testing.assert_array_equal(ours[step].digests, expected.digests)
    records = map(json.loads, (moved / "expected" / "metrics.jsonl").read_text().splitlines())
    expected_losses = [one["loss"] for one in records if "loss" in one and one["step"] > 4]
    np.testing.assert_allclose(found, expected_losses, rtol=1e-5)
    assert prove_data(moved / "run").holds


def test_a_run_of_before_is_proven_where_it_was_moved_to(
    moved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(moved)
    verdict = prove_data(Path("run"))
    assert verdict.holds
    assert verdict.rows == 16
    assert [count.planned for count in verdict.sources.values()] == [239, 71]


@pytest.mark.parametrize("name", ["ids.jsonl", "text"])
def test_a_corpus_is_made_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(FIXTURE)
    (before,) = Path("corpora").glob(f"{name}-*")
    source = open_source("ids.jsonl" if name == "ids.jsonl" else "text.jsonl")
    tokenizer = Tokenizer(Path("run/tokenizer")) if name == "text" else None
    shard_documents = 2 if name == "text" else 4096
    folder = lay_out(name, source, tokenizer, tmp_path, shard_documents=shard_documents)
    assert folder.name == before.name
    build(folder, source, tokenizer, processes=1)
    assert (folder / "lines.npy").read_bytes() == (before / "lines.npy").read_bytes()
    ours, theirs = (json.loads((one / "corpus.json").read_text()) for one in (folder, before))
    assert {key: ours[key] for key in theirs} == theirs
    ours, theirs = (open_shard(one / "shards/0000/0000000.shard") for one in (folder, before))
    assert ours.offsets.tolist() == theirs.offsets.tolist()
    assert ours.tokens.tobytes() == theirs.tokens.tobytes()
