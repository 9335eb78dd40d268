"""`overland data build`: parses its options and those of `--sft`, finds which part of a corpus a
Slurm array's task builds, and prints the result; `apps/data/build.py` builds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.apps.progress import progress_bar
from overland.cli.common import Json, print_notes, verb
from overland.errors import DataError
from overland.words import clock, counted_words

if TYPE_CHECKING:
    from overland.apps.data.build import BuildState, Built
    from overland.config.schema import JobConfig
    from overland.data.sources.source import Source
    from overland.data.tokenizer import Tokenizer

# Options that `overland data inspect` has too.
CorpusPath = Annotated[str, typer.Argument(help="A file or folder of any format, or stdlib.")]
Column = Annotated[str | None, typer.Option(help="Column that holds the documents.")]
Subset = Annotated[str | None, typer.Option(help="Subset (config) of a dataset.")]
Split = Annotated[str | None, typer.Option(help="Split, such as train.")]
Dtype = Annotated[
    str | None, typer.Option(help="Data type of token ids, if the file does not specify one.")
]
SourceImport = Annotated[
    str, typer.Option("--import", help="Module to import first; it may register PATH as a source.")
]


@verb
def build(
    path: CorpusPath,
    tokenizer: str | None = None,
    out: Annotated[str | None, typer.Option(show_default="./data")] = None,
    name: Annotated[str | None, typer.Option(show_default="as PATH")] = None,
    column: Column = None,
    subset: Subset = None,
    split: Split = None,
    dtype: Dtype = None,
    skip_bad: bool = False,
    bos: Annotated[bool | None, typer.Option(show_default="as the tokenizer does")] = None,
    eos: bool = True,
    processes: Annotated[int | None, typer.Option(min=1, show_default="one per core")] = None,
    part: str | None = None,
    array: bool = False,
    sft: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, show_default="2048")] = None,
    custom_import: SourceImport = "",
    as_json: Json = False,
) -> None:
    """Tokenize a corpus into shards ahead of training. Run again to resume an interrupted build.

    Args:
        tokenizer: Folder with tokenizer.json or tokenizer.model; required for text.
        out: Parent folder of the corpus.
        name: Name of the corpus.
        skip_bad: Skip and count documents that cannot be read.
        bos: Begin each document with the BOS token.
        eos: End each document with the EOS token.
        processes: Number of tokenizer processes.
        part: Build only this part, such as 2/8; parts can run in parallel.
        array: Build the part of this task in a Slurm job array.
        sft: For fine-tuning: a key of [sft], such as shape=auto; repeatable.
        seq_len: With --sft: training.seq_len.
        as_json: One JSON object.
    """
    from overland.apps.data import build as builder
    from overland.config.schema import Data
    from overland.data.layout import lay_out, read_layout
    from overland.data.sft import conversations_of
    from overland.data.sources.columns import WHOLE
    from overland.data.tokenizer import Tokenizer
    from overland.data.tokenizer_encoders import num_cores

    which = find_part(part, array, os.environ)
    import_sources(custom_import)
    source: Any
    opened: Tokenizer | None = None
    tuning = sft_config(sft, seq_len, tokenizer, bos, eos)
    if tuning is not None:
        whole = source_at(path, WHOLE, subset, split, dtype, skip_bad)
        source = conversations_of(whole, tuning, tuning.training.seq_len, column)
        opened = source.tokenizer
    else:
        source = source_at(path, column, subset, split, dtype, skip_bad)
        if tokenizer is not None:
            opened = Tokenizer(Path(tokenizer).expanduser(), add_bos=bos, add_eos=eos)
    print_notes(*source.notes)
    started = time.monotonic()
    name = name or Path(path).expanduser().resolve().name
    root = Path(out or Data().folder).expanduser()
    check_apart(Path(path).expanduser(), root)
    if opened is not None and bos is None and source.kind == "text":
        report_bos(opened)
    folder = lay_out(
        name,
        source,
        opened,
        root,
        skip_bad=skip_bad,
        vocab_size=opened.vocab_size if opened is not None else None,
        report=to_stderr,
    )
    began = time.monotonic()
    try:
        with progress_bar("", "share", 1.0, lines=True) as bar:
            built = builder.build(
                folder,
                source,
                opened,
                processes=processes or num_cores(),
                part=which,
                progress=lambda now: bar(now.share, what=about(now, time.monotonic() - began)),
            )
    except KeyboardInterrupt:
        layout = read_layout(folder)
        made = f"{len(layout.made()):,} of {layout.num_shards:,} shards are complete"
        to_stderr(f"stopped: {made}; run the same command again to build the rest")
        raise typer.Exit(130) from None
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps(to_json(built, seconds)))
    else:
        print("\n".join([*built_lines(built, seconds), *sft_lines(tuning)]))


def sft_config(
    given: list[str] | None, seq_len: int | None, tokenizer: str | None, bos: bool | None, eos: bool
) -> JobConfig | None:
    """Returns a config with these settings; None without `--sft`."""
    from overland.config.arguments import parse_arguments
    from overland.config.errors import ConfigError
    from overland.config.validate import check_switches, validate_entries

    if not given:
        if seq_len is not None:
            raise DataError(
                "--seq-len applies only with --sft: other corpora have no sequence length"
            )
        return None
    if tokenizer is None:
        raise DataError("--sft needs --tokenizer, the folder of the model's tokenizer")
    words = [f"sft.{one.removeprefix('sft.')}" for one in given]
    arguments = parse_arguments([*words, f"model.hf_assets_path={json.dumps(tokenizer)}"])
    config, problems, _ = validate_entries(arguments.entries)
    problems += [*arguments.problems, *check_switches(config, arguments.entries)]
    if problems:
        raise ConfigError(problems)
    length = {"training.seq_len": seq_len} if seq_len is not None else {}
    return config.having({"data.add_bos": bos, "data.add_eos": eos, **length})


def sft_lines(config: JobConfig | None) -> Iterator[str]:
    """Yields the other keys that a config needs to train on these conversations."""
    from overland.config.errors import toml_value

    if config is None:
        return
    yield f"seq_len = {config.training.seq_len}"
    yield "\n[sft]"
    for name, value in config.sft.model_dump(exclude_defaults=True).items():
        yield f"{name} = {toml_value(value)}"


def check_apart(source: Path, out: Path) -> None:
    """Refuses to write a corpus inside its own source folder, where it would become input."""
    whole = source.resolve()
    if whole.is_dir() and out.resolve().is_relative_to(whole):
        raise DataError(
            f"{out} is inside the source {source}, so the corpus would become part of its own "
            "input; choose a folder outside of it with --out"
        )


def report_bos(tokenizer: Tokenizer) -> None:
    """Reports whether the tokenizer itself begins documents with BOS."""
    if tokenizer.bos_id is None:
        return
    how = "with" if tokenizer.add_bos else "without"
    other = "--no-bos" if tokenizer.add_bos else "--bos"
    piece, because = tokenizer.pieces([tokenizer.bos_id])[0], tokenizer.bos_because
    to_stderr(f"documents begin {how} {piece}, {because} ({other} builds a separate corpus)")


def import_sources(name: str) -> None:
    """Imports a user's module, as `job.custom_import` does."""
    from overland.checks.model import with_custom_import
    from overland.config.load import Loaded
    from overland.config.schema import Job, JobConfig

    with_custom_import(Loaded(JobConfig(job=Job(custom_import=name)), [], "command line"))


def source_at(
    path: str,
    column: str | None,
    subset: str | None,
    split: str | None,
    dtype: str | None,
    skip_bad: bool,
) -> Source:
    """Returns the source at a path, or the built-in source of that name."""
    from overland.config.schema import Data, DataSource
    from overland.data.registry import source_names
    from overland.data.sources import open_source
    from overland.data.wanted import open_by_name

    if not Path(path).expanduser().exists() and path in source_names():
        return open_by_name(path, DataSource(column=column), Data())
    return open_source(
        path, column=column, subset=subset, split=split, dtype=dtype, skip_bad=skip_bad
    )


def find_part(part: str | None, array: bool, environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the part, counted from 0, and the number of parts, from `I/N` or from Slurm."""
    if array:
        keys = ("ID", "MIN", "COUNT")
        values = [environment.get(f"SLURM_ARRAY_TASK_{key}", "") for key in keys]
        if not all(value.isdecimal() for value in values):
            raise DataError(
                "--array works only in a task of `sbatch --array=1-N`; otherwise use --part"
            )
        task, first, count = map(int, values)
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1") or 1)
        number = (task - first) // step
        what = f"task {task} of this job array, which has gaps"
    elif part is not None:
        words = part.split("/")
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise DataError(f"--part {part}: expected PART/PARTS, such as 2/8")
        number, count = int(words[0]) - 1, int(words[1])
        what = f"--part {part}"
    else:
        return 0, 1
    if not 0 <= number < count:
        raise DataError(f"{what}: expected a part from 1/{count} to {count}/{count}")
    return number, count


def to_json(built: Built, seconds: float) -> dict[str, Any]:
    counted = built.counted
    return {
        "folder": str(built.layout.folder),
        "fingerprint": built.layout.fingerprint,
        "complete": built.totals is not None,
        "documents": counted.num_documents,
        unit_of(built): counted.num_tokens,
        "skipped": counted.num_bad,
        **({"counts": counted.counts} if counted.counts else {}),
        "shards": built.layout.num_shards,
        "made": built.made.num_made,
        "seconds": round(seconds, 3),
        f"{unit_of(built)}_per_second": round(built.made.num_tokens / seconds),
    }


def unit_of(built: Built) -> str:
    """Returns the unit that shards are counted in."""
    return "bytes" if built.layout.kind == "arrays" else "tokens"


def built_lines(built: Built, seconds: float) -> Iterator[str]:
    counted, unit, shards = built.counted, unit_of(built), f"{built.layout.num_shards:,}"
    if built.made.num_made < built.layout.num_shards:
        shards += f" ({built.made.num_made:,} built now)"
    yield f"{'documents':<12}{counted.num_documents:,}"
    yield f"{unit:<12}{counted.num_tokens:,}"
    yield f"{'skipped':<12}{counted.num_bad:,}"
    yield from counted_words(counted.counts)
    yield f"{'shards':<12}{shards}"
    yield f"{'seconds':<12}{seconds:,.1f}"
    if built.made.num_tokens:
        yield f"{unit + '/s':<12}{built.made.num_tokens / seconds:,.0f}"
    yield f"{'folder':<12}{built.layout.folder}\n"
    if built.totals is None:
        made = len(built.layout.made())
        yield f"not complete: {made:,} shards are built; build the other parts"
        return
    yield "[training]"
    yield f"dataset_path = {json.dumps(str(built.layout.folder.resolve()))}"


def about(state: BuildState, seconds: float) -> str:
    millions = state.num_tokens / 1e6
    text = (
        f"{state.num_made:,} of {state.num_shards:,} shards, {state.num_documents:,} documents, "
        f"{millions:,.1f} M tokens, {millions / max(seconds, 1e-3):,.2f} M tokens/s"
    )
    if not 0 < state.share < 1:
        return text
    return f"{text}, {clock(seconds * (1 - state.share) / state.share)} left"


def to_stderr(message: str) -> None:
    print(message, file=sys.stderr)
