"""The sources that a config names for training and validation, and how each is opened."""

from __future__ import annotations

from pathlib import Path

from overland.config.schema import Data, DataSource, JobConfig
from overland.data.corpus_folder import is_corpus
from overland.data.lanes import ImageSet, RandomImages
from overland.data.registry import HELD_OUT_SHAPES, RANDOM, find_folder, open_by_name
from overland.data.sft import conversations_of
from overland.data.sources import Source
from overland.data.sources.columns import WHOLE, NoColumn
from overland.data.sources.csv_rows import CSV_SUFFIXES
from overland.data.sources.image_files import WANTED, ArrayList, is_array_list, listed_files
from overland.errors import ChoiceRequired, DataError, OverlandError
from overland.models.flops import SampleFields, sample_fields
from overland.models.registry import model_config
from overland.plugins import plugin

VALIDATION = "validation"
CHOICES = ("column", "subset", "split")
"""Keys that choose a part of a dataset, in [training], [validation] and sources."""


def sources_of(config: JobConfig) -> dict[str, DataSource]:
    """Returns the training sources: the mixture, or the only dataset as a mixture of one."""
    if config.data.sources:
        return dict(config.data.sources)
    training = config.training
    name = Path(training.dataset_path).name if training.dataset_path else training.dataset
    choices = {key: getattr(training, key) for key in CHOICES}
    return {name: _or_random(config, DataSource(path=training.dataset_path, **choices))}


def validates_on_holdout(config: JobConfig) -> bool:
    """Whether validation reads the documents that `data.holdout` holds out of training."""
    validation = config.validation
    is_named = validation.dataset is not None or validation.dataset_path is not None
    return bool(validation.enable and config.data.holdout and not is_named)


def held_out_sources(config: JobConfig) -> dict[str, DataSource]:
    """Returns the validation sets by name, without the one that `data.holdout` gives."""
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
        found = {Path(path).name: _or_random(config, DataSource(path=path, **choices))}
    else:
        names = validation.dataset
        if names is None:
            names = [] if sets or validates_on_holdout(config) else "stdlib_heldout"
        names = [names] if isinstance(names, str) else names
        found = {name: DataSource(**choices) for name in names}
    return {name: _with_column(config, name, one) for name, one in (found | sets).items()}


def _with_column(config: JobConfig, name: str, wanted: DataSource) -> DataSource:
    """Returns a validation set that is read from the column that training reads, unless it has its
    own. What is built in or built already has no columns."""
    column = config.training.column
    folder = find_folder(name, wanted, config.data)
    if wanted.column is not None or column is None or folder is None or is_corpus(folder):
        return wanted
    return wanted.model_copy(update={"column": column})


def is_placeholder(config: JobConfig, path: str | None) -> bool:
    """Whether random images replace a path that does not exist."""
    is_asked = config.images.if_missing == "random" and path is not None
    return is_asked and not Path(path or "").expanduser().exists()


def _or_random(config: JobConfig, wanted: DataSource) -> DataSource:
    return DataSource(dataset=RANDOM) if is_placeholder(config, wanted.path) else wanted


def validation_table(config: JobConfig, name: str) -> str:
    """Returns the section of the config that defines a validation set."""
    return f"{VALIDATION}.sets.{name}" if name in config.validation.sets else VALIDATION


def is_validation(table: str) -> bool:
    return table.partition(".")[0] == VALIDATION


def training_table(config: JobConfig, name: str) -> str:
    """Returns the section of the config that defines a training source."""
    return f"data.sources.{name}" if config.data.sources else "training"


def open_wanted(config: JobConfig, table: str, name: str, wanted: DataSource) -> Source:
    """Opens a source as a section of the config describes it; messages name that section's keys."""
    if find_folder(name, wanted, config.data) is None:
        refuse_choices(wanted, table, wanted.dataset or name)
    if (images := open_images(config, table, name, wanted)) is not None:
        return images
    is_sft = config.sft.shape != "off"
    whole = wanted.model_copy(update={"column": WHOLE}) if is_sft else wanted
    try:
        source = open_by_name(name, whole, config.data, held_out=is_validation(table))
        _refuse_own_output(config.data, source)
        if is_sft:
            return conversations_of(source, config, length_of_rows(config, table), wanted.column)
        return source
    except ChoiceRequired as error:
        key = f"{table}.{error.option}"
        if is_validation(table) and error.option == "dtype":
            key = "--dtype (of `overland data build`, and validate on the corpus that it builds)"
        elif key == "training.dtype":  # which means something else; sources have their own key
            key = f"data.sources.{name}.dtype (and its path there, not in training.dataset_path)"
        raise error.by(key) from None
    except NoColumn as error:
        if not is_validation(table) or column_of(config, table) is not None:
            raise
        raise DataError(
            f"{error}. The column is that of training.column; set {table}.column to another"
        ) from None


def column_of(config: JobConfig, table: str) -> str | None:
    """Returns the column that the section of a validation set names itself."""
    _, _, name = table.partition(f"{VALIDATION}.sets.")
    return config.validation.sets[name].column if name else config.validation.column


def open_images(config: JobConfig, table: str, name: str, wanted: DataSource) -> ArrayList | None:
    """Opens a source that is a list of images, or returns None for any other source."""
    path = find_folder(name, wanted, config.data)
    if path is None or path.suffix not in CSV_SUFFIXES or not path.is_file():
        return None
    if not is_array_list(path):
        if takes_images(config):
            listed_files(path, wanted.column)  # raises an error that says what is wrong
        return None
    refuse_choices(wanted.model_copy(update={"column": None}), table, f"{path} is a list, which")
    if config.data.holdout:
        raise DataError(
            f"data.holdout holds out documents of text, but {path} lists images: list the "
            "validation images in a separate file, and set validation.dataset_path to it"
        )
    taken = taken_by_model(config)
    channels = taken[WANTED][1][0] if taken and WANTED in taken else None
    skips = config.data.bad_documents == "skip"
    return ArrayList(path, wanted.column, skips, channels, config.images.pad)


def taken_by_model(config: JobConfig) -> SampleFields | None:
    """Returns the arrays that the config's model takes, or None if it takes tokens."""
    return sample_fields(model_config(config.model))


def takes_images(config: JobConfig) -> bool:
    """Whether the model is known to take images; its own config may not be on this machine yet."""
    try:
        return WANTED in (taken_by_model(config) or {})
    except OverlandError:
        return False


def length_of_rows(config: JobConfig, table: str) -> int:
    """Returns the sequence length for training or validation."""
    own = config.validation.seq_len if is_validation(table) else None
    return own or config.training.seq_len


def made_images(name: str, wanted: DataSource, config: JobConfig) -> ImageSet | None:
    """Returns generated images for a model that takes only images, or None for one that takes
    tokens."""
    taken, kind = taken_by_model(config), wanted.dataset or name
    if taken is None or set(taken) != {"pixel_values"}:
        if kind != RANDOM:
            raise DataError(f"{kind} are images, but {config.model.name} does not take images")
        return None
    settings = config.images
    _, shape = taken["pixel_values"]
    channels, height, width = settings.shape or shape
    if kind != RANDOM:
        size = (channels, height, width)
        shapes: ImageSet = plugin("shapes").ShapeImages(
            name, settings.count, size, kind == HELD_OUT_SHAPES
        )
        return shapes
    if settings.pad and (height > settings.pad[0] or width > settings.pad[1]):
        raise DataError(
            f"images.shape is {channels} × {height} × {width}, which cannot be padded to "
            f"{settings.pad[0]} × {settings.pad[1]}: increase images.pad"
        )
    return RandomImages(
        name, settings.count, (channels, height, width), settings.pad, config.debug.seed
    )


def refuse_choices(wanted: DataSource, table: str, what: object) -> None:
    """Rejects keys for a source without columns, subsets or splits. Sections of data.sources are
    exempt: their path may have been changed from the files to the corpus built from them."""
    for key in CHOICES:
        if getattr(wanted, key) is not None and not table.startswith("data.sources"):
            raise DataError(f"{table}.{key} = {getattr(wanted, key)!r}: {what} has no {key}s")


def _refuse_own_output(data: Data, source: Source) -> None:
    """Rejects an output folder inside the folder that is read: it would become part of the data."""
    if not source.is_walked:
        return
    for key in ("folder", "cache_folder"):
        out = getattr(data, key)
        if out and Path(out).expanduser().resolve().is_relative_to(source.root.resolve()):
            raise DataError(
                f"data.{key} = {out} is {source.root} or is inside it, so what the run writes "
                f"there would become part of its data: set data.{key} to a folder outside"
            )
