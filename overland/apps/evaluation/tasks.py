"""Evaluates our models on tasks of lm-evaluation-harness: one saved result, with its key, for all
tasks of a call, and requests shared out among ranks. Definitions, prompts and metrics are the
harness's; scoring and generation are ours.

The first rank runs the harness and distributes the requests; the others compute their share until
they are dismissed. So datasets are read once, and the scores do not depend on the number of ranks.
Each rank saves its results as it goes, and nothing is computed twice. No connection is opened:
datasets come from `overland fetch tasks` (see task_data.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from overland.apps.evaluation.evaluate import EvaluationSession, versions
from overland.apps.evaluation.generate import GenerationRequest, Generator
from overland.apps.evaluation.model import OpenModel
from overland.apps.evaluation.results import Kept, Record
from overland.apps.evaluation.sampling import Sampling
from overland.apps.evaluation.score import ContinuationScorer, Pair, TextScore
from overland.apps.evaluation.task_data import tasks_root
from overland.apps.evaluation.task_run import (
    TaskOptions,
    TaskSettings,
    by_task,
    needs_of,
    run_harness,
    scores_of,
)
from overland.apps.hub.snapshot import read_snapshot
from overland.apps.progress import progress_bar
from overland.data.tokenizer_files import DEFAULT
from overland.errors import ClusterError, DataError, sentence
from overland.files import replace_file
from overland.parallel.comm import all_of, from_first_rank
from overland.words import any_of
from overland.world import World

KIND = "tasks"
HARNESS = "lm_eval"
ROWS_AT_ONCE = {"cpu": 8, "cuda": 64}
DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
KNOWN = ("until", "max_gen_toks", "do_sample", *DRAWN_BY)
AT_ONCE = 16_384  # requests, which are held in memory when sent between ranks
Texts = Callable[
    [Sequence[Sequence[int]], Sequence[str], dict[str, Any]], Iterator[list[tuple[int, str]]]
]
"""Takes prompts and their keys; yields batches of (number of the prompt, its completion)."""
Work = tuple[Literal["score", "generate"], list[Any], list[str], dict[str, Any]]


def evaluate_tasks(session: EvaluationSession, asked: TaskOptions) -> Record:
    """Returns the scores on tasks: from a saved result, resumed, or computed."""
    settings, root = settings_for(session, asked), session.asked.datasets or tasks_root()
    name = ",".join(settings.tasks)
    kept = session.kept(KIND, name, session.once(partial(key_for, session, settings, root)))
    if (before := session.once(kept.result)) is not None:
        return before
    crew = crew_of(session, settings, kept, kept.done() if session.world.is_first else [])
    if not session.world.is_first:
        crew.serve()
        return {}
    if crew.known:
        session.report(f"resuming: {len(crew.known):,} answers are already saved")
    started = time.monotonic()
    try:
        model = harness_model(session, settings, crew)
        results = run_harness(model, settings, root)
    finally:
        crew.dismiss()
    if model.num_cut:
        session.report(
            f"note: {model.num_cut:,} prompts were longer than {settings.context:,} tokens and "
            "were truncated on the left (--context)"
        )
    samples, scores = results.pop("samples", None), scores_of(results)
    numbers = {"scores": scores, "results": by_task(scores), "cut_prompts": model.num_cut}
    record = kept.finish(session.record(KIND, name, numbers, settings, started, HARNESS))
    folder = None
    if record["kept"] is not None:
        folder = write_harness_files(kept.path.with_suffix(""), results, samples, session.report)
    return {**record, "harness": None if folder is None else str(folder)}


def settings_for(session: EvaluationSession, asked: TaskOptions) -> TaskSettings:
    found = session.found
    allowed = getattr(found.architecture, "max_position_embeddings", found.context)
    return TaskSettings(
        context=session.asked.context or allowed,
        dtype=str(session.dtype).removeprefix("torch."),
        limit=session.asked.limit,
        **asdict(asked),
    )


def key_for(session: EvaluationSession, settings: TaskSettings, root: Path) -> list[Any]:
    """Returns everything that affects the scores."""
    include = None if settings.include_path is None else Path(settings.include_path)
    needs = needs_of(settings.tasks, include)
    commits = []
    for one in needs.datasets:
        had = read_snapshot(one.folder(root))
        commits.append([one.name, one.subset, None if had is None else had.commit])
    marks = [sorted(commits, key=str), needs.definitions]
    weights, tokenizer = session.mark_of_weights(), session.found.tokenizer.fingerprint
    return [weights, tokenizer, asdict(settings), versions(HARNESS), marks]


def crew_of(
    session: EvaluationSession,
    settings: TaskSettings,
    kept: Kept,
    done: Iterable[Mapping[str, Any]],
) -> TaskRanks:
    ranked = session.ranked
    scorer = ContinuationScorer(
        ranked, max_length=settings.context, batch_size=session.asked.batch_size
    )
    is_whole = ranked.num_parts == session.world.size and not ranked.in_step
    texts = partial(task_texts, session, settings.context) if is_whole else None
    return TaskRanks(scorer, texts, session.world, keep=kept.add, done=done)


def harness_model(session: EvaluationSession, settings: TaskSettings, crew: TaskRanks) -> Any:
    from overland.apps.evaluation.harness import HarnessModel

    tokenizer, config = session.found.tokenizer, session.found.config
    is_plain = settings.add_bos is None and settings.chat_template is None
    if config is not None and is_plain and tokenizer.add_bos != tokenizer.begins_with_bos:
        begin, other = ("with", "no-") if tokenizer.begins_with_bos else ("without", "")
        session.report(
            f"note: prompts begin {begin} BOS, following the tokenizer, unlike the documents that "
            f"the model was trained on; use --{other}add-bos to match them"
        )
    is_long = config is not None and config.training.seq_len < settings.context
    if config is not None and is_long and session.asked.context is None:
        session.report(
            f"note: prompts may have up to {settings.context:,} tokens, the limit in the model's "
            f"config, but it was trained on {config.training.seq_len:,}; --context limits them"
        )
    return HarnessModel(
        crew,
        tokenizer,
        max_length=settings.context,
        add_bos=settings.add_bos,
        template=settings.chat_template or DEFAULT,
        facts={
            "model_num_parameters": sum(p.numel() for p in session.ranked.model.parameters()),
            "model_dtype": settings.dtype,
            "model_path": str(session.found.path),
            "model_step": session.found.step,
        },
    )


def task_texts(
    session: EvaluationSession,
    context: int,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[str],
    settings: dict[str, Any],
) -> Iterator[list[tuple[int, str]]]:
    """Generates completions for this rank's share of the prompts."""
    found, ranked = session.found, session.ranked
    opened = OpenModel(
        ranked.model, found.tokenizer, found.config, context, found.path, found.step,
        found.end_ids, session.dtype, ranked.device,
    )  # fmt: skip
    sampling = sampling_of(settings)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    mine = order[ranked.part :: ranked.num_parts]
    usual = ROWS_AT_ONCE.get(ranked.device.type, ROWS_AT_ONCE["cuda"])
    # Sampling depends on the prompt's number, which must not depend on what remains to be done.
    size = (session.asked.batch_size or usual) if sampling.is_greedy else 1
    stop = [one for one in settings["until"] if one]
    wanted = GenerationRequest(settings["max_gen_toks"], sampling, opened.end_ids, stop)
    with closing(Generator(opened, batch_size=size, length=context)) as generator:
        for start in range(0, len(mine), size):
            some = mine[start : start + size]
            first = int(keys[some[0]][:7], 16)
            made = generator.generate([prompts[number] for number in some], wanted, first)
            # Only the new tokens are decoded, as in the harness.
            texts = [opened.tokenizer.decode(one.ids) for one in made]
            yield list(zip(some, texts, strict=True))


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """Returns the sampling for the harness's settings."""
    if unknown := [name for name in settings if name not in KNOWN]:
        raise DataError(
            f"a task requests generation with {any_of(unknown, 'and')}, which is not supported; "
            f"supported: {', '.join(KNOWN)}"
        )
    if not settings.get("do_sample"):
        return Sampling(repetition_penalty=settings.get("repetition_penalty", 1.0))
    return Sampling(**{name: settings[name] for name in DRAWN_BY if name in settings})


def write_harness_files(
    folder: Path,
    results: Mapping[str, Any],
    samples: Mapping[str, Sequence[Any]] | None,
    report: Any,
) -> Path | None:
    """Writes the harness's own files next to the result: results.json, and samples per task."""
    from lm_eval.utils import handle_non_serializable

    as_json = partial(json.dumps, default=handle_non_serializable, ensure_ascii=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "results.json", as_json(results, indent=2) + "\n", shared=True)
        for task, some in (samples or {}).items():
            lines = "".join(as_json(one) + "\n" for one in some)
            replace_file(folder / f"samples_{task}.jsonl", lines, shared=True)
    except OSError as error:
        report(f"note: the harness's files were not saved: {sentence(error)}")
        return None
    return folder


class TaskRanks:
    def __init__(
        self,
        scorer: ContinuationScorer,
        texts: Texts | None,
        world: World,
        *,
        keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
        done: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """`texts` generates text, if this layout can; `done` is what `keep` saved of an interrupted
        evaluation."""
        self.scorer, self.texts, self.world, self.keep = scorer, texts, world, keep
        self._is_waited_for = False
        """Whether the other ranks are computing, and waiting for this rank's share."""
        self.known: dict[str, Any] = {}
        for record in done:
            if isinstance(found := record.get("done"), dict):
                self.known |= found

    def score(self, pairs: Sequence[Pair]) -> list[TextScore]:
        keys = [key_of(context, continuation) for context, continuation in pairs]
        self._compute("score", pairs, keys, {})
        return [TextScore(*self.known[key]) for key in keys]

    def generate(self, prompts: Sequence[Sequence[int]], settings: dict[str, Any]) -> list[str]:
        """Generates a completion for each prompt. With sampling, a repeated prompt is sampled
        separately each time."""
        counts: Counter[str] = Counter()
        keys = []
        for prompt in prompts:
            key = key_of(prompt, [], settings)
            counts[key] += 1
            keys.append(f"{key}-{counts[key]}" if settings.get("do_sample") else key)
        self._compute("generate", prompts, keys, settings)
        return [self.known[key] for key in keys]

    def require_texts(self) -> None:
        """Raises an error if this layout cannot generate text."""
        if self.texts is None:
            raise ClusterError(
                "a model that is split over ranks cannot generate text: omit --shard and "
                "--tensor-parallel, so that each rank has the whole model, or omit tasks that "
                "generate"
            )

    def serve(self) -> None:
        """Computes requests from the first rank; run by all other ranks."""
        while (work := from_first_rank(None)) is not None:
            all_of(self._own_part(work))

    def dismiss(self) -> None:
        """Ends `serve` on the other ranks. If this rank failed while they wait for its share, they
        cannot be reached; whatever launched them ends them."""
        if self.world.size > 1 and not self._is_waited_for:
            from_first_rank(None)

    def _compute(
        self,
        kind: Literal["score", "generate"],
        requests: Sequence[Any],
        keys: list[str],
        settings: dict[str, Any],
    ) -> None:
        new = {key: one for key, one in zip(keys, requests, strict=True) if key not in self.known}
        what = "continuations" if kind == "score" else "texts"
        with progress_bar(what, total=len(new)) as bar:
            for start in range(0, len(new), AT_ONCE):
                some = list(new)[start : start + AT_ONCE]
                work: Work = (kind, [new[key] for key in some], some, settings)
                if self.world.size == 1:
                    self.known |= self._own_part(work, bar.advance)
                    continue
                from_first_rank(work)
                self._is_waited_for = True
                for part in all_of(self._own_part(work, bar.advance)):
                    self.known |= part
                self._is_waited_for = False
                bar(start + len(some), len(new), what)

    def _own_part(
        self, work: Work, advance: Callable[[float], None] = lambda more: None
    ) -> dict[str, Any]:
        kind, requests, keys, settings = work
        found: dict[str, Any] = {}
        if kind == "score":
            batches: Iterator[list[tuple[int, Any]]] = self.scorer.score(requests)
        else:
            self.require_texts()
            assert self.texts is not None
            batches = self.texts(requests, keys, settings)
        for batch in batches:
            values = {keys[number]: value for number, value in batch}
            if self.scorer.ranked.leads:
                self.keep({"done": values})
                found |= values
            advance(len(values) * self.scorer.ranked.num_parts)
        return found


def key_of(context: Sequence[int], continuation: Sequence[int], settings: Any = None) -> str:
    """Returns the key under which a result is saved."""
    words = json.dumps([list(context), list(continuation), settings], sort_keys=True, default=str)
    return hashlib.blake2b(words.encode(), digest_size=12).hexdigest()
