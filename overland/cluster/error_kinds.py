"""Decides the kind of an error (out of memory, network, code, …) from its class and message, and
where in the code it came from; what a chain of jobs does about it: `policy.py`.
"""

from __future__ import annotations

import errno
import re
import traceback

from overland.errors import FULL, Kind, OverlandError

FILE_SYSTEM = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO,
               errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EROFS)  # fmt: skip
# Errors of other packages, by class name, so that nothing heavy need be imported.
KIND_OF_ERROR = {
    "OutOfMemoryError": Kind.MEMORY,
    "MemoryError": Kind.MEMORY,
    "DistBackendError": Kind.NETWORK,
    "DistNetworkError": Kind.NETWORK,
    "DistStoreError": Kind.NETWORK,
    "ConnectionError": Kind.NETWORK,
    "TimeoutError": Kind.NETWORK,
    "AcceleratorError": Kind.DEVICE,
}
# Python's own errors for a mistake in the code. Anything in neither table is unknown, and no chain
# ends with its first unknown error: the next release of a library may introduce one.
MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
            NotImplementedError, RecursionError, SyntaxError, TypeError, ValueError)  # fmt: skip
# Messages of libraries, checked before the class. An assertion on a device is a mistake in the
# code, such as an index out of range, but is reported as an error of the device.
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
# Errors of the operating system that are as often caused by a wrong path as by an unavailable file
# system.
WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError,
              PermissionError)  # fmt: skip
COLLECTIVES = re.compile(r"torch/distributed/(distributed_c10d|rendezvous|_functional_collectives)")


def error_kind(error: BaseException) -> Kind:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in FULL:
        return Kind.DISK
    if _file_system_failed(error):
        return Kind.UNKNOWN
    stated = _stated_kind(error)
    for kind, pattern in SIGNATURES:
        is_clear = stated is Kind.TAKEN or (stated is not None and stated.is_of_the_program)
        if re.search(pattern, text) and (kind is Kind.DISK or not is_clear):
            return kind
    if stated is not None:
        return stated
    if isinstance(error, MISTAKES):
        return Kind.CODE
    return Kind.NETWORK if COLLECTIVES.search("".join(_frames(error)[-1:])) else Kind.UNKNOWN


def _stated_kind(error: BaseException) -> Kind | None:
    """Returns the kind that the error's class states, or the one known for its name."""
    if isinstance(error, OverlandError):
        return error.kind
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((KIND_OF_ERROR[name] for name in names if name in KIND_OF_ERROR), None)


def error_place(error: BaseException) -> str:
    """Returns the type of an error and the innermost line outside torch that it came from. Empty if
    a file system failed, since then anything that reads next fails."""
    if _file_system_failed(error):
        return ""
    if isinstance(error, OSError) and not isinstance(error, WRONG_PATH):
        return ""
    frames = _frames(error)
    ours = [frame for frame in frames if "/torch/" not in frame] or frames
    # An environment may be unpacked anywhere, so only the end of the path is compared.
    where = [f" at {'/'.join(frame.split('/')[-3:])}" for frame in ours[-1:]]
    return "".join([type(error).__name__, *where])


def _frames(error: BaseException) -> list[str]:
    """Returns the files and lines of the traceback, outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [f"{frame.f_code.co_filename}:{line}" for frame, line in frames]


def _file_system_failed(error: BaseException | None) -> bool:
    """Returns whether a file system failed, in this error or in its causes, which often affects
    only one node."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FILE_SYSTEM:
            return True
        error = error.__cause__ or error.__context__
    return False
