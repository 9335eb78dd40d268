"""Proves that ten killed sessions, on varying numbers of ranks, read what one unbroken run would.

The ranks are real processes that read their shares of the batches as a training run does; text is
tokenized in the background or pre-tokenized. All processes of a session are killed with SIGKILL at
some point; the next one resumes from an earlier step, as from a checkpoint. In the end, what was
consumed is compared with the plan read by one process, from another folder, without interruption.

python -m tests.prove_sessions docs/evidence/sessions.md   (resumes where it stopped)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from overland.apps.data.build import build
from overland.apps.data.origins import origins_of
from overland.apps.proofs.evidence import Evidence
from overland.config.schema import JobConfig
from overland.data.blocks import BlockStream
from overland.data.corpora import Preparer
from overland.data.corpus import Corpus
from overland.data.lanes import with_borders
from overland.data.order import Mixture
from overland.data.prepare import Dataset, training_data
from overland.data.sampler import Sampler

WORLD_SIZES = (1, 4, 3, 2, 8, 1, 3, 4, 2, 1)
BATCH_SIZE = 24  # a multiple of every world size
NUM_BATCHES = 60
WINDOW_DOCUMENTS = 64
SAVED_EVERY = 5
WEIGHTS = {"wide": 5.0, "narrow": 2.0, "rare": 1.0}
DOCUMENTS = {"many": (400, 120, 30), "few": (7, 3, 2)}
LIMIT_SECONDS = 600.0
PAUSE_SECONDS = 0.02  # per batch, like a step, so that a kill can fall between two
HEAD = """# Killed sessions read what one unbroken run reads

`python -m tests.prove_sessions docs/evidence/sessions.md`: ten sessions on 1, 4, 3, 2, 8, 1, 3, 4,
2 and 1 ranks, each killed with SIGKILL at a random moment (together with the background processes
that tokenize), each resuming from the last multiple of five batches. Three sources, 5 : 2 : 1.
Equal means: the same rows in the same global order as one uninterrupted process in another folder;
every document once per epoch of its source; the exact counts of the mixture at every step.

| corpora | packing | mixture | documents | sessions | epochs per source | verdict |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class SessionStory:
    corpora: str
    packing: str
    mixture: str
    documents: str

    @property
    def name(self) -> str:
        return " ".join(asdict(self).values())


STORIES = [
    SessionStory(*parts)
    for parts in product(
        ("built", "streamed"), ("pack", "overflow", "trunc", "best_fit"),
        ("sequences", "documents"), ("many", "few"),
    )
]  # fmt: skip


SHORT = [
    SessionStory("built", "overflow", "sequences", "few"),
    SessionStory("streamed", "best_fit", "documents", "many"),
]


@dataclass(frozen=True)
class SessionVerdict:
    story: SessionStory
    world_sizes: Sequence[int]
    epochs: list[int]
    """The number of complete passes over each source."""
    problems: list[str]

    def cells(self) -> list[str]:
        epochs = " / ".join(map(str, self.epochs))
        verdict = "; ".join(self.problems) or "equal"
        return [*asdict(self.story).values(), str(len(self.world_sizes)), epochs, verdict]


def main(page: Path) -> int:
    evidence = Evidence(page, HEAD, keys=(0, 1, 2, 3))
    failed = False
    for story in STORIES:
        if evidence.holds(*story.name.split()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            verdict = prove_sessions(story, Path(folder), seed=0)
        failed |= bool(verdict.problems)
        evidence.add(*verdict.cells())
        print(*verdict.cells(), sep="  ", flush=True)
    return int(failed)


def prove_sessions(
    story: SessionStory, folder: Path, seed: int, world_sizes: Sequence[int] = WORLD_SIZES
) -> SessionVerdict:
    """Runs the sessions of a story in its own folder, with random kills drawn from the seed."""
    draw = random.Random(seed)
    write_texts(story, folder / "text")
    config = config_of(story, folder, "killed")
    if story.corpora == "built":
        build_all(config)
    fed: dict[int, list[str]] = {}
    start = 0
    for number, world_size in enumerate(world_sizes):
        is_last = number == len(world_sizes) - 1
        share = (NUM_BATCHES - start) // (len(world_sizes) - number)
        target = NUM_BATCHES if is_last else start + draw.randint(0, 2 * share)
        logs = run_session(folder, config, number, world_size, start, target, draw)
        fed = {batch: rows for batch, rows in fed.items() if batch < start} | logs
        start = max(fed, default=-1) + 1
        if not is_last:
            start = start // SAVED_EVERY * SAVED_EVERY
    unbroken = open_rows(config_of(story, folder, "unbroken"))
    epochs, problems = check_documents(story, documents_begun(unbroken.rows))
    problems += [*compare_digests(unbroken.rows, fed), *check_mixture(story, unbroken.rows)]
    unbroken.close()
    return SessionVerdict(story, world_sizes, epochs, problems)


def write_texts(story: SessionStory, folder: Path) -> None:
    """Writes documents that all differ, from a few words to many."""
    for name, count in zip(WEIGHTS, DOCUMENTS[story.documents], strict=True):
        (folder / name).mkdir(parents=True)
        draw = random.Random(name)
        for first in range(0, count, 10):
            lines = [
                json.dumps({"text": f"{name} {i} " + " ".join(_words(draw))})
                for i in range(first, min(first + 10, count))
            ]
            (folder / name / f"{first:05d}.jsonl").write_text("\n".join(lines) + "\n")


def _words(draw: random.Random) -> list[str]:
    return [f"{draw.randint(0, 999)}" for _ in range(int(draw.expovariate(1 / 25)))]


def config_of(story: SessionStory, folder: Path, cache: str) -> dict[str, Any]:
    sources = {
        name: {"path": str(folder / "text" / name), "weight": weight}
        for name, weight in WEIGHTS.items()
    }
    return {
        "training": {"seq_len": 64, "global_batch_size": BATCH_SIZE},
        "data": {
            "folder": str(folder / "data"),
            "cache_folder": str(folder / cache),
            "sources": sources,
            "mixture": story.mixture,
            "packing": story.packing,
            "window_documents": WINDOW_DOCUMENTS,
            "vocab_size": 400,
            "cache_gb": 0.0001,  # 100 kB: shards come and go
            "tokenise_processes": 2,
        },
    }


def open_rows(
    config: dict[str, Any], tokenizes: bool = True, memory: Path | None = None
) -> Dataset:
    place = Preparer(tokenizes=tokenizes)
    job = JobConfig.model_validate(config)
    return training_data(job, BATCH_SIZE, None, place, memory, writes=tokenizes)


def build_all(config: dict[str, Any]) -> None:
    dataset = open_rows(config)
    for corpus in dataset.rows.corpora.values():
        assert isinstance(corpus, Corpus)
        build(corpus.folder, *corpus.parts(), processes=1)
    dataset.close()


def run_session(
    folder: Path,
    config: dict[str, Any],
    number: int,
    world_size: int,
    start: int,
    target: int,
    draw: random.Random,
) -> dict[int, list[str]]:
    """Runs ranks from `start` on, kills them when all have reached `target`, and returns what they
    read."""
    logs = [folder / f"session-{number}-rank-{rank}" for rank in range(world_size)]
    spec = json.dumps({"config": config, "world_size": world_size, "start": start})
    program = "from tests.prove_sessions import rank; rank()"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, spec, str(i), str(log)],
            cwd=Path(__file__).parents[1],
            start_new_session=True,  # background processes are killed with their rank
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for i, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while min(map(batches_in, logs)) < target - start:
            if time.monotonic() > deadline:
                raise TimeoutError(f"session {number} did not reach batch {target}")
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1 if target < NUM_BATCHES else 0)
    finally:
        draw.shuffle(ranks)
        for process in ranks:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shares = [read_log(log) for log in logs]
    common = min(map(len, shares))
    return {start + i: [row for share in shares for row in share[i]] for i in range(common)}


def rank() -> None:
    """Runs one rank, which reads its share of batch after batch and logs it."""
    spec, number, log = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    memory = log.parent / "memory"
    dataset = open_rows(spec["config"], tokenizes=number == 0, memory=memory)
    with log.open("w") as file:
        for batch in range(spec["start"], NUM_BATCHES):
            rows = digests_of(dataset.rows, batch, number, spec["world_size"])
            file.write(json.dumps(rows) + "\n")
            file.flush()
            time.sleep(PAUSE_SECONDS)
    time.sleep(LIMIT_SECONDS)  # until it is killed


def digests_of(rows: Sampler, batch: int, part: int = 0, num_parts: int = 1) -> list[str]:
    """Returns a digest of everything that the model would consume, row by row."""
    fields = with_borders(rows.read(batch, part, num_parts))
    return [
        hashlib.blake2b(b"".join(map(bytes, row)), digest_size=8).hexdigest()
        for row in zip(*fields, strict=True)
    ]


def batches_in(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def read_log(log: Path) -> list[list[str]]:
    lines = log.read_text().split("\n")[:-1] if log.exists() else []  # the last may be partial
    return [json.loads(line) for line in lines]


def compare_digests(rows: Sampler, fed: dict[int, list[str]]) -> Iterator[str]:
    """Checks that the global order is the same as in one unbroken run."""
    if list(fed) != list(range(NUM_BATCHES)):
        yield f"{len(fed)} batches were consumed, not {NUM_BATCHES}"
    for batch, found in fed.items():
        if found != digests_of(rows, batch):
            yield f"batch {batch} differs from that of an unbroken run"
            return


def check_mixture(story: SessionStory, rows: Sampler) -> Iterator[str]:
    """Checks the exact counts at every step: of rows, or of documents drawn before packing."""
    schedule = Mixture(list(WEIGHTS.values()))
    taken = np.zeros(len(WEIGHTS), np.int64)
    if story.mixture == "sequences":
        for batch in range(NUM_BATCHES):
            for part in origins_of(rows, batch):
                _, first = np.unique(part.row, return_index=True)
                np.add.at(taken, part.source[first], 1)
            if (schedule.before((batch + 1) * BATCH_SIZE) != taken).any():
                yield f"after batch {batch} the sources have contributed {taken.tolist()} rows"
                return
        return
    (lane,) = rows.lanes(0).lanes
    assert isinstance(lane, BlockStream)
    (last,), _ = lane.places([NUM_BATCHES * BATCH_SIZE - 1])
    windows = [lane.windows.open(window) for window in range(last + 1)]
    drawn = np.concatenate([window.source for window in windows])
    numbers = np.concatenate([window.number for window in windows])
    for source, count in enumerate(DOCUMENTS[story.documents]):
        had = np.cumsum(drawn == source)
        due = [schedule.before(turn)[source] for turn in range(1, len(drawn) + 1)]
        if (had != due).any():
            yield f"source {source} is drawn out of turn"
        mine = numbers[drawn == source]
        epochs = [mine[first : first + count] for first in range(0, len(mine), count)]
        if any(len(np.unique(epoch)) != len(epoch) for epoch in epochs):
            yield f"a document of source {source} is drawn twice in an epoch"


def documents_begun(rows: Sampler) -> Counter[tuple[int, int]]:
    """Returns how often each document of each source occurred."""
    begun: Counter[tuple[int, int]] = Counter()
    for batch in range(NUM_BATCHES):
        for part in origins_of(rows, batch):
            first = part.start == 0
            begun.update(zip(part.source[first].tolist(), part.number[first].tolist(), strict=True))
    return begun


def check_documents(
    story: SessionStory, begun: Counter[tuple[int, int]]
) -> tuple[list[int], list[str]]:
    """Returns the number of whole epochs of each source, and problems if a document does not occur
    once in each."""
    epochs, problems = [], []
    for source, (name, count) in enumerate(zip(WEIGHTS, DOCUMENTS[story.documents], strict=True)):
        times = [n for (which, _), n in begun.items() if which == source]
        epochs.append(min(times) if len(times) == count else 0)
        # In a mixture of documents, windows ignore epoch boundaries and are shuffled.
        per_window = WINDOW_DOCUMENTS * WEIGHTS[name] / sum(WEIGHTS.values())
        slack = 1 if story.mixture == "sequences" else 1 + math.ceil(per_window / count)
        if len(times) > count or max(times, default=0) > epochs[-1] + slack:
            problems.append(f"documents of {name} occur {epochs[-1]} to {max(times)} times")
    return epochs, problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
