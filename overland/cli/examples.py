"""The help of each verb: its line in the list of verbs, and the examples below its options."""

from __future__ import annotations

from typing import Any

import typer

# Verb: its line, and example commands.
HELP: dict[str, tuple[str, tuple[str, ...]]] = {
    "init": ("List the recipes, or copy one here as a commented TOML file.",
        ("overland init", "overland init quickstart my.toml")),
    "fetch": ("Download a model, tokenizer, dataset or evaluation tasks.",
        ("overland fetch model Qwen/Qwen3-0.6B",
         "overland fetch dataset allenai/c4 --subset en --include '*00000*'")),
    "check": ("Describe a run and report every problem, without training.",
        ("overland check run.toml", "overland check run.toml --world-size 512")),
    "train": ("Train a model, or resume a run.",
        ("overland train quickstart", "overland train run.toml training.steps=200",
         "overland train runs/quickstart/config.toml")),
    "submit": ("Submit a run to Slurm as a chain of jobs.",
        ("overland submit run.toml --site frontier --nodes 8 --sessions 4",
         "overland submit run.toml --site my.toml --dry-run")),
    "ls": ("List runs with their state, step, loss and age.",
        ("overland ls", "overland ls /scratch/runs --json")),
    "watch": ("Watch a run live, from any machine that can see its folder.",
        ("overland watch runs/quickstart", "overland watch runs/a runs/b --serve")),
    "report": ("Write an HTML report on one run, or comparing several.",
        ("overland report runs/quickstart", "overland report runs/a runs/b --output ab.html")),
    "help": ("List the verbs.", ()),
    "version": ("Print the version.", ()),
    "supervise": ("Start and restart the ranks of a job.", ()),
    "env": ("Print the one-time setup script for a cluster.",
        ("overland env frontier > setup.sh",)),
    "preflight": ("Test every node, device and link, and name the bad ones.",
        ("overland preflight", "overland preflight run.toml --quick")),
    "doctor": ("Check the environment, versions, caches and limits.",
        ("overland doctor", "overland doctor run.toml --site frontier")),
    "eval": ("Measure perplexity and task scores.",
        ("overland eval runs/quickstart", "overland eval runs/quickstart --data mine=texts.jsonl",
         "overland eval Qwen3-0.6B --tasks hellaswag --num-fewshot 10")),
    "generate": ("Continue prompts with a model, or chat with it.",
        ("overland generate runs/quickstart --prompt 'class Node:'",
         "overland generate Qwen3-0.6B --chat 'Who are you?'")),
    "convert": ("Convert a checkpoint from any format to any other.",
        ("overland convert runs/quickstart weights --to hf --dtype bfloat16",
         "overland convert runs/lora merged --to hf --merge-lora")),
    "push": ("Upload a folder of weights or data to the Hugging Face Hub.",
        ("overland push runs/quickstart/hf OWNER/NAME --private",)),
    "data": ("Inspect a corpus, preview batches, or pre-tokenize it.", ()),
    "data build": ("Tokenize a corpus into shards ahead of training.",
        ("overland data build texts.jsonl --tokenizer Qwen3-0.6B",)),
    "data preview": ("Show exactly what the model sees at a step.",
        ("overland data preview quickstart --step 10", "overland data preview runs/quickstart")),
    "data inspect": ("Read a corpus once and summarize what it holds.",
        ("overland data inspect texts.jsonl",)),
    "prove": ("Verify that layouts, resumes, data and checkpoints are exact.", ()),
    "prove layout": ("Compare the losses of parallel layouts with one process.",
        ("overland prove layout --layouts short",)),
    "prove resume": ("Compare runs resumed under other layouts with an unbroken run.",
        ("overland prove resume --layouts dozen",)),
    "prove checkpoint": ("Verify every byte of a checkpoint against its checksums.",
        ("overland prove checkpoint runs/quickstart/checkpoint/step_160",)),
    "prove data": ("Compare the data that a run consumed with its plan.",
        ("overland prove data runs/quickstart",)),
    "config": ("Show, convert and explain configs.", ()),
    "config reference": ("Print every key with its type, default and meaning.",
        ("overland config reference",)),
    "config schema": ("Print the JSON Schema of a config, for editors.",
        ("overland config schema > overland.schema.json",)),
    "config convert": ("Convert a config of another trainer to Overland's keys.",
        ("overland config convert axolotl.yaml run.toml",)),
    "config show": ("Print the resolved config.",
        ("overland config show run.toml training.steps=200",)),
}  # fmt: skip


def add_help(app: typer.Typer, above: str = "") -> None:
    """Adds the line and the examples to every verb."""
    info: Any
    for info in app.registered_commands:
        name = info.name or getattr(info.callback, "__name__", "")
        info.short_help, examples = HELP[f"{above}{name}"]
        if examples:  # \b: keep the lines
            info.epilog = "\b\nExamples:\n" + "\n".join(f"  {one}" for one in examples)
    for info in app.registered_groups:
        info.short_help, _ = HELP[info.name]
        add_help(info.typer_instance, f"{info.name} ")
