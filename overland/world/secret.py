"""The secret by which the ranks of a job recognize each other.

Our launcher and the supervisor make a new one for each start, and pass it on in the environment,
which only its user can read. Ranks that srun, mpirun or torchrun started without us read the user's
own one, from a file in the home directory that is made when it is first needed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from overland.errors import ClusterError

VARIABLE = "OVERLAND_SECRET"
SHORTEST = 16


def new_secret() -> str:
    return secrets.token_hex(16)


def secret_of(env: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret of this job, from the environment or from the user's file."""
    given = env.get(VARIABLE, "")
    if given and len(given) < SHORTEST:
        raise ClusterError(
            f"environment {VARIABLE}: {len(given)} characters are too easy to guess: give it at "
            f"least {SHORTEST} random ones, the same for all ranks"
        )
    return os.fsencode(given or _of_user(env))  # random bytes are no text


def secret_file(env: Mapping[str, str] = os.environ) -> Path:
    folder = env.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "overland" / "secret"


def _of_user(env: Mapping[str, str]) -> str:
    try:
        path = secret_file(env)
        if not path.exists():
            _make(path)
        facts = path.stat()
        text = path.read_text(encoding="ascii").strip()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home directory
        raise ClusterError(
            f"the ranks need a secret to recognize each other, but the file for it cannot be used "
            f"({error}): set {VARIABLE} to {SHORTEST} or more random characters, the same for all "
            "ranks"
        ) from None
    if facts.st_uid != os.getuid():
        raise ClusterError(
            f"{path} belongs to another user (uid {facts.st_uid}, this process has "
            f"{os.getuid()}): set XDG_CONFIG_HOME to a folder of your own, or set {VARIABLE}"
        )
    if facts.st_mode & 0o077:
        raise ClusterError(
            f"{path} can be read by others, so it is no secret: delete it (it is made again), or "
            f"set {VARIABLE}"
        )
    if len(text) < SHORTEST:
        raise ClusterError(f"{path} holds no secret: delete it (it is made again)")
    return text


def _make(path: Path) -> None:
    """Makes the file in one step; of several processes that do so at once, one wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".secret-{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(new_secret() + "\n")
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)
