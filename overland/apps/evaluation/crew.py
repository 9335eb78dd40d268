"""The ranks that evaluate tasks.

The first rank runs the harness and distributes the requests; the others compute their share until
they are dismissed. So datasets are read once, and the scores do not depend on the number of ranks.
Each rank saves its results as it goes, and nothing is computed twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from overland.apps.evaluation.score import ContinuationScorer, Pair, TextScore
from overland.apps.progress import progress_bar
from overland.errors import ClusterError
from overland.parallel.comm import all_of, from_first_rank
from overland.world import World

AT_ONCE = 16_384  # requests, which are held in memory when sent between ranks
Texts = Callable[
    [Sequence[Sequence[int]], Sequence[str], dict[str, Any]], Iterator[list[tuple[int, str]]]
]
"""Takes prompts and their keys; yields batches of (number of the prompt, its completion)."""
Work = tuple[Literal["score", "generate"], list[Any], list[str], dict[str, Any]]


class TaskRanks:
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
        """`texts` generates text, if this layout can; `leads` is whether this rank reports for
        those that compute the same; `done` is what `keep` saved of an interrupted evaluation."""
        self.scorer, self.texts, self.world = scorer, texts, world
        self.leads, self.keep = leads, keep
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
    """Returns the key under which a result is saved."""
    words = json.dumps([list(context), list(continuation), settings], sort_keys=True, default=str)
    return hashlib.blake2b(words.encode(), digest_size=12).hexdigest()
