"""One repository on a Hub, and the client that speaks with it.

The endpoint is HF_ENDPOINT's, the token HF_TOKEN's and nobody else's: a token that a login left in
a file is not read. What is imported here opens connections, so only `fetch` and `push` come here.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overland.errors import HubError
from overland.packages import need
from overland.tools.hub.snapshot import Entry, check_commit

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


def list_files(client: Any, repo: Repo, commit: str) -> dict[str, Entry]:
    """Every file of a commit, with the size and hash that the Hub gives for it."""
    from huggingface_hub.hf_api import RepoFile

    tree = client.list_repo_tree(repo.name, repo_type=repo.type, revision=commit, recursive=True)
    files: dict[str, Entry] = {}
    try:
        for one in itertools.islice(tree, MOST_FILES + 1):
            if isinstance(one, RepoFile) and one.lfs:
                files[one.path] = Entry(one.lfs.size, f"sha256:{one.lfs.sha256}")
            elif isinstance(one, RepoFile):
                files[one.path] = Entry(one.size, f"git:{one.blob_id}")
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
