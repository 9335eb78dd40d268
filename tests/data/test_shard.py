import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from overland.data.shard import (
    BLOCK_BYTES,
    Shard,
    ShardInfo,
    ShardWriter,
    open_shard,
    read_counts,
)
from overland.errors import DataError
from overland.files import replaced

DOCUMENTS = [np.arange(5), np.asarray([7]), np.arange(100, 400)]


def write_shard(
    path: Path,
    documents: Iterable[npt.NDArray[Any]],
    dtype: str,
    channels: Mapping[str, str] | None = None,
) -> ShardInfo:
    with replaced(path) as file:
        shard = ShardWriter(file, dtype, channels)
        for document in documents:
            shard.add([document])
        return shard.finish(("a#0", "b#3"), num_bad=2)


def write(path: Path, dtype: str = "<u2") -> Path:
    write_shard(path, DOCUMENTS, dtype)
    return path


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_shard_gives_back_its_documents(tmp_path: Path, dtype: str) -> None:
    shard = open_shard(write(tmp_path / "a.shard", dtype))
    assert shard.tokens.dtype == dtype
    assert shard.info.num_documents == 3
    assert shard.info.num_tokens == 306
    assert (shard.info.num_bad, shard.info.max_token) == (2, 399)
    assert b'"chunks": ["a#0", "b#3"]' in shard.path.read_bytes()
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(shard.document(number), document)
    shard.verify()
    assert read_counts(shard.path) == (3, 306, 2)


def test_the_same_documents_make_the_same_bytes(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    assert a.read_bytes() == b.read_bytes()


def test_a_shard_without_documents_can_be_read(tmp_path: Path) -> None:
    info = write_shard(tmp_path / "a", [], "<u2")
    shard = open_shard(tmp_path / "a")
    assert (info.num_documents, info.max_token, len(shard.tokens)) == (0, -1, 0)
    shard.verify()


@pytest.mark.parametrize("size", [0, 10, 64, 200, -1])
def test_a_shard_that_is_cut_short_is_named(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "a.shard")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"a\.shard is .*truncated"):
        open_shard(path)


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello" * 100)
    with pytest.raises(DataError, match="x is not a token shard"):
        open_shard(tmp_path / "x")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.shard")
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        with pytest.raises(DataError, match=r"a\.shard"):
            open_shard(path).verify()


def test_a_reader_verifies_the_blocks_that_it_reads(tmp_path: Path) -> None:
    documents = [np.arange(i, i + BLOCK_BYTES) % 256 for i in range(4)]  # two blocks each
    path = tmp_path / "a.shard"
    write_shard(path, documents, "<u2")
    data = bytearray(path.read_bytes())
    data[64 + 5 * BLOCK_BYTES + 7] ^= 1  # in the third document
    path.write_bytes(data)
    shard = open_shard(path)
    shard.verify_index()
    for number in (0, 1, 3):
        np.testing.assert_array_equal(shard.document(number), documents[number])
    assert sum(shard.is_verified) == 6
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.shard is damaged"):
            shard.document(2)
    data[shard.index_at + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.shard is damaged"):
        open_shard(path).verify_index()


def test_a_shard_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def documents() -> Iterator[npt.NDArray[np.int64]]:
        yield np.arange(10)
        raise DataError("bad")

    with pytest.raises(DataError):
        write_shard(tmp_path / "a", documents(), "<u2")
    assert list(tmp_path.iterdir()) == []


def test_an_open_shard_outlives_its_file(tmp_path: Path) -> None:
    shard = open_shard(write(tmp_path / "a"))
    shard.path.unlink()
    np.testing.assert_array_equal(shard.document(2), DOCUMENTS[2])


def test_a_large_shard_is_written_in_little_memory(tmp_path: Path) -> None:
    def documents() -> Iterator[npt.NDArray[np.int32]]:
        for start in range(100):
            yield np.arange(start, start + 100_000, dtype=np.int32)

    tracemalloc.start()
    write_shard(tmp_path / "a", documents(), "<u4")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shard: Shard = open_shard(tmp_path / "a")
    assert shard.info.num_tokens == 10_000_000
    assert peak < 10_000_000
