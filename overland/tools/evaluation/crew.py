"""The ranks of an evaluation of tasks.

The first one runs the harness, and says what is to be computed; the others do their part of it
until they are dismissed. So datasets are read once, and the numbers do not depend on how many there
are. What is computed is kept by each rank as it goes, and nothing is computed twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from overland.errors import ClusterError
from overland.parallel.comm import all_of, from_first_rank
from overland.progress import progress_bar
from overland.tools.evaluation.score import ContinuationScorer, Pair, Score
from overland.world import World

AT_ONCE = 16_384  # requests: what travels between ranks is held in memory
Texts = Callable[
    [Sequence[Sequence[int]], Sequence[str], dict[str, Any]], Iterator[list[tuple[int, str]]]
]
"""Of prompts, with their keys, yields batches of (number of the prompt, text that follows it)."""
Work = tuple[Literal["score", "generate"], list[Any], list[str], dict[str, Any]]


class Crew:
    def __init__(
        self,
        scorer: ContinuationScorer,
        texts: Texts | None,
        world: World,
        *,
        leads: bool = True,
        keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
        done: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """`texts` generates, if this layout can; `leads` says whether this rank reports for those
        that compute the same; `done` is what `keep` kept of an evaluation that was stopped."""
        self.scorer, self.texts, self.world = scorer, texts, world
        self.leads, self.keep = leads, keep
        self._is_waited_for = False
        """Whether the other ranks compute what this one gave them, and wait for its part."""
        self.known: dict[str, Any] = {}
        for record in done:
            if isinstance(found := record.get("done"), dict):
                self.known |= found

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        keys = [key_of(context, continuation) for context, continuation in pairs]
        self._compute("score", pairs, keys, {})
        return [Score(*self.known[key]) for key in keys]

    def generate(self, prompts: Sequence[Sequence[int]], settings: dict[str, Any]) -> list[str]:
        """The same prompt twice is two draws, if there is anything to draw."""
        counts: Counter[str] = Counter()
        keys = []
        for prompt in prompts:
            key = key_of(prompt, [], settings)
            counts[key] += 1
            keys.append(f"{key}-{counts[key]}" if settings.get("do_sample") else key)
        self._compute("generate", prompts, keys, settings)
        return [self.known[key] for key in keys]

    def require_texts(self) -> None:
        """Refuses to generate in a layout that cannot."""
        if self.texts is None:
            raise ClusterError(
                "a model that is split over ranks scores texts and generates none: leave out "
                "--shard and --tensor-parallel, so that each rank has the whole model, or tasks "
                "that generate"
            )

    def serve(self) -> None:
        """What all ranks but the first do."""
        while (work := from_first_rank(None)) is not None:
            all_of(self._own_part(work))

    def dismiss(self) -> None:
        """Ends `serve` on the other ranks. Those that are waited for in vain, as this one failed,
        cannot hear it: whoever started them ends them."""
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
        for batch in self._batches(kind, requests, keys, settings):
            values = {keys[number]: value for number, value in batch}
            if self.leads:
                self.keep({"done": values})
                found |= values
            advance(len(values) * self.scorer.num_parts)
        return found

    def _batches(
        self, kind: str, requests: list[Any], keys: list[str], settings: dict[str, Any]
    ) -> Iterator[list[tuple[int, Any]]]:
        if kind == "score":
            yield from self.scorer.score(requests)
            return
        self.require_texts()
        assert self.texts is not None
        yield from self.texts(requests, keys, settings)


def key_of(context: Sequence[int], continuation: Sequence[int], settings: Any = None) -> str:
    """What an answer of the model is kept by."""
    words = json.dumps([list(context), list(continuation), settings], sort_keys=True, default=str)
    return hashlib.blake2b(words.encode(), digest_size=12).hexdigest()
