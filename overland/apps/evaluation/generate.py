"""Batched text generation: which prompts share a batch, one new token per row and step, and what
ends a text (tokens, stop strings, lengths).

A row of the batch is a prompt and its completion. Rows are started together, and then each step
chooses one token per row, on the device; the host only reads the result. On GPUs it reads one step
behind, so that the device never waits for it. A row ends at an end-of-text token, at a stop string,
at its maximum number of new tokens, or when the context is full: a sliding window would give
different results with a cache than without.

Our own models use a key-value cache (cache.py). Other models recompute all rows for each token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from overland.apps.evaluation.cache import CachedDecoder, can_cache, release
from overland.apps.evaluation.model import OpenModel
from overland.apps.evaluation.sampling import BROKEN, GREEDY, Sampling, choose, row_keys
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError, ModelError
from overland.models.decoder import Decoder

Logits = Callable[..., Tensor]
Done = Callable[[int], None]
HALF = "\ufffd"  # how bytes are shown that are not (yet) a character
MOST_BYTES = 4  # in a character
CONTEXT = 4  # preceding tokens, which decide whether a space comes in between
LONGEST = 64  # tokens decoded at once; if more of them form no character, they are garbage


class Reason(StrEnum):
    """Why a text ended."""

    END = "end of text"
    STOP = "stop string"
    TOKENS = "number of tokens"
    CONTEXT = "context is full"


@dataclass(frozen=True)
class Completion:
    """The completion of a prompt. `ids` do not include the token that ended the text; `text` ends
    before the stop string."""

    ids: tuple[int, ...]
    text: str
    reason: Reason


@dataclass(frozen=True)
class GenerationRequest:
    """How texts are generated, and what ends them."""

    max_new_tokens: int
    sampling: Sampling = GREEDY
    end_ids: Collection[int] = ()
    stop: Sequence[str] = ()


class Generator:
    """Generates completions. `length` is the maximum length of a row, prompt included. A model can
    serve only one Generator at a time, until that is closed."""

    def __init__(self, opened: OpenModel, *, batch_size: int, length: int) -> None:
        self.tokenizer, self.device = opened.tokenizer, opened.device
        self.batch_size, self.length = batch_size, min(length, opened.context)
        self.vocab_size = getattr(getattr(opened.model, "config", None), "vocab_size", None)
        self.rows: CachedDecoder | PlainRows = (
            CachedDecoder(opened.model, batch_size, is_static=opened.device.type == "cuda")
            if can_cache(opened.model)
            else PlainRows(opened.model, batch_size, self.length, opened.device)
        )
        self.batch = PromptBatch(self.rows, batch_size, opened.device)

    def close(self) -> None:
        """Restores the original model and frees the cache."""
        if isinstance(self.rows, CachedDecoder):
            release(self.rows.model)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        asked: GenerationRequest,
        first: int = 0,
        done: Done = lambda count: None,
    ) -> list[Completion]:
        """Completes all prompts, batching those of similar length. `first` is the number of the
        first prompt, which sampling depends on; `done` is called with the number of newly completed
        prompts."""
        asked = self._without_specials(asked)
        rows = [self._row(prompt, first + i, asked) for i, prompt in enumerate(prompts)]
        order = sorted(rows, key=lambda row: -len(row.prompt))
        for start in range(0, len(order), self.batch_size):
            some = order[start : start + self.batch_size]
            for _ in self._run(some, asked):
                pass
            done(len(some))
        return [row.completion() for row in rows]

    def stream(
        self,
        prompt: Sequence[int],
        asked: GenerationRequest,
        number: int = 0,
        ended: Callable[[Completion], None] = lambda completion: None,
    ) -> Iterator[str]:
        """Yields the completion of one prompt piece by piece, then calls `ended` with all of it."""
        asked = self._without_specials(asked)
        row = self._row(prompt, number, asked)
        for _, piece in self._run([row], asked, is_watched=True):
            if piece:
                yield piece
        ended(row.completion())

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises an error for prompts that the model cannot process."""
        for number, prompt in enumerate(prompts):
            self._check(prompt, number)

    def _without_specials(self, asked: GenerationRequest) -> GenerationRequest:
        """Returns what is asked for with the ids of special tokens that end texts, of which they
        are not part."""
        if asked.max_new_tokens < 1:
            raise DataError(f"--num-tokens {asked.max_new_tokens}: expected 1 or more")
        if "" in asked.stop:
            raise DataError("--stop '' would end every text before it starts: omit it")
        specials = self.tokenizer.specials
        ends = {*asked.end_ids, *(specials[one] for one in asked.stop if one in specials)}
        texts = [one for one in asked.stop if one not in specials]
        return replace(asked, end_ids=ends, stop=texts)

    def _row(self, prompt: Sequence[int], number: int, asked: GenerationRequest) -> GrowingText:
        self._check(prompt, number)
        return GrowingText(self.tokenizer, prompt, number, asked, self.length)

    def _check(self, prompt: Sequence[int], number: int) -> None:
        if not prompt:
            raise DataError(f"prompt {number + 1} is empty: give it at least one token")
        if len(prompt) > self.length:
            raise DataError(
                f"prompt {number + 1} has {len(prompt):,} tokens, but the limit is "
                f"{self.length:,}: shorten it"
            )
        if self.vocab_size is not None and max(prompt) >= self.vocab_size:
            raise ModelError(
                f"the tokenizer produced token {max(prompt)}, but the model's vocabulary has "
                f"{self.vocab_size}: {self.tokenizer.path} belongs to another model; give the "
                "right one with --tokenizer"
            )

    def _run(
        self, rows: Sequence[GrowingText], asked: GenerationRequest, is_watched: bool = False
    ) -> Iterator[tuple[GrowingText, str]]:
        """Generates the rows of a batch until all have ended; yields text as it is generated, if
        `is_watched`."""
        is_watched = is_watched or bool(asked.stop)
        batch = self.batch
        steps_left = max(row.most for row in rows) - 1
        ahead = 1 if self.device.type == "cuda" else 0
        waiting = deque([batch.start(rows, asked.sampling)])
        while waiting or steps_left > 0:
            if steps_left > 0 and len(waiting) <= ahead:
                waiting.append(batch.step())
                steps_left -= 1
                continue
            tokens = waiting.popleft().read()
            for row, token in zip(rows, tokens, strict=False):
                if row.reason is None:
                    yield row, row.take(token, is_watched)
            if all(row.reason is not None for row in rows):
                return


@dataclass
class GrowingText:
    """A prompt and its completion so far."""

    tokenizer: Tokenizer
    prompt: Sequence[int]
    number: int
    asked: GenerationRequest
    length: int
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    reason: Reason | None = None

    def __post_init__(self) -> None:
        self.text = TextStream(self.tokenizer, self.prompt, self.asked.stop)
        self.unread = 0
        """Number of ids that have not been decoded yet."""

    @property
    def most(self) -> int:
        """Maximum number of new tokens; a full row still predicts one more."""
        return min(self.asked.max_new_tokens, self.length - len(self.prompt) + 1)

    def take(self, token: int, is_watched: bool) -> str:
        """Adds a token; returns what it adds to the text, if `is_watched`."""
        if token == BROKEN:
            raise ModelError("the model's predictions are not finite: its weights are broken")
        if token in self.asked.end_ids:
            return self._end(Reason.END)
        self.ids.append(token)
        self.unread += 1
        piece = self._read() if is_watched else ""
        if self.text.is_stopped:
            self.reason = Reason.STOP
            return piece
        if len(self.ids) == self.most:
            is_full = self.most < self.asked.max_new_tokens
            return piece + self._end(Reason.CONTEXT if is_full else Reason.TOKENS)
        return piece

    def completion(self) -> Completion:
        assert self.reason is not None
        return Completion(tuple(self.ids), "".join(self.pieces), self.reason)

    def _read(self) -> str:
        piece = self.text.take(self.ids[len(self.ids) - self.unread :])
        self.unread = 0
        self.pieces.append(piece)
        return piece

    def _end(self, reason: Reason) -> str:
        self.reason = reason
        piece = self._read() if self.unread else ""
        rest = self.text.finish()
        self.pieces.append(rest)
        return piece + rest


class PromptBatch:
    """The state of a step on the device. It is allocated once and stays in place, so that a step
    can be recorded and replayed."""

    def __init__(
        self, rows: CachedDecoder | PlainRows, batch_size: int, device: torch.device
    ) -> None:
        self.rows, self.batch_size, self.device = rows, batch_size, device
        self.tokens_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.keys_2B = torch.zeros(2, batch_size, dtype=torch.int64, device=device)
        self.seen_BV: Tensor | None = None
        self.sampling, self.count = GREEDY, batch_size

    @torch.no_grad()
    def start(self, given: Sequence[GrowingText], sampling: Sampling) -> Readback:
        """Starts rows and chooses the first token of each."""
        self.rows.reserve(max(len(row.prompt) + row.most for row in given))
        prompts, numbers = [row.prompt for row in given], [row.number for row in given]
        if self.rows.is_static:  # unused rows
            prompts += [[0]] * (self.batch_size - len(given))
            numbers += [0] * (self.batch_size - len(given))
        self.sampling, self.count = sampling, len(prompts)
        self.keys_2B[:, : self.count] = row_keys(sampling.seed, numbers, self.device)
        logits_BV = self.rows.start(prompts)
        if sampling.repetition_penalty != 1:
            if self.seen_BV is None:
                shape = (self.batch_size, logits_BV.shape[1])
                self.seen_BV = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.seen_BV.zero_()
            for seen_V, prompt in zip(self.seen_BV, prompts, strict=False):
                seen_V[torch.tensor(prompt, device=self.device)] = True
        return Readback(self._choose(logits_BV))

    @torch.no_grad()
    def step(self) -> Readback:
        """Chooses the next token of each row."""
        return Readback(self._choose(self.rows.step(self.tokens_B[: self.count])))

    def _choose(self, logits_BV: Tensor) -> Tensor:
        count, seen_BV = self.count, None
        if self.sampling.repetition_penalty != 1 and self.seen_BV is not None:
            seen_BV = self.seen_BV[:count]
        positions_B = self.rows.lengths_B[:count]
        keys_2B = self.keys_2B[:, :count]
        chosen_B = choose(logits_BV, self.sampling, keys_2B, positions_B, seen_BV)
        tokens_B = self.tokens_B[:count].copy_(chosen_B.clamp(min=0))
        if seen_BV is not None:
            seen_BV.scatter_(1, tokens_B[:, None], True)
        return chosen_B


class Readback:
    """Tokens being copied from the device."""

    def __init__(self, tokens_B: Tensor) -> None:
        self.tokens_B = tokens_B
        self.event: torch.cuda.Event | None = None
        if tokens_B.is_cuda:
            self.tokens_B = torch.empty_like(tokens_B, device="cpu", pin_memory=True)
            self.tokens_B.copy_(tokens_B, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        return self.tokens_B.tolist()


class PlainRows:
    """Rows of a model without a cache: all tokens are processed again in each step. Rows are padded
    at the end, which causal attention cannot see, to a fixed length, so that a compiled model
    compiles only once."""

    def __init__(self, logits_of: Logits, rows: int, length: int, device: torch.device) -> None:
        self.logits_of, self.length, self.is_static = logits_of, length, False
        self.lengths_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens_BS = torch.zeros(rows, length, dtype=torch.int64, device=device)
        # A decoder whose ranks split the rows between layers cannot infer positions by itself.
        is_ours = isinstance(logits_of, Decoder)
        positions_1S = torch.arange(length, device=device)[None]
        self.positions = {"positions_BS": positions_1S} if is_ours else {}

    def reserve(self, tokens: int) -> None:
        """Does nothing: rows have a fixed length."""

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        self.count = len(rows)
        self.tokens_BS.zero_()
        for i, row in enumerate(rows):
            self.tokens_BS[i, : len(row)] = torch.tensor(row)
            self.lengths_B[i] = len(row)
        return self._logits()

    def step(self, tokens_B: Tensor) -> Tensor:
        lengths_B = self.lengths_B[: self.count]
        rows_B = torch.arange(self.count, device=lengths_B.device)
        self.tokens_BS[rows_B, lengths_B.clamp(max=self.length - 1)] = tokens_B
        lengths_B.add_(1).clamp_(max=self.length)
        return self._logits()

    def _logits(self) -> Tensor:
        logits_BSV = self.logits_of(self.tokens_BS[: self.count], **self.positions)
        last_B = self.lengths_B[: self.count] - 1
        return logits_BSV[torch.arange(self.count, device=last_B.device), last_B]


class TextStream:
    """The text of a sequence of tokens. `before` are the tokens that it continues."""

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.is_stopped = False
        self._ids = list(before[-CONTEXT:])
        self._given = len(tokenizer.decode(self._ids))
        """Characters of the text of `_ids` that were already returned, or belong to `before`."""
        self._held = ""
        """Text that may be the start of a stop string."""

    def take(self, ids: Sequence[int]) -> str:
        """Returns the text that the next tokens add, as far as it is certain."""
        self._ids += ids
        text = self.tokenizer.decode(self._ids)
        end = len(text.rstrip(HALF)) if text.endswith(HALF) else len(text)
        end = max(end, len(text) - MOST_BYTES)  # earlier bytes can no longer become a character
        new = text[self._given : end]
        self._given = max(self._given, end)
        if end == len(text) or len(self._ids) > LONGEST:
            self._ids = self._ids[-CONTEXT:]
            left = len(text) - self._given
            self._given = len(self.tokenizer.decode(self._ids)) - left
        return self._without_stop(new)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        if self.is_stopped:
            return ""
        new = self._without_stop(self.tokenizer.decode(self._ids)[self._given :])
        self._given = len(self.tokenizer.decode(self._ids))
        rest, self._held = new + self._held, ""
        return rest

    def _without_stop(self, new: str) -> str:
        if self.is_stopped:
            return ""
        text, self._held = self._held + new, ""
        places = ((text.find(one), one) for one in self.stop)
        if found := [(place + len(one), place) for place, one in places if place >= 0]:
            self.is_stopped = True
            return text[: min(found)[1]]  # the one that is complete first
        held = max((_overlap(text, one) for one in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Returns the number of characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
