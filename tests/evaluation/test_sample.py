"""A sample that is taken between steps changes nothing about a run."""

from __future__ import annotations

from pathlib import Path

import torch

from overland.apps.evaluation import sample
from overland.apps.evaluation.cache import can_cache
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.training.build import build_run
from overland.training.loop import train
from overland.world import World
from tests.jobs import Recorder

from .test_model import text_job


def losses_with_sample(
    world: World, config: JobConfig, is_taken: bool
) -> tuple[list[float], bool, str]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    cached = can_cache(run.model.parts[0])
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    if is_taken:
        sample.take_sample(run)
    train(run)
    return recorder.losses, cached, sample.read_samples(run.folder).get(0, "")


def test_losses_are_the_same_with_and_without_a_sample(ranks: RankPool, tmp_path: Path) -> None:
    """On one rank the model keeps keys and values meanwhile; on two it is sharded."""
    said = {}
    for num_ranks in (1, 2):
        found = []
        for is_taken in (False, True):
            config = text_job(tmp_path / f"{num_ranks} {is_taken}")
            metrics = config.metrics.model_copy(update={"sample_prompt": "import " * 40})
            config = config.model_copy(update={"metrics": metrics})
            found.append(ranks.run(num_ranks, losses_with_sample, config, is_taken)[0])
        (plain, cached, _), (sampled, _, said[num_ranks]) = found
        assert cached == (num_ranks == 1)
        assert sampled == plain
    assert said[1].startswith("import ")  # longer than the context, of which the end is taken
    assert said[1] == said[2]


def said_of_samples(world: World, config: JobConfig) -> list[str]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    run.folder.samples.mkdir()
    sample.take_sample(run)
    run.folder.samples.rmdir()
    run.folder.samples.write_text('{"step": 0\n[1]\n{"step": "x", "text": "y"}\n')
    sample.take_sample(run)
    return [*recorder.messages, *sample.read_samples(run.folder).values()]


def test_no_run_ends_because_of_a_sample(ranks: RankPool, tmp_path: Path) -> None:
    config = text_job(tmp_path / "run")
    metrics = config.metrics.model_copy(update={"sample_prompt": "import"})
    (said,) = ranks.run(1, said_of_samples, config.model_copy(update={"metrics": metrics}))
    refused, text = said
    assert refused.endswith("samples.jsonl cannot be written: Is a directory; the run continues")
    assert text.startswith("import")
