"""Perplexity: every token once, the numbers of a plain loop of transformers, on any number of
ranks, and killed evaluations resume."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overland.apps.evaluation import parts as parts_module
from overland.apps.evaluation.documents import Document
from overland.apps.evaluation.evaluate import (
    EvaluationRequest,
    evaluate_set,
    open_session,
    sets_for,
    settings_of,
)
from overland.apps.evaluation.parts import Cutter, TextWindows, WindowRow
from overland.apps.evaluation.perplexity import Done, Sums, batches, total
from overland.apps.evaluation.ranks import RankedModel
from overland.apps.evaluation.results import Record
from overland.apps.proofs.pool import RankPool
from overland.data.lanes import IGNORED
from overland.data.tokenizer import Tokenizer
from overland.world import World
from tests.cli.processes import overland, start_overland
from tests.evaluation.plain_perplexity import plain_losses, write_corpora
from tests.evaluation.texts import write_text_model
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    return write_corpora(tmp_path_factory.mktemp("corpora"), num_files=3, longest=8_000)


def evaluate(world: World, path: Path, data: Path, said: list[str] | None = None, **asked: Any):
    """One set, as the command does it."""
    heard = [] if said is None else said
    session = open_session(
        EvaluationRequest(path=path, data=(str(data),), **asked),
        world,
        torch.device("cpu"),
        heard.append,
    )
    (one,) = sets_for(session)
    return evaluate_set(session, one, settings_of(session))


def alone(path: Path, data: Path, **asked: Any) -> Record:
    return evaluate(World(), path, data, **asked)


def windows_of(num_tokens: int, context: int, stride: int) -> list[WindowRow]:
    """Those of a text whose tokens are their places."""
    text = TextWindows(context, stride)
    text.add([(np.arange(num_tokens), None)])
    return text.take(is_all=True)


def test_windows_count_every_token_exactly_once() -> None:
    for num_tokens in (0, 1, 2, 3, 9, 10, 11, 64, 65, 1001):
        for context in (2, 3, 10, 64):
            for stride in {1, max(1, context // 2), context}:
                counted: Counter[int] = Counter()
                for row in windows_of(num_tokens, context, stride):
                    assert 0 < len(row.tokens) <= context
                    assert row.num_scored > 0
                    scored = row.labels != IGNORED
                    assert (row.labels[scored] == row.tokens[scored] + 1).all()
                    counted.update(row.labels[scored].tolist())
                assert counted == Counter(range(1, num_tokens))


def test_a_token_has_at_least_half_a_context_before_it_once_there_is_one() -> None:
    for row in windows_of(1000, 64, 32):
        before = int(np.argmax(row.labels != IGNORED))
        assert before >= min(32, row.tokens[before])


def test_batches_hold_every_row_once_and_no_more_tokens_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(1)
    lengths = chance.choices(range(1, 65), k=99)
    ranked = RankedModel(torch.nn.Identity(), torch.device("cpu"))
    found = list(batches(ranked, lengths, 256))
    assert sorted(number for batch in found for number in batch) == list(range(99))
    for batch in found:
        labels_BS = ranked.padded([[0] * lengths[number] for number in batch], IGNORED)
        assert labels_BS.numel() <= 256
        assert (labels_BS != IGNORED).sum() == sum(lengths[number] for number in batch)
    monkeypatch.setattr(RankedModel, "stretches_from", 40)
    alike = [{lengths[number] for number in batch} for batch in batches(ranked, lengths, 256)]
    assert all(len(one) == 1 for one in alike if max(one) > 40)


@pytest.mark.parametrize("joined", [False, True])
def test_parts_count_every_token_once_wherever_they_are_cut(
    model: Path, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(model / "tokenizer.json", add_eos=False)
    chance = random.Random(2)
    documents = [Document(ids=np.array(chance.choices(range(1, 300), k=n), np.int64))
                 for n in chance.choices([0, 1, 2, 5, 30, 200, 1500], k=40)]  # fmt: skip
    for least in (10, 64, 1000, 10**6):
        monkeypatch.setattr(parts_module, "LEAST_TOKENS", least)
        monkeypatch.setattr(parts_module, "WINDOWS", 1)
        cutter = Cutter(tokenizer, context=32, stride=16, joined=joined)
        found = [part.make() for part in cutter.parts(documents)]
        scored = [label for part in found for row in part.rows
                  for label in row.labels.tolist() if label != IGNORED]  # fmt: skip
        expected = [one.ids.tolist() for one in documents if one.ids is not None]
        if joined:
            between = [token for text in expected for token in (tokenizer.eos_id, *text)]
            expected = [between[1:]]
        assert scored == [token for text in expected for token in text[1:]]
        assert sum(part.unscored for part in found) == sum(bool(text) for text in expected)


def test_joined_documents_have_the_windows_of_one_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For strides up to the context, wherever the text ends."""
    monkeypatch.setattr(parts_module, "LEAST_TOKENS", 40)
    monkeypatch.setattr(parts_module, "WINDOWS", 2)
    monkeypatch.setattr(parts_module, "TOGETHER", 2)
    tokenizer = Tokenizer(model / "tokenizer.json", add_eos=False)
    for size in (*range(40), 64, 65, 200):
        ids = np.arange(1, size + 1)
        documents = [Document(ids=one) for one in np.array_split(ids, 3)]
        text = np.concatenate([[tokenizer.eos_id, *one] for one in np.array_split(ids, 3)])[1:]
        for context in (2, 5, 8, 32):
            for stride in {1, context // 2, context // 2 + 1, context - 1, context}:
                cutter = Cutter(tokenizer, context, stride, joined=True)
                parts = islice(cutter.parts(documents), 500)  # of fewer; it once never ended
                rows = [row for part in parts for row in part.make().rows]
                plain = plain_windows(text.tolist(), context, stride)
                assert [(row.tokens.tolist(), row.labels.tolist()) for row in rows] == list(plain)


def plain_windows(
    text: list[int], context: int, stride: int
) -> Iterator[tuple[list[int], list[int]]]:
    start = counted = 0
    while counted < len(text) - 1:
        stop = min(start + context, len(text) - 1)
        seen = counted - start
        yield text[start:stop], [IGNORED] * seen + text[counted + 1 : stop + 1]
        start, counted = start + stride, stop


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [(None, [5, 6, 0, 7]), (0, [0, 5, 6, 0, 7]), (299, [299, 5, 6, 0, 299, 7])],
)
def test_a_prefix_precedes_each_joined_document(
    model: Path, prefix: int | None, expected: list[int]
) -> None:
    tokenizer = Tokenizer(model / "tokenizer.json")
    assert tokenizer.eos_id == 0
    cutter = Cutter(tokenizer, 16, 16, prefix, joined=True)
    documents = [Document(ids=np.array([5, 6])), Document(ids=np.array([7]))]
    (part,) = [part.make() for part in cutter.parts(documents)]
    (row,) = part.rows
    assert [*row.tokens.tolist(), row.labels.tolist()[-1]] == expected
    assert part.unscored == int(prefix is None)


def test_of_joined_conversations_only_learned_tokens_are_scored(model: Path) -> None:
    tokenizer = Tokenizer(model / "tokenizer.json")
    learned = np.array([False, True, True])
    documents = [Document(ids=np.array([5, 6, 7]), is_bare=False, counts=learned)] * 2
    (part,) = [one.make() for one in Cutter(tokenizer, 8, 8, joined=True).parts(documents)]
    scored = [one for row in part.rows for one in row.labels.tolist() if one != IGNORED]
    assert (scored, part.unscored) == ([6, 7, 6, 7], 0)


def test_parts_that_come_twice_and_in_any_order_have_the_same_sum() -> None:
    chance = random.Random(3)
    done = [Done(n, Sums(1, 10, 0, 5, 2, chance.random() * 10**n)) for n in range(12)]
    shuffled = chance.sample(done, 12) + chance.sample(done, 5)
    assert total(shuffled) == total(done)
    assert total(done).documents == 12


@pytest.mark.parametrize("name", ["sources", "lines", "table"])
def test_it_is_what_a_plain_loop_of_transformers_computes(
    name: str, model: Path, corpora: dict[str, tuple[Path, list[str]]], tmp_path: Path
) -> None:
    path, documents = corpora[name]
    found = alone(model, path, context=48, stride=20, output=tmp_path)
    loss, tokens = plain_losses(model, documents, context=48, stride=20)
    assert found["tokens"] == tokens
    assert found["documents"] == len(documents)
    assert found["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-6)
    assert found["bytes"] == sum(len(one.encode()) for one in documents)
    assert found["words"] == sum(len(one.split()) for one in documents)
    assert found["bits_per_byte"] == pytest.approx(loss / found["bytes"] / math.log(2), rel=1e-6)
    assert found["unscored"] == sum(bool(one) for one in documents)


def test_joined_it_is_what_a_plain_loop_computes_on_one_text(
    model: Path, corpora: dict[str, tuple[Path, list[str]]], tmp_path: Path
) -> None:
    path, documents = corpora["lines"]
    asked: dict[str, Any] = {"context": 48, "stride": 48}
    found = alone(model, path, joined=True, output=tmp_path, **asked)
    loss, tokens = plain_losses(model, documents, between=0, **asked)
    assert (found["tokens"], found["unscored"]) == (tokens, 1)
    assert found["summed_loss"] == pytest.approx(loss, rel=1e-6)


def test_the_first_token_follows_eos_if_asked(
    model: Path, corpora: dict[str, tuple[Path, list[str]]], tmp_path: Path
) -> None:
    path, documents = corpora["lines"]
    found = alone(model, path, context=48, stride=48, prefix="eos", output=tmp_path)
    loss, tokens = plain_losses(model, documents, context=48, stride=48, prefix=0)
    assert (found["tokens"], found["unscored"]) == (tokens, 0)
    assert found["summed_loss"] == pytest.approx(loss, rel=1e-6)


def test_any_number_of_ranks_gives_the_same_bits(
    model: Path,
    corpora: dict[str, tuple[Path, list[str]]],
    tmp_path: Path,
    ranks: RankPool,
) -> None:
    keys = ("summed_loss", "perplexity", "bits_per_byte", "word_perplexity", "tokens", "documents")
    path, _ = corpora["table"]
    torch.set_num_threads(1)
    one = alone(model, path, context=24, output=tmp_path / "one")
    for size in (2, 3):
        found = ranks.run(size, on_rank, model, path, tmp_path / f"{size}", {})
        for other in found:
            assert {key: other[key] for key in keys} == {key: one[key] for key in keys}


@pytest.mark.parametrize(("size", "tensor_parallel"), [(2, 1), (4, 2)])
def test_a_model_that_is_split_gives_the_same(
    size: int,
    tensor_parallel: int,
    model: Path,
    corpora: dict[str, tuple[Path, list[str]]],
    tmp_path: Path,
    ranks: RankPool,
) -> None:
    path, _ = corpora["lines"]
    one = alone(model, path, context=24, output=tmp_path / "one")
    asked = {"shard": True, "tensor_parallel": tensor_parallel}
    found = ranks.run(size, on_rank, model, path, tmp_path / "split", asked)
    for other in found:
        assert other["summed_loss"] == pytest.approx(one["summed_loss"], rel=1e-6)
        assert other["tokens"] == one["tokens"]


def on_rank(world: World, model: Path, path: Path, output: Path, asked: dict[str, Any]) -> Record:
    torch.set_num_threads(1)
    return evaluate(world, model, path, context=24, output=output, **asked)


def test_a_killed_evaluation_continues_and_gives_the_same_bits(
    model: Path, corpora: dict[str, tuple[Path, list[str]]], tmp_path: Path
) -> None:
    texts = [one * 8 for _, documents in corpora.values() for one in documents if len(one) > 500]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    words = ("eval", str(model), "--data", f"texts={path}", "--json")
    whole = json.loads(overland(*words, "--output", "whole", cwd=tmp_path).stdout)[0]
    chance = random.Random(os.getpid())
    for number in range(2):
        process = start_overland(*words, "--output", "killed", cwd=tmp_path)
        wanted = number + chance.random()
        wait_until(
            lambda process=process, wanted=wanted: (
                process.poll() is not None or lines_in(tmp_path / "killed") >= wanted
            )
        )
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = lines_in(tmp_path / "killed")
    with_torn = next((tmp_path / "killed").glob(".*/*.jsonl"), None)
    assert done
    assert with_torn is not None, "it was over before it could be killed"
    with with_torn.open("ab") as file:
        file.write(b'{"part": 1, "docum')
    last = overland(*words, "--output", "killed", cwd=tmp_path)
    assert f"resuming: {done} parts are already done" in last.stderr
    again = json.loads(last.stdout)[0]
    for key in ("summed_loss", "perplexity", "tokens", "documents", "bytes", "words"):
        assert again[key] == whole[key]
    assert [one.name for one in (tmp_path / "killed").iterdir()] == [Path(again["kept"]).name]


def lines_in(place: Path) -> int:
    """Parts that are done."""
    return sum(file.read_bytes().count(b"\n") for file in place.glob(".*/*.jsonl"))
