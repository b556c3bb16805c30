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
from rmqkit.arrow.reader import EVERYTHING, ReadPlan, Selection, read_split, within_times
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import SettingsError

SPLIT_BYTES = 128 << 20
INDEX_SLOT_COUNT = 5_000_000

Part = Split | QueueSplit | IndexReads
"""A piece of a store that is read independently of other pieces."""


def plan_parts(
    root: str,
    segments: Sequence[Segment],
    selection: Selection = EVERYTHING,
    *,
    keys: Collection[str] = (),
    offsets_from: OffsetsFrom = OffsetsFrom.WALK,
    split_bytes: int = SPLIT_BYTES,
    index_slot_count: int = INDEX_SLOT_COUNT,
) -> list[Part]:
    """List the parts of a log to read for the selected messages, in the order of the log.
    Raises StoreError: a file cannot be read (its subclass StoreMismatch: the files do not match).
    Raises SettingsError: there is a key, but no topic."""
    if keys:
        if not selection.topics:
            raise SettingsError(f"key={','.join(sorted(keys))} needs a topic: the index knows keys within topics")
        return [one for topic in selection.topics for one in key_reads(root, segments, index_slot_count, topic, keys)]
    within = within_times(segments, selection)
    if offsets_from is OffsetsFrom.CONSUME_QUEUE:
        return [*queue_splits(root, within, split_bytes, topics=selection.topics, queue_ids=selection.queue_ids)]
    return [*plan_splits(within, split_bytes)]


def read_part(part: Part, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages of a part. Raises StoreError: see `rmqkit.arrow.reader.read_split`."""
    if isinstance(part, Split):
        return read_split(part, plan)
    return read_queue(part, plan) if isinstance(part, QueueSplit) else read_records_at(part, plan)
