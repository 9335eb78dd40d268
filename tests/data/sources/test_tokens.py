"""Megatron indices that are damaged, bare arrays of ids, and random ones."""

from pathlib import Path

import numpy as np
import pytest

from overland.data.sources import open_source
from overland.errors import DataError
from tests.data.making import RandomTokens
from tests.data.sources.samples import copied, read_all


def ids(path: Path, **options: str) -> list[list[int]]:
    found = read_all(open_source(path, **options))  # type: ignore[arg-type]
    assert all(not isinstance(one, str) and one.dtype == np.int64 for one in found)
    return [list(one) for one in found]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("suffix", "cut", "message"),
    [
        (".bin", -2, r"text_document\.bin is truncated: sequence 59 ends at byte 52,132"),
        (".idx", -1, r"text_document\.idx is truncated or damaged"),
        (".idx", 20, r"text_document\.idx is not a Megatron index"),
        (".idx", 0, r"text_document\.idx is not a Megatron index"),
    ],
)
def test_a_megatron_file_cut_short_is_named(
    tmp_path: Path, suffix: str, cut: int, message: str
) -> None:
    folder = copied("megatron_uint16", tmp_path)
    path = next(folder.glob(f"*{suffix}"))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=message):
        read_all(open_source(folder))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (17, 7, "type code 7"),
        (34 + 3, 0x80, "negative lengths or offsets"),
        (34 + 60 * 12, 9, "documents do not cover its sequences"),
    ],
)
def test_a_damaged_megatron_index_is_named(
    tmp_path: Path, place: int, value: int, message: str
) -> None:
    folder = copied("megatron_uint16", tmp_path)
    path = next(folder.glob("*.idx"))
    data = bytearray(path.read_bytes())
    data[place] = value
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"text_document\.idx.*{message}"):
        open_source(folder)


def test_a_megatron_index_without_its_tokens_is_named(tmp_path: Path) -> None:
    folder = copied("megatron_uint16", tmp_path)
    next(folder.glob("*.bin")).unlink()
    with pytest.raises(DataError, match=r"text_document\.bin cannot be read: No such file"):
        open_source(folder)


def test_rows_of_an_array_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overland.data.sources.numpy_tokens.ROWS_PER_CHUNK", 2)
    rows = np.arange(15, dtype=np.uint16).reshape(5, 3)
    np.save(tmp_path / "a.npy", rows)
    source = open_source(tmp_path)
    assert [source.num_documents(chunk) for chunk in source.chunks()] == [2, 2, 1]
    assert ids(tmp_path) == rows.tolist()


def test_an_array_in_one_row_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.data.sources.numpy_tokens.PIECE_TOKENS", 4)
    np.save(tmp_path / "a.npy", np.arange(10, dtype=">i4"))
    assert ids(tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_raw_ids_have_their_type_in_the_name_or_given(tmp_path: Path) -> None:
    row = np.array([1, 2, 60_000], "<u2")
    for name in ("train.uint16.bin", "train_uint16.bin", "train.bin"):
        row.tofile(tmp_path / name)
    assert ids(tmp_path / "train.uint16.bin") == ids(tmp_path / "train_uint16.bin")
    assert ids(tmp_path / "train.bin", dtype="uint16") == [row.tolist()]
    with pytest.raises(DataError, match=r"train\.bin: specify the type of its token ids"):
        open_source(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"train\.bin is truncated: 6 bytes are not a whole number"):
        open_source(tmp_path / "train.bin", dtype="uint32")
    with pytest.raises(DataError, match="dtype 'float32' is not a type for token ids"):
        open_source(tmp_path / "train.bin", dtype="float32")


def test_arrays_that_are_no_ids_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(DataError, match=r"a\.npy: expected a one- or two-dimensional array of"):
        open_source(tmp_path)
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(
        DataError, match=r"a\.npy: expected a one- .* integers, got object of shape"
    ):
        open_source(tmp_path)
    np.save(tmp_path / "a.npy", np.arange(1000))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-8])
    with pytest.raises(DataError, match=r"a\.npy is not an array, or is truncated"):
        open_source(tmp_path)
    np.save(tmp_path / "a.npy", np.arange(0))
    with pytest.raises(DataError, match="is empty: it holds no tokens"):
        open_source(tmp_path)


def test_random_tokens_are_a_function_of_the_seed_and_the_chunk() -> None:
    a, b = RandomTokens(100, 3000, 8, seed=1), RandomTokens(100, 3000, 8, seed=2)
    assert [a.num_documents(chunk) for chunk in a.chunks()] == [1024, 1024, 952]
    last = [list(one) for one in a.read("2")]
    assert last == [list(one) for one in a.read("2")]
    assert len(last) == 952
    assert last != [list(one) for one in b.read("2")]
    assert a.identity("a") != b.identity("a")
