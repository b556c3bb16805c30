"""The commit log: the records of all topics, one behind the other, in files of equal size (``CommitLog``).

A record lies in one file and leaves at least 8 bytes after it. If it does not fit, a *blank* (``i32`` remaining bytes,
``i32`` magic) declares the rest of the file as written and the record goes to the next file, which another thread has
made already. Records are written with one ``pwrite`` each (one for a whole batch), so a full disk is an error that is
answered; what a failed write left behind the end is overwritten by the next one.

Invariants: ``max_offset`` moves only after all bytes before it are in the page cache; offsets only grow. An append
costs one system call. A crash of the process loses nothing that was appended, a crash of the machine what was not
flushed.
Owner thread only, except ``max_offset`` and ``last_store_timestamp``, which flush threads read.

Not handled here: queue offsets and checks of a message (`message_store`), flush (`flush`), the cut after a crash
(`recovery`). Source: store.md §3.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rmqkit.protocol.record import BLANK_BYTES, MAGIC_V1, MAGIC_V2, pack_blank
from rmqkit.store.file_queue import FileQueue
from rmqkit.store.json_files import sync_directory
from rmqkit.store.mapped_file import MappedFile
from rmqkit.store.settings import StoreSettings

__all__ = ["CommitLog", "log_directories"]

_CREATE_TIMEOUT_SECONDS = 5.0
_HEAD_BYTES = 88


def log_directories(root: Path, settings: StoreSettings) -> tuple[list[Path], list[Path]]:
    """The writable and the read-only directories of the commit log."""
    named = _paths(settings.store_path_commit_log) or [root / "commitlog"]
    read_only = _paths(settings.read_only_commit_log_store_paths)
    writable = sorted(path for path in named if path not in read_only)
    return writable or sorted(named), read_only


def _paths(text: str) -> list[Path]:
    return [Path(part.strip()).expanduser() for part in text.split(",") if part.strip()]


class CommitLog:
    """All records of a store.

    Attributes:
        queue: the files.
        max_offset: physical offset one past the last byte; the next record goes here unless it needs a new file.
        last_store_timestamp: storeTimestamp of the newest record, set after ``max_offset``.
    """

    def __init__(self, root: Path, settings: StoreSettings) -> None:
        writable, read_only = log_directories(root, settings)
        self.queue = FileQueue(
            writable, settings.commit_log_file_bytes, setting="mappedFileSizeCommitLog", read_only=read_only
        )
        self.max_offset = 0
        self.last_store_timestamp = 0
        self._next = _NextFile(self.queue)
        self._file: MappedFile | None = None
        self._fd = -1
        self._file_end = 0

    @property
    def min_offset(self) -> int:
        """Physical offset of the first byte, -1 while there is no file."""
        return self.queue.min_offset

    # ---- opening and closing

    def resume(self) -> None:
        """Take the end of the files for the end of the log, after load and recovery."""
        self.max_offset = self.queue.max_offset
        self._file = self.queue.files[-1] if self.queue.files else None
        self._fd = self._file.fd if self._file else -1
        self._file_end = self._file.end if self._file else self.max_offset
        self._next.start(self._file_end)

    def close(self) -> None:
        """Give back descriptors and delete the file that was made ahead."""
        self._next.close()
        self._fd = -1
        self.queue.close()

    # ---- appending

    def place(self, size: int) -> int:
        """The physical offset that the next ``size`` bytes will get; rolls to a new file when they do not fit.

        Raises:
            OSError: the next file could not be made, or the blank not be written.
        """
        end = self.max_offset
        return end if size + BLANK_BYTES <= self._file_end - end else self._roll()

    def append(self, data: bytes, store_timestamp: int) -> None:
        """Write one or several whole records, placed before, at the end of the log; readable at once.

        Raises:
            OSError: the disk refused; the log is as before.
        """
        file = self._file
        assert file is not None, "place() came before"
        position, size = file.wrote, len(data)
        if os.pwrite(self._fd, data, position) != size:
            file.write(position, data)  # writes on, or says why not
        file.wrote = position + size
        self.max_offset += size
        self.last_store_timestamp = store_timestamp

    def _roll(self) -> int:
        """Fill up the last file with a blank and go to the next one."""
        if self._file is not None and self._file.wrote < self._file.size:
            remaining = self._file.size - self._file.wrote
            self._file.write(self._file.wrote, pack_blank(remaining))
            self._file.wrote = self._file.size
            self.max_offset += remaining
        file = self._next.take(self.max_offset - self.max_offset % self.queue.file_bytes)
        self.queue.append(file)
        self._file, self._fd = file, file.fd
        self._file_end = file.end
        self.max_offset = file.start
        return file.start

    # ---- reading

    def slice(self, physical_offset: int, size: int) -> memoryview | None:
        """``size`` bytes at an offset without copying, or None where the log holds no such bytes."""
        file = self.queue.find(physical_offset)
        if file is None:
            return None
        position = physical_offset - file.start
        if position + size > file.wrote or size <= 0:
            return None
        return file.view[position : position + size]

    def record_at(self, physical_offset: int) -> memoryview | None:
        """The bytes of the record at an offset, or None when no record begins there."""
        head = self.slice(physical_offset, _HEAD_BYTES)
        if head is None or int.from_bytes(head[4:8], "big", signed=True) not in (MAGIC_V1, MAGIC_V2):
            return None
        return self.slice(physical_offset, int.from_bytes(head[:4], "big", signed=True))

    def store_timestamp(self, physical_offset: int, size: int) -> int:
        """storeTimestamp of a record, or -1 when its bytes are not (or no longer) in the log."""
        if size < _HEAD_BYTES or (record := self.slice(physical_offset, size)) is None:
            return -1
        at = 68 if record[39] & 0x10 else 56
        return int.from_bytes(record[at : at + 8], "big", signed=True)


class _NextFile:
    """Makes the next file before it is needed (``AllocateMappedFileService``)."""

    def __init__(self, queue: FileQueue) -> None:
        self._queue = queue
        self._executor: ThreadPoolExecutor | None = None
        self._start = -1
        self._made: Future[MappedFile] | None = None

    def start(self, start: int) -> None:
        self._executor = ThreadPoolExecutor(1, "store-allocate")
        self._request(start)

    def take(self, start: int) -> MappedFile:
        """The file that begins at an offset; waits only while it is being made.

        Raises:
            OSError: it cannot be made (`TimeoutError` when the disk takes longer than 5 s).
        """
        made, self._made = self._made, None
        if made is not None and self._start == start:
            file = made.result(_CREATE_TIMEOUT_SECONDS)
        else:
            _discard(made)
            file = _create_durably(self._queue, start)
        self._request(file.end)
        return file

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        _discard(self._made)
        self._made = None

    def _request(self, start: int) -> None:
        if self._executor is not None:
            self._start = start
            self._made = self._executor.submit(_create_durably, self._queue, start)


def _create_durably(queue: FileQueue, start: int) -> MappedFile:
    file = queue.create(start)
    try:
        sync_directory(file.path.parent)
    except OSError:
        file.delete()
        raise
    file.is_named_durably = True
    return file


def _discard(made: Future[MappedFile] | None) -> None:
    if made is not None and made.exception(_CREATE_TIMEOUT_SECONDS) is None:
        made.result().delete()
