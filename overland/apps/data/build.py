"""Builds a corpus ahead of training, with several processes, and optionally in parts: makes only
the shards that are missing, so that an interrupted build resumes. Finished shards are kept, and the
builder that finishes the last one marks the corpus complete."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.layout import CorpusLayout, read_layout
from overland.data.shard import open_shard, read_counts
from overland.data.shard_maker import ShardMaker, sweep
from overland.data.sources.source import Source
from overland.data.tokenizer import Tokenizer
from overland.data.workers import CannotStart, Workers
from overland.errors import DataError
from overland.files import replace_file, replaced
from overland.words import counted_words

FEW_SHARDS = 2  # the tokenizer's own threads finish these sooner than processes would start
HEADS_AT_ONCE = 16  # read in parallel: a shared file system takes a millisecond for each one
LOOK_SECONDS = 0.25


@dataclass
class Totals:
    """What a corpus, or a session's part of it, holds."""

    num_documents: int = 0
    num_tokens: int = 0
    num_bad: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many conversations were left out or truncated, by what was done."""


@dataclass
class BuildState(Totals):
    """The progress of a build; shards that existed before it began do not count."""

    num_shards: int = 0
    """The number of shards to make."""
    documents_per_shard: float = 0.0
    num_made: int = 0

    @property
    def share(self) -> float:
        """The fraction that is done, roughly, including shards in progress."""
        begun = self.num_documents / max(self.documents_per_shard, 1)
        return min(max(self.num_made, min(begun, self.num_made + 1)) / max(self.num_shards, 1), 1.0)


@dataclass(frozen=True)
class Built:
    layout: CorpusLayout
    made: BuildState
    """What was made in this session."""
    totals: Totals | None
    """None while other parts are missing."""

    @property
    def counted(self) -> Totals:
        """Counts of the corpus if it is complete, otherwise of what this session made."""
        return self.totals or self.made


def build(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer | None,
    *,
    processes: int,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[BuildState], None] = lambda progress: None,
) -> Built:
    """Makes the missing shards of one part (its number, and the number of parts)."""
    layout = read_layout(folder)
    totals = _read_totals(layout)
    if totals is not None and not _missing(layout, range(layout.num_shards)):
        return Built(layout, BuildState(), totals)
    layout.keep_path.touch()
    number, count = part
    mine = range(layout.num_shards * number // count, layout.num_shards * (number + 1) // count)
    missing = _missing(layout, mine)
    state = BuildState(num_shards=len(missing), documents_per_shard=layout.documents_per_shard)
    session = _Session(layout, source, tokenizer, state, progress)
    progress(state)
    while missing:
        before = len(missing)
        if len(missing) <= FEW_SHARDS and processes > 1:
            session.make_here(missing)
        else:
            session.make_in_processes(missing, processes)
        missing = _missing(layout, mine)
        if len(missing) >= before:
            raise DataError(
                f"{layout.shard_path(missing[0])} was deleted after it was made: make sure that "
                "nothing cleans up this folder, and build again"
            )
    return Built(layout, state, finish(layout))


@dataclass(frozen=True)
class _Session:
    """Makes shards, and reports the progress."""

    layout: CorpusLayout
    source: Source
    tokenizer: Tokenizer | None
    state: BuildState
    progress: Callable[[BuildState], None]

    def make_here(self, numbers: Sequence[int]) -> None:
        maker = ShardMaker(self.layout, self.source, self.tokenizer)

        def tick(documents: int, tokens: int) -> None:
            self.count(["progress", documents, tokens])
            self.progress(self.state)

        for number in numbers:
            while (info := maker.make(number, tick)) is None:
                if self.layout.shard_path(number).exists():
                    break
                time.sleep(LOOK_SECONDS)  # another builder is working on it
            else:
                self.count(["made", info.num_bad])
            self.progress(self.state)

    def make_in_processes(self, numbers: Sequence[int], processes: int) -> None:
        count = min(processes, len(numbers))
        try:
            workers = Workers(
                self.layout, self.source, self.tokenizer, count,
                threads=processes // count, numbers=numbers, reports=True,
            )  # fmt: skip
        except CannotStart:  # a source that only this process can read
            return self.make_here(numbers)
        idle: set[int] = set()
        try:
            while not workers.pids or not idle.issuperset(workers.pids):
                for pid, message in workers.messages(LOOK_SECONDS):
                    if message[0] == "idle":
                        idle.add(pid)
                    self.count(message)
                codes = workers.replace_dead()
                if codes and not workers.num_alive:
                    raise DataError(
                        f"the tokenizing processes keep dying (exit codes "
                        f"{', '.join(map(str, codes))}; -9 means killed, often because memory ran "
                        "out): try fewer --processes"
                    )
                self.progress(self.state)
        finally:
            workers.close()

    def count(self, message: Sequence[Any]) -> None:
        """Adds what a process reports, or raises the error that it had."""
        match message:
            case ["progress", documents, tokens]:
                self.state.num_documents += documents
                self.state.num_tokens += tokens
            case ["made", num_bad]:
                self.state.num_made += 1
                self.state.num_bad += num_bad
            case ["bad", _, text]:
                raise DataError(text)
            case ["refused", _, code, reason, file]:
                raise OSError(code, reason, file)
            case ["failed", number, trace]:
                raise RuntimeError(f"shard {number} could not be built\n{trace}")


def finish(layout: CorpusLayout) -> Totals | None:
    """Marks the corpus complete if all shards exist.

    Each builder publishes its shards before it checks, so the last one sees them all. Two builders
    that get here at the same time write the same files.
    """
    if len(layout.made()) < layout.num_shards:
        return None
    paths = map(layout.shard_path, range(layout.num_shards))
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        counts = np.asarray(list(pool.map(read_counts, paths)), np.int64)
    documents, tokens, bad = counts.sum(axis=0).tolist()
    totals = Totals(documents, tokens, bad, _left_out(layout))
    if not totals.num_documents:
        skipped = counted_words(totals.counts)
        skipped += [f"{totals.num_bad:,} empty or bad"] if totals.num_bad else []
        raise DataError(", ".join([f"{layout.source} is empty: it holds no documents", *skipped]))
    about: dict[str, Any] = {
        "documents": totals.num_documents, "tokens": totals.num_tokens, "bad": totals.num_bad
    }  # fmt: skip
    about |= {"counts": totals.counts} if totals.counts else {}
    replace_file(layout.folder / "totals.json", json.dumps(about), shared=True)
    # A sample of arrays counts as one, whatever its size.
    sizes = counts[:, [0, 0]] if layout.kind == "arrays" else counts[:, :2]
    with replaced(layout.sizes_path, shared=True) as file:
        np.save(file, sizes)
    sweep(layout)
    return totals


def _left_out(layout: CorpusLayout) -> dict[str, int]:
    """Counts conversations that were left out or truncated."""
    total: Counter[str] = Counter()
    for number in range(layout.num_shards) if layout.made_by is not None else ():
        total.update(open_shard(layout.shard_path(number)).info.counts)
    return dict(total)


def _read_totals(layout: CorpusLayout) -> Totals | None:
    if not layout.sizes_path.exists():
        return None
    about = json.loads((layout.folder / "totals.json").read_bytes())
    return Totals(about["documents"], about["tokens"], about["bad"], about.get("counts", {}))


def _missing(layout: CorpusLayout, numbers: Sequence[int]) -> list[int]:
    made = layout.made()
    return [number for number in numbers if number not in made]
