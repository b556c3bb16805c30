"""Dispatch of whole runs of records with numpy: the bulk form of `Dispatcher.apply`.

Three cases dispatch a large part of a log: recovery after a crash, a rebuild, and a slave that catches up.
`DispatchColumns` stores a run of dispatch requests in columns: the facts of `request_of` and the `key_hashes` of every
record. Tests compare both forms. `PropertyColumns` reads the property strings. The plain code handles the delay topic
and inner batches.

For each queue, `BulkDispatcher` skips the records that the queue already has, and writes the entries of the other
records with one call per file. If a queue cannot append a run (it has an extension, is a batch queue, or the numbers
are not consecutive), the records are entered one by one. Keys are added to the index in bulk. Tests check that the
files are the same as after one `apply` per record.

The queues cost about 1 µs per record, the keys another 1 µs. The import needs numpy: see `rmqkit.store.log.scan`.
Source: store.md §3.4, §4.2, §7.2, §11, §12.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable

import numpy as np
from numpy.typing import NDArray

from rmqkit.protocol.names import SCHEDULE_TOPIC
from rmqkit.protocol.record import (
    CRC_NAME,
    INNER_BATCH,
    TRAILER_BYTES,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
)
from rmqkit.store.dispatcher import Dispatcher, DispatchRequest, batch_count, queue_tags_code, request_of
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.index.property_columns import PropertyColumns
from rmqkit.store.lite.lite_queues import LITE_MARK
from rmqkit.store.log.remains import FILLER_TOPIC
from rmqkit.store.log.scan import RECORD_BYTES_MIN, Records, crc_matches
from rmqkit.store.queues.consume_queue import ENTRY_BYTES, ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues, topic_fault

__all__ = ["QUEUE_ENTRY", "BulkDispatcher", "DispatchColumns", "append_entries", "queue_entries"]

Ints = NDArray[np.int64]
_NEWEST_MAX = 16
QUEUE_ENTRY = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
assert QUEUE_ENTRY.itemsize == ENTRY_BYTES


class DispatchColumns:
    """A run of records in columns, as the dispatcher needs them.

    Attributes:
        records: the run.
        topics: the distinct topics of the run; None for a topic that is not UTF-8.
        topic: for each record, the index of its topic in ``topics``.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.topics, self.topic = records.topics()
        self._tags_codes: Ints | None = None

    def __len__(self) -> int:
        return len(self.records)

    @property
    def offsets(self) -> Ints:
        return self.records.offsets

    @functools.cached_property
    def queue_offsets(self) -> Ints:
        return self.records.field("queue_offset")

    @functools.cached_property
    def store_timestamps(self) -> Ints:
        return self.records.field("store_timestamp")

    @functools.cached_property
    def sys_flags(self) -> Ints:
        return self.records.field("sys_flag")

    def rows_of(self, topic: str) -> Ints:
        """Return the rows of the records that belong to a topic."""
        return np.flatnonzero(self.topic == self.topics.index(topic)) if topic in self.topics else np.empty(0, "i8")

    def dispatched(self) -> Ints:
        """Return the rows of the records that belong in queues: all records except the transaction markers of old
        stores.
        """
        kinds = self.sys_flags & TRANSACTION_MASK
        return np.flatnonzero((kinds != TRANSACTION_PREPARED) & (kinds != TRANSACTION_ROLLBACK))

    def lost_bytes(self) -> int:
        """Return how many lost bytes the fillers of the run replace. `is_filler` tests a single record."""
        topics = [i for i, topic in enumerate(self.topics) if topic and FILLER_TOPIC.startswith(topic)]
        if not topics:
            return 0
        is_rollback = self.sys_flags & TRANSACTION_MASK == TRANSACTION_ROLLBACK
        rows = np.isin(self.topic, topics) & is_rollback & (self.records.properties_bytes == 0)
        return int(self.records.field("prepared_transaction_offset")[rows].sum())

    def groups(self) -> Iterable[tuple[str, int, Ints]]:
        """Return topic, queue id and the ascending rows of every queue that has records in the run.
        The transaction markers of old stores belong to no queue."""
        return self._groups

    @functools.cached_property
    def _groups(self) -> list[tuple[str, int, Ints]]:
        groups: list[tuple[str, int, Ints]] = []
        rows = self.dispatched()
        keys = (self.topic[rows] << 32) + self.records.field("queue_id")[rows]
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.diff(keys[order])) + 1
        for group in np.split(rows[order], cuts) if len(rows) else ():
            topic = self.topics[self.topic[group[0]]]
            assert topic is not None, "every dispatched record has a UTF-8 topic"
            groups.append((topic, int(self.records.heads["queue_id"][group[0]]), group))
        return groups

    def newest(self, delays_ms: tuple[int, ...]) -> list[DispatchRequest]:
        """Return the newest record of each tag code in each queue, at most `_NEWEST_MAX` records of a queue.
        These records wake the requests that wait for a queue. A request wakes immediately if it accepts any tag or a
        common tag. The cost of waking does not grow with the number of records in the run."""
        codes = self.tags_codes(delays_ms)
        rows: list[int] = []
        for _, _, group in self.groups():
            newest_first = group[::-1]
            _, at = np.unique(codes[newest_first], return_index=True)
            rows += newest_first[np.sort(at)[:_NEWEST_MAX]].tolist()
        return [request_of(self.records.record(row), delays_ms) for row in sorted(rows)]

    def tags_codes(self, delays_ms: tuple[int, ...]) -> Ints:
        """Return the tag code for the queue entry of each record. All calls must pass the same delays."""
        if self._tags_codes is not None:
            return self._tags_codes
        codes = self._tags_codes = np.zeros(len(self), "i8")
        rows, at, end = self._properties.values(b"TAGS")
        hashes = self._properties.hashes(at, end, np.zeros(len(rows), "u4"))
        codes[rows] = hashes.astype("u4").view("i4")
        # In the delay topic the tag code is the delivery time. Such records are few, and each may have an invalid
        # level.
        if SCHEDULE_TOPIC in self.topics:
            for row in np.flatnonzero(self.topic == self.topics.index(SCHEDULE_TOPIC)).tolist():
                timestamp = int(self.store_timestamps[row])
                properties = self.records.record(row).properties
                codes[row] = queue_tags_code(SCHEDULE_TOPIC, properties, timestamp, delays_ms)
        return codes

    @functools.cached_property
    def batch_counts(self) -> Ints:
        """Number of messages in each record."""
        counts = np.ones(len(self), "i8")
        for row in np.flatnonzero(self.sys_flags & INNER_BATCH).tolist():
            counts[row] = batch_count(self.records.record(row).properties)
        return counts

    def keys(self, *, with_tags: bool) -> tuple[Ints, Ints]:
        """Return the index entries of the run in order: the row and the hash of each entry.
        ``with_tags``: whether TAGS is a key, too, as in brokers from 5.4 on."""
        rows, hashes = self._properties.keys(self.topics, self.topic, with_tags=with_tags)
        is_indexed = self.sys_flags[rows] & TRANSACTION_MASK != TRANSACTION_ROLLBACK
        return rows[is_indexed], hashes[is_indexed]

    def suspects(self) -> Ints:
        """Return the rows that need further checks: the body CRC is wrong, the record ends with zeros, or the record
        has a CRC of its whole content."""
        records = self.records
        octets, ends = np.frombuffer(records.buffer, "u1"), records.positions + records.sizes
        has_properties = records.properties_bytes > 0
        is_odd = ~crc_matches(records) | (has_properties & (octets[ends - 1] == 0))
        at = np.maximum(records.properties_at, ends - TRAILER_BYTES)
        is_sealed = ends - at >= len(CRC_NAME)
        for i, octet in enumerate(CRC_NAME):
            is_sealed &= octets[np.minimum(at + i, ends - 1)] == octet
        return np.flatnonzero(is_odd | is_sealed)

    def in_light_queues(self) -> Ints:
        """Return the rows of the records that may also belong to light queues."""
        return self._properties.values(b"INNER_MULTI_DISPATCH")[0]

    def in_lite_topics(self) -> Ints:
        """Return the rows of the records that may belong to lite topics."""
        records = self.records
        start, end = int(records.positions[0]), int(records.positions[-1] + records.sizes[-1])
        if records.buffer.find(LITE_MARK, start, end) < 0:
            return np.empty(0, "i8")
        return self._properties.values(LITE_MARK[:-1])[0]

    @functools.cached_property
    def _properties(self) -> PropertyColumns:
        buffer, records = self.records.buffer, self.records
        ends = (records.properties_at + records.properties_bytes).tolist()
        return PropertyColumns([buffer[at:end] for at, end in zip(records.properties_at.tolist(), ends, strict=True)])


def queue_entries(arrivals: DispatchColumns, rows: Ints, tags_codes: Ints) -> NDArray[np.void]:
    """Return the consume-queue entries for some records."""
    entries = np.empty(len(rows), QUEUE_ENTRY)
    entries["physical_offset"] = arrivals.offsets[rows]
    entries["size"] = arrivals.records.sizes[rows]
    entries["tags_code"] = tags_codes[rows]
    return entries


class BulkDispatcher:
    """A dispatcher for runs of records. The caller must pass the runs in log order.

    Args:
        dispatcher: enters single records, in the queues only.
        has_light: whether the records are also entered in light queues.
        only: topic and queue id of the queues to enter; None for all queues.

    Attributes:
        gap_max: maximum number of blank entries that replace messages missing in the log, so that later messages
            keep their numbers. A larger gap means that a number is damaged. Fillers among the records raise this value.
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

    def enter(self, arrivals: DispatchColumns) -> list[DispatchRequest]:
        """Enter a run of records. Records that were entered before are skipped.
        Return the newest record of each light queue and tag code.

        Raises:
            OSError: a file cannot be written.
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
        newest: dict[tuple[str, int], DispatchRequest] = {}
        rows = arrivals.in_light_queues() if self._has_light else arrivals.in_lite_topics()
        if len(rows):
            requests = [request_of(arrivals.records.record(row), self._delays_ms) for row in rows.tolist()]
            light = self._dispatcher.enter_light(requests, only, has_light=self._has_light)
            newest.update(((one.topic, one.tags_code), one) for one in light)
        self.enter_keys(arrivals)
        return list(newest.values())

    def enter_keys(self, arrivals: DispatchColumns) -> None:
        """Enter a run of records in the index only.

        Raises:
            OSError: a file cannot be written.
        """
        if self._index is not None:
            keys = arrivals.keys(with_tags=self._index.tags_as_keys)
            self._index.put_run(arrivals.offsets, arrivals.store_timestamps, *keys)

    def _append(self, topic: str, queue_id: int, arrivals: DispatchColumns, rows: Ints, tags_codes: Ints) -> None:
        """Enter records with consecutive queue offsets."""
        numbered = rows.tolist()

        def enter_one(i: int) -> None:
            self._dispatcher.enter_own(request_of(arrivals.records.record(numbered[i]), self._delays_ms))

        queue = None if topic_fault(topic, queue_id) else self._queues.obtain(topic, queue_id)
        if isinstance(queue, ConsumeQueue):
            first, entries = int(arrivals.queue_offsets[rows[0]]), queue_entries(arrivals, rows, tags_codes)
            assert int(arrivals.queue_offsets[rows[-1]]) - first == len(rows) - 1, "queue offsets are consecutive"
            append_entries(queue, first, entries, self.gap_max, enter_one)
        else:
            for i in range(len(rows)):
                enter_one(i)


def append_entries(
    queue: ConsumeQueue, first: int, entries: NDArray[np.void], gap_max: int, enter_one: Callable[[int], None]
) -> None:
    """Append entries with consecutive numbers, many at a time if the queue supports it.

    Args:
        first: number of the first entry.
        gap_max: see `BulkDispatcher`.
        enter_one: appends the i-th entry. It creates files and extension units, and logs why an entry is refused.

    Raises:
        OSError: a file cannot be written.
    """
    queue.fill_gap(first, int(entries["physical_offset"][0]), gap_max)
    done = 0
    # Enter the first entry of each part alone: it opens the file, and ``max_offset`` shows whether the queue accepted
    # it.
    while done < len(entries):
        enter_one(done)
        done += 1
        if queue.ext is None and queue.max_offset == first + done < first + len(entries):
            part = entries[done : done + queue.room]
            begin, end = int(part["physical_offset"][0]), int(part["physical_offset"][-1]) + int(part["size"][-1])
            if queue.append_run(first + done, begin, end, part.tobytes()):
                done += len(part)
