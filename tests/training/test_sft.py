"""Training on conversations: the loss is the same however rows are packed and split, and a changed
mask is detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from overland.apps.check.rehearsal import require_start
from overland.apps.proofs.data import prove_data
from overland.apps.proofs.pool import RankPool
from overland.checks import load_checked
from overland.checks.model import grown_size, with_new_tokens
from overland.config.errors import ConfigError
from overland.config.load import Loaded, load_config
from overland.config.schema import JobConfig
from overland.config.write import to_toml
from overland.data.tokenizer import Tokenizer
from overland.training import loop
from overland.training.build import build_run
from overland.training.loop import train
from overland.world import World
from tests.data.chats import LLAMA3, PLAIN_CHATML, ROLES, write_lines, write_tokenizer
from tests.jobs import TINY_MODEL, losses_and_norms, run_job, tiny_job, write_model

NUM = 12
VOCABULARY = 640


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    write_tokenizer(root / "tokenizer", **ROLES["llama3"], chat_template=LLAMA3)
    talks = []
    for i in range(NUM):
        turns = [
            {"role": role, "content": f"{i} {turn} " + "so " * (i % 4)}
            for turn in range(1 + i % 3)
            for role in ("user", "assistant")
        ]
        turns[1] |= {"weight": 0.5} if i == 3 else {}
        talks.append({"messages": turns})
    write_lines(root / "talks.jsonl", talks)
    return root


def job(files: Path, folder: Path, **sections: Any) -> JobConfig:
    settings: dict[str, Any] = {
        "model": {
            "hf_assets_path": str(files / "tokenizer"),
            "overrides": {**TINY_MODEL, "vocab_size": VOCABULARY},
        },
        "training": {
            "dataset": "stdlib",
            "dataset_path": str(files / "talks.jsonl"),
            "seq_len": 128,
            "local_batch_size": 12,
            "global_batch_size": 12,
            "steps": 3,
        },
        "data": {"folder": str(folder / "data"), "packing": "best_fit", "document_mask": True},
        "sft": {"shape": "auto"},
        "lr_scheduler": {"total_steps": 20},
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    return tiny_job(folder / "run", **settings)


def test_packing_and_accumulation_do_not_change_the_loss(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    """One step with all conversations in it: packed, one per row, some rows at a time, and cut to
    the longest row."""
    once = {"epochs": 1.0}
    (packed,) = ranks.run(1, losses_and_norms, job(files, tmp_path, training=once))
    alone = {"packing": "trunc", "document_mask": False}
    (single,) = ranks.run(1, losses_and_norms, job(files, tmp_path, training=once, data=alone))
    some = {**once, "local_batch_size": 3}
    (accumulated,) = ranks.run(1, losses_and_norms, job(files, tmp_path, training=some))
    alike = {**alone, "group_by_length": True}
    (grouped,) = ranks.run(1, losses_and_norms, job(files, tmp_path, training=once, data=alike))
    assert len(packed) == len(single) == len(grouped) == 1
    for other in (single, accumulated, grouped):
        assert other[0] == pytest.approx(packed[0], rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_degree": 2},
        pytest.param({"context_parallel_degree": 2}, marks=pytest.mark.long),
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3},
        pytest.param({"data_parallel_shard_degree": 2}, marks=pytest.mark.long),
    ],
    ids=["tp", "cp", "pp", "shard"],
)
def test_layouts_do_not_change_the_loss(
    ranks: RankPool, files: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """With noise on the embeddings, which is the same in all of them."""
    noise = {"neftune_alpha": 5.0}
    (expected,) = ranks.run(1, losses_and_norms, job(files, tmp_path, sft=noise))
    size = {"local_batch_size": 6} if "data_parallel_shard_degree" in layout else {}
    split = job(files, tmp_path, sft=noise, parallelism=layout, training=size)
    for found in ranks.run(2, losses_and_norms, split):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-10)


def test_noise_is_there_only_in_training(ranks: RankPool, files: Path, tmp_path: Path) -> None:
    validated = {
        "validation": {"enable": True, "freq": 1, "steps": -1, "allow_training_data": True},
        "optimizer": {"lr": 0.0},
    }
    validated["validation"]["dataset_path"] = str(files / "talks.jsonl")
    both = [
        ranks.run(
            1, losses_of_both, job(files, tmp_path, sft={"neftune_alpha": alpha}, **validated)
        )
        for alpha in (0.0, 5.0)
    ]
    ((without, held_without),), ((with_noise, held_with),) = both
    assert with_noise != without
    assert held_with == held_without


def losses_of_both(world: World, config: JobConfig) -> tuple[list[float], list[Any]]:
    recorder = run_job(world, config)
    return recorder.losses, recorder.validations


def run(world: World, config: JobConfig) -> None:
    train(build_run(config, world, torch.device("cpu"), log_ranks=()))


def run_with_a_changed_mask(world: World, config: JobConfig) -> None:
    """One weight of one row is not what was planned."""
    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    original, numbers = loop.next_batch, iter(range(100))

    def changed(data: Any, meter: Any) -> Any:
        batch = original(data, meter)
        if next(numbers) == 1:
            weights = batch["weights_BS"].clone()
            weights[2, 5] = 1 - weights[2, 5]
            return batch.replace(weights_BS=weights)
        return batch

    loop.next_batch = changed  # type: ignore[assignment]
    try:
        train(built)
    finally:
        loop.next_batch = original


def sessions(files: Path, folder: Path, num_ranks: int, steps: int) -> JobConfig:
    size = {"steps": steps, "global_batch_size": 4, "local_batch_size": 4 // num_ranks}
    saves = {"enable": True, "interval": 2}
    return job(files, folder, training=size, checkpoint=saves)


def test_sessions_on_other_ranks_are_proven_with_their_masks(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    for steps, num_ranks in ((2, 1), (5, 2), (6, 1)):
        ranks.run(num_ranks, run, sessions(files, tmp_path, num_ranks, steps))
    verdict = prove_data(tmp_path / "run")
    assert verdict.holds
    assert (verdict.last_step, verdict.rows) == (6, 24)


def test_a_changed_mask_is_found(ranks: RankPool, files: Path, tmp_path: Path) -> None:
    ranks.run(1, run_with_a_changed_mask, sessions(files, tmp_path, 1, 3))
    verdict = prove_data(tmp_path / "run")
    assert not verdict.holds
    assert verdict.first_wrong == "step 2, row 2: not as planned for batch 1"


def test_a_run_that_is_resumed_otherwise_says_what_changed(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    config = sessions(files, tmp_path, 1, 2)
    ranks.run(1, run, config)
    other = config.sft.model_copy(update={"learn": "last"})
    config = config.model_copy(update={"sft": other})
    with pytest.raises(ConfigError, match=r"sft.learn is .last. and was .assistant."):
        require_start(Loaded(config, [], "run.toml"))
    (said,) = ranks.run(1, what_is_said, config)
    assert "sft.learn is 'last' and was 'assistant'" in said


def what_is_said(world: World, config: JobConfig) -> str:
    try:
        run(world, config)
    except Exception as error:
        return str(error)
    return ""


# New special tokens


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model without the tokens of ChatML, tied or not, with as many rows as tokens."""
    root = tmp_path_factory.mktemp("base")
    for tied in (False, True):
        folder = root / ("tied" if tied else "untied")
        write_tokenizer(folder, eos_token="</s>")
        rules = json.loads((folder / "tokenizer.json").read_text())
        gone = ("<|im_start|>", "<|im_end|>")
        for token in rules["added_tokens"]:
            if token["content"] in gone:
                rules["model"]["vocab"].pop(token["content"])
                token["content"] = f"<gone{token['id']}>"
                rules["model"]["vocab"][token["content"]] = token["id"]
        (folder / "tokenizer.json").write_text(json.dumps(rules))
        size = Tokenizer(folder).vocab_size
        write_model(folder, vocab_size=size + size % 2, tie_word_embeddings=tied)
    return root


def on_base(base: Path, files: Path, folder: Path, **sections: Any) -> JobConfig:
    (folder / "chatml.jinja").write_text(PLAIN_CHATML)
    sft = {
        "chat_template": str(folder / "chatml.jinja"),
        "new_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    settings: dict[str, Any] = {
        "model": {"hf_assets_path": str(base), "config": str(base), "overrides": {}},
        "checkpoint": {"initial_load_path": str(base), "last_save_in_hf": True},
        "sft": sft,
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    loaded = with_new_tokens(Loaded(job(files, folder, **settings), [], "run.toml"))
    assert "grows from" in loaded.notes[0]
    return loaded.config


def test_a_vocabulary_grows_to_what_can_be_split_as_before() -> None:
    assert grown_size(128_256, 128_258) == 128_384
    assert grown_size(32_000, 32_002) == 32_128
    assert grown_size(50_257, 50_259) == 50_259
    assert grown_size(602, 604) == 604


@pytest.mark.parametrize(
    ("tied", "layout"),
    [("tied", "pipeline"), ("untied", "tensor")],
)
def test_new_rows_start_as_the_mean_in_every_layout(
    ranks: RankPool, files: Path, base: Path, tmp_path: Path, tied: str, layout: str
) -> None:
    folder = base / tied
    degrees = {f"{layout}_parallel_degree": 2}
    size = {"steps": 1, "local_batch_size": 12}
    if layout == "pipeline":
        degrees["pipeline_parallel_microbatch_size"] = 6
    frozen = {"optimizer": {"lr": 0.0}, "training": size, "parallelism": degrees}
    config = on_base(folder, files, tmp_path, **frozen)
    require_start(Loaded(config, [], "run.toml"))
    (found, *_) = ranks.run(2, losses_and_norms, config)
    (expected,) = ranks.run(1, losses_and_norms, on_base(folder, files, tmp_path, **{
        **frozen, "parallelism": {}}))  # fmt: skip
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    size = Tokenizer(folder).vocab_size
    out = tmp_path / "run" / "hf"
    with (
        safe_open(folder / "model.safetensors", "pt") as before,
        safe_open(out / "model.safetensors", "pt") as after,
    ):
        assert set(before.keys()) == set(after.keys())
        for name in ("model.embed_tokens.weight", *(["lm_head.weight"] if tied[0] == "u" else [])):
            old, new = before.get_tensor(name), after.get_tensor(name)
            assert len(new) == grown_size(len(old), size + 2)
            mean = old[:size].double().mean(dim=0).float()
            assert torch.equal(new[:size], old[:size])
            assert torch.allclose(new[size : size + 2], mean.expand(2, -1), atol=1e-9)
    exported = Tokenizer(out)
    assert exported.specials["<|im_end|>"] == size + 1
    assert exported.chat_templates["default"] == PLAIN_CHATML
    about = json.loads((out / "generation_config.json").read_text())
    assert size + 1 in about["eos_token_id"]
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(new)


def test_new_tokens_that_cannot_be_are_refused(files: Path, base: Path, tmp_path: Path) -> None:
    overrides = {"model": {"overrides": {"vocab_size": 602}}}
    with pytest.raises(ConfigError, match=r"model.overrides.vocab_size .*sft.new_tokens need"):
        on_base(base / "untied", files, tmp_path, **overrides)


AXOLOTL = """
base_model: {base}
datasets:
  - path: {folder}/alpaca.jsonl
    type: alpaca
adapter: lora
lora_r: 2
lora_alpha: 4
lora_target_linear: true
sequence_len: 192
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
max_steps: 2
learning_rate: 1e-3
bf16: false
output_dir: {folder}/out
dataset_prepared_path: {folder}/prepared
"""


def test_a_config_of_axolotl_trains(ranks: RankPool, base: Path, tmp_path: Path) -> None:
    records = [
        {"instruction": f"Say {i}", "input": "twice" * (i % 2), "output": f"{i} {i}"}
        for i in range(8)
    ]
    write_lines(tmp_path / "alpaca.jsonl", records)
    text = AXOLOTL.format(base=base / "untied", folder=tmp_path)
    (tmp_path / "tune.yml").write_text(text)
    old = load_config(str(tmp_path / "tune.yml"), (), {}, resolve=False).config
    (tmp_path / "new.toml").write_text(to_toml(old, resolved=False))
    config = load_checked(str(tmp_path / "new.toml"), (), {}, world_size=1)[0].config
    (found,) = ranks.run(1, losses_and_norms, config)
    assert len(found) == 2
    assert (tmp_path / "out/checkpoint-2/adapter_model.safetensors").is_file()
