"""The index: messages by key, in files named by their creation time (``IndexService``).

After a crash, a file that is not full is useless: it is deleted at load, and recovery enters the keys of the records
that it scans. Therefore keys can stay in memory. They are entered `_WAITING_MAX` messages at a time (fewer messages if
they have many keys), at the first message after `_WAITING_MS`, and before a query or a clean stop. Under load numpy
enters all of them together.

``indexfiles``, a note (`rmqkit.store.files`), lists the files that a start must find: nothing else in a store shows
that an index file is missing. A full file is added to the list when it is on the disk. The newest file is added at a
clean stop. A missing file stays in the list, and every start logs it, until it would have expired or the index is
rebuilt.

The index follows the log and never blocks it. In a running store (`MessageIndex.may_fall_behind`) a failed write does
not raise an error:

===========================  ===========================================================================================
state                        behaviour
===========================  ===========================================================================================
up to date                   ``put`` holds keys in memory, and enters them when they are due
``is_behind``                a write failed. The waiting keys stay in memory. Later keys are not held: the index stores
                             only the physical offset of the first one, ``behind_from``
`retry` succeeded            the waiting keys are entered; `put_missed` enters the keys from ``behind_from`` on
an unexpected error          the keys in memory are dropped, and ``behind_from`` is the end of the newest file
===========================  ===========================================================================================

Use this module only in the owner thread of the store, except `MessageIndex.sync_full`. Source: store.md §7.
"""

from __future__ import annotations

import importlib
import logging
import shlex
import struct
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from rmqkit.errors import StoreMismatch
from rmqkit.protocol.properties import Keys, find_keys
from rmqkit.store.files import read_note, sync_directory, write_note
from rmqkit.store.index.file import ENTRY, HEADER, SLOT, IndexFile, key_hash, key_hashes
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.log.scan import has_numpy
from rmqkit.system import disk, threads

if TYPE_CHECKING:
    from rmqkit.store.index.file import Ints

__all__ = ["INDEX_NOTE", "HasKeys", "KeyQuery", "KeyRows", "MessageIndex", "file_name", "full_files", "missing_files"]

_log = logging.getLogger(__name__)

_WAITING_MAX = 1024
_WAITING_MS = 1000
_WAITING_WORDS = 8 << 10
_WAITING_BYTES = 512 << 10
"""Bounds of words and bytes in the waiting property strings: entering 1,024 messages of 16,000 keys each took 12 s."""
_LOOK_BYTES = 16 << 10
"""Number of log bytes after which these bounds are checked again."""
_COLUMNS_MIN = 128
"""Number of messages from which numpy is faster than the plain code."""
_YEAR_9999_MS = 253_370_764_800_000
_COLUMNS = "rmqkit.store.index.property_columns"
INDEX_NOTE = "indexfiles"
"""Name of the note of index files, beside their directory."""


class KeyQuery(Struct):
    """The result of a query by key.
    ``physical_offsets``: offsets of the records, ascending.
    ``last_update_timestamp``, ``last_update_offset``: time and offset of the newest entry of the newest file, 0 without
    files."""

    physical_offsets: list[int]
    last_update_timestamp: int = 0
    last_update_offset: int = 0


class HasKeys(Protocol):
    """The fields of a record that the index needs; the dispatcher's `DispatchRequest` has them."""

    topic: str
    physical_offset: int
    store_timestamp: int
    properties: bytes
    keys: Keys | None
    hashes: bytes | None


class _Keyed(Struct, gc=False):
    topic: str
    physical_offset: int
    store_timestamp: int
    properties: bytes
    keys: Keys | None = None
    hashes: bytes | None = None


class KeyRows(Struct, gc=False):
    """The keys of records that were stored together, hashed by the compiled core.

    Attributes:
        physical_offset, last_offset: offset of the first and of the last record.
        count, key_count: number of records, and of their keys.
        rows: the input of `index_entries`.
    """

    physical_offset: int
    last_offset: int
    store_timestamp: int
    count: int
    key_count: int
    rows: bytes
    topic: str = ""
    properties: bytes = b""
    keys: Keys | None = None
    hashes: bytes | None = None


_ROW = struct.Struct("=qqI")


class _NotedFile(Struct, array_like=True, frozen=True):
    """A file in the note. ``end_offset``: physical offset of the last record in the file."""

    end_offset: int
    is_full: bool


_Note = dict[str, _NotedFile]


class MessageIndex:
    """All index files of a store, oldest first.

    Args:
        tags_as_keys: whether TAGS are indexed, too, as in 5.4.

    Attributes:
        may_fall_behind: whether the index falls behind the log after a failed write. If False, a failed write raises
            OSError.
        behind_from: physical offset of the first record whose keys are neither in the files nor in memory, or None.
        failure: the error that made the index fall behind, or None.
    """

    def __init__(self, directory: Path, slot_count: int, entry_count: int, *, tags_as_keys: bool = True) -> None:
        self.directory = directory
        self.files: tuple[IndexFile, ...] = ()
        self._slot_count = slot_count
        self._entry_count = entry_count
        self.tags_as_keys = tags_as_keys
        self._file_bytes = HEADER.size + slot_count * SLOT.size + entry_count * ENTRY.size
        self._current: IndexFile | None = None
        self._full: deque[IndexFile] = deque()
        self._waiting: deque[HasKeys] = deque()
        self._waiting_count = 0
        self._has_rows = False
        self._taken = -1
        self._look_at = 0
        self._looked = self._words = self._bytes = 0
        self._is_behind = False
        self.may_fall_behind = False
        self.behind_from: int | None = None
        self.failure: Exception | None = None
        self._loading: threads.Thread | None = None
        self._note: _Note = {}
        self._missing: _Note = {}

    # ---- opening and closing

    def _on_disk(self) -> list[Path]:
        if not disk.is_directory(self.directory):
            return []
        return [self.directory / name for name in disk.names(self.directory) if name.isdecimal()]

    @property
    def _rebuild(self) -> str:
        return f"rmq store rebuild {shlex.quote(str(self.directory.parent))} --index"

    def check(self) -> None:
        """Check every file without changing anything.
        Raises StoreMismatch: the length of a file does not match the settings."""
        for path in self._on_disk():
            length = disk.size(path)
            if length not in (0, self._file_bytes):
                raise StoreMismatch(
                    f"{path} has {length} bytes, maxHashSlotNum {self._slot_count} and maxIndexNum {self._entry_count} "
                    f"make {self._file_bytes}: set them to the values the store was written with, or rebuild a "
                    f"damaged index: {self._rebuild}"
                )

    def load(
        self,
        *,
        clean: bool,
        durable_timestamp: int,
        log_start: int = 0,
        stored_at: Callable[[int], int | None] = lambda physical_offset: None,
    ) -> None:
        """Load the files on the disk. After a crash, load only files that were full and flushed.
        ``stored_at``: returns the storeTimestamp of the record at a physical offset, or None if there is no record. It
        is used to check headers.
        ``durable_timestamp``: the checkpoint's indexMsgTimestamp.
        ``log_start``: physical offset of the first byte of the log. A file that ends before this offset has expired."""
        self._note = _read_note(self._note_path)
        self._missing = _missing_of(self._note, self.directory, clean=clean, log_start=log_start)
        for name, file_note in self._missing.items():
            _log.warning(
                "index file %s is missing or empty: keys of messages up to offset %d find nothing; run: %s",
                self.directory / name,
                file_note.end_offset,
                self._rebuild,
            )
        files: list[IndexFile] = []
        for path in self._on_disk():
            if not disk.size(path):
                _log.warning("deleting empty index file %s", path)
                disk.remove(path)
                continue
            mapped = MappedFile(path, 0, self._file_bytes, wrote=self._file_bytes)
            file = IndexFile(mapped, self._slot_count, self._entry_count)
            # A crash may have left any part of the other files, so they are deleted.
            is_noted_full = path.name in self._note and self._note[path.name].is_full
            if (clean or is_noted_full) and (faults := file.header_faults(stored_at)):
                _log.warning(
                    "header of index file %s: %s: corrected from its records; if keys find nothing, run: %s",
                    *(path, ", ".join(faults), self._rebuild),
                )
                file.write()
            # Several files may end in the same ms. Only the first of these files is certainly on the disk.
            is_durable = file.end_timestamp < durable_timestamp or (
                file.end_timestamp == durable_timestamp and not (files and files[-1].end_timestamp == durable_timestamp)
            )
            if clean or (file.is_full and (is_durable or is_noted_full)):
                files.append(file)
            else:
                _log.warning("deleting index file %s: it was not flushed before the crash", path)
                mapped.delete()
        self.files = tuple(files)
        self._current = files[-1] if files else None
        if len(files) < len(self._note) - len(self._missing):  # deleted files must not count as missing
            self._write_note(self.files)

    def sync_full(self, durable_offset: int) -> int:
        """Wait until the files that became full are on the disk; called from a flush thread.
        A file with records that are not durable in the log waits: a power cut may remove these records, and the file
        must not contain them.
        ``durable_offset``: physical offset up to which the log is on the disk.
        Return the end timestamp of the newest synced file, or 0 if no file was synced.
        Raises OSError: the sync failed."""
        timestamp = 0
        while self._full and self._full[0].end_offset < durable_offset:
            file = self._full[0]
            file.file.sync()
            sync_directory(self.directory)
            timestamp = file.end_timestamp
            self._full.popleft()
        if timestamp:
            self._write_note(self.files[: -1 - len(self._full)])
        return timestamp

    def sync(self, durable_offset: int) -> None:
        """Wait until every file is on the disk, for a clean stop. Raises OSError: the sync failed."""
        self.sync_full(durable_offset)
        if self._current is not None:
            self._current.file.sync()
            sync_directory(self.directory)
            self._write_note(self.files)

    @property
    def _note_path(self) -> Path:
        return self.directory.parent / INDEX_NOTE

    def _write_note(self, files: tuple[IndexFile, ...]) -> None:
        """List the files that are on the disk and the missing files in the note.
        If the write fails, only the note is lost.
        """
        note = self._missing | {one.file.path.name: _NotedFile(one.end_offset, one.is_full) for one in files}
        if note == self._note:
            return
        try:
            write_note(self._note_path, note)
        except OSError as error:
            _log.warning("cannot write %s; missing index files would not be noticed: %s", self._note_path, error)
            return
        self._note = note

    def close(self) -> None:
        """Close descriptors and mappings."""
        for file in self.files:
            file.release()
            file.file.close()

    # ---- falling behind and catching up

    @property
    def is_behind(self) -> bool:
        """Return True if the index lacks keys that should have been entered."""
        return self._is_behind or self.behind_from is not None

    def retry(self) -> bool:
        """Enter the keys that have waited since a write failed. Return True if they are in the files now."""
        return self._enter_or_fall_behind()

    def put_missed(self, records: Sequence[HasKeys], end: int, *, is_last: bool) -> bool:
        """Enter records of the log from ``behind_from`` up to the physical offset ``end``, after `retry` succeeded.
        Return True if the keys were written.
        ``is_last``: whether the dispatched log ends at ``end``."""
        assert self.behind_from is not None, "the index is behind"
        assert not self._is_behind, "retry() succeeded"
        start, self.behind_from = self.behind_from, None
        self._taken = start - 1
        self.put_all(records)
        is_entered = self._enter_or_fall_behind(is_up_to_date=is_last)
        if self.behind_from is None:
            self._taken = max(self._taken, end - 1)
            if not (is_entered and is_last):
                self.behind_from = end
        return is_entered

    def _enter_or_fall_behind(self, *, is_up_to_date: bool = True) -> bool:
        """Call `enter`. If a write fails in a running store, fall behind instead of raising an error. Return True if
        all keys were written.
        ``is_up_to_date``: whether the index then lacks no other key. Raises OSError: a write failed in a store that
        does not run."""
        waiting = self._waiting
        begins_at = waiting[0].physical_offset if waiting else self._taken + 1
        try:
            self.enter()
        except OSError as error:
            if not self.may_fall_behind:
                raise
            self._fell_behind(error)
            return False
        except Exception as error:
            if not self.may_fall_behind:
                raise
            self._start_over(error, begins_at)
            return False
        if self.failure is not None and is_up_to_date and self.behind_from is None:
            _log.warning("index %s is up to date again", self.directory)
            self.failure = None
        return True

    def _fell_behind(self, error: Exception) -> None:
        if self.failure is None:
            _log.error(
                "%s cannot be written, so messages stored from now on are not found by key until it can: %s",
                self.directory,
                error,
            )
        self.failure = error

    def _start_over(self, error: Exception, begins_at: int) -> None:
        """Drop the keys in memory after an unexpected error. The keys after the end of the newest file will be read
        from the log."""
        if self.failure is None:
            _log.error(
                "index %s: an unexpected error, the keys are read from the log again; if keys find nothing, run: %s",
                self.directory,
                self._rebuild,
                exc_info=error,
            )
        self.failure = error
        if self._current is not None:
            begins_at = min(begins_at, self._current.forget())
        self._waiting.clear()
        self._has_rows = self._is_behind = False
        self._looked = self._words = self._bytes = self._waiting_count = 0
        self.behind_from = begins_at if self.behind_from is None else min(begins_at, self.behind_from)

    def _misses(self, physical_offset: int) -> bool:
        """Return True if the index is behind in a running store. The index then reads the record from the log later."""
        if not self.may_fall_behind or not self.is_behind:
            return False
        if self.behind_from is None and physical_offset > self._taken:
            self.behind_from = physical_offset
        return True

    # ---- building

    def put(self, topic: str, physical_offset: int, store_timestamp: int, properties: bytes) -> None:
        """Accept the keys of one record. They are entered together with the keys of later records, or by `enter`.
        Records must arrive in log order; a repeated record is ignored.
        Raises OSError: the write failed; another attempt continues where this one stopped."""
        self._put(_Keyed(topic, physical_offset, store_timestamp, properties))

    def _put(self, record: HasKeys) -> None:
        if self._misses(record.physical_offset):
            return
        if record.physical_offset <= self._taken and not self._is_behind:
            return
        if record.physical_offset > self._taken:
            self._taken = record.physical_offset
            self._waiting.append(record)
            self._waiting_count += 1
        if self._is_behind or self._is_due(record.store_timestamp):
            self._enter_or_fall_behind()

    def _is_due(self, store_timestamp: int) -> bool:
        """Return True if the waiting keys must be entered: enough keys wait, or the oldest key has waited long
        enough.
        """
        waiting = self._waiting
        if self._waiting_count >= _WAITING_MAX or store_timestamp - waiting[0].store_timestamp > _WAITING_MS:
            return True
        if self._taken < self._look_at:
            return False
        self._look_at = self._taken + _LOOK_BYTES
        added = [one.properties for one in islice(waiting, self._looked, None)]
        self._looked = len(waiting)
        self._words += sum([properties.count(b" ") for properties in added])
        self._bytes += sum(map(len, added))
        return self._words >= _WAITING_WORDS or self._bytes >= _WAITING_BYTES

    def put_all(self, records: Sequence[HasKeys]) -> None:
        """Accept the keys of several records, and hold them until they are entered. Raises OSError: see `put`."""
        assert not records or records[0].physical_offset <= records[-1].physical_offset, "records come in log order"
        if records and self._misses(records[0].physical_offset):
            return
        if self._is_behind or not records or records[0].physical_offset <= self._taken:
            for one in records:
                self._put(one)
            return
        self._waiting += records
        self._waiting_count += len(records)
        self._taken = records[-1].physical_offset
        if self._is_due(records[-1].store_timestamp):
            self._enter_or_fall_behind()

    def put_rows(self, rows: KeyRows) -> None:
        """Accept the keys of records that the compiled core hashed. Raises OSError: see `put`."""
        if self._misses(rows.physical_offset):
            return
        if self._is_behind or rows.physical_offset <= self._taken:
            for one in _each_of(rows):
                self._put(one)
            return
        self._waiting.append(rows)
        self._has_rows = True
        self._waiting_count += rows.count
        self._words += rows.key_count
        self._taken = rows.last_offset
        if self._is_due(rows.store_timestamp):
            self._enter_or_fall_behind()

    def put_run(self, offsets: Ints, store_timestamps: Ints, rows: Ints, hashes: Ints) -> None:
        """Accept the keys of many records with numpy. The next `enter` writes the keys that are still in memory.
        ``offsets``, ``store_timestamps``: physical offset and storeTimestamp of each record, in log order.
        ``rows``, ``hashes``: for each key in order, the row of its record and its hash.
        Raises OSError: the write failed."""
        if not len(offsets) or self._misses(int(offsets[0])):
            return
        if self._waiting:
            self._enter_or_fall_behind()
            if self._misses(int(offsets[0])):
                return
        first_offset = max(self._taken + 1, self._current.end_offset if self._current else 0)
        rows, hashes = (column[bisect_left(rows, bisect_left(offsets, first_offset)) :] for column in (rows, hashes))
        try:
            deque(self._put_keys(offsets[rows], store_timestamps[rows], hashes), maxlen=0)
        except Exception as error:
            if not self.may_fall_behind:
                raise
            if not isinstance(error, OSError):
                self._start_over(error, int(offsets[0]))
                return
            self._fell_behind(error)
            self.behind_from = int(offsets[0])
        self._taken = max(self._taken, int(offsets[-1]))

    def _put_keys(self, offsets: Ints, store_timestamps: Ints, hashes: Ints) -> Iterator[int]:
        """Enter keys with numpy, in as many files as needed. After each file, yield the number of keys entered so
        far.
        """
        key = 0
        while key < len(hashes):
            current = self._current
            if current is None or current.is_full:
                current = self._create(int(store_timestamps[key]))
            key += current.put_run(hashes[key:], offsets[key:], store_timestamps[key:])
            yield key

    def enter(self) -> None:
        """Enter the waiting keys.

        Raises OSError: the write failed; another attempt continues where this one stopped.
        """
        self._is_behind = True
        self._looked = self._words = self._bytes = self._waiting_count = 0
        waiting = self._waiting
        if self._has_rows or (waiting and waiting[0].hashes is not None and waiting[-1].hashes is not None):
            self._enter_hashed()
            waiting = self._waiting
        if len(waiting) >= _COLUMNS_MIN and self._has_columns():
            self._enter_run()
        while waiting:
            self._enter(waiting[0])
            waiting.popleft()
        if self._current is not None:
            self._current.write()
        # Reset it after the write: if the write fails, the next put calls this method again for the waiting keys.
        self._is_behind = False

    def _enter_hashed(self) -> None:
        """Enter the waiting keys with the compiled core if they fit into the file. If they do not fit, the caller
        enters them one by one, with the same result."""
        rows = [one if isinstance(one, KeyRows) else self._row(one) for one in self._waiting]
        keyed = [one for one in rows if one.key_count]
        current = self._current
        if keyed and (current is None or current.is_full):
            current = self._create(keyed[0].store_timestamp)
        if not keyed:
            self._waiting.clear()
            self._has_rows = False
            return
        assert current is not None, "records with keys have a file"
        ends = keyed[0].store_timestamp, keyed[-1].store_timestamp
        if keyed[0].physical_offset >= current.end_offset and current.put_hashed(
            b"".join([one.rows for one in keyed]), *ends
        ):
            self._waiting.clear()
        else:
            self._waiting = deque([record for one in rows for record in _each_of(one)])
        # Reset it after the write: if the write fails, the rows still wait, and the next attempt must call this method
        # again.
        self._has_rows = False

    def _row(self, record: HasKeys) -> KeyRows:
        """Return the row of a record that the core has not hashed."""
        hashes = record.hashes
        if hashes is None:
            keys = record.keys or find_keys(record.properties)
            found = key_hashes(record.topic, keys, with_tags=self.tags_as_keys)
            hashes = struct.pack(f"={len(found)}i", *found)
        at, count = record.physical_offset, len(hashes) // SLOT.size
        return KeyRows(at, at, record.store_timestamp, 1, count, _ROW.pack(at, record.store_timestamp, count) + hashes)

    def _has_columns(self) -> bool:
        """Return True if numpy is loaded. Loading numpy takes a quarter of a second, so the first call that could use
        numpy starts a thread that loads it."""
        if _COLUMNS in sys.modules:
            return self._loading is None or not self._loading.is_alive()
        if self._loading is None and has_numpy():
            self._loading = threads.Thread(importlib.import_module, (_COLUMNS,), name="numpy")
            self._loading.start()
        return False

    def _enter_run(self) -> None:
        """Enter the waiting keys with numpy. The result is the same as entering them one by one."""
        import numpy as np

        waiting = self._waiting
        while self._current is not None and waiting and waiting[0].physical_offset < self._current.end_offset:
            waiting.popleft()
        rows, hashes = self._waiting_hashes()
        offset_of = np.array([one.physical_offset for one in waiting], "i8")
        timestamp_of = np.array([one.store_timestamp for one in waiting], "i8")
        for entered in self._put_keys(offset_of[rows], timestamp_of[rows], hashes):
            if entered < len(rows):
                while waiting[0].physical_offset < offset_of[rows[entered]]:
                    waiting.popleft()
        waiting.clear()

    def _waiting_hashes(self) -> tuple[Ints, Ints]:
        """Return the row of its record and the hash of each key of the waiting records, in order."""
        import numpy as np

        from rmqkit.store.index.property_columns import PropertyColumns

        waiting = self._waiting
        known_hashes = [one.hashes for one in waiting if one.hashes is not None]
        if len(known_hashes) == len(waiting):
            counts = np.fromiter(map(len, known_hashes), "i8", len(waiting)) // 4
            return np.repeat(np.arange(len(waiting)), counts), np.frombuffer(b"".join(known_hashes), "i4").astype("i8")
        topics = [one.topic for one in waiting]
        numbers = {topic: number for number, topic in enumerate(dict.fromkeys(topics))}
        topic_of_row = np.fromiter(map(numbers.__getitem__, topics), "i8", len(topics))
        known = [one.keys for one in waiting if one.keys is not None]
        # Keys of batch messages and of records from the log are not known yet: all property strings are parsed
        # together.
        is_known = len(known) == len(waiting)
        columns = PropertyColumns.of_keys(known) if is_known else PropertyColumns([one.properties for one in waiting])
        return columns.keys(list(numbers), topic_of_row, with_tags=self.tags_as_keys)

    def _enter(self, record: HasKeys) -> None:
        assert not isinstance(record, KeyRows), "rows are entered together, or split"
        physical_offset, store_timestamp = record.physical_offset, record.store_timestamp
        if record.hashes is not None:
            hashes: list[int] = memoryview(record.hashes).cast("i").tolist()
        else:
            keys = record.keys or find_keys(record.properties)
            hashes = key_hashes(record.topic, keys, with_tags=self.tags_as_keys)
        if not hashes:
            return
        current = self._current
        if current is None or current.is_full:
            current = self._create(store_timestamp)
        if physical_offset < current.end_offset:
            return
        # If the keys of a message do not fit, the rest goes to the next file; a reader finds the message by any of its
        # keys.
        while hashes:
            entered = current.put(hashes, physical_offset, store_timestamp)
            hashes = hashes[entered:]
            if hashes:
                current = self._create(store_timestamp)

    def _create(self, now_ms: int) -> IndexFile:
        """Create a file. Its name is the time, and is greater than all other names."""
        if self._current is not None:
            self._current.write()
            self._current.release()
        newest = self.files[-1].file.path.name if self.files else ""
        name = file_name(now_ms, newest)
        assert name > newest, "file names ascend, even if a clock was set back"
        file = IndexFile.create(self.directory / name, self._slot_count, self._entry_count)
        if self.files:
            try:
                file.begin_after(self.files[-1].end_timestamp, self.files[-1].end_offset)
            except OSError:
                file.file.delete()
                raise
            self._full.append(self.files[-1])
        self.files = (*self.files, file)
        self._current = file
        return file

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete the files that contain only records before an offset, but never the newest file. Return the number of
        deleted files.
        Raises OSError: a file cannot be deleted; the next call retries."""
        count = 0
        while len(self.files) > 1 and self.files[0].end_offset < min_physical_offset:
            self.files[0].file.delete()
            self.files = self.files[1:]
            count += 1
        return count

    # ---- queries

    def query(
        self,
        topic: str,
        key: str,
        count_max: int,
        begin: int,
        end: int,
        accept: Callable[[int], bool] | None = None,
    ) -> KeyQuery:
        """Return the records that may have a key and were stored between two times (ms, inclusive). Source: store.md
        §7.5.
        ``accept``: returns True if the record at a physical offset has the key. Without it, the result may include
        records that have another key with the same hash.
        Raises OSError: waiting keys cannot be entered, and the index is not allowed to fall behind."""
        self._enter_or_fall_behind()
        found: list[int] = []
        hashed = key_hash(topic, key)
        for file in reversed(self.files):
            if file.overlaps(begin, end):
                found += file.find(hashed, count_max - len(found), begin, end, accept)
            if file.begin_timestamp < begin or len(found) >= count_max:
                break
        newest = self.files[-1] if self.files else None
        if newest is None:
            return KeyQuery([])
        return KeyQuery(sorted(set(found)), newest.end_timestamp, newest.end_offset)


def _each_of(rows: KeyRows) -> Iterator[HasKeys]:
    """Yield the records of rows one by one."""
    at = 0
    while at < len(rows.rows):
        physical_offset, store_timestamp, count = _ROW.unpack_from(rows.rows, at)
        at += _ROW.size + count * SLOT.size
        hashes = rows.rows[at - count * SLOT.size : at]
        yield _Keyed("", physical_offset, store_timestamp, b"", None, hashes)


def missing_files(directory: Path, *, clean: bool, log_start: int) -> list[Path]:
    """Return the index files that a start must find and that are missing.
    ``clean``: whether the store was closed cleanly.
    ``log_start``: physical offset of the first byte of the log."""
    note = _read_note(directory.parent / INDEX_NOTE)
    return [directory / name for name in _missing_of(note, directory, clean=clean, log_start=log_start)]


def full_files(directory: Path) -> set[str]:
    """Return the names of the index files that were noted as full and durable."""
    return {name for name, one in _read_note(directory.parent / INDEX_NOTE).items() if one.is_full}


def _read_note(path: Path) -> _Note:
    return read_note(path, _Note, "whether an index file is missing is not known") or {}


def _missing_of(note: _Note, directory: Path, *, clean: bool, log_start: int) -> _Note:
    """Return the files of a note that are not on the disk. After a crash, skip the newest file if it was not full: an
    earlier start may have deleted it."""
    return {
        name: one
        for name, one in note.items()
        if (clean or one.is_full) and one.end_offset >= log_start and not _has_content(directory / name)
    }


def _has_content(path: Path) -> bool:
    return disk.is_file(path) and disk.size(path) > 0


def file_name(now_ms: int, newest: str) -> str:
    """Return the name of a file created at a time, in local time. The name is greater than the newest name.

    Source: store.md §7.4.
    """
    moment = datetime.fromtimestamp(min(max(now_ms, 0), _YEAR_9999_MS) / 1000)  # a damaged record may have any time
    while (name := _name_of(moment)) <= newest:
        moment = datetime.strptime(newest[:14], "%Y%m%d%H%M%S") + timedelta(milliseconds=int(newest[14:17]) + 1)
    return name


def _name_of(moment: datetime) -> str:
    return moment.strftime("%Y%m%d%H%M%S") + f"{moment.microsecond // 1000:03d}"
