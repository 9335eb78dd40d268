"""Log-likelihoods of continuations, with shared prefixes computed only once, and with fewer rows at
a time if memory runs out.

A sequence is a context and its continuation. When sorted, sequences with a common prefix are
neighbors: the answers to a question, and all questions after the same examples. They are packed
into one row as a tree, depth first:

    question | answer A | answer B | another question | its answer A | …

A token sees its ancestors and itself, and its position is its depth, so each sequence is computed
as if it were alone. If `ends[k]` is the place after the last descendant of token k:

    q sees k   if   k <= q < ends[k]   (and depth[q] - depth[k] < window)

Only our own Decoder supports this. For any other model a row is one sequence, and contains others
only if they are a prefix of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from overland.apps.evaluation.ranks import RankedModel
from overland.errors import ModelError
from overland.models.attention import Mask
from overland.models.decoder import Decoder
from overland.models.loss import OutputMatrix, places_of
from overland.parallel.comm import gather
from overland.world.records import record

Ids = npt.NDArray[np.int64]
Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a context and of its continuation."""

# A row grows up to twice the length of its first sequence, or to this length, since the cost of
# attention is quadratic. Beyond LONGEST_TREE the mask alone would take 256 MiB.
ROW_TOKENS = 1024
LONGEST_TREE = 16_384
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32_768}  # per batch, if no number of rows is given
PREDICTIONS_AT_ONCE = 1024  # each one is a row of logits, of 128k numbers or more


@record
class TextScore(NamedTuple):
    log_likelihood: float
    is_greedy: bool
    """Whether greedy decoding would produce the continuation."""


@dataclass
class ScoredRow:
    """Sequences packed as a tree."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    asked: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """(number of the request, places whose next token is predicted, those next tokens)."""
    is_chain: bool = True

    def __len__(self) -> int:
        return len(self.tokens)


class ContinuationScorer:
    """Scores continuations: this rank's part of them, of about equal work."""

    def __init__(
        self, ranked: RankedModel, *, max_length: int, batch_size: int | None = None
    ) -> None:
        """`batch_size` is a number of rows; without it, it is chosen by their length. It is halved
        when memory runs out."""
        self.ranked, self.max_length, self.batch_size = ranked, max_length, batch_size
        self.longest_tree = 0
        if isinstance(ranked.model, Decoder):
            self.longest_tree = min(LONGEST_TREE, ranked.stretches_from or LONGEST_TREE)
        self.tokens_at_once = TOKENS_AT_ONCE.get(ranked.device.type, TOKENS_AT_ONCE["cuda"])

    def score(self, requests: Sequence[Pair]) -> Iterator[list[tuple[int, TextScore]]]:
        """Yields batches of (number of the request, its score), the longest first."""
        planted = plant(requests, self.max_length, self.longest_tree)
        rows = sorted(planted, key=len, reverse=True)
        mine = rows[self.ranked.part :: self.ranked.num_parts]
        while self.ranked.goes_on(bool(mine)):
            if not mine:  # other ranks still need this one in their pass
                self._score_rows(rows[-1:])
                continue
            longest = len(mine[0])
            most = self.batch_size or max(1, self.tokens_at_once // longest)
            count = self.ranked.num_together([len(row) for row in mine[:most]], most)
            try:
                scores = self._score_rows(mine[:count])
            except torch.OutOfMemoryError:
                self._take_less(count, longest)
                continue
            yield scores
            mine = mine[count:]

    def _take_less(self, num_rows: int, length: int) -> None:
        if num_rows == 1:
            raise ModelError(
                f"out of device memory with a single row of {length:,} tokens: lower --context, or "
                "use a device with more memory"
            )
        if self.batch_size is not None:
            self.batch_size = num_rows // 2
        self.tokens_at_once = num_rows // 2 * length

    @torch.no_grad()
    def _score_rows(self, rows: list[ScoredRow]) -> list[tuple[int, TextScore]]:
        """Runs one forward pass, and computes logits only where a token is predicted."""
        places = [(b, p) for b, row in enumerate(rows) for _, some, _ in row.asked for p in some]
        wanted = [token for row in rows for _, _, some in row.asked for token in some]
        model, device = self.ranked.model, self.ranked.device
        rows_N, places_N = torch.tensor(places, device=device).unbind(1)
        wanted_N = torch.tensor(wanted, device=device)
        tokens_BS = self.ranked.padded([row.tokens for row in rows])
        if isinstance(model, Decoder):
            depths_BS = self.ranked.padded([row.depths for row in rows])
            fields = {"rows_N": rows_N, "places_N": places_N, "wanted_N": wanted_N}
            ends_BS = None
            if not all(row.is_chain for row in rows):
                ends_BS = self.ranked.padded([row.ends for row in rows])
            with predicting(model, ends_BS, depths_BS):
                # Labels select the objective, which uses its own fields instead.
                predicted_2N = model(tokens_BS, depths_BS, labels_BS=tokens_BS, **fields)
        else:
            predicted_2N = compare(model(tokens_BS)[rows_N, places_N], wanted_N)
        values, hits = predicted_2N.double().cpu().numpy()
        if not np.isfinite(values).all():
            raise ModelError("the model's predictions are not finite: its weights are broken")
        scores, start = [], 0
        for row in rows:
            for number, predicted, _ in row.asked:
                some = slice(start, start + len(predicted))
                scores.append(
                    (number, TextScore(float(values[some].sum()), bool(hits[some].all())))
                )
                start += len(predicted)
        return scores


def plant(requests: Sequence[Pair], max_length: int, longest_tree: int) -> Iterator[ScoredRow]:
    """Yields rows that together contain every request; rows that branch have at most `longest_tree`
    tokens. Requests longer than `max_length` are truncated on the left, as in the harness."""
    sequences: list[tuple[bytes, int, Ids, list[int]]] = []
    for number, (context, continuation) in enumerate(requests):
        assert context, "harness.py gives each at least a prefix"
        assert 0 < len(continuation) <= max_length, "harness.py refuses others"
        ids = np.asarray([*context, *continuation][-(max_length + 1) :][:-1], np.int64)
        sequences.append((ids.astype(">i8").tobytes(), number, ids, list(continuation)))
    sequences.sort(key=lambda one: one[:2])  # bytes sort like the ids, but faster

    row, last, room = ScoredRow(), np.empty(0, np.int64), 0
    path: list[int] = []  # places of the last sequence
    for _, number, ids, wanted in sequences:
        shared = num_shared(last, ids)
        if row.tokens and not joins(row, shared, len(last), len(ids), room):
            yield close(row, path, 0)
            row, path, shared = ScoredRow(), [], 0
        if not row.tokens:
            room = min(longest_tree, max(ROW_TOKENS, 2 * len(ids)))
        row.is_chain = row.is_chain and shared == len(path)
        close(row, path, shared)
        for token in ids[shared:].tolist():
            path.append(len(row.tokens))
            row.depths.append(len(path) - 1)
            row.tokens.append(token)
            row.ends.append(0)
        row.asked.append((number, path[len(ids) - len(wanted) : len(ids)], wanted))
        last = ids
    if row.tokens:
        yield close(row, path, 0)


def joins(row: ScoredRow, shared: int, last: int, new: int, room: int) -> bool:
    """Whether a sequence is added to the row: if it shares at least half of itself."""
    if shared == last and len(row) == last:  # it only extends the last one
        return True
    return 2 * shared >= new and len(row) + new - shared <= room


def close(row: ScoredRow, path: list[int], depth: int) -> ScoredRow:
    """Closes a branch: later tokens do not see its tokens beyond this depth."""
    for place in path[depth:]:
        row.ends[place] = len(row.tokens)
    del path[depth:]
    return row


def num_shared(one: Ids, other: Ids) -> int:
    """Returns the length of the common prefix."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


class Predictions:
    """An objective for the head: the log-likelihood of each wanted token, and whether it is the
    most likely one."""

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        group = getattr(head, "group", None)  # tensor parallelism: each rank has part of the rows
        if group is not None:
            hidden_BSD = gather(hidden_BSD.contiguous(), 1, group)
        hidden_ND = hidden_BSD[fields["rows_N"], fields["places_N"]]
        parts = []
        for start in range(0, len(hidden_ND), PREDICTIONS_AT_ONCE):
            some = slice(start, start + PREDICTIONS_AT_ONCE)
            logits_NV = hidden_ND[some] @ head.weight_VD.t()
            parts.append(compare(logits_NV, fields["wanted_N"][some], group))
        return torch.cat(parts, dim=1)


def compare(logits_NV: Tensor, wanted_N: Tensor, group: Any = None) -> Tensor:
    """Returns log p(wanted), and 1 where it is the most likely token; with a `group`, each rank has
    a part of the vocabulary."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    size = wide_NV.shape[1]
    first = 0 if group is None else dist.get_rank(group) * size
    place_N1, here_N1 = places_of(wanted_N, first, size)
    largest_N1, best_N1 = wide_NV.max(1, keepdim=True)
    own_N1 = wide_NV.gather(1, place_N1).masked_fill(~here_N1, -torch.inf)
    if group is None:
        log_probs_N = own_N1[:, 0] - wide_NV.logsumexp(1)
        return torch.stack((log_probs_N, (best_N1 == place_N1)[:, 0].to(log_probs_N.dtype)))
    mine_N1, largest_N1 = largest_N1, all_reduce(largest_N1, "max", group)
    # The lowest id wins a tie, as in one process.
    best_N1 = torch.where(mine_N1 == largest_N1, best_N1 + first, first + (1 << 40))
    best_N1 = all_reduce(best_N1, "min", group)
    sums_N1 = all_reduce((wide_NV - largest_N1).exp().sum(1, keepdim=True), "sum", group)
    own_N1 = all_reduce(own_N1, "max", group)
    log_probs_N = (own_N1 - largest_N1 - sums_N1.log())[:, 0]
    return torch.stack((log_probs_N, (best_N1[:, 0] == wanted_N).to(log_probs_N.dtype)))


class TreeMasks(nn.Module):
    """Replaces a Decoder's masks."""

    def __init__(self, ends_BS: Tensor, depths_BS: Tensor, windows: list[int | None]) -> None:
        super().__init__()
        self.windows = windows
        places_S = torch.arange(ends_BS.shape[1], device=ends_BS.device)
        q_BQK, k_BQK = places_S[None, :, None], places_S[None, None, :]
        self.ancestors_BQK = (k_BQK <= q_BQK) & (q_BQK < ends_BS[:, None, :])
        # Padding sees itself, since softmax over nothing is NaN.
        self.ancestors_BQK |= k_BQK == q_BQK
        self.depths_BS = depths_BS

    def forward(
        self, x_BSD: Tensor, seq_len: int, documents_BS: Tensor | None
    ) -> dict[int | None, Mask]:
        return {window: Mask("dense", visible_BQK=self._seen(window)) for window in self.windows}

    def _seen(self, window: int | None) -> Tensor:
        if window is None:
            return self.ancestors_BQK
        distance_BQK = self.depths_BS[:, :, None] - self.depths_BS[:, None, :]
        return self.ancestors_BQK & (distance_BQK < window)


@contextmanager
def predicting(model: Decoder, ends_BS: Tensor | None, depths_BS: Tensor) -> Iterator[None]:
    """Makes the model compute predictions within this context; `ends_BS` is given for rows that are
    trees."""
    masks, objective = model.model.masks, model.objective
    model.objective = Predictions()
    if ends_BS is not None:
        model.model.masks = TreeMasks(ends_BS, depths_BS, masks.windows)  # type: ignore[assignment]
    try:
        yield
    finally:
        model.model.masks, model.objective = masks, objective
