"""`overland submit --eval`: the script it writes, what it refuses, and a job of the real Slurm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from overland.apps.evaluation.task_run import open_manager
from overland.cli.main import app
from overland.cluster.script import render_evaluation
from tests.cli.processes import environment, overland
from tests.cluster.scripts import LEFT_OPEN, assert_good_bash, make_job, place
from tests.cluster.slurm import Slurm
from tests.cluster.supervised import SITE
from tests.evaluation.task_files import write_tasks
from tests.evaluation.texts import write_text_model
from tests.hub.test_fetch_tasks import write_task

WORDS = ["/runs/a/checkpoint/step_5", "--tasks", "mmlu,arc_*", "--limit", "10"]


def submit(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["submit", *map(str, words)])


@pytest.mark.parametrize("wanted", [{}, {"sessions": 2, "container": "/images/overland.sif"}])
@pytest.mark.parametrize("site", LEFT_OPEN)
def test_every_script_is_good_bash(site: str, wanted: dict[str, object]) -> None:
    text = render_evaluation(make_job(site, place(Path("/runs/a")), **wanted), WORDS)
    assert_good_bash(text)
    assert "overland eval /runs/a/checkpoint/step_5 --tasks 'mmlu,arc_*' --limit 10" in text
    if site != "laptop":
        assert "#SBATCH --nodes=1\n" in text
        assert ("--dependency=singleton" in text) == bool(wanted)


def test_what_cannot_be_evaluated_is_refused_before_it_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH_ROOT", raising=False)
    Path("model").mkdir()
    Path("definitions").mkdir()
    write_task(Path("definitions"), "quiz", dataset_path="team/quiz")
    open_manager.cache_clear()
    site = ("--eval", "--site", "laptop")
    for words, said in (
        (["model", "--nodes", "2"], "an evaluation runs on one node"),
        (["nowhere"], "nowhere does not exist"),
        (["model", "--taks", "quiz"], "No such option: --taks"),
        (["model", "--limit", "many"], "Invalid value for '--limit'"),
        (["model", "--dtype", "float99"], "Invalid value for '--dtype'"),
        (["model", "--prefix", "beginning"], "Invalid value for '--prefix'"),
        (["model", "--step", "1", "--steps", "all"], "give either --step or --steps, not both"),
        (["model", "--num-fewshot", "0"], "--num-fewshot has no effect without --tasks"),
        (["model", "--tasks", "quiz", "--joined"], "--joined has no effect without --data"),
        (["model", "--data", "nowhere.txt"], "--data nowhere.txt: no such file"),
        (["model", "--tensor-parallel", "99"], "--tensor-parallel 99 does not divide"),
        (["model", "--tasks", "quiz", "--include-path", "definitions"], "fetch tasks quiz"),
    ):
        done = submit(*words, *site)
        assert done.exit_code == 2
        assert said in done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["definitions", "model"]


def test_the_place_of_datasets_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH_ROOT", "/scratch/me")
    Path("model").mkdir()
    words = ("model", "--eval", "--site", "frontier", "--account", "abc", "--dry-run", "--json")
    shown = json.loads(submit(*words).stdout)
    assert "export SCRATCH_ROOT=/scratch/me\n" in shown["script"]
    assert shown["checkpoint"] == str(tmp_path / "model")
    assert shown["ranks"] == 8
    assert f" eval {tmp_path / 'model'}\n" in shown["script"]


def test_weights_stay_if_the_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path("sbatch").write_text("#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    Path("sbatch").chmod(0o755)
    Path("site.toml").write_text(SITE.format(ranks_per_node=2))
    Path("model").mkdir()
    Path("model.safetensors").write_text("weights")
    for model in ("model", "model.safetensors"):
        done = submit(model, "--eval", "--site", "site.toml", "--time", "00:30:00")
        assert done.exit_code == 2
        assert "invalid account" in done.stderr
        assert Path(model).exists()
    assert Path("model.safetensors").read_text() == "weights"
    assert not list(tmp_path.glob("*.evaluations/submit/*"))


@pytest.mark.long
def test_a_job_of_one_node_evaluates_on_all_of_its_ranks(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    write_text_model(tmp_path / "model")
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    write_tasks(tmp_path / "definitions", 4)
    (tmp_path / "site.toml").write_text(SITE.format(ranks_per_node=2))
    done = overland(
        "submit", "model", "--eval", "--tasks", "own_choice,own_answer", "--include-path",
        "definitions", "--context", "256", "--site", "site.toml", "--time", "00:30:00", "--json",
        cwd=tmp_path, **slurm.environment(environment()),
    )  # fmt: skip
    job = json.loads(done.stdout)
    log = Path(job["logs"]) / f"job-{job['jobs'][0]}.log"
    state = slurm.wait_for(int(job["jobs"][0]), lambda: log.read_text() if log.exists() else "")
    assert " JobState=COMPLETED " in state, log.read_text()
    (path,) = (tmp_path / "model.evaluations").glob("tasks-*.json")
    record = json.loads(path.read_text())
    assert record["ranks"] == 2
    assert record["results"].keys() == {"own_choice", "own_answer"}
    assert "exact_match" in log.read_text()
