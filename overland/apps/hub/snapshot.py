"""A fetched folder's list, `.overland/snapshot.json`, which pins the folder to one commit and has
the size and hash of every file, to verify them offline.

    FOLDER/
      config.json, model-00001-of-00004.safetensors …   as on the Hub
      .overland/snapshot.json   repository, commit, and the size and hash of every file
      .overland/partial/        partial downloads

The list is written before the first file is fetched, so that an interrupted fetch resumes with the
same commit. A folder stays at its commit: weights and data do not change during a run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from overland.errors import HubError
from overland.files import replace_file
from overland.words import control_character

OWN = ".overland"
LIST = f"{OWN}/snapshot.json"
VERSION = 1
THREADS = 8  # files at a time, as the Hub's own client does
LARGEST = 2**50  # bytes of a file: a petabyte; no Hub accepts more than a thousandth of that
# Git identifies blobs by SHA-1, or by SHA-256 in repositories configured for it.
HASH = re.compile(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True)
class HubFile:
    """A file's size and hash: `sha256:…` for large files, `git:…` (git's blob id) for others."""

    size: int
    hash: str

    def __post_init__(self) -> None:
        """Validates what a Hub, or a folder's list, claims: the hash becomes part of a path, and
        the size limits what is written."""
        if type(self.hash) is not str or not HASH.fullmatch(self.hash):
            raise ValueError(f"{self.hash!r:.100} is not a hash")
        if type(self.size) is not int or not 0 <= self.size <= LARGEST:
            raise ValueError(f"{self.size!r:.100} is not a file size")

    def problem(self, path: Path) -> str | None:
        """Returns `missing`, `damaged`, or None."""
        try:
            if path.stat().st_size != self.size:
                return "damaged"
            return None if hash_of(path, self.hash) == self.hash else "damaged"
        except FileNotFoundError:
            return "missing"


def hash_of(path: Path, like: str) -> str:
    """Returns the file's hash, of the same kind as `like`."""
    kind, _, digits = like.partition(":")
    digest = hashlib.sha256() if len(digits) == 64 else hashlib.sha1(usedforsecurity=False)
    if kind == "git":
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, lambda: digest).hexdigest()}"


@dataclass
class HubSnapshot:
    """The files of one commit. `requests` are the options of earlier fetches, whose files are all
    in `files`, so the same request needs no network."""

    type: str
    name: str
    revision: str
    commit: str
    files: dict[str, HubFile] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def is_at(self, revision: str | None) -> bool:
        return revision in (None, self.revision, self.commit)

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


def read_snapshot(folder: Path) -> HubSnapshot | None:
    path = folder / LIST
    try:
        tree = json.loads(path.read_bytes())
        if tree["version"] != VERSION:
            raise HubError(f"{path} is from another version of Overland: fetch into a new folder")
        files = {name: HubFile(*entry) for name, entry in tree["files"].items()}
        facts = {key: tree[key] for key in ("type", "name", "revision", "commit")}
        requests = [_in_current_keys(one) for one in tree["requests"]]
        check_commit(facts["commit"])
        snapshot = HubSnapshot(**facts, files=files, requests=requests)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise HubError(f"{path} is damaged: remove it and fetch again") from None
    check_names(snapshot.files)
    return snapshot


def _in_current_keys(request: dict[str, Any]) -> dict[str, Any]:
    """Returns a stored request with `subsets`; older lists have a `subset`, which may be null."""
    request = dict(request)
    if "subset" in request:
        subset = request.pop("subset")
        request.setdefault("subsets", [] if subset is None else [subset])
    return request


def write_snapshot(folder: Path, snapshot: HubSnapshot) -> None:
    """Replaces the list atomically."""
    path = folder / LIST
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "version": VERSION,
        **vars(snapshot),
        "files": {name: [entry.size, entry.hash] for name, entry in sorted(snapshot.files.items())},
    }
    replace_file(path, json.dumps(tree, indent=1), shared=True)


def find_problems(
    folder: Path,
    files: dict[str, HubFile],
    advance: Callable[[int], None] = lambda size: None,
) -> dict[str, str]:
    """Reads every byte, and returns name -> `missing` or `damaged`."""

    def look(name: str) -> str | None:
        found = files[name].problem(folder / name)
        advance(files[name].size)
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(files, pool.map(look, files), strict=True))
    return {name: problem for name, problem in found.items() if problem is not None}


def check_commit(commit: Any) -> str:
    """Validates a commit, which becomes part of URLs."""
    if type(commit) is not str or not re.fullmatch(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", commit):
        raise ValueError(f"{commit!r:.100} is not a commit")
    return commit


def check_names(names: Iterable[str]) -> None:
    """Validates names from a Hub: they must not lead out of the folder, or to our own files."""
    for name in names:
        path = PurePosixPath(name)
        is_plain = path.parts and path.as_posix() == name and not path.is_absolute()
        if (
            not is_plain
            or ".." in path.parts
            or "\\" in name
            or path.parts[0].lower() == OWN
            or control_character(name) is not None
        ):
            raise HubError(f"the repository has a file named {name!r}, which is not allowed")
