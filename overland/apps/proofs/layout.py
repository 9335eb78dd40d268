"""Trains one tiny model under many layouts and compares losses and gradient norms of each step with
one process, within tolerances.

In float64, rounding cannot hide a mistake: the losses and gradient norms of a correct layout agree
to about 1e-15, those of a wrong one to 1e-5 at best. The loss on held-out data is compared too: its
rows are not all full, so that a mean of means over ranks or batches would differ.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any, NamedTuple

from overland.apps.proofs.layouts import ARCHITECTURE, KINDS, PAIRS, WAYS, ProofLayout, Sections
from overland.apps.proofs.pool import RankPool
from overland.checks.machine import lacks_for_schedule
from overland.checks.model import check_custom_import
from overland.config.errors import ConfigError, Problem
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.models.flops import sample_fields
from overland.models.registry import model_config, own_model_name
from overland.world import World
from overland.world.devices import device_type

# Largest relative differences in the loss and in the gradient norm that pass. Only float64 is a
# proof. In bfloat16, twenty steps on random tokens drift apart by up to 1.3e-2 in the loss
# (measured over the short list, where one process was 7e-3 from float32 and its layout 6e-3), and
# by then the norm, a sum of nearly cancelling terms, differs arbitrarily.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
NORM_TOLERANCES = {"float64": 1e-9, "float32": 1e-2, "bfloat16": math.inf}
WIDER = {"float32": "float64", "bfloat16": "float32"}
FLOORS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-3}
SPREADS = 4
REFUSED = "refused"
STEPS = 20
ROWS = 8
SEQ_LEN = 32
MODEL_KINDS = ("model_type", "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_type")
LORA_KINDS = {"alpha", "dropout", "targets", "exclude", "rslora", "dora", "lr_ratio",
              "modules_to_save"}  # fmt: skip

HEAD = """\
# Layouts that compute what one process computes

Written by `overland prove layout --table` (`make prove-all`). Each row is a tiny model, trained \
from the same seed on real processes over gloo, with the largest relative differences from one \
process over all steps: in the loss, in the gradient norm and in the loss on held-out data. Next \
to the number format are the bounds for the losses and for the norm. \
`overland/apps/proofs/layouts.py` explains the names.

| layout | ranks | number format | loss | gradient norm | validation loss | verdict |
|---|---|---|---|---|---|---|
"""

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '>' }}"
    "{% endgeneration %}{% else %}{{ '<' + m.content }}{% endif %}{% endfor %}"
)

# 4 key-value heads and 4 layers, so that everything can be split by 2 or 4. The sequence is split
# by 2·cp and by tp.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


# On a GPU: sizes that its own kernels take. At a learning rate of 1e-2 such a model is chaotic: in
# twenty steps it makes 1e-4 of float64's last bit.
LARGER: dict[str, Any] = {
    **TINY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


class Tolerance(NamedTuple):
    """The largest relative differences that pass."""

    loss: float
    norm: float


@dataclass(frozen=True)
class LayoutVerdict:
    layout: str
    ranks: int
    dtype: str
    loss_difference: float
    norm_difference: float
    validation_difference: float
    bounds: Tolerance
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return (
            not self.error
            and max(self.loss_difference, self.validation_difference) <= self.bounds.loss
            and self.norm_difference <= self.bounds.norm
        )

    @property
    def is_refused(self) -> bool:
        """Whether this model, or this version of torch, cannot train in this layout."""
        kinds = ("overland.errors.ModelError", "overland.errors.Objective", REFUSED)
        return self.error.startswith(kinds)

    @property
    def verdict(self) -> str:
        if self.is_refused:
            return f"refused: {self.error.partition(': ')[2]}"
        return "equal" if self.is_equal else f"differs {self.error}".strip()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bounds": self.bounds._asdict(), "equal": self.is_equal}

    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            f"`{self.layout}`",
            str(self.ranks),
            f"{self.dtype} (≤ {self.bounds.loss:.2g}, {self.bounds.norm:.2g})",
            f"{self.loss_difference:.1e}",
            f"{self.norm_difference:.1e}",
            f"{self.validation_difference:.1e}",
            self.verdict,
        ]

    def line(self) -> str:
        """A line of the terminal."""
        return (
            f"{self.layout:<44}{self.ranks:>5}  {self.loss_difference:>8.1e}  "
            f"{self.norm_difference:>8.1e}  {self.validation_difference:>8.1e}  {self.verdict}"
        )


Curve = list[tuple[float, ...]]
Curves = tuple[Curve, Curve]
References = dict[tuple[str, ...], tuple[Curves, Tolerance]]


def prove_layouts(
    layouts: Iterable[ProofLayout],
    pool: RankPool,
    dtype: str = "float64",
    steps: int = STEPS,
    settings: Sections | None = None,
    references: References | None = None,
) -> Iterator[LayoutVerdict]:
    """Yields one verdict per layout. `settings` (from a user's config) apply to all. `references`
    caches what one process computed, by kind, for another call that differs only in its layouts."""
    references = {} if references is None else references
    for layout in layouts:
        with tempfile.TemporaryDirectory() as folder:
            validated = {"validation": held_out_data(Path(folder)), **(settings or {})}
            job_of = partial(
                proof_job,
                steps=steps,
                folder=Path(folder),
                settings=validated,
                device=pool.device_type,
            )
            if layout.kinds not in references:
                alone = pool.run(1, curves, job_of(layout.alone(), dtype))[0]
                bounds = Tolerance(TOLERANCES[dtype], NORM_TOLERANCES[dtype])
                if pool.device_type == "cuda":
                    others = [job_of(layout.alone("accumulate"), dtype)]
                    if dtype in WIDER:
                        others.append(job_of(layout.alone(), WIDER[dtype]))
                    spread = [pool.run(1, curves, job)[0] for job in others]
                    bounds = spread_bounds(spread, alone, dtype)
                references[layout.kinds] = alone, bounds
            (steps_alone, held_out_alone), bounds = references[layout.kinds]
            job = job_of(layout, dtype)
            found: list[Curves] = []
            if message := lacks_for_schedule(job.parallelism):
                failure = f"{REFUSED}: {message}"
            else:
                found, failure = try_layout(pool, layout, job)
        yield LayoutVerdict(
            layout.name,
            layout.num_ranks,
            dtype,
            largest_difference([got for got, _ in found], steps_alone, 0),
            largest_difference([got for got, _ in found], steps_alone, 1),
            largest_difference([got for _, got in found], held_out_alone, 0),
            bounds,
            failure,
        )


def try_layout(pool: RankPool, layout: ProofLayout, job: JobConfig) -> tuple[list[Curves], str]:
    """Returns what each rank computed, or the error that ended the run."""
    try:
        return pool.run(layout.num_ranks, curves, job, num_nodes=layout.num_nodes), ""
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and line != "no answer"]
        named = (line for line in reversed(lines) if not line.startswith("rank "))
        return [], next(named, "no answer")


def spread_bounds(others: list[Curves], alone: Curves, dtype: str) -> Tolerance:
    """Returns bounds for a GPU, whose kernels round by the shape of what they multiply: a few times
    what one rank differs from itself, when it computes row by row and when it computes in a wider
    format, which shows what rounding itself is worth (ranks round sums that one rank does not)."""
    losses = [difference(one[0], alone[0], 0) for one in others]
    losses += [difference(one[1], alone[1], 0) for one in others]
    norms = [difference(one[0], alone[0], 1) for one in others]
    return Tolerance(*(max(FLOORS[dtype], SPREADS * max(spread)) for spread in (losses, norms)))


def curves(world: World, config: JobConfig) -> Curves:
    """Returns the loss and gradient norm of every step, and the loss of every validation, on this
    rank."""
    import torch

    from overland.checks.model import import_custom
    from overland.training.build import build_run
    from overland.training.callbacks import Callback, Record
    from overland.training.loop import train
    from overland.training.run import Run

    steps: Curve = []
    validations: Curve = []

    class Recorder(Callback):
        def on_log(self, run: Run, record: Record) -> None:
            steps.append((record["loss"], record["grad_norm"]))

        def on_validation(self, run: Run, record: Record) -> None:
            validations.append((record["validation_loss"],))

    import_custom(config)
    kind = device_type(config.training.device)
    device = torch.device(kind if kind == "cpu" else f"{kind}:{torch.cuda.current_device()}")
    run = build_run(config, world, device, log_ranks=())
    run.callbacks = [Recorder(run)]
    train(run)
    return steps, validations


def curve(world: World, config: JobConfig) -> Curve:
    return curves(world, config)[0]


def held_out_data(folder: Path) -> dict[str, Any]:
    """Writes validation data and returns settings that read it: documents of random tokens that do
    not fill the last row or the last batch."""
    draw = Random(0)
    sizes = [draw.randint(3, SEQ_LEN // 2) for _ in range(32)]
    documents = [draw.choices(range(TINY["vocab_size"]), k=size) for size in sizes]
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in documents))
    return {"enable": True, "dataset_path": str(path), "freq": STEPS // 2, "steps": -1}


def talk_data(folder: Path, pairs: bool) -> Sections:
    """Writes short conversations, or pairs of answers, of random letters; returns settings that
    read them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(letter_tokenizer())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    draw = Random(1)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": "".join(draw.choices(ascii_letters, k=draw.randint(1, 5)))}

    for name, count in (("talks", 64), ("held_out_talks", 12)):
        lines: list[dict[str, Any]] = []
        for _ in range(count):
            asked = [turn("user"), turn("assistant"), turn("user")][draw.choice([0, 2]) :]
            one, other = [turn("assistant")], [turn("assistant")]
            told = {"prompt": asked, "chosen": one, "rejected": other}
            lines.append(told if pairs else {"messages": [*asked, *one]})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return {
        "training": {"dataset_path": str(folder / "talks.jsonl")},
        "validation": {"dataset_path": str(folder / "held_out_talks.jsonl")},
        "data": {"folder": str(folder)},
        "model": {"hf_assets_path": str(folder)},
    }


def letter_tokenizer() -> str:
    """Returns a tokenizer.json whose tokens are letters and two special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<", ">", *ascii_letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(["<", ">"])
    return tokenizer.to_str()


def proof_job(
    layout: ProofLayout,
    dtype: str,
    steps: int,
    folder: Path,
    settings: Sections | None = None,
    device: str = "cpu",
) -> JobConfig:
    wide = "float64" if dtype == "float64" else "float32"
    data_parallel = layout.degrees.get("shard", 1) * layout.degrees.get("rep", 1)
    job: Sections = {
        "job": {"dump_folder": str(folder)},
        "training": {
            "dataset": "random",
            "seq_len": SEQ_LEN,
            "global_batch_size": ROWS,
            "local_batch_size": ROWS // data_parallel,
            "steps": steps,
            "dtype": wide,
            "mixed_precision_param": dtype,
            "mixed_precision_reduce": wide,
            "device": "cpu" if device == "cpu" else "auto",
        },
        "compile": {"enable": False},
        "optimizer": {"lr": 1e-2 if device == "cpu" else 1e-3},
        "lr_scheduler": {"warmup_steps": 4},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"enable": False},
    }
    kinds, ways = [KINDS[kind] for kind in layout.kinds], [WAYS[way] for way in layout.ways]
    for change in (settings or {}, *kinds, *ways):
        _merge(job, change)
    if device == "cuda" and "compile" in layout.ways:
        _merge(job, {"compile": {"backend": "inductor"}})
    degrees = layout.parallelism
    if "sharding_stage" in job.get("parallelism", {}):  # derives the data-parallel degrees
        degrees = {key: n for key, n in degrees.items() if not key.startswith("data_parallel")}
    _merge(job, {"parallelism": degrees})
    if "sft" in job:
        _merge(job, talk_data(folder / "talks", pairs="preference" in job))
    changes, own = job.pop(ARCHITECTURE, {}), job.get("model", {}).get("name")
    if own and changes:
        message = f"{', '.join(layout.kinds)} changes a plain decoder, and {own} is a custom model"
        raise ConfigError([Problem(message, "command line", "--layouts")])
    if not own:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps((TINY if device == "cpu" else LARGER) | changes))
        _merge(job, {"model": {"config": str(path)}})
    return JobConfig.model_validate(job)


def difference(got: Curve, expected: Curve, which: int) -> float:
    """Returns the largest relative difference over all steps; a missing step counts as 1."""
    if len(got) != len(expected) or not expected:
        return 1.0
    pairs = zip(got, expected, strict=True)
    return max(abs(a[which] - b[which]) / abs(b[which]) for a, b in pairs)


def largest_difference(found: list[Curve], expected: Curve, which: int) -> float:
    """Returns the same for the curves of several ranks; without any, as for a missing step, 1."""
    return max((difference(got, expected, which) for got in found), default=1.0)


def _own_sections(config: JobConfig, architecture: Any) -> Sections:
    """Returns the sections that name a custom model and, if it takes arrays, its data."""
    keys = {"name", "flavor", "config", "overrides", "freeze"}
    found: Sections = {"model": config.model.model_dump(include=keys)}
    if sample_fields(architecture) is None:
        if getattr(architecture, "vocab_size", 0) < TINY["vocab_size"]:
            message = f"the proof needs a vocabulary of at least {TINY['vocab_size']} tokens"
            raise ConfigError([Problem(message, "", "model.flavor", config.model.flavor)])
        return found
    name = config.training.dataset
    if config.training.dataset_path is not None or config.data.sources:
        message = "the proof of a model of arrays needs one named source (register_source)"
        raise ConfigError([Problem(message, "", "training.dataset", name)])
    found["training"] = {"dataset": name}
    found["validation"] = {"enable": True, "dataset": name, "freq": STEPS // 2, "steps": 2,
                           "allow_training_data": True}  # fmt: skip
    return found


def _merge(job: Sections, change: Sections) -> None:
    for section, values in change.items():
        job[section] = {**job.get(section, {}), **values}


def settings_of(source: str | None) -> Sections | None:
    """Returns what the proof takes from a user's config, as sections for every layout: the kind of
    model and how it computes, but not its size; a custom model as it is. None without a config."""
    if source is None:
        return None
    loaded = load_config(source)
    config = loaded.config
    if problems := list(check_custom_import(loaded)):  # the model may be custom
        raise ConfigError(problems)
    settings: Sections = {
        "job": {"custom_import": config.job.custom_import},
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
        "compile": config.compile.model_dump(),
        "data": config.data.model_dump(include={"document_mask"}),
        "optimizer": config.optimizer.model_dump(include={"name", "options"}),
        "debug": config.debug.model_dump(include={"seed"}),
        "model": config.model.model_dump(include={"transforms", "sparse"}),
        "training": config.training.model_dump(include={"objective", "objective_options"}),
    }
    if config.lora.rank:
        if config.lora.base == "nf4":
            _merge(settings, KINDS["qlora"])
        kind = config.lora.model_dump(include=LORA_KINDS)
        _merge(settings, {"lora": {**kind, "rank": min(config.lora.rank, 4)}})
    if config.preference.loss != "off":
        _merge(settings, {**PAIRS, "preference": config.preference.model_dump()})
    elif config.sft.shape != "off":
        _merge(settings, KINDS["sft"])
    if config.compile.enable:  # the proof is about the layout; generated code rounds differently
        settings["compile"]["backend"] = "aot_eager"
    architecture = model_config(config.model)
    if own_model_name(architecture):  # a plain decoder of its sizes would prove nothing
        _merge(settings, _own_sections(config, architecture))
        settings.pop(ARCHITECTURE, None)
        return settings
    hf = architecture.to_hf()
    _merge(settings, {ARCHITECTURE: {key: hf[key] for key in MODEL_KINDS if key in hf}})
    if hf.get("sliding_window"):
        settings[ARCHITECTURE]["sliding_window"] = 9
    return settings
