"""The page: docs/evidence/peers.md."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from tests.comparison import configs
from tests.comparison.mistakes import MISTAKES
from tests.comparison.shape import BATCH, INTERVAL, NUM_TEXTS, SEQ_LEN, STEPS
from tests.peers import AXOLOTL, TORCHTITAN, TRL

Found = dict[str, Any]


def render(resumed: Found, torchtitan: Found, checked: Found, commit: str) -> str:
    parts = [head(commit), resume_table(resumed, torchtitan), HOW_RESUMED]
    return "\n\n".join([*parts, config_tables(checked), HOW_CHECKED]) + "\n"


def head(commit: str) -> str:
    pins = dict(one.split("==") for one in (*TRL, *TORCHTITAN, *AXOLOTL))
    here = ("transformers", "torch")
    versions = {name: importlib.metadata.version(name) for name in here}
    versions |= {name: pins[name] for name in ("accelerate", "trl", "torchtitan", "axolotl")}
    if commit:
        versions["nanochat"] = f"at {commit[:7]}"
    return (
        "# Compared with other trainers: resuming, and mistakes in configs\n\n"
        "What can be compared on a CPU, by `python -m tests.prove_peers` (part of "
        "`make prove-all`). Speed and memory on a GPU are in [performance](../performance.md).\n\n"
        f"Versions: {', '.join(f'{name} {one}' for name, one in versions.items())}."
    )


def resume_table(resumed: Found, torchtitan: Found) -> str:
    lines = [
        "## Killed and resumed",
        "",
        f"{STEPS} steps, a checkpoint every {INTERVAL}, killed with SIGKILL in a random step after "
        "the tenth, resumed; compared with the same trainer's own unbroken run. *Losses*: how many "
        "of the steps after the resume have the unbroken run's loss, bit for bit. *Samples*: how "
        "many "
        "of those steps have the unbroken run's samples, and how many samples of it were never "
        "seen after the resume, or others in their place.",
        "",
        "| | killed in step, resumed after | losses | samples | resumed on 2 processes: samples |",
        "|---|---|---|---|---|",
    ]
    for name, found in resumed.items():
        one, two = found["one"], found["two"]
        steps = STEPS - one["resumed_after"]
        losses = f"{one['same_losses']} of {steps}" if not one["problem"] else ""
        if not one["problem"] and one["same_losses"] < steps:
            losses += f", {one['loss_difference']:.0e} apart at most"
        cells = [
            name,
            f"{found['kill_at']}, {one['resumed_after']}",
            losses,
            samples(one),
            samples(two),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(
        f"| torchtitan, its data loader alone | | | {torchtitan['same']} of {torchtitan['of']} | "
        f"refused: {short(torchtitan['problem'])} |"
    )
    return "\n".join(lines)


def samples(outcome: Found) -> str:
    if outcome["problem"]:
        return f"failed: {short(outcome['problem'])}"
    said = f"{outcome['same_steps']} of {STEPS - outcome['resumed_after']}"
    missed, total = outcome["skipped"], outcome["num_samples"]
    if not missed and not outcome["repeated"]:
        return said
    return f"{said}; {missed} of {total} never seen, {outcome['repeated']} others instead"


def config_tables(checked: Found) -> str:
    by_name = {
        name: {one["title"]: one for one in results if one["title"] != "none"}
        for name, results in checked.items()
    }
    lines = [
        "## Mistakes in a config",
        "",
        "*Refused*: before the first batch. *Sentence*: not as a Python trace. *Key*: the message "
        "names the key, or for a missing file its path. *Suggestion*: it names what was meant "
        "(of the mistakes where something was). *Line*: of the file. *All at once*: both of two "
        "mistakes. *Warned*: with the key, and trained. *Trained*: it trained as if nothing "
        "were wrong, or dropped the key. *Not seen*: the config was accepted, "
        "and what follows needs a GPU.",
        "",
        "| | mistakes | refused | sentence | key | suggestion | line | all at once | warned | "
        "trained | not seen |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in by_name.items():
        seen = [one for one in MISTAKES if one.title in found]
        each = [configs.verdict(name, one, found[one.title]) for one in seen]
        kinds = (
            "refused",
            "sentence",
            "named",
            "suggested",
            "line",
            "warned",
            "accepted",
            "unseen",
        )
        counts = {kind: str(sum(one[kind] for one in each)) for kind in kinds}
        counts["suggested"] += f" of {sum(bool(one.right) for one in seen)}"
        counts["line"] += " | yes" if each[-1]["named"] else " | no"
        if name == "nanochat":
            counts["line"] = counts["line"].replace("0", "", 1)  # it has no file
        lines.append(f"| {' | '.join([name, str(len(seen)), *counts.values()])} |")
    lines += ["", "What each says, shortened:", "", f"| | {' | '.join(by_name)} |"]
    lines.append("|---|" + "---|" * len(by_name))
    for mistake in MISTAKES:
        cells = [cell(name, mistake.title, found) for name, found in by_name.items()]
        lines.append(f"| {mistake.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(name: str, title: str, found: Found) -> str:
    if title not in found:
        return "has no such setting"
    mistake = next(one for one in MISTAKES if one.title == title)
    found = found[title]
    verdict = configs.verdict(name, mistake, found)
    if verdict["warned"]:
        line = next(one for one in found["warned"].splitlines() if configs.names(mistake, one))
        return f"warned: {short(line)}"
    if verdict["accepted"]:
        return "**trained**" if found["passes"] else "**dropped**"
    if verdict["unseen"]:
        return "not seen"
    return f"{short(found['said'])}{' *(while training)*' if verdict['late'] else ''}"


def short(said: str) -> str:
    """Returns what was said as a cell of a table."""
    text = re.sub(r"\s+", " ", configs.without_usage(said))
    text = re.sub(r"/\S+/bin/(?=overland)", "", text)
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


LONGEST = 160

HOW_RESUMED = f"""\
Every trainer is started in its own process, and given the same small Llama in float32 \
(nanochat its own model), {NUM_TEXTS} short texts, {BATCH} rows of at most {SEQ_LEN} tokens per \
step. What the model is given is recorded in the training process itself, by a hook on the token \
embedding; losses are what the model returns, and for Overland what it logs.

- **Overland**: the same command again. It saves in the background, so a checkpoint of the step \
before a kill may not be committed yet; the one before it then counts. On two processes losses \
are those of the unbroken run to rounding.
- **transformers, TRL**: `trainer.train(resume_from_checkpoint=True)`, with `seed` and \
`data_seed`, and their defaults otherwise (`ignore_data_skip=False`); on two processes with half \
the batch per device. On CPUs the second process asks `torch.load` for a device "cpu:1" and \
fails; the script registers that name, since on GPUs this does not happen. Streaming is a \
`datasets.IterableDataset` of four shards with a shuffle buffer of 64, and rows padded \
to one length, without which two processes fail where accelerate joins their batches. TRL \
packs (`packing=True`), and its samples are documents.
- **torchtitan** trains only on GPUs. Its data loader and the state of it that its checkpoints \
hold were measured without a model.
- **nanochat**: `--resume-from-step` with the last checkpoint; its samples are documents. Its \
data loader calls its resume approximate: it continues with the next row group, and what its \
buffer of 1000 documents held is lost. Real row groups are larger than these, of 256 documents.
- **axolotl** trains with transformers' Trainer; it was not run here."""

HOW_CHECKED = """\
Each mistake is put into a config that works (checked first), and the trainer started with it on \
one process.

- **Overland**: `overland train run.toml`.
- **transformers**: `HfArgumentParser.parse_yaml_file`, then `Trainer`. **TRL**: what `trl sft \
--config run.yaml` runs. Both then train for two steps on the CPU. The machine was offline, and a \
missing model or dataset is looked for on the Hub, so their messages mention the connection.
- **torchtitan**: its `ConfigManager` on a TOML file, then its tokenizer and data loader and the \
optimizer of torch that it uses.
- **axolotl**: `validate_config`, the first thing that its command calls after reading the YAML; \
it does not forbid unknown keys. What it would say after that, while it loads model and data, was \
not seen.
- **nanochat**: `base_train`, which has no files but options of the command line."""
