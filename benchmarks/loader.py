"""The loader's speed, and what a resume far into a plan costs.

    python benchmarks/loader.py

Tokens per second of one process, warm, compared with the simplest possible loader: rows cut at
random places out of one memory-mapped array, without documents, epochs or order (as nanoGPT's
get_batch does). Then a resume at step 10⁶ of a plan with 10⁵ windows, in time and memory, with and
without the counts that a run folder keeps.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from overland.data.batch import load_batch
from overland.data.corpus import Corpus
from overland.data.layout import lay_out
from overland.data.plan import Plan, PlannedSource, Segment
from overland.data.sampler import Sampler
from overland.data.sources.source import Source
from overland.data.windows import Reading

VOCABULARY = 50_000
ROWS = 32
REPEATS = 7


class Documents(Source):
    """Random ids in documents of exponentially spread lengths, as web pages have."""

    kind = "tokens"

    def __init__(self, count: int, mean: int, per_chunk: int) -> None:
        self.count, self.mean, self.per_chunk = count, mean, per_chunk

    def chunks(self) -> list[str]:
        return [str(i) for i in range(0, self.count, self.per_chunk)]

    def num_documents(self, chunk: str) -> int:
        return min(self.per_chunk, self.count - int(chunk))

    def read(self, chunk: str) -> Iterator[np.ndarray]:
        draw = np.random.default_rng(int(chunk))
        for _ in range(self.num_documents(chunk)):
            length = 1 + int(draw.exponential(self.mean))
            yield draw.integers(0, VOCABULARY, length)


def make(root: Path, source: Documents, shard_documents: int) -> Corpus:
    folder = lay_out("tokens", source, None, root, shard_documents=shard_documents,
                     vocab_size=VOCABULARY)  # fmt: skip
    return Corpus(folder, lambda: source, wait=False)


def mark_built(corpus: Corpus, sizes: np.ndarray) -> None:
    np.save(corpus.layout.sizes_path, sizes)


def rows_of(
    corpus: Corpus, seq_len: int, batch: int, window: int, memory: Path | None, **how: object
) -> Sampler:
    segment = Segment(0, batch, seq_len, {"tokens": 1.0}, **how)  # type: ignore[arg-type]
    plan = Plan(0, window, "sequences", {"tokens": PlannedSource(corpus.fingerprint)}, (segment,))
    return Sampler(plan, {"tokens": corpus}, Reading(0, True, window, memory, True))


def best_of(work: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def speed(root: Path) -> None:
    print("Loader, one process, warm: M tokens/s (ratio to the simplest loader)\n")
    head = f"{'documents of':>12} {'sequence':>8} {'packing':>9}"
    print(f"{head}   {'without borders':>16}   {'with borders':>16}")
    for mean in (300, 1000, 3000):
        corpus = make(root / str(mean), Documents(20_000, mean, 1000), 4000)
        infos = [corpus.shard(number).info for number in range(corpus.num_shards)]
        mark_built(corpus, np.array([[info.num_documents, info.num_tokens] for info in infos]))
        whole = np.concatenate([corpus.shard(n).tokens for n in range(corpus.num_shards)])
        for seq_len in (2048, 8192):
            batches = min(40, len(whole) // (ROWS * seq_len))
            count = batches * ROWS * seq_len

            def simplest(seq_len: int = seq_len, batches: int = batches) -> None:
                for _ in range(batches):
                    places = torch.randint(len(whole) - seq_len - 1, (ROWS,)).tolist()  # noqa: B023
                    for shift in (0, 1):
                        cut = (whole[i + shift : i + shift + seq_len] for i in places)  # noqa: B023
                        torch.stack([torch.from_numpy(row.astype(np.int64)) for row in cut])

            peer = count / best_of(simplest)
            for packing in ("pack", "best_fit"):
                cells = []
                for mask in (False, True):
                    rows = rows_of(
                        corpus, seq_len, ROWS, 20_000, None, packing=packing, document_mask=mask
                    )
                    load_batch(rows, 0)

                    def read(rows: Sampler = rows, batches: int = batches) -> None:
                        for number in range(batches):
                            load_batch(rows, number)

                    rate = count / best_of(read)
                    cells.append(f"{rate / 1e6:7.0f} ({rate / peer:4.2f} ×)")
                print(f"{mean:>12} {seq_len:>8} {packing:>9}   {cells[0]:>16}   {cells[1]:>16}")


def resume(root: Path) -> None:
    windows, step = 100_000, 1_000_000
    corpus = make(root, Documents(windows * 8, 100, 8), 8)
    assert corpus.num_shards == windows
    first = corpus.shard(0)
    size = [first.info.num_documents, first.info.num_tokens]
    for number in range(1, windows):  # 10⁵ files; all hold the same, which costs the reader nothing
        path = corpus.layout.shard_path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first.path, path)
    mark_built(corpus, np.tile(size, (windows, 1)))
    per_window = -(-(size[1] - 1) // 64)
    batch = windows * per_window // (step + 1)
    batch = max(1, batch)
    at = min(step, windows * per_window // batch - 1)
    print(f"\nResume at step {at:,} of a plan with {windows:,} windows, batches of {batch} rows")
    for name, memory in (("first, counting", root / "memory"), ("with counts", root / "memory")):
        before, started = memory_in_use(), time.perf_counter()
        again = Corpus(corpus.folder)
        rows = rows_of(again, 64, batch, 8, memory)
        load_batch(rows, at)
        seconds = time.perf_counter() - started
        grown = (memory_in_use() - before) / 2**20
        print(f"  {name:<16} {seconds * 1e3:7.1f} ms   {grown:6.1f} MiB more")


def memory_in_use() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        speed(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        resume(Path(folder))
