"""Sources of documents: one class per format, each of which lists chunks and reads them.

`open_source(path)` detects the format. A document is a text, or the token ids of one that is
already tokenized. A chunk is a name, such as `part-3.parquet#7`: a part of a file that is read
front to back.
"""

from overland.data.sources.arrow_parquet import Arrow, Parquet
from overland.data.sources.file_marks import FileMark
from overland.data.sources.jsonl import JsonLines
from overland.data.sources.numpy_tokens import NumpyTokens
from overland.data.sources.open import open_source
from overland.data.sources.source import Document, FileSource, Kind, Source, as_source
from overland.data.sources.text import StandardLibrary, TextFolder

__all__ = [
    "Arrow",
    "Document",
    "FileMark",
    "FileSource",
    "JsonLines",
    "Kind",
    "NumpyTokens",
    "Parquet",
    "Source",
    "StandardLibrary",
    "TextFolder",
    "as_source",
    "open_source",
]
