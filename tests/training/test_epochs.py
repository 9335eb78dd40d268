"""A run whose length is set in epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overland.apps.check.rehearsal import known_steps
from overland.apps.ledger import read_ledger
from overland.apps.proofs.data import prove_data
from overland.apps.proofs.pool import RankPool
from overland.apps.watch.status import Watch
from overland.checks import check_config
from overland.config.load import load_config
from overland.config.schema import JobConfig, LRScheduler
from overland.data.corpora import Preparer
from overland.data.prepare import training_data
from overland.errors import DataError
from overland.run_folder import RunFolder
from overland.training.build import with_steps
from overland.world import World
from tests.data.corpora import Numbered, make_corpus
from tests.jobs import run_job, tiny_job

DOCUMENTS, ROWS = 27, 8  # 27 rows by `trunc`: three batches and three rows


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    corpus = make_corpus("numbers", Numbered(1, DOCUMENTS), tmp_path / "corpora", built=True)
    return corpus.folder


def job(folder: Path, corpus: Path, ranks: int = 1, **training: object) -> JobConfig:
    return tiny_job(
        folder / "run",
        model={"overrides": {**TINY, "vocab_size": 50_000}},
        training={
            "dataset_path": str(corpus),
            "steps": 10_000,
            "global_batch_size": ROWS,
            "local_batch_size": ROWS // ranks,
            **training,
        },
        data={"packing": "trunc"},
        checkpoint={"enable": True, "interval": 100},
    )


TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def train(world: World, config: JobConfig) -> list[float]:
    return run_job(world, config).losses


def test_sessions_on_other_ranks_end_after_the_same_step(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()  # ends the first session after a step
    assert len(ranks.run(1, train, job(tmp_path, corpus, epochs=1.0))[0]) == 1
    assert len(ranks.run(2, train, job(tmp_path, corpus, 2, epochs=1.0))[0]) == 3
    folder = RunFolder(job(tmp_path, corpus))
    assert folder.steps_done() == 4
    assert folder.kept_epochs() == 1.0
    assert check_config(load_config(str(folder.config), (), {}), 2) == []

    assert len(ranks.run(1, train, job(tmp_path, corpus, epochs=2.0))[0]) == 4
    verdict = prove_data(tmp_path / "run")
    assert verdict.holds
    (count,) = verdict.sources.values()
    assert count.documents == 2 * DOCUMENTS
    assert len(read_ledger(folder.ledger).fed) == 4 + 4


def test_the_loss_of_a_short_batch_is_that_of_its_rows(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    """Whoever holds the rows that count nothing: the mean is over the others."""
    runs = [(1, tmp_path / "one"), (4, tmp_path / "four")]
    one, four = (
        ranks.run(count, train, job(folder, corpus, count, epochs=1.0))[0] for count, folder in runs
    )
    assert one == pytest.approx(four, rel=1e-12)


def test_a_run_that_ends_in_its_warmup_says_so(tmp_path: Path, corpus: Path) -> None:
    config = job(tmp_path, corpus, epochs=1.0)
    said: list[str] = []
    dataset = training_data(config, ROWS, None, Preparer())
    for schedule in ({"warmup_steps": 200}, {"warmup_steps": 4}, {"warmup_ratio": 0.5}):
        asked = config.model_copy(update={"lr_scheduler": LRScheduler.model_validate(schedule)})
        with_steps(asked, dataset, Preparer(report=said.append))
    dataset.close()
    (warned,) = (one for one in said if "warm-up" in one)
    assert warned.startswith("the run ends during its warm-up of 200 steps, below the peak")


def test_a_batch_that_is_not_filled_can_be_dropped(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    config = job(tmp_path, corpus, epochs=1.0, last_batch="drop")
    assert known_steps(config, ROWS) == 3
    few = job(tmp_path, corpus, epochs=0.1, last_batch="drop")
    with pytest.raises(DataError, match=r"of numbers-.* does not fill one batch of 8 rows"):
        known_steps(few, ROWS)
    assert known_steps(job(tmp_path, corpus, epochs=2.5), ROWS) == 9  # 68 rows
    assert len(ranks.run(1, train, config)[0]) == 3


def test_text_is_tokenised_and_counted_before_training_starts(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(f"text {i} " + "words again " * (i % 9))
    config = tiny_job(
        tmp_path / "run",
        training={"dataset_path": str(tmp_path / "texts"), "epochs": 1.5, "local_batch_size": 4},
        data={"folder": str(tmp_path / "data"), "vocab_size": 400, "window_documents": 16},
    )
    config.training.global_batch_size = ROWS
    assert known_steps(config, ROWS) is None
    losses = ranks.run(2, train, config)[0]
    verdict = prove_data(tmp_path / "run")
    assert verdict.holds
    assert (
        verdict.last_step
        == len(losses)
        == json.loads((tmp_path / "run" / "data" / "plan.json").read_text())["steps"]
    )
    (count,) = verdict.sources.values()
    assert 40 < count.documents < 80
    assert Watch(tmp_path / "run").look().steps == len(losses)
