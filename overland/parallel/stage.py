"""A stage of a pipeline."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage


class Stage(PipelineStage):
    """Can also be run forward only where the next stage is on the same rank, as under the schedules
    that turn back: torch hands gradients over there even if none were computed, and fails."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
