"""The plan of a run's data: sources, seed, and segments with batch size, sequence length, packing
and weights; decides which changes begin a new segment, and which are refused.

A segment says how batches are made from some batch on: global batch size, sequence length, packing,
weights. Changing one of these in the middle of a run appends a segment; data that was read is not
read again. A plan is small, is stored in every checkpoint, and determines exactly which tokens any
given batch contains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from overland.config.errors import show_value
from overland.data.pack import LastBlock, Packing
from overland.data.sources.file_marks import digest_of
from overland.errors import DataError
from overland.run_folder import PLAN
from overland.words import any_of

MixedBy = Literal["sequences", "documents"]
FORMAT = 1
REST_RULES = 2  # part of every plan; increased when blocks left unread are cut again in another way
# How this format writes them: fingerprints of plans are made of it.
STORED: dict[MixedBy, str] = {"sequences": "tokens", "documents": "rows"}
LATER = ("holdout", "epochs", "group_by_length")
LENGTH_STEP = 64  # rows cut to the longest of them have a multiple of this many tokens
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
    rest_rules: int = REST_RULES
    epochs: float | None = None
    """After this many epochs of its only source, the rows that fill the batch are masked."""
    group_by_length: bool = False
    """Whether rows of similar length share a batch, which is cut to the longest of them."""

    def for_samples(self) -> Segment:
        """Returns the segment for samples of arrays: each is a row, whatever the config says about
        tokens."""
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
    """Share of its documents that is held out of training."""


@dataclass(frozen=True)
class Plan:
    """Determines the tokens of every batch of a run."""

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
            "mixture": STORED[self.mixture],
            "sources": {name: _to_json(one) for name, one in self.sources.items()},
            "segments": [_to_json(one) for one in self.segments],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        values = dict(data)
        rules = {one.get("rest_rules") for one in data["segments"]}
        if values.pop("format", None) != FORMAT or rules != {REST_RULES}:
            raise DataError(
                "the data plan was written by another version of Overland: resume with that version"
            )
        sources = {name: PlannedSource(**one) for name, one in values.pop("sources").items()}
        segments = tuple(Segment(**one) for one in values.pop("segments"))
        (mixture,) = (word for word, stored in STORED.items() if stored == values["mixture"])
        return cls(**{**values, "mixture": mixture, "sources": sources, "segments": segments})

    def continued(self, wanted: Plan, batch: int) -> Plan:
        """Returns this plan up to `batch`, and from there on that of `wanted`, which has one
        segment."""
        check_same_order(self, wanted.seed, wanted.window_documents, wanted.mixture)
        for name, source in wanted.sources.items():
            if name in self.sources and self.sources[name].fingerprint != source.fingerprint:
                raise ChangedSource(name)
            if name in self.sources:
                check_same_holdout(self.sources[name].holdout, source.holdout, f" for {name}")
        kept = tuple(one for one in self.segments if one.first_batch < batch)
        new = replace(wanted.segments[-1], first_batch=batch)
        if not kept or differences(kept[-1], new):
            kept = (*kept, new)
        sources = {**self.sources, **wanted.sources}
        return replace(self, sources=sources, segments=kept)


def check_same_order(plan: Plan, seed: int, window_documents: int, mixture: str) -> None:
    """Raises an error if a setting that determines the order of all data has changed."""
    for what, ours, theirs in (
        ("debug.seed", plan.seed, seed),
        ("data.window_documents", plan.window_documents, window_documents),
        ("data.mixture", plan.mixture, mixture),
    ):
        if ours != theirs:
            raise DataError(
                f"{what} is {theirs}, but this run began with {ours}: it determines the order of "
                f"all data, so it cannot change in the middle of a run; set it back"
            )


def check_same_holdout(ours: float, theirs: float, of: str = "") -> None:
    """Raises an error if another share, or another number of documents, is held out than when a run
    began; `of` says of what, for the message."""
    if ours != theirs:
        raise DataError(
            f"data.holdout is {theirs!r}{of}, but this run began with {ours!r}: it would "
            "validate on documents that it was trained on; set it back, or start a new run with "
            "--resume none"
        )


class ChangedSource(DataError):
    """Raised when a source is not what the run was trained on."""

    def __init__(
        self, name: str, changes: tuple[str, ...] = (), settings: Mapping[str, Any] | None = None
    ) -> None:
        """`settings` are the keys that changed, with the values that they had."""
        self.name = name
        what = "; ".join(changes) or "its corpus, column, tokenizer or policy is different"
        way_out = "Restore the source as it was, add the new data as another source,"
        if settings and len(settings) == len(changes):  # the data itself is the same
            back = [
                f"{key} back" + ("" if value is None else f" to {show_value(value)}")
                for key, value in settings.items()
            ]
            way_out = f"Set {any_of(back, 'and')},"
        super().__init__(
            f"the data source {name} is not what this run was trained on: {what}. {way_out} or "
            "start a new run with --resume none"
        )


def kept_plan(run: Path) -> dict[str, Any]:
    """Returns what a run wrote down about its data; nothing before its first step."""
    path = run / PLAN
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        kept = None
    plan = kept.get("plan") if isinstance(kept, dict) else None
    parts = [plan.get("sources"), plan.get("segments")] if isinstance(plan, dict) else []
    if [*map(type, parts)] != [dict, list]:
        raise DataError(
            f"{path} is damaged: it contains no data plan. Delete it, and the run writes it again "
            "from its checkpoint"
        )
    return dict(kept)


def differences(before: Segment, after: Segment) -> list[str]:
    """Lists what a new segment changes, for messages."""
    old, new = asdict(before), asdict(after)
    return [
        f"{key} {old[key]} → {new[key]}"
        for key in new
        if key != "first_batch" and old[key] != new[key]
    ]


def former_names(plan: Plan, wanted: Plan) -> dict[str, str]:
    """Returns the former name of each source that is new by name but not by content."""
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


def _to_json(one: Segment | PlannedSource) -> dict[str, Any]:
    """Leaves out what earlier plans did not have, so that their fingerprints stay the same."""
    usual = {field.name: field.default for field in fields(one)}
    values = asdict(one).items()
    return {name: value for name, value in values if name not in LATER or value != usual[name]}
