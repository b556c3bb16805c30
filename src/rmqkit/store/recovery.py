"""Recovery: where the log ends after a stop or a crash, and queues that agree with it.

The consume queues are cut after their last valid entry first; ``D`` is the end of the newest record they know. Then
the log is walked forward from a file that was certainly whole, to the first bytes that are no record: its end ``E``.

=============  =========================================  ==========================================================
               clean stop                                 crash (``abort`` exists)
=============  =========================================  ==========================================================
walk from      the newest record in a queue if that is    newest file whose first record is sound and not younger
               sound; else as Java: the newest file       than the checkpoint's minTimestamp; else the first
               whose first record is sound and not
               behind D; else the first
dispatch       records at or behind D                     every record
=============  =========================================  ==========================================================

At most ``commitLogRecoverMaxNum`` files are looked at for the start. Behind a blank the log goes on in the next file if
that exists, else E is where the blank begins: it is written again. Then everything behind E goes: queue entries, later
files, and the rest of E's file becomes zeros, so that stale bytes never look like records again.

A record is sound when `decode_record` takes it, its CRC is right (``checkCRCOnRecover``, or the CRC of the whole
record with ``forceVerifyPropCRC``) and it says the offset it lies at. After a clean stop the walk costs one decode,
after a crash one per record of the last file(s). Source: store.md §12.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.record import Record, decode_record, is_blank
from rmqkit.store.checkpoint import Checkpoint
from rmqkit.store.commit_log import CommitLog
from rmqkit.store.mapped_file import MappedFile
from rmqkit.store.property_crc import has_sound_crc
from rmqkit.store.settings import StoreSettings

__all__ = ["LogEnd", "find_log_end"]

_log = logging.getLogger(__name__)


class LogEnd(Struct):
    """What a walk over the log found.

    Attributes:
        offset: physical offset one past the last sound record.
        last_record: physical offset of that record, 0 without any.
        last_store_timestamp: its storeTimestamp, 0 without any.
        record_count: sound records walked over.
    """

    offset: int
    last_record: int = 0
    last_store_timestamp: int = 0
    record_count: int = 0


def find_log_end(
    log: CommitLog,
    settings: StoreSettings,
    dispatch: Callable[[Record], None],
    *,
    clean: bool,
    newest: tuple[int, int],
    checkpoint: Checkpoint,
) -> LogEnd:
    """Walk the log to its end; changes nothing itself.

    Args:
        dispatch: told of the records that the queues may lack, in order.
        clean: whether the store was closed in order.
        newest: offset and size of the newest record in any queue, (-1, 0) without one; it ends at D.
    """
    check = _Check(settings)
    files = log.queue.files
    if clean:
        dispatch_from = max(0, sum(newest))
        if check.is_sound(log, *newest):
            start, offset = _file_index(files, newest[0]), newest[0]
        else:
            start = _start_file(files, settings, lambda file: _is_dispatched(check, file, dispatch_from))
            offset = files[start].start
    else:
        start = _start_file(files, settings, lambda file: _is_flushed(check, file, checkpoint, settings))
        dispatch_from, offset = 0, files[start].start
    end = LogEnd(offset)
    for i in range(start, len(files)):
        if not _walk_file(files[i], check, dispatch, dispatch_from, end):
            return end
        if i + 1 < len(files):
            end.offset = files[i + 1].start
    return end


def _walk_file(
    file: MappedFile, check: _Check, dispatch: Callable[[Record], None], dispatch_from: int, end: LogEnd
) -> bool:
    """Walk one file, moving ``end``; True when it is closed by a blank."""
    view, position = file.view, end.offset - file.start
    while True:
        if is_blank(view, position):
            return True
        try:
            record = check.record(file, position)
        except RecordCorrupt as error:
            if any(view[position : position + 8]):
                _log.warning("%s: the log ends at %d: %s", file.path, file.start + position, error)
            return False
        if record.physical_offset >= dispatch_from:
            dispatch(record)
        position += record.size
        end.offset = file.start + position
        end.last_record = record.physical_offset
        end.last_store_timestamp = record.store_timestamp
        end.record_count += 1


def _file_index(files: tuple[MappedFile, ...], physical_offset: int) -> int:
    return next(i for i, file in enumerate(files) if file.start <= physical_offset < file.end)


def _start_file(files: tuple[MappedFile, ...], settings: StoreSettings, is_start: Callable[[MappedFile], bool]) -> int:
    oldest = max(0, len(files) - settings.commit_log_recover_files_max)
    newest_first = range(len(files) - 1, oldest, -1)
    return next((i for i in newest_first if is_start(files[i])), oldest)


def _is_dispatched(check: _Check, file: MappedFile, dispatched_end: int) -> bool:
    first = check.first_record(file)
    return first is not None and first.physical_offset <= dispatched_end


def _is_flushed(check: _Check, file: MappedFile, checkpoint: Checkpoint, settings: StoreSettings) -> bool:
    first = check.first_record(file)
    if first is None or not 0 < first.store_timestamp <= checkpoint.min_timestamp:
        return False
    is_indexed = settings.message_index_enable and settings.message_index_safe
    return not is_indexed or first.store_timestamp <= checkpoint.index_timestamp


class _Check:
    """Which bytes count as a record. Source: store.md §12.1."""

    def __init__(self, settings: StoreSettings) -> None:
        self._whole_record = settings.force_verify_property_crc
        self._body = settings.check_crc_on_recover and not self._whole_record

    def record(self, file: MappedFile, position: int) -> Record:
        """The record at a position.

        Raises:
            RecordCorrupt: there is none.
        """
        view = file.view
        record = decode_record(view, position, verify_crc=self._body)
        if record.physical_offset != file.start + position:
            raise RecordCorrupt(position, f"it says it lies at offset {record.physical_offset}", size=record.size)
        if self._whole_record and not has_sound_crc(view[position : position + record.size]):
            raise RecordCorrupt(position, "the checksum of the whole record is wrong or missing", size=record.size)
        return record

    def is_sound(self, log: CommitLog, physical_offset: int, size: int) -> bool:
        """Whether the log holds a sound record of a size at an offset."""
        file = log.queue.find(physical_offset)
        try:
            return file is not None and self.record(file, physical_offset - file.start).size == size
        except RecordCorrupt:
            return False

    def first_record(self, file: MappedFile) -> Record | None:
        """The first record of a file, or None."""
        try:
            return self.record(file, 0)
        except RecordCorrupt:
            return None
