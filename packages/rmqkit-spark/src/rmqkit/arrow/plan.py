"""The plan of a read: the parts of a store that contain the requested messages, and the way to read each part.

=========================================  ===========================================================================
request                                    read
=========================================  ===========================================================================
everything                                 the log, split by bytes
store times                                the files of the log that may have messages of these times
topics, queues by `OffsetsFrom`            the records that the queues point at
topics and keys                            the records that the index points at, then compared
=========================================  ===========================================================================

Spark's source passes each part to a task (`rmqkit.spark.source.store`). `rmqkit.arrow.store_dataset` reads the parts
one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa

from rmqkit.arrow.fs import Segment
from rmqkit.arrow.options import OffsetsFrom
from rmqkit.arrow.queue_files import IndexReads, QueueSplit, key_reads, queue_splits, read_queue, read_records_at
from rmqkit.arrow.reader import Condition, ReadPlan, read_split, topic_in, wanted, within_times
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import SettingsError

SPLIT_BYTES = 128 << 20
INDEX_SLOT_COUNT = 5_000_000

Part = Split | QueueSplit | IndexReads
"""A piece of a store that is read independently of other pieces."""


def conditions_on(
    *, topics: Collection[str] = (), queue_ids: Collection[int] = (), start_ms: int = 0, end_ms: int = 0
) -> tuple[Condition, ...]:
    """Return conditions that select records before they are decoded: records stored at or after ``start_ms`` and before
    ``end_ms`` (ms since the epoch), of some topics and queues. 0 and empty collections select all."""
    conditions = [topic_in(sorted(topics))] if topics else []
    if queue_ids:
        conditions.append(Condition("queueId", "In", tuple(queue_ids)))
    if start_ms:
        conditions.append(Condition("storeTimestamp", "GreaterThanOrEqual", (start_ms * 1000,)))
    if end_ms:
        conditions.append(Condition("storeTimestamp", "LessThan", (end_ms * 1000,)))
    return tuple(conditions)


def plan_parts(
    root: str,
    segments: Sequence[Segment],
    conditions: Sequence[Condition] = (),
    *,
    keys: Collection[str] = (),
    offsets_from: OffsetsFrom = OffsetsFrom.WALK,
    split_bytes: int = SPLIT_BYTES,
    index_slot_count: int = INDEX_SLOT_COUNT,
) -> list[Part]:
    """List the parts of a log to read for the messages that meet some conditions, in the order of the log.
    Raises StoreError: a file cannot be read (its subclass StoreMismatch: the files do not match).
    Raises SettingsError: there is a key, but no topic."""
    topics = wanted(conditions, "topic")
    if keys:
        if not topics:
            raise SettingsError(f"key={','.join(sorted(keys))} needs a topic: the index knows keys within topics")
        return [one for topic in topics for one in key_reads(root, segments, index_slot_count, topic, keys)]
    within = within_times(segments, conditions)
    if offsets_from is OffsetsFrom.CONSUME_QUEUE:
        return [*queue_splits(root, within, split_bytes, topics=topics, queue_ids=wanted(conditions, "queueId"))]
    return [*plan_splits(within, split_bytes)]


def read_part(part: Part, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages of a part. Raises StoreError: see `rmqkit.arrow.reader.read_split`."""
    if isinstance(part, Split):
        return read_split(part, plan)
    return read_queue(part, plan) if isinstance(part, QueueSplit) else read_records_at(part, plan)
