"""What a trainer does with a config that has a mistake in it, in its own process:

    python -m tests.comparison.checkers TRAINER FOLDER

prints a line of JSON per mistake. FOLDER holds `base`, `texts.jsonl` and, as `data`, a folder with
the latter. transformers and TRL go on to train on the CPU if they accept the config. torchtitan,
which trains on GPUs alone, goes as far as it can without one: config, tokenizer, data, optimizer.
axolotl's config is checked by the function that its command calls first, and nothing is trained.
nanochat's clone is $NANOCHAT.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from overland.config.errors import toml_value
from tests.comparison.mistakes import MISTAKES, Mistake, Settings
from tests.peers import AXOLOTL, NANOCHAT, TORCHTITAN, TRL, install

passes = 0
"""How often a model was given a batch."""


def main(name: str, folder: Path) -> None:
    count_passes()
    with contextlib.suppress(ImportError):  # so that its warnings reach the handler below
        from transformers.utils import logging as theirs

        theirs.enable_propagation()
    sound = Mistake("none", (), settings={name: {}})
    for mistake in [sound, *MISTAKES]:
        if name in mistake.settings:
            print("CHECKED", json.dumps(check(name, mistake, folder)), flush=True)


def count_passes() -> None:
    def count(module: nn.Module, inputs: Any) -> None:
        global passes
        passes += isinstance(module, nn.Embedding)

    nn.modules.module.register_module_forward_pre_hook(count)


def check(name: str, mistake: Mistake, folder: Path) -> dict[str, Any]:
    """Returns whether anything was refused, before or after training began, and what was said."""
    global passes
    passes, log = 0, io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    refused, said = "", ""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        file = Path(place) / ("run.toml" if name == "torchtitan" else "run.yaml")
        write = toml if name == "torchtitan" else flat_yaml
        settings = {**BASES[name](folder), **mistake.settings[name]}
        file.write_text(write(settings) + mistake.text.get(name, ""))
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                STARTS[name](file)
        except SystemExit as error:
            refused, said = "message", out.getvalue() if error.code != 0 else ""
        except BaseException as error:
            refused, said = "trace", f"{type(error).__name__}: {error}"
    logging.getLogger().removeHandler(handler)
    return {
        "title": mistake.title, "refused": refused, "said": said, "warned": log.getvalue(),
        "passes": passes,
    }  # fmt: skip


def flat_yaml(settings: Settings) -> str:
    return yaml.safe_dump(settings)


def toml(settings: Settings) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    return "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def trainer_base(folder: Path) -> Settings:
    return {
        "model_name_or_path": str(folder / "base"), "dataset_name": str(folder / "data"),
        "output_dir": "out", "max_steps": 2, "num_train_epochs": 1,
        "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


@dataclass
class Script:
    model_name_or_path: str
    dataset_name: str


def start_transformers(file: Path) -> None:
    """A user's script, with the parser that transformers has for YAML files."""
    from datasets import load_dataset
    from transformers import (
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        HfArgumentParser,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )

    script, arguments = HfArgumentParser((Script, TrainingArguments)).parse_yaml_file(str(file))
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    model = LlamaForCausalLM.from_pretrained(script.model_name_or_path)
    data = load_dataset(script.dataset_name, split="train")
    data = data.map(lambda one: {"input_ids": tokenizer(one["text"])["input_ids"]})
    Trainer(
        model=model,
        args=arguments,
        train_dataset=data.remove_columns("text"),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ).train()


def start_trl(file: Path) -> None:
    """What `trl sft --config FILE` does."""
    from trl.scripts.sft import main, make_parser

    main(*make_parser().parse_args_and_config(["--config", str(file)]))


def axolotl_base(folder: Path) -> Settings:
    return {
        "base_model": str(folder / "base"), "sequence_len": 64, "micro_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_steps": 2, "learning_rate": 1e-3,
        "optimizer": "adamw_torch", "lr_scheduler": "cosine", "output_dir": "out", "bf16": False,
        "datasets": [{"path": str(folder / "data"), "type": "completion"}],
    }  # fmt: skip


def start_axolotl(file: Path) -> None:
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    validate_config(DictDefault(yaml.safe_load(file.read_text())))


def torchtitan_base(folder: Path) -> Settings:
    return {
        "model.name": "llama3", "model.flavor": "debugmodel",
        "model.hf_assets_path": str(folder / "base"), "optimizer.lr": 1e-3,
        "training.dataset": "c4_test", "training.dataset_path": str(folder / "data"),
        "training.seq_len": 64, "training.local_batch_size": 4, "training.steps": 2,
    }  # fmt: skip


def start_torchtitan(file: Path) -> None:
    """The steps of its trainer that need no GPU."""
    from torchtitan.components.tokenizer import build_hf_tokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader

    config = ConfigManager().parse_args(["--job.config_file", str(file)])
    tokenizer = build_hf_tokenizer(config)
    loader = build_text_dataloader(1, 0, tokenizer, config)
    next(iter(loader))
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)


def nanochat_base(folder: Path) -> Settings:
    return {
        "depth": 2, "aspect-ratio": 32, "head-dim": 32, "max-seq-len": 64, "window-pattern": "L",
        "device-batch-size": 4, "total-batch-size": 256, "num-iterations": 2, "eval-every": -1,
        "core-metric-every": -1, "sample-every": -1, "target-param-data-ratio": 0.01,
    }  # fmt: skip


def start_nanochat(file: Path) -> None:
    """Its script of pretraining, whose settings are words on the command line."""
    words = [f"--{key}={value}" for key, value in yaml.safe_load(file.read_text()).items()]
    sys.argv = ["base_train", *words]
    runpy.run_module("scripts.base_train", run_name="__main__")


BASES: dict[str, Callable[[Path], Settings]] = {
    "transformers": trainer_base,
    "TRL": trainer_base,
    "axolotl": axolotl_base,
    "torchtitan": torchtitan_base,
    "nanochat": nanochat_base,
}
STARTS: dict[str, Callable[[Path], None]] = {
    "transformers": start_transformers,
    "TRL": start_trl,
    "axolotl": start_axolotl,
    "torchtitan": start_torchtitan,
    "nanochat": start_nanochat,
}
PACKAGES = {
    "transformers": ("trl", TRL), "TRL": ("trl", TRL), "axolotl": ("axolotl", AXOLOTL),
    "torchtitan": ("torchtitan", TORCHTITAN), "nanochat": ("nanochat", NANOCHAT, "rustbpe"),
}  # fmt: skip

if __name__ == "__main__":
    who = sys.argv[1]
    install(*PACKAGES[who])
    if who == "nanochat":
        sys.path.insert(0, os.environ["NANOCHAT"])
    main(who, Path(sys.argv[2]))
