"""What a process finds under the real Slurm, and that the tests' Slurm leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from overland.cluster.slurm_jobs import requeue, shun, usable_nodes, was_requeued
from overland.slurm import expand_hosts
from tests.cli.processes import environment
from tests.cluster.packages import need
from tests.cluster.slurm import PROGRAMS, Slurm, end_abandoned, processes_of
from tests.waiting import wait_until

ASK = f"{sys.executable} -c 'from overland.world.launchers import find_world; print(find_world())'"


def test_only_a_task_of_srun_finds_a_world_in_a_batch_script(slurm: Slurm) -> None:
    script = f"{ASK}; srun {ASK}; srun -N1 -n1 {ASK}"
    job, output = slurm.batch(script, "-N2", "--ntasks-per-node=2", env=environment())
    # Of a busy machine, srun may say that it tries again.
    alone, *tasks, one_task = [x for x in output.splitlines() if not x.startswith("srun:")]
    assert (alone, one_task) == ("None", "None")
    places = [tuple(map(int, re.findall(r"(?:rank|size)=(\d+)", line))) for line in tasks]
    assert sorted(places) == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    assert len({line[line.index("rendezvous=") :] for line in tasks}) == 1
    assert f"name='slurm-{job}.0'" in tasks[0]


def test_the_shell_of_salloc_finds_no_world(slurm: Slurm) -> None:
    assert slurm.run("salloc", "-N2", "-n4", "bash", "-c", ASK, env=environment()) == "None\n"


def test_uneven_tasks_end_every_rank_with_one_sentence(slurm: Slurm) -> None:
    words = ["srun", "-N3", "-n5", sys.executable, "-m", "overland", "train", "quickstart"]
    done = subprocess.run(
        words, env=slurm.environment(environment()), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("3,1,1: every node needs the same number of ranks") == 5


def test_a_slurm_whose_test_run_was_killed_is_ended_by_the_next() -> None:
    need(*PROGRAMS)
    code = (
        "import os, subprocess, time; from tests.cluster.slurm import Slurm; cluster = Slurm(2);"
        "subprocess.Popen(['srun', '-N2', 'sleep', '600'], env=cluster.environment(), stdout=-3);"
        "time.sleep(1); print(cluster.folder, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert killed.returncode == -signal.SIGKILL
    folder = Path(killed.stdout.strip())
    left = processes_of(folder)
    assert sum("sleep" in Path(f"/proc/{pid}/cmdline").read_text() for pid in left) >= 2
    end_abandoned()
    assert not processes_of(folder)
    assert not folder.exists()
    assert os.getpid() not in left


def test_who_is_left_over_from_before_a_requeue_is_told(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    words = ["sbatch", "--parsable", "--requeue", "--output=/dev/null", "--wrap=sleep 60"]
    job = slurm.run(*words).strip()
    try:
        wait_until(lambda: " JobState=RUNNING " in shown(slurm, job), "it runs", lambda: "")
        before = {"SLURM_JOB_ID": job}
        assert not was_requeued(before)
        requeue(before)
        assert was_requeued(before)
        assert not was_requeued({**before, "SLURM_RESTART_COUNT": "1"})
        requeue(before)  # by a process that is left over: nothing happens
        assert " Restarts=1 " in shown(slurm, job)
    finally:
        slurm.run("scancel", job)


def shown(slurm: Slurm, job: str) -> str:
    return slurm.run("scontrol", "show", "job", job, "--oneliner")


NAME = "chain-with-bad-nodes"


def test_waiting_jobs_are_kept_from_bad_nodes_for_a_while_and_never_from_too_many(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    words = ["sbatch", "--parsable", f"--job-name={NAME}", "--output=/dev/null", "--wrap=sleep 60"]
    one = slurm.run(*words, "--hold", "--nodes=1", "--exclude=n1").strip()
    all_but_one = slurm.run(*words, "--hold", "--nodes=3").strip()
    env = {"SLURM_JOB_NAME": NAME, "SLURM_JOB_PARTITION": "debug"}
    try:
        shun(["n4", "n3", "n2"], {"n2", "n3", "n4"}, env)
        assert excluded(slurm, one) == ["n1", "n4"], "the user's, and half of what is left over"
        assert excluded(slurm, all_but_one) == []
        shun(["n3"], {"n2", "n3", "n4"}, env)
        assert excluded(slurm, one) == ["n1", "n3"]
        shun([], {"n2", "n3", "n4"}, env)
        assert excluded(slurm, one) == ["n1"]
        assert usable_nodes(env) == slurm.nodes
        assert usable_nodes(env, "no-such-feature") == []
    finally:
        slurm.run("scancel", f"--name={NAME}")


def test_a_job_that_requeues_itself_is_kept_from_its_bad_node(slurm: Slurm, tmp_path: Path) -> None:
    """All of its processes get SIGTERM for it, and what it asks of Slurm must not end there."""
    told = tmp_path / "node"
    code = (
        "import os, signal; from overland.cluster.slurm_jobs import requeue, shun;"
        "node = [os.environ['SLURMD_NODENAME']];"
        f"open('{told}', 'w').write(node[0]);"
        "signal.signal(signal.SIGTERM, lambda *_: None);"
        "requeue(os.environ); shun(node, node, os.environ)"
    )
    words = ["sbatch", "--parsable", "--requeue", f"--job-name={NAME}", "--output=/dev/null"]
    script = f'trap : TERM; exec {sys.executable} -c "{code}"'
    job = slurm.run(*words, f"--wrap={script}", env=environment()).strip()
    try:
        wait_until(lambda: " Restarts=1 " in shown(slurm, job), "it is requeued", lambda: "")
        node = told.read_text()
        wait_until(
            lambda: excluded(slurm, job) == [node], f"{node} is excluded",
            lambda: f"{shown(slurm, job)}\n{slurm.run('sinfo', '--Node', '--long')}",
        )  # fmt: skip
    finally:
        slurm.run("scancel", job)


def excluded(slurm: Slurm, job: str) -> list[str]:
    [listed] = re.findall(r" ExcNodeList=(\S*) ", shown(slurm, job))
    return [] if listed in ("", "(null)") else expand_hosts(listed)
