"""What was compiled is kept in the run folder, and a file that cannot be read does no harm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overland.training.compiled import FILE, CompileCache


def run_in(folder: Path, is_first: bool = True) -> Any:
    return SimpleNamespace(
        folder=SimpleNamespace(root=folder),
        world=SimpleNamespace(is_first=is_first),
        call=lambda *args: None,
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
    (tmp_path / FILE).unlink()
    first.on_step(run)  # once is enough
    assert list(tmp_path.iterdir()) == []
    CompileCache(run).on_step(run)
    CompileCache(run).on_start(run)
    assert made == [b"kernels"]


def test_only_the_first_rank_writes(tmp_path: Path, made: list[bytes]) -> None:
    run = run_in(tmp_path, is_first=False)
    CompileCache(run).on_step(run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no cache at all", b"\x00" * 100])
def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, content: bytes) -> None:
    run = run_in(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    CompileCache(run).on_start(run)


def test_nothing_compiled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    run = run_in(tmp_path)
    CompileCache(run).on_step(run)
    assert list(tmp_path.iterdir()) == []
