"""The README.md of a run folder: what is trained here and how, and how to watch and resume it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from overland.config.derived import Degrees, model_name, rows_per_step
from overland.config.schema import NO_DESCRIPTION, ActivationCheckpoint, JobConfig, Optimizer
from overland.files import replace_file
from overland.models.flops import count_parameters, measure_of, trained_parameters
from overland.run_folder import WRITTEN_BY, RunFolder
from overland.words import command
from overland.world import World
from overland.world.devices import devices_in_words

if TYPE_CHECKING:
    from overland.training.run import Run


def write_readme(run: Run) -> None:
    text = readme(run.config, run.world, run.mesh.degrees, run.model_config, run.folder)
    replace_file(run.folder.readme, text)


def readme(
    config: JobConfig, world: World, degrees: Degrees, model_config: Any, folder: RunFolder
) -> str:
    training, data = config.training, config.data
    rows = rows_per_step(training, degrees.dp)
    accumulation = rows // (training.local_batch_size * degrees.dp)
    run = folder.root
    keep = config.checkpoint.keep_latest_k
    checkpoints = (
        f"every {config.checkpoint.interval} steps, "
        f"{f'the newest {keep} kept' if keep else 'all kept'}"
        if config.checkpoint.enable
        else "off"
    )
    compiled = {True: f"on ({config.compile.backend})", False: "off", "auto": "auto"}
    hardware = devices_in_words(world, config.training.device, config.comm.ranks_per_device)
    profiling = (
        f"on, one trace every {config.profiling.profile_freq} steps into `{folder.traces}/`"
        if config.profiling.enable_profiling
        else "off (`profiling.enable_profiling=true` turns it on)"
    )
    measure = measure_of(model_config, training.seq_len, config.lora, config.model.freeze)
    batch, length, documents, evaluate = f"{rows:,} samples", "", "", ""
    if measure.unit == "tokens":
        batch = f"{rows:,} sequences = {rows * training.seq_len:,} tokens"
        length = f"| sequence length | {training.seq_len:,} tokens |\n"
        borders = "attention stays within each document"
        if data.packing in ("trunc", "overflow"):
            borders = "each starts a new sequence"
        elif not data.document_mask:
            borders = "packed, attention crosses document boundaries"
        documents = f"| documents | {borders} |\n"
        prompt = command("overland", "generate", run, "--prompt", "...")
        evaluate = f"## Evaluate\n\n    {prompt}\n\n"
    title = config.job.description
    if title == NO_DESCRIPTION:
        title = f"Training run {folder.root.name}"
    return f"""\
# {title}

{WRITTEN_BY}; [`config.toml`](config.toml) holds every setting.

## What is trained

| | |
|---|---|
| model | {model_name(config)}, {parameters_in_words(config, model_config)} |
| data | {training.dataset_path or training.dataset} |
{length}| batch | {batch} per step; {accumulation} × {training.local_batch_size} per device |
| steps | {training.steps:,} ({rows * measure.per_row * training.steps:,} {measure.unit}) |
| optimizer | {optimizer_in_words(config.optimizer)} |
| learning rate schedule | {schedule_in_words(config)} |
| gradient clipping | {f"max norm {training.max_norm:g}" if training.max_norm else "off"} |
| number formats | parameters {training.dtype}, computation {training.mixed_precision_param}, \
gradient sums {training.mixed_precision_reduce} |
{documents}
## Parallel layout

| axis | degree |
|---|---|
| data parallel, replicate | {degrees.dp_replicate} |
| data parallel, shard | {degrees.dp_shard} |
| tensor parallel | {degrees.tp} |
| pipeline parallel | {degrees.pp} |
| context parallel | {degrees.cp} |

{strategy_in_words(degrees)} The product of the degrees is the number of devices, {world.size}.

- Hardware: {hardware}, {world.num_nodes} node{"s" if world.num_nodes > 1 else ""}
- Recompute: {recompute_in_words(config.activation_checkpoint)}
- Compile: {compiled[config.compile.enable]}
- Profiling: {profiling}
- Checkpoints: {checkpoints}

## Folders

| | |
|---|---|
| `{folder.metrics}` | one JSON object per logged step |
| `{folder.plot}` | the loss, drawn |
| `{folder.tb}/` | TensorBoard events{"" if config.metrics.enable_tensorboard else " (off)"} |
| `{folder.checkpoints}/` | checkpoints, `step_N` each |
| `{folder.tokenizer}/` | the tokenizer, if the data is text |
| `{folder.hf}/` | the final weights for Hugging Face, if `checkpoint.last_save_in_hf` is on |
| `{folder.traces}/` | profiler traces, if profiling is on |
| `{folder.logs}/` | output of the ranks that do not print |

## Watch

    {command("overland", "watch", run)}
    {command("tensorboard", "--logdir", folder.tb)}
    tail -f {folder.metrics}

## Resume

The same command resumes from the newest checkpoint, on any number of devices:

    {command("overland", "train", folder.config)}

`CONFIG_FILE={folder.config} NGPU={world.local_size} ./run_train.sh` does the same; \
`LOG_RANK=0,1` also prints rank 1; `DRY_RUN=1` only checks the config.

{evaluate}## If something goes wrong

- Out of memory: lower `training.local_batch_size` (the global batch does not change if \
`training.global_batch_size` is set), or set `activation_checkpoint.mode = "full"`.
- Communication error: `comm.backend` and the environment variable `COMM_BACKEND` select the \
backend; on CPUs it is gloo.
- Missing files: `{command("overland", "check", folder.config)}` lists them, and how to fetch each.
"""


def strategy_in_words(d: Degrees) -> str:
    """Describes the layout in a sentence or two."""
    if d.world_size == 1:
        return "One device holds the whole model."
    parts = []
    if d.dp_shard > 1:
        stage = "again for the backward pass" if d.reshard_after_forward else "once per step"
        parts.append(
            f"parameters, gradients and optimizer state are sharded over {d.dp_shard} devices "
            f"(FSDP) and gathered {stage}"
        )
    if d.dp_replicate > 1:
        what = "that group is replicated" if d.dp_shard > 1 else "the model is replicated"
        parts.append(f"{what} {d.dp_replicate} times, and gradients are summed over the replicas")
    if d.tp > 1:
        parts.append(f"each matrix is split over {d.tp} devices")
    if d.pp > 1:
        parts.append(f"the layers form a pipeline of {d.pp} stages")
    if d.cp > 1:
        parts.append(f"each sequence is split over {d.cp} devices")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def all_and_trained(config: JobConfig, architecture: Any) -> tuple[int, int]:
    """Counts the parameters, and those of them that are trained."""
    shapes = trained_parameters(architecture, config.lora, config.model.freeze)
    return count_parameters(architecture).total, sum(map(prod, shapes.values()))


def parameters_in_words(config: JobConfig, architecture: Any) -> str:
    total, trained = all_and_trained(config, architecture)
    if not config.lora.rank:
        of_them = f", of which {trained:,} are trained" if trained != total else ""
        return f"{total:,} parameters{of_them}"
    return f"{total:,} parameters (frozen) and {trained:,} in adapters (trained)"


def optimizer_in_words(settings: Optimizer) -> str:
    options = ", ".join(f"{key} = {value}" for key, value in settings.options.items())
    words = f"{settings.name}{f' ({options})' if options else ''}, learning rate {settings.lr:g}"
    patterns = ", ".join(f"`{group.pattern}`" for group in settings.groups)
    return f"{words}; other learning rates for {patterns}" if patterns else words


def schedule_in_words(config: JobConfig) -> str:
    settings = config.lr_scheduler
    total = settings.total_steps or config.training.steps
    parts = [f"{settings.warmup(total)} warm-up steps"]
    if settings.decay_type == "constant":
        return parts[0] + ", then constant"
    if settings.decay_ratio is not None:
        parts.append(f"a plateau, {settings.decay_type} decay over the last "
                     f"{settings.decay_ratio:.0%}")  # fmt: skip
    else:
        parts.append(f"then {settings.decay_type} decay")
    lowest = settings.min_lr
    if lowest is None:
        lowest = settings.min_lr_factor * config.optimizer.lr
    return ", ".join(parts) + f" to {lowest:g}"


def recompute_in_words(settings: ActivationCheckpoint) -> str:
    if settings.mode == "selective":
        if settings.selective_ac_option == "op":
            return "selective: everything but matrix products and attention is recomputed"
        number = settings.selective_ac_option
        which = "every block" if number == "1" else f"one block in {number}"
        return f"selective: {which} is recomputed"
    if settings.mode == "memory_budget":
        share = f"{settings.memory_budget:.0%}"
        return f"the compiler keeps {share} of the activations that it would otherwise keep"
    words = {"none": "off", "full": "full: every block is recomputed"}
    return words.get(settings.mode, settings.mode)
