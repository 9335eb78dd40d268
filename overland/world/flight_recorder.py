"""NCCL's flight recorder: what each rank last sent and awaited, and which rank the others wait for.

Every rank remembers its latest collectives. When one times out, each rank that still runs writes
its memory to a file, `logs/nccl_rank_N` of the run folder or, under the supervisor, to the folder
of the fault. A rank that wrote nothing, or that has not called what the others wait in, is to
blame.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.words import name_ranks

FILES = "TORCH_FR_DUMP_TEMP_FILE"  # the path of a rank's file, without the rank
NAME = "nccl_rank_"
# torch waits four times this long before it ends a rank whose collective timed out, 60 s by
# default. A record is written within 4 s (torch 2.11 on an H200).
DUMP_MILLISECONDS = 2000


def recorder_settings(files: Path) -> dict[str, str]:
    """Returns the environment variables that torch reads when process groups are created. `files`:
    the path of a rank's record, without the rank."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(DUMP_MILLISECONDS),
        FILES: str(files),
    }


def record_into(folder: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Makes this rank write its record there, unless the user or a supervisor has chosen a place.
    To be called before process groups are created."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in recorder_settings(folder.absolute() / NAME).items():
        env.setdefault(name, value)


Record = Mapping[str, Any]
Entry = Mapping[str, Any]


def last_wait(folder: Path, num_ranks: int | None = None) -> str:
    """Returns which rank the others waited for when a run ended; empty if nothing says so."""
    wait = find_wait(read_records(folder / NAME), num_ranks)
    return wait.words if wait is not None else ""


def take_last_wait(folder: Path) -> str:
    """Returns the same of an earlier session, and removes its records: those of the next one must
    not be mixed with them."""
    words = last_wait(folder)
    for path in folder.glob(f"{NAME}*"):
        path.unlink(missing_ok=True)
    return f"when this run last ended, {words}" if words else ""


@dataclass(frozen=True)
class Wait:
    """Ranks that wait in a collective for others."""

    collective: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def words(self) -> str:
        missing, waiting = name_ranks(self.missing), name_ranks(self.waiting)
        return f"{missing} did not join {waiting} in {self.collective}"


def read_records(files: Path) -> dict[int, Record]:
    """Returns the records by rank, without those that cannot be read. `files`: see
    `recorder_settings`."""
    found = {}
    for path in files.parent.glob(f"{files.name}*"):
        number = path.name.removeprefix(files.name)
        if number.isdecimal():
            with suppress(Exception):  # a torn or damaged file may fail in any way
                with path.open("rb") as file:
                    record = _PlainData(file).load()
                _require_fields(record)
                found[int(number)] = record
    return found


def _require_fields(record: Record) -> None:
    """Raises an error if a record lacks something that is read from it here."""
    if not isinstance(record["entries"], list):
        raise TypeError("entries")
    for entry in record["entries"]:
        name, description = entry["process_group"]
        words = name, description, entry["profiling_name"], entry["state"]
        numbers = entry["collective_seq_id"], entry["p2p_seq_id"], entry["is_p2p"], entry["retired"]
        if not all(isinstance(one, str) for one in words):
            raise TypeError(f"not text: {words}")
        if not all(isinstance(one, int) for one in numbers):
            raise TypeError(f"not numbers: {numbers}")
    for group in record.get("pg_config", {}):
        if not all(isinstance(rank, int) for rank in _members(record, group)):
            raise TypeError(f"not ranks: {group}")


def find_wait(records: Mapping[int, Record], num_ranks: int | None = None) -> Wait | None:
    """Returns which ranks the others wait for; None if the records do not tell. `num_ranks`: of the
    session that wrote them, if known; otherwise they may say it."""
    pending = {rank: _pending(record) for rank, record in records.items()}
    stuck = tuple(rank for rank in sorted(pending) if pending[rank])
    everyone = set(range(num_ranks)) if num_ranks is not None else _world(records)
    silent = tuple(sorted(everyone - records.keys()))
    # Of two ranks, one that waits can only wait for the other.
    if silent and stuck and (len(silent) == 1 or 2 * len(silent) < len(everyone)):
        return Wait(_name(pending[stuck[0]][0]), stuck, silent)
    waits = [*_waits_in_groups(records), *_waits_for_messages(records, pending)]
    # A rank that is waited for may itself wait: the last of such a chain waits for nobody.
    last = [wait for wait in waits if not any(pending.get(rank) for rank in wait.missing)]
    return min(last or waits, key=lambda wait: len(wait.missing), default=None)


def _world(records: Mapping[int, Record]) -> set[int]:
    """Returns all ranks of the session that wrote the records; empty if they do not say."""
    return {
        rank
        for record in records.values()
        for group, config in record.get("pg_config", {}).items()
        if config.get("desc") == "default_pg"
        for rank in _members(record, group)
    }


def _waits_in_groups(records: Mapping[int, Record]) -> Iterator[Wait]:
    """Yields groups in which some ranks wait in a collective that others have not called; of these,
    the ranks that have called the fewest."""
    last: dict[str, dict[int, Entry]] = defaultdict(dict)
    for rank, record in sorted(records.items()):
        for entry in record["entries"]:
            if not entry["is_p2p"]:
                last[entry["process_group"][0]][rank] = entry
    for group, entries in last.items():
        counts = {rank: entry["collective_seq_id"] for rank, entry in entries.items()}
        members = {rank for one in records.values() for rank in _members(one, group)}
        counts |= {rank: 0 for rank in sorted(members & records.keys()) if rank not in counts}
        newest, oldest = max(counts.values()), min(counts.values())
        waiting = tuple(
            rank for rank, entry in entries.items() if counts[rank] == newest and _is_pending(entry)
        )
        if waiting and oldest < newest:
            missing = tuple(rank for rank, count in counts.items() if count == oldest)
            yield Wait(_name(entries[waiting[0]]), waiting, missing)


def _waits_for_messages(
    records: Mapping[int, Record], pending: Mapping[int, list[Entry]]
) -> Iterator[Wait]:
    """Yields ranks that wait for a message, as between the stages of a pipeline."""
    for rank, entries in pending.items():
        for entry in entries:
            sender = re.search(r"recv \d+<-(\d+)", entry["profiling_name"])
            members = _members(records[rank], entry["process_group"][0])
            if sender and int(sender[1]) < len(members):
                yield Wait(_name(entry), (rank,), (members[int(sender[1])],))


def _members(record: Record, group: str) -> list[int]:
    """Returns the ranks of a group; empty if the record does not say."""
    config = record.get("pg_config", {}).get(group, {})
    return list(json.loads(config.get("ranks", "[]")))


def _pending(record: Record) -> list[Entry]:
    return [one for one in record["entries"] if _is_pending(one)]


def _is_pending(entry: Entry) -> bool:
    """Whether a collective has not ended. Those of gloo are never called completed."""
    return entry["state"] != "completed" and not entry["retired"]


def _name(entry: Entry) -> str:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    name, description = entry["process_group"]
    group = name if description in ("", "undefined") else description
    return f"{entry['profiling_name']} number {number} of group {group}"


class _PlainData(pickle.Unpickler):
    """Reads numbers, text and containers, which is all that a record holds, and nothing else: a
    pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")
