"""The data a model is evaluated on: documents from any source that overland.data reads.

A dataset is given as a path, as a name that `training.dataset` accepts, or as NAME=PATH. A run also
has its own validation sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.apps.data.built import BuiltCorpus
from overland.checks.files import C4, fetch_line
from overland.config.schema import Data, DataSource, JobConfig
from overland.data.corpora import Preparer
from overland.data.corpus import Corpus
from overland.data.holdout import foreign_validation
from overland.data.layout import CorpusLayout
from overland.data.prepare import validation_data
from overland.data.registry import MADE, is_built_in, source_names
from overland.data.sft import ConversationSource
from overland.data.shard import TOKENS, WEIGHTS
from overland.data.sources.compression import times_smaller
from overland.data.sources.file_marks import FileMark, digest_of
from overland.data.sources.jsonl import JsonLines
from overland.data.sources.source import BadDocument, FileSource, Kind, Source
from overland.data.sources.source import Document as Raw
from overland.data.tokenizer import Tokenizer
from overland.data.wanted import find_folder, held_out_sources, open_by_name, validates_on_holdout
from overland.errors import ChoiceRequired, DataError
from overland.words import any_of

Ids = npt.NDArray[np.int64]
CHARACTERS_PER_TOKEN = 4  # approximate, to detect long documents before they are tokenized


@dataclass(frozen=True)
class Document:
    """A text, or token ids."""

    text: str | None = None
    ids: Ids | None = None
    is_bare: bool = True
    """Whether it has no special tokens yet, so that BOS may be added."""
    counts: npt.NDArray[np.bool_] | None = None
    """Which tokens are scored; None: all of them."""

    @property
    def size(self) -> int:
        """Approximate number of tokens."""
        return len(self.text or "") // CHARACTERS_PER_TOKEN if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class EvaluationSet:
    """A named set of documents."""

    name: str
    open: Callable[[], Source]

    @cached_property
    def source(self) -> Source:
        source = self.open()
        kind = source.kind
        if kind not in ("text", "tokens"):
            raise DataError(f"{self.name} contains {kind}, but perplexity needs text or token ids")
        return source

    @property
    def layout(self) -> CorpusLayout | None:
        """How it was tokenized, if it is a corpus."""
        return self.source.layout if isinstance(self.source, BuiltCorpus | HeldOut) else None

    @property
    def takes_prefix(self) -> bool:
        """Whether its documents have no special tokens yet: text, or a corpus made of text."""
        return bool((self.layout or self.source).kind == "text")

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Yields the documents in order, at most `limit` of them."""
        chunks = self.source.chunks()
        found = (self._document(one, chunk) for chunk in chunks for one in self.source.read(chunk))
        try:
            yield from islice(found, limit)
        except BadDocument as error:
            raise DataError(f"{error}; use --skip-bad to skip it") from None

    def about_documents(self) -> int | None:
        """Estimates the number of documents, if that is possible without reading them."""
        source = self.source
        if isinstance(source, ConversationSource):
            source = source.records
        if isinstance(source, JsonLines) and source.line_bytes:
            paths = (source.root / file for file in source.files)
            text = sum(path.stat().st_size * times_smaller(path.name) for path in paths)
            return round(text / source.line_bytes)
        if not isinstance(source, FileSource):
            return None
        counts = [source.num_documents(chunk) for chunk in source.chunks()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def fingerprint(self, marks: Mapping[str, FileMark]) -> str:
        """Returns a fingerprint that changes with the data; for a custom source that has none, only
        with the list of its chunks."""
        if marks:
            return self.source.fingerprint(marks)
        return digest_of([self.source.identity(self.name), *self.source.chunks()])

    def require_unchanged(self, marks: Mapping[str, FileMark]) -> None:
        if changes := self.source.changes_since(marks):
            raise DataError(
                f"{self.name} changed during the evaluation: {changes[0]}. No result was saved; "
                "evaluate again"
            )

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises an error for a corpus that was tokenized with another tokenizer."""
        layout = self.layout
        if layout is None or layout.tokenizer is None or layout.made_by is not None:
            return
        add_bos = layout.add_bos if tokenizer.bos_id is not None else False
        add_eos = layout.add_eos if tokenizer.eos_id is not None else False
        same = Tokenizer(tokenizer.path, add_bos=add_bos, add_eos=add_eos)
        if same.fingerprint != layout.tokenizer:
            raise DataError(
                f"{layout.folder} was not tokenized with the model's tokenizer ({tokenizer.path}): "
                "evaluate on the original text"
            )

    def _document(self, raw: Raw, chunk: str) -> Document:
        if isinstance(raw, str):
            return Document(text=raw)
        layout = self.layout
        ids, weights = (raw[TOKENS], raw.get(WEIGHTS)) if isinstance(raw, Mapping) else (raw, None)
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{self.name}, {chunk}: expected documents of text or token ids, got "
                f"{type(raw).__name__}"
            )
        ids = ids.astype(np.int64)
        if weights is not None:
            return Document(ids=ids, is_bare=False, counts=np.asarray(weights) > 0)
        if layout is not None and layout.kind == "text":
            return Document(ids=ids[int(layout.add_bos) : len(ids) - int(layout.add_eos)])
        return Document(ids=ids, is_bare=False)


class HeldOut(Source):
    """The documents that `data.holdout` excludes from training. A chunk is a shard."""

    kind: Kind = "tokens"

    def __init__(self, corpus: Corpus, share: float) -> None:
        self.corpus, self.share, self.layout = corpus, share, corpus.layout

    @property
    def place(self) -> str:
        return f"{self.layout.source}, {self.share:.3%} held out"

    def chunks(self) -> list[str]:
        return [str(number) for number in range(self.corpus.num_shards)]

    def read(self, chunk: str) -> Iterator[Any]:
        shard = self.corpus.shard(int(chunk))
        for number in np.flatnonzero(shard.held_out(self.share)):
            ids = shard.document(int(number)).astype(np.int64)
            if WEIGHTS not in shard.channels:
                yield ids
                continue
            yield {TOKENS: ids, WEIGHTS: shard.document(int(number), WEIGHTS)}

    def identity(self, name: str) -> str:
        return digest_of([self.corpus.fingerprint, self.share])


def sets_of(
    named: Sequence[str], config: JobConfig | None, choices: DataSource, skip_bad: bool = False
) -> list[EvaluationSet]:
    """Returns the datasets given as path, name or NAME=PATH. For a run, names from its config work
    too. `choices`: column, subset and split."""
    data = config.data if config is not None else Data()
    data = data.model_copy(update={"bad_documents": "skip"} if skip_bad else {})
    found: dict[str, EvaluationSet] = {}
    for word in named:
        name, wanted = _wanted(word, choices)
        if not name or name in found:
            raise DataError(
                f"--data {word}: {'the name is empty' if not name else f'{name} is given twice'}; "
                "name datasets as NAME=PATH"
            )
        if wanted.path is None and (wanted.dataset or name) in MADE:
            raise DataError("--data random: random tokens are not text; give a real dataset")
        if find_folder(name, wanted, data) is None and not is_built_in(wanted.dataset or name):
            names = [one for one in (*source_names(), *data.datasets) if one != "random"]
            known = f"known names: {any_of(names)}"
            if wanted.dataset in C4:
                known = fetch_line(wanted.dataset, f"{data.folder}/{wanted.dataset}")
            raise DataError(
                f"--data {word}: no such file or folder, and no dataset of that name; {known}"
            )
        found[name] = EvaluationSet(name, partial(_open, name, wanted, data))
    return list(found.values())


def sets_of_run(
    config: JobConfig, vocab_size: int | None, preparer: Preparer
) -> list[EvaluationSet]:
    """Returns the sets that a run validates on, or would if validation were enabled."""
    if config.preference.loss != "off":
        raise DataError(
            "this run trains on preference pairs, which have no perplexity: give documents with "
            "--data"
        )
    is_asked = config.validation.enable
    config = config.having({"validation.enable": True})
    is_foreign = foreign_validation(config) is not None or config.sft.shape != "off"
    if not is_asked and is_foreign and "stdlib_heldout" in held_out_sources(config):
        raise DataError("this run has no validation data: give documents with --data")
    named = [EvaluationSet(name, wanted.open) for name, wanted in held_out_sources(config).items()]
    if not validates_on_holdout(config):
        return named
    datasets = validation_data(config.having({"validation.sets": {}}), 1, vocab_size, preparer)
    held = []
    for one in datasets:
        corpus, share = one.rows.corpora[one.name], one.plan.sources[one.name].holdout
        assert isinstance(corpus, Corpus)
        held.append(EvaluationSet(one.name, partial(HeldOut, corpus, share)))
    return [*held, *named]


def _wanted(word: str, choices: DataSource) -> tuple[str, DataSource]:
    name, equals, path = word.partition("=")
    if not equals or _is_there(word):
        name, path = "", word
    wanted = {"path": path} if _is_there(path) else {"dataset": path}
    return name or Path(path).name or path, choices.model_copy(update=wanted)


def _is_there(path: str) -> bool:
    place = Path(path).expanduser()
    return place.exists() or place.with_name(place.name + ".idx").exists() if path else False


def _open(name: str, wanted: DataSource, data: Data) -> Source:
    try:
        return open_by_name(name, wanted, data, held_out=True)
    except ChoiceRequired as error:
        raise error.by(f"--{error.option}") from None
