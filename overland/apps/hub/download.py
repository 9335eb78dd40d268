"""Downloads one file from a Hub by ranges, so that an interrupted download resumes, and decides
which errors are retried, and how often.

The client's own download cannot stand in for this. Since huggingface_hub 1.18 a killed download
starts over, even for 50 GB. With 1.33 and plain HTTP, a flipped byte is accepted, since only the
size is compared, and an endless answer for a file of 4 bytes is written until it ends. We use its
session, headers and errors, but write the bytes ourselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from overland.apps.hub.repo import Repo
from overland.apps.hub.snapshot import HubFile

ATTEMPTS = 5  # in a row without any new bytes
WAIT = 0.5  # seconds after the first; doubled after each
PIECE = 32 << 30  # bytes per request: content networks do not serve more than 50 GB
MAY_PASS = (408, 429, 500, 502, 503, 504)  # temporary errors, worth another attempt


def download(
    repo: Repo,
    commit: str,
    name: str,
    entry: HubFile,
    part: Path,
    advance: Callable[[int], None],
) -> None:
    """Appends the missing bytes to `part`. `advance` is called with the number of new bytes, which
    is negative if bytes must be downloaded again."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    url = f"{repo.page}/resolve/{commit}/{quote(name)}"
    part.parent.mkdir(parents=True, exist_ok=True)
    if not part.exists() or part.stat().st_size > entry.size:
        part.write_bytes(b"")
    advance(part.stat().st_size)
    failures = 0
    while (have := part.stat().st_size) < entry.size:
        try:
            _append(repo, url, entry.size, part, advance)
        except (httpx.TransportError, HfHubHTTPError) as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in MAY_PASS:
                raise
            failures = failures + 1 if part.stat().st_size <= have else 1
            if failures >= ATTEMPTS:
                raise
            time.sleep(WAIT * 2 ** (failures - 1))


def _append(repo: Repo, url: str, size: int, part: Path, advance: Callable[[int], None]) -> None:
    import httpx
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import hf_raise_for_status

    have = part.stat().st_size
    headers = {
        **repo.headers,
        "Range": f"bytes={have}-{min(have + PIECE, size) - 1}",
        "Accept-Encoding": "identity",  # ranges refer to the uncompressed file
    }
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        hf_raise_for_status(response)
        came_whole = response.status_code == 200  # a server that does not support ranges
        if came_whole:
            advance(-have)
        room = size if came_whole else min(PIECE, size - have)
        with part.open("wb" if came_whole else "ab") as file:
            for chunk in response.iter_bytes():
                file.write(chunk[:room])
                file.flush()  # so that received bytes survive this process
                advance(min(len(chunk), room))
                room -= len(chunk)
                if room <= 0:  # an endless response would fill the disk
                    break
    if part.stat().st_size <= have:
        raise httpx.RemoteProtocolError("the response was empty")
