"""Decides which of our Triton kernels a run uses: all of them on Hopper, where they are tuned and
compared with float64 (benchmarks/gpu/kernels.py). Any other GPU has to earn those that the run
needs, when it starts: on a small input, a kernel must agree with its plain definition. One that
differs, or does not compile there, is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from overland.config.schema import JobConfig
from overland.kernels import KERNELS, has_triton, use_only
from overland.kernels.bfloat16 import Places, join, split
from overland.kernels.float8 import E4M3, cast_plain
from overland.kernels.gradients import cross_entropy_plain_, scaled_plain, sum_of_squares_plain
from overland.kernels.nf4 import BLOCK, LEVELS, pack, unpack_plain
from overland.optimizers.adamw import update_plain, update_triton
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import ParameterShard, Step
from overland.optimizers.rule import Like
from overland.words import any_of
from overland.world.devices import device_name

HOPPER = 9  # compute capability


def choose_kernels(config: JobConfig, device: torch.device) -> str:
    """Applies `training.kernels`. Returns a line about what a GPU that was not measured has earned;
    empty if there is nothing to say."""
    is_plain = config.training.kernels == "plain"
    use_only(() if is_plain else KERNELS)
    if is_plain or device.type != "cuda" or not has_triton():
        return ""
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == HOPPER:
        return ""
    return earned(wanted(config), device, device_name(config.training.device))


def wanted(config: JobConfig) -> list[str]:
    """Returns the kernels that a run needs."""
    unneeded = {"float8": config.training.float8 == "off", "nf4": config.lora.base != "nf4"}
    return [name for name in KERNELS if not unneeded.get(name)]


def earned(names: list[str], device: torch.device, gpu: str) -> str:
    """Tries kernels, and uses only those that agree with PyTorch from now on. Says which."""
    problems = {name: problem_of(name, device) for name in names}
    good = [name for name, problem in problems.items() if not problem]
    use_only(good)
    agree = "agrees with PyTorch and is" if len(good) == 1 else "agree with PyTorch and are"
    parts = [f"{any_of(good, 'and')} {agree} used"] if good else []
    parts += [f"{name} is not used ({why})" for name, why in problems.items() if why]
    return f"our kernels on {gpu}: {'; '.join(parts)}"


def problem_of(name: str, device: torch.device) -> str:
    """Returns why a kernel cannot be used; empty if it agrees with its plain definition."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            TRIALS[name](device)
    except Exception as error:  # of a compiler, a driver or a comparison
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return ""


def try_adamw(device: torch.device) -> None:
    rule = AdamW(beta2=0.999)
    count, divisor, skip = (torch.tensor(one, device=device) for one in (3.0, 2.5, 0.0))
    step = Step(1e-3, count, divisor, skip)
    wide = torch.randn((61, 67), device=device) * 0.02
    gradient = torch.randn((61, 67), device=device).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        both = []
        for update in (update_triton, update_plain):
            moments = {name: gradient.square().to(dtype) for name in ("exp_avg", "exp_avg_sq")}
            kinds = dict.fromkeys(moments, Like())
            shard = ParameterShard("w", *split(wide), gradient, kinds, moments, {}, 1.0, 0.1, 3)
            shard = replace(shard, places=Places(5, 67, 80))
            update(rule, [shard], step)
            assert shard.remainder is not None
            both.append([join(shard.parameter, shard.remainder), *moments.values()])
        (master, *moments_of_kernel), (exact, *moments_of_twin) = both
        torch.testing.assert_close(master, exact, rtol=1e-5, atol=1e-8)
        # Sums may differ in the last bit, and chance then rounds a few numbers the other way.
        torch.testing.assert_close(moments_of_kernel, moments_of_twin, rtol=2**-7, atol=0)


def try_cross_entropy(device: torch.device) -> None:
    from overland.kernels.triton_kernels import cross_entropy_triton_

    logits = (torch.randn((9, 20_001), device=device) * 3).bfloat16()
    labels = torch.randint(0, 20_001, (9,), device=device)
    labels[[0, 5]] = -100
    got, exact = logits.clone(), logits.clone()
    losses = cross_entropy_triton_(got, labels, -100)
    torch.testing.assert_close(losses, cross_entropy_plain_(exact, labels, -100))
    torch.testing.assert_close(got, exact, rtol=2**-7, atol=1e-6)


def try_float8(device: torch.device) -> None:
    from overland.kernels.triton_kernels import cast_triton

    x = torch.randint(-4, 5, (100, 37), device=device).bfloat16()
    scale = torch.tensor(8.0, device=device)
    got, exact = (cast(x, scale, E4M3, True, True) for cast in (cast_triton, cast_plain))
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0)


def try_nf4(device: torch.device) -> None:
    from overland.kernels.triton_kernels import unpack_triton

    packed = pack(torch.randn((5, 4096), device=device))
    got = unpack_triton(packed, 4096, torch.tensor(LEVELS, device=device), BLOCK, torch.float32)
    torch.testing.assert_close(got, unpack_plain(packed, torch.float32), rtol=0, atol=0)


def try_norm(device: torch.device) -> None:
    from overland.kernels.triton_kernels import PIECE, sum_of_squares_triton

    tensors = [torch.randn(size, device=device).bfloat16() for size in (PIECE + 5, 3)]
    got, exact = sum_of_squares_triton(tensors), sum_of_squares_plain(tensors)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=0)


def try_scale(device: torch.device) -> None:
    from overland.kernels.triton_kernels import scaled_triton

    wide, factor = torch.randn((71, 67), device=device), torch.tensor(1 / 3, device=device)
    got, exact = (one(wide, factor, torch.bfloat16) for one in (scaled_triton, scaled_plain))
    torch.testing.assert_close(got, exact, rtol=2**-7, atol=0)


TRIALS: dict[str, Callable[[torch.device], None]] = {
    "adamw": try_adamw,
    "cross_entropy": try_cross_entropy,
    "float8": try_float8,
    "nf4": try_nf4,
    "norm": try_norm,
    "scale": try_scale,
}
