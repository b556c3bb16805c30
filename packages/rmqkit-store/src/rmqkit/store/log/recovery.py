"""Recovery: finds the end of the log after a stop or a crash, and makes the queues agree with it.

First the consume queues are cut after their last valid entry. ``D`` is the end of the newest record in a queue. Then
the log is scanned forward, from a file that is certainly complete to the first bytes that are not a record. These bytes
are the end of the log, ``E``.

=============  =========================================  ==========================================================
               clean stop                                 crash (``abort`` exists)
=============  =========================================  ==========================================================
scan from      the newest record in a queue, if it is      the newest file with a sound first record that is not
               sound; else as Java: the newest file       younger than the checkpoint's minTimestamp; else the
               with a sound first record that is not      first file
               after D; else the first file
dispatch       records at or after D                      every record
=============  =========================================  ==========================================================

Every file can be the start if necessary. Java's limit of ten files (``commitLogRecoverMaxNum``) would leave gaps in the
queues if more files were written since the checkpoint. Trying a file costs one decode.

After a blank the log continues in the next file, if that file exists. Otherwise E is the start of the blank, which will
be written again. Then everything after E is removed: queue entries, later files, and the rest of E's file. Zeros are
written over the rest, so that stale bytes never look like records again. Valuable bytes are saved before: see
`remains`. After a crash, records that are younger than the checkpoint are written again, with the same bytes: if a sync
of the earlier process failed, the system may consider their pages as written, and no later sync would write them.

A record is *sound* if `decode_record` accepts it, its CRC is right (``checkCRCOnRecover``, or the CRC of the whole
record with ``forceVerifyPropCRC``), its physical offset is its place, and all its sectors reached the disk. (The last
test is omitted for records that were certainly flushed.) After a clean stop the scan costs one decode.
After a crash the scan reads the last file or files: one record at a time, and after `BULK_FROM_BYTES` in runs (`scan`).
Runs are several times as fast and have the same result. Source: store.md §12.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.record import BLANK_BYTES, MAGIC_V1, MAGIC_V2, Record, decode_record, has_sound_crc, is_blank
from rmqkit.store.log import scan
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.mapped_file import SECTOR_BYTES, MappedFile
from rmqkit.store.log.remains import Remains, look_behind
from rmqkit.store.log.scan import Buffer, Records, has_numpy
from rmqkit.store.settings import StoreSettings
from rmqkit.system import disk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BULK_FROM_BYTES", "LogEnd", "find_log_end", "whole_end"]

BULK_FROM_BYTES = 8 << 20
"""Number of bytes after which the scan continues in bulk (if numpy is installed). Importing numpy takes as long as
scanning these bytes one record at a time."""
_log = logging.getLogger(__name__)


class LogEnd(Struct):
    """The result of a scan of the log.

    Attributes:
        offset: physical offset one past the last sound record.
        last_record: physical offset of the last sound record, or 0 without a record.
        last_store_timestamp: storeTimestamp of the last sound record, or 0 without a record.
        newest_store_timestamp: the greatest storeTimestamp. It differs from the last one if the clock was set back.
        record_count: number of sound records in the scan.
        certain: physical offset up to which the log was flushed by an earlier process. The records after it may be in
            the page cache only, even if every sync from now on succeeds.
        remains: the bytes after the end, unless they are known not to be a part of the log. None if the end is a blank.
    """

    offset: int
    last_record: int = 0
    last_store_timestamp: int = 0
    newest_store_timestamp: int = 0
    record_count: int = 0
    certain: int = 0
    remains: Remains | None = None


def find_log_end(
    log: CommitLog,
    settings: StoreSettings,
    dispatch: Callable[[Record], None],
    dispatch_run: Callable[[Records], object],
    *,
    on_replay: Callable[[int], None],
    clean: bool,
    newest: tuple[int, int],
    indexed_end: int,
    checkpoint: Checkpoint,
) -> LogEnd:
    """Find the end of the log with a scan. The scan itself changes nothing.

    Args:
        dispatch: called with each record that the queues may lack, in order.
        dispatch_run: called with a whole run of such records instead.
        on_replay: called after a crash, before any record is dispatched, with the offset from which all records are
            dispatched again.
        clean: whether the store was closed cleanly.
        newest: offset and size of the newest record in any queue, (-1, 0) without a record. The record ends at D.
        indexed_end: end of the newest record that has a queue entry, even if the record is damaged.
    """
    check = _Check(settings, None if clean else checkpoint.physic_timestamp)
    files = log.queue.files
    if clean:
        dispatch_from = max(0, sum(newest))
        if check.is_sound(log, *newest):
            offset = newest[0]
            start = next(i for i, file in enumerate(files) if file.start <= offset < file.end)
        else:
            start = _start_file(files, lambda file: _is_dispatched(check, file, dispatch_from))
            offset = files[start].start
    else:
        start = _start_file(files, lambda file: _is_flushed(check, file, checkpoint, settings))
        dispatch_from, offset = 0, files[start].start
        on_replay(offset)
    # Start at a record or at the start of a file, never in between: there, bytes of a body may look like a head.
    walk = _Walk(check, dispatch, dispatch_run, dispatch_from, LogEnd(offset, certain=offset))
    for i in range(start, len(files)):
        if not walk.file(files[i]):
            # After a clean stop every record is in a queue, so bytes after the newest of these records are not records.
            if not clean or walk.end.offset != indexed_end:
                walk.end.remains = look_behind(files[i:], walk.end.offset, walk.reason, check.record)
            break
        if i + 1 < len(files):
            # After a blank, continue with the next file, even if a file in between is missing: the later records were
            # stored.
            assert files[i + 1].start >= walk.end.offset, "files are scanned in log order"
            walk.end.offset = files[i + 1].start
    end = walk.end
    assert end.offset <= files[-1].end, "the log ends in its last file"
    assert not end.record_count or end.last_record < end.offset, "the end is after the last record"
    assert end.certain <= end.offset, "flushed records are in the log"
    return end


def whole_end(log: CommitLog, settings: StoreSettings, start: int, end: int) -> int | None:
    """Return the physical offset up to which the page cache has all records between two offsets, by the rules of a
    recovery. Return None if the page cache lost a record, which may happen after a failed flush. The result is less
    than ``end`` only in a slave's log that ends inside a record. Any thread can call this."""
    check, found = _Check(settings, 0), start
    for file in log.queue.files:
        if file.end <= start or file.start >= end:
            continue
        position, low, high = 0, start - file.start, min(end, file.end) - file.start
        if low > 0 and _begins_at(check, file, low):
            position = low
        while position < high and not is_blank(file.view, position):
            try:
                # Before ``start`` check only the heads: these records are on the disk.
                record = check.record(file, position) if position >= low else decode_record(file.view, position)
            except RecordCorrupt:
                return found if _is_under_way(file, position, high) else None
            position += record.size
            found = max(found, file.start + min(position, high))
        else:
            found = file.start + high
    return found


def _is_under_way(file: MappedFile, position: int, end: int) -> bool:
    """Return True if an incomplete record begins at a position. A slave may not have received its end yet."""
    if end - position < BLANK_BYTES:
        return True
    size = int.from_bytes(file.view[position : position + 4], "big", signed=True)
    magic = int.from_bytes(file.view[position + 4 : position + 8], "big", signed=True)
    return position + size > end and magic in (MAGIC_V1, MAGIC_V2)


def _begins_at(check: _Check, file: MappedFile, position: int) -> bool:
    """Return True if a record or a blank begins at a position. The log of a slave may end inside a record."""
    if is_blank(file.view, position):
        return True
    try:
        check.record(file, position)
    except RecordCorrupt:
        return False
    return True


class _Walk:
    """The scan from a file on.

    ``end`` advances with the scan. At the end, ``reason`` describes why the bytes there are not a record.
    """

    def __init__(
        self,
        check: _Check,
        dispatch: Callable[[Record], None],
        dispatch_run: Callable[[Records], object],
        dispatch_from: int,
        end: LogEnd,
    ) -> None:
        self.end = end
        self.reason = ""
        self._check, self._dispatch, self._dispatch_run = check, dispatch, dispatch_run
        self._dispatch_from = dispatch_from
        self._bulk_from = end.offset + BULK_FROM_BYTES if has_numpy() else None
        self._is_certain = True

    def file(self, file: MappedFile) -> bool:
        """Scan one file. Return True if a blank closes the file."""
        view, end = file.view, self.end
        bulk_from = self._bulk_from
        while not is_blank(view, position := end.offset - file.start):
            if bulk_from is not None and end.offset >= bulk_from:
                bulk_from = None  # this loop checks the bytes that stop the runs
                self._runs(file)
                continue
            try:
                record = self._check.record(file, position)
            except RecordCorrupt as error:
                self.reason = error.reason if any(view[position : position + BLANK_BYTES]) else "zeros"
                return False
            if record.physical_offset >= self._dispatch_from:
                self._dispatch(record)
            end.offset += record.size
            self._is_certain = self._is_certain and not self._check.is_doubted(record.store_timestamp)
            if self._is_certain:
                end.certain = end.offset
            end.last_record = record.physical_offset
            end.last_store_timestamp = record.store_timestamp
            end.newest_store_timestamp = max(record.store_timestamp, end.newest_store_timestamp)
            end.record_count += 1
        return True

    def _runs(self, file: MappedFile) -> None:
        """Scan the sound records of a file in runs. Stop before the first doubtful record."""
        end, buffer = self.end, file.view.obj
        assert isinstance(buffer, disk.Mapped), "a view belongs to a mapping"
        for records in scan.runs(buffer, file.start, end.offset - file.start, file.size):
            run = records.text_only()
            run = run.head(self._check.sound_count(run))
            if len(run):
                offsets, times = run.offsets, run.store_timestamps
                new = bisect_left(offsets, self._dispatch_from)
                if new < len(run):
                    self._dispatch_run(run.take(slice(new, None)) if new else run)
                end.offset = file.start + run.end
                if self._is_certain:
                    doubted = self._check.first_doubted(run)
                    self._is_certain = doubted == len(run)
                    end.certain = end.offset if self._is_certain else int(offsets[doubted])
                end.last_record = int(offsets[-1])
                assert end.last_record < end.offset, "a run ends after its last record"
                end.last_store_timestamp = int(times[-1])
                end.newest_store_timestamp = max(int(times.max()), end.newest_store_timestamp)
                end.record_count += len(run)
            disk.release_pages(buffer)  # these pages would count as memory of the broker
            if len(run) < len(records):
                return


def _start_file(files: tuple[MappedFile, ...], is_start: Callable[[MappedFile], bool]) -> int:
    return next((i for i in range(len(files) - 1, 0, -1) if is_start(files[i])), 0)


def _is_dispatched(check: _Check, file: MappedFile, dispatched_end: int) -> bool:
    first = check.first_record(file)
    return first is not None and first.physical_offset <= dispatched_end


def _is_flushed(check: _Check, file: MappedFile, checkpoint: Checkpoint, settings: StoreSettings) -> bool:
    first = check.first_record(file)
    if first is None or not 0 < first.store_timestamp <= checkpoint.min_timestamp:
        return False
    is_indexed = settings.message_index_enable and settings.message_index_safe
    return not is_indexed or first.store_timestamp <= checkpoint.index_timestamp


def _octets(buffer: Buffer) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(buffer, "u1")


def _is_torn(view: memoryview, end: int, topic_bytes: int, properties_bytes: int) -> bool:
    """Return True if topic and properties of the record that ends at a position are incomplete.
    No checksum covers them. A torn write leaves zeros at their end, or in a whole sector. `put` refuses messages with
    such zeros."""
    if not properties_bytes:
        return not all(view[end - 2 - topic_bytes : end - 2])
    if not view[end - 1]:
        return True
    low, high = end - properties_bytes - 2 - topic_bytes, end
    for start in range(-(-low // SECTOR_BYTES) * SECTOR_BYTES, high, SECTOR_BYTES):
        if not view[start] and not any(view[start : min(start + SECTOR_BYTES, high)]):
            return True
    return False


class _Check:
    """A check of records by the rules for sound records. Source: store.md §12.1.
    ``doubted_from``: records from this storeTimestamp on may not have reached the disk; None if all records have."""

    def __init__(self, settings: StoreSettings, doubted_from: int | None) -> None:
        self._doubted_from = doubted_from
        self._whole_record = settings.force_verify_property_crc
        self._body = settings.check_crc_on_recover and not self._whole_record

    def record(self, file: MappedFile, position: int) -> Record:
        """Return the record at a position. Raises RecordCorrupt: no sound record begins there."""
        view = file.view
        record = decode_record(view, position, verify_crc=self._body)
        if record.physical_offset != file.start + position:
            raise RecordCorrupt(position, f"it belongs to offset {record.physical_offset}", size=record.size)
        if self._whole_record and not has_sound_crc(view[position : position + record.size]):
            raise RecordCorrupt(position, "the checksum of the whole record is wrong or missing", size=record.size)
        if self.is_doubted(record.store_timestamp):
            topic_bytes = len(record.topic.encode())
            if _is_torn(view, position + record.size, topic_bytes, len(record.properties)):
                raise RecordCorrupt(position, "its topic or properties are incomplete", size=record.size)
        return record

    def is_doubted(self, store_timestamp: int) -> bool:
        """Return True if a record may not have reached the disk."""
        return self._doubted_from is not None and store_timestamp >= self._doubted_from

    def first_doubted(self, run: Records) -> int:
        """Return the index of the first record of a run that may not have reached the disk."""
        if self._doubted_from is None:
            return len(run)
        is_doubted = run.store_timestamps >= self._doubted_from
        return int(is_doubted.argmax()) if is_doubted.any() else len(run)

    def sound_count(self, run: Records) -> int:
        """Return the number of records at the start of a run that are sound."""
        if self._whole_record:
            view = memoryview(run.buffer)
            places = zip(run.positions.tolist(), run.sizes.tolist(), strict=True)
            is_sound = (has_sound_crc(view[at : at + size]) for at, size in places)
            return next((row for row, sound in enumerate(is_sound) if not sound), len(run))
        count = len(run)
        if self._body:
            matches = scan.crc_matches(run)
            count = count if matches.all() else int(matches.argmin())
        return count if self._doubted_from is None else self._whole_count(run, count, self._doubted_from)

    def _whole_count(self, run: Records, count: int, doubted_from: int) -> int:
        """Return how many of the first ``count`` records reached the disk with all their sectors."""
        view, ends = memoryview(run.buffer), run.positions + run.sizes
        reaches_on = -(-run.topic_at // SECTOR_BYTES) * SECTOR_BYTES < ends
        is_odd = reaches_on | (_octets(run.buffer)[ends - 1] == 0)
        rows = (is_odd & (run.store_timestamps >= doubted_from)).nonzero()[0].tolist()
        for row in rows:
            if row < count and _is_torn(
                view, int(ends[row]), int(run.topic_bytes[row]), int(run.properties_bytes[row])
            ):
                return int(row)
        return count

    def is_sound(self, log: CommitLog, physical_offset: int, size: int) -> bool:
        """Return True if the log holds a sound record with a given size at an offset."""
        file = log.queue.find(physical_offset)
        try:
            return file is not None and self.record(file, physical_offset - file.start).size == size
        except RecordCorrupt:
            return False

    def first_record(self, file: MappedFile) -> Record | None:
        """Return the first record of a file, or None if the file does not begin with a sound record."""
        try:
            return self.record(file, 0)
        except RecordCorrupt:
            return None
