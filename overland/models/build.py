"""Builds a run's model on the meta device, unsplit: which transforms the config asks for, in which
order, the dtype of its parameters, and which are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.models.decoder import Decoder
from overland.models.draws import EmbeddingNoise
from overland.models.float8 import Float8
from overland.models.init import cast_floats, require_rules, require_starts
from overland.models.lora import LoRA
from overland.models.nf4 import NF4
from overland.models.registry import build_model
from overland.models.sparse import SparseWeights
from overland.models.structure import check_structure, ties_of
from overland.models.transform import (
    Transform,
    added_rule,
    apply_transforms,
    make_transforms,
    transforms_of,
)


def build_undivided(architecture: Any, config: JobConfig) -> nn.Module:
    """Returns the model from which every part of every layout starts."""
    model = build_model(architecture, config.model.attention)
    check_structure(model)
    apply_transforms(model, transforms_for(config))
    require_rules(model)
    require_starts(model)
    require_no_hand_ties(model)
    cast_floats(model, getattr(torch, config.training.dtype))
    freeze(model, config.model.freeze)
    narrow_frozen(model, config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "nothing would be trained: model.freeze and model.transforms freeze every parameter"
        )
    return model


def transforms_for(config: JobConfig) -> list[Transform]:
    """Returns the transforms that the config asks for. Products in 8 bits come last, so that they
    include modules added by others."""
    adapters = [LoRA(config.lora)] if config.lora.rank else []
    narrow: list[Transform] = [Float8()] if config.training.float8 != "off" else []
    if config.lora.rank and config.lora.base == "nf4":
        narrow.append(NF4(config.lora))
    noise = [Neftune(config.sft.neftune_alpha)] if config.sft.neftune_alpha else []
    sparse = [SparseWeights(config.model.sparse)] if config.model.sparse else []
    return [*make_transforms(config.model.transforms), *sparse, *adapters, *noise, *narrow]


@dataclass(frozen=True)
class Neftune(Transform):
    """Adds noise to the embeddings of a decoder."""

    alpha: float

    def apply(self, model: nn.Module) -> None:
        if not isinstance(model, Decoder):
            raise ModelError(
                f"sft.neftune_alpha requires a Decoder, but the model is {type(model).__name__}: "
                "set it to 0"
            )
        model.model.noise = EmbeddingNoise(self.alpha)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters that match a pattern, and, if a transform trains only its own, all
    parameters except those it has added or also trains. A shared parameter matches by either
    name."""
    only_new = [transform for transform in transforms_of(model) if transform.only_new]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, known in names.items():
        is_new = any(added_rule(model, name) is not None for name in known)
        is_kept = all(any(map(one.also_trains, known)) for one in only_new)
        is_named = any(fnmatchcase(name, pattern) for name in known for pattern in patterns)
        if is_named or not (is_new or is_kept):
            parameter.requires_grad_(False)


def narrow_frozen(model: nn.Module, config: JobConfig) -> None:
    """Stores the weights that are frozen under adapters in the dtype of computation, since they get
    no updates that would need more precision."""
    if not config.lora.rank:
        return
    kind: str = config.lora.base
    if kind in ("auto", "nf4"):  # for everything not in 4 bits already
        kind = config.training.mixed_precision_param
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, kind))


def require_no_hand_ties(model: nn.Module) -> None:
    """Raises if two modules share a parameter without declaring it: it would become two when the
    model is allocated."""
    owner_of: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    ties = ties_of(model)
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            owner, first = owner_of.setdefault(parameter, (module, name))
            if owner is module or ties.get(name) == first:
                continue
            if ties.get(first) == name:
                raise ModelError(
                    f"structure() of {type(model).__name__} ties {first} to {name}, expected the "
                    f'first of them in the model as the owner: ties={{"{name}": "{first}"}}'
                )
            raise ModelError(
                f"{first} and {name} are one parameter, and would become two when the model is "
                "allocated: list it in the ties of structure() (a Decoder does so if its config "
                "has tie_word_embeddings = true), or let one module own the parameter and pass it "
                "to the other"
            )
