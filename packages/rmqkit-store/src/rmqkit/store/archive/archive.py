"""The archive of a commit log: the list of its segments, and reads of the messages that the log has deleted.

`Archive.refresh` lists the segments that exist; then the number ranges of all queues are known without another request.
Calls block on the place and may come from any thread; a broker makes them in its own threads. Memory is bounded:

=================  ====================================================================================================
fetched bytes      cached for later reads, `CACHE_BYTES` in total; the most recently read ones stay
directories        of the most recently read segments: `DIRECTORY_BYTES` in total, plus one that is larger
a read under way   `FETCH_BYTES` of a segment, that holds `CONTENT_BYTES`, or one block
a result           copies of its records: as many bytes as were requested, or one record; it holds no block
=================  ====================================================================================================

Memory for the number ranges is not bounded: 24 bytes for each queue of each segment.

Segments may be deleted, exchanged or damaged while they are read:

======================  ===============================================================================================
an object is missing    the place is listed again, and the read is repeated with the segments that exist
it has another footer   the same: the object was exchanged
it has a bad footer     an ERROR; the segment counts as missing. A master writes it again while it has the log file
a block is damaged      an ERROR names object and messages; the read continues after the block
a segment is missing    an ERROR names the bytes (`gaps`) and, at a read, the messages; the read continues after them
the oldest are missing  a queue begins at the first message that remains
nothing is there        OSError: a place that was not mounted looks like this, and nobody is moved past its messages
======================  ===============================================================================================

An owner (`rmqkit.store.archive.identity`) says which segments belong to this log. The others are ignored with an ERROR,
and an archive that has only others is refused before anything is read or written.
"""

from __future__ import annotations

import itertools
import logging
import re
import shlex
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from rmqkit.errors import StoreError
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import INNER_BATCH, decode_record, record_properties
from rmqkit.store.archive.contents import identity_of, messages_of
from rmqkit.store.archive.places import Place
from rmqkit.store.archive.segment import Block, Directory, PlaceOf, Queue, SegmentFile
from rmqkit.store.index.file import key_hash, keys_of
from rmqkit.store.log.scan import RECORD_BYTES_MIN
from rmqkit.store.reader import GetResult, GetStatus

__all__ = ["Archive", "Found", "Owner", "segment_name", "segments_in"]

CACHE_BYTES = 64 << 20
"""Bytes of blocks that are kept for the reads that follow, with the numbers of their records."""

DIRECTORY_BYTES = 64 << 20
FETCH_BYTES = 1 << 20
CONTENT_BYTES = 4 << 20
_BLOCK_ROW_BYTES, _QUEUE_ROW_BYTES = 300, 270
"""What a row of a segment's blocks and of its queues takes in memory, as tracemalloc counts it."""
_NAME = re.compile(r"(\d{20})\.segment")
_COMPARED_MAX = 4096
_LISTS_MAX = 4
"""How often one read lists the place again because its objects change."""

_SAID_MAX = 1024
"""Ranges of damage that were logged; each is logged once, until so many others were."""

_HEAD = struct.Struct(">i16xq8xi")
"""size, queueOffset and sysFlag at the start of a record."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


def segment_name(start: int) -> str:
    """The name of the segment of a log file."""
    return f"{start:020d}.segment"


def segments_in(place: Place) -> dict[str, int]:
    """Return name and length of the objects that are named like segments. Raises OSError: it cannot be listed."""
    return {name: size for name, size in place.names().items() if _NAME.fullmatch(name)}


class Found(Struct):
    """A segment that was found in a place: its name, its length, its directory and the CRC-32 of that."""

    name: str
    size: int
    directory: Directory
    digest: int


class Owner(Protocol):
    """Says which segments belong to the log of a store directory, ``root``."""

    @property
    def root(self) -> Path: ...

    def settle(self, found: list[Found], place: str) -> None:
        """Learn which log the segments of a place belong to, where that is not known yet.
        Raises StoreError: they belong to another log. Raises OSError: what was learned cannot be stored."""

    def owns(self, found: Found) -> bool:
        """Return whether a segment belongs to the log."""


class _Known(Struct, gc=False):
    """The facts about a segment that stay in memory."""

    name: str
    size: int
    start: int
    end: int
    first_time: int
    last_time: int
    identity: str
    digest: int


class _Numbers(Struct):
    """The numbers that segments have of a queue: from ``firsts`` to before ``ends``, oldest segment first. Rows before
    ``begin`` belong to a topic that was deleted and made again."""

    segments: list[_Known]
    firsts: array[int]
    ends: array[int]
    begin: int = 0


class _Changed(Exception):
    """An object is not there any more, or has another directory than the segment that was known by its name."""

    def __init__(self, known: _Known) -> None:
        self.known = known


class _Rows(Struct):
    """A block, and where its records lie: numbers from ``numbers`` to before ``ends``, between two of ``bounds``."""

    view: memoryview
    numbers: array[int]
    ends: array[int]
    bounds: array[int]

    @property
    def held_bytes(self) -> int:
        """Return the number of bytes that the view and its numbers occupy in memory."""
        return self.view.nbytes + 24 * len(self.numbers)


class Archive:
    """The segments of one log.

    Args:
        place: where they are kept.
        owner: says which segments belong to the log; None accepts all.

    Attributes:
        place: where they are kept.
        changes: how often segments were added or dropped.
    """

    def __init__(self, place: Place, owner: Owner | None = None) -> None:
        self.place = place
        self._owner = owner
        self._listing = threading.Lock()
        self._lock = threading.Lock()
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

    # ---- what there is

    def refresh(self) -> int:
        """Look which segments there are; returns how many were added. One that cannot be read counts as not there.
        Raises OSError: the place cannot be listed, or read, or is empty now.
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
            # Two objects have exchanged their names: the other one is not what was known by its name, either.
            twins = [other for other in self._segments if other.start == one.directory.start and other.name in known]
            for twin in twins:
                gone.append(twin)
                known.remove(twin.name)
                unread.append(twin.name)
        return self._change(gone, found)

    def _found(self, name: str, size: int) -> Found | None:
        """A segment of the place; None where it is none, or was deleted meanwhile."""
        try:
            segment = self._segment_file(name, size)
        except FileNotFoundError:
            return None
        except StoreError as error:
            # Read again at the next listing: a repaired one may have the same length.
            start = int(name.partition(".")[0])
            missing = f"the log from {start} on is missing where the broker has no log file to write it again"
            self._lost(size, f"{error}: {missing}")
            return None
        return Found(name, size, segment.directory, segment.digest)

    def add(self, name: str, size: int) -> None:
        """Take up a segment. Raises StoreError: it is none, or of another log. Raises OSError: it cannot be read."""
        segment = self._segment_file(name, size)
        with self._listing:
            self._ignored.pop(name, None)
            former = [one for one in self._segments if one.name == name]
            self._change(former, [Found(name, size, segment.directory, segment.digest)])

    def _change(self, gone: list[_Known], found: list[Found]) -> int:
        """Drop segments, and take up others that belong to the log; returns how many. Raises as `refresh`."""
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
        # The queues first: what `covered` counts the retention may delete, and by then its messages have to be found
        # here.
        for queue in directory.queues:
            if queue.topic:
                self._enter_queue((queue.topic, queue.queue_id), known, queue)
        self._segments = sorted([*self._segments, known], key=lambda one: one.start)

    def _enter_queue(self, place: tuple[str, int], known: _Known, queue: Queue) -> None:
        rows = self._queues.get(place)
        if rows is not None and rows.segments[-1].start < known.start and queue.first >= rows.ends[-1]:
            rows.segments.append(known)  # others read meanwhile: the ends last, by which they look
            rows.firsts.append(queue.first)
            rows.ends.append(queue.end)
            return
        new = (known, queue.first, queue.end)
        self._queues[place] = _numbers(
            sorted([*(_rows_of(rows) if rows is not None else ()), new], key=lambda row: row[0].start)
        )

    def covered(self, start: int) -> int:
        """Physical offset up to which the log is archived without a gap from an offset on."""
        for one in self._segments:
            if one.start == start:
                start = one.end
        return start

    def gaps(self, log_begin: int, reached: int = 0) -> list[tuple[int, int]]:
        """Physical offsets from and to which the log is neither archived nor there, from the first segment on, also
        where that cannot be read.

        Args:
            log_begin: where the log begins.
            reached: up to where the log was archived once.
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
            first_record: the first record of the log file that begins at an offset, None when that is gone.
            log_end: where the log ends.

        Raises:
            StoreError: they are those of another log.
        """
        if self._segments and self._segments[-1].end > log_end:
            raise StoreError(
                f"archive {self.place} reaches to {self._segments[-1].end} and the log ends at {log_end}: it "
                "belongs to another store, or this store lost its end; give another archive, or restore the store"
            )
        for one in self._segments:
            # Offsets alone do not tell logs apart, and the retention deletes files on the word of the segments: those
            # of another store would cost all messages.
            record = first_record(one.start)
            if record is not None and identity_of(record) != one.identity:
                raise StoreError(
                    f"archive {self.place} belongs to another store: {one.name} and the log's file of that offset "
                    "begin with different records; give another archive"
                )

    def min_offset(self, topic: str, queue_id: int, otherwise: int) -> int:
        """The first message of a queue that is archived, or ``otherwise`` where that is lower or none is."""
        rows = self._queues.get((topic, queue_id))
        return otherwise if rows is None else min(otherwise, rows.firsts[rows.begin])

    def has(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if a message, or one behind it, is archived."""
        rows = self._queues.get((topic, queue_id))
        return rows is not None and queue_offset < rows.ends[-1]

    @property
    def segment_count(self) -> int:
        """Return how many segments there are."""
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
            # Of the oldest messages nobody expects any more; between two segments they were lost.
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
        index = -1 if rows is None else _index_of(rows, queue_offset)
        return None if rows is None or index < 0 else rows.segments[index]

    def _from(self, topic: str, queue_id: int, queue_offset: int) -> Iterator[tuple[int, int, memoryview | None]]:
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
    ) -> Iterator[tuple[int, int, memoryview | None]]:
        """The messages that a segment has of a queue, from the last block on that lies before what is looked for; of
        that only messages behind ``queue_offset``, or the one that holds it. The messages of a damaged block come as
        one row without a record."""
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
        """The record at an offset of the log, None where none begins. Raises StoreError: the segment is damaged there.
        Raises OSError."""
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
            return None  # bytes that are no record
        rows = self._content(known, segment, blocks, place.block, place.block + 1)
        at = bisect_right(rows.bounds, place.at)
        return _copied(rows.view[place.at : rows.bounds[at]])

    def _place_of(self, known: _Known, segment: SegmentFile, physical_offset: int) -> PlaceOf | None:
        return self._checked(known, lambda: segment.place_of(physical_offset))

    def query(
        self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int, *, bytes_max: int
    ) -> list[memoryview]:
        """Records that have a key, stored between two times; the newest segments first. One that does not fit into
        ``bytes_max`` any more is left out, but for the first. Damaged ones are left out with an ERROR. Raises OSError.
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
                # A hash has 31 bits, and one key may be that of every message: each comparison may fetch a block.
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
        """Physical offsets of the records of a segment that have a key of a hash."""
        try:
            segment, _ = self._opened(known)
            yield from self._checked(known, lambda: list(itertools.islice(segment.offsets_of(hashed), _COMPARED_MAX)))
        except StoreError as error:
            where = f"records from {known.start} to {known.end} are left out of queries"
            self._lost((known.digest, "keys"), f"{where}: {error}")

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """The first message stored at or after a time; None when the archive has none. Raises OSError."""
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

    # ---- what changes while it is read

    def _reading(self, read: Callable[[], T]) -> T:
        """Read. Where an object was taken away or exchanged, list the place and read again."""
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
        """Read a part of a segment. Raises _Changed: the object is not the one that was known by its name.
        Raises StoreError: the part is damaged."""
        try:
            return read()
        except FileNotFoundError:
            raise _Changed(known) from None
        except StoreError:
            self._compare(known)
            raise

    def _compare(self, known: _Known) -> SegmentFile:
        """The segment as it is now. Raises _Changed: it is not the one that was known by its name."""
        try:
            segment = self._segment_file(known.name, known.size)
        except (FileNotFoundError, StoreError):
            raise _Changed(known) from None
        if segment.digest != known.digest:
            raise _Changed(known)
        return segment

    def _lost(self, key: object, said: str) -> None:
        """Log messages that are passed over, once."""
        with self._lock:
            is_said = (key, said) in self._said
            self._said[key, said] = None
            while len(self._said) > _SAID_MAX:
                self._said.popitem(last=False)
        if not is_said:
            repair = "" if self._owner is None else f" --repair-from {shlex.quote(str(self._owner.root))}"
            verify = f"rmq archive verify {shlex.quote(str(self.place))}{repair}"
            _log.error("archive %s: %s; run: %s", self.place, said, verify)

    # ---- what is kept

    def _segment_file(self, name: str, size: int) -> SegmentFile:
        return SegmentFile(name, lambda position, count: self.place.read(name, position, count), size)

    def _opened(self, known: _Known) -> tuple[SegmentFile, list[Block]]:
        with self._lock:
            found = self._open.get(known.name)
            if found is not None and found[0].digest == known.digest:
                self._open.move_to_end(known.name)
                return found
        # Without the lock: who waits for one object must not hold up those who read another. Two may fetch the same one
        # then.
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
        """A block; those behind it are fetched with it, as far as the queue goes. Raises StoreError: it is damaged."""
        key = segment.name, segment.digest, number
        with self._lock:
            found = self._contents.get(key)
            if found is not None:
                self._contents.move_to_end(key)
                return found
        # By what the blocks hold, too: a MiB of bodies that are alike may hold gigabytes.
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
            # Another thread may have fetched the same blocks meanwhile: counted twice, they would shrink the cache for
            # good.
            for at, rows in enumerate(fetched, number):
                if (segment.name, segment.digest, at) not in self._contents:
                    self._contents[segment.name, segment.digest, at] = rows
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


def _rows_of(rows: _Numbers) -> Iterator[tuple[_Known, int, int]]:
    return zip(rows.segments, rows.firsts, rows.ends, strict=True)


def _numbers(rows: Iterable[tuple[_Known, int, int]]) -> _Numbers:
    """The numbers of a queue, of rows that are in the order of the log."""
    found = _Numbers([], array("q"), array("q"))
    for known, first, end in rows:
        if found.ends and first < found.ends[-1]:
            found.begin = len(found.ends)  # numbers that begin again: of a topic that was made again
        found.segments.append(known)
        found.firsts.append(first)
        found.ends.append(end)
    return found


def _index_of(rows: _Numbers, queue_offset: int) -> int:
    """The row that has a message, or the first one behind it; -1 where none has."""
    index = bisect_right(rows.ends, queue_offset, lo=rows.begin)
    return index if index < len(rows.segments) else -1


def _named(topic: str, queue_id: int, first: int, end: int) -> str:
    return f"messages {first} to {end - 1} of queue {queue_id} of topic {topic}"


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
