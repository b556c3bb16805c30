"""Holding queues, extension units and index files against the log they are derived from, for `fsck`.

=================  ==================================================================================================
part               what has to hold
=================  ==================================================================================================
queue entry        points at a record of that topic and queue; its size, queue offset and tags code are the record's
queue              has an entry for every record of the log that belongs to it
extension unit     ``size`` is 20 + bitMapSize; tags code and store time behind an address are the record's
index file         the header's counts; every entry's previous one, and every slot, as the entries in their order make
                   them; the hash is that of a key of the record
=================  ==================================================================================================

Entries of records that retention removed are held against nothing. Blank entries may fill the start of a queue.
While a broker works (``report.is_live``) a queue may lack the newest records and a slot may be ahead of its header.
Not handled here: keys that the index lacks (an index is cut by a crash, store.md §7.4). Source: store.md §4–§7.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from rmqkit.errors import RecordCorrupt, StoreMismatch
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record
from rmqkit.store.batch_queue import BATCH_ENTRY
from rmqkit.store.consume_queue import BLANK_ENTRY, ENTRY
from rmqkit.store.consume_queues import topic_fault
from rmqkit.store.delay_levels import parse_delay_levels
from rmqkit.store.dispatcher import arrival_of
from rmqkit.store.findings import Kind, Report, common_length, entries_of, files_in_order
from rmqkit.store.index_file import ENTRY as INDEX_ENTRY
from rmqkit.store.index_file import HEADER, SLOT, key_hashes
from rmqkit.store.log_view import LogView, mapped
from rmqkit.store.queue_ext import ADDRESS_BASE, FILE_FULL, FREE_BYTES, UNIT, is_address
from rmqkit.store.scan import Buffer
from rmqkit.store.settings import StoreSettings

__all__ = ["DerivedFiles"]

_SLOTS_BYTES = 1024 * SLOT.size


class _Place(Struct, frozen=True, gc=False):
    """Where an entry lies, and the queue or index it is an entry of."""

    path: Path
    position: int
    folder: Path


class _ExtFile(Struct):
    """One extension file; ``end`` is where its units end."""

    path: Path
    start: int
    buffer: Buffer
    end: int


class _QueueEnd(Struct):
    """Queue offset one past the last entry of a queue, and where that entry ends."""

    offset: int
    path: Path
    position: int


class DerivedFiles:
    """Everything but the log of one store.

    Args:
        settings: delay levels and index sizes; the sizes of queue files too, when ``sizes_are_set``.
        advance: told how many bytes were read.

    Raises:
        StoreMismatch: the sizes of the index are not the default ones and were not said.
    """

    def __init__(
        self,
        root: Path,
        log: LogView,
        settings: StoreSettings,
        report: Report,
        *,
        sizes_are_set: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._root, self._log, self._settings, self._report = root, log, settings, report
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._sizes_are_set = sizes_are_set
        self._advance = advance
        self._ends: dict[tuple[str, str, int], _QueueEnd] = {}
        self._ext_bytes = self._file_bytes("consumequeue_ext", settings.consume_queue_ext_file_bytes)
        self._ext: list[_ExtFile] = []
        self._index_paths = [path for path in entries_of(root / "index") if path.name.isdecimal()]
        self._index_bytes = self._expected_index_bytes()
        self._keys_at = functools.lru_cache(maxsize=64)(self._read_keys)

    def check(self, log_ends: Mapping[tuple[str, int], int]) -> None:
        """Look at all of them.

        Args:
            log_ends: queue offset one past the last message of each queue, as the log has it.
        """
        set_bytes = self._settings.consume_queue_file_bytes
        self._queues("consumequeue", ENTRY, self._simple_entry, set_bytes)
        set_bytes = self._settings.batch_consume_queue_file_bytes
        self._queues("batchconsumequeue", BATCH_ENTRY, self._batch_entry, set_bytes)
        if not self._report.is_live:
            self._queue_ends(log_ends)
        self._index_files()

    # ---- queues

    def _file_bytes(self, tree: str, set_bytes: int) -> int:
        return set_bytes if self._sizes_are_set else common_length([self._root / tree])

    def _queue_folders(self, tree: str) -> list[Path]:
        folders = [queue for topic in entries_of(self._root / tree) for queue in entries_of(topic)]
        for folder in folders:
            if not folder.is_dir() or not folder.name.isdecimal():
                self._report.add(Kind.FILE_NAME, folder, 0, "a directory named by a queue id", folder.name)
        return [folder for folder in folders if folder.is_dir() and folder.name.isdecimal()]

    def _read(self, path: Path) -> bytes:
        data = path.read_bytes()
        self._advance(len(data))
        return data

    def _queues(
        self,
        tree: str,
        layout: struct.Struct,
        check_entry: Callable[[_Place, int, tuple[Any, ...]], int],
        set_bytes: int,
    ) -> None:
        """Walk every queue of one kind, up to the zeros at the end of its last file."""
        entry_bytes = layout.size
        file_bytes = self._file_bytes(tree, -(-set_bytes // entry_bytes) * entry_bytes)
        for folder in self._queue_folders(tree):
            self._open_ext(folder)
            files = list(files_in_order([folder], file_bytes, self._report))
            is_filler, end = True, _QueueEnd(0, folder, 0)
            for path, start in files:
                data = self._read(path)
                used = len(data.rstrip(b"\0")) if path is files[-1][0] else len(data)
                end.path, end.position = path, 0
                for position in range(0, min(used, len(data) - entry_bytes + 1), entry_bytes):
                    self._report.checked["queue entries"] += 1
                    index = (start + position) // entry_bytes
                    is_filler = is_filler and data.startswith(BLANK_ENTRY, position)
                    end.offset, end.position = index + 1, position + entry_bytes
                    if not is_filler:
                        entry = layout.unpack_from(data, position)
                        end.offset = check_entry(_Place(path, position, folder), index, entry)
            self._ends[tree, folder.parent.name, int(folder.name)] = end

    def _record(self, physical_offset: int) -> Record | RecordCorrupt | None:
        """The record at an offset, or why there is none; None when it was removed, or came after the log's walk."""
        if 0 <= physical_offset < self._log.min_offset:
            return None
        if physical_offset >= self._log.end:
            newer = RecordCorrupt(physical_offset, f"the log ends at {self._log.end}")
            return None if self._report.is_live else newer
        try:
            return self._log.record_at(physical_offset)
        except RecordCorrupt as error:
            return error

    def _pointed(self, place: _Place, physical_offset: int, size: int) -> tuple[Record, int] | None:
        """The record of an entry and its number in the queue; None without one, which is noted if it should exist."""
        topic, queue_id = place.folder.parent.name, int(place.folder.name)
        record = self._record(physical_offset)
        if isinstance(record, RecordCorrupt):
            found = f"offset {physical_offset}, size {size}: {record.reason}"
            self._report.add(Kind.QUEUE_ENTRY, place.path, place.position, f"a record of {topic}-{queue_id}", found)
        if not isinstance(record, Record):
            return None
        number = _number_in(record, topic, queue_id)
        if number is None or record.size != size:
            found = f"offset {physical_offset}, size {size}: {record.topic}-{record.queue_id} of {record.size} bytes"
            self._report.add(Kind.QUEUE_ENTRY, place.path, place.position, f"a record of {topic}-{queue_id}", found)
            return None
        return record, number

    def _compare(self, place: _Place, what: str, expected: object, found: object, kind: Kind) -> None:
        if expected != found:
            self._report.add(kind, place.path, place.position, f"{what} {expected}", found)

    def _simple_entry(self, place: _Place, index: int, entry: tuple[Any, ...]) -> int:
        """Check an entry of a consume queue; returns the queue offset after it."""
        physical_offset, size, stored = entry
        pointed = self._pointed(place, physical_offset, size)
        if pointed is not None:
            record, number = pointed
            tags_code = arrival_of(record, self._delays_ms).tags_code
            self._compare(place, "queue offset", index, number, Kind.QUEUE_ENTRY)
            if is_address(stored):
                self._ext_unit_of(place, stored, (tags_code, record.store_timestamp))
            else:
                self._compare(place, "tags code", tags_code, stored, Kind.QUEUE_ENTRY)
        return index + 1

    def _batch_entry(self, place: _Place, index: int, entry: tuple[Any, ...]) -> int:
        """Check an entry of a batch queue; returns the queue offset after it."""
        base, count = entry[4], entry[5]
        pointed = self._pointed(place, entry[0], entry[1])
        if pointed is not None:
            record, number = pointed
            arrival = arrival_of(record, self._delays_ms)
            expected = (arrival.tags_code, record.store_timestamp, number, arrival.batch_count)
            what = "tagsCode, storeTimestamp, msgBaseOffset, batchSize"
            self._compare(place, what, expected, entry[2:6], Kind.QUEUE_ENTRY)
        return int(base + count)

    def _queue_ends(self, log_ends: Mapping[tuple[str, int], int]) -> None:
        """Note the queues that lack messages of the log."""
        batch_topics = {topic for tree, topic, _ in self._ends if tree == "batchconsumequeue"}
        for (topic, queue_id), expected in log_ends.items():
            if topic_fault(topic, queue_id):
                continue
            tree = "batchconsumequeue" if topic in batch_topics else "consumequeue"
            missing = _QueueEnd(0, self._root / tree / topic / str(queue_id), 0)
            end = self._ends.get((tree, topic, queue_id), missing)
            if end.offset < expected:
                found = f"an end at {end.offset}"
                self._report.add(Kind.QUEUE_END, end.path, end.position, f"entries up to {expected}", found)

    # ---- extension units

    def _open_ext(self, folder: Path) -> None:
        """Walk all units of a queue, and keep the files for the entries that point there."""
        ext_folder = self._root.joinpath("consumequeue_ext", *folder.parts[-2:])
        self._ext = []
        for path, start in files_in_order([ext_folder], self._ext_bytes, self._report):
            buffer = mapped(path)
            self._ext.append(_ExtFile(path, start, buffer, self._units_end(path, buffer)))
            self._advance(len(buffer))

    def _units_end(self, path: Path, buffer: Buffer) -> int:
        """Where the units of a file end; its length when it is damaged, so that what follows stays in reach."""
        position = 0
        while position + UNIT.size + FREE_BYTES <= len(buffer):
            size, _, _, bitmap_bytes = UNIT.unpack_from(buffer, position)
            if size in (FILE_FULL, 0):
                break
            self._report.checked["extension units"] += 1
            if size != UNIT.size + bitmap_bytes or bitmap_bytes < 0:
                expected = f"size {UNIT.size} + bitMapSize {bitmap_bytes}"
                self._report.add(Kind.EXT_UNIT, path, position, expected, size)
                return len(buffer)
            position += size
        return position

    def _ext_unit_of(self, place: _Place, address: int, expected: tuple[int, int]) -> None:
        """Hold the unit behind an address against what the record says; noted with the unit's own place."""
        at = address + ADDRESS_BASE
        file = next((file for file in reversed(self._ext) if file.start <= at), None)
        if file is None or at - file.start + UNIT.size > file.end:
            self._compare(place, "an extension unit at", at, "none", Kind.QUEUE_ENTRY)
            return
        unit = UNIT.unpack_from(file.buffer, at - file.start)
        unit_place = _Place(file.path, at - file.start, place.folder)
        self._compare(unit_place, "tagsCode, msgStoreTime", expected, unit[1:3], Kind.EXT_UNIT)

    # ---- index

    def _expected_index_bytes(self) -> int:
        slots, entries = self._settings.hash_slot_count, self._settings.index_entry_count
        file_bytes = HEADER.size + slots * SLOT.size + entries * INDEX_ENTRY.size
        lengths = [path.stat().st_size for path in self._index_paths]
        if lengths and file_bytes not in lengths and not self._sizes_are_set:
            raise StoreMismatch(
                f"{self._index_paths[0]} has {lengths[0]} bytes and not {file_bytes}: maxHashSlotNum and maxIndexNum "
                "are not the default ones, give the broker.conf of the store"
            )
        return file_bytes

    def _index_files(self) -> None:
        for path in self._index_paths:
            data = mapped(path)
            self._report.checked["files"] += 1
            if len(data) == self._index_bytes:
                self._index_file(path, data)
            else:
                sizes = (
                    f"maxHashSlotNum {self._settings.hash_slot_count}, maxIndexNum {self._settings.index_entry_count}"
                )
                expected = f"{self._index_bytes} bytes ({sizes})"
                position = min(len(data), self._index_bytes)
                self._report.add(Kind.FILE_SIZE, path, position, expected, f"{len(data)} bytes")
            self._advance(len(data))

    def _index_file(self, path: Path, data: Buffer) -> None:
        slots, entries = self._settings.hash_slot_count, self._settings.index_entry_count
        header = HEADER.unpack_from(data)
        begin_timestamp, slots_used, count = header[0], header[4], max(1, header[5])
        if not count <= entries:
            self._report.add(Kind.INDEX_HEADER, path, 36, f"an indexCount from 1 to {entries}", count)
            return
        entries_at = HEADER.size + slots * SLOT.size
        newest: dict[int, int] = {}
        for number in range(1, count):
            place = _Place(path, entries_at + number * INDEX_ENTRY.size, path.parent)
            hashed, physical_offset, seconds, previous = INDEX_ENTRY.unpack_from(data, place.position)
            self._report.checked["index entries"] += 1
            self._compare(place, "previous entry", newest.get(hashed % slots, 0), previous, Kind.INDEX_CHAIN)
            newest[hashed % slots] = number
            self._index_entry(place, hashed, physical_offset, begin_timestamp if number > 1 else None, seconds)
        if not self._report.is_live:
            self._slots(path, data, newest, slots_used)

    def _slots(self, path: Path, data: Buffer, newest: dict[int, int], slots_used: int) -> None:
        """Hold the slots, most of which are empty, against the newest entry of each chain."""
        end = HEADER.size + self._settings.hash_slot_count * SLOT.size
        for start in range(HEADER.size, end, _SLOTS_BYTES):
            chunk = data[start : min(start + _SLOTS_BYTES, end)]
            first = (start - HEADER.size) // SLOT.size
            if chunk.count(0) == len(chunk) and newest.keys().isdisjoint(range(first, first + len(chunk) // 4)):
                continue
            for slot, (number,) in enumerate(SLOT.iter_unpack(chunk), first):
                if number != newest.get(slot, 0):
                    position = HEADER.size + slot * SLOT.size
                    self._report.add(Kind.INDEX_CHAIN, path, position, f"newest entry {newest.get(slot, 0)}", number)
        if slots_used != len(newest):
            self._report.add(Kind.INDEX_HEADER, path, 32, f"hashSlotCount {len(newest)}", slots_used)

    def _index_entry(
        self, place: _Place, hashed: int, physical_offset: int, begin_timestamp: int | None, seconds: int
    ) -> None:
        """Hold an entry against its record; the time of entry 1 is counted from the file before and left out."""
        keys = self._keys_at(physical_offset)
        if keys is None:
            return
        if isinstance(keys, RecordCorrupt):
            self._compare(place, "a record at", physical_offset, keys.reason, Kind.INDEX_ENTRY)
            return
        hashes, store_timestamp = keys
        if hashed not in hashes:
            self._compare(place, f"the hash of a key at {physical_offset}, one of", hashes, hashed, Kind.INDEX_ENTRY)
        if begin_timestamp is not None:
            expected = max(0, (store_timestamp - begin_timestamp) // 1000)
            self._compare(place, "timeDiff", expected, seconds, Kind.INDEX_ENTRY)

    def _read_keys(self, physical_offset: int) -> tuple[list[int], int] | RecordCorrupt | None:
        """Key hashes and storeTimestamp of a record, or what `_record` says instead."""
        record = self._record(physical_offset)
        return (
            (key_hashes(record.topic, record.properties, with_tags=True), record.store_timestamp)
            if isinstance(record, Record)
            else record
        )


def _number_in(record: Record, topic: str, queue_id: int) -> int | None:
    """The queue offset of a record in a queue, its own or a light one; None when it is in another."""
    if (record.topic, record.queue_id) == (topic, queue_id):
        return record.queue_offset
    names = (find_property(record.properties, b"INNER_MULTI_DISPATCH") or b"").decode("utf-8", "replace").split(",")
    numbers = (find_property(record.properties, b"INNER_MULTI_QUEUE_OFFSET") or b"").split(b",")
    if queue_id != 0 or topic not in names or len(numbers) != len(names):
        return None
    number = numbers[names.index(topic)]
    return int(number) if number.isdigit() else None
