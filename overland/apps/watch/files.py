"""Reads files of a run that may be missing, truncated, or hold anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from overland.files import parse_toml

LARGEST_TEXT = 1 << 22  # bytes read of a config or another small file
LONGEST_EVENT = 1 << 16  # bytes, of a line of sessions.jsonl


def read_text(path: Path, from_end: int = 0) -> str:
    """Returns a file's text without space around it, or the last `from_end` bytes of it; "" if it
    cannot be read."""
    with suppress(OSError):
        if path.is_file():  # opening a named pipe would block
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - from_end) if from_end else 0)
                return file.read(LARGEST_TEXT).decode(errors="replace").strip()
    return ""


def read_toml(path: Path) -> dict[str, Any]:
    """Returns a config; {} if it cannot be read, such as while it is being written."""
    with suppress(ValueError):
        return parse_toml(read_text(path))
    return {}


def read_json(path: Path) -> dict[str, Any]:
    return object_in(read_text(path))


def read_last_line(path: Path) -> dict[str, Any]:
    """Returns the last JSON object of a file with one per line."""
    lines = read_text(path, from_end=LONGEST_EVENT).splitlines()
    return object_in(lines[-1]) if lines else {}


def samples_in(text: str) -> dict[int, str]:
    """Returns the model's samples by step, as far as the text of samples.jsonl has them."""
    found = map(object_in, text.splitlines())
    return {
        one["step"]: str(one.get("text", "")) for one in found if isinstance(one.get("step"), int)
    }


def object_in(text: str | bytes) -> dict[str, Any]:
    """Returns a JSON object; {} for anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def table_in(config: Mapping[str, Any], section: str) -> dict[str, Any]:
    value = config.get(section)
    return value if isinstance(value, dict) else {}


def finite(value: Any) -> Any:
    """Replaces non-finite numbers with None, since JSON has no NaN."""
    return to_jsonable_python(value, inf_nan_mode="null")
