"""On which line each key of a TOML text stands; `tomllib` keeps no positions.

The text may be broken: the index then holds what came before, and goes on at the next line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

KeyPath = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'", re.DOTALL
)


@dataclass
class LineIndex:
    """Line of each key and table, and the keys given twice: (path, second line, first line)."""

    lines: dict[KeyPath, int] = field(default_factory=dict)
    repeats: list[tuple[KeyPath, int, int]] = field(default_factory=list)


def index_lines(text: str) -> LineIndex:
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.index = LineIndex()
        self.at = 0
        self.values: set[KeyPath] = set()
        self.tables: set[KeyPath] = set()
        self.counts: dict[KeyPath, int] = {}

    def scan(self) -> LineIndex:
        prefix: KeyPath = ()
        while self._skip(_BLANK) < len(self.text):
            if self._peek("["):
                prefix = self._table_header()
            elif not self._key_value(prefix):
                self._next_line()
        return self.index

    def _table_header(self) -> KeyPath:
        line, many = self._line(), self._peek("[[")
        self.at += 2 if many else 1
        path = self._key()
        self._next_line()
        if many:
            # Each table of an array gets its number, so that equal keys are no repeats.
            number = self.counts[path] = self.counts.get(path, -1) + 1
            self.index.lines.setdefault(path, line)
            path = (*path, str(number))
        self._record(path, line, self.tables)
        return path

    def _key_value(self, prefix: KeyPath) -> bool:
        line, key = self._line(), self._key()
        self._skip(_SPACE)
        if not key or not self._peek("="):
            return False
        self.at += 1
        path = (*prefix, *key)
        for end in range(len(prefix) + 1, len(path)):
            self.index.lines.setdefault(path[:end], line)
        self._record(path, line, self.values)
        self._skip(_SPACE)
        self._value(path)
        return True

    def _value(self, path: KeyPath) -> None:
        if self._peek("{"):
            self.at += 1
            while self._skip(_BLANK) < len(self.text) and not self._peek("}"):
                if self._peek(","):
                    self.at += 1
                elif not self._key_value(path):
                    return
            self.at += 1
        elif self._peek("["):
            self._array()
        else:
            self._scalar()

    def _array(self) -> None:
        depth = 0
        while self._skip(_BLANK) < len(self.text):
            if self._string():
                continue
            depth += self.text[self.at] in "[{"
            depth -= self.text[self.at] in "]}"
            self.at += 1
            if depth == 0:
                return

    def _scalar(self) -> None:
        if not self._string():
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _string(self) -> bool:
        found = _STRINGS.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found is not None

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            for pattern in (_BARE, _BASIC, _LITERAL):
                found = pattern.match(self.text, self.at)
                if found:
                    break
            else:
                return tuple(parts)
            self.at = found.end()
            parts.append(_unquote(found.group()))
            self._skip(_SPACE)
            if not self._peek("."):
                return tuple(parts)
            self.at += 1

    def _record(self, path: KeyPath, line: int, seen: set[KeyPath]) -> None:
        if path in self.values or path in seen:
            self.index.repeats.append((path, line, self.index.lines[path]))
        seen.add(path)
        self.index.lines.setdefault(path, line)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _next_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end + 1

    def _peek(self, what: str) -> bool:
        return self.text.startswith(what, self.at)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self.at)
        assert found is not None  # both patterns match the empty string
        self.at = found.end()
        return self.at


def _unquote(part: str) -> str:
    if part.startswith("'"):
        return part[1:-1]
    if part.startswith('"'):
        try:
            return str(json.loads(part))
        except ValueError:
            return part[1:-1]
    return part
