"""A changed corpus is detected, and the file that changed is named."""

import json
import os
from pathlib import Path

import pytest

from overland.data.sources import open_source
from tests.data.sources.samples import copied

LARGE = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("first")
    (tmp_path / "corpus" / "b.txt").write_text("x" * LARGE)
    return tmp_path / "corpus"


def changes(folder: Path, before: str) -> list[str]:
    """Through JSON, as marks are kept."""
    return open_source(folder).changes_since(json.loads(before))


def test_nothing_changed_also_after_a_touch_or_a_move(folder: Path) -> None:
    source = open_source(folder)
    marks, fingerprint = json.dumps(source.marks()), source.fingerprint()
    os.utime(folder / "a.txt", (1, 1))
    os.utime(folder / "b.txt", (1, 1))
    assert changes(folder, marks) == []
    moved = folder.rename(folder.with_name("elsewhere"))
    assert changes(moved, marks) == []
    assert open_source(moved).fingerprint() == fingerprint


@pytest.mark.parametrize("name", ["a.txt", "b.txt"])
def test_other_bytes_of_the_same_size_are_named(folder: Path, name: str) -> None:
    source = open_source(folder)
    marks, fingerprint = json.dumps(source.marks()), source.fingerprint()
    size = (folder / name).stat().st_size
    (folder / name).write_text("y" * size)
    os.utime(folder / name, (1, 1))
    assert changes(folder, marks) == [
        f"{folder / name} changed: its size is the same, but its content is not"
    ]
    assert open_source(folder).fingerprint() != fingerprint


def test_an_edit_in_the_middle_of_a_large_file_is_seen(folder: Path) -> None:
    """Between the sixteen blocks that large files were once judged by."""
    source = open_source(folder)
    marks, fingerprint = json.dumps(source.marks()), source.fingerprint()
    with (folder / "b.txt").open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"y")
    os.utime(folder / "b.txt", (1, 1))
    assert len(changes(folder, marks)) == 1
    assert open_source(folder).fingerprint() != fingerprint


def test_a_corpus_too_large_to_hash_is_marked_by_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.data.sources.file_marks.WHOLE_BYTES", LARGE)
    assert not open_source(folder).marks()["b.txt"].is_sure


def test_a_file_that_grew_is_gone_or_is_new_is_named(folder: Path) -> None:
    marks = json.dumps(open_source(folder).marks())
    (folder / "a.txt").write_text("longer now")
    (folder / "b.txt").unlink()
    (folder / "c.txt").write_text("new")
    assert changes(folder, marks) == [
        f"{folder / 'a.txt'} changed: it had 5 bytes and now has 10",
        f"{folder / 'b.txt'} no longer exists",
        f"{folder / 'c.txt'} is new",
    ]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mds_zstd", "index.json"),
        ("mds_zstd", "shard.00001.mds.zstd"),
        ("megatron_int32", "multi_text_sentence.bin"),
        ("megatron_int32", "multi_text_sentence.idx"),
    ],
)
def test_every_file_of_a_format_counts(tmp_path: Path, name: str, file: str) -> None:
    folder = copied(name, tmp_path)
    source = open_source(folder)
    marks = source.marks()
    with (folder / file).open("ab") as opened:
        opened.write(b" ")
    assert [sentence.split(" changed")[0] for sentence in source.changes_since(marks)] == [
        str(folder / file)
    ]


def test_another_column_is_another_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "title": "b"}\n')
    one, other = open_source(tmp_path), open_source(tmp_path, column="title")
    assert one.fingerprint() != other.fingerprint()
