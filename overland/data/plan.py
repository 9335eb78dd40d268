"""The plan of a run's data: sources, seed, and segments.

A segment says how batches are made from some batch on: global batch size, sequence length, packing,
weights. Changing one of these in the middle of a run appends a segment; what was read stays read.
A plan is small, is kept in every checkpoint, and with the number of a batch says exactly which
tokens it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from overland.data.pack import LastBlock, Packing
from overland.data.sources.marks import digest_of
from overland.errors import DataError

MixedBy = Literal["rows", "tokens"]
FORMAT = 1
LENGTH_STEP = 64  # rows that are cut to the longest of them have a multiple of so many tokens
T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """How batches are made from `first_batch` on, until the next segment."""

    first_batch: int
    global_batch_size: int
    seq_len: int
    weights: Mapping[str, float]
    packing: Packing = "pack"
    last_block: LastBlock = "pad"
    document_mask: bool = False
    pad_id: int = 0
    rest_rules: int = 2
    """How blocks are cut again that the segment before has left unread: under 1, which a plan of an
    earlier version means, the pieces stayed apart and lost the predictions between them."""
    epochs: float | None = None
    """After so many epochs of its one source, the rows that fill up a batch count nothing."""
    group_by_length: bool = False
    """Whether rows of similar length share a batch, which is cut to the longest of them."""

    def for_samples(self) -> Segment:
        """Returns the segment for samples that are arrays: each is a row, whatever the config says
        about tokens."""
        return replace(
            self,
            seq_len=1,
            packing="trunc",
            last_block="pad",
            document_mask=False,
            pad_id=0,
            group_by_length=False,
        )


@dataclass(frozen=True)
class PlannedSource:
    fingerprint: str
    max_epochs: int | None = None
    holdout: float = 0.0
    """Share of its documents that is kept out of training."""


@dataclass(frozen=True)
class Plan:
    """Which tokens every batch of a run holds."""

    seed: int
    window_documents: int
    mixture: MixedBy
    sources: Mapping[str, PlannedSource]
    segments: tuple[Segment, ...]

    @property
    def fingerprint(self) -> str:
        return digest_of(self.to_json())

    def segment(self, batch: int) -> Segment:
        return next(one for one in reversed(self.segments) if one.first_batch <= batch)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **asdict(self),
            "sources": {name: _source_to_json(one) for name, one in self.sources.items()},
            "segments": [_to_json(one) for one in self.segments],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        values = dict(data)
        if values.pop("format", None) != FORMAT:
            raise DataError("the plan of the data was written by another version of Overland")
        sources = {name: PlannedSource(**one) for name, one in values.pop("sources").items()}
        segments = tuple(Segment(**{"rest_rules": 1, **one}) for one in values.pop("segments"))
        return cls(sources=sources, segments=segments, **values)

    def continued(self, wanted: Plan, batch: int) -> Plan:
        """Returns this plan up to `batch`, and from there on as `wanted` says, which has one
        segment."""
        check_same_order(self, wanted.seed, wanted.window_documents, wanted.mixture)
        for name, source in wanted.sources.items():
            if name in self.sources and self.sources[name].fingerprint != source.fingerprint:
                raise ChangedSource(name)
            if name in self.sources:
                check_same_holdout(name, self.sources[name].holdout, source.holdout)
        kept = tuple(one for one in self.segments if one.first_batch < batch)
        new = replace(wanted.segments[-1], first_batch=batch)
        if not kept or differences(kept[-1], new):
            kept = (*kept, new)
        sources = {**self.sources, **wanted.sources}
        return replace(self, sources=sources, segments=kept)


def check_same_order(plan: Plan, seed: int, window_documents: int, mixture: str) -> None:
    """Raises where what decides the order of all data is not what the run began with."""
    for what, ours, theirs in (
        ("debug.seed", plan.seed, seed),
        ("data.window_documents", plan.window_documents, window_documents),
        ("data.mixture", plan.mixture, mixture),
    ):
        if ours != theirs:
            raise DataError(
                f"{what} is {theirs}, and this run began with {ours}: it decides the order of all "
                f"data, so it cannot change in the middle of a run; set it back"
            )


def check_same_holdout(name: str, ours: float, theirs: float) -> None:
    if ours != theirs:
        raise DataError(
            f"data.holdout is a share of {theirs:.6g} of {name}, and this run began with "
            f"{ours:.6g}: it would validate on documents that it was trained on; set it back, or "
            "start a new run with --resume none"
        )


class ChangedSource(DataError):
    """Raised when a source is not what the run was trained on."""

    def __init__(self, name: str, changes: tuple[str, ...] = ()) -> None:
        self.name = name
        what = "; ".join(changes) or "another corpus, column, tokenizer or policy stands behind it"
        super().__init__(
            f"the data source {name} is not what this run was trained on: {what}. Restore the "
            "source as it was, add the new data as another source, or start a new run with "
            "--resume none"
        )


def differences(before: Segment, after: Segment) -> list[str]:
    """Lists what a new segment changes, for the user."""
    old, new = asdict(before), asdict(after)
    return [
        f"{key} {old[key]} → {new[key]}"
        for key in new
        if key not in ("first_batch", "rest_rules") and old[key] != new[key]
    ]


def former_names(plan: Plan, wanted: Plan) -> dict[str, str]:
    """The name that a plan has for each source whose name is new and whose content is not."""
    gone = {
        source.fingerprint: name
        for name, source in plan.sources.items()
        if name not in wanted.sources
    }
    new = {
        name: one.fingerprint for name, one in wanted.sources.items() if name not in plan.sources
    }
    found = ((name, gone.pop(fingerprint, None)) for name, fingerprint in new.items())
    return {name: former for name, former in found if former is not None}


def under(names: Mapping[str, str], values: Mapping[str, T]) -> dict[str, T]:
    return {names.get(name, name): value for name, value in values.items()}


def plan_under(names: Mapping[str, str], plan: Plan) -> Plan:
    segments = tuple(replace(one, weights=under(names, one.weights)) for one in plan.segments)
    return replace(plan, sources=under(names, plan.sources), segments=segments)


def _source_to_json(source: PlannedSource) -> dict[str, Any]:
    """Leaves out what earlier plans did not have, so that their fingerprint stays."""
    values = asdict(source)
    if not source.holdout:
        del values["holdout"]
    return values


def _to_json(segment: Segment) -> dict[str, Any]:
    """Writes a segment as the version that made it did, so that a plan's fingerprint stays."""
    values = asdict(segment)
    if segment.rest_rules == 1:
        del values["rest_rules"]
    if segment.epochs is None:
        del values["epochs"]
    if not segment.group_by_length:
        del values["group_by_length"]
    return values
