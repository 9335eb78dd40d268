"""`overland prove data`: the ledger against the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.apps.proofs.data import prove_data
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.data.plan import ChangedSource
from overland.errors import DataError
from overland.training import loop
from overland.training.build import build_run
from overland.training.loop import train
from overland.world import World
from tests.jobs import tiny_job
from tests.prove_sessions import SHORT, prove_sessions

WEIGHTS = {"code": 3.0, "news": 1.0}


def job(folder: Path, num_ranks: int = 1, **sections: Any) -> JobConfig:
    return tiny_job(
        folder / "run",
        training={
            "steps": sections.pop("steps", 6),
            "seq_len": sections.pop("seq_len", 32),
            "local_batch_size": 8 // num_ranks,
        },
        lr_scheduler={"total_steps": 20},
        checkpoint={"enable": True, "interval": 2, **sections.pop("checkpoint", {})},
        data={
            "folder": str(folder / "data"),
            "vocab_size": 400,
            "sources": {
                name: {"path": str(folder / name), "weight": weight}
                for name, weight in WEIGHTS.items()
            },
            **sections.pop("data", {}),
        },
        **sections,
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in WEIGHTS:
        (tmp_path / name).mkdir()
        for i in range(30):
            (tmp_path / name / f"{i:02}.txt").write_text(f"{name} {i} " + "words again " * (i % 9))
    return tmp_path


def run(world: World, config: JobConfig) -> int:
    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    train(built)
    return built.progress.step


def run_with_a_wrong_row(world: World, config: JobConfig) -> int:
    """One row of one batch is not what was planned, on the last rank."""
    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    original, numbers = loop.next_batch, iter(range(100))

    def corrupted(data: Any, meter: Any) -> Any:
        batch = original(data, meter)
        if next(numbers) == 3 and world.rank == world.size - 1:
            tokens = batch["tokens_BS"].clone()
            tokens[-1, 5] = (tokens[-1, 5] + 1) % 400
            return batch.replace(tokens_BS=tokens)
        return batch

    loop.next_batch = corrupted  # type: ignore[assignment]
    try:
        train(built)
    finally:
        loop.next_batch = original
    return built.progress.step


@pytest.mark.parametrize("mixture", ["sequences", "documents"])
def test_sessions_on_other_ranks_are_proven_together(
    ranks: RankPool, texts: Path, mixture: str
) -> None:
    for steps, num_ranks in ((3, 1), (7, 4), (8, 2)):
        config = job(texts, num_ranks, steps=steps, data={"mixture": mixture})
        ranks.run(num_ranks, run, config)
    verdict = prove_data(texts / "run")
    assert verdict.holds
    assert (verdict.first_step, verdict.last_step, verdict.rows) == (1, 8, 64)
    for count in verdict.sources.values():
        assert count.planned == count.consumed > 0
        assert count.repeated == count.skipped == 0
    turns = [count.turns for count in verdict.sources.values()]
    assert turns[0] == 3 * turns[1] > 0
    if mixture == "sequences":
        code, news = (count.planned for count in verdict.sources.values())
        assert 2.8 < code / news < 3.2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_wrong_row_of_one_batch_is_caught(ranks: RankPool, texts: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, run_with_a_wrong_row, job(texts, num_ranks))
    verdict = prove_data(texts / "run")
    assert not verdict.holds
    assert verdict.wrong_rows == 1
    assert verdict.first_wrong == "step 4, row 7: not as planned for batch 3"
    assert sum(count.skipped for count in verdict.sources.values()) > 0


def test_steps_that_were_lost_and_done_again_count_once(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=6))
    older = str(texts / "run" / "checkpoint" / "step_2")
    ranks.run(1, run, job(texts, steps=5, checkpoint={"resume": older}))
    verdict = prove_data(texts / "run")
    assert verdict.holds
    assert (verdict.last_step, verdict.rows) == (5, 40)


def test_another_length_in_the_middle_is_proven_too(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=3))
    ranks.run(1, run, job(texts, steps=6, seq_len=16, data={"packing": "best_fit"}))
    assert prove_data(texts / "run").holds
    plan = json.loads((texts / "run" / "data" / "plan.json").read_text())["plan"]
    assert [one["first_batch"] for one in plan["segments"]] == [0, 3]


def test_a_step_that_is_not_in_the_ledger_is_missed(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=6))
    ledger = texts / "run" / "data" / "ledger.bin"
    ledger.write_bytes(ledger.read_bytes()[:-10])
    verdict = prove_data(texts / "run")
    assert not verdict.holds
    assert verdict.missing_steps == [6]


def test_a_changed_corpus_is_named(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=3))
    (texts / "news" / "07.txt").write_text("something else")
    with pytest.raises(ChangedSource, match=r"source news is not what.*news/07\.txt changed"):
        prove_data(texts / "run")
    with pytest.raises(AssertionError, match=r"source news is not what.*news/07\.txt changed"):
        ranks.run(1, run, job(texts, steps=6))


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        prove_data(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(DataError, match=r"ledger\.bin does not exist"):
        prove_data(tmp_path)


def run_and_skip_batches(world: World, config: JobConfig) -> int:
    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    built.progress.batch += 2
    train(built)
    return built.progress.step


def test_batches_that_were_skipped_are_caught(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=4))
    ranks.run(1, run_and_skip_batches, job(texts, steps=6))
    verdict = prove_data(texts / "run")
    assert not verdict.holds
    assert verdict.first_wrong == "step 5 consumed batch 6, but 4 was planned"
    assert sum(count.skipped for count in verdict.sources.values()) > 400


def test_a_ledger_that_was_lost_is_missed(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=4))
    (texts / "run" / "data" / "ledger.bin").unlink()
    ranks.run(1, run, job(texts, steps=6))
    assert prove_data(texts / "run").missing_steps == [1, 2, 3, 4]


def test_a_run_that_goes_on_from_another_one_begins_there(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=4))
    (texts / "run").rename(texts / "before")
    resume = {"resume": str(texts / "before" / "checkpoint" / "step_4")}
    ranks.run(1, run, job(texts, steps=6, checkpoint=resume))
    verdict = prove_data(texts / "run")
    assert verdict.holds
    assert (verdict.first_step, verdict.last_step) == (5, 6)


def test_what_the_spike_guard_left_out_is_told_and_no_fault(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run_with_a_spike, job(texts, steps=8, health={"spike_guard": "rewind"}))
    verdict = prove_data(texts / "run")
    assert verdict.holds
    assert verdict.left_out > 0


def run_with_a_spike(world: World, config: JobConfig) -> int:
    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    assert built.guard is not None
    calls = iter(range(100))
    built.guard.is_spike = lambda loss: next(calls) == 4  # type: ignore[method-assign]
    train(built)
    return built.progress.step


def test_sources_come_and_go(ranks: RankPool, texts: Path) -> None:
    """The tokenizer is the run's own, trained on the first source alone."""

    def config(steps: int, *names: str) -> JobConfig:
        sources = {name: {"path": str(texts / name), "weight": WEIGHTS[name]} for name in names}
        return job(texts, steps=steps, data={"sources": sources})

    ranks.run(1, run, config(2, "code"))
    ranks.run(1, run, config(4, "code", "news"))
    ranks.run(1, run, config(6, "news"))
    verdict = prove_data(texts / "run")
    assert verdict.holds
    assert verdict.sources["news"].consumed > verdict.sources["code"].consumed / 2 > 0


def test_random_tokens_are_counted_under_their_own_name(ranks: RankPool, texts: Path) -> None:
    sources = {"code": {"path": str(texts / "code"), "weight": 3.0}, "random": {"weight": 1.0}}
    ranks.run(1, run, job(texts, steps=4, data={"sources": sources}))
    verdict = prove_data(texts / "run")
    assert verdict.holds
    assert verdict.sources["random"].planned == 8 * 33
    assert (
        "random tokens cannot be mixed by documents"
        in ranks.run(
            1, refusal, job(texts / "b", data={"sources": sources, "mixture": "documents"})
        )[0]
    )


def refusal(world: World, config: JobConfig) -> str:
    try:
        build_run(config, world, torch.device("cpu"), log_ranks=())
    except DataError as error:
        return str(error)
    return ""


def test_ranks_that_share_rows_must_be_given_the_same(ranks: RankPool, texts: Path) -> None:
    config = job(texts, parallelism={"tensor_parallel_degree": 2})
    with pytest.raises(AssertionError, match="data-parallel rank 0 got different rows"):
        ranks.run(2, run_with_a_wrong_row, config)


def test_validation_sees_every_row_once_in_any_layout(ranks: RankPool, texts: Path) -> None:
    held_out = {
        "enable": True, "freq": 2, "steps": -1, "dataset": "news", "allow_training_data": True,
    }  # fmt: skip
    config = job(texts, 2, steps=2, validation=held_out)
    config.data.datasets["news"] = str(texts / "news")
    loss = ranks.run(2, validated, config)[0]
    assert loss == pytest.approx(ranks.run(1, validated, config)[0], rel=1e-9)


def validated(world: World, config: JobConfig) -> float:
    """Of fresh weights; with the rows of a batch per rank."""
    from overland.training.validate import loss_on

    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    (held_out,) = built.validation_sets
    return loss_on(built, held_out)


def test_a_ledger_whose_beginning_is_damaged_proves_nothing(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=4))
    ledger = texts / "run" / "data" / "ledger.bin"
    ledger.write_bytes(b"XXXXXXXX" + ledger.read_bytes()[8:])
    ranks.run(1, run, job(texts, steps=6))
    ledger.write_bytes(
        b"XXXX" + ledger.read_bytes()[4:200] + bytes(100) + ledger.read_bytes()[300:]
    )
    verdict = prove_data(texts / "run")
    assert not verdict.holds
    assert verdict.first_step == 1
    assert verdict.missing_steps


def test_a_damaged_shard_is_found_by_the_proof(ranks: RankPool, texts: Path) -> None:
    ranks.run(1, run, job(texts, steps=3))
    shard = next((texts / "data").glob("code-*/shards/*/*.shard"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="is damaged: its checksum does not match"):
        prove_data(texts / "run")


def test_a_source_that_ends_stops_all_ranks_and_what_was_learned_is_saved(
    ranks: RankPool, texts: Path
) -> None:
    sources = {"code": {"path": str(texts / "code"), "max_epochs": 2}}
    config = job(texts, 4, steps=50, data={"sources": sources}, checkpoint={"interval": 50})
    said = ranks.run(4, ended, config)
    assert len(set(said)) == 1
    assert "code has been read 2 times, the limit set by its max_epochs" in said[0]
    (saved,) = (texts / "run" / "checkpoint").glob("step_*")
    assert int(saved.name.removeprefix("step_")) >= 1
    assert prove_data(texts / "run").holds


def ended(world: World, config: JobConfig) -> str:
    built = build_run(config, world, torch.device("cpu"), log_ranks=())
    try:
        train(built)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("story", SHORT, ids=lambda story: story.name.replace(" ", "-"))
def test_killed_sessions_read_what_one_run_reads(story: Any, tmp_path: Path) -> None:
    verdict = prove_sessions(story, tmp_path, seed=1, world_sizes=(1, 3, 2))
    assert verdict.problems == []
    assert min(verdict.epochs) >= 2
