"""Files: written completely or not at all, and untrusted files read within limits.

The contents of a file survive a power failure after `fsync` of the file, its name after `fsync` of
its folder. So a file is written under a temporary name, synced, and renamed; all code does this
through this module. All operations go through `Disk`, so that tests can crash at each of them.

Reading an untrusted file gives a value or a ValueError. Python's parsers of JSON, TOML and YAML
fail with a RecursionError if values are nested too deeply, and read files of any size. In YAML a
value can be named once and used many times, or inside itself, so a few lines can expand to more
than fits into memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import tomllib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

Moved = Callable[[int], None]
"""Called with the number of bytes read or written since the last call, from several threads; with 0
when another operation has finished."""


def ignore(num_bytes: int) -> None:
    """Ignores progress."""


def reserve(path: Path, num_bytes: int) -> None:
    """Tests whether there is space for a new file, by reserving it without writing and releasing it
    again. Raises OSError if there is not, also because of a quota, which a disk's free space does
    not show; or if the file system (EOPNOTSUPP) or the operating system (ENOSYS) cannot do it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # posix_fallocate would write every block if the file system cannot reserve space.
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
        """Called before every operation. Tests override it to crash there."""

    def make_folder(self, path: Path) -> None:
        self.at("make folder", path)
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Returns a new file, open for writing. An existing one is removed rather than overwritten:
        a thread of an abandoned save may still be writing to it."""
        self.at("create", path)
        path.unlink(missing_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write_at(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
        self.at("write", path)
        while data:  # the system may write less than requested
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def sync_so_far(self, descriptor: int, path: Path) -> None:
        """Waits until everything written so far is on disk; more may be written meanwhile."""
        self.at("sync so far", path)
        os.fdatasync(descriptor)

    def close_durably(self, descriptor: int, path: Path) -> None:
        try:
            self.at("sync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, data: bytes) -> None:
        """Writes a small file, which is on disk when this returns; its name is not durable yet."""
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
        """Makes the symbolic link `link` point to `target`, atomically."""
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
        """Removes a folder with its contents; a missing one is not an error."""
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
    """Yields a file that replaces `path` at the end, if nothing is raised: readers see either the
    old or the new one. Set `shared` if several processes may write it at once, and `durable=False`
    if it can be recreated."""
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
    """Replaces a file by these contents, as `replaced` does."""
    with replaced(path, shared=shared, durable=durable, disk=disk) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def new_file(path: Path, *, durable: bool = True, disk: Disk = DISK) -> Iterator[BinaryIO]:
    """Yields a file whose contents are on disk when this ends. Errors of writing to it, such as a
    full disk, name the file."""
    with naming(path):
        disk.at("create", path)
        with path.open("wb") as file:
            yield file
            disk.at("write", path)
            file.flush()
            if durable:
                disk.at("sync", path)
                os.fsync(file.fileno())


def append(path: Path, data: bytes) -> None:
    """Appends all of these bytes, or none: half a line or record is of no use on a full disk."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:  # the system may write less than requested
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def publish(beside: Path, path: Path, *, durable: bool = True, disk: Disk = DISK) -> None:
    """Gives a complete file or folder its final name, atomically."""
    disk.at("rename", beside)
    beside.replace(path)
    if durable:
        disk.sync_folder(path.parent)


def sync(path: Path) -> None:
    """Waits until a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to errors of writing to it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


# The index of a large model's weights takes megabytes, a config kilobytes.
LARGEST_JSON = 2**28
LARGEST_CONFIG = 2**22
DEEPEST = 50
TOO_DEEP = "its values are nested too deeply"
MOST_VALUES = 100_000


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """Returns the contents of a JSON file. Raises ValueError if it is invalid or too large."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, more than the limit of {most:,}")
    return parse_json(path.read_bytes())


def parse_json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def read_object(
    path: Path, error: type[Exception], most: int = LARGEST_JSON, text: bytes | None = None
) -> dict[str, Any]:
    """Returns the object in a JSON file, or raises this error, which says why there is none. `text`
    is what the file holds, if that is known."""
    try:
        value = read_json(path, most) if text is None else parse_json(text)
    except OSError as why:
        raise error(f"{path} cannot be read: {why.strerror}") from None
    except ValueError as why:
        raise error(f"{path} is not valid JSON: {why}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, expected an object")
    return value


CHECKSUMS = "checksums.json"  # next to weights that we exported


def checksums_of(path: Path, error: type[Exception]) -> dict[str, int] | None:
    """Returns the CRC-32 of each tensor of an exported file of weights, and of its header under an
    empty name; None if there are none. Raises this error if they are damaged."""
    beside = path.parent / CHECKSUMS
    try:
        sums = read_json(beside).get(path.name)
        return None if sums is None else {str(name): int(one) for name, one in sums.items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as why:
        raise error(
            f"{beside} is damaged ({what_is_wrong(why)}), so the weights next to it cannot be "
            "verified; delete it to use them anyway"
        ) from None


QUOTED = r"""(?:"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""  # TOML's strings of one line
KEY_PART = rf"(?:[A-Za-z0-9_-]++|{QUOTED})"
# A dotted key with this many parts. Each would cost the parser as much as all before it together:
# 40 kB of a.a.a took 18 s and 3.3 GB.
_DEEP_KEY = re.compile(rf"(?<![\w.\\-])(?<!\.[ \t])(?:{KEY_PART}[ \t]*+\.[ \t]*+){{{DEEPEST}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the contents of untrusted TOML. Raises ValueError for any problem."""
    if len(text) > LARGEST_CONFIG:
        raise ValueError(f"it has more than {LARGEST_CONFIG:,} characters")
    if _DEEP_KEY.search(text):  # it could not be parsed in good time
        raise ValueError(TOO_DEEP)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


# What reading untrusted contents raises if they do not have the expected structure.
NOT_AS_EXPECTED = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


def what_is_wrong(error: Exception) -> str:
    """Describes an error about an untrusted file that does not have the expected structure."""
    if isinstance(error, RecursionError):
        return TOO_DEEP
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, ValueError):
        return str(error)
    return "it does not have the expected structure"


# What PyYAML raises for a value that is not of the type of its tag, such as `!!bool perhaps`.
YAML_VALUE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


def compose_yaml(text: str, base: Any = None) -> tuple[Any, Any]:
    """Returns a loader of this class, by default PyYAML's safe one, and the document that it has
    composed, in which an alias is the same object. Raises ValueError if the document is nested too
    deeply, contains itself, or is too large once aliases are expanded."""
    import yaml

    too_many = f"it has more than {MOST_VALUES:,} values"
    too_deep = f"its values are nested more than {DEEPEST} levels deep, or contain themselves"

    class Bounded(base or yaml.SafeLoader):  # type: ignore[misc]
        depth = num_nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Stops early: all of a list of 500 kB took 40 s, one of 4 MB minutes."""
            self.depth, self.num_nodes = self.depth + 1, self.num_nodes + 1
            if self.num_nodes > MOST_VALUES:
                raise ValueError(too_many)
            if self.depth > DEEPEST + 2:
                raise ValueError(too_deep)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    sizes: dict[int, int] = {}  # by identity; 0 while it is being measured

    def size_of(node: Any, depth: int) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if known := sizes.get(id(node)):
            return known
        if id(node) in sizes or depth > DEEPEST:
            raise ValueError(too_deep)
        sizes[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        inside = [one for pair in node.value for one in pair] if pairs else node.value
        sizes[id(node)] = 1 + sum(size_of(one, depth + 1) for one in inside)
        if sizes[id(node)] > MOST_VALUES:
            raise ValueError(too_many)
        return sizes[id(node)]

    loader = Bounded(text)
    node = loader.get_single_node()
    size_of(node, 0)
    return loader, node


def parse_yaml(text: str) -> Any:
    """Returns the contents of untrusted YAML, loaded safely. Raises ValueError for any problem."""
    import yaml

    if len(text) > LARGEST_CONFIG:
        raise ValueError(f"it has more than {LARGEST_CONFIG:,} characters")
    try:
        loader, node = compose_yaml(text)
        return loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, *YAML_VALUE_ERRORS, RecursionError) as error:
        raise ValueError(str(error).partition("\n")[0] or TOO_DEEP) from None


def leads_out(path: Path, folder: Path) -> bool:
    """Returns whether links lead from `path` out of `folder`. A snapshot in Hugging Face's cache
    consists of links to the blobs next to it, which belong to it."""
    folder = folder.resolve()
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    return not any(path.resolve().is_relative_to(root) for root in roots)
