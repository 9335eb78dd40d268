"""Config files of other trainers, translated to current keys before they are validated.

Start with `translate`, which recognizes whose file it is. Each dialect is a module that writes into
a `Draft`.
"""

from __future__ import annotations

from overland.apps.dialects.axolotl import is_axolotl, translate_axolotl
from overland.apps.dialects.lessons import lesson as lesson
from overland.apps.dialects.stub import is_stub, translate_stub
from overland.apps.dialects.torchtitan import todays_key as todays_key
from overland.apps.dialects.torchtitan import translate_torchtitan
from overland.config.source import Entries, Translated


def translate(entries: Entries, shown: str, below: Entries, above: Entries) -> Translated:
    """Returns entries in current keys, notes on keys that were renamed or have no effect, and
    problems: keys that would train something else here than in the trainer the file is for.

    Args:
        entries: What was read.
        shown: Name of the place it was read from.
        below: Entries, in current keys, that these will override.
        above: Entries that will override these, untranslated.
    """
    first = Translated(entries, [], [])
    if is_stub(entries):
        first = translate_stub(entries, shown, above)
    elif is_axolotl(entries):
        first = translate_axolotl(entries, shown, above)
    second = translate_torchtitan(first.entries, shown, below, above)
    return Translated(
        second.entries,
        first.notes + second.notes,
        first.problems + second.problems,
        first.routine | second.routine,
        first.about or second.about,
    )
