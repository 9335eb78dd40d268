"""Every file of a folder is read, or named."""

import bz2
import json
import lzma
import os
from pathlib import Path

import pytest

from overland.data.sources import open_source
from overland.errors import DataError
from tests.data.sources.samples import read_all


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_every_ending_that_is_usual_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("a"))
    (tmp_path / "B.JSONL").write_bytes(lines("b"))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines("c 1")) + lzma.compress(lines("c 2")))
    (tmp_path / "d.jsonl.bz2").write_bytes(bz2.compress(lines("d 1")) + bz2.compress(lines("d 2")))
    (tmp_path / "e.csv").write_text('id,text\n1,"e, ""quoted""\nin two lines"\n')
    (tmp_path / "f.TXT.XZ").write_bytes(lzma.compress(b"f"))
    source = open_source(tmp_path)
    expected = ["b", "a", "c 1", "c 2", "d 1", "d 2", 'e, "quoted"\nin two lines', "f"]
    assert read_all(source) == expected
    assert source.not_read == ""


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.jsonl.bz2"])
def test_a_compressed_file_that_is_cut_short_or_damaged_is_never_skipped(
    tmp_path: Path, name: str
) -> None:
    compress = {".xz": lzma.compress, ".bz2": bz2.compress}[Path(name).suffix]
    data = compress(lines(*(os.urandom(50).hex() for _ in range(50))))
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 0xFF
    for bad in (data[: len(data) // 2], bytes(damaged)):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(DataError, match=rf"{name} cannot be read"):
            read_all(open_source(tmp_path, skip_bad=True))


def test_what_is_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, shut, elsewhere = tmp_path / "data", tmp_path / "data" / "shut", tmp_path / "elsewhere"
    for folder in (data / "sub", shut, elsewhere / "deep"):
        folder.mkdir(parents=True)
    (data / "a.jsonl").write_bytes(lines("a"))
    (data / "sub" / "b.jsonl").write_bytes(lines("b"))
    (elsewhere / "deep" / "c.jsonl").write_bytes(lines("c"))
    (elsewhere / "deep" / "back").symlink_to(elsewhere)
    (data / "linked").symlink_to(elsewhere)
    (data / "loop").symlink_to(data)
    (data / "twice").symlink_to(data / "sub")
    (data / "lost.jsonl").symlink_to(data / "nothing")
    (data / "photo.jpg").write_bytes(b"\xff")
    (data / "meta.csv").write_text("id,title\n1,x\n")
    for name in ("README.md", ".hidden.jsonl", "_SUCCESS"):
        (data / name).write_text("{}")
    scandir = os.scandir

    def refuse(path: Path) -> object:  # as the system does; but a test may run as root
        if Path(path) == shut:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    source = open_source(data)
    assert source.chunks() == ["a.jsonl", "linked/deep/c.jsonl", "sub/b.jsonl"]
    assert read_all(source) == ["a", "c", "b"]
    assert source.not_read.startswith("7 files not read: ")
    monkeypatch.setattr("overland.data.sources.source.SHOWN", 9)
    named = open_source(data).not_read
    for part in (
        "shut/ (the folder cannot be opened: Permission denied)",
        "loop/ (a link to a folder that is already read)",
        "twice/ (a link to a folder that is already read)",
        "linked/deep/back/ (a link to a folder that is already read)",
        "lost.jsonl (a broken link)",
        "photo.jpg (unknown format)",
        "meta.csv (it has no column 'text')",
    ):
        assert part in named


def test_notes_beside_data_of_another_format_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    for name in ("README.md", "more.txt", "more.csv"):
        (tmp_path / name).write_text("x")
    source = open_source(tmp_path)
    assert read_all(source) == ["a"]
    assert source.not_read == (
        "2 files not read: more.csv (next to parquet files), more.txt (next to parquet files)"
    )


def test_csv_is_read_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,text\r\n1,plain\r\n\r\n2,"caf\xe9"\n3\n4,more\n5,"x"y\n6,last\n'
    )
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(DataError, match=r"a\.csv:4: text is not UTF-8 text"):
        read_all(open_source(tmp_path))
    source = open_source(tmp_path, skip_bad=True)
    assert source.columns == {"id": "string", "text": "string"}
    assert read_all(source) == ["plain", "more", "last"]
    assert source.num_bad == 3
    assert read_all(open_source(path, column="id", skip_bad=True)) == ["1", "2", "4", "6"]
    path.write_text("id,body\n1,long\n")
    with pytest.raises(DataError, match=r"set --column .*body \(string, such as 'long'\)"):
        open_source(tmp_path)
    path.write_text('id,text\n1,"never closed\n2,b\n')
    with pytest.raises(DataError, match=r"a\.csv:2: a quote is opened and never closed"):
        read_all(open_source(tmp_path, skip_bad=True))
    path.write_text("")
    with pytest.raises(DataError, match=r"a\.csv is empty: it has no header"):
        open_source(tmp_path)
    (tmp_path / "a.tsv").write_text("text\tid\na, b\t1\n")
    path.unlink()
    assert read_all(open_source(tmp_path)) == ["a, b"]
