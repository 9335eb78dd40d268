"""One `JobConfig`, one class per TOML section.

Section and key names are torchtitan's, so that its files load unchanged; `[data]` and `[health]`
are ours. A key stands here only if something reads it: keys that other trainers know and we have no
use for are listed in `dialects/`, where each gets a note. Every field has a description, because
`overland config reference` and the JSON Schema are made from this file and from nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
}
"""Keys that say the same in another unit: only one of the two may be set."""


SWITCHES = {
    "sft": ("sft.shape",),
    "lora": ("lora.rank", "lora.adapter"),
    "preference": ("preference.loss",),
}
"""Sections that do nothing before one of these keys is set."""

SFT_DEFAULTS: dict[str, Any] = {"data.packing": "best_fit", "data.document_mask": True}
"""What keys are with sft.shape, unless they are set: each conversation by itself, and whole."""
PAIR_DEFAULTS: dict[str, Any] = {"data.packing": "trunc"}
"""The same with preference.loss: each pair is a row."""


class Section(BaseModel):
    """A TOML section: unknown keys are errors, and types are not guessed."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_by_name=True,
    )


class Job(Section):
    """What this run is and where it writes."""

    dump_folder: PathText = "./outputs"
    """The run folder: metrics, TensorBoard events, checkpoints, traces and a README go below it.
    Without this key it is named after the config file: ./outputs/NAME."""
    description: str = "a training run"
    """One line about the run, shown in its README and at the start."""
    print_config: bool = False
    """Print the resolved config before training."""
    custom_import: str = ""
    """Python module to import first; it may register models, data sources and callbacks."""


class Sparse(Section):
    """Linear layers whose weights are N:M sparse: of every M in a row, N are used."""

    pattern: str = "2:4"
    """N:M, such as 2:4, which GPUs from the A100 on have units for; M is 8 at most."""
    modules: str | list[str] = "all-linear"
    """Linear layers of the blocks that become sparse: their names, a regular expression for full
    names, or all-linear."""
    exclude: str | list[str] = []
    """Linear layers that stay as they are: names, or a regular expression."""
    refresh: PositiveInt = 1
    """Steps after which masks are made anew."""
    method: str = "magnitude"
    """How masks are made: magnitude, which uses the largest weights, or one that
    `job.custom_import` registers."""

    @property
    def ratio(self) -> tuple[int, int]:
        kept, _, group = self.pattern.partition(":")
        return int(kept), int(group)


class Model(Section):
    """Which network is trained."""

    from_: PathText | None = Field(default=None, alias="from")
    """Folder of a model to continue from: Hugging Face's, or of a run. Takes its architecture,
    tokenizer and weights: shorthand for config, hf_assets_path and checkpoint.initial_load_path."""
    name: str = "llama3"
    """Family: llama2, llama3, mistral, qwen2.5, qwen3, or one that `job.custom_import` adds."""
    flavor: str = "debug"
    """Named size of the family, such as 8B. Ignored when `config` is given."""
    config: PathText | None = None
    """Path of a Hugging Face config.json (or the folder that holds it) in place of a flavor."""
    overrides: dict[str, Any] = {}
    """Architecture values to change, by Hugging Face name, e.g. {num_hidden_layers = 4}."""
    hf_assets_path: PathText | None = None
    """Folder with a tokenizer: tokenizer.json, or tokenizer.model of sentencepiece or Llama 3."""
    freeze: list[str] = []
    """Parameters that are not trained, by name with wildcards, e.g. ["model.embed_tokens.*"]."""
    transforms: dict[str, dict[str, Any]] = {}
    """Changes to the model that `job.custom_import` registers, in this order: a table of options
    for each, [model.transforms.NAME]."""
    sparse: Sparse | None = None
    """N:M sparse linear layers, a table of its own, [model.sparse]; not set: none."""
    attention: Literal["auto", "cudnn", "flash", "flex", "sdpa"] = "auto"
    """Attention backend; auto takes the fastest one that this device and mask allow."""


class Training(Section):
    """The batch, the length and the number formats."""

    dataset: str = "stdlib"
    """Data source by name: stdlib (Python's own source text; stdlib:2/6 is a part of it),
    docstrings (questions and answers about it), random (tokens, or images for a model of images),
    shapes (made images), or a name under `data.folder`."""
    dataset_path: PathText | None = None
    """File or folder of any format to train on, in place of a name."""
    column: str | None = None
    """Column that holds the documents, such as text or files[].text; default: text, tokens,
    input_ids or content, or the only one."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: train."""
    local_batch_size: PositiveInt = 8
    """Sequences that one device takes in one forward pass."""
    global_batch_size: BatchSize = -1
    """Sequences per optimizer step over all devices; -1: local_batch_size times the data-parallel
    degree. Gradient accumulation follows from it."""
    seq_len: PositiveInt = 2048
    """Tokens per sequence."""
    steps: PositiveInt = 10000
    """Optimizer steps to train for."""
    epochs: PositiveFloat | None = None
    """How often to read the data, in place of steps; may be a fraction, such as 0.5. For a single
    source, whose rows are counted before training starts: text is tokenised first."""
    last_batch: Literal["pad", "drop"] = "pad"
    """With epochs: where the data does not fill the last batch, the rows that are missing count
    nothing, or the batch is dropped."""
    max_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type that parameters and optimizer state are kept in."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float16", "float64"] = "auto"
    """Type of the forward and backward pass; auto: bfloat16 on GPUs, float32 on CPUs, most of which
    emulate bfloat16; float16 brings a gradient scaler."""
    mixed_precision_reduce: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type in which gradients are summed over devices."""
    objective: str = "auto"
    """What is minimised: next_token, per_sample (of models that compute their own loss), or one
    that `job.custom_import` registers; auto: what the model is made for, next_token by default."""
    objective_options: dict[str, Any] = {}
    """Options of an objective of your own."""
    z_loss: NonNegativeFloat = 0.0
    """With next_token: adds this times log²Z per token, which keeps logits from drifting (1e-4 is
    usual); 0: none."""
    float8: Literal["off", "tensorwise"] = "off"
    """tensorwise: matrix products of the blocks in 8 bits, one dynamic scale per tensor; head,
    embeddings and attention stay as they are."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    gc_freq: PositiveInt = 50
    """Collect garbage on every rank together, once per this many steps."""


class Parallelism(Section):
    """How model and batch are spread; the product of the degrees is the number of devices."""

    data_parallel_replicate_degree: Degree = 1
    """Copies of the (sharded) model."""
    data_parallel_shard_degree: int = -1
    """Devices that share one copy of parameters, gradients and optimizer state; -1: the rest."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward pass; default: always, but never with a
    pipeline."""
    sharding_stage: Literal["zero0", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"] | None = None
    """Shorthand over the two degrees above: zero0 replicates, zero2 keeps parameters gathered
    between forward and backward, zero3 shards everything; hybrid: replicate across nodes, shard
    within one."""
    tensor_parallel_degree: Degree = 1
    """Devices that split each matrix."""
    enable_async_tensor_parallel: bool = False
    """Experimental: overlap tensor parallelism's communication with its matrix products (needs
    compile and several NVIDIA GPUs that reach each other's memory)."""
    pipeline_parallel_degree: Degree = 1
    """Stages that split the layers."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order of forward and backward passes in the pipeline."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences that flow through the pipeline together."""
    context_parallel_degree: Degree = 1
    """Devices that split each sequence."""


class ParameterGroup(Section):
    """Parameters with rates of their own: one table of [[optimizer.groups]]."""

    pattern: str
    """Names of parameters, with wildcards, e.g. "*.embed_tokens.*"."""
    lr_factor: NonNegativeFloat = 1.0
    """Learning rate as a multiple of optimizer.lr and its schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; default: as without a group."""


class Optimizer(Section):
    """The optimizer and its rates; norms and biases are not decayed."""

    name: str = "AdamW"
    """AdamW, Adam (whose weight decay enters the gradient), Lion, or one that `job.custom_import`
    adds."""
    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""
    beta1: Beta = 0.9
    """Decay of AdamW's and Adam's first moment."""
    beta2: Beta = 0.95
    """Decay of AdamW's and Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Added by AdamW and Adam to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices and embeddings."""
    bf16_moments: bool = False
    """Keep both moments of AdamW and Adam in bfloat16, stochastically rounded, so averages stay
    unbiased: 4 bytes per parameter less; a shorter update on NVIDIA GPUs (timed on one), a longer
    elsewhere."""
    options: dict[str, Any] = {}
    """Options of any other optimizer, e.g. {beta2 = 0.98} for Lion, whose defaults are beta1 = 0.9
    and beta2 = 0.99."""
    groups: list[ParameterGroup] = []
    """Parameter groups, as [[optimizer.groups]] tables with pattern, lr_factor and weight_decay; a
    parameter belongs to the first one whose pattern matches its name."""


class LRScheduler(Section):
    """Warm-up, an optional plateau, and decay."""

    warmup_steps: NonNegativeInt = 200
    """Steps over which the rate grows linearly from 0."""
    warmup_ratio: Fraction | None = None
    """Share of all steps spent on that, in place of warmup_steps."""
    total_steps: PositiveInt | None = None
    """Steps that the schedule spans; default: training.steps."""
    decay_ratio: Fraction | None = None
    """Share of all steps spent decaying, after a plateau (warm-up, stable, decay); default:
    everything after the warm-up."""
    decay_type: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Shape of the decay; constant: none."""
    min_lr_factor: Fraction = 0.0
    """Lowest rate as a share of the peak."""
    min_lr: NonNegativeFloat | None = None
    """Lowest rate itself; takes the place of min_lr_factor."""

    def warmup(self, total: int) -> int:
        """Steps of the warm-up, in a schedule of so many in all."""
        return self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * total)


class Metrics(Section):
    """What is logged, how often and where."""

    log_freq: PositiveInt = 10
    """Log every this many steps."""
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    save_tb_folder: PathText = "tb"
    """Folder of the events, below the run folder. An absolute path may be shared by runs: each
    gets a subfolder with the name of its run folder."""
    enable_wandb: bool = False
    """Also log to Weights & Biases (needs the wandb package)."""
    peak_flops: PositiveFloat | None = None
    """FLOP/s that a device can do at most, which MFU is a share of; default: as its maker says, for
    devices that are known here."""
    disable_color_printing: bool = False
    """Plain text on the console."""
    sample_prompt: str = ""
    """Text to let the model continue after the last step, or a question where it learns
    conversations, for a first look; with model.from also before the first step. Empty: none."""
    sample_at_validation: bool = False
    """Also let it continue that text at every validation, for samples over time. Not done for a
    model that is compiled, which would be compiled again for the shapes of generation."""


class Profiling(Section):
    """Traces of what the devices did."""

    enable_profiling: bool = False
    """Record traces (open them in Perfetto)."""
    save_traces_folder: PathText = "profile_trace"
    """Folder of the traces, below the run folder; absolute: as metrics.save_tb_folder."""
    profile_freq: PositiveInt = 10
    """One trace every this many steps."""
    profiler_warmup: NonNegativeInt = 3
    """Steps observed and thrown away before each trace."""
    profiler_active: PositiveInt = 1
    """Steps in one trace."""
    enable_memory_snapshot: bool = False
    """Write the CUDA allocator's history at the end of each trace."""
    save_memory_snapshot_folder: PathText = "memory_snapshot"
    """Folder of the snapshots, below the run folder; absolute: as metrics.save_tb_folder."""


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = True
    """Save checkpoints and resume from them."""
    folder: PathText = "checkpoint"
    """Folder of the checkpoints, below the run folder; an absolute path must be this run's own."""
    interval: PositiveInt = 500
    """Save every this many steps; the last step is always saved."""
    interval_minutes: PositiveFloat | None = None
    """Also save whenever this many minutes have gone by since the last save."""
    preempt_interval: PositiveInt | None = None
    """Also save every this many steps under the name of a stop before the end, step_N.preempt."""
    link_by_time: bool = False
    """Also name each checkpoint by the time of its save: next to the run folder a link, named like
    that with .<time> and, for a stop before the end, .preempt behind it."""
    type: Literal["shard", "full", "local"] = "shard"
    """shard: each rank writes its part, any layout reads it; full: whole tensors, put together by
    rank 0; local: each rank writes all it holds, and only the same layout reads it."""
    full_format: Literal["safetensors", "torch"] = "safetensors"
    """With full: safetensors, or the four files model_state_dict.pt, optim_state_dict.pt,
    lr_state_dict.pt and iter_state_dict.pt."""
    async_mode: Literal["async", "disabled"] = "async"
    """async: copy the state to host memory and write it while training goes on; disabled: training
    waits for the disk."""
    keep_latest_k: NonNegativeInt = 10
    """Keep this many checkpoints; 0 keeps all."""
    keep_every: PositiveInt | None = None
    """Beside those, keep every checkpoint whose step is a multiple of this."""
    keep_best: NonNegativeInt = 0
    """Beside those, keep this many with the lowest validation loss; a step whose validation loss is
    the best so far is then saved at once."""
    stop_after_minutes: PositiveFloat | None = None
    """Save and stop after so many minutes of this session; the next session goes on."""
    walltime_margin_minutes: NonNegativeFloat = 3.0
    """Save and stop this long before a Slurm job ends, or earlier if saving takes long."""
    fallback_folder: PathText | None = None
    """Where the last save of a session goes, in a folder named after the run's, if the run folder's
    disk keeps refusing it; a resume looks there too. Best on another file system."""
    resume: PathText = "auto"
    """auto: from the newest checkpoint of the run folder, if any; none: start anew in a fresh
    folder; or the path of a checkpoint."""
    skip_optimizer: bool = False
    """Resume the weights and the position in the data, with a new optimizer."""
    initial_load_path: PathText | None = None
    """Weights that a new run starts from: a Hugging Face folder, a checkpoint, or any other format
    that `overland convert` reads."""
    last_save_in_hf: bool = False
    """Also write the final weights as a Hugging Face folder, `hf/` below the run folder, with
    adapters merged into them."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in that folder."""


class ActivationCheckpoint(Section):
    """Memory against recomputation."""

    mode: Literal["auto", "none", "full", "selective", "memory_budget"] = "auto"
    """auto: the first of none, selective (op) and full that fits the device's memory by estimate;
    full: recompute every block in the backward pass; selective: see selective_ac_option;
    memory_budget: the compiler picks what to keep (needs compile)."""
    selective_ac_option: str = "op"
    """A number n: recompute every n-th block; op: keep matrix products and attention, recompute the
    rest."""
    memory_budget: Fraction = 0.5
    """With memory_budget: share of what would be kept without recomputation; 0 keeps the least."""


class Compile(Section):
    """torch.compile."""

    enable: bool | Literal["auto"] = "auto"
    """Compile each block, before sharding; auto: on GPUs."""
    backend: str = "inductor"
    """Compiler backend."""
    cuda_graphs: bool = True
    """With compile, on a single NVIDIA GPU: record the forward and backward pass once, and replay
    them."""


class ValidationSet(Section):
    """One set to validate on, with a cadence of its own: [validation.sets.NAME]."""

    path: PathText | None = None
    """File or folder of any format."""
    dataset: str | None = None
    """Without a path: a dataset by name, as in training.dataset; default: the set's name."""
    column: str | None = None
    """Column that holds the documents; default: as for training.column."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: validation, or else test."""
    freq: PositiveInt | None = None
    """Steps between two validations on it; default: validation.freq."""
    steps: Annotated[int, Field(ge=-1)] | None = None
    """Batches per validation, -1: the whole set; default: validation.steps."""


class Validation(Section):
    """Loss on held-out text while training."""

    enable: bool = False
    """Validate every `freq` steps and after the last one."""
    dataset: str | list[str] | None = None
    """One held-out set, or several, by name; default: what data.holdout keeps out of training, or
    else, without validation.sets, stdlib_heldout."""
    dataset_path: PathText | None = None
    """Folder or file to validate on, in place of a name."""
    column: str | None = None
    """Column that holds the documents; default: as for training.column."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: validation, or else test."""
    sets: dict[str, ValidationSet] = {}
    """Further sets, each a table with its path, and with freq and steps of its own if it shall be
    validated on more or less often. The best checkpoint is judged by those without a freq."""
    allow_training_data: bool = False
    """Also validate on files that are trained on."""
    freq: PositiveInt = 100
    """Steps between two validations."""
    steps: Annotated[int, Field(ge=-1)] = 10
    """Batches per validation and set; -1: the whole set."""
    local_batch_size: PositiveInt | None = None
    """Sequences per device and batch; default: training.local_batch_size."""
    seq_len: PositiveInt | None = None
    """Tokens per sequence; default: training.seq_len."""


class DataSource(Section):
    """One source of a mixture; its name is the table's: [data.sources.NAME]."""

    path: PathText | None = None
    """File or folder of any format, or a corpus that `overland data build` made."""
    dataset: str | None = None
    """Without a path: a dataset by name, as in training.dataset; default: the source's name."""
    weight: NonNegativeFloat = 1.0
    """Share of the mixture, beside the weights of the others; 0: nothing is read from it."""
    column: str | None = None
    """Column that holds the documents; default: as for training.column."""
    subset: str | None = None
    """Subset (config) of a dataset folder."""
    split: str | None = None
    """Split of a dataset folder; default: train."""
    dtype: str | None = None
    """Of token ids whose file does not say it, such as uint16."""
    max_epochs: PositiveInt | None = None
    """Read it at most this often; training stops with an error where it would be read again."""


class Images(Section):
    """Images that a model takes as arrays: random ones, and what is done to each."""

    shape: Annotated[list[PositiveInt], Field(min_length=3, max_length=3)] | None = None
    """Channels, height and width of random images (training.dataset = "random"), before they are
    padded; default: what the model takes."""
    count: PositiveInt = 1000
    """Random images in an epoch."""
    if_missing: Literal["error", "random"] = "error"
    """What happens where the list of images that training.dataset_path or validation.dataset_path
    names is not there: an error, or random images take its place, and that is said."""
    pad: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    """Height and width that images are brought to with zeros around them; larger ones are an
    error. Default: none is padded, and all must have one size."""
    instance_norm: bool = False
    """Bring each channel of each image, once it is padded, to mean 0 and variance 1."""
    segment_size: PositiveInt | None = None
    """Images per segment, the unit in which iter_state_dict.pt says how far an epoch has come (with
    checkpoint.full_format = "torch"); default: an epoch is one segment."""


class Data(Section):
    """Where text and tokens lie and how they become batches."""

    folder: PathText = "./data"
    """Where named datasets are looked for, and tokenizers and token shards are kept."""
    datasets: dict[str, PathText] = {}
    """Names for folders, e.g. {c4 = "/scratch/c4"}."""
    sources: dict[str, DataSource] = {}
    """A mixture, in place of training.dataset: a table per source, with its path and weight."""
    mixture: Literal["tokens", "rows"] = "tokens"
    """What weights count. tokens: sequences, each from one source; rows: documents, which are then
    packed together."""
    holdout: NonNegativeInt | Annotated[float, Field(ge=0, lt=1)] = 0
    """Documents of each source that are kept out of training and validated on: a share, such as
    0.01, or about so many. A document stays on its side when data is added."""
    packing: Literal["pack", "overflow", "trunc", "best_fit"] = "pack"
    """pack: documents one after another, cut into sequences; overflow: each begins a sequence and
    goes on in further ones; trunc: each is one sequence, the rest is left out; best_fit: only
    documents longer than a sequence are cut, and what is left shares sequences."""
    last_block: Literal["pad", "drop"] = "pad"
    """With pack: what is left at the end of a window is padded, or dropped."""
    document_mask: bool = False
    """Attention and positions start anew at each document, and no loss is taken across a border."""
    group_by_length: bool = False
    """With trunc or overflow: sequences of similar length share a batch, and padding that all of
    them have is left out."""
    window_documents: PositiveInt = 100_000
    """Documents, about, that are shuffled together; held ready as tokens, on disk."""
    add_bos: bool | None = None
    """Begin each document with the tokenizer's BOS token. Not set: as the tokenizer itself does (by
    add_bos_token in tokenizer_config.json, or its post-processor; Llama 2 and 3 do); a resumed run
    and an existing corpus keep what they began with."""
    add_eos: bool | None = None
    """End each document with the tokenizer's EOS token. Not set: yes, but a resumed run and an
    existing corpus keep what they began with."""
    vocab_size: PositiveInt | None = None
    """Size of the tokenizer trained on the text when no model.hf_assets_path is given; default:
    4096, or the model's vocabulary if that is smaller."""
    bad_documents: Literal["error", "skip"] = "error"
    """Documents that are empty, no UTF-8 or no JSON: stop and name the first, or skip and count
    them. A file that cannot be read always stops."""
    cache_folder: PathText | None = None
    """Where text is tokenised ahead of training: a shared folder, or one on each node (such as
    /tmp/overland); default: data.folder."""
    cache_gb: PositiveFloat = 100.0
    """Size of what was tokenised ahead and may be made again; built corpora do not count."""
    tokenise_processes: NonNegativeInt | None = None
    """Background processes per node that tokenise ahead, shared by the sources, each of which has
    at least one; default: half of the cores, 16 at most; 0: ranks make what they need."""
    read_ahead: PositiveInt = 4
    """Batches prepared ahead of the step that takes them."""


class Sft(Section):
    """Supervised fine-tuning: conversations, prompts with completions, or texts."""

    shape: Literal[
        "off", "auto", "messages", "sharegpt", "completion", "instruction", "text", "preference"
    ] = "off"
    """What the records of a dataset are; auto: told by their columns, and said; off: documents of
    text or tokens, as for pretraining."""
    chat_template: PathText | None = None
    """File of a chat template (Jinja), or chatml or alpaca, which are built in; default: the one
    that the tokenizer brings."""
    template_options: dict[str, Any] = {}
    """Variables that the template is given, e.g. {enable_thinking = false}."""
    date: str | None = None
    """The day that templates are told which ask for today's, e.g. "2026-07-01"."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """What is learned: what assistants say, their last turn, or every token. A turn may say
    otherwise by its own `weight` or `train`."""
    too_long: Literal["error", "truncate", "drop", "split"] = "error"
    """Samples that are longer than training.seq_len."""
    parse_specials: bool | None = None
    """Whether names of special tokens in plain texts, such as <s>, stand for the tokens. Not set:
    a text that has one is refused."""
    skip_unlearned: bool = False
    """Skip and count samples that have nothing to learn; else the first one is an error."""
    new_tokens: list[str] = []
    """Special tokens to add to the tokenizer, such as <|im_start|>. Where they do not fit, the
    vocabulary grows; their rows start as the mean of the others."""
    neftune_alpha: NonNegativeFloat = 0.0
    """Noise on embeddings while training (NEFTune, Jain et al. 2023); 5 is usual, 0: none."""


class Lora(Section):
    """Adapters: small trained matrices beside frozen ones (LoRA). Names and defaults are PEFT's,
    in plain words."""

    rank: NonNegativeInt = 0
    """Width of the adapters, PEFT's `r`; 0: none, all weights are trained."""
    alpha: PositiveFloat = 8.0
    """Adapters count alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of what an adapter is given that is left out by chance."""
    targets: str | list[str] = ["q_proj", "v_proj"]
    """Matrices that get an adapter: their names, a regular expression for full names, or
    all-linear."""
    exclude: str | list[str] = []
    """Matrices that get none: names, or a regular expression."""
    layers: list[NonNegativeInt] | None = None
    """Blocks that get adapters, counted from 0; not set: all."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Other ranks, by a regular expression for the end of a name, e.g. {"layers.0.*" = 32}."""
    alpha_pattern: dict[str, PositiveFloat] = {}
    """Other alphas, likewise."""
    rslora: bool = False
    """Adapters count alpha / √rank (rsLoRA)."""
    dora: bool = False
    """Lengths of the matrices' rows are trained on their own (DoRA)."""
    lr_ratio: PositiveFloat = 1.0
    """Learning rate of B over that of A (LoRA+); 16 is usual where it is used."""
    modules_to_save: list[str] = []
    """Modules that are trained whole beside the adapters, such as lm_head."""
    base: Literal["auto", "float32", "bfloat16", "nf4"] = "auto"
    """Type that frozen weights are kept in; auto: that of the forward pass; nf4: 4 bits (QLoRA),
    without tensor parallelism."""
    adapter: PathText | None = None
    """Folder of a PEFT adapter to continue from. It also gives rank, alpha, dropout, targets,
    exclude, layers, both patterns, rslora, dora and modules_to_save."""
    save_as_peft: bool = False
    """At each save, also write the adapters to checkpoint-N/ in the run folder, as PEFT does."""


class Preference(Section):
    """Preference tuning: pairs of a chosen and a rejected answer."""

    loss: Literal["off", "dpo", "ipo", "orpo", "simpo"] = "off"
    """What is minimised; off: pairs are not trained on."""
    beta: PositiveFloat = 0.1
    """How much leaving the reference costs (dpo, ipo); scale of the rewards (simpo, 2 is usual);
    weight of the odds (orpo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With dpo: how often a pair is taken to be the wrong way round."""
    simpo_gamma: NonNegativeFloat = 0.5
    """With simpo: the margin that is aimed at."""
    reference: Literal["auto", "adapter_off", "copy", "precomputed"] = "auto"
    """Where the reference of dpo and ipo comes from: the model without its adapters, a frozen copy
    of what is trained, or log-probabilities computed once beforehand. auto: the model as this run
    starts, which is adapter_off if all that is trained are new adapters, else copy."""
    max_prompt: PositiveInt | None = None
    """Tokens that are kept of a prompt that is too long, at least; not set: half of the room that
    it has with an answer, which is half of a row."""
    prompt_side: Literal["left", "right"] = "left"
    """Where prompts that are too long lose tokens."""
    answer_side: Literal["left", "right"] = "right"
    """Where answers that are too long lose tokens."""


class Comm(Section):
    """How devices talk to each other."""

    backend: Literal["auto", "nccl", "gloo", "mpi", "nvshmem"] = "auto"
    """auto: nccl (RCCL on AMD) for GPUs, gloo for CPUs."""
    init_timeout_seconds: Seconds = 300
    """Longest wait for all ranks to meet and take their first step."""
    train_timeout_seconds: Seconds = 100
    """Longest wait of one collective after the first step."""


class Health(Section):
    """What happens when a step goes wrong."""

    max_bad_steps: PositiveInt = 10
    """Steps with a non-finite loss or gradient are skipped; this many in a row stop the run."""
    spike_guard: Literal["off", "skip", "rewind"] = "off"
    """On a loss spike: skip the step, or go back to the last checkpoint and leave the batches
    out."""
    spike_threshold: Annotated[float, Field(gt=0)] = 6.0
    """A spike is this many standard deviations above the mean of the recent losses."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Recent losses that are looked at."""
    hang_seconds: PositiveFloat = 60.0
    """A rank that has not gone on for this long, and for ten times what it usually takes, hangs; a
    job then ends all ranks and starts them again. A save hangs when no byte was written for this
    long, whatever its size."""
    max_failed_starts: PositiveInt = 8
    """After this many attempts in a row without a new step a job gives its nodes back, and the next
    job of the chain continues on others. The same error at the same place twice stops the chain
    whatever this says."""


class Debug(Section):
    """Seeds and determinism."""

    seed: Seed = 0
    """Seed of weights, data order and every other random stream."""
    deterministic: bool = False
    """Only deterministic algorithms: two runs give the same bits."""
    deterministic_warn_only: bool = False
    """Warn where an operation has no deterministic form, in place of stopping."""


class JobConfig(BaseModel):
    """Everything a run depends on."""

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
