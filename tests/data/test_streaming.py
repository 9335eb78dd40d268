import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from overland.apps.data.build import build
from overland.data import corpus as corpus_module
from overland.data.corpora import Preparer
from overland.data.corpus import Corpus
from overland.data.layout import CorpusLayout, lay_out
from overland.data.prepare import training_data
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.cli.processes import ROOT, environment
from tests.data.making import (
    built,
    bytes_of,
    is_running,
    leftovers,
    lines_of,
    slow_lines_of,
    streamed,
    write_lines,
)
from tests.data.test_holdout import config_of
from tests.waiting import wait_until


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "lines", 8)


def slow(
    lines: Path, tokenizer: Tokenizer, root: Path, processes: int, seconds: float = 0.1
) -> Corpus:
    source = slow_lines_of(lines, seconds)
    folder = lay_out("slow", source, tokenizer, root, shard_documents=1)
    return Corpus(folder, lambda: source, tokenizer, processes=processes)


def pids(corpus: Corpus) -> list[int]:
    assert corpus.workers is not None
    return corpus.workers.pids


def claims_of(layout: CorpusLayout) -> list[Path]:
    return list((layout.folder / "shards").glob("*/*.claim"))


def test_streamed_shards_are_those_of_a_build_whatever_their_order(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    corpus = streamed(lines, tokenizer, tmp_path / "streamed", processes=2)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    corpus.expect(order)
    for number in order:
        corpus.shard(number).verify()
    children = pids(corpus)
    assert len(children) == 2
    assert all(map(is_running, children))
    corpus.close()
    assert not any(map(is_running, children))
    assert bytes_of(corpus.folder) == bytes_of(built(lines, tokenizer, tmp_path / "built"))
    assert leftovers(corpus.folder) == []


def test_a_background_process_never_imports_torch() -> None:
    code = (
        "import sys, overland.data.workers, overland.data.tokenizer_encoders\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)


def test_nothing_is_started_for_a_little_corpus_or_a_built_one(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    little = write_lines(tmp_path / "little", 2)
    corpus = streamed(little, tokenizer, tmp_path, processes=2)
    corpus.expect([0, 1])
    assert corpus.shard(1).info.num_documents == 20
    assert corpus.workers is None
    folder = built(write_lines(tmp_path / "more", 5), tokenizer, tmp_path)
    corpus = Corpus(folder, processes=2)
    corpus.expect(range(5))
    assert corpus.workers is None


def test_processes_killed_while_a_reader_waits_do_not_stop_it(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    corpus = slow(lines, tokenizer, tmp_path, processes=2, seconds=0.2)
    corpus.expect(range(8))
    wait_until(lambda: claims_of(corpus.layout), "a claim")
    reader = threading.Thread(target=lambda: [corpus.shard(number) for number in (0, 1)])
    reader.start()
    for pid in pids(corpus):
        os.kill(pid, signal.SIGKILL)
    reader.join(300)  # only a hang takes so long
    assert not reader.is_alive()
    assert len(pids(corpus)) == 2  # others in their place
    assert all(map(is_running, pids(corpus)))
    assert corpus.shard(7).info.num_documents == 20
    corpus.close()
    assert leftovers(corpus.folder) == []


PARENT = """
import sys, time
from pathlib import Path
from overland.data.tokenizer import Tokenizer
from tests.data.test_streaming import pids, slow

lines, tokenizer, root = map(Path, sys.argv[1:4])
corpus = slow(lines, Tokenizer(tokenizer), root, processes=2, seconds=0.3)
corpus.expect(range(8))
corpus.shard(0)
print(*pids(corpus), flush=True)
time.sleep(600)
"""


def test_background_processes_end_when_their_parent_is_killed(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    words = [str(lines), str(tokenizer.path), str(tmp_path)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    for number in (signal.SIGINT, signal.SIGTERM):  # which a job gets as a whole
        for pid in children:
            os.kill(pid, number)
    assert all(map(is_running, children))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_running, children)), "the children to end")
    assert claims_of(slow(lines, tokenizer, tmp_path, 0).layout) == []


def test_what_is_wrong_with_a_shard_reaches_its_reader_and_no_other(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    path = lines / "003.jsonl"
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n')
    corpus = streamed(lines, tokenizer, tmp_path, processes=2)
    corpus.expect([3, *range(8)])
    for number in (0, 1, 2, 4):
        corpus.shard(number)
    for _ in range(2):
        with pytest.raises(DataError, match=r"003\.jsonl:21: expected UTF-8"):
            corpus.shard(3)
    assert corpus.shard(7).info.num_documents == 20
    corpus.close()


def test_ranks_share_one_folder_and_make_each_shard_once(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    first = slow(lines, tokenizer, tmp_path, processes=2)
    others = [slow(lines, tokenizer, tmp_path, processes=0) for _ in range(3)]
    first.expect(range(8))

    def read(corpus: Corpus) -> None:
        for number in range(8):
            corpus.shard(number)

    threads = [threading.Thread(target=read, args=[corpus]) for corpus in (first, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    inodes = {corpus.shard(0).path.stat().st_ino for corpus in others}
    assert len(inodes) == 1
    first.close()


def test_the_cache_stays_within_its_bound_while_a_reader_goes_on(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "OPEN_SHARDS", 3)
    lines = write_lines(tmp_path / "lines", 30)
    complete = Corpus(built(lines, tokenizer, tmp_path / "built"))
    bound = sum(map(len, bytes_of(complete.folder))) // 3
    corpus = streamed(lines, tokenizer, tmp_path, processes=2, cache_bytes=bound)
    kept = corpus.shard(0)
    largest = 0
    for number in [*range(30), *range(5)]:  # continues with a second epoch: evicted ones come again
        corpus.expect([n % 30 for n in range(number, number + 3)])
        np.testing.assert_array_equal(corpus.shard(number).tokens, complete.shard(number).tokens)
        largest = max(largest, sum(corpus.layout.made().values()))
    largest_shard = max(map(len, bytes_of(complete.folder)))
    assert largest <= bound + largest_shard  # how large one will be shows when it is made
    assert len(corpus.layout.made()) < 15
    np.testing.assert_array_equal(kept.tokens, complete.shard(0).tokens)  # mapped still
    corpus.close()


def test_a_build_is_never_evicted(tmp_path: Path, lines: Path, tokenizer: Tokenizer) -> None:
    folder = built(lines, tokenizer, tmp_path)
    corpus = Corpus(folder, processes=1, cache_bytes=1)
    for _ in range(5):
        corpus.expect([0])
    (folder / "sizes.npy").unlink()  # a build that is under way
    for _ in range(5):
        corpus.expect([0])
    assert len(corpus.layout.made()) == 8


def test_a_source_that_cannot_be_sent_is_read_here(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    source = lines_of(lines)
    source.tie = lambda: None  # type: ignore[attr-defined]  # which no process can be sent
    folder = lay_out("lines", source, tokenizer, tmp_path, shard_documents=1)
    corpus = Corpus(folder, lambda: source, tokenizer, processes=2)
    corpus.expect(range(8))
    assert corpus.workers is None
    assert [corpus.shard(number).info.num_documents for number in range(8)] == [20] * 8


def test_a_shard_that_was_evicted_meanwhile_is_made_again(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    corpus = streamed(lines, tokenizer, tmp_path, wait=False)
    data = corpus.shard(4).path.read_bytes()
    corpus.shard(4).path.unlink()
    other = streamed(lines, tokenizer, tmp_path, wait=False)
    assert other.shard(4).path.read_bytes() == data


def test_closing_a_corpus_frees_a_reader_that_waits(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    corpus = slow(lines, tokenizer, tmp_path, processes=1, seconds=60)
    corpus.expect(range(8))
    wait_until(lambda: claims_of(corpus.layout), "a claim")
    told: list[DataError] = []

    def read() -> None:
        try:
            corpus.shard(0)
        except DataError as error:
            told.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    corpus.close()
    reader.join(300)
    assert "was closed" in str(told[0])


def test_a_cache_of_ones_own_does_not_hide_a_corpus_that_is_built(
    tmp_path: Path, lines: Path, tokenizer: Tokenizer
) -> None:
    """Scripts for many nodes set data.cache_folder, whether `overland data build` ran or not."""
    config = config_of(lines, tmp_path / "data", tokenizer, 0)
    training_data(config, 4, None, Preparer())
    (folder,) = (tmp_path / "data").glob("lines-*")
    config.data.cache_folder = str(tmp_path / "own")
    said: list[str] = []
    training_data(config, 4, None, Preparer(report=said.append)).close()
    assert any(f"ahead of training, in {tmp_path}/own" in line for line in said)
    build(folder, lines_of(lines), tokenizer, processes=1)
    said.clear()
    data = training_data(config, 4, None, Preparer(report=said.append))
    (corpus,) = data.rows.corpora.values()
    assert isinstance(corpus, Corpus)
    assert corpus.layout.folder == folder
    assert f"lines is read from {folder}, where it is built, not data.cache_folder" in said
