"""Trains a byte-level BPE tokenizer on the text of a run that has none."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from overland.config.derived import model_name
from overland.config.schema import Data as Settings
from overland.config.schema import JobConfig
from overland.data.arrays import require_fields
from overland.data.sources.file_marks import digest_of
from overland.data.sources.source import BadDocument, Source
from overland.data.tokenizer_encoders import need_for_text
from overland.data.wanted import CHOICES, WantedSource, taken_by_model
from overland.errors import DataError
from overland.files import publish

TOKENIZER_SIZE = 4096
SMALLEST = 257  # every byte, and the end-of-document token
# Most documents that a tokenizer is trained on; more change little at these vocabulary sizes.
TOKENIZER_DOCUMENTS = 20_000
END_OF_TEXT = "<|endoftext|>"


def trained_tokenizer(
    config: JobConfig,
    wanted: Mapping[str, WantedSource],
    vocab_size: int | None,
    report: Callable[[str], None],
    trains: bool,
) -> str | None:
    """Returns the path of a tokenizer for the text among the sources, or None without text."""
    data, size = config.data, trained_size(config.data, vocab_size)
    path = trained_path(data, wanted, size)
    if path.exists() or not trains:
        return str(path) if path.exists() else None
    texts = [source for one in wanted.values() if (source := _text(one))]
    if not texts:
        return None
    report(f"training a tokenizer of {size:,} tokens (data.vocab_size) on {', '.join(wanted)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    train_tokenizer(_documents(texts), size, beside)
    publish(beside, path)
    return str(path)


def trained_size(data: Settings, vocab_size: int | None) -> int:
    """Returns the vocabulary size of a tokenizer to train, given that of the model."""
    if data.vocab_size is not None:
        return data.vocab_size
    return TOKENIZER_SIZE if vocab_size is None else min(TOKENIZER_SIZE, vocab_size)


def _text(wanted: WantedSource) -> Source | None:
    """Returns the source if it is text that is not tokenized yet."""
    if wanted.is_made or wanted.built:
        return None
    source, config = wanted.open(), wanted.config
    if source.kind != "text":
        return None
    require_fields(wanted.name, None, taken_by_model(config), model_name(config))
    return source


def _documents(sources: list[Source]) -> Iterator[str]:
    for source in sources:
        texts = (str(text) for chunk in source.chunks() for text in source.read(chunk))
        try:
            yield from itertools.islice(texts, TOKENIZER_DOCUMENTS // len(sources))
        except BadDocument as error:
            raise DataError(f'{error}; data.bad_documents = "skip" skips it') from None


def trained_path(data: Settings, wanted: Mapping[str, WantedSource], size: int) -> Path:
    """Returns the path of the tokenizer that is trained on these sources."""
    names = list(wanted)
    places = [str(one.folder or one.asked.dataset) for one in wanted.values()]
    choices = [[getattr(one.asked, key) for key in CHOICES] for one in wanted.values()]
    parts = [names, places, *([choices] if any(map(any, choices)) else [])]
    label = f"{names[0] if len(names) == 1 else 'mixture'}-{digest_of(parts)[:8]}"
    return Path(data.folder).expanduser() / f"tokenizer-{label}-{size}" / "tokenizer.json"


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE tokenizer on the texts and writes it as tokenizer.json."""
    library = need_for_text("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
