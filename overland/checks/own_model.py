"""Refuses a custom model whose blocks do not run as its `structure()` says, which pipelines rely
on, and finds the matrices that transforms or the optimizer leave out. Both show when the model is
built on the meta device, which computes nothing.

Its blocks must be called in the order in which `structure()` names them, and pass what it
describes: a pipeline is split by that description alone, so a wrong order would give wrong results,
and a wrong shape would make stages hang. And settings may not reach some of its matrices: fp8,
adapters, 4 bits and sparse weights change linear layers, whole-matrix optimizers take parameters of
two dimensions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from overland.config.derived import COMPARED, Degrees, optimizer_settings, resolve_dtype
from overland.config.schema import JobConfig
from overland.data.wanted import sources_of
from overland.errors import DataError, ModelError
from overland.models.build import build_undivided, transforms_for
from overland.models.flops import sample_fields
from overland.models.registry import own_model_name
from overland.models.structure import Inputs, blocks_of, structure_of
from overland.models.transform import transforms_of
from overland.objectives.preference import REFERENCE
from overland.optimizers.registry import rule_for, rules_of
from overland.optimizers.rule import WholeMatrix
from overland.parallel.apply import require_splittable
from overland.words import any_of

MOST_MATRICES = 6  # named in a sentence


def require_order(architecture: Any, config: JobConfig, degrees: Degrees) -> str:
    """Refuses a custom model that a pipeline would change, or that would hang in one. Returns a
    note if that cannot be determined, because the model does not run without values."""
    if degrees.pp == 1 or own_model_name(architecture) is None:
        return ""
    # Attention kernels and float8 do not change the order, and both need a GPU.
    any_device = config.having({"model.attention": "auto", "training.float8": "off"})
    with torch.device("meta"):
        model = build_undivided(architecture, any_device)
        require_splittable(model, architecture, degrees)
        structure = structure_of(model)
        if structure.between is None:
            return ""  # which stage_costs() refuses
        rows = config.parallelism.pipeline_parallel_microbatch_size
        tokens = config.training.seq_len
        first, others = Inputs(model).of(made_up_fields(architecture, rows, tokens, config))
        called: list[str] = []
        returned: dict[str, object] = {}
        for name, block in blocks_of(model).items():
            block.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            block.register_forward_hook(
                lambda *passed, name=name: returned.update({name: passed[2]})
            )
        failure = ""
        try:
            with torch.random.fork_rng(devices=[]):  # the run's random numbers must not change
                model(first, **others)
        except Exception as error:  # the user's code may fail in any way at all
            failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    named, own = list(blocks_of(model)), type(model).__name__
    refuse_order(own, named, called, is_whole=not failure)
    said = structure.between(tokens)
    expected = (rows, *said) if isinstance(said, tuple | list) else said
    refuse_shape(own, {name: returned[name] for name in named[:-1] if name in returned}, expected)
    if not failure or len(returned) == len(named):  # what follows the blocks does not matter here
        return ""
    return (
        f"could not check whether {own} calls its blocks in the order of structure(), nor what "
        "passes between them: a forward pass on the meta device, where tensors have no values, "
        f"fails with {failure}"
    )


def refuse_order(own: str, named: list[str], called: list[str], is_whole: bool) -> None:
    """Refuses another order than that of structure(). `is_whole`: the pass finished, so missing
    blocks are never called."""
    for name in called:
        if (times := called.count(name)) > 1:
            raise ModelError(
                f"the forward pass of {own} calls {name} {times} times, but a pipeline stage calls "
                "each of its blocks once; train it with pp = 1"
            )
    missing = [name for name in named if name not in called]
    if missing and is_whole:
        raise ModelError(
            f"structure() of {own} names {missing[0]} among the blocks, which its forward pass "
            "does not call; name only blocks that it calls, or train it with pp = 1"
        )
    for number, (name, instead) in enumerate(zip(named, called, strict=False), 1):
        if name != instead:
            raise ModelError(
                f"structure() of {own} names {name} as block {number}, but its forward pass calls "
                f"{instead} there, so a pipeline would train another model; name the blocks in the "
                "order of the forward pass"
            )


def refuse_shape(own: str, returned: Mapping[str, object], expected: object) -> None:
    """Refuses a block that passes to the next, which may be on another stage, what structure() does
    not say."""
    for name, found in returned.items():
        if not isinstance(found, Tensor):
            raise ModelError(
                f"{name} of {own} returns a {type(found).__name__}, but pipeline stages pass a "
                "single tensor to each other; let each block return only the hidden state, or "
                "train it with pp = 1"
            )
        if tuple(found.shape) != expected:
            raise ModelError(
                f"{name} of {own} returns the shape {tuple(found.shape)}, but between() of its "
                f"structure() says {expected}, with the rows of a micro-batch; make them agree"
            )


def made_up_fields(
    architecture: Any, rows: int, tokens: int, config: JobConfig
) -> dict[str, Tensor]:
    """Returns a batch of zeros, in the shapes that the model expects."""
    numbers = {name: torch.zeros(rows, dtype=torch.int64) for name in ("sample_B", "epoch_B")}
    shapes = sample_fields(architecture)
    if shapes is not None:
        return numbers | {
            name: torch.zeros(rows, *shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in shapes.items()
        }
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    documents = {"documents_BS": ids} if config.data.document_mask else {}
    channels = {
        f"{name}_BS": torch.zeros(rows, tokens, dtype=getattr(torch, dtype))
        for name, dtype in channels_of(config).items()
    }
    own = {"tokens_BS": ids, "labels_BS": ids, "positions_BS": ids}
    preference, computed = config.preference, {}
    if preference.loss in COMPARED and preference.reference == "precomputed":
        computed = {REFERENCE: torch.zeros(rows, 2)}
    return own | documents | channels | numbers | computed


def channels_of(config: JobConfig) -> dict[str, str]:
    """Returns the channels that accompany the tokens of the training data, from sources that exist:
    an objective may need them."""
    found: dict[str, str] = {}
    for wanted in sources_of(config).values():
        if not wanted.is_made:
            with suppress(DataError, OSError):
                found |= wanted.open().channels or {}
    return found


def left_out(architecture: Any, config: JobConfig) -> list[str]:
    """Returns a sentence for each transform and for the optimizer, if it leaves something out."""
    rules = rules_of(optimizer_settings(config))
    if not transforms_for(config) and not isinstance(rules[0], WholeMatrix):
        return []
    with torch.device("meta"):
        model = build_undivided(architecture, resolve_dtype(config, "cuda"))  # any will do
    notes = []
    for transform in transforms_of(model):
        if names := transform.left_out(model):
            key = transform.key or type(transform).__name__
            notes.append(f"{key} leaves out {merged(names)}, which it cannot change")
    if isinstance(rules[0], WholeMatrix):
        others = [
            name
            for name, one in model.named_parameters()
            if one.requires_grad
            and one.ndim > 1
            and rule_for(rules, name, tuple(one.shape)) is not rules[0]
        ]
        if others:
            name, second = config.optimizer.name, rules[0].others
            notes.append(f"{name} leaves {merged(others)} to {second}")
    return notes


def merged(names: Sequence[str]) -> str:
    """Returns names, with those that differ only in numbers as one."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    words = [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
    more = [f"{len(words) - MOST_MATRICES} more"] if len(words) > MOST_MATRICES else []
    return any_of([*words[:MOST_MATRICES], *more], "and")
