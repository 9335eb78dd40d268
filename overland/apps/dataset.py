"""`open_dataset`: the training batches of a config or a run, by step, for scripts and previews."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from overland.apps.ledger import read_ledger
from overland.arguments import integer, path_of
from overland.checks import devices_for
from overland.checks.model import with_custom_import, with_new_tokens
from overland.config.arguments import ngpu
from overland.config.derived import resolve_degrees
from overland.config.load import load_config
from overland.config.schema import Data, Job, JobConfig
from overland.config.validate import validate_again
from overland.data.corpora import Opener, Preparer
from overland.data.corpus import Corpus
from overland.data.layout import is_corpus
from overland.data.plan import Plan, kept_plan
from overland.data.prepare import Dataset, as_planned, kept_policy, training_data
from overland.data.sampler import AnyCorpus, Sampler
from overland.data.tokenizer import Tokenizer
from overland.data.wanted import sources_of
from overland.data.windows import Reading
from overland.errors import DataError
from overland.models.registry import model_config
from overland.run_folder import CONFIG, PLAN, TOKENIZER, RunFolder
from overland.words import visible

if TYPE_CHECKING:
    from overland.data.batch import Batch


MAX_STEP = 10**12  # the numbers of its rows fit into 64 bits with any batch size


class TrainingSet:
    """Global batches by step, each a pure function of the data, the seed and its number."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the text; None for pre-tokenized data or arrays."""
        return self.dataset.tokenizer

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 1, on the CPU. Ignores batches that a run has
        skipped after a loss spike; `overland data preview RUN` accounts for them."""
        from overland.data.batch import load_batch

        return load_batch(self.dataset.rows, check_step(step, "step") - 1)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of steps 1, 2, 3, … endlessly."""
        from overland.data.batch import batches

        return batches(self.dataset.rows, 0)

    def close(self) -> None:
        """Ends the processes that tokenize ahead."""
        self.dataset.close()

    def __enter__(self) -> TrainingSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_dataset(source: JobConfig | str | Path) -> TrainingSet:
    """Opens the data that a config trains on, or that a run was trained on.

    Args:
        source: What `overland.load_config` returned, or a run folder, whose plan is read.
    """
    if isinstance(source, JobConfig):
        devices = ngpu(os.environ) or 1  # as `overland.train` has
        return TrainingSet(_of_config(validate_again(source, "the config"), Preparer(), devices))
    return TrainingSet(open_step(str(path_of(source, "source")), [], 1)[0])


def check_step(step: int, name: str) -> int:
    return integer(step, name, least=1, most=MAX_STEP)


def open_step(config: str, settings: list[str], step: int) -> tuple[Dataset, int]:
    """Returns the data and the number of the batch of a step. A run has its own plan, and its
    ledger records skipped batches."""
    check_step(step, "--step")
    run = Path(config).expanduser()
    if run.name == CONFIG and not settings:
        run = run.parent
    is_run = (run / PLAN).is_file()
    found = with_new_tokens(load_config(str(run / CONFIG) if is_run else config, settings))
    loaded = with_custom_import(found)
    if not is_run:
        devices = ngpu(os.environ) or devices_for(found)[0]
        return _of_config(loaded, Preparer(report=_say), devices), step - 1
    folder = RunFolder(loaded.model_copy(update={"job": Job(dump_folder=str(run))}))
    fed = read_ledger(folder.ledger).fed if folder.ledger.is_file() else {}
    ahead = step - max(fed, default=0)
    batch = fed[step].batch if step in fed else step - 1
    if fed and ahead > 0:
        batch = fed[max(fed)].batch + ahead
    return planned_data(loaded, run), batch


def planned_data(config: JobConfig, run: Path) -> Dataset:
    """Opens the training set of a run from its folder: plan, corpora, tokenizer."""
    kept = kept_plan(run)
    if not kept:
        raise DataError(f"{run / PLAN} does not exist: the run has not recorded its data plan")
    folders, plan = kept.get("corpora", {}), Plan.from_json(kept["plan"])
    tokenizer = tokenizer_of(run, config.data) if (run / TOKENIZER).is_dir() else None
    wanted, vocab_size = sources_of(config), _vocab_size(config)
    corpora: dict[str, AnyCorpus] = {}
    reader = Opener(config, tokenizer, vocab_size, Preparer(tokenizes=False))
    for name in plan.sources:
        folder, source = Path(folders.get(name, "")), wanted.get(name)
        if name in folders and is_corpus(folder):
            # A source that is no longer in the config can be read as far as its shards exist.
            corpora[name] = Corpus(folder) if source is None else reader.streamed(folder, source)
        elif source is not None:
            corpora[name] = replace(reader, preparer=Preparer()).open(source)
    corpora = as_planned(plan, corpora, reader.reopen)
    reading = Reading(plan.seed, True, plan.window_documents, run / "data")
    rows = Sampler(plan, corpora, reading)
    return Dataset(config.training.dataset, rows, tokenizer)


def tokenizer_of(run: Path, data: Data) -> Tokenizer:
    """Opens the tokenizer in a run's folder, with the policy of its documents."""
    kept = kept_policy(run)
    add_bos = kept.add_bos if data.add_bos is None else data.add_bos
    add_eos = kept.add_eos if data.add_eos is None else data.add_eos
    return Tokenizer(run / TOKENIZER, add_bos=add_bos, add_eos=add_eos is not False)


def _of_config(config: JobConfig, preparer: Preparer, devices: int) -> Dataset:
    memory, size = RunFolder(config).data, global_batch_size(config, devices)
    return training_data(config, size, _vocab_size(config), preparer, memory)


def _vocab_size(config: JobConfig) -> int | None:
    return getattr(model_config(config.model), "vocab_size", None)


def _say(message: str) -> None:
    print(visible(message), file=sys.stderr)


def global_batch_size(config: JobConfig, num_devices: int) -> int:
    """Returns the global batch size of the config, which may depend on the number of devices."""
    size = config.training.global_batch_size
    if size != -1:
        return size
    print(
        f"note: training.global_batch_size depends on the number of devices; shown for "
        f"{num_devices} (set NGPU=N to change it)",
        file=sys.stderr,
    )
    return config.training.local_batch_size * resolve_degrees(config.parallelism, num_devices).dp
