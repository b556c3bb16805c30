"""Bulk comparison of the entries in queues and index files with the log. It finds the entries that are exactly right.

The caller passes the log run by run, in order. The expected entries of a run's records are created as bytes and
compared with the bytes in the files. Equal entries are stored as ranges of entry numbers. An entry outside of these
ranges is not necessarily wrong: the caller must check it. Memory: some numbers per damaged place, and one table of
slots while the chains of an index file are followed. The import needs numpy. Source: store.md §4, §7.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rmqkit.store.bulk import DispatchColumns, Ints, queue_entries
from rmqkit.store.index.file import ENTRY, HEADER, SLOT
from rmqkit.store.log.mapped_file import file_name
from rmqkit.store.log.scan import Buffer
from rmqkit.store.queues.consume_queue import ENTRY_BYTES

__all__ = ["IndexComparison", "QueueComparison", "Ranges"]

_INDEX_ENTRY = np.dtype([("hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_CHUNK_ENTRIES = 1 << 18
assert _INDEX_ENTRY.itemsize == ENTRY.size


class Ranges:
    """Ascending ranges of numbers that do not touch each other."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add a range. Ignore the range if it begins before the end of the last range."""
        assert start <= end, "a range ascends"
        if self.ends and start < self.ends[-1]:
            return
        if self.ends and start == self.ends[-1]:
            self.ends[-1] = end
        else:
            self.starts.append(start)
            self.ends.append(end)

    def add_where(self, is_member: NDArray[np.bool_], start: int) -> None:
        """Add the numbers of the true elements in an array. ``start`` is the number of its first element."""
        edges = np.flatnonzero(np.diff(is_member.astype("i1"), prepend=0, append=0)) + start
        for low, high in edges.reshape(-1, 2).tolist():
            self.add(low, high)

    def join(self, others: Ranges) -> None:
        """Add ranges that follow these ranges."""
        for start, end in zip(others.starts, others.ends, strict=True):
            self.add(start, end)

    def end_of(self, number: int) -> int:
        """Return the end of the range that contains a number, or the number itself if no range contains it."""
        i = bisect_right(self.starts, number) - 1
        return max(number, self.ends[i]) if i >= 0 else number

    def gaps(self, start: int, end: int) -> Ints:
        """Return the numbers from ``start`` up to but not including ``end`` that are in no range."""
        held = np.zeros(end - start, bool)
        for low, high in zip(self.starts, self.ends, strict=True):
            held[max(0, low - start) : max(0, high - start)] = True
        return np.flatnonzero(~held) + start


class QueueComparison:
    """The comparison of all consume queues in a store.

    Args:
        folder: ``consumequeue``.
        file_bytes: the size of its files.

    Attributes:
        ranges: the numbers of the equal entries of each queue.
    """

    def __init__(self, folder: Path, file_bytes: int, delays_ms: tuple[int, ...]) -> None:
        self._folder, self._file_bytes, self._delays_ms = folder, file_bytes, delays_ms
        self.ranges: defaultdict[Path, Ranges] = defaultdict(Ranges)

    def compare(self, arrivals: DispatchColumns) -> None:
        """Compare the entries of a run of records."""
        if not self._file_bytes:
            return
        tags_codes = arrivals.tags_codes(self._delays_ms)
        for topic, queue_id, rows in arrivals.groups():
            numbers = arrivals.queue_offsets[rows]
            folder = self._folder / topic / str(queue_id) if "/" not in topic and "\0" not in topic else None
            # Damaged heads may have any topic and number: use no path outside of the
            # folder and no invalid position.
            if folder is None or numbers.min() < 0 or numbers.max() >= 1 << 56:
                continue
            entries = queue_entries(arrivals, rows, tags_codes)
            per_file = self._file_bytes // ENTRY_BYTES
            cuts = np.flatnonzero((np.diff(numbers) != 1) | (numbers[1:] % per_file == 0)) + 1
            for first, part in zip(numbers[[0, *cuts]].tolist(), np.split(entries, cuts), strict=True):
                self._compare(folder, first, part)

    def _compare(self, folder: Path, first: int, entries: NDArray[np.void]) -> None:
        """Compare the expected entries with the entries in one file, and add the numbers of equal entries to `ranges`.
        The numbers of the expected entries are consecutive and begin with ``first``."""
        position = first * ENTRY_BYTES % self._file_bytes
        expected = entries.tobytes()
        try:
            with open(folder / file_name(first * ENTRY_BYTES - position), "rb", buffering=0) as file:
                file.seek(position)
                found = file.read(len(expected)) or b""
        except OSError:  # a missing or unreadable file is not equal; the check of single entries finds the reason
            return
        if found == expected:
            self.ranges[folder].add(first, first + len(entries))
        else:
            count = len(found) // ENTRY_BYTES
            is_equal = np.frombuffer(found, "V20", count) == entries[:count].view("V20")
            self.ranges[folder].add_where(is_equal, first)


class IndexComparison:
    """The comparison of one index file.

    Args:
        data: the file, mapped. It must have the right length.
        log_start: physical offset of the start of the log, or of the compared part of the log. Earlier entries are
            skipped.

    Attributes:
        begin_timestamp, end_timestamp, begin_offset, end_offset, slots_used, index_count: fields of the header.
            ``index_count`` is at least 1.
        entries_at: position of entry 0.
        chain_count: number of slots that have entries, set at the end of `unequal`.
        ranges: the numbers of the equal entries.
    """

    def __init__(self, data: Buffer, slot_count: int, entry_count: int, log_start: int = 0) -> None:
        self._data = data
        header = HEADER.unpack_from(data)
        self.begin_timestamp: int = header[0]
        self.end_timestamp: int = header[1]
        self.begin_offset: int = header[2]
        self.end_offset: int = header[3]
        self.slots_used: int = header[4]
        self.index_count: int = max(1, header[5])
        self.entries_at = HEADER.size + slot_count * SLOT.size
        self.chain_count = 0
        self.ranges = Ranges()
        self._slot_count = slot_count
        self._slots = np.frombuffer(data, ">i4", slot_count, HEADER.size)
        self._entries = np.frombuffer(data, _INDEX_ENTRY, min(self.index_count, entry_count), self.entries_at)
        self._newest: NDArray[np.int32] = np.zeros(0, "i4")
        offsets = self._entries["physical_offset"]
        self._next = max(1, bisect_left(range(len(offsets)), log_start, 1, key=offsets.__getitem__))

    def entry_offset(self, number: int) -> int:
        """Return the physical offset of an entry."""
        return int(self._entries["physical_offset"][number])

    @property
    def has_more(self) -> bool:
        """Return True if there is an entry at the next free number of the header."""
        at = self.entries_at + self.index_count * _INDEX_ENTRY.itemsize
        return any(memoryview(self._data)[at : at + _INDEX_ENTRY.itemsize])

    def compare(self, arrivals: DispatchColumns, keys: tuple[Ints, Ints]) -> None:
        """Compare the entries of a run of records. Chains are not compared yet.
        ``keys``: the keys of the run, including its tags."""
        if self._next >= len(self._entries):
            return
        rows, hashes = keys
        offsets = arrivals.offsets
        window = self._entries[self._next : self._next + len(rows) + _CHUNK_ENTRIES // 64]
        at = window["physical_offset"].astype("i8")
        inside = np.flatnonzero((at >= offsets[0]) & (at <= offsets[-1]))
        if not len(inside):
            return
        at, window = at[: inside[-1] + 1], window[: inside[-1] + 1]
        row = np.minimum(np.searchsorted(offsets, at), len(offsets) - 1)
        is_equal = offsets[row] == at
        expected = np.maximum(0, (arrivals.store_timestamps - self.begin_timestamp) // 1000)
        is_equal &= window["seconds"] == expected[row]
        if not (len(row) == len(rows) and (row == rows).all() and (window["hash"] == hashes).all()):
            is_equal &= np.isin((row << 32) + window["hash"], (rows << 32) + hashes)
        self.ranges.add_where(is_equal, self._next)
        self._next += len(window)
        if self._next == len(self._entries):
            self.release()

    def release(self) -> None:
        """Release the pages of the file. A later read loads them again."""
        if isinstance(self._data, mmap.mmap):
            self._data.madvise(mmap.MADV_DONTNEED)

    def unequal(self) -> Iterator[tuple[int, tuple[int, int, int, int], int]]:
        """Yield number and fields of every entry that is not equal, and its expected previous entry."""
        newest = self._newest = np.zeros(self._slot_count, "i4")
        for start in range(1, len(self._entries), _CHUNK_ENTRIES):
            chunk = self._entries[start : start + _CHUNK_ENTRIES]
            slots = chunk["hash"].astype("i8") % self._slot_count
            order = np.argsort(slots, kind="stable")
            in_order = slots[order]
            is_first = np.diff(in_order, prepend=-1) != 0
            previous = np.empty(len(chunk), "i4")
            previous[order] = np.where(is_first, newest[in_order], np.roll(order, 1) + start)
            newest[in_order] = order + start  # for a repeated slot the last number stays
            is_odd = previous != chunk["previous"]
            is_odd[self.ranges.gaps(start, start + len(chunk)) - start] = True
            for i in np.flatnonzero(is_odd).tolist():
                yield start + i, chunk[i].item(), int(previous[i])
        self.chain_count = int(np.count_nonzero(newest))

    def unequal_slots(self) -> Iterator[tuple[int, int, int]]:
        """Yield the slots that do not contain the newest entry of their chain: the slot, the newest entry and the
        actual value.
        """
        for slot in np.flatnonzero(self._slots != self._newest).tolist():
            yield slot, int(self._newest[slot]), int(self._slots[slot])
