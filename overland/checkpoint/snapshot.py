"""A copy of a rank's tensors in host memory, taken while training goes on.

On a GPU the copy runs on a stream of its own into page-locked memory, at the speed of the link, and
hides behind the next forward and backward pass; only what would overwrite the tensors, the update,
waits for it (`wait_on_device`). The memory is taken once, when the run starts, and used again.
"""

from __future__ import annotations

import itertools
import math
import mmap
import threading
from pathlib import Path

import torch
from torch import Tensor

from overland.checkpoint.plan import Box, Packed, Plan, State, local_tensor

ALIGNMENT = 64
UNPACKED = 16 * 2**20  # elements at a time
SPARE_SHARE = 0.1  # of the memory that is free, left for everything else


class Snapshot:
    def __init__(self, plan: Plan, device: torch.device, state: State) -> None:
        self.device = device
        self.boxes = [box for file in plan.files for box in file.boxes]
        self.places: dict[tuple[str, tuple[int, ...]], int] = {}
        position = 0
        for box in self.boxes:
            self.places[box.name, box.start] = position
            position += -(-box.num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = position
        self._copied: torch.cuda.Event | None = None
        self._locked = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Locking 39 GB takes 11 s (measured), so a thread does it while the model compiles.
        self._making = threading.Thread(
            target=self._make, args=(state,), name="checkpoint-memory", daemon=True
        )
        self._making.start()

    def take(self, state: State) -> None:
        """Starts the copy. On a GPU it is not done when this returns."""
        self._making.join()
        if self._stream is None:
            self._copy(state)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy(state)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait_on_device(self) -> None:
        """What is queued on the device after this call runs after the copy. The host goes on."""
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def read(self, box: Box, begin: int, end: int) -> memoryview:
        place = self.places[box.name, box.start]
        return self._view[place + begin : place + end]

    def close(self) -> None:
        self._making.join()
        self.wait()
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._locked = False

    def _make(self, state: State) -> None:
        region = mmap.mmap(-1, max(1, self.num_bytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(region)
        self._memory = torch.frombuffer(region, dtype=torch.uint8)
        self._rooms = [self._room(box) for box in self.boxes]
        if self._stream is None:
            return
        self._memory.zero_()  # on all cores, where locking would touch page after page on one
        with torch.cuda.device(self.device):
            result = torch.cuda.cudart().cudaHostRegister(
                self._memory.data_ptr(), self.num_bytes, 0
            )
            self._locked = int(result) == 0  # else copies are slower and no less right
            # A kernel is loaded when it first runs, which should not be in a save.
            for value in itertools.islice(state.values(), 16):
                if isinstance(value, Packed):
                    value.unpack(0, min(4096, math.prod(value.shape)))

    def _room(self, box: Box) -> Tensor:
        place = self.places[box.name, box.start]
        return self._memory[place : place + box.num_bytes].view(box.dtype).view(box.shape)

    @torch.no_grad()
    def _copy(self, state: State) -> None:
        for box, room in zip(self.boxes, self._rooms, strict=True):
            value = state[box.name]
            if not isinstance(value, Packed):
                room.copy_(local_tensor(value), non_blocking=True)
                continue
            flat = room.view(-1)
            for begin in range(0, flat.numel(), UNPACKED):
                end = min(begin + UNPACKED, flat.numel())
                flat[begin:end].copy_(value.unpack(begin, end), non_blocking=True)


class Direct:
    """No copy: bytes are fetched block by block while training waits. For want of memory."""

    def __init__(self) -> None:
        self._state: State = {}

    def take(self, state: State) -> None:
        self._state = state

    def wait_on_device(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def read(self, box: Box, begin: int, end: int) -> memoryview:
        value = self._state[box.name]
        if isinstance(value, Packed):
            size = box.dtype.itemsize
            some = value.unpack(begin // size, end // size).view(torch.uint8)
            return memoryview(some.cpu().numpy().data)
        flat = local_tensor(value).detach().contiguous().view(-1).view(torch.uint8)
        return memoryview(flat[begin:end].cpu().numpy().data)

    def close(self) -> None:
        self._state = {}


def fits_in_memory(num_bytes: int, num_ranks: int) -> bool:
    """Whether every rank of this machine can have so much."""
    return num_bytes * num_ranks <= available_memory() * (1 - SPARE_SHARE)


def available_memory() -> float:
    """Bytes that can be had without swapping; a container's limit counts."""
    free = [float("inf")]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free.append(amounts["MemAvailable"])
    except (OSError, KeyError, ValueError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(free)
