"""How far a run has come. With the weights and the optimizer, this is all that a resume needs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """`batch` is the next global batch; it runs ahead of `step` where batches were left out."""

    step: int = 0
    batch: int = 0
    tokens: int = 0
    """Of samples that are arrays: their number."""
    best_validation_loss: float = math.inf

    def to_json(self) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    def restore(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, math.inf if value is None else value)
