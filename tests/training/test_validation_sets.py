"""Named sets to validate on, each with its own interval, and what they leave unchanged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.apps.console.bar import validation_line
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.folder import list_checkpoints
from overland.config.schema import JobConfig
from overland.data.holdout import check_held_out
from overland.errors import DataError
from overland.training.build import build_run
from overland.training.loop import train
from overland.training.validate import about_sets
from overland.world import World
from tests.jobs import Recorder, run_job, tiny_job

SETS = {
    "poems": {"freq": 2, "steps": 1},
    "prose": {"steps": -1},
    "plays": {"freq": 5, "steps": 1},
}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    found = {
        "poems": "roses are red, violets are blue\n",
        "prose": "It was a dark night.\n",
        "plays": "To be, or not to be?\n",
        "trained": "a rose is a rose, it was a night to be red or blue in the dark\n",
    }
    for name, text in found.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{n} {text}" for n in range(120)))
    return {name: str(tmp_path / f"{name}.txt") for name in found}


def job(folder: Path, texts: dict[str, str], **sections: dict[str, Any]) -> JobConfig:
    sets = {name: {**one, "path": texts[name]} for name, one in SETS.items()}
    return tiny_job(
        folder,
        **{
            "data": {"folder": str(folder.parent / "data"), "vocab_size": 300},
            "validation": {"enable": True, "freq": 3, "local_batch_size": 2, "sets": sets},
            "training": {"dataset_path": texts["trained"], **sections.pop("training", {})},
            "checkpoint": {"enable": True, "interval": 100, **sections.pop("checkpoint", {})},
            **sections,
        },
    )


def story(world: World, config: JobConfig) -> tuple[list[dict[str, float]], list[float]]:
    recorder = run_job(world, config)
    return recorder.validations, recorder.losses


def test_sets_have_their_own_cadence_and_perplexities(
    ranks: RankPool, tmp_path: Path, texts: dict[str, str]
) -> None:
    config = job(tmp_path / "run", texts, training={"steps": 7, "seq_len": 32})
    validations, losses = ranks.run(1, story, config)[0]
    found = {
        int(one["step"]): {name.split("/")[1] for name in one if name.startswith("validation/")}
        for one in validations
    }
    assert found == {
        2: {"poems"}, 3: {"prose"}, 4: {"poems"}, 5: {"plays"}, 6: {"poems", "prose"},
        7: {"poems", "prose", "plays"},
    }  # fmt: skip
    for one in validations:
        for name in found[int(one["step"])]:
            loss = one[f"validation/{name}/loss"]
            assert one[f"validation/{name}/perplexity"] == math.exp(loss)
            assert one[f"validation_loss/{name}"] == loss
        # Best is judged by the sets without a cadence of their own.
        judged = one.get("validation_loss")
        assert judged == one.get("validation/prose/loss")

    plain = job(tmp_path / "plain", texts, training={"steps": 7, "seq_len": 32})
    plain = plain.model_copy(
        update={"validation": plain.validation.model_copy(update={"enable": False})}
    )
    assert ranks.run(1, story, plain)[0] == ([], losses)


def test_a_resumed_run_validates_with_the_same_bits_and_two_ranks_alike(
    ranks: RankPool, tmp_path: Path, texts: dict[str, str]
) -> None:
    def of(name: str, steps: int, rows: int = 8) -> JobConfig:
        return job(
            tmp_path / name, texts,
            training={"steps": steps, "local_batch_size": rows},
            lr_scheduler={"total_steps": 6},
        )  # fmt: skip

    whole = ranks.run(1, story, of("whole", 6))[0]
    first = ranks.run(1, story, of("parts", 3))[0]
    second = ranks.run(1, story, of("parts", 6))[0]
    # The last step of a session validates on all; of step 3 the unbroken run has fewer sets.
    records = {one["step"]: one for one in whole[0]}
    assert second[0] == [records[step] for step in (4, 5, 6)]
    assert first[0][0] == records[2]
    assert records[3].items() <= first[0][1].items()
    assert [*first[1], *second[1]] == whole[1]
    two = ranks.run(2, story, of("two", 6, rows=4))[0]
    for one, other in zip(two[0], whole[0], strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_a_set_is_the_same_sequences_whatever_reads_it(
    ranks: RankPool, tmp_path: Path, texts: dict[str, str]
) -> None:
    """Any number of ranks, rows per pass and accumulation: only full batches were read once."""

    def of(num_ranks: int, rows: int, batch: int = 6, **more: Any) -> dict[str, float]:
        sets = {name: {"path": texts[name]} for name in ("poems", "plays", "prose")}
        sets["plays"]["sequences"] = 5
        sets["prose"]["steps"] = 1
        config = job(
            tmp_path / f"{num_ranks}-{rows}-{batch}-{len(more)}", texts,
            training={"steps": 1, "seq_len": 32, "global_batch_size": batch,
                      "local_batch_size": batch // num_ranks},
            validation={"enable": True, "local_batch_size": rows, "sequences": 7, "sets": sets},
            checkpoint={"enable": False},
            **more,
        )  # fmt: skip
        validations, _ = ranks.run(num_ranks, story, config)[0]
        return validations[-1]

    whole = of(1, 100)
    for num_ranks, rows in ((1, 4), (2, 1), (2, 3), (3, 2)):
        assert of(num_ranks, rows) == pytest.approx(whole, rel=1e-12)
    half = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}
    assert of(2, 3, parallelism=half) == pytest.approx(whole, rel=1e-12)


def test_a_changed_batch_size_does_not_change_the_set(
    ranks: RankPool, tmp_path: Path, texts: dict[str, str]
) -> None:
    def of(last: int, rows: int, **validation: Any) -> tuple[list[dict[str, float]], list[str]]:
        sets = {
            name: {"path": texts[name]} for name in sorted(("prose", "plays"), reverse=last > 1)
        }
        config = job(
            tmp_path / "run", texts,
            training={"steps": last, "local_batch_size": rows, "global_batch_size": rows},
            validation={"enable": True, "freq": 1, "sets": sets, **validation},
            checkpoint={"enable": True, "interval": 1, "keep_best": 1, "keep_latest_k": 2},
            optimizer={"lr": 0.0},
        )  # fmt: skip
        return ranks.run(1, heard, config)[0]

    before, said = of(1, 6, steps=1)
    assert any("up to 6 sequences of plays and prose" in one for one in said)
    after, said = of(2, 2, steps=1)
    assert any("up to 6 sequences of prose and plays" in one for one in said)
    assert not any("chosen again" in one for one in said)
    assert after[0]["validation_loss"] == pytest.approx(before[0]["validation_loss"], rel=1e-12)
    other, said = of(6, 2, sequences=5)
    assert any("chosen again" in one for one in said)
    assert other[0]["validation_loss"] != pytest.approx(before[0]["validation_loss"], rel=1e-6)
    # The best of each set of sequences, and the newest two.
    kept = [one.step for one in list_checkpoints(tmp_path / "run" / "checkpoint")]
    assert kept in ([1, 3, 5, 6], [2, 3, 5, 6])


def heard(world: World, config: JobConfig) -> tuple[list[dict[str, float]], list[str]]:
    """What was validated, and what was said."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    train(run)
    return recorder.validations, [*about_sets(run), *recorder.messages]


def test_what_is_held_out_is_validated_on_unless_told_otherwise() -> None:
    assert JobConfig.model_validate({"data": {"holdout": 0.1}}).validation.enable
    held = {"data": {"holdout": 0.1}, "validation": {"enable": False}}
    assert not JobConfig.model_validate(held).validation.enable
    assert not JobConfig().validation.enable


def test_sets_stand_beside_the_others_and_no_name_comes_twice(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    def config(**validation: Any) -> JobConfig:
        return tiny_job(
            tmp_path / "run",
            training={"dataset": "stdlib"},
            validation={"enable": True, **validation},
        )

    check_held_out(config(dataset="stdlib_heldout", sets={"poems": {"path": texts["poems"]}}))
    poems = {"path": texts["poems"]}
    for sets, message in (
        ({"stdlib_heldout": poems}, "validation.dataset names stdlib_heldout, which is also in"),
        ({"a": poems, "b": poems}, "twice, as a and as b"),
        ({"a": {"dataset": "stdlib"}}, "which is also training data"),
        ({"a": {"dataset": "stdlib_heldout"}}, "twice, as stdlib_heldout and as a"),
    ):
        with pytest.raises(DataError, match=message):
            check_held_out(config(dataset="stdlib_heldout", sets=sets))
    held = config(sets={"stdlib": poems})
    held = held.model_copy(update={"data": held.data.model_copy(update={"holdout": 0.1})})
    with pytest.raises(DataError, match=r"data\.holdout holds out stdlib"):
        check_held_out(held)


def test_the_console_shows_loss_and_perplexity() -> None:
    record = {
        "step": 3, "validation_loss": 2.0, "validation_loss/a": 2.0, "validation/a/loss": 2.0,
        "validation/a/perplexity": 7.389, "validation_loss/b": 3.0, "validation/b/loss": 3.0,
    }  # fmt: skip
    assert validation_line(record) == (
        "validation_loss 2.0000  validation_loss/a 2.0000 (perplexity 7.39)  "
        "validation_loss/b 3.0000"
    )
