"""The recipes for fine-tuning, unchanged except for the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overland.data.tokenizer import Tokenizer
from tests.cli.processes import TINY, losses, overland
from tests.data.chats import LLAMA3, ROLES, write_lines, write_tokenizer
from tests.jobs import write_model

NUM = 40
OF_64 = {"hidden_size": 64, "head_dim": 16}  # 4-bit weights share scales by 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, and small datasets where the recipes look for their own."""
    root = tmp_path_factory.mktemp("recipes")
    write_tokenizer(root / "tiny", **ROLES["llama3"], chat_template=LLAMA3)
    size = Tokenizer(root / "tiny").vocab_size
    write_model(root / "tiny", vocab_size=size, max_position_embeddings=2048, **OF_64)
    asked = [f"<s>[INST] Add {i} and {i}. [/INST] That is {2 * i}. </s>" for i in range(NUM)]
    write_lines(root / "data/guanaco-llama2-1k/train.jsonl", [{"text": text} for text in asked])
    pairs = [
        {
            name: [
                {"role": "user", "content": f"Add {i} and {i}."},
                {"role": "assistant", "content": f"That is {i + more}."},
            ]
            for name, more in (("chosen", i), ("rejected", i + 1))
        }
        for i in range(198, 198 + NUM)  # two of these are held out
    ]
    write_lines(root / "data/ultrafeedback_binarized/train.jsonl", pairs)
    return root


# The steps of an epoch, and what is there at its end.
FINE_TUNING = {
    "sft_lora_llama3_8b": (3, "checkpoint-3/adapter_model.safetensors"),
    "sft_full": (3, "hf/model.safetensors"),
    "qlora": (3, "checkpoint-3/adapter_model.safetensors"),
    "dpo": (2, "checkpoint-2/adapter_config.json"),
}


@pytest.mark.parametrize(
    "recipe",
    ["sft_lora_llama3_8b", "qlora", "dpo", pytest.param("sft_full", marks=pytest.mark.long)],
)
def test_a_recipe_runs_on_a_tiny_model(folder: Path, recipe: str) -> None:
    steps, file = FINE_TUNING[recipe]
    done = overland("train", recipe, "model.from=tiny", cwd=folder, NGPU="1")
    run = folder / "runs" / recipe
    # 4-bit weights cannot be merged, so that is not suggested.
    assert ("--merge-lora" in done.stdout) == (recipe in ("sft_lora_llama3_8b", "dpo"))
    assert ("--to peft" in done.stdout) == (recipe == "qlora")
    assert max(losses(run / "metrics.jsonl")) == steps
    assert (run / file).is_file()


def test_the_quickstart_is_fine_tuned_and_asked_before_and_after(tmp_path: Path) -> None:
    small = ["training.steps=2", "training.local_batch_size=2", "validation.steps=1"]
    for verb, code in (("check", 0), ("train", 2)):
        missing = overland(verb, "sft_quickstart", cwd=tmp_path, code=code)
        assert "quickstart` creates it" in (missing.stderr if code else missing.stdout)
    part = "training.dataset=stdlib:0/40"
    overland("train", "quickstart", *TINY, *small[:2], part, *QUIET, cwd=tmp_path, NGPU="1")
    part = "training.dataset=docstrings:3/40"
    fast = ["lr_scheduler.warmup_steps=0", "optimizer.lr=0.05"]
    told = overland("train", "sft_quickstart", part, *small, *fast, cwd=tmp_path, NGPU="1")
    assert "another vocab_size" not in told.stderr  # the note about new tokens says it
    run = tmp_path / "runs/sft_quickstart"
    first, last = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert (first["step"], last["step"]) == (0, 2)
    assert f"Before training, the model answers {QUESTION!r}:" in told.stdout
    assert first["text"] != last["text"]
    assert {"<|im_start|>", "<|im_end|>"} <= set(Tokenizer(run / "tokenizer").specials)


QUIET = ["validation.enable=false", "metrics.sample_prompt=", "metrics.enable_tensorboard=false"]
QUESTION = "What does shutil.copyfile do?"
