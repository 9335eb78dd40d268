"""Writes the ledger of what the model has consumed: a digest per row, from all ranks into one file.

Digests are computed on the device and read when the loop waits for it anyway, at a log or a save.
A checkpoint is never newer than the ledger: the rows it was trained on are on disk before it is
saved. Ranks that must receive the same rows, because they share layers, matrices or sequences of
the model, compare their digests.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overland.data.batch import Batch, digests
from overland.data.ledger import Ledger
from overland.errors import TrainingError
from overland.parallel.comm import from_first_rank
from overland.training.run import Run


class LedgerWriter:
    def __init__(self, run: Run) -> None:
        self._run, self._mesh = run, run.mesh
        self._ledger = None
        if run.world.is_first:
            self._ledger = Ledger(run.folder.ledger, run.folder.fallback_ledger)
        self._problem = ""
        """Why the ledger is not up to date."""
        self._pending: list[torch.Tensor] = []
        if self._ledger is not None:
            if self._ledger.is_new and run.resumed_own:  # it was lost, and must not look complete
                self._ledger.mark(0, 0)
            self._note(self._ledger.mark(run.progress.step, run.progress.batch))

    def start_again(self, step: int, batch: int) -> None:
        """Records that the run went back to a step and leaves out the batches before `batch`."""
        self.write()
        if self._ledger is not None:
            self._note(self._ledger.mark(step, batch, leaves_out=True))

    def note(self, batch: Batch, step: int, number: int) -> None:
        """Records this rank's rows of a global batch, which the model consumes in a step."""
        if not self._pending:
            self._first = (step, number)
        self._pending.append(digests(batch))

    def write(self) -> None:
        """Writes what was recorded. Called by all ranks together; waits for the device. What does
        not fit on a full disk is written later."""
        if self._pending:
            mine = torch.stack(self._pending)
            self._pending = []
            self._compare(mine)
            group = self._mesh.axis("dp").get_group()
            shares = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(shares, mine, group=group)
            if self._ledger is not None:
                rows = torch.cat(shares, dim=1).cpu().numpy()
                self._note(self._ledger.add(*self._first, rows))

    def sync(self, or_elsewhere: bool = False) -> str:
        """Syncs everything to disk, or to the fallback folder; returns, on all ranks, what prevents
        that, or an empty string."""
        self.write()
        if self._ledger is not None:
            self._problem = self._ledger.sync()
            if self._problem and or_elsewhere:
                self._problem = self._ledger.sync_elsewhere()
        return from_first_rank(self._problem)

    def end(self) -> None:
        """Reports what is missing."""
        if self._problem:
            self._run.call(
                "on_message", f"{self._problem}: `overland prove data` will miss some steps"
            )

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            words = f"{problem}; the run continues, but cannot save until this is fixed"
            self._run.call("on_message", words)
        self._problem = problem

    def _compare(self, mine: torch.Tensor) -> None:
        """Raises if ranks with the same share of the batch were given different rows."""
        if self._mesh.dp_size == dist.get_world_size():
            return
        total = mine.sum()
        lowest = torch.iinfo(torch.int64).min
        seen = torch.full((2, self._mesh.dp_size), lowest, device=mine.device)
        seen[:, self._mesh.dp_rank] = torch.stack([total, ~total])
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        wrong = (seen[0] != ~seen[1]).nonzero().flatten().tolist()
        if wrong:
            first, last = self._first[0], self._first[0] + len(mine) - 1
            raise TrainingError(
                f"ranks that share the rows of data-parallel rank {wrong[0]} got different rows in "
                f"steps {first} to {last}: their copies of the data differ"
            )
