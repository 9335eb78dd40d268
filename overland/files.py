"""Files: written whole or not at all, and those of others read within bounds.

A file's bytes survive a power cut after `fsync` of the file, its name after `fsync` of its folder.
So a file is written beside its place, synced, and renamed; nobody does that by hand elsewhere. All
operations go through `Disk`, so that tests can end the world at each.

Whatever a file of others holds, the end is a value or a ValueError. Python's readers of JSON, TOML
and YAML give up with a RecursionError where values are nested too deep, and read files of any size.
YAML names a value once and uses it many times, or inside itself, so a few lines can stand for more
than fits into any memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

Moved = Callable[[int], None]
"""Called with the number of bytes read or written since the last call, from several threads; with 0
when another operation has ended."""


def ignore(num_bytes: int) -> None:
    """For those who need not know how far it is."""


def reserve(path: Path, num_bytes: int) -> None:
    """Sets room aside for a new file there, writing nothing, and gives it back. OSError where it
    cannot be had, by a quota too, which does not show in what a disk has free; or where the file
    system (EOPNOTSUPP) or the operating system (ENOSYS) cannot do it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # posix_fallocate would write every block where the file system cannot set room aside.
        fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
        if fallocate is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


class Disk:
    def at(self, operation: str, path: Path) -> None:
        """Called before every operation. Tests override it to die there."""

    def make_folder(self, path: Path) -> None:
        self.at("make folder", path)
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file, open for writing. One that is there is removed and not overwritten: a thread
        of a save that was given up may still write into it."""
        self.at("create", path)
        path.unlink(missing_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write_at(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
        self.at("write", path)
        while data:  # the system may take less than it is given
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def sync_so_far(self, descriptor: int, path: Path) -> None:
        """Waits until what was written so far is on the disk; more may be written meanwhile."""
        self.at("sync so far", path)
        os.fdatasync(descriptor)

    def close_durably(self, descriptor: int, path: Path) -> None:
        try:
            self.at("sync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, data: bytes) -> None:
        """A whole small file, on the disk when this returns; its name is not yet."""
        descriptor = self.create(path)
        try:
            self.write_at(descriptor, memoryview(data), 0, path)
        except BaseException:
            os.close(descriptor)
            raise
        self.close_durably(descriptor, path)

    def sync_folder(self, path: Path) -> None:
        self.at("sync folder", path)
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self.at("rename", source)
        source.rename(target)
        self.sync_folder(target.parent)

    def point(self, link: Path, target: str) -> None:
        """Makes the symbolic link `link` name `target`, in one step."""
        beside = link.with_name(f".{link.name}.tmp")
        self.at("remove", beside)
        beside.unlink(missing_ok=True)
        self.at("link", beside)
        beside.symlink_to(target)
        self.rename(beside, link)

    def remove(self, path: Path) -> None:
        self.at("remove", path)
        path.unlink(missing_ok=True)
        self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Everything in it and itself; what is not there is no error."""
        self.at("remove folder", path)
        shutil.rmtree(path, ignore_errors=True)


DISK = Disk()


@contextmanager
def replaced(
    path: Path,
    *,
    beside: Path | None = None,
    shared: bool = False,
    durable: bool = True,
    disk: Disk = DISK,
) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` at the end, if nothing is raised until then: readers
    see the old one or the new one. Say `shared` where several processes may write it at once, and
    not `durable` where it can be made again."""
    unique = f".{uuid.uuid4().hex[:12]}" if shared else ""
    beside = beside or path.with_name(f".{path.name}{unique}.part")
    try:
        with new_file(beside, durable=durable, disk=disk) as file:
            yield file
        publish(beside, path, durable=durable, disk=disk)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def replace_file(
    path: Path,
    data: bytes | str,
    *,
    shared: bool = False,
    durable: bool = True,
    disk: Disk = DISK,
) -> None:
    """The same for contents that are at hand."""
    with replaced(path, shared=shared, durable=durable, disk=disk) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def new_file(path: Path, *, durable: bool = True, disk: Disk = DISK) -> Iterator[BinaryIO]:
    """A file whose bytes are on the disk when this ends. What the system says of writing to it,
    such as that the disk is full, has its name."""
    with naming(path):
        disk.at("create", path)
        with path.open("wb") as file:
            yield file
            disk.at("write", path)
            file.flush()
            if durable:
                disk.at("sync", path)
                os.fsync(file.fileno())


def publish(beside: Path, path: Path, *, durable: bool = True, disk: Disk = DISK) -> None:
    """Gives a file or folder that is complete its name, in one step."""
    disk.at("rename", beside)
    beside.replace(path)
    if durable:
        disk.sync_folder(path.parent)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's name into what the system says of writing to it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


# An index of a large model's weights has megabytes, a config kilobytes.
LARGEST_JSON = 2**28
LARGEST_CONFIG = 2**22
DEEPEST = 50
MOST_VALUES = 100_000


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """What a JSON file holds. ValueError if it holds none or is too large; OSError as ever."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and {most:,} are the most that is read")
    return parse_json(path.read_bytes())


def parse_json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def what_is_wrong(error: Exception) -> str:
    """What an error says about a foreign file whose structure is not the one that is read."""
    if isinstance(error, RecursionError):
        return "its values are nested too deep"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, ValueError):
        return str(error)
    return "its structure is another"


def check_yaml(node: Any) -> None:
    """ValueError if the document is deep, holds itself, or is large with what it repeats written
    out. `node`: the composed document, in which what has a name is one object."""
    import yaml

    sizes: dict[int, int] = {}  # by identity; 0 while it is being looked at

    def size_of(node: Any, depth: int) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if known := sizes.get(id(node)):
            return known
        if id(node) in sizes or depth > DEEPEST:
            raise ValueError(f"its values are nested more than {DEEPEST} deep, or in a loop")
        sizes[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        inside = [one for pair in node.value for one in pair] if pairs else node.value
        sizes[id(node)] = 1 + sum(size_of(one, depth + 1) for one in inside)
        if sizes[id(node)] > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        return sizes[id(node)]

    size_of(node, 0)


def parse_yaml(text: str) -> Any:
    """What YAML of others holds, by its safe rules. ValueError for whatever is wrong with it."""
    import yaml

    if len(text) > LARGEST_CONFIG:
        raise ValueError(f"it has more than {LARGEST_CONFIG:,} letters")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        check_yaml(node)
        return loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            str(error).partition("\n")[0] or "its values are nested too deep"
        ) from None


def leads_out(path: Path, folder: Path) -> bool:
    """Whether links take `path` out of `folder`. A snapshot in Hugging Face's cache consists of
    links to the blobs beside it, which belong to it."""
    folder = folder.resolve()
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    return not any(path.resolve().is_relative_to(root) for root in roots)
