"""The optimizer of a run: this rank's parameters with their state and rates (which
config/derived.py decides), gradient clipping, and skipped updates.

Clipping, the loss scale and the check for finite values reach the rules as two numbers on the
device: a divisor for the gradients, and a flag that cancels the whole update. So the loop never
waits to learn whether a step was good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn

from overland.checkpoint import plan
from overland.config import schema
from overland.config.derived import GroupRates, group_rates
from overland.kernels.bfloat16 import Places, join
from overland.optimizers.adamw import update_adamw
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import (
    ParameterShard,
    Step,
    packed,
    unpacked,
    update_in_pieces,
)
from overland.optimizers.registry import rule_for, rules_of, state_kinds
from overland.optimizers.rule import Elementwise, Packed, Rule, Scalar, StateKinds, WholeMatrix
from overland.optimizers.whole_matrix import Matrices
from overland.parallel.master_weights import MasterWeights
from overland.parallel.sharding import (
    names_by_parameter,
    places_of_shard,
    shard_of,
    tied_copies,
)

PREFIX = "optimizer."

Saved = dict[str, Tensor | plan.PackedTensor]
Updater = Callable[[Sequence[ParameterShard], Step], None]


@dataclass(frozen=True)
class TrainedParameter:
    """One parameter, with its fixed properties and its state."""

    name: str
    rule: Rule
    kinds: StateKinds
    group: GroupRates
    seed: int
    state: dict[str, Tensor] = field(default_factory=dict)
    packed: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    is_saved: bool = True

    def packing(self, name: str) -> Packed:
        kind = self.kinds[name]
        assert isinstance(kind, Packed)
        return kind

    def saved_name(self, name: str) -> str:
        return f"{PREFIX}{self.name}.{name}"


class Optimizer:
    """Updates the parameters of this rank. Master weights are whole until `split`; within `whole`
    they are whole too, and packed state is unpacked."""

    def __init__(self, parts: Sequence[nn.Module], settings: schema.Optimizer) -> None:
        names = names_by_parameter(parts)
        some = next(iter(names))  # trained or not, since all parameters of a stage may be frozen
        self.num_updates = torch.zeros((), device=some.device)
        self.rules = rules_of(settings)
        self._entries = {
            parameter: self._entry(names[parameter], parameter, settings)
            for part in parts
            for parameter in part.parameters()
            if parameter.requires_grad
        }
        for _, copy in tied_copies(parts):  # one copy is saved, two are updated
            if copy in self._entries:
                entry = self._entries[copy]
                self._entries[copy] = replace(entry, name=f"{entry.name} (copy)", is_saved=False)
        is_widest = any(parameter.dtype == torch.float64 for parameter in self._entries)
        self._wide = torch.float64 if is_widest else torch.float32
        self._master_weights = MasterWeights(parts)
        self._updaters: list[Updater] | None = None
        self._places: dict[nn.Parameter, Places] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return list(self._entries)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state of a parameter, by name; packed state only within `whole`."""
        return self._entries[parameter].state

    @property
    def num_bytes(self) -> int:
        """Memory of the state on this rank."""
        kept = [[*entry.state.values()] for entry in self._entries.values()]
        kept += [[*some] for entry in self._entries.values() for some in entry.packed.values()]
        return sum(shard_of(tensor).nbytes for some in kept for tensor in some)

    def update(
        self,
        learning_rate: float,
        norm: Tensor,
        max_norm: float,
        loss_scale: Tensor,
        skip: Tensor,
    ) -> None:
        """Does one step with gradients divided by the loss scale and clipped; `skip` changes
        nothing.

        `norm` is the norm of the gradients without their loss scale.
        """
        divisor = loss_scale
        if max_norm > 0:
            divisor = loss_scale * (norm / max_norm).clamp(min=1.0)
        home = self.num_updates.device  # host memory, if the parameters are offloaded
        divisor, skip = divisor.to(home, self._wide), skip.to(home, torch.float32)
        self.num_updates += 1
        step = Step(learning_rate, self.num_updates, divisor, skip)
        with torch.no_grad():
            for rule, update in zip(self.rules, self.prepared(), strict=True):
                update(self._shards(rule), step)
        self.num_updates -= skip
        for parameter in self._entries:
            parameter.grad = None

    def split(self, gradient_dtype: torch.dtype | None = None) -> None:
        """Splits float32 master weights: from now on the parameters are bfloat16. If several passes
        accumulate, their gradients are summed in `gradient_dtype`."""
        self._master_weights.split(gradient_dtype)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within this context, parameters and state are plain tensors in the form that is saved:
        what is read is exact, and what is written is kept."""
        with self._master_weights.whole():
            for parameter, entry in self._entries.items():
                for name, kept in entry.packed.items():
                    entry.state[name] = torch.zeros_like(parameter.detach(), dtype=torch.float32)
                    place = shard_of(entry.state[name])
                    place.copy_(unpacked(entry.packing(name), kept, place.shape))
            try:
                yield
            finally:
                for entry in self._entries.values():
                    for name in entry.packed:
                        numbers = shard_of(entry.state.pop(name))
                        entry.packed[name] = packed(entry.packing(name), numbers)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state by its names in a checkpoint, to be filled from one. Only within
        `whole`."""
        found = {f"{PREFIX}num_updates": self.num_updates}
        for entry in self._entries.values():
            if entry.is_saved:
                found |= {entry.saved_name(name): entry.state[name] for name in entry.kinds}
        return found

    def saved(self) -> Saved:
        """Returns the state under the same names, to be saved; packed state is unpacked as it is
        written."""
        found: Saved = {f"{PREFIX}num_updates": self.num_updates}
        for parameter, entry in self._entries.items():
            if not entry.is_saved:
                continue
            found |= {entry.saved_name(name): one for name, one in entry.state.items()}
            for name, kept in entry.packed.items():
                kind = entry.packing(name)
                like, unpack = parameter.detach(), kind.unpack
                found[entry.saved_name(name)] = plan.PackedTensor(
                    like, torch.float32, kept, unpack, kind.block
                )
        return found

    def saved_parameter(self, parameter: nn.Parameter) -> Tensor | plan.PackedTensor:
        """Returns the form in which a parameter is saved: a split one as its float32 master
        weight."""
        remainder = self._master_weights.remainders.get(parameter)
        if remainder is None:
            return parameter.detach()
        return plan.PackedTensor(
            parameter.detach(), torch.float32, (shard_of(parameter.detach()), remainder), join
        )

    def copy_state(self, parameter: nn.Parameter, copy: nn.Parameter) -> None:
        """Gives a tied copy the state of its parameter. Only within `whole`."""
        for name, one in self.state(parameter).items():
            self.state(copy)[name].copy_(one)

    def _entry(
        self, name: str, parameter: nn.Parameter, settings: schema.Optimizer
    ) -> TrainedParameter:
        shape = tuple(parameter.shape)
        rule = rule_for(self.rules, name, shape)
        kinds = state_kinds(self.rules, name, shape)
        entry = TrainedParameter(
            name,
            rule,
            kinds,
            group_rates(name, len(shape), settings),
            # From the name: both copies of a tied matrix must be rounded alike, wherever they are.
            seed=crc32(name.encode()) >> 1,
        )
        like = parameter.detach()
        for state, kind in kinds.items():
            if isinstance(kind, Packed):
                zeros = torch.zeros_like(shard_of(like), dtype=torch.float32)
                entry.packed[state] = packed(kind, zeros)
            elif isinstance(kind, Scalar):
                wide = torch.promote_types(parameter.dtype, torch.float32)
                dtype = getattr(torch, kind.dtype) if kind.dtype else wide
                entry.state[state] = torch.zeros((), dtype=dtype, device=parameter.device)
            else:
                dtype = getattr(torch, kind.dtype) if kind.dtype else parameter.dtype
                entry.state[state] = torch.zeros_like(like, dtype=dtype)
        return entry

    def prepared(self) -> list[Updater]:
        """Returns an updater for each rule. They are created in the first step, while the timeout
        of collectives is still long."""
        if self._updaters is None:
            self._places = {parameter: places_of_shard(parameter) for parameter in self._entries}
            self._updaters = [
                updater_of(rule, {e.name: p for p, e in self._entries.items() if e.rule is rule})
                for rule in self.rules
            ]
        return self._updaters

    def _shards(self, rule: Rule) -> list[ParameterShard]:
        return [
            ParameterShard(
                entry.name,
                shard_of(parameter.detach()),
                self._master_weights.remainders.get(parameter),
                shard_of(parameter.grad),
                entry.kinds,
                {name: shard_of(one) for name, one in entry.state.items()},
                entry.packed,
                entry.group.lr_factor,
                entry.group.weight_decay,
                entry.seed,
                self._places[parameter],
            )
            for parameter, entry in self._entries.items()
            if entry.rule is rule and parameter.grad is not None
        ]


def updater_of(rule: Rule, parameters: Mapping[str, nn.Parameter]) -> Updater:
    """Returns the function that updates these parameters of this rank."""
    if isinstance(rule, WholeMatrix):
        return Matrices(rule, parameters).update
    if isinstance(rule, AdamW):
        return partial(update_adamw, rule)
    assert isinstance(rule, Elementwise)
    return partial(update_in_pieces, rule)
