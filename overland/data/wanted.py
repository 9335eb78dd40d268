"""Which sources a config asks for, to train and to validate on; opened, and not yet read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from overland.config.schema import Data, DataSource, JobConfig
from overland.data import registry
from overland.data.arrays import Arrays, require_fields
from overland.data.layout import is_corpus
from overland.data.overlap import may_share, shared
from overland.data.sources import FileSource, Source
from overland.errors import DataError, Unsettled
from overland.words import any_of

CHOICES = ("column", "subset", "split")
"""Keys that say which part of a dataset is read; [training], [validation] and sources have them."""

OWN_VALIDATION = ("stdlib", "stdlib_heldout", "random")
"""Nobody wonders that the standard library is validated on; the held-out part itself is refused."""


def sources_of(config: JobConfig) -> dict[str, DataSource]:
    """The mixture, or the one dataset as a mixture of one."""
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
    """The sets to validate on, by name; none where `data.holdout` gives them."""
    validation = config.validation
    if not validation.enable or validates_on_holdout(config):
        return {}
    choices = {key: getattr(validation, key) for key in CHOICES}
    if validation.dataset_path is not None:
        path = validation.dataset_path
        return {Path(path).name: DataSource(path=path, **choices)}
    names = validation.dataset or "stdlib_heldout"
    return {name: DataSource(**choices) for name in ([names] if isinstance(names, str) else names)}


def training_table(config: JobConfig, name: str) -> str:
    """The table of the config that says where a source is."""
    return f"data.sources.{name}" if config.data.sources else "training"


def open_wanted(config: JobConfig, table: str, name: str, wanted: DataSource) -> Source:
    """A source as a table of the config describes it; messages name the keys of that table."""
    if registry.find_folder(name, wanted, config.data) is None:
        refuse_choices(wanted, table, wanted.dataset or name)
    try:
        source = registry.open_source(name, wanted, config.data, held_out=table == "validation")
        _refuse_own_output(config.data, source)
        return source
    except Unsettled as error:
        key = f"{table}.{error.option}"
        if key == "training.dtype":  # which is another thing; a table of sources names all of them
            key = f"data.sources.{name}.dtype (and its path there, not in training.dataset_path)"
        elif key == "validation.dtype":
            key = "--dtype (of `overland data build`, to validate on what it makes)"
        raise error.by(key) from None


def check_samples(
    config: JobConfig, taken: Mapping[str, tuple[str, tuple[int, ...]]], model: str
) -> None:
    """Refuses sources without the arrays that the model takes, before anything is made of them."""
    named = [(training_table(config, name), name, one) for name, one in sources_of(config).items()]
    named += [("validation", name, one) for name, one in held_out_sources(config).items()]
    for table, name, wanted in named:
        held = None
        if not registry.is_random(name, wanted):
            held = held_by(name, open_wanted(config, table, name, wanted))
        require_fields(name, held, taken, model)


def held_by(name: str, source: Source) -> Arrays | None:
    """The arrays that a source has declared; None for text and tokens."""
    is_arrays = getattr(source, "kind", "text") == "arrays"
    return Arrays.declared(name, getattr(source, "fields", None)) if is_arrays else None


def _refuse_own_output(data: Data, source: Source) -> None:
    """Tokens that a run makes inside the folder that it reads would become part of its data."""
    if not isinstance(source, FileSource) or not source.is_walked:
        return
    for key in ("folder", "cache_folder"):
        out = getattr(data, key)
        if out and Path(out).expanduser().resolve().is_relative_to(source.root.resolve()):
            raise DataError(
                f"data.{key} = {out} is {source.root} or lies inside it, so what the run writes "
                f"there would become part of what it reads: set data.{key} to a folder outside"
            )


def foreign_validation(config: JobConfig) -> str | None:
    """What to say where the standard library is validated on and something else is trained on."""
    training = sources_of(config)
    if "stdlib_heldout" not in held_out_sources(config) or any(
        wanted.path is None and (wanted.dataset or name).partition(":")[0] in OWN_VALIDATION
        for name, wanted in training.items()
    ):
        return None
    return (
        f"validation reads stdlib_heldout, which is not held out of {any_of(list(training), 'and')}"
        ": data.holdout = 0.01 keeps a share of the training data for it, or set "
        "validation.dataset_path"
    )


def check_held_out(config: JobConfig) -> None:
    """Raises where validation would read what is trained on, unless that is asked for."""
    if validates_on_holdout(config):
        choices = {key: getattr(config.validation, key) for key in CHOICES}
        refuse_choices(DataSource(**choices), "validation", "what data.holdout keeps for it")
        if all(registry.is_random(*one) for one in sources_of(config).items()):
            raise DataError(
                "data.holdout keeps documents for validation, and random tokens are none: name "
                "other data in [validation]"
            )
    _refuse_twice(config)
    if config.validation.allow_training_data:
        return
    for held in held_out_sources(config).items():
        for trained in sources_of(config).items():
            if file := _shared(config, held, trained):
                raise DataError(
                    f"validation would read {file}, which is trained on: set data.holdout = 0.01 "
                    "in its place to keep some documents for validation, choose other data in "
                    "[validation], or set validation.allow_training_data = true"
                )


def _refuse_twice(config: JobConfig) -> None:
    """A set that is named twice would be read twice, or one of its names would go unheard."""
    names = config.validation.dataset
    seen: dict[str, str] = {}
    if not isinstance(names, list) or config.validation.dataset_path is not None:
        return
    for name in names:
        folder = registry.find_folder(name, DataSource(), config.data)
        place = name if folder is None else str(folder.resolve())
        if place in seen:
            also = "" if seen[place] == name else f", as {seen[place]} and as {name}"
            raise DataError(f"validation.dataset has {place} twice{also}: leave one of them out")
        seen[place] = name


def _shared(
    config: JobConfig, held: tuple[str, DataSource], trained: tuple[str, DataSource]
) -> str | None:
    """What both read, if anything."""
    if not may_share(config, held, trained):
        return None
    one = _opened(config, "validation", *held)
    other = _opened(config, training_table(config, trained[0]), *trained)
    names = [wanted.dataset or name for name, wanted in (held, trained)]
    has_files = any(isinstance(source, Path | FileSource) for source in (one, other))
    if not has_files and names[0] == names[1]:  # a user's own source is known by its name
        return names[0]
    return shared(one, other)


def _opened(config: JobConfig, table: str, name: str, wanted: DataSource) -> Source | Path:
    """A source, or the folder of a corpus that is built."""
    folder = registry.find_folder(name, wanted, config.data)
    if folder is not None and is_corpus(folder):
        return folder
    return open_wanted(config, table, name, wanted)


def refuse_choices(wanted: DataSource, table: str, what: object) -> None:
    """For what has no columns, subsets or splits. A source's own table is left alone: its path may
    have been changed from the files to the corpus that was built from them."""
    for key in CHOICES:
        if getattr(wanted, key) is not None and not table.startswith("data.sources"):
            raise DataError(f"{table}.{key} = {getattr(wanted, key)!r}: {what} has no {key}s")
