"""What a run folder says about its run: its config, README, tokenizer, the model's config.json, and
the data plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overland.config.schema import JobConfig
from overland.config.write import write_config
from overland.data.corpus import Corpus
from overland.data.prepare import corpora_of
from overland.data.sft import end_of_turn
from overland.data.tokenizer import UNKNOWN, Tokenizer
from overland.data.tokenizer_files import GENERATION, companions_in
from overland.files import replace_file
from overland.plugins import plugin
from overland.run_folder import MODEL_CONFIG
from overland.training.run import Run


def describe_run(run: Run, asked: JobConfig) -> None:
    """Writes all but the plan. `asked`: the config that the run was started with."""
    # These apply once: they must not apply again when this config resumes the run.
    once: dict[str, Any] = {"resume": "auto", "skip_optimizer": False, "allow_changes": []}
    again = asked.checkpoint.model_copy(update=once)
    config = asked.model_copy(update={"checkpoint": again})
    write_config(config, run.folder.config, full=True)
    plugin("console").write_readme(run)
    if hasattr(run.model_config, "to_hf"):
        text = json.dumps(run.model_config.to_hf(), indent=2)
        replace_file(run.folder.root / MODEL_CONFIG, text + "\n")
    if run.dataset.tokenizer is not None:
        keep_tokenizer(run.dataset.tokenizer, run.folder.tokenizer, run.config)


def keep_tokenizer(tokenizer: Tokenizer, folder: Path, config: JobConfig) -> None:
    """Copies the tokenizer into the run folder, with the chat template used in training."""
    folder.mkdir(exist_ok=True)
    if tokenizer.path.parent.resolve() == folder.resolve():
        return  # a resumed run opened the copy
    # A model's generation config lies next to its tokenizer, and is copied with it.
    beside = {file.name: file.read_bytes() for file in companions_in(tokenizer.path.parent)}
    files = {**beside, **tokenizer.files()}
    if config.sft.shape != "off" and (end := end_of_turn(config, tokenizer)) is not None:
        about = json.loads(files.get(GENERATION, b"{}"))
        ends = [end] if tokenizer.eos_id is None else [tokenizer.eos_id, end]
        known = about.get("eos_token_id") or []
        known = known if isinstance(known, list) else [known]
        about["eos_token_id"] = list(dict.fromkeys([*known, *ends]))
        files[GENERATION] = json.dumps(about, indent=2).encode()
    for name, data in files.items():
        replace_file(folder / name, data)


def write_plan(run: Run) -> None:
    """Writes the data plan and the paths of its corpora for `overland prove data`, and the number
    of steps for `overland watch`."""
    folder = run.folder.data
    folder.mkdir(exist_ok=True)
    places = corpora_of(run.folder.root)
    for name, corpus in run.dataset.rows.corpora.items():
        if isinstance(corpus, Corpus):
            places[name] = str(corpus.folder.absolute())
    tokenizer = run.dataset.tokenizer
    plan = {
        "fingerprint": run.dataset.plan.fingerprint,
        "plan": run.dataset.plan.to_json(),
        "steps": run.config.training.steps,
        **({"holdout": run.config.data.holdout} if run.config.data.holdout else {}),
        **(tokenizer.policy if tokenizer is not None else UNKNOWN)._asdict(),
    }
    replace_file(run.folder.plan, json.dumps({**plan, "corpora": places}, indent=1) + "\n")
