import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from overland.apps.data.build import build
from overland.data import corpus as corpus_module
from overland.data import shard as shard_module
from overland.data.corpus import Corpus
from overland.data.layout import lay_out
from overland.data.sampler import Sampler
from overland.data.sources import open_source
from overland.data.sources.source import Document, Source
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.data.corpora import Numbered, make_corpus, one_segment, rows_of
from tests.data.making import (
    RandomTokens,
    built,
    bytes_of,
    documents_of,
    leftovers,
    lines_of,
    streamed,
    write_lines,
)


def opened(source: Source, tokenizer: Tokenizer | None, root: Path, **policy: object) -> Corpus:
    folder = lay_out("a", source, tokenizer, root, **policy)  # type: ignore[arg-type]
    return Corpus(folder, lambda: source, tokenizer, wait=False)  # type: ignore[arg-type,return-value]


def test_shards_hold_every_document_in_the_order_of_the_source(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = write_lines(tmp_path / "lines", 5)
    corpus = streamed(lines, tokenizer, tmp_path, wait=False)
    assert corpus.num_shards == 5
    texts = [
        json.loads(line)["text"]
        for path in sorted(lines.iterdir())
        for line in path.read_text().splitlines()
    ]
    assert documents_of(corpus) == [ids.tolist() for ids in tokenizer.encode_documents(texts)]
    assert corpus.eos_id == tokenizer.eos_id
    assert leftovers(corpus.folder) == []


def test_ids_take_two_bytes_where_the_vocabulary_allows(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    assert streamed(write_lines(tmp_path / "l", 1), tokenizer, tmp_path).layout.dtype == "<u2"
    source = RandomTokens(100, 3, 4)
    for size, dtype in ((65_536, "<u2"), (65_537, "<u4"), (None, "<u4")):
        corpus = opened(source, None, tmp_path, vocab_size=size)
        assert corpus.layout.dtype == dtype
        assert corpus.shard(0).tokens.dtype == dtype
        assert documents_of(corpus) == [ids.tolist() for ids in source.read("0")]  # nothing added


def test_a_built_corpus_needs_neither_source_nor_tokenizer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = write_lines(tmp_path / "lines", 3)
    before = streamed(lines, tokenizer, tmp_path)
    assert before.sizes() is None
    folder = built(lines, tokenizer, tmp_path)
    for path in lines.iterdir():
        path.unlink()
    corpus = Corpus(folder)
    assert corpus.is_complete
    sizes = corpus.sizes()
    assert sizes is not None
    shards = [corpus.shard(number) for number in range(3)]
    assert sizes.tolist() == [[s.info.num_documents, s.info.num_tokens] for s in shards]
    corpus.layout.shard_path(1).unlink()
    with pytest.raises(DataError, match=r"0000001\.shard is missing from a complete corpus"):
        Corpus(folder).shard(1)


def test_a_shard_that_nobody_makes_is_an_error_in_the_end(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "PATIENCE_SECONDS", 0.1)
    folder = streamed(write_lines(tmp_path / "lines", 3), tokenizer, tmp_path).folder
    with pytest.raises(DataError, match="missing and no process is making it: run `overland data"):
        Corpus(folder).shard(1)


def test_the_stale_claim_of_another_node_costs_no_more_than_a_moment(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    corpus = streamed(write_lines(tmp_path / "lines", 2), tokenizer, tmp_path)
    claim = corpus.layout.claim_path(0)
    claim.parent.mkdir(parents=True)
    claim.write_text(json.dumps({"host": "elsewhere", "process": 1, "start": "1"}))
    past = time.time() - 100
    os.utime(claim, (past, past))
    assert corpus.shard(0).info.num_documents == 20
    assert not claim.exists()


BAD = {
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n', r"a\.jsonl:2: .*UTF-8"),
    "not JSON": (b'{"text": "a"}\noops\n{"text": "b"}\n', r"a\.jsonl:2: not a JSON object"),
    "no column": (b'{"text": "a"}\n{"word": 1}\n{"text": "b"}\n', r"a\.jsonl:2: expected"),
    "id": (
        b'{"tokens": [1]}\n{"tokens": [1, 300]}\n{"tokens": [299]}\n',
        r"a\.jsonl: document 1 has the id 300, which is outside a vocabulary of 300",
    ),
    "negative": (
        b'{"tokens": [1]}\n{"tokens": [-1]}\n{"tokens": [2]}\n',
        "-1 is not a token id",
    ),
    "no ids": (b'{"tokens": [1]}\n{"tokens": []}\n{"tokens": [2]}\n', "holds no tokens"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_content_is_named_or_skipped_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, kind: str
) -> None:
    data, message = BAD[kind]
    (tmp_path / "a.jsonl").write_bytes(data)
    corpus = opened(open_source(tmp_path / "a.jsonl"), tokenizer, tmp_path, vocab_size=300)
    with pytest.raises(DataError, match=message):
        corpus.shard(0)
    assert leftovers(corpus.folder) == []
    source = open_source(tmp_path / "a.jsonl", skip_bad=True)
    corpus = opened(source, tokenizer, tmp_path, vocab_size=300, skip_bad=True)
    shard = corpus.shard(0)
    assert (shard.info.num_documents, shard.info.num_bad) == (2, 1)
    corpus.shard(0)
    assert corpus.num_bad == 1
    built = build(corpus.folder, source, tokenizer, processes=2)
    assert (built.counted.num_documents, built.counted.num_bad) == (2, 1)


def test_empty_texts_are_left_out_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    source = open_source(tmp_path / "a.jsonl")
    corpus = opened(source, tokenizer, tmp_path, vocab_size=300)
    assert corpus.shard(0).info.num_documents == 2
    assert corpus.num_bad == 1
    built = build(corpus.folder, source, tokenizer, processes=2)
    assert (built.counted.num_documents, built.counted.num_bad) == (2, 1)


def test_a_file_that_is_cut_short_is_an_error_under_every_policy(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = (os.urandom(1000).hex() for _ in range(2000))
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines, 1)[:-1000])
    source = open_source(tmp_path / "a.jsonl.gz", skip_bad=True)
    corpus = opened(source, tokenizer, tmp_path, skip_bad=True)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        corpus.shard(0)


class Odd(Source):
    """A source of somebody's own that gives what is no text."""

    skip_bad = False

    def chunks(self) -> list[str]:
        return ["one"]

    def read(self, chunk: str) -> Iterator[Document]:
        yield "good"
        yield "half of a pair: \ud83d"
        yield 7  # type: ignore[misc]


def test_what_is_no_text_is_bad_content_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="one: document 1 has half of a surrogate pair"):
        opened(Odd(), tokenizer, tmp_path).shard(0)  # type: ignore[arg-type]
    shard = opened(Odd(), tokenizer, tmp_path, skip_bad=True).shard(0)  # type: ignore[arg-type]
    assert (shard.info.num_documents, shard.info.num_bad) == (1, 2)


def test_a_corpus_without_a_document_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": ""}\n')
    source = open_source(tmp_path, skip_bad=True)
    corpus = opened(source, tokenizer, tmp_path / "out", skip_bad=True, shard_documents=1)
    assert corpus.shard(0).info.num_documents == 0
    with pytest.raises(DataError, match="is empty: it holds no documents, 2 empty or bad"):
        corpus.shard(1)
    with pytest.raises(DataError, match="is empty: it holds no documents, 2 empty or bad"):
        build(corpus.folder, source, tokenizer, processes=2)


def test_no_shard_is_made_from_a_file_that_was_edited_in_its_middle(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = write_lines(tmp_path / "lines", 1, documents_per_file=5000)
    folder = lay_out("a", lines_of(lines), tokenizer, tmp_path)
    corpus = Corpus(folder, lambda: lines_of(lines), tokenizer, wait=False)
    os.utime(lines / "000.jsonl", (1, 1))
    assert corpus.shard(0).info.num_documents == 5000
    corpus.layout.shard_path(0).unlink()
    text = (lines / "000.jsonl").read_text()
    (lines / "000.jsonl").write_text(text.replace('"0 2501 ', '"0 2502 '))
    corpus = Corpus(folder, lambda: lines_of(lines), tokenizer, wait=False)
    with pytest.raises(DataError, match=r"000\.jsonl changed: its size is the same, but its con"):
        corpus.shard(0)


def test_no_shard_is_made_from_a_file_that_changed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = write_lines(tmp_path / "lines", 3)
    corpus = streamed(lines, tokenizer, tmp_path, wait=False)
    text = (lines / "001.jsonl").read_text()
    (lines / "001.jsonl").write_text(text.replace("tokens", "snekot"))
    corpus.shard(0)
    with pytest.raises(DataError, match=r"001\.jsonl changed: .*was laid out"):
        corpus.shard(1)
    assert not corpus.layout.shard_path(1).exists()


def test_few_shards_are_kept_open_and_any_can_be_had_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "OPEN_SHARDS", 2)
    corpus = streamed(write_lines(tmp_path / "lines", 4), tokenizer, tmp_path, wait=False)
    first = corpus.shard(0)
    assert corpus.shard(0) is first
    for number in (1, 2, 3):
        corpus.shard(number)
    again = corpus.shard(0)
    assert again is not first
    np.testing.assert_array_equal(again.tokens, first.tokens)
    with pytest.raises(IndexError):
        corpus.shard(4)


def test_a_corpus_can_be_read_and_built_as_a_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = built(write_lines(tmp_path / "lines", 3), tokenizer, tmp_path)
    source = open_source(folder)
    assert (source.format, source.kind, len(source.chunks())) == ("corpus", "tokens", 3)
    copy = opened(source, None, tmp_path / "copy", vocab_size=300)
    assert documents_of(copy) == documents_of(Corpus(folder))
    path = Corpus(folder).layout.shard_path(2)
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"!!" + data[102:])
    with pytest.raises(DataError, match=r"0000002\.shard is damaged"):
        list(source.read(source.chunks()[2]))
    assert bytes_of(folder)[0] == Corpus(folder).layout.shard_path(0).read_bytes()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def read_all(rows: Sampler) -> None:
    for batch in range(20):
        rows.read(batch)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("place", [70, -200])  # a token, the index
def test_training_stops_before_it_reads_a_shard_with_a_flipped_bit(
    tmp_path: Path, place: int, num_ranks: int
) -> None:
    corpus = make_corpus("a", Numbered(100, 60), tmp_path, built=True)
    plan = one_segment({"a": corpus}, {"a": 1.0}, global_batch_size=6)
    good = rows_of(plan, {"a": corpus})
    right = [good.read(batch).tokens for batch in range(20)]
    flip(corpus.layout.shard_path(3), place)
    ranks = [rows_of(plan, {"a": Corpus(corpus.folder)}) for _ in range(num_ranks)]

    def train() -> None:
        for batch in range(20):
            parts = [one.read(batch, part, num_ranks).tokens for part, one in enumerate(ranks)]
            assert np.array_equal(np.concatenate(parts), right[batch])

    with pytest.raises(DataError, match=r"0000003\.shard is damaged"):
        train()


def test_each_of_many_ranks_hashes_little_more_than_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    sum_of = shard_module._sum

    def counting(data: bytes | memoryview, key: bytes = b"") -> int:
        hashed.append(len(data))
        return sum_of(data, key)

    monkeypatch.setattr(shard_module, "_sum", counting)
    monkeypatch.setattr(shard_module, "BLOCK_BYTES", 512)
    source = Numbered(1, 200, longest=1000, per_chunk=20)
    corpus = make_corpus("a", source, tmp_path, built=True)
    size = sum(path.stat().st_size for path in corpus.folder.glob("shards/*/*"))
    num_ranks, worst = 32, 0
    plan = one_segment({"a": corpus}, {"a": 1.0}, seq_len=512, global_batch_size=num_ranks)
    for part in (0, 17, 31):
        hashed.clear()
        rows = rows_of(plan, {"a": Corpus(corpus.folder)})
        for batch in range(rows.num_batches()):
            rows.read(batch, part, num_ranks)
        worst = max(worst, sum(hashed))
    assert worst < size / 4


@pytest.mark.parametrize("place", [0, -8])  # its head, the tokens of the last shard
def test_damaged_sizes_of_a_corpus_are_found(tmp_path: Path, place: int) -> None:
    corpus = make_corpus("a", Numbered(100, 60), tmp_path, built=True)
    flip(corpus.layout.sizes_path, place)
    rows = rows_of(one_segment({"a": corpus}, {"a": 1.0}), {"a": Corpus(corpus.folder)})
    with pytest.raises(DataError, match=r"sizes\.npy is damaged"):
        read_all(rows)


def test_a_shard_deleted_from_a_complete_corpus_is_built_again(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = write_lines(tmp_path / "lines", 3)
    folder = built(lines, tokenizer, tmp_path)
    before = bytes_of(folder)
    Corpus(folder).layout.shard_path(1).unlink()
    build(folder, lines_of(lines), tokenizer, processes=1)
    assert bytes_of(folder) == before


def test_a_corpus_that_is_not_complete_is_no_source_yet(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    corpus = streamed(write_lines(tmp_path / "lines", 3), tokenizer, tmp_path, wait=False)
    corpus.shard(1)
    with pytest.raises(DataError, match="has only 1 of its 3 shards"):
        open_source(corpus.folder)
