"""Dispatching whole runs of records: what `Dispatcher.apply` does for each of them, in bulk, with numpy.

Used where much of a log is dispatched again: recovery after a crash, and rebuilding. Per queue, the records that it
knows already are skipped, and the entries of the others are written with one call per file. Where a queue does not take
them so (an extension, a batch queue, numbers that do not follow each other) they are entered one by one. Keys go to the
index in bulk. The files are the same as after one `apply` per record, which is tested. Source: store.md §11, §12.3.
"""

from __future__ import annotations

import numpy as np

from rmqkit.store.arrivals import Arrivals, Ints
from rmqkit.store.comparison import queue_entries
from rmqkit.store.consume_queue import BLANK_ENTRY, ENTRY_BYTES, ConsumeQueue
from rmqkit.store.consume_queues import ConsumeQueues
from rmqkit.store.dispatcher import Dispatcher, arrival_of
from rmqkit.store.logic_queue import LogicQueue
from rmqkit.store.message_index import MessageIndex

__all__ = ["CatchUp"]


class CatchUp:
    """Enters runs of records, which come in log order.

    Args:
        dispatcher: enters records one by one, in the queues only.

    Attributes:
        gap_max: up to so many blank entries are put where the log lacks records, so that those behind keep their
            numbers; a larger gap is a damaged number.
    """

    def __init__(
        self,
        queues: ConsumeQueues,
        index: MessageIndex | None,
        dispatcher: Dispatcher,
        delays_ms: tuple[int, ...],
    ) -> None:
        self._queues, self._index, self._dispatcher, self._delays_ms = queues, index, dispatcher, delays_ms
        self.gap_max = 0

    def enter(self, arrivals: Arrivals) -> None:
        """Enter a run of records; what was entered before is not changed.

        Raises:
            OSError: the disk refused.
        """
        tags_codes = arrivals.tags_codes(self._delays_ms)
        ends = arrivals.offsets + arrivals.records.sizes
        for topic, queue_id, rows in arrivals.groups():
            queue = self._queues.get(topic, queue_id)
            missing = rows if queue is None else rows[ends[rows] > queue.max_physical_offset]
            cuts = np.flatnonzero(np.diff(arrivals.queue_offsets[missing]) != 1) + 1
            for part in np.split(missing, cuts) if len(missing) else ():
                self._append(topic, queue_id, arrivals, part, tags_codes)
        self.enter_keys(arrivals)

    def enter_keys(self, arrivals: Arrivals) -> None:
        """Enter a run of records in the index only.

        Raises:
            OSError: the disk refused.
        """
        if self._index is not None:
            keys = arrivals.keys(with_tags=self._index.tags_as_keys)
            self._index.put_run(arrivals.offsets, arrivals.store_timestamps, *keys)

    def _append(self, topic: str, queue_id: int, arrivals: Arrivals, rows: Ints, tags_codes: Ints) -> None:
        """Enter records whose queue offsets follow each other."""
        first = int(arrivals.queue_offsets[rows[0]])
        queue = self._queues.get(topic, queue_id)
        if isinstance(queue, ConsumeQueue) and queue.queue.files and first - queue.max_offset <= self.gap_max:
            _fill(queue, first)
        self._one(arrivals, rows[0])  # makes the queue and its file, or says why not
        rows = rows[1:]
        queue = self._queues.get(topic, queue_id)
        while len(rows) and isinstance(queue, ConsumeQueue):
            count = min(len(rows), _room(queue))
            part, rows = rows[:count], rows[count:]
            offsets = arrivals.offsets[part[[0, -1]]].tolist()
            end = offsets[1] + int(arrivals.records.sizes[part[-1]])
            entries = queue_entries(arrivals, part, tags_codes).tobytes()
            if not queue.append_run(int(arrivals.queue_offsets[part[0]]), offsets[0], end, entries):
                for row in part:
                    self._one(arrivals, row)
        for row in rows:
            self._one(arrivals, row)

    def _one(self, arrivals: Arrivals, row: int) -> None:
        self._dispatcher.apply(arrival_of(arrivals.records.record(row), self._delays_ms))


def _room(queue: LogicQueue) -> int:
    """How many entries the file that the next one goes to still takes."""
    file_bytes = queue.queue.file_bytes
    return (file_bytes - queue.queue.max_offset % file_bytes) // ENTRY_BYTES


def _fill(queue: ConsumeQueue, end: int) -> None:
    """Append blank entries up to a number; they have no extension unit."""
    ext, queue.ext = queue.ext, None
    while queue.max_offset < end:
        at = queue.max_physical_offset
        is_taken = queue.append_run(queue.max_offset, at, at, BLANK_ENTRY * min(end - queue.max_offset, _room(queue)))
        assert is_taken, "blanks fit and are the next ones"
    queue.ext = ext
