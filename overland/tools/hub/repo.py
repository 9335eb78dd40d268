"""One repository on a Hub, the client that speaks with it, and what can go wrong between here and
there, each as a sentence with a way out.

The endpoint is HF_ENDPOINT's, the token HF_TOKEN's and nobody else's: a token that a login left in
a file is not read. What is imported here opens connections, so only `fetch` and `push` come here.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from overland.errors import HubError
from overland.packages import need
from overland.tools.hub.snapshot import HubFile, check_commit

ENDPOINT = "https://huggingface.co"
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # the client obeys both
SECONDS = 30.0  # for an answer about a repository
MOST_FILES = 2_000_000  # of a repository; a list without an end would fill the memory


@dataclass(frozen=True)
class Repo:
    name: str
    type: Literal["model", "dataset"]
    endpoint: str
    token: str | None = field(repr=False)

    @property
    def page(self) -> str:
        """Where a person reads about it."""
        return f"{self.endpoint}/{'datasets/' if self.type == 'dataset' else ''}{self.name}"


def open_repo(
    name: str, repo_type: Literal["model", "dataset"], env: Mapping[str, str] = os.environ
) -> Repo:
    endpoint = (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    return Repo(name, repo_type, endpoint, (env.get("HF_TOKEN") or "").strip() or None)


def connect(repo: Repo, env: Mapping[str, str] = os.environ) -> Any:
    """The client, if connections are allowed at all."""
    for switch in SWITCHES:
        if env.get(switch, "").lower() not in ("", "0", "false", "no", "off"):
            raise HubError(
                f"{switch} is set, so no connection may be opened: unset it where there is a "
                "network, such as a login node"
            )
    client = need("huggingface_hub", "a connection to a Hub", "hub", HubError)
    # False, not None: None would look for a token in files.
    return client.HfApi(endpoint=repo.endpoint, token=repo.token or False, library_name="overland")


def commit_of(client: Any, repo: Repo, revision: str | None) -> str:
    """The commit that a branch, a tag or a shortened commit means now."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        info = client.repo_info(repo.name, repo_type=repo.type, revision=revision, timeout=SECONDS)
    except RevisionNotFoundError:
        refs = client.list_repo_refs(repo.name, repo_type=repo.type)
        names = ", ".join(ref.name for ref in [*refs.branches, *refs.tags])
        raise HubError(
            f"{repo.name} has no revision {revision!r}; it has {names}, and its commits"
        ) from None
    try:
        return check_commit(info.sha)
    except ValueError as error:
        raise not_a_hub(repo, error) from None


def list_files(client: Any, repo: Repo, commit: str) -> dict[str, HubFile]:
    """Every file of a commit, with the size and hash that the Hub gives for it."""
    from huggingface_hub.hf_api import RepoFile

    tree = client.list_repo_tree(repo.name, repo_type=repo.type, revision=commit, recursive=True)
    files: dict[str, HubFile] = {}
    try:
        for one in itertools.islice(tree, MOST_FILES + 1):
            if isinstance(one, RepoFile) and one.lfs:
                files[one.path] = HubFile(one.lfs.size, f"sha256:{one.lfs.sha256}")
            elif isinstance(one, RepoFile):
                files[one.path] = HubFile(one.size, f"git:{one.blob_id}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, json.JSONDecodeError):  # a page of a proxy, which has its own words
            raise
        raise not_a_hub(repo, error) from None
    if len(files) > MOST_FILES:
        raise HubError(f"{repo.page} lists more than {MOST_FILES:,} files, which is refused")
    return files


def not_a_hub(repo: Repo, error: Exception) -> HubError:
    return HubError(
        f"{repo.endpoint} does not answer about {repo.name} as a Hub does ({error!s:.200}): check "
        "HF_ENDPOINT"
    )


@contextmanager
def hub_errors(repo: Repo) -> Iterator[None]:
    """Turns errors of the client, the network and the disk into ours. A token is in none of them:
    the client's own words, which could quote a request, are not passed on."""
    try:
        yield
    except Exception as error:
        words = _explain(error, repo)
        if words is None:
            raise
        raise HubError(words) from None


def _explain(error: Exception, repo: Repo) -> str | None:
    import httpx
    from huggingface_hub import errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client wraps what an upload fails of
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it where there is a network, such as a login node"
    if isinstance(error, errors.HFValidationError):
        return f"{repo.name!r} is no name on a Hub: expected OWNER/NAME"
    if isinstance(error, errors.GatedRepoError):
        if repo.token:
            return (
                f"the account of HF_TOKEN may not read {repo.name} yet: accept its licence at "
                f"{repo.page}, and use a token that may read gated repositories"
            )
        return (
            f"{repo.name} is given to those who accept its licence: do so at {repo.page}, then set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo.name} has no such revision; those it has: {repo.page}/tree/main"
    if isinstance(error, errors.RepositoryNotFoundError):
        private = (
            "or the account of HF_TOKEN may not see it"
            if repo.token
            else "or it is private, and HF_TOKEN is not set"
        )
        return f"there is no {repo.type} {repo.name} at {repo.endpoint}, {private}"
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_answer(error.response.status_code, repo)
    if isinstance(error, httpx.TransportError):
        return (
            f"no connection to {repo.endpoint} ({error or type(error).__name__}): this needs a "
            "network, as login nodes have; HF_ENDPOINT names another Hub, https_proxy a proxy"
        )
    if isinstance(error, json.JSONDecodeError):
        return (
            f"{repo.endpoint} does not answer as a Hub does: check HF_ENDPOINT, and whether a "
            "proxy wants a login first"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk, or your share of it, is full; what came so far is kept: make room and run "
            "this again, or choose another folder with --to"
        )
    return None


def _explain_answer(status: int, repo: Repo) -> str:
    if status == 401:
        return (
            f"{repo.endpoint} does not know the token in HF_TOKEN: make a new one in your settings"
        )
    if status == 403:
        return (
            f"{repo.endpoint} forbids this to the account of HF_TOKEN: see {repo.page}, and what "
            "the token is allowed to do"
        )
    if status == 429:
        return f"{repo.endpoint} says that these were too many requests: wait some minutes" + (
            "" if repo.token else ", or set HF_TOKEN, which raises the limit"
        )
    later = "try again later" if status >= 500 else "check HF_ENDPOINT"
    return f"{repo.endpoint} answered {status} about {repo.name}: {later}"
