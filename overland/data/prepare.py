"""Prepares the training and validation sets of a config (tokenizer, corpora, plan, sampler), and
resumes with the plan of a checkpoint, even if sources were renamed or removed.

The tokenizer is the model's own, or one that is trained on the text; a built corpus has its own,
and one that was made with another tokenizer is refused. If the config does not specify whether
documents begin with BOS and end with EOS, the run that is resumed, an existing corpus, or the
tokenizer itself decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from overland.config.schema import Data, JobConfig
from overland.data.corpora import (
    ANOTHER_TOKENIZER,
    Opener,
    Preparer,
    built_corpora,
    changed_source,
    find_corpus,
)
from overland.data.corpus import Corpus
from overland.data.holdout import check_held_out, share_of, without_held_out
from overland.data.layout import SHARD_DOCUMENTS, CorpusLayout, read_layout, source_changes
from overland.data.plan import (
    ChangedSource,
    Plan,
    PlannedSource,
    Segment,
    former_names,
    kept_plan,
    plan_under,
    under,
)
from overland.data.sampler import AnyCorpus, Corpora, Sampler, one_kind
from overland.data.sft import tokenizer_for_chats
from overland.data.tokenizer import UNKNOWN, Policy, Tokenizer
from overland.data.wanted import Sources, held_out_sources, sources_of, validates_on_holdout
from overland.data.windows import Reading
from overland.errors import DataError
from overland.plugins import plugin
from overland.processes import allow_open_files

OF_TRAINING = "that of the training data"
Reopen = Callable[[str, str], Corpus | None]
"""Returns the corpus of a source, given its name and the fingerprint that a plan has of it."""


@dataclass(frozen=True)
class Dataset:
    """Rows to train on, and the tokenizer that made them (None for a source of token ids)."""

    name: str
    rows: Sampler
    tokenizer: Tokenizer | None
    reopen: Reopen = lambda name, fingerprint: None

    @property
    def plan(self) -> Plan:
        return self.rows.plan

    @property
    def num_skipped(self) -> int:
        """The number of empty and bad documents in the shards read so far."""
        return sum(corpus.num_bad for corpus in self.rows.corpora.values())

    @property
    def counts(self) -> Counter[str]:
        """How many documents were left out or truncated so far, by what was done."""
        found = (corpus.counts for corpus in self.rows.corpora.values())
        return sum(map(Counter, found), Counter())

    def continued(self, saved: Mapping[str, Any], batch: int) -> Dataset:
        """Resumes at a batch with the plan of a checkpoint; changes start a new segment."""
        plan = Plan.from_json(saved)
        names = former_names(plan, self.plan)
        wanted, there = plan_under(names, self.plan), under(names, self.rows.corpora)
        check_still_there(plan, there)
        _refuse_same_bytes(plan, there)
        corpora = as_planned(plan, there, self.reopen)
        sources = {
            name: replace(source, fingerprint=corpora[name].fingerprint)
            for name, source in wanted.sources.items()
        }
        try:
            continued = plan.continued(replace(wanted, sources=sources), batch)
        except ChangedSource as error:
            raise self._explained(error, plan) from None
        tokenizer = self.tokenizer
        if corpora != there:
            tokenizer = one_tokenizer(None, corpora)
        rows = Sampler(continued, corpora, self.rows.reading)
        return replace(self, rows=rows, tokenizer=tokenizer)

    def close(self) -> None:
        for corpus in self.rows.corpora.values():
            corpus.close()

    def _explained(self, error: ChangedSource, plan: Plan) -> ChangedSource:
        """Adds the names of the files that changed, if the earlier corpus still exists."""
        corpus = self.rows.corpora[error.name]
        if not isinstance(corpus, Corpus) or corpus.open_source is None:
            return error
        before = find_corpus(corpus.folder.parent, plan.sources[error.name].fingerprint)
        if before is None:
            return error
        source = corpus.open_source()
        what = source_changes(before, source)
        if not what and read_layout(before).tokenizer != corpus.layout.tokenizer:
            what = [ANOTHER_TOKENIZER]
        return changed_source(error.name, before, source, *what)


def training_data(
    config: JobConfig,
    global_batch_size: int,
    vocab_size: int | None,
    preparer: Preparer,
    memory: Path | None = None,
    writes: bool = False,
) -> Dataset:
    """Opens the training set. `memory` is the folder of counts, which one process `writes`."""
    allow_open_files()
    training, data, seed = config.training, config.data, config.debug.seed
    wanted = sources_of(config)
    tokenizer = tokenizer_for(config, wanted, vocab_size, preparer)
    reading = Reading(seed, True, data.window_documents, memory, writes)
    opener = Opener(config, tokenizer, vocab_size, preparer)
    corpora = {name: opener.open(one) for name, one in wanted.items()}
    tokenizer = one_tokenizer(tokenizer, corpora, asked_policy(config))
    if tokenizer is not None and tokenizer.bos_id is not None and tokenizer.bos_because:
        how = "with" if tokenizer.add_bos else "without"
        preparer.report(
            f"documents begin {how} {tokenizer.pieces([tokenizer.bos_id])[0]}, "
            f"{tokenizer.bos_because} (data.add_bos)"
        )
    segment = Segment(
        first_batch=0,
        global_batch_size=global_batch_size,
        seq_len=training.seq_len,
        weights={name: one.asked.weight for name, one in wanted.items()},
        packing=data.packing,
        last_block=data.last_block,
        document_mask=data.document_mask,
        pad_id=_pad_id(corpora),
        epochs=training.epochs if training.last_batch == "pad" else None,
        group_by_length=data.group_by_length,
    )
    if one_kind(corpora) is not None:
        segment = segment.for_samples()
    share, empty = _share_held_out(data, corpora, preparer)
    documents = _of_documents(corpora)
    planned = {
        name: PlannedSource(
            corpora[name].fingerprint, one.asked.max_epochs, share if name in documents else 0.0
        )
        for name, one in wanted.items()
    }
    for name in documents:
        if name in empty:
            preparer.report(f"note: {name}: none of its documents is held out of training")
        elif share and isinstance(data.holdout, float):
            preparer.report(f"{name}: about {100 * share:.3g}% of the documents are held out")
    plan = Plan(seed, data.window_documents, data.mixture, planned, (segment,))
    name = training.dataset if len(wanted) == 1 else "mixture"
    rows = Sampler(plan, corpora, reading)
    return Dataset(name, rows, tokenizer, opener.reopen)


def validation_data(
    config: JobConfig, num_rows: int, vocab_size: int | None, preparer: Preparer
) -> list[Dataset]:
    """Opens the validation sets, in the order of the config; they are never shuffled."""
    validation, on_holdout = config.validation, validates_on_holdout(config)
    if not validation.enable:
        return []
    preparer.once(partial(check_held_out, config))
    segment = Segment(
        first_batch=0,
        global_batch_size=num_rows,
        seq_len=validation.seq_len or config.training.seq_len,
        weights={},
        packing=config.data.packing if config.sft.shape != "off" else "pack",
        document_mask=config.data.document_mask,
        epochs=1.0,
    )
    tokenizer = tokenizer_for(config, sources_of(config), vocab_size, preparer)
    if tokenizer is None:
        tokenizer = one_tokenizer(None, built_corpora(config))
    # Held-out documents are read a shard at a time, because a whole window is tokenized to find a
    # few of them. Notes were already reported for the training data.
    quiet = replace(preparer, report=lambda message: None)
    opener = Opener(config, tokenizer, vocab_size, quiet)
    trained = {
        name: opener.open(one) for name, one in (sources_of(config).items() if on_holdout else ())
    }
    share, empty = _share_held_out(config.data, trained, quiet)
    datasets = [
        _held_out_set(name, corpus, segment, tokenizer, config, share)
        for name, corpus in _of_documents(trained).items()
        if name not in empty
    ]
    opener = replace(opener, preparer=preparer)
    for name, one in held_out_sources(config).items():
        datasets.append(_held_out_set(name, opener.open(one), segment, tokenizer, config))
    return datasets


def _held_out_set(
    name: str,
    corpus: AnyCorpus,
    segment: Segment,
    tokenizer: Tokenizer | None,
    config: JobConfig,
    share: float = 0.0,
) -> Dataset:
    """Opens a validation set: all of a corpus, or the share of it that is held out."""
    one_tokenizer(tokenizer, {name: corpus}, whose=OF_TRAINING)
    window_documents = config.data.window_documents
    if share:
        window_documents = min(window_documents, SHARD_DOCUMENTS)
    own = replace(segment, weights={name: 1.0}, pad_id=_pad_id({name: corpus}))
    plan = Plan(
        config.debug.seed,
        window_documents,
        "sequences",
        {name: PlannedSource(corpus.fingerprint, holdout=share)},
        (own if one_kind({name: corpus}) is None else own.for_samples(),),
    )
    reading = Reading(config.debug.seed, False, window_documents, held_out=bool(share))
    return Dataset(name, Sampler(plan, {name: corpus}, reading), tokenizer)


def tokenizer_for(
    config: JobConfig, wanted: Sources, vocab_size: int | None, preparer: Preparer
) -> Tokenizer | None:
    """Opens the model's own tokenizer, or one trained on the training text, in `data.folder`."""
    opened = partial(open_tokenizer, config=config, wanted=wanted, preparer=preparer)
    if config.model.hf_assets_path is not None:
        return opened(Path(config.model.hf_assets_path).expanduser())
    if preparer.tokenizer is not None and preparer.tokenizer.is_dir():
        return opened(preparer.tokenizer)  # adding a source does not change it
    train = plugin("tokenizer_training").trained_tokenizer
    made = partial(train, config, wanted, vocab_size, preparer.report, preparer.trains)
    path = preparer.once(made)
    return opened(Path(path)) if path else None


def open_tokenizer(path: Path, config: JobConfig, wanted: Sources, preparer: Preparer) -> Tokenizer:
    """Opens a tokenizer with the policy of the config, of the run that is resumed, of a built
    corpus, or its own, in this order."""
    if config.sft.shape != "off":
        return tokenizer_for_chats(config)
    asked = asked_policy(config)
    built, folder = preparer.once(partial(_built_policy, wanted))
    known = {"as this run began": preparer.policy, f"as {folder} was built": built}
    ends = (one.add_eos for one in (asked, *known.values()) if one.add_eos is not None)
    tokenizer = Tokenizer(path, add_bos=asked.add_bos, add_eos=next(ends, True))
    begins = ((why, one.add_bos) for why, one in known.items() if one.add_bos is not None)
    because, add_bos = next(begins, ("", None))
    if asked.add_bos is None and add_bos is not None and tokenizer.bos_id is not None:
        tokenizer = tokenizer.with_bos(add_bos)
        tokenizer.bos_because = because
    return tokenizer


def one_tokenizer(
    given: Tokenizer | None, corpora: Corpora, asked: Policy = UNKNOWN, whose: str = "the model's"
) -> Tokenizer | None:
    """Returns the tokenizer that made all corpora; a built corpus has its own. `whose`: what errors
    call the given one."""
    made_by = {
        name: corpus.layout
        for name, corpus in corpora.items()
        if isinstance(corpus, Corpus) and corpus.layout.tokenizer is not None
    }
    if not made_by:
        return None
    first = next(iter(made_by))
    expected, fingerprint = f"that of {first}", made_by[first].tokenizer
    if given is not None:
        expected, fingerprint = whose, given.fingerprint
    for name, layout in made_by.items():
        _check_policy(name, layout, asked)
        if layout.tokenizer != fingerprint:
            if given is not None and layout.add_eos != given.add_eos:
                _refuse_other_kind(name, is_chat=layout.made_by is not None)
            raise DataError(
                f"{name} was made with another tokenizer than {expected}, or with another BOS and "
                f"EOS policy ({_words(layout)}): build it again with the same one"
            )
    layout = made_by[first]
    if given is None and layout.tokenizer_path is not None:
        return Tokenizer(layout.tokenizer_path, add_bos=layout.add_bos, add_eos=layout.add_eos)
    return given


def _refuse_other_kind(name: str, is_chat: bool) -> None:
    """Raises an error: documents and conversations are tokenized by different rules."""
    if is_chat:
        raise DataError(
            f"{name} is a corpus of conversations: set sft.shape to the one it was built with"
        )
    raise DataError(
        f"{name} is a corpus of documents, which are tokenized by other rules than sft.shape: "
        "provide its texts as records with a column text (JSON lines, parquet, …), or build it "
        "from such records with --sft shape=text"
    )


def asked_policy(config: JobConfig) -> Policy:
    """Returns the policy that the config sets for documents; conversations have none."""
    data = config.data
    return Policy(data.add_bos, data.add_eos) if config.sft.shape == "off" else UNKNOWN


def kept_policy(run: Path) -> Policy:
    """Returns the policy of an existing run, as far as it is known."""
    kept = kept_plan(run)
    found = (kept.get("add_bos"), kept.get("add_eos"))
    return Policy(*(one if isinstance(one, bool) else None for one in found))


def _built_policy(wanted: Sources) -> tuple[Policy, str]:
    """Returns the policy of the first built text corpus among the sources, and its folder."""
    for one in wanted.values():
        if folder := one.built:
            layout = read_layout(folder)
            if layout.kind == "text":
                return Policy(layout.add_bos, layout.add_eos), str(folder)
    return UNKNOWN, ""


def _check_policy(name: str, layout: CorpusLayout, asked: Policy) -> None:
    """Raises an error if the config sets another policy than that of a corpus."""
    for key, wanted in asked._asdict().items():
        if wanted is not None and getattr(layout, key) != wanted:
            raise DataError(
                f"data.{key} is {str(wanted).lower()}, but the documents of {name} are "
                f"{_words(layout)}: remove data.{key} to use them as they are, or build it again"
            )


def _words(layout: CorpusLayout) -> str:
    bos, eos = ("with" if added else "without" for added in (layout.add_bos, layout.add_eos))
    return f"{bos} BOS and {eos} EOS"


def corpora_of(run: Path) -> dict[str, str]:
    """Returns the folders of a run's corpora, by the names of its sources; none before its first
    step."""
    corpora: dict[str, str] = kept_plan(run).get("corpora", {})
    return corpora


def check_still_there(plan: Plan, sources: Collection[str]) -> None:
    missing = [name for name in plan.sources if name not in sources]
    if missing and plan.mixture == "documents":  # the current window may have documents of it
        raise DataError(
            f"the data source {missing[0]} was used by this run; keep it in the config (weight = 0 "
            "stops reading it)"
        )


def _refuse_same_bytes(plan: Plan, corpora: Corpora) -> None:
    """Raises an error if a new source has the files of a removed one under other names: they would
    be read again from the beginning."""
    gone = {name: one for name, one in plan.sources.items() if name not in corpora}
    for name, corpus in corpora.items():
        if name in plan.sources or not isinstance(corpus, Corpus):
            continue
        for former, source in gone.items():
            before = find_corpus(corpus.folder.parent, source.fingerprint)
            if before is not None and _contents(corpus.folder) == _contents(before) != []:
                raise DataError(
                    f"{name} has the same content as {former}, which this run was trained on, but "
                    "under other file names, so it would be read again from the beginning: rename "
                    "the files back, or start a new run with --resume none"
                )


def _contents(corpus: Path) -> list[tuple[int, str]]:
    marks = read_layout(corpus).all_chunks()[1].values()
    return [(mark.size, mark.sample) for mark in marks]


def as_planned(plan: Plan, corpora: Corpora, reopen: Reopen) -> dict[str, AnyCorpus]:
    """Returns the corpora, each laid out as in the plan."""
    found = dict(corpora)
    for name, source in plan.sources.items():
        corpus = found.get(name)
        if isinstance(corpus, Corpus) and corpus.fingerprint != source.fingerprint:
            again = reopen(name, source.fingerprint)
            if again is not None:
                corpus.close()
                found[name] = again
    return found


def _share_held_out(data: Data, corpora: Corpora, preparer: Preparer) -> tuple[float, list[str]]:
    """Returns the share of documents to hold out, and the sources of which that is none. A resumed
    run keeps its share; otherwise the first rank marks the documents for all."""
    there = _of_documents(corpora)
    if not data.holdout or not there:
        return 0.0, []
    share = preparer.holdout
    if share is None:
        share = preparer.once(partial(share_of, data, there, preparer.report))
    return share, preparer.once(partial(without_held_out, there, share))


def _of_documents(corpora: Corpora) -> dict[str, Corpus]:
    return {name: corpus for name, corpus in corpora.items() if isinstance(corpus, Corpus)}


def _pad_id(corpora: Corpora) -> int:
    ends = (corpus.eos_id for corpus in corpora.values())
    return next((end for end in ends if end is not None), 0)
