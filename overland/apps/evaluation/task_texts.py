"""Generates the texts that the harness's tasks request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overland.apps.evaluation.generate import Generator
from overland.apps.evaluation.model import OpenModel
from overland.apps.evaluation.sampling import Sampling
from overland.errors import DataError
from overland.words import any_of

if TYPE_CHECKING:
    from overland.apps.evaluation.evaluate import EvaluationSession

ROWS_AT_ONCE = {"cpu": 8, "cuda": 64}
DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
KNOWN = ("until", "max_gen_toks", "do_sample", *DRAWN_BY)


class TaskTexts:
    """Generates completions for this rank's share of the prompts."""

    def __init__(self, session: EvaluationSession, context: int) -> None:
        found, device = session.found, session.scorer.device
        self.opened = OpenModel(
            session.scorer.model, found.tokenizer, found.config, context, found.path, found.step,
            found.end_ids, session.dtype, device,
        )  # fmt: skip
        self.ranks = session.ranks
        usual = ROWS_AT_ONCE.get(device.type, ROWS_AT_ONCE["cuda"])
        self.batch_size = session.asked.batch_size or usual

    def __call__(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], settings: dict[str, Any]
    ) -> Iterator[list[tuple[int, str]]]:
        sampling = sampling_of(settings)
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        mine = order[self.ranks.rank :: self.ranks.size]
        # Sampling depends on the prompt's number, which must not depend on what remains to be done.
        size = self.batch_size if sampling.is_greedy else 1
        generator = Generator(self.opened, batch_size=size, length=self.opened.context)
        try:
            for start in range(0, len(mine), size):
                some = mine[start : start + size]
                found = generator.generate(
                    [prompts[number] for number in some],
                    max_new_tokens=settings["max_gen_toks"],
                    sampling=sampling,
                    end_ids=self.opened.end_ids,
                    stop=[stop for stop in settings["until"] if stop],
                    first=int(keys[some[0]][:7], 16),
                )
                # Only the new tokens are decoded, as in the harness.
                texts = [self.opened.tokenizer.decode(one.ids) for one in found]
                yield list(zip(some, texts, strict=True))
        finally:
            generator.close()


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
