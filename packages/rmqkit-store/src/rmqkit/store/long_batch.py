"""A batch of many messages that is prepared step by step and put with one write: `Appender.put_batch` for any size.

Storing the 190,000 messages of a 4 MiB request in one call takes half a second, and the broker could serve no other
request meanwhile. Therefore all work that does not depend on the place in the log is done first, in short steps with
pauses:

=========  ==========================================================================  =====================
step       work                                                                        amount at a time
=========  ==========================================================================  =====================
walk       find each message in the body                                               1,024 messages
encode     make the records, with places relative to the start of the batch            1,024 messages
settle     enter queue offsets, physical offsets and the time in all records           all: it is one put
           and write them with one write
parts      make the dispatch requests, when the dispatcher reaches the part            512 messages, or
                                                                                       16 KiB of properties
=========  ==========================================================================  =====================

No space is reserved during the steps: other puts continue, and the whole batch is stored after them. With a checksum in
each record (``enabledAppendPropCRC``) `settle` takes about 1 µs more per message, because the checksum covers the
place.
Use this module only in the owner thread of the store. Source: store.md §3.7.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, pairwise, repeat
from operator import add

from msgspec import Struct

from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX
from rmqkit.protocol.record import (
    TRAILER_BYTES,
    BatchBounds,
    BatchEntry,
    RecordRow,
    batch_bounds,
    encode_batch,
    encode_records,
    is_long_batch,
    layout_of,
    seal,
    with_room_for_crc,
)
from rmqkit.store.dispatcher import DispatchRequest, queue_tags_code
from rmqkit.store.inner_message import InnerMessage, PutResult, PutStatus

__all__ = ["LongBatch", "is_long"]

_AT_ONCE = 1024
_OFFSETS = 4096
_PART = 512
_PART_PROPERTIES_BYTES = 16 << 10
_LONG_COUNT = 2048
_LONG_PROPERTIES_BYTES = 32 << 10
_PLACE_AT = layout_of(0).positions["queue_offset"]
_SETTLED = {bits: struct.Struct(f">qqiq{20 if bits & 0x10 else 8}sq") for bits in (0, 0x10, 0x20, 0x30)}
"""Structs of the fields from queue_offset to store_timestamp, by the bits of sysFlag that mark IPv6 hosts."""
_SYS_FLAG_AT = layout_of(0).positions["sys_flag"]


def is_long(body: bytes) -> bool:
    """Return True if a batch body must be stored in steps. A shorter body takes only a few milliseconds in one call."""
    return is_long_batch(body, count_max=_LONG_COUNT, properties_bytes_max=_LONG_PROPERTIES_BYTES)


class _Part(Struct, gc=False):
    """A range of messages of a batch. Iterating over it creates their dispatch requests."""

    batch: LongBatch
    delays_ms: tuple[int, ...]
    first: int
    end: int

    def __iter__(self) -> Iterator[DispatchRequest]:
        return iter(self.batch.arrivals(self.first, self.end, self.delays_ms))


class LongBatch:
    """A batch on its way into the log.

    Attributes:
        message: the message for `Appender.put_batch`.
        count: number of messages found in the batch.
        size: bytes of the records.
        is_encoded: whether the records were created.
        refused: the refusal, or None if the batch can be put.
    """

    def __init__(self, message: InnerMessage) -> None:
        self.message = message
        self.count = 0
        self.is_encoded = False
        self.refused: PutResult | None = None
        self._bounds: list[list[BatchBounds]] = []
        self._data = bytearray()
        self._ends: list[int] = []
        self._places: list[int] = []
        self._properties_bytes: list[int] = []
        self._cuts = [0]
        self._queue_offset = self._physical_offset = self._store_timestamp = 0
        self._has_crc = False

    @property
    def size(self) -> int:
        return len(self._data)

    def walk(self) -> Iterator[list[BatchBounds]]:
        """Find the messages in steps, and yield the bounds found in each step. Raises BodyError: the body is not a
        batch.
        """
        body, position = self.message.body, 0
        while position < len(body):
            bounds = batch_bounds(body, position, _AT_ONCE)
            position = bounds[-1][3]
            self.count += len(bounds)
            self._bounds.append(bounds)
            yield bounds

    def encode(self, topic_field: bytes, *, has_crc: bool) -> Iterator[None]:
        """Create the records in steps. Raises struct.error: a number of a message does not fit into a record."""
        message, data, done = self.message, self._data, 0
        self._has_crc = has_crc
        for bounds in self._bounds:
            body: bytes = message.body
            if has_crc:
                body, bounds = _with_room(body, bounds)
                if not bounds:
                    reason = "a member's properties are too long"
                    self.refused = PutResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, reason=reason)
                    return
            start = len(data)
            encoded, sizes = encode_records(
                self._rows(body, bounds, topic_field, done),
                physical_offset=0,
                born_host=message.born_host,
                store_timestamp=0,
                store_host=message.store_host,
            )
            data += encoded
            done += len(bounds)
            for size, (_, _, at, end) in zip(sizes, bounds, strict=True):
                self._places.append(start + _PLACE_AT)
                start += size
                self._ends.append(start)
                self._properties_bytes.append(end - at)
            self._cut(done - len(bounds), done)
            yield
        self._bounds.clear()
        self.is_encoded = True

    def settle(self, *, queue_offset: int, physical_offset: int, store_timestamp: int) -> bytearray:
        """Write the place and time of each record into it. Return the bytes to write to the log."""
        assert len(self._places) == self.count, "every message of the batch has a record"
        self._queue_offset, self._physical_offset = queue_offset, physical_offset
        self._store_timestamp = store_timestamp
        data, message = self._data, self.message
        (sys_flag,) = struct.unpack_from(">i", data, _SYS_FLAG_AT)
        entered = map(
            _SETTLED[sys_flag & 0x30].pack_into,
            repeat(data),
            self._places,
            count(queue_offset),
            map(add, self._places, repeat(physical_offset - _PLACE_AT)),
            repeat(sys_flag),
            repeat(message.born_timestamp),
            repeat(message.born_host),
            repeat(store_timestamp),
        )
        deque(entered, maxlen=0)
        if self._has_crc:
            start = 0
            for end in self._ends:
                data[end - TRAILER_BYTES : end] = seal(bytes(data[start:end]))[-TRAILER_BYTES:]
                start = end
        return data

    def physical_offsets(self) -> Iterator[list[int]]:
        """Yield the physical offsets of all records in order, 4,096 at a time. Call it after `settle`."""
        for first in range(0, self.count, _OFFSETS):
            yield list(map(add, self._places[first : first + _OFFSETS], repeat(self._physical_offset - _PLACE_AT)))

    def parts(self, delays_ms: tuple[int, ...]) -> Iterable[tuple[int, Iterable[DispatchRequest]]]:
        """Return the parts for the dispatcher, each with its physical end and its records."""
        ends, base = self._ends, self._physical_offset
        return [(base + ends[end - 1], _Part(self, delays_ms, first, end)) for first, end in pairwise(self._cuts)]

    def arrivals(self, first: int, end: int, delays_ms: tuple[int, ...]) -> list[DispatchRequest]:
        """Return the dispatch requests of the messages from ``first`` up to but not including ``end``."""
        topic, queue_id, sys_flag = self.message.topic, self.message.queue_id, self.message.sys_flag
        now, base = self._store_timestamp, self._physical_offset
        start = self._ends[first - 1] if first else 0
        found: list[DispatchRequest] = []
        for number in range(first, end):
            stop = self._ends[number]
            properties = bytes(self._data[stop - self._properties_bytes[number] : stop])
            code = queue_tags_code(topic, properties, now, delays_ms)
            at, size = base + start, stop - start
            found.append(
                DispatchRequest(topic, queue_id, self._queue_offset + number, code, now, at, size, sys_flag, properties)
            )
            start = stop
        return found

    def _cut(self, first: int, end: int) -> None:
        """Divide the messages that were just encoded into parts, and store the ends of the parts."""
        properties_bytes, cuts = 0, self._cuts
        for number in range(first, end):
            properties_bytes += self._properties_bytes[number]
            if number - cuts[-1] >= _PART or (properties_bytes > _PART_PROPERTIES_BYTES and number > cuts[-1]):
                cuts.append(number)
                properties_bytes = self._properties_bytes[number]
        cuts.append(end)

    def _rows(self, body: bytes, bounds: list[BatchBounds], topic_field: bytes, first: int) -> Iterator[RecordRow]:
        """Yield the rows of the messages.

        A batch entry ends with the length of the properties and the properties. So does a record, so the bytes are
        copied.
        """
        message = self.message
        queue_id, kind = message.queue_id, message.sys_flag
        born, times = message.born_timestamp, message.reconsume_times
        for number, (flag, body_at, at, end) in enumerate(bounds, first):
            yield topic_field, queue_id, flag, number, kind, born, times, body[body_at : at - 2], body[at - 2 : end]


def _with_room(body: bytes, bounds: list[BatchBounds]) -> tuple[bytes, list[BatchBounds]]:
    """Return the messages of a batch with space for their checksums. Return an empty batch if a message has no space
    left."""
    entries = [
        BatchEntry(bytes(body[body_at : at - 2]), with_room_for_crc(bytes(body[at:end])), flag)
        for flag, body_at, at, end in bounds
    ]
    if any(len(one.properties) > PROPERTIES_BYTES_MAX for one in entries):
        return b"", []
    roomy = encode_batch(entries)
    return roomy, batch_bounds(roomy)
