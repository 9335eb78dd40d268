"""Stopping together: a signal on any rank ends all ranks after the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers the first signal; the second Ctrl-C acts as usual.

    Ranks get signals at different moments, so each step they ask each other: `ask` before the
    computation, `agreed` after it. The answer travels while the devices are busy.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._answer: dist.Work | None = None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self) -> None:
        self._flag.fill_(int(self.signal is not None))
        if self._group is not None:
            self._answer = dist.all_reduce(
                self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def agreed(self) -> bool:
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
        return bool(self._flag.item())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
