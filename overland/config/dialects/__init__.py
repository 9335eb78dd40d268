"""Config files of other trainers, rewritten in today's keys before they are validated."""

from __future__ import annotations

from overland.config.dialects import stub, torchtitan
from overland.config.dialects.draft import Translated
from overland.config.source import Entries, KeyPath

__all__ = ["todays_key", "translate"]


def translate(
    entries: Entries, shown: str, below: Entries | None = None, above: Entries | None = None
) -> Translated:
    """Entries in today's keys, notes on what was renamed or has no meaning here, and problems:
    what would train something else here than in the trainer that the file was written for.

    Args:
        entries: What was read.
        shown: Name of the place it was read from.
        below: Entries, in today's keys, that these will be laid over.
        above: Entries that will be laid over these, as they were given.
    """
    first = Translated(entries, [], [])
    if stub.recognises(entries):
        first = stub.translate(entries, shown, above or {})
    second = torchtitan.translate(first.entries, shown, below or {}, above or {})
    return Translated(second.entries, first.notes + second.notes, first.problems + second.problems)


def todays_key(path: KeyPath) -> KeyPath:
    """Where a key of an older torchtitan lives now; any other key is returned as it is."""
    return torchtitan.todays_key(path)
