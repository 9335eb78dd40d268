"""`overland doctor`: every possible problem is found, and no secret is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.cli.main import app
from overland.cluster.doctor import Finding, session, software
from overland.cluster.doctor.offline import check_offline_start, judge_start
from overland.cluster.site import NamedSite, load_site
from tests.cli.processes import ROOT, environment

FRONTIER, PERLMUTTER, LAPTOP = (load_site(name) for name in ("frontier", "perlmutter", "laptop"))
JOB = {"SLURM_JOB_ID": "7"}


def status(findings: list[Finding], what: str) -> str:
    (found,) = [one for one in findings if one.what == what]
    return found.status


# software


@pytest.mark.parametrize(
    ("version", "built_for", "site", "drivers", "verdict"),
    [
        ("2.13.0+rocm7.2", "amd", FRONTIER, [], "ok"),
        ("2.13.0+cu130", "nvidia", FRONTIER, [], "error"),
        ("2.13.0+rocm7.2", "amd", PERLMUTTER, [], "error"),
        ("2.13.0+cpu", "none", PERLMUTTER, [], "error"),
        ("2.13.0+cpu", "none", LAPTOP, [], "ok"),
        ("2.13.0+cpu", "none", None, ["nvidia"], "error"),
        ("2.13.0+cu130", "nvidia", None, ["nvidia"], "ok"),
        ("2.13.0+cu130", "nvidia", None, [], "ok"),
        ("2.10.1+cpu", "none", None, [], "error"),
        ("", "none", None, [], "error"),
    ],
)
def test_a_torch_of_the_wrong_build_or_age_is_found(
    version: str, built_for: str, site: NamedSite | None, drivers: list[str], verdict: str
) -> None:
    found = software.check_torch(software.Torch(version, built_for), site, drivers)
    assert found.status == verdict
    assert bool(found.way_out) == (verdict != "ok")


def test_a_driver_without_devices_is_wrong() -> None:
    blind = software.Torch("2.13.0", "nvidia")
    assert software.check_devices(blind, ["nvidia"]).status == "error"
    assert software.check_devices(blind, []).status == "ok"
    two = replace(blind, devices=("H200", "H200"))
    assert software.check_devices(two, ["nvidia"]).found == "2 × H200"
    assert software.check_kernels(two, lambda: False).status == "warning"
    assert software.check_kernels(two, lambda: True).status == "ok"


def test_packages_are_held_to_what_overland_asks_for() -> None:
    wanted = [
        software.Requirement("numpy", "2.0", None),
        software.Requirement("pyarrow", "18", "data"),
        software.Requirement("zstandard", "0.23", "data"),
        software.Requirement("wandb", "0.19", "wandb"),
    ]
    good = {"numpy": "2.4.6", "pyarrow": "26.0.1", "zstandard": "0.23"}
    found = list(software.check_requirements(wanted, good))
    assert [one.status for one in found] == ["ok"] * 3
    assert "pip install 'overland[wandb]'" in found[2].found
    found = list(software.check_requirements(wanted, {**good, "numpy": "1.26.4", "pyarrow": "9.0"}))
    assert [one.status for one in found] == ["error", "warning", "ok"]
    assert found[0].found == "numpy 1.26.4 is older than 2.0"
    assert next(software.check_requirements(wanted, {})).found == "numpy is missing"


def test_what_overland_asks_for_is_read_from_its_package() -> None:
    wanted = {one.package: one for one in software.requirements()}
    assert wanted["torch"].minimum == "2.11"
    assert wanted["tokenizers"].extra == "text"
    assert "pytest" not in wanted
    assert software.release("2.13.0+cpu") > software.release("2.9")


# places


def test_caches_that_cannot_be_written_or_lie_in_a_small_home_are_found(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "file").write_text("")
    env = {
        "HOME": f"{tmp_path}/home",
        "USER": "me",
        "SCRATCH_ROOT": f"{tmp_path}/scratch",
        "HF_HOME": f"{tmp_path}/scratch/hf",
        "TRITON_CACHE_DIR": f"{tmp_path}/file/below",
    }
    found = list(session.check_places(PERLMUTTER, env))
    assert status(found, "SCRATCH_ROOT") == status(found, "HF_HOME") == "ok"
    assert status(found, "XDG_CACHE_HOME") == "warning"
    assert status(found, "TRITON_CACHE_DIR") == "error"
    assert "MIOPEN_USER_DB_PATH" not in [one.what for one in found]


def test_what_the_site_sets_in_every_job_is_no_matter(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "SCRATCH_ROOT": "/tmp"}
    found = list(session.check_places(FRONTIER, env))
    assert status(found, "MIOPEN_USER_DB_PATH") == status(found, "TRITON_CACHE_DIR") == "ok"
    assert status(found, "HF_HOME") == "warning"


def test_a_full_disk_and_a_missing_scratch_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.check_scratch(FRONTIER, {}).status == "warning"
    assert session.check_scratch(LAPTOP, {}).status == "ok"
    monkeypatch.setattr(session, "LITTLE", 1e18)
    assert session.check_writable("x", tmp_path, "elsewhere").status == "warning"


# session


def test_offline_switches_belong_into_jobs() -> None:
    switches = dict.fromkeys(session.OFFLINE, "1")
    assert session.check_offline({}).status == "ok"
    assert session.check_offline(switches).status == "warning"
    assert session.check_offline({**JOB, **switches}).status == "ok"
    found = session.check_offline({**JOB, **switches, "HF_DATASETS_OFFLINE": "0"})
    assert found.status == "warning"
    assert "HF_DATASETS_OFFLINE" in found.found


def test_proxies_are_named_and_never_shown() -> None:
    env = {"https_proxy": "http://me:pass-word@proxy:3128"}
    assert session.check_proxies(FRONTIER, env).status == "ok"
    found = session.check_proxies(FRONTIER, {**JOB, **env})
    assert found.status == "warning"
    assert "https_proxy" in found.found
    assert "pass-word" not in str(found)


def test_ranks_left_in_the_shell_are_found() -> None:
    assert session.check_ranks({"RANK": "0", "MASTER_ADDR": "n1"}).way_out == (
        "unset RANK MASTER_ADDR"
    )
    assert session.check_ranks({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}).status == "ok"
    assert session.check_ranks({}).status == "ok"


def test_small_limits_are_found() -> None:
    small = list(session.check_limits(1024, 8 << 20, FRONTIER))
    assert [one.status for one in small] == ["warning", "warning"]
    assert [one.status for one in session.check_limits(-1, -1, FRONTIER)] == ["ok", "ok"]
    assert [one.status for one in session.check_limits(65536, 8 << 20, LAPTOP)] == ["ok", "ok"]


def test_slurm_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert session.check_slurm(FRONTIER).status == "error"
    assert session.check_slurm(LAPTOP).status == "ok"
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho slurm 24.05.4\n")
    sbatch.chmod(0o755)
    assert session.check_slurm(FRONTIER).found == "slurm 24.05.4"
    sbatch.write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    assert session.check_slurm(FRONTIER).status == "error"


def test_a_token_is_never_shown_and_its_file_is_for_its_owner(tmp_path: Path) -> None:
    assert "hf_secret" not in str(session.check_token({"HF_TOKEN": "hf_secret"}))
    env = {"HF_HOME": str(tmp_path)}
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "token").chmod(0o644)
    (found,) = session.check_token_files(env)
    assert found.status == "warning"
    assert found.way_out == f"chmod 600 {tmp_path}/token"
    assert "hf_secret" not in str(found)
    (tmp_path / "token").chmod(0o600)
    assert list(session.check_token_files(env)) == []


# start


def refusing(tmp_path: Path, code: str) -> tuple[str, list[str]]:
    """What a program prints, and the addresses it tried."""
    script = (
        "from overland.cluster.doctor.offline import refuse_network\n"
        f"refuse_network({str(tmp_path / 'tried')!r})\nimport socket\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True
    )
    tried = tmp_path / "tried"
    return done.stdout + done.stderr, tried.read_text().split() if tried.exists() else []


def test_connections_and_lookups_are_refused_and_recorded(tmp_path: Path) -> None:
    code = """
for attempt in (
    lambda: socket.create_connection(("huggingface.co", 443), timeout=1),
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.2", 53)),
    lambda: socket.gethostbyname("example.org"),
):
    try:
        attempt()
        print("came through")
    except ConnectionRefusedError:
        pass
"""
    output, tried = refusing(tmp_path, code)
    assert output == ""
    assert tried == ["huggingface.co:443", "192.0.2.1:80", "192.0.2.2:53", "example.org"]


def test_this_machine_may_be_reached(tmp_path: Path) -> None:
    code = """
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(("localhost", server.getsockname()[1])).close()
socket.getaddrinfo(socket.gethostname(), 80)
a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1))
"""
    output, tried = refusing(tmp_path, code)
    assert output == "b'x'\n"
    assert tried == []


def test_a_run_that_calls_home_is_found_though_it_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calls_home.py").write_text(
        "import socket\ntry:\n    socket.create_connection(('home.example', 443), timeout=1)\n"
        "except OSError:\n    pass\n"
    )
    (tmp_path / "run.toml").write_text(
        '[job]\ncustom_import = "calls_home"\n[model]\nflavor = "debugmodel"\n'
        'hf_assets_path = "missing/folder"\n[training]\nseq_len = 32\n'
    )
    monkeypatch.chdir(tmp_path)
    env = environment(PYTHONPATH=str(ROOT))
    found = list(check_offline_start("run.toml", env))
    assert [one.status for one in found] == ["error", "error"]
    assert "tried to reach home.example:443" in found[0].found
    assert "missing/folder" in found[1].found


def test_a_config_that_does_not_start_is_told_in_its_own_words() -> None:
    done = subprocess.CompletedProcess([], 2, "", "run.toml:3: a\nrun.toml:4: b\n")
    (found,) = judge_start("run.toml", done, [])
    assert found.status == "error"
    assert "run.toml:3: a; run.toml:4: b" in found.found


def test_a_path_that_does_not_exist_is_a_finding_about_files() -> None:
    said = json.dumps({"to_fetch": ["run.toml:3: training.dataset_path: no such file"]})
    done = subprocess.CompletedProcess([], 2, stdout=said, stderr="")
    start, files = judge_start("run.toml", done, [])
    assert (start.status, files.status) == ("ok", "error")
    assert files.found == "run.toml:3: training.dataset_path: no such file"


def test_the_verb_looks_at_everything_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(software, "DRIVERS", {})
    done = CliRunner().invoke(app, ["doctor", "--site", "laptop", "--json"])
    facts = json.loads(done.stdout)
    assert "hf_secret" not in done.output
    assert status([Finding(**one) for one in facts["findings"]], "start without network") == "ok"
    assert done.exit_code == (1 if facts["error"] else 0)
    done = CliRunner().invoke(app, ["doctor", "--site", "nowhere"])
    assert done.exit_code == 2


def test_the_table_has_a_line_for_each_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Finding("a", "fine"), Finding("b", "broken", "mend it", "error")]
    monkeypatch.setattr("overland.cli.doctor.examine", lambda config, site: iter(told))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "→ mend it" in done.stdout
    assert "2 checks: 1 error, 0 warnings." in done.stdout
