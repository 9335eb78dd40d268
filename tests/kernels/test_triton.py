"""The Triton kernels compute what they should, and compile for the GPUs of the field; no GPU is
needed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not tried")


def test_what_they_compute() -> None:
    """In a process of its own: the interpreter must be asked for before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider",
         "tests/kernels/interpreted.py", "tests/kernels/interpreted_inference.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


UPDATE_NUMBERS = "*fp32 i64 fp32 fp32 fp32 fp32 fp32 fp32 i32 i64 i64 i64"
UPDATE: dict[str, Any] = {"DECOUPLED": True, "WHOLE_ROWS": False, "BLOCK": 2048}
KERNELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("_update", f"*i16 *i16 *bf16 *fp32 *fp32 {UPDATE_NUMBERS}",
              {"SPLIT": True, "NARROW": False, **UPDATE}),
    "adamw, narrow": ("_update", f"*i16 *i16 *bf16 *bf16 *bf16 {UPDATE_NUMBERS}",
                      {"SPLIT": True, "NARROW": True, **UPDATE}),
    "adamw, whole": ("_update", f"*fp32 *fp32 *fp32 *bf16 *bf16 {UPDATE_NUMBERS}",
                     {"SPLIT": False, "NARROW": True, **UPDATE}),
    "cross_entropy": ("_cross_entropy", "*bf16 *i64 *fp32 i32 i32 i32", {"BLOCK": 8192}),
    "norm": ("_sum_of_squares", "*bf16 *fp32 i64", {"BLOCK": 4096, "ROUNDS": 4}),
    "scale": ("_scaled", "*fp32 *bf16 *fp32 i64", {"BLOCK": 4096}),
    "float8": ("_cast", "*bf16 *fp8e4nv *fp8e4nv *fp32 i32 i32 i32 i32",
               {"MOST": 448.0, "ROWS": True, "COLUMNS": True, "BLOCK": 128}),
    "nf4": ("_unpack", "*u8 *bf16 *fp32 *bf16 i32 i32", {"GROUP": 32, "BLOCK": 512}),
}  # fmt: skip
HEADS = {
    "KV_HEADS": 8,
    "GROUP": 4,
    "WIDTH": 128,
    "PADDED": 128,
    "q_norm_ptr": None,
    "k_norm_ptr": None,
}
PARTS = {"ROWS": 64, "BLOCK": 32, "DEPTH": 128, "STAGES": 5, "PARTS": 2, "bias_ptr": None}
INFERENCE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one row": ("_product", "*bf16 *bf16 *bf16 *bf16 i32",
                {"WIDTH": 14336, "BLOCK": 2048, "GATED": False}),
    "one row, gated": ("_product", "*bf16 *bf16 *bf16 i32",
                       {"WIDTH": 4096, "BLOCK": 2048, "GATED": True, "bias_ptr": None}),
    "rows": ("_products", "*bf16 *bf16 *bf16 *fp32 *i32 i32 i32 i32", {**PARTS, "GATED": False}),
    "rows, gated": ("_products", "*bf16 *bf16 *bf16 *fp32 *i32 i32 i32 i32",
                    {**PARTS, "BLOCK": 64, "DEPTH": 64, "PARTS": 1, "GATED": True}),
    "norm": ("_add_norm", "*bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32", {"BLOCK": 4096}),
    "silu": ("_silu_times_rows", "*bf16 *bf16 i32", {"BLOCK": 2048}),
    "begin": ("_begin", "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 fp32 i32",
              {**HEADS, "ROWS": 4}),
    "attend": ("_attend", "*bf16 *bf16 *bf16 *i64 *bf16 *fp32 *i32 *bf16 *bf16 i32 fp32 fp32",
               {**HEADS, "ROWS": 16, "KEYS": 64, "PARTS": 1, "WINDOW": 512}),
    "attend in parts": (
        "_attend", "*bf16 *bf16 *bf16 *i64 *bf16 *fp32 *i32 *bf16 *bf16 i32 fp32 fp32",
        {**HEADS, "ROWS": 16, "KEYS": 128, "PARTS": 8, "WINDOW": 0}),
}  # fmt: skip
CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
AMD = ("gfx90a", "gfx942")  # MI250X, MI300X
LONG = {90: (), 80: pytest.mark.long, 100: pytest.mark.long}
FLOAT8_FROM = 89


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(k, c, marks=LONG[c])
        for k in KERNELS
        for c in CAPABILITIES
        if k != "float8" or c >= FLOAT8_FROM
    ],
)
def test_compiles(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overland.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, types, constants = KERNELS[name]
    warps = triton_kernels.TUNED[name.partition(",")[0]][1]
    compile_for(capability, getattr(triton_kernels, function), types, constants, warps)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(k, c, marks=() if k == "rows" else LONG[c])
        for k in INFERENCE
        for c in CAPABILITIES
        if c == 90 or k in ("rows", "attend in parts")
    ],
)
def test_compiles_for_generation(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Hopper on a kernel may start early, and waits for the one before it."""
    from overland.apps.evaluation.kernels import triton_cached_attention, triton_inference

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, types, constants = INFERENCE[name]
    home = triton_inference if hasattr(triton_inference, function) else triton_cached_attention
    kernel = getattr(home, function)
    is_early = "EARLY" in kernel.arg_names and capability >= 90
    if "EARLY" in kernel.arg_names:
        constants = {**constants, "EARLY": is_early}
    compiled = compile_for(capability, kernel, types, constants, 4)
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == is_early


@pytest.mark.parametrize("gpu", AMD)
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "float8"])
def test_compiles_for_amd(
    name: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float8 is refused on AMD's GPUs, and has other formats there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compile_for_amd(name, gpu).asm["amdgcn"]
    assert number_in(code, "vgpr_spill_count") == number_in(code, "sgpr_spill_count") == 0


def compile_for_amd(name: str, gpu: str) -> Any:
    from triton.backends.compiler import GPUTarget

    from overland.kernels import triton_kernels

    function, types, constants = KERNELS[name]
    warps = triton_kernels.TUNED[name.partition(",")[0]][1]
    target = GPUTarget("hip", gpu, 64)
    return compile_on(target, getattr(triton_kernels, function), types, constants, warps)


def number_in(code: str, name: str) -> int:
    """Returns what the compiler says of a kernel for AMD: a number of registers, or of spills."""
    found = re.search(rf"\.{name}:\s+(\d+)", code)
    assert found is not None
    return int(found[1])


def compile_for(
    capability: int, kernel: Any, types: str, constants: dict[str, Any], warps: int
) -> Any:
    from triton.backends.compiler import GPUTarget

    compiled = compile_on(GPUTarget("cuda", capability, 32), kernel, types, constants, warps)
    assert compiled.asm["cubin"]
    return compiled


def compile_on(target: Any, kernel: Any, types: str, constants: dict[str, Any], warps: int) -> Any:
    from triton.compiler import ASTSource

    given = [argument for argument in kernel.arg_names if argument not in constants]
    signature = dict(zip(given, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    return triton.compile(source, target=target, options={"num_warps": warps})
