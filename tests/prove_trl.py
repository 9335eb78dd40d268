"""Fine-tuning compared with TRL and PEFT: the losses of every step, and the models exchanged;
writes a page of results.

    python -m tests.prove_trl docs/evidence/trl.md

Overland trains by its command line, TRL by its trainers. Both are given the same files: a small
Llama with random weights, its tokenizer with Llama 3's published chat template (TRL puts its own
marks into it, Overland finds assistants' turns by prefixes), an adapter that a short run of
Overland has written, and records in the order in which Overland's run read them.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.apps.convert.formats import open_any
from overland.apps.convert.formats.merge import join
from overland.config.errors import toml_value
from overland.config.load import load_config
from overland.data.batch import load_batch
from overland.data.corpora import Preparer
from overland.data.prepare import training_data
from tests.cli.processes import overland, read_metrics
from tests.data.chats import ROLES, write_lines, write_tokenizer
from tests.peers import TRL, install
from tests.prove_peft import difference, ours

LIMITS = {
    "losses": 1e-4, "gradient norms": 1e-3, "reward margins": 1e-4,
    "our model in PEFT": 1e-5, "theirs here": 1e-5,  # as in prove_peft
}  # fmt: skip
STEPS = 20
BATCH, MICRO_BATCH = 8, 4
NUM_RECORDS = 96  # so that the data is read almost twice
LONGEST = 256
VOCABULARY = 640
LR = 2e-3
DECAY = 0.01
CLIP = 0.3  # the norms of most steps are larger

LINEAR = {"rank": 8, "alpha": 16, "targets": "all-linear"}


@dataclass(frozen=True)
class Case:
    """A way of training, in the words of both."""

    data: str = "messages"
    """Which of the record files."""
    trainer: str = "SFT"
    lora: dict[str, Any] = field(default_factory=dict)
    preference: dict[str, Any] = field(default_factory=dict)
    trl: dict[str, Any] = field(default_factory=dict)
    """Of TRL's config."""
    starts_with_adapter: bool = True
    """Whether TRL's trainer is given a PeftModel, or a config of PEFT and only then the weights.
    The first takes the adapter at its start for DPO's reference, the second the model without."""
    micro_batch: int = MICRO_BATCH
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further keys of Overland, by section."""


DORA = {**LINEAR, "dora": True}
DECAYED = {"groups": [{"pattern": "*.lora_magnitude_vector", "weight_decay": DECAY}]}
WITHOUT: dict[str, Any] = {
    "data": "pairs", "trainer": "DPO", "lora": LINEAR, "starts_with_adapter": False
}  # fmt: skip
CASES: dict[str, Case] = {
    "LoRA": Case(lora={"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}),
    "LoRA, all linear": Case(lora=LINEAR),
    "LoRA and a whole head": Case(lora={**LINEAR, "modules_to_save": ["lm_head"]}),
    "rsLoRA": Case(lora={**LINEAR, "rslora": True}),
    "DoRA": Case(lora=DORA),
    "DoRA, decayed as TRL does": Case(lora=DORA, more={"optimizer": DECAYED}),
    "all weights": Case(),
    "LoRA, prompts and completions in turns": Case("completions", lora=LINEAR),
    "LoRA, prompts and completions as texts": Case("texts", lora=LINEAR),
    "DPO, reference without adapter": Case(
        **WITHOUT, preference={"loss": "dpo", "reference": "adapter_off"}
    ),
    "DPO, reference is the adapter's start": Case(
        "pairs", "DPO", lora=LINEAR, preference={"loss": "dpo"}
    ),
    "DPO, reference computed beforehand": Case(
        "pairs",
        "DPO",
        lora=LINEAR,
        preference={"loss": "dpo", "reference": "precomputed"},
        trl={"precompute_ref_log_probs": True},
    ),
    "DPO, all weights": Case("pairs", "DPO", preference={"loss": "dpo"}),
    "IPO": Case(
        **WITHOUT,
        preference={"loss": "ipo", "reference": "adapter_off"},
        trl={"loss_type": ["ipo"]},
    ),
    "SimPO": Case(
        "pairs",
        "CPO",
        lora=LINEAR,
        preference={"loss": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
        trl={"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "beta": 2.0},
    ),
    "ORPO": Case(
        "bare pairs",
        "ORPO",
        lora=LINEAR,
        preference={"loss": "orpo"},
        micro_batch=1,
        more={"sft": {"parse_specials": True}},  # the prompt is the name of a token
    ),
}


def main(path: Path) -> int:
    install("trl", TRL)
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="overland-trl-") as folder:
        files = Files(Path(folder))
        for name, case in CASES.items():
            losses, found = prove(files, name, case)
            is_equal = all(one is None or one < LIMITS[what] for what, one in found.items())
            failed |= not is_equal
            figures = ["" if one is None else f"{one:.1e}" for one in found.values()]
            cells = [name, f"{losses[0]:.4f} → {losses[-1]:.4f}", *figures]
            rows.append(f"| {' | '.join([*cells, 'equal' if is_equal else 'DIFFERS'])} |")
            print(rows[-1], flush=True)
    path.write_text("\n".join([*head(), *rows, "", HOW, ""]))
    return int(failed)


class Files:
    """What both sides are given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder, folder / "base"
        self.records = records()
        for name, lines in self.records.items():
            write_lines(folder / f"{name}.jsonl", lines)
        self._write_base()
        self._starts: dict[str, Path] = {}

    def _write_base(self) -> None:
        import trl
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=VOCABULARY,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
            max_position_embeddings=2 * LONGEST,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(self.base)
        template = Path(trl.__file__).parent / "chat_templates" / "llama3.jinja"
        names = {**ROLES["llama3"], "pad_token": "<unk>"}
        write_tokenizer(self.base, **names, chat_template=template.read_text())

    def start(self, lora: dict[str, Any]) -> Path:
        """An adapter that Overland has trained for some steps and written in PEFT's format."""
        key = json.dumps(lora)
        if key not in self._starts:
            run = self.folder / f"start-{len(self._starts)}"
            settings = sections(self, Case(lora=lora), run)
            settings["training"]["steps"] = 3
            settings["optimizer"]["lr"] = 1e-2
            settings["lora"] |= {"save_as_peft": True}
            train(settings, run)
            self._starts[key] = run / "checkpoint-3"
        return self._starts[key]


def records() -> dict[str, list[dict[str, Any]]]:
    """Records of every shape, each with a number of its own in its first turn."""
    draw = random.Random(1)
    words = ["the", "model", "reads", "a", "list", "of", "names", "and", "writes", "one", "line"]

    def text(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("messages", "completions", "texts", "pairs", "bare pairs")
    }
    for i in range(NUM_RECORDS):
        ask = f"Record {i}: {text(12)}"
        more = [
            turn(role, text(10))
            for _ in range(draw.randint(0, 2))
            for role in ("user", "assistant")
        ]
        system = [turn("system", text(6))] if i % 3 == 0 else []
        talk = [*system, turn("user", ask), turn("assistant", text(20)), *more]
        found["messages"].append({"messages": talk})
        found["completions"].append({"prompt": talk[:-1], "completion": talk[-1:]})
        found["texts"].append({"prompt": f"{ask}\n", "completion": text(20)})
        answers = [text(20), text(20)]
        found["pairs"].append({
            "prompt": [*system, turn("user", ask)],
            "chosen": [turn("assistant", answers[0])],
            "rejected": [turn("assistant", answers[1])],
        })  # fmt: skip
        bare = {"chosen": f"Record {i}: {answers[0]}", "rejected": answers[1]}
        found["bare pairs"].append({"prompt": ROLES["llama3"]["bos_token"], **bare})
    return found


def prove(files: Files, name: str, case: Case) -> tuple[Sequence[float], dict[str, float | None]]:
    """Trains both; returns Overland's losses, and how far the two are apart at most."""
    place = files.folder / re.sub(r"\W+", "-", name)
    run, other = place / "ours", place / "theirs"
    settings = sections(files, case, run)
    if case.lora:
        settings["lora"] = {"adapter": str(files.start(case.lora)), "save_as_peft": True}
    else:
        settings["checkpoint"]["last_save_in_hf"] = True
    logged = train(settings, run)
    lines = [files.records[case.data][i] for i in order_of(run)]
    log, model = train_theirs(files, case, lines, other)
    losses = [record["loss"] for record in logged]
    assert max(losses) / min(losses) > 1.02, losses  # or nothing would be shown

    tokens_BS = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    written, source = ours(open_any(run), tokens_BS), open_any(other)
    assert difference(written, logits(load(files.base), tokens_BS)) > 0.01
    if case.lora:
        source = join(open_any(files.base), source)
    margins = ("rewards_margins", "rewards/margins") if case.preference else None
    return losses, {
        "losses": apart(logged, log, "loss", "loss"),
        "gradient norms": apart(logged, log, "grad_norm", "grad_norm"),
        "reward margins": apart(logged, log, *margins) if margins else None,
        "our model in PEFT": difference(logits(load_ours(files, case, run), tokens_BS), written),
        "theirs here": difference(ours(source, tokens_BS), logits(model, tokens_BS)),
    }


def apart(ours: list[Any], theirs: list[Any], our_key: str, their_key: str) -> float:
    """How far the logged values of a step are apart at most, relative to the larger one; margins,
    which begin at 0, relative to their largest."""
    pairs = [(one[our_key], other[their_key]) for one, other in zip(ours, theirs, strict=True)]
    largest = max(abs(other) for _, other in pairs)
    is_margin = "margins" in our_key
    return max(abs(a - b) / (largest if is_margin else max(abs(a), abs(b))) for a, b in pairs)


def sections(files: Files, case: Case, run: Path) -> dict[str, dict[str, Any]]:
    """Overland's config."""
    found: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(run)},
        "model": {"from": str(files.base)},
        "training": {
            "dataset_path": str(files.folder / f"{case.data}.jsonl"),
            "seq_len": 2 * LONGEST if case.preference else LONGEST,
            "local_batch_size": case.micro_batch,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "max_norm": CLIP,
            "dtype": "float32",
            "mixed_precision_param": "float32",
        },
        "sft": {"shape": "auto"},
        "data": {"folder": str(run.parent / "data"), "packing": "trunc"},
        "optimizer": {"lr": LR, "beta2": 0.999, "weight_decay": DECAY},
        "lr_scheduler": {"warmup_steps": 0, "decay_type": "cosine"},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"interval": STEPS},
    }
    if case.lora:
        found["lora"] = dict(case.lora)
    if case.preference:
        found["preference"] = dict(case.preference)
    for section, values in case.more.items():
        found[section] |= values
    return found


def train(settings: dict[str, dict[str, Any]], run: Path) -> list[dict[str, Any]]:
    """Runs `overland train`; returns what it logged of each step."""
    run.mkdir(parents=True)
    lines = []
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(one)}" for key, one in values.items())]
    file = run.with_suffix(".toml")
    file.write_text("\n".join(lines))
    overland("train", str(file), cwd=run.parent)
    return [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def order_of(run: Path) -> list[int]:
    """Numbers of the records in the order in which a run has read them."""
    config = load_config(str(run / "config.toml"), env={}).config
    data = training_data(config, BATCH, VOCABULARY, Preparer())
    try:
        assert data.tokenizer is not None
        found = []
        for step in range(STEPS):
            for row in load_batch(data.rows, step)["tokens_BS"]:
                number = re.search(r"Record (\d+):", data.tokenizer.decode(row.tolist()))
                assert number is not None
                found.append(int(number[1]))
    finally:
        data.close()
    return found


def train_theirs(
    files: Files, case: Case, lines: list[dict[str, Any]], place: Path
) -> tuple[list[dict[str, float]], Any]:
    """Trains with TRL; returns what it logged of each step, and the model."""
    import trl
    import trl.experimental.cpo
    import trl.experimental.orpo
    from datasets import Dataset
    from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
    from transformers import AutoTokenizer

    kinds = {
        "SFT": (trl.SFTConfig, trl.SFTTrainer),
        "DPO": (trl.DPOConfig, trl.DPOTrainer),
        "CPO": (trl.experimental.cpo.CPOConfig, trl.experimental.cpo.CPOTrainer),
        "ORPO": (trl.experimental.orpo.ORPOConfig, trl.experimental.orpo.ORPOTrainer),
    }
    make_config, make_trainer = kinds[case.trainer]
    config = make_config(
        output_dir=str(place), per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=BATCH // case.micro_batch, max_steps=STEPS,
        train_sampling_strategy="sequential", learning_rate=LR, lr_scheduler_type="cosine",
        warmup_steps=0, weight_decay=DECAY, max_grad_norm=CLIP, max_length=LONGEST, bf16=False,
        use_cpu=True, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True,
        **({"assistant_only_loss": True} if case.data == "messages" else {}), **case.trl,
    )  # fmt: skip
    model, more = load(files.base), {}
    if case.lora and case.starts_with_adapter:
        model = PeftModel.from_pretrained(model, files.start(case.lora), is_trainable=True)
    elif case.lora:
        more["peft_config"] = LoraConfig.from_pretrained(files.start(case.lora))
        more["peft_config"].inference_mode = False
    trainer = make_trainer(
        model=model, args=config, train_dataset=Dataset.from_list(lines),
        processing_class=AutoTokenizer.from_pretrained(files.base), **more,
    )  # fmt: skip
    if more:
        set_peft_model_state_dict(trainer.model, load_peft_weights(str(files.start(case.lora))))
    trainer.train()
    trainer.save_model(str(place))
    return [log for log in trainer.state.log_history if "loss" in log], trainer.model


def load_ours(files: Files, case: Case, run: Path) -> Any:
    """What our run has written, read by transformers and PEFT."""
    if not case.lora:
        return load(run / "hf")
    from peft import PeftModel

    return PeftModel.from_pretrained(load(files.base), run / f"checkpoint-{STEPS}")


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(tokens_BS).logits
    return found


def head() -> list[str]:
    names = ("trl", "peft", "transformers", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    limits = ", ".join(f"{what} {limit:.0e}" for what, limit in LIMITS.items())
    return [
        "# Fine-tuning next to TRL and PEFT",
        "",
        f"The same {STEPS} steps by `overland train` and by TRL's trainers, in float32 on a CPU, "
        f"with {versions}: the largest relative difference of what both logged in any step, and of "
        "the logits of the trained models, each written by one side and read by the other. What "
        f"counts as equal, at most: {limits}.",
        "",
        f"| | loss, first → last step | {' | '.join(LIMITS)} | |",
        f"|---|---|{'---|' * len(LIMITS)}---|",
    ]


HOW = f"""\
By `python -m tests.prove_trl` (part of `make prove-all`). Both sides are given the same files: a \
small Llama with random weights, a tokenizer with Llama 3's published chat template, {NUM_RECORDS} \
records of one to three turns, and an adapter that a short run of Overland has trained and written \
(not where all weights are trained). TRL reads the records in the order in which Overland's run \
did. Both have AdamW with weight decay {DECAY}, a cosine schedule, clipping at {CLIP}, which most \
steps exceed, and {BATCH} records per step in micro-batches of {MICRO_BATCH}. TRL marks what \
assistants say by its own version of the template (`assistant_only_loss`), Overland finds it by \
prefixes of the published one.

Where the two mean different things:

- **DoRA.** transformers decays the vectors of lengths, Overland decays matrices alone. The second \
row has a group of the optimizer that decays them too.
- **The reference of DPO.** TRL compares a `PeftModel` with the adapter that it came with, and a \
model with a `peft_config` with itself without adapters: `preference.reference` `copy` and \
`adapter_off`. `auto` is the model as the run starts; for new adapters, all three are the same.
- **ORPO.** TRL makes the prompt likelier as well, and takes the mean over the tokens of a \
micro-batch; the paper, and Overland, count the answer alone, each pair as much as any other. So \
the prompts of this row are one token long, and its micro-batches one pair.
- **Warm-up** is left out: the first step of transformers has a rate of 0, the first of Overland \
one of 1 / (warmup_steps + 1)."""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
