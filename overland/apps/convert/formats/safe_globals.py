"""Decides which classes and functions a pickle in a checkpoint may name, and what each one creates.
See docs/convert.md.

Tensors become `Lazy` tensors, checked against the storage they claim; containers stay as they are;
objects of a few classes found in real files become inert stand-ins. Nothing else is allowed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from overland.apps.convert.formats.lazy import MAX_DIMS, Stored
from overland.apps.convert.formats.pickles import Maker, Names, as_dict, as_keys, stand_in
from overland.errors import CheckpointError


@dataclass(frozen=True)
class Storage:
    """A record of raw bytes in a file."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StorageType:
    dtype: torch.dtype


def _tensor(storage: Any, first: Any, shape: Any, stride: Any, *_: Any) -> Stored:
    return _stored(storage, storage.dtype, first, shape, stride)


def _tensor_of_type(
    storage: Any, first: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Stored:
    """The form for dtypes that have no storage class, such as float8."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError
    return _stored(storage, dtype, first, shape, stride)


def _stored(storage: Storage, dtype: torch.dtype, first: Any, shape: Any, stride: Any) -> Stored:
    where = storage.path
    if not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise TypeError
    plausible = len(shape) == len(stride) <= MAX_DIMS and all(
        type(number) is int and 0 <= number < 2**63 for number in (first, *shape, *stride)
    )
    if not plausible:
        raise CheckpointError(f"{where} holds a tensor with an impossible shape")
    result = Stored(tuple(shape), dtype, where, storage.offset + first * dtype.itemsize)
    if not result.numel:
        return result
    last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # An expanded tensor (stride 0) claims more elements than it stores; no checkpoint needs that,
    # and a file of a kilobyte could use it to allocate terabytes.
    if max((last + 1) * dtype.itemsize, result.nbytes) > storage.nbytes:
        raise CheckpointError(
            f"{where} holds a tensor of shape {list(shape)}, more than the {storage.nbytes} bytes "
            "that are stored for it"
        )
    contiguous = torch.empty(shape, device="meta").stride()
    is_plain = all(s == c or n == 1 for s, c, n in zip(stride, contiguous, shape, strict=True))
    return result if is_plain else replace(result, stride=tuple(stride))


def _typed_tensor(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    """Returns a tensor that has attributes, as DeepSpeed adds some, without them."""
    if (
        not isinstance(function, Maker)
        or function.make not in (_tensor, _tensor_of_type, _parameter)
        or (kind is not TENSOR and kind is not PARAMETER)
        or not isinstance(args, tuple)
        or len(args) > 8
    ):
        raise TypeError
    return function.make(*args)


def _parameter(tensor: Any, *_: Any) -> Stored:
    if not isinstance(tensor, Stored):
        raise TypeError
    return tensor


def _bytes(text: Any = b"", encoding: Any = "latin1") -> bytes:
    """Returns bytes or a bytearray as older protocols write them."""
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError
    return bytes(text, "latin-1")


def _word(part: Any) -> str:
    """Returns a string or number as text. Anything else is refused: a few levels of nested tuples
    could expand to gigabytes."""
    if not isinstance(part, str | int):
        raise TypeError
    return str(part)


TENSOR, PARAMETER = stand_in("torch.Tensor"), Maker("torch.nn.Parameter", _parameter)

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}

_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed_tensor,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch", "device"): lambda *parts: ":".join(map(_word, parts)),
    ("torch.serialization", "_get_layout"): lambda name: _word(name),
    ("collections", "OrderedDict"): lambda pairs=(): OrderedDict(as_dict(pairs)),
    ("collections", "defaultdict"): lambda _factory=None, pairs=(): as_dict(pairs),
    ("collections", "Counter"): as_dict,
    ("_codecs", "encode"): _bytes,
    ("builtins", "set"): lambda items=(): set(as_keys(items)),
    ("builtins", "frozenset"): lambda items=(): frozenset(as_keys(items)),
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "complex"): lambda real, imaginary: complex(real, imaginary),
    ("builtins", "list"): lambda items=(): list(items),
    ("builtins", "dict"): as_dict,
    ("builtins", "int"): lambda: 0,
    ("builtins", "float"): lambda: 0.0,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): lambda stage: int(stage),
    ("pathlib", "PosixPath"): lambda *parts: "/".join(map(_word, parts)),
}

_STAND_INS = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # torch 2.0 to 2.3 had two of the above here.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    # Many files hold random states of NumPy along with the weights.
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
}  # fmt: skip


def _table() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        (module, name): Maker(f"{module}.{name}", function)
        for (module, name), function in _FUNCTIONS.items()
    }
    for module, name in list(_FUNCTIONS):
        if module == "builtins":  # the name in Python 2 and in protocol 2
            table["__builtin__", name] = table[module, name]
    for module in ("pathlib", "pathlib._local"):  # Python 3.13 moved it
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            table[module, name] = table["pathlib", "PosixPath"]
    for module, names in _STAND_INS.items():
        table |= {(module, name): stand_in(f"{module}.{name}") for name in names}
    for name, dtype in _STORAGES.items():
        table["torch", name] = StorageType(dtype)
    table["torch.storage", "UntypedStorage"] = StorageType(torch.uint8)
    for name in dir(torch):
        if isinstance(value := getattr(torch, name), torch.dtype):
            table["torch", name] = value
    for module, name in (("torch", "Tensor"), ("torch._tensor", "Tensor")):
        table[module, name] = TENSOR
    table["torch.nn.parameter", "Parameter"] = PARAMETER
    return table


SAFE_GLOBALS: Names = _table()
