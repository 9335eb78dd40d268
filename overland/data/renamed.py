"""Data that a run knows under another name: its folder was renamed, or its table in the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from overland.data.layout import read_layout
from overland.data.plan import Plan
from overland.errors import DataError

T = TypeVar("T")


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


def refuse_same_bytes(name: str, corpus: Path, former: str, before: Path) -> None:
    """Raises where a new source has the files of one that is gone, under names of their own: they
    would be read again from their beginning."""
    if _contents(corpus) == _contents(before) != []:
        raise DataError(
            f"{name} holds the same bytes as {former}, which this run was trained on, in files of "
            "other names, so they would be read again from their beginning: give the files their "
            "names back, or start a new run with --resume none"
        )


def _contents(corpus: Path) -> list[tuple[int, str]]:
    marks = read_layout(corpus).all_chunks()[1].values()
    return [(mark.size, mark.sample) for mark in marks]
