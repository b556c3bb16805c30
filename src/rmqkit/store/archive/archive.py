"""What of a log is archived, and reading it: below a store's first message its queues go on here.

`Archive.refresh` looks which segments there are; then every queue's numbers are known without another request. All
calls wait for the place and may come from any thread; a broker makes them in threads of its own. Memory is bounded:

=================  ====================================================================================================
what was fetched   kept for the reads that follow, `CACHE_BYTES` in all, the latest read last
directories        of the segments that were read last, `DIRECTORY_BYTES` in all, and one that is larger
a read under way   `FETCH_BYTES` of a segment, that holds `CONTENT_BYTES`, or one block
a result           copies of its records: as many bytes as were asked for, or one record; it holds no block
=================  ====================================================================================================

What the numbers of the queues take is not: 24 bytes for each queue of each segment.

A segment is one of this log when it begins and ends where a file of the log does, and, where that file is still there,
when both begin with the same record. An archive of another log is refused before anything is read or written.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator

from msgspec import Struct

from rmqkit.errors import StoreError
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import INNER_BATCH, decode_record, record_properties
from rmqkit.store.archive.contents import identity_of, messages_of
from rmqkit.store.archive.places import Place
from rmqkit.store.archive.segment import Block, Directory, Queue, SegmentFile
from rmqkit.store.index.file import key_hash, keys_of
from rmqkit.store.log.scan import RECORD_BYTES_MIN
from rmqkit.store.reader import GetResult, GetStatus

__all__ = ["Archive", "segment_name"]

CACHE_BYTES = 64 << 20
"""Bytes of blocks that are kept for the reads that follow, with the numbers of their records."""

DIRECTORY_BYTES = 64 << 20
FETCH_BYTES = 1 << 20
CONTENT_BYTES = 4 << 20
_BLOCK_ROW_BYTES, _QUEUE_ROW_BYTES = 300, 270
"""What a row of a segment's blocks and of its queues takes in memory, as tracemalloc counts it."""
_NAME = re.compile(r"(\d{20})\.segment")
_COMPARED_MAX = 4096
_HEAD = struct.Struct(">i16xq8xi")
"""size, queueOffset and sysFlag at the start of a record."""

_log = logging.getLogger(__name__)


def segment_name(start: int) -> str:
    """The name of the segment of a log file."""
    return f"{start:020d}.segment"


class _Known(Struct, gc=False):
    """What is kept of every segment."""

    name: str
    size: int
    start: int
    end: int
    first_time: int
    last_time: int


class _Numbers(Struct):
    """The numbers that segments have of a queue: from ``firsts`` to before ``ends``, oldest first."""

    segments: list[_Known]
    firsts: array[int]
    ends: array[int]


class _Rows(Struct):
    """A block, and where its records lie: numbers from ``numbers`` to before ``ends``, between two of ``bounds``."""

    view: memoryview
    numbers: array[int]
    ends: array[int]
    bounds: array[int]

    @property
    def held_bytes(self) -> int:
        """What it takes in memory."""
        return self.view.nbytes + 24 * len(self.numbers)


class Archive:
    """The segments of one log.

    Attributes:
        place: where they are kept.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._segments: list[_Known] = []
        self._queues: dict[tuple[str, int], _Numbers] = {}
        self._open: OrderedDict[str, tuple[SegmentFile, list[Block]]] = OrderedDict()
        self._open_bytes = 0
        self._contents: OrderedDict[tuple[str, int], _Rows] = OrderedDict()
        self._content_bytes = 0

    # ---- what there is

    def refresh(self) -> int:
        """Look for segments that were added; returns how many. One that cannot be read counts as not there.
        Raises OSError: the place cannot be listed, or read."""
        listed = self.place.names()
        known = {one.name for one in self._segments}
        found = 0
        for name in sorted(listed):
            if name in known or _NAME.fullmatch(name) is None:
                continue
            try:
                self.add(name, listed[name])
                found += 1
            except StoreError as error:
                _log.warning("archive %s: %s: it is made anew while its log file is there", self.place, error)
        return found

    def add(self, name: str, size: int) -> None:
        """Take up a segment. Raises StoreError: it is none. Raises OSError: it cannot be read."""
        directory = self._segment_file(name, size).directory
        known = _Known(name, size, directory.start, directory.end, directory.first_time, directory.last_time)
        if not self._segments or self._segments[-1].start < known.start:
            # The queues first: what `covered` counts the retention may delete, and by then its messages have to be
            # found here.
            _enter(self._queues, known, directory)
            self._segments = [*self._segments, known]
            return
        # Written late, by hand: the numbers are put together anew, in the order of the log.
        segments = sorted([*self._segments, known], key=lambda one: one.start)
        queues: dict[tuple[str, int], _Numbers] = {}
        for one in segments:
            _enter(queues, one, self._segment_file(one.name, one.size).directory)
        self._segments, self._queues = segments, queues

    def covered(self, start: int) -> int:
        """Physical offset up to which the log is archived without a gap from an offset on."""
        for one in self._segments:
            if one.start == start:
                start = one.end
        return start

    def check(self, first_record: Callable[[int], bytes | None], log_end: int) -> None:
        """Compare the newest segments with the log.

        Args:
            first_record: the first record of the log file that begins at an offset, None when that is gone.
            log_end: where the log ends.

        Raises:
            StoreError: they are those of another log.
            OSError: the place cannot be read.
        """
        if self._segments and self._segments[-1].end > log_end:
            raise StoreError(
                f"archive {self.place} reaches to {self._segments[-1].end} and the log ends at {log_end}: it is that "
                "of another store, or this one lost its end; give another archive, or bring the store back"
            )
        for one in self._segments:
            # Offsets alone do not tell logs apart, and the retention deletes files on the word of the segments: those
            # of another store would cost all messages.
            record = first_record(one.start)
            if record is not None and identity_of(record) != self._segment_file(one.name, one.size).directory.identity:
                raise StoreError(
                    f"archive {self.place} is that of another store: {one.name} and the log's file of that offset "
                    "begin with different records; give another archive"
                )

    def min_offset(self, topic: str, queue_id: int, otherwise: int) -> int:
        """The first message of a queue that is archived, or ``otherwise`` where that is lower or none is."""
        rows = self._queues.get((topic, queue_id))
        return otherwise if rows is None else min(otherwise, rows.firsts[0])

    def has(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Whether a message, or one behind it, is archived."""
        rows = self._queues.get((topic, queue_id))
        return rows is not None and rows.firsts[0] <= queue_offset < rows.ends[-1]

    @property
    def segment_count(self) -> int:
        """How many segments there are."""
        return len(self._segments)

    # ---- reading

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int,
        bytes_max: int,
        codes: frozenset[int] | None = None,
        accept: Callable[[memoryview], bool] | None = None,
        tags_code: Callable[[bytes], int] | None = None,
    ) -> GetResult:
        """Read a queue from a message on, as `Reader.get` reads the log; offsets of the result are the archive's own.
        It ends where the segment ends: whoever waits for one object waits for no other.

        Args:
            codes: tag codes wanted, None for all; ``tags_code`` makes one of a record's TAGS.
            accept: a further test of the record itself.

        Raises:
            StoreError: a segment was changed.
            OSError: the place cannot be read.
        """
        result = GetResult(
            GetStatus.NO_MATCHED_MESSAGE, queue_offset, self.min_offset(topic, queue_id, queue_offset), 0
        )
        scanned = 0
        for _, following, record in self._from(topic, queue_id, queue_offset):
            if result.records and (result.size + len(record) > bytes_max or len(result.records) >= count_max):
                break
            scanned += len(record)
            # Not before the test above: a record that does not fit is the first of the next pull.
            result.next_begin_offset = following
            if _is_wanted(record, codes, accept, tags_code):
                result.records.append(_copied(record))
                result.size += len(record)
                result.status = GetStatus.FOUND
            # A filter that matches little must not keep its turn for a whole segment: the consumer asks again from here
            # on.
            elif scanned > 16 * bytes_max:
                break
        return result

    def segment_of(self, topic: str, queue_id: int, queue_offset: int) -> str:
        """The name of the segment that `get` reads; empty when the archive has nothing of the queue from there on."""
        known = self._holding(topic, queue_id, queue_offset)
        return "" if known is None else known.name

    def _holding(self, topic: str, queue_id: int, queue_offset: int) -> _Known | None:
        rows = self._queues.get((topic, queue_id))
        if rows is None:
            return None
        index = bisect_right(rows.ends, queue_offset)
        return rows.segments[index] if index < len(rows.segments) else None

    def _from(self, topic: str, queue_id: int, queue_offset: int) -> Iterator[tuple[int, int, memoryview]]:
        """Number, the number after it, and record of the messages of a queue from about one on, block by block, up to
        the end of the segment that has the first of them."""
        known = self._holding(topic, queue_id, queue_offset)
        if known is not None:
            yield from self._of(known, topic, queue_id, lambda block: block.first <= queue_offset, queue_offset)

    def _of(
        self,
        known: _Known,
        topic: str,
        queue_id: int,
        is_before: Callable[[Block], bool],
        queue_offset: int = -1,
    ) -> Iterator[tuple[int, int, memoryview]]:
        """The messages that a segment has of a queue, from the last block on that lies before what is looked for; of
        that only messages behind ``queue_offset``, or the one that holds it."""
        segment, blocks = self._opened(known)
        queue = next(one for one in segment.directory.queues if (one.topic, one.queue_id) == (topic, queue_id))
        own = range(queue.block, queue.block_end)
        first = max(0, bisect_left(own, True, key=lambda block: not is_before(blocks[block])) - 1)
        for block in own[first:]:
            rows = self._content(segment, blocks, block, queue.block_end)
            for at in range(bisect_right(rows.ends, queue_offset), len(rows.ends)):
                yield rows.numbers[at], rows.ends[at], rows.view[rows.bounds[at] : rows.bounds[at + 1]]

    def record_at(self, physical_offset: int) -> memoryview | None:
        """The record at an offset of the log, None where none begins. Raises StoreError, OSError."""
        at = bisect_right(self._segments, physical_offset, key=lambda one: one.start) - 1
        if at < 0 or physical_offset >= self._segments[at].end:
            return None
        segment, blocks = self._opened(self._segments[at])
        place = segment.place_of(physical_offset)
        if place is None:
            return None
        if not any(
            queue.topic or queue.queue_id >= 0 for queue in segment.directory.queues if _has(queue, place.block)
        ):
            return None  # bytes that are no record
        rows = self._content(segment, blocks, place.block, place.block + 1)
        at = bisect_right(rows.bounds, place.at)
        return _copied(rows.view[place.at : rows.bounds[at]])

    def query(
        self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int, *, bytes_max: int
    ) -> list[memoryview]:
        """Records that have a key, stored between two times; the newest segments first. One that does not fit into
        ``bytes_max`` any more is left out, but for the first. Raises StoreError, OSError."""
        found: list[memoryview] = []
        hashed, left = key_hash(topic, key), _COMPARED_MAX
        for known in reversed(self._segments):
            if known.last_time < begin_ms or known.first_time > end_ms:
                continue
            segment, _ = self._opened(known)
            for physical_offset in segment.offsets_of(hashed):
                # A hash has 31 bits, and one key may be that of every message: each comparison may fetch a block.
                left -= 1
                if len(found) >= count_max or left < 0:
                    return found
                record = self.record_at(physical_offset)
                if record is None or not _has_key(record, topic, key, begin_ms, end_ms):
                    continue
                if len(record) <= bytes_max or not found:
                    found.append(record)
                    bytes_max -= len(record)
        return found

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """The first message stored at or after a time; None when the archive has none. Raises StoreError, OSError."""
        rows = self._queues.get((topic, queue_id))
        if rows is None:
            return None
        for known in rows.segments:
            if known.last_time >= timestamp_ms:
                for number, _, record in self._of(known, topic, queue_id, lambda one: one.first_time < timestamp_ms):
                    if decode_record(record).store_timestamp >= timestamp_ms:
                        return number
        return None

    # ---- what is kept

    def _segment_file(self, name: str, size: int) -> SegmentFile:
        return SegmentFile(name, lambda position, count: self.place.read(name, position, count), size)

    def _opened(self, known: _Known) -> tuple[SegmentFile, list[Block]]:
        with self._lock:
            found = self._open.get(known.name)
            if found is not None:
                self._open.move_to_end(known.name)
                return found
        # Without the lock: who waits for one object must not hold up those who read another. Two may fetch the same one
        # then.
        segment = self._segment_file(known.name, known.size)
        found = segment, segment.blocks()
        with self._lock:
            if known.name not in self._open:
                self._open[known.name] = found
                self._open_bytes += _directory_bytes(*found)
            while self._open_bytes > DIRECTORY_BYTES and len(self._open) > 1:
                self._open_bytes -= _directory_bytes(*self._open.popitem(last=False)[1])
        return found

    def _content(self, segment: SegmentFile, blocks: list[Block], number: int, end: int) -> _Rows:
        """A block; those behind it are fetched with it, as far as the queue goes."""
        with self._lock:
            found = self._contents.get((segment.name, number))
            if found is not None:
                self._contents.move_to_end((segment.name, number))
                return found
        # By what the blocks hold, too: a MiB of bodies that are alike may hold gigabytes.
        last, size, content_bytes = number, 0, 0
        while last < end:
            size += blocks[last].stored_bytes
            content_bytes += blocks[last].bytes
            if last > number and (size > FETCH_BYTES or content_bytes > CONTENT_BYTES):
                break
            last += 1
        fetched = [_rows(segment.name, content) for content in segment.contents(blocks[number:last])]
        with self._lock:
            # Another thread may have fetched the same blocks meanwhile: counted twice, they would shrink the cache for
            # good.
            for at, rows in enumerate(fetched, number):
                if (segment.name, at) not in self._contents:
                    self._contents[segment.name, at] = rows
                    self._content_bytes += rows.held_bytes
            while self._content_bytes > CACHE_BYTES and len(self._contents) > 1:
                self._content_bytes -= self._contents.popitem(last=False)[1].held_bytes
        return fetched[0]


def _copied(record: memoryview) -> memoryview:
    """A record by itself: a slice would hold its whole block for as long as an answer waits to be sent."""
    return memoryview(bytes(record))


def _directory_bytes(segment: SegmentFile, blocks: list[Block]) -> int:
    parts = len(segment.directory.places) + len(segment.directory.keys)
    return _BLOCK_ROW_BYTES * (len(blocks) + parts) + _QUEUE_ROW_BYTES * len(segment.directory.queues)


def _has(queue: Queue, block: int) -> bool:
    return queue.block <= block < queue.block_end


def _enter(queues: dict[tuple[str, int], _Numbers], known: _Known, directory: Directory) -> None:
    """Add the numbers of a segment, behind those of all before it."""
    for queue in directory.queues:
        place = (queue.topic, queue.queue_id)
        if not queue.topic:
            continue
        rows = queues.get(place)
        if rows is None or queue.first < rows.ends[-1]:  # numbers that begin again: of a topic that was made again
            queues[place] = _Numbers([known], array("q", [queue.first]), array("q", [queue.end]))
        else:
            rows.segments.append(known)  # others read meanwhile: the ends last, by which they look
            rows.firsts.append(queue.first)
            rows.ends.append(queue.end)


def _rows(name: str, content: bytes) -> _Rows:
    """Number the records of a block. Raises StoreError: it does not consist of records."""
    rows = _Rows(memoryview(content), array("q"), array("q"), array("q", [0]))
    position = 0
    while position < len(content):
        size, number, sys_flag = _HEAD.unpack_from(content, position)
        if size < RECORD_BYTES_MIN or position + size > len(content):
            raise StoreError(f"{name} has a block with a record of {size} bytes")
        count = messages_of(decode_record(content, position)) if sys_flag & INNER_BATCH else 1
        rows.numbers.append(number)
        rows.ends.append(number + count)
        position += size
        rows.bounds.append(position)
    return rows


def _is_wanted(
    record: memoryview,
    codes: frozenset[int] | None,
    accept: Callable[[memoryview], bool] | None,
    tags_code: Callable[[bytes], int] | None,
) -> bool:
    if codes is not None and tags_code is not None:
        tags = find_property(record_properties(record), b"TAGS")
        if (tags_code(tags) if tags else 0) not in codes:
            return False
    return accept is None or accept(record)


def _has_key(record: memoryview, topic: str, key: str, begin_ms: int, end_ms: int) -> bool:
    found = decode_record(record)
    return found.topic == topic and begin_ms <= found.store_timestamp <= end_ms and key in keys_of(found.properties)
