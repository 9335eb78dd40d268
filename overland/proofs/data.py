"""Was the model fed what the plan says? The plan is replayed and compared with the ledger.

The ledger holds digests of the rows that really were given to the model, step by step, over all
sessions of a run. The replay makes the same rows from the corpora again, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overland.checkpoint.folder import committed, step_of
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.data.corpus import Corpus, changes
from overland.data.digest import digests
from overland.data.errors import DataError
from overland.data.ledger import Fed, read_ledger
from overland.data.loader import load
from overland.data.plan import ChangedSource
from overland.data.prepare import Dataset, planned_data
from overland.models.registry import model_config
from overland.training.folder import RunFolder

Progress = Callable[[int, int], None]


@dataclass
class SourceCount:
    """Tokens that the model was to be given, and was; documents that begin in them."""

    planned: int = 0
    consumed: int = 0
    repeated: int = 0
    skipped: int = 0
    documents: int = 0


@dataclass
class Verdict:
    fingerprint: str
    first_step: int
    last_step: int
    rows: int = 0
    wrong_rows: int = 0
    first_wrong: str | None = None
    missing_steps: list[int] = field(default_factory=list)
    left_out: int = 0
    """Batches that the spike guard left out on purpose."""
    sources: dict[str, SourceCount] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        counts = self.sources.values()
        amiss = any(count.repeated or count.skipped for count in counts)
        return self.rows > 0 and not (self.wrong_rows or self.missing_steps or amiss)

    def to_json(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}

    def page(self) -> Iterator[str]:
        """The verdict for a terminal."""
        width = max(len("source"), *map(len, self.sources))
        head = "".join(f"{name:>16}" for name in ("planned", "consumed", "repeated", "skipped"))
        yield f"{'source':<{width}}{head}{'documents':>12}"
        for name, count in self.sources.items():
            tokens = (count.planned, count.consumed, count.repeated, count.skipped)
            cells = "".join(f"{number:>16,}" for number in tokens)
            yield f"{name:<{width}}{cells}{count.documents:>12,}"
        yield "(tokens, and documents that begin in them)"
        yield ""
        if self.missing_steps:
            first, number = self.missing_steps[0], len(self.missing_steps)
            yield f"Not in the ledger: {number:,} steps, the first of them {first:,}."
        if self.left_out:
            yield f"{self.left_out:,} batches were left out by the spike guard."
        if self.first_wrong:
            yield f"{self.wrong_rows:,} of {self.rows:,} rows differ; first {self.first_wrong}."
        if self.holds:
            yield (
                f"Steps {self.first_step:,} to {self.last_step:,} were fed exactly what the plan "
                f"says: {self.rows:,} rows, none repeated, none skipped."
            )


def prove_data(
    run: Path,
    first_step: int | None = None,
    last_step: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Verdict:
    """Replays the steps of a run, or some of them."""
    config = load_config(str(run / "config.toml"), env={}).config
    folder = RunFolder.of(config.model_copy(update={"job": _here(config, run)}))
    history = read_ledger(folder.ledger)
    dataset = planned_data(config, model_config(config.model).vocab_size, run)
    check_sources(dataset)
    first = history.start + 1 if first_step is None else first_step
    last = max(history.last, _last_saved(folder)) if last_step is None else last_step
    verdict = Verdict(dataset.plan.fingerprint, first, last)
    verdict.sources = {name: SourceCount() for name in dataset.plan.sources}
    steps = [history.fed[step] for step in range(first, last + 1) if step in history.fed]
    verdict.missing_steps = [step for step in range(first, last + 1) if step not in history.fed]
    if not steps:
        raise DataError(f"{folder.ledger} has no record of steps {first} to {last}")
    seen: set[int] = set()
    for done, step in enumerate(steps):
        progress(done, len(steps))
        good = _compare(dataset, step, verdict)
        _count(dataset, step.batch, good, step.batch in seen, verdict)
        seen.add(step.batch)
    verdict.left_out = max(seen) - min(seen) + 1 - len(seen)
    progress(len(steps), len(steps))
    dataset.close()
    return verdict


def check_sources(dataset: Dataset) -> None:
    """That the corpora are still those of the run; one that is built needs its source no more."""
    for name, corpus in dataset.rows.corpora.items():
        if corpus.fingerprint != dataset.plan.sources[name].fingerprint:
            raise ChangedSource(name)
        if isinstance(corpus, Corpus) and not corpus.is_complete and corpus.open_source:
            if changed := changes(corpus.folder, corpus.open_source()):
                raise ChangedSource(name, tuple(changed))


def _last_saved(folder: RunFolder) -> int:
    """No checkpoint may be newer than the ledger."""
    saved = committed(folder.checkpoints)
    return step_of(saved[-1]) if saved else 0


def _here(config: JobConfig, run: Path) -> Any:
    """A run folder may have been moved since."""
    return config.job.model_copy(update={"dump_folder": str(run)})


def _compare(dataset: Dataset, step: Fed, verdict: Verdict) -> np.ndarray[Any, Any]:
    """Which rows of a step were as planned."""
    planned = digests(load(dataset.rows, step.batch)).numpy()
    verdict.rows += len(planned)
    if len(planned) != len(step.digests):
        what = f"step {step.step}: {len(step.digests)} rows were fed, {len(planned)} planned"
        verdict.first_wrong = verdict.first_wrong or what
        verdict.wrong_rows += len(planned)
        return np.zeros(len(planned), bool)
    good = planned == step.digests
    if not good.all():
        row = int(np.argmin(good))
        what = f"step {step.step}, row {row}: not what batch {step.batch} of the plan holds"
        found = np.flatnonzero(planned == step.digests[row])
        if len(found):
            what += f", but its row {int(found[0])}"
        verdict.first_wrong = verdict.first_wrong or what
        verdict.wrong_rows += int((~good).sum())
    return good


def _count(
    dataset: Dataset, batch: int, good: np.ndarray[Any, Any], again: bool, verdict: Verdict
) -> None:
    names = list(dataset.plan.sources)
    for origins in dataset.rows.origins(batch):
        for number in np.unique(origins.source).tolist():
            mine = origins.source == number
            tokens = int(origins.length[mine].sum())
            consumed = int(origins.length[mine & good[origins.row]].sum())
            count = verdict.sources[names[number]]
            if again:
                count.repeated += consumed
                continue
            count.planned += tokens
            count.consumed += consumed
            count.skipped += tokens - consumed
            count.documents += int((origins.start[mine] == 0).sum())
