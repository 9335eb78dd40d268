"""`overland preflight` on this machine: exit codes, table and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from overland.cluster.preflight import conduct
from overland.cluster.preflight.conduct import (
    PreflightSettings,
    preflight,
    preflight_among_ranks,
    preflight_here,
)
from overland.errors import ClusterError
from overland.world import World
from tests.cli.processes import environment, overland
from tests.waiting import LIMIT_SECONDS


def test_a_good_machine_is_exit_code_0(tmp_path: Path) -> None:
    done = overland("preflight", "--quick", "--save", "out.json", cwd=tmp_path)
    assert "1 of 1 nodes are good" in done.stdout
    assert "preflight: device, " in done.stderr
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["good"], saved["bad"], saved["quick"]) == (True, {}, True)


def test_a_bad_machine_is_named_with_exit_code_1(tmp_path: Path) -> None:
    words = ["preflight", "quickstart", "--quick", "--json"]
    done = overland(*words, cwd=tmp_path, code=1, NCCL_SOCKET_IFNAME="ib7")
    report = json.loads(done.stdout)
    ((node, reason),) = report["bad"].items()
    assert [node] == report["nodes"]
    assert "has no interface ib7 with an address" in reason


@pytest.mark.parametrize("words", [["no.toml"], ["--nodes", "n1"], ["--slowly"]])
def test_wrong_usage_is_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    overland("preflight", *words, cwd=tmp_path, code=2)


def test_a_sum_of_all_that_hangs_is_a_failure_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "sum_limit", lambda num_tasks: 0.01)
    report = preflight_here(2, PreflightSettings(folder=str(tmp_path), quick=False), environment())
    assert report.bad == {}
    assert not report.is_good
    assert "all-reduce of all good nodes failed on 2 of 2 tasks" in report.failure
    assert "did not finish within" in report.failure


def test_devices_are_shared_on_one_machine_only() -> None:
    job = PreflightSettings(ranks_per_device=4)
    with pytest.raises(ClusterError, match=r"comm.ranks_per_device = 4, .* there are 2 nodes; "):
        preflight(["srun"], ["n1", "n2"], 4, job, {})
    with pytest.raises(ClusterError, match="there are 2 nodes"):
        preflight_among_ranks(World(0, 8, 0, 4), job, {})


def test_without_a_gpu_to_share_nothing_is_good(tmp_path: Path) -> None:
    job = PreflightSettings(folder=str(tmp_path), quick=True, ranks_per_device=4)
    report = preflight_here(1, job, environment(CUDA_VISIBLE_DEVICES=""))
    assert not report.is_good
    assert "comm.ranks_per_device = 4, but only GPUs are shared" in report.summary()


@pytest.mark.long
def test_tasks_of_torchrun_find_the_first_of_them(tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--nproc-per-node=2", "-m", "overland", "preflight"]
    done = subprocess.run(
        [sys.executable, "-m", *words, "--quick", "--json"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["good"]
    (facts,) = report["measured"].values()
    assert len(facts["device"]) == 2
