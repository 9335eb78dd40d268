"""Lists the runs below a folder, newest first: decides what counts as a run, how deep to search,
and the columns of each line. A run that cannot be read gets a line of its own and does not stop the
listing: runs may be damaged, half deleted, or owned by another user.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overland.apps.progress import progress_bar
from overland.apps.watch.history import END_BYTES, History
from overland.apps.watch.status import STATES, RunStatus, Watch, newest_script
from overland.errors import NoRun, sentence
from overland.run_folder import ATTEMPTS, CONFIG, LIVE, METRICS, OWNER, PLAN, SESSIONS, SUBMITTED
from overland.words import command, duration, on_one_line, visible

UNREADABLE = "unreadable"
DEPTH = 4  # levels of folders below the given one
TRACES = {METRICS, SESSIONS, OWNER, ATTEMPTS, LIVE}
IGNORE = ".overlandignore"  # runs in a folder with this file, such as recorded ones, are not listed
SLURM_SECONDS = 5.0  # for all runs together
LONGEST = 60  # characters of a reason


def list_runs(folder: Path) -> list[RunStatus]:
    """Returns the runs in a folder and below it."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise NoRun(f"{folder} {what}: expected a folder that contains runs")
    found: list[RunStatus] = []
    until = time.monotonic() + SLURM_SECONDS
    with progress_bar("looking for runs") as bar:
        for path in find_runs(folder):
            bar(len(found), None, on_one_line(str(path)))
            found.append(look(path, max(0.0, until - time.monotonic())))
    return sorted(found, key=lambda one: -(one.last_sign or 0.0))


def newest_run(folder: Path) -> Path:
    """Returns the run in a folder or below it that last showed a sign of life."""
    runs = list_runs(folder)
    if not runs:
        raise NoRun(no_runs(folder))
    return Path(runs[0].run)


def no_runs(folder: Path) -> str:
    start = command("overland", "train", "quickstart")
    return f"no runs in {folder} or below it; `{start}` starts one"


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yields run folders, without searching inside them or following links."""
    try:
        with os.scandir(folder) as entries:
            names = {one.name: one for one in entries}
    except OSError:  # another user's, or just deleted
        return
    if is_run(folder, names):
        yield folder
        return
    if IGNORE in names and depth < DEPTH:
        return
    for name in sorted(names) if depth else ():
        try:
            is_folder = names[name].is_dir(follow_symlinks=False)
        except OSError:
            continue
        if is_folder and not name.startswith("."):
            yield from find_runs(folder / name, depth - 1)


def is_run(folder: Path, entries: Mapping[str, os.DirEntry[str]]) -> bool:
    """Whether a folder with these entries is a run; a config.toml alone could be anything."""
    files = {name for name in {CONFIG, *TRACES} & set(entries) if not entries[name].is_dir()}
    if SUBMITTED in entries and newest_script(folder) is not None:
        files.add(SUBMITTED)
    if (folder / PLAN).is_file():
        files.add(PLAN)
    return len(files) > 1 and bool(files & {CONFIG, SESSIONS, ATTEMPTS})


def look(run: Path, patience: float) -> RunStatus:
    try:
        return Watch(run, History(run / METRICS, last_bytes=END_BYTES)).look(patience)
    except Exception as error:  # one unreadable run must not hide the others
        why = sentence(error) or type(error).__name__
        return RunStatus(str(run), time.time(), UNREADABLE, why)


def to_json(seen: RunStatus) -> dict[str, Any]:
    """Returns what the list says about a run. Times are in seconds since 1970."""
    return {
        "run": seen.run,
        "state": seen.state,
        "because": seen.because,
        "step": seen.step,
        "steps": seen.steps,
        "loss": seen.newest.get("loss"),
        "held_out": {name: points[-1][1] for name, points in seen.held_out.items() if points},
        "last_sign": seen.last_sign,
        "age_seconds": seen.time - seen.last_sign if seen.last_sign else None,
        "seconds_left": seen.seconds_left,
        "description": seen.description,
    }


def table(runs: list[RunStatus], width: int) -> list[str]:
    """Returns one line per run; if it is too wide, first the reason and then the name is cut."""
    rows: list[tuple[str, ...]] = [("run", "state", "step", "loss", "held out", "age", "")]
    rows += [row_of(one) for one in runs]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    others = sum(widths[1:]) + 2 * 6
    widths[0] = max(16, min(widths[0], width - others))
    lines = []
    for name, state, *numbers, why in rows:
        shown = name if len(name) <= widths[0] else "…" + name[-widths[0] + 1 :]
        cells = [shown.ljust(widths[0]), state.ljust(widths[1])]
        cells += [text.rjust(size) for text, size in zip(numbers, widths[2:], strict=True)]
        line = "  ".join([*cells, why]).rstrip()
        room = max(width, widths[0] + others - 2)
        lines.append(line if len(line) <= room else line[: room - 1].rstrip() + "…")
    return lines


def row_of(one: RunStatus) -> tuple[str, ...]:
    # More steps than that were taken before it was lowered.
    step = f"{one.step:,}" + (f"/{one.steps:,}" if one.steps and one.step <= one.steps else "")
    loss, held_out = one.newest.get("loss"), [points for points in one.held_out.values() if points]
    return (
        on_one_line(one.run),
        STATES.get(one.state, one.state),
        "" if one.state == UNREADABLE else step,
        "" if loss is None else f"{loss:.4f}",
        f"{held_out[0][-1][1]:.4f}" if held_out else "",
        duration(one.time - one.last_sign) if one.last_sign else "",
        visible(" ".join((one.because or one.description).split()))[:LONGEST],
    )
