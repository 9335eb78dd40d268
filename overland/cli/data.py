"""`overland data preview` draws what the model sees at a step, token by token, one color per
document, dim where no loss is taken; `overland data inspect` reads a corpus once and prints a
summary; `overland data build` is in `data_build.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.apps.progress import progress_bar
from overland.apps.streams import SafeConsole
from overland.cli.common import complete_recipe, verb
from overland.cli.data_build import (
    Column,
    CorpusPath,
    Dtype,
    SourceImport,
    Split,
    Subset,
    build,
    import_sources,
    source_at,
)
from overland.errors import DataError
from overland.words import any_of, first_few, number_of, visible

if TYPE_CHECKING:
    from rich.text import Text

    from overland.apps.data.summary import SourceSummary
    from overland.data.lanes import Samples
    from overland.data.prepare import Dataset
    from overland.data.sources.source import Document

MARKS = ("⟦", "⟧")
COLORS = ("cyan", "yellow", "green", "magenta", "blue")
MOST_PLACES = 4  # documents that the line above a row names
BAR_WIDTH = 40
SAMPLE_CHARACTERS = 160
SAMPLE_TOKENS = 24

ABOUT = "Inspect a corpus, preview batches, or pre-tokenize it."

app = typer.Typer(help=ABOUT, no_args_is_help=True, rich_markup_mode=None)
app.command()(build)


@app.command()
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
    taken. In conversations, only learned tokens are bright, and special tokens are highlighted."""
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


@app.command()
@verb
def inspect(
    path: CorpusPath,
    column: Column = None,
    subset: Subset = None,
    split: Split = None,
    dtype: Dtype = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Also count the tokens of the text with this tokenizer.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of documents to show.", min=0)] = 3,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Skip and count documents that are not UTF-8 or JSON."),
    ] = False,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Print only the SHA-256 of every document, in order.")
    ] = False,
    custom_import: SourceImport = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Read a corpus once and summarize what it holds."""
    from overland.apps.data.summary import document_hash, summarize
    from overland.data.sources.source import BadDocument

    found: list[str] = []
    keep = found.append if as_json else print
    import_sources(custom_import)
    source = source_at(path, column, subset, split, dtype, skip_bad)
    encode = None
    if tokenizer is not None and source.kind == "text":
        from overland.data.tokenizer import Tokenizer

        encode = Tokenizer(tokenizer.expanduser()).encode_documents

    def each(document: Document) -> None:
        if hashes:
            keep(document_hash(document))

    is_drawn = not hashes or as_json or not sys.stdout.isatty()
    with progress_bar("chunks", visible=is_drawn) as bar:
        try:
            summary = summarize(source, samples, each, bar, encode)
        except BadDocument as error:
            raise BadDocument(f"{error}; --skip-bad skips it") from None
    if as_json:
        print(
            json.dumps({"path": path, **summary.to_json(), **({"hashes": found} if hashes else {})})
        )
    elif not hashes:
        print(path)
        print("\n".join(summary_lines(summary)))
    else:
        bad = [f"{summary.num_bad:,} bad documents skipped"] if summary.num_bad else []
        for note in [*source.notes, *bad]:
            print(note, file=sys.stderr)


def summary_lines(summary: SourceSummary) -> Iterator[str]:
    """Yields the summary as lines for a terminal."""
    source = summary.source
    column = f", column {source.column}" if source.column else ""
    yield f"  {'format':<12}{summary.format}"
    yield f"  {'kind':<12}{source.kind}{column}"
    if source.columns:
        columns = ", ".join(f"{name} ({kind})" for name, kind in source.columns.items())
        yield f"  {'columns':<12}{columns}"
    yield f"  {'files':<12}{len(source.files):,}"
    for note in source.notes:
        yield f"  {'':<12}{note}"
    yield f"  {'chunks':<12}{summary.num_chunks:,}"
    bad = f" ({number_of(summary.num_bad, 'bad one')} skipped)" if summary.num_bad else ""
    num_empty = summary.by_power.get(0, 0)
    empty = f", {num_empty:,} of them empty and skipped in training" if num_empty else ""
    yield f"  {'documents':<12}{summary.num_documents:,}{bad}{empty}"
    mean = summary.total / summary.num_documents
    yield (
        f"  {summary.unit:<12}{summary.total:,} "
        f"(shortest {summary.shortest:,}, mean {mean:,.0f}, longest {summary.longest:,})"
    )
    if summary.num_tokens is not None:
        per_token = summary.total / max(summary.num_tokens, 1)
        yield f"  {'tokens':<12}{summary.num_tokens:,} ({per_token:.2f} characters each)"
    yield ""
    yield f"{summary.unit} per document"
    most = max(summary.by_power.values())
    for first, last, count in summary.histogram():
        bar = "█" * -(-BAR_WIDTH * count // most)
        yield f"  {first:>11,} to {last:>11,} {count:>11,} {bar}".rstrip()
    if summary.samples:
        yield ""
        yield "samples"
    for number, document in enumerate(summary.samples):
        yield f"  {number}: {sample(document)}"


def sample(document: Document) -> str:
    """Returns the beginning of a document, in one line."""
    if isinstance(document, str):
        rest = len(document) - SAMPLE_CHARACTERS
        return repr(document[:SAMPLE_CHARACTERS]) + (f" and {rest:,} more" if rest > 0 else "")
    if isinstance(document, Mapping):
        from overland.apps.data.summary import describe_array

        return "; ".join(f"{name} {describe_array(values)}" for name, values in document.items())
    rest = len(document) - SAMPLE_TOKENS
    ids = " ".join(map(str, document[:SAMPLE_TOKENS].tolist()))
    return ids + (f" and {rest:,} more" if rest > 0 else "")
