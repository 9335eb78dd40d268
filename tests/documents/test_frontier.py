"""`frontier`: training on many nodes, six sources of data, conversion and evaluation, with the
document's own configs."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from overland.checks import load_checked
from overland.cli.init import SCRIPTS
from overland.cli.main import app
from overland.config.derived import resolve_degrees
from overland.config.load import load_config, recipe_path
from tests.checkpoint.convert.samples import fixture, saved
from tests.cli.processes import ROOT, environment, losses, overland
from tests.cluster.scripts import assert_good_bash
from tests.cluster.slurm import Slurm
from tests.data.chats import ROLES, write_tokenizer
from tests.documents.scripts import HERE, TINY, copied, page_lines, shown, typed
from tests.evaluation.task_files import write_tasks
from tests.evaluation.texts import write_text_model
from tests.hub.server import TOKEN, Hub
from tests.reporting.runs import line
from tests.waiting import LIMIT_SECONDS

RECIPES = {
    "llama3_8b_n64": "llama3_8b_frontier",
    "llama3_8b_n640": "llama3_8b_frontier_n640",
    "llama3_8b_n8_benchmark": "llama3_8b_frontier_benchmark",
}
WEIGHTS = {"dclm": 40, "fineweb_edu": 44, "dolma": 3, "zyda": 2, "stack2": 10, "finemath": 1}
SITE = """\
description = "virtual nodes"
accelerator = "none"
[slurm]
gpus = "none"
devices_per_node = 2
cpus_per_task = 1
limits = [{ time = "24:00:00" }]
[slurm.partitions.extended]
limits = [{ nodes = 64, time = "24:00:00" }]
[environment]
OMP_NUM_THREADS = "1"
"""


def text_of(recipe: str) -> str:
    path = recipe_path(recipe)
    assert path is not None
    return path.read_text()


def test_overland_env_prints_the_set_up_of_frontier(tmp_path: Path) -> None:
    """PyTorch for ROCm, FlashAttention for MI250X and RCCL's plugin, as the document has them."""
    script = shown("overland env frontier", tmp_path).stdout
    assert_good_bash(script)
    for part in ("whl/rocm", "ROCm/flash-attention", 'GPU_ARCHS="gfx90a"', "ROCm/aws-ofi-rccl"):
        assert part in script


@pytest.mark.parametrize("name", ["llama3_8b_n64", "llama3_8b_n8_benchmark"])
def test_the_documents_config_and_our_recipe_train_the_same(name: str) -> None:
    """But for the data, which the document has in its code, and the length of the benchmark."""
    theirs = load_config(str(Path(__file__).with_name(f"{name}.toml")), env={}).config
    ours = load_config(RECIPES[name], env={}).config
    for section in ("parallelism", "optimizer", "activation_checkpoint", "compile"):
        assert getattr(theirs, section) == getattr(ours, section), section
    assert theirs.model.overrides == ours.model.overrides
    for key in ("seq_len", "local_batch_size", "max_norm"):
        assert getattr(theirs.training, key) == getattr(ours.training, key)
    assert theirs.checkpoint.enable == ours.checkpoint.enable


def test_640_nodes_take_110_million_tokens_a_step() -> None:
    small, large = (load_config(RECIPES[f"llama3_8b_n{n}"], env={}).config for n in (64, 640))
    degrees = resolve_degrees(large.parallelism, 640 * 8)
    assert (degrees.dp_replicate, degrees.dp_shard, degrees.tp) == (20, 32, 8)
    tokens = large.training.local_batch_size * degrees.dp * large.training.seq_len
    assert tokens == 32 * 20 * 21 * 8192
    assert round(tokens * large.training.steps / 1e12, 3) == 1.0
    assert small.data == large.data


@pytest.mark.parametrize("name", RECIPES)
def test_the_configs_of_the_scripts_are_the_recipes(name: str) -> None:
    """But for the place of the tokenizer, which download_tokenizer.py fills."""
    copy = (SCRIPTS / "frontier/train_configs" / f"{name}.toml").read_text().splitlines()
    pairs = zip(copy, text_of(RECIPES[name]).splitlines(), strict=True)
    differ = [pair for pair in pairs if pair[0] != pair[1]]
    assert [one.partition(" ")[0] for one, _ in differ] == ["#", "hf_assets_path"]


# Sources


def parquet(**columns: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def fill(hub: Hub) -> None:
    """The document's datasets with their own folders and columns, and little in them."""
    folders = {
        "dclm_crossdeduped": "data/dclm_crossdeduped/global-shard_01_of_10",
        "fwe3": "data/fwe3/CC-MAIN-2013-20",
        "dolma-cc_crossdeduped-filtered": "data/dolma-cc_crossdeduped-filtered",
        "zyda_crossdeduped-filtered": "data/zyda_crossdeduped-filtered/arxiv",
    }
    lines = ["---", "configs:"]
    files = {}
    for number, (subset, folder) in enumerate(folders.items()):
        lines += [f"- config_name: {subset}", "  data_files:", "  - split: train"]
        lines += [f"    path: data/{subset}/**"]
        texts = [f"{subset} {i}: {list(range(i))}" for i in range(60)]
        files[f"{folder}/part.0.parquet"] = parquet(
            text=texts, nemo_id=[f"{number}-{i}" for i in range(60)]
        )
    files["README.md"] = "\n".join([*lines, "---", ""]).encode()
    hub.add("Zyphra/Zyda-2", files, kind="dataset")
    math = {
        f"{subset}/train-00000-of-00001.parquet": parquet(
            text=[f"{subset}: {i} + {i} = {2 * i}" for i in range(60)], url=["u"] * 60
        )
        for subset in ("finemath-3plus", "finemath-4plus")
    }
    hub.add("HuggingFaceTB/finemath", math, kind="dataset")
    ids = [[{"blob_id": f"{i:040x}", "path": "/a.py", "src_encoding": "UTF-8"}] for i in range(9)]
    stack = {"data/train-00000.parquet": parquet(repo_name=["r"] * 9, files=ids)}
    hub.add("bigcode/the-stack-v2-train-smol-ids", stack, kind="dataset", private=True)


@pytest.mark.long
def test_every_source_has_a_line_that_fetches_it_and_all_six_are_trained_on(
    hub: Hub, tmp_path: Path
) -> None:
    fill(hub)
    text = text_of("llama3_8b_frontier")
    page = (ROOT / "docs/coming-from/frontier.md").read_text()
    lines = re.findall(r"overland (fetch dataset \S+(?: --subset \S+)? --to \S+)", text)
    assert len(lines) == len(WEIGHTS)
    for typed_line in lines:
        assert f"`overland {typed_line}`" in page
        words = shlex.split(typed_line)
        overland(*words, cwd=tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert not list(tmp_path.rglob("finemath-4plus"))
    # Stack v2's ids hold no text, which is said; with its text, each repository is a document.
    column = ["--column", "files[+].text"]
    refused = overland("data", "inspect", "data/stack_v2_ids", *column, cwd=tmp_path, code=2)
    assert "files[+].text" in refused.stderr
    assert "blob_id" in refused.stderr
    nested = [[{"text": f"def f{i}(): return {j}"} for j in range(2)] for i in range(30)]
    (tmp_path / "data/stack_v2_smol").mkdir()
    (tmp_path / "data/stack_v2_smol/train.parquet").write_bytes(parquet(files=nested))
    told = overland("data", "inspect", "data/stack_v2_smol", *column, "--json", cwd=tmp_path)
    assert json.loads(told.stdout)["documents"] == 30
    write_tokenizer(tmp_path / "assets/hf/Llama-3.1-8B", **ROLES["llama3"])
    overland("train", "llama3_8b_frontier", *SMALL, cwd=tmp_path, NGPU="1")
    run = tmp_path / "runs/llama3_8b_frontier"
    (segment,) = json.loads((run / "data/plan.json").read_text())["plan"]["segments"]
    assert segment["weights"] == WEIGHTS
    assert max(losses(run / "metrics.jsonl")) == 2


@pytest.mark.long
def test_the_download_scripts_bring_what_the_recipe_reads(hub: Hub, tmp_path: Path) -> None:
    fill(hub)
    copied("frontier", tmp_path)
    env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    for name in ("zyda2", "finemath", "stack_v2"):
        shown(f"python download_scripts/download_{name}.py", tmp_path, env=env)
    sources = load_config("llama3_8b_frontier", env={}).config.data.sources
    folders = {tmp_path / str(one.path) for name, one in sources.items() if name != "stack2"}
    assert all(list(folder.rglob("*.parquet")) for folder in folders)
    assert list((tmp_path / "data/stack_v2_ids").rglob("*.parquet"))


SMALL = [
    *TINY, "training.steps=2", "training.local_batch_size=2", "metrics.log_freq=1",
    "parallelism.data_parallel_replicate_degree=1", "parallelism.data_parallel_shard_degree=-1",
    "parallelism.tensor_parallel_degree=1", "compile.enable=false", "data.window_documents=100",
    "activation_checkpoint.mode=none", "checkpoint.last_save_in_hf=false",
]  # fmt: skip

RANDOM = ["training.dataset=random", "model.hf_assets_path=none"]  # nothing to fetch


DOWNLOAD_TOKENIZER = 'python torchtitan/datasets/download_tokenizer.py --repo_id meta-llama/Meta-Llama-3.1-8B --tokenizer_path "original" --hf_token=TOKEN'  # noqa: E501


def test_download_tokenizer_brings_it_where_the_configs_look(hub: Hub, tmp_path: Path) -> None:
    name, ranks = "meta-llama/Meta-Llama-3.1-8B", b"IQ== 0\nIg== 1\n"
    shown("overland init --from frontier", tmp_path)
    shutil.copy(HERE / "llama3_8b_n64.toml", tmp_path)
    repo = hub.add(name, {"original/tokenizer.model": ranks, "tokenizer.json": b"{}"}, gated=True)
    env = {"HF_ENDPOINT": hub.url}
    refused = shown(DOWNLOAD_TOKENIZER, tmp_path, code=2, env=env, TOKEN=TOKEN)
    assert f"accept its license at {hub.url}/{name}" in refused.stderr
    repo.gated, repo.private = False, True
    shown(DOWNLOAD_TOKENIZER, tmp_path, env=env, TOKEN=TOKEN)
    folder = tmp_path / "torchtitan/datasets/tokenizer"
    assert (folder / "original/tokenizer.model").read_bytes() == ranks
    assert not (folder / "tokenizer.json").exists()
    for config in ("llama3_8b_n64.toml", *(f"train_configs/{one}.toml" for one in RECIPES)):
        place = load_config(str(tmp_path / config), env={}).config.model.hf_assets_path
        assert tmp_path / (place or "") == folder


def test_the_name_of_the_documents_mixture_leads_to_the_recipe_that_has_it() -> None:
    config = str(HERE / "llama3_8b_n64.toml")
    _, problems = load_checked(config, [], world_size=512, waive={"machine", "missing"})
    (said,) = (one.message for one in problems if one.key == "training.dataset")
    assert "the recipe llama3_8b_frontier has" in said


# Jobs


@pytest.mark.parametrize(
    ("script", "nodes"),
    [("train_8B_n64", 64), ("train_8B_n640", 644), ("train_8B_n8_benchmark", 8)],
)
def test_a_batch_script_asks_slurm_for_what_overland_submit_asks(script: str, nodes: int) -> None:
    """All but the account, the name and the log: those are the user's, or the document's."""
    text = (SCRIPTS / f"frontier/{script}.sh").read_text()
    headers = dict(re.findall(r"^#SBATCH (--[\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert headers["--nodes"] == str(nodes)
    config = str(SCRIPTS / "frontier" / re.search(r"train_configs/\S+toml", text)[0])  # type: ignore[index]
    words = ["--site", "frontier", "--account", "abc", "--dry-run", "--nodes", str(nodes)]
    words += ["--time", headers["--time"]]
    words += ["--partition", "extended"] if "--partition" in headers else []
    words += ["--nodes", "640", "--spares", "4"] if script == "train_8B_n640" else []
    done = CliRunner().invoke(app, ["submit", config, *words])
    asked = dict(re.findall(r"^#SBATCH (--[\w-]+)=?(.*)$", done.stdout, flags=re.MULTILINE))
    for flag in ("--account", "--job-name", "--output", "--export"):
        asked.pop(flag)
    assert asked.items() <= headers.items(), done.stderr


def test_a_train_script_outside_of_a_job_submits_one(tmp_path: Path) -> None:
    copied("frontier", tmp_path)
    said = typed("./train_8B_n64.sh --sessions 10 --dry-run", tmp_path, SBATCH_ACCOUNT="abc")
    assert "#SBATCH --nodes=64\n" in said
    assert "#SBATCH --partition=extended\n" in said
    assert 'NCCL_SOCKET_IFNAME="hsn0"' in said
    assert 'GLOO_SOCKET_IFNAME="hsn0"' in said
    assert "64 nodes import Python from" in said  # nothing is packed here
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.long
def test_the_largest_job_has_four_spares(tmp_path: Path) -> None:
    copied("frontier", tmp_path)
    large = typed("./train_8B_n640.sh --dry-run", tmp_path, SBATCH_ACCOUNT="abc")
    assert "#SBATCH --nodes=644\n" in large
    assert "--nodes 640" in large


@pytest.mark.parametrize("script", ["train_8B_n64.sh", "train_8B_n640.sh"])
def test_large_jobs_read_python_and_tokenized_text_from_the_nodes_own_disks(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied("frontier", tmp_path)
    (tmp_path / "overland").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "overland").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [f"./{script}"], cwd=tmp_path, env={"PATH": path, "USER": "me"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    verb, config, *words = done.stdout.splitlines()
    assert words[-1] == "data.cache_folder=/mnt/bb/me/overland"
    monkeypatch.chdir(tmp_path)
    assert load_config(config, words[-1:], env={}).config.data.cache_folder == words[-1][18:]
    packed = tmp_path / "overland-env.tar.gz"
    monkeypatch.setattr("overland.cluster.script.packed_by_setup", lambda: packed)
    job = CliRunner().invoke(app, [verb, config, *words, "--account", "abc", "--dry-run"])
    assert f"sbcast --force {packed} " in job.stdout, job.stderr
    assert f"Python is copied to each node's disk from {packed}" in job.stderr


def batch(slurm: Slurm, folder: Path, line: str, flags: list[str], *words: str) -> str:
    """What the job says of `sbatch SCRIPT`, with more flags before and words behind it."""
    _, script, *given = line.split()
    (folder / "sites").mkdir(exist_ok=True)
    (folder / "sites/frontier.toml").write_text(SITE)
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    flags = ["--ntasks-per-node=2", "--cpus-per-task=1", "--parsable", *flags]
    words = (*flags, script, *given, *words)
    job = int(slurm.run("sbatch", *words, env=environment(PATH=path), cwd=folder))
    state = slurm.wait_for(job)
    log = "".join(path.read_text() for path in folder.glob(f"*_{job}.out"))
    assert " JobState=COMPLETED " in state, log
    return log


@pytest.mark.long
def test_sbatch_trains_on_the_nodes_that_it_was_given_and_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    """`sbatch train_8B_n64.sh` with the supervisor that `overland submit` has; the same line again
    goes on from there."""
    copied("frontier", tmp_path)
    words = [*SMALL, *RANDOM, "data.sources={}", "data.mixture=sequences"]
    words += ["--no-preflight"]
    log = batch(slurm, tmp_path, "sbatch train_8B_n64.sh", ["--nodes=2"], *words)
    assert "Finished: 2 steps" in log
    run = tmp_path / "runs/llama3_8b_frontier"
    words += ["training.steps=4"]
    log = batch(slurm, tmp_path, "sbatch train_8B_n64.sh", ["--nodes=2"], *words)
    assert "Finished: 4 steps" in log
    assert list(losses(run / "metrics.jsonl")) == [1, 2, 3, 4]
    sessions = [json.loads(one) for one in (run / "sessions.jsonl").read_text().splitlines()]
    assert [one["step"] for one in sessions if one["event"] == "start"] == [0, 2]


@pytest.mark.long
def test_sbatch_trains_on_all_nodes_but_four_spares(tmp_path: Path) -> None:
    """`sbatch train_8B_n640.sh`, of 6 nodes: two train."""
    copied("frontier", tmp_path)
    words = [*SMALL, *RANDOM, "data.sources={}", "data.mixture=sequences", "--no-preflight"]
    slurm = Slurm(num_nodes=6)
    try:
        log = batch(slurm, tmp_path, "sbatch train_8B_n640.sh", ["--nodes=6"], *words)
    finally:
        slurm.stop()
    assert "Finished: 2 steps" in log
    (run,) = (tmp_path / "runs").iterdir()
    starts = [json.loads(one) for one in (run / "sessions.jsonl").read_text().splitlines()]
    assert [one["nodes"] for one in starts if one["event"] == "start"] == [2]


@pytest.mark.long
def test_a_benchmark_of_n_nodes_tells_tokens_per_second(slurm: Slurm, tmp_path: Path) -> None:
    """MFU too, where the peak of the device is known; of a processor it is not."""
    copied("frontier", tmp_path)
    words = [*SMALL[:-1], *RANDOM, "training.steps=4", "--no-preflight"]
    for nodes in (1, 2):
        flags = [f"--nodes={nodes}"]
        log = batch(slurm, tmp_path, "sbatch train_8B_n8_benchmark.sh", flags, *words)
        assert "Finished: 4 steps" in log
        assert "tok/s" in log
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    told = overland("report", *map(str, runs), "--json", cwd=tmp_path)
    charts = {chart["id"]: chart for chart in json.loads(told.stdout)["charts"]}
    assert len(charts["tokens_per_second"]["lines"]) == 2


def test_a_job_that_is_none_is_refused(tmp_path: Path) -> None:
    copied("frontier", tmp_path)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/frontier.toml").write_text(SITE)
    config = "train_configs/llama3_8b_n8_benchmark.toml"
    words = ["submit", config, *SMALL[:-1], *RANDOM, "--site", "frontier"]
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    for more, env, said in (
        ([], {}, "--here trains inside the current Slurm job, but this is not a Slurm job"),
        (["--nodes", "2"], job, "2 nodes are requested, but this job has 1"),
    ):
        done = overland(*words, *more, "--here", cwd=tmp_path, code=2, **env)
        assert said in done.stderr
    assert not (tmp_path / "runs").exists()


# Checkpoints


def test_weights_go_to_dcp_and_back_and_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    copied("frontier", tmp_path)
    original = saved(fixture("meta_llama3")[0])
    places = {"INPUT_DIR": str(original), "OUTPUT_DIR": "outputs/step-0"}
    line = "python llama_to_dcp.py --input_dir INPUT_DIR --output_dir OUTPUT_DIR"
    shown(line, tmp_path, **places)
    loaded = stock_dcp(tmp_path / "outputs/step-0")
    theirs = torch.load(original / "consolidated.00.pth", weights_only=True)
    assert {f"model.{name}" for name in theirs} - {"model.rope.freqs"} <= set(loaded)
    places = {"INPUT_DIR": "outputs/step-0", "OUTPUT_DIR": "outputs/pt"}
    line = "python dcp_to_llama.py --input_dir INPUT_DIR --output_dir OUTPUT_DIR --push_to_hub"
    env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HUB_REPO_ID": "me/llama"}
    for name, value, says in (
        ("HUB_REPO_ID", "", "name the repository"),  # a terminal is asked
        ("HUB_REPO_ID", "llama", "name the repository"),
        ("HF_TOKEN", "", "set HF_TOKEN"),
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE is set"),
    ):
        refused = shown(line, tmp_path, code=2, env={**env, name: value}, **places)
        assert says in refused.stderr
        assert not (tmp_path / "outputs/pt").exists()  # nothing is converted in vain
    shown(line, tmp_path, env=env, **places)
    again = shown(line, tmp_path, code=2, env=env, **places)
    assert "overland push outputs/pt me/llama --revision step-0" in again.stderr
    for file in ("consolidated.00.pth", "checkpoint.pth"):
        ours = torch.load(tmp_path / "outputs/pt" / file, weights_only=True)
        for name, tensor in theirs.items():
            if name != "rope.freqs":
                assert torch.equal(ours[name], tensor), name
    repo = hub.repos["model", "me/llama"]
    assert {"consolidated.00.pth", "checkpoint.pth", "params.json"} <= set(
        repo.commits[repo.refs["step-0"]]
    )


def test_a_terminal_is_asked_for_the_repository(tmp_path: Path) -> None:
    copied("frontier", tmp_path)
    ours, theirs = pty.openpty()
    os.write(ours, b"\n")
    words = ["dcp_to_llama.py", "--input_dir", "a", "--output_dir", "b", "--push_to_hub"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(), stdin=theirs,
        capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert "OWNER/NAME" in done.stdout


@pytest.mark.long
def test_a_dcp_folder_that_does_not_say_its_model_needs_a_config(tmp_path: Path) -> None:
    """As torchtitan writes them."""
    copied("frontier", tmp_path)
    folder = fixture("meta_llama3")[0]
    places = {"INPUT_DIR": str(saved(folder)), "OUTPUT_DIR": "dcp"}
    line = "python llama_to_dcp.py --input_dir INPUT_DIR --output_dir OUTPUT_DIR"
    shown(line, tmp_path, **places)
    (tmp_path / "dcp/config.json").unlink()
    line = "python dcp_to_llama.py --input_dir INPUT_DIR --output_dir OUTPUT_DIR"
    places = {"INPUT_DIR": "dcp", "OUTPUT_DIR": "pt"}
    refused = shown(line, tmp_path, code=2, **places)
    assert "--config" in refused.stderr
    assert not (tmp_path / "pt").exists()
    shown(line, tmp_path, "--config", str(folder / "hf/config.json"), **places)
    assert (tmp_path / "pt/checkpoint.pth").is_file()


def stock_dcp(folder: Path) -> set[str]:
    """The keys that torch's own reader finds."""
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


@pytest.mark.long
def test_eval_ckpt_outside_of_a_job_submits_one(tmp_path: Path) -> None:
    copied("frontier", tmp_path)
    (tmp_path / "outputs/pt").mkdir(parents=True)
    said = typed("./eval_ckpt.sh outputs/pt --dry-run", tmp_path, SBATCH_ACCOUNT="abc")
    assert f"eval {tmp_path}/outputs/pt --tasks @frontier" in said
    configured = "CONFIG_FILE=eval_configs/config_mmlu.yaml ./eval_ckpt.sh outputs/pt --dry-run"
    assert "--tasks mmlu" in typed(configured, tmp_path, SBATCH_ACCOUNT="abc")
    unnamed = typed("./eval_ckpt.sh", tmp_path, code=1)
    assert "name a checkpoint or a run" in unnamed


@pytest.mark.long
def test_a_converted_checkpoint_is_evaluated_by_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    """From Hugging Face's form, by DCP, to Meta's, which is evaluated with its tokenizer."""
    pytest.importorskip("lm_eval")
    copied("frontier", tmp_path)
    write_text_model(tmp_path / "hf")
    overland("convert", "hf", "meta", "--to", "meta", cwd=tmp_path)
    line = "python llama_to_dcp.py --input_dir INPUT_DIR --output_dir OUTPUT_DIR"
    shown(line, tmp_path, INPUT_DIR="meta", OUTPUT_DIR="dcp")
    line = "python dcp_to_llama.py --input_dir INPUT_DIR --output_dir OUTPUT_DIR"
    shown(line, tmp_path, INPUT_DIR="dcp", OUTPUT_DIR="pt")
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(config))
    write_tasks(tmp_path / "definitions", 4)
    words = ["--include-path", "definitions", "--context", "256", "--tokenizer", "hf"]
    flags = ["--export=ALL,TASKS=own_choice"]
    line = "sbatch eval_ckpt.sh OUTPUT_DIR".replace("OUTPUT_DIR", "pt")
    log = batch(slurm, tmp_path, line, flags, *words)
    assert "own_choice" in log
    (record,) = (tmp_path / "pt.evaluations").glob("tasks-*.json")
    assert json.loads(record.read_text())["results"].keys() == {"own_choice"}


def test_the_plugin_is_built_with_the_versions_of_the_machine(tmp_path: Path) -> None:
    """By `sh`, as the document has it; where ROCm is not, it says so and fetches nothing."""
    copied("frontier", tmp_path)
    refused = typed("sh aws_ofi_rccl.sh", tmp_path, code=2)
    assert "/opt/rocm-6.3.1 does not exist; set ROCM_PATH" in refused
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    note = f'#!/bin/sh\necho "$(basename "$0") $*" >>{log}\n'
    clone = 'for name in autogen.sh configure; do cp "$0" "$5/$name"; done\n'
    (tools / "git").write_text(note + 'if [ "$1" = clone ]; then\n' + clone + "fi\n")
    (tools / "make").write_text(note)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "rocm").mkdir()
    env = {"ROCM_PATH": str(tmp_path / "rocm"), "LIBFABRIC": str(tmp_path)}
    said = typed(f'PATH="{tools}:$PATH" sh aws_ofi_rccl.sh', tmp_path, **env)
    assert f"{tmp_path}/aws-ofi-rccl/lib" in said
    ran = log.read_text().splitlines()
    assert [one.split()[0] for one in ran] == ["git", "autogen.sh", "configure", "make"]
    assert f"--with-libfabric={tmp_path} --with-hip={tmp_path}/rocm" in ran[2]


def test_the_loss_is_drawn_in_bins_of_100_and_of_15000_steps(tmp_path: Path) -> None:
    """Of the document's 73,500 steps."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("[training]\nsteps = 500000\n")
    lines = (line(step) for step in range(10, 73_501, 10))
    (run / "metrics.jsonl").write_text("".join(lines))
    told = overland("report", "run", "--json", "--svg", "plots", cwd=tmp_path)
    (loss,) = [one for one in json.loads(told.stdout)["charts"] if one["id"] == "loss"]
    drawn = {one["name"]: len(one["steps"]) for one in loss["lines"]}
    assert drawn["mean of 100 steps"] == 735
    assert drawn["mean of 15,000 steps"] == 5
    assert list((tmp_path / "plots").glob("*loss*.svg"))


def test_the_page_shows_no_line_that_is_not_typed_here() -> None:
    here = Path(__file__).read_text()
    for one in page_lines("frontier"):
        assert f'"{one}' in here or f"'{one}'" in here, one
