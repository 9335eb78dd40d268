"""Decides which sources a config names for training and for validation, and how each is opened:
from a path, by a known name, as a built corpus, or generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from overland.config.schema import Data, DataSource, JobConfig
from overland.data.lanes import ImageSet
from overland.data.layout import is_corpus
from overland.data.registry import MADE, RANDOM, is_built_in, registered
from overland.data.sft import conversations_of
from overland.data.sources import open_source
from overland.data.sources.columns import WHOLE, NoColumn
from overland.data.sources.image_files import WANTED, ArrayList, is_array_list, listed_files
from overland.data.sources.source import Source
from overland.data.sources.text import CSV_SUFFIXES
from overland.errors import ChoiceRequired, DataError, OverlandError
from overland.models.flops import SampleFields, sample_fields
from overland.models.registry import model_config
from overland.plugins import plugin
from overland.words import command

VALIDATION = "validation"
SECTIONS = ("training", VALIDATION)
CHOICES = ("column", "subset", "split")
"""Keys that choose a part of a dataset, in [training], [validation] and sources."""


@dataclass(frozen=True)
class WantedSource:
    """A data source that a config names."""

    config: JobConfig = field(repr=False)
    table: str
    """The section of the config that describes it; messages name its keys."""
    name: str
    asked: DataSource
    missing: str | None = None
    """The list of images in whose place there are random images, because it does not exist."""
    inherits_column: bool = False
    """Whether it is read from the column that training reads."""

    @property
    def dataset(self) -> str:
        """Its name as a dataset, if it has no path."""
        return self.asked.dataset or self.name

    @property
    def is_made(self) -> bool:
        """Whether it is generated on the fly: random tokens, random images, images of shapes."""
        return self.asked.path is None and self.dataset in MADE

    @property
    def is_for_validation(self) -> bool:
        return self.table.partition(".")[0] == VALIDATION

    @property
    def folder(self) -> Path | None:
        """Its path, or the path that its name stands for, if any."""
        return find_folder(self.name, self.asked, self.config.data)

    @property
    def is_there(self) -> bool:
        """Whether it need not be fetched. A path may be the prefix of a Megatron pair."""
        folder = self.folder
        if folder is None:
            return is_built_in(self.dataset)
        return folder.exists() or folder.with_name(folder.name + ".idx").exists()

    @property
    def path_key(self) -> str:
        """The key that may hold its path."""
        return f"{self.table}.{'dataset_path' if self.table in SECTIONS else 'path'}"

    @property
    def key(self) -> str:
        """The key or table that names it."""
        if self.table not in SECTIONS:
            return self.table
        has_path = self.asked.path is not None or self.missing is not None
        return self.path_key if has_path else f"{self.table}.dataset"

    @property
    def built(self) -> Path | None:
        """Its folder, if it is a built corpus."""
        folder = self.folder
        return folder if folder is not None and is_corpus(folder) else None

    @property
    def seq_len(self) -> int:
        own = self.config.validation.seq_len if self.is_for_validation else None
        return own or self.config.training.seq_len

    def open(self) -> Source:
        """Opens a source that is neither generated nor built."""
        if self.folder is None:
            self.refuse_choices(self.dataset)
        if (images := self.open_images()) is not None:
            return images
        is_sft = self.config.sft.shape != "off"
        whole = self.asked.model_copy(update={"column": WHOLE}) if is_sft else self.asked
        try:
            source = open_by_name(self.name, whole, self.config.data, self.is_for_validation)
            _refuse_own_output(self.config.data, source)
            if is_sft:
                return conversations_of(source, self.config, self.seq_len, self.asked.column)
            return source
        except ChoiceRequired as error:
            raise error.by(self._key_of(error.option)) from None
        except NoColumn as error:
            if not self.inherits_column:
                raise
            raise DataError(
                f"{error}. The column is that of training.column; set {self.table}.column to "
                "another"
            ) from None

    def _key_of(self, option: str) -> str:
        """Returns where a choice can be made, for messages."""
        if option == "dtype" and self.is_for_validation:
            return "--dtype (of `overland data build`, and validate on the corpus that it builds)"
        if option == "dtype" and self.table == "training":  # whose dtype means something else
            own = f"data.sources.{self.name}.dtype"
            return f"{own} (and its path there, not in training.dataset_path)"
        return f"{self.table}.{option}"

    def open_images(self) -> ArrayList | None:
        """Opens a source that is a list of images, or returns None for any other source."""
        config, path = self.config, self.folder
        if path is None or path.suffix not in CSV_SUFFIXES or not path.is_file():
            return None
        if not is_array_list(path):
            if takes_images(config):
                listed_files(path, self.asked.column)  # raises an error that says what is wrong
            return None
        self.refuse_choices(f"{path} is a list, which", ("subset", "split"))
        if config.data.holdout:
            raise DataError(
                f"data.holdout holds out documents of text, but {path} lists images: list the "
                "validation images in a separate file, and set validation.dataset_path to it"
            )
        taken = taken_by_model(config)
        channels = taken[WANTED][1][0] if taken and WANTED in taken else None
        skips = config.data.bad_documents == "skip"
        return ArrayList(path, self.asked.column, skips, channels, config.images.pad)

    def made_images(self) -> ImageSet | None:
        """Returns generated images for a model that takes only images, or None for one that takes
        tokens."""
        images: ImageSet | None = plugin("made_rows").made_images(self)
        return images

    def refuse_choices(self, what: object, keys: tuple[str, ...] = CHOICES) -> None:
        """Rejects keys for a source without columns, subsets or splits. Sections of data.sources
        are exempt: their path may have been changed from the files to the corpus built from
        them."""
        for key in keys:
            value = getattr(self.asked, key)
            if value is not None and not self.table.startswith("data.sources"):
                raise DataError(f"{self.table}.{key} = {value!r}: {what} has no {key}s")


Sources: TypeAlias = Mapping[str, WantedSource]


def sources_of(config: JobConfig) -> dict[str, WantedSource]:
    """Returns the training sources: the mixture, or the only dataset as a mixture of one."""
    if config.data.sources:
        return {
            name: WantedSource(config, f"data.sources.{name}", name, asked)
            for name, asked in config.data.sources.items()
        }
    training = config.training
    (only,) = _of_section(config, "training", training.dataset_path, [training.dataset])
    return {only.name: only}


def held_out_sources(config: JobConfig) -> dict[str, WantedSource]:
    """Returns the validation sets by name, without the one that `data.holdout` gives."""
    validation = config.validation
    if not validation.enable:
        return {}
    names = validation.dataset
    if names is None:
        has_others = validation.sets or validates_on_holdout(config)
        names = [] if has_others else "stdlib_heldout"
    names = [names] if isinstance(names, str) else names
    found = _of_section(config, VALIDATION, validation.dataset_path, names)
    for name, one in validation.sets.items():
        asked = {key: getattr(one, key) for key in ("path", "dataset", *CHOICES)}
        found.append(WantedSource(config, f"{VALIDATION}.sets.{name}", name, DataSource(**asked)))
    return {one.name: _with_column(one) for one in found}


def validates_on_holdout(config: JobConfig) -> bool:
    """Whether validation reads the documents that `data.holdout` holds out of training."""
    validation = config.validation
    is_named = validation.dataset is not None or validation.dataset_path is not None
    return bool(validation.enable and config.data.holdout and not is_named)


def _of_section(
    config: JobConfig, table: str, path: str | None, names: list[str]
) -> list[WantedSource]:
    """Returns the sources that [training] or [validation] names: one by its path, or some by their
    names."""
    choices = {key: getattr(getattr(config, table), key) for key in CHOICES}
    if path is None:
        return [WantedSource(config, table, name, DataSource(**choices)) for name in names]
    name = Path(path).name
    if config.images.if_missing == "random" and not Path(path).expanduser().exists():
        return [WantedSource(config, table, name, DataSource(dataset=RANDOM), missing=path)]
    return [WantedSource(config, table, name, DataSource(path=path, **choices))]


def _with_column(wanted: WantedSource) -> WantedSource:
    """Returns a validation set that is read from the column that training reads, unless it has its
    own. What is built in or built already has no columns."""
    column = wanted.config.training.column
    has_none = wanted.folder is None or wanted.built
    if wanted.asked.column is not None or column is None or has_none:
        return wanted
    asked = wanted.asked.model_copy(update={"column": column})
    return replace(wanted, asked=asked, inherits_column=True)


def find_folder(name: str, asked: DataSource, data: Data) -> Path | None:
    """Returns the path of a source, or the path that its name stands for, if any."""
    if asked.path is not None:
        return Path(asked.path).expanduser()
    name = asked.dataset or name
    if is_built_in(name):
        return None
    if name in data.datasets:
        return Path(data.datasets[name]).expanduser()
    folder = Path(data.folder).expanduser() / name
    return folder if folder.exists() else None


def open_by_name(name: str, asked: DataSource, data: Data, held_out: bool = False) -> Source:
    """Opens the source of that name; a path takes precedence over known names. `held_out`: it is
    for validation, which determines the default split."""
    folder = find_folder(name, asked, data)
    if folder is not None:
        return open_source(
            folder,
            column=asked.column,
            subset=asked.subset,
            split=asked.split,
            dtype=asked.dtype,
            skip_bad=data.bad_documents == "skip",
            held_out=held_out,
        )
    name = asked.dataset or name
    source = registered(name)
    if source is None:
        place = f"{data.folder}/{name}"
        fetch = command("overland", "fetch", "dataset", "OWNER/NAME", "--to", place)
        raise DataError(
            f"there is no dataset {name!r}: download it with `{fetch}`, or set "
            f"data.datasets.{name} to its folder"
        )
    if source.kind == "records" and asked.column != WHOLE:
        raise DataError(f'{name} contains questions and answers: set sft.shape = "auto"')
    return source


def taken_by_model(config: JobConfig) -> SampleFields | None:
    """Returns the arrays that the config's model takes, or None if it takes tokens."""
    return sample_fields(model_config(config.model))


def takes_images(config: JobConfig) -> bool:
    """Whether the model is known to take images; its own config may not be on this machine yet."""
    try:
        return WANTED in (taken_by_model(config) or {})
    except OverlandError:
        return False


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
