"""The loader by itself, as a training script of one's own uses it."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overland.data import build_train_loader
from overland.data.batch import IGNORED
from overland.data.errors import DataError
from overland.data.tokenizer import Tokenizer, train_tokenizer
from tests.data.sources.samples import copied


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "tokenizer").mkdir()
    text = ["the quick brown fox jumps over the lazy dog"] * 5
    train_tokenizer(text, 300, tmp_path / "tokenizer" / "tokenizer.json")
    return {
        "mds_root": copied("mds_plain", tmp_path),
        "tokenizer_name": str(tmp_path / "tokenizer"),
        "seq_len": 64,
        "local_cache": tmp_path / "cache",
    }


def some(loader: Any, count: int) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("strategy", ["pack", "overflow", "trunc"])
def test_the_call_of_the_playground_works(settings: dict[str, Any], strategy: str) -> None:
    loader = build_train_loader(**settings, strategy=strategy, micro_blocks=4)
    for batch in some(loader, 5):
        assert {field.shape for field in batch.values()} == {(4, 64)}
        valid = batch["labels"] != IGNORED
        assert valid.any()
        after = batch["input_ids"].roll(-1, 1)
        assert (batch["labels"] == after)[:, :-1][valid[:, :-1]].all()
        assert torch.equal(batch["position_ids"], torch.arange(64).expand(4, 64))
    loader.close()


def test_borders_count_where_they_are_asked_for(settings: dict[str, Any]) -> None:
    loader = build_train_loader(**settings, micro_blocks=4, document_mask=True)
    for batch in some(loader, 3):
        begins = batch["position_ids"] == 0
        assert torch.equal(begins.cumsum(1) - 1, batch["document_ids"])
        assert (batch["labels"][:, :-1][begins[:, 1:]] == IGNORED).all()


def test_ranks_share_each_batch(settings: dict[str, Any]) -> None:
    whole = some(build_train_loader(**settings, micro_blocks=6, rank=0, world_size=1), 3)
    ranks = [
        some(build_train_loader(**settings, micro_blocks=2, rank=rank, world_size=3), 3)
        for rank in range(3)
    ]
    for step in range(3):
        joined = torch.cat([batches[step]["input_ids"] for batches in ranks])
        assert torch.equal(joined, whole[step]["input_ids"])


def test_rank_and_world_size_come_from_torchrun(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = build_train_loader(**settings, micro_blocks=2)
    assert (loader.rank, loader.world_size) == (1, 2)


def test_a_state_goes_on_with_another_number_of_ranks(settings: dict[str, Any]) -> None:
    unbroken = some(build_train_loader(**settings, micro_blocks=4, world_size=1), 5)
    first = build_train_loader(**settings, micro_blocks=4, world_size=1)
    some(first, 2)
    rest = []
    for rank in range(2):
        loader = build_train_loader(**settings, micro_blocks=2, rank=rank, world_size=2)
        loader.load_state_dict(first.state_dict())
        rest.append(some(loader, 3))
    for step in range(3):
        joined = torch.cat([rest[rank][step]["input_ids"] for rank in range(2)])
        assert torch.equal(joined, unbroken[2 + step]["input_ids"])


def test_a_batch_that_was_read_ahead_but_not_taken_comes_again(settings: dict[str, Any]) -> None:
    loader = build_train_loader(**settings, micro_blocks=4)
    some(loader, 2)
    assert loader.state_dict()["step"] == 2
    unbroken = some(build_train_loader(**settings, micro_blocks=4), 3)
    assert torch.equal(some(loader, 1)[0]["input_ids"], unbroken[2]["input_ids"])


def test_every_document_of_the_fixture_comes_once(settings: dict[str, Any]) -> None:
    tokenizer = Tokenizer(Path(settings["tokenizer_name"]))
    loader = build_train_loader(**settings, strategy="overflow", micro_blocks=1)
    lane = loader.dataset.rows.lanes(0).lanes[0]
    num_blocks = lane.num_blocks(lane.windows.per_epoch)  # type: ignore[union-attr]
    ends = sum(
        int((batch["labels"] == tokenizer.eos_id).sum()) for batch in some(loader, num_blocks)
    )
    documents = sum(
        info.num_documents
        for number in range(lane.windows.corpus.num_shards)  # type: ignore[union-attr]
        for info in [lane.windows.corpus.shard(number).info]  # type: ignore[union-attr]
    )
    assert ends == documents > 0


def test_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    ids = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    np.save(tmp_path / "ids.npy", ids)
    loader = build_train_loader(tmp_path / "ids.npy", seq_len=63, micro_blocks=2,
                                local_cache=tmp_path / "cache", strategy="trunc")  # fmt: skip
    for batch in some(loader, 4):
        assert (batch["input_ids"][:, 0] % 64 == 0).all()


def test_a_tokenizer_that_is_nowhere_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="there is no tokenizer 'meta-llama/none', neither"):
        build_train_loader(**{**settings, "tokenizer_name": "meta-llama/none"})


def test_a_name_is_found_in_the_cache_of_hugging_face(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    Path(settings["tokenizer_name"]).rename(repository / "snapshots" / "abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    loader = build_train_loader(**{**settings, "tokenizer_name": "some/model"}, micro_blocks=1)
    assert some(loader, 1)[0]["input_ids"].shape == (1, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "nope"}, "strategy is 'nope'; known: pack"),
        ({"micro_blocks": 0}, "micro_blocks and seq_len must be 1 or more"),
        ({"tokenizer_name": None}, "is text: say which tokenizer"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(
    settings: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_train_loader(**{**settings, **change})


def test_a_state_of_another_corpus_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    state = build_train_loader(**settings, micro_blocks=1).state_dict()
    np.save(tmp_path / "ids.npy", np.arange(64).reshape(8, 8))
    other = build_train_loader(tmp_path / "ids.npy", local_cache=tmp_path / "cache", seq_len=4)
    with pytest.raises(DataError, match="the state is of mds_plain, not of this corpus"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="this is no state of a loader"):
        other.load_state_dict({"foo": 1})
