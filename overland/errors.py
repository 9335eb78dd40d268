"""The errors that users see, and the kind of each, which tells a chain of jobs whether to retry.

Every error of ours is a sentence for the user. Its kind tells a job chain what to do: an error that
would happen again on any node ends the chain when it occurs twice; an error of unknown kind never
does.
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import ClassVar


class Kind(StrEnum):
    """Kinds of failure, in order of precedence: of several, the first is taken as the cause."""

    NODE = "node lost"
    DEVICE = "device fault"
    MEMORY = "out of memory"
    DISK = "disk full"
    CONFIG = "config error"
    DATA = "data error"
    TRAINING = "training error"
    CODE = "code error"
    KILLED = "rank killed"
    TAKEN = "folder taken"
    UNKNOWN = "unknown"
    HANG = "hang"
    NETWORK = "network"
    STOPPED = "stopped"

    @property
    def is_of_the_program(self) -> bool:
        """Whether the same error would happen again on any node."""
        return self in (Kind.CONFIG, Kind.DATA, Kind.TRAINING, Kind.CODE)


class OverlandError(Exception):
    """A user error: the message is one sentence that says how to fix it."""

    kind: ClassVar[Kind] = Kind.UNKNOWN
    exit_code: ClassVar[int] = 2


class ArgumentError(OverlandError, ValueError):
    """An argument of a public function that it cannot take."""

    kind = Kind.CODE


class ModelError(OverlandError, ValueError):
    """A model, config.json, attention backend or weight file that cannot be used as requested."""

    kind = Kind.CONFIG


class ObjectiveError(OverlandError, ValueError):
    """An objective that does not exist, or cannot be used as requested."""

    kind = Kind.CONFIG


class OptimizerError(OverlandError, ValueError):
    """An optimizer that does not exist, or cannot be used as requested."""

    kind = Kind.CONFIG


class DataError(OverlandError):
    """Data that cannot be read or does not fit."""

    kind = Kind.DATA


class ChoiceRequired(DataError):
    """Something that only the user can choose, such as a column. The option to set depends on the
    caller: a flag of a command, or a key of a config."""

    def __init__(self, before: str, option: str, after: str) -> None:
        super().__init__(f"{before}--{option}{after}")
        self.before, self.option, self.after = before, option, after

    def by(self, option: str) -> DataError:
        """Returns the same error with this name for the option."""
        return DataError(f"{self.before}{option}{self.after}")


class FromFirstRank(DataError):
    """A failure of rank 0, seen by other ranks; rank 0 itself reports the cause."""

    kind = Kind.NETWORK


class CheckpointError(OverlandError):
    """A checkpoint that is missing or cannot be used."""

    kind = Kind.TRAINING


class MismatchError(CheckpointError):
    """An intact checkpoint of another model or of other settings, as older ones of the run are."""

    kind = Kind.CONFIG


class NotSavedError(CheckpointError):
    """The last save of a session failed, so progress since the previous save is lost."""

    exit_code = 74  # EX_IOERR of sysexits.h


class TrainingError(OverlandError):
    """Training cannot continue."""

    kind = Kind.TRAINING


class TakenError(TrainingError):
    """Another process is training in the run folder."""

    kind = Kind.TAKEN


class OutOfMemoryError(TrainingError):
    """Out of memory; the message says what used it and what to change."""

    kind = Kind.MEMORY


class ClusterError(OverlandError):
    """Ranks could not be started or could not continue."""

    kind = Kind.NETWORK


class HubError(OverlandError):
    """Something could not be fetched or pushed."""


class ReportError(OverlandError):
    """A report cannot be written or served as requested."""


class NoRun(OverlandError):
    """There is nothing to watch."""


FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk or a quota


def sentence(error: Exception) -> str:
    """Returns what went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        if error.errno in FULL:  # of a copy, the second name is where it was written
            where = error.filename2 or error.filename
            advice = "free some space there" if where else "`df -h` shows which disk is full"
            return f"{f'{where}: ' if where else ''}{error.strerror}; {advice}"
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
