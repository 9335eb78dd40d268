"""Buffers of a user's own model: where their values come from, and which of them are saved.

Models are built on the meta device, where no tensor has values, and get memory afterwards. A
parameter then starts by `init_rule(name)`; a buffer (a table of angles, a running mean) starts by
`init_buffers()` of the module that registered it, or of any module around that one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overland.errors import ModelError
from overland.models.init import plain_name


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts real floating-point tensors. Module.to() would drop the imaginary part of a complex
    buffer."""
    return model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, by plain name."""
    return {
        name: buffer
        for name, owner, own, buffer in _buffers(model)
        if own not in owner._non_persistent_buffers_set
    }


def require_starts(model: nn.Module) -> None:
    """Refuses a model with a buffer that no `init_buffers()` is responsible for."""
    without = list(_without_start(model))
    if without:
        name, owner = without[0]
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        raise ModelError(
            f"nothing sets the values of the buffer {name}{more}: models are built without memory, "
            f"so {type(owner).__name__}, or a module around it, needs a method init_buffers() that "
            "fills it"
        )


def init_buffers(model: nn.Module, device: torch.device) -> None:
    """Calls every `init_buffers()`, from the outermost module inwards. Values may be written into
    the buffers or assigned to them."""
    was = {}
    for name, owner, own, buffer in _buffers(model):
        was[name] = buffer
        plain = buffer.to_local() if isinstance(buffer, DTensor) else buffer
        plain = torch.empty_like(plain, device=device)  # parameters may be kept in host memory
        owner._buffers[own] = plain.fill_(_unset(plain.dtype))
    with torch.no_grad(), torch.device(device):
        for module in model.modules():
            if has_start(module):
                module.init_buffers()  # type: ignore[operator]
    for name, owner, own, buffer in _buffers(model):
        if _is_unset(buffer):
            raise ModelError(f"init_buffers() leaves values of the buffer {name} unset")
        buffer = buffer.to(device, was[name].dtype)
        like = was[name]
        if isinstance(like, DTensor):
            buffer = DTensor.from_local(buffer, like.device_mesh, like.placements)
        owner._buffers[own] = buffer


def has_start(module: nn.Module) -> bool:
    return callable(getattr(type(module), "init_buffers", None))


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(full name, the module that registered it, its name there, the buffer)."""
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield plain_name(f"{prefix}.{own}" if prefix else own), module, own, buffer


def _without_start(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    if has_start(module):
        return
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield prefix + name, module
    for name, child in module.named_children():
        yield from _without_start(child, f"{prefix}{name}.")


def _unset(dtype: torch.dtype) -> float | int:
    """What no module fills a buffer with, where the type has such a value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(buffer: Tensor) -> bool:
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    smallest = torch.iinfo(buffer.dtype).min if buffer.dtype != torch.bool else 0
    return smallest < 0 and bool((buffer == smallest).any())
