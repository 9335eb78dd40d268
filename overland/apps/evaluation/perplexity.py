"""Perplexity of a model on documents: per token, and per byte and per word, which are comparable
between models with different tokenizers.

    documents    each separately, or all joined together (`joined`)
    windows      of `context` tokens, every `stride` tokens: every token exactly once
    parts        the unit of work of a rank; finished parts are saved, so that an interrupted
                 evaluation resumes (parts.py, results.py)
    sums         over a row in float64 on the device, everything else exactly rounded, so that the
                 order in which ranks and sessions finish cannot change a bit
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from overland.apps.evaluation.parts import IGNORED, EvaluationPart, batches, padded
from overland.apps.evaluation.ranks import Ranks, RowScorer
from overland.errors import DataError
from overland.world.records import record

KIND = "perplexity"
PROGRESS_SECONDS = 0.2

Watch = Callable[["Sums"], None]
"""Called from time to time with what this rank has processed so far."""


@record
@dataclass
class Sums:
    """Totals over parts."""

    documents: int = 0
    tokens: int = 0
    """Scored tokens."""
    unscored: int = 0
    """First tokens of documents, which are not scored."""
    bytes: int | None = 0
    words: int | None = 0
    """None if the text is unknown, or only parts of it are scored."""
    loss: float = 0.0
    """Summed over tokens, in nats."""


@record
@dataclass(frozen=True)
class Done:
    """A part that was scored."""

    part: int
    sums: Sums

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, **asdict(self.sums)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Done | None:
        """Returns None for a record that is not a finished part."""
        try:
            values = {name: record[name] for name in Sums.__dataclass_fields__}
            part = record["part"]
        except KeyError:
            return None
        numbers = [one for one in (part, *values.values()) if one is not None]
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
            return None
        return cls(int(part), Sums(**values))


def total(done: Iterable[Done]) -> Sums:
    """Sums parts independently of their order; a part that occurs twice counts once."""
    parts = {one.part: one.sums for one in done}
    some = [parts[number] for number in sorted(parts)]

    def count(name: str) -> Any:
        values = [getattr(one, name) for one in some]
        return None if None in values else sum(values)

    counts = {name: count(name) for name in ("documents", "tokens", "unscored", "bytes", "words")}
    return Sums(**counts, loss=math.fsum(one.loss for one in some))


def figures(sums: Sums) -> dict[str, float | None]:
    """Returns the loss per token in nats, and perplexities: the number of equally likely tokens,
    bytes or words that the model's uncertainty corresponds to."""

    def per(count: int | None) -> float | None:
        return sums.loss / count if count else None

    def perplexity(loss: float | None) -> float | None:
        return None if loss is None or loss > 700 else math.exp(loss)  # float64 overflows above

    by_byte = per(sums.bytes)
    return {
        "loss": per(sums.tokens),
        "perplexity": perplexity(per(sums.tokens)),
        "bits_per_byte": None if by_byte is None else by_byte / math.log(2),
        "byte_perplexity": perplexity(by_byte),
        "word_perplexity": perplexity(per(sums.words)),
    }


def score(
    scorer: RowScorer,
    parts: Iterable[EvaluationPart],
    ranks: Ranks,
    *,
    batch_tokens: int,
    done: Iterable[Done] = (),
    keep: Callable[[Done], None] = lambda done: None,
    watch: Watch = lambda sums: None,
) -> list[Done]:
    """Scores this rank's share of the unfinished parts, and returns it."""
    before = {one.part: one.sums for one in done}
    found: list[Done] = []
    work = _batches(_share(parts, ranks, before, watch), scorer, batch_tokens, found, keep)
    while True:
        batch = next(work, None)
        if not ranks.goes_on(batch is not None):
            return found
        if batch is None:  # the others need this rank's shard of the parameters
            nothing = np.zeros((1, scorer.multiple), np.int64)
            scorer(nothing, np.full_like(nothing, IGNORED))
            continue
        rows, losses, numbers = batch
        for number, loss in zip(numbers, scorer(*padded(rows, scorer.multiple)), strict=True):
            losses[number] = loss


def _share(
    parts: Iterable[EvaluationPart], ranks: Ranks, done: Mapping[int, Sums], watch: Watch
) -> Iterator[EvaluationPart]:
    """Assigns the remaining parts to the ranks in turn. All ranks read all documents, but tokenize
    only their own."""
    passed, turn, last = Sums(), 0, 0.0
    for part in parts:
        passed.documents += part.num_documents
        if part.number not in done:
            if turn % ranks.size == ranks.rank:
                yield part
            turn += 1
        if (now := time.monotonic()) - last > PROGRESS_SECONDS:
            last = now
            watch(passed)


def _batches(
    parts: Iterable[EvaluationPart],
    scorer: RowScorer,
    batch_tokens: int,
    found: list[Done],
    keep: Callable[[Done], None],
) -> Iterator[tuple[Sequence[Any], list[float], list[int]]]:
    """Yields rows, the list that receives their losses, and their indices in it. A part is done
    when all its losses are known."""
    for part in parts:
        made = part.make()
        losses = [0.0] * len(made.rows)
        for numbers in batches(made.rows, batch_tokens, scorer.stretches_from):
            yield [made.rows[number] for number in numbers], losses, numbers
        sums = Sums(
            part.num_documents,
            sum(row.num_scored for row in made.rows),
            made.unscored,
            made.num_bytes,
            made.num_words,
            math.fsum(losses),
        )
        found.append(Done(part.number, sums))
        keep(found[-1])


def require_some(sums: Sums, name: str, may_prefix: bool = False) -> None:
    """Raises an error if no token was scored. `may_prefix`: whether a prefix would change that."""
    if not sums.tokens:
        what = f"{sums.documents:,} documents" if sums.documents else "no documents"
        advice = "; use --prefix eos to score the first token of each"
        raise DataError(
            f"{name} has {what} and no tokens to score"
            + (advice if sums.unscored and may_prefix else "")
        )


def prefix_id(tokenizer: Any, prefix: str) -> int | None:
    """Returns the id of the prefix token; `auto` means BOS, if documents begin with it."""
    if prefix == "auto":
        return tokenizer.bos_id if tokenizer.add_bos else None
    if prefix == "none":
        return None
    found: int | None = getattr(tokenizer, f"{prefix}_id")
    if found is None:
        raise DataError(f"--prefix {prefix}: {tokenizer.path} has no {prefix.upper()} token")
    return found
