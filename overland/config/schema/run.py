"""Keys of `[job]`, `[metrics]`, `[profiling]`, `[checkpoint]`, `[comm]`, `[health]` and `[debug]`,
with defaults and bounds: where a run writes, and what it does besides training.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from overland.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Seed,
)

NO_DESCRIPTION = "a training run"


class Job(Section):
    """What this run is and where it writes."""

    dump_folder: PathText = "./outputs"
    """The run folder, which holds metrics, TensorBoard events, checkpoints, traces and a README.
    If not set, it is named after the config file: ./outputs/NAME."""
    description: str = NO_DESCRIPTION
    """One line about the run, shown in its README and when it starts."""
    print_config: bool = False
    """Print the resolved config before training."""
    custom_import: str = ""
    """Python module to import first; it may register models, data sources and callbacks."""


class Metrics(Section):
    """What is logged, how often, and where."""

    log_freq: PositiveInt = 10
    """Log every N steps."""
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    save_tb_folder: PathText = "tb"
    """Folder for the events, inside the run folder. Several runs can share an absolute path: each
    gets a subfolder named after its run folder."""
    enable_wandb: bool = False
    """Also log to Weights & Biases (needs the wandb package)."""
    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of a device, used to compute MFU; default: the vendor's figure, for known
    devices."""
    disable_color_printing: bool = False
    """Print to the console without colors."""
    sample_prompt: str = ""
    """Prompt for a sample after the last step: a text to continue, or a question for a model
    trained on conversations; with model.from, also before the first step. Empty: no sample."""
    sample_at_validation: bool = False
    """Also sample at every validation, to see progress over time. Skipped for a compiled model,
    which would have to be recompiled for the shapes of generation."""


class Profiling(Section):
    """Profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Record profiler traces (open them in Perfetto)."""
    save_traces_folder: PathText = "profile_trace"
    """Folder for the traces, inside the run folder; absolute paths: as metrics.save_tb_folder."""
    profile_freq: PositiveInt = 10
    """Record one trace every N steps."""
    profiler_warmup: NonNegativeInt = 3
    """Warm-up steps before each trace, which are discarded."""
    profiler_active: PositiveInt = 1
    """Steps per trace."""
    enable_memory_snapshot: bool = False
    """Also write the CUDA allocator's history at the end of each trace."""
    save_memory_snapshot_folder: PathText = "memory_snapshot"
    """Folder for the snapshots, inside the run folder; absolute paths: as
    metrics.save_tb_folder."""


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = True
    """Save checkpoints and resume from them."""
    folder: PathText = "checkpoint"
    """Folder for checkpoints, inside the run folder; `.`: the run folder itself; an absolute path
    must belong to this run alone."""
    interval: PositiveInt = 500
    """Save every N steps; the last step is always saved."""
    interval_minutes: PositiveFloat | None = None
    """Also save when this many minutes have passed since the last save."""
    preempt_interval: PositiveInt | None = None
    """Also save every N steps as step_N.preempt, the name used for an early stop."""
    link_by_time: bool = False
    """Also create a link to each checkpoint next to the run folder, named RUN_FOLDER.<time>, with
    .preempt appended for an early stop."""
    type: Literal["shard", "full", "local"] = "shard"
    """shard: each rank writes its part, and any layout can load it; full: rank 0 gathers and writes
    whole tensors; local: each rank writes all it holds, and only the same layout can load it."""
    full_format: Literal["safetensors", "torch"] = "safetensors"
    """With type = "full": safetensors, or torch for the four files model_state_dict.pt,
    optim_state_dict.pt, lr_state_dict.pt and iter_state_dict.pt."""
    async_mode: Literal["async", "disabled"] = "async"
    """async: copy the state to host memory and write it in the background while training
    continues; disabled: training waits for the disk."""
    keep_latest_k: NonNegativeInt = 10
    """Keep this many of the latest checkpoints; 0 keeps all."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: NonNegativeInt = 0
    """Also keep this many checkpoints with the lowest validation loss; a step with the best
    validation loss so far is then saved immediately."""
    stop_after_minutes: PositiveFloat | None = None
    """Save and stop after this many minutes of a session; the next session resumes."""
    walltime_margin_minutes: NonNegativeFloat = 3.0
    """Save and stop this long before a Slurm job ends, or earlier if saving is slow."""
    fallback_folder: PathText | None = None
    """Where the last save of a session goes if the disk of the run folder keeps failing, in a
    folder named after the run folder; resuming looks there too. Use another file system."""
    resume: PathText = "auto"
    """auto: resume from the newest checkpoint in the run folder, if any; none: start again in a new
    folder; or the path of a checkpoint."""
    allow_changes: list[str] = []
    """Keys that may differ from those that a checkpoint was trained with, e.g. ["lora.alpha"].
    Without this, resuming refuses a change that would train something else."""
    skip_optimizer: bool = False
    """Resume the weights and the position in the data, but with a fresh optimizer."""
    initial_load_path: PathText | None = None
    """Initial weights of a new run: a Hugging Face folder, a checkpoint, or any other format that
    `overland convert` reads."""
    last_save_in_hf: bool = False
    """Also export the final weights in Hugging Face's format, to `hf/` in the run folder, with
    adapters merged."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the exported weights."""


class Comm(Section):
    """Communication between devices."""

    backend: Literal["auto", "nccl", "gloo", "mpi", "nvshmem"] = "auto"
    """auto: nccl (RCCL on AMD) for GPUs, gloo for CPUs."""
    init_timeout_seconds: Seconds = 300
    """Timeout for all ranks to connect and take their first step."""
    train_timeout_seconds: Seconds = 100
    """Timeout of each collective after the first step."""
    ranks_per_device: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks that share a GPU, to try a layout on fewer devices than it is meant for:
    results are the same, only slower, and each rank may use its part of the memory."""


class Health(Section):
    """What to do about bad steps, hangs and failures."""

    max_bad_steps: PositiveInt = 10
    """Skip steps with a non-finite loss or gradient; stop the run after this many in a row."""
    spike_guard: Literal["off", "skip", "rewind"] = "off"
    """On a loss spike: skip the step, or rewind to the last checkpoint and skip the batches since
    then."""
    spike_threshold: Annotated[float, Field(gt=0)] = 6.0
    """A spike is a loss this many standard deviations above the mean of recent losses."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Number of recent losses to compare with."""
    hang_seconds: PositiveFloat = 60.0
    """A rank hangs if it makes no progress for this long and for ten times as long as usual; the
    job then ends all ranks and restarts them. A save hangs if it writes no byte for this long,
    whatever its size."""
    max_failed_starts: PositiveInt = 8
    """After this many attempts in a row without a new step, a job releases its nodes, and the next
    job of the chain continues on others. The same error twice at the same place always stops the
    chain."""
    check_memory: bool = True
    """Refuse to start a run that cannot fit: its parameters, gradients and optimizer state take
    more memory than the GPU, or on CPUs the machine or job, has; or a step is estimated to take
    1.5 times as much. Turn it off to try anyway."""


class Debug(Section):
    """Seeds and determinism."""

    seed: Seed = 0
    """Seed for initial weights, data order and everything else that is random."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that two runs give identical bits."""
    deterministic_warn_only: bool = False
    """Warn instead of stopping if an operation has no deterministic implementation."""
