"""A model that is not split into stages: gradient accumulation over micro-batches, and steps
recorded as a CUDA graph and replayed.

On one NVIDIA GPU, forward and backward are recorded once as a CUDA graph and then replayed. A step
of a Llama is 1,500 to 4,000 kernels, each launched by the host, and the device waits between them.
A replay is one call for all of them. The same kernels run in the same order on the same numbers, so
results are identical bit for bit. Norm and update stay outside: the learning rate changes from step
to step, and the host has time for them while the replay runs.

A graph reads and writes at fixed addresses: batches are copied into its own tensors, and gradients
stay where they were when it was recorded. It keeps its memory, including activations, from one step
to the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.errors import ModelError
from overland.models.structure import Inputs, structure_of
from overland.parallel.mesh import Mesh
from overland.parallel.sharding import is_single, sync_gradients

PLAIN_STEPS = 3  # run first: they compile and select kernels, which a recording cannot do

Key = tuple[object, ...]


class Whole:
    """A model that is not split into stages; it has the methods of `Pipeline`."""

    def __init__(self, model: nn.Module, rows_per_pass: int, num_sums: int = 1) -> None:
        self.parts = [model]
        self.rows_per_pass = rows_per_pass
        self.num_sums = num_sums
        self._inputs = Inputs(model)

    def loss_and_gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """Returns the summed loss times `scale`, and the objective's other sums; leaves the
        gradients, accumulated over micro-batches, in the parameters."""
        total = torch.zeros(self.num_sums, dtype=torch.float64, device=batch.device)
        micro_batches = list(batch.split(self.rows_per_pass))
        for number, micro in enumerate(micro_batches, start=1):
            sync_gradients(self.parts[0], last=number == len(micro_batches))
            sums = self.loss(micro) * scale
            (sums if sums.ndim == 0 else sums[0]).backward()
            total += sums.detach()
        return total

    def loss(self, batch: Batch) -> Tensor:
        """Returns the summed loss, alone or followed by the objective's other sums."""
        first, others = self._inputs.of(batch.fields)
        return checked_sums(self.parts[0](first, **others), self.num_sums, self._inputs.model)

    def forward_only(self, batch: Batch) -> None:
        """Runs forward passes without gradients, for an objective that records results."""
        for micro in batch.split(self.rows_per_pass):
            self.loss(micro)

    def counted_once(self, parameter: nn.Parameter) -> bool:
        return True


class Replayed(Whole):
    """A whole model whose passes are replayed. They run as usual if shapes are new, documents are
    masked (their number is read on the host), gradients accumulate over several passes (not tested
    yet), or a recording failed."""

    def __init__(self, model: nn.Module, rows_per_pass: int, num_sums: int = 1) -> None:
        super().__init__(model, rows_per_pass, num_sums)
        self._parameters = list(dict.fromkeys(model.parameters()))
        self._recording: Recording | None = None
        self._key: Key = ()
        self._plain_steps = 0

    def loss_and_gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        if "documents_BS" in batch or len(batch) > self.rows_per_pass:
            return super().loss_and_gradients(batch, scale)
        key = self._key_of(batch)
        if key != self._key:  # another shape, or a rewind has moved the parameters
            self._key, self._recording, self._plain_steps = key, None, 0
        if self._recording is None:
            self._plain_steps += 1
            if self._plain_steps <= PLAIN_STEPS or not self._record(batch, scale):
                return super().loss_and_gradients(batch, scale)
        assert self._recording is not None
        return self._recording.replay(batch, scale)

    def _key_of(self, batch: Batch) -> Key:
        shapes = ((name, value.shape) for name, value in batch.fields.items())
        return (*shapes, *(p.data_ptr() for p in self._parameters))

    def _record(self, batch: Batch, scale: Tensor) -> bool:
        """Records the step; returns whether that worked. It is tried once per key, since a second
        attempt would fail like the first."""
        if self._plain_steps > PLAIN_STEPS + 1:
            return False
        batch, scale = batch.map(torch.clone), scale.clone()
        try:
            again, loss = record(lambda: super(Replayed, self).loss_and_gradients(batch, scale))
        except RuntimeError as error:
            for parameter in self._parameters:
                parameter.grad = None
            warnings.warn(
                "the step could not be recorded as a CUDA graph, so it runs without one (set "
                f"compile.cuda_graphs = false to skip this): {str(error).splitlines()[0]}",
                stacklevel=2,
            )
            return False
        gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        self._recording = Recording(again, batch, scale, loss, gradients)
        return True


@dataclass
class Recording:
    """A recorded step and the tensors that it reads and writes."""

    again: Callable[[], None]
    inputs: Batch
    scale: Tensor
    loss: Tensor
    gradients: dict[nn.Parameter, Tensor]

    def replay(self, batch: Batch, scale: Tensor) -> Tensor:
        for name, place in self.inputs.fields.items():
            place.copy_(batch[name])
        self.scale.copy_(scale)
        self.again()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        return self.loss


def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records the work; returns a function that runs it, and its result, which each run updates.
    The work itself has not run yet."""
    graph = torch.cuda.CUDAGraph()
    # Other threads keep running, reading batches and pinning memory for checkpoints.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


def checked_sums(returned: object, num_sums: int, model: str) -> Tensor:
    """Returns what a model returned, or raises if that is not the sums of a pass."""
    shapes = [(num_sums,)] if num_sums > 1 else [(), (1,)]
    if isinstance(returned, Tensor) and tuple(returned.shape) in shapes:
        return returned
    what = f"a {type(returned).__name__}"
    if isinstance(returned, Tensor):
        what = f"a tensor of shape {tuple(returned.shape)}"
    expected = "the sum of its loss, a single number"
    if num_sums > 1:
        expected = f"the sums of its loss and metrics, a tensor of shape ({num_sums},)"
    raise ModelError(
        f"forward() of {model.removeprefix('FSDP')} returned {what}, expected {expected} "
        "(docs/extending.md)"
    )


def can_replay(model: nn.Module, mesh: Mesh, config: JobConfig) -> bool:
    """Whether steps can be replayed: on one NVIDIA GPU, with a model that never waits for it. Flex
    attention builds its masks in every pass and has not been tested; without compilation, blocks
    are meant to be debugged."""
    if not (config.compile.enable and config.compile.cuda_graphs):
        return False
    if mesh.device_type != "cuda" or torch.version.hip or not is_single(mesh, config):
        return False
    return structure_of(model).recordable and config.model.attention != "flex"
