"""A file that is replaced is the old one or the new one, whenever the writer is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from overland.files import Disk, new_file, publish, replace_file, replaced


class Killed(Disk):
    """Ends the process before the operation of that number, as a power cut would."""

    def __init__(self, last: int) -> None:
        self.left = last

    def at(self, operation: str, path: Path) -> None:
        if self.left == 0:
            os._exit(9)
        self.left -= 1


def survives(act: Callable[[Disk], None], last: int) -> bool:
    """Whether the act ended by itself."""
    child = os.fork()
    if child == 0:
        try:
            act(Killed(last))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "plan.json"
    for last in range(20):
        path.write_text("old")
        ended = survives(lambda disk: replace_file(path, "new", shared=shared, disk=disk), last)
        assert path.read_text() in ("old", "new")
        if ended:
            assert path.read_text() == "new"
            break
    else:
        raise AssertionError("it never ended")
    assert last > 3, "create, write, sync, rename and the folder's sync were each tried"


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    for last in range(20):
        place = tmp_path / str(last)
        ended = survives(lambda disk, place=place: write_folder(place, disk), last)  # type: ignore[misc]
        whole = {path.name for path in (place / "corpus").glob("*")}
        assert whole == {"a", "b"} if ended else whole in (set(), {"a", "b"})
        if ended:
            return
    raise AssertionError("it never ended")


def write_folder(place: Path, disk: Disk) -> None:
    beside = place / ".corpus.part"
    beside.mkdir(parents=True)
    for name in ("a", "b"):
        with new_file(beside / name, disk=disk) as file:
            file.write(name.encode())
    publish(beside, place / "corpus", disk=disk)


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    path.write_text("old")
    with pytest.raises(TypeError), replaced(path) as file:
        file.write("no bytes")  # type: ignore[arg-type]
    assert [one.name for one in tmp_path.iterdir()] == ["live.json"]
    assert path.read_text() == "old"


def test_a_full_disk_is_said_with_the_name_of_the_file() -> None:
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space left") as refused, new_file(full) as file:
        file.write(b"more" * 10_000)
    assert refused.value.filename == "/dev/full"
