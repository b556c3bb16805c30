"""The reader, which decodes one split of a commit log into Arrow batches of the wanted messages, without Spark.

::

    scan.walk ─ runs of records ─→ `matches` ─→ CRC ─→ message_batches ─→ column kernels ─→ record batch
            └─ damage ─────────────────────────────────────────────────→ fail, skip or a row that reports it

Only the requested columns are decoded: without ``body`` no body is copied; without ``properties``, ``keys``, ``tags``
and ``msgId`` no property string is decoded. A `Selection` is checked on topics and heads before any other part of a
record is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.arrow.fs import Segment, map_range, map_records
from rmqkit.arrow.options import CorruptRecords, VerifyCrc
from rmqkit.arrow.schema import CORRUPT, Column, arrow_schema
from rmqkit.arrow.splits import Split
from rmqkit.errors import StoreError
from rmqkit.protocol import properties as names
from rmqkit.store.kernels.batch import MessageBatch, message_batches, topics_of
from rmqkit.store.kernels.columns import to_microseconds
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Damage, Records, crc_matches

CLOCK_SLACK_US = 60_000_000


class Selection(Struct, frozen=True):
    """The records to read: those of some topics and queues, stored at or after ``start_us`` and before ``end_us`` (µs
    since the epoch). Empty tuples and 0 select all records."""

    topics: tuple[str, ...] = ()
    queue_ids: tuple[int, ...] = ()
    start_us: int = 0
    end_us: int = 0

    @classmethod
    def of(cls, topics: Iterable[str], queue_ids: Iterable[int], start_ms: int, end_ms: int) -> Selection:
        """Return the selection for options of a read, with times in ms."""
        return cls(tuple(sorted({*topics})), tuple(sorted({*queue_ids})), start_ms * 1000, end_ms * 1000)


EVERYTHING = Selection()


class ReadPlan(Struct, frozen=True):
    """The columns of the messages of every split, and the selection of messages.
    Rows that report damage need not be selected. With ``keys``, only messages with one of these keys or unique
    keys are returned. With ``tags``, only messages with one of these tags are returned. With
    ``lite_topics`` or ``lite_prefix``, only messages of these lite topics are returned. ``choose`` selects the records
    that may match before they are decoded. Errors end with ``damage_hint`` or ``crc_hint``."""

    columns: tuple[Column, ...]
    selection: Selection = EVERYTHING
    verify_crc: VerifyCrc = VerifyCrc.NONE
    corrupt_records: CorruptRecords = CorruptRecords.FAIL
    decompress: bool = True
    unwrap: bool = True
    broker_name: str = ""
    keys: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()
    lite_topics: frozenset[str] = frozenset()
    lite_prefix: str = ""
    choose: Callable[[Records], NDArray[np.bool_]] | None = None
    batch_rows: int = scan.BATCH_ROWS
    damage_hint: str = "corruptRecordMode=skip reads on, report shows it in rows"
    crc_hint: str = "verifyCrc=drop leaves such messages out, column marks them"

    def needs(self, column: str) -> bool:
        """Return True if the result has a column."""
        return any(chosen.name == column for chosen in self.columns)


def read_split(split: Split, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages of a split in the order of the log.
    Raises StoreError: the file was deleted, or the file is damaged and the plan does not allow damage."""
    buffer = map_range(split.path, split.low, split.high)
    return read_parts(
        split, scan.walk(buffer, split.base_offset, split.low, split.high, rows_max=plan.batch_rows), plan
    )


def read_parts(split: Split, parts: Iterable[Records | Damage], plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Decode the messages of some records in the file of a split. Raises StoreError: see `read_split`."""
    for part in parts:
        if isinstance(part, Records):
            yield from _batches(split, part, plan)
        elif plan.corrupt_records is CorruptRecords.FAIL:
            raise _damaged(split, part.position, part.reason, plan)
        elif plan.corrupt_records is CorruptRecords.REPORT:
            yield _report(split, part, plan)


def decode_pulled(body: bytes, plan: ReadPlan, low: int, high: int) -> Iterator[pa.RecordBatch]:
    """Decode the messages in a pulled body that have queue offsets from ``low`` up to ``high``.
    Raises BodyError: the body does not consist of records. Raises StoreError: a message body cannot be unpacked."""
    records = scan.pulled(body)
    source = Split("a pulled body", 0, 0, len(body))
    for first in range(0, len(records), plan.batch_rows):
        part = records.take(slice(first, first + plan.batch_rows))
        for batch in _planned(part, plan):
            # Filter row by row: an inner batch is pulled as a whole, and some of its members may be outside of the
            # range. Another task reads these members.
            offsets = batch.field("queue_offset") + batch.member
            decoded = _decoded(source, batch, np.empty(0, "i8"), plan, (offsets >= low) & (offsets < high))
            if len(decoded):
                yield decoded


def _batches(split: Split, records: Records, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    if plan.selection != EVERYTHING:
        records = records.take(matches(records, plan.selection))
    if plan.choose is not None:
        records = records.take(plan.choose(records))
    crc_wrong = np.empty(0, "i8")
    if plan.verify_crc is not VerifyCrc.NONE and len(records):
        is_right = crc_matches(records)
        if plan.verify_crc is VerifyCrc.DROP:
            records = records.take(is_right)
        else:
            crc_wrong = records.positions[~is_right]
    if len(crc_wrong) and plan.verify_crc is VerifyCrc.FAIL:
        position = int(crc_wrong[0])
        raise StoreError(
            f"{split.path}: the body at byte {position} (commitLogOffset {split.base_offset + position}) does not match"
            f" its CRC; {plan.crc_hint}"
        )
    for batch in _planned(records, plan):
        yield _decoded(split, batch, crc_wrong, plan)


def _planned(records: Records, plan: ReadPlan) -> Iterator[MessageBatch]:
    return message_batches(
        records,
        bodies=plan.needs("body"),
        decompressed=plan.decompress,
        unwrapped=plan.unwrap,
        broker_name=plan.broker_name,
    )


def _decoded(
    split: Split,
    batch: MessageBatch,
    crc_wrong: NDArray[np.int64],
    plan: ReadPlan,
    wanted: NDArray[np.bool_] | None = None,
) -> pa.RecordBatch:
    """Return the wanted rows of a batch with their columns."""
    arrays = [column.kernel(batch) if column.kernel else None for column in plan.columns]
    # Check problems only after the kernels have run: kernels may find rows that cannot be decoded.
    if batch.problems and plan.corrupt_records is CorruptRecords.FAIL:
        row = min(batch.problems)
        raise _damaged(split, int(batch.of_record(batch.records.positions)[row]), batch.problems[row], plan)
    arrays = [_reasons(batch, crc_wrong) if array is None else array for array in arrays]
    decoded = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(plan.columns))
    kept = np.ones(len(batch), bool) if wanted is None else wanted
    if plan.corrupt_records is CorruptRecords.SKIP:
        kept[list(batch.problems)] = False
    if plan.keys:
        kept &= _has_key(batch, plan.keys)
    if plan.tags:
        found = batch.properties.values_of(names.TAGS)
        kept &= _is_in(found, plan.tags)
    if plan.lite_topics or plan.lite_prefix:
        found = batch.properties.values_of(names.LITE_TOPIC)
        if plan.lite_topics:
            kept &= _is_in(found, plan.lite_topics)
        kept &= pc.fill_null(pc.starts_with(found, plan.lite_prefix), False).to_numpy(zero_copy_only=False)
    return decoded if kept.all() else decoded.filter(pa.array(kept))


def _is_in(found: pa.Array, wanted: frozenset[str]) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = pc.is_in(found, value_set=pa.array(sorted(wanted), pa.string())).to_numpy(
        zero_copy_only=False
    )
    return mask


def _has_key(batch: MessageBatch, keys: frozenset[str]) -> NDArray[np.bool_]:
    """Return a mask of the rows that have one of some keys as a key or as the unique key."""
    unique_keys = batch.properties.values_of(names.UNIQ_KEY).to_pylist()
    texts = batch.properties.values_of(names.KEYS).to_pylist()
    rows = zip(unique_keys, texts, strict=True)
    return np.array([unique in keys or not keys.isdisjoint((text or "").split()) for unique, text in rows], bool)


def _reasons(batch: MessageBatch, crc_wrong: NDArray[np.int64]) -> pa.Array:
    """Return the reason why each row is damaged, or null."""
    reasons: list[str | None] = [None] * len(batch)
    positions = batch.of_record(batch.records.positions)
    for row in np.flatnonzero(np.isin(positions, crc_wrong)).tolist():
        reasons[row] = "the body does not match its CRC"
    for row, reason in batch.problems.items():
        reasons[row] = reason
    return pa.array(reasons, pa.string())


def _report(split: Split, damage: Damage, plan: ReadPlan) -> pa.RecordBatch:
    """Return one row with the position and the size of the damage."""
    known = {
        "commitLogOffset": split.base_offset + damage.position,
        "storeSize": damage.end - damage.position,
        "brokerName": plan.broker_name or None,
        CORRUPT: damage.reason,
    }
    arrays = [pa.array([known.get(column.name)], column.arrow) for column in plan.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(plan.columns))


def _damaged(split: Split, position: int, reason: str, plan: ReadPlan) -> StoreError:
    return StoreError(
        f"{split.path}: damage at byte {position} (commitLogOffset {split.base_offset + position}): {reason};"
        f" {plan.damage_hint}"
    )


# ---------------------------------------------------------------- selections


def within_times(segments: Sequence[Segment], selection: Selection) -> list[Segment]:
    """Return the files of a log that may have messages with the wanted store times.

    The messages in a file are older than the first message in the next file, unless the clock was set back (by at most
    `CLOCK_SLACK_US`). Files are omitted only at the two ends, so that the remaining files are still one log."""
    low, high = selection.start_us, selection.end_us
    kept = list(segments)
    while len(kept) > 1 and high and first_stored(kept[-1]) > high + CLOCK_SLACK_US:
        kept.pop()
    while len(kept) > 1 and low and 0 < first_stored(kept[1]) < low - CLOCK_SLACK_US:
        kept.pop(0)
    return kept


def first_stored(segment: Segment) -> int:
    """Return the store time (µs) of the first message in a file. Return 0 (unknown) if the file does not begin with a
    message."""
    for part in scan.pick(map_records(segment.path, [0]), segment.base_offset, [0]):
        if isinstance(part, Records):
            return int(part.field("store_timestamp")[0]) * 1000
    return 0


def matches(records: Records, selection: Selection) -> NDArray[np.bool_]:
    """Return a mask of the selected records. The members of an inner batch share the compared fields."""
    met = np.ones(len(records), bool)
    if selection.topics:
        topics = topics_of(records)
        # Compare each of the few distinct topics in a batch once, then distribute the result to its records.
        texts = np.array([topic.decode("utf-8", "replace") for topic in topics.dictionary.to_pylist()], object)
        met &= np.isin(texts, selection.topics)[topics.indices.to_numpy()]
    if selection.queue_ids:
        met &= np.isin(records.field("queue_id"), selection.queue_ids)
    if selection.start_us or selection.end_us:
        times_us, is_known = to_microseconds(records.field("store_timestamp"))
        met &= is_known  # as in SQL, a null meets no condition
        if selection.start_us:
            met &= times_us >= selection.start_us
        if selection.end_us:
            met &= times_us < selection.end_us
    return met
