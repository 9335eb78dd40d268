"""The parts and the progress of a run, and the hooks of the callbacks that observe it. `build.py`
makes a run, `loop.py` trains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from overland.checkpoint.lazy import Origin
from overland.checkpoint.store import Outcome, Store
from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.data.prepare import Dataset
from overland.models.flops import Measure, measure_of
from overland.objectives.objective import Objective
from overland.optimizers.optimizer import Optimizer
from overland.parallel.apply import ParallelModel
from overland.parallel.mesh import Mesh
from overland.run_folder import RunFolder
from overland.training.health import LossScaler, SpikeGuard
from overland.training.inner_state import InnerState
from overland.world import World
from overland.world.heartbeat import Heartbeat

Record = dict[str, Any]
"""What is logged of a step: a line of metrics.jsonl."""


@dataclass
class Progress:
    """The progress of a run. With the weights and the optimizer state, this is all that resuming
    needs. `batch` is the next global batch; it runs ahead of `step` if batches were left out."""

    step: int = 0
    batch: int = 0
    tokens: int = 0
    """For samples that are arrays: the number of samples."""
    best_validation_loss: float = math.inf
    validated_on: str = ""
    """A mark of the sequences that the best validation loss was measured on."""

    def advance(self, tokens: int) -> None:
        """Counts a step."""
        self.step += 1
        self.batch += 1
        self.tokens += tokens

    def to_json(self) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    def restore(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, math.inf if value is None else value)


class Precomputed(Protocol):
    """What was computed for every row before training."""

    def added_to(self, batch: Batch) -> Batch: ...


class Screen(Protocol):
    """Where a run prints; see apps/console."""

    @property
    def is_shown(self) -> bool: ...

    def print(self, text: str) -> None: ...


@dataclass(kw_only=True)
class Run:
    config: JobConfig
    world: World
    device: torch.device
    folder: RunFolder
    mesh: Mesh
    model_config: Any
    model: ParallelModel
    objective: Objective
    inner: InnerState
    global_batch_size: int
    optimizer: Optimizer
    scaler: LossScaler
    dataset: Dataset
    validation_sets: list[Dataset]
    store: Store
    guard: SpikeGuard | None
    screen: Screen
    progress: Progress = field(default_factory=Progress)
    saved_step: int = -1
    resumed_own: bool = False
    """Whether this session resumed a checkpoint of its own run folder."""
    resumed_config: Mapping[str, Any] = field(default_factory=dict)
    """The config that the resumed checkpoint was saved with."""
    origin: Origin | None = None
    """Where to find the frozen weights that checkpoints leave out."""
    start_marks: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Size and digest of the files whose weights the objective keeps; see `mark_start`."""
    reference: Precomputed | None = None
    """Reference log-probabilities that were computed before training, for preference tuning."""
    beat: Heartbeat = field(default_factory=Heartbeat)
    callbacks: list[Callback] = field(default_factory=list)

    @cached_property
    def measure(self) -> Measure:
        """The unit of training (tokens or samples), and its cost."""
        config = self.config
        return measure_of(
            self.model_config, config.training.seq_len, config.lora, config.model.freeze
        )

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def say(self, message: str) -> None:
        """Tells the callbacks something the user should know."""
        self.call("on_message", message)


class Callback:
    """Hooks of a run; each does nothing unless overridden."""

    def __init__(self, run: Run) -> None:
        """Called when the run is built, before `on_start`."""

    def on_start(self, run: Run) -> None:
        """Called when everything is built (and resumed), just before the first step."""

    def on_step(self, run: Run) -> None:
        """Called after every step. `run.progress.step` already includes it."""

    def on_log(self, run: Run, record: Record) -> None:
        """Called every `metrics.log_freq` steps with loss, learning rate, speed and more, as plain
        numbers."""

    def on_validation(self, run: Run, record: Record) -> None:
        """Called with `validation/NAME/loss` and `validation/NAME/perplexity` of each set that was
        due (and with the loss as `validation_loss/NAME`, its name in earlier versions)."""

    def on_save(self, run: Run, saved: Outcome) -> None:
        """Called when a checkpoint has been committed. Saves end in the background, so ranks learn
        of it at different steps: never wait for another rank here."""

    def on_rewind(self, run: Run) -> None:
        """Called when the run went back to an earlier step (`run.progress.step`), as with
        `health.spike_guard = "rewind"`: what was logged for later steps is void."""

    def on_message(self, run: Run, message: str) -> None:
        """Called with something the user should know, such as a skipped step."""

    def on_end(self, run: Run) -> None:
        """Called last, even when training stops early or fails."""
