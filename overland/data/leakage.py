"""Leakage: refuses to validate on what is trained on.

That is the same file, by whatever name or link, a copy of it, or a corpus that was built from it.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path

from overland.config.schema import DataSource, JobConfig, Validation
from overland.data.corpus_folder import is_corpus, read_layout
from overland.data.registry import (
    CHOICES,
    find_built,
    find_folder,
    held_out_sources,
    is_built_in,
    is_made,
    open_wanted,
    refuse_choices,
    sources_of,
    takes_images,
    training_table,
    validates_on_holdout,
    validation_table,
)
from overland.data.sources import FileSource, Source
from overland.data.sources.marks import FileMark, has_mark, marks_of_files
from overland.errors import DataError
from overland.words import any_of

# Of the bytes that are validated on: two folders of code may well hold the same licence.
MOST_SHARED = 0.01

OWN_VALIDATION = ("stdlib", "stdlib_heldout", "random")
"""Nobody wonders that the standard library is validated on; the held-out part itself is refused."""

Named = tuple[str, DataSource]


def check_held_out(config: JobConfig) -> None:
    """Raises where validation would read what is trained on, unless that is asked for."""
    if validates_on_holdout(config):
        choices = {key: getattr(config.validation, key) for key in CHOICES}
        refuse_choices(DataSource(**choices), "validation", "what data.holdout keeps for it")
        if all(is_made(*one) for one in sources_of(config).items()):
            raise DataError(
                "data.holdout keeps documents for validation, and random tokens are none: name "
                "other data in [validation]"
            )
    if config.sft.shape != "off" and "stdlib_heldout" in held_out_sources(config):
        raise DataError(
            "validation reads stdlib_heldout by default, which is no conversations: set "
            "data.holdout = 0.02 to keep some of the training data for it, or "
            "validation.dataset_path"
        )
    _refuse_twice(config)
    if config.validation.allow_training_data:
        return
    for held in held_out_sources(config).items():
        for trained in sources_of(config).items():
            if file := _shared(config, held, trained):
                holdout = (
                    "set data.holdout = 0.01 in its place to keep some documents for validation, "
                    if not takes_images(config)  # of those, none can be kept
                    else ""
                )
                raise DataError(
                    f"validation would read {file}, which is trained on: {holdout}choose other "
                    "data in [validation], or set validation.allow_training_data = true"
                )


def foreign_validation(config: JobConfig) -> str | None:
    """Returns what to say where the standard library is validated on and something else is trained
    on."""
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


def _refuse_twice(config: JobConfig) -> None:
    """Refuses a set that is named twice: it would be read twice, or one name ignored."""
    validation = config.validation
    listed = validation.dataset if isinstance(validation.dataset, list) else []
    if len({*listed}) < len(listed) and validation.dataset_path is None:
        name = max(listed, key=listed.count)
        raise DataError(f"validation.dataset has {name} twice: leave one of them out")
    others = held_out_sources(config.model_copy(update={"validation": _without_sets(validation)}))
    trained = sources_of(config) if validates_on_holdout(config) else {}
    for name in validation.sets:
        if name in others or name in trained:
            where = "data.holdout keeps some of" if name in trained else "validation.dataset names"
            raise DataError(f"{where} {name}, and so does validation.sets: give the set a new name")
    seen: dict[tuple[str, ...], str] = {}
    for name, wanted in held_out_sources(config).items():
        folder = find_folder(name, wanted, config.data)
        place = wanted.dataset or name if folder is None else str(folder.resolve())
        what = (place, *(str(getattr(wanted, key)) for key in CHOICES))
        if what in seen:
            raise DataError(
                f"validation has {place} twice, as {seen[what]} and as {name}: leave one of them "
                "out"
            )
        seen[what] = name


def _without_sets(validation: Validation) -> Validation:
    return validation.model_copy(update={"sets": {}})


def _shared(
    config: JobConfig, held: tuple[str, DataSource], trained: tuple[str, DataSource]
) -> str | None:
    """Returns what both read, if anything."""
    if not _may_share(config, held, trained):
        return None
    one = _opened(config, validation_table(config, held[0]), *held)
    other = _opened(config, training_table(config, trained[0]), *trained)
    names = [wanted.dataset or name for name, wanted in (held, trained)]
    has_files = any(isinstance(source, Path | FileSource) for source in (one, other))
    if not has_files and names[0] == names[1]:  # a user's own source is known by its name
        return names[0]
    return _first_shared(one, other)


def _opened(config: JobConfig, table: str, name: str, wanted: DataSource) -> Source | Path:
    """A source, or the folder of a corpus that is built."""
    built = find_built(name, wanted, config.data)
    return open_wanted(config, table, name, wanted) if built is None else built


def _may_share(config: JobConfig, one: Named, other: Named) -> bool:
    """Whether it takes a look at the files to tell; opening a large dataset is not free."""
    if is_made(*one) or is_made(*other):
        return False
    folders = [find_folder(name, wanted, config.data) for name, wanted in (one, other)]
    if any(folder is not None and is_corpus(folder) for folder in folders):
        return True
    if None in folders:  # built in or registered, or not here yet
        return all(is_built_in(wanted.dataset or name) for name, wanted in (one, other))
    first, second = (folder.resolve() for folder in folders if folder is not None)
    if not (first.exists() and second.exists()):
        return False
    if first.is_relative_to(second) or second.is_relative_to(first):
        return True
    files = [_files_below(first), _files_below(second)]
    if any(_is_link(found) for found in (*files[0], *files[1])):
        return True
    sizes = [{found.st_size for found in these} - {0} for these in files]
    return not sizes[0].isdisjoint(sizes[1])  # copies have one size


def _first_shared(held: Source | Path, trained: Source | Path) -> str | None:
    """The first file that both read, or that the one was built from and the other reads. A corpus
    that was built is given by its folder."""
    if isinstance(held, Path) and isinstance(trained, Path) and held.samefile(trained):
        return str(held)
    if isinstance(held, FileSource) and isinstance(trained, FileSource):
        files = {_identity(trained.root / file) for file in trained.files}
        paths = (held.root / file for file in held.files)
        if itself := next((str(path) for path in paths if _identity(path) in files), None):
            return itself
    names = list(_of_the_same_bytes(held, trained))
    share = sum(size for _, size in names) / max(_num_bytes(held), 1)
    return names[0][0] if share > MOST_SHARED else None


def _of_the_same_bytes(held: Source | Path, trained: Source | Path) -> Iterator[tuple[str, int]]:
    """Files of the first whose content the second has too, and their sizes. A corpus has marks of
    the files that it was built from."""
    if not isinstance(held, Path):
        marks = _by_size(_marks(trained, {path.stat().st_size for path in _paths(held)}))
        for path in _paths(held):
            size = path.stat().st_size
            if any(has_mark(path, mark) for mark in marks[size]):
                yield str(path), size
    elif not isinstance(trained, Path):
        paths = defaultdict(list)
        for path in _paths(trained):
            paths[path.stat().st_size].append(path)
        for mark in _marks(held):
            for path in paths[mark.size]:
                if has_mark(path, mark):
                    yield str(path), mark.size
                    break
    else:
        samples = {(mark.size, mark.sample) for mark in _marks(trained)}
        for name, mark in read_layout(held).all_chunks()[1].items():
            if (mark.size, mark.sample) in samples:
                yield f"{name} (in {held})", mark.size


def _marks(source: Source | Path, sizes: Container[int] = ()) -> list[FileMark]:
    """Returns the marks of a corpus, or of the files of these sizes."""
    if isinstance(source, Path):
        return list(read_layout(source).all_chunks()[1].values())
    files = [str(path) for path in _paths(source) if path.stat().st_size in sizes]
    return list(marks_of_files(Path(), files, whole=False).values())


def _by_size(marks: list[FileMark]) -> dict[int, list[FileMark]]:
    found = defaultdict(list)
    for mark in marks:
        found[mark.size].append(mark)
    return found


def _num_bytes(source: Source | Path) -> int:
    if isinstance(source, Path):
        return sum(mark.size for mark in _marks(source))
    return sum(path.stat().st_size for path in _paths(source))


def _paths(source: Source | Path) -> list[Path]:
    """Files that a source reads; a user's own source may read none."""
    if not isinstance(source, FileSource):
        return []
    return [source.root / file for file in source.depends_on()]


def _identity(path: Path) -> tuple[int, int]:
    """Identifies the file itself, whatever links lead to it."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _files_below(path: Path) -> list[os.stat_result]:
    """Lists all files there, and links to folders."""
    below = (
        os.path.join(parent, name)
        for parent, subfolders, files in os.walk(path)
        for name in (*subfolders, *files)
    )
    found = map(os.lstat, (str(path), *below))
    return [one for one in found if not stat.S_ISDIR(one.st_mode)]


def _is_link(found: os.stat_result) -> bool:
    """Whether it is a symbolic link, or a file with another name somewhere."""
    return stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1)
