"""Messages that something points at: consume queue entries and hits of the index, instead of a walk over the log.

What costs is then what is asked for: of a topic with 3 % of the messages 3 % of the records are touched. The queues
know what consumers can get; a message that is not dispatched (yet), of a deleted topic, or a half message that was
rolled back is in the log alone. Source: spark.md §5, §8.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.spark.fs import Segment, map_records
from rmqkit.spark.source.queue_files import QueueFile, find_index_files, find_queue_files, index_entries, queue_entries
from rmqkit.spark.source.reader import ReadPlan, read_parts
from rmqkit.spark.source.splits import Split, records_end
from rmqkit.store.bulk import scan
from rmqkit.store.index.file import key_hash

__all__ = ["Picks", "QueueSplit", "key_picks", "queue_splits", "read_picks", "read_queue"]


class Picks(Struct, frozen=True):
    """Physical offsets of messages in one file of the log, ascending."""

    segment: Segment
    offsets: tuple[int, ...]


class QueueSplit(Struct, frozen=True):
    """Messages of a stretch of a consume queue file: its entries from queue offset ``low`` up to ``high``."""

    file: QueueFile
    low: int
    high: int
    segments: tuple[Segment, ...]


def queue_splits(
    root: str,
    segments: Sequence[Segment],
    split_bytes: int,
    *,
    topics: Sequence[str] = (),
    queue_ids: Collection[int] = (),
    low: dict[tuple[str, int], int] | None = None,
) -> list[QueueSplit]:
    """The messages of some queues, about ``split_bytes`` of records in each split, empty sets meaning all.
    ``low`` has by topic and queue id the queue offset to begin with. Entries that point before or behind the log are
    left out: retention or a crash took their records.
    Raises StoreError: the store has no consume queues."""
    splits: list[QueueSplit] = []
    if not segments:
        return splits
    log_start, log_end = segments[0].base_offset, records_end(segments)
    for file in find_queue_files(root, topics):
        if queue_ids and file.queue_id not in queue_ids:
            continue
        numbers, entries = queue_entries(file)
        offsets = entries["offset"].astype("i8")
        kept = (
            (offsets >= log_start) & (offsets < log_end) & (numbers >= (low or {}).get((file.topic, file.queue_id), 0))
        )
        numbers, entries, offsets = numbers[kept], entries[kept], offsets[kept]
        sums = np.cumsum(entries["size"].astype("i8"))
        bounds = np.flatnonzero(np.diff(sums // split_bytes)) + 1
        for part in np.split(np.arange(len(numbers)), bounds):
            if len(part):
                first, last = offsets[part[0]], offsets[part[-1]]
                around = tuple(
                    one for one in segments if one.base_offset <= last and one.base_offset + one.size > first
                )
                splits.append(QueueSplit(file, int(numbers[part[0]]), int(numbers[part[-1]]) + 1, around))
    return splits


def key_picks(
    root: str, segments: Sequence[Segment], slot_count: int, topic: str, keys: Collection[str]
) -> list[Picks]:
    """The messages that the index knows under some keys; hashes collide, so others may be among them.
    Raises StoreError: an index file does not fit ``slot_count``."""
    hashes = [key_hash(topic, key) for key in keys]
    found: set[int] = set()
    for part in find_index_files(root, slot_count):
        _, entries = index_entries(part)
        found |= set(entries["offset"][np.isin(entries["hash"], hashes)].tolist())
    log_end = records_end(segments)
    return _in_segments(sorted(offset for offset in found if offset < log_end), segments)


def read_picks(picks: Picks, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """The messages, in the order of the log. Raises StoreError: as `rmqkit.spark.source.reader.read_split`."""
    segment = picks.segment
    for first in range(0, len(picks.offsets), plan.batch_rows):
        positions = [offset - segment.base_offset for offset in picks.offsets[first : first + plan.batch_rows]]
        split = Split(segment.path, segment.base_offset, positions[0], positions[-1])
        buffer = map_records(segment.path, positions)
        yield from read_parts(split, scan.pick(buffer, segment.base_offset, positions), plan)


def read_queue(split: QueueSplit, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """The messages, in the order of the log. Raises StoreError: as `rmqkit.spark.source.reader.read_split`."""
    offsets = np.sort(chosen_entries(split)[1]["offset"].astype("i8")).tolist()
    for picks in _in_segments(offsets, split.segments):
        yield from read_picks(picks, plan)


def chosen_entries(split: QueueSplit) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Queue offsets and entries of a split."""
    numbers, entries = queue_entries(split.file)
    within = slice(*np.searchsorted(numbers, [split.low, split.high]))
    return numbers[within], entries[within]


def _in_segments(offsets: Sequence[int], segments: Sequence[Segment]) -> list[Picks]:
    """Ascending offsets by the file that they lie in; those in none are left out."""
    picks = []
    for segment in segments:
        low = bisect.bisect_left(offsets, segment.base_offset)
        high = bisect.bisect_left(offsets, segment.base_offset + segment.size)
        if low < high:
            picks.append(Picks(segment, tuple(offsets[low:high])))
    return picks
