"""Which attention backend computes which mask, decided when the mask is made, never per layer.

| backend | device | plain causal | sliding window, documents | moved positions |
|---|---|---|---|---|
| `auto`  | any        | SDPA, any kernel     | GPU: varlen flash or flex; CPU: dense | see below |
| `sdpa`  | any        | SDPA, any kernel     | SDPA with a dense bool mask           | dense   |
| `cudnn` | CUDA       | SDPA pinned to cuDNN | refused                               | refused |
| `flash` | CUDA, ROCm | SDPA pinned to flash | varlen flash (half precision)         | refused |
| `flex`  | CUDA, ROCm | flex attention       | flex attention, sparse blocks         | flex    |

Moved positions are those of context parallel: queries in another order than keys. For them `auto`
takes flex on GPUs and a dense mask elsewhere.
A backend that cannot compute what is asked raises a ModelError; a mask is never weakened. All of
them work under `torch.compile(fullgraph=True)` per layer.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch

from overland.errors import ModelError
from overland.words import did_you_mean

BACKENDS = ("auto", "cudnn", "flash", "flex", "sdpa")
HALF = (torch.float16, torch.bfloat16)

# Kernels that SDPA may take for a plain causal mask, best first; empty: as it likes.
CAUSAL_KERNELS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "sdpa": (),
    "cudnn": ("CUDNN_ATTENTION",),
    "flash": ("FLASH_ATTENTION",),
}


@cache
def varlen_parameters() -> frozenset[str]:
    """What this torch's varlen attention takes; nothing where there is none. Its import brings the
    compiler, for which a CPU need not wait."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def check_backend(attention: str) -> str:
    if attention not in BACKENDS:
        raise ModelError(
            f"attention backend '{attention}' does not exist{did_you_mean(attention, BACKENDS)}"
        )
    return attention


def choose_form(
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
    documents: bool,
    moved: bool,
    deterministic: bool | None = None,
) -> str:
    """The form of mask (see mask.py) for this backend and this mask."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    on_gpu = device.type == "cuda"  # ROCm calls itself cuda too
    if attention in ("cudnn", "flash", "flex") and not on_gpu:
        raise ModelError(
            f"attention backend '{attention}' needs a GPU, but the model runs on {device.type}; "
            "use 'auto' or 'sdpa'"
        )
    if attention in ("cudnn", "flash") and dtype not in HALF:
        raise ModelError(
            f"attention backend '{attention}' computes in float16 or bfloat16, but the model runs "
            f"in {_name(dtype)}; use 'auto', 'flex' or 'sdpa'"
        )
    if attention == "cudnn" and torch.version.hip:
        raise ModelError("attention backend 'cudnn' does not exist on ROCm; use 'flash' or 'auto'")
    if attention == "cudnn" and deterministic:
        raise ModelError("attention backend 'cudnn' is not deterministic; use 'flash' or 'auto'")
    if attention == "flex":
        return "block"

    plain = window is None and not documents and not moved
    if plain:
        return "causal"
    asked = "documents" if documents else "a sliding window" if window else "moved positions"
    if attention == "cudnn":
        raise ModelError(
            f"attention backend 'cudnn' cannot mask {asked}; use 'auto', 'flash', 'flex' or 'sdpa'"
        )
    if attention == "flash":
        if moved:
            raise ModelError(
                "attention backend 'flash' cannot compute moved positions (context parallel); "
                "use 'auto', 'flex' or 'sdpa'"
            )
        if "window_size" not in varlen_parameters():
            raise ModelError(
                f"attention backend 'flash' cannot mask {asked}: torch {torch.__version__} has no "
                "torch.nn.attention.varlen with windows; use 'flex' or 'sdpa'"
            )
        return "varlen"
    if attention == "sdpa" or not on_gpu:
        return "dense"
    # varlen flash on ROCm has not been tried, flex has Triton there.
    if moved or dtype not in HALF or torch.version.hip:
        return "block"
    return "varlen" if "window_size" in varlen_parameters() else "block"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
