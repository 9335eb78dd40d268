"""Decodes tokens to text incrementally, never emitting half a character or part of a stop
string."""

from __future__ import annotations

from collections.abc import Sequence

from overland.data.tokenizer import Tokenizer

HALF = "\ufffd"  # how bytes are shown that are not (yet) a character
MOST_BYTES = 4  # in a character
CONTEXT = 4  # preceding tokens, which decide whether a space comes in between
LONGEST = 64  # tokens decoded at once; if more of them form no character, they are garbage


class TextStream:
    """The text of a sequence of tokens. `before` are the tokens that it continues."""

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.is_stopped = False
        self._ids = list(before[-CONTEXT:])
        self._given = len(tokenizer.decode(self._ids))
        """Characters of the text of `_ids` that were already returned, or belong to `before`."""
        self._held = ""
        """Text that may be the start of a stop string."""

    def take(self, ids: Sequence[int]) -> str:
        """Returns the text that the next tokens add, as far as it is certain."""
        self._ids += ids
        text = self.tokenizer.decode(self._ids)
        end = len(text.rstrip(HALF)) if text.endswith(HALF) else len(text)
        end = max(end, len(text) - MOST_BYTES)  # earlier bytes can no longer become a character
        new = text[self._given : end]
        self._given = max(self._given, end)
        if end == len(text) or len(self._ids) > LONGEST:
            self._ids = self._ids[-CONTEXT:]
            left = len(text) - self._given
            self._given = len(self.tokenizer.decode(self._ids)) - left
        return self._without_stop(new)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        if self.is_stopped:
            return ""
        new = self._without_stop(self.tokenizer.decode(self._ids)[self._given :])
        self._given = len(self.tokenizer.decode(self._ids))
        rest, self._held = new + self._held, ""
        return rest

    def _without_stop(self, new: str) -> str:
        if self.is_stopped:
            return ""
        text, self._held = self._held + new, ""
        places = ((text.find(one), one) for one in self.stop)
        if found := [(place + len(one), place) for place, one in places if place >= 0]:
            self.is_stopped = True
            return text[: min(found)[1]]  # the one that is complete first
        held = max((_overlap(text, one) for one in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Returns the number of characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
