"""`torchtitan`: run_train.sh, torchtitan/train.py and scripts/download_hf_assets.py, with the
document's own config."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

from overland.config.load import load_config
from overland.world.launch import free_port
from tests.cli.processes import ROOT, environment, losses, overland
from tests.data.chats import ROLES, write_lines, write_tokenizer
from tests.documents.scripts import HERE, TINY, copied, page_lines, shown, typed
from tests.hub.server import TOKEN, Hub

MODEL = "meta-llama/Llama-3.1-8B"
SMALL = [
    *TINY, "training.steps=6", "metrics.log_freq=1", "profiling.profile_freq=5",
    "lr_scheduler.warmup_steps=2",
]  # fmt: skip
SETTINGS = " ".join(f"'{word}'" for word in SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's: the scripts, the config, the tokenizer, and some C4."""
    folder = tmp_path_factory.mktemp("torchtitan")
    shown("overland init --from torchtitan", folder)
    ours, theirs = (load_config(str(place / "llama3_8b.toml"), env={}).config
                    for place in (folder, HERE))  # fmt: skip
    assert ours == theirs
    write_tokenizer(folder / "assets/hf/Llama-3.1-8B", **ROLES["llama3"])
    texts = [{"text": f"Document {i} counts to {i}: {list(range(i))}"} for i in range(60)]
    write_lines(folder / "data/c4/c4-train.00000.json", texts)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """What run_train.sh says, with every variable set."""
    line = "COMM_BACKEND=gloo LOG_RANK=0,1 NGPU=2 CONFIG_FILE=./llama3_8b.toml ./run_train.sh"
    return typed(f"{line} {SETTINGS}", folder)


def test_run_train_sh_takes_every_variable(trained: str, folder: Path) -> None:
    assert re.search(r"^step 6/6", trained, flags=re.MULTILINE)
    assert "[rank 1] step 6/6" in trained
    assert 'backend = "gloo"' in (folder / "outputs/config.toml").read_text()


def test_the_output_folders_are_those_of_the_document(trained: str, folder: Path) -> None:
    run = folder / "outputs"
    traces = sorted(path.name for path in (run / "profile_trace").iterdir())
    assert traces == ["step_5_rank_0.json.gz", "step_5_rank_1.json.gz"]
    assert list((run / "tb").glob("events.out.tfevents.*"))
    assert (run / "checkpoint/step_6").is_dir()


@pytest.mark.long
def test_torchrun_trains_the_same_and_hides_no_torchtitan(trained: str, folder: Path) -> None:
    """The losses are run_train.sh's, bit for bit, and whoever imports torchtitan in there, as a
    module of the user's may, gets the installed one."""
    package = folder / "installed" / "torchtitan"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (folder / "mine.py").write_text(
        "from pathlib import Path\nimport torchtitan\n"
        "Path('found').write_text(str(Path(torchtitan.__file__)))\n"
    )
    words = " --job.custom_import mine --job.dump_folder by_torchrun "
    line = "torchrun --nproc_per_node=2 torchtitan/train.py --job.config_file ./llama3_8b.toml"
    typed(line + words + SETTINGS, folder, PYTHONPATH=f"{ROOT}:{package.parent}")
    assert (folder / "found").read_text() == str(package / "__init__.py")
    assert losses(folder / "by_torchrun/metrics.jsonl") == losses(folder / "outputs/metrics.jsonl")
    found = subprocess.run(
        [sys.executable, "-c", "import torchtitan; print(torchtitan.__file__)"],
        cwd=folder, env=environment(PYTHONPATH=str(package.parent)), capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(package / "__init__.py")


def test_a_dry_run_checks_and_writes_nothing(tmp_path: Path) -> None:
    copied("torchtitan", tmp_path, "llama3_8b.toml")
    before = sorted(tmp_path.rglob("*"))
    line = 'DRY_RUN=1 CONFIG_FILE="./llama3_8b.toml" NGPU=4 ./run_train.sh'
    said = typed(f"{line} {SETTINGS}", tmp_path)
    assert "The rest of the config is valid" in said  # the data is still to be fetched
    assert re.search(r"^devices +4$", said, flags=re.MULTILINE)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
def test_the_requirements_can_be_installed_and_are_overlands(folder: Path) -> None:
    """From no index: they are here already."""
    said = typed("pip install -r requirements.txt", folder, PIP_NO_INDEX="1")
    assert "tokenizers" in said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = {*project["dependencies"], *extras["text"], *extras["data"], *extras["hub"]}
    lines = (folder / "requirements.txt").read_text().splitlines()
    needed = {line for line in lines if not line.startswith("#")}
    assert needed <= ours
    assert {*extras["text"], *extras["data"], *extras["hub"]} <= needed


FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "LICENSE": b"a license",
    "original/tokenizer.model": b"ranks",
}
DOWNLOAD = "scripts/download_hf_assets.py"


def downloaded(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)) for file in files if ".overland" not in file.parts}


def test_assets_of_a_gated_model_come_with_a_token_of_the_environment(
    hub: Hub, tmp_path: Path
) -> None:
    copied("torchtitan", tmp_path)
    hub.add(MODEL, FILES, gated=True)
    refused = overland(DOWNLOAD, cwd=tmp_path, code=2, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert f"accept its license at {hub.url}/{MODEL}" in refused.stderr
    assert downloaded(tmp_path / "assets") == set()
    hub.repos["model", MODEL].gated = False
    hub.repos["model", MODEL].private = True
    overland(DOWNLOAD, cwd=tmp_path, code=2, HF_ENDPOINT=hub.url)
    env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    done = shown("python scripts/download_hf_assets.py", tmp_path, env=env)
    assert "add --assets safetensors for the weights" in done.stderr
    found = downloaded(tmp_path / "assets/hf/Llama-3.1-8B")
    assert {"tokenizer.json", "config.json"} <= found
    assert not any("safetensors" in name for name in found)
    assert TOKEN not in done.stdout + done.stderr


def test_assets_are_chosen_by_the_flags_of_the_script(hub: Hub, tmp_path: Path) -> None:
    copied("torchtitan", tmp_path)
    hub.add(MODEL, FILES, private=True)
    given = ["--repo_id", MODEL, "--hf_token", TOKEN]

    def assets(*words: str, local_dir: str) -> set[str]:
        to = ["--local_dir", local_dir]
        overland(DOWNLOAD, *given, *to, *words, cwd=tmp_path, HF_ENDPOINT=hub.url)
        return downloaded(tmp_path / local_dir / "Llama-3.1-8B")

    weights = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    configs = {"config.json", "generation_config.json"}
    assert assets("--assets", "safetensors", "config", local_dir="a") == weights | configs
    assert assets("--assets", "index", local_dir="b") == {"model.safetensors.index.json"}
    patterns = ["--additional_patterns", "LICENSE", "tokenizer.model"]
    assert assets(*patterns, local_dir="c") == {"LICENSE", "original/tokenizer.model"}
    assert assets("--all", local_dir="d") == set(FILES)
    wrong = overland(DOWNLOAD, "--assets", "weights", cwd=tmp_path, code=2)
    assert "invalid choice: 'weights'" in wrong.stderr


@pytest.mark.long
def test_tensorboard_shows_the_losses(trained: str, folder: Path) -> None:
    port = free_port()
    line = f"exec {Path(sys.executable).parent}/" + "tensorboard --logdir outputs/tb"
    server = subprocess.Popen(
        ["bash", "-c", f"{line} --port {port}"], cwd=folder, env=environment()
    )
    address = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    tags: set[str] = set()
    try:
        while "loss" not in tags:
            assert server.poll() is None
            try:
                with opener.open(address) as answer:
                    tags = {tag for run in json.load(answer).values() for tag in run}
            except OSError:
                continue
    finally:
        server.terminate()
        server.wait()
    assert {"loss", "tokens_per_second"} <= tags


@pytest.mark.long
def test_its_configs_are_checked_trained_and_converted(folder: Path, tmp_path: Path) -> None:
    shutil.copy(HERE / "llama3_8b.toml", tmp_path / "your_run.toml")
    shutil.copytree(folder / "assets", tmp_path / "assets")
    told = shown("overland check your_run.toml", tmp_path, "--no-step", "--world-size", "4")
    assert "The rest of the config is valid" in told.stdout
    place = {"training.dataset_path=/path/to/text": f"training.dataset_path={folder}/data/c4"}
    line = "overland train your_run.toml training.dataset_path=/path/to/text"
    shown(line, tmp_path, *SMALL, "training.steps=1", env={"NGPU": "1"}, **place)
    assert list(losses(tmp_path / "outputs/metrics.jsonl")) == [1]
    shown("overland config convert your_run.toml new.toml", tmp_path)
    assert (tmp_path / "new.toml").is_file()


def test_the_page_shows_no_line_that_is_not_typed_here() -> None:
    here = Path(__file__).read_text()
    for line in page_lines("torchtitan"):
        assert f'"{line}' in here or f"'{line}'" in here, line
