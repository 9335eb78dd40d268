"""Samples from the model of a run, prompted with `metrics.sample_prompt`: after the last step,
before the first one if training starts from given weights, and optionally at every validation.

A model trained on conversations answers the prompt, using its chat template; any other continues
it.
"""

from __future__ import annotations

import json
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from overland.apps.evaluation.chat import prompt_of, turns_of
from overland.apps.evaluation.generate import GenerationRequest, Generator
from overland.apps.evaluation.model import OpenModel
from overland.apps.evaluation.prompts import encode_prompt
from overland.apps.evaluation.sampling import Sampling
from overland.apps.watch.files import samples_in
from overland.data.sft import end_of_turn
from overland.data.tokenizer import Tokenizer
from overland.files import replace_file
from overland.parallel.sharding import reshard
from overland.run_folder import RunFolder
from overland.training.callbacks import Callback, Record
from overland.words import visible

if TYPE_CHECKING:
    from overland.config.schema import JobConfig
    from overland.training.run import Run

NUM_TOKENS = 96
HOW = Sampling(temperature=0.8)


def sample_start(run: Run) -> None:
    """Samples from a model that is about to be fine-tuned."""
    if run.progress.step == 0 and run.config.checkpoint.initial_load_path is not None:
        take_sample(run)


class SamplesOverTime(Callback):
    """Takes a sample at every validation but the last, after which there is one anyway."""

    def on_start(self, run: Run) -> None:
        self.is_on = run.config.compile.enable is not True
        if not self.is_on:
            run.call("on_message", "metrics.sample_at_validation is ignored, because the model is "
                     "compiled; set compile.enable = false to use it")  # fmt: skip

    def on_validation(self, run: Run, record: Record) -> None:
        if self.is_on and run.progress.step < run.config.training.steps:
            take_sample(run)
            reshard(run.model.parts)


def take_sample(run: Run) -> None:
    """Samples and saves the text; all ranks take part. Skips models with pipeline or context
    parallelism, for which there is `overland generate`."""
    degrees, tokenizer = run.mesh.degrees, run.dataset.tokenizer
    if not run.config.metrics.sample_prompt or tokenizer is None or degrees.pp * degrees.cp > 1:
        return
    text = sample(run, tokenizer)
    if run.world.is_first:
        try:
            _keep(run, text)
        except OSError as error:  # a sample must not end a run
            words = f"{run.folder.samples} cannot be written: {error.strerror}; the run continues"
            run.call("on_message", words)


def _keep(run: Run, text: str) -> None:
    """Adds the sample to the file, and removes those of later steps, which were undone."""
    earlier = {at: one for at, one in read_samples(run.folder).items() if at < run.progress.step}
    kept = earlier | {run.progress.step: text}
    lines = [json.dumps({"step": step, "text": text}) for step, text in sorted(kept.items())]
    replace_file(run.folder.samples, "\n".join(lines) + "\n")


def read_samples(folder: RunFolder) -> dict[int, str]:
    """Returns the samples by step, as far as they can be read."""
    with suppress(OSError, UnicodeDecodeError):
        return samples_in(folder.samples.read_text(encoding="utf-8"))
    return {}


def sample(run: Run, tokenizer: Tokenizer) -> str:
    prompt, seq_len = run.config.metrics.sample_prompt, run.config.training.seq_len
    is_asked = is_chat(run.config, tokenizer)
    end_id = end_of_turn(run.config, tokenizer) if is_asked else tokenizer.eos_id
    ends = () if end_id is None else (end_id,)
    model = run.model.parts[0].eval()
    dtype = next(model.parameters()).dtype
    opened = OpenModel(
        model, tokenizer, run.config, seq_len, run.folder.root, run.progress.step, ends, dtype,
        run.device,
    )  # fmt: skip
    given = prompt_of(opened, turns_of(prompt)) if is_asked else encode_prompt(tokenizer, prompt)
    wanted = GenerationRequest(NUM_TOKENS, HOW, ends)
    try:
        with closing(Generator(opened, batch_size=1, length=seq_len)) as generator:
            (said,) = generator.generate([given[-seq_len:]], wanted)
    finally:
        model.train()
    return said.text.strip() if is_asked else prompt + said.text


def samples_in_words(run: Run, tokenizer: Tokenizer) -> str:
    """Describes the newest sample, and the one before the first step if there is one."""
    samples, prompt = read_samples(run.folder), run.config.metrics.sample_prompt
    step = run.progress.step
    if step not in samples:
        return ""
    verb = "answers" if is_chat(run.config, tokenizer) else "continues"
    if step == 0 or 0 not in samples:
        return f"The model {verb} {prompt!r}:\n\n{_quoted(samples[step])}\n"
    return (
        f"Before training, the model {verb} {prompt!r}:\n\n{_quoted(samples[0])}\n\n"
        f"After training:\n\n{_quoted(samples[step])}\n"
    )


def is_chat(config: JobConfig, tokenizer: Tokenizer) -> bool:
    """Whether the model answers questions, rather than continuing texts."""
    return config.sft.shape != "off" and bool(tokenizer.chat_templates)


def _quoted(text: str) -> str:
    return "\n".join("  │ " + line for line in visible(text).splitlines() or [""])
