"""From a config to rows: finds or trains the tokenizer, opens the corpora, makes the plan."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from overland.config.schema import Data as Settings
from overland.config.schema import DataSource, JobConfig
from overland.data import registry
from overland.data.corpus import Corpus, changes, lay_out, open_corpus
from overland.data.documents import Reading
from overland.data.holdout import share_of
from overland.data.layout import Layout, find_laid_out, is_corpus, read_layout
from overland.data.plan import ChangedSource, Plan, PlannedSource, Segment
from overland.data.random_blocks import RandomBlocks
from overland.data.renamed import former_names, plan_under, refuse_same_bytes, under
from overland.data.rows import PlannedRows, one_kind
from overland.data.sources import Source
from overland.data.sources.marks import digest_of
from overland.data.tokenizer import UNKNOWN, Policy, Tokenizer, train_tokenizer
from overland.data.wanted import (
    CHOICES,
    check_held_out,
    held_out_sources,
    open_wanted,
    refuse_choices,
    sources_of,
    training_table,
    validates_on_holdout,
)
from overland.errors import DataError, Unsettled
from overland.files import publish
from overland.processes import allow_open_files
from overland.run_folder import PLAN, TOKENIZER

# Text that a tokenizer is trained on at most; more changes little at these vocabulary sizes.
TOKENIZER_DOCUMENTS = 20_000
TOKENIZER_SIZE = 4096
# Up to four epochs teach almost as much as fresh data (Muennighoff et al. 2023, arXiv:2305.16264).
MANY_EPOCHS = 4
MAX_PROCESSES = 16  # on a node with many cores, some are left to the ranks and the file system
SHARDS_PER_WINDOW = 16  # at least: so many places of the corpus meet in a window
SHARD_DOCUMENTS = 4096
ANOTHER_TOKENIZER = "its text became tokens by another tokenizer, or another BOS or EOS policy"
OF_TRAINING = "that of the training data"
LAYOUT_SECONDS = 600.0  # marks of a hundred thousand files on a slow file system

T = TypeVar("T")
Data = Corpus | RandomBlocks


@dataclass(frozen=True)
class Place:
    """Who prepares the data: one process alone, or a rank among others."""

    once: Callable[[Callable[[], T]], T] = lambda make: make()
    """Runs something on the first rank only; its result, or its error, is everybody's."""
    tokenises: bool = True
    """Whether background processes run here; on one rank per node."""
    report: Callable[[str], None] = lambda message: None
    tokenizer: Path | None = None
    """Folder of the tokenizer that a run has trained before."""
    policy: Policy = UNKNOWN
    """What the run that is resumed began with, as far as it is known: `kept_policy`."""


Reopen = Callable[[str, str], Corpus | None]
"""The corpus of a source, by its name and a fingerprint, as an earlier version laid it out."""


@dataclass(frozen=True)
class Dataset:
    """Rows to train on, and the tokenizer that made them (none for tokens that came as such)."""

    name: str
    rows: PlannedRows
    tokenizer: Tokenizer | None
    reopen: Reopen = lambda name, fingerprint: None

    @property
    def plan(self) -> Plan:
        return self.rows.plan

    @property
    def num_skipped(self) -> int:
        """Bad documents in what was read so far."""
        return sum(getattr(corpus, "num_bad", 0) for corpus in self.rows.corpora.values())

    def continued(self, saved: Mapping[str, Any], batch: int) -> Dataset:
        """Goes on at a batch with the plan that a checkpoint has; what changed is a new segment."""
        plan = Plan.from_json(saved)
        names = former_names(plan, self.plan)
        wanted, there = plan_under(names, self.plan), under(names, self.rows.corpora)
        check_still_there(plan, there)
        _refuse_same_bytes(plan, there)
        corpora = _as_planned(plan, there, self.reopen)
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
        rows = PlannedRows(continued, corpora, self.rows.reading)
        return replace(self, rows=rows, tokenizer=tokenizer)

    def repeats(self, num_batches: int) -> list[str]:
        """A note on each source that so many batches read over and over, as far as its size is
        known before all of it is read."""
        segment, notes = self.plan.segments[-1], []
        weights = sum(segment.weights.values())
        for name, weight in segment.weights.items():
            corpus = self.rows.corpora.get(name)
            if not weight or not isinstance(corpus, Corpus) or corpus.arrays is not None:
                continue
            tokens = corpus.num_tokens()
            if not tokens:
                continue
            rows = -(-tokens // segment.seq_len)
            epochs = num_batches * segment.global_batch_size * weight / weights / rows
            if epochs > MANY_EPOCHS:
                notes.append(
                    f"{name} has only {tokens:,} tokens, {rows:,} "
                    f"{'row' if rows == 1 else 'rows'} of {segment.seq_len:,}: this run "
                    f"(training.steps = {num_batches}) reads it about {epochs:,.0f} times, and the "
                    "model may learn it by heart"
                )
        return notes

    def with_plan(self, plan: Plan) -> Dataset:
        rows = self.rows
        return replace(self, rows=PlannedRows(plan, rows.corpora, rows.reading))

    def close(self) -> None:
        for corpus in self.rows.corpora.values():
            if isinstance(corpus, Corpus):
                corpus.close()

    def _explained(self, error: ChangedSource, plan: Plan) -> ChangedSource:
        """Names the files that changed, if the corpus of before is still there to tell."""
        corpus = self.rows.corpora[error.name]
        if not isinstance(corpus, Corpus) or corpus.open_source is None:
            return error
        before = _find(corpus.folder.parent, plan.sources[error.name].fingerprint)
        if before is None:
            return error
        what = changes(before, corpus.open_source())
        if not what and read_layout(before).tokenizer != corpus.layout.tokenizer:
            what = [ANOTHER_TOKENIZER]
        return ChangedSource(error.name, tuple(what))


def _refuse_same_bytes(plan: Plan, corpora: Mapping[str, Data]) -> None:
    gone = {name: one for name, one in plan.sources.items() if name not in corpora}
    for name, corpus in corpora.items():
        if name in plan.sources or not isinstance(corpus, Corpus):
            continue
        for former, source in gone.items():
            before = _find(corpus.folder.parent, source.fingerprint)
            if before is not None:
                refuse_same_bytes(name, corpus.folder, former, before)


def check_still_there(plan: Plan, sources: Collection[str]) -> None:
    missing = [name for name in plan.sources if name not in sources]
    if missing and plan.mixture == "rows":  # a window that is under way has documents of it
        raise DataError(
            f"the data source {missing[0]} is part of this run: keep it in the config, with "
            f"weight = 0 if nothing more is to be read from it"
        )


def training_data(
    config: JobConfig,
    global_batch_size: int,
    vocab_size: int | None,
    place: Place,
    memory: Path | None = None,
    writes: bool = False,
) -> Dataset:
    """The training set. `memory` is where counts are kept, by the one process that `writes`."""
    allow_open_files()
    training, data, seed = config.training, config.data, config.debug.seed
    wanted = sources_of(config)
    tokenizer = tokenizer_for(config, wanted, vocab_size, place)
    reading = Reading(seed, True, data.window_documents, memory, writes)
    corpora = {
        name: open_data(
            training_table(config, name), name, source, config, tokenizer, vocab_size, place
        )
        for name, source in wanted.items()
    }
    tokenizer = one_tokenizer(tokenizer, corpora, asked_policy(data))
    if tokenizer is not None and tokenizer.bos_id is not None and tokenizer.bos_because:
        how = "with" if tokenizer.add_bos else "without"
        place.report(
            f"documents begin {how} {tokenizer.pieces([tokenizer.bos_id])[0]}, "
            f"{tokenizer.bos_because} (data.add_bos)"
        )
    segment = Segment(
        first_batch=0,
        global_batch_size=global_batch_size,
        seq_len=training.seq_len,
        weights={name: source.weight for name, source in wanted.items()},
        packing=data.packing,
        last_block=data.last_block,
        document_mask=data.document_mask,
        pad_id=_pad_id(corpora),
        epochs=training.epochs if training.last_batch == "pad" else None,
    )
    if one_kind(corpora) is not None:
        segment = segment.for_samples()
    planned = {
        name: PlannedSource(
            corpora[name].fingerprint, source.max_epochs, _holdout(data, corpora[name], place)
        )
        for name, source in wanted.items()
    }
    for name, source in planned.items():
        if source.holdout:
            place.report(f"{name}: {source.holdout:.3%} of all documents are kept out of training")
    plan = Plan(seed, data.window_documents, data.mixture, planned, (segment,))
    name = training.dataset if len(wanted) == 1 else "mixture"
    rows = PlannedRows(plan, corpora, reading)
    return Dataset(name, rows, tokenizer, partial(_reopen, config, tokenizer, vocab_size, place))


def planned_data(config: JobConfig, vocab_size: int | None, run: Path) -> Dataset:
    """The training set of a run, from what its folder keeps: plan, corpora and tokenizer."""
    folders = corpora_of(run)
    path = run / PLAN
    try:
        plan = Plan.from_json(json.loads(path.read_text())["plan"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} holds no plan of a run's data: {error}") from None
    tokenizer = tokenizer_of(run, config.data) if (run / TOKENIZER).is_dir() else None
    wanted = sources_of(config)
    corpora: dict[str, Data] = {}
    for name in plan.sources:
        table = training_table(config, name)
        if name in folders and is_corpus(Path(folders[name])):
            # One that has left the config since can be read as far as its shards are there.
            source = (
                partial(open_wanted, config, table, name, wanted[name]) if name in wanted else None
            )
            corpora[name] = _open(Path(folders[name]), source, tokenizer, config, processes=0)
        elif name in wanted:
            corpora[name] = open_data(
                table, name, wanted[name], config, tokenizer, vocab_size, Place()
            )
    reopen = partial(_reopen, config, tokenizer, vocab_size, Place(tokenises=False))
    corpora = _as_planned(plan, corpora, reopen)
    reading = Reading(plan.seed, True, plan.window_documents, run / "data")
    rows = PlannedRows(plan, corpora, reading)
    return Dataset(config.training.dataset, rows, tokenizer)


def validation_data(
    config: JobConfig, num_rows: int, vocab_size: int | None, place: Place
) -> list[Dataset]:
    """The held-out sets, in the order of their names; read in order, never shuffled."""
    validation, on_holdout = config.validation, validates_on_holdout(config)
    if not validation.enable:
        return []
    wanted = sources_of(config) if on_holdout else held_out_sources(config)
    place.once(partial(check_held_out, config))
    segment = Segment(
        first_batch=0,
        global_batch_size=num_rows,
        seq_len=validation.seq_len or config.training.seq_len,
        weights={},
        document_mask=config.data.document_mask,
        epochs=1.0,
    )
    tokenizer = tokenizer_for(config, sources_of(config), vocab_size, place)
    if tokenizer is None:
        tokenizer = one_tokenizer(None, _built_corpora(config))
    window_documents = config.data.window_documents
    if on_holdout:  # a shard at a time: all of a window is tokenised, to find a few documents in it
        window_documents = min(window_documents, SHARD_DOCUMENTS)
    reading = Reading(config.debug.seed, False, window_documents, held_out=on_holdout)
    datasets = []
    for name, source in wanted.items():
        table = training_table(config, name) if on_holdout else "validation"
        corpus = open_data(table, name, source, config, tokenizer, vocab_size, place)
        one_tokenizer(tokenizer, {name: corpus}, whose=OF_TRAINING)
        share = _holdout(config.data, corpus, place) if on_holdout else 0.0
        if on_holdout and not share:  # random tokens
            continue
        own = replace(segment, weights={name: 1.0}, pad_id=_pad_id({name: corpus}))
        plan = Plan(
            config.debug.seed,
            window_documents,
            "tokens",
            {name: PlannedSource(corpus.fingerprint, holdout=share)},
            (own if one_kind({name: corpus}) is None else own.for_samples(),),
        )
        rows = PlannedRows(plan, {name: corpus}, reading)
        datasets.append(Dataset(name, rows, tokenizer))
    return datasets


def _built_corpora(config: JobConfig) -> dict[str, Data]:
    """The sources to train on that are built."""
    folders = {
        name: registry.find_folder(name, source, config.data)
        for name, source in sources_of(config).items()
    }
    return {
        name: open_built(folder)
        for name, folder in folders.items()
        if folder is not None and is_corpus(folder)
    }


def _holdout(data: Settings, corpus: Data, place: Place) -> float:
    """The share of a corpus that is held out; the first rank counts its documents for all."""
    return place.once(partial(share_of, data, corpus)) if isinstance(corpus, Corpus) else 0.0


def open_data(
    table: str,
    name: str,
    wanted: DataSource,
    config: JobConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    place: Place,
) -> Data:
    """A corpus that is built, or one that is made while it is read; `table` of the config says
    where it is."""
    data = config.data
    folder = registry.find_folder(name, wanted, data)
    if registry.is_random(name, wanted):
        return RandomBlocks(
            trained_size(data, None) if vocab_size is None else vocab_size, config.debug.seed
        )
    if folder is not None and is_corpus(folder):
        refuse_choices(wanted, table, f"{folder} is a built corpus, which")
        corpus = open_built(folder)
    else:
        source = partial(open_wanted, config, table, name, wanted)
        corpus = _stream(name, source, config, tokenizer, vocab_size, place)
    check_vocabulary(name, corpus.vocab_size, vocab_size)
    return corpus


def open_built(folder: Path) -> Corpus:
    corpus = open_corpus(folder)
    if not corpus.is_complete:
        raise DataError(f"{folder} is not complete: `overland data build` finishes it")
    return corpus


def check_vocabulary(name: str, of_data: int | None, of_model: int | None) -> None:
    if of_model is not None and (of_data or 0) > of_model:
        raise DataError(
            f"{name} has a vocabulary of {of_data:,} tokens, the model only {of_model:,}: set "
            f"model.overrides.vocab_size = {of_data}, or use the model's own tokenizer"
        )


def _stream(
    name: str,
    open_source: Callable[[], Source],
    config: JobConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    place: Place,
) -> Corpus:
    root = _root(config)

    def prepare() -> str:
        source = open_source()
        for note in getattr(source, "notes", ()):
            place.report(f"note: {name}: {note}")
        folder = _lay_out(name, source, tokenizer, config, vocab_size, place.report)
        return folder.name.rpartition("-")[2]

    fingerprint = place.once(prepare)
    if place.tokenises and _find(root, fingerprint) is None:  # the folder is this node's own
        prepare()
    folder = _wait_for(root, fingerprint, name)
    if not (folder / "shards").exists():
        how = "tokenised" if read_layout(folder).kind == "text" else "made into shards"
        place.report(f"{name} is {how} ahead of training, into {folder}")
    return _open(folder, open_source, tokenizer, config, _processes(config) * place.tokenises)


def _root(config: JobConfig) -> Path:
    return Path(config.data.cache_folder or config.data.folder).expanduser()


def _lay_out(
    name: str,
    source: Source,
    tokenizer: Tokenizer | None,
    config: JobConfig,
    vocab_size: int | None,
    report: Callable[[str], None] = lambda message: None,
    expected: str | None = None,
) -> Path:
    how = partial(lay_out, report=report, expected=expected)
    found = _lay_out_as(how, name, source, tokenizer, config, vocab_size)
    assert found is not None
    return found


def _lay_out_as(
    how: Callable[..., Path | None],
    name: str,
    source: Source,
    tokenizer: Tokenizer | None,
    config: JobConfig,
    vocab_size: int | None,
) -> Path | None:
    data = config.data
    with named_by_keys():
        return how(
            name,
            source,
            tokenizer,
            _root(config),
            shard_documents=max(
                1, min(SHARD_DOCUMENTS, data.window_documents // SHARDS_PER_WINDOW)
            ),
            skip_bad=data.bad_documents == "skip",
            vocab_size=vocab_size,
        )


@contextlib.contextmanager
def named_by_keys() -> Iterator[None]:
    """Where a tokenizer is missing, the message names the key of a config that gives one."""
    try:
        yield
    except Unsettled as error:
        raise error.by("model.hf_assets_path") from None


def _processes(config: JobConfig) -> int:
    """Background processes for one source, on a node."""
    processes = config.data.tokenise_processes
    if processes is None:
        processes = min(MAX_PROCESSES, (os.cpu_count() or 1) // 2)
    return max(1, processes // max(len(config.data.sources), 1)) if processes else 0


def _as_planned(plan: Plan, corpora: Mapping[str, Data], reopen: Reopen) -> dict[str, Data]:
    """The corpora, each as the plan has it where it was laid out by an earlier version."""
    found = dict(corpora)
    for name, source in plan.sources.items():
        corpus = found.get(name)
        if isinstance(corpus, Corpus) and corpus.fingerprint != source.fingerprint:
            again = reopen(name, source.fingerprint)
            if again is not None:
                corpus.close()
                found[name] = again
    return found


def _reopen(
    config: JobConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    place: Place,
    name: str,
    fingerprint: str,
) -> Corpus | None:
    """Every rank does this by itself: some may have failed to read the checkpoint that asks."""
    wanted = sources_of(config).get(name)
    if wanted is None:
        return None
    folder = registry.find_folder(name, wanted, config.data)
    if registry.is_random(name, wanted) or (folder is not None and is_corpus(folder)):
        return None
    source = partial(open_wanted, config, training_table(config, name), name, wanted)
    found = _find(_root(config), fingerprint)
    for one in _policies(config, tokenizer) if found is None else ():
        path = _lay_out(name, source(), one, config, vocab_size, expected=fingerprint)
        if path.name.endswith(fingerprint):
            found = path
            break
    if found is None or changes(found, source()):
        return None
    if is_of_another_tokenizer(found, config, tokenizer):
        return None
    made_by = read_layout(found).tokenizer
    tokenizers = [one for one in _policies(config, tokenizer) if one is not None]
    tokenizer = next((one for one in tokenizers if one.fingerprint == made_by), None)
    return _open(found, source, tokenizer, config, _processes(config) * place.tokenises)


def _policies(config: JobConfig, tokenizer: Tokenizer | None) -> list[Tokenizer | None]:
    """The tokenizer and, where nobody says whether documents begin with BOS, the other way too."""
    if tokenizer is None or tokenizer.bos_id is None or config.data.add_bos is not None:
        return [tokenizer]
    return [tokenizer, tokenizer.with_bos(not tokenizer.add_bos)]


def is_of_another_tokenizer(folder: Path, config: JobConfig, tokenizer: Tokenizer | None) -> bool:
    """Whether the tokens of a corpus were made from text by a tokenizer that is not this one."""
    made_by = read_layout(folder).tokenizer
    ours = [one.fingerprint for one in _policies(config, tokenizer) if one is not None]
    return made_by is not None and made_by not in ours


def check_same_tokenizer(plan: Plan, config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raises where a run was trained on tokens of another tokenizer, as far as the corpora that it
    read are still there to tell."""
    for name, wanted in sources_of(config).items():
        folder = registry.find_folder(name, wanted, config.data)
        if name not in plan.sources or (folder is not None and is_corpus(folder)):
            continue
        before = _find(_root(config), plan.sources[name].fingerprint)
        if before is not None and is_of_another_tokenizer(before, config, tokenizer):
            raise ChangedSource(name, (ANOTHER_TOKENIZER,))


def _find(root: Path, fingerprint: str) -> Path | None:
    """A corpus by its fingerprint; its name may be that of another run's source."""
    return next((one for one in sorted(root.glob(f"*-{fingerprint}")) if is_corpus(one)), None)


def _wait_for(root: Path, fingerprint: str, name: str) -> Path:
    """Another rank of this node may be laying it out."""
    deadline = time.monotonic() + LAYOUT_SECONDS
    while (folder := _find(root, fingerprint)) is None:
        if time.monotonic() > deadline:
            raise DataError(
                f"{root} does not hold {name} ({fingerprint}), which rank 0 has found: do all "
                f"nodes see the same files?"
            )
        time.sleep(0.1)
    return folder


def _open(
    folder: Path,
    open_source: Callable[[], Source] | None,
    tokenizer: Tokenizer | None,
    config: JobConfig,
    processes: int,
) -> Corpus:
    return open_corpus(
        folder,
        open_source,
        (lambda: tokenizer) if tokenizer is not None else None,
        processes=processes,
        cache_bytes=int(config.data.cache_gb * 1e9),
    )


def tokenizer_for(
    config: JobConfig, wanted: Mapping[str, DataSource], vocab_size: int | None, place: Place
) -> Tokenizer | None:
    """The model's own tokenizer, or one trained on the training text and kept in `data.folder`."""
    opened = partial(open_tokenizer, config=config, wanted=wanted, place=place)
    if config.model.hf_assets_path is not None:
        return opened(Path(config.model.hf_assets_path).expanduser())
    if place.tokenizer is not None and place.tokenizer.is_dir():
        return opened(place.tokenizer)  # a source that joins does not change it
    path = place.once(partial(_trained, config, wanted, vocab_size, place.report))
    return opened(Path(path)) if path else None


def open_tokenizer(
    path: Path, config: JobConfig, wanted: Mapping[str, DataSource], place: Place
) -> Tokenizer:
    """The tokenizer, with the policy of the config, of the run that is resumed, of a corpus that is
    there already, or its own: in this order."""
    asked = asked_policy(config.data)
    built, folder = place.once(partial(_built_policy, config, wanted))
    known = (asked.add_eos, place.policy.add_eos, built.add_eos)
    add_eos = next((one for one in known if one is not None), True)
    tokenizer = Tokenizer(path, add_bos=asked.add_bos, add_eos=add_eos)
    if asked.add_bos is not None or tokenizer.bos_id is None:
        return tokenizer
    kept, because = place.policy.add_bos, "as this run began"
    if kept is None:
        kept, because = built.add_bos, f"as {folder} was built"
    if kept is None:
        kept, because = place.once(partial(_former_bos, config, wanted, tokenizer))
    if kept is None:
        return tokenizer
    tokenizer = tokenizer.with_bos(kept)
    tokenizer.bos_because = because
    return tokenizer


def asked_policy(data: Settings) -> Policy:
    return Policy(data.add_bos, data.add_eos)


def _built_policy(config: JobConfig, wanted: Mapping[str, DataSource]) -> tuple[Policy, str]:
    """What was done in the first corpus of text among the sources that is built, and its folder."""
    for name, source in wanted.items():
        folder = registry.find_folder(name, source, config.data)
        if folder is not None and is_corpus(folder):
            layout = read_layout(folder)
            if layout.kind == "text":
                return Policy(layout.add_bos, layout.add_eos), str(folder)
    return UNKNOWN, ""


def _former_bos(
    config: JobConfig, wanted: Mapping[str, DataSource], tokenizer: Tokenizer
) -> tuple[bool | None, str]:
    """What was done in a corpus that was laid out from these sources before BOS came by default."""
    if not tokenizer.add_bos or not any(_root(config).glob("*/corpus.json")):
        return None, ""
    for name, one in wanted.items():
        source = _text(name, one, config)
        if source is None or _lay_out_as(find_laid_out, name, source, tokenizer, config, None):
            continue
        former = tokenizer.with_bos(False)
        if found := _lay_out_as(find_laid_out, name, source, former, config, None):
            return False, f"as {found} was made"
    return None, ""


def corpora_of(run: Path) -> dict[str, str]:
    """Where the corpora of a run lie, by the names of its sources; none before its first step."""
    path = run / PLAN
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        kept = None
    corpora = kept.get("corpora") if isinstance(kept, dict) else None
    if not isinstance(corpora, dict):
        raise DataError(
            f"{path} is damaged: it holds no plan of a run's data. Delete it, and the run writes "
            "it again from its checkpoint"
        )
    return corpora


def kept_policy(run: Path) -> Policy:
    """What stands around the documents of a run, if there is such a run. Runs from before BOS was
    noted began without, unless their config said so."""
    try:
        kept = json.loads((run / PLAN).read_text())
    except (OSError, ValueError):
        return UNKNOWN
    if not isinstance(kept, dict):
        return UNKNOWN
    found = (kept.get("add_bos", False), kept.get("add_eos"))
    return Policy(*(one if isinstance(one, bool) else None for one in found))


def tokenizer_of(run: Path, data: Settings) -> Tokenizer:
    """The tokenizer that a run keeps, with the policy of its documents."""
    kept = kept_policy(run)
    add_bos = kept.add_bos if data.add_bos is None else data.add_bos
    add_eos = kept.add_eos if data.add_eos is None else data.add_eos
    return Tokenizer(run / TOKENIZER, add_bos=add_bos, add_eos=add_eos is not False)


def trained_size(data: Settings, vocab_size: int | None) -> int:
    """Tokens of a tokenizer that is trained here, for a model with a vocabulary of that size."""
    if data.vocab_size is not None:
        return data.vocab_size
    return TOKENIZER_SIZE if vocab_size is None else min(TOKENIZER_SIZE, vocab_size)


def trained_path(data: Settings, wanted: Mapping[str, DataSource], size: int) -> Path:
    """Where the tokenizer that was trained on these sources is kept."""
    names = list(wanted)
    places = [
        str(registry.find_folder(name, wanted[name], data) or wanted[name].dataset)
        for name in names
    ]
    choices = [[getattr(one, key) for key in CHOICES] for one in wanted.values()]
    parts = [names, places, *([choices] if any(map(any, choices)) else [])]
    label = f"{names[0] if len(names) == 1 else 'mixture'}-{digest_of(parts)[:8]}"
    return Path(data.folder).expanduser() / f"tokenizer-{label}-{size}" / "tokenizer.json"


def _trained(
    config: JobConfig,
    wanted: Mapping[str, DataSource],
    vocab_size: int | None,
    report: Callable[[str], None],
) -> str | None:
    """The path of a tokenizer for the text among the sources; none if there is no text."""
    data, size = config.data, trained_size(config.data, vocab_size)
    path = trained_path(data, wanted, size)
    if path.exists():
        return str(path)
    texts = [source for name, one in wanted.items() if (source := _text(name, one, config))]
    if not texts:
        return None
    report(f"training a tokenizer of {size:,} tokens (data.vocab_size) on {', '.join(wanted)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    train_tokenizer(_documents(texts), size, beside)
    publish(beside, path)
    return str(path)


def _text(name: str, wanted: DataSource, config: JobConfig) -> Source | None:
    """The source, if it is text that has yet to become tokens."""
    folder = registry.find_folder(name, wanted, config.data)
    if registry.is_random(name, wanted) or (folder is not None and is_corpus(folder)):
        return None
    source = open_wanted(config, training_table(config, name), name, wanted)
    return source if getattr(source, "kind", "text") == "text" else None


def _documents(sources: list[Source]) -> Iterator[str]:
    for source in sources:
        texts = (str(text) for chunk in source.chunks() for text in source.read(chunk))
        yield from itertools.islice(texts, TOKENIZER_DOCUMENTS // len(sources))


def _pad_id(corpora: Mapping[str, Data]) -> int:
    ends = (getattr(corpus, "eos_id", None) for corpus in corpora.values())
    return next((end for end in ends if end is not None), 0)


def one_tokenizer(
    given: Tokenizer | None,
    corpora: Mapping[str, Data],
    asked: Policy = UNKNOWN,
    whose: str = "the model's",
) -> Tokenizer | None:
    """The tokenizer that made all of them; a corpus that is built brings its own. `whose`: what
    errors call the one that is given."""
    made_by = {
        name: corpus.layout
        for name, corpus in corpora.items()
        if isinstance(corpus, Corpus) and corpus.layout.tokenizer is not None
    }
    first = next(iter(made_by), None)
    for name, layout in made_by.items():
        _check_policy(name, layout, asked)
        other = given.fingerprint if given is not None else made_by[first or name].tokenizer
        if layout.tokenizer != other:
            expected = whose if given is not None else f"that of {first}"
            raise DataError(
                f"{name} was made by another tokenizer than {expected}, or with another BOS and "
                f"EOS policy ({_words(layout)}): build it again with the same one"
            )
    if given is None and first is not None and (path := made_by[first].tokenizer_path):
        layout = made_by[first]
        return Tokenizer(path, add_bos=layout.add_bos, add_eos=layout.add_eos)
    return given if made_by else None


def _check_policy(name: str, layout: Layout, asked: Policy) -> None:
    """Raises where the config asks for other documents than those of a corpus."""
    for key, wanted in asked._asdict().items():
        if wanted is not None and getattr(layout, key) != wanted:
            raise DataError(
                f"data.{key} is {str(wanted).lower()}, and the documents of {name} are "
                f"{_words(layout)}: leave data.{key} out to keep them so, or build it again"
            )


def _words(layout: Layout) -> str:
    bos, eos = ("with" if added else "without" for added in (layout.add_bos, layout.add_eos))
    return f"{bos} BOS and {eos} EOS"
