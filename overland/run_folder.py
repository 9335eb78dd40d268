"""A run folder: every name in it, and what it holds.

config.toml            the config of the run, with all keys
model_config.json      the architecture, in Hugging Face's format
README.md              what the run is and how to resume it
tokenizer/             the tokenizer's files
data/plan.json         the plan of its data, and where the corpora are
data/ledger.bin        what the model consumed
metrics.jsonl          a line per logged step
metrics.undone.jsonl   the lines of steps that were undone by resuming from an earlier step
sessions.jsonl         each session: what it ran on, what it saved and printed, and how it ended
loss.svg               the losses
samples.jsonl          the model's answers to metrics.sample_prompt
checkpoint/step_N/     checkpoints; those of an early stop are called step_N.preempt
evaluations/step_N/    evaluation results of a checkpoint
checkpoint-N/          the adapters of step_N in PEFT's format, with lora.save_as_peft
logs/                  the output of ranks and jobs
faults/                stack traces and flight recorder dumps of failures
submit/                scripts and configs of the jobs
attempts.jsonl         the events of the jobs
live.json              the current state
owner.json             the process that trains in it
STOP                   created by the user: stop after this step
stopped                why the chain of jobs ended before the run
done                   the last step, once it is taken and saved; with checkpoint.enable = false, a
                       second line says that nothing is saved
hf/                    the weights in Hugging Face's format
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from overland.files import parse_toml, replace_file

if TYPE_CHECKING:
    from overland.config.schema import JobConfig


CONFIG, MODEL_CONFIG, README = "config.toml", "model_config.json", "README.md"
METRICS, PLOT, LOGS, TOKENIZER = "metrics.jsonl", "loss.svg", "logs", "tokenizer"
UNDONE, SESSIONS, SAMPLES = "metrics.undone.jsonl", "sessions.jsonl", "samples.jsonl"
DATA, PLAN, LEDGER = "data", "data/plan.json", "data/ledger.bin"
ATTEMPTS, LIVE, OWNER = "attempts.jsonl", "live.json", "owner.json"
STOP, STOPPED, DONE = "STOP", "stopped", "done"
EVALUATIONS = "evaluations"
FAULTS, SUBMITTED, PREFLIGHT = "faults", "submit", "preflight.json"

CHECKPOINTS = "checkpoint"  # unless `checkpoint.folder` says otherwise
LATEST = "latest"
NOT_SAVED = "nothing is saved: checkpoint.enable = false"  # the second line of `done`, if so
WRITTEN_BY = "Written by `overland train`"  # in the README.md of every run
COMMITTED = "COMMITTED"  # in a complete checkpoint
CHECKPOINT = re.compile(r"step_(\d+)(\.preempt)?")
ADAPTERS = re.compile(r"checkpoint-(\d+)")

# The metrics of every step. Metrics of a model or an objective need other names, or one would hide
# the other.
METRIC_NAMES = frozenset({
    "step", "time", "loss", "grad_norm", "lr", "tokens", "samples", "tokens_per_second",
    "samples_per_second", "tflops", "mfu", "memory_gib", "data_wait", "skipped_steps",
    "skipped_documents", "empty_steps", "seconds", "train/sparsity",
})  # fmt: skip
VALIDATION_LOSS = "validation_loss"  # reserved, with all names that begin with it or with the next
VALIDATION = "validation/"


def checkpoint_name(step: int, preempt: bool = False) -> str:
    return f"step_{step}" + (".preempt" if preempt else "")


def adapters_name(step: int) -> str:
    """Returns the name that transformers' Trainer gives its checkpoints."""
    return f"checkpoint-{step}"


class RunFolder:
    """The paths of a run folder (see above)."""

    def __init__(self, config: JobConfig) -> None:
        root = Path(config.job.dump_folder).expanduser()
        fallback = config.checkpoint.fallback_folder
        self.root = root
        self.tb = below(root, config.metrics.save_tb_folder)
        self.checkpoints = root / config.checkpoint.folder
        self.traces = below(root, config.profiling.save_traces_folder)
        self.memory_snapshots = below(root, config.profiling.save_memory_snapshot_folder)
        self.fallback = Path(fallback) / root.absolute().name if fallback else None
        """For the last save of a session, if the run folder's disk fails."""
        self.fallback_ledger = self.fallback / "ledger.bin" if self.fallback else None
        """The part of the ledger that belongs to a checkpoint there."""
        self.config, self.readme = root / CONFIG, root / README
        self.metrics, self.undone_metrics = root / METRICS, root / UNDONE
        self.sessions, self.samples, self.plot = root / SESSIONS, root / SAMPLES, root / PLOT
        self.data, self.plan, self.ledger = root / DATA, root / PLAN, root / LEDGER
        self.tokenizer, self.logs, self.hf = root / TOKENIZER, root / LOGS, root / "hf"
        self.done = root / DONE

    def steps_done(self) -> int:
        try:
            return steps_in(self.done.read_text())
        except OSError:
            return 0

    def kept_epochs(self) -> float:
        """Returns `training.epochs` from the run's config.toml; 0 if not set."""
        try:
            kept = parse_toml(self.config.read_text())
            return float(kept.get("training", {}).get("epochs", 0))
        except (OSError, ValueError, TypeError, AttributeError):
            return 0.0

    def mark_done(self, steps: int, is_saved: bool = True) -> None:
        replace_file(self.done, f"{steps}\n" if is_saved else f"{steps}\n{NOT_SAVED}\n")


def steps_in(done: str) -> int:
    """Returns the number of steps that the text of a file `done` names; 0 if it names none."""
    first = done.partition("\n")[0].strip()
    return int(first) if re.fullmatch("[0-9]{1,18}", first) else 0


def below(root: Path, folder: str) -> Path:
    """Returns a folder of the run. An absolute path may be shared by runs, so each gets a subfolder
    with its name."""
    path = Path(folder).expanduser()
    return path / root.absolute().name if path.is_absolute() else root / path


def fresh_folder(wanted: str) -> str:
    """Returns `wanted`, or the first of `wanted-2`, `wanted-3`, … that is unused."""
    number, candidate = 1, Path(wanted).expanduser()
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = Path(f"{wanted.rstrip('/')}-{number}").expanduser()
    return str(candidate)


def remove_old_stop(root: Path) -> str:
    """Removes a file STOP from before, since the user asks to run now; returns a note, or "" if
    there was none. A run that is training in the folder has yet to read it, so it then stays."""
    stop = root / STOP
    if not stop.exists() or (root / OWNER).exists():
        return ""
    stop.unlink(missing_ok=True)
    return f"removed {stop}, left from before; it would have stopped the run after one step"


def first_taken(names: Iterable[str]) -> str | None:
    """Returns the first of these names that is already used for another metric."""
    return next(
        (
            name
            for name in names
            if name in METRIC_NAMES or name.startswith((VALIDATION_LOSS, VALIDATION))
        ),
        None,
    )
