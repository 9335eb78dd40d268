"""metrics.jsonl after sessions that ended in the middle of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from overland.training.metrics import drop_torn_line

WHOLE = b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 3, "loss": 2.0', b'{"st' + b"x" * 5000])
def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + torn)
    drop_torn_line(path)
    assert path.read_bytes() == WHOLE


def test_a_file_with_nothing_but_half_a_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step"')
    drop_torn_line(path)
    assert path.read_bytes() == b""


def test_a_new_file_is_begun(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
