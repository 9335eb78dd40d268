"""Preference tuning: each loss is what its paper says, in every layout and with every reference."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from overland.apps.check.fake_step import fake_steps
from overland.apps.proofs.pool import RankPool
from overland.checks.hyperparameters import check_objective
from overland.config.load import Loaded
from overland.config.schema import JobConfig, Preference
from overland.data.chat import ChatTemplate
from overland.data.learned_tokens import PairWriter, encode
from overland.data.tokenizer import Tokenizer
from overland.errors import CheckpointError
from overland.models.config import DecoderConfig
from overland.models.init import init_weights
from overland.models.registry import build_model, model_config
from overland.objectives.preference import PreferenceLoss, log_complement
from overland.training.reference import read_reference
from overland.world import World
from tests.data.chats import LLAMA3, ROLES, write_lines, write_tokenizer
from tests.jobs import TINY_MODEL, run_job, tiny_job, write_model

VOCABULARY = 640
NUM = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    write_tokenizer(root / "tokenizer", **ROLES["llama3"], chat_template=LLAMA3)
    ask = [[{"role": "user", "content": f"what is {i}? " + "so " * (i % 4)}] for i in range(NUM)]
    write_lines(root / "pairs.jsonl", [
        {"prompt": ask[i],
         "chosen": [{"role": "assistant", "content": f"it is {i}" + " indeed" * (i % 3)}],
         "rejected": [{"role": "assistant", "content": f"no {i + 1}" + " maybe" * (i % 2)}]}
        for i in range(NUM)
    ])  # fmt: skip
    return root


def job(files: Path, folder: Path, **sections: Any) -> JobConfig:
    settings: dict[str, Any] = {
        "model": {
            "hf_assets_path": str(files / "tokenizer"),
            "overrides": {**TINY_MODEL, "vocab_size": VOCABULARY},
        },
        "training": {
            "dataset_path": str(files / "pairs.jsonl"), "seq_len": 128, "local_batch_size": 8,
            "global_batch_size": 8, "steps": 4,
        },
        "data": {"folder": str(folder / "data"), "packing": "trunc"},
        "sft": {"shape": "preference"},
        "preference": {"loss": "dpo"},
        "lora": {"rank": 4, "targets": "all-linear"},
        "lr_scheduler": {"total_steps": 20},
    }  # fmt: skip
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    return tiny_job(folder / "run", **settings)


METRICS = PreferenceLoss.metrics


def records(world: World, config: JobConfig) -> list[dict[str, float]]:
    logged = run_job(world, config).records
    return [{key: one[key] for key in ("loss", "grad_norm", *METRICS)} for one in logged]


def test_rows_that_are_cut_to_their_longest_give_the_same_loss(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    size = {"global_batch_size": NUM, "steps": 1, "seq_len": 192}  # the longest pair has 87 tokens
    plain, grouped = (
        ranks.run(1, records, job(files, tmp_path, training=size, data={"group_by_length": one}))[0]
        for one in (False, True)
    )
    assert grouped[0] == pytest.approx(plain[0], rel=1e-12)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo"])
def test_every_loss_is_learned(ranks: RankPool, files: Path, tmp_path: Path, loss: str) -> None:
    (found,) = ranks.run(1, records, job(files, tmp_path, preference={"loss": loss}))
    if loss == "dpo":  # nothing is preferred to begin with
        assert found[0]["loss"] == pytest.approx(math.log(2), rel=1e-12)
        assert found[0]["rewards_margins"] == pytest.approx(0, abs=1e-12)
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["rewards_margins"] > found[0]["rewards_margins"]
    assert 0 <= found[-1]["rewards_accuracies"] <= 1


SPLIT: dict[str, dict[str, int]] = {
    "tp": {"tensor_parallel_degree": 2},
    "cp": {"context_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
    "shard": {"data_parallel_shard_degree": 2},
}


@pytest.mark.parametrize(
    ("reference", "layout"),
    [
        ("adapter_off", SPLIT["tp"]),
        ("adapter_off", SPLIT["pp"]),
        ("copy", SPLIT["pp"]),
        ("copy", SPLIT["shard"]),
        ("precomputed", SPLIT["cp"]),
        ("precomputed", SPLIT["shard"]),
    ],
)
def test_layouts_do_not_change_the_loss(
    ranks: RankPool, files: Path, tmp_path: Path, layout: dict[str, int], reference: str
) -> None:
    sections: dict[str, Any] = {"preference": {"reference": reference}}
    if reference == "copy":
        sections["lora"] = {"rank": 0}
    (alone,) = ranks.run(1, records, job(files, tmp_path, **sections))
    size = {"local_batch_size": 4} if "data_parallel_shard_degree" in layout else {}
    split = job(files, tmp_path, parallelism=layout, training=size, **sections)
    for found in ranks.run(2, records, split):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_every_reference_is_the_same_at_first(ranks: RankPool, files: Path, tmp_path: Path) -> None:
    """Adapters that start at zero are no adapters; later steps differ by nothing else either. What
    is dropped or noisy is what is trained, not the reference."""
    noisy: dict[str, Any] = {"lora": {"dropout": 0.2}, "sft": {"neftune_alpha": 5.0}}
    found = [
        ranks.run(1, records, job(files, tmp_path / name, preference={"reference": name}, **noisy))
        for name in ("adapter_off", "copy", "precomputed")
    ]
    for (other,) in found[1:]:
        for one, expected in zip(other, found[0][0], strict=True):
            assert one == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("reference", ["copy", "precomputed"])
def test_a_resumed_run_has_the_reference_of_its_start(
    ranks: RankPool, files: Path, tmp_path: Path, reference: str
) -> None:
    sections: dict[str, Any] = {
        "preference": {"reference": reference}, "lora": {"rank": 0},
        "checkpoint": {"enable": True, "interval": 2},
    }  # fmt: skip
    (whole,) = ranks.run(1, records, job(files, tmp_path / "whole", **sections))
    ranks.run(1, records, job(files, tmp_path / "two", training={"steps": 2}, **sections))
    (again,) = ranks.run(1, records, job(files, tmp_path / "two", **sections))
    assert again == whole[2:]
    for path in (tmp_path / "two").glob("**/reference.npz"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        sections["training"] = {"steps": 6}
        (said,) = ranks.run(1, problem, job(files, tmp_path / "two", **sections))
        assert "reference.npz is damaged" in said


def test_any_flipped_byte_of_a_reference_is_found(tmp_path: Path) -> None:
    path, rows, values = tmp_path / "reference.npz", np.arange(3), np.arange(6.0).reshape(3, 2)
    np.savez(path, rows=rows, values=values)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        found, problem = read_reference(path)
        assert problem == "damaged" or np.array_equal(found.values, values)  # type: ignore[union-attr]
    for length in (0, 10, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert read_reference(path)[1] == "damaged"


def test_a_reference_is_the_model_at_its_start(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    """With the adapter that it started from, DoRA's lengths, and what else is trained whole."""
    lora: dict[str, Any] = {"rank": 4, "targets": "all-linear", "dora": True}
    lora["modules_to_save"] = ["lm_head"]
    saved = {"checkpoint": {"enable": True, "interval": 2}, "training": {"steps": 2}}
    ranks.run(1, records, job(files, tmp_path, lora={**lora, "save_as_peft": True}, **saved))
    lora["adapter"] = str(tmp_path / "run" / "checkpoint-2")
    by_auto, by_copy, computed = (
        ranks.run(1, records, job(files, tmp_path / one, lora=lora, preference={"reference": one}))
        for one in ("auto", "copy", "precomputed")
    )
    assert by_auto[0][0]["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert by_auto == by_copy
    for one, expected in zip(by_auto[0], computed[0], strict=True):
        assert one == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_what_is_trained_whole_cannot_be_switched_off(files: Path, tmp_path: Path) -> None:
    whole = job(
        files,
        tmp_path,
        lora={"modules_to_save": ["lm_head"]},
        preference={"reference": "adapter_off"},
    )
    (problem,) = check_objective(Loaded(whole, [], "run.toml"))
    assert "lora.modules_to_save cannot be switched off" in problem.message


def test_what_is_precomputed_lasts_for_more_steps_and_other_batches(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    def session(epochs: float, batch: int) -> list[dict[str, float]]:
        size = {"epochs": epochs, "global_batch_size": batch, "local_batch_size": batch}
        config = job(
            files, tmp_path, training=size, preference={"reference": "precomputed"},
            data={"group_by_length": True}, checkpoint={"enable": True},
        )  # fmt: skip
        return ranks.run(1, records, config)[0]

    session(0.25, 4)
    assert len(session(2.0, 6)) == 5  # 4 of 16 pairs are read; 28 are left, the last batch has 4


def test_a_start_that_has_changed_is_no_reference(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    base = write_model(tmp_path / "base", vocab_size=VOCABULARY)
    start = {"enable": True, "initial_load_path": str(base)}
    one, two = (
        job(files, tmp_path, checkpoint=start, lora={"rank": 0}, training={"steps": steps})
        for steps in (1, 2)
    )
    ranks.run(1, records, one)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert "has changed since" in ranks.run(1, problem, two)[0]


def problem(world: World, config: JobConfig) -> str:
    with pytest.raises(CheckpointError) as error:
        run_job(world, config)
    return str(error.value)


def test_a_check_knows_what_is_computed_beforehand(files: Path, tmp_path: Path) -> None:
    fake_steps(job(files, tmp_path, preference={"reference": "precomputed"}), 1)


def test_a_pair_in_one_row_has_the_log_probabilities_of_two(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    """Each answer with its prompt, alone in a plain model."""
    config = job(files, tmp_path, training={"global_batch_size": NUM, "local_batch_size": NUM})
    ((first, *_),) = ranks.run(1, records, config)
    architecture = model_config(config.model)
    assert isinstance(architecture, DecoderConfig)
    model = build_model(architecture).double()
    init_weights(model, config.debug.seed)
    tokenizer = Tokenizer(files / "tokenizer", add_bos=False, add_eos=False)
    totals = {"chosen": 0.0, "rejected": 0.0}
    for ids, border, which in encoded(tokenizer, files):
        logits = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        picked = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        totals[which] += picked[border - 1 :].sum().item()
    for which, total in totals.items():
        assert first[f"logps_{which}"] == pytest.approx(total / NUM, rel=1e-9)


def encoded(tokenizer: Tokenizer, files: Path) -> list[tuple[list[int], int, str]]:
    template = ChatTemplate(LLAMA3, tokenizer.specials, tokenizer.named)
    found = []
    for line in (files / "pairs.jsonl").read_text().splitlines():
        record = json.loads(line)
        for which in ("chosen", "rejected"):
            turns = [*record["prompt"], *record[which]]
            ids, weights = encode(tokenizer, template.write(turns, [0, 1]))
            found.append((ids.tolist(), int(weights.argmax()), which))
    return found


TERMS = torch.tensor([[-4.0, -6.0, 4.0, 3.0], [-2.0, -1.0, 2.0, 5.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-5.0, -6.5, 4, 3], [-2.5, -0.5, 2, 5]], dtype=torch.float64)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo"])
def test_losses_by_their_formulas(loss: Any) -> None:
    settings = Preference(loss=loss, beta=0.3, simpo_gamma=0.4)
    objective = PreferenceLoss(settings, starts_as_base=True)
    found, _ = objective.loss(TERMS, {"reference_Bk": REFERENCE})
    (c, r, nc, nr), (rc, rr) = TERMS.unbind(1), REFERENCE.unbind(1)[:2]
    if loss == "dpo":
        expected = -F.logsigmoid(0.3 * ((c - rc) - (r - rr)))
    elif loss == "ipo":
        expected = ((c - rc) / nc - (r - rr) / nr - 1 / (2 * 0.3)) ** 2
    elif loss == "simpo":
        expected = -F.logsigmoid(0.3 * (c / nc - r / nr) - 0.4)
    else:
        p, q = (c / nc).exp(), (r / nr).exp()
        odds = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
        expected = -c / nc - 0.3 * F.logsigmoid(odds)
    torch.testing.assert_close(found, expected)


def test_the_complement_is_exact_at_both_ends() -> None:
    near_zero, near_one = torch.tensor([-1e-10, -40.0], dtype=torch.float64)
    assert log_complement(near_zero) == pytest.approx(math.log(1e-10), rel=1e-9)
    assert log_complement(near_one) == pytest.approx(-math.exp(-40), rel=1e-9)


def test_a_prompt_gives_way_to_the_longer_answer() -> None:
    unused: Any = None
    options = dict.fromkeys((one.name for one in fields(PairWriter)), unused)
    # Half of a row is 20 tokens.
    pairs = PairWriter(**{**options, "seq_len": 39, "settings": Preference(loss="dpo")})
    both = [
        (np.arange(16 + size), np.repeat([0.0, 1.0], [16, size]).astype(np.float32))
        for size in (3, 8)
    ]
    for_prompt = pairs._room_for_prompt(both)
    assert for_prompt == 12
    cut = [pairs._cut(*one, for_prompt) for one in both]
    assert [int(weights.sum()) for _, weights in cut] == [3, 8], "no answer is cut"
    assert [len(ids) for ids, _ in cut] == [15, 20]
