"""Copies a rank's tensors to host memory while training continues, or fetches them without a copy
for lack of memory, and tests them for values that are not finite.

On a GPU a thread queues the copies on a separate stream, into pinned memory: they run at the speed
of the link and overlap with the next forward and backward pass. Only the update, which would
overwrite the tensors, waits for them (`wait_on_device`). They are plain copies, because a kernel on
that stream would compete with training's own (measured: 30 instead of 55 GB/s).

The memory is allocated once, when the run starts, and reused.

The caller names the tensors to test for values that are not finite. On a GPU the test is queued
with training's own kernels, before the copy; tensors in host memory are tested in the copy, by the
thread that writes it, and packed ones when they are unpacked. The loop waits for none of these.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from overland.checkpoint.plan import Box, PackedTensor, SavePlan, State
from overland.parallel.sharding import shard_of
from overland.world.devices import available_memory

ALIGNMENT = 64
SPARE_SHARE = 0.1  # of the free memory, left for everything else
# A device's queue holds about a thousand commands, and adding one more blocks (measured: 0.23 s in
# the loop). So copies are queued a few hundred at a time.
COPIES_AT_ONCE = 256


class Snapshot:
    """The copy of one rank's tensors. Raises OSError if there is no memory for it."""

    def __init__(self, plan: SavePlan, device: torch.device, state: State) -> None:
        self.device = device
        self.boxes = [box for file in plan.files for box in file.boxes]
        self._make_rooms(state)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._state: State = {}
        self._ready: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None
        self._tested: Collection[str] = ()
        self._largest = LargestValues([])
        self._broken: set[str] = set()
        self._queued = threading.Event()
        self._queued.set()
        self._locked = False
        # Pinning 39 GB takes 10 s (measured), so a thread does it while the model compiles.
        self._locking = threading.Thread(target=self._lock, name="checkpoint-memory", daemon=True)
        self._locking.start()

    def take(self, state: State, tested: Collection[str] = ()) -> None:
        """Copies `state`, or on a GPU starts to; then `copy` must be called in another thread."""
        self._locking.join()
        self._tested = tested
        self._broken = set()
        if self._stream is None:
            for box, rooms in zip(self.boxes, self._rooms, strict=True):
                for room, tensor in zip(rooms, _kept(state[box.name]), strict=True):
                    room.copy_(tensor)
            return
        self._state = state
        self._largest = LargestValues(
            (box.name, tensor)
            for box in self.boxes
            if box.name in tested and box.name not in self._unpacks
            for tensor in _kept(state[box.name])
            if tensor.is_cuda
        )
        self._ready = torch.cuda.current_stream(self.device).record_event()
        self._queued.clear()

    def copy(self) -> None:
        """Queues the copies and waits for them."""
        if self._stream is None:
            return
        assert self._ready is not None
        try:
            with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                self._queue_all()
                self._copied = self._stream.record_event()
        finally:
            self._state = {}
            self._queued.set()
        self._copied.synchronize()

    def not_finite(self) -> list[str]:
        """Returns which of the tested tensors hold values that are not finite. Call it once all are
        written."""
        done = self._largest.names | self._unpacks.keys()
        in_host_memory = LargestValues(
            (box.name, room)
            for box, rooms in zip(self.boxes, self._rooms, strict=True)
            if box.name in self._tested and box.name not in done
            for room in rooms
        )
        # Training's own stream is far ahead. On a CPU, even stream(None) would initialize a GPU.
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            found = self._largest.not_finite() + in_host_memory.not_finite()
        return sorted(self._broken & set(self._tested)) + found

    def wait_on_device(self) -> None:
        """Makes everything queued on the device after this call wait for the copy."""
        self._queued.wait()
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    def read(self, box: Box, begin: int, end: int) -> memoryview:
        rooms = self._rooms[self._number[box.name, box.start]]
        return _bytes(box, rooms, self._unpacks.get(box.name), begin, end, self._broken)

    def close(self) -> None:
        self._locking.join()
        if self._copied is not None:
            self._copied.synchronize()
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._locked = False

    def _make_rooms(self, state: State) -> None:
        """Reserves places for the tensors, in memory that is not touched yet."""
        values = [_kept(state[box.name]) for box in self.boxes]
        size = sum(_aligned(tensor.nbytes) for kept in values for tensor in kept)
        region = mmap.mmap(-1, max(1, size))
        with suppress(AttributeError, OSError):  # not every system has huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(region, dtype=torch.uint8)
        self._number = {(box.name, box.start): i for i, box in enumerate(self.boxes)}
        packed = {name: value for name, value in state.items() if isinstance(value, PackedTensor)}
        self._unpacks = {name: (value.unpack, value.block) for name, value in packed.items()}
        self._rooms: list[list[Tensor]] = []
        place = 0
        for kept in values:
            self._rooms.append([])
            for tensor in kept:
                room = self._memory[place : place + tensor.nbytes].view(tensor.dtype)
                self._rooms[-1].append(room.view(tensor.shape))
                place += _aligned(tensor.nbytes)

    def _lock(self) -> None:
        if self._stream is not None:
            self._memory.zero_()  # touches the pages on all cores; pinning would do it on one
            with torch.cuda.device(self.device):
                result = torch.cuda.cudart().cudaHostRegister(
                    self._memory.data_ptr(), self._memory.nbytes, 0
                )
            self._locked = int(result) == 0  # otherwise copies are slower, but still correct

    def _queue_all(self) -> None:
        assert self._stream is not None
        queued = 0
        before: torch.cuda.Event | None = None
        for box, rooms in zip(self.boxes, self._rooms, strict=True):
            for room, tensor in zip(rooms, _kept(self._state[box.name]), strict=True):
                room.copy_(tensor, non_blocking=True)
                queued += 1
                if queued % COPIES_AT_ONCE == 0:  # the previous batch of copies must be done
                    if before is not None:
                        before.synchronize()
                    before = self._stream.record_event()


class Direct:
    """Used without a copy, for lack of memory: bytes are fetched block by block while training
    waits."""

    def __init__(self) -> None:
        self._state: State = {}
        self._tested: Collection[str] = ()
        self._broken: set[str] = set()

    def take(self, state: State, tested: Collection[str] = ()) -> None:
        self._state, self._tested, self._broken = state, tested, set()

    def copy(self) -> None:
        pass

    def not_finite(self) -> list[str]:
        values = [(name, value) for name, value in self._state.items() if name in self._tested]
        plain = [(name, value) for name, value in values if not isinstance(value, PackedTensor)]
        found = LargestValues(
            (name, one) for name, value in plain for one in _kept(value)
        ).not_finite()
        return sorted(self._broken & set(self._tested)) + found

    def wait_on_device(self) -> None:
        pass

    def read(self, box: Box, begin: int, end: int) -> memoryview:
        value = self._state[box.name]
        unpack = (value.unpack, value.block) if isinstance(value, PackedTensor) else None
        return _bytes(box, _kept(value), unpack, begin, end, self._broken)

    def close(self) -> None:
        self._state = {}


def _kept(value: Tensor | PackedTensor) -> list[Tensor]:
    """Returns the tensors on this rank that hold a value."""
    return list(value.kept) if isinstance(value, PackedTensor) else [shard_of(value).detach()]


def _bytes(
    box: Box,
    kept: list[Tensor],
    unpack: tuple[Callable[..., Tensor], int] | None,
    begin: int,
    end: int,
    broken: set[str],
) -> memoryview:
    """Returns bytes of what is saved, from the tensors that hold it. A packed tensor that is not
    finite is added to `broken`, since that shows only when it is unpacked."""
    first, last = begin // box.dtype.itemsize, end // box.dtype.itemsize
    if unpack is None:
        whole = kept[0].reshape(-1)[first:last].cpu()
    else:
        function, block = unpack
        rows = [tensor.reshape(-1) if block == 1 else tensor for tensor in kept]
        start = first // block
        numbers = function(*(row[start : -(-last // block)].cpu() for row in rows)).reshape(-1)
        whole = numbers[first - start * block : last - start * block]
        if not whole.isfinite().all():
            broken.add(box.name)
    view: memoryview = whole.view(torch.uint8).numpy().data
    return view


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def fits_in_memory(num_bytes: int, num_ranks: int) -> bool:
    """Whether every rank of this machine can allocate that much memory."""
    return num_bytes * num_ranks <= available_memory() * (1 - SPARE_SHARE)


class LargestValues:
    """The largest absolute values of tensors, each with the name used to report it.

    The largest value is not finite if any value of its tensor is not. Finding it takes one pass at
    memory speed and almost no extra memory. On a GPU the pass is queued on construction; only
    `not_finite` waits for it. Integer tensors and empty ones are always finite.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
        self.names = {name for group in groups.values() for name, _ in group}
        self._values: list[tuple[list[str], Tensor]] = []
        for group in groups.values():
            names, some = [name for name, _ in group], [tensor for _, tensor in group]
            self._values.append((names, torch.stack(torch._foreach_norm(some, math.inf))))

    def not_finite(self) -> list[str]:
        """Returns the names of tensors with a value that is not finite; waits for the device."""
        found: list[str] = []
        for names, values in self._values:
            bad = (~values.isfinite()).tolist()
            found += [name for name, is_bad in zip(names, bad, strict=True) if is_bad]
        return list(dict.fromkeys(found))
