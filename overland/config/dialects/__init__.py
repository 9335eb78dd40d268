"""Config files of other trainers, rewritten in today's keys before they are validated."""

from __future__ import annotations

from overland.config.dialects import stub, torchtitan
from overland.config.source import Entries, KeyPath

__all__ = ["todays_key", "translate"]


def translate(
    entries: Entries, shown: str, below: Entries | None = None
) -> tuple[Entries, list[str]]:
    """Entries in today's keys, and notes on what was renamed or has no meaning here.

    Args:
        entries: What was read.
        shown: Name of the place it was read from.
        below: Entries, in today's keys, that these will be laid over.
    """
    notes: list[str] = []
    if stub.recognises(entries):
        entries, notes = stub.translate(entries, shown)
    entries, more = torchtitan.translate(entries, shown, below or {})
    return entries, notes + more


def todays_key(path: KeyPath) -> KeyPath:
    """Where a key of an older torchtitan lives now; any other key is returned as it is."""
    return torchtitan.todays_key(path)
