"""The commit log: the records of all topics, one after the other, in files of equal size (``CommitLog``).

A record is in one file, with at least 8 bytes after it. If a record does not fit, a *blank* (``i32`` remaining bytes,
``i32`` magic) fills the rest of the file, and the record goes to the next file, which another thread has created in
advance. Each record, or whole batch, is written with one ``pwrite``, so that the sender gets an error if the disk is
full. The next write overwrites the bytes that a failed write left after the end.

Invariants: ``committed_offset`` moves only after all bytes before it are in the page cache. Offsets only grow. An
append costs one system call, and is committed immediately. A crash of the process loses no committed record. A crash of
the machine loses the records that were not flushed. With the transient store pool, an append costs a copy and is
committed later. Use this module only in the owner thread of the store, except `commit` and the values that flush
threads read.

`LogStart` stores the start of the log in the note ``logstart``, beside ``checkpoint``. Apache's broker does not know
the note. The note distinguishes a missing first file from retention. Its one field is ``start``, the physical offset of
the first byte. Unlike the note of queue ends, this note exists while a broker runs and after a kill:

=====================================  ================================================================================
event                                  content of the note
=====================================  ================================================================================
a store was opened                     the start of the log; 0 for an empty log, no note for a slave's empty log
retention is about to delete files     the start of the log without them
a slave's empty log gets a first file  the start of that file
=====================================  ================================================================================

If the log begins after the noted offset, its first files are missing: another broker's retention deleted them, or they
are lost. These two cases cannot be distinguished. The next start logs one WARNING. Until then, ``rmq store verify``
reports the difference. If the note cannot be written, the comparison is lost, or the next start warns of files that
retention deleted.

Not handled here: queue offsets and checks of a message (`put`), flush (`flush`), the cut after a crash
(`recovery`). Source: store.md §3.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from msgspec import Struct

from rmqkit.protocol.record import BLANK_BYTES, MAGIC_V1, MAGIC_V2, pack_blank
from rmqkit.store.files import read_note, remove_note, write_note
from rmqkit.store.log.file_queue import FileQueue, sync_names
from rmqkit.store.log.mapped_file import MappedFile, file_name
from rmqkit.store.log.transient_pool import TransientPool
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.system import disk, threads

__all__ = ["CommitLog", "LogStart", "gone_files", "log_directories", "noted_start"]

_log = logging.getLogger(__name__)
_CREATE_TIMEOUT_SECONDS = 5.0
_HEAD_BYTES = 88


def log_directories(root: Path, settings: StoreSettings) -> tuple[list[Path], list[Path]]:
    """Return the writable and the read-only directories of the commit log."""
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
        pool: the buffers of uncommitted bytes, under ASYNC_FLUSH with ``transientStorePoolEnable``.
        root: the store directory.
        max_offset: physical offset one past the last byte. The next record is written here unless it needs a new file.
        last_store_timestamp: storeTimestamp of the newest record, set after ``max_offset``.
    """

    def __init__(self, root: Path, settings: StoreSettings, *, is_replica: bool = False) -> None:
        self.root = root
        writable, read_only = log_directories(root, settings)
        self.queue = FileQueue(
            writable, settings.commit_log_file_bytes, setting="mappedFileSizeCommitLog", root=root, read_only=read_only
        )
        self.pool = None if is_replica else _pool_of(settings)
        self.max_offset = 0
        self.last_store_timestamp = 0
        self._committed_timestamp = 0
        self._is_replica = is_replica
        self._next = _NextFile(self.queue, self.pool, is_warm=settings.warm_mapped_file)
        self._file: MappedFile | None = None
        self._fd = -1
        self._file_end = 0

    @property
    def file_end(self) -> int:
        """Physical offset at which the current file ends, or the end of the log if there is no file."""
        return self._file_end

    @property
    def min_offset(self) -> int:
        """Physical offset of the first byte, or -1 without files."""
        return self.queue.min_offset

    @property
    def committed_offset(self) -> int:
        """Physical offset up to which the log is in the page cache and can be read."""
        return self.max_offset if self.pool is None else self.pool.committed_offset

    @property
    def committed_timestamp(self) -> int:
        """storeTimestamp of a record before `committed_offset`, usually the newest. Read `committed_offset` after this
        timestamp."""
        return self.last_store_timestamp if self.pool is None else self._committed_timestamp

    # ---- opening and closing

    def resume(self) -> None:
        """Set the end of the log to the end of its files, after load and recovery."""
        self._find_end()
        self._committed_timestamp = self.last_store_timestamp
        if self.pool is not None:
            self.pool.committed_offset = self.max_offset
            if self._file is not None and self.max_offset < self._file_end:
                self.pool.lend(self._file)
        if self._file is not None or not self._is_replica:  # the master determines the start of a slave's first file
            self._next.start(self._file_end)

    def _find_end(self) -> None:
        self.max_offset = self.queue.max_offset
        self._file = self.queue.files[-1] if self.queue.files else None
        self._fd = self._file.fd if self._file else -1
        self._file_end = self._file.end if self._file else self.max_offset

    def close(self) -> None:
        """Close the descriptors and delete the file that was created in advance."""
        self._next.close()
        self._fd = -1
        self.queue.close()

    # ---- appending

    def place(self, size: int) -> int:
        """Return the physical offset of the next ``size`` bytes. Begin a new file if they do not fit into the current
        file.
        Raises OSError: the next file could not be created, or the blank could not be written. `BlockingIOError`: the
        file or a buffer of the pool is not ready yet."""
        return self.max_offset if self.has_room(size) else self._roll()

    def has_room(self, size: int) -> bool:
        """Return True if the next ``size`` bytes fit at ``max_offset``. Then `place` is not needed."""
        return size + BLANK_BYTES <= self._file_end - self.max_offset

    def append(self, data: bytes | bytearray | memoryview, store_timestamp: int) -> None:
        """Write one or more whole records to the end of the log, after `place` was called for them. They become
        readable with the commit. (In a replica's log: write any bytes that fit into the file of `begin_file`.)
        Raises OSError: the write failed; the log is unchanged."""
        file, size = self._file, len(data)
        assert file is not None, "place() was called"
        if self.pool is not None:
            self.pool.append(bytes(data))
        else:
            position = file.wrote
            if disk.pwrite(self._fd, data, position) != size:
                file.write(position, data)  # writes the rest, or raises the reason
            file.wrote = position + size
        # Keep this order: a flush reads the timestamp first, and the record with this timestamp must be among the
        # flushed bytes.
        self.max_offset += size
        self.last_store_timestamp = store_timestamp

    def _roll(self) -> int:
        """Fill the last file with a blank and begin the next file."""
        remaining = self._file_end - self.max_offset
        if self._file is not None and remaining:
            if self.pool is not None:
                self.pool.append(pack_blank(remaining))
                self.pool.end_file()
            else:
                self._file.write(self._file.wrote, pack_blank(remaining))
                self._file.wrote = self._file.size
            self.max_offset += remaining
        if self.pool is not None:
            self.pool.reserve()
        self.begin_file(self.max_offset - self.max_offset % self.queue.file_bytes)
        return self.max_offset

    def begin_file(self, start: int) -> None:
        """Begin a new file after the last file, or in a replica's empty log at the start of any file.
        Raises OSError: the file could not be created."""
        file = self._next.take_file(start)
        assert file.start == start, "the file begins at the requested offset"
        self.queue.append(file)
        if self.pool is not None:
            self.pool.lend(file)
        self._file, self._fd = file, file.fd
        self._file_end = file.end
        self.max_offset = file.start

    def cut(self, offset: int) -> None:
        """Cut a replica's log at a physical offset, while no flush runs.
        Raises OSError: the log cannot be cut."""
        assert offset <= self.max_offset, "a log is cut at or before its end"
        self.queue.truncate(offset)
        self._find_end()

    def commit(self, least_bytes: int = 0) -> bool:
        """Move the content of the pool to the page cache. Return True if anything was moved. Only one thread can call
        this at a time.
        Raises OSError: the write failed; the next call retries."""
        if self.pool is None:
            return False
        timestamp = self.last_store_timestamp  # read it first: the log sets its end first
        end = self.max_offset
        is_moved = self.pool.commit(least_bytes)
        if self.pool.committed_offset >= end:
            self._committed_timestamp = timestamp
        return is_moved

    # ---- reading

    def slice(self, physical_offset: int, size: int) -> memoryview | None:
        """Return ``size`` bytes at an offset without a copy, or None if they are not in the log."""
        file = self.queue.find(physical_offset)
        if file is None:
            return None
        position = physical_offset - file.start
        if position + size > file.wrote or size <= 0:
            return None
        return file.view[position : position + size]

    def copy(self, physical_offset: int, size: int) -> bytes | None:
        """Return a copy of ``size`` bytes at an offset, or None if they are not in the log. Unlike `slice`, this maps
        no page of the file."""
        file = self.queue.find(physical_offset)
        if file is None or size <= 0 or physical_offset - file.start + size > file.wrote:
            return None
        return file.read(physical_offset - file.start, size)

    def record_at(self, physical_offset: int) -> memoryview | None:
        """Return the bytes of the record at an offset, or None if no record begins there."""
        head = self.slice(physical_offset, _HEAD_BYTES)
        if head is None or int.from_bytes(head[4:8], "big", signed=True) not in (MAGIC_V1, MAGIC_V2):
            return None
        return self.slice(physical_offset, int.from_bytes(head[:4], "big", signed=True))

    def appended_record_at(self, physical_offset: int) -> memoryview | bytes | None:
        """Return the record at an offset like `record_at`, even if it is still in the pool. Call it only in the owner
        thread of the store."""
        found = self.record_at(physical_offset)
        if found is not None or self.pool is None:
            return found
        head = self.pool.slice(physical_offset, _HEAD_BYTES)
        if head is None or int.from_bytes(head[4:8], "big", signed=True) not in (MAGIC_V1, MAGIC_V2):
            return None
        return self.pool.slice(physical_offset, int.from_bytes(head[:4], "big", signed=True))

    def store_timestamp(self, physical_offset: int, size: int) -> int:
        """Return the storeTimestamp of a record, or -1 if its bytes are not in the log."""
        if size < _HEAD_BYTES or (record := self.slice(physical_offset, size)) is None:
            return -1
        at = 68 if record[39] & 0x10 else 56
        return int.from_bytes(record[at : at + 8], "big", signed=True)


def _pool_of(settings: StoreSettings) -> TransientPool | None:
    """Create the pool. Return None if the pool is disabled, or under SYNC_FLUSH, where a send waits for the disk
    anyway."""
    if not settings.transient_store_pool or settings.flush_disk_type is FlushDiskType.SYNC_FLUSH:
        return None
    return TransientPool(settings.transient_store_pool_size, settings.commit_log_file_bytes)


class _NextFile:
    """A thread that creates the next file before it is needed (``AllocateMappedFileService``)."""

    def __init__(self, queue: FileQueue, pool: TransientPool | None, *, is_warm: bool) -> None:
        self._queue = queue
        self._pool = pool
        self._is_warm = is_warm
        self._executor: threads.Pool | None = None
        self._start = -1
        self._made: threads.Future[MappedFile] | None = None
        self._is_late = False
        self._is_closing = False

    def start(self, start: int) -> None:
        """Start to create the file that begins at an offset."""
        self._executor = self._executor or threads.Pool(1, "store-allocate")
        self._start, self._made = start, self._executor.submit(self._make, start)

    def take_file(self, start: int) -> MappedFile:
        """Return the file that begins at an offset. Wait only while the file is being created.
        Raises OSError: the file cannot be created. `TimeoutError`: the disk takes longer than 5 s; later calls raise
        `BlockingIOError` immediately until the file is ready."""
        if self._made is None or self._start != start:
            _discard(self._made)
            self.start(start)
        assert self._made is not None
        if self._is_late and not self._made.done():
            raise BlockingIOError(errno.EAGAIN, "the next log file is still being created")
        try:
            file = self._made.result(_CREATE_TIMEOUT_SECONDS)
        except OSError as error:
            if error.errno is not None:
                self._made = None
                raise
            self._is_late = True  # the future's own TimeoutError
            raise TimeoutError(errno.ETIMEDOUT, f"not created after {_CREATE_TIMEOUT_SECONDS:.0f} s") from None
        self._is_late = False
        self.start(file.end)
        return file

    def close(self) -> None:
        """Delete the unused file."""
        if self._executor is not None:
            self._is_closing = True
            self._executor.shutdown()
            self._executor, self._is_closing = None, False
        _discard(self._made)
        self._made = None

    def _make(self, start: int) -> MappedFile:
        if self._pool is not None:
            self._pool.lock_buffers()
        file = self._queue.create(start)
        try:
            if self._is_warm:
                file.warm(is_wanted=lambda: not self._is_closing)
            disk.sync_file(file.fd)  # syncs its length: an empty file would end the log
            sync_names(file, 2)
        except OSError:
            file.delete()
            raise
        return file


def _discard(made: threads.Future[MappedFile] | None) -> None:
    if made is not None and made.exception(_CREATE_TIMEOUT_SECONDS) is None:
        file = made.result()
        try:
            file.delete()
        except OSError as error:
            _log.warning("cannot delete %s, which is not needed any more: %s", file.path, error)


_START_NOTE = "logstart"


class _Note(Struct):
    start: int


def noted_start(root: Path) -> int | None:
    """Return the noted start of a store's log, or None if the note is missing. Raises OSError: the note cannot be
    opened."""
    note = read_note(root / _START_NOTE, _Note, "where the log began is not compared with it")
    return None if note is None else note.start


def gone_files(noted: int, start: int) -> str:
    """Describe missing files: the log began at offset ``noted`` before, and now begins at ``start``."""
    return (
        f"{start - noted} bytes from {file_name(noted)} to before {file_name(start)} are gone: deleted by the "
        "retention of another broker, or lost"
    )


class LogStart:
    """The start note of a store. Use it only in the owner thread of the store.

    Args:
        is_replica: whether the store belongs to a slave. A slave's master determines the start of the log.
    """

    def __init__(self, root: Path, log: CommitLog, *, is_replica: bool = False) -> None:
        self._root = root
        self._commit_log = log
        self._is_replica = is_replica
        self._noted: int | None = None

    def compare(self) -> None:
        """Read the note after the files were loaded. Warn if first files are missing."""
        self._noted = noted_start(self._root)
        start = self._commit_log.min_offset
        if self._noted is not None and start > self._noted:
            said = "store %s: the log began at %d and begins at %d: %s"
            _log.warning(said, self._root, self._noted, start, gone_files(self._noted, start))

    def renew(self) -> None:
        """Store the start of the log in the note after recovery."""
        start = self._commit_log.min_offset
        if start >= 0 or not self._is_replica:
            self.note(max(0, start))
            return
        self._noted = None
        try:
            remove_note(self._root / _START_NOTE)
        except OSError as error:
            self._tell_refusal(error)

    def note(self, start: int) -> bool:
        """Store the future start of the log in the note. Return True if the note is on the disk."""
        if start == self._noted:
            return True
        try:
            write_note(self._root / _START_NOTE, _Note(start))
        except OSError as error:
            self._tell_refusal(error)
            return False
        self._noted = start
        return True

    def _tell_refusal(self, error: OSError) -> None:
        said = "%s cannot be written, the next start may report log files that retention deleted as lost: %s"
        _log.warning(said, self._root / _START_NOTE, error)
