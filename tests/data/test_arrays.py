"""Samples that are arrays by name: the same order, mixture, ranks, resume and proofs as tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overland.apps.data.build import build
from overland.apps.data.loader import build_train_loader
from overland.apps.data.summary import summarize
from overland.apps.proofs.data import prove_data
from overland.config.schema import JobConfig
from overland.config.write import write_config
from overland.data import registry
from overland.data.arrays import Arrays, Unfit
from overland.data.batch import Batch, load_batch
from overland.data.corpora import Preparer
from overland.data.layout import lay_out
from overland.data.prepare import Dataset, training_data, validation_data
from overland.data.registry import register_source
from overland.data.shard import open_shard
from overland.data.sources import open_source
from overland.data.sources.source import as_source
from overland.errors import DataError
from overland.training.ledger import Ledger
from overland.training.saving import digests

ROWS = 8


class Pictures:
    """Numbered pictures: every pixel of picture i is i, and so is its label."""

    kind = "arrays"
    fields = {"pixels": ("float32", (3, 4, 5)), "label": ("int64", ()), "is_odd": ("bool", (1,))}

    def __init__(self, first: int = 0, count: int = 53, per_chunk: int = 4) -> None:
        self.numbers, self.per_chunk = range(first, first + count), per_chunk

    def chunks(self) -> list[str]:
        return [str(place) for place in range(0, len(self.numbers), self.per_chunk)]

    def read(self, chunk: str) -> Iterator[dict[str, Any]]:
        for i in self.numbers[int(chunk) : int(chunk) + self.per_chunk]:
            yield {
                "pixels": np.full((3, 4, 5), i, np.float32),
                "label": np.int64(i),
                "is_odd": np.array([i % 2 == 1]),
            }


class Uneven(Pictures):
    """One of its pictures has another size."""

    def read(self, chunk: str) -> Iterator[dict[str, Any]]:
        for one in super().read(chunk):
            yield {**one, "pixels": one["pixels"][:, :3]} if one["label"] == 9 else one


def register() -> None:
    register_source("pictures", Pictures)
    register_source("paintings", lambda: Pictures(1000, 31))
    register_source("uneven_pictures", Uneven)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: others list the sources that there are."""
    monkeypatch.setattr(registry, "_sources", dict(registry._sources))
    register()


def job(folder: Path, **data: Any) -> JobConfig:
    sources = data.pop("sources", {"pictures": 1.0})
    return JobConfig.model_validate(
        {
            "job": {"dump_folder": str(folder / "run")},
            "training": {"global_batch_size": ROWS},
            "data": {
                "folder": str(folder / "data"),
                "window_documents": 20,
                "tokenise_processes": 0,
                "sources": {name: {"weight": weight} for name, weight in sources.items()},
                **data,
            },
        }
    )


def open_data(config: JobConfig) -> Dataset:
    return training_data(config, ROWS, None, Preparer())


def samples(dataset: Dataset, batches: range) -> Batch:
    parts = [load_batch(dataset.rows, batch) for batch in batches]
    return Batch({name: torch.cat([part[name] for part in parts]) for name in parts[0].fields})


def test_every_sample_comes_once_per_epoch_as_it_was_given(tmp_path: Path) -> None:
    found = samples(open_data(job(tmp_path)), range(53))  # 8 epochs
    assert found["pixels"].dtype == torch.float32
    assert found["pixels"].shape == (53 * ROWS, 3, 4, 5)
    labels = found["label"]
    assert (found["pixels"] == labels[:, None, None, None]).all()
    assert torch.equal(found["is_odd"][:, 0], labels % 2 == 1)
    orders = labels.view(8, 53)
    for epoch, order in enumerate(orders):
        assert sorted(order.tolist()) == list(range(53))
        assert (found["epoch_B"].view(8, 53)[epoch] == epoch).all()
    assert not torch.equal(orders[0], orders[1])
    numbers = dict(zip(found["sample_B"].tolist(), labels.tolist(), strict=True))
    assert len(numbers) == 53  # a sample keeps its number from epoch to epoch


def test_a_mixture_by_weight_keeps_samples_of_sources_apart(tmp_path: Path) -> None:
    weights = {"pictures": 3.0, "paintings": 1.0}
    for mixture in ("sequences", "documents"):
        config = job(tmp_path, sources=weights, mixture=mixture)
        found = samples(open_data(config), range(20))
        is_painting = found["label"] >= 1000
        assert is_painting.sum() == 20 * ROWS // 4
        assert torch.equal(found["sample_B"] >> 56, is_painting.long())
        times = Counter(found["label"].tolist())
        assert max(times.values()) <= 3


def session(config: JobConfig, ledger: Ledger, steps: range, ranks: int, saved: Any) -> Any:
    """Feeds some steps, as ranks of a run would; returns the plan as a checkpoint has it."""
    dataset = open_data(config)
    if saved is not None:
        dataset = dataset.continued(saved, steps.start)
    ledger.mark(steps.start, steps.start)
    for step in steps:
        shares = [load_batch(dataset.rows, step, part, ranks) for part in range(ranks)]
        fed = torch.cat([digests(share) for share in shares])
        ledger.add(step + 1, step, fed[None].numpy())
    dataset.close()
    return dataset.plan.to_json()


@pytest.mark.parametrize(
    "mixture", ["documents", pytest.param("sequences", marks=pytest.mark.long)]
)
def test_killed_sessions_on_other_ranks_feed_what_an_unbroken_run_does(
    tmp_path: Path, mixture: str
) -> None:
    config = job(tmp_path, sources={"pictures": 2.0, "paintings": 1.0}, mixture=mixture)
    run = tmp_path / "run"
    plan = None
    for steps, ranks in ((range(5), 1), (range(3, 9), 4), (range(8, 13), 2)):
        plan = session(config, Ledger(run / "data" / "ledger.bin"), steps, ranks, plan)
    write_config(config, run / "config.toml", full=True)
    (run / "data" / "plan.json").write_text(json.dumps({"plan": plan, "corpora": {}}))
    verdict = prove_data(run)
    assert verdict.holds
    assert (verdict.rows, verdict.unit) == (13 * ROWS, "samples")
    assert sum(count.planned for count in verdict.sources.values()) == 13 * ROWS
    assert "samples;" in "\n".join(verdict.page())

    changed = open_data(job(tmp_path, sources={"pictures": 1.0, "paintings": 1.0}, mixture=mixture))
    changed = changed.continued(plan, 13)
    assert len(changed.plan.segments) == 2
    again = samples(changed, range(30))
    assert (again["pixels"][:, 0, 0, 0] == again["label"]).all()
    times = Counter(again["sample_B"].tolist())
    for sample, epoch in zip(again["sample_B"].tolist(), again["epoch_B"].tolist(), strict=True):
        assert 0 <= epoch < times[sample]  # each time in an epoch of its own


def test_held_out_samples_are_validated_on_and_never_trained_on(tmp_path: Path) -> None:
    config = job(tmp_path, holdout=0.3)
    config.validation.enable = True
    (held_out,) = validation_data(config, 4, None, Preparer())
    validated = samples(held_out, range(held_out.rows.num_batches()))
    kept = set(validated["label"][validated["epoch_B"] == 0].tolist())
    trained = set(samples(open_data(config), range(10))["label"].tolist())
    assert len(trained) + len(kept) == 53
    assert not trained & kept


def test_a_record_that_is_not_what_was_declared_is_a_bad_document(tmp_path: Path) -> None:
    message = (
        r"8: document 1 has pixels as float32 3 × 3 × 5, but float32 3 × 4 × 5 was declared; "
        r'data\.bad_documents = "skip" skips it'
    )
    with pytest.raises(DataError, match=message):
        samples(open_data(job(tmp_path, sources={"uneven_pictures": 1.0})), range(10))
    skipping = open_data(job(tmp_path, sources={"uneven_pictures": 1.0}, bad_documents="skip"))
    assert 9 not in samples(skipping, range(14))["label"]
    assert skipping.num_skipped == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (None, "expected fields such as"),
        ({}, "declares no fields"),
        ({"pixels": "float32"}, "expected fields such as"),
        ({"pixels": ("float33", (3,))}, "expected fields such as"),
        ({"pixels": ("object", (3,))}, "expected booleans, integers or floats"),
        ({"pixels": ("float32", (0, 3))}, "a shape without zeros"),
        ({"pixels": ("longdouble", (3,))}, "floats of at most 64 bits"),
        ({"two words": ("float32", ())}, "cannot be named 'two words'"),
        ({"sample_B": ("int64", ())}, "cannot be named 'sample_B'"),
        ({"weight_B": ("int64", ())}, "weight_B is the weight of a row"),
    ],
)
def test_fields_that_cannot_be_are_refused_in_a_sentence(fields: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Arrays.declared("pictures", fields)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {"pixels": [[1.0], [2.0, 3.0]], "weight_B": 1},
            "has pixels as lists of different lengths",
        ),
        ({"pixels": np.zeros(2, np.float32), "weight_B": np.float32(-1)}, "has -1 in weight_B"),
        ({"pixels": np.zeros(2, np.float32), "weight_B": np.float32("nan")}, "has nan in weight_B"),
    ],
)
def test_a_record_that_means_nothing_is_a_bad_document(document: Any, words: str) -> None:
    arrays = Arrays.declared("a", {"pixels": ("float32", (2,)), "weight_B": ("float32", ())})
    with pytest.raises(Unfit, match=words):
        arrays.encode(document)


def test_a_source_that_lists_no_names_or_reads_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path)
    monkeypatch.setattr(Pictures, "read", lambda self, chunk: None)
    for words in (
        r"read\(.*\) of Pictures returned NoneType",
        r"chunks\(\) of Pictures returned 0",
    ):
        with pytest.raises(DataError, match=words):
            samples(open_data(config), range(1))
        monkeypatch.setattr(Pictures, "chunks", lambda self: [0])


def test_sources_that_hold_different_things_are_not_mixed(tmp_path: Path) -> None:
    config = job(tmp_path, sources={"pictures": 1.0, "random": 1.0})
    words = r"pictures has pixels \(float32 3 × 4 × 5\), .*, random has tokens: sources that are"
    with pytest.raises(DataError, match=words):
        open_data(config)


def test_a_built_corpus_of_arrays_reads_as_its_source_does(tmp_path: Path) -> None:
    source = as_source(Pictures())
    folder = lay_out("pictures", source, None, tmp_path, shard_documents=10)
    built = build(folder, source, None, processes=1)
    assert built.counted.num_documents == 53
    again = open_source(folder)
    for chunk in again.chunks():
        open_shard(folder / chunk).verify()
    documents = [one for chunk in again.chunks() for one in again.read(chunk)]
    given = [one for chunk in source.chunks() for one in source.read(chunk)]
    for ours, theirs in zip(documents, given, strict=True):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert ours[name].dtype == values.dtype
            np.testing.assert_array_equal(ours[name], values)
    with pytest.raises(DataError, match="contains arrays, but this loader reads tokens"):
        build_train_loader(folder, tokenizer_name=None, strategy="pack", seq_len=8, micro_blocks=1)
    assert summarize(again).total == 53 * (60 * 4 + 8 + 1)
