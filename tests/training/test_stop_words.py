"""Why a run stops, in words."""

from __future__ import annotations

import signal
import time

import pytest

from overland.training.stop import StopRequest, Wish


def test_the_signal_before_the_time_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest.__new__(StopRequest)
    stop.signal = signal.SIGUSR1
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert stop.reason(Wish.SIGNAL) == "received a signal (SIGUSR1)"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 200))
    assert "3 min before the job's time limit (checkpoint." in stop.reason(Wish.SIGNAL)
    stop.signal = signal.SIGINT
    assert stop.reason(Wish.SIGNAL) == "received a signal (SIGINT)"
    stop.signal = None
    assert "time limit is near (checkpoint.walltime_margin_" in stop.reason(Wish.WALLTIME)


def test_a_program_has_its_own_handlers_again_after_training() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with StopRequest.__new__(StopRequest):
            assert signal.getsignal(signal.SIGUSR1) is not own
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)
