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
