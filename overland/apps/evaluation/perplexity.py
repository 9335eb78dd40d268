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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from overland.apps.evaluation.parts import EvaluationPart, WindowRow, WindowRows
from overland.apps.evaluation.ranks import RankedModel
from overland.data.lanes import IGNORED
from overland.errors import DataError, ModelError
from overland.models.loss import OutputMatrix
from overland.world.records import record

KIND = "perplexity"
PROGRESS_SECONDS = 0.2
NOTHING = WindowRow(np.zeros(1, np.int64), np.full(1, IGNORED))

Watch = Callable[[int], None]
"""Called from time to time with the number of documents that this rank has passed so far."""


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
        values = {name: record.get(name, math.nan) for name in Sums.__dataclass_fields__}
        part = record.get("part", math.nan)
        numbers = [part, *(one for one in values.values() if one is not None)]
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
    ranked: RankedModel,
    parts: Iterable[EvaluationPart],
    *,
    batch_tokens: int,
    done: Iterable[Done] = (),
    keep: Callable[[Done], None] = lambda done: None,
    watch: Watch = lambda documents: None,
) -> list[Done]:
    """Scores this rank's share of the unfinished parts, and returns it."""
    before = {one.part for one in done}
    found: list[Done] = []
    work = _batches(ranked, _share(ranked, parts, before, watch), batch_tokens, found, keep)
    while True:
        batch = next(work, None)
        if not ranked.goes_on(batch is not None):
            return found
        if batch is None:  # the others need this rank's shard of the parameters
            row_losses(ranked, [NOTHING])
            continue
        rows, losses, numbers = batch
        for number, loss in zip(numbers, row_losses(ranked, rows), strict=True):
            losses[number] = loss


def _share(
    ranked: RankedModel, parts: Iterable[EvaluationPart], done: Collection[int], watch: Watch
) -> Iterator[EvaluationPart]:
    """Assigns the remaining parts to the ranks in turn. All ranks read all documents, but tokenize
    only their own."""
    passed, turn, last = 0, 0, 0.0
    for part in parts:
        passed += part.num_documents
        if part.number not in done:
            if turn % ranked.num_parts == ranked.part:
                yield part
            turn += 1
        if (now := time.monotonic()) - last > PROGRESS_SECONDS:
            last = now
            watch(passed)


def _batches(
    ranked: RankedModel,
    parts: Iterable[EvaluationPart],
    batch_tokens: int,
    found: list[Done],
    keep: Callable[[Done], None],
) -> Iterator[tuple[Sequence[WindowRow], list[float], list[int]]]:
    """Yields rows, the list that receives their losses, and their indices in it. A part is done
    when all its losses are known."""
    for part in parts:
        made = part.make()
        losses = [0.0] * len(made.rows)
        lengths = [len(row.tokens) for row in made.rows]
        for numbers in batches(ranked, lengths, batch_tokens):
            yield [made.rows[number] for number in numbers], losses, numbers
        found.append(Done(part.number, _sums_of(part, made, losses)))
        keep(found[-1])


def batches(ranked: RankedModel, lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Yields the numbers of rows that form a batch: rows of similar length, longest first, with at
    most `most_tokens` including padding (or a single row)."""
    left = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    while left:
        longest_first = [lengths[number] for number in left]
        count = ranked.num_together(longest_first, max(1, most_tokens // longest_first[0]))
        yield left[:count]
        left = left[count:]


def _sums_of(part: EvaluationPart, made: WindowRows, losses: Iterable[float]) -> Sums:
    texts = made.texts
    return Sums(
        part.num_documents,
        sum(row.num_scored for row in made.rows),
        made.unscored,
        None if texts is None else sum(len(text.encode("utf-8", "replace")) for text in texts),
        None if texts is None else sum(len(text.split()) for text in texts),
        math.fsum(losses),
    )


@torch.no_grad()
def row_losses(ranked: RankedModel, rows: Sequence[WindowRow]) -> list[float]:
    """Returns the summed loss of each row of a batch, in float64."""
    tokens_BS = ranked.padded([row.tokens for row in rows])
    labels_BS = ranked.padded([row.labels for row in rows], IGNORED)
    positions_1S = torch.arange(tokens_BS.shape[1], device=ranked.device)[None]
    model: Any = ranked.model
    if hasattr(model, "objective"):
        model.objective = RowLosses()
        sums_B = model(tokens_BS, positions_1S, labels_BS=labels_BS)
    else:  # a custom model, whose head only computes its own loss
        logits_NV = model(tokens_BS, positions_1S).flatten(0, 1)
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        losses_N = F.cross_entropy(
            logits_NV.to(wide), labels_BS.flatten(), ignore_index=IGNORED, reduction="none"
        )
        sums_B = losses_N.view(labels_BS.shape).double().sum(1)
    if not bool(sums_B.isfinite().all()):
        raise ModelError("the model's predictions are not finite: its weights are broken")
    return sums_B.tolist()


class RowLosses:
    """An objective for the head: the summed loss of each row."""

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        return head.token_losses(hidden_BSD, fields["labels_BS"]).double().sum(1)


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
