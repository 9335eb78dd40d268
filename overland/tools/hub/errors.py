"""What can go wrong between here and a Hub, each as a sentence with a way out."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from overland.errors import HubError

if TYPE_CHECKING:
    from overland.tools.hub.repo import Repo


@contextmanager
def in_words(repo: Repo) -> Iterator[None]:
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
