"""Reads: a pull is a slice of a consume queue and the records of its entries (``DefaultMessageStore.getMessage``).

Entries are unpacked in one call, filtered by tag code, and turned into memoryviews of the mapped log: nothing is copied
or decoded. A caller that sends all records requests them *joined*, because a write of many pieces costs more than a
copy. Contiguous records are then one slice of the log. Other records are copied into one buffer, by the compiled core
if it is installed (`rmqkit.protocol.core.SelectRecords`). A pull stops at the first of these limits: the requested
number of messages, the bytes or messages allowed from memory or disk, the scanned entries, the end of the queue file.
The first message is always returned as a whole.
This module also finds an offset by store time. Use this module only in the owner thread of the store. Source: store.md
§16, §17.1.
"""

from __future__ import annotations

import enum
import logging
import os
import shlex
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from rmqkit.core import CORE
from rmqkit.protocol.names import is_light
from rmqkit.protocol.record import has_sound_body, record_topic
from rmqkit.store.lite.lite_queues import LiteQueue
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.queues.base import BLANK_SIZE, ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BatchQueue
from rmqkit.store.queues.consume_queue import ENTRY, ENTRY_BYTES, ConsumeQueue
from rmqkit.store.queues.queue_ext import ExtUnit, is_address
from rmqkit.store.settings import StoreSettings

__all__ = ["EntryTest", "GetResult", "GetStatus", "Reader", "may_return"]

EntryTest: TypeAlias = Callable[[int | None, ExtUnit | None], bool]
"""A function that returns True if an entry matches. Its arguments are the tag code (None if unknown) and the extension
unit (None without extension).
"""

_RESULT_BYTES_MAX = 128 << 20
_HEAD = struct.Struct(">i8xi4xqq")
"""The fields size, queueId, queueOffset and physicalOffset of a record."""
_I32_MIN, _I32_MAX = -(1 << 31), (1 << 31) - 1


_log = logging.getLogger(__name__)


AnyQueue = ConsumeQueueBase | LiteQueue
"""A queue with a folder of its own, or the light queue of a lite topic."""


class GetStatus(enum.Enum):
    """The result of a read; the names are the remarks of a pull response. Source: store.md §16.1."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    NOT_IN_LOG = "NOT_IN_LOG"
    """A status of rmqkit that is never sent: the log has deleted the message, which must be fetched before it can be
    read.
    """


_FOUND, _NO_MATCHED = GetStatus.FOUND, GetStatus.NO_MATCHED_MESSAGE  # member access of an enumeration costs a call


class GetResult(Struct):
    """The messages that a read found, and the state of the queue.

    Attributes:
        next_begin_offset: queue offset to read from next.
        records: stored records, as slices of the mapped log. A slice stays valid while it is referenced. A slice may
            contain several records if ``joined_count`` is set.
        joined_count: total number of records if a slice may contain several; else 0.
        suggest_slave: whether the reader lags so far behind that a slave should serve it.
        size: bytes of the records.
    """

    status: GetStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    records: list[memoryview] = []
    suggest_slave: bool = False
    size: int = 0
    joined_count: int = 0

    @property
    def count(self) -> int:
        """Number of records found."""
        return self.joined_count or len(self.records)


class Reader:
    """Reads of the queues of one store.

    Attributes:
        doubted_end: end of the records that an earlier process wrote, or that a failed flush may have damaged. Such a
            record is checked before it is returned: it must match its entry and have its original body.
    """

    def __init__(self, log: CommitLog, settings: StoreSettings) -> None:
        self._log = log
        self._settings = settings
        self.doubted_end = 0
        self._logged_lost: set[AnyQueue] = set()
        self._select = CORE.select_records
        self._memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * settings.memory_ratio_max // 100

    def get(
        self,
        queue: AnyQueue,
        queue_offset: int,
        count_max: int,
        codes: frozenset[int] | None,
        accept: Callable[[memoryview], bool] | None = None,
        accept_entry: EntryTest | None = None,
        *,
        joins: bool = False,
    ) -> GetResult:
        """Read messages from an offset on.

        Args:
            codes: tag codes to accept, None for all.
            accept: an additional filter for the record itself.
            accept_entry: an additional filter for the entry, applied before the record is accessed.
            joins: whether records can be joined.
        """
        low, high = queue.min_offset, queue.max_offset
        if high == 0:
            return GetResult(GetStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
        if queue_offset < low:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, low, low, high)
        if queue_offset == high:
            return GetResult(GetStatus.OFFSET_OVERFLOW_ONE, queue_offset, low, high)
        if queue_offset > high:
            return GetResult(GetStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
        count_max = max(1, count_max)
        if accept is None and accept_entry is None and isinstance(queue, ConsumeQueue):
            found = self._common(queue, queue_offset, count_max, codes, joins=joins)
            if found is not None:
                return found
        return self._general(queue, queue_offset, count_max, codes, accept, accept_entry)

    def _common(
        self, queue: ConsumeQueue, queue_offset: int, count_max: int, codes: frozenset[int] | None, *, joins: bool
    ) -> GetResult | None:
        """Execute a common pull, which reads mapped memory of one log file and compares only plain tag codes. Return
        None for other pulls.
        The result equals the result of `_general`, but checks with a known outcome are skipped. A test compares both.
        The loop is the plain version of the core's `SelectRecords`."""
        settings, log = self._settings, self._log
        scan_bytes = max(settings.filter_bytes_max, count_max * ENTRY_BYTES)
        count_max = min(count_max, settings.transfer_count_in_memory_max)
        raw = queue.read(queue_offset, count_max if codes is None else -(-scan_bytes // ENTRY_BYTES))
        if not raw:  # a file in between is missing: the general scan finds the start of the next file
            return None
        first = int.from_bytes(raw[:8], "big", signed=True)
        files = log.queue.files
        # In most cases this is the newest file, found without a call.
        file = files[-1] if files and first >= files[-1].start else log.queue.find(first)
        if file is None or log.max_offset - first > self._memory_bytes:
            return None
        doubted_end = self.doubted_end
        view, start, end = file.view, file.start, file.start + file.wrote
        bytes_max = left = settings.transfer_bytes_in_memory_max
        if joins and self._select is not None and first >= doubted_end:  # the next records have greater offsets
            selected = self._select(raw, view, start, end, codes, count_max, bytes_max)
            if selected is None:
                return None
            count, passed, size, at, copied = selected
            joined = view[at : at + size] if copied is None else memoryview(copied)
            return _found(queue, queue_offset + passed, [joined] if count else [], size, count)
        records: list[memoryview] = []
        add = records.append
        following = queue_offset
        for physical_offset, size, code in ENTRY.iter_unpack(raw):
            # Apply the limits only after the first record: otherwise a larger record would never be read.
            if records and (size > left or len(records) == count_max):
                break
            position = physical_offset - start
            if position < 0 or size <= 0 or physical_offset + size > end:
                return None
            following += 1
            if codes is not None and code not in codes:
                if _I32_MIN <= code <= _I32_MAX:
                    continue  # any other number is the address of an extension unit, which has the tag code
                return None
            record = view[position : position + size]
            if physical_offset < doubted_end and not self._is_sound(record, queue, following - 1, physical_offset):
                return None
            left -= size
            add(record)
        count = len(records)
        if joins and count > 1:
            records = [memoryview(b"".join(records))]
        return _found(queue, following, records, bytes_max - left, count if joins else 0)

    def _general(
        self,
        queue: AnyQueue,
        queue_offset: int,
        count_max: int,
        codes: frozenset[int] | None,
        accept: Callable[[memoryview], bool] | None,
        accept_entry: EntryTest | None,
    ) -> GetResult:
        """Execute any pull."""
        result = GetResult(GetStatus.NO_MATCHED_MESSAGE, queue_offset, queue.min_offset, queue.max_offset)
        scanned = queue.scan(queue_offset, max(self._settings.filter_bytes_max, count_max * queue.entry_bytes))
        if scanned is None:
            result.status = GetStatus.OFFSET_FOUND_NULL
            result.next_begin_offset = queue.next_file_offset(queue_offset)
            return result
        log, log_end, memory_bytes = self._log, self._log.max_offset, self._memory_bytes
        message_count, total_bytes, removed_below, last = 0, 0, -1, 0
        for physical_offset, size, stored_code, following, units in scanned:
            if result.records and self._is_full(
                message_count, units, total_bytes, size, count_max, is_near=log_end - physical_offset <= memory_bytes
            ):
                break
            if size <= 0 and may_return(queue):
                if not result.records:
                    result.status = GetStatus.OFFSET_FOUND_NULL
                break
            last = physical_offset
            # Also move past skipped entries: a consumer that gets the same offset again would make no progress.
            result.next_begin_offset = following
            if physical_offset < removed_below:
                continue
            if size > 0 and not _is_wanted(queue, stored_code, codes, accept_entry):
                continue  # a damaged entry is reported instead
            record = self._slice(queue, following - units, physical_offset, size)
            if record is None:
                if not result.records:
                    result.status = GetStatus.MESSAGE_WAS_REMOVING
                if size != BLANK_SIZE:
                    removed_below = log.min_offset if 0 <= physical_offset < log.min_offset else removed_below
                    self._log_lost(queue, following - units, physical_offset, size)
                continue
            if accept is not None and not accept(record):
                continue
            result.records.append(record)
            result.status = GetStatus.FOUND
            message_count += units
            total_bytes += size
            removed_below = -1
        result.size = total_bytes
        result.suggest_slave = log_end - last > memory_bytes
        return result

    def _slice(self, queue: AnyQueue, queue_offset: int, physical_offset: int, size: int) -> memoryview | None:
        """Return the record of an entry, or None if there is no valid record."""
        record = self._log.slice(physical_offset, size)
        if record is None or physical_offset >= self.doubted_end:
            return record
        return record if self._is_sound(record, queue, queue_offset, physical_offset) else None

    def _is_full(self, count: int, units: int, total_bytes: int, size: int, count_max: int, *, is_near: bool) -> bool:
        """Return True if a pull is full and must stop before its next record, of ``units`` messages and ``size``
        bytes."""
        settings = self._settings
        if count + units > count_max or total_bytes + size > _RESULT_BYTES_MAX:
            return True
        if is_near:
            return (
                total_bytes + size > settings.transfer_bytes_in_memory_max
                or count >= settings.transfer_count_in_memory_max
            )
        return total_bytes + size > settings.transfer_bytes_on_disk_max or count >= settings.transfer_count_on_disk_max

    def _is_sound(self, record: memoryview, queue: AnyQueue, queue_offset: int, physical_offset: int) -> bool:
        """Return True if a slice of the log is the record of an entry in a queue."""
        shift = _shift(record, queue, queue_offset, physical_offset)
        if shift is None or (self._settings.check_crc_on_recover and not has_sound_body(record)):
            return False
        return shift == 0 or self._is_run(queue, queue_offset, shift)

    def _is_run(self, queue: AnyQueue, queue_offset: int, shift: int) -> bool:
        """Return True if the record of the previous or next entry has a number that differs from its entry by the same
        shift.
        After a gap in the numbers, brokers enter all later records at an index that is too low. This is not damage."""
        for other in (queue_offset - 1, queue_offset + 1):
            physical_offset, size = queue.place(other)
            record = self._log.slice(physical_offset, size)
            if record is not None and _shift(record, queue, other, physical_offset) == shift:
                return True
        return False

    def _log_lost(self, queue: AnyQueue, queue_offset: int, physical_offset: int, size: int) -> None:
        """Log that an entry is skipped, once per queue."""
        if queue not in self._logged_lost:
            self._logged_lost.add(queue)
            _log.error(
                "%s-%d: skipping message %d: its entry says %d bytes at %d, and no valid record is there: "
                "stop the broker, and to see all of them, run: rmq store verify %s",
                *(queue.topic, queue.queue_id, queue_offset, size, physical_offset, shlex.quote(str(self._log.root))),
            )

    def is_in_memory(self, queue: AnyQueue, queue_offset: int) -> bool:
        """Return True if a message is so near the end of the log that it counts as cached."""
        physical_offset, size = queue.place(queue_offset)
        return size > 0 and self._log.max_offset - physical_offset <= self._memory_bytes

    # ---- time

    def store_time_at(self, queue: AnyQueue, queue_offset: int) -> int:
        """Return the storeTimestamp of a message, or -1 if the queue has no message at the offset."""
        if not queue.min_offset <= queue_offset < queue.max_offset:
            return -1
        return self._log.store_timestamp(*queue.place(queue_offset))

    def offset_by_time(self, queue: AnyQueue, timestamp_ms: int, *, upper: bool) -> int:
        """Return the offset of the first message at or after a time. With ``upper``, return the offset of the last
        message at or before the time.
        Source: store.md §16.2."""
        if queue.max_offset == 0:
            return 0
        if isinstance(queue, LiteQueue):
            return queue.offset_by_time(timestamp_ms, upper=upper)
        if isinstance(queue, BatchQueue):
            found = self._search_batches(queue, timestamp_ms, upper=upper)
        else:
            found = self._search(queue, timestamp_ms, upper=upper)
        return max(queue.min_offset, min(found, queue.max_offset))

    def _search(self, queue: ConsumeQueueBase, timestamp_ms: int, *, upper: bool) -> int:
        first, last = self._pick_file(queue, timestamp_ms, upper=upper)
        low, high = max(first, queue.min_offset), last
        if low > high:
            return queue.max_offset
        newest, oldest = self._time(queue, high), self._time(queue, low)
        if newest < 0 or oldest < 0:
            return 0
        if newest < timestamp_ms:
            return high if upper else high + 1
        if oldest > timestamp_ms:
            return 0 if upper else first
        # low becomes the first entry with a later time (upper), or with a time that is not earlier (lower)
        while low <= high:
            middle = (low + high) // 2
            time = self._time(queue, middle)
            if time < timestamp_ms or (upper and time == timestamp_ms):
                low = middle + 1
            else:
                high = middle - 1
        return low - 1 if upper else low

    def _pick_file(self, queue: ConsumeQueueBase, timestamp_ms: int, *, upper: bool) -> tuple[int, int]:
        """Return the first and last entry of the queue file to search in."""
        bounds = queue.file_bounds()
        if upper:
            for first, last in reversed(bounds):
                if self._time(queue, max(first, queue.min_offset)) <= timestamp_ms:
                    return first, last
            return bounds[0]
        for first, last in bounds:
            if self._time(queue, last) >= timestamp_ms:
                return first, last
        return bounds[-1]

    def _search_batches(self, queue: BatchQueue, timestamp_ms: int, *, upper: bool) -> int:
        """Return the offset of a time in a batch queue, like Apache's brokers.
        Only the newest file that begins early enough is searched, so the result is at most the last record of this
        file."""
        bounds = queue.file_bounds()
        first, last = next((file for file in reversed(bounds) if self._time(queue, file[0]) <= timestamp_ms), bounds[0])
        times = [self._time(queue, index) for index in range(first, last + 1)]
        if upper:
            at = max(0, bisect_right(times, timestamp_ms) - 1)
        else:
            at = min(bisect_left(times, timestamp_ms), len(times) - 1)
        return queue.base_offset(first + at)

    def _time(self, queue: ConsumeQueueBase, index: int) -> int:
        """Return the storeTimestamp of an entry's record: 0 (the earliest time) if the record has expired, -1 if it
        cannot be read."""
        physical_offset, size = queue.entry(index)[:2]
        if physical_offset < self._log.min_offset:
            return 0
        return self._log.store_timestamp(physical_offset, size)


def _found(queue: ConsumeQueue, following: int, records: list[memoryview], size: int, count: int) -> GetResult:
    """Create the result of a common pull. ``count``: see `GetResult.joined_count`."""
    status = _FOUND if records else _NO_MATCHED
    return GetResult(status, following, queue.min_offset, queue.max_offset, records, False, size, count)


def _shift(record: memoryview, queue: AnyQueue, queue_offset: int, physical_offset: int) -> int | None:
    """Return the difference between the number of a record and the number of its entry. Return None if the slice is not
    a complete record at its own offset with the queue's topic and queue id. Return 0 if the numbers cannot be compared:
    a record does not contain its numbers in light queues, and an entry of a batch queue has its own number.
    """
    if len(record) < _HEAD.size:
        return None
    size, queue_id, number, lies_at = _HEAD.unpack_from(record)
    if size != len(record) or lies_at != physical_offset:
        return None
    topic = record_topic(record)
    if topic == queue.topic_utf8:
        if queue_id != queue.queue_id:
            return None
    elif not topic or not is_light(queue.topic):
        return None
    if number == queue_offset or is_light(queue.topic) or not isinstance(queue, ConsumeQueue):
        return 0
    return int(number - queue_offset)


def may_return(queue: AnyQueue) -> bool:
    """Return True if a damaged entry may be sound again after a restart, so that a reader must not move past it: XFS
    and btrfs drop the pages of a failed sync."""
    return not isinstance(queue, LiteQueue) and queue.queue.unsynced_bytes > 0


def _is_wanted(queue: AnyQueue, stored_code: int, codes: frozenset[int] | None, accept_entry: EntryTest | None) -> bool:
    """Return True if an entry passes both filters. An entry with an unknown tag passes the tag filter."""
    if codes is None and accept_entry is None:
        return True
    code: int | None = stored_code
    unit = None
    if is_address(stored_code):
        unit = queue.unit(stored_code)
        code = None if unit is None else unit.tags_code
    if codes is not None and code is not None and ((code + (1 << 31)) & 0xFFFFFFFF) - (1 << 31) not in codes:
        return False
    return accept_entry is None or accept_entry(code, unit)
