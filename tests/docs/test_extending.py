"""The examples of docs/extending.md, taken from the page, work as the page says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overland.data.shard import open_shard
from tests.cli.processes import ROOT, environment, losses, overland

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Those of the page itself; examples that are files have tests of their own."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/examples").glob("*.py")]
    return [block for block in found if block not in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run with the three examples was made, on two ranks, and exported."""
    folder = tmp_path_factory.mktemp("extending")
    (config,) = blocks("toml")
    (folder / "run.toml").write_text(config)
    (folder / "my_parts.py").write_text("\n\n".join(blocks("python")))
    words = ["train", "run.toml", "checkpoint.last_save_in_hf=true"]
    overland(*words, cwd=folder, NGPU="2")
    return folder


def test_the_page_has_one_example_of_each_kind() -> None:
    text = "\n".join(blocks("python"))
    for name in ("register_model", "register_optimizer", "register_source", "register_callback"):
        assert len(re.findall(rf"^from .*\b{name}$", text, flags=re.MULTILINE)) == 1


SAME_LOGITS = """
import pathlib, torch, transformers
from overland.apps.evaluation.main import open_model

run = pathlib.Path("runs/mine")
tokens = torch.arange(200, 216)[None]
ours = open_model(run).model
theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
with torch.no_grad():
    print(float((ours(tokens) - theirs(tokens).logits).abs().max()))
    for layer in theirs.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU()
    print(float((ours(tokens) - theirs(tokens).logits).abs().max()))
"""


def test_the_model_is_the_one_that_was_trained_and_exported(folder: Path) -> None:
    """In a process of its own: what the module registers would stay in this one."""
    run = folder / "runs" / "mine"
    assert json.loads((run / "hf" / "config.json").read_text())["hidden_act"] == "relu"
    done = subprocess.run(
        [sys.executable, "-c", SAME_LOGITS],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with_relu, with_silu = map(float, done.stdout.split())
    assert with_relu < 1e-4
    assert with_silu > 1e-2
    by_step = losses(run / "metrics.jsonl")
    assert by_step[20] < 0.8 * by_step[5]


def test_the_source_is_what_was_tokenized(folder: Path) -> None:
    (shard,) = (folder / "data").glob("sums-*/shards/*/*.shard")
    assert open_shard(shard).info.num_documents == 300


def test_arrays_and_channels_come_as_the_page_says(folder: Path) -> None:
    words = ["data", "preview", "run.toml", "--rows", "2", "--json"]
    pages = overland(*words, "training.dataset=gradients", cwd=folder, NGPU="1").stdout
    for page in map(json.loads, pages.splitlines()):
        assert page["fields"]["pixels"].startswith("float32 1 × 8 × 8, from 0 to ")
        assert page["epoch"] == 0
    built = overland("data", "build", "gradients", "--import", "my_parts", cwd=folder)
    assert f"bytes       {100 * (64 * 4 + 8):,}" in built.stdout
    overland(*words, "training.dataset=dialogues", cwd=folder, NGPU="1")
    (shard,) = (folder / "data").glob("dialogues-*/shards/*/*.shard")
    assert open_shard(shard).channels["weights"][:6].tolist() == [0, 0, 0, 1, 1, 1]


def test_the_callback_saw_the_run_on_one_rank(folder: Path) -> None:
    run = folder / "runs" / "mine"
    found = json.loads((run / "lowest_loss.json").read_text())
    assert found == {"lowest_loss": min(losses(run / "metrics.jsonl").values()), "steps": 20}


def test_a_checkpoint_of_the_model_can_be_opened_again(folder: Path) -> None:
    words = ["generate", "runs/mine", "--prompt", "7 + 1 = ", "--num-tokens", "4"]
    assert overland(*words, cwd=folder).stdout.startswith("7 + 1 = ")
