"""Keys of `[model]`, `[training]`, `[optimizer]`, `[lr_scheduler]`, `[lora]`, `[parallelism]`,
`[activation_checkpoint]` and `[compile]`, with defaults and bounds: what is trained, and how.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from overland.config.schema.base import (
    BatchSize,
    Beta,
    Degree,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)


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
    """Recompute the masks every N steps."""
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
    """Where each process computes; auto: on a GPU, if there is one; cpu: always on the CPU."""
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
    kernels: Literal["auto", "plain"] = "auto"
    """Our own GPU kernels in training; auto: on Hopper all of them, on other GPUs those that agree
    with PyTorch on all ranks when the run starts, which then says so; plain: PyTorch only."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    gc_freq: PositiveInt = 50
    """Run Python's garbage collector on all ranks together, every N steps."""


class ParameterGroup(Section):
    """Parameters with their own rates: one table of [[optimizer.groups]]."""

    pattern: str
    """Parameter names, with wildcards, e.g. "*.embed_tokens.*"."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor on optimizer.lr and its schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; default: the same as outside a group."""


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
    """Alphas of single matrices, in the same way."""
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
