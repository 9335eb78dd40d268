"""Whole runs on real ranks: what stays equal, what is recorded, what starts from what."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from overland.apps.convert.exports import export_hf
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.read import open_checkpoint
from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.errors import sentence
from overland.files import DISK
from overland.training.build import build_run
from overland.training.loop import train
from overland.training.records import keep_tokenizer
from overland.world import World
from tests.jobs import TINY_MODEL, losses, run_job, tiny_job

FLOAT32 = {
    "dtype": "float32",
    "mixed_precision_param": "float32",
    "mixed_precision_reduce": "float32",
}


def test_a_disk_that_fills_during_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Files:
        path = tmp_path / "given" / "tokenizer.json"

        def files(self) -> dict[str, bytes]:
            return {"tokenizer.json": b"{}"}

    def refuse(operation: str, path: Path) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DISK, "at", refuse)
    with pytest.raises(OSError, match=r"No space left") as full:
        keep_tokenizer(Files(), tmp_path / "tokenizer", tiny_job(tmp_path))  # type: ignore[arg-type]
    assert sentence(full.value).startswith(f"{tmp_path}/tokenizer/")


def test_two_deterministic_runs_give_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    first, again = (
        ranks.run(
            2,
            losses,
            tiny_job(
                tmp_path / name,
                training={**FLOAT32, "local_batch_size": 4},
                debug={"deterministic": True},
            ),
        )
        for name in ("first", "again")
    )
    assert first == again


def test_another_seed_gives_another_run(ranks: RankPool, tmp_path: Path) -> None:
    one, other = (
        ranks.run(1, losses, tiny_job(tmp_path / str(seed), debug={"seed": seed}))[0]
        for seed in (1, 2)
    )
    assert one != other


@pytest.mark.parametrize(
    "sections",
    [
        {"activation_checkpoint": {"mode": "full"}},
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}},
        {
            "compile": {"enable": True, "backend": "aot_eager"},
            "activation_checkpoint": {"mode": "selective"},
        },
    ],
    ids=["full", "every second", "compiled op"],
)
def test_recompute_and_compile_do_not_change_losses(
    ranks: RankPool, tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    plain = ranks.run(1, losses, tiny_job(tmp_path / "plain"))[0]
    changed = ranks.run(1, losses, tiny_job(tmp_path / "changed", **sections))[0]
    assert changed == pytest.approx(plain, rel=1e-12)


def validations(world: World, config: JobConfig) -> list[dict[str, float]]:
    return run_job(world, config).validations


def test_several_held_out_sets_are_validated_alike_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, data_folder: Path
) -> None:
    held_out = tmp_path / "poems"
    held_out.mkdir()
    (held_out / "a.txt").write_text("roses are red, violets are blue\n" * 200)
    sections = {
        "data": {
            "folder": str(data_folder),
            "vocab_size": 512,
            "datasets": {"poems": str(held_out)},
            "document_mask": True,
        },
        "validation": {
            "enable": True,
            "dataset": ["stdlib_heldout", "poems"],
            "freq": 3,
            "steps": 2,
            "local_batch_size": 4,
        },
    }
    one = tiny_job(tmp_path / "one", training={"dataset": "stdlib"}, **sections)
    sections["validation"]["local_batch_size"] = 2
    two = tiny_job(
        tmp_path / "two", training={"dataset": "stdlib", "local_batch_size": 4}, **sections
    )
    expected = ranks.run(1, validations, one)[0]
    got = ranks.run(2, validations, two)[0]
    assert [record["step"] for record in expected] == [3, 6]
    assert set(expected[0]) == {
        "step",
        "validation_loss",
        *(f"validation_loss/{name}" for name in ("stdlib_heldout", "poems")),
        *(f"validation/{name}/loss" for name in ("stdlib_heldout", "poems")),
        *(f"validation/{name}/perplexity" for name in ("stdlib_heldout", "poems")),
    }
    assert got == [pytest.approx(record, rel=1e-12) for record in expected]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_resumed_run_goes_on_as_if_unbroken_on_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    def job(name: str, steps: int, num_ranks: int) -> JobConfig:
        return tiny_job(
            tmp_path / name,
            training={"steps": steps, "local_batch_size": 8 // num_ranks},
            checkpoint={"enable": True},
            lr_scheduler={"total_steps": 8},
        )

    unbroken = ranks.run(1, losses, job("unbroken", 8, 1))[0]
    ranks.run(before, losses, job("broken", 5, before))
    resumed = ranks.run(after, losses, job("broken", 8, after))[0]
    assert resumed == pytest.approx(unbroken[5:], rel=1e-12)


def exported(world: World, config: JobConfig) -> float:
    """Trains, exports, and returns the loss on one batch."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    train(run)
    export_hf(run)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        return float(run.model.loss(Batch({"tokens_BS": tokens, "labels_BS": tokens}))) / 64


@pytest.mark.parametrize("tied", [False, True])
def test_exported_weights_are_what_transformers_computes_with(
    ranks: RankPool, tmp_path: Path, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    overrides = {**TINY_MODEL, "tie_word_embeddings": tied}
    config = tiny_job(
        tmp_path, model={"overrides": overrides}, training={**FLOAT32, "local_batch_size": 4}
    )
    ours = ranks.run(2, exported, config)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(64).view(2, 32)
    logits = model(tokens).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert ours == pytest.approx(theirs.item(), abs=1e-4)


def export_and_save(world: World, config: JobConfig) -> None:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    train(run)
    export_hf(run)


@pytest.mark.parametrize(
    ("axis", "tied"), [("tensor", True), ("pipeline", True), ("pipeline", False)]
)
def test_every_axis_exports_whole_weights(
    ranks: RankPool, tmp_path: Path, axis: str, tied: bool
) -> None:
    config = tiny_job(
        tmp_path,
        model={"overrides": {**TINY_MODEL, "tie_word_embeddings": tied}},
        training={**FLOAT32, "steps": 2},
        parallelism={f"{axis}_parallel_degree": 2},
        checkpoint={"enable": True},
    )
    ranks.run(2, export_and_save, config)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert ("lm_head.weight" in exported) != tied
    with open_checkpoint(tmp_path / "checkpoint" / "step_2") as saved:
        assert {f"model.{name}" for name in exported} == {
            name for name in saved.tensors if name.startswith("model.")
        }
        for name, tensor in exported.items():
            assert torch.equal(tensor, saved.read(f"model.{name}")), name


def test_a_run_that_goes_on_exports_again(ranks: RankPool, tmp_path: Path) -> None:
    for steps in (1, 2):
        ranks.run(1, exported, tiny_job(tmp_path, training={**FLOAT32, "steps": steps}))
    assert (tmp_path / "hf" / "config.json").is_file()
    assert not (tmp_path / ".hf.new").exists()


def first_loss(world: World, config: JobConfig) -> float:
    return run_job(world, config).losses[0]


def test_a_run_starts_from_hugging_face_weights(ranks: RankPool, tmp_path: Path) -> None:
    source = tiny_job(tmp_path / "source", training={**FLOAT32, "local_batch_size": 4})
    ranks.run(2, exported, source)
    one, two = (
        tiny_job(
            tmp_path / name,
            training={**FLOAT32, "local_batch_size": size, "steps": 1},
            checkpoint={"initial_load_path": str(tmp_path / "source" / "hf")},
            debug={"seed": 5},
        )
        for name, size in (("one", 8), ("two", 4))
    )
    fresh = tiny_job(tmp_path / "fresh", training={**FLOAT32, "steps": 1}, debug={"seed": 5})
    loaded = ranks.run(1, first_loss, one)[0]
    assert loaded == pytest.approx(ranks.run(2, first_loss, two)[0], rel=1e-5)
    assert loaded != pytest.approx(ranks.run(1, first_loss, fresh)[0], rel=1e-5)
