"""Data sources by name, and those that a config asks for, to train and to validate on.

A user's module (`job.custom_import`) adds sources of its own: `register_source`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from overland.config.schema import Data, DataSource, JobConfig
from overland.data.arrays import Arrays, require_fields
from overland.data.corpus_folder import is_corpus
from overland.data.sft import conversations_of
from overland.data.sources import Docstrings, FileSource, Source, StandardLibrary, open_source
from overland.data.sources.columns import WHOLE
from overland.errors import DataError, Unsettled
from overland.words import command

RANDOM = "random"  # tokens without text: `sampler.RandomBlocks`
# One of so many parts, from 0: stand-ins for a mixture.
PART = re.compile(r"(stdlib|docstrings):(\d+)/(\d+)")

VALIDATION = "validation"
CHOICES = ("column", "subset", "split")
"""Keys that say which part of a dataset is read; [training], [validation] and sources have them."""

_sources: dict[str, Callable[[], Source]] = {
    "stdlib": lambda: StandardLibrary(),
    "stdlib_heldout": lambda: StandardLibrary(held_out=True),
    "docstrings": lambda: Docstrings(),
}


def register_source(name: str, open_source: Callable[[], Source]) -> None:
    """Makes `training.dataset = NAME` read from what `open_source()` returns."""
    if name in _sources or name == RANDOM:
        raise DataError(f"a data source named {name!r} is registered already")
    _sources[name] = open_source


def source_names() -> list[str]:
    return [*_sources, RANDOM]


def is_built_in(name: str) -> bool:
    return name in _sources or name == RANDOM or PART.fullmatch(name) is not None


def is_random(name: str, wanted: DataSource) -> bool:
    return wanted.path is None and (wanted.dataset or name) == RANDOM


def find_folder(name: str, wanted: DataSource, data: Data) -> Path | None:
    """Returns where a source lies: at its path, or at what its name stands for, if that is a
    place."""
    if wanted.path is not None:
        return Path(wanted.path).expanduser()
    name = wanted.dataset or name
    if is_built_in(name):
        return None
    if name in data.datasets:
        return Path(data.datasets[name]).expanduser()
    folder = Path(data.folder).expanduser() / name
    return folder if folder.exists() else None


def find_built(name: str, wanted: DataSource, data: Data) -> Path | None:
    """The folder of a source that is a built corpus; None for any other."""
    folder = find_folder(name, wanted, data)
    return folder if folder is not None and is_corpus(folder) else None


def open_by_name(name: str, wanted: DataSource, data: Data, held_out: bool = False) -> Source:
    """The source of that name; a path wins over the names that are known. `held_out`: to validate
    on, which decides the split where none is asked for."""
    folder = find_folder(name, wanted, data)
    if folder is not None:
        return open_source(
            folder,
            column=wanted.column,
            subset=wanted.subset,
            split=wanted.split,
            dtype=wanted.dtype,
            skip_bad=data.bad_documents == "skip",
            held_out=held_out,
        )
    name = wanted.dataset or name
    if name in _sources:
        return _whole(name, _sources[name](), wanted)
    if part := PART.fullmatch(name):
        which = (int(part[2]), int(part[3]))
        library = StandardLibrary(part=which) if part[1] == "stdlib" else Docstrings(which)
        return _whole(name, library, wanted)
    fetch = command("overland", "fetch", "dataset", "OWNER/NAME", "--to", f"{data.folder}/{name}")
    raise DataError(
        f"there is no dataset {name!r}: `{fetch}` brings it, or set data.datasets.{name} to its "
        "folder"
    )


def sources_of(config: JobConfig) -> dict[str, DataSource]:
    """Returns the sources to train on: the mixture, or the one dataset as a mixture of one."""
    if config.data.sources:
        return dict(config.data.sources)
    training = config.training
    name = Path(training.dataset_path).name if training.dataset_path else training.dataset
    choices = {key: getattr(training, key) for key in CHOICES}
    return {name: DataSource(path=training.dataset_path, **choices)}


def validates_on_holdout(config: JobConfig) -> bool:
    """Whether validation reads the documents that `data.holdout` keeps out of training."""
    validation = config.validation
    is_named = validation.dataset is not None or validation.dataset_path is not None
    return bool(validation.enable and config.data.holdout and not is_named)


def held_out_sources(config: JobConfig) -> dict[str, DataSource]:
    """The sets to validate on, by name, beside what `data.holdout` gives."""
    validation = config.validation
    if not validation.enable:
        return {}
    keys = ("path", "dataset", *CHOICES)
    sets = {
        name: DataSource(**{key: getattr(one, key) for key in keys})
        for name, one in validation.sets.items()
    }
    choices = {key: getattr(validation, key) for key in CHOICES}
    if validation.dataset_path is not None:
        path = validation.dataset_path
        return {Path(path).name: DataSource(path=path, **choices), **sets}
    names = validation.dataset
    if names is None:
        names = [] if sets or validates_on_holdout(config) else "stdlib_heldout"
    names = [names] if isinstance(names, str) else names
    return {name: DataSource(**choices) for name in names} | sets


def validation_table(config: JobConfig, name: str) -> str:
    """The table of the config that says where a set to validate on is."""
    return f"{VALIDATION}.sets.{name}" if name in config.validation.sets else VALIDATION


def is_validation(table: str) -> bool:
    return table.partition(".")[0] == VALIDATION


def training_table(config: JobConfig, name: str) -> str:
    """The table of the config that says where a source is."""
    return f"data.sources.{name}" if config.data.sources else "training"


def open_wanted(config: JobConfig, table: str, name: str, wanted: DataSource) -> Source:
    """Opens a source as a table of the config describes it; messages name that table's keys."""
    if find_folder(name, wanted, config.data) is None:
        refuse_choices(wanted, table, wanted.dataset or name)
    is_sft = config.sft.shape != "off"
    whole = wanted.model_copy(update={"column": WHOLE}) if is_sft else wanted
    try:
        source = open_by_name(name, whole, config.data, held_out=is_validation(table))
        _refuse_own_output(config.data, source)
        if is_sft:
            return conversations_of(source, config, length_of_rows(config, table), wanted.column)
        return source
    except Unsettled as error:
        key = f"{table}.{error.option}"
        if is_validation(table) and error.option == "dtype":
            key = "--dtype (of `overland data build`, to validate on what it makes)"
        elif key == "training.dtype":  # which is another thing; sources have a key for it
            key = f"data.sources.{name}.dtype (and its path there, not in training.dataset_path)"
        raise error.by(key) from None


def length_of_rows(config: JobConfig, table: str) -> int:
    """Returns the tokens of a sequence, to train or to validate on."""
    own = config.validation.seq_len if is_validation(table) else None
    return own or config.training.seq_len


def check_samples(
    config: JobConfig, taken: Mapping[str, tuple[str, tuple[int, ...]]], model: str
) -> None:
    """Refuses sources without the arrays that the model takes, before anything is made of them."""
    named = [(training_table(config, name), name, one) for name, one in sources_of(config).items()]
    held_out = held_out_sources(config).items()
    named += [(validation_table(config, name), name, one) for name, one in held_out]
    for table, name, wanted in named:
        held = None
        if not is_random(name, wanted):
            held = held_by(name, open_wanted(config, table, name, wanted))
        require_fields(name, held, taken, model)


def held_by(name: str, source: Source) -> Arrays | None:
    """The arrays that a source has declared; None for text and tokens."""
    is_arrays = getattr(source, "kind", "text") == "arrays"
    return Arrays.declared(name, getattr(source, "fields", None)) if is_arrays else None


def refuse_choices(wanted: DataSource, table: str, what: object) -> None:
    """Refuses keys for what has no columns, subsets or splits. A source's own table is left alone:
    its path may have been changed from the files to the corpus that was built from them."""
    for key in CHOICES:
        if getattr(wanted, key) is not None and not table.startswith("data.sources"):
            raise DataError(f"{table}.{key} = {getattr(wanted, key)!r}: {what} has no {key}s")


def _whole(name: str, source: Source, wanted: DataSource) -> Source:
    """The source, unless it has records where documents are asked for."""
    if getattr(source, "kind", "text") == "records" and wanted.column != WHOLE:
        raise DataError(f'{name} holds questions and answers: set sft.shape = "auto"')
    return source


def _refuse_own_output(data: Data, source: Source) -> None:
    """Refuses to write into the folder that is read: it would become part of the data."""
    if not isinstance(source, FileSource) or not source.is_walked:
        return
    for key in ("folder", "cache_folder"):
        out = getattr(data, key)
        if out and Path(out).expanduser().resolve().is_relative_to(source.root.resolve()):
            raise DataError(
                f"data.{key} = {out} is {source.root} or lies inside it, so what the run writes "
                f"there would become part of what it reads: set data.{key} to a folder outside"
            )
