"""A queue of fixed-size files that together hold one growing range of bytes (``MappedFileQueue``).

Commit log, consume queues, extension files and batch queues use it. A file name is the logical offset of the file's
first byte. Every file except the last is full. Only the owner thread of the store changes a queue. ``files`` is
replaced, never changed in place, so that flush threads can iterate over the tuple that they have read.

Invariant: the files are sorted, and their starts differ by the file size (a gap is logged; lookups still work).
Source: store.md §2.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from rmqkit.errors import StoreMismatch
from rmqkit.store.files import sync_directory
from rmqkit.store.log.mapped_file import MappedFile, file_name
from rmqkit.system import disk, threads

__all__ = ["FileQueue", "split", "sync_names", "sync_names_of"]

_log = logging.getLogger(__name__)
_NAME_DIGITS = 20
_PARTS = 16
T = TypeVar("T")


class FileQueue:
    """One queue of files, oldest first.

    Args:
        directories: directories of the files. File number ``k`` goes to ``directories[k % n]``; directories in
            ``avoided`` are left out.
        file_bytes: size of every file.
        setting: the key of the size setting, for error texts.
        read_only: additional directories with files that are only read. They get no new files.

    Attributes:
        avoided: directories that are too full for new files. They are used only if all directories are avoided.
        found: the result of `check`, stored by the owner for `load`.
    """

    def __init__(
        self, directories: Sequence[Path], file_bytes: int, *, setting: str, root: Path, read_only: Sequence[Path] = ()
    ) -> None:
        self.directories = tuple(directories)
        self.file_bytes = file_bytes
        self.files: tuple[MappedFile, ...] = ()
        self.avoided: frozenset[Path] = frozenset()
        self.found: list[tuple[int, Path, int]] | None = None
        self._setting, self._root = setting, root
        self._read_only = tuple(read_only)

    # ---- loading

    def check(self, *, has_empty: bool = False) -> list[tuple[int, Path, int]]:
        """Return start, path and length of each file on the disk, oldest first. Nothing is changed.
        ``has_empty``: whether every file may be empty, because a power cut leaves names without lengths. If False, only
        the last file may be empty. After a power cut the files after an empty file are lost, too.
        Raises StoreMismatch: a file does not have the length of the settings, or its name is not an offset."""
        found = sorted(one for directory in {*self.directories, *self._read_only} for one in _files_of(directory))
        for i, (_, path, length) in enumerate(found):
            if length == self.file_bytes or (length == 0 and (has_empty or i == len(found) - 1)):
                continue
            has_others = any(other == self.file_bytes for _, _, other in found)
            advice = f"set {self._setting} to the size the store was written with"
            if length < self.file_bytes:  # a repair restores the length of the file, or rebuilds the file
                repair = (
                    f"run with the broker's settings: rmq store repair {shlex.quote(str(self._root))} -c broker.conf"
                )
                advice = f"it was cut off: {repair}" if has_others else f"{advice}, or, if it was cut off, {repair}"
            raise StoreMismatch(f"{path} has {length} bytes and {self._setting} says {self.file_bytes}: {advice}")
        return found

    def load(self) -> None:
        """Load the files on the disk, or the files in `found`, as full files. Recovery lowers the end of the last file.
        Raises StoreMismatch: see `check`; nothing was changed."""
        found, self.found = self.check() if self.found is None else self.found, None
        sound = next((i for i, (_, _, length) in enumerate(found) if length == 0), len(found))
        while len(found) > sound:
            _, path, length = found.pop()
            _log.warning("deleting %s of %d bytes", path, length)
            disk.remove(path)
        self.files = tuple(MappedFile(path, start, size, wrote=size) for start, path, size in found)
        for file in self.files:  # the previous process may have been killed
            file.synced, file.is_named_durably = -1, file is not self.files[-1]
        for older, newer in zip(self.files, self.files[1:], strict=False):
            if newer.start - older.start != self.file_bytes:
                _log.error(
                    "%s does not follow %s: a file of %d bytes is missing", newer.path, older.path, self.file_bytes
                )

    # ---- looking up

    @property
    def min_offset(self) -> int:
        """Logical offset of the first byte, or -1 without files."""
        return self.files[0].start if self.files else -1

    @property
    def max_offset(self) -> int:
        """Logical offset one past the last written byte, or 0 without files."""
        return self.files[-1].start + self.files[-1].wrote if self.files else 0

    def find(self, offset: int) -> MappedFile | None:
        """Return the file that contains a logical offset, or None."""
        files = self.files
        if not files or offset < files[0].start:
            return None
        last = files[-1]
        if offset >= last.start:  # the common case, without a call
            return last if offset < last.start + last.size else None
        i = offset // self.file_bytes - files[0].start // self.file_bytes
        if i < len(files) and files[i].start <= offset < files[i].end:
            return files[i]
        return next((file for file in files if file.start <= offset < file.end), None)

    # ---- growing and shrinking

    def path_of(self, start: int) -> Path:
        """Return the path for the file that begins at an offset."""
        roomy = [directory for directory in self.directories if directory not in self.avoided] or self.directories
        return roomy[start // self.file_bytes % len(roomy)] / file_name(start)

    def create(self, start: int) -> MappedFile:
        """Create a file that is not part of the queue yet. Raises OSError: the file cannot be created."""
        return MappedFile.create(self.path_of(start), start, self.file_bytes)

    def append(self, file: MappedFile) -> None:
        assert not self.files or file.start >= self.files[-1].end, "files are appended in order"
        self.files = (*self.files, file)

    def truncate(self, offset: int) -> None:
        """Remove everything from a logical offset on: delete the later files, and write zeros over the rest of this
        file.
        """
        kept = tuple(file for file in self.files if file.start <= offset)
        dropped, self.files = self.files[len(kept) :], kept
        for file in reversed(dropped):  # newest first: a crash in between leaves no gap
            file.delete()
        for directory in {file.path.parent for file in dropped}:
            sync_directory(directory)  # a deleted file that reappears would restore cut records
        if kept:
            kept[-1].cut(offset - kept[-1].start)

    def drop_front(self, is_expired: Callable[[MappedFile], bool]) -> int:
        """Delete files, oldest first, while the test is true for them. Never delete the last file. Return the number of
        deleted files.
        Raises OSError: a file cannot be deleted. This file and the files after it stay in the queue."""
        count = 0
        while len(self.files) > 1 and is_expired(self.files[0]):
            self.files[0].delete()
            self.files = self.files[1:]
            count += 1
        return count

    # ---- flushing

    @property
    def unsynced_bytes(self) -> int:
        """Number of written bytes that are not known to be on the disk."""
        count = 0
        for file in reversed(self.files):
            if file.synced >= file.wrote > 0:
                break
            count += max(0, file.wrote - file.synced)
        return count

    def sync(self, *, unnamed: set[MappedFile] | None = None) -> None:
        """Wait until everything written so far is on the disk, oldest file first. Any thread can call this.
        ``unnamed``: collects the files with names that are not durable, for `sync_names_of`. Without it, names are
        synced, too.
        Raises OSError: the sync failed."""
        unsynced: list[MappedFile] = []
        for file in reversed(self.files):
            if not file.is_idle:
                unsynced.append(file)
            elif file.wrote:  # the newest file may still be empty: then the last data is in the file before it
                break
        for file in reversed(unsynced):
            file.sync()
            if not file.is_named_durably:
                if unnamed is None:
                    sync_names(file, 4)
                else:
                    unnamed.add(file)

    def write_again(self, offset: int) -> None:
        """Let the next `sync` write everything from a logical offset on again, with its content in the page cache."""
        for file in self.files:
            if file.end > offset and file.wrote:
                file.again_from = max(0, offset - file.start)

    def refused(self) -> list[MappedFile]:
        """Return the files whose last sync failed."""
        return [file for file in self.files if file.again_from is not None]

    def mark_synced(self) -> None:
        """Mark everything as durable, after a clean shutdown."""
        for file in self.files:
            file.synced, file.is_named_durably = file.wrote, True

    def close(self) -> None:
        for file in self.files:
            file.close()

    def close_idle(self) -> None:
        """Close the descriptors that no flush thread will use."""
        for file in self.files:
            if file.is_idle:
                file.close()

    def destroy(self) -> None:
        dropped, self.files = self.files, ()
        for file in dropped:
            file.delete()
        for directory in self.directories:
            try:
                disk.remove_directory(directory)
            except OSError:
                _log.debug("%s is not deleted: it is missing or holds other files", directory)


def sync_names(file: MappedFile, levels: int) -> None:
    """Make the name of a new file durable, and the names of its parent directories, which may also be new."""
    for directory in list(file.path.parents)[:levels]:
        if not _sync_if_ours(directory):
            return
    file.is_named_durably = True


def sync_names_of(files: Collection[MappedFile], levels: int, pool: threads.Pool) -> None:
    """Make the names of many files durable, like `sync_names`. Sync each directory once and several in parallel. No
    file may be deleted meanwhile."""
    level = {file.path.parent for file in files}
    directories = set(level)
    for _ in range(levels - 1):
        level = {directory.parent for directory in level}
        directories |= level
    for _ in pool.map(_sync_all_of_ours, split(sorted(directories))):
        pass
    for file in files:
        file.is_named_durably = True


def split(things: Collection[T]) -> list[list[T]]:
    """Split items into parts for the threads of a pool. A separate task for each item would take longer than most
    syncs.
    """
    listed = list(things)
    return [part for i in range(_PARTS) if (part := listed[i::_PARTS])]


def _sync_all_of_ours(directories: list[Path]) -> None:
    for directory in directories:
        _sync_if_ours(directory)


def _sync_if_ours(directory: Path) -> bool:
    """Make the names in a directory durable. Return False if the directory was deleted meanwhile."""
    try:
        sync_directory(directory)
    except FileNotFoundError:
        return False
    except PermissionError:  # this process is not allowed to read it, so another process created it
        pass
    return True


def _files_of(directory: Path) -> list[tuple[int, Path, int]]:
    """Return start, path and length of every file of a directory."""
    try:
        sizes = disk.file_sizes(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(_start_of(path := directory / name), path, length) for name, length in sizes]


def _start_of(path: Path) -> int:
    if len(path.name) == _NAME_DIGITS and path.name.isascii() and path.name.isdigit():
        return int(path.name)
    raise StoreMismatch(f"{path} is not a store file (its name is not a 20-digit offset): move it elsewhere")
