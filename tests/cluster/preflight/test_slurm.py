"""Four nodes of a real Slurm, some of them really bad: each is named, for the right reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overland.cluster.preflight import crew, start
from overland.cluster.preflight.conduct import PreflightSettings, preflight
from overland.cluster.preflight.report import Report
from overland.errors import ClusterError
from tests.cli.processes import environment
from tests.cluster.preflight.faults import launch
from tests.cluster.slurm import Slurm

OVERLAND = (sys.executable, "-m", "overland")


@pytest.fixture
def folder(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run will be; what hangs is waited for less long than on a cluster."""
    (tmp_path / "run.toml").write_text(f'[job]\ndump_folder = "{tmp_path}/runs/one"\n')
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    monkeypatch.setitem(crew.LIMITS, "listen", 5.0)
    monkeypatch.setattr(start, "GRACE_SECONDS", 2.0)
    return tmp_path


def fly(slurm: Slurm, folder: Path, faults: dict[str, str], tasks: int = 1) -> Report:
    env = slurm.environment(environment())
    report = preflight(
        launch(faults, folder, slurm.nodes, tasks),
        slurm.nodes,
        tasks,
        PreflightSettings.of(folder / "run.toml", env),
        env,
    )
    assert slurm.run("squeue", "--noheader", "--steps") == ""  # nothing of it is left
    assert [path.name for path in folder.rglob(".overland*")] == []
    return report


@pytest.mark.long
def test_good_nodes_are_good(slurm: Slurm, folder: Path) -> None:
    report = fly(slurm, folder, {}, tasks=2)
    assert report.bad == {}
    assert report.is_good
    assert report.quick  # there are no accelerators
    assert [len(report.measured[node]["device"]) for node in slurm.nodes] == [2, 2, 2, 2]
    assert [match.nodes for match in report.matches] == [
        ("n1", "n2"), ("n3", "n4"), ("n1", "n3"), ("n2", "n4"),
    ]  # fmt: skip
    report.save(folder / "deep" / "preflight.json")
    assert json.loads((folder / "deep" / "preflight.json").read_text())["good"] is True
    assert re.search(r"n1 +2 .* good *\n", report.table())


def test_versions_clocks_files_and_disks_are_compared(slurm: Slurm, folder: Path) -> None:
    faults = {"n2": "old version", "n3": "clock ahead", "n4": "small files only + stale file"}
    report = fly(slurm, folder, faults)
    assert report.bad.keys() == faults.keys()
    assert report.bad["n2"] == "overland is 0.0.9, but 0.1.0 on most nodes"
    assert report.bad["n3"] == "clock is 5.0 s ahead"
    stale, run, temporary = report.bad["n4"].split("; ")
    assert re.fullmatch(r"config is \w{16}, but \w{16} on most nodes", stale)
    assert run == f"run folder {folder} is not writable: File too large"
    assert re.fullmatch(r"temporary folder /\S+ is not writable: File too large", temporary)


def test_devices_must_be_right_and_fast_and_interfaces_there(slurm: Slurm, folder: Path) -> None:
    faults = {"n2": "wrong bit", "n3": "slow matmul", "n4": "no such interface"}
    report = fly(slurm, folder, faults, tasks=2)
    assert report.bad.keys() == faults.keys()
    assert report.bad["n2"].startswith("matmul of task 0 differs in bits from that of most (")
    assert "matmul of task 1 differs in bits" in report.bad["n2"]
    assert report.bad["n3"].startswith("matmul of task 0 is slow: ")
    assert "environment GLOO_SOCKET_IFNAME: " in report.bad["n4"]
    assert "has no interface ib7 with an address" in report.bad["n4"]


@pytest.mark.long
def test_who_never_starts_or_hangs_holds_up_nobody(
    slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "PATIENCE", 8.0)
    faults = {"n2": "ends at once", "n3": "never starts", "n4": "hanging matmul"}
    report = fly(slurm, folder, faults)
    assert report.bad.keys() == faults.keys()
    assert report.bad["n2"] == "did not start: exited with exit code 3 (cannot read /env)"
    assert re.fullmatch(r"did not start within \d+ s", report.bad["n3"])
    assert re.search(r"no answer in the device test within|in the matmul", report.bad["n4"])
    assert "n1" in report.measured


@pytest.mark.long
def test_a_node_that_stops_in_a_round_is_named_and_its_partner_is_not(
    slurm: Slurm, folder: Path
) -> None:
    report = fly(slurm, folder, {"n3": "stops when it is to listen"})
    assert report.bad.keys() == {"n3"}
    words = r"no answer in round 1 of the links within \d+ s, with n4"
    assert re.fullmatch(words, report.bad["n3"])
    assert ("n2", "n4") in [match.nodes for match in report.matches]


@pytest.mark.long
def test_a_slow_link_is_the_fault_of_the_node_that_is_slow_with_all(
    slurm: Slurm, folder: Path
) -> None:
    report = fly(slurm, folder, {"n2": "slow network"})
    assert report.bad.keys() == {"n2"}
    assert re.match(
        r"link with n1 in round 1: .* GB/s, while the median is .*; link with n4 in round 2",
        report.bad["n2"],
    )


def test_an_srun_that_fails_is_an_error_in_its_own_words(slurm: Slurm, folder: Path) -> None:
    words, job = ["srun", "--nodelist=n9", *OVERLAND], PreflightSettings()
    with pytest.raises(
        ClusterError, match=r"no task of the preflight started: srun: .*Invalid node name"
    ):
        preflight(words, ["n1"], 1, job, slurm.environment(environment()))
    with pytest.raises(ClusterError, match="cannot run /no/srun: No such file"):
        preflight(["/no/srun", *OVERLAND], ["n1"], 1, job, slurm.environment(environment()))


def test_in_the_shell_of_an_allocation_it_tests_all_its_nodes_as_training_will(
    slurm: Slurm, folder: Path
) -> None:
    """The whole: torch, gloo and the sum of all."""
    words = ["salloc", "--nodelist=n1,n2,n3", "--ntasks-per-node=1", *OVERLAND]
    options = ["preflight", "run.toml", "--json"]
    report = json.loads(slurm.run(*words, *options, env=environment(), cwd=folder))
    assert (report["good"], report["quick"], report["bad"]) == (True, False, {})
    assert report["nodes"] == ["n1", "n2", "n3"]
    assert report["all_reduce"]["tasks"] == 3
    assert [match["nodes"] for match in report["matches"]] == [["n1", "n2"], ["n1", "n3"]]


@pytest.mark.long
def test_some_nodes_of_an_allocation_can_be_chosen(slurm: Slurm, folder: Path) -> None:
    overland = f"{' '.join(OVERLAND)} preflight --quick"
    script = f"{overland} --json --nodes n2; {overland} --nodes n[2-4] || echo code $?"
    words = ["salloc", "-N2", "--nodelist=n1,n2", "bash", "-c", script]
    done = subprocess.run(
        words, env=slurm.environment(environment()), cwd=folder, capture_output=True, text=True
    )
    assert '"nodes": [\n    "n2"\n  ]' in done.stdout
    assert done.stdout.endswith("code 2\n")
    assert "--nodes n[2-4]: not in this allocation: n3, n4" in done.stderr


@pytest.mark.long
def test_tasks_of_srun_find_the_first_of_them(slurm: Slurm, folder: Path) -> None:
    words = ["srun", "--nodelist=n1,n2", "--ntasks-per-node=1", *OVERLAND]
    options = ["preflight", "--quick", "--json"]
    report = json.loads(slurm.run(*words, *options, env=environment(), cwd=folder))
    assert report["good"]
    assert report["nodes"] == ["n1", "n2"]
    assert len(report["matches"]) == 1
