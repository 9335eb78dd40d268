"""The reference model's log-probabilities of pairs of answers, computed once before training
(`preference.reference = "precomputed"`).

The initial model makes one pass over the training and validation data, and its log-probabilities
are kept in the run folder, where a resumed run, whose weights have changed, finds them. Pairs are
identified by the digest of their tokens, so layout, order, padding and batch size do not matter.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from overland.data.batch import Batch, make_batch
from overland.data.prepare import Dataset
from overland.data.wanted import sources_of
from overland.errors import CheckpointError, DataError
from overland.files import replace_file
from overland.objectives.preference import REFERENCE
from overland.parallel.comm import all_of, first_problem, from_first_rank
from overland.parallel.context import share_of_rows
from overland.parallel.sharding import reshard
from overland.training.run import Run
from overland.training.saving import digests
from overland.world.heartbeat import Phase

FILE = "reference.npz"


class Reference:
    """Log-probabilities of the chosen and the rejected answer of each row, by its digest."""

    def __init__(self, rows: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        order = np.argsort(rows)
        self.rows, self.values = rows[order], values[order]

    def added_to(self, batch: Batch) -> Batch:
        """Returns the batch with the reference's log-probabilities of its rows as a field."""
        wanted = digests_of_pairs(batch).cpu().numpy()
        place = np.searchsorted(self.rows, wanted).clip(max=len(self.rows) - 1)
        unknown = self.rows[place] != wanted
        if (weight_B := batch.get("weight_B")) is not None:  # rows after the last epoch have none
            unknown &= weight_B.cpu().numpy() != 0
        if unknown.any():
            raise DataError(
                "the reference was not computed for some pairs: they were added to the data since "
                "then, or a mixture now runs for more steps; set preference.reference to copy or "
                "adapter_off, or start a new run with --resume none"
            )
        values = torch.from_numpy(self.values[place]).to(batch.device)
        return batch.replace(**{REFERENCE: values})


def digests_of_pairs(batch: Batch) -> Tensor:
    """Returns a digest per row, of its pair alone: the padding of rows varies, since they may be
    cut to the longest in their batch (`data.group_by_length`)."""
    is_pair = batch["answers_BS"] != 0
    names = ("tokens_BS", "labels_BS", "weights_BS", "answers_BS")
    return digests(Batch({name: batch[name].where(is_pair, 0) for name in names}))


def reference_for(run: Run, report: Callable[[str], None]) -> Reference:
    """Reads the reference that the run has computed, or computes it. Called by all ranks
    together."""
    path = run.folder.data / FILE
    kept, problem = read_reference(path)
    problem = first_problem(problem)  # of any rank, so that all do the same
    if from_first_rank(run.resumed_own) and kept is not None and not problem:
        return kept
    if run.progress.step:
        raise CheckpointError(
            f"{path} is {problem or 'of another run'}, and cannot be computed again since the "
            "weights have changed: restore it, set preference.reference to copy or adapter_off, or "
            "start a new run with --resume none"
        )
    run.beat.enter(Phase.VALIDATING)
    found: dict[int, tuple[float, float]] = {}
    for dataset in (run.dataset, *run.validation_sets):
        for batch in _once_over(run, dataset):
            found |= _looked_at(run, batch)
    report(f"computed the reference for {len(found):,} rows (preference.reference)")
    rows = np.fromiter(found, np.int64, len(found))
    values = np.array(list(found.values())).reshape(-1, 2)
    if run.world.is_first:
        run.folder.data.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, rows=rows, values=values)
        replace_file(path, buffer.getvalue())
    return Reference(rows, values)


def read_reference(path: Path) -> tuple[Reference | None, str]:
    """Reads what the run has computed, or says what is wrong with the file."""
    try:
        with zipfile.ZipFile(path) as file:  # it has a checksum of each array
            if file.testzip() is not None:
                return None, "damaged"
        with np.load(path, allow_pickle=False) as kept:
            return Reference(kept["rows"], kept["values"]), ""
    except FileNotFoundError:
        return None, "missing"
    except Exception:  # a flipped bit can look like another version, encryption, anything
        return None, "damaged"


def _once_over(run: Run, dataset: Dataset) -> Iterator[Batch]:
    """Yields this rank's share of each batch that holds new rows for any rank. A single source is
    read completely, even if this session has fewer steps, since the next may have more. A mixture
    of several has no common end."""
    seen: set[int] = set()
    sources = [one for one in sources_of(run.config).values() if one.asked.weight]
    is_mixture = dataset is run.dataset and len(sources) > 1
    count = run.config.training.steps if is_mixture else dataset.rows.num_batches()
    for number in range(count):
        batch = make_batch(dataset.rows.read(number, run.mesh.dp_rank, run.mesh.dp_size))
        own = digests_of_pairs(batch).tolist()
        new: set[int] = set().union(*all_of(set(own) - seen))
        if new:
            seen |= new
            yield batch.to(run.device)


@torch.no_grad()
def _looked_at(run: Run, batch: Batch) -> dict[int, tuple[float, float]]:
    """Returns the current model's log-probabilities for a batch: those of all ranks, on every
    rank."""
    run.beat.enter(Phase.VALIDATING)
    rows = digests_of_pairs(batch).tolist()
    with run.objective.finding(REFERENCE) as found:
        run.model.forward_only(share_of_rows(batch, run.mesh))
    reshard(run.model.parts)
    # Only the last stage of a pipeline has results.
    mine = dict(zip(rows, torch.cat(found)[:, :2].tolist(), strict=True)) if found else {}
    return {row: values for one in all_of(mine) for row, values in one.items()}
