"""Tasks of every kind, by our models and by lm-evaluation-harness's own `hf` model on the exported
folder; writes a page of results.

    python -m tests.prove_tasks docs/evidence/tasks.md

`accelerate`, which the `hf` model needs, is installed in a folder of its own (.venv/accelerate), so
that nothing else can come to need it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from overland.apps.convert import convert
from overland.apps.evaluation.evaluate import EvaluationRequest, open_session
from overland.apps.evaluation.task_run import TaskOptions, no_network
from overland.apps.evaluation.tasks import evaluate_tasks
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.world import World
from tests.evaluation.task_files import KINDS, write_tasks
from tests.evaluation.texts import CORPUS
from tests.jobs import run_job, tiny_job
from tests.peers import install

ACCELERATE = ("accelerate==1.15.0", "psutil==7.2.2")
LIMIT = 1e-5  # of a log-likelihood, absolute or relative: the sum of hundreds is rounded, too
CONTEXT = 1024
BATCH_SIZE = 16  # of the hf model; larger and smaller ones were slower here

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "no examples": {},
    "5 examples": {"num_fewshot": 5},
    "5 examples, as a conversation": {"num_fewshot": 5, "chat_template": "default"},
    "2 examples, conversation of one turn": {
        "num_fewshot": 2, "chat_template": "default", "multiturn": False,
    },
}  # fmt: skip


def main(path: Path) -> int:
    install("accelerate", ACCELERATE)
    no_network()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        rows, failed = compare(Path(place))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head(), *rows, "", HOW, ""]))
    print(path.read_text())
    return failed


def compare(place: Path) -> tuple[list[str], int]:
    run = trained(place)
    exported = place / "hf"
    convert(run / "checkpoint" / "step_60", exported, "hf")
    definitions = write_tasks(place / "definitions", num_documents=32, text_words=600)
    theirs = hf_model(exported)
    rows, failed, totals = [], 0, [0.0, 0.0]
    for label, settings in SETTINGS.items():
        for task in KINDS:
            wanted, seconds = by_harness(theirs, definitions, task, settings)
            found, ours = by_us(run, definitions, task, settings, place / "results")
            difference, is_same = differences(wanted, found)
            is_equal = is_same and difference <= LIMIT and same_scores(wanted, found)
            failed += not is_equal
            totals = [totals[0] + seconds, totals[1] + ours]
            kind = KINDS[task]["output_type"]
            worst = "" if kind == "generate_until" else f"{difference:.1e}"
            rows.append(
                f"| {task} | {kind} | {label} | {worst} | {main_score(found)} | {seconds:.1f} | "
                f"{ours:.1f} | {seconds / ours:.1f} | {'equal' if is_equal else 'DIFFERENT'} |"
            )
            print(rows[-1], file=sys.stderr, flush=True)
    theirs_s, ours_s = totals
    rows.append(f"| all | | | | | {theirs_s:.1f} | {ours_s:.1f} | {theirs_s / ours_s:.1f} | |")
    return rows, failed + (ours_s >= theirs_s)


def trained(place: Path) -> Path:
    """A run on Python's own source, whose tokenizer has a chat template."""
    text = place / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.py").write_text(CORPUS[number * 1000 :])
    config = tiny_job(
        place / "run",
        data={"folder": str(place / "data"), "vocab_size": 512},
        model={"overrides": SIZES},
        training={
            "dataset_path": str(text), "dtype": "float32", "steps": 60, "seq_len": 128,
            "mixed_precision_param": "float32", "mixed_precision_reduce": "float32",
        },
        checkpoint={"enable": True, "interval": 60},
    )  # fmt: skip
    pool = RankPool()
    pool.run(2, train_it, config)
    pool.close()
    run = Path(config.job.dump_folder)
    (run / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return run


SIZES = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip


def train_it(world: World, config: JobConfig) -> None:
    run_job(world, config)


def hf_model(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=BATCH_SIZE)


def by_harness(
    model: Any, definitions: Path, task: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    started = time.process_time()
    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    loaded = manager.load([task])
    for one in loaded["tasks"].values():
        one.set_config(key="num_fewshot", value=settings.get("num_fewshot", 0))
        one.set_fewshot_seed(seed=1234)
    results = evaluate(
        lm=model,
        task_dict=loaded,
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=bool(settings.get("chat_template")),
        fewshot_as_multiturn=settings.get("multiturn", True),
    )
    seconds = time.process_time() - started
    samples = json.loads(json.dumps(results["samples"][task], default=str))
    return {"samples": samples, "results": results["results"][task]}, seconds


def by_us(
    run: Path, definitions: Path, task: str, settings: dict[str, Any], output: Path
) -> tuple[dict[str, Any], float]:
    asked = EvaluationRequest(path=run, output=output, datasets=output, context=CONTEXT)
    session = open_session(asked, World(), torch.device("cpu"), lambda message: None)
    wanted = TaskOptions(
        tasks=(task,), include_path=str(definitions), log_samples=True, bootstrap=0,
        **settings,
    )  # fmt: skip
    started = time.process_time()
    record = evaluate_tasks(session, wanted)
    seconds = time.process_time() - started
    folder = Path(record["harness"])
    lines = (folder / f"samples_{task}.jsonl").read_text().splitlines()
    results = json.loads((folder / "results.json").read_text())["results"][task]
    return {"samples": list(map(json.loads, lines)), "results": results}, seconds


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> tuple[float, bool]:
    """The largest difference of log-likelihoods, and whether all else is the same: prompts, texts,
    what is greedy."""
    largest = 0.0
    if len(wanted["samples"]) != len(found["samples"]):
        return largest, False
    for one, other in zip(wanted["samples"], found["samples"], strict=True):
        if one["arguments"] != other["arguments"] or one["doc_id"] != other["doc_id"]:
            return largest, False
        for left, right in zip(one["resps"], other["resps"], strict=True):
            a, b = left[0], right[0]
            if isinstance(a, str):
                if a != b:
                    return largest, False
                continue
            if isinstance(a, list):
                if a[1] != b[1]:
                    return largest, False
                a, b = a[0], b[0]
            largest = max(largest, abs(a - b) / max(1.0, abs(a)))
    return largest, True


def same_scores(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    """Exactly what is counted; perplexities as far as log-likelihoods are equal."""
    for name, value in wanted["results"].items():
        if "stderr" in name or not isinstance(value, float):
            continue
        is_counted = name.startswith(("acc", "exact_match"))
        allowed = 0.0 if is_counted else 1e-4 * abs(value)
        if abs(found["results"][name] - value) > allowed:
            return False
    return True


def main_score(found: dict[str, Any]) -> str:
    name, value = next((n, v) for n, v in found["results"].items() if isinstance(v, float))
    return f"{name.partition(',')[0]} {value:.4g}"


def head() -> list[str]:
    names = ("lm_eval", "transformers", "torch", "accelerate")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return [
        "# Tasks compared with lm-evaluation-harness's own model",
        "",
        f"One run, float32 on a CPU, {versions}. Prompts, greedy continuations, generated texts "
        f"and counted scores must be the same, and log-likelihoods equal to {LIMIT:g}.",
        "",
        "| task | kind | | largest difference of a log-likelihood | score | `hf`, CPU s | "
        "ours, CPU s | times as fast | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


HOW = (
    "By `python -m tests.prove_tasks` (part of `make prove-all`): a small Llama trained for 60 "
    "steps, read from its checkpoint here, and by `hf` (batches of 16) from the folder that "
    "`overland convert` made of it. 32 documents each; texts of up to 600 words are longer than "
    "the context of 1,024 tokens, so that contexts are cut and texts rolled. Differences are "
    "relative where a log-likelihood is above 1, as sums of hundreds of float32 are rounded, too. "
    "Seconds are those of the processor, from names of tasks to results, with one thread: others "
    "may work on the same machine."
)

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
