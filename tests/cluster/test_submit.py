"""`overland submit`: the scripts it writes, what it refuses, and what their shell does."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from overland.cli.main import app
from overland.cli.submit import with_packed_python
from overland.cluster.job import JobRequest, plan_job
from overland.cluster.script import render_job
from overland.cluster.site import load_site
from overland.cluster.submit import next_files, submit, without_slurms_own, write_private
from overland.cluster.supervise.faults import Findings
from overland.config.load import load_config
from overland.config.write import write_config
from overland.errors import ClusterError
from tests.cli.processes import ROOT
from tests.cluster.scripts import LEFT_OPEN, assert_good_bash, make_job, place

RUN = Path("/scratch/me/runs/llama")
SHAPES: dict[str, dict[str, object]] = {
    "one-node": {"nodes": 1},
    "many-nodes": {"nodes": 64, "spares": 2},
    "sessions": {"nodes": 2, "sessions": 3, "sbatch": "--mail-type=END -x 'node1'"},
    "container": {"nodes": 2, "container": "/images/overland.sif"},
    "environment": {"nodes": 2, "env": ("WANDB_API_KEY",)},
}
ON_SLURM = [site for site in LEFT_OPEN if site != "laptop"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def overland(*words: str) -> Result:
    return CliRunner().invoke(app, ["submit", *words])


def refusal(*words: str) -> str:
    done = overland(*words)
    assert done.exit_code == 2, done.output
    return str(done.stderr.strip())


# Scripts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("site", ON_SLURM)
def test_every_script_is_good_bash(site: str, shape: str) -> None:
    assert_good_bash(render_job(make_job(site, place(RUN), **SHAPES[shape])))


@pytest.mark.parametrize("wanted", [{}, {"sessions": 3}, {"container": "/images/overland.sif"}])
def test_a_machine_without_a_scheduler_gets_a_script_too(wanted: dict[str, object]) -> None:
    text = render_job(make_job("laptop", place(RUN), **wanted))
    assert_good_bash(text)
    assert "SBATCH" not in text
    assert "srun" not in text


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


@pytest.mark.parametrize("site", ON_SLURM)
def test_every_script_survives_lost_nodes_and_the_end_of_the_walltime(site: str) -> None:
    text = render_job(make_job(site, place(RUN), nodes=2, sessions=2))
    asked = directives(text)
    assert {"--no-kill", "--requeue", "--open-mode=append", "--dependency=singleton"} <= set(asked)
    assert "--signal=USR1@180" in asked  # no B:, which the ranks would never see
    (launch,) = re.findall(r"launch=\((.*?)^\)", text, flags=re.MULTILINE | re.DOTALL)
    assert "--no-kill" in launch
    assert "--kill-on-bad-exit=1" in launch
    assert "SLURM_RESTART_COUNT" in text


@pytest.mark.parametrize("site", LEFT_OPEN)
def test_every_job_is_offline(site: str) -> None:
    text = render_job(make_job(site, place(RUN)))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        assert f"{name}=1" in text


def test_frontiers_script_has_what_frontier_needs() -> None:
    text = render_job(make_job("frontier", place(RUN), nodes=64, spares=2, sessions=10))
    asked = directives(text)
    for flag in ("--account=abc123", "--nodes=66", "--time=02:00:00", "--constraint=nvme",
                 "--network=disable_rdzv_get", "--ntasks-per-node=8", "--export=NONE"):  # fmt: skip
        assert flag in asked
    srun = "srun --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest"
    assert srun in text
    assert "--nodes 64 --tasks-per-node 8 --steps 100 --requeue -- " in text
    for name, value in {
        "NCCL_SOCKET_IFNAME": "hsn0",
        "GLOO_SOCKET_IFNAME": "hsn0",
        "FI_CXI_RDZV_PROTO": "alt_read",
        "FI_MR_CACHE_MONITOR": "kdreg2",
        "MIOPEN_USER_DB_PATH": "/tmp/$USER-$SLURM_JOB_ID-miopen",
    }.items():
        assert f'export {name}="{value}"' in text
    assert "rccl-net-plugin" in text
    assert "unset http_proxy" in text
    assert "# Without both of these, nothing beyond about 300 nodes works" in text


def test_a_packed_environment_is_copied_to_every_nodes_disk() -> None:
    text = render_job(make_job("frontier", place(RUN), nodes=2, packed_env="/scratch/env.tar.gz"))
    assert_good_bash(text)
    assert 'sbcast --force /scratch/env.tar.gz "$packed" || packed=' in text
    assert '    "$node_env/bin/python" -P -m overland\n' in text
    assert 'exec "$node_env/bin/python" -P -m overland supervise' in text
    with pytest.raises(ClusterError, match="generic-amd names no node-local disk"):
        make_job("generic-amd", place(RUN), packed_env="/scratch/env.tar.gz")


def test_the_environment_that_setup_packed_is_used_unless_it_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "scratch/envs/overland"
    installed = prefix / "lib/site-packages"
    installed.mkdir(parents=True)
    (tmp_path / "scratch/overland.sh").touch()
    packed = tmp_path / "scratch/overland-env.tar.gz"
    packed.touch()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(installed))
    site, wanted = load_site("frontier"), JobRequest(nodes=64)
    assert with_packed_python(site, wanted).packed_env == str(packed)
    assert with_packed_python(site, replace(wanted, nodes=1)).packed_env is None
    assert with_packed_python(site, replace(wanted, container="a.sif")).packed_env is None
    assert with_packed_python(load_site("generic-amd"), wanted).packed_env is None
    capsys.readouterr()
    os.utime(packed, (1, 1))
    assert with_packed_python(site, wanted).packed_env is None
    assert "overland env frontier > setup.sh && bash setup.sh" in capsys.readouterr().err


SBCAST = """\
#!/bin/bash
[ -z "$BROKEN" ] || exit 1
[[ $* == *--preserve* ]] && keep=-p
cp $keep "${@: -2}"
"""
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@"
"""


@pytest.mark.parametrize("broken", ["", "1"])
def test_an_old_packed_environment_is_unpacked_and_those_of_old_jobs_are_gone(
    broken: str, tmp_path: Path
) -> None:
    disk, bin_folder, packed = tmp_path / "disk", tmp_path / "env" / "bin", tmp_path / "env.tar.gz"
    for folder in (disk, bin_folder):
        folder.mkdir(parents=True)
    for folder, name, program in (
        (bin_folder, "python", "#!/bin/bash\n"),
        (tmp_path, "sbcast", SBCAST),
        (tmp_path, "srun", SRUN),
    ):
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    subprocess.run(["tar", "-czf", packed, "-C", tmp_path / "env", "."], check=True)
    month_ago = time.time() - 30 * 86400
    os.utime(packed, (month_ago, month_ago))
    (disk / "overland-env-3").mkdir()
    os.utime(disk / "overland-env-3", (month_ago, month_ago))
    site = tmp_path / "cpus.toml"
    site.write_text(
        'description = "cpus"\naccelerator = "none"\n[slurm]\ngpus = "none"\n'
        f'devices_per_node = 2\n[disk]\nnode_local = "{disk}"\n'
    )
    wanted = JobRequest(nodes=2, time="00:10:00", packed_env=str(packed))
    text = render_job(plan_job(load_site(str(site)), wanted, place(RUN)))
    script = (
        "log() { :; }\n" + text[text.index("node_env=") : text.index("# Wrapper around each rank")]
    )
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "USER": getpass.getuser(),
        "BROKEN": broken,
    }
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (disk / "overland-env-7" / "bin" / "python").exists()
    assert not (disk / "overland-env-3").exists()
    assert not (disk / "overland-env-7.part").exists()


def test_a_container_stands_between_srun_and_python() -> None:
    wanted = {"container": "/images/overland.sif"}
    commands = {
        "frontier": "apptainer exec --rocm --bind /lustre/orion --bind /mnt/bb --bind /opt/cray "
        "--bind /scratch/me/runs/llama /images/overland.sif python -P -m overland\n",
        "s3df": "apptainer exec --nv --bind /scratch/me/runs/llama /images/overland.sif python",
        "perlmutter": "shifter '--module=gpu,nccl-plugin' --image=/images/overland.sif python",
    }
    for site, command in commands.items():
        text = render_job(make_job(site, place(RUN), **wanted))
        assert command in text
        assert "exec /env/bin/python -P -m overland supervise" in text, "srun is outside of it"


def test_a_users_own_flags_have_the_last_word() -> None:
    text = render_job(make_job("frontier", place(RUN), sbatch="--mail-type=END -x node1 --mem=1G"))
    assert directives(text)[-3:] == ["--mail-type=END", "-x node1", "--mem=1G"]


def test_a_cluster_without_gpus_is_asked_for_none(tmp_path: Path) -> None:
    site = tmp_path / "cpus.toml"
    text = 'description = "cpus"\naccelerator = "none"\n[slurm]\ngpus = "none"\n'
    site.write_text(text + "devices_per_node = 2\n")
    done = overland("quickstart", "--site", str(site), "--time", "00:10:00", "--dry-run")
    assert_good_bash(done.stdout)
    assert "--gpu" not in done.stdout
    assert "srun --ntasks-per-node=2" in done.stdout


def test_a_job_sources_what_the_setup_wrote() -> None:
    where = replace(place(RUN), setup=Path("/scratch/me/overland.sh"))
    text = render_job(make_job("generic-amd", where))
    assert_good_bash(text)
    assert "\nsource /scratch/me/overland.sh\n" in text


def test_a_job_that_must_not_be_repeated_is_not_requeued() -> None:
    text = render_job(make_job("generic-amd", replace(place(RUN), repeatable=False), nodes=2))
    assert "--no-requeue" in directives(text)
    assert "--requeue" not in directives(text)
    assert "scancel" in text
    assert "scontrol requeue" not in text


@pytest.mark.parametrize(
    ("nodes", "spares", "guards"), [(1, 0, 0), (1, 1, 1), (2, 0, 1), (8, 2, 3)]
)
def test_other_nodes_guard_the_job(nodes: int, spares: int, guards: int) -> None:
    text = render_job(make_job("generic-amd", place(RUN), nodes=nodes, spares=spares))
    assert (f"guard_number <= {guards}; " in text) == bool(guards)
    assert ("guard" in text) == bool(guards)


SCONTROL = """\
#!/bin/bash
case "$2" in
job) printf '%s' "$SHOWN" ;;
hostnames) [ -z "$3" ] || printf '%s\\n' ${3//,/ } ;;
*) echo "$@" ;;
esac
"""
RUNS = " JobState=RUNNING Restarts=1 ReqNodeList=n7 ExcNodeList=n3 "
SLEEP_ONCE = """\
#!/bin/bash
[ ! -e "$0.again" ] || kill "$PPID"
touch "$0.again"
"""


@pytest.mark.parametrize(
    ("shown", "ordered"),
    [
        (RUNS + "NodeList=n2,n11 BatchHost=n1 ", "requeue 7\n"),
        (RUNS.replace("=1 ", "=2 ") + "NodeList=n2,n3 BatchHost=n2 ", ""),  # runs again
        (RUNS + "NodeList=n1,n2 BatchHost=n1 ", ""),
        (RUNS + "NodeList=n2,n1 BatchHost=n1 ", ""),
        (RUNS.replace("RUNNING", "COMPLETING") + "NodeList=n2 BatchHost=n1 ", ""),
        (RUNS + "NodeList= BatchHost=n1 ", ""),
        ("", ""),
    ],
)
def test_a_guard_gives_back_a_job_without_its_first_node_alone(
    shown: str, ordered: str, tmp_path: Path
) -> None:
    text = render_job(make_job("generic-amd", place(RUN), nodes=2))
    guard = text.split("guard='")[1].split("done'")[0] + "done"
    for name, program in (("scontrol", SCONTROL), ("sleep", SLEEP_ONCE)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SHOWN": shown, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", guard, "guard", "n1", "1"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == (ordered, -signal.SIGTERM), done.stderr


def test_the_script_has_the_last_word_over_the_environment() -> None:
    env = {"SBATCH_TIMELIMIT": "1", "SLURM_NTASKS": "9", "SLURM_CONF": "/etc/s", "HOME": "/me"}
    assert without_slurms_own(env) == {"SLURM_CONF": "/etc/s", "HOME": "/me"}


def test_jobs_of_one_run_share_a_name_and_those_of_others_do_not() -> None:
    names = [make_job("frontier", place(Path(run))).name for run in ("/a/x", "/a/x", "/b/x")]
    assert names[0] == names[1] != names[2]
    assert make_job("frontier", place(RUN), name="mine").name == "mine"


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--site", "frontier"],
         "frontier requires --account for every job: give it, or set SBATCH_ACCOUNT"),
        ([], "no cluster given; set --site to one of frontier, generic-amd, generic-cpu, "
         "generic-nvidia, laptop, perlmutter, s3df; --site NAME --dry-run shows what else is "
         "needed"),
        (["--site", "s3df", "--account", "fac:repo"],
         "s3df requires --partition (ada, ampere, hopper) for every job: give it, or set "
         "SBATCH_PARTITION\ns3df: the walltime limit is not known; give --time HH:MM:SS"),
        (["--site", "s3df", "--account", "fac:repo", "--here"],
         "s3df: the number of devices per node depends on the partition; give --partition (ada, "
         "ampere, hopper) or --devices-per-node"),
        (["--site", "generic-nvidia"],
         "generic-nvidia: the number of devices per node is not known; give --devices-per-node\n"
         "generic-nvidia: the walltime limit is not known; give --time HH:MM:SS"),
        (["--site", "generic-cpu"],
         "generic-cpu: the walltime limit is not known; give --time HH:MM:SS"),
        (["--site", "laptop", "--nodes", "2", "--devices-per-node", "1"],
         "--nodes: laptop is a single machine without a scheduler"),
        (["--site", "frontier", "--account", "a b"], "--account 'a b': expected a single word"),
        (["--site", "frontier", "--account", "abc123", "--qos", "debug", "--sessions", "2"],
         "--sessions: frontier does not allow job chains in debug"),
        (["--site", "frontier", "--account", "abc123", "--time", "00:02:00"],
         "--time 00:02:00: ranks stop 3 minutes before the end "
         "(checkpoint.walltime_margin_minutes), which leaves no time to train; raise --time, or "
         "lower that key"),
        (["--site", "frontier", "--account", "abc123", "--container", "no.sif"],
         "--container no.sif: no such file; build it from the definition in containers/"),
        (["--site", "frontier", "--account", "abc123", "--sbatch", "--export=HF_TOKEN=hf_abc"],
         "--sbatch: a value in --export would be readable in the script; use `--env NAME` to "
         "pass a variable by name"),
        (["--site", "frontier", "--account", "abc123", "--sbatch", "--mem=1G --nodes=5"],
         "--sbatch --nodes=5: the rest of the script depends on this value; use --nodes and "
         "--spares"),
        (["--site", "frontier", "--account", "abc123", "--sbatch", "-N5"],
         "--sbatch -N5: the rest of the script depends on this value; use --nodes and --spares"),
        (["--site", "frontier", "--account", "abc123", "--nodez", "--dry-run"],
         'command line: "--nodez": no such option (`--help` lists them); expected '
         "section.key=value, such as training.steps=20"),
        (["--site", "my.toml"], 'command line: site = "my.toml": no such site, and no such file'),
        (["--site", "frontier", "--account", "abc123", "--env", "HF_TOKEN=hf_abc"],
         "--env HF_TOKEN=…: expected only the name of a variable; its value is taken from the "
         "environment and never written to disk"),
        (["--site", "frontier", "--account", "abc123", "--env", "HF_TOKEN"],
         "--env HF_TOKEN: this variable is not set here, so it cannot be passed on"),
        (["--site", "frontier", "--account", "abc123", "--sessions", "2",
          "checkpoint.enable=false"],
         "--sessions: a chain of jobs resumes from checkpoints; set checkpoint.enable = true"),
        (["--site", "frontier", "--account", "abc123", "--sessions", "2",
          "checkpoint.skip_optimizer=true"],
         "--sessions: every job of the chain would apply checkpoint.resume = \"auto\" and "
         "checkpoint.skip_optimizer again; submit one job with them, then the chain without them"),
        (["--site", "frontier", "--account", "abc123", "comm.ranks_per_device=4"],
         "comm.ranks_per_device = 4, but a job starts one rank per GPU, and sharing is for trying "
         "a layout on one machine with `overland train`; remove the key, or set it to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_submitted_is_one_sentence(words: list[str], message: str) -> None:
    assert refusal("quickstart", *words) == message


def test_the_config_is_checked_for_all_devices_of_the_job() -> None:
    words = ["--site", "frontier", "--account", "abc123", "--nodes", "3"]
    said = refusal("quickstart", *words, "training.global_batch_size=512")
    assert "expected a multiple of 384" in said
    assert "training.stepz" in refusal("quickstart", *words, "training.stepz=3")


def test_files_that_are_missing_are_forgiven_in_a_dry_run_alone() -> None:
    words = ["quickstart", "training.dataset_path=not/there", "--site", "frontier"]
    words += ["--account", "abc123"]
    assert "not/there" in refusal(*words)
    done = overland(*words, "--dry-run")
    assert done.exit_code == 0
    assert "not/there" in done.stderr


def test_a_run_that_is_finished_is_not_submitted_again(tmp_path: Path) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "done").write_text("160\n")
    words = ["quickstart", "--site", "frontier", "--account", "abc123", "--dry-run"]
    assert "runs/quickstart has finished its 160 steps" in refusal(*words)
    assert overland(*words, "training.steps=320").exit_code == 0
    assert overland(*words, "checkpoint.resume=none").exit_code == 0


def test_a_run_that_has_had_its_epochs_is_not_submitted_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    words = ["quickstart", "--site", "frontier", "--account", "abc123", "--dry-run"]
    assert overland(*words, "training.epochs=2").exit_code == 0
    (run / "done").write_text("160\n")
    kept = load_config("quickstart", ["training.epochs=2"], {}).config
    write_config(kept, run / "config.toml", full=True)
    assert "has finished its 2 epochs; raise training.epochs" in refusal(
        *words, "training.epochs=2"
    )
    more = overland(*words, "training.epochs=3")
    assert more.exit_code == 0
    assert " --steps 161 " in more.stdout  # the supervisor counts as the script does


# What is shown and written


@pytest.mark.parametrize("words", [["--site"], ["--sites"], []])
def test_the_sites_are_listed(words: list[str]) -> None:
    done = overland(*words)
    assert done.exit_code == 0
    assert all(site in done.stdout for site in LEFT_OPEN)


def test_a_dry_run_shows_the_script_and_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ["quickstart", "--site", "frontier", "--account", "abc123", "--nodes", "2"]
    done = overland(*words, "--dry-run")
    assert done.exit_code == 0
    assert done.stdout.startswith("#!/bin/bash")
    assert f"cd {tmp_path} ||" in done.stdout
    assert list(tmp_path.iterdir()) == []
    as_json = json.loads(overland(*words, "--dry-run", "--json").stdout)
    assert as_json["script"] == done.stdout
    assert (as_json["ranks"], as_json["time"], as_json["sessions"]) == (16, "02:00:00", 1)


def test_variables_of_the_config_reach_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job starts without the environment of the shell that submitted it."""
    monkeypatch.setenv("SCRATCH_ROOT", str(tmp_path / "a folder"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    words = ["quickstart", "--site", "laptop"]
    folder = "job.dump_folder=${SCRATCH_ROOT}/$USER/run"
    monkeypatch.setenv("USER", "me")
    script = tmp_path / "job.sh"
    script.write_text(overland(*words, folder, "--dry-run").output)
    lines = script.read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("export SCRATCH_ROOT=")]
    assert not [line for line in lines if line.startswith("export USER=")]
    shown = ["env", "-i", "bash", "-c", f'{line}; printf %s "$SCRATCH_ROOT"']
    assert subprocess.check_output(shown, text=True) == str(tmp_path / "a folder")
    assert str(tmp_path / "a folder" / "me" / "run") in script.read_text()
    assert "$USER" not in script.read_text()
    assert "is not set here" in refusal(*words, "data.folder=$SCRATCH_ROTO/data")
    assert "looks like a secret" in refusal(*words, "data.folder=/x/$HF_TOKEN")
    assert "the config uses $SLURM_JOB_ID" in refusal(*words, "data.folder=/x/$SLURM_JOB_ID")


def test_a_secret_is_passed_on_by_name_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    words = ["quickstart", "--site", "frontier", "--account", "abc123", "--dry-run"]
    plain, named = overland(*words), overland(*words, "--env", "HF_TOKEN")
    assert "HF_TOKEN" not in plain.output
    assert "#SBATCH --export=HF_TOKEN\n" in named.stdout
    for more in ([], ["--env", "HF_TOKEN"], ["--json"]):
        assert "hf_very_secret" not in overland(*words, *more).output


@pytest.mark.parametrize("place", [["--sbatch", "--comment=hf_very_secret"],
                                   ["job.description=hf_very_secret"]])  # fmt: skip
def test_a_secret_that_slipped_in_is_found(
    place: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    words = ["--site", "frontier", "--account", "abc123", "--dry-run"]
    said = refusal("quickstart", *words, *place)
    assert said.startswith("the script would contain the value of HF_TOKEN")
    assert "hf_very_secret" not in said


def test_files_are_for_the_users_eyes_alone(tmp_path: Path) -> None:
    script = tmp_path / "run" / "submit" / "1.sh"
    write_private(script, "first")
    script.chmod(0o644)
    write_private(script, "second")
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert script.read_text() == "second"


def test_a_later_submission_leaves_the_files_of_an_earlier_one_alone(tmp_path: Path) -> None:
    first, config = next_files(tmp_path)
    assert (first.name, config.name) == ("1.sh", "1.toml")
    write_private(first, "")
    assert next_files(tmp_path)[0].name == "2.sh"


def test_without_sbatch_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["--site", "frontier", "--account", "abc123"]
    said = refusal("quickstart", *words, "job.dump_folder=mine")
    assert said.startswith("sbatch was not found: submit from a login node of frontier")
    assert not (tmp_path / "mine").exists()


def test_a_job_without_overland_is_noted_before_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that only PYTHONPATH finds: jobs have none unless it is passed on."""
    (tmp_path / "python").write_text(f'#!/bin/sh\n[ "$PYTHONPATH" = {ROOT} ]\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("overland.cluster.submit.PYTHON", (str(tmp_path / "python"),))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["quickstart", "--site", "frontier", "--account", "abc123", "--dry-run"]
    done = overland(*words)
    assert done.exit_code == 0
    assert f"run `pip install -e {ROOT}` first" in done.stderr
    for more in (["--env", "PYTHONPATH"], ["--container", "docker://overland"]):
        assert "pip install" not in overland(*words, *more).stderr


def test_a_stop_file_from_before_is_removed_unless_a_run_has_yet_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "STOP").touch()
    (tmp_path / "mine" / "owner.json").touch()
    words = ["--site", "generic-nvidia", "--devices-per-node", "1", "--time", "01:00:00"]
    training = overland("quickstart", *words, "job.dump_folder=mine")
    assert training.exit_code == 0, training.output
    assert (tmp_path / "mine" / "STOP").exists()
    (tmp_path / "mine" / "owner.json").unlink()
    done = overland("quickstart", *words, "job.dump_folder=mine")
    assert f"note: removed {tmp_path}/mine/STOP, left from before; it would have" in done.stderr
    assert not (tmp_path / "mine" / "STOP").exists()


# What the scripts do


def run_script(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash"], input=text, capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8",
             "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_END_TIME": "4102444800", **env},
    )  # fmt: skip


@pytest.mark.parametrize("folder", [".", "it's me/$(run) at 100%"])
@pytest.mark.parametrize("site", ["generic-nvidia", "frontier", "laptop"])
def test_a_surplus_link_ends_at_once(site: str, folder: str, tmp_path: Path) -> None:
    """Before modules, which are not here, and before srun. Odd names of folders do no harm."""
    run = tmp_path / folder
    run.mkdir(parents=True, exist_ok=True)
    (run / "done").write_text("100\n")
    done = run_script(render_job(make_job(site, place(run), sessions=2)))
    assert done.returncode == 0
    assert "already finished" in done.stdout
    assert done.stderr == ""


def test_a_job_without_a_scheduler_runs_in_the_background(tmp_path: Path) -> None:
    job = make_job("laptop", place(tmp_path))
    (tmp_path / "done").write_text("100\n")
    (pid,) = submit(job, {tmp_path / "submit" / "1.sh": render_job(job)})
    os.waitpid(int(pid), 0)
    assert "already finished" in (tmp_path / "logs" / "job.log").read_text()


RANK = re.compile(r"^rank='(.*)'$", flags=re.MULTILINE)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (75, 0), (2, 2), (137, 137)])
def test_a_rank_that_stopped_is_no_failure(code: int, seen: int) -> None:
    (around,) = RANK.findall(render_job(make_job("generic-nvidia", place(RUN))))
    done = subprocess.run(
        ["bash", "-c", around, "rank", "bash", "-c", f"exit {code}"],
        env={**os.environ, "SLURMD_NODENAME": "n7"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == seen
    heard = Findings()
    assert all(heard.read(f"3: {line}\n") for line in done.stdout.splitlines())
    told = {rank: node for rank, (node, _) in heard.ended.items()}
    assert told == ({3: "n7"} if code == 0 else {}), "srun tells nothing of an exit code of 0"


SAVES_AND_STOPS = """
import signal, sys, time
def stop(*_):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
print("ready", flush=True)
time.sleep(30)
"""


def test_the_shell_around_a_rank_outlives_the_signal_that_stops_it() -> None:
    """Slurm signals every process of a step, the shell too."""
    (around,) = RANK.findall(render_job(make_job("frontier", place(RUN))))
    process = subprocess.Popen(
        ["bash", "-c", around, "rank", sys.executable, "-c", SAVES_AND_STOPS],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "MIOPEN_USER_DB_PATH": "."},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == 0


def test_a_rank_that_is_starting_outlives_a_warning() -> None:
    (around,) = RANK.findall(render_job(make_job("generic-nvidia", place(RUN))))
    rank = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"
    done = subprocess.run(
        ["bash", "-c", around, "rank", sys.executable, "-c", rank], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "alive")


# In place of the supervisor, which needs a Slurm: what is tested is the shell around it.
PYTHON = """#!/bin/bash
[ "$HF_HUB_OFFLINE$SLURM_EXPORT_ENV" = 1ALL ] && [ -z "$MASTER_ADDR" ] || exit 99
echo "ran $1 $2 $3 $4 $5 until $SLURM_JOB_END_TIME"
exit 3
"""


def test_the_supervisors_exit_code_is_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    where = place(tmp_path, python=str(tmp_path / "python"))
    done = run_script(
        render_job(make_job("generic-nvidia", where, nodes=2)),
        MASTER_ADDR="stale",
        SLURM_RESTART_COUNT="2",
    )
    assert done.returncode == 3, done.stderr
    assert f"ran -P -m overland supervise {tmp_path}/submit/1.toml until 4102444800" in done.stdout
    assert "job 7, restart 2, on n[1-2]" in done.stdout


def test_a_run_that_was_stopped_is_not_started_until_it_is_submitted_anew(tmp_path: Path) -> None:
    (tmp_path / "stopped").write_text("code error: rank 1: KeyError\n")
    job = make_job("generic-nvidia", place(tmp_path), nodes=2)
    done = run_script(render_job(job))
    assert done.returncode == 1
    assert "not started, because this run was stopped: code error: rank 1: KeyError" in done.stdout


SHOWN: dict[str, tuple[str, str, dict[str, object]]] = {
    "frontier": ("frontier", "/lustre/orion/abc123/scratch/me", SHAPES["many-nodes"]),
    "frontier-container": (
        "frontier",
        "/lustre/orion/abc123/scratch/me",
        {**SHAPES["many-nodes"], "container": "/lustre/orion/abc123/scratch/me/overland.sif"},
    ),
    "s3df": ("s3df", "/sdf/scratch/me", {"nodes": 1}),
    "perlmutter": ("perlmutter", "/pscratch/sd/m/me", {"nodes": 4}),
    "generic-nvidia": ("generic-nvidia", "/scratch/me", {"nodes": 4}),
    "generic-amd": ("generic-amd", "/scratch/me", {"nodes": 4}),
    "generic-cpu": ("generic-cpu", "/scratch/me", {"nodes": 4}),
    "laptop": ("laptop", "/home/me", {}),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_docs_show_todays_script(name: str) -> None:
    """To renew them: OVERLAND_RENEW=1 pytest -k todays_script."""
    site, scratch, wanted = SHOWN[name]
    where = place(Path(scratch, "runs/llama"), Path(scratch), f"{scratch}/envs/overland/bin/python")
    sessions = {} if site == "laptop" else {"sessions": 10}
    script = render_job(make_job(site, where, **sessions, **wanted))
    shown = ROOT / "docs" / "scripts" / f"{name}.sh"
    if os.environ.get("OVERLAND_RENEW"):
        shown.parent.mkdir(exist_ok=True)
        shown.write_text(script, encoding="utf-8")
    assert shown.read_text(encoding="utf-8") == script
    assert_good_bash(script)


def test_the_docs_show_a_script_for_every_site() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert {site for site, _, _ in SHOWN.values()} == set(LEFT_OPEN)
    files = {path.stem for path in (ROOT / "docs" / "scripts").glob("*.sh")}
    assert files == set(SHOWN)
    assert all(f"(scripts/{name}.sh)" in page for name in SHOWN)
