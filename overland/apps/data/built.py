"""A built corpus as a source, to describe it or to evaluate on it. Training reads its shards
themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.layout import read_layout
from overland.data.shard import TOKENS, Shard, open_shard, read_counts
from overland.data.sources.compression import reading
from overland.data.sources.source import Document, FileSource, Kind
from overland.errors import DataError


class BuiltCorpus(FileSource):
    """A chunk is a shard, whose checksum is verified when it is read."""

    format = "corpus"
    kind: Kind = "tokens"
    fields: dict[str, Any] | None
    channels: dict[str, str] | None

    def __init__(self, root: Path, skip_bad: bool = False) -> None:
        self.layout = read_layout(root)
        if not self.layout.sizes_path.exists():
            made = len(self.layout.made())
            raise DataError(
                f"{root} has only {made:,} of its {self.layout.num_shards:,} shards: run the same "
                "`overland data build` again to make the rest"
            )
        self.kind = "arrays" if self.layout.arrays is not None else "tokens"
        self.fields, self.channels = self.layout.fields, self.layout.channels
        paths = map(self.layout.shard_path, range(self.layout.num_shards))
        super().__init__(root, [str(path.relative_to(root)) for path in paths], skip_bad)

    def num_documents(self, chunk: str) -> int:
        with reading(self.root / chunk):
            return read_counts(self.root / chunk)[0]

    def read(self, chunk: str) -> Iterator[Document]:
        with reading(self.root / chunk):
            shard = open_shard(self.root / chunk)
            shard.verify_index()
        for number in range(shard.info.num_documents):
            yield self._document(shard, number)

    def _document(self, shard: Shard, number: int) -> Document:
        document = shard.document(number)
        if self.layout.arrays is not None:
            return self.layout.arrays.decode(document)
        tokens = document.astype(np.int64)
        if not shard.channels:
            return tokens
        channels = {name: shard.document(number, name) for name in shard.channels}
        return {TOKENS: tokens, **channels}
