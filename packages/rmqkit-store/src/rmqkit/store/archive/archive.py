"""The archive of a commit log: the list of its segments, and reads of the messages that the log has deleted.

`Archive.refresh` lists the existing segments. After a refresh, the number ranges of all queues are known without
further requests. Every call blocks until the storage of the segments (`Place`) answers. Any thread can call the
methods. A broker uses separate threads for these calls. Memory is bounded:

=================  ====================================================================================================
fetched bytes      cached for later reads, `CACHE_BYTES` in total; the most recently read ones stay
directories        of the most recently read segments: `DIRECTORY_BYTES` in total, plus one larger directory
a running read     `FETCH_BYTES` of a segment, with at most `CONTENT_BYTES` of content, or one block
a result           copies of its records: at most the requested number of bytes, or one record; it holds no block
=================  ====================================================================================================

Memory for the number ranges is not bounded: 24 bytes for each queue of each segment.

Segments may be deleted, replaced or damaged while they are read:

======================  ===============================================================================================
an object is missing    the place is listed again, and the read is repeated with the segments that exist
its footer differs      the same: the object was replaced
its footer is invalid   an ERROR; the segment counts as missing. A master writes it again while it has the log file
a block is damaged      an ERROR names object and messages; the read continues after the block
a segment is missing    an ERROR names the bytes (`gaps`) and, at a read, the messages; the read continues after them
the oldest are missing  a queue begins at the first message that remains
the place is empty      OSError: an unmounted place looks like this, and consumers must not skip its messages
======================  ===============================================================================================

An owner (`rmqkit.store.archive.identity`) decides which segments belong to this log. All other segments are ignored
with an ERROR. An archive without a segment of this log is refused before anything is read or written.
"""

from __future__ import annotations

import itertools
import logging
import re
import shlex
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from rmqkit.errors import BodyError, StoreError
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import INNER_BATCH, decode_record, record_properties
from rmqkit.store.archive.contents import identity_of, messages_of
from rmqkit.store.archive.places import Place
from rmqkit.store.archive.segment import Block, Directory, PlaceOf, Queue, SegmentFile
from rmqkit.store.index.file import key_hash, keys_of
from rmqkit.store.log.scan import pulled
from rmqkit.store.reader import GetResult, GetStatus
from rmqkit.system import threads

__all__ = ["Archive", "Found", "Owner", "segment_name", "segments_in"]

CACHE_BYTES = 64 << 20
"""Maximum size of the cached blocks in bytes, including the numbers of their records."""

DIRECTORY_BYTES = 64 << 20
FETCH_BYTES = 1 << 20
CONTENT_BYTES = 2 << 20
_BLOCK_ROW_BYTES, _QUEUE_ROW_BYTES = 300, 270
"""Memory per block and per queue of a segment, as measured by tracemalloc."""
_NAME = re.compile(r"(\d{20})\.parquet")
_COMPARED_MAX = 4096
_LISTS_MAX = 4
"""Number of times that one read lists the place again because its objects change."""

_SAID_MAX = 1024
"""Maximum number of logged faults to remember. A remembered fault is not logged again."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


def segment_name(start: int) -> str:
    """Return the name of the segment of a log file."""
    return f"{start:020d}.parquet"


def segments_in(place: Place) -> dict[str, int]:
    """Return the name and the length of each object that has the name of a segment. Raises OSError: the place cannot be
    listed."""
    return {name: size for name, size in place.names().items() if _NAME.fullmatch(name)}


class Found(Struct):
    """A segment that was found in a place: name, length, directory, and the CRC-32 of the directory."""

    name: str
    size: int
    directory: Directory
    digest: int


class Owner(Protocol):
    """An object that decides which segments belong to a log. ``root`` is the store directory of the log."""

    @property
    def root(self) -> Path: ...

    def settle(self, found: list[Found], place: str) -> None:
        """Determine the log of the segments in a place, unless it is known already. Raises StoreError: the segments
        belong to another log. Raises OSError: the result cannot be stored."""

    def owns(self, found: Found) -> bool:
        """Return True if a segment belongs to the log."""


class _Known(Struct, gc=False):
    """A known segment. Only these facts about the segment stay in memory."""

    name: str
    size: int
    start: int
    end: int
    first_time: int
    last_time: int
    identity: str
    digest: int


class _Numbers(Struct):
    """The numbers of one queue's messages in each segment: from ``firsts`` up to but not including ``ends``, oldest
    segment first. Rows before ``begin`` belong to a topic that was deleted and created again."""

    segments: list[_Known]
    firsts: array[int]
    ends: array[int]
    begin: int = 0


class _Changed(Exception):
    """An object is missing, or its directory differs from that of the known segment with the same name."""

    def __init__(self, known: _Known) -> None:
        self.known = known


class _Rows(Struct):
    """A block and its records. Record ``i`` has the numbers from ``numbers[i]`` up to but not including ``ends[i]``.
    Its bytes are between ``bounds[i]`` and ``bounds[i + 1]``."""

    view: memoryview
    numbers: array[int]
    ends: array[int]
    bounds: array[int]

    @property
    def held_bytes(self) -> int:
        """Number of bytes that the view and its numbers occupy in memory."""
        return self.view.nbytes + 24 * len(self.numbers)


class Archive:
    """The segments of one log.

    Args:
        place: the place of the segments.
        owner: decides which segments belong to the log; None accepts all.

    Attributes:
        place: the place of the segments.
        changes: how many times segments were added or dropped.
    """

    def __init__(self, place: Place, owner: Owner | None = None) -> None:
        self.place = place
        self._owner = owner
        self._listing = threads.Lock()
        self._lock = threads.Lock()
        self._segments: list[_Known] = []
        self._queues: dict[tuple[str, int], _Numbers] = {}
        self.changes = 0
        self._ignored: dict[str, int] = {}
        self._foreign: set[str] = set()
        self._first_name = 0
        self._open: OrderedDict[str, tuple[SegmentFile, list[Block]]] = OrderedDict()
        self._open_bytes = 0
        self._contents: OrderedDict[tuple[str, int, int], _Rows] = OrderedDict()
        self._content_bytes = 0
        self._said: OrderedDict[tuple[object, ...], None] = OrderedDict()

    # ---- the list of segments

    def refresh(self) -> int:
        """List the segments; return the number of added ones. A segment that cannot be read counts as missing.
        Raises OSError: the place cannot be listed or read, or is now empty.
        Raises StoreError: all segments belong to another log."""
        with self._listing:
            return self._list(None)

    def _list(self, suspect: _Known | None) -> int:
        listed = segments_in(self.place)
        if self._segments and not listed:
            raise OSError(
                f"archive {self.place} is empty now and had {len(self._segments)} segments: mount or restore it; "
                "if it was deleted for good, restart the broker"
            )
        self._first_name = min((int(name.partition(".")[0]) for name in listed), default=0)
        gone = [one for one in self._segments if listed.get(one.name) != one.size or one is suspect]
        known = {one.name for one in self._segments} - {one.name for one in gone}
        self._ignored = {name: size for name, size in self._ignored.items() if listed.get(name) == size}
        self._foreign &= self._ignored.keys()
        found, unread = [], sorted(listed.keys() - known - self._ignored.keys())
        while unread:
            one = self._found(name := unread.pop(0), listed[name])
            if one is None:
                continue
            found.append(one)
            # If two objects have swapped their names, the other object is not the known segment of its name, either.
            twins = [other for other in self._segments if other.start == one.directory.start and other.name in known]
            for twin in twins:
                gone.append(twin)
                known.remove(twin.name)
                unread.append(twin.name)
        return self._change(gone, found)

    def _found(self, name: str, size: int) -> Found | None:
        """Return a segment of the place, or None if the segment is invalid or was deleted meanwhile."""
        try:
            segment = self._segment_file(name, size)
        except FileNotFoundError:
            return None
        except StoreError as error:
            # The next listing reads it again: a repaired object may have the same length.
            start = int(name.partition(".")[0])
            missing = f"the log from {start} on is missing where the broker has no log file to write it again"
            self._lost(size, f"{error}: {missing}")
            return None
        return Found(name, size, segment.directory, segment.digest)

    def add(self, name: str, size: int) -> None:
        """Add a segment. Raises StoreError: the segment is invalid or belongs to another log. Raises OSError: the
        segment cannot be read.
        """
        segment = self._segment_file(name, size)
        with self._listing:
            self._ignored.pop(name, None)
            former = [one for one in self._segments if one.name == name]
            self._change(former, [Found(name, size, segment.directory, segment.digest)])

    def _change(self, gone: list[_Known], found: list[Found]) -> int:
        """Drop segments, and add the found segments that belong to the log. Return the number of added segments.

        Raises the errors of `refresh`.
        """
        if self._owner is not None:
            self._owner.settle(found, str(self.place))
        own: list[Found] = []
        for one in sorted(found, key=lambda one: (one.directory.start, one.name != segment_name(one.directory.start))):
            if self._owner is not None and not self._owner.owns(one):
                self._foreign.add(one.name)
                self._ignore(one, "belongs to another log: it is ignored; remove it, or give another archive")
            elif own and own[-1].directory.start == one.directory.start:
                self._ignore(one, f"begins where {own[-1].name} begins: it is ignored")
            else:
                own.append(one)
        self._drop(gone)
        for one in own:
            self._enter(one)
        self.changes += bool(gone or own)
        if self._foreign and not self._segments:
            raise StoreError(f"archive {self.place} belongs to another store: it has no segment of this log")
        return len(own)

    def _ignore(self, one: Found, why: str) -> None:
        self._ignored[one.name] = one.size
        _log.error("archive %s: %s %s", self.place, one.name, why)

    def _drop(self, gone: list[_Known]) -> None:
        names = {one.name for one in gone}
        if not names:
            return
        queues: dict[tuple[str, int], _Numbers] = {}
        for queue, rows in self._queues.items():
            if any(one.name in names for one in rows.segments):
                rows = _numbers(row for row in _rows_of(rows) if row[0].name not in names)
            if rows.segments:
                queues[queue] = rows
        self._segments, self._queues = [one for one in self._segments if one.name not in names], queues
        with self._lock:
            for name in names & self._open.keys():
                self._open_bytes -= _directory_bytes(*self._open.pop(name))

    def _enter(self, found: Found) -> None:
        directory = found.directory
        known = _Known(
            found.name,
            found.size,
            directory.start,
            directory.end,
            directory.first_time,
            directory.last_time,
            directory.identity,
            found.digest,
        )
        # Add the queues before the segment: retention may delete everything that `covered` includes, and a read must
        # find the deleted messages here by then.
        for queue in directory.queues:
            if queue.topic:
                self._enter_queue((queue.topic, queue.queue_id), known, queue)
        self._segments = sorted([*self._segments, known], key=lambda one: one.start)

    def _enter_queue(self, place: tuple[str, int], known: _Known, queue: Queue) -> None:
        rows = self._queues.get(place)
        if rows is not None and rows.segments[-1].start < known.start and queue.first >= rows.ends[-1]:
            rows.segments.append(known)  # append to ``ends`` last: concurrent reads search ``ends``
            rows.firsts.append(queue.first)
            rows.ends.append(queue.end)
            return
        new = (known, queue.first, queue.end)
        self._queues[place] = _numbers(
            sorted([*(_rows_of(rows) if rows is not None else ()), new], key=lambda row: row[0].start)
        )

    def covered(self, start: int) -> int:
        """Return the end of the part of the log that begins at an offset and is archived without a gap. Return the
        offset itself if nothing is archived there.
        """
        for one in self._segments:
            if one.start == start:
                start = one.end
        return start

    def gaps(self, log_begin: int, reached: int = 0) -> list[tuple[int, int]]:
        """Return the ranges of physical offsets that are neither archived nor in the log. The first range begins no
        earlier than the first segment; that segment counts even if it is unreadable.
        """
        found, end = [], min(self._first_name, self._segments[0].start) if self._segments else 0
        for one in self._segments:
            if end < min(one.start, log_begin):
                found.append((end, min(one.start, log_begin)))
            end = max(end, one.end)
        last = log_begin if self._segments else min(reached, log_begin)
        return [*found, (end, last)] if end < last else found

    def check(self, first_record: Callable[[int], bytes | None], log_end: int) -> None:
        """Compare the newest segments with the log.

        Args:
            first_record: returns the first record of the log file that begins at an offset, or None if the file is
                gone.

        Raises:
            StoreError: the segments belong to another log.
        """
        if self._segments and self._segments[-1].end > log_end:
            raise StoreError(
                f"archive {self.place} reaches to {self._segments[-1].end} and the log ends at {log_end}: it "
                "belongs to another store, or this store lost its end; give another archive, or restore the store"
            )
        for one in self._segments:
            # Offsets alone do not distinguish logs. Retention deletes the log files that segments cover: with the
            # segments of another store, all messages would be lost.
            record = first_record(one.start)
            if record is not None and identity_of(record) != one.identity:
                raise StoreError(
                    f"archive {self.place} belongs to another store: {one.name} and the log's file of that offset "
                    "begin with different records; give another archive"
                )

    def min_offset(self, topic: str, queue_id: int, otherwise: int) -> int:
        """Return the queue offset of the first archived message if it is less than ``otherwise``. Return ``otherwise``
        if not, or if no message is archived."""
        rows = self._queues.get((topic, queue_id))
        return otherwise if rows is None else min(otherwise, rows.firsts[rows.begin])

    def has(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if the archive has a message or a later message of the same queue."""
        rows = self._queues.get((topic, queue_id))
        return rows is not None and queue_offset < rows.ends[-1]

    @property
    def segment_count(self) -> int:
        """Number of known segments."""
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
        """Read messages of a queue from an offset on, like `Reader.get` for the log. The min and max offset in the
        result belong to the archive. The read stops at the end of the segment, so that a caller waits for one object
        only.

        Args:
            codes: tag codes to accept, None for all; ``tags_code`` computes the code from the TAGS of a record.
            accept: an additional filter for the record itself.

        Raises:
            StoreError: a segment is damaged.
            OSError: the place cannot be read.
        """
        return self._reading(
            lambda: self._get(topic, queue_id, queue_offset, count_max, bytes_max, codes, accept, tags_code)
        )

    def _get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        codes: frozenset[int] | None,
        accept: Callable[[memoryview], bool] | None,
        tags_code: Callable[[bytes], int] | None,
    ) -> GetResult:
        low = self.min_offset(topic, queue_id, queue_offset)
        result = GetResult(GetStatus.NO_MATCHED_MESSAGE, queue_offset, low, 0)
        rows = self._queues.get((topic, queue_id))
        index = -1 if rows is None else _index_of(rows, queue_offset)
        if rows is None or index < 0:
            return result
        if (first := rows.firsts[index]) > queue_offset:
            # No consumer expects the oldest messages any more. Messages missing between two segments are lost.
            result.next_begin_offset = first
            if index == rows.begin:
                result.status = GetStatus.OFFSET_TOO_SMALL
            else:
                before = rows.segments[index - 1]
                self._lost(before.end, f"{_named(topic, queue_id, queue_offset, first)} are not in it: no segment has "
                           f"the log from {before.end} to {rows.segments[index].start}")  # fmt: skip
            return result
        scanned = 0
        for _, following, record in self._from(topic, queue_id, queue_offset):
            if record is None:
                result.next_begin_offset = following
                continue
            if result.records and (result.size + len(record) > bytes_max or len(result.records) >= count_max):
                break
            scanned += len(record)
            # Set it after the test above: if a record does not fit, the next pull starts with this record.
            result.next_begin_offset = following
            if _is_wanted(record, codes, accept, tags_code):
                result.records.append(_copied(record))
                result.size += len(record)
                result.status = GetStatus.FOUND
            # Stop here: a filter with few matches must not read a whole segment in one call. The next pull continues
            # here.
            elif scanned > 16 * bytes_max:
                break
        return result

    def segment_of(self, topic: str, queue_id: int, queue_offset: int) -> str:
        """Return the name of the segment that `get` reads. The name is empty if the archive has neither the message nor
        a later message of the queue."""
        known = self._holding(topic, queue_id, queue_offset)
        return "" if known is None else known.name

    def _holding(self, topic: str, queue_id: int, queue_offset: int) -> _Known | None:
        rows = self._queues.get((topic, queue_id))
        index = -1 if rows is None else _index_of(rows, queue_offset)
        return None if rows is None or index < 0 else rows.segments[index]

    def _from(self, topic: str, queue_id: int, queue_offset: int) -> Iterator[tuple[int, int, memoryview | None]]:
        """Yield the messages of a queue from an offset on, block by block, each as its number, the next number and the
        record. Stop at the end of the segment that has the first message."""
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
    ) -> Iterator[tuple[int, int, memoryview | None]]:
        """Yield the messages of a queue in a segment, from the last block for which ``is_before`` is true.

        Records before the record with ``queue_offset`` are omitted. A damaged block yields one row without a record for
        all its messages.
        """
        try:
            segment, blocks = self._opened(known)
        except StoreError as error:
            rows = self._queues[topic, queue_id]
            at = rows.segments.index(known)
            self._lost(known.digest, f"{_named(topic, queue_id, rows.firsts[at], rows.ends[at])} are skipped: {error}")
            yield rows.firsts[at], rows.ends[at], None
            return
        queue = next(one for one in segment.directory.queues if (one.topic, one.queue_id) == (topic, queue_id))
        own = range(queue.block, queue.block_end)
        first = max(0, bisect_left(own, True, key=lambda block: not is_before(blocks[block])) - 1)
        for block in own[first:]:
            try:
                rows_of_block = self._content(known, segment, blocks, block, queue.block_end)
            except StoreError as error:
                begin, end = blocks[block].first, blocks[block + 1].first if block + 1 < queue.block_end else queue.end
                self._lost((known.digest, block), f"{_named(topic, queue_id, begin, end)} are skipped: {error}")
                yield begin, end, None
                continue
            for at in range(bisect_right(rows_of_block.ends, queue_offset), len(rows_of_block.ends)):
                bounds = rows_of_block.bounds
                yield rows_of_block.numbers[at], rows_of_block.ends[at], rows_of_block.view[bounds[at] : bounds[at + 1]]

    def record_at(self, physical_offset: int) -> memoryview | None:
        """Return the record at an offset of the log, or None if no record begins there.
        Raises StoreError: the segment is damaged at this offset. Raises OSError: the place cannot be read."""
        return self._reading(lambda: self._record_at(physical_offset))

    def _record_at(self, physical_offset: int) -> memoryview | None:
        at = bisect_right(self._segments, physical_offset, key=lambda one: one.start) - 1
        if at < 0 or physical_offset >= self._segments[at].end:
            return None
        known = self._segments[at]
        segment, blocks = self._opened(known)
        place = self._place_of(known, segment, physical_offset)
        if place is None:
            return None
        if not any(
            queue.topic or queue.queue_id >= 0 for queue in segment.directory.queues if _has(queue, place.block)
        ):
            return None  # bytes that are not a record
        rows = self._content(known, segment, blocks, place.block, place.block + 1)
        at = bisect_right(rows.bounds, place.at)
        return _copied(rows.view[place.at : rows.bounds[at]])

    def _place_of(self, known: _Known, segment: SegmentFile, physical_offset: int) -> PlaceOf | None:
        return self._checked(known, lambda: segment.place_of(physical_offset))

    def query(
        self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int, *, bytes_max: int
    ) -> list[memoryview]:
        """Return the records that have a key and were stored between two times. The newest segments come first. A
        record that no longer fits in ``bytes_max`` is omitted, unless it is the first. Damaged records are omitted with
        an ERROR.
        Raises OSError: the place cannot be read.
        """
        return self._reading(lambda: self._query(topic, key, count_max, begin_ms, end_ms, bytes_max))

    def _query(
        self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int, bytes_max: int
    ) -> list[memoryview]:
        found: list[memoryview] = []
        hashed, left = key_hash(topic, key), _COMPARED_MAX
        for known in reversed(self._segments):
            if known.last_time < begin_ms or known.first_time > end_ms:
                continue
            for physical_offset in self._offsets_of(known, hashed):
                # A hash has 31 bits, and every message may have the same key: each comparison may fetch a block.
                left -= 1
                if len(found) >= count_max or left < 0:
                    return found
                try:
                    record = self._record_at(physical_offset)
                except StoreError as error:
                    self._lost(physical_offset, f"the record at {physical_offset} is left out of a query: {error}")
                    continue
                if record is None or not _has_key(record, topic, key, begin_ms, end_ms):
                    continue
                if len(record) <= bytes_max or not found:
                    found.append(record)
                    bytes_max -= len(record)
        return found

    def _offsets_of(self, known: _Known, hashed: int) -> Iterator[int]:
        """Yield the physical offsets of the records in a segment that have a key with a given hash."""
        try:
            segment, _ = self._opened(known)
            yield from self._checked(known, lambda: list(itertools.islice(segment.offsets_of(hashed), _COMPARED_MAX)))
        except StoreError as error:
            where = f"records from {known.start} to {known.end} are left out of queries"
            self._lost((known.digest, "keys"), f"{where}: {error}")

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """Return the queue offset of the first message stored at or after a time, or None if there is no such message.

        Raises OSError: the place cannot be read.
        """
        return self._reading(lambda: self._offset_by_time(topic, queue_id, timestamp_ms))

    def _offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        rows = self._queues.get((topic, queue_id))
        if rows is None:
            return None
        for known in rows.segments[rows.begin :]:
            if known.last_time >= timestamp_ms:
                for number, _, record in self._of(known, topic, queue_id, lambda one: one.first_time < timestamp_ms):
                    if record is not None and decode_record(record).store_timestamp >= timestamp_ms:
                        return number
        return None

    # ---- changes during a read

    def _reading(self, read: Callable[[], T]) -> T:
        """Run a read. If an object was deleted or replaced, list the place and read again."""
        for _ in range(_LISTS_MAX):
            try:
                return read()
            except _Changed as changed:
                with self._listing:
                    # Another thread may have listed the place meanwhile.
                    if any(one is changed.known for one in self._segments):
                        self._list(changed.known)
        raise OSError(f"archive {self.place} changes while it is read")

    def _checked(self, known: _Known, read: Callable[[], T]) -> T:
        """Read a part of a segment. Raises _Changed: the object was deleted or replaced.
        Raises StoreError: the part is damaged."""
        try:
            return read()
        except FileNotFoundError:
            raise _Changed(known) from None
        except StoreError:
            self._compare(known)
            raise

    def _compare(self, known: _Known) -> SegmentFile:
        """Open a segment again. Raises _Changed: the object was deleted or replaced."""
        try:
            segment = self._segment_file(known.name, known.size)
        except (FileNotFoundError, StoreError):
            raise _Changed(known) from None
        if segment.digest != known.digest:
            raise _Changed(known)
        return segment

    def _lost(self, key: object, said: str) -> None:
        """Log that messages cannot be read. Do not log the same ``key`` and text twice."""
        with self._lock:
            is_said = (key, said) in self._said
            self._said[key, said] = None
            while len(self._said) > _SAID_MAX:
                self._said.popitem(last=False)
        if not is_said:
            repair = "" if self._owner is None else f" --repair-from {shlex.quote(str(self._owner.root))}"
            verify = f"rmq archive verify {shlex.quote(str(self.place))}{repair}"
            _log.error("archive %s: %s; run: %s", self.place, said, verify)

    # ---- caches

    def _segment_file(self, name: str, size: int) -> SegmentFile:
        return SegmentFile(name, lambda position, count: self.place.read(name, position, count), size)

    def _opened(self, known: _Known) -> tuple[SegmentFile, list[Block]]:
        with self._lock:
            found = self._open.get(known.name)
            if found is not None and found[0].digest == known.digest:
                self._open.move_to_end(known.name)
                return found
        # Fetch without the lock: a read that waits for one object must not block reads of other objects. As a result,
        # two threads may fetch the same object.
        segment = self._compare(known)
        found = segment, self._checked(known, segment.blocks)
        with self._lock:
            if known.name in self._open:
                self._open_bytes -= _directory_bytes(*self._open.pop(known.name))
            self._open[known.name] = found
            self._open_bytes += _directory_bytes(*found)
            while self._open_bytes > DIRECTORY_BYTES and len(self._open) > 1:
                self._open_bytes -= _directory_bytes(*self._open.popitem(last=False)[1])
        return found

    def _content(self, known: _Known, segment: SegmentFile, blocks: list[Block], number: int, end: int) -> _Rows:
        """Return a block. Fetch the next blocks of the queue with the same request. Raises StoreError: the block is
        damaged.
        """
        key = segment.name, segment.digest, number
        with self._lock:
            found = self._contents.get(key)
            if found is not None:
                self._contents.move_to_end(key)
                return found
        # Limit the content, too: one MiB of compressed identical bodies may decompress to gigabytes.
        last, size, content_bytes = number, 0, 0
        while last < end:
            size += blocks[last].stored_bytes
            content_bytes += blocks[last].bytes
            if last > number and (size > FETCH_BYTES or content_bytes > CONTENT_BYTES):
                break
            last += 1
        contents = self._checked(known, lambda: segment.contents(blocks[number:last]))
        fetched = [_rows(segment.name, content) for content in contents]
        with self._lock:
            # Another thread may have fetched the same blocks. Counting them twice would
            # shrink the cache permanently.
            for at, rows in enumerate(fetched, number):
                if (segment.name, segment.digest, at) not in self._contents:
                    self._contents[segment.name, segment.digest, at] = rows
                    self._content_bytes += rows.held_bytes
            while self._content_bytes > CACHE_BYTES and len(self._contents) > 1:
                self._content_bytes -= self._contents.popitem(last=False)[1].held_bytes
        return fetched[0]


def _copied(record: memoryview) -> memoryview:
    """Return a copy of a record. A slice would keep the whole block in memory until the response is sent."""
    return memoryview(bytes(record))


def _directory_bytes(segment: SegmentFile, blocks: list[Block]) -> int:
    parts = len(segment.directory.places) + len(segment.directory.keys)
    return _BLOCK_ROW_BYTES * (len(blocks) + parts) + _QUEUE_ROW_BYTES * len(segment.directory.queues)


def _has(queue: Queue, block: int) -> bool:
    return queue.block <= block < queue.block_end


def _rows_of(rows: _Numbers) -> Iterator[tuple[_Known, int, int]]:
    return zip(rows.segments, rows.firsts, rows.ends, strict=True)


def _numbers(rows: Iterable[tuple[_Known, int, int]]) -> _Numbers:
    """Return the numbers of a queue from rows in log order."""
    found = _Numbers([], array("q"), array("q"))
    for known, first, end in rows:
        if found.ends and first < found.ends[-1]:
            found.begin = len(found.ends)  # the numbers begin again: the topic was created again
        found.segments.append(known)
        found.firsts.append(first)
        found.ends.append(end)
    return found


def _index_of(rows: _Numbers, queue_offset: int) -> int:
    """Return the index of the row that has a message, or of the first later row. Return -1 if there is neither."""
    index = bisect_right(rows.ends, queue_offset, lo=rows.begin)
    return index if index < len(rows.segments) else -1


def _named(topic: str, queue_id: int, first: int, end: int) -> str:
    return f"messages {first} to {end - 1} of queue {queue_id} of topic {topic}"


def _rows(name: str, content: bytes) -> _Rows:
    """Return the records of a block with their numbers. Raises StoreError: the block does not consist of records."""
    try:
        records = pulled(content)
    except BodyError as error:
        raise StoreError(f"{name} has a block that does not consist of records: {error}") from None
    numbers = records.field("queue_offset")
    ends = numbers + 1
    for row in (records.field("sys_flag") & INNER_BATCH).nonzero()[0].tolist():
        ends[row] = numbers[row] + messages_of(records.record(row))
    bounds = array("q", records.positions.tobytes())
    bounds.append(len(content))
    return _Rows(memoryview(content), array("q", numbers.tobytes()), array("q", ends.tobytes()), bounds)


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
