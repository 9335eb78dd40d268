"""Pushes a folder to a Hub in one commit, decides which files are left out or refused (checkpoints,
links), and compares it afterwards with the Hub's file list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from overland.apps.hub.repo import SECONDS, Repo, connect, hub_errors, list_files, open_repo
from overland.apps.hub.secrets import refuse_secret_files
from overland.apps.hub.snapshot import OWN, check_names
from overland.errors import HubError
from overland.files import leads_out
from overland.run_folder import COMMITTED
from overland.words import command, number_of

LEFT_OUT = {OWN, ".cache", ".git"}  # files of fetch, the Hub's client and git
# Names of files that only a trainer reads: markers of our checkpoints and of DCP's.
CHECKPOINT_FILES = (COMMITTED, ".metadata")


@dataclass(frozen=True)
class Pushed:
    commit: str
    url: str
    files: dict[str, int]
    """Size in bytes by name."""


def push(
    folder: Path,
    name: str,
    *,
    repo_type: Literal["model", "dataset"] = "model",
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    bars: bool = False,
) -> Pushed:
    """Adds the folder's files to the repository, which is created if it does not exist; its other
    files are left alone."""
    repo = open_repo(name, repo_type)
    files = find_files(folder)
    refuse_checkpoints(folder, files)
    refuse_secret_files(folder, files)
    client = connect(repo)
    if not repo.token:
        raise HubError("HF_TOKEN is not set: to push, set it to a token with write access")
    from huggingface_hub import CommitOperationAdd, constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    enable_progress_bars() if bars else disable_progress_bars()
    with hub_errors(repo):
        client.create_repo(name, repo_type=repo_type, private=private or None, exist_ok=True)
        info = client.repo_info(name, repo_type=repo_type, timeout=SECONDS)
        if private and not info.private:
            raise HubError(
                f"{name} already exists and is public: make it private at "
                f"{repo.page}/settings, choose another name, or omit --private"
            )
        if revision is not None:
            client.create_branch(name, repo_type=repo_type, branch=revision, exist_ok=True)
        # With hf_xet installed, the client uploads large files with Xet without checking that the
        # Hub supports it; if it does not, plain LFS is used.
        if not constants.HF_HUB_DISABLE_XET and not speaks_xet(repo, revision or "main"):
            constants.HF_HUB_DISABLE_XET = True
        done = client.create_commit(
            name,
            [CommitOperationAdd(path_in_repo=one, path_or_fileobj=folder / one) for one in files],
            commit_message=message or f"Add {number_of(len(files), 'file')}",
            repo_type=repo_type,
            revision=revision,
        )
        there = list_files(repo, str(done.oid))
    wrong = [one for one in files if one not in there or there[one].problem(folder / one)]
    if wrong:
        raise HubError(
            f"{repo.page} does not match what was pushed: {', '.join(wrong)}; push again, and "
            "check whether a .gitignore there excludes files"
        )
    sizes = {one: there[one].size for one in files}
    return Pushed(str(done.oid), f"{repo.page}/tree/{revision or 'main'}", sizes)


def speaks_xet(repo: Repo, revision: str) -> bool:
    from urllib.parse import quote

    from huggingface_hub import get_session

    answer = get_session().get(
        f"{repo.endpoint}/api/{repo.type}s/{repo.name}/xet-write-token/{quote(revision, safe='')}",
        headers=repo.headers,
        timeout=SECONDS,
    )
    return bool(answer.is_success)


def find_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise HubError(f"{folder} is not a folder; `overland push` needs one, such as RUN/hf")
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if not LEFT_OUT & set(path.relative_to(folder).parts)
    ]
    for path in paths:
        if path.is_symlink():
            refuse_link(path, folder)
    found = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    if not found:
        raise HubError(f"{folder} contains no files")
    check_names(found)
    return found


def refuse_link(path: Path, folder: Path) -> None:
    """Raises an error for links that lead out of the folder or nowhere. They may lead to anything
    on this machine, so silently following or skipping them would be a surprise either way."""
    if not path.exists():
        raise HubError(f"{path} is a broken link: remove it before pushing")
    if path.is_dir():
        raise HubError(f"{path} is a link to a folder: replace it with a copy, or remove it")
    if leads_out(path, folder):
        raise HubError(
            f"{path} is a link out of the folder, to {path.resolve()}: replace it with a copy if "
            "you want to push it, or remove it"
        )


def refuse_checkpoints(folder: Path, files: list[str]) -> None:
    for file in files:
        path = Path(file)
        if path.name in CHECKPOINT_FILES or path.suffix == ".distcp":
            convert = command("overland", "convert", folder, f"{folder}-hf", "--to", "hf")
            raise HubError(
                f"{folder} contains a training checkpoint ({file}): convert it with `{convert}` "
                "and push the result"
            )
