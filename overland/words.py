"""Formats values and commands for sentences, suggests the name that was meant, and makes untrusted
text safe to print.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# Control characters, surrogates, line and paragraph separators, and marks that reverse the order of
# the letters around them: in a name they are a mistake or an attack.
_REFUSED = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069]")


def control_character(text: str) -> str | None:
    """Returns the first control character in `text`, as Python writes it; None if there is none."""
    found = _REFUSED.search(text)
    return repr(found[0]) if found else None


def visible(text: str) -> str:
    """Returns `text` safe for a terminal: newlines and tabs stay, other control characters are
    escaped."""
    return _REFUSED.sub(lambda one: one[0] if one[0] in "\n\t" else repr(one[0])[1:-1], text)


def on_one_line(text: str) -> str:
    """Returns `text` safe for a line of a table: all control characters are escaped."""
    return _REFUSED.sub(lambda one: repr(one[0])[1:-1], text)


def size(num_bytes: float) -> str:
    """Formats a size in GB, or in MB or kB if that would be 0.0 GB."""
    for unit, bytes_of_unit in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= bytes_of_unit / 10:
            return f"{num_bytes / bytes_of_unit:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def duration(seconds: float) -> str:
    """Formats a duration in at most two units: `3 d 4 h`, `5 min`, `12 s`."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if whole >= 120 else f"{whole} s"


def clock(seconds: float) -> str:
    """Formats a duration like a clock: `0:12`, `1:02:03`; from a day on, `3 d 4 h`."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return duration(whole)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rounded(number: float) -> str:
    """Returns three digits of a number, and all digits of a whole one: 0.0412, 41.2, 4,123."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def number_of(count: int, what: str) -> str:
    """Returns a number with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def counted_words(counts: Mapping[str, int]) -> list[str]:
    """Returns phrases such as `3 too long`, one for each count."""
    return [f"{count:,} {what}" for what, count in sorted(counts.items())]


def in_columns(rows: Mapping[str, object]) -> str:
    """Returns names and values as two columns, a line for each."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows.items())


def first_few(names: Sequence[str], most: int = 1) -> str:
    """Returns the first of these names, and how many more there are: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def any_of(names: Sequence[str], word: str = "or") -> str:
    """Returns names as `a, b or c`."""
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + f" {word} {names[-1]}"


def nearest_name(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the candidate that `name` most likely meant, ignoring case, if one is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for a misspelled name, or all valid names if none is close."""
    names = sorted(valid)
    if near := nearest_name(name, names):
        return f"; did you mean '{near}'?"
    return f"; valid names: {', '.join(names)}" if names else ""


def command(*words: object) -> str:
    """Returns a command of this installation with its arguments, quoted for the shell: by name if
    the PATH finds this installation, otherwise by its path."""
    name, *rest = words
    return " ".join([_program(str(name)), *(shlex.quote(_argument(word)) for word in rest)])


def _argument(word: object) -> str:
    """A path that begins with a dash would be taken for an option."""
    text = str(word)
    return f"./{text}" if isinstance(word, Path) and text.startswith("-") else text


def _program(name: str) -> str:
    here = Path(sys.executable).parent / name  # next to this Python, where pip installs it
    if not here.exists():
        return name if shutil.which(name) else f"{shlex.quote(sys.executable)} -m {name}"
    found = shutil.which(name)
    if found is not None and os.path.realpath(found) == os.path.realpath(here):
        return name
    if here.is_relative_to(Path.cwd()):
        return shlex.quote(str(here.relative_to(Path.cwd())))
    return shlex.quote(str(here))


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{' …' if len(ranks) > 8 else ''}"
