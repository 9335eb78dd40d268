"""Epochs as a unit: every document is read that many times, and what fills up the last batch does
not count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from overland.apps.data.origins import origins_of
from overland.data.batch import load_batch
from overland.data.corpus import Corpus
from overland.data.lanes import IGNORED
from overland.data.plan import PlannedSource
from overland.data.sampler import Sampler
from tests.data.corpora import Numbered, make_corpus, one_segment, rows_of

COUNT = 97


@pytest.fixture(scope="module", params=[False, True], ids=["streamed", "built"])
def corpora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("epochs")
    return {"a": make_corpus("a", Numbered(1000, COUNT), root, built=request.param)}


def times_begun(rows: Sampler, batches: range) -> Counter[int]:
    begun: Counter[int] = Counter()
    for batch in batches:
        for part in origins_of(rows, batch):
            begun.update(part.number[part.start == 0].tolist())
    return begun


@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc", "best_fit"])
def test_an_epoch_ends_inside_its_last_batch(corpora: dict[str, Corpus], packing: str) -> None:
    how = {"packing": packing, "global_batch_size": 7}
    rows = rows_of(one_segment(corpora, {"a": 1.0}, epochs=2.0, **how), corpora)
    batches = rows.num_batches(2.0)
    assert set(times_begun(rows, range(batches)).values()) == {2}
    parts = [origins_of(rows, batches - 1, part, 7) for part in range(7)]
    shared = sorted(one for part in parts for origins in part for one in origins.number.tolist())
    whole = [one for origins in origins_of(rows, batches - 1) for one in origins.number.tolist()]
    assert shared == sorted(whole), "no rank reports rows that only fill the batch"
    total = 0
    for number in range(batches):
        shares = [load_batch(rows, number, part, 7) for part in range(7)]
        weights = [float(share["weight_B"]) if "weight_B" in share else 1.0 for share in shares]
        assert sorted(weights, reverse=True) == weights
        assert len({tuple(share.fields) for share in shares}) == 1
        for share, weight in zip(shares, weights, strict=True):
            assert (share["epoch_B"] < 2).all()
            if not weight:
                assert (share["labels_BS"] == IGNORED).all()
        total += int(sum(weights))
        assert (sum(weights) == 7) == (number < batches - 1 or not total % 7)
    begun = [rows.epoch(batch) for batch in range(batches)]
    assert begun == sorted(set(begun)), "what the status line says counts up with each batch"
    assert 2 * 5 / total < (begun[1] or 0) < 2 * 9 / total
    endless = rows_of(one_segment(corpora, {"a": 1.0}, **how), corpora)
    assert endless.num_batches(2.0) == batches
    assert endless.num_batches(2.0, drop=True) == total // 7
    assert endless.rows_left(2.0, at_most=3) == 3


def test_parts_of_epochs_are_rounded_up_to_rows(corpora: dict[str, Corpus]) -> None:
    rows = rows_of(one_segment(corpora, {"a": 1.0}, packing="trunc", global_batch_size=1), corpora)
    found = {epochs: rows.num_batches(epochs) for epochs in (0.01, 0.5, 1.0, 2.25)}
    assert found == {0.01: 1, 0.5: 49, 1.0: COUNT, 2.25: 2 * COUNT + 25}


def test_a_source_may_be_read_no_more_often_than_that(corpora: dict[str, Corpus]) -> None:
    plan = one_segment(corpora, {"a": 1.0}, epochs=1.0, packing="trunc", global_batch_size=10)
    once = {"a": PlannedSource(corpora["a"].fingerprint, max_epochs=1)}
    rows = rows_of(replace(plan, sources=once), corpora)
    last = load_batch(rows, rows.num_batches(1.0) - 1)
    assert last["weight_B"].tolist() == [1] * 7 + [0] * 3
    assert (last["sample_B"][7:] == last["sample_B"][6]).all()  # the last row once more


@pytest.mark.parametrize("packing", ["pack", "trunc"])
def test_more_epochs_go_on_behind_the_last_row_that_counted(
    corpora: dict[str, Corpus], packing: str, tmp_path: Path
) -> None:
    how = {"packing": packing, "global_batch_size": 10}
    first = one_segment(corpora, {"a": 1.0}, epochs=1.0, **how)
    batches = rows_of(first, corpora, tmp_path).num_batches(1.0)
    plan = first.continued(one_segment(corpora, {"a": 1.0}, epochs=3.0, **how), batches)
    assert len(plan.segments) == 2
    assert type(plan).from_json(plan.to_json()) == plan
    rows = rows_of(plan, corpora)
    more = rows.num_batches(3.0)
    assert set(times_begun(rows, range(more)).values()) == {3}
    assert rows.num_rows(batches - 1) < 10
    assert rows.num_rows(batches) == 10


def test_plans_without_epochs_keep_their_fingerprint(corpora: dict[str, Corpus]) -> None:
    plan = one_segment(corpora, {"a": 1.0})
    assert "epochs" not in plan.to_json()["segments"][0]
    assert plan.fingerprint != one_segment(corpora, {"a": 1.0}, epochs=1.0).fingerprint
