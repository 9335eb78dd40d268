"""The loader by itself, as a user's own training script uses it."""

import inspect
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from overland.apps.data.tokenizer_training import train_tokenizer
from overland.data import build_train_loader
from overland.data.lanes import IGNORED
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.cluster.test_world import recorded
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
        assert set(batch) == {"input_ids", "labels", "attention_mask"}
        assert {field.shape for field in batch.values()} == {(4, 64)}
        assert torch.equal(batch["labels"] != IGNORED, batch["attention_mask"] == 1)
        real = batch["attention_mask"] == 1
        assert torch.equal(batch["labels"][real], batch["input_ids"][real])
    loader.close()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("salloc", (0, 1)),
        ("salloc_interactive", (0, 1)),
        ("sbatch", (0, 1)),
        ("sbatch_from_task", (0, 1)),
        ("srun", (5, 8)),
    ],
)
def test_slurm_gives_the_place_only_of_a_task_that_srun_started(
    name: str, place: tuple[int, int], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in recorded(name).items():
        monkeypatch.setenv(variable, value)
    loader = build_train_loader(**settings, micro_blocks=4)
    assert (loader.rank, loader.world_size) == place
    loader.close()


def test_its_length_is_one_pass_over_the_data(settings: dict[str, Any]) -> None:
    loader = build_train_loader(**settings, micro_blocks=4)
    with pytest.raises(TypeError, match="num_batches"):  # nothing is tokenized yet
        len(loader)
    assert loader
    assert loader.num_batches() > 1
    assert len(loader) == loader.num_batches()
    loader.close()


def test_its_defaults_are_those_of_the_playground() -> None:
    call = {"strategy": "pack", "seq_len": 2048, "micro_blocks": 64}
    parameters = inspect.signature(build_train_loader).parameters
    assert {name: parameters[name].default for name in call} == call


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        use_cache=False, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("mask", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("strategy", ["pack", "trunc"])
def test_a_hugging_face_model_learns_the_next_token(
    settings: dict[str, Any], llama: Any, strategy: str, mask: bool
) -> None:
    """Its loss is the mean of the next-token losses, worked out here from the shifted labels, less
    the one at the end of each full row."""
    ours, theirs = (
        build_train_loader(
            **settings, strategy=strategy, micro_blocks=4, document_mask=mask, shifted=shifted
        )
        for shifted in (True, False)
    )
    for mine, batch in zip(some(ours, 3), some(theirs, 3), strict=True):
        assert torch.equal(mine["input_ids"], batch["input_ids"])
        with torch.no_grad():
            output = llama(**batch)
        losses = torch.nn.functional.cross_entropy(
            output.logits[:, :-1].transpose(1, 2), mine["labels"][:, :-1], reduction="none"
        )
        count = (mine["labels"][:, :-1] != IGNORED).sum()
        assert torch.isclose(output.loss, (losses.sum() / count).float(), rtol=1e-6)


def test_a_hugging_face_model_keeps_documents_apart(settings: dict[str, Any], llama: Any) -> None:
    loader = build_train_loader(**settings, micro_blocks=256, document_mask=True)
    (batch,) = some(loader, 1)
    row, begin = (batch["position_ids"][:, 1:] == 0).nonzero()[0].tolist()
    assert batch["labels"][row, begin + 1] == IGNORED
    with torch.no_grad():
        packed = llama(**{name: field[row : row + 1] for name, field in batch.items()}).logits[0]
        alone = llama(input_ids=batch["input_ids"][row : row + 1, begin + 1 : begin + 2]).logits
    assert torch.allclose(packed[begin + 1], alone[0, 0], rtol=0, atol=1e-12)


def test_labels_are_shifted_where_that_is_asked_for(settings: dict[str, Any]) -> None:
    loader = build_train_loader(**settings, micro_blocks=4, shifted=True)
    for batch in some(loader, 3):
        valid = batch["labels"] != IGNORED
        assert valid[:, -1].any()  # the prediction that a model's own shift would lose
        after = batch["input_ids"].roll(-1, 1)
        assert (batch["labels"] == after)[:, :-1][valid[:, :-1]].all()
        assert torch.equal(batch["position_ids"], torch.arange(64).expand(4, 64))


def test_borders_count_where_they_are_asked_for(settings: dict[str, Any]) -> None:
    loader = build_train_loader(**settings, micro_blocks=4, document_mask=True, shifted=True)
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
    loader = build_train_loader(**settings, strategy="overflow", micro_blocks=1, shifted=True)
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


@pytest.fixture
def with_bos(settings: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer that begins texts with BOS, as Llama's does."""
    file = Path(settings["tokenizer_name"]) / "tokenizer.json"
    library = HFTokenizer.from_file(str(file))
    library.add_special_tokens(["<s>"])
    library.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    library.save(str(file))
    return {**settings, "micro_blocks": 4, "seq_len": 512}


def test_documents_begin_as_the_tokenizer_begins_them(with_bos: dict[str, Any]) -> None:
    tokenizer = Tokenizer(Path(with_bos["tokenizer_name"]))
    for add_bos in (None, True, False):
        loader = build_train_loader(**with_bos, strategy="trunc", add_bos=add_bos)
        for batch in some(loader, 3):
            begins = batch["input_ids"][:, 0] == tokenizer.bos_id
            assert begins.all() if add_bos is not False else not begins.any()
        loader.close()


@pytest.mark.parametrize("cache", ["there", "gone", "of both kinds"])
def test_a_state_goes_on_with_the_bos_that_it_began_with(
    with_bos: dict[str, Any], cache: str
) -> None:
    loader = build_train_loader(**with_bos, add_bos=False)
    some(loader, 2)
    state, after = loader.state_dict(), some(loader, 2)
    loader.close()
    if cache == "gone":
        shutil.rmtree(with_bos["local_cache"])
    if cache == "of both kinds":
        build_train_loader(**with_bos, add_bos=True).close()
    loader = build_train_loader(**with_bos)
    assert loader.dataset.tokenizer is not None
    assert loader.dataset.tokenizer.add_bos
    loader.load_state_dict(state)
    assert not loader.dataset.tokenizer.add_bos
    for mine, theirs in zip(some(loader, 2), after, strict=True):
        assert torch.equal(mine["input_ids"], theirs["input_ids"])
    loader.close()


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
        ({"strategy": "nope"}, "strategy is 'nope'; use one of pack"),
        ({"micro_blocks": 0}, "micro_blocks and seq_len must be 1 or more"),
        ({"tokenizer_name": None}, "is text: specify the tokenizer"),
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
    with pytest.raises(DataError, match="the state belongs to mds_plain, not to this corpus"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="this is not the state of a loader"):
        other.load_state_dict({"foo": 1})


def test_the_column_of_documents_is_an_argument(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"id": 1, "ids": [1, 2, 3, 4, 5]}\n')
    settings: dict[str, Any] = {"seq_len": 2, "micro_blocks": 1, "local_cache": tmp_path / "cache"}
    with pytest.raises(DataError, match="set the argument column to the column"):
        build_train_loader(tmp_path / "text", **settings)
    loader = build_train_loader(tmp_path / "text", **settings, column="ids")
    assert next(iter(loader))["input_ids"].shape == (1, 2)
    loader.close()
