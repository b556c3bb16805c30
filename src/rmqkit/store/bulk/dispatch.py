"""Dispatching whole runs of records: what `Dispatcher.apply` does for each of them, in bulk, with numpy.

Used where much of a log is dispatched again: recovery after a crash, and rebuilding. Per queue, the records that it
knows already are skipped, and the entries of the others are written with one call per file. Where a queue does not take
them so (an extension, a batch queue, numbers that do not follow each other) they are entered one by one. Keys go to the
index in bulk. The files are the same as after one `apply` per record, which is tested. Source: store.md §11, §12.3.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np
from numpy.typing import NDArray

from rmqkit.store.bulk.columns import Arrivals, Ints
from rmqkit.store.dispatcher import Arrival, Dispatcher, arrival_of
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.log.scan import RECORD_BYTES_MIN
from rmqkit.store.offline.bulk_compare import queue_entries
from rmqkit.store.queues.consume_queue import ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues, topic_fault

__all__ = ["CatchUp", "append_entries"]


class CatchUp:
    """Enters runs of records, which come in log order.

    Args:
        dispatcher: enters records one by one, in the queues only.
        has_light: whether they are entered in light queues, too.
        only: the queues that are entered, by topic and queue id; None for all.

    Attributes:
        gap_max: up to so many blank entries are put where the log lacks records, so that those behind keep their
            numbers; a larger gap is a damaged number. Fillers among the records raise it.
    """

    def __init__(
        self,
        queues: ConsumeQueues,
        index: MessageIndex | None,
        dispatcher: Dispatcher,
        delays_ms: tuple[int, ...],
        *,
        has_light: bool = False,
        only: Container[tuple[str, int]] | None = None,
    ) -> None:
        self._has_light, self._only = has_light, only
        self._queues, self._index, self._dispatcher, self._delays_ms = queues, index, dispatcher, delays_ms
        self.gap_max = 0

    def enter(self, arrivals: Arrivals) -> list[Arrival]:
        """Enter a run of records; what was entered before is not changed.
        Returns the newest one of each light queue and tag code.

        Raises:
            OSError: the disk refused.
        """
        self.gap_max += arrivals.lost_bytes() // RECORD_BYTES_MIN
        tags_codes = arrivals.tags_codes(self._delays_ms)
        ends = arrivals.offsets + arrivals.records.sizes
        only = self._only
        for topic, queue_id, rows in arrivals.groups():
            if only is not None and (topic, queue_id) not in only:
                continue
            queue = self._queues.get(topic, queue_id)
            deleted_end = self._queues.deleted_ends.get(topic, -1)
            missing = rows[ends[rows] > (deleted_end if queue is None else queue.max_physical_offset)]
            cuts = np.flatnonzero(np.diff(arrivals.queue_offsets[missing]) != 1) + 1
            for part in np.split(missing, cuts) if len(cuts) else (missing,) if len(missing) else ():
                self._append(topic, queue_id, arrivals, part, tags_codes)
        newest: dict[tuple[str, int], Arrival] = {}
        for row in arrivals.in_light_queues().tolist() if self._has_light else ():
            light = self._dispatcher.enter_light(arrival_of(arrivals.records.record(row), self._delays_ms), only)
            newest.update(((one.topic, one.tags_code), one) for one in light)
        self.enter_keys(arrivals)
        return list(newest.values())

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
        numbered = rows.tolist()

        def enter_one(i: int) -> None:
            self._dispatcher.apply(arrival_of(arrivals.records.record(numbered[i]), self._delays_ms))

        queue = None if topic_fault(topic, queue_id) else self._queues.obtain(topic, queue_id)
        if isinstance(queue, ConsumeQueue):
            first, entries = int(arrivals.queue_offsets[rows[0]]), queue_entries(arrivals, rows, tags_codes)
            append_entries(queue, first, entries, self.gap_max, enter_one)
        else:
            for i in range(len(rows)):
                enter_one(i)


def append_entries(
    queue: ConsumeQueue, first: int, entries: NDArray[np.void], gap_max: int, enter_one: Callable[[int], None]
) -> None:
    """Append entries whose numbers follow each other, many at a time where the queue takes them so.

    Args:
        first: the number of the first one.
        gap_max: as in `CatchUp`.
        enter_one: appends the i-th entry: it makes files and extension units, or says why not.

    Raises:
        OSError: the disk refused.
    """
    queue.fill_gap(first, gap_max)
    done = 0
    while done < len(entries):
        enter_one(done)
        done += 1
        if queue.ext is None and queue.max_offset == first + done < first + len(entries):
            part = entries[done : done + queue.room]
            begin, end = int(part["physical_offset"][0]), int(part["physical_offset"][-1]) + int(part["size"][-1])
            if queue.append_run(first + done, begin, end, part.tobytes()):
                done += len(part)
