"""Rows of similar length share a batch, whoever reads it and whenever."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from overland.apps.data.origins import origins_of
from overland.checks import check_config
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.data.batch import load_batch
from overland.data.corpus import Corpus
from overland.data.lanes import IGNORED
from overland.data.plan import LENGTH_STEP, Plan
from overland.data.sampler import Sampler
from tests.data.corpora import Numbered, make_corpus, one_segment, rows_of

LONGEST, DOCUMENTS, ROWS = 300, 240, 8


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    source = Numbered(1, DOCUMENTS, longest=LONGEST)
    return {"numbers": make_corpus("numbers", source, tmp_path_factory.mktemp("grouping"))}


def plan_of(corpora: dict[str, Corpus], grouped: bool = True, windows: int = 60) -> Plan:
    plan = one_segment(
        corpora,
        dict.fromkeys(corpora, 1.0),
        global_batch_size=ROWS,
        seq_len=LONGEST,
        packing="trunc",
        group_by_length=grouped,
    )
    return Plan(plan.seed, windows, plan.mixture, plan.sources, plan.segments)


def documents_in(rows: Sampler, batch: int) -> list[int]:
    return [int(one) for origins in origins_of(rows, batch) for one in origins.number]


def test_every_document_comes_once_per_epoch(corpora: dict[str, Corpus]) -> None:
    rows = rows_of(plan_of(corpora), corpora)
    batches = range(DOCUMENTS // ROWS)
    times = Counter(one for batch in batches for one in documents_in(rows, batch))
    assert len(times) == DOCUMENTS
    assert set(times.values()) == {1}


@pytest.mark.parametrize(("windows", "least"), [(60, 0.7), (36, 0.73)])
def test_batches_are_cut_to_their_longest_row(
    corpora: dict[str, Corpus], windows: int, least: float
) -> None:
    """Also if windows do not end with a batch: a group begins in one and continues in the next."""
    grouped, plain = (rows_of(plan_of(corpora, one, windows), corpora) for one in (True, False))
    given = [0, 0]
    for batch in range(DOCUMENTS // ROWS):
        for place, rows in enumerate((grouped, plain)):
            one = load_batch(rows, batch)
            tokens, labels = one["tokens_BS"], one["labels_BS"]
            given[place] += tokens.numel()
            width = tokens.shape[1]
            assert width % LENGTH_STEP == 0 or width == LONGEST
            if place == 0:  # no batch could be narrower
                most = int((labels != IGNORED).sum(dim=1).max())
                assert most > width - LENGTH_STEP or width == LENGTH_STEP
    assert given[0] < least * given[1]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_ranks_see_the_rows_that_one_sees(corpora: dict[str, Corpus], parts: int) -> None:
    plan = plan_of(corpora)
    rows, fresh = rows_of(plan, corpora), rows_of(plan, corpora)
    for batch in (17, 3, 29, 61):  # in any order, as after a resume
        whole = load_batch(rows, batch)["tokens_BS"].numpy()
        shares = [load_batch(fresh, batch, part, parts)["tokens_BS"] for part in range(parts)]
        assert np.array_equal(np.concatenate([one.numpy() for one in shares]), whole)


def test_short_and_long_batches_are_mixed(corpora: dict[str, Corpus]) -> None:
    rows = rows_of(plan_of(corpora), corpora)
    widths = [load_batch(rows, batch)["tokens_BS"].shape[1] for batch in range(DOCUMENTS // ROWS)]
    assert widths not in (sorted(widths), sorted(widths, reverse=True))


def test_plans_without_it_are_written_as_before(corpora: dict[str, Corpus]) -> None:
    plain, grouped = plan_of(corpora, grouped=False), plan_of(corpora)
    assert "group_by_length" not in plain.to_json()["segments"][0]
    assert Plan.from_json(grouped.to_json()) == grouped


def test_mixtures_are_grouped_by_source(tmp_path: Path, corpora: dict[str, Corpus]) -> None:
    other = make_corpus("other", Numbered(1000, 60, longest=LONGEST), tmp_path)
    both = {**corpora, "other": other}
    rows = rows_of(plan_of(both), both)
    found = Counter(one for batch in range(12) for one in documents_in(rows, batch))
    assert sum(found.values()) == 12 * ROWS


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"packing": "best_fit"}}, 'packing = "best_fit" leaves no padding to save'),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "a pipeline takes sequences of one"),
        ({"parallelism": {"tensor_parallel_degree": 3}}, "cannot split into 3 parts"),
    ],
)
def test_what_cannot_be_grouped_is_refused(
    sections: dict[str, dict[str, object]], words: str
) -> None:
    data = {"packing": "trunc", "group_by_length": True, **sections.pop("data", {})}
    config = JobConfig.model_validate({"data": data, **sections})
    problems = check_config(Loaded(config, [], "run.toml"), None)
    assert any(words in str(problem) for problem in problems)
