"""Comparison of queues, extension units and index files with the log, for `verify`.

=================  ==================================================================================================
part               rule
=================  ==================================================================================================
queue entry        points to a record of its topic and queue; its size, queue offset and tag code match the record
queue              has an entry for every record of the log that belongs to it
extension unit     ``size`` is 20 + bitMapSize; tag code and store time at an address match the record
index file         the header's counts are right, an older file is full, and its times and offsets match the first
                   and the last entry; the previous entry of every entry, and every slot, follow from the order of the
                   entries;
                   every hash is the hash of a key of the record
=================  ==================================================================================================

`DerivedFiles.compare` accepts the log run by run and compares all entries of a run's records in one step
(`bulk_compare`). `DerivedFiles.check` then scans queues and index files, and checks the entries that are not equal one
by one. This is slow, but finds the fault. Extension and batch entries are always checked one by one. Parts of a log can
be compared separately. Their `Equal` results are then joined. Every queue and index file can be checked separately.

Entries of records that retention deleted are not compared. Blank entries may fill the start of a queue. If the log has
fillers of a repair, which replace lost records (`filler`), blank entries may be anywhere in a queue.
While a broker runs (``report.is_live``), a queue may lack the newest records and a slot may be newer than the header. A
killed broker (``report.is_unclean``) held up to `HELD_BYTES_MAX` bytes of entries of a consume queue in memory, all for
the newest file of the queue. Its next start dispatches their records again.
Not handled here: keys that an index file lacks (a crash cuts an index, store.md §7.4). Source: store.md §4–§7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from rmqkit.errors import RecordCorrupt, StoreMismatch
from rmqkit.protocol.properties import find_keys
from rmqkit.protocol.record import Record
from rmqkit.store.dispatcher import request_of
from rmqkit.store.index.file import ENTRY as INDEX_ENTRY
from rmqkit.store.index.file import HEADER, SLOT, key_hashes
from rmqkit.store.index.index import full_files, missing_files
from rmqkit.store.light import light_numbers
from rmqkit.store.log.scan import Buffer
from rmqkit.store.log.view import LogView, mapped
from rmqkit.store.offline.bulk_compare import IndexComparison, QueueComparison, Ranges
from rmqkit.store.offline.findings import Kind, Report, common_length, entries_of, files_in_order
from rmqkit.store.queue_recovery import configured_topics
from rmqkit.store.queues.base import BLANK_SIZE
from rmqkit.store.queues.batch_queue import BATCH_ENTRY
from rmqkit.store.queues.consume_queue import BLANK_ENTRY, ENTRY, HELD_BYTES_MAX
from rmqkit.store.queues.queue_ext import ADDRESS_BASE, FILE_FULL, FREE_BYTES, UNIT, is_address
from rmqkit.store.queues.table import topic_fault, whole
from rmqkit.store.settings import StoreSettings, parse_delay_levels

if TYPE_CHECKING:
    from rmqkit.store.bulk import DispatchColumns

__all__ = ["DerivedFiles", "Equal", "FileSizes", "LogSpan", "QueueEnd", "index_bytes", "light_queues"]

_QUEUE, _BATCH, _EXT = "consumequeue", "batchconsumequeue", "consumequeue_ext"


class _Place(Struct, frozen=True, gc=False):
    """The place of an entry, and the directory of the queue or index that has the entry."""

    path: Path
    position: int
    folder: Path


class _ExtFile(Struct):
    """An extension file; ``end`` is the end of its units."""

    path: Path
    start: int
    buffer: Buffer
    end: int


class QueueEnd(Struct):
    """The queue offset one past the last entry of a queue, and the position of the end of this entry. ``begin``: offset
    of the first entry."""

    offset: int
    path: Path
    position: int
    begin: int = -1


class LogSpan(Struct):
    """The numbers of a queue's messages in the log: the first number, and one past the last number.
    ``restart_at``: physical offset at which numbers began again although no note says that the topic was deleted, else
    -1."""

    begin: int
    end: int
    restart_at: int = -1


class _IndexSpan(Struct):
    """An index file of the right length, and the range of physical offsets in its first and last entry and its header.
    ``comparison``: created for the first run of records in the range, so that the file is mapped only if necessary."""

    path: Path
    low: int
    high: int
    comparison: IndexComparison | None = None


class Equal(Struct):
    """The equal entries, of consume queues by their directory and of index files by their path."""

    queues: dict[Path, Ranges] = field(default_factory=dict)
    index: dict[Path, Ranges] = field(default_factory=dict)

    def join(self, other: Equal) -> None:
        """Add the equal entries of a later part of the log."""
        for mine, theirs in ((self.queues, other.queues), (self.index, other.index)):
            for path, ranges in theirs.items():
                (mine.get(path) or mine.setdefault(path, Ranges())).join(ranges)


class FileSizes(Struct, frozen=True):
    """Size of the files of each kind, in bytes."""

    queue: int
    batch: int
    ext: int
    index: int

    @classmethod
    def of(cls, root: Path, settings: StoreSettings, *, are_set: bool) -> FileSizes:
        """Return the file sizes in the settings if the settings belong to the store, otherwise the most common sizes.

        Raises:
            StoreMismatch: the sizes of the index are not the default sizes and were not set.
        """
        index = index_bytes(root, settings, is_set=are_set)
        if not are_set:
            queue, batch, ext = (common_length([root / tree]) for tree in (_QUEUE, _BATCH, _EXT))
            return cls(queue, batch, ext, index)
        queue = whole(settings.consume_queue_file_bytes, ENTRY.size)
        batch = whole(settings.batch_consume_queue_file_bytes, BATCH_ENTRY.size)
        return cls(queue, batch, settings.consume_queue_ext_file_bytes, index)


class DerivedFiles:
    """All files of one store except its log.

    Args:
        settings: delay levels and index sizes.
        advance: called with the number of bytes that were read.
        compared_from: physical offset from which the log is compared; None for the start of the log.

    Attributes:
        ends: the ends of the checked queues, by tree, topic and queue id.
    """

    def __init__(
        self,
        root: Path,
        log: LogView,
        settings: StoreSettings,
        report: Report,
        sizes: FileSizes,
        *,
        advance: Callable[[int], None] = lambda count: None,
        compared_from: int | None = None,
    ) -> None:
        self._root, self._log, self._settings, self._report = root, log, settings, report
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._sizes, self._advance = sizes, advance
        self._start = log.min_offset if compared_from is None else compared_from
        self._ext: list[_ExtFile] = []
        self._read_last: tuple[int, tuple[list[int], int] | RecordCorrupt | None] = -1, None
        self._queues = QueueComparison(root / _QUEUE, sizes.queue, self._delays_ms)
        self._index: list[_IndexSpan] | None = None
        self._has_fillers = False
        self._full_index_files = full_files(root / "index")
        self.ends: dict[tuple[str, str, int], QueueEnd] = {}

    def compare(self, arrivals: DispatchColumns) -> None:
        """Find the equal entries of a run of records. Runs must be passed in log order."""
        if self._index is None:
            paths = (path for path in self.index_paths() if path.stat().st_size == self._sizes.index)
            self._index = [self._span(path) for path in paths]
        self._has_fillers = self._has_fillers or arrivals.lost_bytes() > 0
        self._queues.compare(arrivals)
        first, last = int(arrivals.offsets[0]), int(arrivals.offsets[-1])
        # Keys cost as much as the rest of the scan. Compute them only if an index file has entries in this range.
        spans = [span for span in self._index if span.low <= last and first <= span.high]
        keys = arrivals.keys(with_tags=True) if spans else None
        for span in spans:
            if span.comparison is None:
                span.comparison = self._comparison(span.path)
            assert keys is not None, "a file has entries of the run"
            span.comparison.compare(arrivals, keys)

    def equal(self) -> Equal:
        """Return the ranges of queue and index entries that are equal to the log so far."""
        index = {span.path: span.comparison.ranges for span in self._index or [] if span.comparison is not None}
        return Equal(dict(self._queues.ranges), index)

    def check(self, log_ends: Mapping[tuple[str, int], LogSpan]) -> None:
        """Check all queues and index files.

        Args:
            log_ends: the numbers of each queue according to the log.
        """
        equal = self.equal()
        for folder in self.queue_folders():
            self.check_queue(folder, equal.queues.get(folder, Ranges()))
        self.check_ends(log_ends)
        self.check_missing_index()
        paths = self.index_paths()
        for path in paths:
            self.check_index(path, equal.index.get(path, Ranges()), is_newest=path == paths[-1])

    # ---- queues

    def queue_folders(self) -> list[Path]:
        """Return the directories of all queues. Report other files beside them."""
        trees = (self._root / _QUEUE, self._root / _BATCH)
        folders = [queue for tree in trees for topic in entries_of(tree) for queue in entries_of(topic)]
        for folder in folders:
            if not folder.is_dir() or not folder.name.isdecimal():
                self._report.add(Kind.FILE_NAME, folder, 0, "a directory named by a queue id", folder.name)
        return [folder for folder in folders if folder.is_dir() and folder.name.isdecimal()]

    def _read(self, path: Path) -> bytes:
        data = path.read_bytes()
        self._advance(len(data))
        return data

    def check_queue(self, folder: Path, equal: Ranges) -> None:
        """Check one queue, up to the zeros at the end of its last file.

        Args:
            equal: the numbers of the equal entries.
        """
        tree = folder.parent.parent.name
        layout, file_bytes = (BATCH_ENTRY, self._sizes.batch) if tree == _BATCH else (ENTRY, self._sizes.queue)
        check_entry = self._batch_entry if tree == _BATCH else self._simple_entry
        entry_bytes = layout.size
        self._open_ext(folder)
        files = list(files_in_order([folder], file_bytes, self._report))
        is_filler, has_live, end = True, False, QueueEnd(0, folder, 0)
        for path, start in files:
            data = self._read(path)
            # Only in the newest file, zeros are the end of the queue. In an older file they are lost entries.
            used = len(data.rstrip(b"\0")) if path is files[-1][0] else len(data)
            end.path, end.position = path, 0
            position, stop = 0, min(used, len(data) - entry_bytes + 1)
            while position < stop:
                index = (start + position) // entry_bytes
                if (skipped := min(equal.end_of(index) - index, -(-(stop - position) // entry_bytes))) > 0:
                    is_filler, has_live = False, True
                else:
                    skipped = 1
                    is_filler = (is_filler or self._has_fillers) and data.startswith(BLANK_ENTRY, position)
                if end.begin < 0 and not is_filler:
                    end.begin = layout.unpack_from(data, position)[4] if tree == _BATCH else index
                end.offset, end.position = index + skipped, position + skipped * entry_bytes
                # Blanks are valid before the first message, and anywhere in a store with fillers in its log.
                if not is_filler and equal.end_of(index) == index:
                    entry = layout.unpack_from(data, position)
                    is_old = 0 <= entry[0] < self._log.min_offset and entry[1] != BLANK_SIZE
                    if is_old and has_live:
                        found = f"offset {entry[0]}, before the log's start"
                        self._report.add(Kind.QUEUE_ENTRY, path, position, "a record behind the one before", found)
                    has_live = has_live or not is_old
                    end.offset = check_entry(_Place(path, position, folder), index, entry)
                self._report.checked["queue entries"] += skipped
                position = end.position
        self.ends[tree, folder.parent.name, int(folder.name)] = end

    def indexed_end(self) -> int:
        """Return the end of the newest record that has a queue entry, as a physical offset, or 0 without an entry."""
        newest = 0
        for tree, layout in ((_QUEUE, ENTRY), (_BATCH, BATCH_ENTRY)):
            for folder in self._root.glob(f"{tree}/*/*"):
                for path in reversed(entries_of(folder) if folder.is_dir() else []):
                    data = path.read_bytes() if path.is_file() else b""
                    at = (len(data.rstrip(b"\0")) - 1) // layout.size * layout.size
                    if 0 <= at <= len(data) - layout.size:
                        newest = max(newest, sum(layout.unpack_from(data, at)[:2]))
                        break
        return newest

    def _record(self, physical_offset: int) -> Record | RecordCorrupt | None:
        """Return the record at an offset, or the error in it. Return None if retention deleted the record, or if the
        record is newer than the scan."""
        if 0 <= physical_offset < self._log.min_offset:
            return None
        # A running broker may have appended after the scan, so its newest entries are valid.
        if physical_offset >= self._log.end:
            newer = RecordCorrupt(physical_offset, f"the log ends at {self._log.end}")
            return None if self._report.is_live else newer
        try:
            return self._log.record_at(physical_offset)
        except RecordCorrupt as error:
            return error

    def _pointed(self, place: _Place, physical_offset: int, size: int) -> tuple[Record, int] | None:
        """Return the record of an entry and its number in the queue. Return None without a record, and report a missing
        record that should exist."""
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
        """Check an entry of a consume queue. Return the queue offset after the entry."""
        physical_offset, size, stored = entry
        pointed = self._pointed(place, physical_offset, size)
        if pointed is not None:
            record, number = pointed
            tags_code = request_of(record, self._delays_ms).tags_code
            self._compare(place, "queue offset", index, number, Kind.QUEUE_ENTRY)
            if is_address(stored):
                self._ext_unit_of(place, stored, (tags_code, record.store_timestamp))
            else:
                self._compare(place, "tags code", tags_code, stored, Kind.QUEUE_ENTRY)
        return index + 1

    def _batch_entry(self, place: _Place, index: int, entry: tuple[Any, ...]) -> int:
        """Check an entry of a batch queue. Return the queue offset after the entry."""
        base, count = entry[4], entry[5]
        pointed = self._pointed(place, entry[0], entry[1])
        if pointed is not None:
            record, number = pointed
            arrival = request_of(record, self._delays_ms)
            expected = (arrival.tags_code, record.store_timestamp, number, arrival.batch_count, -1, 0)
            what = "tagsCode, storeTimestamp, msgBaseOffset, batchSize, compactedOffset, reserved"
            self._compare(place, what, expected, entry[2:], Kind.QUEUE_ENTRY)
        return int(base + count)

    def check_ends(self, log_ends: Mapping[tuple[str, int], LogSpan]) -> None:
        """Report the queues that lack messages of the log. All queues must be checked before. A topic that is not in
        the configuration and has no queues was deleted: its messages stay in the log until they expire. If numbers
        began again, the earlier messages are in no queue: the queue's files were lost, or an Apache broker deleted the
        topic without leaving a note."""
        if self._report.is_live:
            return
        topics = configured_topics(self._root)
        batch_topics = {topic for tree, topic, _ in self.ends if tree == _BATCH}
        for (topic, queue_id), expected in log_ends.items():
            if topic_fault(topic, queue_id):
                continue
            tree = _BATCH if topic in batch_topics else _QUEUE
            missing = QueueEnd(0, self._root / tree / topic / str(queue_id), 0)
            if topics is not None and topic not in topics and not missing.path.parent.exists():
                continue
            end = self.ends.get((tree, topic, queue_id), missing)
            if end.offset < expected.end and not (tree == _QUEUE and self._were_held(end, expected.end)):
                found = f"an end at {end.offset}"
                self._report.add(Kind.QUEUE_END, end.path, end.position, f"entries up to {expected.end}", found)
            elif end.begin > expected.begin:
                first = min(entries_of(end.path.parent), default=end.path)
                self._report.add(Kind.QUEUE_END, first, 0, f"entries from {expected.begin} on", f"{end.begin} first")
            if expected.restart_at >= 0:
                found = f"number {expected.begin} again at {expected.restart_at} of the log"
                self._report.add(Kind.QUEUE_END, end.path, 0, "every number once: messages are in no queue", found)

    def _were_held(self, end: QueueEnd, expected_end: int) -> bool:
        """Return True if a killed broker may have held the missing entries of a consume queue in memory."""
        if not self._report.is_unclean or not end.path.is_file():
            return False
        room = int(end.path.name) + self._sizes.queue - expected_end * ENTRY.size
        return room >= 0 and (expected_end - end.offset) * ENTRY.size <= HELD_BYTES_MAX

    # ---- extension units

    def _open_ext(self, folder: Path) -> None:
        """Scan all units of a queue. Hold the files open for the entries that refer to the units."""
        ext_folder = self._root.joinpath(_EXT, *folder.parts[-2:])
        self._ext = []
        for path, start in files_in_order([ext_folder], self._sizes.ext, self._report):
            buffer = mapped(path)
            self._ext.append(_ExtFile(path, start, buffer, self._units_end(path, buffer)))
            self._advance(len(buffer))

    def _units_end(self, path: Path, buffer: Buffer) -> int:
        """Return the end of the units in a file. Return the file's length if the file is damaged, so that later units
        can be read."""
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
        """Compare the unit at an address with its record. Report a fault in the unit at the place of the unit."""
        at = address + ADDRESS_BASE
        file = next((file for file in reversed(self._ext) if file.start <= at), None)
        if file is None or at >= file.start + len(file.buffer):
            self._compare(place, "an extension unit at", at, "none", Kind.QUEUE_ENTRY)
            return
        unit_place = _Place(file.path, at - file.start, place.folder)
        if at - file.start + UNIT.size > file.end:
            self._compare(unit_place, "the unit of the queue entry at", place.position, "none", Kind.EXT_UNIT)
            return
        unit = UNIT.unpack_from(file.buffer, at - file.start)
        self._compare(unit_place, "tagsCode, msgStoreTime", expected, unit[1:3], Kind.EXT_UNIT)

    # ---- index

    def index_paths(self) -> list[Path]:
        """Return the index files, oldest first."""
        return _index_paths(self._root)

    def check_missing_index(self) -> None:
        """Report the index files that a start must find and that are missing."""
        log_start, is_clean = max(0, self._log.min_offset), not self._report.is_unclean
        for path in missing_files(self._root / "index", clean=is_clean, log_start=log_start):
            self._report.add(Kind.FILE_MISSING, path, 0, "an index file", "none")

    def check_index(self, path: Path, equal: Ranges, *, is_newest: bool) -> None:
        """Check one index file.

        Args:
            equal: the numbers of the equal entries.
            is_newest: whether the file may be partly filled.
        """
        length = path.stat().st_size
        self._report.checked["files"] += 1
        if length == self._sizes.index:
            comparison = self._comparison(path)
            comparison.ranges = equal
            self._index_file(path, comparison, is_newest=is_newest)
            comparison.release()
        else:
            slots, entries = self._settings.hash_slot_count, self._settings.index_entry_count
            expected = f"{self._sizes.index} bytes (maxHashSlotNum {slots}, maxIndexNum {entries})"
            self._report.add(Kind.FILE_SIZE, path, min(length, self._sizes.index), expected, f"{length} bytes")
        self._advance(length)

    def _span(self, path: Path) -> _IndexSpan:
        sizes = self._settings
        entries_at = HEADER.size + sizes.hash_slot_count * SLOT.size
        with open(path, "rb", buffering=0) as file:
            _, _, first, last, _, count = HEADER.unpack(file.read(HEADER.size))
            offsets = [first, last]
            for number in {1, min(max(1, count - 1), sizes.index_entry_count - 1)}:
                file.seek(entries_at + number * INDEX_ENTRY.size)
                offsets.append(INDEX_ENTRY.unpack(file.read(INDEX_ENTRY.size))[1])
        return _IndexSpan(path, min(offsets), max(offsets))

    def _comparison(self, path: Path) -> IndexComparison:
        sizes = self._settings
        return IndexComparison(mapped(path), sizes.hash_slot_count, sizes.index_entry_count, self._start)

    def _index_file(self, path: Path, comparison: IndexComparison, *, is_newest: bool) -> None:
        entries, count = self._settings.index_entry_count, comparison.index_count
        # After a crash, the next start deletes a file that was not full and durable.
        is_doubted = self._report.is_live or (self._report.is_unclean and path.name not in self._full_index_files)
        least = 1 if is_doubted else 2 if is_newest else entries
        if not least <= count <= entries:
            self._report.add(Kind.INDEX_HEADER, path, 36, f"an indexCount from {least} to {entries}", count)
            return
        self._report.checked["index entries"] += count - 1
        for number, (hashed, physical_offset, seconds, previous), newest in comparison.unequal():
            place = _Place(path, comparison.entries_at + number * INDEX_ENTRY.size, path.parent)
            self._compare(place, "previous entry", newest, previous, Kind.INDEX_CHAIN)
            begin_timestamp = comparison.begin_timestamp if number > 1 else None
            self._index_entry(place, hashed, physical_offset, begin_timestamp, seconds)
        if not is_doubted:
            self._index_bounds(path, comparison)
        if self._report.is_live:
            return
        for slot, newest, found in comparison.unequal_slots():
            position = HEADER.size + slot * SLOT.size
            self._report.add(Kind.INDEX_CHAIN, path, position, f"newest entry {newest}", found)
        if comparison.slots_used != (used := comparison.chain_count):
            self._report.add(Kind.INDEX_HEADER, path, 32, f"hashSlotCount {used}", comparison.slots_used)

    def _index_bounds(self, path: Path, comparison: IndexComparison) -> None:
        """Compare the times and offsets in a header with the first and the last entry, and their records."""
        ends = (
            (0, "begin", 1, comparison.begin_timestamp, comparison.begin_offset),
            (8, "end", comparison.index_count - 1, comparison.end_timestamp, comparison.end_offset),
        )
        for position, name, number, timestamp, offset in ends:
            expected = comparison.entry_offset(number)
            self._compare(
                _Place(path, position + 16, path.parent), f"{name}PhyOffset", expected, offset, Kind.INDEX_HEADER
            )
            record = self._record(expected)
            if isinstance(record, Record):
                place = _Place(path, position, path.parent)
                self._compare(place, f"{name}Timestamp", record.store_timestamp, timestamp, Kind.INDEX_HEADER)
        if comparison.index_count < self._settings.index_entry_count and comparison.has_more:
            found = f"{comparison.index_count}, and there is an entry of that number"
            self._report.add(Kind.INDEX_HEADER, path, 36, "the indexCount of its entries", found)

    def _index_entry(
        self, place: _Place, hashed: int, physical_offset: int, begin_timestamp: int | None, seconds: int
    ) -> None:
        """Compare an entry with its record. The time of entry 1 depends on the previous file and is not checked."""
        if self._read_last[0] != physical_offset:
            self._read_last = physical_offset, self._read_keys(physical_offset)
        keys = self._read_last[1]
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
        """Return the key hashes and the storeTimestamp of a record. Return the result of `_record` if it is not a
        record."""
        record = self._record(physical_offset)
        return (
            (key_hashes(record.topic, find_keys(record.properties), with_tags=True), record.store_timestamp)
            if isinstance(record, Record)
            else record
        )


def _index_paths(root: Path) -> list[Path]:
    return [path for path in entries_of(root / "index") if path.name.isdecimal()]


def index_bytes(root: Path, settings: StoreSettings, *, is_set: bool) -> int:
    """Return the size of an index file.

    Raises:
        StoreMismatch: all files have another size, and the settings do not belong to the store.
    """
    slots, entries = settings.hash_slot_count, settings.index_entry_count
    file_bytes = HEADER.size + slots * SLOT.size + entries * INDEX_ENTRY.size
    lengths = {path.stat().st_size: path for path in _index_paths(root)}
    if lengths and file_bytes not in lengths and not is_set:
        length, path = min(lengths.items(), key=lambda item: item[1])
        raise StoreMismatch(
            f"{path} has {length} bytes and not {file_bytes}: maxHashSlotNum and maxIndexNum "
            "are not the default ones, give the broker.conf of the store"
        )
    return file_bytes


def _number_in(record: Record, topic: str, queue_id: int) -> int | None:
    """Return the queue offset of a record in a queue, or None if the queue does not contain the record. The queue is
    the queue of the record's topic, or a light queue."""
    if (record.topic, record.queue_id) == (topic, queue_id):
        return record.queue_offset
    return light_queues(record).get(topic) if queue_id == 0 else None


def light_queues(record: Record) -> dict[str, int]:
    """Return the light queues of a record, with its number in each queue. Their queue id is 0. Source: store.md §11."""
    return light_numbers(record.topic, record.properties)
