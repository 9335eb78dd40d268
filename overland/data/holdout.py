"""Holds out some documents for validation, chosen by their content.

Each document has a mark, a keyed hash of its tokens without BOS and EOS, and is held out if the
mark is below a limit. All sources of a run have the same limit, so all copies of a document are on
the same side, wherever they are. A share gives the limit at once. A number of documents is exact:
the limit lies between the marks of the last document that is held out and the next one, so all
documents have to be marked before the first step. The limit is fixed when a run begins. A document
stays on its side when files are moved or shuffled, and whatever the seed. Shards contain all
documents; the side of each is decided when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.config.schema import Data as Settings
from overland.data.corpus import Corpus
from overland.data.plan import kept_plan
from overland.errors import DataError
from overland.words import any_of, number_of

FEW_SHARDS = 2  # up to 8,192 documents, which have to be tokenized before the first step anyway
# A number of documents is exact for a source of up to this many shards (65,536 documents or 1 GiB
# of text, a few minutes of one core): larger ones have to be built first.
COUNTED_SHARDS = 16


def held_out_documents(corpus: Corpus, number: int, share: float) -> npt.NDArray[np.bool_]:
    """Returns which documents of a shard are held out."""
    return corpus.shard(number).marks < np.uint64(limit_of(share))


def limit_of(share: float) -> int:
    return min(round(share * 2**64), 2**64 - 1)


def share_of(data: Settings, corpora: Mapping[str, Corpus], report: Callable[[str], None]) -> float:
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
            f"be tokenized before the first step, and {name} is too large for that: set a share, "
            f"such as data.holdout = 0.01, or build it first with `overland data build`"
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


def kept_share(run: Path, data: Settings) -> float | None:
    """Returns the held-out share of an existing run that holds out a number of documents, or
    None."""
    kept = kept_plan(run)
    before = kept.get("holdout")
    if not data.holdout or before is None:
        return None
    shares = [one.get("holdout", 0.0) for one in kept["plan"]["sources"].values()]
    if before != data.holdout:
        raise DataError(
            f"data.holdout is {data.holdout}, but this run began with {before}: it would validate "
            "on documents that it was trained on; set it back, or start a new run with --resume "
            "none"
        )
    return None if isinstance(data.holdout, float) else max(shares) or None


def require_both_sides(name: str, share: float, held_out: int, total: int) -> None:
    """Raises an error unless there are documents to train on and documents to validate on."""
    if total and held_out in (0, total):
        side, fix = ("no document", "raise it") if held_out == 0 else ("every document", "lower it")
        raise DataError(
            f"data.holdout holds out {side} of {name} (a share of {share:.3g} of {total:,}): "
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
            sides = held_out_documents(corpus, number, share)
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
