"""A file of lines that grows, read once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CHUNK = 4 << 20


class Tail:
    """What was appended since the last look. A file that was replaced or cut is begun again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset, self._rest = -1, 0, b""

    def chunks(self) -> Iterator[tuple[list[bytes], int, bool]]:
        """(whole lines, bytes still to come, whether everything before is void). A last line
        without an end is being written: it comes when it is complete."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                is_other = stat.st_ino != self._inode or stat.st_size < self._offset
                if is_other:
                    self._forget()
                    self._inode = stat.st_ino
                file.seek(self._offset)
                while data := file.read(CHUNK):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    yield lines, max(0, stat.st_size - self._offset), is_other
                    is_other = False
                if is_other:  # it is empty now
                    yield [], 0, True
        except FileNotFoundError:
            if self._inode != -1:
                self._forget()
                yield [], 0, True
