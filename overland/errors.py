"""Errors, and what kind of trouble each one is.

Every error of ours is a sentence for the user. Its kind tells a job chain what to do about it: a
kind that would happen again on any node ends the chain when it comes twice, and a new error, whose
kind nobody has stated, never does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


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
    TAKEN = "folder taken"
    UNKNOWN = "unknown"
    HANG = "hang"
    NETWORK = "network"
    STOPPED = "stopped"

    @property
    def is_of_the_program(self) -> bool:
        """Whether the same would happen again on any node."""
        return self in (Kind.CONFIG, Kind.DATA, Kind.TRAINING, Kind.CODE)


class OverlandError(Exception):
    """Something that the user can mend; the message is a sentence that says how."""

    kind: ClassVar[Kind] = Kind.UNKNOWN
    exit_code: ClassVar[int] = 2


class ModelError(OverlandError, ValueError):
    """A model, config.json, attention backend or weight file that cannot be used as asked."""

    kind = Kind.CONFIG


class ObjectiveError(OverlandError, ValueError):
    """An objective that does not exist, or cannot be used as asked."""

    kind = Kind.CONFIG


class OptimizerError(OverlandError, ValueError):
    """An optimizer that does not exist, or cannot be used as asked."""

    kind = Kind.CONFIG


class DataError(OverlandError):
    """Data that cannot be read or does not fit."""

    kind = Kind.DATA


class Unsettled(DataError):
    """Something that only the user can choose, such as a column. By which option depends on who
    asks: a flag of a command, or a key of a config."""

    def __init__(self, before: str, option: str, after: str) -> None:
        super().__init__(f"{before}--{option}{after}")
        self.before, self.option, self.after = before, option, after

    def by(self, option: str) -> DataError:
        """The same, where the option has this name."""
        return DataError(f"{self.before}{option}{self.after}")


class FromFirstRank(DataError):
    """What rank 0 could not do; it tells the cause itself."""

    kind = Kind.NETWORK


class CheckpointError(OverlandError):
    """A checkpoint that is missing or cannot be used."""

    kind = Kind.TRAINING


class NotSavedError(CheckpointError):
    """The last save of a session failed: what was learned since the one before is lost."""

    exit_code = 74  # "input/output error", as sysexits.h has it


class TrainingError(OverlandError):
    """Training cannot go on."""

    kind = Kind.TRAINING


class TakenError(TrainingError):
    """Somebody else trains in the run folder."""

    kind = Kind.TAKEN


class OutOfMemoryError(TrainingError):
    """There is no memory left; the message says what held it and what to change."""

    kind = Kind.MEMORY


class ClusterError(OverlandError):
    """Ranks could not be started or could not go on."""

    kind = Kind.NETWORK


class HubError(OverlandError):
    """Something could not be fetched or pushed."""


class ReportError(OverlandError):
    """A report cannot be written or served as asked."""


class NoRun(OverlandError):
    """There is nothing to watch."""


def sentence(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
