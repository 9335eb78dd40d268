"""The plan of a masked autoencoder: what is split over `tp` and how.

    over tp           what is split                             how
    into attention    heads                                     q, k, v by columns; output by rows
    into the MLP      inner width                               by columns; by rows
    all else          nothing: every rank has all of it

The output of a block is summed, so each block has two all-reduces forward and two backward. Rows of
patches are not split, since no degree divides their number (such as 57 of 225 in the encoder).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from overland.config.derived import Degrees
from overland.errors import ModelError
from overland.models.structure import blocks_of
from overland.models.vit_mae import ViTMAE
from overland.models.vit_mae_config import ViTMAEConfig
from overland.parallel.tensor import overlap_communication

SPLIT: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "attention.attention.query": ColwiseParallel,
    "attention.attention.key": ColwiseParallel,
    "attention.attention.value": ColwiseParallel,
    "attention.output.dense": RowwiseParallel,
    "intermediate.dense": ColwiseParallel,
    "output.dense": RowwiseParallel,
}
WHOLE = ("layernorm_before", "layernorm_after")


class ViTMAEPlan:
    axes = ("tp",)

    def uneven(self, config: ViTMAEConfig, tp: int) -> list[str]:
        parts = {
            f"{config.num_attention_heads} attention heads": config.num_attention_heads,
            f"an inner width of {config.intermediate_size}": config.intermediate_size,
            f"{config.decoder_num_attention_heads} attention heads of the decoder": (
                config.decoder_num_attention_heads
            ),
            f"an inner width of {config.decoder_intermediate_size} of the decoder": (
                config.decoder_intermediate_size
            ),
        }
        return [name for name, count in parts.items() if count % tp]

    def check(self, model: nn.Module, degrees: Degrees) -> None:
        if not isinstance(model, ViTMAE):
            raise ModelError(
                f"{type(model).__name__} is not a ViTMAE, so tp = {degrees.tp} cannot split it; it "
                "can be sharded and replicated"
            )
        for path, block in blocks_of(model).items():
            for name, _ in block.named_parameters():
                if name.rpartition(".")[0] not in (*SPLIT, *WHOLE):
                    raise ModelError(
                        f"tensor parallelism cannot split {path}.{name}; it splits attention and "
                        "MLP of a ViTMAE by their names, so train this model without it"
                    )

    def split_tensors(self, model: nn.Module, tp: DeviceMesh, overlap: bool) -> None:
        if overlap:
            overlap_communication(tp)
        frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
        for block in blocks_of(model).values():
            parallelize_module(block, tp, {path: split() for path, split in SPLIT.items()})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def split_context(self, model: nn.Module, cp: DeviceMesh) -> None:
        raise AssertionError("cp is not among its axes")
