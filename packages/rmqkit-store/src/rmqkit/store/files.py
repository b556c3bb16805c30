"""Files beside the log: how they are written so that a power cut leaves one whole, and what that asks of the system.

**Configuration files**, ``config/X.json`` with its backup ``X.json.bak`` (`JsonFile`). Writing makes a whole ``X.tmp``,
moves ``X`` to ``X.bak``, and ``X.tmp`` to ``X``, each in one step: whenever the machine stops, one of the two is whole,
and neither is torn. Reading takes ``X``; if it is missing, empty or unreadable, the backup, and says so. Integer map
keys are written bare, as old brokers need it; any whitespace and order is read.

**Notes**, small files of ours beside ``checkpoint``, which Apache's broker does not know (`read_note`, `write_note`).
The first line is the CRC-32 of the rest in hex, the rest is JSON. A note is replaced in one step, so that a kill leaves
the former one or the new one.

**System calls** that systems name differently; they are looked up when they are called:

=============  ===================================  ===================================================================
function       Linux                                where that is missing (macOS)
=============  ===================================  ===================================================================
`sync_data`    fdatasync                            F_FULLFSYNC, as fsync there leaves data in the disk's own cache;
                                                    fsync on a file system that does not know it
`sync_file`    fsync                                the same
`reserve`      posix_fallocate                      a byte of every block is written that may be a hole
`drop_cached`  posix_fadvise, POSIX_FADV_DONTNEED   nothing: the system decides what it keeps in memory
=============  ===================================  ===================================================================

Log files are sparse and read through a mapping. On a tmpfs the first look at a page that was never written takes
memory, and where there is none left the kernel answers with SIGBUS, which no program survives: `check_room` refuses
such a store before it is opened. Source: store.md §8, §9.1, §13.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rmqkit.errors import BodyError, StoreError, StoreLocked, StoreMismatch, StoreUnavailable
from rmqkit.protocol import fastjson

__all__ = [
    "JsonFile",
    "RowTexts",
    "StoreLock",
    "check_room",
    "decode_file",
    "drop_cached",
    "is_note",
    "make_directory",
    "naming",
    "read_note",
    "remove_note",
    "reserve",
    "sync_data",
    "sync_directory",
    "sync_file",
    "write_all",
    "write_durably",
    "write_note",
]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_INDENT = "\t"
_VERSION = "dataVersion"
_ANYBODY_S = 0o666  # less what the process's mask takes away


class JsonFile:
    """One configuration file and its backup. ``path``: the file; its directory is made when first written.
    ``mode``: who may read it, as of a new file."""

    def __init__(self, path: Path, *, mode: int = _ANYBODY_S) -> None:
        self.path = path
        self._mode = mode
        self.backup = path.with_name(path.name + ".bak")
        self._saving = threading.Lock()

    def load(self, value_type: type[T]) -> T | None:
        """The stored value, or None when neither file holds one.
        Raises StoreMismatch: what there is cannot be read, and no backup can; nothing was changed."""
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
        if self.path.exists():
            _log.warning("%s cannot be read (%s): using its backup", self.path, failure or "it is empty")
            self.path.unlink()  # the next save would make it the backup
        elif value is not None:  # also after a kill between the two renames of a save
            _log.warning("%s is missing: using its backup, which may be older", self.path)
        return value

    def set_aside(self) -> None:
        """Give the file and its backup other names, ``X.json.damaged``, for who wants to look at them.
        Raises OSError: the disk refused."""
        for path in (self.path, self.backup):
            if path.exists():
                path.replace(path.with_name(path.name + ".damaged"))

    def save(self, value: Any) -> None:
        """Replace the file; when this returns the value is on the disk. Any thread, one after the other.
        Raises StoreUnavailable: the disk refused; the former value is still in one of the files."""
        content = fastjson.dumps(value, indent=_INDENT)
        with self._saving:
            self._replace(content)

    def _replace(self, content: bytes) -> None:
        try:
            make_directory(self.path.parent)
            # Its name needs no wait: whichever of the renames a power cut leaves out, one of the two files is whole.
            _write_synced(whole := self.path.with_name(self.path.name + ".tmp"), content, self._mode)
            if self.path.exists():
                self.path.replace(self.backup)
            whole.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self.path}: errno {error.errno} {error.strerror}") from error


class RowTexts:
    """The text of a table that is saved often, such as that of all topics. Each row is formatted once.
    A changed row is another object."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[Any, bytes]] = {}

    def of(self, rows: Mapping[str, Any]) -> msgspec.Raw:
        """Return the text of the table, which `JsonFile.save` writes as it would write the table itself."""
        # A broker saves its topics when one is created: a call per row here would make topics cost their number.
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
    """Have an OSError name a file that was open when it came, such as one of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file and wait until it and its name are on the disk."""
    _write_synced(path, content, _ANYBODY_S)
    sync_directory(path.parent)


def _write_synced(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        write_all(descriptor, content, 0)
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all bytes at a position; a full disk may take a part of them first.
    Raises OSError: the disk refused; a part may have been written."""
    written = os.pwrite(descriptor, data, position)
    while written < len(data):  # the next call of a short write says why
        written += os.pwrite(descriptor, memoryview(data)[written:], position + written)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing, and wait until their names are on the disk."""
    # From the top down, each waited for: a name is durable only when the directory it stands in is.
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Wait until names made, renamed or removed in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, value_type: type[T]) -> T | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return decode_file(content, value_type) if content.strip() else None


def decode_file(content: bytes, value_type: type[T]) -> T:
    """The value in the content of a file.
    Raises BodyError: it holds no such value, or that of another file: one that has nothing of the type."""
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
    """A note, None when there is none or it cannot be read, which is a WARNING.
    ``without_it``: what is not done then.
    Raises OSError: the disk refused."""
    try:
        note = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if is_note(note):
            return msgspec.json.decode(note[_CRC_DIGITS + 1 :], type=note_type)
    except msgspec.DecodeError:
        _log.debug("%s is no note", path)
    _log.warning("%s cannot be read: %s", path, without_it)
    return None


def is_note(note: bytes) -> bool:
    """Return True if the content of a file is a whole note, by its CRC."""
    crc, _, content = note.partition(b"\n")
    return crc == b"%08x" % zlib.crc32(content)


def write_note(path: Path, note: object) -> None:
    """Replace a note; when this returns it is on the disk. Raises OSError: the disk refused."""
    content = msgspec.json.encode(note)
    whole = path.with_name(path.name + ".tmp")
    write_durably(whole, b"%08x\n%b" % (zlib.crc32(content), content))
    whole.replace(path)
    sync_directory(path.parent)


def remove_note(path: Path) -> None:
    """Remove a note, if there is one. Raises OSError: the disk refused."""
    if path.exists():
        path.unlink()
        sync_directory(path.parent)


_BLOCK_BYTES = 4096
_NOT_KNOWN = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)


def sync_data(descriptor: int) -> None:
    """Wait until a file's bytes, and its length, are on the disk. Raises OSError: the disk refused."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync_file(descriptor)


def sync_file(descriptor: int) -> None:
    """Wait until the data and metadata of a file or directory are on the disk. Raises OSError: the disk refused."""
    import fcntl  # missing on Windows, where files are read that were written elsewhere

    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
            return
        except OSError as error:
            if error.errno not in _NOT_KNOWN:
                raise
    os.fsync(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Give a file its blocks from 0 to a size, without changing what is in it; nobody else may write to it meanwhile.
    Raises OSError: the disk has no room for them."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    for position in range(0, size, _BLOCK_BYTES):
        if os.pread(descriptor, 1, position) == b"\0":
            os.pwrite(descriptor, b"\0", position)


def drop_cached(descriptor: int, start: int, size: int) -> None:
    """Let the page cache drop a part of a file that is on the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


_NEEDED_BYTES = 1 << 20
_MOUNTS = Path("/proc/self/mountinfo")


def check_room(path: Path) -> None:
    """Raises StoreError: a directory, or the one it will be made in, lies on a tmpfs that is full."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = os.statvfs(path)
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < _NEEDED_BYTES and _is_tmpfs(path):
        raise StoreError(
            f"{path} is on a tmpfs with {free_bytes} bytes free, and a start needs {_NEEDED_BYTES}: delete files "
            f"there, or make it larger (mount -o remount,size=... {_mount_point(path)})"
        )


def _is_tmpfs(path: Path) -> bool:
    return any(kind == "tmpfs" for kind, _ in _mounts_of(path))


def _mount_point(path: Path) -> str:
    return next((point for _, point in _mounts_of(path)), str(path))


def _mounts_of(path: Path) -> list[tuple[str, str]]:
    """Kind and mount point of the file system of a path; nothing where the kernel does not tell."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return []
    return [(words[words.index("-") + 1], words[4]) for words in lines if words[2] == number and "-" in words]


# ---------------------------------------------------------------- the lock of a store directory
# A POSIX record lock on byte 0 of ``lock``, as Java brokers take it. Record locks belong to the process, and closing
# any descriptor of the file gives them up. So a process keeps the list of the directories it holds, looks there first,
# and opens the file only when it does not hold it. Source: store.md §8.3.

_held: set[Path] = set()
_held_lock = threading.Lock()


class StoreLock:
    """Exclusive use of one store directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._fd = -1

    def check(self) -> None:
        """See whether the directory is free, without changing anything.
        Raises StoreLocked: a store of this or another process has it."""
        with _held_lock:
            if self._root in _held:
                raise StoreLocked(str(self._root))
            try:
                fd = os.open(self._root / "lock", os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError:
                raise StoreLocked(str(self._root)) from None
            finally:
                os.close(fd)

    def acquire(self) -> None:
        """Take the lock. Raises StoreLocked: a store of this or another process has it; nothing was changed."""
        with _held_lock:
            if self._root in _held:
                raise StoreLocked(str(self._root))
            fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError:
                os.close(fd)
                raise StoreLocked(str(self._root)) from None
            os.pwrite(fd, b"lock", 0)
            self._fd = fd
            _held.add(self._root)

    def release(self) -> None:
        if self._fd >= 0:
            with _held_lock:
                os.close(self._fd)
                self._fd = -1
                _held.discard(self._root)
