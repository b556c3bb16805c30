"""One file of the index: a hash table on disk, and the hashes of keys (``IndexFile``).

::

    header 40 bytes | slots × i32 | entries × 20 bytes

    header  i64 beginTimestamp | i64 endTimestamp | i64 beginPhyOffset | i64 endPhyOffset | i32 hashSlotCount |
            i32 indexCount
    entry   i32 keyHash | i64 phyOffset | i32 timeDiff (seconds after beginTimestamp) | i32 prevIndex

A slot holds the number of its newest entry. An entry holds the number of the previous entry in its chain; 0 ends the
chain. ``indexCount`` is the next free number and starts at 1, so a full file has one entry less than its capacity. The
keys of a message are its UNIQ_KEY, every word of KEYS, and ``T#`` + TAGS (5.4). The hash is the hash of ``topic#key``.
Only hashes are compared: the caller must check the key in the record.

New keys stay in memory until `IndexFile.write`.

Entries and header are written with ``pwrite``. Slots are written through a mapping, because the three keys of a message
would be three writes of four bytes. The blocks of header and slots are allocated before they are mapped, so that a full
disk is an error, not a signal. A process that reads beside a running broker finds complete chains: entries are written
first, then slots, and the header last. Use this module only in the owner thread of the store. Not handled here: the
list of files, and when keys are entered (`message_index`).
Source: store.md §7.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rmqkit.protocol.core import index_entries, set_slots
from rmqkit.protocol.properties import Keys, find_keys, java_hash
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.system import disk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["ENTRY", "HEADER", "SLOT", "IndexFile", "key_hash", "key_hashes", "keys_of"]

HEADER = struct.Struct(">qqqqii")
SLOT = struct.Struct(">i")
ENTRY = struct.Struct(">iqii")
_I32_MAX = 0x7FFFFFFF
_UNIQUE_KEY_HEAD = 28
assert (HEADER.size, ENTRY.size) == (40, 20)

_pack_entry = ENTRY.pack
_unpack_slot, _pack_slot_into = SLOT.unpack_from, SLOT.pack_into
_head_hash = functools.lru_cache(maxsize=1024)(java_hash)


def key_hash(topic: str, key: str) -> int:
    """Return the hash of a key in index files: ``abs`` of Java's hash of ``topic#key``. Source: store.md §7.2."""
    if not key.isascii():
        h = java_hash(f"{topic}#{key}")
    elif len(key) == 32:  # Java hashes from left to right, and the unique keys of a producer differ only at their end
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


def keys_of(properties: bytes) -> set[str]:
    """Return the keys of a record: its UNIQ_KEY, the words of its KEYS, ``T#`` and its TAGS."""
    unique_key, words, tags = [value.decode("utf-8", "replace") for value in find_keys(properties)]
    return {unique_key, *words.split(" "), *([f"T#{tags}"] if tags else [])} - {""}


def key_hashes(topic: str, keys: Keys, *, with_tags: bool) -> list[int]:
    """Return the hashes of a record's keys, in the order of its entries. Source: store.md §7.2.
    ``with_tags``: whether TAGS is a key, too, as in brokers from 5.4 on."""
    unique_key, words, tags = keys
    hashes: list[int] = []
    if unique_key:
        hashes.append(key_hash(topic, unique_key.decode("utf-8", "replace")))
    if words:
        hashes += [key_hash(topic, word) for word in words.decode("utf-8", "replace").split(" ") if word]
    if with_tags and tags:
        hashes.append(_tags_hash(topic, tags))
    return hashes


class IndexFile:
    """One file of the index.
    ``begin_timestamp``, ``end_timestamp``, ``begin_offset``, ``end_offset``, ``slots_used``, ``index_count``: the
    fields of the header."""

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
        self._slots: disk.Mapped | None = None
        self._is_header_due = False

    @classmethod
    def create(cls, path: Path, slot_count: int, entry_count: int) -> IndexFile:
        """Create a file. Raises OSError: the file cannot be created."""
        file_bytes = HEADER.size + slot_count * SLOT.size + entry_count * ENTRY.size
        file = MappedFile.create(path, 0, file_bytes)
        file.wrote = file_bytes
        return cls(file, slot_count, entry_count)

    @property
    def is_full(self) -> bool:
        """Return True if no further entry fits."""
        return self.index_count >= self._entry_count

    def begin_after(self, timestamp: int, offset: int) -> None:
        """Set the start in the header to the end of the previous file."""
        self.begin_timestamp = self.end_timestamp = timestamp
        self.begin_offset = self.end_offset = offset
        self._write_header()

    def put(self, hashes: list[int], physical_offset: int, store_timestamp: int) -> int:
        """Add the keys of one record, which stay in memory until `write`. Return the number of keys that fit."""
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
            # A number greater than the entry's own number is damage, and would create a circular chain.
            if not 0 < previous <= number:
                previous = 0
                self.slots_used += 1
            entries += _pack_entry(hashed, physical_offset, seconds, previous)
            newest[slot] = number
            if number == 1:  # the first entry of a file changes the start in the header
                self.begin_offset, self.begin_timestamp, seconds = physical_offset, store_timestamp, 0
            number += 1
        assert number <= self._entry_count, "numbers begin at 1: a full file has one entry less than its capacity"
        self.index_count = number
        self.end_offset, self.end_timestamp = physical_offset, store_timestamp
        return count

    def put_run(self, hashes: Ints, physical_offsets: Ints, store_timestamps: Ints) -> int:
        """Add many keys with numpy, like `put`. Write everything except the header. Return the number of keys that fit.
        Raises OSError: the write failed."""
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
        order = np.argsort((slots << count.bit_length()) + np.arange(count))  # a stable sort, four times as fast
        in_order = slots[order]
        is_first = np.diff(in_order, prepend=-1) != 0
        known = table[in_order].astype("i4")
        known[(known < 0) | (known > numbers[order])] = 0
        used = int(np.count_nonzero(is_first & (known == 0)))
        seconds = self._seconds(store_timestamps[:count], self.begin_timestamp)
        if first == 1:  # the first entry of a file changes the start in the header
            seconds[1:] = self._seconds(store_timestamps[1:count], int(store_timestamps[0]))
        entries = np.empty(count, [("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
        entries["hash"], entries["offset"], entries["seconds"] = hashes[:count], physical_offsets[:count], seconds
        entries["previous"][order] = np.where(is_first, known, np.roll(numbers[order], 1))
        self.file.write(self._entries_at + first * ENTRY.size, entries.tobytes())
        assert len(in_order) == count, "every key has a slot"
        table[in_order] = numbers[order]  # for a repeated slot the last number stays
        # Update the counts after the write: a failed write is repeated, and would count its slots twice.
        if first == 1:
            self.begin_offset, self.begin_timestamp = int(physical_offsets[0]), int(store_timestamps[0])
        self.slots_used += used
        self._is_header_due = True
        self.index_count += count
        self.end_offset, self.end_timestamp = int(physical_offsets[count - 1]), int(store_timestamps[count - 1])
        return count

    def put_hashed(self, rows: bytes, first_timestamp: int, last_timestamp: int) -> bool:
        """Add the keys of many records with the compiled core, like `put`. Write everything except the header. Return
        False, with nothing done, if not all keys fit.
        ``rows``: the input of `index_entries`. ``first_timestamp``, ``last_timestamp``: storeTimestamp of the first and
        the last record that has a key.
        Raises OSError: the write failed."""
        if self._entries:
            self.write()
        first, table = self.index_count, self._mapped_slots()
        made = index_entries(table, self._slot_count, first, self._entry_count, self.begin_timestamp, rows)
        if made is None:
            return False
        entries, changes, used = made
        assert entries, "the rows have a key"
        self.file.write(self._entries_at + first * ENTRY.size, entries)
        set_slots(table, self._slot_count, changes)
        if first == 1:  # the first entry of a file changes the start in the header
            self.begin_offset, self.begin_timestamp = ENTRY.unpack_from(entries)[1], first_timestamp
        self.end_offset = ENTRY.unpack_from(entries, len(entries) - ENTRY.size)[1]
        self.end_timestamp = last_timestamp
        self.slots_used += used
        self.index_count += len(entries) // ENTRY.size
        self._is_header_due = True
        return True

    @staticmethod
    def _seconds(store_timestamps: Ints, begin: int) -> Ints:
        seconds: Ints = (store_timestamps - begin) // 1000 if begin > 0 else store_timestamps * 0
        return seconds.clip(0, _I32_MAX)

    def _mapped_slots(self) -> disk.Mapped:
        """Return header and slots as a mapping for changes in place.
        Their blocks are allocated first: with a full disk, a write through a mapping can only fail with a signal.
        Raises OSError: the disk has no space for the blocks."""
        if self._slots is None:
            disk.reserve(self.file.fd, self._entries_at)
            self._slots = disk.map_file(self.file.fd, self._entries_at, writable=True)
        return self._slots

    def forget(self) -> int:
        """Drop the keys that are not written. Return the physical offset of the last written record."""
        self.release()
        self._entries = bytearray()
        self._newest.clear()
        self._is_header_due = False
        header = HEADER.unpack(self.file.read(0, HEADER.size))
        self.begin_timestamp, self.end_timestamp, self.begin_offset, self.end_offset, self.slots_used = header[:5]
        self.index_count = max(1, header[5])
        return self.end_offset

    def release(self) -> None:
        """Unmap the slots. Call this if no key will be added soon."""
        self._slots = None

    def write(self) -> None:
        """Write the keys that are in memory. Entries are written first and the header last, so that every chain is
        complete.
        Raises OSError: the write failed; the keys stay in memory for another attempt."""
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
        bounds = self.begin_timestamp, self.end_timestamp, self.begin_offset, self.end_offset
        self.file.write(0, HEADER.pack(*bounds, self.slots_used, self.index_count))

    def header_faults(self, stored_at: Callable[[int], int | None]) -> list[str]:
        """Compare the header with the first and the last entry and their records. Return the differences.
        If these records exist, the header is corrected in memory, for `write`. A damaged entry count is replaced by the
        number of the first empty entry.
        ``stored_at``: returns the storeTimestamp of the record at a physical offset, or None if there is no record."""
        count = self.index_count
        if not 1 < count <= self._entry_count or not self._entry(count - 1) or self._entry(count):
            count = bisect_left(range(self._entry_count), True, 1, key=lambda number: not self._entry(number))
        first, last = self._entry(1), self._entry(count - 1) if count > 1 else None
        if not first or not last:
            return [f"indexCount is {self.index_count}, and there is no entry"]
        begun, ended = stored_at(first[1]), stored_at(last[1])
        right = [
            ("beginTimestamp", self.begin_timestamp, begun),
            ("endTimestamp", self.end_timestamp, ended),
            ("beginPhyOffset", self.begin_offset, first[1]),
            ("endPhyOffset", self.end_offset, last[1]),
            ("indexCount", self.index_count, count),
        ]
        faults = [f"{name} is {had}, not {one}" for name, had, one in right if one not in (None, had)]
        if faults and begun is not None:
            self.begin_timestamp, self.begin_offset = begun, first[1]
        if faults and ended is not None:
            self.end_timestamp, self.end_offset, self.index_count = ended, last[1], count
        self._is_header_due = self._is_header_due or bool(faults)
        return faults

    def _entry(self, number: int) -> tuple[int, int, int, int] | None:
        """Return an entry of the file, or None if the entry consists of zeros or is after the last entry."""
        if number >= self._entry_count:
            return None
        entry: tuple[int, int, int, int] = ENTRY.unpack(
            self.file.read(self._entries_at + number * ENTRY.size, ENTRY.size)
        )
        return entry if any(entry) else None

    def overlaps(self, begin: int, end: int) -> bool:
        """Return True if the file may have messages stored between two times."""
        return begin <= self.end_timestamp and end >= self.begin_timestamp

    def find(
        self, hashed: int, count_max: int, begin: int, end: int, accept: Callable[[int], bool] | None = None
    ) -> list[int]:
        """Return the physical offsets of the records that have a key with the hash and were stored between two times,
        newest first.
        ``accept``: returns True if the record at an offset has the key; other records are omitted."""
        found: list[int] = []
        view = self.file.view
        number = SLOT.unpack_from(view, HEADER.size + hashed % self._slot_count * 4)[0]
        while 0 < number < self.index_count and len(found) < count_max:
            entry = ENTRY.unpack_from(view, self._entries_at + number * ENTRY.size)
            entry_hash, physical_offset, seconds, previous = entry
            timestamp = self.begin_timestamp + seconds * 1000
            if seconds < 0 or timestamp < begin:
                break
            if entry_hash == hashed and timestamp <= end and (accept is None or accept(physical_offset)):
                found.append(physical_offset)
            if previous >= number:  # chains go backwards; any other number is damage
                break
            number = previous
        return found
