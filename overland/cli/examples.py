"""The examples below the options of each verb, in its help."""

from __future__ import annotations

from typing import Any

import typer

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("overland init", "overland init quickstart my.toml"),
    "fetch": ("overland fetch model Qwen/Qwen3-0.6B",
              "overland fetch dataset allenai/c4 --subset en --include '*00000*'"),
    "check": ("overland check run.toml", "overland check run.toml --world-size 512"),
    "train": ("overland train quickstart", "overland train run.toml training.steps=200",
              "overland train runs/quickstart/config.toml"),
    "submit": ("overland submit run.toml --site frontier --nodes 8 --sessions 4",
               "overland submit run.toml --site my.toml --dry-run"),
    "ls": ("overland ls", "overland ls /scratch/runs --json"),
    "watch": ("overland watch runs/quickstart", "overland watch runs/a runs/b --serve"),
    "report": ("overland report runs/quickstart",
               "overland report runs/a runs/b --output ab.html"),
    "env": ("overland env frontier > setup.sh",),
    "preflight": ("overland preflight", "overland preflight run.toml --quick"),
    "doctor": ("overland doctor", "overland doctor run.toml --site frontier"),
    "eval": ("overland eval runs/quickstart",
             "overland eval runs/quickstart --data mine=texts.jsonl",
             "overland eval Qwen3-0.6B --tasks hellaswag --num-fewshot 10"),
    "generate": ("overland generate runs/quickstart --prompt 'class Node:'",
                 "overland generate Qwen3-0.6B --chat 'Who are you?'"),
    "convert": ("overland convert runs/quickstart weights --to hf --dtype bfloat16",
                "overland convert runs/lora merged --to hf --merge-lora"),
    "push": ("overland push runs/quickstart/hf OWNER/NAME --private",),
    "data build": ("overland data build texts.jsonl --tokenizer Qwen3-0.6B",),
    "data preview": ("overland data preview quickstart --step 10",
                     "overland data preview runs/quickstart"),
    "data inspect": ("overland data inspect texts.jsonl",),
    "prove layout": ("overland prove layout --layouts short",),
    "prove resume": ("overland prove resume --layouts dozen",),
    "prove checkpoint": ("overland prove checkpoint runs/quickstart/checkpoint/step_160",),
    "prove data": ("overland prove data runs/quickstart",),
    "config reference": ("overland config reference",),
    "config schema": ("overland config schema > overland.schema.json",),
    "config convert": ("overland config convert axolotl.yaml run.toml",),
    "config show": ("overland config show run.toml training.steps=200",),
}  # fmt: skip


def add_examples(app: typer.Typer, above: str = "") -> None:
    info: Any
    for info in app.registered_commands:
        name = info.name or getattr(info.callback, "__name__", "")
        if examples := EXAMPLES.get(f"{above}{name}"):  # \b: keep the lines
            info.epilog = "\b\nExamples:\n" + "\n".join(f"  {one}" for one in examples)
    for info in app.registered_groups:
        add_examples(info.typer_instance, f"{info.name} ")
