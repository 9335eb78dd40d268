"""Leakage: detects validation data that is also training data.

That is the same file, under any name or link, a copy of it, or a corpus that was built from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path

from overland.config.schema import DataSource, JobConfig
from overland.data.corpus_folder import read_layout
from overland.data.registry import is_built_in
from overland.data.sources import Source
from overland.data.sources.file_marks import FileMark, has_mark, marks_of_files
from overland.data.wanted import (
    CHOICES,
    VALIDATION,
    WantedSource,
    held_out_sources,
    sources_of,
    takes_images,
    validates_on_holdout,
)
from overland.errors import DataError
from overland.words import any_of

# Share of the validation bytes that may also be trained on: two folders of code often contain the
# same license.
MOST_SHARED = 0.01

OWN_VALIDATION = ("stdlib", "stdlib_heldout", "random")
"""Training sources for which validation on the held-out standard library is expected."""


def check_held_out(config: JobConfig) -> None:
    """Raises an error if validation would read training data, unless the config allows it."""
    held_out, trained = held_out_sources(config), sources_of(config)
    if validates_on_holdout(config):
        asked = DataSource(**{key: getattr(config.validation, key) for key in CHOICES})
        on_holdout = WantedSource(config, VALIDATION, "", asked)
        on_holdout.refuse_choices("what data.holdout holds out")
        if all(one.is_made for one in trained.values()):
            raise DataError(
                "data.holdout holds out documents for validation, but random tokens have no "
                "documents: name other data in [validation]"
            )
    if config.sft.shape != "off" and "stdlib_heldout" in held_out:
        raise DataError(
            "validation reads stdlib_heldout by default, which has no conversations: set "
            "data.holdout = 0.02 to hold out some of the training data, or set "
            "validation.dataset_path"
        )
    _refuse_twice(config)
    if config.validation.allow_training_data:
        return
    for held in held_out.values():
        for one in trained.values():
            if file := _shared(held, one):
                holdout = (
                    "set data.holdout = 0.01 instead to hold out some documents for validation, "
                    if not takes_images(config)  # images cannot be held out
                    else ""
                )
                raise DataError(
                    f"validation would read {file}, which is also training data: {holdout}choose "
                    "other data in [validation], or set validation.allow_training_data = true"
                )


def foreign_validation(config: JobConfig) -> str | None:
    """Returns a note if validation reads the standard library but training reads something else."""
    training = sources_of(config)
    if "stdlib_heldout" not in held_out_sources(config) or any(
        wanted.asked.path is None and wanted.dataset.partition(":")[0] in OWN_VALIDATION
        for wanted in training.values()
    ):
        return None
    return (
        f"validation reads stdlib_heldout, which is not held out of {any_of(list(training), 'and')}"
        ": set data.holdout = 0.01 to hold out a share of the training data, or set "
        "validation.dataset_path"
    )


def _refuse_twice(config: JobConfig) -> None:
    """Rejects a set that is named twice: it would be read twice, or one of the names ignored."""
    validation = config.validation
    listed = validation.dataset if isinstance(validation.dataset, list) else []
    if len({*listed}) < len(listed) and validation.dataset_path is None:
        name = max(listed, key=listed.count)
        raise DataError(f"validation.dataset lists {name} twice: remove one of them")
    others = held_out_sources(config.having({"validation.sets": {}}))
    trained = sources_of(config) if validates_on_holdout(config) else {}
    for name in validation.sets:
        if name in others or name in trained:
            where = "data.holdout holds out" if name in trained else "validation.dataset names"
            raise DataError(
                f"{where} {name}, which is also in validation.sets: give that set another name"
            )
    seen: dict[tuple[str, ...], str] = {}
    for name, wanted in held_out_sources(config).items():
        place = wanted.dataset if wanted.folder is None else str(wanted.folder.resolve())
        what = (place, *(str(getattr(wanted.asked, key)) for key in CHOICES))
        if what in seen:
            raise DataError(
                f"validation has {place} twice, as {seen[what]} and as {name}: remove one of them"
            )
        seen[what] = name


def _shared(held: WantedSource, trained: WantedSource) -> str | None:
    """Returns a file or source that both read, if any."""
    if not _may_share(held, trained):
        return None
    one, other = (wanted.built or wanted.open() for wanted in (held, trained))
    has_files = any(isinstance(source, Path) or source.files for source in (one, other))
    if not has_files and held.dataset == trained.dataset:  # sources of users, compared by name
        return held.dataset
    return _first_shared(one, other)


def _may_share(one: WantedSource, other: WantedSource) -> bool:
    """Whether both are there, so that their files can be compared."""
    if one.is_made or other.is_made:
        return False
    if one.built or other.built:
        return True
    if one.folder is None or other.folder is None:  # not a file, or not on this machine yet
        return is_built_in(one.dataset) and is_built_in(other.dataset)
    return one.folder.exists() and other.folder.exists()


def _first_shared(held: Source | Path, trained: Source | Path) -> str | None:
    """Returns the first file that both read, or that one reads and the other was built from. A
    built corpus is given by its folder."""
    if isinstance(held, Path) and isinstance(trained, Path) and held.samefile(trained):
        return str(held)
    if isinstance(held, Source) and isinstance(trained, Source):
        files = {_identity(trained.root / file) for file in trained.files}
        paths = (held.root / file for file in held.files)
        if itself := next((str(path) for path in paths if _identity(path) in files), None):
            return itself
    names = list(_of_the_same_bytes(held, trained))
    share = sum(size for _, size in names) / max(_num_bytes(held), 1)
    return names[0][0] if share > MOST_SHARED else None


def _of_the_same_bytes(held: Source | Path, trained: Source | Path) -> Iterator[tuple[str, int]]:
    """Yields the files whose content both have, and their sizes. A corpus has marks of the files
    that it was built from."""
    if isinstance(held, Path) and not isinstance(trained, Path):
        held, trained = trained, held
    if not isinstance(held, Path):
        marks = _by_size(_marks(trained, {path.stat().st_size for path in _paths(held)}))
        for path in _paths(held):
            size = path.stat().st_size
            if any(has_mark(path, mark) for mark in marks[size]):
                yield str(path), size
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
    """Returns the files that a source reads; a user-defined source may read none."""
    if isinstance(source, Path):
        return []
    return [source.root / file for file in source.depends_on()]


def _identity(path: Path) -> tuple[int, int]:
    """Identifies the file itself, whatever links lead to it (device and inode)."""
    found = path.stat()
    return found.st_dev, found.st_ino
