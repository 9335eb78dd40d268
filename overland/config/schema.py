"""One `JobConfig`, one class per TOML section.

Section and key names are torchtitan's, so that its files load unchanged; `[data]` and `[health]`
are ours. A key is here only if something reads it; keys of other trainers that have no use here are
listed in `dialects/`, with a note for each. Every field has a description, because `overland config
reference` and the JSON Schema are generated from this file alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[int, Field(gt=0, le=31_536_000)]  # a year; torch counts nanoseconds
Seed = Annotated[int, Field(ge=0, lt=2**63)]
BatchSize = Annotated[int, Field(ge=-1)]
Degree = Annotated[int, Field(gt=0)]
HOLDS_A_PATH = "path"
PathText = Annotated[str, HOLDS_A_PATH]  # may hold variables and ~: see variables.py


IN_PLACE_OF = {
    "training.epochs": "training.steps",
    "lr_scheduler.warmup_ratio": "lr_scheduler.warmup_steps",
    "validation.sequences": "validation.steps",
    "lr_scheduler.min_lr": "lr_scheduler.min_lr_factor",
    "training.dataset_path": "training.dataset",
    "validation.dataset_path": "validation.dataset",
}
"""Keys that set the same thing in two ways: only one of the two may be set, and one on the command
line replaces the other in a file."""


SWITCHES = {
    "sft": ("sft.shape",),
    "lora": ("lora.rank", "lora.adapter"),
    "preference": ("preference.loss",),
}
"""Sections that have no effect until one of these keys is set."""

SFT_DEFAULTS: dict[str, Any] = {"data.packing": "best_fit", "data.document_mask": True}
"""Defaults of these keys with sft.shape: conversations stay separate and whole."""
PAIR_DEFAULTS: dict[str, Any] = {"data.packing": "trunc"}
"""Defaults with preference.loss: each pair is a row."""


class Section(BaseModel):
    """A TOML section: unknown keys are errors, and types are never coerced."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_by_name=True,
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


class Sparse(Section):
    """Linear layers with N:M sparse weights: of every M weights in a row, N are used."""

    pattern: str = "2:4"
    """N:M, such as 2:4, which GPUs since the A100 support in hardware; M is at most 8."""
    modules: str | list[str] = "all-linear"
    """Linear layers of the blocks to make sparse: names, a regular expression that matches full
    names, or all-linear."""
    exclude: str | list[str] = []
    """Linear layers to leave dense: names, or a regular expression."""
    refresh: PositiveInt = 1
    """Recompute the masks every this many steps."""
    method: str = "magnitude"
    """How masks are chosen: magnitude, which keeps the largest weights, or a method that
    `job.custom_import` registers."""

    @property
    def ratio(self) -> tuple[int, int]:
        kept, _, group = self.pattern.partition(":")
        return int(kept), int(group)


class Model(Section):
    """The model to train."""

    from_: PathText | None = Field(default=None, alias="from")
    """Folder of a model to start from, in Hugging Face's format or a run folder. Sets its
    architecture, tokenizer and weights: shorthand for config, hf_assets_path and
    checkpoint.initial_load_path."""
    name: str = "llama3"
    """Model family: llama2, llama3, mistral, qwen2.5, qwen3, or one that `job.custom_import`
    adds."""
    flavor: str = "debug"
    """Named size within the family, such as 8B. Ignored if `config` is set."""
    config: PathText | None = None
    """Path of a Hugging Face config.json (or the folder that holds it), instead of a flavor."""
    overrides: dict[str, Any] = {}
    """Architecture values to override, by Hugging Face name, e.g. {num_hidden_layers = 4}."""
    hf_assets_path: PathText | None = None
    """Tokenizer folder, with tokenizer.json, or tokenizer.model of SentencePiece or Llama 3."""
    freeze: list[str] = []
    """Parameters to freeze, by name with wildcards, e.g. ["model.embed_tokens.*"]."""
    transforms: dict[str, dict[str, Any]] = {}
    """Model transforms that `job.custom_import` registers, applied in this order; each is a table
    of options, [model.transforms.NAME]."""
    sparse: Sparse | None = None
    """N:M sparse linear layers, in their own table [model.sparse]; not set: none."""
    attention: Literal["auto", "cudnn", "flash", "flex", "sdpa"] = "auto"
    """Attention backend; auto: the fastest one that supports the device and mask."""


class Training(Section):
    """Data, batch size, length and precision."""

    dataset: str = "stdlib"
    """Dataset by name: stdlib (the source code of Python's standard library; stdlib:2/6 is one part
    of six), docstrings (questions and answers about that code), random (tokens, or images for an
    image model), shapes (synthetic images), or a name in `data.folder`."""
    dataset_path: PathText | None = None
    """File or folder to train on, of any format, instead of a named dataset."""
    column: str | None = None
    """Column that holds the documents, such as text, files[].text (each item is a document) or
    files[+].text (the items are joined); default: text, tokens, input_ids or content, or the only
    column."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: train."""
    local_batch_size: PositiveInt = 8
    """Sequences per device in one forward pass."""
    global_batch_size: BatchSize = -1
    """Sequences per optimizer step, over all devices; -1: local_batch_size times the data-parallel
    degree. It determines the number of gradient accumulation steps."""
    seq_len: PositiveInt = 2048
    """Tokens per sequence."""
    steps: PositiveInt = 10000
    """Optimizer steps to train for."""
    epochs: PositiveFloat | None = None
    """Passes over the data, instead of steps; may be fractional, such as 0.5. Needs a single
    source, whose rows are counted before training starts; text is tokenized first."""
    last_batch: Literal["pad", "drop"] = "pad"
    """With epochs, if the data does not fill the last batch: pad it with rows that do not count, or
    drop it."""
    max_norm: NonNegativeFloat = 1.0
    """Clip gradients to this global norm; 0 turns clipping off."""
    device: Literal["auto", "cpu"] = "auto"
    """Where each process computes; auto: on a GPU, if there are any; cpu: on the CPU even so."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of parameters and optimizer state."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float16", "float64"] = "auto"
    """Data type of the forward and backward pass; auto: bfloat16 on GPUs, float32 on CPUs, most of
    which emulate bfloat16; float16 adds a gradient scaler."""
    mixed_precision_reduce: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type in which gradients are summed over devices."""
    objective: str = "auto"
    """Training objective: next_token, per_sample (for models that compute their own loss), or one
    that `job.custom_import` registers; auto: the model's own, next_token by default."""
    objective_options: dict[str, Any] = {}
    """Options of a custom objective."""
    z_loss: NonNegativeFloat = 0.0
    """With next_token: weight of the z-loss, log²Z per token, which keeps logits from drifting
    (1e-4 is usual); 0: off."""
    float8: Literal["off", "tensorwise"] = "off"
    """tensorwise: float8 matrix products in the blocks, with one dynamic scale per tensor; the
    head, embeddings and attention are unchanged."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    gc_freq: PositiveInt = 50
    """Run Python's garbage collector on all ranks together, every this many steps."""


class Parallelism(Section):
    """How model and batch are split; the product of the degrees is the number of devices."""

    data_parallel_replicate_degree: Degree = 1
    """Number of replicas of the (sharded) model."""
    data_parallel_shard_degree: int = -1
    """Devices that parameters, gradients and optimizer state are sharded over; -1: all
    remaining."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward pass; default: always, except with pipeline
    parallelism."""
    sharding_stage: Literal["zero0", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"] | None = None
    """Shorthand for the keys above: zero0 replicates, zero2 keeps parameters gathered between
    forward and backward, zero3 shards everything; hybrid: replicate across nodes, shard within
    each."""
    tensor_parallel_degree: Degree = 1
    """Number of devices that split each matrix."""
    enable_async_tensor_parallel: bool = False
    """Experimental: overlap tensor parallelism's communication with its matrix products (needs
    compile, and NVIDIA GPUs that can access each other's memory)."""
    pipeline_parallel_degree: Degree = 1
    """Number of pipeline stages that split the layers."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Pipeline schedule: the order of forward and backward passes."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences per microbatch in the pipeline."""
    context_parallel_degree: Degree = 1
    """Number of devices that split each sequence."""


class ParameterGroup(Section):
    """Parameters with their own rates: one table of [[optimizer.groups]]."""

    pattern: str
    """Parameter names, with wildcards, e.g. "*.embed_tokens.*"."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor on optimizer.lr and its schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; default: the same as without a group."""


class Optimizer(Section):
    """The optimizer; norms and biases have no weight decay."""

    name: str = "AdamW"
    """AdamW, Adam (weight decay is added to the gradient), Lion, or one that `job.custom_import`
    adds."""
    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""
    beta1: Beta = 0.9
    """AdamW and Adam: decay rate of the first moment."""
    beta2: Beta = 0.95
    """AdamW and Adam: decay rate of the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW and Adam: added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices and embeddings."""
    bf16_moments: bool = False
    """AdamW and Adam: keep both moments in bfloat16, stochastically rounded, so averages stay
    unbiased. Saves 4 bytes per parameter; the update is faster on NVIDIA GPUs (measured on one),
    slower elsewhere."""
    options: dict[str, Any] = {}
    """Options of other optimizers, e.g. {beta2 = 0.98} for Lion, whose defaults are beta1 = 0.9 and
    beta2 = 0.99."""
    groups: list[ParameterGroup] = []
    """Parameter groups: [[optimizer.groups]] tables with pattern, lr_factor and weight_decay. A
    parameter belongs to the first group whose pattern matches its name."""


class LRScheduler(Section):
    """Learning-rate schedule: warm-up, optional plateau, and decay."""

    warmup_steps: NonNegativeInt = 200
    """Steps of linear warm-up from 0."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a fraction of all steps, instead of warmup_steps."""
    total_steps: PositiveInt | None = None
    """Length of the schedule in steps; default: training.steps."""
    decay_ratio: Fraction | None = None
    """Fraction of all steps spent decaying, after a plateau (warmup-stable-decay); default: decay
    starts right after the warm-up."""
    decay_type: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Shape of the decay; constant: no decay."""
    min_lr_factor: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""
    min_lr: NonNegativeFloat | None = None
    """Final learning rate as an absolute value, instead of min_lr_factor."""

    def warmup(self, total: int) -> int:
        """Returns the warm-up steps of a schedule with `total` steps."""
        return self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * total)


class Metrics(Section):
    """What is logged, how often, and where."""

    log_freq: PositiveInt = 10
    """Log every this many steps."""
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
    """Record one trace every this many steps."""
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
    """Save every this many steps; the last step is always saved."""
    interval_minutes: PositiveFloat | None = None
    """Also save when this many minutes have passed since the last save."""
    preempt_interval: PositiveInt | None = None
    """Also save every this many steps as step_N.preempt, the name used for an early stop."""
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
    folder named after the run folder; a resume looks there too. Use another file system."""
    resume: PathText = "auto"
    """auto: resume from the newest checkpoint in the run folder, if any; none: start again in a new
    folder; or the path of a checkpoint."""
    allow_changes: list[str] = []
    """Keys that may differ from those that a checkpoint was trained with, e.g. ["lora.alpha"].
    Without this, a resume refuses a change that would train something else."""
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


class ActivationCheckpoint(Section):
    """Recomputation of activations, to save memory."""

    mode: Literal["auto", "none", "full", "selective", "memory_budget"] = "auto"
    """auto: the first of none, selective (op) and full that is estimated to fit in device memory;
    full: recompute every block in the backward pass; selective: see selective_ac_option;
    memory_budget: the compiler chooses what to keep (needs compile)."""
    selective_ac_option: str = "op"
    """A number n: recompute every n-th block; op: keep the outputs of matrix products and
    attention, and recompute the rest."""
    memory_budget: Fraction = 0.5
    """With memory_budget: fraction of the activations to keep; 0 keeps the least."""


class Compile(Section):
    """torch.compile."""

    enable: bool | Literal["auto"] = "auto"
    """Compile each block before sharding; auto: only on GPUs."""
    backend: str = "inductor"
    """Compiler backend."""
    cuda_graphs: bool = True
    """With compile, on a single NVIDIA GPU: capture the forward and backward pass once as CUDA
    graphs and replay them."""


class ValidationSet(Section):
    """One validation set, with its own frequency: [validation.sets.NAME]."""

    path: PathText | None = None
    """File or folder of any format."""
    dataset: str | None = None
    """Without a path: a dataset by name, as in training.dataset; default: the name of the set."""
    column: str | None = None
    """Column that holds the documents; default: training.column if that is set, otherwise found in
    the same way."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: validation, or else test."""
    freq: PositiveInt | None = None
    """Validate on it every this many steps; default: validation.freq."""
    sequences: Annotated[int, Field(ge=-1)] | None = None
    """Sequences per validation, from the beginning of the set; -1: the whole set; default:
    validation.sequences."""
    steps: Annotated[int, Field(ge=-1)] | None = None
    """The same in batches, as validation.steps counts them."""


class Validation(Section):
    """Loss on held-out data during training."""

    enable: bool | None = None
    """Validate every `freq` steps and after the last step; default: true if data.holdout keeps
    documents out of training, otherwise false."""
    dataset: str | list[str] | None = None
    """One or more validation sets, by name; default: the documents that data.holdout keeps out of
    training; without that and without validation.sets, stdlib_heldout."""
    dataset_path: PathText | None = None
    """File or folder to validate on, instead of a named dataset."""
    column: str | None = None
    """Column that holds the documents; default: training.column if that is set, otherwise found in
    the same way."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: validation, or else test."""
    sets: dict[str, ValidationSet] = {}
    """Additional sets, each a table with a path and, to validate on it more or less often, its own
    freq and sequences. Only sets without their own freq decide which checkpoint is best."""
    allow_training_data: bool = False
    """Allow validation on files that are also trained on."""
    freq: PositiveInt = 100
    """Validate every this many steps."""
    sequences: Annotated[int, Field(ge=-1)] | None = None
    """Sequences per set and validation, from the beginning of the set, whatever the batch size and
    the number of ranks; -1: the whole set; default: 128. For arrays: samples."""
    steps: Annotated[int, Field(ge=-1)] | None = None
    """Instead of validation.sequences: batches per set and validation, each of the global batch
    size that the run begins with; -1: the whole set."""
    local_batch_size: PositiveInt | None = None
    """Sequences per device in one pass, which does not change what is measured; default:
    training.local_batch_size."""
    seq_len: PositiveInt | None = None
    """Tokens per sequence; default: training.seq_len."""


class DataSource(Section):
    """One source of a mixture, named by its table: [data.sources.NAME]."""

    path: PathText | None = None
    """File or folder of any format, or a corpus from `overland data build`."""
    dataset: str | None = None
    """Without a path: a dataset by name, as in training.dataset; default: the name of the
    source."""
    weight: NonNegativeFloat = 1.0
    """Weight in the mixture, relative to the other sources; 0: the source is not read."""
    column: str | None = None
    """Column that holds the documents; default: text, tokens, input_ids or content, or the only
    column."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: train."""
    dtype: str | None = None
    """Data type of token ids, such as uint16, if the file does not specify one."""
    max_epochs: PositiveInt | None = None
    """Maximum passes over this source; training stops with an error if it would need another."""


class Images(Section):
    """Images for models that take arrays: random images, and preprocessing."""

    shape: Annotated[list[PositiveInt], Field(min_length=3, max_length=3)] | None = None
    """Channels, height and width of random images (training.dataset = "random"), before padding;
    default: what the model expects."""
    count: PositiveInt = 1000
    """Number of random images per epoch."""
    if_missing: Literal["error", "random"] = "error"
    """If the image list in training.dataset_path or validation.dataset_path does not exist: stop
    with an error, or use random images instead and print a note."""
    pad: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    """Height and width to zero-pad images to; larger images are an error. Default: no padding, and
    all images must have the same size."""
    instance_norm: bool = False
    """Normalize each channel of each image to mean 0 and variance 1, after padding."""
    segment_size: PositiveInt | None = None
    """Images per segment, the unit in which iter_state_dict.pt records progress through an epoch
    (with checkpoint.full_format = "torch"); default: one segment per epoch."""


class Data(Section):
    """Where data is stored, and how it becomes batches."""

    folder: PathText = "./data"
    """Folder to find named datasets in, and to store tokenizers and token shards in."""
    datasets: dict[str, PathText] = {}
    """Names for dataset folders, e.g. {c4 = "/scratch/c4"}."""
    sources: dict[str, DataSource] = {}
    """A mixture, instead of training.dataset: one table per source, with its path and weight."""
    mixture: Literal["tokens", "rows"] = "tokens"
    """What the weights apply to. tokens: sequences, each from one source; rows: documents, which
    are then packed together."""
    holdout: Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(ge=0, lt=1)] = 0
    """Documents to hold out for validation: a fraction, such as 0.01, or a number over all sources,
    which is exact. Copies of a document stay together, and no document that was trained on is held
    out when data is added."""
    packing: Literal["pack", "overflow", "trunc", "best_fit"] = "pack"
    """pack: concatenate documents and cut them into sequences; overflow: each document starts a new
    sequence and continues in further ones; trunc: each document is one sequence, truncated;
    best_fit: cut only documents longer than a sequence, and pack the pieces without cutting."""
    last_block: Literal["pad", "drop"] = "pad"
    """With pack: pad or drop the incomplete sequence at the end of a window."""
    document_mask: bool = False
    """Restart attention and positions at each document, and take no loss across a document
    boundary."""
    group_by_length: bool = False
    """With trunc or overflow: batch sequences of similar length, and leave out the padding that all
    of them share."""
    window_documents: PositiveInt = 100_000
    """Approximate number of documents that are shuffled together; kept tokenized on disk."""
    add_bos: bool | None = None
    """Begin each document with the BOS token. Not set: as the tokenizer does (by add_bos_token in
    tokenizer_config.json or its post-processor; Llama 2 and 3 do); a resumed run or an existing
    corpus keeps its setting."""
    add_eos: bool | None = None
    """End each document with the EOS token. Not set: true, but a resumed run or an existing corpus
    keeps its setting."""
    vocab_size: PositiveInt | None = None
    """Vocabulary size of the tokenizer that is trained on the text if model.hf_assets_path is not
    set; default: 4096, or the model's vocabulary size if smaller."""
    bad_documents: Literal["error", "skip"] = "error"
    """Documents that are not valid UTF-8 or JSON, or without text: stop and report the first, or
    skip and count them. Empty texts are always skipped and counted, and a file that cannot be read
    is always an error."""
    cache_folder: PathText | None = None
    """Folder for text that is tokenized ahead of training: shared, or local to each node (such as
    /tmp/overland); default: data.folder. What is built in data.folder is read from there."""
    cache_gb: PositiveFloat = 100.0
    """Size limit of that cache in GB; corpora from `overland data build` do not count."""
    tokenise_processes: NonNegativeInt | None = None
    """Background processes per node that tokenize ahead, divided among the sources, with at least
    one each; default: half of the cores, at most 16; 0: ranks tokenize what they need."""
    read_ahead: PositiveInt = 4
    """Number of batches to prepare in advance."""


class Sft(Section):
    """Supervised fine-tuning: conversations, prompts with completions, or texts."""

    shape: Literal[
        "off", "auto", "messages", "sharegpt", "completion", "instruction", "text", "preference"
    ] = "off"
    """Format of the dataset's records; auto: detected from their columns, and reported; off: plain
    documents of text or tokens, as for pretraining."""
    chat_template: PathText | None = None
    """File with a chat template (Jinja), or one of the built-in chatml and alpaca; default: the
    tokenizer's own."""
    template_options: dict[str, Any] = {}
    """Variables passed to the template, e.g. {enable_thinking = false}."""
    date: str | None = None
    """Date for templates that ask for today's date, e.g. "2026-07-01"."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to learn from: all assistant turns, the last one, or everything. The `weight` or
    `train` field of a turn overrides this."""
    too_long: Literal["error", "truncate", "drop", "split"] = "error"
    """What to do with samples longer than training.seq_len."""
    parse_specials: bool | None = None
    """Whether names of special tokens in the text, such as <s>, become those tokens. Not set: a
    text that contains one is an error."""
    special_tokens_in_content: bool | list[str] = False
    """Whether names of special tokens in messages, such as <|im_end|>, become those tokens, or
    which of them, e.g. ["<think>", "</think>"]. Otherwise they are encoded as text, and counted."""
    skip_unlearned: bool = False
    """Skip and count samples that have nothing to learn; otherwise the first one is an error."""
    new_tokens: list[str] = []
    """Special tokens to add to the tokenizer, such as <|im_start|>. The vocabulary grows if needed,
    and new embeddings start as the mean of the others."""
    neftune_alpha: NonNegativeFloat = 0.0
    """Noise added to embeddings during training (NEFTune, Jain et al. 2023); 5 is usual; 0: off."""


Alpha = Annotated[float, Field(gt=0, le=1e6)]  # a larger one is a mistake, and overflows


class Lora(Section):
    """Adapters (LoRA): small trained matrices alongside frozen weights. Defaults are PEFT's, and
    names are PEFT's in plain words."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, PEFT's `r`; 0: no adapters, all weights are trained."""
    alpha: Alpha = 8.0
    """Adapter outputs are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the inputs of adapters."""
    targets: str | list[str] = ["q_proj", "v_proj"]
    """Matrices that get an adapter: names, a regular expression that matches full names, or
    all-linear."""
    exclude: str | list[str] = []
    """Matrices that get no adapter: names, or a regular expression."""
    layers: list[NonNegativeInt] | None = None
    """Blocks that get adapters, counted from 0; not set: all."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Ranks of single matrices, by a regular expression for the end of a name, e.g. {"layers.0.*" =
    32}."""
    alpha_pattern: dict[str, Alpha] = {}
    """Alphas of single matrices, likewise."""
    rslora: bool = False
    """Scale by alpha / √rank instead (rsLoRA)."""
    dora: bool = False
    """Train the magnitudes of the weights' rows separately (DoRA)."""
    lr_ratio: PositiveFloat = 1.0
    """Ratio of B's learning rate to A's (LoRA+); a usual value is 16."""
    modules_to_save: list[str] = []
    """Modules to train in full alongside the adapters, such as lm_head."""
    base: Literal["auto", "float32", "bfloat16", "nf4"] = "auto"
    """Data type of the frozen weights; auto: that of the forward pass; nf4: 4 bits (QLoRA), not
    available with tensor parallelism."""
    adapter: PathText | None = None
    """Folder of a PEFT adapter to continue from. It also sets rank, alpha, dropout, targets,
    exclude, layers, both patterns, rslora, dora and modules_to_save."""
    save_as_peft: bool = False
    """At each save, also write the adapters in PEFT's format to checkpoint-N/ in the run folder."""


class Preference(Section):
    """Preference tuning on pairs of a chosen and a rejected answer."""

    loss: Literal["off", "dpo", "ipo", "orpo", "simpo"] = "off"
    """Preference loss; off: no preference tuning."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model (dpo, ipo); scale of the rewards (simpo, 2
    is usual); weight of the odds-ratio term (orpo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With dpo: assumed probability that the answers of a pair are swapped."""
    simpo_gamma: NonNegativeFloat = 0.5
    """With simpo: target margin between the rewards."""
    reference: Literal["auto", "adapter_off", "copy", "precomputed"] = "auto"
    """Reference model of dpo and ipo: the model without its adapters, a frozen copy of the trained
    weights, or log-probabilities computed once before training. auto: the model as it is when the
    run starts, which is adapter_off if only new adapters are trained, otherwise copy."""
    max_prompt: PositiveInt | None = None
    """Minimum number of tokens to keep of a prompt that is too long; not set: half of the space for
    a prompt and one answer, which is half of a row."""
    prompt_side: Literal["left", "right"] = "left"
    """Side on which prompts that are too long are truncated."""
    answer_side: Literal["left", "right"] = "right"
    """Side on which answers that are too long are truncated."""


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
    they compute the same, slowly, and each may use its part of the memory."""


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
    1.5 times as much. Turn it off to try all the same."""


class Debug(Section):
    """Seeds and determinism."""

    seed: Seed = 0
    """Seed for initial weights, data order and everything else that is random."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that two runs give identical bits."""
    deterministic_warn_only: bool = False
    """Warn instead of stopping if an operation has no deterministic implementation."""


class JobConfig(BaseModel):
    """All settings of a run."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    data: Data = Data()
    images: Images = Images()
    sft: Sft = Sft()
    lora: Lora = Lora()
    preference: Preference = Preference()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    health: Health = Health()
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _validates_what_is_held_out(self) -> JobConfig:
        if self.data.holdout and self.validation.enable is None:
            self.validation = self.validation.model_copy(update={"enable": True})
        return self
