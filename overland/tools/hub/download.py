"""One file from a Hub, by ranges, into a file that outlives the process.

The client has no such thing any more: since huggingface_hub 1.18 a download that is killed begins
again, 50 GB or not. Its session, headers and errors are used; the bytes are ours to keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from overland.tools.hub.repo import Repo
from overland.tools.hub.snapshot import HubFile

ATTEMPTS = 5  # in a row that bring nothing
WAIT = 0.5  # seconds after the first; twice as long after each
PIECE = 32 << 30  # asked for at once: content networks give no answer above 50 GB
MAY_PASS = (408, 429, 500, 502, 503, 504)  # answers that another attempt may not get


def download(
    repo: Repo,
    commit: str,
    name: str,
    entry: HubFile,
    part: Path,
    advance: Callable[[int], None],
) -> None:
    """Appends to `part` what it lacks. `advance` is told of each byte, and of those that must come
    again as negative ones."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    url = f"{repo.page}/resolve/{commit}/{quote(name)}"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    if part.stat().st_size > entry.size:
        part.unlink()
        part.touch()
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
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    have = part.stat().st_size
    headers = {
        **build_hf_headers(token=repo.token or False, library_name="overland"),
        "Range": f"bytes={have}-{min(have + PIECE, size) - 1}",
        "Accept-Encoding": "identity",  # ranges are of the file, not of a compressed one
    }
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        hf_raise_for_status(response)
        came_whole = response.status_code == 200  # a server that knows no ranges
        if came_whole:
            advance(-have)
        room = size if came_whole else min(PIECE, size - have)
        with part.open("wb" if came_whole else "ab") as file:
            for chunk in response.iter_bytes():
                file.write(chunk[:room])
                file.flush()  # what has come outlives this process
                advance(min(len(chunk), room))
                room -= len(chunk)
                if room <= 0:  # an answer without an end would fill the disk
                    break
    if part.stat().st_size <= have:
        raise httpx.RemoteProtocolError("the answer was empty")
