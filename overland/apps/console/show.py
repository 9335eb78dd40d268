"""What the trainer calls to display a run (see plugins.py), and the summary at its end: results,
where everything is, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Callable
from textwrap import indent

from overland.apps.console.bar import Console
from overland.apps.console.opening import opening
from overland.apps.console.readme import write_readme
from overland.apps.console.services import TensorBoard, WeightsAndBiases
from overland.apps.report.plot import LossPlot
from overland.objectives.objective import NextToken
from overland.plugins import plugin
from overland.run_folder import NOT_SAVED
from overland.training.callbacks import Callback
from overland.training.main import Trained
from overland.training.run import Run
from overland.training.validate import LARGEST_LOSS
from overland.words import command, in_columns, number_of

__all__ = ["callbacks", "closing", "opening", "write_readme"]

BUILT_IN = "stdlib"  # its text is Python code
NUM_COMMANDS = 3


def callbacks(run: Run) -> list[Callback]:
    """Returns what shows the run on this rank."""
    metrics, first = run.config.metrics, run.world.is_first
    wanted: list[tuple[bool, Callable[[Run], Callback]]] = [
        (run.screen.is_shown, Console),
        (first, LossPlot),
        (first and metrics.enable_tensorboard, TensorBoard),
        (first and metrics.enable_wandb, WeightsAndBiases),
    ]
    return [make(run) for is_wanted, make in wanted if is_wanted]


def closing(run: Run, result: Trained, is_new: bool) -> str:
    """Returns the summary of a run. `is_new`: whether this session trained any steps."""
    folder, steps = run.folder, run.config.training.steps
    if not result.finished:
        saved = f"saved step {result.step}" if run.config.checkpoint.enable else "not saved"
        stopped = f"\nStopped after step {result.step} of {steps}; {saved}."
        if run.beat.is_supervised:  # in a job
            return stopped
        return f"{stopped} To resume:\n\n  {command('overland', 'train', folder.config)}\n"
    first = f"Finished: {number_of(steps, 'step')} in {folder.root}."
    if not run.config.checkpoint.enable:
        first += f" {NOT_SAVED[0].upper()}{NOT_SAVED[1:]}."
    if not is_new:
        first = (
            f"Nothing left to do: {how_far(run, result.step)}. `--resume none` starts a new run "
            f"next to it."
        )
    found = in_columns(losses(run, result) | places(run, result))
    parts = [f"\n{first}", indent(f"{found}\n", "  ")]
    if run.dataset.tokenizer is not None:
        parts.append(plugin("samples").samples_in_words(run, run.dataset.tokenizer))
    parts.append(
        "To try next:\n\n" + "".join(f"  {one}\n" for one in next_commands(run, result.step))
    )
    return "\n".join(part for part in parts if part)


def how_far(run: Run, step: int) -> str:
    """Describes where a run is that has nothing left to do."""
    root, steps, epochs = run.folder.root, run.config.training.steps, run.config.training.epochs
    if step == steps:
        return f"{root} is at step {step} of {steps}"
    wanted = f"training.steps = {steps}"
    if epochs is not None:
        wanted = f"training.epochs = {epochs:g} is {steps} steps"
    return f"{root} has done {step} steps, and {wanted}; raise it to train longer"


def losses(run: Run, result: Trained) -> dict[str, str]:
    found = {"loss": f"{result.loss:.4f}"} if result.loss is not None else {}
    held_out = []
    for name, loss in result.validation.items():
        more = ""
        if isinstance(run.objective, NextToken):
            more = f" (perplexity {math.exp(min(loss, LARGEST_LOSS)):,.2f})"
        held_out.append(f"{loss:.4f}{more} on {name}")
    return found | ({"held-out loss": ", ".join(held_out)} if held_out else {})


def places(run: Run, result: Trained) -> dict[str, str]:
    """Returns the paths of the run's outputs that exist."""
    config, folder = run.config, run.folder
    found = {}
    if result.checkpoint is not None:
        found["checkpoint"] = str(result.checkpoint)
    if folder.hf.is_dir():
        found["Hugging Face"] = str(folder.hf)
    if config.lora.rank and config.lora.save_as_peft:
        found["PEFT adapters"] = f"{folder.root}/checkpoint-{result.step}"
    found["metrics"] = str(folder.metrics)
    if folder.plot.is_file():
        found["plot"] = str(folder.plot)
    if config.metrics.enable_tensorboard:
        found["TensorBoard"] = str(folder.tb)
    return found


def next_commands(run: Run, done: int) -> list[str]:
    """Returns commands that make sense for this run, the most likely first. `done`: steps taken,
    which may be more than the config asks for."""
    config, root = run.config, run.folder.root
    times = 2 * max(1.0, done / config.training.steps)
    steps, epochs = round(times * config.training.steps), config.training.epochs
    commands = []
    if config.checkpoint.enable and run.dataset.tokenizer is not None:
        commands.append(command("overland", "generate", root, *prompt_words(run)))
    if config.checkpoint.enable and config.lora.rank:
        if config.lora.base == "nf4":  # not merged: they were trained with the 4-bit weights
            out, options = f"{root.name}-adapter", ["--to", "peft"]
        else:
            out, options = f"{root.name}-merged", ["--to", "hf", "--merge-lora"]
        commands.append(command("overland", "convert", root, root.with_name(out), *options))
    commands.append(command("overland", "report", root))
    longer = f"training.steps={steps}" if epochs is None else f"training.epochs={times * epochs:g}"
    if config.checkpoint.enable:
        commands.append(command("overland", "train", run.folder.config, longer))
    if config.metrics.enable_tensorboard:
        commands.append(command("tensorboard", "--logdir", run.folder.tb))
    commands.append(command("overland", "watch", root, "--once"))
    return commands[:NUM_COMMANDS]


def prompt_words(run: Run) -> tuple[str, str]:
    """Returns a prompt for the model: the run's own, or something similar to its data."""
    config, tokenizer = run.config, run.dataset.tokenizer
    assert tokenizer is not None
    asked = config.metrics.sample_prompt
    if plugin("samples").is_chat(config, tokenizer):
        return "--chat", asked or "Who are you?"
    if config.training.dataset == BUILT_IN and not config.training.dataset_path:
        return "--prompt", "class Node:"
    return "--prompt", asked or "The"
