"""The `overland` command: lists its verbs, with examples of each, and suggests the right one for
verbs of other tools, such as `finetune`. Each verb is a thin module that imports heavy packages
when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import overland
from overland.apps.streams import guard_streams
from overland.cli import (
    check,
    config,
    convert,
    data,
    doctor,
    eval,
    generate,
    hub,
    init,
    preflight,
    prove,
    submit,
    train,
    watch,
)
from overland.cli.common import TAKES_SETTINGS

# Names of other tools, and what is meant here.
OTHER_NAMES = {
    **dict.fromkeys(
        ("finetune", "fine-tune", "sft", "dpo", "lora", "pretrain", "resume", "run"),
        "train` with a config, or a recipe of `overland init",
    ),
    "chat": "generate MODEL --chat",
    **dict.fromkeys(("sample", "infer", "inference", "complete", "predict"), "generate"),
    **dict.fromkeys(("evaluate", "test", "benchmark", "perplexity"), "eval"),
    **dict.fromkeys(("merge", "export"), "convert"),
    **dict.fromkeys(("tokenize", "preprocess", "prepare"), "data build"),
    **dict.fromkeys(("list", "runs"), "ls"),
    "download": "fetch",
    "upload": "push",
    "validate": "check",
    "launch": "submit",
    "status": "watch",
    "plot": "report",
}

# Below the options of a verb, in its help.
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


class Verbs(TyperGroup):
    """Names the verb that is meant by a word of another tool."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (verb := OTHER_NAMES.get(args[0].lower())):
            ctx.fail(f"No such command '{args[0]}'. Use `overland {verb}`.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="overland",
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and fine-tune large models on any machine; stop at any point and resume exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"overland {overland.__version__}")
        raise typer.Exit


@app.callback()
def every_verb(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def show_help(context: typer.Context) -> None:
    """Prints the list of verbs, for those who leave out the dashes of --help."""
    assert context.parent is not None
    print(context.parent.get_help())


def add_examples(app: typer.Typer, above: str = "") -> None:
    info: Any
    for info in app.registered_commands:
        name = info.name or getattr(info.callback, "__name__", "")
        if examples := EXAMPLES.get(f"{above}{name}"):  # \b: keep the lines
            info.epilog = "\b\nExamples:\n" + "\n".join(f"  {one}" for one in examples)
    for info in app.registered_groups:
        add_examples(info.typer_instance, f"{info.name} ")


app.command()(init.init)
app.command()(hub.fetch)
app.command(context_settings=TAKES_SETTINGS)(check.check)
app.command(context_settings=TAKES_SETTINGS)(train.train)
app.command(cls=submit.Submit, context_settings=TAKES_SETTINGS)(submit.submit)
app.command(name="ls")(watch.list_runs)
app.command(cls=watch.Watching)(watch.watch)
app.command()(watch.report)
app.command(hidden=True)(submit.supervise)
app.command()(submit.env)
app.command()(preflight.preflight)
app.command()(doctor.doctor)
app.command(name="eval")(eval.evaluate)
app.command()(generate.generate)
app.command()(convert.convert)
app.command()(hub.push)
app.command(name="help", hidden=True)(show_help)
app.command(name="version", hidden=True)(lambda: print_version(True))
app.add_typer(data.app, name="data")
app.add_typer(prove.app, name="prove")
app.add_typer(config.app, name="config")
add_examples(app)


def main() -> None:
    guard_streams()
    app()


def run(*words: str) -> None:
    """Runs a verb from a script; if the verb fails, the script exits."""
    guard_streams()
    try:
        app(list(words))
    except SystemExit as end:
        if end.code:
            raise
