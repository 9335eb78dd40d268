"""Decides which of our Triton kernels a run uses: all of them on Hopper, where they are tuned and
compared with float64 (benchmarks/gpu/kernels.py). Any other GPU has to earn those that the run
needs, when it starts: on a small input, a kernel must agree with its plain definition. One that
differs, or does not compile there, is not used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overland.config.schema import JobConfig
from overland.kernels import KERNELS, has_triton, use_only
from overland.kernels.bfloat16 import WHOLE, Places, join, split
from overland.kernels.float8 import E4M3, cast_plain
from overland.kernels.gradients import cross_entropy_plain_, scaled_plain, sum_of_squares_plain
from overland.kernels.nf4 import BLOCK, LEVELS, pack, unpack_plain
from overland.optimizers.adamw import update_plain, update_triton
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import ParameterShard, Step
from overland.optimizers.rule import Like
from overland.parallel.comm import all_of
from overland.words import any_of
from overland.world.devices import device_name

HOPPER = 9  # compute capability


def choose_kernels(config: JobConfig, device: torch.device) -> str:
    """Applies `training.kernels` on all ranks, which call this together. Returns a line about what
    GPUs that were not measured have earned; empty if there is nothing to say."""
    is_plain = config.training.kernels == "plain"
    use_only(() if is_plain else KERNELS)
    if is_plain or device.type != "cuda":
        return ""
    gpu = "" if is_measured(device) else device_name(config.training.device)
    problems = {name: problem_of(name, device) for name in wanted(config)} if gpu else {}
    return earned(wanted(config), all_of((gpu, problems)))


def is_measured(device: torch.device) -> bool:
    is_hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
    return torch.version.hip is None and is_hopper and has_triton()


def wanted(config: JobConfig) -> list[str]:
    """Returns the kernels that a run needs."""
    unneeded = {"float8": config.training.float8 == "off", "nf4": config.lora.base != "nf4"}
    return [name for name in KERNELS if not unneeded.get(name)]


def earned(names: list[str], of_ranks: list[tuple[str, dict[str, str]]]) -> str:
    """Uses only kernels that agree with PyTorch on every rank: where ranks differ, replicas would
    round differently, and could recompute differently. Says which; `of_ranks`: each rank's GPU,
    unless it was measured, and problems."""
    bad: dict[str, str] = {}
    for rank, (_, problems) in enumerate(of_ranks):
        for name, why in problems.items():
            if why and name not in bad:
                bad[name] = f"{name} is not used (rank {rank}: {why})"
    good = [name for name in names if name not in bad]
    use_only(good)
    gpus = sorted({gpu for gpu, _ in of_ranks if gpu})
    agree = "agrees with PyTorch and is" if len(good) == 1 else "agree with PyTorch and are"
    parts = [f"{any_of(good, 'and')} {agree} used"] if good else []
    return f"our kernels on {any_of(gpus, 'and')}: {'; '.join([*parts, *bad.values()])}" * bool(
        gpus
    )


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
    """Tries each kind of weight, moment, gradient, shard and weight decay at least once."""
    count, divisor, skip = (torch.tensor(one, device=device) for one in (3.0, 2.5, 0.0))
    step = Step(1e-3, count, divisor, skip)
    wide = torch.randn((61, 67), device=device) * 0.02
    gradient = torch.randn((61, 67), device=device)
    kinds = dict.fromkeys(("exp_avg", "exp_avg_sq"), Like())
    for is_split, moments, summed, places, decoupled in (
        (True, torch.float32, torch.bfloat16, WHOLE, True),
        (True, torch.bfloat16, torch.bfloat16, WHOLE, True),
        (True, torch.bfloat16, torch.float32, Places(5, 67, 80), False),
        (False, torch.bfloat16, torch.float32, WHOLE, True),
        (False, torch.bfloat16, torch.float32, Places(5, 67, 80), False),
    ):
        both = []
        for update in (update_triton, update_plain):
            weight, rest = split(wide) if is_split else (wide.clone(), None)
            state = {name: gradient.square().to(moments) for name in kinds}
            given = gradient.to(summed)
            shard = ParameterShard("w", weight, rest, given, kinds, state, {}, 1.0, 0.1, 3, places)
            update(AdamW(beta2=0.999, decoupled=decoupled), [shard], step)
            master = weight if rest is None else join(weight, rest)
            both.append([master, *state.values()])
        (got, *got_state), (exact, *exact_state) = both
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-8)
        # Sums may differ in the last bit, and chance then rounds a few numbers the other way.
        torch.testing.assert_close(got_state, exact_state, rtol=2**-7, atol=0)


def try_cross_entropy(device: torch.device) -> None:
    from overland.kernels.triton_kernels import cross_entropy_triton_

    logits = (torch.randn((9, 20_001), device=device) * 3).bfloat16()
    labels = torch.randint(0, 20_001, (9,), device=device)
    labels[[0, 5]] = -100
    got, exact = logits.clone(), logits.clone()
    losses = cross_entropy_triton_(got, labels, -100)
    of_twin = cross_entropy_plain_(exact, labels, -100)
    torch.testing.assert_close(losses, of_twin, rtol=1e-5, atol=1e-5)  # sums of 20,001 numbers
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
