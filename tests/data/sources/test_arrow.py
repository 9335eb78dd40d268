"""Parquet and Arrow files, written by pyarrow."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from overland.data.sources import open_source
from overland.errors import DataError
from tests.data.sources.samples import read_all

TEXTS = [f"document {i} ünï" * (i % 4) for i in range(25)]


def table(**changes: Any) -> pa.Table:
    return pa.table({"id": list(range(len(TEXTS))), "text": TEXTS, **changes})


def write(path: Path, what: pa.Table) -> Path:
    """As the suffix says; `.stream` is an Arrow stream, as `datasets` writes them."""
    if path.suffix == ".parquet":
        pq.write_table(what, path, row_group_size=10, write_page_checksum=True)
        return path
    new = pa.ipc.new_stream if path.name.startswith("stream") else pa.ipc.new_file
    with new(path, what.schema) as writer:
        writer.write_table(what, max_chunksize=10)
    return path


FILES = ["a.parquet", "file.arrow", "stream.arrow"]


@pytest.mark.parametrize("name", FILES)
def test_rows_come_out_in_order(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, table())
    source = open_source(tmp_path)
    assert source.format == ("parquet" if name == "a.parquet" else "arrow")
    assert source.columns == {"id": "int64", "text": "string"}
    assert read_all(source) == TEXTS
    sizes = [source.num_documents(chunk) for chunk in source.chunks()]
    assert sizes == ([None] if name == "stream.arrow" else [10, 10, 5])
    assert list(source.read(source.chunks()[-1]))[-1] == TEXTS[-1]


@pytest.mark.parametrize(
    "type",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
def test_text_of_every_arrow_type(tmp_path: Path, type: pa.DataType) -> None:
    write(tmp_path / "file.arrow", table(text=pa.array(TEXTS).cast(type)))
    assert read_all(open_source(tmp_path)) == TEXTS


@pytest.mark.parametrize("name", FILES)
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, pa.Table.from_arrays([TEXTS, TEXTS[::-1]], ["text", "text"]))
    with pytest.raises(DataError, match="has the column 'text' twice"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_nested_text_is_read_by_its_path(tmp_path: Path, name: str) -> None:
    """As in The Stack v2: a row is a repository, and each of its files a document."""
    files = [[{"path": f"{i}", "text": f"{row} {i}"} for i in range(row % 4)] for row in range(25)]
    files[5], files[6] = None, [{"path": "x", "text": None}, {"path": "y", "text": "6 1"}]  # type: ignore[call-overload]
    owners = [{"name": f"owner {i}"} for i in range(25)]
    repos = [f"repo {i}" for i in range(25)]
    write(tmp_path / name, pa.table({"repo_name": repos, "owner": owners, "files": files}))
    with pytest.raises(DataError, match=r"set --column .*repo_name \(string, such as 'repo 0'\)"):
        open_source(tmp_path)
    expected = [f"{row} {i}" for row in range(25) if row != 5 for i in range(row % 4)]
    expected[expected.index("6 0")] = "6 1"
    del expected[expected.index("6 1") + 1]
    with pytest.raises(DataError, match=rf"{name}: row 5: the list of documents is null"):
        read_all(open_source(tmp_path, column="files[].text"))
    joined = open_source(tmp_path, column="files[+].text", skip_bad=True)
    rows = [[f"{row} {i}" for i in range(row % 4)] for row in range(25)]
    rows[5], rows[6] = [], ["6 1"]
    assert read_all(joined) == ["".join(f"\n\n{one}" for one in row) for row in rows if row]
    assert joined.column == "files[+].text"
    with pytest.raises(DataError, match=r"did you mean 'files\[\+\]\.text'"):
        open_source(tmp_path, column="files[+].tekst")
    source = open_source(tmp_path, column="files[].text", skip_bad=True)
    assert source.columns["files[].text"] == "string"
    assert read_all(source) == expected
    assert source.num_bad == 2
    assert {source.num_documents(chunk) for chunk in source.chunks()} == {None}
    owned = open_source(tmp_path, column="owner.name")
    assert read_all(owned) == [owner["name"] for owner in owners]


def test_bytes_of_token_ids_are_not_taken_for_text(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"input_ids": [b"\x01\x00\x02\x00"]}))
    with pytest.raises(DataError, match="set --column to the column that holds the documents"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "type", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 3)]
)
@pytest.mark.parametrize("name", FILES)
def test_lists_of_integers_are_token_ids(tmp_path: Path, name: str, type: pa.DataType) -> None:
    rows = [[i, i + 1, i + 2] for i in range(25)]
    write(tmp_path / name, pa.table({"input_ids": pa.array(rows, type)}))
    source = open_source(tmp_path)
    assert source.kind == "tokens"
    found = read_all(source)
    assert [ids.tolist() for ids in found if isinstance(ids, np.ndarray)] == rows
    assert all(not isinstance(ids, str) and ids.dtype == np.int64 for ids in found)


def test_compressed_feather_is_an_arrow_file(tmp_path: Path) -> None:
    pyarrow.feather.write_feather(table(), tmp_path / "a.feather", compression="zstd")
    assert read_all(open_source(tmp_path)) == TEXTS


@pytest.mark.parametrize("name", FILES)
def test_a_null_or_bad_utf8_is_named_by_its_row_or_skipped(tmp_path: Path, name: str) -> None:
    raw = [text.encode() for text in TEXTS]
    raw[12], raw[13] = b"caf\xe9", None  # type: ignore[call-overload]
    bad = pa.array(raw, pa.binary()).view(pa.string())
    write(tmp_path / name, table(text=bad))
    with pytest.raises(DataError, match=rf"{name}: row 12: expected UTF-8 text"):
        read_all(open_source(tmp_path))
    source = open_source(tmp_path, skip_bad=True)
    assert read_all(source) == TEXTS[:12] + TEXTS[14:]
    assert source.num_bad == 2


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 3, 0.5, -1, -8])
def test_a_file_cut_short_is_named_and_never_skipped(
    tmp_path: Path, name: str, kept: float
) -> None:
    data = write(tmp_path / name, table()).read_bytes()
    size = int(len(data) * kept) if kept == 0.5 else int(kept) % len(data)
    (tmp_path / name).write_bytes(data[:size])
    with pytest.raises(DataError, match=rf"{name} (cannot be read|is truncated)"):
        read_all(open_source(tmp_path, skip_bad=True))


def test_a_flipped_bit_in_parquet_is_found_by_its_checksum(tmp_path: Path) -> None:
    texts = [np.random.default_rng(i).bytes(50).hex() for i in range(200)]
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "a.parquet", compression=None, use_dictionary=False,
        write_page_checksum=True,
    )  # fmt: skip
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    place = data.index(texts[100].encode())
    data[place] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read.*(CRC|checksum)"):
        read_all(open_source(tmp_path, skip_bad=True))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, table())
    with pytest.raises(DataError, match=rf"{name} has no column 'txt'; did you mean 'text'\?"):
        open_source(tmp_path, column="txt")
    with pytest.raises(DataError, match=r"column 'id' contains no text or token ids"):
        open_source(tmp_path, column="id")


def test_a_file_that_lacks_the_column_of_the_others_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table())
    write(tmp_path / "b.parquet", table().rename_columns(["id", "texts"]))
    with pytest.raises(DataError, match=r"b\.parquet has no column 'text'; did you mean 'texts'"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", FILES[:2])
def test_no_rows_are_an_empty_source(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, table().slice(0, 0))
    with pytest.raises(DataError, match=rf"{name} is empty: it has no rows"):
        open_source(tmp_path)


def test_without_pyarrow_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.parquet", table())
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'overland\[data\]'"):
        open_source(tmp_path)
