"""Broadcasts, gathers and scatters values among ranks, signed with the secret of their job;
records.py decides which values can be sent.

PyTorch's own `all_gather_object` and its siblings unpickle what arrives, so whoever takes the place
of a rank can run code on the others. Here, all ranks first show each other that they know the
secret of the job, without sending it; from then on every value is signed with a key that is derived
from it and from random numbers of all ranks, so that values of an earlier start are not accepted
either. Tensors are not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from overland.errors import ClusterError
from overland.world.records import from_json, to_json
from overland.world.rendezvous import SECRET

T = TypeVar("T")
Group = dist.ProcessGroup | None

SIGNATURE_BYTES = 32
LENGTH_BYTES = 8
MOST_BYTES = 2**32

_key = b""  # of this world; empty in tests that only compute


def greet(secret: bytes) -> None:
    """Raises an error unless all ranks of the world know the secret. Called by all of them."""
    global _key
    drawn = _all_of(secrets.token_bytes(SIGNATURE_BYTES))
    key = _sign(secret, b"".join(drawn))
    proofs = _all_of(_sign(key, _name(dist.get_rank())))
    for rank, proof in enumerate(proofs):
        if not hmac.compare_digest(proof, _sign(key, _name(rank))):
            raise ClusterError(
                f"rank {rank} does not know the secret of this job: another program has taken its "
                f"place, or the ranks have different ones; set {SECRET} to the same random "
                "characters for all of them"
            )
    _key = key


def part() -> None:
    """Forgets the world's key."""
    global _key
    _key = b""


def broadcast(value: T, source: int = 0, group: Group = None) -> T:
    """Returns the value of one rank, by its number in the world, on every rank."""
    is_source = dist.get_rank() == source
    sent = _packed(value) if is_source else b""
    size = torch.tensor([len(sent)])
    dist.broadcast(size, source, group)
    tensor = _padded(sent, int(size))
    dist.broadcast(tensor, source, group)
    return value if is_source else _unpacked(tensor)


def all_gather(value: T, group: Group = None) -> list[T]:
    """Returns the values of all ranks, in rank order, on every rank."""
    return list(map(_unpacked, _gathered(_padded_alike(_packed(value), group), group)))


def gather(value: T, group: Group = None) -> list[T]:
    """Returns the values of all ranks on the group's first rank, and an empty list elsewhere."""
    mine = _padded_alike(_packed(value), group)
    if dist.get_rank(group):
        dist.gather(mine, None, group=group, group_dst=0)
        return []
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.gather(mine, found, group=group, group_dst=0)
    return list(map(_unpacked, found))


def scatter(values: list[T], group: Group = None) -> T:
    """Returns to each rank its own of the values that the group's first rank has."""
    packed = list(map(_packed, values))
    size = torch.tensor([max(map(len, packed), default=0)])
    dist.broadcast(size, group=group, group_src=0)
    mine = _padded(b"", int(size))
    sent = [_padded(one, int(size)) for one in packed]
    dist.scatter(mine, sent if dist.get_rank(group) == 0 else None, group=group, group_src=0)
    found: T = _unpacked(mine)
    return found


def _all_of(data: bytes) -> list[bytes]:
    """Returns the bytes of all ranks of the world, all of one length."""
    return [one.numpy().tobytes() for one in _gathered(_padded(data, len(data)))]


def _gathered(mine: Tensor, group: Group = None) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group)
    return found


def _packed(value: Any) -> bytes:
    body = to_json(value)
    return len(body).to_bytes(LENGTH_BYTES) + _sign(_key, body) + body


def _unpacked(tensor: Tensor) -> Any:
    data = tensor.numpy().tobytes()
    start = LENGTH_BYTES + SIGNATURE_BYTES
    body = data[start : start + int.from_bytes(data[:LENGTH_BYTES])]
    if not hmac.compare_digest(data[LENGTH_BYTES:start], _sign(_key, body)):
        raise ClusterError(
            "a value that another rank sent is not signed with this job's secret: another program "
            "has taken its place"
        )
    return from_json(body)


def _padded_alike(data: bytes, group: Group) -> Tensor:
    """Returns bytes as a tensor as long as the longest of the ranks'."""
    size = torch.tensor([len(data)])
    dist.all_reduce(size, dist.ReduceOp.MAX, group)
    return _padded(data, int(size))


def _padded(data: bytes, size: int) -> Tensor:
    if not len(data) <= size <= MOST_BYTES:
        raise ClusterError(f"a rank announced a value of {size:,} bytes")
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(padded)


def _sign(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)


def _name(rank: int) -> bytes:
    return f"rank {rank} of {dist.get_world_size()}".encode()
