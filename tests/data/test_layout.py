import gzip
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from overland.apps.data.build import build
from overland.data.layout import lay_out, read_layout, source_changes
from overland.data.shard_maker import ShardMaker
from overland.data.sources import open_source
from overland.data.sources.jsonl import JsonLines
from overland.data.sources.source import Source
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.data.making import RandomTokens, lines_of, write_lines


class Sums(Source):
    """A source of somebody's own: only what it must have."""

    def __init__(self, num_chunks: int = 10) -> None:
        self.num_chunks = num_chunks

    def chunks(self) -> list[str]:
        return [str(number) for number in range(self.num_chunks)]

    def read(self, chunk: str) -> Iterator[str]:
        yield f"{chunk} + {chunk} = {2 * int(chunk)}"


def groups_of(folder: Path) -> list[list[str]]:
    layout = read_layout(folder)
    return [layout.chunks_of(number)[0] for number in range(layout.num_shards)]


def test_consecutive_chunks_form_shards_of_about_equal_size(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("text")
    folder = lay_out("a", open_source(tmp_path), tokenizer, tmp_path / "out", shard_documents=4)
    assert [len(group) for group in groups_of(folder)] == [4, 4, 2]
    assert [chunk for group in groups_of(folder) for chunk in group] == [
        f"{number}.txt" for number in range(10)
    ]
    assert read_layout(folder).documents_per_shard == pytest.approx(10 / 3)


def test_a_shard_ends_where_it_is_nearest_to_being_full(tmp_path: Path) -> None:
    source = RandomTokens(100, 5000, 4)  # chunks of 1,024 documents and a last one of 904
    folder = lay_out("a", source, None, tmp_path, shard_documents=1500, vocab_size=100)
    assert [len(group) for group in groups_of(folder)] == [1, 1, 1, 2]
    folder = lay_out("a", source, None, tmp_path, shard_documents=1600, vocab_size=100)
    assert [len(group) for group in groups_of(folder)] == [2, 2, 1]


def test_the_size_of_files_tells_about_how_many_documents_they_hold(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    line = json.dumps({"text": "x" * 4096}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 30)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(os.urandom(4096 * 10)))
    (tmp_path / "c.jsonl").write_text(line)
    source = JsonLines(tmp_path, ["a.jsonl", "b.jsonl.gz", "c.jsonl"])
    folder = lay_out("a", source, tokenizer, tmp_path / "out")
    assert read_layout(folder).documents_per_shard == pytest.approx(30 + 30 + 1, rel=0.01)


def test_a_corpus_is_found_again_under_any_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = write_lines(tmp_path / "lines", 3)
    folder = lay_out("first", lines_of(lines), tokenizer, tmp_path)
    assert folder.name.startswith("first-")
    assert lay_out("second", lines_of(lines), tokenizer, tmp_path) == folder
    os.utime(lines / "001.jsonl", (1, 1))  # touched, not changed
    assert lay_out("first", lines_of(lines), tokenizer, tmp_path) == folder
    moved = tmp_path / "elsewhere"
    shutil.move(lines, moved)
    assert lay_out("first", lines_of(moved), tokenizer, tmp_path) == folder


def test_a_changed_file_makes_another_corpus_and_is_named(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = write_lines(tmp_path / "lines", 3)
    folder = lay_out("a", lines_of(lines), tokenizer, tmp_path)
    assert source_changes(folder, lines_of(lines)) == []
    with (lines / "001.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    said: list[str] = []
    other = lay_out("a", lines_of(lines), tokenizer, tmp_path, report=said.append)
    assert other != folder
    assert "001.jsonl changed" in said[0]
    (sentence,) = source_changes(folder, lines_of(lines))
    assert "001.jsonl changed: it had" in sentence


def test_whatever_decides_the_tokens_is_in_the_fingerprint(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = lines_of(write_lines(tmp_path / "lines", 3))
    without_end = Tokenizer(tokenizer.path, add_eos=False)
    folders = {
        lay_out("a", lines, tokenizer, tmp_path),
        lay_out("a", lines, tokenizer, tmp_path, skip_bad=True),
        lay_out("a", lines, tokenizer, tmp_path, shard_documents=1),
        lay_out("a", lines, without_end, tmp_path),
    }
    assert len(folders) == 4


def test_the_fingerprint_is_that_of_every_version(tmp_path: Path) -> None:
    """The order of a run follows from it: one that was begun earlier finds its data again, even if
    its shards have to be made again, in another format."""
    source = RandomTokens(100, 5000, 4)
    folder = lay_out("a", source, None, tmp_path, shard_documents=1500, vocab_size=100)
    assert folder.name == "a-81a31976784fbd7e"


def test_two_sources_of_ones_own_with_the_same_list_stay_apart(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    first = lay_out("first", Sums(), tokenizer, tmp_path)
    assert lay_out("first", Sums(), tokenizer, tmp_path) == first
    assert lay_out("second", Sums(), tokenizer, tmp_path) != first
    assert lay_out("first", Sums(11), tokenizer, tmp_path) != first
    assert "lists different chunks" in source_changes(first, Sums(11))[0]


def test_two_may_lay_out_a_corpus_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = write_lines(tmp_path / "lines", 20)
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(lay_out("a", lines_of(lines), tokenizer, tmp_path / "out"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert [path.name for path in (tmp_path / "out").iterdir()] == [found[0].name]


def test_text_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a is text: specify the tokenizer .*--tokenizer"):
        lay_out("a", Sums(), None, tmp_path)


def test_a_bad_document_names_the_option_of_whoever_reads(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.jsonl").write_text('{"text": "one"}\n{"text": "\\ud83d"}\n')
    source = lines_of(tmp_path / "a")
    layout = read_layout(lay_out("a", source, tokenizer, tmp_path / "out"))
    with pytest.raises(
        DataError, match=r'half of a surrogate pair.*; data\.bad_documents = "skip" skips it'
    ):
        ShardMaker(layout, source, tokenizer).make(0)
    with pytest.raises(DataError, match=r"half of a surrogate pair.*; --skip-bad skips it"):
        build(layout.folder, source, tokenizer, processes=1)
    # A run that met one may skip it from there on.
    made = ShardMaker(layout, open_source(tmp_path / "a", skip_bad=True), tokenizer).make(0)
    assert made is not None


def test_a_source_without_chunks_is_empty(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="is empty"):
        lay_out("a", Sums(0), tokenizer, tmp_path)


# What version 0.1 gave for this very file: 1 MB, so marked by blocks of it.


def write_ids(folder: Path) -> Path:
    folder.mkdir()
    with (folder / "ids.jsonl").open("w") as file:
        for i in range(4000):
            file.write(json.dumps({"tokens": [(i * 7 + j) % 997 for j in range(50)]}) + "\n")
    return folder


def test_a_corpus_without_a_hash_of_each_file_is_found_after_a_touch_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.data.sources.file_marks.WHOLE_BYTES", 0)
    ids = write_ids(tmp_path / "ids")
    again = lay_out("ids", open_source(ids), None, tmp_path / "a", vocab_size=1000)
    os.utime(ids / "ids.jsonl", (1, 1))
    said: list[str] = []
    found = lay_out(
        "ids", open_source(ids), None, tmp_path / "a", vocab_size=1000, report=said.append
    )
    assert found == again
    assert len(said) == 1
    assert "has no hash of the whole file" in said[0]
