"""`frontier-sft`: from downloads to sbatch, adapters, one file of weights, and an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from overland.data.tokenizer import Tokenizer
from tests.checkpoint.convert.test_peft import BASE, deepspeed_of, folder_of
from tests.cli.processes import ROOT, environment, losses, overland
from tests.cli.test_offline import HOOK, namespace
from tests.cluster.slurm import Slurm
from tests.data.chats import ROLES, write_tokenizer
from tests.documents.scripts import copied, shown, typed
from tests.jobs import write_model
from tests.waiting import LIMIT_SECONDS

CONVERSATIONS = 40
STEPS = 3  # of 16 conversations each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's: the scripts, and what was downloaded to SCRATCH_ROOT."""
    folder = copied("frontier-sft", tmp_path_factory.mktemp("sft"))
    scratch = folder / "scratch"
    write_tokenizer(scratch / "llama-tokenizers-cache", **ROLES["llama3"])
    vocab_size = Tokenizer(scratch / "llama-tokenizers-cache").vocab_size
    shutil.copytree(scratch / "llama-tokenizers-cache", scratch / "llama-models-cache")
    write_model(scratch / "llama-models-cache", vocab_size=vocab_size, max_position_embeddings=1024)
    data = scratch / "data_cache/mlabonne___guanaco-llama2-1k/data"
    data.mkdir(parents=True)
    asked = [f"<s>[INST] Add {i} and {i}. [/INST] {2 * i} </s>" for i in range(CONVERSATIONS)]
    pq.write_table(pa.table({"text": asked}), data / "train-00000-of-00001.parquet")
    return folder


SITE = """\
description = "virtual nodes"
accelerator = "none"
modules = ["rocm/7.1.1"]
[environment]
OMP_NUM_THREADS = "1"
GLOO_SOCKET_IFNAME = "lo"
"""
INSTALLERS = ("pip", "conda", "git", "curl")


def tools(folder: Path, *more: str) -> str:
    """A PATH in which installers fail and say so in a file, after programs of `more`, which say how
    they were called."""
    place = folder / "tools"
    place.mkdir(exist_ok=True)
    for name in (*INSTALLERS, *more):
        text = f'#!/bin/bash\necho "{name} $*" >>{folder}/called\n'
        text += "exit 1\n" if name in INSTALLERS else f"env >{folder}/env\n"
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    return f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_the_job_gets_modules_network_and_caches_and_installs_nothing(tmp_path: Path) -> None:
    """With setup.sh as the page makes it, and without a network."""
    copied("frontier-sft", tmp_path)
    typed("overland env frontier > setup.sh", tmp_path)
    path = tools(tmp_path, "module", "srun", "scontrol")
    job = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}
    env = environment(PATH=path, SCRATCH_ROOT=str(tmp_path), USER="me", **job)
    done = subprocess.run(
        [*namespace(), "bash", "launch_deepspeed_ft.slurm", "training.steps=3"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text().replace("\ntrap", " trap").splitlines()
    assert [line.split()[0] for line in called] == ["module", "module", "scontrol", "srun"]
    assert called[1].startswith("module load ")
    assert "rocm/" in called[1]
    assert " -c 7 " in called[-1]
    assert "--kill-on-bad-exit=1" in called[-1]  # no rank waits for one that could not start
    assert called[-1].endswith("python -u sft_llama_ds.py training.steps=3")
    ranks = (tmp_path / "env").read_text().splitlines()
    for line in ("NCCL_SOCKET_IFNAME=hsn0", "GLOO_SOCKET_IFNAME=hsn0", "HF_HUB_OFFLINE=1",
                 "MIOPEN_USER_DB_PATH=/tmp/me-7-miopen"):  # fmt: skip
        assert line in ranks


CONDA = """\
mkdir -p "$4/bin"
for n in python overland; do
    printf '#!/bin/bash\\n[[ "$2" = *version.hip* ]] || exec {real}/%s "$@"\\n' $n >"$4/bin/$n"
done
printf '#!/bin/bash\\n' | tee "$4/bin/pip" >"$4/bin/conda-pack"
chmod +x "$4"/bin/*
"""


def set_up(folder: Path, env: dict[str, str]) -> None:
    """`bash setup.sh` as the page says, with a conda that takes this Python, and a pip that does
    nothing."""
    typed("overland env frontier > setup.sh", folder)
    conda = folder / "tools/conda"
    failing = conda.read_text()
    conda.write_text("#!/bin/bash\n" + CONDA.replace("{real}", str(Path(sys.executable).parent)))
    done = subprocess.run(["bash", "setup.sh"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    conda.write_text(failing)
    (folder / "called").unlink()


def test_a_job_without_overland_says_what_to_run(tmp_path: Path) -> None:
    copied("frontier-sft", tmp_path)
    done = subprocess.run(
        ["/bin/bash", "launch_deepspeed_ft.slurm"], cwd=tmp_path, env={"PATH": "/nowhere"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "setup.sh" in line
    assert "SCRATCH_ROOT" in line


@pytest.fixture(scope="module")
def log(folder: Path, slurm: Slurm) -> str:
    """What the job of `sbatch launch_deepspeed_ft.slurm` says, on two nodes without a network. The
    user has run setup.sh before, and has Python only from there."""
    tools(folder, "module")
    env = environment(
        SCRATCH_ROOT=str(folder / "scratch"),
        PATH=f"{folder}/tools:/usr/local/bin:/usr/bin:/bin",
        USER="me",
    )
    set_up(folder, env)
    (folder / "sites").mkdir()
    (folder / "sites/frontier.toml").write_text(SITE)
    env |= {
        "RANKS_PER_NODE": "1",
        "SRUN_FLAGS": " ",
        "PYTHONPATH": f"{HOOK}:{ROOT}",
        "OVERLAND_ATTEMPTS": str(folder / "attempts"),
        "OVERLAND_NODES": " ".join(slurm.nodes),
        "https_proxy": "http://127.0.0.1:9",
    }
    said = slurm.run("sbatch", "--parsable", "launch_deepspeed_ft.slurm", env=env, cwd=folder)
    job = int(said)
    out, errors = (folder / f"logs/finetune_llama3_ds-{job}.{end}" for end in "oe")
    shown = slurm.wait_for(job, lambda: errors.read_text() if errors.exists() else "")
    assert " JobState=COMPLETED " in shown, out.read_text() + errors.read_text()
    called = (folder / "called").read_text()
    assert called == "module reset\nmodule load rocm/7.1.1\n"
    assert not (folder / "attempts").exists()
    return out.read_text()


def test_sbatch_trains_and_its_log_has_its_name(log: str, folder: Path) -> None:
    assert f"Finished: {STEPS} steps" in log
    results = folder / "results_modified"
    assert max(losses(results / "metrics.jsonl")) == STEPS
    names = {path.name for path in (results / f"checkpoint-{STEPS}").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "zero_to_fp32.py"} <= names
    shown("overland report results_modified", folder)
    assert list(results.rglob("report.html"))


def test_zero_to_fp32_merges_from_where_it_lies(log: str, folder: Path) -> None:
    checkpoint = f"results_modified/checkpoint-{STEPS}"
    line = f"python {checkpoint}/zero_to_fp32.py --model_dir {checkpoint} --merge_lora"
    typed(f"{line} --output_path finetuned_llama3_8B.safetensors", folder)
    merged = load_file(folder / "finetuned_llama3_8B.safetensors")
    base = load_file(folder / "scratch/llama-models-cache/model.safetensors")
    assert merged.keys() == base.keys()
    changed = [name for name in base if not torch.equal(merged[name], base[name])]
    assert {name.rpartition(".self_attn.")[2] for name in changed} == {
        "q_proj.weight",
        "v_proj.weight",
    }
    inside = "python zero_to_fp32.py --merge_lora --output_path ../../inside.safetensors"
    shown(inside, folder / checkpoint)
    again = load_file(folder / "inside.safetensors")
    assert all(torch.equal(again[name], merged[name]) for name in merged)
    step = f"results_modified/checkpoint/step_{STEPS}"
    line = f"python zero_to_fp32.py --model_dir {step} --merge_lora"
    shown(f"{line} --output_path own.safetensors", folder)
    own = load_file(folder / "own.safetensors")
    assert all(torch.equal(own[name], merged[name]) for name in merged)


@pytest.mark.long
def test_the_adapter_answers(log: str, folder: Path) -> None:
    prompt = "<s>[INST] Add 3 and 3. [/INST]"
    words = (f"results_modified/checkpoint-{STEPS}", "--prompt", prompt, "--num-tokens", "4")
    said = overland("generate", *words, cwd=folder).stdout
    assert said.startswith(prompt)
    assert len(said) > len(prompt) + 1


@pytest.mark.parametrize("text", ['{"base_model_name_or_path": 5}', "[1]", "{"])
def test_an_adapter_config_that_names_no_model_is_one_sentence(text: str, tmp_path: Path) -> None:
    copied("frontier-sft", tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    done = overland("zero_to_fp32.py", "--merge_lora", cwd=tmp_path, code=2)
    assert done.stderr.strip().endswith("name the base model with --base_dir")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["peft", "deepspeed"])
def test_checkpoints_of_others_are_merged(kind: str, tmp_path: Path) -> None:
    copied("frontier-sft", tmp_path)
    saved = tmp_path / "checkpoint-3"
    if kind == "deepspeed":
        deepspeed_of(saved, "lora")
    else:
        shutil.copytree(folder_of("lora"), saved)
    config = saved / "adapter_config.json"
    settings = {**json.loads(config.read_text()), "base_model_name_or_path": "meta-llama/Llama"}
    config.chmod(0o644)
    config.write_text(json.dumps(settings))
    line = "python zero_to_fp32.py --model_dir checkpoint-3 --merge_lora"
    line += " --output_path out.safetensors"
    if kind == "peft":
        said = typed(line, tmp_path, code=2)
        assert (
            "names meta-llama/Llama, which is not a folder here; name the base model with" in said
        )
        line += f" --base_dir {BASE}"
    typed(line, tmp_path)
    overland(
        "convert", str(BASE), "same.safetensors", "--to", "safetensors", "--merge-lora",
        "--adapter", str(folder_of("lora")), cwd=tmp_path,
    )  # fmt: skip
    found, expected = (load_file(tmp_path / f"{name}.safetensors") for name in ("out", "same"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
