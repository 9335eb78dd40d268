"""Proves that the model consumed what the plan says, by replaying the plan against the ledger.

The ledger has digests of the rows that the model actually consumed, step by step, over all sessions
of a run. The replay creates the same rows from the corpora again, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.apps.data.origins import origins_of
from overland.apps.dataset import planned_data
from overland.apps.ledger import Fed, FedSteps, read_ledger
from overland.checkpoint.folder import committed, step_of
from overland.checks.model import with_custom_import
from overland.config.load import load_config
from overland.data.batch import load_batch
from overland.data.blocks import BlockStream
from overland.data.corpus import Corpus
from overland.data.layout import source_changes
from overland.data.plan import ChangedSource
from overland.data.prepare import Dataset
from overland.data.windows import MixedWindows
from overland.errors import DataError
from overland.run_folder import CONFIG, RunFolder
from overland.training.saving import digests

Progress = Callable[[int, int], None]
Array = npt.NDArray[np.int64]
Matches = npt.NDArray[np.bool_]


@dataclass
class SourceCount:
    """Planned and consumed tokens of a source, and the documents that begin in them."""

    planned: int = 0
    consumed: int = 0
    repeated: int = 0
    skipped: int = 0
    documents: int = 0
    turns: int = 0
    """What weights count: rows in a mixture of sequences; documents drawn into windows so far
    in a mixture of documents."""


@dataclass
class DataVerdict:
    fingerprint: str
    mixture: str
    first_step: int
    last_step: int
    rows: int = 0
    wrong_rows: int = 0
    first_wrong: str | None = None
    missing_steps: list[int] = field(default_factory=list)
    left_out: int = 0
    """Batches that the spike guard skipped on purpose."""
    unit: str = "tokens"
    """What is counted: tokens, or samples that are arrays."""
    sources: dict[str, SourceCount] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        counts = self.sources.values()
        amiss = any(count.repeated or count.skipped for count in counts)
        return self.rows > 0 and not (self.first_wrong or self.missing_steps or amiss)

    def to_json(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}

    def page(self) -> Iterator[str]:
        """Yields the verdict as lines for a terminal."""
        width = max(len("source"), *map(len, self.sources))
        head = "".join(f"{name:>16}" for name in ("planned", "consumed", "repeated", "skipped"))
        turns = "rows" if self.mixture == "sequences" else "drawn"
        yield f"{'source':<{width}}{head}{'documents':>12}{turns:>12}"
        for name, count in self.sources.items():
            tokens = (count.planned, count.consumed, count.repeated, count.skipped)
            cells = "".join(f"{number:>16,}" for number in tokens)
            yield f"{name:<{width}}{cells}{count.documents:>12,}{count.turns:>12,}"
        counted = (
            "rows" if self.mixture == "sequences" else "documents drawn into the windows so far"
        )
        yield f"({self.unit}; documents that begin in them; weights refer to {counted})"
        yield ""
        if self.missing_steps:
            first, number = self.missing_steps[0], len(self.missing_steps)
            yield f"Missing from the ledger: {number:,} steps, the first of them {first:,}."
        if self.left_out:
            yield f"{self.left_out:,} batches were skipped by the spike guard."
        if self.first_wrong:
            yield f"{self.wrong_rows:,} of {self.rows:,} rows differ; first {self.first_wrong}."
        if self.holds:
            yield (
                f"Steps {self.first_step:,} to {self.last_step:,} consumed exactly what was "
                f"planned: {self.rows:,} rows, none repeated, none skipped."
            )


def prove_data(
    run: Path,
    first_step: int | None = None,
    last_step: int | None = None,
    progress: Progress = lambda done, total: None,
) -> DataVerdict:
    """Replays all or some steps of a run."""
    if not (run / CONFIG).is_file():
        raise DataError(f"{run} is not a run folder: it has no config.toml")
    config = with_custom_import(load_config(str(run / CONFIG), env={}))
    folder = RunFolder(config.having({"job.dump_folder": str(run)}))  # it may have been moved
    history = read_ledger(folder.ledger)
    dataset = planned_data(config, run)
    check_sources(dataset)
    first = history.start + 1 if first_step is None else first_step
    saved = committed(folder.checkpoints)  # none may be newer than the ledger
    newest = max(history.last, step_of(saved[-1]) if saved else 0)
    last = newest if last_step is None else last_step
    plan = dataset.plan
    unit = "tokens" if dataset.rows.arrays is None else "samples"
    verdict = DataVerdict(plan.fingerprint, plan.mixture, first, last, unit=unit)
    replay = Replay(dataset, history, verdict)
    try:
        return replay.run(progress)
    finally:
        dataset.close()


class Replay:
    """Replays the steps once, comparing and counting."""

    def __init__(self, dataset: Dataset, history: FedSteps, verdict: DataVerdict) -> None:
        self.dataset, self.history, self.verdict = dataset, history, verdict
        self.names = list(dataset.plan.sources)
        verdict.sources = {name: SourceCount() for name in self.names}
        self.seen: set[int] = set()
        self.begun: list[Array] = []
        """Documents that have begun, as source × 2⁵⁶ + number."""

    def run(self, progress: Progress) -> DataVerdict:
        verdict, fed = self.verdict, self.history.fed
        wanted = range(verdict.first_step, verdict.last_step + 1)
        verdict.missing_steps = [step for step in wanted if step not in fed]
        steps = [fed[step] for step in wanted if step in fed]
        if not steps:
            raise DataError(
                f"the ledger has no record of steps {verdict.first_step} to {verdict.last_step}"
            )
        for done, step in enumerate(steps):
            progress(done, len(steps))
            self._check_place(step)
            self._count(step.batch, self._compare(step))
            self.seen.add(step.batch)
        self._check_epochs()
        self._count_drawn(steps[-1].batch)
        progress(len(steps), len(steps))
        return verdict

    def _check_place(self, step: Fed) -> None:
        """Checks that a step consumed the batch after that of the previous step, apart from batches
        that the spike guard skipped."""
        before = self.history.fed.get(step.step - 1)
        mark = self.history.marks.get(step.step - 1)
        if before is not None:
            expected = before.batch + 1
        elif step.step - 1 == self.history.start and mark is not None:
            expected = mark.batch
        else:
            return  # the previous step is missing, which is reported
        if step.batch > expected and mark is not None and mark.leaves_out:
            self.verdict.left_out += step.batch - expected
        elif step.batch != expected:
            what = f"step {step.step} consumed batch {step.batch}, but {expected} was planned"
            self._wrong(what, 0)
            for batch in range(expected, step.batch):
                size = self.dataset.plan.segment(batch).global_batch_size
                self._count(batch, np.zeros(size, bool))

    def _compare(self, step: Fed) -> Matches:
        """Returns which rows of a step were as planned."""
        planned = digests(load_batch(self.dataset.rows, step.batch)).numpy()
        self.verdict.rows += len(planned)
        if len(planned) != len(step.digests):
            what = f"step {step.step}: {len(step.digests)} rows consumed, {len(planned)} planned"
            self._wrong(what, len(planned))
            return np.zeros(len(planned), bool)
        good: Matches = planned == step.digests
        if not good.all():
            row = int(np.argmin(good))
            what = f"step {step.step}, row {row}: not as planned for batch {step.batch}"
            found = np.flatnonzero(planned == step.digests[row])
            what += f", but row {int(found[0])} of it" if len(found) else ""
            self._wrong(what, int((~good).sum()))
        return good

    def _count(self, batch: int, good: Matches) -> None:
        for origins in origins_of(self.dataset.rows, batch):
            begins = origins.start == 0
            if batch not in self.seen:
                self.begun.append((origins.source[begins] << 56) + origins.number[begins])
            for number in np.unique(origins.source).tolist():
                mine = origins.source == number
                tokens = int(origins.length[mine].sum())
                consumed = int(origins.length[mine & good[origins.row]].sum())
                count = self.verdict.sources[self.names[number]]
                if batch in self.seen:
                    count.repeated += consumed
                    continue
                count.planned += tokens
                count.consumed += consumed
                count.skipped += tokens - consumed
                count.documents += int((begins & mine).sum())
                if self.dataset.plan.mixture == "sequences":
                    count.turns += len(np.unique(origins.row[mine]))

    def _count_drawn(self, batch: int) -> None:
        """Counts, for a mixture of documents, those of all windows up to that of the last row."""
        lanes = self.dataset.rows.lanes(batch)
        (lane, *_) = lanes.lanes
        if not isinstance(lane, BlockStream) or not isinstance(lane.windows, MixedWindows):
            return
        (window,), _ = lane.places([lanes.read_until(batch + 1)[0] - 1])
        drawn = lane.windows.taken(lane.window_behind(int(window)) + 1)
        for name, count in zip(self.names, drawn, strict=True):
            self.verdict.sources[name].turns = count

    def _check_epochs(self) -> None:
        """Checks that the plan itself uses every document equally often, or once more. In a
        mixture of documents, a window may contain the end of one epoch and the start of another."""
        whole = self.verdict.first_step == 1 and not self.verdict.left_out
        if self.dataset.plan.mixture != "sequences" or not whole:
            return
        documents, times = np.unique(np.concatenate(self.begun), return_counts=True)
        for number, name in enumerate(self.names):
            mine = times[documents >> 56 == number]
            if len(mine) and mine.max() > mine.min() + 1:
                self._wrong(f"documents of {name} occur {mine.min()} to {mine.max()} times", 0)

    def _wrong(self, what: str, rows: int) -> None:
        self.verdict.first_wrong = self.verdict.first_wrong or what
        self.verdict.wrong_rows += rows


def check_sources(dataset: Dataset) -> None:
    """Checks that the corpora are still those of the run; a complete one no longer needs its
    source."""
    for name, corpus in dataset.rows.corpora.items():
        if corpus.fingerprint != dataset.plan.sources[name].fingerprint:
            raise ChangedSource(name)
        if not isinstance(corpus, Corpus):
            continue
        if corpus.is_complete or corpus.open_source is None:
            continue
        try:
            source = corpus.open_source()
        except DataError:  # the source is not available here, but its corpus is
            continue
        if changed := source_changes(corpus.folder, source):
            raise ChangedSource(name, tuple(changed))
