"""When a run saves, how a failed save is retried, what happens after each one, and how the ledger
of consumed rows is written.

A checkpoint is never newer than the ledger: the rows it was trained on are on disk before it is
saved.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from overland.checkpoint.folder import committed
from overland.checkpoint.store import Outcome
from overland.data.batch import Batch
from overland.data.order import mix64
from overland.errors import CheckpointError, NotSavedError, TrainingError, sentence
from overland.files import Moved, ignore
from overland.parallel.comm import from_first_rank
from overland.plugins import plugin
from overland.training.callbacks import Record
from overland.training.ledger import Ledger
from overland.training.run import Run
from overland.training.state import save_run, saved_state
from overland.training.stop import Clock, StopRequest, Wish
from overland.words import first_few
from overland.world.heartbeat import Phase

RETRY_SECONDS = 20.0  # between two attempts of the last save
RETRY_FOR_SECONDS = 600.0  # at most; less if the job ends before
# Who sends SIGTERM or Ctrl-C wants the run to end, and a scheduler kills it half a minute later.
RETRY_AFTER_SIGNAL_SECONDS = 10.0
LOOK_SECONDS = 0.5  # for signals meanwhile
ABOUT_ROWS = ("sample_B", "epoch_B", "weight_B")
"""Not part of the digest of token rows: tokens and labels suffice, and earlier ledgers have only
those."""


def prepare_saves(run: Run, report: Callable[[str], None]) -> None:
    """Lets rank 0 write what belongs next to each checkpoint, including what an earlier session did
    not get to: adapters in PEFT's format, links named by time."""

    def adapters(newest: Path | None = None, moved: Moved = ignore) -> None:
        in_fallback = run.store.folder == run.folder.fallback
        root = run.store.folder if in_fallback else run.folder.root
        plugin("exports").follow(root, run.store.folder, newest, run.store.disk, moved)

    def links(newest: Path | None = None, moved: Moved = ignore) -> None:
        plugin("exports").follow_links(run.folder.root, run.store.folder, run.store.disk)

    wanted = {
        adapters: run.config.lora.save_as_peft,
        links: run.config.checkpoint.link_by_time,
    }
    for write in (write for write, is_wanted in wanted.items() if is_wanted and run.world.is_first):
        run.store.then.append(write)
        try:
            write()
        except (CheckpointError, OSError) as error:
            report(f"note: {sentence(error)}")
    if run.config.checkpoint.last_save_in_hf:
        plugin("exports")  # loaded now: at the end, the program's files may have changed
    run.store.prepare(saved_state(run))
    for note in run.store.notes:
        report(f"note: {note}")


def save_while_training(
    run: Run, ledger: LedgerWriter, clock: Clock | None, wish: Wish, held_out: Record | None
) -> None:
    run.beat.enter(Phase.SAVING)
    is_usual = is_due(run.progress.step, run.config.checkpoint.interval, run.config.training.steps)
    preempt = wish.stops or (is_preempt_due(run) and not is_usual)
    save(run, ledger, preempt, held_out.get("validation_loss") if held_out else None)
    if clock is not None:
        clock.saving()


def save(
    run: Run,
    ledger: LedgerWriter,
    preempt: bool = False,
    validation_loss: float | None = None,
    in_fallback: bool = False,
) -> None:
    """Starts a save once the ledger is on disk."""
    if problem := ledger.sync(or_elsewhere=in_fallback):
        run.store.give_up(run.progress.step, problem, preempt)
    else:
        save_run(run, preempt, validation_loss)


def save_is_due(run: Run, wish: Wish, held_out: Record | None) -> bool:
    settings, progress = run.config.checkpoint, run.progress
    loss = held_out.get("validation_loss") if held_out is not None else None
    is_best = False
    if loss is not None and settings.keep_best:  # rank 0 decides: others may differ in the last bit
        is_best = from_first_rank(loss <= progress.best_validation_loss)
    if progress.step == run.saved_step and not wish.stops:  # the run was rewound to this step
        return False
    due = is_due(progress.step, settings.interval, run.config.training.steps)
    return due or is_best or wish is not Wish.NOTHING or is_preempt_due(run)


def is_preempt_due(run: Run) -> bool:
    every = run.config.checkpoint.preempt_interval
    return every is not None and run.progress.step % every == 0


def report_saves(run: Run, outcomes: list[Outcome], clock: Clock | None) -> None:
    """Reports finished saves. A failed save does not end the run, since the next one may succeed; a
    state that is not finite does."""
    for outcome in outcomes:
        if outcome.error:
            run.say(f"{outcome.path} was not saved: {outcome.error}")
        elif outcome.not_finite:
            what = first_few(list(outcome.not_finite))
            run.say(f"NOT FINITE: {what}; kept as {outcome.path}, which is never resumed")
            if clock is not None:
                clock.gives_up = True
        else:
            run.call("on_save", outcome)
        if outcome.note:
            run.say(outcome.note)
        if clock is not None:
            clock.saved(outcome.seconds)


def retry_final_save(
    run: Run, ledger: LedgerWriter, clock: Clock | None, stop: StopRequest, preempt: bool
) -> None:
    """Waits for the last save. If it fails in a way that may pass, such as a full disk, it is
    retried until the job is about to end, for a few seconds after a signal, or until the next
    signal; and then in `checkpoint.fallback_folder`."""
    asked = stop.num_ends
    report_saves(run, run.store.finish(), clock)
    # A supervisor sends SIGTERM well before the end of a job, and kills what takes too long.
    is_urgent = stop.any_rank(asked > 0) and not run.beat.is_supervised
    most = RETRY_AFTER_SIGNAL_SECONDS if is_urgent else RETRY_FOR_SECONDS
    seconds = from_first_rank(min(clock.seconds_left(), most) if clock is not None else 0.0)
    deadline = time.monotonic() + seconds
    pause = RETRY_AFTER_SIGNAL_SECONDS / 2.5 if is_urgent else RETRY_SECONDS
    while (last := run.store.last) is not None and last.error and last.may_pass:
        if not from_first_rank(time.monotonic() + pause < deadline):
            break
        left = deadline - time.monotonic()
        words = f"retrying the save for {left:.0f} s; free some disk space"
        run.say(words + ", or end it with SIGTERM" * (not is_urgent))
        if is_told_to_end(stop, asked, pause):
            run.say("received a signal: the save is not retried")
            break
        save(run, ledger, preempt)
        report_saves(run, run.store.finish(), clock)
    fallback = run.folder.fallback
    if last is not None and last.error and fallback is not None:
        run.say(f"saving in checkpoint.fallback_folder instead: {fallback}")
        run.store.folder = fallback
        save(run, ledger, preempt, in_fallback=True)
        report_saves(run, run.store.finish(), clock)


def is_told_to_end(stop: StopRequest, asked: int, seconds: float) -> bool:
    """Waits; returns True early if any rank is asked to end again."""
    until = time.monotonic() + seconds
    while not stop.any_rank(stop.num_ends > asked):
        if from_first_rank(time.monotonic() >= until):
            return False
        time.sleep(min(LOOK_SECONDS, seconds))
    return True


def check_last_save(run: Run) -> None:
    """Raises if the newest save cannot be resumed."""
    last = run.store.last
    if last is None:
        return
    if last.error:
        kept = committed(run.folder.checkpoints)
        stands = "there is no earlier checkpoint"
        if kept:
            stands = f"the newest checkpoint is {kept[-1]}, and the same command resumes it"
        raise NotSavedError(
            f"the last save failed, so there is no {last.path}: {last.error}; {stands}"
        )
    if last.not_finite:
        good = committed(run.store.folder)
        names = first_few(list(last.not_finite))
        raise TrainingError(
            f"the state is no longer finite ({names}), and training cannot recover from that. It "
            f"is kept as {last.path}, which is never resumed. "
            + (
                f"The newest good checkpoint is {good[-1]}: resume from it with the same command "
                f"and a lower optimizer.lr or training.max_norm"
                if good
                else "There is no good checkpoint: start again with a lower optimizer.lr or "
                "training.max_norm, and checkpoint.interval"
            )
        )


def is_due(step: int, every: int, last: int, first: bool = False) -> bool:
    return step % every == 0 or step == last or (first and step == 1)


class LedgerWriter:
    """Writes the ledger of what the model has consumed: a digest per row, from all ranks into one
    file. Digests are computed on the device and read when the loop waits for it anyway, at a log or
    a save. Ranks that must receive the same rows, because they share layers, matrices or sequences
    of the model, compare their digests."""

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
            self._run.say(f"{self._problem}: `overland prove data` will miss some steps")

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            self._run.say(f"{problem}; the run continues, but cannot save until this is fixed")
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


def digests(batch: Batch) -> Tensor:
    """Returns a digest of each row, over all of its bytes. Each place of each field has its own
    multiplier, and sums wrap around. A single changed token always changes the digest; any other
    change goes unnoticed with a probability of about 2⁻⁴⁶."""
    left_out = ABOUT_ROWS if "tokens_BS" in batch else ()
    total = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    for name, values in sorted(batch.fields.items()):
        if name not in left_out:
            words = words_of(values)
            total += (words * _multipliers(name, words.shape[1], words.device)).sum(dim=1)
    return total


def words_of(values: Tensor) -> Tensor:
    """Returns the bytes of each row as 64-bit integers, padded with zeros."""
    rows = values.reshape(len(values), -1)
    if rows.dtype == torch.int64:
        return rows
    rows = rows.contiguous().view(torch.uint8)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
    return rows.view(torch.int64)


@lru_cache(maxsize=16)
def _multipliers(name: str, count: int, device: torch.device) -> Tensor:
    first = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
    numbers = mix64(first + np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
