"""Opens everything that a run opens before its first step (tokenizer, data, weights, checkpoints)
without writing anything. This is how `overland check` and `overland submit` find what `overland
train` would refuse.

Only the beginning of each source is read; a bad document further on is found only in training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from overland.checkpoint.folder import committed, lack_of_room, newest_in
from overland.checkpoint.formats.checkpoint import MODEL
from overland.checkpoint.origin import Origin
from overland.checkpoint.read import open_checkpoint, refuse_unused, without
from overland.config.errors import ConfigError, Problem
from overland.config.load import Loaded, in_order
from overland.config.schema import DataSource, JobConfig
from overland.data import registry
from overland.data.arrays import Arrays, require_fields
from overland.data.corpora import (
    Preparer,
    check_made_by,
    check_same_tokenizer,
    check_vocabulary,
    named_by_keys,
    open_built,
    placeholder_words,
    shard_documents,
    trained_size,
)
from overland.data.corpus import Corpus
from overland.data.corpus_folder import is_corpus
from overland.data.holdout import check_countable, check_fewer, require_both_sides
from overland.data.images import RandomImages
from overland.data.layout import count_shards, sketch
from overland.data.leakage import check_held_out, same_data
from overland.data.plan import Plan, check_same_holdout, check_same_order
from overland.data.prepare import check_still_there, corpora_of
from overland.data.registry import (
    VALIDATION,
    held_by,
    held_out_sources,
    is_validation,
    open_wanted,
    refuse_choices,
    sources_of,
    training_table,
    validation_table,
)
from overland.data.sampler import NoDocuments
from overland.data.shard_maker import ShardMaker
from overland.data.sources import Source
from overland.data.sources.array_list import ArrayList
from overland.data.tokenizer import SMALLEST, Tokenizer
from overland.data.tokenizer_choice import (
    OF_TRAINING,
    asked_policy,
    one_tokenizer,
    open_tokenizer,
    trained_path,
)
from overland.errors import CheckpointError, DataError, MismatchError, ModelError
from overland.models.flops import SampleFields, casts_samples, sample_fields
from overland.models.hf import INDEX, SINGLE, load_hf
from overland.models.new_rows import vocabulary_matrices
from overland.models.registry import build_model, model_config
from overland.models.sparse import is_mask
from overland.models.transform import added_rule, apply_transforms
from overland.optimizers.optimizer import PREFIX
from overland.optimizers.registry import rules_of, state_bytes, state_kinds
from overland.optimizers.rule import Scalar
from overland.parallel.apply import freeze, transforms_for
from overland.parallel.sharding import named_buffers, named_parameters
from overland.plugins import plugin
from overland.run_folder import RunFolder
from overland.training.readme import model_name
from overland.training.resume import policy_of_the_resumed, shares_of_the_resumed
from overland.training.state import check_changes, check_same_optimizer, naming_keys
from overland.training.vocabulary import new_rows_of
from overland.words import any_of, counted_words

Shapes = Mapping[str, tuple[int, ...]]

FEW_DOCUMENTS = 1000
FEW_CHARACTERS = 4 << 20


def require_start(loaded: Loaded) -> list[Problem]:
    """Raises `ConfigError` with everything that would stop a run before its first step; returns
    notes. Files that have yet to be fetched are left out: `checks` lists them."""
    rehearsal = Rehearsal(loaded)
    rehearsal.folders()
    rehearsal.data()
    if not rehearsal.lacks_model():
        rehearsal.start()
        rehearsal.room()
    fatal = [problem for problem in rehearsal.problems if problem.kind != "note"]
    if fatal:
        raise ConfigError(in_order(fatal), partial=loaded)
    return rehearsal.problems


@dataclass(frozen=True)
class Untrained:
    """Stands in for the tokenizer that the run will train: one token per byte."""

    vocab_size: int
    bos_id: int | None = None
    eos_id: int = 0
    add_bos: bool = False
    add_eos: bool = True
    fingerprint: str = ""

    def encode_documents(self, texts: list[str]) -> list[Any]:
        return [np.frombuffer(text.encode() + b"\0", np.uint8) for text in texts]


@dataclass
class Rehearsal:
    loaded: Loaded
    problems: list[Problem] = field(default_factory=list)
    given: Tokenizer | None = None
    """The tokenizer, if it already exists."""
    tokens: set[str] = field(default_factory=set)
    """Sources that hold token ids, on which no tokenizer is trained."""
    documents: dict[str, int] = field(default_factory=dict)
    """The number of documents in each source for which it is known."""
    opened: dict[str, Source | Path] = field(default_factory=dict)
    """The training sources, and the folders of built ones."""
    counts_documents: bool = False
    """Whether data.holdout is a number of documents, which the run has yet to choose."""
    taken: SampleFields | None = None
    """The arrays that the model takes; None: tokens."""

    @contextmanager
    def told(self, key: str) -> Iterator[None]:
        """Records an error as a problem of that key, and lets the rehearsal continue."""
        try:
            yield
        except (DataError, ModelError, CheckpointError, OSError) as error:
            problem = Problem(" ".join(str(error).split()), self.loaded.where(key), key)
            if problem not in self.problems:
                self.problems.append(problem)

    def folders(self) -> None:
        """Checks that the folders a run writes to can be created and written."""
        config, folder = self.loaded.config, RunFolder.of(self.loaded.config)
        wanted = {"job.dump_folder": folder.root}
        if config.metrics.enable_tensorboard:
            wanted["metrics.save_tb_folder"] = folder.tb
        if config.checkpoint.enable:
            wanted["checkpoint.folder"] = folder.checkpoints
        if config.profiling.enable_profiling:
            wanted["profiling.save_traces_folder"] = folder.traces
        for key, path in wanted.items():
            with self.told(key):
                require_place(path)

    def data(self) -> None:
        """Opens the tokenizer and every source, and reads the beginning of each."""
        config = self.loaded.config
        wanted = sources_of(config)
        if config.data.mixture == "documents":
            with self.told("data.mixture"):
                if any(registry.is_made(name, source) for name, source in wanted.items()):
                    raise NoDocuments
        with self.told("data.holdout"):
            shares = shares_of_the_resumed(config, RunFolder.of(config))
            is_number = config.data.holdout and not isinstance(config.data.holdout, float)
            self.counts_documents = bool(is_number and shares is None)
        vocab_size = None
        if not self.lacks_model():
            architecture = model_config(config.model)
            vocab_size = getattr(architecture, "vocab_size", None)
            self.taken = sample_fields(architecture)
        size = max(SMALLEST, trained_size(config.data, vocab_size))
        tokenizer: Any = Untrained(size, add_eos=config.data.add_eos is not False)
        with self.told("model.hf_assets_path"):
            self.given = self.tokenizer(wanted, vocab_size)
            tokenizer = self.given or tokenizer
        built: dict[str, Corpus] = {}
        for name, source in wanted.items():
            key = self.key_of(name, source)
            with self.told(key):
                table = training_table(config, name)
                corpus = self.source(table, name, source, tokenizer, vocab_size)
                built |= {name: corpus} if corpus is not None else {}
            if registry.is_made(name, source):
                self.tokens.add(name)
        with self.told("data.sources"):
            notes = same_data(self.opened, wanted) if len(wanted) > 1 else []
            self.problems += [Problem(note, kind="note") for note in notes]
        with self.told("data.holdout"):
            self.both_sides([name for name in wanted if not registry.is_made(name, wanted[name])])
        with self.told("data"):
            kept = one_tokenizer(self.given, built, asked_policy(config))
            # A tokenizer is trained if any source is text; otherwise the corpora bring theirs.
            if self.given is None and wanted.keys() <= built.keys() | self.tokens:
                tokenizer = kept
        if config.validation.enable:
            by_path = config.validation.dataset_path is not None
            main = "validation.dataset_path" if by_path else "validation.dataset"
            with self.told(main if not config.validation.sets else "validation"):
                check_held_out(config)
            for name, source in held_out_sources(config).items():
                table = validation_table(config, name)
                with self.told(main if table == VALIDATION else table):
                    corpus = self.source(table, name, source, tokenizer, vocab_size)
                    if corpus is not None and not isinstance(tokenizer, Untrained):
                        one_tokenizer(tokenizer, {name: corpus}, whose=OF_TRAINING)

    def both_sides(self, names: list[str]) -> None:
        """Checks that data.holdout leaves documents on both sides, if all sources were counted.
        Which documents are held out depends on their tokens; how many is known well enough."""
        holdout = self.loaded.config.data.holdout
        if not holdout or not names or any(name not in self.documents for name in names):
            return
        total = sum(self.documents[name] for name in names)
        if isinstance(holdout, float):
            require_both_sides(any_of(names, "and"), holdout, round(holdout * total), total)
        elif self.counts_documents:
            check_fewer(holdout, names, total)

    def lacks_model(self) -> bool:
        """Whether the model's config.json has yet to be fetched, which `checks` reports."""
        path = self.loaded.config.model.config
        return path is not None and not Path(path).expanduser().exists()

    def lacks_chats(self) -> bool:
        """Whether the tokenizer with the chat template has yet to be fetched."""
        path = self.loaded.config.model.hf_assets_path
        is_missing = path is not None and not Path(path).expanduser().exists()
        return is_missing and self.loaded.config.sft.shape != "off"

    def tokenizer(
        self, wanted: Mapping[str, DataSource], vocab_size: int | None
    ) -> Tokenizer | None:
        """Returns the tokenizer that the run will use, if it already exists."""
        config = self.loaded.config
        path = trained_path(config.data, wanted, trained_size(config.data, vocab_size))
        folder = RunFolder.of(config)
        if config.model.hf_assets_path is not None:
            path = Path(config.model.hf_assets_path).expanduser()
        elif committed(folder.checkpoints) and folder.tokenizer.is_dir():
            path = folder.tokenizer
        if not path.exists():
            return None
        place = Preparer(policy=policy_of_the_resumed(config.checkpoint, folder))
        there = {name: one for name, one in wanted.items() if not self.is_missing(name, one)}
        return open_tokenizer(path, config, there, place)

    def source(
        self, table: str, name: str, wanted: DataSource, tokenizer: Any, vocab_size: int | None
    ) -> Corpus | None:
        """Opens a source and reads its beginning. Returns it if it is a built corpus."""
        data = self.loaded.config.data
        folder = registry.find_folder(name, wanted, data)
        if registry.is_made(name, wanted):
            self.made(table, name, wanted)
            return None
        if self.is_missing(name, wanted) or self.lacks_chats():
            return None
        if folder is not None and is_corpus(folder):
            refuse_choices(wanted, table, f"{folder} is a built corpus, which")
            corpus = open_built(folder)
            check_made_by(corpus.layout, self.loaded.config, table)
            self.fits(name, corpus.arrays)
            check_vocabulary(name, corpus.vocab_size, vocab_size)
            sizes = corpus.sizes()
            if sizes is not None and not is_validation(table):
                self.documents[name] = int(sizes[:, 0].sum())
                self.opened[name] = folder
            return corpus
        source = open_wanted(self.loaded.config, table, name, wanted)
        if not is_validation(table):
            self.opened[name] = source
        self.fits(name, held_by(name, source))
        if isinstance(source, ArrayList):
            self.images(table, name, source)
            return None
        for note in getattr(source, "notes", ()):
            self.problems.append(Problem(f"{name}: {note}", kind="note"))
        skip_bad = data.bad_documents == "skip"
        with named_by_keys():
            layout = sketch(name, source, tokenizer, skip_bad=skip_bad, vocab_size=vocab_size)
        check_vocabulary(name, layout.vocab_size, vocab_size)
        is_given = self.loaded.config.model.hf_assets_path is not None
        is_trained_here = isinstance(tokenizer, Untrained) and not is_given
        if layout.kind == "text" and is_trained_here and data.add_bos:
            raise DataError(
                "a tokenizer that is trained here has no beginning-of-document token; turn "
                "data.add_bos off"
            )
        if layout.kind == "tokens":
            self.tokens.add(name)
        maker = ShardMaker(layout, source, tokenizer)
        documents, tokens, is_all = maker.try_out(FEW_DOCUMENTS, FEW_CHARACTERS)
        counted = counted_words(maker.counts())
        if not tokens:
            what = ", ".join([f"it holds no {layout.unit}", *counted])
            raise DataError(f"{layout.source} is empty: {what}")
        if counted:
            message = f"{name}: of the first {documents:,} documents, {any_of(counted, 'and')}"
            self.problems.append(Problem(message, kind="note"))
        if self.counts_documents and not is_validation(table):
            num_shards = count_shards(source, shard_documents(data))
            check_countable(int(data.holdout), name, num_shards, is_built=False)
        if is_all and not is_validation(table):
            self.documents[name] = documents
        training = self.loaded.config.training
        batch = max(training.global_batch_size, training.local_batch_size)
        batch *= training.seq_len if layout.arrays is None else 1
        if is_all and tokens < batch:
            is_guess = layout.kind == "text" and isinstance(tokenizer, Untrained)
            more = "at most " if is_guess else ""
            message = f"{name} has {more}{tokens:,} {layout.unit}, less than a batch of {batch:,}"
            self.problems.append(Problem(message, self.loaded.source, kind="note"))
        return None

    def made(self, table: str, name: str, wanted: DataSource) -> None:
        """Notes that random images replace a list that does not exist."""
        config = self.loaded.config
        images = None if self.lacks_model() else registry.made_images(name, wanted, config)
        self.fits(name, None if images is None else images.arrays)
        held_out = is_validation(table)
        path = config.validation.dataset_path if held_out else config.training.dataset_path
        if isinstance(images, RandomImages) and path and registry.is_placeholder(config, path):
            words = placeholder_words(config, table, path, images)
            self.problems.append(Problem(words, kind="note"))

    def images(self, table: str, name: str, source: ArrayList) -> None:
        """Reads the first image, and notes if there are too few for a batch."""
        source.fill(0, np.empty(source.shape, source.dtype_of_all))
        training = self.loaded.config.training
        batch = max(training.global_batch_size, training.local_batch_size)
        if len(source) < batch and not is_validation(table):
            message = f"{name} has {len(source):,} images, less than a batch of {batch:,}"
            self.problems.append(Problem(message, self.loaded.source, kind="note"))

    def fits(self, name: str, held: Arrays | None) -> None:
        """Raises unless a source holds what the model takes."""
        if not self.lacks_model():
            config = self.loaded.config
            casts = casts_samples(model_config(config.model))
            require_fields(name, held, self.taken, model_name(config), casts)

    def is_missing(self, name: str, wanted: DataSource) -> bool:
        """Whether a source has yet to be fetched, which `checks` reports."""
        folder = registry.find_folder(name, wanted, self.loaded.config.data)
        if folder is None:
            return not registry.is_built_in(wanted.dataset or name)
        return not folder.exists() and not folder.with_name(folder.name + ".idx").exists()

    def key_of(self, name: str, source: DataSource) -> str:
        if self.loaded.config.data.sources:
            return f"data.sources.{name}"
        return "training.dataset" if source.path is None else "training.dataset_path"

    def start(self) -> None:
        """Checks that the checkpoint to resume, or the weights to start from, fit model and
        data."""
        config = self.loaded.config
        settings = config.checkpoint
        own = committed(RunFolder.of(config).checkpoints)
        if settings.resume not in ("auto", "none"):
            path = Path(settings.resume).expanduser()
            if path.exists():
                with self.told("checkpoint.resume"):
                    self.note(try_checkpoint(newest_in(path), config, self.given))
        elif settings.enable and settings.resume == "auto" and own:
            with self.told("job.dump_folder"):
                corpora_of(RunFolder.of(config).root)
                self.note(try_newest(own, config, self.given))
        elif settings.initial_load_path is not None:
            path = Path(settings.initial_load_path).expanduser()
            if path.exists():
                with self.told("checkpoint.initial_load_path"):
                    try_weights(path, config)

    def note(self, notes: list[str]) -> None:
        self.problems += [Problem(note, kind="note") for note in notes]

    def room(self) -> None:
        """Notes if the disk has too little space for the checkpoints."""
        config = self.loaded.config
        if not config.checkpoint.enable:
            return
        model = model_of(config)
        freeze(model, config.model.freeze)
        parameters = named_parameters([model])
        width = getattr(torch, config.training.dtype).itemsize
        trained = {n: tuple(p.shape) for n, p in parameters.items() if p.requires_grad}
        size = sum(p.numel() * width for p in parameters.values())
        size += int(state_bytes(config, trained, saved=True))
        if words := lack_of_room(RunFolder.of(config).checkpoints, config.checkpoint, size):
            key = "job.dump_folder"
            self.problems.append(Problem(words, self.loaded.where(key), key, kind="note"))


def require_place(folder: Path) -> None:
    """Raises if a folder cannot be created or written to, without creating it."""
    there = folder.absolute()
    while not (there.exists() or there.is_symlink()):
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(f"{folder} cannot be created: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write to {there}")


def try_newest(
    checkpoints: list[Path], config: JobConfig, tokenizer: Tokenizer | None
) -> list[str]:
    """Tries the newest checkpoint, as a run does: one that cannot be read is skipped for an older
    one, with a note. If none can be read, raises the problem of the newest."""
    problems: list[CheckpointError] = []
    for path in reversed(checkpoints):
        try:
            notes = try_checkpoint(path, config, tokenizer)
            return [f"{problem}; {path.name} will be resumed" for problem in problems] + notes
        except MismatchError:  # older ones do not fit either
            raise
        except CheckpointError as error:
            problems.append(error)
    raise problems[0]


def try_checkpoint(path: Path, config: JobConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Raises if a run could not resume the checkpoint; returns notes about changed settings."""
    if plugin("four_files").is_four_files(path):
        model, files = model_of(config), plugin("four_files").open_four_files(path)
        has = {name: tuple(lazy.shape) for name, lazy in files.tensors.items()}
        refuse_unused(path, has, state_names(model))
        kept = {} if config.checkpoint.skip_optimizer else state_shapes(model, config)
        needs = {MODEL + name: shape for name, shape in shapes_of(model).items()}
        compare(path, {**needs, **kept}, has)
        return []
    with open_checkpoint(path) as checkpoint:
        notes = check_changes(path, checkpoint.run, config, model_config(config.model))
        model = model_of(config)
        kept = {} if config.checkpoint.skip_optimizer else state_shapes(model, config)
        if not config.checkpoint.skip_optimizer:
            check_same_optimizer(checkpoint, config.optimizer, kept)
        if checkpoint.index.kind != "local":  # a local one holds the ranks' own pieces
            refuse_unused(path, checkpoint.tensors, state_names(model))
            has = {name: tuple(entry.shape) for name, entry in checkpoint.tensors.items()}
            needs = {MODEL + name: shape for name, shape in shapes_of(model).items()}
            if not any(map(is_mask, has)):  # a dense one: masks follow from its weights
                needs = {name: shape for name, shape in needs.items() if not is_mask(name)}
            if (origin := Origin.from_json(checkpoint.run)) is not None:
                given = config.checkpoint.initial_load_path
                also = [Path(given).expanduser()] if given is not None else []
                for one in also:
                    origin.check_given(one)
                origin.find(also, look_only=True)
                left_out = {MODEL + name for name in origin.names}
                needs = {name: shape for name, shape in needs.items() if name not in left_out}
            compare(path, {**needs, **kept}, has)
        facts = checkpoint.run
    plan = (facts.get("data") or {}).get("plan")
    if plan is not None:
        saved = Plan.from_json(plan)
        check_still_there(saved, sources_of(config))
        if tokenizer is not None:
            with naming_keys(facts, config):
                check_same_tokenizer(saved, config, tokenizer)
        share, before = config.data.holdout, ((facts.get("config") or {}).get("data") or {})
        for name, source in sources_of(config).items():
            if name not in saved.sources or registry.is_made(name, source):
                continue
            if isinstance(share, float) or not share:
                check_same_holdout(name, saved.sources[name].holdout, float(share))
            elif before.get("holdout", share) != share:  # of which share is not known yet
                check_same_holdout(name, before["holdout"], share)
        check_same_order(
            saved, config.debug.seed, config.data.window_documents, config.data.mixture
        )
    return notes


def try_weights(path: Path, config: JobConfig) -> None:
    model = model_of(config)
    if any((path / name).is_file() for name in (INDEX, SINGLE)):
        load_hf(
            model,
            path,
            lambda one: (torch.empty(0), (0,) * one.ndim, tuple(one.shape)),
            new_rows=new_rows_of(config),
        )
        return
    describe = getattr(model_config(config.model), "to_hf", None)
    weights = plugin("formats").open_any(path, describe() if describe else None).weights()
    own = {n: shape for n, shape in shapes_of(model).items() if added_rule(model, n) is None}
    has = {name: tuple(one.shape) for name, one in weights.items()}
    if (new := new_rows_of(config)) is not None:
        for name in vocabulary_matrices(model) & own.keys() & has.keys():
            own[name] = has[name] if new.fits(has[name], own[name]) else own[name]
    compare(path, own, has)


def model_of(config: JobConfig) -> nn.Module:
    with torch.device("meta"):
        model = build_model(model_config(config.model), config.model.attention)
        apply_transforms(model, transforms_for(config))
    return model


def shapes_of(model: nn.Module) -> Shapes:
    return {name: tuple(one.shape) for name, one in named_parameters([model]).items()}


def state_names(model: nn.Module) -> set[str]:
    return {MODEL + name for name in (*named_parameters([model]), *named_buffers([model]))}


def state_shapes(model: nn.Module, config: JobConfig) -> Shapes:
    """Returns the shapes of the optimizer state in a checkpoint, for the trained parameters."""
    freeze(model, config.model.freeze)
    rules, found = rules_of(config.optimizer), {}
    for name, parameter in named_parameters([model]).items():
        if parameter.requires_grad:
            shape = tuple(parameter.shape)
            for state, kind in state_kinds(rules, name, shape).items():
                found[f"{PREFIX}{name}.{state}"] = () if isinstance(kind, Scalar) else shape
    return found


def compare(path: Path, needs: Shapes, has: Shapes) -> None:
    for name, shape in needs.items():
        if name not in has:
            raise MismatchError(without(path, [n for n in needs if n not in has], "model"))
        if has[name] != shape:
            raise MismatchError(
                f"{path} has {name} with shape {list(has[name])}, but this model needs "
                f"{list(shape)}"
            )
