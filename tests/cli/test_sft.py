"""Fine-tuning from the command line: check, preview, build, train, ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import overland
from tests.data.chats import LLAMA3, ROLES, write_lines, write_tokenizer

CONFIG = """\
[job]
dump_folder = "run"
[model]
hf_assets_path = "tokenizer"
overrides = {hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, \
num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 640}
[sft]
shape = "auto"
[training]
dataset_path = "talks.json"
seq_len = 128
local_batch_size = 2
steps = 2
[metrics]
log_freq = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    write_tokenizer(folder / "tokenizer", **ROLES["llama3"], chat_template=LLAMA3)
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + {i}?"},
                {"role": "assistant", "content": f"It is {2 * i}."},
            ]
        }
        for i in range(40)
    ]
    (folder / "talks.json").write_text(json.dumps(talks, indent=1))
    (folder / "run.toml").write_text(CONFIG)
    return folder


def test_a_config_is_checked_previewed_trained_and_asked(folder: Path) -> None:
    checked = overland("check", "run.toml", "--no-step", cwd=folder)
    assert "conversations in column messages (sft.shape)" in checked.stderr
    size = "training.global_batch_size=2"
    page = json.loads(overland("data", "preview", "run.toml", size, "--json", cwd=folder).stdout)
    learned = [p for p, w in zip(page["pieces"], page["weights"], strict=True) if w]
    answers = "".join(learned).split("<|eot_id|>")
    assert answers[0].startswith("It is ")
    marked = [p for p, s in zip(page["pieces"], page["special"], strict=True) if s]
    assert set(marked) == {
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    }  # fmt: skip
    shown = overland("data", "preview", "run.toml", size, cwd=folder).stdout
    assert "<|start_header_id|>user<|end_header_id|>" in shown
    assert f"128 tokens, {sum(page['has_loss'])} learned" in shown
    trained = overland("train", "run.toml", cwd=folder, NGPU="1")
    assert "the tokenizer has no padding token; exports will use <|eot_id|>" in trained.stdout
    assert "--chat" in trained.stdout
    asked = overland("generate", "run", "--chat", "Hi?", "--num-tokens", "4", cwd=folder).stdout
    assert "Hi?" not in asked


def test_conversations_are_built_beforehand(folder: Path) -> None:
    words = ["data", "build", "talks.json", "--tokenizer", "tokenizer", "--out", "built"]
    long = write_lines(folder / "long.jsonl", [
        {"prompt": "a", "completion": "b " * length} for length in (3, 400)
    ])  # fmt: skip
    built = overland(*words, "--sft", "shape=auto", "--seq-len", "128", cwd=folder)
    assert 'seq_len = 128\n\n[sft]\nshape = "auto"\n' in built.stdout
    words[2] = str(long)
    dropped = overland(*words, "--sft", "shape=auto", "--sft", "too_long=drop", "--seq-len", "64",
                       "--json", cwd=folder)  # fmt: skip
    assert json.loads(dropped.stdout)["counts"] == {"too long": 1}
    for more, said in (
        (["--sft", "learn=last"], "has no effect unless sft.shape is set"),
        (["--sft", "shape=chat"], 'sft.shape = "chat": expected one of'),
        (["--seq-len", "64"], "--seq-len applies only with --sft"),
    ):
        assert said in overland(*words, *more, cwd=folder, code=2).stderr
