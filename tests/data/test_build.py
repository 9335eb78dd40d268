import gzip
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from overland.apps.data.build import build
from overland.data.corpus import Corpus
from overland.data.layout import lay_out, read_layout
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.cli.processes import ROOT, environment
from tests.data.making import (
    FatalLines,
    built,
    bytes_of,
    children_of,
    documents_of,
    is_running,
    leftovers,
    lines_of,
    slow_lines_of,
    streamed,
    write_lines,
)
from tests.waiting import wait_until

BUILD_SLOWLY = """
import sys
from pathlib import Path
from overland.apps.data.build import build
from overland.data.tokenizer import Tokenizer
from tests.data.making import slow_lines_of

folder, lines, tokenizer = map(Path, sys.argv[1:4])
build(folder, slow_lines_of(lines), Tokenizer(tokenizer), processes=2)
"""


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "lines", 12)


@pytest.fixture
def expected(tmp_path: Path, lines: Path, tokenizer: Tokenizer) -> list[bytes]:
    """What one process makes that is not disturbed."""
    corpus = streamed(lines, tokenizer, tmp_path / "expected", wait=False)
    documents_of(corpus)
    return bytes_of(corpus.folder)


def start(folder: Path, lines: Path, tokenizer: Tokenizer) -> subprocess.Popen[bytes]:
    words = [str(folder), str(lines), str(tokenizer.path)]
    return subprocess.Popen(
        [sys.executable, "-c", BUILD_SLOWLY, *words], cwd=ROOT, env=environment()
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_one_file_is_built_in_parts(
    tmp_path: Path, tokenizer: Tokenizer, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several processes and --part, so that a kill loses a shard and not the file."""
    monkeypatch.setattr("overland.data.sources.jsonl.PART_BYTES", 4000)
    lines = write_lines(tmp_path / "lines", 1, documents_per_file=300)
    texts = list(lines_of(lines).read("000.jsonl"))
    if suffix:
        (lines / "000.jsonl.gz").write_bytes(gzip.compress((lines / "000.jsonl").read_bytes()))
        (lines / "000.jsonl").unlink()
    source = lines_of(lines)
    folder = lay_out("a", source, tokenizer, tmp_path, shard_documents=1)
    layout = read_layout(folder)
    assert layout.num_shards >= 6
    assert build(folder, source, tokenizer, processes=2, part=(0, 2)).totals is None
    assert 0 < len(layout.made()) < layout.num_shards
    assert build(folder, source, tokenizer, processes=2, part=(1, 2)).totals is not None
    corpus = Corpus(folder)
    shards = [corpus.shard(number) for number in range(corpus.num_shards)]
    made = [one.document(i).tolist() for one in shards for i in range(one.info.num_documents)]
    assert [tokenizer.decode(ids) for ids in made] == texts


def test_processes_build_what_one_process_makes(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer, expected: list[bytes]
) -> None:
    folder = built(lines, tokenizer, tmp_path)
    assert bytes_of(folder) == expected
    assert leftovers(folder) == []
    corpus = Corpus(folder)
    assert corpus.is_complete
    sizes = corpus.sizes()
    assert sizes is not None
    assert sizes.shape == (12, 2)
    again = build(folder, lines_of(lines), tokenizer, processes=2)
    assert again.made.num_made == 0
    assert (again.counted.num_documents, again.counted.num_tokens) == tuple(
        np.sum(sizes, axis=0).tolist()
    )


def test_parts_make_the_whole_and_the_last_one_completes_it(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer, expected: list[bytes]
) -> None:
    folder = lay_out("lines", lines_of(lines), tokenizer, tmp_path, shard_documents=1)
    done = [
        build(folder, lines_of(lines), tokenizer, processes=2, part=(number, 3))
        for number in (1, 0, 2)
    ]
    assert [one.made.num_made for one in done] == [4, 4, 4]
    assert [one.totals is not None for one in done] == [False, False, True]
    assert sum(one.made.num_tokens for one in done) == done[-1].counted.num_tokens
    assert bytes_of(folder) == expected


def test_a_build_that_is_killed_again_and_again_makes_the_same_bytes(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer, expected: list[bytes]
) -> None:
    folder = lay_out("lines", lines_of(lines), tokenizer, tmp_path, shard_documents=1)
    layout = read_layout(folder)
    draw = random.Random(0)
    for _ in range(3):
        before = layout.made()
        process = start(folder, lines, tokenizer)
        wait_until(lambda before=before: layout.made().keys() > before.keys(), "a shard")
        time.sleep(draw.random() * 0.3)
        children = children_of(process.pid)
        process.kill()
        process.wait()
        assert len(children) == 2
        wait_until(
            lambda children=children: not any(map(is_running, children)), "the children to end"
        )
    made = layout.made()
    assert 3 <= len(made) < 12
    times = {number: layout.shard_path(number).stat().st_mtime_ns for number in made}
    build(folder, lines_of(lines), tokenizer, processes=2)
    assert bytes_of(folder) == expected
    assert all(layout.shard_path(n).stat().st_mtime_ns == time for n, time in times.items())
    assert leftovers(folder) == []


def test_a_process_that_is_killed_is_replaced(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer, expected: list[bytes]
) -> None:
    folder = lay_out("lines", lines_of(lines), tokenizer, tmp_path, shard_documents=1)
    process = start(folder, lines, tokenizer)
    wait_until(lambda: read_layout(folder).made(), "a shard")
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    assert process.wait(60) == 0
    assert bytes_of(folder) == expected
    assert Corpus(folder).is_complete


def test_two_builders_share_the_work(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer, expected: list[bytes]
) -> None:
    folder = lay_out("lines", lines_of(lines), tokenizer, tmp_path, shard_documents=1)
    made: list[int] = []

    def run() -> None:
        done = build(folder, slow_lines_of(lines), tokenizer, processes=2)
        made.append(done.made.num_made)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made) == 12
    assert bytes_of(folder) == expected
    assert Corpus(folder).is_complete


def test_bad_content_ends_a_build_and_names_the_record(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    path = lines / "007.jsonl"
    path.write_text(path.read_text() + "oops\n")
    folder = lay_out("lines", lines_of(lines), tokenizer, tmp_path, shard_documents=1)
    with pytest.raises(DataError, match=r"007\.jsonl:21: not a JSON object"):
        build(folder, lines_of(lines), tokenizer, processes=2)
    assert not Corpus(folder).is_complete


def test_a_file_that_changes_between_two_parts_is_named(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    folder = lay_out("lines", lines_of(lines), tokenizer, tmp_path, shard_documents=1)
    build(folder, lines_of(lines), tokenizer, processes=2, part=(0, 2))
    (lines / "008.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(DataError, match=r"008\.jsonl changed"):
        build(folder, lines_of(lines), tokenizer, processes=2, part=(1, 2))


def test_processes_that_always_end_are_an_error_with_a_way_out(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    source = FatalLines(lines, sorted(path.name for path in lines.iterdir()))
    folder = lay_out("lines", source, tokenizer, tmp_path, shard_documents=1)
    with pytest.raises(DataError, match=r"keep dying.*try fewer --processes"):
        build(folder, source, tokenizer, processes=1)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_cannot_be_written_is_named(
    tmp_path: Path, tokenizer: Tokenizer, processes: int
) -> None:
    """A limit on the size of files stands for a full disk: the system names no file either."""
    source = lines_of(write_lines(tmp_path / "text", 4, 1000))
    folder = lay_out("lines", source, tokenizer, tmp_path / "out", shard_documents=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            build(folder, source, tokenizer, processes=processes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(error.value.filename).startswith(str(folder / "shards"))
