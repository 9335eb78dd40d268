"""Pipeline parallelism: the layers split into stages over `pp`, micro-batches flowing through them
under a schedule of `torch.distributed.pipelining`.

    schedule                stages per rank     in which order
    GPipe                          1            all forwards, then all backwards
    1F1B                           1            one forward, one backward
    Interleaved1F1B                2            the same, each rank twice in the loop
    InterleavedZeroBubble          2            weight gradients fill the gaps
    ZBVZeroBubble, DualPipeV       2            the loop turns back: rank 0 has first and last stage

Stages are whole decoders with parts left out, so parameter names are those of the undivided model.
Layers are dealt out by cost, the output matrix counted as the layers it weighs. Tied embeddings
live on the first and the last stage: their gradients are summed before the update, which is then
the same on both, and the norm counts them once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overland.config.schedules import STAGES_PER_RANK, TURNING
from overland.data.batch import Batch
from overland.models.config import DecoderConfig
from overland.models.decoder import Decoder
from overland.models.errors import ModelError
from overland.parallel.mesh import Mesh
from overland.parallel.parts import shard_of

# What a stage can own. Anything else would be trained by every stage, each in its own way.
STAGED = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def stages_of_rank(rank: int, pp: int, schedule: str) -> list[int]:
    if STAGES_PER_RANK[schedule] == 1:
        return [rank]
    return [rank, 2 * pp - 1 - rank] if schedule in TURNING else [rank, rank + pp]


def deal_layers(config: DecoderConfig, num_stages: int) -> list[range]:
    """Consecutive layers for each stage: one for each, then always one more for the cheapest."""
    layer, head = layer_and_head_cost(config)
    counts = [1] * num_stages
    costs = [layer] * (num_stages - 1) + [layer + head]
    for _ in range(config.num_hidden_layers - num_stages):
        cheapest = costs.index(min(costs))
        counts[cheapest] += 1
        costs[cheapest] += layer
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def layer_and_head_cost(config: DecoderConfig) -> tuple[float, float]:
    """Multiplications per token of a layer's matrices and of the output matrix."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * config.head_dim * heads
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return float(layer), float(config.hidden_size * config.vocab_size)


def micro_batches_kept(schedule: str, pp: int, num_microbatches: int) -> list[set[tuple[int, ...]]]:
    """For each rank of a pipeline, how many micro-batches each of its stages keeps for the backward
    pass at a time: all combinations that occur in a step, in the order that torch's schedule has.

    A micro-batch is kept from its forward pass until its backward pass is over. Where that is split
    in two, the gradients of the inputs free nothing: torch computes them with `retain_graph`, and
    the nodes that it remembers for the gradients of the weights reach the whole graph. Those free
    all of it. In between, torch also holds the gradient of every output of an operation on a
    parameter; that is no part of this count.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    numbers = stages_of_rank(0, pp, schedule)
    stages = [SimpleNamespace(stage_index=number, num_stages=pp * len(numbers), group_size=pp,
                              group_rank=0, is_first=number == 0, device=torch.device("cpu"),
                              is_last=number == pp * len(numbers) - 1, submod=nn.Identity())
              for number in numbers]  # fmt: skip
    kind: Callable[..., Any] = get_schedule_class(schedule)
    made = kind(
        stages if len(numbers) > 1 else stages[0], num_microbatches, loss_fn=lambda *_: None
    )
    change = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
    combinations = []
    for rank in range(pp):
        kept = dict.fromkeys(stages_of_rank(rank, pp, schedule), 0)
        found = set()
        for action in made.pipeline_order[rank]:
            for part in () if action is None else action.sub_actions or (action,):
                kept[part.stage_index] += change.get(part.computation_type.name, 0)
                found.add(tuple(kept.values()))
        combinations.append(found)
    return combinations


def keep_stage(model: Decoder, layers: range, *, first: bool, last: bool) -> None:
    """Takes out of a decoder what other stages have."""
    for name, _ in model.named_parameters():
        if not name.startswith(STAGED):
            raise ModelError(
                f"{name} is outside of the blocks, the embedding, the last norm and the head, so "
                "no stage of a pipeline would own it; put it into a block, or set pp to 1"
            )
    names = list(model.model.layers)
    if names != [str(number) for number in range(len(names))]:
        raise ModelError(
            f"the blocks are named {', '.join(names[:3])}, …, and a pipeline deals them out by "
            "number: name them 0, 1, 2, … in their order, or set pp to 1"
        )
    for name in names:
        if int(name) not in layers:
            del model.model.layers[name]
    if not first:
        model.model.embed_tokens = None
    if not last:
        model.model.norm = model.lm_head = None
    else:
        # Schedules join the outputs of micro-batches, and numbers without a dimension don't join.
        model.register_forward_hook(
            lambda module, args, out: torch.stack((out,)) if out.ndim == 0 else out
        )


class Pipeline:
    """The stages of this rank under their schedule. Called alike on every rank of the pipeline."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        mesh: Mesh,
        schedule: str,
        microbatch_rows: int,
        num_microbatches: int,
        row_tokens: int,
        hidden_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`hidden_shape`: what passes between stages for one row (tokens, width)."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        from overland.parallel.stage import Stage

        self.parts = list(parts)
        self.rows_per_pass = microbatch_rows * num_microbatches
        pp = mesh.axis("pp")
        numbers = stages_of_rank(mesh.rank("pp"), pp.size(), schedule)
        num_stages = pp.size() * len(numbers)
        wide = torch.promote_types(dtype, torch.float32)
        hidden = torch.empty(
            microbatch_rows, *hidden_shape, dtype=dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty(microbatch_rows, row_tokens, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=wide, device="meta", requires_grad=True)
        stages = [
            Stage(
                part,
                number,
                num_stages,
                device,
                input_args=tokens if number == 0 else hidden,
                output_args=loss if number == num_stages - 1 else hidden,
                group=pp.get_group(),
            )
            for part, number in zip(self.parts, numbers, strict=True)
        ]
        kind: Callable[..., Any] = get_schedule_class(schedule)
        self._scale = torch.ones((), device=device)
        self._schedule = kind(
            stages if STAGES_PER_RANK[schedule] > 1 else stages[0],
            num_microbatches,
            loss_fn=lambda output, target: output.squeeze() * self._scale,
            scale_grads=False,
        )
        self._first, self._last = 0 in numbers, num_stages - 1 in numbers
        self._tied = TiedEmbedding.find(self.parts, mesh)

    def loss_and_gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """The summed loss times `scale` (zero away from the last stage); gradients are left in
        the parameters."""
        self._scale = scale
        losses: list[Tensor] = []
        self._schedule.step(*self._args(batch), target=batch["labels_BS"], losses=losses,
                            **self._kwargs(batch))  # fmt: skip
        if self._tied is not None:
            self._tied.sum_gradients()
        return self._sum(losses, scale)

    def loss(self, batch: Batch) -> Tensor:
        self._scale = torch.ones((), device=batch.device)
        losses: list[Tensor] = []
        self._schedule.eval(*self._args(batch), target=batch["labels_BS"], losses=losses,
                            **self._kwargs(batch))  # fmt: skip
        return self._sum(losses, self._scale)

    def counted_once(self, parameter: nn.Parameter) -> bool:
        """False for the last stage's copy of a tied embedding."""
        return self._tied is None or not self._tied.is_copy(parameter)

    def _args(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch["tokens_BS"],) if self._first else ()

    def _kwargs(self, batch: Batch) -> dict[str, Tensor]:
        names = ("positions_BS", "documents_BS", "labels_BS")
        return {name: batch[name] for name in names if name in batch}

    def _sum(self, losses: list[Tensor], like: Tensor) -> Tensor:
        if not self._last:
            return torch.zeros((), dtype=torch.float64, device=like.device)
        return torch.stack([loss.detach().double() for loss in losses]).sum()


class TiedEmbedding:
    """One matrix at both ends of the pipeline."""

    def __init__(
        self,
        embedding: Tensor | None,
        head: Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.embedding, self.head, self.group = embedding, head, group

    @classmethod
    def find(cls, parts: Sequence[Decoder], mesh: Mesh) -> TiedEmbedding | None:
        if not parts[0].config.tie_word_embeddings:
            return None
        tokens = [part.model.embed_tokens for part in parts]
        heads = [part.lm_head for part in parts]
        embedding = next((e.weight for e in tokens if e is not None), None)
        head = next((h.weight for h in heads if h is not None), None)
        end = embedding if embedding is not None else head
        if end is not None and not end.requires_grad:  # frozen: there are no gradients to sum
            embedding = head = None
        return cls(embedding, head, end_group(mesh))

    def is_copy(self, parameter: nn.Parameter) -> bool:
        return parameter is self.head

    def sum_gradients(self) -> None:
        if self.embedding is not None and self.head is not None:  # both ends on this rank
            assert self.embedding.grad is not None
            assert self.head.grad is not None
            total = shard_of(self.embedding.grad) + shard_of(self.head.grad)
            shard_of(self.embedding.grad).copy_(total)
            shard_of(self.head.grad).copy_(total)
        elif self.embedding is not None or self.head is not None:
            mine = self.embedding if self.embedding is not None else self.head
            assert mine is not None
            assert mine.grad is not None
            dist.all_reduce(shard_of(mine.grad), group=self.group)


def end_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """First and last rank of this rank's pipeline, as a group. Every rank takes part in making
    the groups of all pipelines."""
    ranks = mesh.tokens.mesh  # [pp, dp, cp, tp]
    mine = None
    for ends in ranks[[0, -1]].flatten(1).t().tolist():
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
