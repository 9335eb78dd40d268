"""Perplexity compared with a plain loop of transformers, for three corpora on 1, 2 and 3 ranks;
writes a page of results.

    python -m tests.prove_perplexity docs/evidence/perplexity.md

A small model is trained for some steps and exported, so that its losses are those of a model that
knows something.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from overland.apps.evaluation.evaluate import (
    EvaluationRequest,
    evaluate_set,
    open_session,
    sets_for,
    settings_of,
)
from overland.apps.evaluation.results import Record
from overland.apps.proofs.pool import RankPool
from overland.world import World
from tests.evaluation.plain_perplexity import plain_losses, write_corpora
from tests.jobs import run_job, tiny_job

LIMIT = 1e-6  # relative to the perplexity of the plain loop
CONTEXT = 128
STRIDES = (64, 128)
RANKS = (1, 2, 3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "2, sharded": {"shard": True},
    "2, tensor parallel": {"tensor_parallel": 2},
}


def main(path: Path) -> int:
    torch.set_num_threads(1)
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="overland-perplexity-") as folder:
        pool = RankPool()
        try:
            model = export(Path(folder), pool)
            corpora = write_corpora(Path(folder) / "corpora", num_files=60, longest=120_000)
            for name, (data, documents) in corpora.items():
                for stride in STRIDES:
                    for cells, is_equal in compare(model, name, data, documents, stride, pool):
                        failed |= not is_equal
                        rows.append(f"| {' | '.join(cells)} |")
                        print(rows[-1], flush=True)
        finally:
            pool.close()
    path.write_text("\n".join([*head(), *rows, "", HOW, ""]))
    return int(failed)


def export(folder: Path, pool: RankPool) -> Path:
    config = tiny_job(
        folder / "run",
        model={
            "overrides": {
                "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "vocab_size": 1024, "max_position_embeddings": 256,
            }
        },
        training={
            "dataset": "stdlib", "steps": 60, "seq_len": 128, "dtype": "float32",
            "mixed_precision_param": "float32", "mixed_precision_reduce": "float32",
        },
        data={"folder": str(folder / "data"), "vocab_size": 1024},
        checkpoint={"enable": True, "interval": 60, "last_save_in_hf": True},
    )  # fmt: skip
    pool.run(1, train, config)
    return folder / "run" / "hf"


def train(world: World, config: Any) -> None:
    run_job(world, config)


def compare(
    model: Path, name: str, data: Path, documents: list[str], stride: int, pool: RankPool
) -> list[tuple[list[str], bool]]:
    loss, tokens = plain_losses(model, documents, context=CONTEXT, stride=stride)
    wanted = math.exp(loss / tokens)
    found = []
    first: Record = {}
    for ranks in (*map(str, RANKS), *LAYOUTS):
        size = int(ranks[0])
        with tempfile.TemporaryDirectory() as output:
            asked = {"stride": stride, "output": Path(output), **LAYOUTS.get(ranks, {})}
            result = pool.run(size, evaluate, model, data, asked)[0]
        first = first or result
        off = abs(result["perplexity"] / wanted - 1)
        is_equal = off <= LIMIT and result["tokens"] == tokens
        if ranks not in LAYOUTS:
            is_equal &= result["summed_loss"] == first["summed_loss"]
        bits = "same bits" if result["summed_loss"] == first["summed_loss"] else "rounding"
        cells = [
            name, f"{len(documents):,}", f"{tokens:,}", str(stride), ranks, f"{wanted:.6f}",
            f"{result['perplexity']:.6f}", f"{off:.1e}", bits, "equal" if is_equal else "DIFFERS",
        ]  # fmt: skip
        found.append((cells, is_equal))
    return found


def evaluate(world: World, model: Path, data: Path, asked: dict[str, Any]) -> Record:
    torch.set_num_threads(1)
    every = EvaluationRequest(path=model, data=(str(data),), context=CONTEXT, **asked)
    session = open_session(every, world, torch.device("cpu"), lambda message: None)
    (one,) = sets_for(session)
    return evaluate_set(session, one, settings_of(session))


def head() -> list[str]:
    names = ("transformers", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return [
        "# Perplexity compared with a plain loop of transformers",
        "",
        f"Windows of {CONTEXT} tokens, in float32 on a CPU, with {versions}. At most {LIMIT:.0e}, "
        "relative, counts as equal; any number of ranks with a copy of the model each must give "
        "the same bits.",
        "",
        "| corpus | documents | tokens | stride | ranks | transformers | Overland | difference | "
        "beside one rank | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]


HOW = """\
By `python -m tests.prove_perplexity` (part of `make prove-all`): a small Llama, trained for some \
steps and exported. The plain loop takes one document and one window at a time. The corpora: \
sources of Python's standard library as text files; JSON lines with letters of many scripts, \
emoji, control characters and empty documents; parquet with documents of no token, of one, and of \
hundreds of contexts. The same comparison with smaller corpora is part of `make test` \
(`tests/evaluation/test_perplexity.py`)."""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
