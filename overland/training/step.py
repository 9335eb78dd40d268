"""One optimizer step: images preprocessed as `[images]` says, the summed loss of the global batch,
divided by its count, the norm of the gradients over all ranks, whether to skip the update, and the
update.

The objective defines the loss and what it is averaged over (see objectives/); losses,
statistics and state inside the model are in inner_state.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overland.data.batch import Batch
from overland.data.sources.image_files import WANTED
from overland.kernels.gradients import sum_of_squares
from overland.models.draws import draws_of
from overland.objectives.objective import count_of
from overland.optimizers.optimizer import Optimizer
from overland.parallel.apply import ParallelModel
from overland.parallel.comm import from_first_rank, sum_over, total_sums
from overland.parallel.context import share_of_rows
from overland.parallel.mesh import SHARDS, Mesh
from overland.parallel.sharding import reshard, shard_of
from overland.training.health import SpikeGuard
from overland.training.run import Run
from overland.training.schedule import learning_rate
from overland.world.heartbeat import Phase

DRAWS = ("draws_BS", "noise_BS")
"""The batch fields that seed dropout and noise."""
EPSILON = 1e-6  # added to the variance, so that a constant image becomes zeros


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device; reading one waits for the step."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    not_finite: torch.Tensor
    is_empty: torch.Tensor
    """Whether nothing in the global batch counts towards the loss, which is then NaN."""
    num_units: int
    """Number of tokens, or of samples for models of arrays."""
    metrics: torch.Tensor
    """What the objective logs alongside the loss, in the order of its names."""
    spiked: bool = False


def train_step(run: Run, batch: Batch, guard: SpikeGuard | None = None) -> StepResult:
    """Runs one step. The weights stay unchanged if it is not finite, empty or a loss spike."""
    run.beat.enter(Phase.COMPUTING)
    training, scaler, mesh = run.config.training, run.scaler, run.mesh
    share = share_of_rows(with_draws(run, with_known(run, batch)), mesh)
    count = sum_over(count_of(run.objective, share), mesh.token_group)
    is_empty = count == 0
    count = count.masked_fill(is_empty, 1)  # 0 / 1, not 0 / 0, so that no gradient becomes NaN
    share = with_passes(run, share)
    scale = scaler.scale.double()  # 1 / count in float32 would be off by 6e-8
    run.inner.begin_step(scale / run.global_batch_size)
    sums = run.model.loss_and_gradients(share, scale / count)
    sums = (total_sums(sums, mesh) / scale).masked_fill(is_empty, torch.nan)
    loss = sums[0]

    norm = gradient_norm(run.optimizer, run.model, mesh).to(run.device) / scaler.scale
    not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm)) & ~is_empty
    spiked = guard is not None and from_first_rank(guard.is_spike(loss.item()))
    rate = learning_rate(run.progress.step, run.config)
    run.store.wait_on_device()  # a save may still be copying what is about to change
    skip = not_finite | is_empty | spiked
    run.optimizer.update(rate, norm, training.max_norm, scaler.scale, skip)
    run.inner.after_step(skip, run.progress.step + 1)
    scaler.update(not_finite.float())
    per_row = batch["tokens_BS"].shape[1] if "tokens_BS" in batch else run.measure.per_row
    num_units = run.global_batch_size * per_row
    return StepResult(loss, norm, not_finite, is_empty, num_units, sums[1:], spiked)


def with_passes(run: Run, share: Batch) -> Batch:
    """Runs the objective's passes without gradients and returns the batch with their results as
    fields. Only the last stage of a pipeline needs and gets them. A reference is not trained, so
    these passes have no dropout and no noise."""
    objective = run.objective
    is_single = run.mesh.degrees.pp == 1 and len(share) <= run.model.rows_per_pass
    objective.has_passes = bool(objective.passes) and not (objective.gathers and is_single)
    if not objective.has_passes:
        return share  # of rows that are compared, all are in the one pass that follows
    given = share if objective.gathers else share.without(*DRAWS)
    for field in objective.passes:
        reshard(run.model.parts)  # otherwise a gathered copy would hold stale values
        with (
            torch.no_grad(),
            objective.during(field, run.model.parts),
            objective.finding(field) as found,
        ):
            run.model.forward_only(given)
        reshard(run.model.parts)
        if found:
            result = objective.completed(field, torch.cat(found), share.fields)
            share = share.replace(**{field: result})
    return share


def gradient_norm(optimizer: Optimizer, model: ParallelModel, mesh: Mesh) -> Tensor:
    """Returns the 2-norm of all gradients together, over every shard and stage.

    Gradients are grouped by the axes they are sharded over, so that there is one small all-reduce
    per axis, however many parameters there are.
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in optimizer.parameters:
        if parameter.grad is not None and model.counted_once(parameter):
            axes = sharded_axes(parameter.grad)
            groups.setdefault(axes, []).append(shard_of(parameter.grad))
    squares = {axes: sum_of_squares(gradients) for axes, gradients in groups.items()}
    assert {axis for axes in squares for axis in axes} <= {*SHARDS}, "unknown axis of a gradient"
    for axis in SHARDS:
        together = [axes for axes in squares if axis in axes]
        if together and mesh.parameters[axis].size() > 1:
            summed = torch.stack([squares[axes] for axes in together])
            sum_over(summed, mesh.parameters.get_group(axis))
            squares.update(zip(together, summed, strict=True))
    # A stage whose parameters are all frozen must still take part in the sum.
    total = torch.stack([no_squares(model), *squares.values()]).sum()
    return sum_over(total, mesh.parameters.get_group("pp")).sqrt()


def no_squares(model: ParallelModel) -> Tensor:
    """Returns zero, with the dtype and device of the sums."""
    some = next(parameter for part in model.parts for parameter in part.parameters())
    wide = torch.promote_types(some.dtype, torch.float32)
    return torch.zeros((), dtype=wide, device=some.device)


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Returns the mesh axes along which ranks hold different parts."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(name for name, placement in axes if not placement.is_replicate())


def with_draws(run: Run, batch: Batch) -> Batch:
    """Adds the seeds of dropout and noise, if the config asks for either."""
    amounts = (run.config.lora.dropout, run.config.sft.neftune_alpha)
    names = [name for name, amount in zip(DRAWS, amounts, strict=True) if amount]
    if not names:
        return batch
    length, seed = batch["tokens_BS"].shape[1], run.config.debug.seed
    draws_BS = draws_of(seed, batch["sample_B"], batch["epoch_B"], length)
    return batch.replace(**dict.fromkeys(names, draws_BS))


def with_known(run: Run, batch: Batch) -> Batch:
    """Adds the precomputed reference, if there is one, and preprocesses images as `[images]` says.
    The ledger digests images as they are read, because devices differ in the last bit of a mean."""
    if run.config.images.instance_norm and WANTED in batch:
        batch = batch.replace(**{WANTED: instance_norm(batch[WANTED])})
    return batch if run.reference is None else run.reference.added_to(batch)


def instance_norm(pixels_BCHW: Tensor) -> Tensor:
    """Normalizes each channel of each image to mean 0 and variance 1, in float32."""
    wide = pixels_BCHW if pixels_BCHW.dtype == torch.float64 else pixels_BCHW.to(torch.float32)
    var, mean = torch.var_mean(wide, dim=(-2, -1), correction=0, keepdim=True)
    return (wide - mean) * (var + EPSILON).rsqrt()
