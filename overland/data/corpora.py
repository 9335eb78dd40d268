"""Opens the corpora that a config names, built or streamed, and refuses one whose vocabulary, or
whose settings for conversations, do not fit the run.

A streamed corpus is tokenized while it is read, ahead of training.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from overland.config.derived import model_name
from overland.config.schema import Data, JobConfig
from overland.data.arrays import require_fields
from overland.data.corpus import Corpus
from overland.data.lanes import ListedImages, MadeRows
from overland.data.layout import (
    SHARD_DOCUMENTS,
    CorpusLayout,
    is_corpus,
    lay_out,
    read_layout,
    source_changes,
)
from overland.data.learned_tokens import Changes, changed_keys, in_words
from overland.data.plan import ChangedSource
from overland.data.sampler import AnyCorpus
from overland.data.sft import writer_for
from overland.data.sources.source import Source
from overland.data.tokenizer import UNKNOWN, Policy, Tokenizer
from overland.data.wanted import WantedSource, sources_of, taken_by_model
from overland.errors import ChoiceRequired, DataError
from overland.plugins import plugin
from overland.words import number_of

MAX_PROCESSES = 16  # leaves cores of a large node to the ranks and the file system
SHARDS_PER_WINDOW = 16  # at least, so that a window mixes this many places of the corpus
ANOTHER_TOKENIZER = "it was tokenized with another tokenizer, or another BOS or EOS policy"
LAYOUT_SECONDS = 600.0  # enough to mark a hundred thousand files on a slow file system

T = TypeVar("T")


@dataclass(frozen=True)
class Preparer:
    """The process that prepares the data: a single one, or one of several ranks."""

    once: Callable[[Callable[[], T]], T] = lambda make: make()
    """Runs a function on the first rank only; all ranks get its result, or its error."""
    tokenizes: bool = True
    """Whether this rank runs background processes; one rank per node does."""
    trains: bool = True
    """Whether a tokenizer that the data needs is trained, and written; otherwise it is left out."""
    report: Callable[[str], None] = lambda message: None
    tokenizer: Path | None = None
    """Folder of the tokenizer that this run trained earlier."""
    holdout: float | None = None
    """The share of documents that the resumed run holds out, if it is known: `kept_share`."""
    policy: Policy = UNKNOWN
    """The policy that the resumed run began with, as far as it is known: `kept_policy`."""


@dataclass(frozen=True)
class Opener:
    """Opens the corpora of a run."""

    config: JobConfig
    tokenizer: Tokenizer | None
    vocab_size: int | None
    """That of the model, if it is known."""
    preparer: Preparer

    def open(self, wanted: WantedSource) -> AnyCorpus:
        """Opens a corpus that is built, or one that is made while it is read."""
        if wanted.is_made:
            made: MadeRows = plugin("made_rows").made_rows(
                wanted, self.vocab_size, self.preparer.report
            )
            return made
        if built := wanted.built:
            wanted.refuse_choices(f"{built} is a built corpus, which")
            corpus = open_built(built)
            _check_made_by(corpus.layout, wanted)
        elif (listed := self.preparer.once(wanted.open_images)) is not None:
            if listed.num_bad:
                skipped = number_of(listed.num_bad, "file")
                self.preparer.report(f"note: {wanted.name}: {skipped} skipped")
            return ListedImages(wanted.name, listed)
        else:
            corpus = self.streamed(self._laid_out(wanted), wanted)
        check_vocabulary(wanted.name, corpus.vocab_size, self.vocab_size)
        return corpus

    def streamed(self, folder: Path, wanted: WantedSource) -> Corpus:
        """Opens a corpus that is laid out, and whose shards are made while it is read."""
        data = self.config.data
        processes = data.tokenise_processes
        if processes is None:
            processes = min(MAX_PROCESSES, (os.cpu_count() or 1) // 2)
        if processes:  # shared by the sources of a node
            processes = max(1, processes // max(len(data.sources), 1))
        return Corpus(
            folder,
            wanted.open,
            self.tokenizer,
            processes=processes * self.preparer.tokenizes,
            cache_bytes=int(data.cache_gb * 1e9),
        )

    def reopen(self, name: str, fingerprint: str) -> Corpus | None:
        """Returns the corpus with this fingerprint, which may have been laid out with another
        policy for BOS or bad documents, or None. Every rank does this on its own, because some may
        have failed to read the checkpoint that needs it."""
        wanted = sources_of(self.config).get(name)
        if wanted is None or wanted.is_made or wanted.built:
            return None
        found = find_corpus(streams_root(self.config), fingerprint)
        tokenizers = _policies(self.config, self.tokenizer)
        # Documents that were read are the same whether bad ones stop the run or are skipped.
        policies = itertools.product(tokenizers, (False, True)) if found is None else ()
        for tokenizer, skips in policies:
            path = replace(self, tokenizer=tokenizer).folder_of(wanted, wanted.open(), skips)
            if path.name.endswith(fingerprint):
                found = path
                break
        now = wanted.open()
        if found is None or source_changes(found, now) or changed_settings(found, now):
            return None
        if is_of_another_tokenizer(found, self.config, self.tokenizer):
            return None
        made_by = read_layout(found).tokenizer
        same = (one for one in tokenizers if one is not None and one.fingerprint == made_by)
        return replace(self, tokenizer=next(same, None)).streamed(found, wanted)

    def _laid_out(self, wanted: WantedSource) -> Path:
        """Returns the folder of a corpus that is made while it is read, on every rank."""
        data, name, preparer = self.config.data, wanted.name, self.preparer
        root, shared = streams_root(self.config), Path(data.folder).expanduser()

        def prepare() -> str:
            source = wanted.open()
            for note in source.notes:
                preparer.report(f"note: {name}: {note}")
            folder = self.folder_of(wanted, source, data.bad_documents == "skip", preparer.report)
            return folder.name.rpartition("-")[2]

        def built() -> str:
            """Returns the folder of the corpus where `overland data build` has completed it: a run
            with a data.cache_folder would tokenize it again."""
            found = find_corpus(shared, fingerprint)
            return str(found) if found is not None and Corpus(found).is_complete else ""

        fingerprint = preparer.once(prepare)
        if preparer.tokenizes and find_corpus(root, fingerprint) is None:
            prepare()  # this node has a folder of its own
        folder = _wait_for(root, fingerprint, name)
        if shared != root and (path := preparer.once(built)):
            preparer.report(f"{name} is read from {path}, where it is built, not data.cache_folder")
            return Path(path)
        if not (folder / "shards").exists():
            is_text = read_layout(folder).tokenizer is not None
            how = "tokenized" if is_text else "converted to shards"
            preparer.report(f"{name} is {how} ahead of training, in {folder}")
        return folder

    def folder_of(
        self,
        wanted: WantedSource,
        source: Source,
        skip_bad: bool,
        report: Callable[[str], None] = lambda message: None,
    ) -> Path:
        config = self.config
        if self.tokenizer is None and source.kind == "text":  # perhaps the model takes arrays
            require_fields(wanted.name, None, taken_by_model(config), model_name(config))
        with named_by_keys():
            return lay_out(
                wanted.name,
                source,
                self.tokenizer,
                streams_root(config),
                shard_documents=shard_documents(config.data),
                skip_bad=skip_bad,
                vocab_size=self.vocab_size,
                report=report,
            )


def _check_made_by(layout: CorpusLayout, wanted: WantedSource) -> None:
    """Raises an error if a corpus of conversations was built with different settings."""
    if wanted.config.sft.shape == "off" or layout.made_by is None:
        return
    writer = writer_for(wanted.config, wanted.seq_len, layout.tokenizer_path)
    before = {key: value for key, value in layout.made_by.items() if key != "columns"}
    if changes := changed_keys(before, writer.identity):
        raise DataError(
            f"{layout.folder} was built with different settings: {'; '.join(in_words(changes))}. "
            "Change them back, or build the corpus again"
        )


def open_built(folder: Path) -> Corpus:
    corpus = Corpus(folder)
    if not corpus.is_complete:
        raise DataError(f"{folder} is incomplete: finish it with `overland data build`")
    return corpus


def built_corpora(config: JobConfig) -> dict[str, AnyCorpus]:
    """Returns the training sources that are built corpora."""
    return {
        name: open_built(folder)
        for name, wanted in sources_of(config).items()
        if (folder := wanted.built)
    }


def find_corpus(root: Path, fingerprint: str) -> Path | None:
    """Finds a corpus by its fingerprint; it may have the name of another run's source."""
    return next((one for one in sorted(root.glob(f"*-{fingerprint}")) if is_corpus(one)), None)


def check_vocabulary(name: str, of_data: int | None, of_model: int | None) -> None:
    if of_model is not None and (of_data or 0) > of_model:
        raise DataError(
            f"{name} has a vocabulary of {of_data:,} tokens, but the model only {of_model:,}: set "
            f"model.overrides.vocab_size = {of_data}, or use the model's own tokenizer"
        )


def changed_settings(before: Path, source: Source) -> Changes:
    """Returns what has changed in what is read of the files, and in how conversations are
    tokenized, since a corpus was laid out."""
    layout = read_layout(before)
    changes = changed_keys(layout.made_by or {}, source.made_by or {})
    if None not in (layout.column, source.column) and layout.column != source.column:
        changes["the column"] = layout.column, source.column
    return changes


def changed_source(name: str, before: Path, source: Source, *more: str) -> ChangedSource:
    """Returns the error about a source that is not what a run was trained on; `more` is what else
    has changed. Of a chat template only a hash is known, so its error has no earlier value."""
    changes = changed_settings(before, source)
    values = {key: None if key == "sft.chat_template" else old for key, (old, _) in changes.items()}
    keys = {key: value for key, value in values.items() if "." in key or key == "the column"}
    return ChangedSource(name, (*more, *in_words(changes)), keys)


def is_of_another_tokenizer(folder: Path, config: JobConfig, tokenizer: Tokenizer | None) -> bool:
    """Whether the text of a corpus was tokenized with a tokenizer other than this one."""
    made_by = read_layout(folder).tokenizer
    ours = [one.fingerprint for one in _policies(config, tokenizer) if one is not None]
    return made_by is not None and made_by not in ours


def shard_documents(data: Data) -> int:
    """Returns the number of documents to put into a shard."""
    return max(1, min(SHARD_DOCUMENTS, data.window_documents // SHARDS_PER_WINDOW))


@contextlib.contextmanager
def named_by_keys() -> Iterator[None]:
    """Makes the error about a missing tokenizer name the config key for it."""
    try:
        yield
    except ChoiceRequired as error:
        raise error.by("model.hf_assets_path") from None


def streams_root(config: JobConfig) -> Path:
    """Returns the folder of streamed corpora."""
    return Path(config.data.cache_folder or config.data.folder).expanduser()


def _policies(config: JobConfig, tokenizer: Tokenizer | None) -> list[Tokenizer | None]:
    """Returns the tokenizer and, unless the config says whether documents begin with BOS, also the
    tokenizer with the opposite setting."""
    if tokenizer is None or tokenizer.bos_id is None or config.data.add_bos is not None:
        return [tokenizer]
    return [tokenizer, tokenizer.with_bos(not tokenizer.add_bos)]


def _wait_for(root: Path, fingerprint: str, name: str) -> Path:
    """Waits for a corpus that another rank of this node may be laying out."""
    deadline = time.monotonic() + LAYOUT_SECONDS
    while (folder := find_corpus(root, fingerprint)) is None:
        if time.monotonic() > deadline:
            raise DataError(
                f"{name} ({fingerprint}), which rank 0 found, is not in {root}: check that all "
                f"nodes see the same files"
            )
        time.sleep(0.1)
    return folder
