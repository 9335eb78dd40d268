"""Saves a run's state, mostly in the background: snapshot, writing, commit, then deletion of old
checkpoints; abandons a save that stalls, and keeps a state that is not finite from being resumed.

1. The loop calls `save`: a snapshot of this rank's tensors is started (see snapshot.py), and the
   loop continues.
2. A thread writes the snapshot to `.step_N.tmp/`, block by block with checksums, and syncs it.
3. Rank 0 gathers the checksums of all ranks, writes the index and then COMMITTED, and renames the
      folder to `step_N`. From this moment the checkpoint exists, and `latest` points to it. A state
   with values that are not finite is kept as `step_N.nonfinite`, which is never resumed; nothing
   else changes.
4. Old checkpoints that the settings do not keep are deleted. Then anything that is derived from
   checkpoints follows (`then`).
5. `poll` tells the loop the outcome. An error is reported, and never ends the run.

Two saves never overlap: the second waits for the first. A save may take as long as it needs if it
makes progress: if a rank has neither read nor written a byte for `stall_seconds`, all ranks abandon
it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overland.checkpoint.folder import (
    broken,
    delete,
    lack_of_room,
    list_checkpoints,
    set_aside,
    superfluous,
    tidy,
)
from overland.checkpoint.plan import (
    SavePlan,
    State,
    broadcast,
    gather,
    local_name,
    local_state,
    plan_save,
)
from overland.checkpoint.snapshot import Direct, Snapshot, fits_in_memory
from overland.checkpoint.write import WrittenFile, build_index, commit, write_files, write_full
from overland.config.schema import Checkpoint
from overland.errors import CheckpointError, sentence
from overland.files import Disk, Moved
from overland.run_folder import LATEST, checkpoint_name
from overland.world.heartbeat import Heartbeat, node_name

# During a save ranks communicate every few seconds, however long it takes. Only a rank whose
# process is stopped is silent for longer, and training itself notices that first.
TICK_SECONDS = 5.0
PATIENCE = timedelta(minutes=30)
PATIENT = 10.0  # × stall_seconds, for a save that training does not wait for

T = TypeVar("T")


class Stalled(CheckpointError):
    """Raised on all ranks when one of them has neither read nor written a byte for too long."""


# A full disk, a quota, a hiccup of the file system: errors that may be gone at a second attempt.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@dataclass(frozen=True)
class Outcome:
    """How a save ended. `seconds` is the time from the call to the commit; `waited` is the time
    that the loop lost. `error`: the checkpoint does not exist. `note`: it exists, but something
    else went wrong. `not_finite`: the state is kept in `path`, but cannot be resumed."""

    path: Path
    seconds: float
    waited: float
    num_bytes: int
    error: str = ""
    note: str = ""
    not_finite: tuple[str, ...] = ()

    @property
    def may_pass(self) -> bool:
        """Whether the error may be temporary."""
        return any(os.strerror(number) in self.error for number in PASSING)


class Store:
    """The checkpoints of one run. Every rank has a store, and all of them call it at the same
    steps."""

    def __init__(
        self,
        folder: Path,
        settings: Checkpoint,
        device: torch.device | None = None,
        local_ranks: int = 1,
        disk: Disk | None = None,
        beat: Heartbeat | None = None,
        stall_seconds: float = float("inf"),
    ) -> None:
        self.folder, self.settings, self.disk = folder, settings, disk or Disk()
        beat = beat or Heartbeat()
        self.pulse, self._is_watched = beat.pulse, beat.is_supervised
        self._stall_seconds = stall_seconds
        self.notes: list[str] = []
        self.then: list[Callable[[Path, Moved], None]] = []
        """Rank 0 calls these with every new checkpoint, once the old ones are deleted."""
        self._device, self._local_ranks = device or torch.device("cpu"), local_ranks
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.group = None if alone else dist.new_group(backend="gloo", timeout=PATIENCE)
        self._rank = 0 if alone else dist.get_rank()
        self._plan: SavePlan | None = None
        self._snapshot: Snapshot | Direct = Direct()
        self._writing: threading.Thread | None = None
        self._is_waited_for = True
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.last: Outcome | None = None
        """How the newest save ended, if there was one."""

    @property
    def is_async(self) -> bool:
        return isinstance(self._snapshot, Snapshot)

    def prepare(self, state: State) -> None:
        """Plans and allocates memory, so that no save has to. Called by all ranks together."""
        state = self._named(state)
        if self._rank == 0:
            self.disk.make_folder(self.folder)
            tidy(self.folder, self.disk)
        self._plan = plan_save(state, self.group)
        if self._rank == 0:
            files = [file for files in self._plan.files_of_ranks for file in files]
            size = sum(file.num_bytes for file in files)
            if words := lack_of_room(self.folder, self.settings, size):
                self.notes.append(words)
        if self.settings.async_mode == "disabled":
            return
        if snapshot := self._make_snapshot(self._plan, state):
            self._snapshot = snapshot
        else:
            gigabytes = self._plan.num_bytes * self._local_ranks / 1e9
            self.notes.append(
                f"host memory is too small for a copy of the state ({gigabytes:.0f} GB on this "
                f"node), so training will wait while checkpoints are written"
            )

    def _make_snapshot(self, plan: SavePlan, state: State) -> Snapshot | None:
        """Allocates a snapshot on all ranks or on none: a rank that waits for the disk would make
        all others wait."""
        snapshot = None
        if fits_in_memory(plan.num_bytes, self._local_ranks):
            with suppress(OSError):
                snapshot = Snapshot(plan, self._device, state)
        if self.group is not None:
            fits = torch.tensor(int(snapshot is not None))
            dist.all_reduce(fits, dist.ReduceOp.MIN, group=self.group)
            if not fits.item() and snapshot is not None:
                snapshot.close()
                snapshot = None
        return snapshot

    def save(
        self,
        step: int,
        state: State,
        run: Mapping[str, Any],
        preempt: bool = False,
        measured: tuple[float, str] | None = None,
        tested: Collection[str] | None = None,
    ) -> None:
        """Starts a save; `poll` or `finish` returns its outcome. `measured` is the validation loss,
        and a mark of what it was measured on. `tested` names the tensors that must be finite; by
        default, all of them."""
        started = time.monotonic()
        if self._plan is None:
            self.prepare(state)
        assert self._plan is not None
        self.wait()
        named = self._named(state)
        tested = set(named if tested is None else self._names(tested))
        self._snapshot.take(named, tested)
        about = {
            "step": step,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "validation_loss": None if measured is None else measured[0],
            **({} if measured is None else {"validated_on": measured[1]}),
        }
        name = checkpoint_name(step, preempt)
        arguments = (self._plan, name, dict(run), about, started)
        if self.is_async:
            waited = time.monotonic() - started
            self._writing = threading.Thread(
                target=self._write, args=(*arguments, waited), name="checkpoint-save", daemon=True
            )
            self._is_waited_for = False
            self._writing.start()
        else:
            self._write(*arguments)

    def give_up(self, step: int, error: str, preempt: bool = False) -> None:
        """Records a save that could not be started."""
        self.wait()
        self.last = Outcome(self.folder / checkpoint_name(step, preempt), 0.0, 0.0, 0, error)
        self._outcomes.put(self.last)

    def wait_on_device(self) -> None:
        """Must be called before anything overwrites the state; the host does not wait."""
        self._snapshot.wait_on_device()

    def poll(self) -> list[Outcome]:
        """Returns the saves that have ended since the last call."""
        return [self._outcomes.get() for _ in range(self._outcomes.qsize())]

    def wait(self) -> None:
        if self._writing is not None:
            self._is_waited_for = True
            self._writing.join()
            self._writing = None

    def finish(self) -> list[Outcome]:
        """Waits for a save in progress; returns the saves that have ended since the last call."""
        self.wait()
        return self.poll()

    def close(self) -> None:
        self.wait()
        self._snapshot.close()

    def _named(self, state: State) -> State:
        return local_state(state, self._rank) if self.settings.type == "local" else state

    def _names(self, names: Collection[str]) -> Collection[str]:
        is_local = self.settings.type == "local"
        return [local_name(name, self._rank) for name in names] if is_local else names

    def _write(
        self,
        plan: SavePlan,
        name: str,
        run: dict[str, Any],
        about: dict[str, Any],
        started: float,
        waited: float | None = None,
    ) -> None:
        """Writes the snapshot. `waited`: the time that the loop has lost; if None, the loop is
        waiting for this call."""
        beside, error, note = self.folder / f".{name}.tmp", "", ""
        not_finite: list[str] = []

        def write(moved: Moved) -> tuple[str, list[str], list[WrittenFile]]:
            try:
                self.pulse.wait()  # for the device, if there is a copy
                self._snapshot.copy()
                moved(0)
                written = write_files(
                    beside, plan.files, self._snapshot.read, self.disk, moved=moved
                )
                self.pulse.wait()  # for the device or the CPU
                return "", self._snapshot.not_finite(), written
            except Exception as problem:
                return f"rank {self._rank}: {sentence(problem)}", [], []

        def conclude(moved: Moved) -> tuple[str, list[str], str]:
            if self._rank:
                return "", [], ""
            errors = [text for text, _, _ in reports if text]
            names = list(dict.fromkeys(name for _, names, _ in reports for name in names))
            facts = {**about, "not_finite": names} if names else about
            done = [files for _, _, files in reports]
            error = errors[0] if errors else self._commit(plan, name, run, facts, done, moved)
            return error, names, self._tidy_up(name, error, not names, moved)

        self.pulse.begin(plan.num_bytes)
        try:
            reports = gather(self.together(write), self.group)
            error, not_finite, note = self.together(conclude)
            error, not_finite = broadcast((error, not_finite), self.group)
        except (Stalled, RuntimeError) as problem:  # RuntimeError: the process group failed
            error = sentence(problem)
        finally:
            self.pulse.end()
        path = self.folder / name
        path = broken(path) if not_finite else path
        seconds = time.monotonic() - started
        waited = seconds if waited is None else waited
        size = plan.num_bytes
        self.last = Outcome(path, seconds, waited, size, error, note, tuple(not_finite))
        self._outcomes.put(self.last)

    def together(self, work: Callable[[Moved], T]) -> T:
        """Does `work` on every rank, in a separate thread; returns when all ranks are done. Raises
        Stalled if one of them neither reads nor writes for too long; its thread is then
        abandoned."""
        done, results, errors = threading.Event(), [], []
        is_given_up = False

        def moved(num_bytes: int) -> None:
            if is_given_up:
                raise CheckpointError("this save was abandoned")
            self.pulse.moved(num_bytes)

        def run() -> None:
            try:
                results.append(work(moved))
            except BaseException as error:
                errors.append(error)
            done.set()

        self.pulse.moved()
        threading.Thread(target=run, name="checkpoint-work", daemon=True).start()
        while True:
            is_done = done.wait(min(TICK_SECONDS, self._stall_seconds / 4))
            if is_done:
                self.pulse.wait()
            try:
                if not self._others_work(is_done):
                    break
            except Stalled:
                is_given_up = True
                raise
        if errors:
            raise errors[0]
        return results[0]

    def _others_work(self, is_done: bool) -> bool:
        """Whether any rank is still working. All ranks call this every few seconds."""
        quiet = 0.0 if is_done else self.pulse.quiet_seconds
        is_urgent = self._is_waited_for and not self._is_watched  # a supervisor can do more
        limit = self._stall_seconds * (1.0 if is_urgent else PATIENT)
        unfinished, longest, least = self._greatest(float(not is_done), quiet, -limit)
        if longest > -least:
            (who,) = self._greatest(float(self._rank) if quiet == longest else -1.0)
            node = broadcast(node_name(), self.group, int(who))
            raise Stalled(
                f"rank {int(who)} on {node} has neither read nor written a byte for {longest:.0f} s"
            )
        return bool(unfinished)

    def _greatest(self, *values: float) -> list[float]:
        """Returns the elementwise maximum of all ranks' values."""
        if self.group is None:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=self.group)
        greatest: list[float] = together.tolist()
        return greatest

    def _commit(
        self,
        plan: SavePlan,
        name: str,
        run: dict[str, Any],
        about: dict[str, Any],
        written: list[list[WrittenFile]],
        moved: Moved,
    ) -> str:
        """Commits the save, on rank 0 only. Whatever goes wrong here leaves earlier checkpoints
        unchanged."""
        beside, path = self.folder / f".{name}.tmp", self.folder / name
        try:
            kind = self.settings.type
            index = build_index(kind, plan.files_of_ranks, written, run)
            moved(0)
            if kind == "full":
                write_full(beside, index, about, self.settings.full_format, self.disk, moved)
            else:
                commit(beside, index, about, self.disk)
            moved(0)  # the last chance to abandon it
            if about.get("not_finite"):
                path = broken(path)
                self.disk.remove_folder(path)  # from an earlier attempt that ended the same way
            elif path.exists():  # damaged, or from before the run went back to an earlier step
                set_aside(path, self.disk)
            self.disk.rename(beside, path)
        except Exception as problem:
            return sentence(problem)
        return ""

    def _tidy_up(self, name: str, error: str, is_good: bool, moved: Moved) -> str:
        """Cleans up, on rank 0 only, once the new checkpoint is safe or has failed."""
        try:
            if error:  # on a full disk, the space is needed
                self.disk.remove_folder(self.folder / f".{name}.tmp")
                return ""
            if not is_good:  # the existing checkpoints are better
                return ""
            self.disk.point(self.folder / LATEST, name)
            for old in superfluous(list_checkpoints(self.folder), self.settings, name):
                delete(old.path, self.disk)
                moved(0)
        except Exception as problem:  # the other ranks wait for this one
            return f"updating {LATEST} or deleting an old checkpoint failed: {sentence(problem)}"
        try:
            for call in self.then:
                call(self.folder / name, moved)
        except Exception as problem:
            return sentence(problem)
        return ""
