"""Checks that torch and this machine have what the config needs: communication backends, compiler,
attention kernels, devices, optional packages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from overland.config.derived import SPLIT_BACKWARD, recomputes_some_split_blocks, resolve_dtype
from overland.config.errors import Problem, ProblemKind
from overland.config.load import Loaded
from overland.config.schema import Parallelism
from overland.errors import ModelError
from overland.models.registry import model_config
from overland.words import any_of
from overland.world.devices import RANKS_PER_DEVICE, device_memory, mps_note


def check_comm_backend(loaded: Loaded) -> Iterator[Problem]:
    """Checks that this build of torch has the backend. Imports torch only for backends that a build
    may lack; auto and gloo always exist."""
    backend, message = loaded.config.comm.backend, ""
    if backend in ("auto", "gloo"):
        return
    import torch
    import torch.distributed as dist

    backends = _backends()
    has = any_of([name for name, there in backends.items() if there], "and")
    build = f"this build of torch ({torch.__version__}) has {has}"
    if not backends[backend]:
        way_out = {
            "mpi": "build torch from source with MPI, or start with mpirun and nccl or gloo",
            "nccl": "install torch for CUDA or ROCm, or set comm.backend to auto or gloo",
            "nvshmem": "install a CUDA build with NVSHMEM, or set comm.backend to nccl",
        }[backend]
        message = f"{build}, not {backend}; {way_out}"
    elif backend != "mpi" and not torch.cuda.is_available():
        message = (
            f"{backend} needs a GPU, and this machine has none visible; set comm.backend to gloo"
        )
    elif backend == "nvshmem" and not dist.is_nccl_available():
        message = f"{build}, but nvshmem also needs nccl"
    if message:
        # Builds with MPI are made by hand, so another machine's torch would lack it too.
        kind: ProblemKind = "invalid" if backend == "mpi" else "machine"
        yield loaded.problem("comm.backend", message, kind=kind)


def check_sharing(loaded: Loaded) -> Iterator[Problem]:
    """Checks that ranks can share a device here; that they take turns on it is a note."""
    config, value = loaded.config, loaded.config.comm.ranks_per_device
    if value == 1:
        return
    import torch

    if config.comm.backend == "nvshmem":
        message = "nvshmem needs a device for each rank; set comm.backend to nccl"
        yield loaded.problem(RANKS_PER_DEVICE, message)
    message = ""
    kind: ProblemKind = "machine"
    if config.training.device == "cpu" or not torch.cuda.is_available():
        kind = "invalid" if config.training.device == "cpu" else "machine"
        why = "training.device = cpu" if kind == "invalid" else "this machine has none visible"
        message = f"only GPUs are shared, and {why}; NGPU sets the number of CPU ranks"
    elif torch.version.hip is not None:
        message = "is untested on AMD GPUs; start one rank per device"
    elif not device_memory(torch.device("cuda", 0), value):
        message = "leaves no memory of this GPU to each rank; lower it"
    elif message := mps_note():
        kind = "note"
    if message:
        yield loaded.problem(RANKS_PER_DEVICE, message, kind=kind)


def check_algorithms(loaded: Loaded) -> Iterator[Problem]:
    """Notes a value of NCCL_ALGO that is not a list of algorithms, such as "TREE or RING", which a
    widely copied launch line has where a choice is meant."""
    value = os.environ.get("NCCL_ALGO", "")
    names = re.split(r"[,;:^@]", value)
    if not all(not name or name.lower() in ALGORITHMS for name in names):
        message = "is not a list of algorithms, which NCCL may refuse; write Tree,Ring, or unset it"
        yield Problem(message, "environment", "NCCL_ALGO", value, kind="note")


ALGORITHMS = ("tree", "ring", "collnet", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat",
              "allreduce", "allgather", "reducescatter", "broadcast", "reduce")  # fmt: skip


def check_packages(loaded: Loaded) -> Iterator[Problem]:
    """Checks that the optional packages that this config needs are installed."""
    if loaded.config.metrics.enable_wandb and find_spec("wandb") is None:
        message = "the package wandb is not installed; pip install 'overland[wandb]'"
        yield loaded.problem("metrics.enable_wandb", message, kind="machine")


def check_schedule(loaded: Loaded) -> Iterator[Problem]:
    """Refuses schedules that this version of torch cannot run."""
    if message := lacks_for_schedule(loaded.config.parallelism):
        yield loaded.problem("parallelism.pipeline_parallel_schedule", message, kind="machine")


def lacks_for_schedule(layout: Parallelism) -> str:
    """Says what a schedule that splits the backward pass needs: before torch 2.13 all three of them
    hang."""
    schedule = layout.pipeline_parallel_schedule
    if layout.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD:
        return ""
    installed = version("torch")
    if tuple(int(part) for part in installed.split(".")[:2]) >= (2, 13):
        return ""
    return f"needs torch 2.13 or newer to split the backward pass (installed: {installed})"


def check_float8(loaded: Loaded) -> Iterator[Problem]:
    """Checks that this GPU supports float8. On a CPU it is emulated, for tests."""
    if loaded.config.training.float8 == "off":
        return
    import torch

    message = ""
    if torch.cuda.is_available() and torch.version.hip:
        message = "is untested on AMD GPUs"
    elif torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        name = torch.cuda.get_device_name()
        message = f"needs an NVIDIA Ada, Hopper or newer GPU, not {name}"
    if message:
        message += '; training.float8 = "off" trains in training.mixed_precision_param'
        yield loaded.problem("training.float8", message, kind="machine")


def _backends() -> dict[str, bool]:
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    nvshmem = getattr(symmetric_memory, "is_nvshmem_available", lambda: False)
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "nvshmem": bool(nvshmem()),
    }


def check_recompute(loaded: Loaded) -> Iterator[Problem]:
    config, key = loaded.config, "activation_checkpoint.selective_ac_option"
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        message = 'expected "op" or a positive whole number in quotes, such as "2"'
        yield loaded.problem(key, message)
    elif config.compile.enable is True and recomputes_some_split_blocks(config):
        message = (
            "torch cannot compile blocks that tensor parallelism splits if only some of them are "
            "recomputed; set it to op, or activation_checkpoint.mode = full, or compile.enable = "
            "false"
        )
        yield loaded.problem(key, message)


def check_needs_compile(loaded: Loaded) -> Iterator[Problem]:
    """Refuses settings that need compilation without it."""
    config = loaded.config
    wishes = {
        "activation_checkpoint.mode": config.activation_checkpoint.mode == "memory_budget",
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
    }
    for key, wished in wishes.items():
        if wished and not config.compile.enable:
            yield loaded.problem(key, "needs compile.enable = true")


def check_compiler(loaded: Loaded) -> Iterator[Problem]:
    config = loaded.config.compile
    if config.enable is False or config.backend == "inductor":
        return
    from torch._dynamo import list_backends

    backends = list_backends(exclude_tags=())
    if config.backend not in backends:
        message = f"no such compiler backend in this torch; expected one of {', '.join(backends)}"
        yield loaded.problem("compile.backend", message)


def check_profiling(loaded: Loaded) -> Iterator[Problem]:
    settings = loaded.config.profiling
    observed = settings.profiler_warmup + settings.profiler_active
    if settings.enable_profiling and settings.profile_freq < observed:
        message = f"is less than profiler_warmup + profiler_active = {observed}"
        yield loaded.problem("profiling.profile_freq", message)


def check_attention(loaded: Loaded) -> Iterator[Problem]:
    """Checks that the chosen backend supports this model's masks, on a GPU."""
    config, key = loaded.config, "model.attention"
    if config.model.attention in ("auto", "sdpa"):
        return
    import torch

    from overland.models.attention import choose_form

    window = getattr(model_config(config.model), "sliding_window", None)
    try:
        choose_form(
            config.model.attention,
            torch.device("cuda"),
            getattr(torch, resolve_dtype(config, "cuda").training.mixed_precision_param),
            window,
            config.data.document_mask,
            config.parallelism.context_parallel_degree > 1,
            config.debug.deterministic,
        )
    except ModelError as error:
        yield loaded.problem(key, str(error))
        return
    if not torch.cuda.is_available():
        message = 'needs a GPU, and this machine has none visible; use "auto" or "sdpa"'
        yield loaded.problem(key, message, kind="machine")
