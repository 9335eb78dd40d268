"""Fetches files from a Hub: decides which commit, which files of a model, tokenizer or dataset, and
into which folder; verifies every byte.

1. The commit is the one in the folder's snapshot list, if it has one; otherwise the Hub resolves
it.
2. The Hub lists the commit's files; the kind, `--subset` and `--include` select among them.
3. The snapshot list is written; then each missing or damaged file is downloaded by ranges into
   `.overland/partial`, compared with the Hub's hash, and moved into place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, Literal

from overland.apps.hub.download import download
from overland.apps.hub.repo import Repo, commit_of, connect, hub_errors, list_files, open_repo
from overland.apps.hub.snapshot import (
    OWN,
    THREADS,
    HubFile,
    HubSnapshot,
    check_names,
    find_problems,
    read_snapshot,
    write_snapshot,
)
from overland.config.load import parts_of
from overland.errors import DataError, HubError
from overland.files import publish, sync
from overland.words import size

FetchKind = Literal["model", "tokenizer", "dataset"]
ON_SCRATCH = {"model": "models_cache", "tokenizer": "tokenizers_cache", "dataset": "data_cache"}
HERE = {"model": "assets/hf", "tokenizer": "assets/hf", "dataset": "data"}
# Many repositories have the same weights in two or three formats. The first of these is taken:
# safetensors come first, because reading them runs no code.
WEIGHTS = ((".safetensors",), (".bin",), (".pth", ".pt", ".ckpt"))
FOREIGN = (".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf", ".tflite", ".mlmodel")
TOKENIZER = (
    "tokenizer*.json", "tokenizer*.model*", "tokenizer*.jinja", "special_tokens_map.json",
    "added_tokens.json", "merges.txt", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json",
    "spiece.model", "sentencepiece*.model", "chat_template*", "additional_chat_templates/*",
    "config.json", "generation_config.json", "original/tokenizer*",
)  # fmt: skip
LARGEST_README = 2**24  # bytes; it is downloaded before free space is checked
Report = Callable[[int, int, str], None]  # bytes so far, total bytes, current activity


@dataclass(frozen=True)
class Wanted:
    kind: FetchKind
    name: str
    revision: str | None = None
    subsets: tuple[str | None, ...] = ()
    """Of a dataset; without any, all of it. None is the default subset."""
    include: tuple[str, ...] = ()

    @property
    def repo(self) -> Repo:
        return open_repo(self.name, "dataset" if self.kind == "dataset" else "model")

    @property
    def request(self) -> dict[str, Any]:
        """The request as stored in the folder's snapshot list."""
        include = sorted(self.include)
        return {"kind": self.kind, "subsets": list(self.subsets), "include": include}


@dataclass(frozen=True)
class Fetched:
    snapshot: HubSnapshot
    fetched: list[str]
    """Files that were downloaded this time."""
    mended: list[str]
    """Those among them that were here before, but damaged."""


def fetch(wanted: Wanted, folder: Path, report: Report = lambda *_: None) -> Fetched:
    """Makes sure that every requested file is in `folder`, identical to the Hub's."""
    if wanted.subsets and wanted.kind != "dataset":
        raise HubError(f"--subset is for datasets; use --include for a {wanted.kind}")
    repo, had = wanted.repo, read_snapshot(folder)
    if had is not None:
        check_same(had, repo, folder)
    # The Hub is not needed if the snapshot list has all requested files.
    answered = had is not None and had.is_at(wanted.revision) and wanted.request in had.requests
    snapshot = had if had is not None and answered else ask_hub(wanted, repo, folder, had)
    with only_one(folder):
        snapshot = merge(folder, snapshot, repo)
        problems = find_problems(folder, snapshot.files, Bytes(report, "checking", snapshot).add)
        if problems:
            check_space(folder, snapshot, problems)
        if not answered:
            write_snapshot(folder, snapshot)
        if problems:
            connect(repo)
            with hub_errors(repo):
                bring(repo, snapshot, folder, list(problems), report)
        shutil.rmtree(folder / OWN / "partial", ignore_errors=True)
    damaged = [name for name, problem in problems.items() if problem == "damaged"]
    return Fetched(snapshot, list(problems), damaged)


def verify_folder(wanted: Wanted, folder: Path, report: Report = lambda *_: None) -> dict[str, str]:
    """Checks the folder without a network; returns name -> `missing` or `damaged`."""
    had = read_snapshot(folder)
    if had is None:
        raise HubError(f"{folder} was not created by `overland fetch`: there is nothing to verify")
    check_same(had, wanted.repo, folder)
    if not had.is_at(wanted.revision):
        raise HubError(f"{folder} contains {had.revision}, commit {had.commit}, of {had.name}")
    return find_problems(folder, had.files, Bytes(report, "checking", had).add)


def default_folder(kind: FetchKind, name: str, env: Mapping[str, str] = os.environ) -> Path:
    """Returns one folder per repository below SCRATCH_ROOT. Without that, the folder where a config
    looks: `assets/hf/NAME`, as in the recipes and torchtitan, or `data/NAME`, where datasets are
    found by name (`data.folder`)."""
    root = env.get("SCRATCH_ROOT")
    if root:
        return Path(root).expanduser() / ON_SCRATCH[kind] / name.replace("/", "___")
    return Path(HERE[kind]) / name.rpartition("/")[2]


def config_lines(kind: FetchKind, name: str, folder: Path, subset: str | None) -> str:
    """Returns lines to paste into a config, which refer to the folder."""
    path = json.dumps(str(folder), ensure_ascii=False)  # a JSON string is a TOML string
    if kind == "dataset":
        source = re.sub(r"[^\w-]", "_", name.rpartition("/")[2], flags=re.ASCII)
        lines = f"[data.sources.{source}]\npath = {path}\n"
        return lines + (f"subset = {json.dumps(subset)}\n" if subset else "")
    if kind == "model" and parts_of(folder)[0]:
        return f"[model]\nfrom = {path}\n"
    # Meta's own files do not specify the architecture.
    lines = f"[model]\nhf_assets_path = {path}\n"
    return lines + (f"\n[checkpoint]\ninitial_load_path = {path}\n" if kind == "model" else "")


def check_same(had: HubSnapshot, repo: Repo, folder: Path) -> None:
    if (had.type, had.name) != (repo.type, repo.name):
        raise HubError(
            f"{folder} already contains the {had.type} {had.name}: choose another folder with "
            f"--to for {repo.name}"
        )


def ask_hub(wanted: Wanted, repo: Repo, folder: Path, had: HubSnapshot | None) -> HubSnapshot:
    """Asks the Hub for the requested files and their hashes."""
    client = connect(repo)
    with hub_errors(repo):
        if had is not None and wanted.revision in (None, had.revision):
            commit = had.commit
        else:
            commit = commit_of(client, repo, wanted.revision)
        if had is not None and commit != had.commit:
            raise HubError(
                f"{folder} contains commit {had.commit[:12]} of {had.name}, but {wanted.revision} "
                f"is {commit[:12]}: a run may be using the folder, so choose another with --to, or "
                "remove this one"
            )
        files = list_files(repo, commit)
        chosen = choose_files(wanted, repo, commit, files)
    check_names(chosen)
    entries = {name: files[name] for name in chosen}
    revision = had.revision if had is not None else wanted.revision or "main"
    return HubSnapshot(repo.type, repo.name, revision, commit, entries, [wanted.request])


def merge(folder: Path, new: HubSnapshot, repo: Repo) -> HubSnapshot:
    """Adds the current contents of the folder's snapshot list; the folder is locked."""
    had = read_snapshot(folder)
    if had is None:
        return new
    check_same(had, repo, folder)
    if had.commit != new.commit:
        raise HubError(f"another fetch has just written commit {had.commit[:12]} to {folder}")
    requests = had.requests + [one for one in new.requests if one not in had.requests]
    return replace(had, files=had.files | new.files, requests=requests)


def choose_files(wanted: Wanted, repo: Repo, commit: str, files: dict[str, HubFile]) -> list[str]:
    names = list(files)
    where = f"{wanted.name} at {commit[:12]}"
    if wanted.subsets:
        names = subset_of(wanted.subsets, repo, commit, files)
        where += "".join(f", subset {name}" for name in wanted.subsets if name)
    if wanted.include:
        names = choose_included(names, wanted.include, where)
    elif wanted.kind == "model":
        names = choose_model(names)
    elif wanted.kind == "tokenizer":
        names = [name for name in names if any(_matches(name, one) for one in TOKENIZER)]
    if not names:
        raise HubError(f"{where} has no {wanted.kind} files; see {repo.page}/tree/{commit}")
    if wanted.subsets and "README.md" in files:
        names = list(dict.fromkeys(["README.md", *names]))  # it describes the files
    return names


def subset_of(
    subsets: Sequence[str | None], repo: Repo, commit: str, files: dict[str, HubFile]
) -> list[str]:
    """Returns the files of the subsets, according to the README or the folders. The README is read
    before anything is written, so a misspelled name leaves nothing behind."""
    from overland.data.sources.huggingface import subset_files

    with tempfile.TemporaryDirectory() as place:
        page = files.get("README.md")
        if page and page.size > LARGEST_README:
            raise HubError(
                f"the README.md of {repo.name} is too large ({page.size:,} bytes); use --include "
                "to select files"
            )
        if page:
            bring_one(repo, commit, "README.md", page, Path(place), lambda size: None)
        try:
            found = [subset_files(Path(place), list(files), one, repo.name) for one in subsets]
        except DataError as error:
            raise HubError(str(error)) from None
    return list(dict.fromkeys(name for some in found for name in some))


def choose_model(names: Iterable[str]) -> list[str]:
    """Returns all files except second copies of the weights in another format."""
    names = list(names)
    suffixes = {suffix for name in names if (suffix := _weights(name))}
    kinds = [kind for kind in WEIGHTS if suffixes & set(kind)]
    left_out = {suffix for kind in kinds[1:] for suffix in kind} | set(FOREIGN if kinds else ())
    chosen = [name for name in names if _weights(name) not in left_out]
    return [name for name in chosen if not _is_second_copy(name, chosen)]


def choose_included(names: Sequence[str], patterns: Sequence[str], where: str) -> list[str]:
    """Returns names that match a pattern; `*` also matches `/`, and `folder/` matches all in it."""
    for pattern in patterns:
        if not any(_included(name, pattern) for name in names):
            some = ", ".join(list(names)[:5]) or "none"
            raise HubError(
                f"--include {pattern!r} matches none of the {len(names)} files in {where}, such as "
                f"{some}"
            )
    return [name for name in names if any(_included(name, pattern) for pattern in patterns)]


def _weights(name: str) -> str:
    """Returns the suffix of a weights file or its index; "" for other files."""
    suffix = PurePosixPath(name.removesuffix(".index.json")).suffix
    return suffix if any(suffix in kind for kind in (*WEIGHTS, FOREIGN)) else ""


def _is_second_copy(name: str, chosen: Sequence[str]) -> bool:
    """Whether a file is a copy in Meta's or Mistral's own format, next to Hugging Face's."""
    has_standard = any(fnmatchcase(other, "model*.safetensors") for other in chosen)
    folder, _, file = name.rpartition("/")
    is_own = folder == "original" or (not folder and file.startswith("consolidated"))
    return has_standard and is_own and bool(_weights(name))


def _matches(name: str, pattern: str) -> bool:
    """Matches folder by folder: `tokenizer*` does not match files in `onnx/`."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _included(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern + "*" if pattern.endswith("/") else pattern)


def check_space(folder: Path, snapshot: HubSnapshot, problems: dict[str, str]) -> None:
    """Raises an error if the disk is too full, before hours of download rather than after."""
    free = shutil.disk_usage(folder).free
    partial = folder / OWN / "partial"
    here = sum(path.stat().st_size for path in partial.iterdir()) if partial.is_dir() else 0
    needed = sum(snapshot.files[name].size for name in problems) - here
    if needed > free:
        raise HubError(
            f"{size(needed)} are needed, but {folder} has only {size(free)} free: free some space, "
            "choose another folder with --to, or fewer files with --include or --subset"
        )


def bring(
    repo: Repo, snapshot: HubSnapshot, folder: Path, names: list[str], report: Report
) -> None:
    entries = {name: snapshot.files[name] for name in names}
    progress = Bytes(report, "fetching", replace(snapshot, files=entries))
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [
            pool.submit(bring_one, repo, snapshot.commit, name, entry, folder, progress.add)
            for name, entry in entries.items()
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            progress.stopped = True  # the other threads stop and keep their bytes
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def bring_one(
    repo: Repo, commit: str, name: str, entry: HubFile, folder: Path, advance: Callable[[int], None]
) -> None:
    check_names([name])
    # Named by content, so that leftovers of another commit are never mistaken for a part of this
    # one, and by file name, since two files may have the same content.
    of_name = hashlib.sha256(name.encode()).hexdigest()[:8]
    part = folder / OWN / "partial" / f"{entry.hash.replace(':', '-')}-{of_name}"
    for _ in range(2):  # a file assembled over days may be damaged once
        download(repo, commit, name, entry, part, advance)
        if entry.problem(part) is None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            sync(part)
            publish(part, target)
            return
        advance(-part.stat().st_size)
        part.unlink()
    raise HubError(
        f"{name} was downloaded twice and does not match its hash at {repo.endpoint}: try again "
        "later, or use another Hub with HF_ENDPOINT"
    )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Locks the folder, since two fetches would write to the same partial files."""
    lock = folder / OWN / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(f"another fetch is running in {folder}: wait for it to end") from None
        except OSError:
            pass  # Lustre may be mounted without locks; hashes detect mixed-up files
        yield


class Bytes:
    """A byte counter shared by several threads."""

    def __init__(self, report: Report, what: str, snapshot: HubSnapshot) -> None:
        self.report, self.what, self.total = report, what, snapshot.num_bytes
        self.done, self.lock, self.stopped = 0, Lock(), False

    def add(self, size: int) -> None:
        if self.stopped:
            raise HubError("stopped, because another file failed")
        with self.lock:
            self.done += size
            self.report(self.done, self.total, self.what)
