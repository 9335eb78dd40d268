"""Peak rates of known devices; an unknown device has none, and says so."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


def peak_flops(device: str, dtype: str = "bfloat16") -> float | None:
    """Peak FLOP/s of the device with this name, or None where the table has no figure.

    float16 runs at bfloat16's rate on every device listed; float32 is not what the matrix units
    are rated for, so it has no peak here and no MFU is reported.
    """
    rate = "bfloat16" if dtype == "float16" else dtype
    for entry in _devices():
        if any(word.lower() in device.lower() for word in entry["match"]):
            return entry[rate] * 1e12 if rate in entry else None
    return None


@cache
def _devices() -> list[dict[str, Any]]:
    text = files("overland.world").joinpath("hardware.toml").read_text()
    return tomllib.loads(text)["device"]
