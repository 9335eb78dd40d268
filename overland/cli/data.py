"""`overland data inspect`: reads a corpus once and prints a summary; the other verbs of `overland
data` are in `data_build.py` and `data_preview.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overland.apps.progress import progress_bar
from overland.cli.common import verb
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
from overland.cli.data_preview import preview
from overland.words import number_of

if TYPE_CHECKING:
    from overland.apps.data.summary import SourceSummary
    from overland.data.sources.source import Document

BAR_WIDTH = 40
SAMPLE_CHARACTERS = 160
SAMPLE_TOKENS = 24

ABOUT = "Inspect a corpus, preview batches, or pre-tokenize it."

app = typer.Typer(help=ABOUT, no_args_is_help=True, rich_markup_mode=None)
app.command()(build)
app.command()(preview)


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

    visible = not hashes or as_json or not sys.stdout.isatty()
    with progress_bar("chunks", visible=visible) as bar:
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
    empty = f", of which {num_empty:,} empty: skipped in training" if num_empty else ""
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
