"""The progress bar and the log lines of training: which metrics they show, in what form and order,
which are dropped in a narrow terminal, and the time left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from rich.text import Text

from overland.apps.console.screen import Screen
from overland.apps.watch.history import HELD_OUT, History
from overland.checkpoint.store import Outcome
from overland.data.corpus import Corpus
from overland.run_folder import METRIC_NAMES
from overland.training.callbacks import Callback, Record
from overland.training.run import Run
from overland.words import clock, duration
from overland.world.heartbeat import Phase

RECENT = 100  # logged losses in the sparkline
PATIENCE_SECONDS = 1.0  # in one phase, before the bar gives way to a description of it
USUAL = (Phase.COMPUTING, Phase.REPORTING)
GAP = 2
SHORTEST_BAR, SHORTEST_SPARKLINE, LONGEST_SPARKLINE = 8, 8, 24
LEVELS = "▁▂▃▄▅▆▇█"
# In order of importance: the last ones are dropped first.
KEPT = ("doing", "step", "loss", "left", "sparkline", "speed", "bar", "elapsed", "lr", "grad_norm",
        "mfu", "memory_gib", "epoch", "others")  # fmt: skip
SHOWN = ("doing", "bar", "step", "epoch", "loss", "sparkline", "lr", "grad_norm", "speed", "mfu",
         "memory_gib", "others", "elapsed", "left")  # fmt: skip
FORMS: dict[str, Callable[[float], str]] = {
    "epoch": "epoch {:.2f}".format,
    "loss": lambda loss: f"loss~{loss:.4f}" if loss < 1e4 else f"loss {loss:.4g}",
    "lr": "lr {:.2e}".format,
    "grad_norm": "grad {:.2f}".format,
    "mfu": "MFU {:.1%}".format,
    "memory_gib": "{:.1f} GiB".format,
    "elapsed": clock,
    "left": lambda seconds: f"{clock(seconds)} left",
}
COLORS = {"doing": "cyan", "step": "green", "sparkline": "cyan", "left": "cyan"}


class Console(Callback):
    """Draws the progress bar with messages above it, or prints plain lines without a terminal."""

    def __init__(self, run: Run) -> None:
        assert isinstance(run.screen, Screen)
        self.run, self.screen = run, run.screen
        self.losses: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.record: Record = {}
        self.pace = StepTimes(run.progress.step)
        self.epoch: float | None = None

    def on_start(self, run: Run) -> None:
        self.pace = StepTimes(run.progress.step)
        if run.progress.step >= run.config.training.steps:
            return
        run.beat.words = first_words(run)
        if self.screen.is_live:
            self._recall(run)
            self.screen.line = self.bar

    def on_step(self, run: Run) -> None:
        run.beat.words = {}
        self.screen.trains = True
        self.pace.step(run.progress.step)

    def on_log(self, run: Run, record: Record) -> None:
        self.record = record
        self.epoch = run.dataset.rows.epoch(run.progress.batch)
        self.losses.append((record["step"], record["loss"]))
        if not self.screen.is_live:
            steps, left = run.config.training.steps, self.pace.left(run.config.training.steps)
            more = f"  {duration(left)} left" if left else ""
            self.screen.print(f"step {record['step']}/{steps}  {line_of(record)}{more}")

    def on_validation(self, run: Run, record: Record) -> None:
        self.screen.print(f"step {record['step']}  {validation_line(record)}")

    def on_save(self, run: Run, saved: Outcome) -> None:
        if run.world.is_first:
            took, waited = f"{saved.seconds:.1f} s", f"{saved.waited:.1f} s"
            self.screen.print(f"saved {saved.path} in {took} (training waited {waited})")

    def on_rewind(self, run: Run) -> None:
        while self.losses and self.losses[-1][0] > run.progress.step:
            self.losses.pop()
        self.pace = StepTimes(run.progress.step)

    def on_message(self, run: Run, message: str) -> None:
        self.screen.print(message)

    def on_end(self, run: Run) -> None:
        run.beat.words, self.screen.trains = {}, False
        if self.screen.line == self.bar:  # leave the bar on screen; later output goes below it
            self.screen.line = self.screen.waiting
            self.screen.print(self.bar(self.screen.width, is_over=True))

    def bar(self, width: int, is_over: bool = False) -> Text:
        step, steps = self.run.progress.step, self.run.config.training.steps
        losses = [loss for _, loss in self.losses]
        numbers = {
            **self.record,
            "epoch": self.epoch,
            "loss": smoothed(losses),
            "elapsed": self.pace.elapsed,
            "left": None if is_over else self.pace.left(steps),
        }
        columns = {
            "doing": "" if is_over else self._doing(),
            "step": f"{step:,}/{steps:,}",
            "speed": speed(self.record, self.run.world.size > 1),
            "others": others(self.record).strip(),
        } | in_words(numbers)
        return draw(columns, step / max(1, steps), losses, width, self.screen.is_ascii)

    def _doing(self) -> str:
        """Returns what the run is waiting for if that takes long; it is shown in place of the
        bar."""
        beat, is_first = self.run.beat, not self.screen.trains
        takes_long = beat.seconds_here > PATIENCE_SECONDS and beat.phase not in USUAL
        return beat.doing if is_first or takes_long else ""

    def _recall(self, run: Run) -> None:
        """Fills the sparkline of a resumed run with the losses logged before."""
        if run.progress.step:
            with suppress(OSError):
                history = History(run.folder.metrics)
                history.read_on()
                recent = [one for one in history.recent if one["step"] <= run.progress.step]
                self.losses.extend((one["step"], float(one["loss"])) for one in recent)


class StepTimes:
    """The speed of training, measured from the end of the first step, which also compiles and
    connects."""

    def __init__(self, step: int) -> None:
        self._started = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._last = step

    def step(self, step: int) -> None:
        self._last = step
        self._first = self._first or (step, time.monotonic())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def left(self, steps: int) -> float | None:
        """Returns the seconds to the last step, including validation and saves; None until
        known."""
        if self._first is None or self._last <= self._first[0]:
            return None
        step, since = self._first
        return (steps - self._last) * (time.monotonic() - since) / (self._last - step)


def first_words(run: Run) -> dict[Phase, str]:
    """Returns what to show for each phase until the first step is done."""
    corpora = run.dataset.rows.corpora.values()
    is_made = any(isinstance(one, Corpus) and not one.is_complete for one in corpora)
    what = "compiling" if run.config.compile.enable is True else "running the first step"
    return {
        Phase.DATA: "tokenizing the first batch" if is_made else "waiting for the first batch",
        Phase.COMPUTING: what,
        Phase.REPORTING: what,
    }


def validation_line(record: Record) -> str:
    """Returns the loss of each validation set, with its perplexity where it has one."""
    names = [name.removeprefix(HELD_OUT) for name in record if name.startswith(HELD_OUT)]
    parts = []
    if "validation_loss" in record and len(names) > 1:
        parts.append(f"validation_loss {record['validation_loss']:.4f}")
    for name in names:
        perplexity = record.get(f"validation/{name}/perplexity")
        more = f" (perplexity {perplexity:,.2f})" if perplexity is not None else ""
        parts.append(f"validation_loss/{name} {record[HELD_OUT + name]:.4f}{more}")
    return "  ".join(parts)


def speed(record: Record, is_shared: bool = False) -> str:
    """Returns the throughput. `is_shared`: there are several devices, so say that it is per
    device."""
    for unit, short in (("tokens", "tok"), ("samples", "samples")):
        if f"{unit}_per_second" in record:
            device = "/device" if is_shared else ""
            return f"{record[f'{unit}_per_second']:,.0f} {short}/s{device}"
    return ""


def line_of(record: Record) -> str:
    """Returns a logged record as one line."""
    parts = [
        f"loss {record['loss']:.4f}",
        f"grad {record['grad_norm']:.2f}",
        f"lr {record['lr']:.2e}",
        speed(record, is_shared=True),
        *([f"MFU {record['mfu']:.1%}"] if record["mfu"] is not None else []),
        f"{record['memory_gib']:.2f} GiB",
    ]
    if record["data_wait"] > 0.01:
        parts.append(f"data wait {record['data_wait']:.0%}")
    return "  ".join(parts) + others(record)


def others(record: Record) -> str:
    """Returns the metrics logged by the objective and by losses inside the model, with their
    names."""
    shown = [name for name in record if name not in METRIC_NAMES and "sparsity/" not in name]
    return "".join(f"  {name} {record[name]:.4g}" for name in shown)


def in_words(numbers: Mapping[str, float | None]) -> dict[str, str]:
    """Returns what the line says of each number that it shows and that is known."""
    known = {name: one for name in FORMS if (one := numbers.get(name)) is not None}
    return {name: FORMS[name](one) for name, one in known.items()}


def draw(
    columns: Mapping[str, str],
    share: float,
    losses: Sequence[float],
    width: int,
    is_ascii: bool = False,
) -> Text:
    """Returns one line of `width` cells with the columns that fit, chosen in the order of `KEPT`.
    The bar, which shows the share of steps done, fills the remaining space; what the run is `doing`
    takes its place."""
    texts = {
        **columns,
        "bar": "" if columns.get("doing") else " " * SHORTEST_BAR,
        "sparkline": "" if is_ascii else sparkline(losses, SHORTEST_SPARKLINE),
    }
    chosen: dict[str, str] = {}
    room = width + GAP
    for name in KEPT:
        text = texts.get(name)
        if text and len(text) + GAP <= room:
            chosen[name] = text
            room -= len(text) + GAP
    more = min(room // 3, LONGEST_SPARKLINE - SHORTEST_SPARKLINE)
    if "sparkline" in chosen and "bar" in chosen and more > 0:
        longer = sparkline(losses, SHORTEST_SPARKLINE + more)
        room -= len(longer) - len(chosen["sparkline"])
        chosen["sparkline"] = longer
    drawn = Text(no_wrap=True, overflow="crop")
    for name in SHOWN:
        if name not in chosen:
            continue
        if drawn:
            drawn.append(" " * GAP)
        if name == "bar":
            drawn.append_text(_bar(min(1.0, share), SHORTEST_BAR + room, is_ascii))
        else:
            drawn.append(chosen[name], style=COLORS.get(name, ""))
    drawn.truncate(width)
    return drawn


def _bar(share: float, width: int, is_ascii: bool) -> Text:
    done = int(share * width)
    full, empty = ("#", "-") if is_ascii else ("━", "━")
    return Text.assemble((full * done, "magenta"), (empty * (width - done), "bright_black"))


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the values as at most `width` bars of eight heights, each the mean of neighboring
    values. Values that are not finite leave a gap."""
    if len(values) < 2:
        return ""
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    means = [
        math.fsum(values[a:b]) / (b - a)
        if all(map(math.isfinite, values[a:b])) else math.nan
        for a, b in pairwise(edges)
    ]  # fmt: skip
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(LEVELS) - 1
    return "".join(
        LEVELS[round((mean - low) / span * top) if span else 0] if math.isfinite(mean) else " "
        for mean in means
    )


def smoothed(losses: Sequence[float], weight: float = 0.9) -> float | None:
    """Returns an exponential moving average of the losses, with decay `weight`; if the last loss is
    not finite, returns that loss."""
    if not losses:
        return None
    if not math.isfinite(losses[-1]):
        return losses[-1]
    total = count = 0.0
    for loss in losses:
        if math.isfinite(loss):
            total, count = weight * total + loss, weight * count + 1.0
    return total / count
