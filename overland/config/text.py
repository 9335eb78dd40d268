"""Text from others, before it reaches a script, a path or a terminal."""

from __future__ import annotations

import unicodedata

# Control characters, half characters, and what ends a line or a paragraph: in a name they are a
# mistake or an attack.
_REFUSED = ("Cc", "Cs", "Zl", "Zp")


def control_character(text: str) -> str | None:
    """The first one in `text`, as Python writes it; None if there is none."""
    for letter in text:
        if unicodedata.category(letter) in _REFUSED:
            return repr(letter)
    return None


def visible(text: str) -> str:
    """`text` as a terminal may show it: new lines and tabs stay, and nothing moves the cursor."""
    return "".join(
        letter if letter in "\n\t" or control_character(letter) is None else repr(letter)[1:-1]
        for letter in text
    )
