"""The datasets of the harness's tasks: which ones the installed definitions name, where
`overland fetch tasks` puts them, and how the harness finds them there without a network.

    ROOT/OWNER___NAME[@REVISION]/   files as on the Hub, verified byte by byte
    ROOT/.prepared/                 what the `datasets` library converts them to

ROOT is $SCRATCH_ROOT/tasks_cache, or data/tasks if SCRATCH_ROOT is not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from overland.apps.hub.fetch import Report, Wanted, fetch
from overland.apps.hub.snapshot import read_snapshot
from overland.config.load import recipes_folder
from overland.errors import DataError, HubError
from overland.words import command, did_you_mean

LISTS = "tasks"  # folder in the recipes
ON_SCRATCH, HERE = "tasks_cache", "data/tasks"
PREPARED = ".prepared"
# hf://datasets/OWNER/NAME@REVISION/FILE, and the address of the same file.
ON_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?/(.+)")
ADDRESS = re.compile(
    r"https://huggingface\.co/datasets/([\w.-]+/[\w.-]+)/(?:resolve|raw|blob)/([^/]+)/([^?]+)"
)
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class TaskData:
    """The part of a Hub dataset that a task needs."""

    name: str
    revision: str | None = None
    subset: str | None = None
    files: tuple[str, ...] = ()
    """Only these files, if the task names them."""

    def folder(self, root: Path) -> Path:
        at = f"@{self.revision}" if self.revision else ""
        return root / f"{self.name}{at}".replace("/", "___")

    def is_here(self, root: Path) -> bool:
        folder = self.folder(root)
        had = read_snapshot(folder)
        if had is None or not any(map(self._is_in, had.requests)):
            return False
        return all((folder / name).is_file() for name in had.files)

    def _is_in(self, request: Mapping[str, Any]) -> bool:
        """Whether a fetch with these options includes it."""
        included, subsets = request.get("include"), request.get("subsets") or [None]
        if included:
            return bool(self.files) and set(self.files) <= set(included)
        return subsets == [None] or self.subset in subsets


@dataclass(frozen=True)
class Needs:
    """The data that tasks read."""

    datasets: dict[TaskData, list[str]]
    """Each dataset with the tasks that use it."""
    others: dict[str, str]
    """Tasks whose data cannot be fetched, and why."""
    definitions: dict[str, str]
    """Fingerprints of each task's definition and the files that it names."""

    def to_json(self, root: Path) -> dict[str, Any]:
        datasets = [
            {
                "dataset": one.name,
                "revision": one.revision,
                "subset": one.subset,
                "files": list(one.files),
                "folder": str(one.folder(root)),
                "is_here": one.is_here(root),
                "tasks": tasks,
            }
            for one, tasks in self.datasets.items()
        ]
        return {"datasets": datasets, "cannot_be_fetched": self.others}


def tasks_root(env: Mapping[str, str] = os.environ) -> Path:
    scratch = env.get("SCRATCH_ROOT")
    return Path(scratch).expanduser() / ON_SCRATCH if scratch else Path(HERE)


def task_names(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the tasks in words such as `a,b` and `@LIST`, where LIST is a file or the name of a
    built-in list."""
    names: list[str] = []
    for word in (one.strip() for some in words for one in some.split(",")):
        if word.startswith("@"):
            names += read_list(word[1:])
        elif word:
            names.append(word)
    if not names:
        raise DataError("--tasks is empty: give tasks, such as hellaswag,arc_easy or @frontier")
    return tuple(dict.fromkeys(names))


def read_list(name: str) -> list[str]:
    folder = recipes_folder() / LISTS
    path = Path(name).expanduser()
    if not path.is_file():
        known = sorted(one.stem for one in folder.glob("*.txt"))
        if name not in known:
            raise DataError(
                f"@{name} is neither a file nor a built-in list of tasks{did_you_mean(name, known)}"
            )
        path = folder / f"{name}.txt"
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [name for line in lines for name in line.replace(",", " ").split()]


def leaves(manager: Any, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, definition) of every single task in these names."""
    seen: set[str] = set()

    def walk(item: Any, over: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(item, dict) and isinstance(item.get("task"), list):  # a group in a group
            for one in item["task"]:
                yield from walk(one, over)
            return
        name = item.get("task") or item.get("group") if isinstance(item, dict) else item
        over = over | item if isinstance(item, dict) else over
        entry = manager.task_index.get(name)
        if entry is None:
            from lm_eval.tasks._yaml_loader import load_yaml

            config = load_yaml(name, resolve_func=False) if is_file(str(name)) else over
        else:
            config = entry.cfg or {}
        if entry is not None and entry.kind.name == "TAG":
            for one in sorted(entry.tags):
                yield from walk(one, over)
        elif isinstance(config.get("task"), list):
            yield from walk({**config, "group": name}, over)
        elif name not in seen:
            seen.add(str(name))
            yield str(name), {**config, **over, "_yaml": getattr(entry, "yaml_path", None)}

    for name in names:
        yield from walk(name, {})


def data_of(config: Mapping[str, Any]) -> list[TaskData] | str:
    """Returns the datasets that a definition names, or why they are unknown."""
    if function := config.get("custom_dataset"):
        name = str(getattr(function, "__name__", function)).rpartition("/")[2]
        return f"its data is read by a custom function ({name})"
    path, subset = config.get("dataset_path"), config.get("dataset_name")
    options = config.get("dataset_kwargs") or {}
    if path is None and config.get("class"):
        path, subset = attributes_of(config)
    if not isinstance(path, str):
        return "its definition names no dataset"
    files = [one for some in listed(options.get("data_files")) for one in some]
    if is_local(path) or (not files and is_packaged(path)):
        return []
    if not is_packaged(path):
        start = f"{options['data_dir'].strip('/')}/" if options.get("data_dir") else ""
        chosen = tuple(start + one for one in files) or ((f"{start}*",) if start else ())
        return [TaskData(path, options.get("revision"), subset, chosen)]
    found: dict[tuple[str, str | None], list[str]] = {}
    for file in files:
        place = on_hub(file)
        if place is None and "://" in file:
            return f"its data is at {file}, which is not on the Hub"
        if place is not None:
            found.setdefault(place[:2], []).append(place[2])
    return [TaskData(*place, None, tuple(some)) for place, some in found.items()]


def local_files(config: Mapping[str, Any]) -> list[Any]:
    """Returns the sizes and times of local files that a definition names: data and Python code."""
    options, path = config.get("dataset_kwargs") or {}, config.get("dataset_path")
    named = [one for some in listed(options.get("data_files")) for one in some]
    named += [one for one in (path, options.get("data_dir")) if isinstance(one, str)]
    named += [f"{one.rpartition('.')[0]}.py" for one in texts_in(config) if one.startswith("/")]
    files = dict.fromkeys(file for one in named for file in files_at(os.path.expanduser(one)))
    found = [(file, os.stat(file)) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in found]


def files_at(path: str) -> list[str]:
    """Returns a file, the files below a folder, or those that match a pattern."""
    inside = f"{path}/**" if os.path.isdir(path) else path
    return [one for one in sorted(glob(inside, recursive=True)) if os.path.isfile(one)]


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(one)


def attributes_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the dataset path and name of a task written in Python."""
    from lm_eval.tasks._yaml_loader import load_yaml

    resolved = load_yaml(config["_yaml"])["class"] if config.get("_yaml") else config["class"]
    return getattr(resolved, "DATASET_PATH", None), getattr(resolved, "DATASET_NAME", None)


def listed(data_files: Any) -> list[list[str]]:
    """Returns files by split, from any form that the library accepts."""
    some = data_files.values() if isinstance(data_files, Mapping) else [data_files or []]
    return [[one] if isinstance(one, str) else list(one) for one in some]


def on_hub(file: str) -> tuple[str, str | None, str] | None:
    """Returns (dataset, revision, file) if the file is on the Hub."""
    if match := ON_HUB.fullmatch(file):
        return match[1], match[2], match[3]
    if match := ADDRESS.fullmatch(file):
        return match[1], None if match[2] == "main" else match[2], match[3]
    return None


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).expanduser().is_file()


def is_packaged(path: str) -> bool:
    """Whether the path is the name of a file format, not of a dataset."""
    return path in ("json", "csv", "text", "parquet", "arrow", "xml", "pandas")


def is_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or Path(path).is_dir()


def fetch_tasks(
    needs: Needs, root: Path, report: Report, tell: Callable[[str], None]
) -> dict[str, str]:
    """Fetches and prepares every dataset; returns those that cannot be used, and why."""
    failed: dict[str, str] = {}
    for (name, revision), some in by_repository(needs).items():
        folder = TaskData(name, revision).folder(root)
        try:
            for wanted in requests_of(name, revision, some):
                done = fetch(wanted, folder, report)
            if f"{name.rpartition('/')[2]}.py" in done.snapshot.files:
                raise DataError(scripted(name, name))
            for one in some:
                prepare(one, root)
        except (HubError, DataError) as error:
            failed[name] = str(error)
            continue
        size = done.snapshot.num_bytes / 1e6
        tell(f"{folder}: {name} at commit {done.snapshot.commit[:12]}, {size:,.1f} MB, verified")
    return failed


def by_repository(needs: Needs) -> dict[tuple[str, str | None], list[TaskData]]:
    found: dict[tuple[str, str | None], list[TaskData]] = {}
    for one in needs.datasets:
        found.setdefault((one.name, one.revision), []).append(one)
    return found


def requests_of(name: str, revision: str | None, some: list[TaskData]) -> list[Wanted]:
    """Returns as few requests to the Hub as possible: one for all subsets, and one for all
    files."""
    subsets = tuple(sorted({one.subset for one in some if not one.files}, key=str))
    files = [Wanted("dataset", name, revision, include=one.files) for one in some if one.files]
    whole = [Wanted("dataset", name, revision, subsets=subsets)] if subsets else []
    return whole + files


def prepare(one: TaskData, root: Path) -> None:
    """Lets the library read a dataset once, to check that it works."""
    if one.files:  # the task defines how they are read
        return
    import datasets

    datasets.disable_progress_bars()
    with fetched(root):
        datasets.load_dataset(one.name, one.subset, revision=one.revision)


@contextmanager
def fetched(root: Path, tasks: Iterable[str] = ()) -> Iterator[None]:
    """Makes the `datasets` library read from `root` within this context, without opening any
    connection. `tasks` are named in errors."""
    import datasets
    import huggingface_hub

    original = datasets.load_dataset

    def load(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
        try:
            place, options = local_place(path, name, options, root)
            if place != path and not os.environ.get("HF_DATASETS_CACHE"):
                options.setdefault("cache_dir", str((root / PREPARED).absolute()))
            return original(place, name, *args, **options)
        except Exception as error:
            words = explained(error, path, name, root, list(tasks))
            if words is None:
                raise
            raise DataError(words) from None

    with (
        patch.object(datasets, "load_dataset", load),
        patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
    ):
        yield


def local_place(
    path: str, subset: str | None, options: dict[str, Any], root: Path
) -> tuple[str, dict[str, Any]]:
    """Returns the arguments of a load, with local files in place of remote ones if they exist."""
    if is_packaged(path):
        files = options.get("data_files")
        return path, {**options, "data_files": moved_files(files, root)} if files else options
    if is_local(path):
        return path, options
    config = {"dataset_path": path, "dataset_name": subset, "dataset_kwargs": options}
    data = cast(list[TaskData], data_of(config))[0]
    if read_snapshot(data.folder(root)) is None:  # the library's own cache may have it
        return path, options
    if not data.is_here(root):
        raise FileNotFoundError
    place = str(data.folder(root).absolute())
    return place, {key: value for key, value in options.items() if key != "revision"}


def moved_files(files: Any, root: Path) -> Any:
    if isinstance(files, Mapping):
        return {split: moved_files(some, root) for split, some in files.items()}
    if not isinstance(files, str):
        return [moved_files(one, root) for one in files]
    place = on_hub(files)
    if place is None:
        return files
    name, revision, file = place
    here = TaskData(name, revision).folder(root) / file
    return str(here.absolute()) if here.is_file() else files


def scripted(what: str, path: str) -> str:
    return (
        f"{what} is loaded by its own script, {path.rpartition('/')[2]}.py, which the `datasets` "
        "library no longer supports since version 4: no task can read it"
    )


def explained(
    error: Exception, path: str, subset: str | None, root: Path, tasks: list[str]
) -> str | None:
    """Explains an error with a dataset, if the user can fix it."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    what = path if subset is None else f"{path}, subset {subset}"
    if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
        return scripted(what, path)
    missing = (
        DatasetNotFoundError, ConnectionError, FileNotFoundError, OfflineModeIsEnabled,
        HfHubHTTPError,
    )  # fmt: skip
    is_unknown_subset = isinstance(error, ValueError) and "BuilderConfig" in str(error)
    if not isinstance(error, missing) and not is_unknown_subset:
        return None
    ways = command("overland", "fetch", "tasks", *(tasks or ["NAME"]))
    alone = command("overland", "fetch", "dataset", path, "--to", TaskData(path).folder(root))
    return (
        f"the dataset {what} is not on this machine, and an evaluation opens no connections: where "
        f"there is a network, run `{ways}`" + (f" (or `{alone}`)" if not is_packaged(path) else "")
    )


def in_words(needs: Needs, root: Path) -> list[str]:
    """Returns a line per repository, and per task whose data cannot be fetched."""
    lines = []
    for (name, revision), some in by_repository(needs).items():
        tasks = list(dict.fromkeys(task for one in some for task in needs.datasets[one]))
        subsets = [one.subset for one in some if one.subset and not one.files]
        files = {file for one in some for file in one.files}
        parts = [name, *([f"revision {revision}"] if revision else [])]
        parts += [shown("subset", subsets)] if subsets else []
        parts += [shown("file", sorted(files))] if files else []
        missing = sum(not one.is_here(root) for one in some)
        state = "missing" if missing == len(some) else f"{missing} missing" if missing else "here"
        lines.append(f"{state}: {', '.join(parts)}, for {shown('task', tasks)}")
    return lines + [f"cannot be fetched: {name}: {why}" for name, why in needs.others.items()]


def shown(what: str, names: Sequence[str]) -> str:
    return f"{what} {names[0]}" if len(names) == 1 else f"{len(names)} {what}s"
