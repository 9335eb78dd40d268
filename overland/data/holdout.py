"""Keeps validation data apart from training data: decides what share of the documents
`data.holdout` holds out, and refuses validation data that is also training data, under any name.

`data.holdout` holds out some documents for validation, chosen by their content.
Each document has a mark, a keyed hash of its tokens without BOS and EOS, and is held out if the
mark is below a limit. All sources of a run have the same limit, so all copies of a document are on
the same side, wherever they are. A share gives the limit at once. A number of documents is exact:
the limit lies between the marks of the last document that is held out and the next one, so all
documents have to be marked before the first step. The limit is fixed when a run begins. A document
stays on its side when files are moved or shuffled, and whatever the seed. Shards contain all
documents; the side of each is decided when they are read.

`check_held_out` detects validation data that is also training data: the same file, under any name
or link, a copy of it, or a corpus that was built from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

import numpy as np

from overland.config.schema import Data, DataSource, JobConfig
from overland.data.corpus import Corpus
from overland.data.layout import read_layout
from overland.data.plan import check_same_holdout, kept_plan
from overland.data.registry import is_built_in
from overland.data.shard import limit_of
from overland.data.sources.file_marks import FileMark, has_mark, marks_of_files
from overland.data.sources.source import Source
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
from overland.words import any_of, number_of

FEW_SHARDS = 2  # up to 8,192 documents, which have to be tokenized before the first step anyway
# A number of documents is exact for a source of up to this many shards (65,536 documents or 1 GiB
# of text, a few minutes of one core): larger ones have to be built first.
COUNTED_SHARDS = 16
# Share of the validation bytes that may also be trained on: two folders of code often contain the
# same license.
MOST_SHARED = 0.01

OWN_VALIDATION = ("stdlib", "stdlib_heldout", "random")
"""Training sources for which validation on the held-out standard library is expected."""


def share_of(data: Data, corpora: Mapping[str, Corpus], report: Callable[[str], None]) -> float:
    """Returns the share that `data.holdout` resolves to, the same for all sources."""
    if isinstance(data.holdout, float) or not data.holdout:
        return float(data.holdout)
    for name, corpus in corpora.items():
        check_countable(data.holdout, name, corpus.num_shards, corpus.is_complete)
    names = any_of(list(corpora), "and")
    report(f"choosing the {number_of(data.holdout, 'document')} of {names} to hold out")
    share = _share_between(*_last_two(data.holdout, corpora))
    report(f"{number_of(data.holdout, 'document')} of {names} held out of training (data.holdout)")
    return share


def check_countable(wanted: int, name: str, num_shards: int, is_built: bool) -> None:
    """Raises an error if it would take too long to mark all documents of a source."""
    if not is_built and num_shards > COUNTED_SHARDS:
        raise DataError(
            f"data.holdout = {wanted:,} is a number of documents, which requires all documents to "
            f"be tokenized before the first step, and {name} is too large for that: set a "
            f"fraction, such as data.holdout = 0.01, or build it first with `overland data build`"
        )


def check_fewer(wanted: int, names: list[str], total: int) -> None:
    """Raises an error if nothing would be left to train on."""
    if wanted >= total:
        raise DataError(
            f"data.holdout = {wanted:,} would hold out all of {any_of(names, 'and')}, which has "
            f"{total:,} different documents: lower it"
        )


def _last_two(wanted: int, corpora: Mapping[str, Corpus]) -> tuple[int, int]:
    """Returns the largest mark among the documents to hold out, and the next larger one."""
    lowest = np.zeros(0, np.uint64)
    for corpus in corpora.values():
        corpus.expect(range(corpus.num_shards))
        for number in range(corpus.num_shards):
            lowest = np.union1d(lowest, corpus.shard(number).marks)[: wanted + 1]
    check_fewer(wanted, list(corpora), len(lowest))
    return int(lowest[-2]), int(lowest[-1])


def _share_between(last: int, next_: int) -> float:
    """Returns a share whose limit is above the first mark, but not above the second."""
    share = ((last + next_ + 1) // 2) / 2**64
    if not last < limit_of(share) <= next_:  # 53 bits are too few; no one will ever see it
        raise DataError("two documents have almost the same hash: set another data.holdout")
    return share


def kept_share(run: Path, data: Data) -> float | None:
    """Returns the held-out share of an existing run that holds out a number of documents, or
    None."""
    kept = kept_plan(run)
    before = kept.get("holdout")
    if not data.holdout or before is None:
        return None
    shares = [one.get("holdout", 0.0) for one in kept["plan"]["sources"].values()]
    check_same_holdout(before, data.holdout)
    return None if isinstance(data.holdout, float) else max(shares) or None


def require_both_sides(name: str, share: float, held_out: int, total: int) -> None:
    """Raises an error unless there are documents to train on and documents to validate on."""
    if total and held_out in (0, total):
        side, fix = ("no document", "raise it") if held_out == 0 else ("every document", "lower it")
        raise DataError(
            f"data.holdout holds out {side} of {name} (a fraction of {share:.3g} of {total:,}): "
            f"{fix}, or name other data in validation.dataset_path. A text file is one document, "
            f"and copies of a document stay together"
        )


def without_held_out(corpora: Mapping[str, Corpus], share: float) -> list[str]:
    """Returns the sources that have no held-out document, as far as that is known: small ones are
    tokenized for that if necessary; in a larger one that is not yet built, an empty side is
    detected during training. Raises an error if no source has one, or one has nothing else."""
    found: dict[str, tuple[int, int]] = {}
    for name, corpus in corpora.items():
        if not corpus.is_complete and corpus.num_shards > FEW_SHARDS:
            continue
        held = total = 0
        for number in range(corpus.num_shards):
            sides = corpus.shard(number).held_out(share)
            held, total = held + int(sides.sum()), total + len(sides)
            if 0 < held < total:
                break
        if held:
            require_both_sides(name, share, held, total)
        found[name] = held, total
    empty = [name for name, (held, _) in found.items() if not held]
    if len(empty) == len(corpora) and empty:
        total = sum(total for _, total in found.values())
        require_both_sides(any_of(empty, "and"), share, 0, total)
    return empty


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
        ": set data.holdout = 0.01 to hold out a part of the training data, or set "
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
        marks = defaultdict(list)
        for mark in _marks(trained, {path.stat().st_size for path in _paths(held)}):
            marks[mark.size].append(mark)
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
