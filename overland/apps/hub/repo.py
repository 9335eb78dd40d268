"""A repository on a Hub: its endpoint and token, its list of files, and a clear message for
everything that can go wrong.

The endpoint comes from HF_ENDPOINT and the token only from HF_TOKEN: a token that a login stored in
a file is not read. This module opens connections, so only `fetch` and `push` import it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

from overland.apps.hub.snapshot import HubFile, check_commit
from overland.errors import FULL, HubError
from overland.files import parse_json, what_is_wrong
from overland.plugins import need
from overland.words import number_of

ENDPOINT = "https://huggingface.co"
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # the client obeys both
SECONDS = 30.0  # timeout of a request about a repository
# Of the list of a repository's files, which could be endless in any way.
MOST_FILES = 2_000_000
MOST_PAGES = 2_500  # of a thousand files each
LARGEST_PAGE = 2**26  # bytes
LIST_SECONDS = 600.0


@dataclass(frozen=True)
class Repo:
    name: str
    type: Literal["model", "dataset"]
    endpoint: str
    token: str | None = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The client's own headers for a request about the repository."""
        from huggingface_hub.utils import build_hf_headers

        return build_hf_headers(token=self.token or False, library_name="overland")

    @property
    def page(self) -> str:
        """The address of the repository's web page."""
        return f"{self.endpoint}/{'datasets/' if self.type == 'dataset' else ''}{self.name}"


def open_repo(name: str, repo_type: Literal["model", "dataset"]) -> Repo:
    endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    return Repo(name, repo_type, endpoint, os.environ.get("HF_TOKEN", "").strip() or None)


def connect(repo: Repo) -> Any:
    """Returns the client, or raises an error if connections are disabled."""
    for switch in SWITCHES:
        if os.environ.get(switch, "").lower() not in ("", "0", "false", "no", "off"):
            raise HubError(
                f"{switch} is set, which disables connections: unset it on a machine with a "
                "network, such as a login node"
            )
    client = need("huggingface_hub", "a connection to a Hub", "hub", HubError)
    # False, not None: None would look for a token in files.
    return client.HfApi(endpoint=repo.endpoint, token=repo.token or False, library_name="overland")


def commit_of(client: Any, repo: Repo, revision: str | None) -> str:
    """Resolves a branch, a tag or a shortened commit to a commit."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        info = client.repo_info(repo.name, repo_type=repo.type, revision=revision, timeout=SECONDS)
    except RevisionNotFoundError:
        refs = client.list_repo_refs(repo.name, repo_type=repo.type)
        names = ", ".join(ref.name for ref in [*refs.branches, *refs.tags])
        raise HubError(
            f"{repo.name} has no revision {revision!r}; it has {names}, or give a commit"
        ) from None
    try:
        return check_commit(info.sha)
    except ValueError as error:
        raise not_a_hub(repo, error) from None


def list_files(repo: Repo, commit: str) -> dict[str, HubFile]:
    """Returns every file of a commit, with its size and hash on the Hub. The client's own listing
    follows the link to the next page wherever it leads, with the token, and without end."""
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo.name)
    url = f"{repo.endpoint}/api/{repo.type}s/{repo.name}/tree/{commit}?recursive=true"
    files: dict[str, HubFile] = {}
    seen, until = set[str](), time.monotonic() + LIST_SECONDS
    for _ in range(MOST_PAGES):
        entries, following = _page(repo, url, until)
        known = len(seen)
        try:
            for one in entries:
                seen.add(one["path"])
                if one["type"] == "file" and (large := one.get("lfs")) is not None:
                    files[one["path"]] = HubFile(large["size"], f"sha256:{large['oid']}")
                elif one["type"] == "file":
                    files[one["path"]] = HubFile(one["size"], f"git:{one['oid']}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise not_a_hub(repo, ValueError(what_is_wrong(error))) from None
        if following is None:
            return files
        if len(seen) == known or len(seen) > MOST_FILES:
            break
        if urlsplit(following)[:2] != urlsplit(repo.endpoint)[:2]:
            raise HubError(
                f"{repo.endpoint} continues its list of {repo.name} on another host, "
                f"{following!r:.200}, which is not followed"
            )
        url = following
    raise HubError(f"the list of {repo.page} does not end: {number_of(len(seen), 'file')} so far")


def _page(repo: Repo, url: str, until: float) -> tuple[list[Any], str | None]:
    """Returns one page of a list, and the address of the next."""
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    with http_stream_backoff("GET", url, headers=repo.headers, timeout=SECONDS) as response:
        hf_raise_for_status(response)
        text = bytearray()
        for piece in response.iter_bytes():
            text += piece
            if len(text) > LARGEST_PAGE or time.monotonic() > until:
                raise HubError(f"{repo.endpoint} does not finish its list of {repo.name}")
    try:
        entries = parse_json(bytes(text))
    except json.JSONDecodeError:  # a proxy's web page, which has its own message
        raise
    except ValueError as error:
        raise not_a_hub(repo, error) from None
    if not isinstance(entries, list):
        raise not_a_hub(repo, ValueError("a list of files was expected"))
    link = response.links.get("next", {}).get("url")
    return entries, urljoin(url, link) if link else None


def not_a_hub(repo: Repo, error: Exception) -> HubError:
    return HubError(
        f"{repo.endpoint} did not respond like a Hub about {repo.name} ({error!s:.200}): check "
        "HF_ENDPOINT"
    )


@contextmanager
def hub_errors(repo: Repo) -> Iterator[None]:
    """Turns errors of the client, the network and the disk into ours. They never contain a token:
    the client's own messages, which could quote a request, are not passed on."""
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
        error = error.__cause__  # the client wraps the cause of a failed upload
    if isinstance(error, errors.HFValidationError):
        return f"{repo.name!r} is not a valid repository name: expected OWNER/NAME"
    if isinstance(error, errors.GatedRepoError):
        if repo.token:
            return (
                f"the account of HF_TOKEN does not have access to {repo.name} yet: accept its "
                f"license at {repo.page}, and use a token that can read gated repositories"
            )
        return (
            f"{repo.name} requires accepting its license: do so at {repo.page}, then set HF_TOKEN "
            "to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo.name} has no such revision; see {repo.page}/tree/main for its revisions"
    if isinstance(error, errors.RepositoryNotFoundError):
        private = (
            "or the account of HF_TOKEN has no access to it"
            if repo.token
            else "or it is private, and HF_TOKEN is not set"
        )
        return f"there is no {repo.type} {repo.name} at {repo.endpoint}, {private}"
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_answer(error.response.status_code, repo)
    if isinstance(error, httpx.TransportError):
        return (
            f"cannot connect to {repo.endpoint} ({error or type(error).__name__}): run this on a "
            "machine with a network, such as a login node; set HF_ENDPOINT for another Hub, or "
            "https_proxy for a proxy"
        )
    if isinstance(error, json.JSONDecodeError):
        return (
            f"{repo.endpoint} did not respond like a Hub: check HF_ENDPOINT, and whether a proxy "
            "requires a login first"
        )
    if isinstance(error, KeyError | TypeError | ValueError | AttributeError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames and "huggingface_hub" in Path(frames[-1].filename).parts:  # reading an answer
            return str(not_a_hub(repo, ValueError(what_is_wrong(error))))
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            "the disk or your quota is full; downloaded data is kept: free some space and run this "
            "again, or choose another folder with --to"
        )
    return None


def _explain_answer(status: int, repo: Repo) -> str:
    if status == 401:
        return f"{repo.endpoint} rejected the token in HF_TOKEN: create a new one in your settings"
    if status == 403:
        return (
            f"{repo.endpoint} does not allow this for the account of HF_TOKEN: see {repo.page}, "
            "and check the permissions of the token"
        )
    if status == 429:
        return f"{repo.endpoint} reports too many requests: wait a few minutes" + (
            "" if repo.token else ", or set HF_TOKEN, which raises the limit"
        )
    later = "try again later" if status >= 500 else "check HF_ENDPOINT"
    return f"{repo.endpoint} returned status {status} for {repo.name}: {later}"
