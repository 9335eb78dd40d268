"""What the ranks were doing when they hung: kept for a reader, and asked who stands out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from overland.tools.jobs.supervise.watchdog import Heard

FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
INNERMOST = 4  # frames among which a rank that waits for others is inside torch.distributed


def keep_stacks(folder: Path, stacks: Mapping[int, str], ranks: Iterable[Heard]) -> Path:
    """All of them in one file, the ranks that are behind first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stacks.txt"
    with path.open("w") as file:
        for heard in sorted(ranks, key=lambda heard: (heard.place, heard.rank)):
            text = stacks.get(heard.rank, "its node did not answer")
            file.write(
                f"rank {heard.rank} on {heard.node}: step {heard.step}, {heard.phase.words} for "
                f"{heard.age:.1f} s, process state {heard.state or 'gone'}\n{text}\n\n"
            )
    return path


def odd_ranks(stacks: Mapping[int, str]) -> list[int]:
    """Those that do not wait for the others, where most do; else those that are elsewhere in the
    code than most. None, where none are clearly fewer."""
    waiting = {rank: _is_waiting(text) for rank, text in stacks.items()}
    own_way = sorted(rank for rank, waits in waiting.items() if not waits)
    if own_way and 2 * len(own_way) < len(stacks):
        return own_way
    places = {rank: _place(text) for rank, text in stacks.items()}
    common = Counter(places.values()).most_common(1)
    if not common or 2 * common[0][1] <= len(stacks):
        return []
    return sorted(rank for rank, place in places.items() if place != common[0][0])


def _main_thread(text: str) -> list[re.Match[str]]:
    """Its frames, innermost first: those of the thread that runs the training."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    ours = [thread for thread in threads if "in run_rank" in thread] or threads[-1:]
    return list(FRAME.finditer(ours[-1])) if ours else []


def _is_waiting(text: str) -> bool:
    inner = _main_thread(text)[:INNERMOST]
    return any(
        re.search(r"torch/(distributed|_ops|autograd/graph)", frame["file"]) for frame in inner
    )


def _place(text: str) -> str:
    """Where in our own code, or a user's, the rank is."""
    for frame in _main_thread(text):
        if "site-packages" not in frame["file"] and "/torch/" not in frame["file"]:
            return f"{frame['file']}:{frame['line']}"
    return ""
