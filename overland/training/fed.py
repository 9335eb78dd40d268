"""What the model was fed, written down: a digest per row, from all ranks into one file.

Digests are taken on the device and read when the loop waits for it anyway, at a log or a save. A
checkpoint is never newer than the ledger: what it was trained on is written before it is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from overland.data.batch import Batch
from overland.data.digest import digests
from overland.data.ledger import Ledger

if TYPE_CHECKING:
    from overland.training.run import Run


class FedRows:
    def __init__(self, run: Run) -> None:
        self._group = run.mesh.axis("dp").get_group()
        self._ledger = Ledger(run.folder.ledger) if run.world.is_first else None
        self._pending: list[torch.Tensor] = []
        self.start_at(run.progress.step)

    def start_at(self, step: int) -> None:
        """The model is that of `step`: what was fed after it is not part of it."""
        self.write()
        if self._ledger is not None:
            self._ledger.mark(step)

    def note(self, batch: Batch, step: int, number: int) -> None:
        """This rank's rows of a global batch, given to the model in a step."""
        if not self._pending:
            self._first = (step, number)
        self._pending.append(digests(batch))

    def write(self) -> None:
        """All ranks together; waits for the device."""
        if not self._pending:
            return
        mine = torch.stack(self._pending)
        shares = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(shares, mine, group=self._group)
        self._pending = []
        if self._ledger is not None:
            self._ledger.add(*self._first, torch.cat(shares, dim=1).cpu().numpy())
