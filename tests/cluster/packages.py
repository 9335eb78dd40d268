"""System programs that tests need, and what to do if they are missing."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str | None:
    """Debian puts daemons where only root looks."""
    return shutil.which(
        name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    )


def need(*programs: str) -> None:
    """Whoever may install packages has no reason to leave these tests out, and CI may not."""
    missing = [name for name in programs if program(name) is None]
    if not missing:
        return
    words = f"not on this machine: {', '.join(missing)}; `make cluster-packages` installs them"
    if os.environ.get("CI") or os.geteuid() == 0:
        pytest.fail(words)
    pytest.skip(words)
