"""Perplexity as a few plain lines of transformers compute it, to compare with; and texts."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

UNICODE = [
    "Grüße aus Zürich, naïve Æsop — “quoted” …",
    "日本語のテキスト。改行\nと空白　全角",
    "emoji 👩‍🚀🚀 and combining é, ا لعربية",
    "",
    "x",
    "tabs\tand\x00control\x1f characters, \\u2028 \u2028 too",
]


def plain_losses(
    folder: Path,
    documents: Sequence[str],
    *,
    context: int,
    stride: int,
    prefix: int | None = None,
    between: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, int]:
    """(summed loss, tokens that are scored), window by window and one at a time. With a token
    `between` them, the documents are one text."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    total, count = 0.0, 0
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in documents]
    if between is not None:
        found = [[token for one in found for token in (between, *one)][1:]]
    for ids in found:
        if prefix is not None:
            ids = [prefix, *ids]
        scored_up_to = 1
        for start in range(0, max(len(ids) - 1, 0), stride):
            window = ids[start : start + context + 1]
            if start + len(window) <= scored_up_to:
                break
            with torch.no_grad():
                logits = model(torch.tensor([window[:-1]])).logits[0].double()
            losses = torch.nn.functional.cross_entropy(
                logits, torch.tensor(window[1:]), reduction="none"
            )
            new = losses[scored_up_to - start - 1 :]
            total, count = total + float(new.sum()), count + len(new)
            scored_up_to = start + len(window)
    return total, count


def write_corpora(folder: Path, num_files: int, longest: int) -> dict[str, tuple[Path, list[str]]]:
    """Three corpora: sources of the standard library, JSON lines with Unicode, and parquet with
    very short and very long documents. (path, documents in order) by name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [one for one in library if one.stat().st_size < 4_000][:num_files]
    sources = folder / "sources"
    sources.mkdir()
    for file in files:
        (sources / file.name).write_bytes(file.read_bytes())
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in UNICODE * 3))
    sample = "".join(file.read_text(encoding="utf-8") for file in library[:20])
    texts = ["", "a", "def f():", sample[:longest], "b", " ", sample[longest : longest + 700]]
    pq.write_table(pa.table({"text": texts}), folder / "table.parquet", row_group_size=2)
    return {
        "sources": (sources, [(sources / one.name).read_text() for one in files]),
        "lines": (lines, UNICODE * 3),
        "table": (folder / "table.parquet", texts),
    }
