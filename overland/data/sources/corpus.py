"""A built corpus as a source of tokens: `overland data inspect` reads it, and so may a build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from overland.data.errors import DataError
from overland.data.layout import read_layout
from overland.data.shard import open_shard, read_counts
from overland.data.sources.compression import reading
from overland.data.sources.source import FileSource, Kind, Tokens


class BuiltCorpus(FileSource):
    """A chunk is a shard; its checksum is verified as it is read."""

    format = "corpus"
    kind: Kind = "tokens"

    def __init__(self, root: Path, skip_bad: bool = False) -> None:
        self.layout = read_layout(root)
        if not self.layout.sizes_path.exists():
            made = len(self.layout.made())
            raise DataError(
                f"{root} has {made:,} of its {self.layout.num_shards:,} shards: the same "
                "`overland data build` again makes the rest"
            )
        paths = map(self.layout.shard_path, range(self.layout.num_shards))
        super().__init__(root, [str(path.relative_to(root)) for path in paths], skip_bad)

    def num_documents(self, chunk: str) -> int:
        with reading(self.root / chunk):
            return read_counts(self.root / chunk)[0]

    def read(self, chunk: str) -> Iterator[Tokens]:
        with reading(self.root / chunk):
            shard = open_shard(self.root / chunk)
            shard.verify()
        for number in range(shard.info.num_documents):
            yield shard.document(number).astype(np.int64)
