"""Initial weights: the standard deviations of a decoder's weights, and numbers that are a pure
function of (seed, parameter name, element); and initial buffers.

The scheme: embeddings, linear layers and the output matrix are normal with mean 0 and standard
deviation `initializer_range`; for `o_proj` and `down_proj`, which write into the residual stream,
it is divided by sqrt(2 x number of layers); norms start at 1, biases at 0.

Each element is a hash of its position turned into a normal number, so a rank computes its own shard
alone and every layout starts from the same bits. This needs no state, no communication and no
full-size tensor anywhere.

Models are built on the meta device, where no tensor has values, and are allocated afterwards. Then
`init_rule(name)` tells how a parameter starts; a buffer (a table of angles, a running mean) is
filled by `init_buffers()` of the module that registered it, or of any enclosing module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overland.errors import ModelError
from overland.kernels.nf4 import columns_of, pack
from overland.models.config import DecoderConfig
from overland.models.draws import hash_bits, keys_of
from overland.models.structure import Constant, Normal, Rule, Uniform, ties_of
from overland.models.transform import added_rule
from overland.words import first_few

# The local part of a parameter: the tensor to fill, where it starts in each dim of the full
# parameter, and the full shape.
Part = tuple[Tensor, Sequence[int], Sequence[int]]
LocalPart = Callable[[Tensor], Part]


def whole(parameter: Tensor) -> Part:
    """Returns the local part of a parameter that is not sharded."""
    return parameter.data, (0,) * parameter.dim(), tuple(parameter.shape)


def init_weights(model: nn.Module, seed: int, local_part: LocalPart = whole) -> None:
    """Fills every parameter according to `model.init_rule(name)`; sharded ones through
    `local_part`."""
    ties = ties_of(model)
    with torch.no_grad():
        for wrapped_name, parameter in model.named_parameters():
            name = plain_name(wrapped_name)
            tensor, offsets, shape = local_part(parameter)
            if tensor.is_meta:
                raise ModelError(f"{name} is on the meta device; call to_empty() before init")
            # Alone on a last pipeline stage, a tied parameter starts like the one it is tied to.
            rule = rule_of(model, ties.get(name, name))
            if isinstance(rule, Constant):
                tensor.fill_(rule.value)
            elif tensor.is_floating_point():
                fill_random(tensor, seed, rule, offsets, shape)
            elif tensor.numel():  # rows in 4 bits
                wide = torch.empty(len(tensor), columns_of(tensor), device=tensor.device)
                fill_random(wide, seed, rule, offsets, (shape[0], wide.shape[1]))
                tensor.copy_(pack(wide))


def rule_of(model: nn.Module, name: str) -> Rule:
    """Returns the rule of the transform that added the parameter, otherwise that of the model
    itself."""
    rule: Rule = added_rule(model, name) or model.init_rule(name)  # type: ignore[operator]
    return rule


def require_rules(model: nn.Module) -> None:
    """Raises if a model does not define how each parameter starts."""
    name_of_model = type(model).__name__
    if not callable(getattr(model, "init_rule", None)):
        raise ModelError(
            f"{name_of_model} has no method init_rule(name), which defines how each parameter "
            "starts (docs/extending.md)"
        )
    for name, _ in model.named_parameters():
        rule = rule_of(model, name)
        if not isinstance(rule, Rule):
            raise ModelError(
                f"init_rule('{name}') of {name_of_model} returned {rule!r:.60}, expected a Normal, "
                "Uniform or Constant of overland.models.init (docs/extending.md)"
            )


def decoder_rule(config: DecoderConfig, name: str) -> Rule:
    """Returns the rule of the scheme above for a parameter of a Decoder."""
    if name.endswith("norm.weight"):
        return Constant(1.0)
    if name.endswith(".bias"):
        return Constant(0.0)
    std = config.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.num_hidden_layers)
    return Normal(std, name)


def fill_random(
    tensor: Tensor,
    seed: int,
    rule: Normal | Uniform,
    offsets: Sequence[int],
    shape: Sequence[int],
) -> None:
    """Fills a rectangle of a parameter of this full shape with the numbers of (seed, name)."""
    if tensor.numel() == 0:
        return
    key = keys_of(f"{seed}/{rule.name}")
    # MPS has no float64; computing on the CPU gives the same bits.
    device = torch.device("cpu") if tensor.device.type == "mps" else tensor.device
    row_numel = tensor[0].numel() if tensor.dim() else 1
    rows = tensor if tensor.dim() else tensor[None]
    rows_per_chunk = max(1, _CHUNK // row_numel)
    for start in range(0, rows.shape[0], rows_per_chunk):
        chunk = rows[start : start + rows_per_chunk]
        index = _places(chunk.shape, (offsets[0] + start, *offsets[1:]), shape, device)
        if isinstance(rule, Normal):
            numbers = _normal(index, key) * rule.std
        else:
            bound = shape[-1] ** -0.5 if rule.bound is None else rule.bound
            numbers = _uniform(index, key) * bound
        # Rounded to float32 whatever the parameter's dtype, so that all dtypes start alike and
        # differences in the last bit of log and cos between devices disappear.
        chunk.copy_(numbers.to(torch.float32))


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of wrappers (recompute, compile)."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


# Elements at a time: 4 M int64 are 32 MB, and about five such temporaries exist at once.
_CHUNK = 1 << 22
_M32 = (1 << 32) - 1


def _places(
    local: Sequence[int], offsets: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Returns the row-major number of each local element in the full parameter."""
    index = torch.zeros(tuple(local), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        places = torch.arange(local[dim], dtype=torch.int64, device=device) + offsets[dim]
        index += (places * stride).view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return index


def _normal(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Returns a normal number from one hash per element, by Box-Muller: the two halves of the hash
    are its two uniform numbers."""
    bits = hash_bits(index, key)
    radius = ((bits >> 32) & _M32).to(torch.float64).add_(0.5).mul_(2.0**-32)
    angle = (bits & _M32).to(torch.float64).mul_(2 * math.pi * 2.0**-32)
    return radius.log_().mul_(-2.0).sqrt_().mul_(angle.cos_())


def _uniform(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Returns a number between -1 and 1 from one hash per element."""
    bits = (hash_bits(index, key) >> 11) & ((1 << 53) - 1)
    return bits.to(torch.float64).mul_(2.0**-52).sub_(1.0)


def cast_floats(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts real floating-point tensors. Module.to() would drop the imaginary part of a complex
    buffer."""
    return model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that belong to the model's state, by plain name."""
    return {
        name: buffer
        for name, owner, own, buffer in _buffers(model)
        if own not in owner._non_persistent_buffers_set
    }


def require_starts(model: nn.Module) -> None:
    """Raises if a model has a buffer that no `init_buffers()` is responsible for."""
    without = list(_without_start(model))
    if without:
        names, owner = first_few([name for name, _ in without]), without[0][1]
        raise ModelError(
            f"nothing sets the values of the buffer {names}: models are built on the meta "
            f"device, so {type(owner).__name__}, or an enclosing module, needs a method "
            "init_buffers() that fills it"
        )


def init_buffers(model: nn.Module, device: torch.device) -> None:
    """Calls every `init_buffers()`, from the outermost module inwards. Values may be written into
    the buffers or assigned to them."""
    was = {}
    for name, owner, own, buffer in _buffers(model):
        was[name] = buffer
        plain = buffer.to_local() if isinstance(buffer, DTensor) else buffer
        plain = torch.empty_like(plain, device=device)  # parameters may be in host memory
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
    """Yields each buffer's full name, the module that registered it, its name there, and the
    buffer."""
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
    """Returns a value that no module would set in a buffer, if the dtype has one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(buffer: Tensor) -> bool:
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    smallest = torch.iinfo(buffer.dtype).min if buffer.dtype != torch.bool else 0
    return smallest < 0 and bool((buffer == smallest).any())
