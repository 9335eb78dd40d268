import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from overland.data.batch import IGNORED
from overland.data.errors import DataError
from overland.data.loader import RandomTokens, ShardBlocks, batches, read_ahead
from overland.data.shards import TokenShards, build_shards
from overland.data.sources import StandardLibrary, TextFolder
from overland.data.tokenizer import Tokenizer, train_tokenizer

SEQ_LEN = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 5, 300, path)
    return Tokenizer(path)


@pytest.fixture
def shards(tmp_path: Path, tokenizer: Tokenizer) -> TokenShards:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i:02}.txt").write_text(f"document {i}: " + "the lazy fox " * (i % 7))
    build_shards(TextFolder(text), tokenizer, tmp_path / "shards")
    return TokenShards(tmp_path / "shards")


def test_an_epoch_holds_every_block_once_and_the_next_one_in_another_order(
    shards: TokenShards,
) -> None:
    blocks = ShardBlocks(shards, SEQ_LEN, seed=3)
    n = blocks.num_blocks
    first, second = (blocks.rows(np.arange(e * n, (e + 1) * n)).tokens_BS for e in (0, 1))
    expected = torch.from_numpy(shards.read(0, n * SEQ_LEN)).view(n, SEQ_LEN)

    def as_set(rows: torch.Tensor) -> list[tuple[int, ...]]:
        return sorted(map(tuple, rows.tolist()))

    assert as_set(first) == as_set(second) == as_set(expected)
    assert not torch.equal(first, second)
    assert not torch.equal(first, expected)


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_a_global_batch_does_not_depend_on_the_number_of_ranks(
    shards: TokenShards, num_parts: int
) -> None:
    blocks = ShardBlocks(shards, SEQ_LEN)
    whole = list(itertools.islice(batches(blocks, 2, 8), 5))
    parts = [
        list(itertools.islice(batches(blocks, 2, 8, part, num_parts), 5))
        for part in range(num_parts)
    ]
    for step, batch in enumerate(whole):
        joined = torch.cat([part[step].tokens_BS for part in parts])
        assert torch.equal(joined, batch.tokens_BS)


def test_starting_at_a_step_gives_what_an_unbroken_run_would_read(shards: TokenShards) -> None:
    blocks = ShardBlocks(shards, SEQ_LEN)
    unbroken = list(itertools.islice(batches(blocks, 0, 4), 9))
    resumed = list(itertools.islice(batches(blocks, 6, 4), 3))
    for a, b in zip(unbroken[6:], resumed, strict=True):
        assert torch.equal(a.tokens_BS, b.tokens_BS)


def test_labels_are_the_next_tokens_also_across_blocks(shards: TokenShards) -> None:
    row = ShardBlocks(shards, SEQ_LEN, shuffle=False).rows(np.array([1]))
    assert row.tokens_BS[0].tolist() == shards.read(SEQ_LEN, 2 * SEQ_LEN).tolist()
    assert row.labels_BS[0].tolist() == shards.read(SEQ_LEN + 1, 2 * SEQ_LEN + 1).tolist()


def test_document_borders_reset_positions_and_take_no_loss(
    shards: TokenShards, tokenizer: Tokenizer
) -> None:
    blocks = ShardBlocks(shards, 200, shuffle=False, document_mask=True)
    row = blocks.rows(np.array([0]))
    assert row.positions_BS is not None
    assert row.documents_BS is not None
    tokens, labels = row.tokens_BS[0], row.labels_BS[0]
    ends = tokens == tokenizer.end_id
    assert ends.sum() > 2
    assert (labels[ends] == IGNORED).all()
    assert (labels[~ends] != IGNORED).all()
    starts = torch.cat([torch.tensor([True]), ends[:-1]])
    assert torch.equal(row.positions_BS[0] == 0, starts)
    assert torch.equal(row.documents_BS[0], starts.cumsum(0) - 1)


def test_random_tokens_depend_on_seed_and_row_alone() -> None:
    a, b = RandomTokens(100, 8, seed=1), RandomTokens(100, 8, seed=2)
    rows = a.rows(np.arange(10)).tokens_BS
    assert torch.equal(a.rows(np.array([7])).tokens_BS[0], rows[7])
    assert not torch.equal(b.rows(np.arange(10)).tokens_BS, rows)


def test_too_little_text_is_one_sentence(shards: TokenShards) -> None:
    with pytest.raises(DataError, match=r"too few for one block of seq_len = 1,000,000"):
        ShardBlocks(shards, 1_000_000)


def test_a_build_that_fails_leaves_no_shards(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Broken:
        def chunks(self) -> list[str]:
            return ["a", "b"]

        def read(self, chunk: str) -> Iterator[str]:
            yield "fine"
            raise DataError("b is broken")

    with pytest.raises(DataError, match="b is broken"):
        build_shards(Broken(), tokenizer, tmp_path / "shards")
    assert list(tmp_path.iterdir()) == []


def test_shards_cut_short_are_named(tmp_path: Path, shards: TokenShards) -> None:
    with (tmp_path / "shards" / "tokens.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match="it is cut short, build it again"):
        TokenShards(tmp_path / "shards")


def test_held_out_files_are_not_trained_on() -> None:
    train, held_out = StandardLibrary().chunks(), StandardLibrary(held_out=True).chunks()
    assert len(train) > 10 * len(held_out) > 0
    assert not set(train) & set(held_out)


def test_a_bad_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(DataError, match=rf'{path}:2: expected an object with a "text"'):
        list(TextFolder(path).read(str(path)))


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
    for _ in range(50):
        if not any(thread.name == "read-ahead" for thread in threading.enumerate()):
            return
        time.sleep(0.1)
    pytest.fail("the thread is still there")
