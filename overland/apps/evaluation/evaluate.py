"""Runs one evaluation, on every rank: opens the model, measures the perplexity of one dataset after
another, and saves each result under a key of everything that affects it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import overland
from overland.apps.evaluation.documents import EvaluationSet, sets_of, sets_of_run
from overland.apps.evaluation.model import Found, Given, dtype_of, find_model, find_run
from overland.apps.evaluation.parts import Cutter
from overland.apps.evaluation.perplexity import (
    KIND,
    Done,
    Watch,
    figures,
    prefix_id,
    require_some,
    score,
    total,
)
from overland.apps.evaluation.ranks import RankedModel, open_on_ranks
from overland.apps.evaluation.results import (
    Kept,
    Record,
    Report,
    base_of,
    mark_of_weights,
    place_of,
)
from overland.apps.progress import progress_bar
from overland.config.schema import DataSource
from overland.data.corpora import Preparer
from overland.data.holdout import kept_share
from overland.data.prepare import kept_policy
from overland.errors import DataError, ModelError, OutOfMemoryError
from overland.parallel.comm import all_of, once_for_all
from overland.run_folder import TOKENIZER
from overland.training.fit import is_out_of_memory
from overland.world import World

T = TypeVar("T")

MOST_CONTEXT = 4096  # the default is no longer, although many models allow 131,072 tokens
BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """Settings that affect the numbers, in addition to weights and data."""

    context: int
    stride: int
    prefix: int | None
    joined: bool
    limit: int | None
    dtype: str


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(Given):
    """What is asked for, by the names of the arguments of `overland.evaluate`."""

    path: Path
    column: str | None = None
    subset: str | None = None
    split: str | None = None
    data: Sequence[str] = ()
    skip_bad: bool = False
    context: int | None = None
    stride: int | None = None
    joined: bool = False
    prefix: str = "auto"
    limit: int | None = None
    batch_size: int | None = None
    dtype: torch.dtype | None = None
    shard: bool = False
    tensor_parallel: int = 1
    output: Path | None = None
    datasets: Path | None = None
    """Where the tasks' datasets are."""
    again: bool = False


@dataclass(frozen=True)
class EvaluationSession:
    """A loaded model, on this rank."""

    asked: EvaluationRequest
    found: Found
    ranked: RankedModel
    world: World
    dtype: torch.dtype
    report: Report

    def once(self, make: Callable[[], T]) -> T:
        """Runs a function on the first rank only; all ranks get its result, or its error."""
        return make() if self.world.size == 1 else once_for_all(make)

    def gathered(self, mine: list[T]) -> list[T]:
        """Returns the results of all ranks."""
        if self.world.size == 1:
            return mine
        return [one for some in all_of(mine if self.ranked.leads else []) for one in some]

    def mark_of_weights(self) -> str:
        return mark_of_weights(self.found.path, self.asked.base or base_of(self.found.path))

    def kept(self, kind: str, name: str, key: list[Any]) -> Kept:
        """Returns the place of a result. `key`: everything that affects it."""
        path = self.found.path
        place = place_of(path, find_run(path)[0], self.asked.output)
        return Kept(place, kind, name, key, self.report, self.asked.again)

    def record(
        self,
        kind: str,
        name: str,
        numbers: Record,
        settings: Any,
        started: float,
        *packages: str,
    ) -> Record:
        """Returns a result: its numbers, of which model they are, and how they were computed."""
        return {
            "kind": kind,
            "name": name,
            "model": str(self.found.path),
            "step": self.found.step,
            **numbers,
            "settings": asdict(settings),
            "ranks": self.world.size,
            "seconds": round(time.monotonic() - started, 3),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(*packages),
        }


def open_session(
    asked: EvaluationRequest, world: World, device: torch.device, report: Report
) -> EvaluationSession:
    found = find_model(asked.path, asked)
    dtype = dtype_of(asked.dtype, device)
    ranked = open_on_ranks(found, world, device, dtype, asked.shard, asked.tensor_parallel)
    return EvaluationSession(asked, found, ranked, world, dtype, report)


def sets_for(session: EvaluationSession) -> list[EvaluationSet]:
    """Returns the datasets that were requested, or those that a run validates on."""
    asked, config = session.asked, session.found.config
    if asked.data:
        choices = DataSource(column=asked.column, subset=asked.subset, split=asked.split)
        return sets_of(asked.data, config, choices, asked.skip_bad)
    for name in ("column", "subset", "split", "skip_bad"):
        if getattr(asked, name):
            option = name.replace("_", "-")
            raise DataError(f"--{option} has no effect without --data: a run's sets have their own")
    if config is None:
        raise DataError(
            f"--data is required: {asked.path} does not belong to a run with validation data"
        )
    run = find_run(session.found.path)[0]
    assert run is not None
    preparer = Preparer(
        session.once,
        tokenizes=False,
        report=session.report,
        tokenizer=run / TOKENIZER,
        holdout=kept_share(run, config.data),
        policy=kept_policy(run),
    )
    return sets_of_run(config, session.found.vocab_size, preparer)


def settings_of(session: EvaluationSession) -> Settings:
    asked, found = session.asked, session.found
    trained = found.config.training.seq_len if found.config is not None else found.context
    context = asked.context or min(trained, MOST_CONTEXT)
    if context < 2:
        raise ModelError("--context must be at least 2: with 1 there is nothing to predict from")
    if context > found.context:
        session.report(
            f"note: --context {context:,} is longer than the model's context of "
            f"{found.context:,} tokens"
        )
    stride = asked.stride or max(1, context // 2)
    if stride > context:
        raise ModelError(
            f"--stride {stride:,} is longer than the context, {context:,}: tokens between windows "
            "would be skipped"
        )
    prefix = prefix_id(found.tokenizer, asked.prefix)
    name = str(session.dtype).removeprefix("torch.")
    return Settings(context, stride, prefix, asked.joined, asked.limit, name)


def evaluate_set(session: EvaluationSession, one: EvaluationSet, settings: Settings) -> Record:
    """Returns the perplexity on a dataset: from a saved result, resumed, or computed."""
    asked, found = session.asked, session.found
    marks, weights = session.once(lambda: (one.source.marks(), session.mark_of_weights()))
    if asked.prefix in ("bos", "eos") and not one.takes_prefix:
        raise DataError(
            f"--prefix {asked.prefix} has no effect on {one.name}, which has token ids: they are "
            "scored as they are"
        )
    key = [weights, one.fingerprint(marks), found.tokenizer.fingerprint, asdict(settings)]
    kept = session.kept(KIND, one.name, key)
    before, done = session.once(partial(_kept_before, kept, session.report))
    if before is not None:
        return before
    one.require_tokenizer(found.tokenizer)
    started = time.monotonic()
    cutter = Cutter(
        found.tokenizer,
        settings.context,
        settings.stride,
        settings.prefix,
        settings.joined,
        found.vocab_size,
    )
    tokens = BATCH_TOKENS.get(session.ranked.device.type, BATCH_TOKENS["cpu"])
    most = asked.batch_size or max(1, tokens // settings.context)
    expected = asked.limit if asked.limit is not None else one.about_documents()
    with _progress(one.name, expected, session) as watch, _memory_in_words(most, settings):
        mine = score(
            session.ranked,
            cutter.parts(one.documents(asked.limit)),
            batch_tokens=most * settings.context,
            done=done,
            keep=lambda part: kept.add(part.to_json()) if session.ranked.leads else None,
            watch=watch,
        )
    sums = total([*done, *session.gathered(mine)])
    session.once(partial(one.require_unchanged, marks))
    may_prefix = asked.prefix == "auto" and settings.prefix is None and one.takes_prefix
    require_some(sums, one.name, may_prefix)
    numbers = {
        "data": str(one.source.place),
        **figures(sums),
        **{name: value for name, value in asdict(sums).items() if name != "loss"},
        "summed_loss": sums.loss,
        "skipped_documents": one.source.num_bad,
        "takes_prefix": one.takes_prefix,
    }
    record = session.record(KIND, one.name, numbers, settings, started)
    return session.once(partial(kept.finish, record))


def versions(*packages: str) -> dict[str, str]:
    own = {"overland": overland.__version__, "torch": str(torch.__version__)}
    return own | {name: version(name) for name in packages}


def _kept_before(kept: Kept, report: Report) -> tuple[Record | None, list[Done]]:
    """Returns the saved result, or the parts that are already done."""
    if (before := kept.result()) is not None:
        return before, []
    done = [one for one in map(Done.from_json, kept.done()) if one is not None]
    if done:
        report(f"resuming: {len({one.part for one in done}):,} parts are already done")
    elif left := kept.left_over():
        report(
            f"note: {left[0]} belongs to an unfinished evaluation with other weights, data or "
            "settings; you may delete it"
        )
    return None, done


@contextmanager
def _progress(name: str, expected: int | None, session: EvaluationSession) -> Iterator[Watch]:
    """Shows how many documents rank 0 has processed: as a bar in a terminal, otherwise as a line
    from time to time."""
    last, of = time.monotonic(), f" of about {expected:,}" if expected else ""
    with progress_bar(name, "things", expected, visible=session.world.is_first) as bar:

        def move(documents: int) -> None:
            nonlocal last
            bar(documents, expected, name)
            if not bar.is_drawn and time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                session.report(f"{name}: {documents:,}{of} documents")

        yield move


@contextmanager
def _memory_in_words(batch_size: int, settings: Settings) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"out of device memory with {batch_size:,} windows of {settings.context:,} tokens: "
            "lower --batch-size or --context, or split the model over several devices "
            "(--shard, --tensor-parallel); finished parts are saved"
        ) from None


def wait_long(seconds: int = 7 * 86_400) -> None:
    """Raises the timeout, since ranks may have to wait for others with longer documents."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        dist.barrier()
        _set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)
