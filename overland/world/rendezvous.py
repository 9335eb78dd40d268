"""Where the ranks of a world find each other, a small store that rank 0 opens, and the secret by
which they recognize each other.

The port is derived from the job, so that every rank knows it. Jobs that get the same port still
cannot mix: their keys in the store have the name of their world as prefix, and the second job ends
with an error.

Our launcher and the supervisor make a new secret for each start, and pass it on in the environment,
which only its user can read. Ranks that srun, mpirun or torchrun started without us read the user's
own one, from a file in the home directory that is made when it is first needed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from overland.errors import ClusterError
from overland.slurm import ask
from overland.words import name_ranks
from overland.world import Rendezvous, World

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
# The system assigns no ports below 32768 to outgoing connections.
FIRST_PORT, LAST_PORT = 20000, 32767
LATER_SECONDS = 10  # so that the first rank, which knows who is missing, is the first to give up
SECRET = "OVERLAND_SECRET"
SHORTEST_SECRET = 16  # characters
STEPS = 4  # consecutive steps of a job that may run at the same time on a node


def port_of_job(job: int, step: int) -> int:
    """Returns a different port for each of 3,192 consecutive jobs, and for 4 consecutive steps of a
    job."""
    num_jobs = (LAST_PORT + 1 - FIRST_PORT) // STEPS
    return FIRST_PORT + job % num_jobs * STEPS + step % STEPS


def port_of_name(name: str) -> int:
    return FIRST_PORT + zlib.crc32(name.encode()) % (LAST_PORT + 1 - FIRST_PORT)


def open_store(world: World, timeout_seconds: int) -> Store:
    """Returns the store of this world, on every rank."""
    import torch.distributed as dist

    rendezvous = world.rendezvous
    if rendezvous is None:  # torchrun has opened one
        seconds = timedelta(seconds=timeout_seconds)
        opened, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=seconds))
        return dist.PrefixStore("overland", opened)
    address = reachable(rendezvous.address)
    listener = _listen(rendezvous, address, world) if world.is_first else None
    try:
        tcp = dist.TCPStore(
            address,
            rendezvous.port,
            is_master=world.is_first,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=None if listener is None else listener.detach(),
        )
        store = dist.PrefixStore(rendezvous.name, tcp)
        if world.is_first:
            store.set("ranks per node", str(world.local_size))
        per_node = int(store.get("ranks per node"))
    except dist.DistError as error:
        raise ClusterError(
            f"rank {world.rank} did not find rank 0 of {rendezvous.name} at "
            f"{address}:{rendezvous.port} within {timeout_seconds} s "
            f"(comm.init_timeout_seconds): {str(error).splitlines()[0]}"
        ) from None
    if per_node != world.local_size:
        raise ClusterError(
            f"{world.local_size} ranks on the node of rank {world.rank}, but {per_node} on that of "
            "rank 0: every node needs the same number"
        )
    return store


def wait_for_all(store: Store, world: World, timeout_seconds: int) -> None:
    """Waits until all ranks have found the store; the first rank names those that have not."""
    import torch.distributed as dist

    keys = [f"joined {rank}" for rank in range(world.size)]
    store.set(keys[world.rank], "")
    try:
        if world.is_first:
            store.wait(keys, timedelta(seconds=timeout_seconds))
            store.set("all joined", "")
        else:
            store.wait(["all joined"], timedelta(seconds=timeout_seconds + LATER_SECONDS))
    except dist.DistError as error:
        within = f"within {timeout_seconds} s (comm.init_timeout_seconds)"
        if not world.is_first:
            raise ClusterError(
                f"rank {world.rank} has joined, but not all {world.size} ranks did {within}: "
                f"{str(error).splitlines()[0]}"
            ) from None
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise ClusterError(
            f"{name_ranks(missing)} of {world.size} did not join {within}: not started yet, stuck "
            "at its start, or without a connection to this one"
        ) from None


def reachable(host: str) -> str:
    """Returns an address of a host; if DNS does not know it, Slurm may."""
    with suppress(OSError):
        socket.getaddrinfo(host, None)
        return host
    found = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "show", "node", host))
    if found is None or found[1] == host:
        raise ClusterError(
            f"the rendezvous host {host} cannot be resolved here; set MASTER_ADDR to the address "
            "of rank 0's node"
        )
    return found[1]


def _listen(rendezvous: Rendezvous, address: str, world: World) -> socket.socket:
    """Returns a socket bound only to the address that the ranks use, not to all of the node's
    addresses, as torch would do. The exception is a node whose own name resolves to a loopback
    address, as on Debian, which others cannot use."""
    family, kind, _, _, place = socket.getaddrinfo(
        address, rendezvous.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if world.num_nodes > 1 and ip_address(place[0]).is_loopback:
        place = ("", *place[1:])
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"the rendezvous port {rendezvous.port} of {address} is in use by another program; "
                "set MASTER_PORT to a free one"
            ) from None
        raise ClusterError(
            f"the rendezvous address {address} does not belong to {socket.gethostname()}, where "
            f"rank 0 is ({error.strerror}); set MASTER_ADDR to that node, or leave it unset under "
            "srun"
        ) from None
    return listener


def new_secret() -> str:
    return secrets.token_hex(16)


def secret_of(env: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret of this job, from the environment or from the user's file."""
    given = env.get(SECRET, "")
    if given and len(given) < SHORTEST_SECRET:
        raise ClusterError(
            f"environment {SECRET}: {len(given)} characters are too easy to guess: give it at "
            f"least {SHORTEST_SECRET} random ones, the same for all ranks"
        )
    return os.fsencode(given or _users_secret(env))  # random bytes are no text


def secret_file(env: Mapping[str, str] = os.environ) -> Path:
    folder = env.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "overland" / "secret"


def _users_secret(env: Mapping[str, str]) -> str:
    try:
        path = secret_file(env)
        if not path.exists():
            _make_secret(path)
        facts = path.stat()
        text = path.read_text(encoding="ascii").strip()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home directory
        raise ClusterError(
            f"the ranks need a secret to recognize each other, but the file for it cannot be used "
            f"({error}): set {SECRET} to {SHORTEST_SECRET} or more random characters, the same for "
            "all ranks"
        ) from None
    problem, way_out = "", "delete it (a new one is created)"
    if facts.st_uid != os.getuid():
        problem = f"belongs to another user (uid {facts.st_uid}, this process has {os.getuid()})"
        way_out = "set XDG_CONFIG_HOME to a folder of your own"
    elif facts.st_mode & 0o077:
        problem = "can be read by others, so it is no secret"
    elif len(text) < SHORTEST_SECRET:
        problem = "holds no secret"
    if problem:
        raise ClusterError(f"{path} {problem}: {way_out}, or set {SECRET}")
    return text


def _make_secret(path: Path) -> None:
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
