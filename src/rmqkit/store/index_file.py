"""The index: messages by key, in hash tables on disk named by their creation time (``IndexService``, ``IndexFile``).

::

    header 40 bytes | slots × i32 | entries × 20 bytes

    header  i64 beginTimestamp | i64 endTimestamp | i64 beginPhyOffset | i64 endPhyOffset | i32 hashSlotCount |
            i32 indexCount
    entry   i32 keyHash | i64 phyOffset | i32 timeDiff (seconds after beginTimestamp) | i32 prevIndex

A slot holds the number of its newest entry, an entry the number of the one before it; 0 ends the chain. ``indexCount``
is the next free number and starts at 1, so a full file holds one entry less than it has room for. Keys of a message
are its UNIQ_KEY, every word of KEYS, and ``T#`` + TAGS (5.4); hashed is ``topic#key``. The hash alone is compared:
whoever asks checks the key in the record.

A file that is not full is worth nothing after a crash: it is deleted at load, and its keys come back for the records
that recovery walks over. So keys may wait in memory: they are entered `_WAITING_MAX` messages at a time, after
`_WAITING_MS` at the next message, and before a query or a clean stop. Under load numpy does it for all at once.

Entries and header are written with ``pwrite``, slots through a mapping: three keys a message would be three writes of
four bytes. Header and slots have their blocks before they are mapped, so a full disk is an error, not a signal.
Whoever reads beside a live broker finds whole chains: entries are written first, then slots, and the header last.
Owner thread only, except `sync_full`.
Source: store.md §7.
"""

from __future__ import annotations

import functools
import importlib
import logging
import mmap
import os
import re
import struct
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from rmqkit.errors import StoreMismatch
from rmqkit.protocol.hashing import java_hash
from rmqkit.store.json_files import sync_directory
from rmqkit.store.mapped_file import MappedFile
from rmqkit.store.scan import has_numpy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["ENTRY", "HEADER", "SLOT", "IndexFile", "KeyQuery", "MessageIndex", "key_hash", "key_hashes"]

_log = logging.getLogger(__name__)

HEADER = struct.Struct(">qqqqii")
SLOT = struct.Struct(">i")
ENTRY = struct.Struct(">iqii")
_I32_MAX = 0x7FFFFFFF
_NAME_DIGITS = 17
_UNIQUE_KEY_HEAD = 28
_WAITING_MAX = 1024
_WAITING_MS = 1000
_COLUMNS_MIN = 128
"""Messages from which on numpy is faster than the plain code."""
_COLUMNS = "rmqkit.store.property_columns"
_KEYS = re.compile(rb"(?:^|\x02)(UNIQ_KEY|KEYS|TAGS)\x01([^\x02]+)")
"""Finds what `find_property` finds, for all three names at once; tested equal."""
assert (HEADER.size, ENTRY.size) == (40, 20)

_pack_entry = ENTRY.pack
_unpack_slot, _pack_slot_into = SLOT.unpack_from, SLOT.pack_into
_head_hash = functools.lru_cache(maxsize=1024)(java_hash)


def key_hash(topic: str, key: str) -> int:
    """The hash an index file stores for a key: ``abs`` of Java's hash of ``topic#key``. Source: store.md §7.2."""
    if not key.isascii():
        h = java_hash(f"{topic}#{key}")
    elif len(key) == 32:  # the hash runs from left to right, and a producer's unique keys differ at their end only
        a, b, c, d = key[_UNIQUE_KEY_HEAD:].encode()
        h = _head_hash(f"{topic}#{key[:_UNIQUE_KEY_HEAD]}") * 923521 + a * 29791 + b * 961 + c * 31 + d  # 31⁴, 31³, 31²
    else:
        h = _head_hash(topic + "#")
        for unit in key.encode():
            h = (31 * h + unit) & 0xFFFFFFFF
    h &= 0xFFFFFFFF
    return h if h < 1 << 31 else ((1 << 32) - h) & 0x7FFFFFFF


@functools.lru_cache(maxsize=4096)
def _tags_hash(topic: str, tags: bytes) -> int:
    return key_hash(topic, "T#" + tags.decode("utf-8", "replace"))


def key_hashes(topic: str, properties: bytes, *, with_tags: bool) -> list[int]:
    """The hashes a record is indexed under, in the order of its entries. Source: store.md §7.2.

    Args:
        properties: the record's property string.
        with_tags: whether TAGS is a key, too, as with 5.4 brokers.
    """
    found = dict(_KEYS.findall(properties))
    hashes: list[int] = []
    if unique_key := found.get(b"UNIQ_KEY"):
        hashes.append(key_hash(topic, unique_key.decode("utf-8", "replace")))
    if keys := found.get(b"KEYS"):
        words = keys.decode("utf-8", "replace").split(" ")
        hashes += [key_hash(topic, word) for word in words if word]
    if with_tags and (tags := found.get(b"TAGS")):
        hashes.append(_tags_hash(topic, tags))
    return hashes


class KeyQuery(Struct):
    """What a query by key found.

    Attributes:
        physical_offsets: of records whose key has the hash asked for, ascending.
        last_update_timestamp, last_update_offset: newest entry of the newest file, 0 without files.
    """

    physical_offsets: list[int]
    last_update_timestamp: int = 0
    last_update_offset: int = 0


class IndexFile:
    """One file of the index.

    Attributes:
        begin_timestamp, end_timestamp, begin_offset, end_offset, slots_used, index_count: the header.
    """

    def __init__(self, file: MappedFile, slot_count: int, entry_count: int) -> None:
        self.file = file
        self._slot_count = slot_count
        self._entry_count = entry_count
        self._entries_at = HEADER.size + slot_count * SLOT.size
        header = HEADER.unpack(file.read(0, HEADER.size))
        self.begin_timestamp: int = header[0]
        self.end_timestamp: int = header[1]
        self.begin_offset: int = header[2]
        self.end_offset: int = header[3]
        self.slots_used: int = header[4]
        self.index_count: int = max(1, header[5])
        self._entries = bytearray()
        self._newest: dict[int, int] = {}
        self._slots: mmap.mmap | None = None
        self._is_header_due = False

    @property
    def is_full(self) -> bool:
        """Whether no entry fits any more."""
        return self.index_count >= self._entry_count

    def begin_after(self, timestamp: int, offset: int) -> None:
        """Take over the end of the file before."""
        self.begin_timestamp = self.end_timestamp = timestamp
        self.begin_offset = self.end_offset = offset
        self._write_header()

    def put(self, hashes: list[int], physical_offset: int, store_timestamp: int) -> int:
        """Enter the keys of one record, in memory until `write`; returns how many of them fit."""
        number = first = self.index_count
        count = min(len(hashes), self._entry_count - first)
        if count <= 0:
            return 0
        seconds = (store_timestamp - self.begin_timestamp) // 1000 if self.begin_timestamp > 0 else 0
        seconds = max(0, min(seconds, _I32_MAX))
        newest, slot_count, slots, entries = self._newest, self._slot_count, self._mapped_slots(), self._entries
        for hashed in hashes[:count]:
            slot = hashed % slot_count
            previous = newest.get(slot) or _unpack_slot(slots, HEADER.size + slot * 4)[0]
            if not 0 < previous <= number:
                previous = 0
                self.slots_used += 1
            entries += _pack_entry(hashed, physical_offset, seconds, previous)
            newest[slot] = number
            if number == 1:  # the first entry of a file moves its beginning
                self.begin_offset, self.begin_timestamp, seconds = physical_offset, store_timestamp, 0
            number += 1
        self.index_count = number
        self.end_offset, self.end_timestamp = physical_offset, store_timestamp
        return count

    def put_run(self, hashes: Ints, physical_offsets: Ints, store_timestamps: Ints) -> int:
        """`put` for many keys at once, with numpy; all but the header is written. Returns how many fit.

        Raises:
            OSError: the disk refused.
        """
        import numpy as np

        if self._entries:
            self.write()
        first = self.index_count
        count = min(len(hashes), self._entry_count - first)
        if count <= 0:
            return 0
        table = np.frombuffer(self._mapped_slots(), ">i4", self._slot_count, HEADER.size)
        slots = hashes[:count] % self._slot_count
        numbers = np.arange(first, first + count, dtype="i4")
        order = np.argsort((slots << count.bit_length()) + np.arange(count))  # stable, at a quarter of the time
        in_order = slots[order]
        is_first = np.diff(in_order, prepend=-1) != 0
        known = table[in_order].astype("i4")
        known[(known < 0) | (known > numbers[order])] = 0
        self.slots_used += int(np.count_nonzero(is_first & (known == 0)))
        seconds = self._seconds(store_timestamps[:count])
        if first == 1:  # the first entry of a file moves its beginning
            self.begin_offset, self.begin_timestamp = int(physical_offsets[0]), int(store_timestamps[0])
            seconds[1:] = self._seconds(store_timestamps[1:count])
        entries = np.empty(count, [("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
        entries["hash"], entries["offset"], entries["seconds"] = hashes[:count], physical_offsets[:count], seconds
        entries["previous"][order] = np.where(is_first, known, np.roll(numbers[order], 1))
        self.file.write(self._entries_at + first * ENTRY.size, entries.tobytes())
        table[in_order] = numbers[order]  # of a slot that comes several times the last one stays
        self._is_header_due = True
        self.index_count += count
        self.end_offset, self.end_timestamp = int(physical_offsets[count - 1]), int(store_timestamps[count - 1])
        return count

    def _seconds(self, store_timestamps: Ints) -> Ints:
        begin = self.begin_timestamp
        seconds: Ints = (store_timestamps - begin) // 1000 if begin > 0 else store_timestamps * 0
        return seconds.clip(0, _I32_MAX)

    def _mapped_slots(self) -> mmap.mmap:
        """Header and slots, to be changed in place.

        They get their blocks first: through a mapping a disk without room could only answer with a signal.

        Raises:
            OSError: the disk has no room for them.
        """
        if self._slots is None:
            os.posix_fallocate(self.file.fd, 0, self._entries_at)
            self._slots = mmap.mmap(self.file.fd, self._entries_at)
        return self._slots

    def release(self) -> None:
        """Give the mapping of the slots back: nothing is put any more, or not soon."""
        self._slots = None

    def write(self) -> None:
        """Write what was put: entries first and the header last, so that no chain leads nowhere.

        Raises:
            OSError: the disk refused; what is in memory stays there for another try.
        """
        if self._entries:
            first = self.index_count - len(self._entries) // ENTRY.size
            self.file.write(self._entries_at + first * ENTRY.size, self._entries)
            slots = self._mapped_slots()
            for slot, number in self._newest.items():
                _pack_slot_into(slots, HEADER.size + slot * 4, number)
            self._entries = bytearray()
            self._newest.clear()
            self._is_header_due = True
        if self._is_header_due:
            self._write_header()
            self._is_header_due = False

    def _write_header(self) -> None:
        self.file.write(
            0,
            HEADER.pack(
                self.begin_timestamp,
                self.end_timestamp,
                self.begin_offset,
                self.end_offset,
                self.slots_used,
                self.index_count,
            ),
        )

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether the file may hold messages stored between two times."""
        return begin <= self.end_timestamp and end >= self.begin_timestamp

    def find(self, hashed: int, count_max: int, begin: int, end: int) -> list[int]:
        """Physical offsets entered under a hash between two times, newest first."""
        found: list[int] = []
        view = self.file.view
        number = SLOT.unpack_from(view, HEADER.size + hashed % self._slot_count * 4)[0]
        while 0 < number < self.index_count and len(found) < count_max:
            entry = ENTRY.unpack_from(view, self._entries_at + number * ENTRY.size)
            entry_hash, physical_offset, seconds, previous = entry
            timestamp = self.begin_timestamp + seconds * 1000
            if seconds < 0 or timestamp < begin:
                break
            if entry_hash == hashed and timestamp <= end:
                found.append(physical_offset)
            if previous >= number:  # chains lead backwards; anything else is damage
                break
            number = previous
        return found


class MessageIndex:
    """All index files of a store, oldest first.

    Attributes:
        tags_as_keys: whether TAGS are indexed too, as 5.4 does.
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
        self._waiting: deque[tuple[str, int, int, bytes]] = deque()
        self._taken = -1
        self._is_behind = False
        self._loading: threading.Thread | None = None

    # ---- opening and closing

    def _on_disk(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if path.name.isdecimal())

    def check(self) -> None:
        """Look at every file without changing anything.

        Raises:
            StoreMismatch: a file has another length than the settings say.
        """
        for path in self._on_disk():
            length = path.stat().st_size
            if length not in (0, self._file_bytes):
                raise StoreMismatch(
                    f"{path} has {length} bytes, maxHashSlotNum {self._slot_count} and maxIndexNum {self._entry_count} "
                    f"make {self._file_bytes}: set them to the values the store was written with"
                )

    def load(self, *, clean: bool, durable_timestamp: int) -> None:
        """Take over the files on the disk; after a crash only those that were full and flushed.

        Args:
            durable_timestamp: the checkpoint's indexMsgTimestamp.
        """
        files: list[IndexFile] = []
        for path in self._on_disk():
            if not path.stat().st_size:
                _log.warning("deleting empty index file %s", path)
                path.unlink()
                continue
            mapped = MappedFile(path, 0, self._file_bytes, wrote=self._file_bytes)
            file = IndexFile(mapped, self._slot_count, self._entry_count)
            # several files may end in the same ms: of those the first is certainly on the disk
            is_durable = file.end_timestamp < durable_timestamp or (
                file.end_timestamp == durable_timestamp and not (files and files[-1].end_timestamp == durable_timestamp)
            )
            if clean or (file.is_full and is_durable):
                files.append(file)
            else:
                _log.warning("deleting index file %s: it was not flushed before the crash", path)
                mapped.delete()
        self.files = tuple(files)
        self._current = files[-1] if files else None

    def sync_full(self, durable_offset: int) -> int:
        """Wait until the files that became full are on the disk; called from a flush thread.

        A file that knows more than the disk's log waits: what a power cut takes from the log is never in a file kept.

        Args:
            durable_offset: physical offset up to which the log is on the disk.

        Returns:
            the end timestamp of the newest of them, 0 without any.

        Raises:
            OSError: the disk refused.
        """
        timestamp = 0
        while self._full and self._full[0].end_offset < durable_offset:
            file = self._full[0]
            file.file.sync()
            sync_directory(self.directory)
            timestamp = file.end_timestamp
            self._full.popleft()
        return timestamp

    def sync(self, durable_offset: int) -> None:
        """Wait until every file is on the disk, as a clean stop does.

        Raises:
            OSError: the disk refused.
        """
        self.sync_full(durable_offset)
        if self._current is not None:
            self._current.file.sync()
            sync_directory(self.directory)

    def close(self) -> None:
        """Give back descriptors and mappings."""
        for file in self.files:
            file.release()
            file.file.close()

    # ---- building

    def put(self, topic: str, physical_offset: int, store_timestamp: int, properties: bytes) -> None:
        """Take over the keys of one record; they are entered with those of the following ones, or by `enter`.

        Records come in log order; one that came before is ignored.

        Raises:
            OSError: the disk refused; another try goes on where this one stopped.
        """
        if physical_offset <= self._taken and not self._is_behind:
            return
        if physical_offset > self._taken:
            self._taken = physical_offset
            self._waiting.append((topic, physical_offset, store_timestamp, properties))
        waiting = self._waiting
        if len(waiting) >= _WAITING_MAX or self._is_behind or store_timestamp - waiting[0][2] > _WAITING_MS:
            self.enter()

    def put_all(self, records: list[tuple[str, int, int, bytes]]) -> None:
        """`put` for several records: topic, physical offset, storeTimestamp and properties of each.

        Raises:
            OSError: as `put`.
        """
        if not records or self._is_behind or records[0][1] <= self._taken or self._waiting_ms(records) > _WAITING_MS:
            for record in records:
                self.put(*record)
            return
        self._waiting += records
        self._taken = records[-1][1]
        if len(self._waiting) >= _WAITING_MAX:
            self.enter()

    def _waiting_ms(self, records: list[tuple[str, int, int, bytes]]) -> int:
        """How much older what waits longest is than the last of these records."""
        return records[-1][2] - (self._waiting or records)[0][2]

    def put_run(self, offsets: Ints, store_timestamps: Ints, rows: Ints, hashes: Ints) -> None:
        """`put` for many records at once, with numpy; the next `enter` writes what is still in memory.

        Args:
            offsets, store_timestamps: physical offset and storeTimestamp of each record, in log order.
            rows, hashes: the keys in their order: which record each belongs to, and its hash.

        Raises:
            OSError: the disk refused.
        """
        if self._waiting:
            self.enter()
        first_offset = max(self._taken + 1, self._current.end_offset if self._current else 0)
        rows, hashes = (column[bisect_left(rows, bisect_left(offsets, first_offset)) :] for column in (rows, hashes))
        deque(self._put_keys(offsets[rows], store_timestamps[rows], hashes), maxlen=0)
        self._taken = max(self._taken, int(offsets[-1]))

    def _put_keys(self, offsets: Ints, store_timestamps: Ints, hashes: Ints) -> Iterator[int]:
        """Enter keys with numpy, in as many files as it takes; yields after each how many are entered."""
        key = 0
        while key < len(hashes):
            current = self._current
            if current is None or current.is_full:
                current = self._create(int(store_timestamps[key]))
            key += current.put_run(hashes[key:], offsets[key:], store_timestamps[key:])
            yield key

    def enter(self) -> None:
        """Enter the keys that wait.

        Raises:
            OSError: the disk refused; another try goes on where this one stopped.
        """
        self._is_behind = True
        waiting = self._waiting
        if len(waiting) >= _COLUMNS_MIN and self._has_columns():
            self._enter_run()
        while waiting:
            self._enter(*waiting[0])
            waiting.popleft()
        if self._current is not None:
            self._current.write()
        self._is_behind = False

    def _has_columns(self) -> bool:
        """Whether numpy is there; who could use it first has it loaded, in a thread: that takes a quarter second."""
        if _COLUMNS in sys.modules:
            return self._loading is None or not self._loading.is_alive()
        if self._loading is None and has_numpy():
            self._loading = threading.Thread(
                target=importlib.import_module, args=(_COLUMNS,), name="numpy", daemon=True
            )
            self._loading.start()
        return False

    def _enter_run(self) -> None:
        """Enter the keys that wait with numpy, equal to doing it one by one."""
        import numpy as np

        from rmqkit.store.property_columns import PropertyColumns

        waiting = self._waiting
        while self._current is not None and waiting and waiting[0][1] < self._current.end_offset:
            waiting.popleft()
        topics, offsets, timestamps, strings = zip(*waiting, strict=True) if waiting else ((), (), (), ())
        numbers = {topic: number for number, topic in enumerate(dict.fromkeys(topics))}
        topic_of_row = np.fromiter(map(numbers.__getitem__, topics), "i8", len(topics))
        columns = PropertyColumns(strings)
        rows, hashes = columns.keys(list(numbers), topic_of_row, with_tags=self.tags_as_keys)
        offset_of, timestamp_of = np.array(offsets, "i8"), np.array(timestamps, "i8")
        for entered in self._put_keys(offset_of[rows], timestamp_of[rows], hashes):
            if entered < len(rows):
                while waiting[0][1] < offset_of[rows[entered]]:
                    waiting.popleft()
        waiting.clear()

    def _enter(self, topic: str, physical_offset: int, store_timestamp: int, properties: bytes) -> None:
        hashes = key_hashes(topic, properties, with_tags=self.tags_as_keys)
        if not hashes:
            return
        current = self._current
        if current is None or current.is_full:
            current = self._create(store_timestamp)
        if physical_offset < current.end_offset:
            return
        while hashes:
            entered = current.put(hashes, physical_offset, store_timestamp)
            hashes = hashes[entered:]
            if hashes:
                current = self._create(store_timestamp)

    def _create(self, now_ms: int) -> IndexFile:
        """A new file, named by the time and behind all others."""
        if self._current is not None:
            self._current.write()
            self._current.release()
        moment = datetime.fromtimestamp(now_ms / 1000)  # names are local time
        name = _file_name(moment)
        newest = self.files[-1].file.path.name if self.files else ""
        while name <= newest:
            moment = datetime.strptime(newest[:14], "%Y%m%d%H%M%S") + timedelta(milliseconds=int(newest[14:17]) + 1)
            name = _file_name(moment)
        mapped = MappedFile.create(self.directory / name, 0, self._file_bytes)
        mapped.wrote = self._file_bytes
        file = IndexFile(mapped, self._slot_count, self._entry_count)
        if self.files:
            file.begin_after(self.files[-1].end_timestamp, self.files[-1].end_offset)
            self._full.append(self.files[-1])
        self.files = (*self.files, file)
        self._current = file
        return file

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete files, never the newest, that hold nothing at or behind an offset; returns how many."""
        count = 0
        while count < len(self.files) - 1 and self.files[count].end_offset < min_physical_offset:
            count += 1
        dropped, self.files = self.files[:count], self.files[count:]
        for file in dropped:
            file.file.delete()
        return count

    # ---- asking

    def query(self, topic: str, key: str, count_max: int, begin: int, end: int) -> KeyQuery:
        """Records that may have a key and were stored between two times (ms, inclusive). Source: store.md §7.5.

        Raises:
            OSError: keys that waited cannot be entered.
        """
        self.enter()
        found: list[int] = []
        hashed = key_hash(topic, key)
        for file in reversed(self.files):
            if file.overlaps(begin, end):
                found += file.find(hashed, count_max - len(found), begin, end)
            if file.begin_timestamp < begin or len(found) >= count_max:
                break
        newest = self.files[-1] if self.files else None
        if newest is None:
            return KeyQuery([])
        return KeyQuery(sorted(found), newest.end_timestamp, newest.end_offset)


def _file_name(moment: datetime) -> str:
    return moment.strftime("%Y%m%d%H%M%S") + f"{moment.microsecond // 1000:03d}"
