"""Data files that lie about their contents, or expand to more than any memory: one sentence
each."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overland.apps.data.megatron import HEAD, MAGIC
from overland.apps.data.summary import summarize
from overland.data.sources import compression, jsonl, open_source, text
from tests.limited import limited

MIB = 1 << 20
SPACES = b" " * 2**22


def ended(path: Path, megabytes: int = 512) -> str:
    """What reading all documents of a file ended with."""
    return limited(lambda: summarize(open_source(path)), megabytes)


def refused(path: Path, *words: str, megabytes: int = 512) -> None:
    said = ended(path, megabytes)
    assert said.startswith(("DataError: ", "BadDocument: ")), said
    assert path.name in said, said
    assert "\n" not in said
    for word in words:
        assert word in said, said


def zstd(data: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return compressed


FOLD: dict[str, Callable[[bytes], bytes]] = {
    ".gz": partial(gzip.compress, compresslevel=1), ".bz2": partial(bz2.compress, compresslevel=1),
    ".xz": partial(lzma.compress, preset=0), ".zst": zstd,
}  # fmt: skip


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (jsonl, text):
        monkeypatch.setattr(module, "LONGEST_LINE", MIB)


@pytest.mark.parametrize("suffix", FOLD)
def test_a_line_without_an_end_is_not_read_whole(
    suffix: str, short_lines: None, tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(FOLD[suffix](SPACES) * 64)  # frame after frame, 256 MiB
    refused(path, ":1: a line of more than 1,048,576 bytes", megabytes=200)


def test_a_line_that_is_too_long_is_a_bad_document(short_lines: None, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = b'{"text": "' + b"x" * 9 * MIB + b'"}\n'
    path.write_bytes(b'{"text": "one"}\n' + long + b'{"text": "two"}\n' + long + b'{"text": "end"}')
    source = open_source(path, skip_bad=True)
    assert len(source.chunks()) > 1  # so that parts begin inside of long lines
    found = [document for chunk in source.chunks() for document in source.read(chunk)]
    assert found == ["one", "two", "end"]
    assert source.num_bad == 2
    assert "a.jsonl:2: a line of more than" in ended(path)


@pytest.mark.parametrize("text", [b"text\n", b'text\n"' + b"\n" * 2**21])
def test_a_csv_row_without_an_end_is_not_read_whole(
    text: bytes, short_lines: None, tmp_path: Path
) -> None:
    (tmp_path / "a.csv.gz").write_bytes(FOLD[".gz"](text) + FOLD[".gz"](SPACES) * 64)
    refused(tmp_path / "a.csv.gz", ":2: a row of more than 1,048,576 bytes", megabytes=200)


def test_a_small_text_does_not_unfold_to_a_huge_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compression, "MOST_UNFOLDED", 8 * MIB)
    piece = gzip.compress(SPACES)  # a thousandth
    (tmp_path / "a.txt.gz").write_bytes(piece)
    assert len(*open_source(tmp_path / "a.txt.gz").read("a.txt.gz")) == len(SPACES)
    (tmp_path / "a.txt.gz").write_bytes(piece * 64)
    refused(tmp_path / "a.txt.gz", "decompresses to more than 26,", "100 times", megabytes=200)


def test_an_xz_file_cannot_ask_for_all_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    data = lzma.compress(b'{"text": "abc"}\n')
    path.write_bytes(data + b"\0" * 8 + data)  # with padding between the two, as xz allows
    assert [*open_source(path).read("a.jsonl.xz")] == ["abc", "abc"]
    start = 12  # of the first block's header: its length, its filter (LZMA2, a byte of size), a CRC
    length = (data[start] + 1) * 4
    header = bytearray(data[start : start + length - 4])
    header[header.index(b"\x21\x01") + 2] = 40  # a dictionary of 4 GiB
    forged = bytes(header) + zlib.crc32(header).to_bytes(4, "little")
    path.write_bytes(data[:start] + forged + data[start + length :])
    refused(path, "Memory usage limit", megabytes=8000)


# NumPy


def npy(
    header: bytes, body: bytes = bytes(16), version: int = 1, length: int | None = None
) -> bytes:
    size = (len(header) if length is None else length).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + body


def described(shape: str, dtype: str = "'<i4'", fortran: bool = False) -> bytes:
    return npy(f"{{'descr': {dtype}, 'fortran_order': {fortran}, 'shape': {shape}}}\n".encode())


@pytest.mark.parametrize(
    "data",
    [
        described(f"({2**62},)"), described(f"({2**70},)"), described(f"({2**32}, {2**32})"),
        described("(-4,)"), described("(-2, -2)"), described("(True,)"), described("(1.5,)"),
        described(f"({2**40}, 0)"), described("(4,)", "'|O'"), described("(4,)", "'|V2147483647'"),
        described("(1,)", "(" * 150 + "'<i4'" + ",)" * 150), described("(1,)", "{'a': 1}"),
        npy(b"(" * 9000), npy(b"-" * 9000 + b"1"), npy(b"1" + b"+1" * 4000), npy(b"\0" * 100),
        npy(b"{}", version=2, length=2**32 - 1), npy(b"{}", version=9), b"\x93NUMPY\x01\x00",
        b"PK\x03\x04" + bytes(30), b"\x80\x04\x95" + bytes(30),
    ],
    ids=lambda data: f"{len(data)} bytes",
)  # fmt: skip
def test_an_array_is_checked_before_it_is_mapped(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    refused(tmp_path / "a.npy")


def test_rows_of_nothing_make_no_chunks(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(8).reshape(2, 4))
    (tmp_path / "b.npy").write_bytes(described(f"({2**40}, 0)"))
    said = limited(lambda: open_source(tmp_path).chunks())
    assert "b.npy is empty: its 1,099,511,627,776 rows" in said, said


def test_a_header_is_not_read_at_any_length(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        file.write(npy(b"", b"", 2, 2**32 - 1))
        file.truncate(2**32 + 12)  # takes no space on the disk
    refused(tmp_path / "a.npy", "its header has more than 10,000 bytes")


def test_an_array_in_column_order_is_read_by_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(np.arange(6).reshape(2, 3)))
    source = open_source(tmp_path / "a.npy")
    assert [ids.tolist() for ids in source.read(source.chunks()[0])] == [[0, 1, 2], [3, 4, 5]]


# Megatron


@pytest.mark.parametrize(
    ("lengths", "pointers", "borders"),
    [
        ([2] * 1000, [0] * 1000, [0, 1000]),  # one document, 1,000 times the whole file
        ([2, 2], [0, 0], [0, 2**63 - 1, -2, 2]),  # whose differences wrap around
    ],
)
def test_megatron_documents_lie_in_their_file(
    lengths: list[int], pointers: list[int], borders: list[int], tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(16))
    arrays = np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(borders, "<i8")
    head = HEAD.pack(MAGIC, 1, 5, len(lengths), len(borders))
    (tmp_path / "a.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    refused(tmp_path / "a.idx", "is damaged")


# Arrow


def arrow(columns: dict[str, Any], as_file: bool = True) -> bytes:
    pa = pytest.importorskip("pyarrow")
    table, data = pa.table(columns), io.BytesIO()
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(data, table.schema) as writer:
        writer.write_table(table)
    return data.getvalue()


def changed(data: bytes, numbers: Any, place: int, number: int) -> bytes:
    """`data` with one of the numbers in it replaced."""
    start = data.index(numbers.tobytes()) + place * numbers.itemsize
    new = np.array([number], numbers.dtype).tobytes()
    return data[:start] + new + data[start + len(new) :]


TEXTS = [f"text {i}" for i in range(777)]
IDS = [[1, 2, 3]] * 777
NESTED = [[{"text": "abc"}]] * 777
OFFSETS = {
    "text": np.cumsum([0, *map(len, TEXTS)]).astype("<i4"),
    "input_ids": np.arange(0, 3 * 778, 3).astype("<i4"),
    "files": np.arange(778).astype("<i4"),
}
VALUES: dict[str, Any] = {"text": TEXTS, "input_ids": IDS, "files": NESTED}


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("place", [5, 777])
@pytest.mark.parametrize("number", [10**8, 2**31 - 1, -5])
@pytest.mark.parametrize("column", OFFSETS)
def test_arrow_offsets_are_checked(
    column: str, number: int, place: int, as_file: bool, tmp_path: Path
) -> None:
    data = arrow({column: VALUES[column]}, as_file)
    (tmp_path / "a.arrow").write_bytes(changed(data, OFFSETS[column], place, number))
    refused(tmp_path / "a.arrow")


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("number", [2**62, 2**40, -1])
def test_arrow_lengths_are_checked(number: int, as_file: bool, tmp_path: Path) -> None:
    data = arrow({"text": TEXTS}, as_file)
    data = data.replace(struct.pack("<q", 777), struct.pack("<q", number))
    (tmp_path / "a.arrow").write_bytes(data)
    refused(tmp_path / "a.arrow")


@pytest.mark.parametrize("number", [10**9, -1])
def test_arrow_dictionaries_are_checked(number: int, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    indices = (np.arange(777) % 3).astype("<i4")
    texts = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(["a", "b", "c"]))
    data = changed(arrow({"text": texts}), indices, 10, number)
    (tmp_path / "a.arrow").write_bytes(data)
    refused(tmp_path / "a.arrow", "an index is outside its dictionary of 3 values")


def test_an_arrow_column_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(arrow({"title": TEXTS}).replace(b"title", b"\xfftle\xff"))
    refused(tmp_path / "a.arrow")


# Parquet


def number_of(value: int) -> bytes:
    """As Thrift writes it: zigzag, seven bits to a byte."""
    value, found = (value << 1 ^ value >> 63) & (1 << 64) - 1, bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


ROWS = 12_345


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("num_rows", 2**62), ("num_rows", 2**40), ("num_rows", -5),
        ("total_compressed_size", 2**62), ("total_compressed_size", -5),
        ("data_page_offset", 2**62), ("data_page_offset", -5), ("page", 2**31 - 1), ("page", -5),
    ],
)  # fmt: skip
def test_numbers_of_a_parquet_file_are_not_believed(
    field: str, number: int, tmp_path: Path
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(ROWS)]
    parquet.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    column = parquet.read_metadata(path).row_group(0).column(0)
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    if field == "page":  # how much it decompresses to, in the header of the only one
        plain = 4 * ROWS + sum(map(len, texts))
        head = next(number_of(plain + d) for d in range(64) if number_of(plain + d) in body[:16])
        body = body.replace(head, number_of(number), 1)
        total = column.total_compressed_size
        grown = len(number_of(number)) - len(head)
        footer = footer.replace(number_of(total), number_of(total + grown))
    else:
        old = ROWS if field == "num_rows" else getattr(column, field)
        assert number_of(old) in footer
        footer = footer.replace(number_of(old), number_of(number))
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    refused(path)


def test_a_text_that_is_repeated_is_not_in_memory_in_every_row(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    once = pa.array(["x" * 4 * MIB])
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(256, "<i4")), once)
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    (tmp_path / "a.arrow").write_bytes(arrow({"text": texts}))
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        assert ended(path, megabytes=700) == "read"
