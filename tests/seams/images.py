"""A user's module with images to train on: noise, always the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np

from overland.data.registry import register_source
from overland.training.callbacks import Callback, register_callback


class Images:
    kind = "arrays"
    fields = {"pixel_values": ("float32", (3, 32, 32)), "label": ("int64", ())}

    def chunks(self) -> list[str]:
        return ["0", "1", "2"]

    def read(self, chunk: str) -> Iterator[dict[str, Any]]:
        draw = np.random.default_rng(int(chunk))
        for label in range(8):
            pixels = draw.standard_normal((3, 32, 32), dtype=np.float32)
            yield {"pixel_values": pixels, "label": np.int64(label)}


class Wide(Images):
    fields = {"pixel_values": ("float32", (3, 32, 48))}


class Words:
    def chunks(self) -> list[str]:
        return ["all"]

    def read(self, chunk: str) -> Iterator[str]:
        yield from (f"page {number} has words" for number in range(100))


register_source("images", Images)
register_source("wide_images", Wide)
register_source("words", Words)


@register_callback
class Dies(Callback):
    """Ends its own process after the step that DIES_AFTER names."""

    def __init__(self, run: Any) -> None:
        pass

    def on_step(self, run: Any) -> None:
        if str(run.progress.step) == os.environ.get("DIES_AFTER"):
            os.kill(os.getpid(), signal.SIGKILL)
