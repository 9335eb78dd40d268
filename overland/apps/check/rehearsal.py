"""Opens everything that a run opens before its first step (tokenizer, data, weights, checkpoints)
without writing anything. This is how `overland check` and `overland submit` find what `overland
train` would refuse. The rules are those of `data/` and of `resume.py`; here, problems are collected
instead of raised, and tensors have shapes but no memory.

Only the beginning of each source is read; a bad document further on is found only in training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overland.apps.check.look import Beginning, Untrained, look_at
from overland.apps.data.tokenizer_training import SMALLEST, trained_size
from overland.checkpoint.folder import committed, lack_of_room, newest_in
from overland.checkpoint.lazy import MODEL, Origin
from overland.checkpoint.read import open_checkpoint, refuse_unused, require_fit
from overland.config.derived import model_name, resolve_dtype
from overland.config.errors import ConfigError, Problem
from overland.config.load import Loaded, in_order
from overland.config.schema import JobConfig
from overland.data.arrays import Arrays, require_fields
from overland.data.corpora import (
    ANOTHER_TOKENIZER,
    Opener,
    Preparer,
    changed_settings,
    changed_source,
    find_corpus,
    is_of_another_tokenizer,
    streams_root,
)
from overland.data.corpus import Corpus
from overland.data.holdout import check_fewer, check_held_out, require_both_sides
from overland.data.layout import is_corpus
from overland.data.plan import ChangedSource, Plan, check_same_holdout, check_same_order
from overland.data.prepare import (
    OF_TRAINING,
    asked_policy,
    check_still_there,
    corpora_of,
    one_tokenizer,
    tokenizer_for,
    training_data,
)
from overland.data.sampler import AnyCorpus, NoDocuments
from overland.data.sources.image_files import is_array_list
from overland.data.tokenizer import Tokenizer
from overland.data.wanted import WantedSource, held_out_sources, sources_of
from overland.errors import CheckpointError, DataError, MismatchError, ModelError
from overland.models.build import build_undivided
from overland.models.flops import casts_samples, sample_fields
from overland.models.registry import model_config
from overland.models.weights import load_hf
from overland.optimizers.optimizer import PREFIX
from overland.optimizers.registry import rules_of, state_bytes, state_kinds
from overland.optimizers.rule import Scalar
from overland.parallel.sharding import named_buffers, named_parameters
from overland.plugins import plugin
from overland.run_folder import RunFolder
from overland.training.build import num_steps
from overland.training.resume import check_changes, choose_tensors, naming_keys, preparer_for
from overland.training.start import find_left_out, is_hf, new_rows_of, open_foreign, require_weights
from overland.words import any_of


def require_start(loaded: Loaded) -> list[Problem]:
    """Raises `ConfigError` with everything that would stop a run before its first step; returns
    notes. Files that have yet to be fetched are left out: `checks` lists them."""
    rehearsal = Rehearsal(loaded)
    rehearsal.folders()
    rehearsal.data()
    rehearsal.held_out()
    if not rehearsal.lacks_model:
        rehearsal.start()
        rehearsal.room()
    fatal = [problem for problem in rehearsal.problems if problem.kind != "note"]
    if fatal:
        raise ConfigError(in_order(fatal), partial=loaded)
    return rehearsal.problems


@dataclass
class Rehearsal:
    loaded: Loaded
    problems: list[Problem] = field(default_factory=list)
    preparer: Preparer = field(default_factory=Preparer)
    given: Tokenizer | None = None
    """The tokenizer, if it already exists."""
    tokenizer: Tokenizer | Untrained | None = None
    """The same, or what stands in for it."""

    @contextmanager
    def recorded(self, key: str) -> Iterator[None]:
        """Records an error as a problem of that key, and lets the rehearsal continue."""
        try:
            yield
        except (DataError, ModelError, CheckpointError, OSError) as error:
            problem = Problem(" ".join(str(error).split()), self.loaded.where(key), key)
            if problem not in self.problems:
                self.problems.append(problem)

    def note(self, *notes: str) -> None:
        self.problems += [Problem(note, kind="note") for note in notes]

    def report(self, message: str) -> None:
        """Keeps the notes of what a run would report."""
        if message.startswith("note: "):
            self.note(message.removeprefix("note: "))

    @property
    def config(self) -> JobConfig:
        return self.loaded.config

    @property
    def lacks_model(self) -> bool:
        """Whether the model's config.json has yet to be fetched, which `checks` reports."""
        return is_missing(self.config.model.config)

    def folders(self) -> None:
        """Checks that the folders a run writes to can be created and written."""
        config, folder = self.config, RunFolder(self.config)
        wanted = {"job.dump_folder": folder.root}
        if config.metrics.enable_tensorboard:
            wanted["metrics.save_tb_folder"] = folder.tb
        if config.checkpoint.enable:
            wanted["checkpoint.folder"] = folder.checkpoints
        if config.profiling.enable_profiling:
            wanted["profiling.save_traces_folder"] = folder.traces
        for key, path in wanted.items():
            with self.recorded(key):
                require_place(path)

    def data(self) -> None:
        """Opens the tokenizer and every source, and reads the beginning of each."""
        config, wanted = self.config, sources_of(self.config)
        made = {name for name, one in wanted.items() if one.is_made}
        if config.data.mixture == "documents" and made:
            with self.recorded("data.mixture"):
                raise NoDocuments
        with self.recorded("data.holdout"):
            self.preparer = preparer_for(config, RunFolder(config))
        self.preparer = replace(self.preparer, trains=False, report=self.report)
        size = max(SMALLEST, trained_size(config.data, self.vocab_size))
        self.tokenizer = Untrained(size, add_eos=config.data.add_eos is not False)
        with self.recorded("model.hf_assets_path"):
            if not self.lacks_tokenizer:
                there = {name: one for name, one in wanted.items() if one.is_there}
                self.given = tokenizer_for(config, there, self.vocab_size, self.preparer)
            self.tokenizer = self.given or self.tokenizer
        corpora: dict[str, Corpus] = {}
        begun: dict[str, Beginning] = {}
        for name, one in wanted.items():
            with self.recorded(one.key):
                found = self.look(one)
                corpora |= {name: found} if isinstance(found, Corpus) else {}
                begun |= {name: found} if isinstance(found, Beginning) else {}
        with self.recorded("data.holdout"):
            counts = {name: one.documents for name, one in begun.items()}
            counts |= {name: num_documents(one) for name, one in corpora.items()}
            self.both_sides({name: counts.get(name) for name in wanted if name not in made})
        with self.recorded("data"):
            kept = one_tokenizer(self.given, corpora, asked_policy(config))
            tokens = made | {name for name, one in begun.items() if one.kind == "tokens"}
            # A tokenizer is trained if any source is text; otherwise the corpora bring theirs.
            if self.given is None and wanted.keys() <= corpora.keys() | tokens:
                self.tokenizer = kept

    def held_out(self) -> None:
        """Opens the validation sets, after the training data, whose tokenizer they need."""
        config = self.config
        by_path = config.validation.dataset_path is not None
        main = "validation.dataset_path" if by_path else "validation.dataset"
        with self.recorded(main if not config.validation.sets else "validation"):
            if config.validation.enable:
                check_held_out(config)
        for name, one in held_out_sources(config).items():
            with self.recorded(one.key):
                found = self.look(one)
                if isinstance(found, Corpus) and not isinstance(self.tokenizer, Untrained):
                    one_tokenizer(self.tokenizer, {name: found}, whose=OF_TRAINING)

    def look(self, wanted: WantedSource) -> AnyCorpus | Beginning | None:
        """Looks at a source that is there, and checks that it holds what the model takes."""
        config = self.config
        lacks_chats = self.lacks_tokenizer and config.sft.shape != "off"
        if self.lacks_model if wanted.is_made else lacks_chats:
            return None
        if not wanted.is_there:
            return None
        model = None if self.lacks_model else model_config(config.model)
        if model is not None and sample_fields(model) is not None:  # before any is read
            self.require_fields(wanted.name, held_by_wanted(wanted), model)
        tokenizer: Any = self.tokenizer
        found = look_at(wanted, Opener(config, tokenizer, self.vocab_size, self.preparer))
        if model is not None:
            self.require_fields(wanted.name, getattr(found, "arrays", None), model)
        return found

    def require_fields(self, name: str, arrays: Arrays | None, model: Any) -> None:
        of_model, casts = model_name(self.config), casts_samples(model)
        require_fields(name, arrays, sample_fields(model), of_model, casts)

    def both_sides(self, documents: Mapping[str, int | None]) -> None:
        """Checks that data.holdout leaves documents on both sides, if all sources were counted.
        Which documents are held out depends on their tokens; how many is known well enough."""
        holdout, names = self.config.data.holdout, list(documents)
        total = sum(count or 0 for count in documents.values())
        if not holdout or not names or None in documents.values():
            return
        if isinstance(holdout, float):
            require_both_sides(any_of(names, "and"), holdout, round(holdout * total), total)
        elif self.preparer.holdout is None:
            check_fewer(holdout, names, total)

    @property
    def vocab_size(self) -> int | None:
        model = None if self.lacks_model else model_config(self.config.model)
        return getattr(model, "vocab_size", None)

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the model's tokenizer has yet to be fetched."""
        return is_missing(self.config.model.hf_assets_path)

    def start(self) -> None:
        """Checks that the checkpoint to resume, or the weights to start from, fit model and
        data."""
        config, settings = self.config, self.config.checkpoint
        folder = RunFolder(config)
        own = committed(folder.checkpoints)
        if settings.resume not in ("auto", "none"):
            path = Path(settings.resume).expanduser()
            if path.exists():
                with self.recorded("checkpoint.resume"):
                    self.note(*try_checkpoint(newest_in(path), config, self.given))
        elif settings.enable and settings.resume == "auto" and own:
            with self.recorded("job.dump_folder"):
                corpora_of(folder.root)
                self.note(*try_newest(own, config, self.given))
        elif settings.initial_load_path is not None:
            path = Path(settings.initial_load_path).expanduser()
            if path.exists():
                with self.recorded("checkpoint.initial_load_path"):
                    try_weights(path, config)

    def room(self) -> None:
        """Notes if the disk has too little space for the checkpoints."""
        config = self.config
        if not config.checkpoint.enable:
            return
        parameters = named_parameters([model_of(config)])
        width = getattr(torch, config.training.dtype).itemsize
        trained = {n: tuple(p.shape) for n, p in parameters.items() if p.requires_grad}
        size = sum(p.numel() * width for p in parameters.values())
        size += int(state_bytes(config, trained, saved=True))
        if words := lack_of_room(RunFolder(config).checkpoints, config.checkpoint, size):
            key = "job.dump_folder"
            self.problems.append(Problem(words, self.loaded.where(key), key, kind="note"))


def is_missing(path: str | None) -> bool:
    return path is not None and not Path(path).expanduser().exists()


def held_by_wanted(wanted: WantedSource) -> Arrays | None:
    """Returns the arrays of a source that a config names, or None for text and tokens."""
    if wanted.is_made:
        images = wanted.made_images()
        return None if images is None else images.arrays
    source = wanted.open()
    return Arrays.declared(wanted.name, source.fields) if source.kind == "arrays" else None


def check_same_tokenizer(plan: Plan, config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raises an error if a run was trained with another tokenizer, as far as the corpora that it
    read still exist."""
    for name, wanted in sources_of(config).items():
        if name not in plan.sources or wanted.built:
            continue
        before = find_corpus(streams_root(config), plan.sources[name].fingerprint)
        if before is None:
            continue
        if is_of_another_tokenizer(before, config, tokenizer):
            raise ChangedSource(name, (ANOTHER_TOKENIZER,))
        source = wanted.open()
        if changed_settings(before, source):
            raise changed_source(name, before, source)


def num_documents(corpus: Corpus) -> int | None:
    sizes = corpus.sizes()
    return None if sizes is None else int(sizes[:, 0].sum())


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
    model = model_of(config)
    state, buffers = state_of(model, config), named_buffers([model])
    if plugin("four_files").is_four_files(path):
        files = plugin("four_files").open_torch(path).tensors
        refuse_unused(path, files, state)
        needs = {
            name: one for name, one in state.items() if name.removeprefix(MODEL) not in buffers
        }
        require_fit(path, {name: tuple(lazy.shape) for name, lazy in files.items()}, needs)
        return []
    with open_checkpoint(path) as checkpoint:
        facts = checkpoint.run
        notes = check_changes(path, facts, config, model_config(config.model))
        optimizer = None if config.checkpoint.skip_optimizer else config.optimizer
        chosen = choose_tensors(checkpoint, state, buffers, state, optimizer)
        if checkpoint.index.kind != "local":
            if (origin := Origin.from_json(facts)) is not None:
                find_left_out(origin, config, look_only=True)
            has = {name: tuple(entry.shape) for name, entry in checkpoint.tensors.items()}
            require_fit(path, has, chosen.tensors)
    plan = (facts.get("data") or {}).get("plan")
    if plan is not None:
        saved = Plan.from_json(plan)
        check_still_there(saved, sources_of(config))
        if tokenizer is not None:
            with naming_keys(facts, config):
                check_same_tokenizer(saved, config, tokenizer)
        check_holdout(saved, config, (facts.get("config") or {}).get("data") or {})
        data = config.data
        check_same_order(saved, config.debug.seed, data.window_documents, data.mixture)
    return notes


def check_holdout(saved: Plan, config: JobConfig, before: Mapping[str, Any]) -> None:
    """Raises if the share that is held out has changed; of a number of documents, it is not known
    yet."""
    share = config.data.holdout
    for name, source in sources_of(config).items():
        if name not in saved.sources or source.is_made:
            continue
        if isinstance(share, float) or not share:
            check_same_holdout(saved.sources[name].holdout, float(share), f" for {name}")
        elif before.get("holdout", share) != share:
            check_same_holdout(before["holdout"], share, f" for {name}")


def try_weights(path: Path, config: JobConfig) -> None:
    """Raises if a run could not start from these weights."""
    model = model_of(config)
    if is_hf(path):
        no_memory = lambda one: (torch.empty(0), (0,) * one.ndim, tuple(one.shape))
        load_hf(model, path, no_memory, new_rows=new_rows_of(config))
    else:
        weights = open_foreign(path, model_config(config.model)).weights()
        require_weights(path, [model], weights, new_rows_of(config))


def model_of(config: JobConfig) -> nn.Module:
    """Returns the whole model on the meta device. Any device will do, and attention kernels need
    theirs."""
    with torch.device("meta"):
        return build_undivided(model_config(config.model), resolve_dtype(config, "cuda"))


def state_of(model: nn.Module, config: JobConfig) -> dict[str, Tensor]:
    """Returns what a run loads from a checkpoint, without memory."""
    parameters = named_parameters([model])
    state: dict[str, Tensor] = {MODEL + name: one for name, one in parameters.items()}
    state |= {MODEL + name: one for name, one in named_buffers([model]).items()}
    if config.checkpoint.skip_optimizer:
        return state
    rules = rules_of(config.optimizer)
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            shape = tuple(parameter.shape)
            for kept, kind in state_kinds(rules, name, shape).items():
                size = () if isinstance(kind, Scalar) else shape
                state[f"{PREFIX}{name}.{kept}"] = torch.empty(size, device="meta")
    return state


def known_steps(config: JobConfig, global_batch_size: int) -> int | None:
    """Returns the number of steps, if it can be known without tokenizing anything."""
    if config.training.epochs is None:
        return config.training.steps
    (wanted,) = (one for one in sources_of(config).values() if one.asked.weight)
    folder = wanted.folder
    is_list = folder is not None and folder.is_file() and is_array_list(folder)
    is_built = folder is not None and is_corpus(folder) and not config.data.holdout
    if not (wanted.is_made or is_list or is_built):
        return None
    dataset = training_data(config, global_batch_size, None, Preparer())
    try:
        return num_steps(dataset, config.training)
    finally:
        dataset.close()
