"""Compiled code is kept in the run folder, and an unreadable file does no harm."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overland.training.callbacks import CompileCache
from overland.world import World


def run_in(folder: Path, rank: int = 0, pp: int = 1, size: int = 4) -> Any:
    """Alone in its group, so that what is read is read here."""
    return SimpleNamespace(
        folder=SimpleNamespace(root=folder),
        world=World(rank=rank, size=size, local_rank=0, local_size=1),
        mesh=SimpleNamespace(degrees=SimpleNamespace(pp=pp)),
        store=SimpleNamespace(group=None),
        say=lambda message: None,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the compiler was given back."""
    read: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"kernels", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", read.append)
    return read


def test_the_second_session_reads_what_the_first_one_made(
    tmp_path: Path, made: list[bytes]
) -> None:
    run = run_in(tmp_path)
    first = CompileCache(run)
    first.on_start(run)
    assert made == []
    first.on_step(run)
    (tmp_path / "compiled.bin").unlink()
    first.on_step(run)  # once is enough
    assert list(tmp_path.iterdir()) == []
    CompileCache(run).on_step(run)
    CompileCache(run).on_start(run)
    assert made == [b"kernels"]


def test_a_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, made: list[bytes]
) -> None:
    run, said = run_in(tmp_path / "gone"), []
    run.say = said.append
    CompileCache(run).on_step(run)
    assert "compiled.bin was not written: No such file or directory" in said[0]


def test_only_the_first_rank_writes(tmp_path: Path, made: list[bytes]) -> None:
    run = run_in(tmp_path, rank=1)
    CompileCache(run).on_step(run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no cache at all", b"\x00" * 100])
def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, content: bytes) -> None:
    run = run_in(tmp_path)
    (tmp_path / "compiled.bin").write_bytes(content)
    CompileCache(run).on_start(run)


def test_nothing_compiled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    run = run_in(tmp_path)
    CompileCache(run).on_step(run)
    assert list(tmp_path.iterdir()) == []


def test_each_stage_of_a_pipeline_keeps_its_own(tmp_path: Path, made: list[bytes]) -> None:
    for rank in range(4):
        CompileCache(run_in(tmp_path, rank, pp=2)).on_step(run_in(tmp_path, rank, pp=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiled.bin", "compiled_1.bin"]


def test_what_another_user_wrote_is_not_run(
    tmp_path: Path, made: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiled.bin").write_bytes(b"code")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    CompileCache(run_in(tmp_path)).on_start(run_in(tmp_path))
    assert made == []
