"""`frontier-sft`: from downloads to sbatch, adapters, one file of weights, and an answer."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from overland.data.tokenizer import Tokenizer
from tests.checkpoint.convert.test_peft import BASE, deepspeed_of, folder_of
from tests.cli.processes import environment, losses, overland
from tests.cluster.slurm import Slurm
from tests.data.chats import ROLES, write_tokenizer
from tests.documents.scripts import copied, shown, typed
from tests.jobs import write_model

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


@pytest.fixture(scope="module")
def log(folder: Path, slurm: Slurm) -> str:
    """What the job of `sbatch launch_deepspeed_ft.slurm` says, on two nodes."""
    env = environment(
        SCRATCH_ROOT=str(folder / "scratch"),
        RANKS_PER_NODE="1",
        SRUN_FLAGS=" ",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    said = slurm.run("sbatch", "--parsable", "launch_deepspeed_ft.slurm", env=env, cwd=folder)
    job = int(said)
    out, errors = (folder / f"logs/finetune_llama3_ds-{job}.{end}" for end in "oe")
    shown = slurm.wait_for(job, lambda: errors.read_text() if errors.exists() else "")
    assert " JobState=COMPLETED " in shown, out.read_text() + errors.read_text()
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
    typed(f"cd {checkpoint} && {inside}", folder)
    again = load_file(folder / "inside.safetensors")
    assert all(torch.equal(again[name], merged[name]) for name in merged)
    step = f"results_modified/checkpoint/step_{STEPS}"
    line = f"python zero_to_fp32.py --model_dir {step} --merge_lora"
    typed(f"{line} --output_path own.safetensors", folder)
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
