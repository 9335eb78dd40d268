"""The type to compute in, where the config leaves it to the device."""

from __future__ import annotations

from overland.config.schema import Training


def settle_dtype(training: Training, device_type: str) -> Training:
    """Training without `auto`. A CPU without bfloat16 instructions took 200 times as long in it."""
    if training.mixed_precision_param != "auto":
        return training
    dtype = "bfloat16" if device_type == "cuda" else "float32"
    return training.model_copy(update={"mixed_precision_param": dtype})
