"""What a rank says before it ends, in one line of its output, and what kind of end that is."""

from __future__ import annotations

import errno
import json
import re
import time
from dataclasses import asdict, dataclass
from enum import StrEnum

from overland.cluster.beat import node_name

SAYS = "overland says: "


class Kind(StrEnum):
    """In the order of blame: of several, the first is the cause."""

    NODE = "node lost"
    DEVICE = "device fault"
    MEMORY = "out of memory"
    DISK = "disk full"
    CONFIG = "config error"
    DATA = "data error"
    TRAINING = "training error"
    CODE = "code error"
    KILLED = "rank killed"
    HANG = "hang"
    TAKEN = "folder taken"
    UNKNOWN = "unknown"
    NETWORK = "network"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        """Whether the same would happen again."""
        return self in (Kind.CONFIG, Kind.DATA, Kind.TRAINING, Kind.CODE)


@dataclass(frozen=True)
class Said:
    """A rank's last words."""

    rank: int
    node: str
    kind: Kind
    what: str
    time: float
    step: int = 0


FILE_SYSTEM = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO)
# By the name of the class, so that nothing heavy is imported to compare with.
KIND_OF_ERROR = {
    "ConfigError": Kind.CONFIG,
    "DegreeError": Kind.CONFIG,
    "ModelError": Kind.CONFIG,
    "TakenError": Kind.TAKEN,
    "FromFirstRank": Kind.NETWORK,  # rank 0 tells its own
    "CheckpointError": Kind.TRAINING,
    "TrainingError": Kind.TRAINING,
    "DataError": Kind.DATA,
    "OutOfMemoryError": Kind.MEMORY,
    "MemoryError": Kind.MEMORY,
    "ClusterError": Kind.NETWORK,
    "DistBackendError": Kind.NETWORK,
    "DistNetworkError": Kind.NETWORK,
    "DistStoreError": Kind.NETWORK,
    "ConnectionError": Kind.NETWORK,
    "TimeoutError": Kind.NETWORK,
    "AcceleratorError": Kind.DEVICE,
}
# What libraries write, looked for before the class is asked. An assertion on a device is a mistake
# in the code, such as an index out of range; it comes as an error of the device.
SIGNATURES = [
    (Kind.DISK, r"No space left on device|Disk quota exceeded"),
    (Kind.MEMORY, r"out of memory|Cannot allocate memory|OOM|hipErrorOutOfMemory"),
    (Kind.CODE, r"device-side assert"),
    (
        Kind.DEVICE,
        r"(CUDA|HIP) error|uncorrectable|\bECC\b|\bXid\b|hardware error|cudaError|hipError"
        r"|illegal memory access|unspecified launch failure|CUBLAS_STATUS_EXECUTION_FAILED",
    ),
    (
        Kind.NETWORK,
        r"\bNCCL\b|\bRCCL\b|ProcessGroup|\bgloo\b|[Cc]onnection (closed|reset|refused)"
        r"|Broken pipe|Socket [Tt]imeout|Timed out waiting|libfabric|TCPStore|recvValue|sendBytes",
    ),
]


def kind_of(error: BaseException) -> Kind:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Kind.DISK
    if _file_system_failed(error):
        return Kind.UNKNOWN
    names = [kind.__name__ for kind in type(error).__mro__]
    ours = next((KIND_OF_ERROR[name] for name in names if name in KIND_OF_ERROR), None)
    for kind, pattern in SIGNATURES:
        is_clear = ours is Kind.TAKEN or (ours is not None and ours.is_final)
        if re.search(pattern, text) and (kind is Kind.DISK or not is_clear):
            return kind
    if ours is not None:
        return ours
    return Kind.UNKNOWN if isinstance(error, OSError) else Kind.CODE


def say(rank: int, kind: Kind, what: str, step: int = 0) -> None:
    """For whoever reads this rank's output."""
    print(last_words(rank, kind, what, step), flush=True)


def last_words(rank: int, kind: Kind, what: str, step: int = 0) -> str:
    if kind is Kind.NETWORK:  # libraries add where in their source, and advice that is not ours
        what = re.sub(r"\[/[^\]]*\]\s*", "", what).split(". ")[0]
    said = Said(rank, node_name(), kind, " ".join(what.split())[:500], time.time(), step)
    return f"\n{SAYS}{json.dumps(asdict(said))}"


def _file_system_failed(error: BaseException | None) -> bool:
    """It, or what it was raised for: of one node, as often as not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FILE_SYSTEM:
            return True
        error = error.__cause__ or error.__context__
    return False
