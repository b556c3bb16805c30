"""The log of a slave: the bytes of its master's log, appended when they arrive and dispatched later (``HAService``).

A master sends the bytes of its log files in parts. A part may end anywhere: in a record, in a head, or in the undefined
bytes after a blank. A slave appends the parts unchanged. To guarantee a valid log, it checks every head once::

    | whole records ... | incomplete record: head known, body coming ...
                        ^ whole_end         ^ max_offset              ^ position of the next head

===================  ==================================================================================
content at a head    check
===================  ==================================================================================
a record             magic v1 or v2, its own physical offset, a size that leaves 8 bytes of the file
a blank              the rest of the file: the slave stores its bytes unchanged, and the file is full
anything else        `LogDiverged`: the master's history differs. The log is cut here and accepts no more
===================  ==================================================================================

`Replica.dispatch` then enters whole records (under SYNC_FLUSH only durable ones) into queues and index. If few records
are pending, they are entered one by one, otherwise in runs with numpy. `Replica.dispatch` also checks the parts of each
record: if their sizes do not add up, the log has diverged, too. Listeners are notified only of the newest records of a
run (`DispatchColumns.newest`). While many bytes are pending, dispatched and synced parts of the log are dropped from
the page cache: reusing the same pages costs a quarter of allocating new pages.

Invariants: every head before ``whole_end`` was checked once; nothing at or after ``whole_end`` is dispatched; the log
is never cut before the dispatched position. An append costs one ``pwrite`` and 0.4 µs for each record. A crash may
leave a torn last record. A recovery or a new connection cuts the torn record off.
Use this module only in the owner thread of the store. Not handled here: frames, reports and reconnects (the broker).
Source: store.md §3.6, §11, §21.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from rmqkit.errors import LogDiverged, RecordCorrupt, StoreError, StoreUnavailable
from rmqkit.protocol.record import BLANK_BYTES, BLANK_MAGIC, BORN_HOST_V6, MAGIC_V1, MAGIC_V2, decode_record
from rmqkit.store.dispatcher import Dispatcher, DispatchRequest, request_of
from rmqkit.store.flush import Flusher
from rmqkit.store.log import scan
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.log.scan import RECORD_BYTES_MIN, Records, has_numpy
from rmqkit.store.settings import FlushDiskType, StoreSettings, parse_delay_levels
from rmqkit.system import disk

__all__ = ["IS_REPLICA", "Replica", "log_part"]

IS_REPLICA = "this broker is a slave: send to its master"

Data = bytes | bytearray | memoryview
_HEAD = struct.Struct(">ii20xqi16xq")  # size, magic, physicalOffset, sysFlag, storeTimestamp (of IPv4 senders)
_STORE_TIMESTAMP_V6_AT = 68
_HEAD_BYTES = _STORE_TIMESTAMP_V6_AT + 8
_MAGICS = frozenset((MAGIC_V1, MAGIC_V2))
_I64 = struct.Struct(">q")
_SIZE_AND_MAGIC = struct.Struct(">ii")
_NO_RECORD = -1
_BULK_FROM_BYTES = 512 << 10
"""Number of pending bytes from which numpy is faster than the plain code."""
_ONE_BY_ONE_MAX = 512
"""Maximum number of records that one call of `Replica.dispatch` enters one by one: about 5 ms."""
_RELEASED_BYTES = 16 << 20
_FAR_BEHIND_BYTES = 2 << 20
"""Number of pending bytes that indicates a slave that catches up. A log that grows by 200 MB/s has fewer pending
bytes.
"""
_CACHED_BYTES = 512 << 20
"""Size of the end of the log that stays in the page cache meanwhile. It is more than arrives between two flushes."""
_OTHER_SIZE = "open a new store with the mappedFileSizeCommitLog of the master"

assert _HEAD_BYTES < RECORD_BYTES_MIN, "a head is part of its record"


def log_part(log: CommitLog, end: int, physical_offset: int, size_max: int) -> memoryview:
    """Return bytes of a log from an offset on: at most ``size_max`` bytes, from one file, before ``end``.

    Raises:
        StoreError: the offset is not in the log.
    """
    if not max(0, log.min_offset) <= physical_offset <= log.max_offset:
        raise StoreError(
            f"the log holds {max(0, log.min_offset)} to {log.max_offset}, and a slave requests it from "
            f"{physical_offset} on: a slave that is behind needs a new copy, one that is ahead another master"
        )
    file = log.queue.find(physical_offset)
    if file is None or physical_offset >= end:
        return memoryview(b"")
    position = physical_offset - file.start
    part_end = min(position + size_max, end - file.start, file.wrote)
    if position // _RELEASED_BYTES != part_end // _RELEASED_BYTES:
        _release(file.view)  # otherwise sent pages count as memory of the broker
    return file.view[position:part_end]


def _release(view: memoryview) -> disk.Mapped:
    """Release the pages of a mapped file; a later read loads them again."""
    mapping = view.obj
    assert isinstance(mapping, disk.Mapped), "a view belongs to a mapping"
    disk.release_pages(mapping)
    return mapping


class Replica:
    """The part of a slave's store that appends the bytes of its master's log.

    Args:
        enter_run: enters a run of records into queues and index, and returns the newest record of each queue. Raises
            OSError.
        note_start: called with the start offset of the first file of an empty log, before the file is created.

    Attributes:
        whole_end: physical offset one past the last whole record or blank.
        divergence: the error that stopped all appends, or None.
    """

    def __init__(
        self,
        log: CommitLog,
        dispatcher: Dispatcher,
        flusher: Flusher,
        settings: StoreSettings,
        enter_run: Callable[[Records], list[DispatchRequest]],
        note_start: Callable[[int], object],
    ) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._flusher = flusher
        self._enter_run = enter_run
        self._note_start = note_start
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._is_sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._has_numpy = has_numpy()
        self.divergence: LogDiverged | None = None
        self.whole_end = 0
        self._due = 0  # position of the next head: greater than the end of the log while a record is incomplete
        self._last_record = _NO_RECORD
        self._part_of_head = b""

    def resume(self, last_record: int | None) -> None:
        """Continue after the last record of the log, after recovery."""
        self.whole_end = self._due = self._log.max_offset
        self._last_record = _NO_RECORD if last_record is None else last_record

    # ---- appending

    def append(self, physical_offset: int, data: Data) -> None:
        """Append bytes of the master's log, unchanged. ``data`` can be reused after the return. The heads of records
        are checked, and `MessageStore.dispatch` makes whole records readable. Under SYNC_FLUSH the owner then calls
        `request_flush`.

        Args:
            physical_offset: must be `max_physical_offset`. While the log is empty (the property is 0), it may be the
                start of any file.
            data: must not cross the end of the file. It may begin and end inside a record.

        Raises:
            LogDiverged: at the position of a head there are other bytes, or the record has another offset. The log now
                ends there, and every later call raises the same error.
            StoreError: the bytes do not begin at the end of the log: connect to the master again. (`StoreUnavailable`:
                the last flush failed.)
            OSError: the write failed. The log is unchanged, and the same bytes can be appended again.
        """
        log = self._log
        # Refuse all later appends: after a cut the offsets of the master's bytes would match, and the log would mix two
        # histories.
        if self.divergence is not None:
            raise self.divergence
        if (failure := self._flusher.failure) is not None:
            self._flusher.request_again()
            raise StoreUnavailable(f"flush failed: errno {failure.errno} {failure.strerror}")
        end = log.max_offset
        if physical_offset != end and (end or physical_offset % log.queue.file_bytes):
            raise StoreError(
                f"the master sends its log from {physical_offset} on and ours ends at {end}: connect to it again; an "
                f"empty log can only begin with a file, and mappedFileSizeCommitLog is {log.queue.file_bytes}"
            )
        if not len(data):
            return
        if physical_offset == log.file_end or physical_offset != end:
            self._begin_file(physical_offset)
        if physical_offset + len(data) > log.file_end:
            found = f"{len(data)} bytes of one file where a file ends at {log.file_end}"
            raise self._diverge(physical_offset, found, _OTHER_SIZE)
        self._append_part(physical_offset, data)

    def _begin_file(self, start: int) -> None:
        log = self._log
        if not log.max_offset:
            log.cut(-1)  # an empty file that was created in advance
            self._note_start(start)
            self.whole_end = self._due = self._dispatcher.position = start
        log.begin_file(start)

    def _append_part(self, physical_offset: int, data: Data) -> None:
        """Write a part of the log, up to the first invalid head."""
        base, buffer = physical_offset, data
        if self._part_of_head:
            base, buffer = self.whole_end, self._part_of_head + bytes(data)
        end, file_end = base + len(buffer), self._log.file_end
        under_way, due, last_record, stored_ms = self._follow_heads(buffer, base, file_end)
        part_of_head = b""
        if due < end:
            last_record, under_way = under_way if under_way < due else last_record, due
            left, at = end - due, due - base
            size, magic = _SIZE_AND_MAGIC.unpack_from(buffer, at) if left >= BLANK_BYTES else (0, 0)
            if magic == BLANK_MAGIC and due + size == file_end:
                due = file_end
            elif left < _HEAD_BYTES and end < file_end:
                part_of_head = bytes(buffer[at:])
            else:
                self._write(data[: max(0, due - physical_offset)], stored_ms)
                self._last_record = last_record
                found = _found(bytes(buffer[at : at + _HEAD_BYTES]), due, file_end)
                raise self._diverge(due, found)
        self._write(data, stored_ms)
        if under_way < due <= end:
            last_record, under_way = under_way if due < file_end else last_record, due
        assert self.whole_end <= under_way <= due, "the head position never moves backwards"
        assert under_way <= self._log.max_offset, "whole records are in the log"
        self.whole_end, self._due, self._last_record = under_way, due, last_record
        self._part_of_head = part_of_head

    def _follow_heads(self, buffer: Data, base: int, file_end: int) -> tuple[int, int, int, int]:
        """Follow the heads in bytes that begin at ``base``, up to an incomplete or invalid head.
        Return three physical offsets (the start of the incomplete record, the position of the next head, the start of
        the last record before the incomplete one), and the storeTimestamp of the newest head."""
        unpack, size_min, magics, v6 = _HEAD.unpack_from, RECORD_BYTES_MIN, _MAGICS, BORN_HOST_V6
        heads_end, records_end = len(buffer) - _HEAD_BYTES, file_end - BLANK_BYTES - base
        start, at, last_record = self.whole_end - base, self._due - base, self._last_record
        newest_ms = self._log.last_store_timestamp
        while at <= heads_end:
            size, magic, physical_offset, sys_flag, stored_ms = unpack(buffer, at)
            if physical_offset != base + at or size < size_min or at + size > records_end or magic not in magics:
                break
            if sys_flag & v6:
                (stored_ms,) = _I64.unpack_from(buffer, at + _STORE_TIMESTAMP_V6_AT)
            if stored_ms < newest_ms:  # lower the checkpoint first: its times mark flushed records
                self._flusher.step_back(stored_ms, newest_ms)
            newest_ms = stored_ms
            if start < at:
                last_record, start = base + start, at
            at += size
        return base + start, base + at, last_record, newest_ms

    def _write(self, data: Data, stored_ms: int) -> None:
        if len(data):
            self._log.append(data, stored_ms)

    def _diverge(self, physical_offset: int, found: str, remedy: str = "") -> LogDiverged:
        """Cut the log where it differs from the master's log, and refuse all later appends."""
        assert physical_offset >= self._dispatcher.position, "dispatched records are not cut"
        if physical_offset < self._log.max_offset:
            self._flusher.cut_log(physical_offset)
        self.whole_end = self._due = physical_offset
        self._part_of_head = b""
        self.divergence = LogDiverged(physical_offset, found, remedy)
        return self.divergence

    # ---- the end of the log

    def cut_torn_tail(self) -> int:
        """Cut off an incomplete last record before a new connection. Return the end of the log for the report.
        Raises OSError: the log cannot be cut."""
        # The master sends from the reported end on: after an incomplete record it would continue inside the record.
        if self.whole_end < self._log.max_offset:
            self._flusher.cut_log(self.whole_end)
        self._due, self._part_of_head = self.whole_end, b""
        return self.whole_end

    def last_record(self) -> tuple[int, bytes] | None:
        """Return physical offset and bytes of the last whole record, or None without a record."""
        at = self._last_record
        record = None if at == _NO_RECORD else self._log.record_at(at)
        return None if record is None else (at, bytes(record))

    def record_starts(self, file_start: int) -> list[int]:
        """Return the physical offsets of the whole records of one log file, ascending. The function reads every head of
        the file, which takes 0.2 s for a million records."""
        file = self._log.queue.find(file_start)
        starts: list[int] = []
        if file is None:
            return starts
        at, view, high = 0, file.view, min(file.wrote, self.whole_end - file.start)
        while at < high:
            size, magic = _SIZE_AND_MAGIC.unpack_from(view, at)
            if magic == BLANK_MAGIC or size < RECORD_BYTES_MIN:
                break
            starts.append(file.start + at)
            at += size
        return starts

    # ---- dispatching

    def dispatch(self) -> bool:
        """Dispatch pending records; see `MessageStore.dispatch`."""
        dispatcher, limit = self._dispatcher, self.whole_end
        if self._is_sync:
            limit = min(limit, self._flusher.durable_offset)
        if dispatcher.pending:
            dispatcher.run(limit)
        position = dispatcher.position
        assert position <= self.whole_end, "only whole records are dispatched"
        file = self._log.queue.find(position) if position < limit and not dispatcher.pending else None
        if file is None:
            return False
        end = min(limit, file.end)
        if not (self._has_numpy and end - position >= _BULK_FROM_BYTES and self._dispatch_run(file, position, end)):
            self._dispatch_few(file, position, end)
        return position < dispatcher.position < limit

    def _dispatch_run(self, file: MappedFile, position: int, end: int) -> bool:
        """Dispatch a run of records of one file. Return False if no run begins at the position."""
        buffer = _release(file.view)
        records = next(scan.runs(buffer, file.start, position - file.start, end - file.start), None)
        run = None if records is None else records.text_only()
        if run is None or not len(run):
            return False

        run_end = file.start + run.end
        self._dispatcher.submit_run(lambda: self._enter_run(run), run_end)
        if end - position >= _FAR_BEHIND_BYTES:
            self._drop_cached(*(at // _RELEASED_BYTES * _RELEASED_BYTES - _CACHED_BYTES for at in (position, run_end)))
        return True

    def _drop_cached(self, start: int, end: int) -> None:
        """Drop a part of the log from the page cache if the part is on the disk. Mapped pages stay."""
        file = self._log.queue.find(start) if start < end <= self._flusher.durable_offset else None
        if file is not None:
            disk.drop_cached(file.fd, start - file.start, end - start)

    def _dispatch_few(self, file: MappedFile, position: int, end: int) -> None:
        """Dispatch records of one file one by one, and the blank after them."""
        view, start, delays_ms = file.view, file.start, self._delays_ms
        arrivals: list[DispatchRequest] = []
        at, high, reason = position - start, end - start, ""
        while at < high and len(arrivals) < _ONE_BY_ONE_MAX:
            size, magic = _SIZE_AND_MAGIC.unpack_from(view, at)
            if at + size > high:
                break
            if magic != BLANK_MAGIC:
                try:
                    arrivals.append(request_of(decode_record(view, at), delays_ms))
                except RecordCorrupt as error:
                    reason = error.reason
                    break
            at += size
        if arrivals:
            self._dispatcher.submit(arrivals, start + at, start + at)
        elif start + at > position:
            self._dispatcher.position = start + at
        if reason:
            divergence = self._diverge(start + at, reason)
            self._last_record = self._record_before(start + at)
            raise divergence

    def _record_before(self, physical_offset: int) -> int:
        for file in reversed(self._log.queue.files):
            if file.start < physical_offset and (starts := self.record_starts(file.start)):
                return starts[-1]
        return _NO_RECORD


def _found(head: bytes, physical_offset: int, file_end: int) -> str:
    """Describe the bytes at the position of a record's head."""
    if len(head) < _HEAD_BYTES:
        return f"{len(head)} bytes at the end of a file, which are not a record"
    size, magic, says, _, _ = _HEAD.unpack_from(head)
    if magic == BLANK_MAGIC:
        return f"the end of a file with {size} bytes left where there are {file_end - physical_offset}"
    if magic not in _MAGICS:
        return f"bytes with magic {magic & 0xFFFFFFFF:08x}, which are not a record"
    if says != physical_offset:
        return f"a record with the offset {says}"
    return f"a record of {size} bytes where the file has {file_end - physical_offset} left"
