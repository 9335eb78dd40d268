import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from overland.apps.data.made_rows import RandomBlocks
from overland.apps.data.standard_library import StandardLibrary
from overland.data.batch import Batch, batches, load_batch, read_ahead
from overland.data.sources import open_source
from overland.errors import DataError
from tests.data.corpora import one_segment, rows_of
from tests.waiting import wait_until


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_a_global_batch_does_not_depend_on_the_number_of_ranks(num_parts: int) -> None:
    data = {"random": RandomBlocks(100)}
    rows = rows_of(one_segment(data, {"random": 1.0}, global_batch_size=8), data)
    whole = list(itertools.islice(batches(rows, 2), 5))
    parts = [
        list(itertools.islice(batches(rows, 2, part, num_parts), 5)) for part in range(num_parts)
    ]
    for step, batch in enumerate(whole):
        joined = torch.cat([part[step]["tokens_BS"] for part in parts])
        assert torch.equal(joined, batch["tokens_BS"])


def test_starting_at_a_step_gives_what_an_unbroken_run_would_read() -> None:
    data = {"random": RandomBlocks(100)}
    rows = rows_of(one_segment(data, {"random": 1.0}), data)
    unbroken = list(itertools.islice(batches(rows, 0), 9))
    for a, b in zip(unbroken[6:], itertools.islice(batches(rows, 6), 3), strict=True):
        assert torch.equal(a["tokens_BS"], b["tokens_BS"])


def test_documents_come_with_the_batch_where_they_are_asked_for() -> None:
    data = {"random": RandomBlocks(100)}
    plan = one_segment(data, {"random": 1.0}, seq_len=64, document_mask=True)
    batch = load_batch(rows_of(plan, data), 0)
    assert batch["documents_BS"].max() > 0
    begins = batch["positions_BS"] == 0
    assert torch.equal(begins.cumsum(1) - 1, batch["documents_BS"])


def test_places_of_a_row_are_taken_from_fields_of_tokens_alone() -> None:
    batch = Batch(
        {
            "tokens_BS": torch.arange(12).view(2, 6),
            "weights_BS": torch.arange(12.0).view(2, 6),
            "pixels": torch.zeros(2, 6, 6),
            "sample_B": torch.arange(2),
        }
    ).with_positions()
    share = batch.at_places(lambda length: torch.tensor([0, length - 1]))
    assert share["tokens_BS"].tolist() == [[0, 5], [6, 11]]
    assert share["weights_BS"].tolist() == [[0, 5], [6, 11]]
    assert share["positions_BS"].tolist() == [[0, 5], [0, 5]]
    assert share["pixels"].shape == (2, 6, 6)
    assert len(share) == 2


def test_held_out_files_are_not_trained_on() -> None:
    train, held_out = StandardLibrary().chunks(), StandardLibrary(held_out=True).chunks()
    assert len(train) > 10 * len(held_out) > 0
    assert not set(train) & set(held_out)


def test_a_bad_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(DataError, match=rf'{path}:2: expected an object with a "text"'):
        list(open_source(path).read(str(path)))


def test_reading_ahead_keeps_order_and_passes_errors_on() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise DataError("no more")

    reader = read_ahead(items(), depth=2)
    assert list(itertools.islice(reader, 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="no more"):
        next(reader)


def test_a_reader_that_is_closed_ends_its_thread() -> None:
    reader = read_ahead(itertools.count(), depth=2)
    assert next(reader) == 0
    reader.close()
    wait_until(lambda: all(thread.name != "read-ahead" for thread in threading.enumerate()))
