"""What the user sees while training: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from overland.run_folder import METRIC_NAMES
from overland.training.callbacks import Callback, Record
from overland.training.history import HELD_OUT
from overland.world.launchers import is_under_mpi

if TYPE_CHECKING:
    from overland.checkpoint.store import Outcome
    from overland.training.run import Run


class Console(Callback):
    """Draws a bar with the logged lines above it, on rank 0 in a terminal; prints lines
    elsewhere."""

    def __init__(self, run: Run) -> None:
        plain = run.config.metrics.disable_color_printing
        self.screen = RichConsole(no_color=plain, highlight=False, soft_wrap=True)
        self.prefix = f"[rank {run.world.rank}] " if run.world.rank else ""
        self.bar: Progress | None = None
        if sys.stdout.isatty() and run.world.is_first and not is_under_mpi():
            self.bar = Progress(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TextColumn("eta"),
                TimeRemainingColumn(compact=True),
                console=self.screen,
            )

    def on_start(self, run: Run) -> None:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task(
                "", total=run.config.training.steps, completed=run.progress.step, status=""
            )

    def on_step(self, run: Run) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=run.progress.step)

    def on_log(self, run: Run, record: Record) -> None:
        if self.bar is not None:
            self.bar.update(self.task, status=short_line_of(record))
            return
        self._print(f"step {record['step']}/{run.config.training.steps}  {line_of(record)}")

    def on_validation(self, run: Run, record: Record) -> None:
        self._print(f"step {record['step']}  {validation_line(record)}")

    def on_save(self, run: Run, saved: Outcome) -> None:
        if run.world.is_first:
            self._print(
                f"saved {saved.path} in {saved.seconds:.1f} s ({saved.waited:.1f} s waited)"
            )

    def on_message(self, run: Run, message: str) -> None:
        self._print(message)

    def on_end(self, run: Run) -> None:
        if self.bar is not None:
            with suppress(OSError):
                self.bar.stop()

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed must not end the run before its save
            self.screen.print(self.prefix + text, markup=False)


def validation_line(record: Record) -> str:
    """Returns the losses of the sets, with perplexities where they have one."""
    names = [name.removeprefix(HELD_OUT) for name in record if name.startswith(HELD_OUT)]
    parts = []
    if "validation_loss" in record and len(names) > 1:
        parts.append(f"validation_loss {record['validation_loss']:.4f}")
    for name in names:
        perplexity = record.get(f"validation/{name}/perplexity")
        more = f" (perplexity {perplexity:,.2f})" if perplexity is not None else ""
        parts.append(f"validation_loss/{name} {record[HELD_OUT + name]:.4f}{more}")
    return "  ".join(parts)


def short_line_of(record: Record) -> str:
    """Returns what fits next to a bar on 80 columns."""
    mfu = f"{record['mfu']:.0%} MFU  " if record["mfu"] is not None else ""
    usual = f"loss {record['loss']:.3f}  {speed(record)}  {mfu}{record['memory_gib']:.1f} GiB"
    return usual + others(record)


def speed(record: Record) -> str:
    for unit, short in (("tokens", "tok"), ("samples", "samples")):
        if f"{unit}_per_second" in record:
            return f"{record[f'{unit}_per_second']:,.0f} {short}/s"
    return ""


def line_of(record: Record) -> str:
    """Returns a logged record as one line."""
    parts = [
        f"loss {record['loss']:.4f}",
        f"grad {record['grad_norm']:.2f}",
        f"lr {record['lr']:.2e}",
        f"{speed(record)}/device",
        f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "MFU – (peak unknown)",
        f"{record['memory_gib']:.2f} GiB",
    ]
    if record["data_wait"] > 0.01:
        parts.append(f"data wait {record['data_wait']:.0%}")
    return "  ".join(parts) + others(record)


def others(record: Record) -> str:
    """Returns what the objective and losses inside the model log, by their names."""
    shown = [name for name in record if name not in METRIC_NAMES and "sparsity/" not in name]
    return "".join(f"  {name} {record[name]:.4g}" for name in shown)
