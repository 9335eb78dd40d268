"""The order of the data: everything once per epoch, the same whatever the ranks and sessions."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overland.apps.data.made_rows import RandomBlocks
from overland.apps.data.origins import origins_of
from overland.data.blocks import BlockStream
from overland.data.corpus import Corpus
from overland.data.plan import MixedBy, Plan, PlannedSource, Segment
from overland.data.sampler import Sampler
from overland.data.windows import Reading
from overland.errors import DataError
from tests.data.corpora import Distinct, Numbered, make_corpus, one_segment, rows_of

SOURCES = {"a": Numbered(1000, 97), "b": Numbered(5000, 31), "c": Numbered(9000, 5, 200)}
WEIGHTS = {"a": 5.0, "b": 2.0, "c": 1.0}
PACKINGS = ["pack", "overflow", "trunc", "best_fit"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    root = tmp_path_factory.mktemp("built")
    return {name: make_corpus(name, one, root, built=True) for name, one in SOURCES.items()}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    root = tmp_path_factory.mktemp("streamed")
    return {name: make_corpus(name, one, root) for name, one in SOURCES.items()}


def documents_begun(rows: Sampler, batches: range) -> Iterator[tuple[int, int]]:
    """(source, document) in the order in which they begin."""
    for batch in batches:
        for part in origins_of(rows, batch):
            begun = part.start == 0
            yield from zip(part.source[begun].tolist(), part.number[begun].tolist(), strict=True)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mixture", ["sequences", "documents"])
def test_built_and_streamed_corpora_give_the_same_rows(
    built: dict[str, Corpus], streamed: dict[str, Corpus], packing: str, mixture: str
) -> None:
    plan = one_segment(built, WEIGHTS, mixture, packing=packing)
    assert plan == one_segment(streamed, WEIGHTS, mixture, packing=packing)
    one, two = rows_of(plan, built), rows_of(plan, streamed)
    for batch in range(60):
        a, b = one.read(batch), two.read(batch)
        assert (a.tokens == b.tokens).all()
        assert (a.num_tokens == b.num_tokens).all()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_epoch_holds_every_document_once_and_the_next_in_another_order(
    streamed: dict[str, Corpus], packing: str, name: str
) -> None:
    corpora = {name: streamed[name]}
    rows = rows_of(one_segment(corpora, {name: 1.0}, packing=packing, global_batch_size=1), corpora)
    lane = rows.lanes(0).lanes[0]
    assert not isinstance(lane, RandomBlocks)
    per_epoch = lane.windows.per_epoch
    ends = [lane.num_blocks(epoch * per_epoch) for epoch in range(4)]
    orders = [
        list(documents_begun(rows, range(first, last))) for first, last in itertools.pairwise(ends)
    ]
    for order in orders:
        assert len(order) == len(set(order)) == SOURCES[name].count
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("mixture", ["sequences", "documents"])
def test_each_row_has_the_number_and_epoch_of_its_sample(
    built: dict[str, Corpus], mixture: str
) -> None:
    plan = one_segment(built, WEIGHTS, mixture, packing="trunc")
    rows = rows_of(plan, built)
    read = [rows.read(batch) for batch in range(60)]
    samples = np.concatenate([one.sample for one in read])
    origins = [part for batch in range(60) for part in origins_of(rows, batch)]
    numbers = np.concatenate([(part.source << 56) + part.number for part in origins])
    assert sorted(samples.tolist()) == sorted(numbers.tolist())
    seen: Counter[int] = Counter()
    for one in read:  # the n-th time that a sample is read is in epoch n
        for sample, epoch in zip(one.sample.tolist(), one.epoch.tolist(), strict=True):
            assert epoch == seen[sample]
            seen[sample] += 1
    assert max(seen.values()) > 2


def pieces_of(rows: Sampler, batches: range) -> Counter[tuple[int, int, int]]:
    """How often each token of each document of each source was given."""
    fed: Counter[tuple[int, int, int]] = Counter()
    for batch in batches:
        for part in origins_of(rows, batch):
            for source, number, start, length in zip(
                part.source, part.number, part.start, part.length, strict=True
            ):
                places = range(int(start), int(start + length))
                fed.update((int(source), int(number), i) for i in places)
    return fed


@pytest.mark.parametrize("packing", ["pack", "overflow", "best_fit"])
def test_an_epoch_feeds_every_token_once(streamed: dict[str, Corpus], packing: str) -> None:
    corpora = {"a": streamed["a"]}
    rows = rows_of(one_segment(corpora, {"a": 1.0}, packing=packing, global_batch_size=1), corpora)
    lane = rows.lanes(0).lanes[0]
    assert not isinstance(lane, RandomBlocks)
    fed = pieces_of(rows, range(lane.num_blocks(lane.windows.per_epoch)))
    assert set(fed.values()) == {1}
    assert len(fed) == SOURCES["a"].lengths.sum()


@pytest.mark.parametrize("mixture", ["sequences", "documents"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 6, 12])
def test_ranks_share_a_batch_and_change_nothing(
    streamed: dict[str, Corpus], mixture: str, num_parts: int
) -> None:
    plan = one_segment(streamed, WEIGHTS, mixture, global_batch_size=12)
    whole = rows_of(plan, streamed)
    ranks = [rows_of(plan, streamed) for _ in range(num_parts)]
    for batch in (0, 1, 17, 5):  # a rank may also go back
        parts = [rank.read(batch, i, num_parts).tokens for i, rank in enumerate(ranks)]
        assert (np.concatenate(parts) == whole.read(batch).tokens).all()


@pytest.mark.parametrize("mixture", ["sequences", "documents"])
def test_mixture_counts_are_exact_at_every_step(streamed: dict[str, Corpus], mixture: str) -> None:
    plan = one_segment(streamed, WEIGHTS, mixture, packing="trunc", global_batch_size=3)
    rows = rows_of(plan, streamed)
    shares = np.array(list(WEIGHTS.values())) / 8
    had = np.zeros(3)
    for batch in range(80):
        for part in origins_of(rows, batch):
            np.add.at(had, part.source, 1)
        turns = 3 * (batch + 1)
        if mixture == "sequences":
            assert (np.abs(had - turns * shares) < 1).all()
    # By rows it is documents that are counted; within a window blocks are shuffled.
    assert (np.abs(had - had.sum() * shares) < (1 if mixture == "sequences" else 24)).all()


def test_a_mixture_by_rows_draws_documents_in_exact_shares(streamed: dict[str, Corpus]) -> None:
    plan = one_segment(streamed, WEIGHTS, "documents")
    lane = rows_of(plan, streamed).lanes(0).lanes[0]
    assert not isinstance(lane, RandomBlocks)
    drawn = np.zeros(3)
    for window in range(30):
        for number, source in enumerate(lane.windows.open(window).source.tolist()):
            drawn[source] += 1
            turns = window * 24 + number + 1
            assert (np.abs(drawn - turns * np.array([5, 2, 1]) / 8) < 1).all()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mixture", ["sequences", "documents"])
@pytest.mark.parametrize(
    "change",
    [{"seq_len": 24}, {"seq_len": 9}, {"weights": {"a": 1.0, "b": 2.0, "c": 0.0}},
     {"global_batch_size": 7}, {"packing": "best_fit", "seq_len": 40}],
    ids=["longer", "shorter", "weights", "batch", "packing"],
)  # fmt: skip
def test_a_new_segment_repeats_nothing_and_leaves_nothing_out(
    streamed: dict[str, Corpus], packing: str, mixture: str, change: dict[str, object]
) -> None:
    before = one_segment(streamed, WEIGHTS, mixture, packing=packing)
    wanted = replace(before, segments=(replace(before.segments[0], **change),))  # type: ignore[arg-type]
    plan = before.continued(wanted, 5).continued(wanted, 9)
    assert [one.first_batch for one in plan.segments] == [0, 5]
    rows, old = rows_of(plan, streamed), rows_of(before, streamed)
    for batch in range(5):
        assert (rows.read(batch).tokens == old.read(batch).tokens).all()
    fed = pieces_of(rows, range(60))
    for source, name in enumerate(SOURCES):
        times = Counter({key: count for key, count in fed.items() if key[0] == source})
        num_tokens = int(SOURCES[name].lengths.sum())
        if packing == "trunc" or plan.segments[1].packing != packing:  # what it leaves out
            times = Counter({key: count for key, count in times.items() if key[2] == 0})
            num_tokens = SOURCES[name].count
        # Epoch after epoch: nothing comes again before everything has come. (A window of a mixture
        # by rows may hold the end of one epoch and the beginning of the next, shuffled.)
        fewest = min(times.values()) if len(times) == num_tokens else 0
        assert max(times.values()) <= fewest + (1 if mixture == "sequences" else 2)


def test_segments_of_segments_go_on_from_the_rest_of_a_rest(streamed: dict[str, Corpus]) -> None:
    plan = one_segment(streamed, {"a": 1.0, "b": 0.0, "c": 0.0})
    for batch, seq_len in ((2, 8), (3, 32), (4, 5), (7, 16)):
        segment = replace(plan.segments[-1], seq_len=seq_len)
        plan = plan.continued(replace(plan, segments=(segment,)), batch)
    fed = pieces_of(rows_of(plan, streamed), range(14))
    assert set(fed.values()) == {1}
    assert len(fed) > 500


@pytest.fixture(scope="module")
def distinct(tmp_path_factory: pytest.TempPathFactory) -> tuple[Distinct, Corpus]:
    source = Distinct(0, 60, longest=90)
    return source, make_corpus("distinct", source, tmp_path_factory.mktemp("distinct"))


def predictions_in_an_epoch(plan: Plan, corpus: Corpus) -> Counter[int]:
    """How often each token was predicted from the one before it in its document."""
    rows = rows_of(plan, {"distinct": corpus})
    last = plan.segments[-1].first_batch
    lane = rows.lanes(last).lanes[0]
    assert isinstance(lane, BlockStream)
    lead = 1 if lane.rest else 0
    num_blocks = lane.num_blocks(lane.windows.per_epoch - lane.first + lead)
    predicted: Counter[int] = Counter()
    for batch in range(last + num_blocks - int(rows.lanes(last).read_before[0])):
        read = rows.read(batch)
        for tokens, count in zip(read.tokens, read.num_tokens, strict=True):
            pairs = itertools.pairwise(tokens[:count].tolist())
            predicted.update(b for a, b in pairs if b == a + 1)
    return predicted


CHANGES: dict[str, list[dict[str, object]]] = {
    "longer": [{"seq_len": 24}],
    "shorter": [{"seq_len": 9}],
    "tiny": [{"seq_len": 3}],
    "again and again": [{"seq_len": 8}, {"seq_len": 31}, {"seq_len": 5}],
    "packing": [{"packing": "best_fit", "seq_len": 40}],
    "there and back": [{"packing": "overflow"}, {"packing": "best_fit"}, {"packing": "pack"}],
}


@pytest.mark.parametrize("packing", ["pack", "overflow", "best_fit"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_change_in_a_window_loses_no_prediction(
    distinct: tuple[Distinct, Corpus], packing: str, changes: list[dict[str, object]]
) -> None:
    source, corpus = distinct
    plan = one_segment(
        {"distinct": corpus}, {"distinct": 1.0}, packing=packing, global_batch_size=1
    )
    for number, change in enumerate(changes, start=1):
        segment = replace(plan.segments[-1], **change)  # type: ignore[arg-type]
        plan = plan.continued(replace(plan, segments=(segment,)), 7 * number)
    predicted = predictions_in_an_epoch(plan, corpus)
    assert len(predicted) == source.lengths.sum() - source.count
    assert set(predicted.values()) == {1}


def test_a_plan_with_other_rules_is_refused(distinct: tuple[Distinct, Corpus]) -> None:
    data = one_segment({"distinct": distinct[1]}, {"distinct": 1.0}).to_json()
    del data["segments"][0]["rest_rules"]
    with pytest.raises(DataError, match="written by another version of Overland"):
        Plan.from_json(data)


def test_a_source_that_joins_later_changes_nothing_before(streamed: dict[str, Corpus]) -> None:
    for mixture in ("sequences", "documents"):
        two = {name: streamed[name] for name in ("a", "b")}
        before = one_segment(two, {"a": 2.0, "b": 1.0}, mixture)
        plan = before.continued(one_segment(streamed, WEIGHTS, mixture), 6)
        old, new = rows_of(before, two), rows_of(plan, streamed)
        for batch in range(6):
            assert (old.read(batch).tokens == new.read(batch).tokens).all()
        assert 2 in {source for source, _ in documents_begun(new, range(6, 30))}


def test_a_source_is_read_as_often_as_it_may_and_then_named(streamed: dict[str, Corpus]) -> None:
    plan = one_segment(streamed, WEIGHTS)
    limited = {**plan.sources, "c": replace(plan.sources["c"], max_epochs=2)}
    rows = rows_of(replace(plan, sources=limited), streamed)
    begun: Counter[int] = Counter()

    def read_all() -> None:
        for batch in itertools.count():
            found = documents_begun(rows, range(batch, batch + 1))
            begun.update(number for source, number in found if source == 2)

    with pytest.raises(DataError, match="c has been read 2 times, the limit set by its max_epochs"):
        read_all()
    assert len(begun) == 5
    assert set(begun.values()) == {2}


@pytest.mark.parametrize(
    ("mixture", "stored", "fingerprint"),
    [
        ("sequences", "tokens", "568314956c166aa8f6d2be5c3ce50fc5"),
        ("documents", "rows", "e0bd9c4137e76a0d710a16a3c549a81c"),
    ],
)
def test_a_plan_is_stored_and_marked_as_by_version_0_1(
    mixture: MixedBy, stored: str, fingerprint: str
) -> None:
    segment = Segment(0, 4, 8, {"a": 1.0})
    plan = Plan(0, 24, mixture, {"a": PlannedSource("f")}, (segment,))
    assert plan.fingerprint == fingerprint
    assert plan.to_json()["mixture"] == stored
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("what", ["seed", "window_documents", "mixture"])
def test_what_decides_the_whole_order_cannot_change(streamed: dict[str, Corpus], what: str) -> None:
    plan = one_segment(streamed, WEIGHTS)
    wanted = replace(
        plan, **{what: {"seed": 1, "window_documents": 7, "mixture": "documents"}[what]}
    )  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot change in the middle of a run"):
        plan.continued(wanted, 3)


def test_the_name_under_which_a_corpus_is_found_does_not_matter(
    streamed: dict[str, Corpus], tmp_path: Path
) -> None:
    other = make_corpus("another_name", SOURCES["a"], tmp_path)
    plan = one_segment({"a": streamed["a"]}, {"a": 1.0})
    renamed = replace(
        plan, sources={"a": replace(plan.sources["a"], fingerprint=other.fingerprint)}
    )
    one, two = rows_of(plan, {"a": streamed["a"]}), rows_of(renamed, {"a": other})
    for batch in range(10):
        a, b = one.lanes(0).lanes[0], two.lanes(0).lanes[0]
        assert isinstance(a, BlockStream)
        assert isinstance(b, BlockStream)
        assert a.windows.open(batch).number.tolist() == b.windows.open(batch).number.tolist()


def test_a_mixture_by_rows_ends_where_a_source_may_not_be_read_again(
    streamed: dict[str, Corpus],
) -> None:
    plan = one_segment(streamed, WEIGHTS, "documents", packing="trunc", global_batch_size=1)
    limited = {**plan.sources, "b": replace(plan.sources["b"], max_epochs=1)}
    rows = rows_of(replace(plan, sources=limited, window_documents=10_000), streamed)
    begun: Counter[tuple[int, int]] = Counter()

    def read_all() -> None:
        for batch in itertools.count():
            begun.update(documents_begun(rows, range(batch, batch + 1)))

    with pytest.raises(DataError, match="b has been read 1 time,"):
        read_all()
    counts = [count for (source, _), count in begun.items() if source == 1]
    assert counts == [1] * 31


def test_documents_that_trunc_has_not_reached_are_whole_again_after_it(
    streamed: dict[str, Corpus],
) -> None:
    plan = one_segment({"a": streamed["a"]}, {"a": 1.0}, packing="trunc", seq_len=8)
    segment = replace(plan.segments[0], packing="pack", seq_len=64)
    plan = plan.continued(replace(plan, segments=(segment,)), 1)
    rows = rows_of(plan, {"a": streamed["a"]})
    fed = pieces_of(rows, range(1, 4))
    assert max(place for _, _, place in fed) > 30


def test_changing_and_changing_back_at_once_changes_nothing(streamed: dict[str, Corpus]) -> None:
    plan = one_segment(streamed, WEIGHTS)
    other = replace(plan, segments=(replace(plan.segments[0], seq_len=8),))
    assert plan.continued(other, 5).continued(plan, 5) == plan


def test_a_plan_survives_json(streamed: dict[str, Corpus]) -> None:
    import json

    plan = one_segment(streamed, WEIGHTS, "documents", packing="best_fit")
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.fingerprint == plan.fingerprint


def test_counts_in_the_run_folder_spare_a_resume_all_windows_before(
    streamed: dict[str, Corpus], tmp_path: Path
) -> None:
    plan = one_segment(streamed, WEIGHTS, "documents", packing="best_fit")
    expected = rows_of(plan, streamed, tmp_path).read(70).tokens
    resumed = rows_of(plan, streamed, tmp_path)
    lane = resumed.lanes(70).lanes[0]
    assert not isinstance(lane, RandomBlocks)
    opened: list[int] = []
    open_window = lane.windows.open
    lane.windows.open = lambda window: opened.append(window) or open_window(window)  # type: ignore[func-returns-value, method-assign]
    assert (resumed.read(70).tokens == expected).all()
    assert len(opened) <= 2
    assert min(opened) > 5


def test_held_out_data_is_read_in_order(streamed: dict[str, Corpus]) -> None:
    plan = one_segment({"b": streamed["b"]}, {"b": 1.0}, packing="trunc", global_batch_size=31)
    rows = Sampler(plan, {"b": streamed["b"]}, Reading(0, False, 24))
    assert rows.read(0).tokens[:, 0].tolist() == list(range(5000, 5031))
    assert rows.num_batches() == 1


def test_random_tokens_depend_on_seed_and_row_alone() -> None:
    one, two = (
        rows_of(one_segment({"random": data}, {"random": 1.0}), {"random": data})
        for data in (RandomBlocks(100, seed=1), RandomBlocks(100, seed=2))
    )
    assert (one.read(7).tokens == one.read(7).tokens).all()
    assert not (one.read(7).tokens == two.read(7).tokens).all()
    assert not (one.read(7).tokens == one.read(8).tokens).all()
