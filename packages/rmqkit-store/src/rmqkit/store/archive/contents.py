"""The content of a sealed segment: the records of a full log file, by queue, and the keys of its index.

`contents_of` scans the file. It determines the queue of every record and the order of the records in each queue. With
numpy, the scan handles runs of records (`rmqkit.store.log.scan`, `DispatchColumns`) and is several times as fast.
Without numpy, the scan handles one record at a time. In the rare file in which a topic was deleted and created again,
the scan always handles one record at a time. Tests check that both scans return the same result. Source: store.md §3,
§4, §7.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.properties import find_keys
from rmqkit.protocol.record import (
    BLANK_BYTES,
    INNER_BATCH,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Record,
    decode_record,
    is_blank,
)
from rmqkit.store.dispatcher import batch_count
from rmqkit.store.index.file import key_hashes
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Buffer, Records, find_record, has_numpy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Numbers = array[int] | Ints

__all__ = ["KEY", "OTHER_BYTES", "OTHER_RECORDS", "Contents", "Group", "contents_of", "identity_of", "messages_of"]

_Queue = tuple[str, int]
# Hashes are unsigned, because hashes in index files are never negative: Java's abs, or 0 if abs returns a negative
# number.
KEY = struct.Struct(">IQ")
OTHER_RECORDS = ("", 0)
"""The queue name of records that belong to no queue."""
OTHER_BYTES = ("", -1)
"""The queue name of bytes that are not a record."""


@dataclass(slots=True)
class Group:
    """The records of one queue.

    Attributes:
        queue: topic and queue id, or `OTHER_RECORDS`, or `OTHER_BYTES`.
        first: number of the first message; 0 for parts that belong to no queue.
        end: one past the number of the last message; 0 for parts that belong to no queue.
        parts: indexes of the records among the parts of the file, in the order of their numbers.
    """

    queue: _Queue
    first: int
    end: int
    parts: Numbers


@dataclass(slots=True)
class Contents:
    """The contents of a log file, which is cut into parts: records, and the bytes between records.

    Attributes:
        identity: a digest of the first record. Another log with the same offsets has another digest.
        records_end: the end of the last part.
        other_bytes: the number of bytes outside of records.
        record_count: the number of parts that are records.
        first_time, last_time: earliest and latest storeTimestamp, in ms.
        positions, sizes: position and size of each part, in the order of the file.
        numbers, times: queue offset and storeTimestamp of each part; -1 and 0 for a part that is not a record.
        groups: the parts by queue, in the order of the queues' names.
        keys: sorted rows of `KEY`: the hash of a key, and the physical offset of the record that has the key.
    """

    identity: str
    records_end: int
    other_bytes: int
    record_count: int
    first_time: int
    last_time: int
    positions: Numbers
    sizes: Numbers
    numbers: Numbers
    times: Numbers
    groups: list[Group]
    keys: bytes


def identity_of(first_record: bytes | memoryview) -> str:
    """Return a digest of the first record of a file. Different logs have different digests."""
    return hashlib.blake2b(first_record, digest_size=16).hexdigest()


def messages_of(record: Record) -> int:
    """Return how many queue offsets a record occupies: one, or the number of messages of its inner batch."""
    return batch_count(record.properties) if record.sys_flag & INNER_BATCH else 1


def contents_of(log: Buffer, start: int, *, with_tags: bool) -> Contents:
    """Return the contents of a full log file.

    Args:
        log: the whole file.
        start: physical offset of its first byte, its name.
        with_tags: whether TAGS is a key, too (``indexTags``).
    """
    found = _in_runs(log, start, with_tags) if has_numpy() else None
    return found or _one_by_one(log, start, with_tags)


# ---------------------------------------------------------------- one record after the other


def _one_by_one(log: Buffer, start: int, with_tags: bool) -> Contents:
    positions, sizes, numbers, times = array("q"), array("q"), array("q"), array("q")
    groups: dict[_Queue, array[int]] = {}
    ends: dict[_Queue, int] = {}
    keys: list[tuple[int, int]] = []
    known: list[int] = []
    identity, other_bytes, position = "", 0, 0
    with memoryview(log) as view:
        while not _is_over(view, position):
            record = _record_at(view, position, start)
            if record is None:
                end = find_record(log, start, position + 1, len(log))
                number, time, queue = -1, 0, OTHER_BYTES
                other_bytes += end - position
            else:
                end, number, time = position + record.size, record.queue_offset, record.store_timestamp
                identity = identity or identity_of(view[position:end])
                known.append(time)
                queue = (record.topic, record.queue_id) if _is_in_queue(record) else OTHER_RECORDS
            if record is not None and queue is not OTHER_RECORDS:
                if number < ends.get(queue, 0):  # the topic was deleted and created again
                    groups.setdefault(OTHER_RECORDS, array("q")).extend(groups.pop(queue))
                    del ends[queue]
                ends[queue] = max(ends.get(queue, 0), number + messages_of(record))
                hashes = key_hashes(record.topic, find_keys(record.properties), with_tags=with_tags)
                keys += [(value, start + position) for value in hashes]
            groups.setdefault(queue, array("q")).append(len(positions))
            positions.append(position)
            sizes.append(end - position)
            numbers.append(number)
            times.append(time)
            position = end
    found = []
    for name in sorted(groups):
        first = numbers[groups[name][0]] if name in ends else 0
        found.append(Group(name, first, ends.get(name, 0), groups[name]))
    return Contents(
        identity, position, other_bytes, len(known), min(known, default=0), max(known, default=0),
        positions, sizes, numbers, times, found, b"".join(KEY.pack(*key) for key in sorted(keys)),
    )  # fmt: skip


def _is_over(log: memoryview, position: int) -> bool:
    """Return True if no record can follow: the rest of the file is a blank, or too short for a blank."""
    return len(log) - position < BLANK_BYTES or is_blank(log, position)


def _record_at(log: memoryview, position: int, start: int) -> Record | None:
    try:
        record = decode_record(log, position)
    except RecordCorrupt:
        return None
    return record if record.physical_offset == start + position else None


def _is_in_queue(record: Record) -> bool:
    """Return True if a broker enters a record in its queue. Prepared and rolled back records of transactions are not
    entered.
    """
    return (
        bool(record.topic)
        and record.queue_offset >= 0
        and record.sys_flag & TRANSACTION_MASK not in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)
    )


# ---------------------------------------------------------------- in runs


_OTHER_NUMBER = 1


class _Runs:
    """The results of the scan so far. Each run adds one array to every column."""

    def __init__(self) -> None:
        self.queues: dict[_Queue, int] = {OTHER_RECORDS: 0, OTHER_BYTES: _OTHER_NUMBER}
        self.columns: list[tuple[Ints, ...]] = []
        self.keys: list[tuple[Ints, Ints]] = []

    def add(self, run: Records, with_tags: bool) -> None:
        """Add the records of a run."""
        import numpy as np

        from rmqkit.store.bulk import DispatchColumns

        arrivals = DispatchColumns(run)
        numbers = arrivals.queue_offsets
        queue = np.zeros(len(run), "i8")
        for topic, queue_id, rows in arrivals.groups():
            queue[rows] = self.queues.setdefault((topic, queue_id), len(self.queues)) if topic else 0
        queue[numbers < 0] = 0
        ends = numbers + arrivals.batch_counts
        self.columns.append((run.positions, run.sizes, numbers, arrivals.store_timestamps, queue, ends))
        rows, hashes = arrivals.keys(with_tags=with_tags)
        is_queued = queue[rows] > 0
        self.keys.append((hashes[is_queued], run.offsets[rows[is_queued]]))

    def add_other(self, position: int, size: int) -> None:
        """Add bytes that are not a record."""
        import numpy as np

        self.columns.append(tuple(np.array([value]) for value in (position, size, -1, 0, _OTHER_NUMBER, 0)))


def _in_runs(log: Buffer, start: int, with_tags: bool) -> Contents | None:
    """Return the contents of a log file. Return None if the file has no records, or if the numbers of a queue do not
    ascend because its topic was deleted and created again."""
    import numpy as np

    found = _Runs()
    identity, position, other_bytes = "", 0, 0
    with memoryview(log) as view:
        while not _is_over(view, position):
            run = next(scan.runs(log, start, position, len(log)), None)
            if run is not None and len(run := run.text_only()):
                identity = identity or identity_of(view[position : position + int(run.sizes[0])])
                found.add(run, with_tags)
                position = run.end
            else:
                end = find_record(log, start, position + 1, len(log))
                found.add_other(position, end - position)
                other_bytes += end - position
                position = end
    if not found.keys:
        return None
    positions, sizes, numbers, times, queue, ends = map(np.concatenate, zip(*found.columns, strict=True))
    groups = _grouped(list(found.queues), queue, numbers, ends)
    if groups is None:
        return None
    known = times[queue != _OTHER_NUMBER]
    hashes, offsets = map(np.concatenate, zip(*found.keys, strict=True))
    keys = np.empty(len(hashes), [("hash", ">u4"), ("physical_offset", ">u8")])
    order = np.lexsort((offsets, hashes))
    keys["hash"], keys["physical_offset"] = hashes[order], offsets[order]
    return Contents(
        identity, position, other_bytes, len(known), int(known.min()), int(known.max()),
        positions, sizes, numbers, times, groups, keys.tobytes(),
    )  # fmt: skip


def _grouped(names: list[_Queue], queue: Ints, numbers: Ints, ends: Ints) -> list[Group] | None:
    """Group the parts by queue. Return None if the numbers of a queue do not ascend.
    ``queue``: for each part, the index of its queue in ``names``.
    """
    import numpy as np

    order = np.argsort(queue, kind="stable")
    groups = []
    for parts in np.split(order, np.flatnonzero(np.diff(queue[order])) + 1):
        name, first, end = names[queue[parts[0]]], 0, 0
        if name[0]:
            before = np.maximum.accumulate(np.concatenate(([0], ends[parts])))
            if (numbers[parts] < before[:-1]).any():
                return None
            first, end = int(numbers[parts[0]]), int(before[-1])
        groups.append(Group(name, first, end, parts))
    return sorted(groups, key=lambda group: group.queue)
