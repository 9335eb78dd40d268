"""Keys of `[data]`, `[images]`, `[sft]`, `[preference]` and `[validation]`, with defaults and
bounds: what is trained and validated on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from overland.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)


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


OLDER_MIXTURES = {"tokens": "sequences", "rows": "documents"}
"""What version 0.1 called them."""


class Data(Section):
    """Where data is stored, and how it becomes batches."""

    folder: PathText = "./data"
    """Folder to find named datasets in, and to store tokenizers and token shards in."""
    datasets: dict[str, PathText] = {}
    """Names for dataset folders, e.g. {c4 = "/scratch/c4"}."""
    sources: dict[str, DataSource] = {}
    """A mixture, instead of training.dataset: one table per source, with its path and weight."""
    mixture: Literal["sequences", "documents"] = "sequences"
    """What the weights apply to: sequences, each from one source; or documents, which are then
    packed together."""
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

    @field_validator("mixture", mode="before")
    @classmethod
    def _has_todays_name(cls, value: Any) -> Any:
        return OLDER_MIXTURES.get(value, value) if isinstance(value, str) else value


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
    """Validate on it every N steps; default: validation.freq."""
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
    """Validate every N steps."""
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
