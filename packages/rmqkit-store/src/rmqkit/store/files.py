"""Files beside the log: writes that survive a power cut, made of the calls of `rmqkit.system.disk`.

**Configuration files**, ``config/X.json`` with its backup ``X.json.bak`` (`JsonFile`). A save writes ``X.tmp``, renames
``X`` to ``X.bak``, and then ``X.tmp`` to ``X``. At any power cut at least one of the two files is complete, and neither
is torn. A load reads ``X``. If ``X`` is missing, empty or unreadable, the load reads the backup, writes ``X`` again and
logs a warning.
Integer map keys are written without quotes, because old brokers need this form. Whitespace and order do not matter.

**Notes**, small files of rmqkit beside ``checkpoint``, which Apache's broker does not know (`read_note`, `write_note`).
The first line is the CRC-32 of the rest in hex. The rest is JSON. A rename replaces a note, so that a kill leaves
either the old note or the new one.

Log files are sparse and memory-mapped. On a tmpfs the first access to a page that was never written allocates memory.
If no memory is left, the kernel sends SIGBUS, which kills the process. `check_room` refuses such a store before it is
opened. Source: store.md §8, §9.1, §13.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rmqkit.errors import BodyError, StoreError, StoreLocked, StoreMismatch, StoreUnavailable
from rmqkit.protocol import fastjson
from rmqkit.system import disk, threads

__all__ = [
    "JsonFile",
    "RowTexts",
    "StoreLock",
    "check_room",
    "cut_file",
    "decode_file",
    "is_note",
    "make_directory",
    "naming",
    "read_note",
    "remove_note",
    "sync_directory",
    "write_durably",
    "write_note",
]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_INDENT = "\t"
_VERSION = "dataVersion"
_ANYBODY_S = 0o666  # minus the process's umask


class JsonFile:
    """A configuration file and its backup. ``path``: the file; the first write creates its directory.
    ``mode``: the permissions of a new file."""

    def __init__(self, path: Path, *, mode: int = _ANYBODY_S) -> None:
        self.path = path
        self._mode = mode
        self.backup = path.with_name(path.name + ".bak")
        self._saving = threads.Lock()

    def load(self, value_type: type[T], *, restores: bool = True) -> T | None:
        """Return the stored value, or None if neither file has a value.
        ``restores``: write a missing file again from its backup. False if the time or the absence of the file has a
        meaning; the caller then writes the file.
        Raises StoreMismatch: neither the file nor its backup can be read; nothing was changed."""
        try:
            value = _read(self.path, value_type)
            failure = None
        except BodyError as error:
            value, failure = None, error
        if value is not None:
            return value
        try:
            value = _read(self.backup, value_type)
        except BodyError as error:
            failure = failure or error
        if value is None and failure is not None:
            raise StoreMismatch(f"{self.path} and its backup cannot be read ({failure}): repair or remove them")
        if disk.exists(self.path):
            _log.warning("%s cannot be read (%s): using its backup", self.path, failure or "it is empty")
            disk.remove(self.path)  # the next save would make it the backup
        elif value is not None:  # also after a kill between the two renames of a save
            _log.warning("%s is missing: using its backup, which may be older", self.path)
        if value is not None and restores:
            self._restore()
        return value

    def _restore(self) -> None:
        try:
            self._replace(disk.read_file(self.backup))
        except StoreUnavailable as error:
            _log.warning("%s; only its backup has the value", error)

    def set_aside(self) -> None:
        """Rename the file and its backup to ``X.json.damaged`` and ``X.json.bak.damaged``, for later inspection.
        Raises OSError: a file cannot be renamed."""
        for path in (self.path, self.backup):
            if disk.exists(path):
                disk.rename(path, path.with_name(path.name + ".damaged"))

    def save(self, value: Any) -> None:
        """Replace the file. Return when the value is on the disk. Threads can call it concurrently; each waits for the
        other.
        Raises StoreUnavailable: the write failed; one of the two files still has the former value."""
        content = fastjson.dumps(value, indent=_INDENT)
        with self._saving:
            self._replace(content)

    def _replace(self, content: bytes) -> None:
        try:
            make_directory(self.path.parent)
            # The name of the new file needs no sync: a power cut may undo any of the renames, and one file is still
            # complete.
            _write_synced(whole := self.path.with_name(self.path.name + ".tmp"), content, self._mode)
            if disk.exists(self.path):
                disk.rename(self.path, self.backup)
            disk.rename(whole, self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self.path}: errno {error.errno} {error.strerror}") from error


class RowTexts:
    """A cache of the text of each row in a table that is saved often, such as the topic table.
    A changed row must be a new object."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[Any, bytes]] = {}

    def of(self, rows: Mapping[str, Any]) -> msgspec.Raw:
        """Return the text of the table, exactly as `JsonFile.save` would write it."""
        # A broker saves all topics when it creates a topic. Without the cache, each save would format every topic.
        known, members = self._members, {}
        for name, row in rows.items():
            made = known.get(name)
            if made is None or made[0] is not row:
                made = row, fastjson.dumps({name: row}, indent=_INDENT)[1:-2]  # without the braces
            members[name] = made
        self._members = members
        texts = [text for _, text in members.values()]
        return msgspec.Raw(b"{" + b",".join(texts) + b"\n}" if texts else b"{}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path of an open file to an OSError without a path, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file, and wait until the file and its name are on the disk."""
    _write_synced(path, content, _ANYBODY_S)
    sync_directory(path.parent)


def _write_synced(path: Path, content: bytes, mode: int) -> None:
    descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        disk.write_all(descriptor, content, 0)
        disk.sync_file(descriptor)
    finally:
        disk.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, and wait until their names are on the disk."""
    # Create them from the top down and sync each level: a name is durable only when its parent directory is.
    if not disk.is_directory(directory):
        make_directory(directory.parent)
        disk.make_directory(directory)
        sync_directory(directory.parent)


def cut_file(path: Path, size: int) -> None:
    """Set the length of a file. Raises OSError: it cannot be changed."""
    descriptor = disk.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        disk.truncate(descriptor, size)
    finally:
        disk.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Wait until the names created, renamed or removed in a directory are on the disk."""
    descriptor = disk.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.sync_file(descriptor)
    finally:
        disk.close(descriptor)


def _read(path: Path, value_type: type[T]) -> T | None:
    try:
        content = disk.read_file(path)
    except FileNotFoundError:
        return None
    return decode_file(content, value_type) if content.strip() else None


def decode_file(content: bytes, value_type: type[T]) -> T:
    """Decode the content of a file.
    Raises BodyError: the content is invalid, or has no field of the type and therefore belongs to another file."""
    value = fastjson.decode_as(content, value_type)
    if isinstance(value, msgspec.Struct):
        names = {one.encode_name for one in msgspec.structs.fields(value)} - {_VERSION}
        if not any(b'"%b"' % name.encode() in content for name in names):
            others = sorted({*fastjson.loads(content)} - {_VERSION})
            if others:
                raise BodyError(f"it holds {', '.join(others[:3])} and nothing of a {value_type.__name__}")
    return value


_CRC_DIGITS = 8


def read_note(path: Path, note_type: type[T], without_it: str) -> T | None:
    """Return a note, or None if it is missing or cannot be read. Log a WARNING if it cannot be read.
    ``without_it``: the consequence of an unreadable note, for the log.
    Raises OSError: the file cannot be opened."""
    try:
        note = disk.read_file(path)
    except FileNotFoundError:
        return None
    try:
        if is_note(note):
            return msgspec.json.decode(note[_CRC_DIGITS + 1 :], type=note_type)
    except msgspec.DecodeError:
        _log.debug("%s is not a note", path)
    _log.warning("%s cannot be read: %s", path, without_it)
    return None


def is_note(note: bytes) -> bool:
    """Return True if the content of a file is a complete note: its CRC is right."""
    crc, _, content = note.partition(b"\n")
    return crc == b"%08x" % zlib.crc32(content)


def write_note(path: Path, note: object) -> None:
    """Replace a note and return when it is on the disk. Raises OSError: the write failed."""
    content = msgspec.json.encode(note)
    whole = path.with_name(path.name + ".tmp")
    write_durably(whole, b"%08x\n%b" % (zlib.crc32(content), content))
    disk.rename(whole, path)
    sync_directory(path.parent)


def remove_note(path: Path) -> None:
    """Remove a note if it exists. Raises OSError: the file cannot be removed."""
    if disk.exists(path):
        disk.remove(path)
        sync_directory(path.parent)


_NEEDED_BYTES = 1 << 20


def check_room(path: Path) -> None:
    """Raise StoreError if a directory is on a full tmpfs. For a missing directory, check the nearest existing
    parent.
    """
    while not disk.exists(path) and path != path.parent:
        path = path.parent
    usage = disk.space(path)
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < _NEEDED_BYTES and _is_tmpfs(path):
        raise StoreError(
            f"{path} is on a tmpfs with {free_bytes} bytes free, and a start needs {_NEEDED_BYTES}: delete files "
            f"there, or make it larger (mount -o remount,size=... {_mount_point(path)})"
        )


def _is_tmpfs(path: Path) -> bool:
    return any(kind == "tmpfs" for kind, _ in disk.mounts(path))


def _mount_point(path: Path) -> str:
    return next((point for _, point in disk.mounts(path)), str(path))


class StoreLock:
    """Exclusive use of one store directory: a lock of the file ``lock`` in it. Source: store.md §8.3."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._fd = -1

    def check(self) -> None:
        """Raise StoreLocked if a store of this or another process has locked the directory. Nothing is changed."""
        if disk.is_locked(self._root / "lock"):
            raise StoreLocked(str(self._root))

    def acquire(self) -> None:
        """Acquire the lock. Raises StoreLocked: a store of this or another process holds it; nothing was changed.
        Raises OSError: the file cannot be written; the lock is free."""
        try:
            descriptor = disk.lock(self._root / "lock")
        except BlockingIOError:
            raise StoreLocked(str(self._root)) from None
        try:
            disk.pwrite(descriptor, b"lock", 0)
        except OSError:
            disk.unlock(descriptor)
            raise
        self._fd = descriptor

    def release(self) -> None:
        if self._fd >= 0:
            disk.unlock(self._fd)
            self._fd = -1
