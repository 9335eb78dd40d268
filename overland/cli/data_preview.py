"""`overland data preview`: draws what the model sees at a step, token by token, one color per
document, dim where no loss is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.apps.streams import SafeConsole
from overland.cli.common import complete_recipe, verb
from overland.errors import DataError
from overland.words import any_of, first_few, visible

if TYPE_CHECKING:
    from rich.text import Text

    from overland.data.lanes import Samples
    from overland.data.prepare import Dataset

MARKS = ("⟦", "⟧")
COLORS = ("cyan", "yellow", "green", "magenta", "blue")
MOST_PLACES = 4  # documents that the line above a row names


@verb
def preview(
    config: Annotated[
        str,
        typer.Argument(help="A config, a recipe, or a run folder.", autocompletion=complete_recipe),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", show_default=False)
    ] = None,
    step: Annotated[int, typer.Option(help="Step, counted from 1.", min=1)] = 1,
    row: Annotated[int, typer.Option(help="First row of the global batch to show.", min=0)] = 0,
    rows: Annotated[int, typer.Option(help="Number of rows to show.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> None:
    """Show exactly what the model sees at a step. One color per document, dim where no loss is
    taken. In conversations, only what is learned is bright, and special tokens are reversed."""
    from overland.apps.dataset import open_step

    loaded, batch = open_step(config, list(settings or []), step)
    size = loaded.plan.segment(batch).global_batch_size
    if row >= size:
        raise DataError(f"there is no row {row}: the batch of step {step} has rows 0 to {size - 1}")
    screen = SafeConsole(highlight=False, soft_wrap=True)
    for page in pages(loaded, batch, row, rows):
        if as_json:
            print(json.dumps(page))
        else:
            screen.print(render(page, step, marks=screen.color_system is None))
    loaded.close()


def pages(dataset: Dataset, batch: int, first: int, count: int) -> Iterator[dict[str, Any]]:
    import numpy as np

    from overland.apps.data.origins import origins_of
    from overland.data.lanes import IGNORED, Samples, tokens_and_labels, with_borders
    from overland.data.shard import WEIGHTS

    segment = dataset.plan.segment(batch)
    size, names = segment.global_batch_size, list(dataset.plan.sources)
    for row in range(first, min(first + count, size)):
        rows = dataset.rows.read(batch, row, size)
        if isinstance(rows, Samples):
            yield sample_page(dataset, rows, row, size)
            continue
        fields = with_borders(rows)
        labels = fields.labels if segment.document_mask else tokens_and_labels(rows)[1]
        if row >= dataset.rows.num_rows(batch):
            labels = np.full_like(labels, IGNORED)
        tokens = fields.tokens[0].tolist()
        has_loss, about = labels[0] != IGNORED, {}
        if WEIGHTS in rows.channels:
            counts = np.where(has_loss, rows.channels[WEIGHTS][0, 1:], 0)
            has_loss = counts > 0
            # The weight of predicting each token, which the row stores one place before that token.
            about = {"weights": [0.0, *counts[:-1].tolist()], "special": special(dataset, tokens)}
        # A row that only pads the last batch has no source.
        places = [
            place(names[source], int(number), int(start), tokens=int(length))
            for one in origins_of(dataset.rows, batch, row, size)
            for source, number, start, length in zip(
                one.source, one.number, one.start, one.length, strict=True
            )
        ]
        yield {
            "row": row,
            "rows": size,
            "tokens": tokens,
            "pieces": dataset.tokenizer.pieces(tokens) if dataset.tokenizer else None,
            "has_loss": has_loss.tolist(),
            **about,
            "documents": fields.documents[0].tolist(),
            "positions": fields.positions[0].tolist(),
            "from": places,
        }


def place(source: str, document: int, start: int, **count: int) -> dict[str, Any]:
    return {"source": source, "document": document, "start": start, **count}


def special(dataset: Dataset, tokens: list[int]) -> list[bool]:
    """Returns which of the tokens are special tokens."""
    names = set(dataset.tokenizer.specials.values()) if dataset.tokenizer is not None else set()
    return [token in names for token in tokens]


def sample_page(dataset: Dataset, samples: Samples, row: int, size: int) -> dict[str, Any]:
    """Returns a page for a sample of arrays, each described in a few words."""
    from overland.apps.data.summary import describe_array

    source, number = divmod(int(samples.sample[0]), 1 << 56)
    return {
        "row": row,
        "rows": size,
        "sample": int(samples.sample[0]),
        "epoch": int(samples.epoch[0]),
        "from": [place(list(dataset.plan.sources)[source], number, 0, samples=1)],
        "fields": {name: describe_array(values[0]) for name, values in samples.arrays.items()},
    }


def place_of(part: dict[str, Any]) -> str:
    """Returns where a part of a row comes from: source, shard and document, counted from 0."""
    shard, document = divmod(part["document"], 1 << 32)
    shard_words = f"shard {shard:,} " if shard else ""
    start = f" from token {part['start']:,}" if part["start"] else ""
    return f"{part['source']} {shard_words}document {document:,}{start}"


def render(page: dict[str, Any], step: int, marks: bool = False) -> Text:
    """Returns a row in colors: one per document, dim where no loss is taken. With `marks`, for
    terminals without colors, what is learned in conversations is put between marks."""
    from rich.text import Text

    text = Text()
    text.append(f"step {step}, row {page['row']} of {page['rows']}: ", style="bold")
    places = [place_of(one) for one in page["from"]]
    text.append(f"{visible(first_few(places, MOST_PLACES))}\n")
    if "fields" in page:
        for name, words in page["fields"].items():
            text.append(f"{name}: {words}\n")
        text.append(f"sample {page['sample']}, epoch {page['epoch']}\n", style="bold")
        return text
    words = page["pieces"] or [f"{token} " for token in page["tokens"]]
    is_chat = "weights" in page
    bright = page["weights"] if is_chat else page["has_loss"]
    reversed_ = page.get("special") or [False] * len(words)
    shown = list(zip(words, page["documents"], bright, reversed_, strict=True))
    if is_chat:  # the rest is padding
        shown = shown[: sum(one["tokens"] for one in page["from"])]
    inside = False
    for word, document, counts, is_special in shown:
        if marks and is_chat and bool(counts) != inside:
            inside = bool(counts)
            text.append(MARKS[0] if inside else MARKS[1])
        style = COLORS[document % len(COLORS)] + ("" if counts else " dim")
        text.append(visible(word), style=f"{style} reverse" if is_special else style)
    text.append(MARKS[1] if inside else "")
    text.append(f"\n{len(words):,} tokens, {_counted(page, len(shown), marks)}\n", style="bold")
    return text


def _counted(page: dict[str, Any], shown: int, marks: bool) -> str:
    """Describes how many tokens have a loss."""
    with_loss, total = sum(page["has_loss"]), len(page["tokens"])
    if "weights" not in page:
        return f"{total - with_loss:,} without a loss"
    what = f"{with_loss:,} learned" + (f" (between {MARKS[0]} and {MARKS[1]})" if marks else "")
    if others := sorted({round(one, 6) for one in page["weights"] if one not in (0, 1)}):
        what += f", some with weight {any_of([f'{one:g}' for one in others], 'and')}"
    return what + (f", {total - shown:,} of padding" if shown < total else "")
