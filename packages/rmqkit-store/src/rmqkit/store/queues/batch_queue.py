"""The batch queue: the index of a queue whose records are inner batches (``BatchConsumeQueue``, 5.x).

===============  ======  ====  =======================================
field            offset  size  value
===============  ======  ====  =======================================
physicalOffset        0     8  place of the record in the commit log
size                  8     4  size of the record
tagsCode             12     8  Java hash of TAGS
storeTimestamp       20     8
msgBaseOffset        28     8  queue offset of the first message in the record (``INNER_BASE``)
batchSize            36     2  messages in the record (``INNER_NUM``)
compactedOffset      38     4  -1
reserved             42     4  0
===============  ======  ====  =======================================

Topics with the attribute ``queue.type=BatchCQ`` have batch queues. Entries are in log order and have no fixed relation
to queue offsets: the entry of a message is the entry with the greatest msgBaseOffset that is not greater than the
offset of the message.
Source: store.md §6.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import ClassVar

from rmqkit.store.queues.base import ConsumeQueueBase

__all__ = ["BATCH_ENTRY", "BatchQueue"]

_log = logging.getLogger(__name__)

BATCH_ENTRY = struct.Struct(">qiqqqhii")
_BASE, _COUNT = 4, 5
_NOT_COMPACTED, _RESERVED = -1, 0
assert BATCH_ENTRY.size == 46


class BatchQueue(ConsumeQueueBase):
    """A batch queue of a topic, in ``batchconsumequeue/<topic>/<queueId>``."""

    __slots__ = ()
    layout = BATCH_ENTRY
    setting = "mapperFileSizeBatchConsumeQueue"
    least: ClassVar[dict[int, int]] = {0: 0, 1: 1, _BASE: 0, _COUNT: 1}

    def append_batch(
        self, base_offset: int, count: int, physical_offset: int, size: int, tags_code: int, store_timestamp: int
    ) -> None:
        """Index a record that holds ``count`` messages. If the record is already indexed, do nothing.
        Raises OSError: a write failed; the queue is unchanged."""
        if physical_offset + size <= self.max_physical_offset:
            return
        place = self.topic, self.queue_id
        if base_offset < self.max_offset:  # the topic was deleted and created again: see `ConsumeQueue`
            forgotten = self.max_offset - max(base_offset, self.min_offset)
            _log.warning("%s-%d: renumbered from %d on, %d messages dropped", *place, base_offset, forgotten)
            self.queue.truncate(max(self.first_index, self.index_of(base_offset - 1) + 1) * BATCH_ENTRY.size)
            self.resume()
        if base_offset > max(self.max_offset, self.next_offset):
            self.on_gap(self)
        if self.first_index == self.end_index:
            self.min_offset = base_offset
        elif (lost := base_offset - self.max_offset) > 0:
            _log.warning("%s-%d: %d messages from %d on are not in the log", *place, lost, self.max_offset)
        if self._fd < 0 or self._position == self._file_bytes:
            self._open_last()
        fields = physical_offset, size, tags_code, store_timestamp, base_offset, count, _NOT_COMPACTED, _RESERVED
        self._file.write(self._position, BATCH_ENTRY.pack(*fields))
        self._position = self._file.wrote = self._position + BATCH_ENTRY.size
        self.max_offset = base_offset + count
        self.max_physical_offset = physical_offset + size
        if not self.is_dirty:
            self.is_dirty = True
            self._dirty[self] = None

    def append(
        self,
        queue_offset: int,
        physical_offset: int,
        size: int,
        tags_code: int,
        store_timestamp: int,
        bitmap: bytes = b"",
    ) -> None:
        """Log that the record is not indexed: it has no INNER_BASE and INNER_NUM. Do nothing else."""
        _log.warning(
            "%s-%d: record at %d is not an inner batch, so it is not indexed",
            self.topic,
            self.queue_id,
            physical_offset,
        )

    def resume(self) -> None:
        """Set the bounds of the queue from the first and the last entry."""
        self._fd = -1
        if self.first_index < self.end_index:
            last = self.entry(self.end_index - 1)
            self.min_offset = self.entry(self.first_index)[_BASE]
            self.max_offset = last[_BASE] + last[_COUNT]
        else:
            self.min_offset = self.max_offset = 0

    def correct_min_offset(self, min_physical_offset: int) -> None:
        if self.first_index < self.end_index:
            found = self.first_behind(min_physical_offset)
            self.min_offset = self.base_offset(found) if found < self.end_index else self.max_offset

    # ---- reading

    def index_of(self, queue_offset: int) -> int:
        """Return the index of the entry with the greatest msgBaseOffset at or before a queue offset, or -1 if there is
        none."""
        if queue_offset >= self.max_offset:
            return -1
        indexes = range(self.first_index, self.end_index)
        return bisect_right(indexes, queue_offset, key=lambda index: int(self.entry(index)[_BASE])) + indexes.start - 1

    def base_offset(self, index: int) -> int:
        """Return the queue offset of the first message of an entry."""
        return int(self.entry(index)[_BASE])

    def place(self, queue_offset: int) -> tuple[int, int]:
        entry = self.entry(self.index_of(queue_offset))
        return entry[0], entry[1]

    def scan(self, queue_offset: int, bytes_max: int) -> Iterator[tuple[int, int, int, int, int]] | None:
        """Iterate over entries within one file, starting with the entry of a message."""
        index = self.index_of(queue_offset)
        file = self._find(index * BATCH_ENTRY.size) if index >= self.first_index else None
        if file is None:
            return None
        position = index * BATCH_ENTRY.size - file.start
        whole = -(-bytes_max // BATCH_ENTRY.size) * BATCH_ENTRY.size
        raw = file.read(position, min(whole, file.wrote - position))
        return (
            (entry[0], entry[1], entry[2], entry[_BASE] + entry[_COUNT], entry[_COUNT])
            for entry in BATCH_ENTRY.iter_unpack(raw)
        )

    def next_file_offset(self, queue_offset: int) -> int:
        """Return the queue offset at which the file after the file of a message begins."""
        bases = [self.base_offset(first) for first, _ in self.file_bounds()]
        return next((base for base in bases if base > queue_offset), self.max_offset)
