"""The audit of a store: traffic, sizes, latency, hot keys, lag, retries, and waiting messages.
`rmqkit.spark.jobs.audit_report` creates a report from the audit.

Each task reduces its split to a few small Arrow tables (`REDUCED`). Tasks and driver add these tables up. No body is
read, and no task returns a row per message. Two results are not exact:

==================  ==================================================================================================
percentiles         values are counted in ranges of at most 1/64 of the value, exact below 128: a percentile is the
                    maximum of its range, at most 1/64 too high
hot keys            a task returns at most ``_KEYS_MAX`` keys; ``keys_undercount_max`` limits the error of a key's count
==================  ==================================================================================================

Latency is the time from the producer's clock (born) to the broker's clock (store). If it is negative, the clocks
differ. It excludes messages that wait by design (delayed, transactional, consumed again). The lag time is relative to
the newest message of the store, not to the current time, so that an audit of an old copy always has the same result.
The broker's own groups and its message timer are omitted.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from rmqkit.arrow.fs import Segment, find_segments, map_records, resolve
from rmqkit.arrow.queue_files import QueueFile, find_queue_files, message_counts, queue_entries
from rmqkit.arrow.reader import ReadPlan
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import StoreError
from rmqkit.protocol.names import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    SYSTEM_GROUPS,
    group_of_retry_topic,
    is_system_topic,
)
from rmqkit.spark.jobs.audit_tables import READ, REDUCED, Reduced, add, reduce_split
from rmqkit.spark.jobs.log_ranges import SegmentCounts
from rmqkit.spark.jobs.tasks import core_count, reduce_tasks, run_tasks
from rmqkit.spark.options import Entity, StoreOptions, words
from rmqkit.spark.session import address
from rmqkit.spark.source.store import read_plan, refuse_archive, store_options
from rmqkit.spark.source.tables import TABLES
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Records
from rmqkit.store.queues.consume_queue import ENTRY_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Audit", "HotKey", "Lag", "Range", "Retried", "Topic", "Traffic", "Waiting", "audit"]


class Traffic(Struct):
    """The messages of a queue within a period of store times. ``bytes`` is the size of their records."""

    topic: str
    queue_id: int
    begin: datetime
    messages: int
    bytes: int


class Topic(Struct):
    """The numbers of a topic. ``busiest_queue_share`` is 1/``queues`` if all queues have the same number of messages.
    Latencies are null if no message of the topic has a latency. ``skewed`` counts messages that were born after they
    were stored."""

    topic: str
    messages: int
    bytes: int
    queues: int
    busiest_queue_share: float
    latency_ms_p50: int | None
    latency_ms_p95: int | None
    latency_ms_p99: int | None
    latency_ms_max: int | None
    skewed: int
    record_bytes_p50: int
    record_bytes_max: int
    first_store_timestamp: datetime
    last_store_timestamp: datetime

    @property
    def is_internal(self) -> bool:
        """Return True if the broker created the topic: system topics, retries and dead letters."""
        return is_system_topic(self.topic) or self.topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


class Range(Struct):
    """The number of values of a topic from ``low`` to ``high``, inclusive. A range begins at 0 or at a power of two.
    All negative values are in one range, from the lowest value to -1."""

    topic: str
    low: int
    high: int
    messages: int


class HotKey(Struct):
    """A key that occurs in several messages of a topic."""

    topic: str
    key: str
    messages: int
    share: float


class Lag(Struct):
    """The lag of a group in a queue. ``lag_ms`` is the age of the first message that was not consumed."""

    group: str
    topic: str
    queue_id: int
    offset: int
    max_offset: int
    lag: int
    lag_ms: int | None


class Retried(Struct):
    """The messages of a topic that a group sent back ``times`` times, or that became dead letters (``is_dead``)."""

    group: str
    is_dead: bool
    origin: str | None
    times: int
    messages: int
    oldest: datetime
    newest: datetime


class Waiting(Struct):
    """Messages that cannot be consumed yet: the messages of a delay level, with the first and the last delivery time,
    or the undecided half messages of a producer group, with the first and the last store time."""

    name: str
    messages: int
    first: datetime
    last: datetime


class Audit(Struct):
    """The result of an audit. ``notes`` lists the checks that failed. Tables are sorted by name. Hot keys and lags are
    sorted by size, largest first."""

    store: str
    period_seconds: int
    messages: int
    bytes: int
    first_store_timestamp: datetime | None
    last_store_timestamp: datetime | None
    keys_undercount_max: int
    notes: list[str]
    topics: list[Topic]
    traffic: list[Traffic]
    record_bytes: list[Range]
    latency_ms: list[Range]
    hot_keys: list[HotKey]
    lags: list[Lag]
    retries: list[Retried]
    delayed: list[Waiting]
    half_messages: list[Waiting]
    segments: list[SegmentCounts]


def audit(
    spark: SparkSession,
    path: str,
    options: Mapping[str, str] | None = None,
    *,
    period_seconds: int = 3600,
    hot_keys: int = 20,
) -> Audit:
    """Audit a store in one pass. Damaged records are omitted and counted in ``segments``, unless ``corruptRecordMode``
    is set. ``options`` are options of ``rocketmq-store``.
    Raises SettingsError: an option is not valid.
    Raises StoreError: the store is missing or cannot be read."""
    parsed = store_options({"corruptRecordMode": "skip", **(options or {}), "path": address(spark, path)})
    refuse_archive(parsed, "audit")
    plan = read_plan(parsed, READ)
    segments = find_segments(parsed.path, words(parsed.log_paths))
    splits = plan_splits(segments, parsed.split_bytes)
    reduced = Reduced({}, 0, [])
    if splits:
        reduced = reduce_tasks(spark, lambda split: reduce_split(split, plan, period_seconds), splits, add)
    found = audit_of(str(resolve(path)), period_seconds, reduced, hot_keys)

    # Other files may be missing or damaged. The results for the log are reported in any case.
    def noted(what: str, look: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        try:
            return look(spark, parsed, segments, *arguments)
        except StoreError as error:
            found.notes.append(f"{what} not known: {error}")
            return []

    found.lags = noted("consumer lag", _lags, found.last_store_timestamp)
    delay, half = ("delayLevel", "deliverTimestamp"), ("producerGroup", "storeTimestamp")
    found.delayed = noted("delayed messages", _waiting, splits, Entity.DELAY, delay)
    found.half_messages = noted("pending transactions", _waiting, splits, Entity.TRANSACTIONS, half)
    return found


# ---------------------------------------------------------------- results of the log


def audit_of(store: str, period_seconds: int, reduced: Reduced, hot_keys: int) -> Audit:
    rows = {name: reduced.tables[name].to_pylist() if name in reduced.tables else [] for name in REDUCED}
    topics = _topics(rows)
    traffic = [
        Traffic(
            row["topic"],
            row["queueId"],
            _time(row["period"] * period_seconds * 1_000_000),
            row["messages"],
            row["bytes"],
        )
        for row in rows["traffic"]
    ]
    retries = [
        Retried(
            group=_group(row["topic"]),
            is_dead=row["topic"].startswith(DLQ_PREFIX),
            origin=row["origin"],
            times=row["times"],
            messages=row["messages"],
            oldest=_time(row["first"]),
            newest=_time(row["last"]),
        )
        for row in rows["retries"]
    ]
    of_topic = {one.topic: one.messages for one in topics if not one.is_internal}
    keys = [row for row in rows["keys"] if row["topic"] in of_topic and row["messages"] > 1]
    hot = sorted(keys, key=lambda row: (-row["messages"], row["topic"], row["key"]))
    return Audit(
        store=store,
        period_seconds=period_seconds,
        messages=sum(one.messages for one in topics),
        bytes=sum(one.bytes for one in topics),
        first_store_timestamp=min((one.first_store_timestamp for one in topics), default=None),
        last_store_timestamp=max((one.last_store_timestamp for one in topics), default=None),
        keys_undercount_max=reduced.keys_undercount,
        notes=[],
        topics=topics,
        traffic=sorted(traffic, key=lambda one: (one.topic, one.queue_id, one.begin)),
        record_bytes=_powers(rows["sizes"]),
        latency_ms=_powers(rows["latencies"]),
        hot_keys=[
            HotKey(row["topic"], row["key"], row["messages"], row["messages"] / of_topic[row["topic"]])
            for row in hot[:hot_keys]
        ],
        lags=[],
        retries=sorted(retries, key=lambda one: (one.is_dead, one.group, one.origin or "", one.times)),
        delayed=[],
        half_messages=[],
        segments=reduced.segments,
    )


def _topics(rows: dict[str, list[dict[str, Any]]]) -> list[Topic]:
    by_topic: dict[str, defaultdict[str, list[dict[str, Any]]]] = {
        name: defaultdict(list) for name in ("traffic", "sizes", "latencies")
    }
    for name, grouped in by_topic.items():
        for row in rows[name]:
            grouped[row["topic"]].append(row)
    return [
        _topic(topic, by_topic["traffic"][topic], by_topic["sizes"][topic], by_topic["latencies"][topic])
        for topic in sorted(by_topic["traffic"])
    ]


def _topic(
    topic: str, traffic: list[dict[str, Any]], sizes: list[dict[str, Any]], latencies: list[dict[str, Any]]
) -> Topic:
    queues: defaultdict[int, int] = defaultdict(int)
    for row in traffic:
        queues[row["queueId"]] += row["messages"]
    messages = sum(queues.values())
    return Topic(
        topic=topic,
        messages=messages,
        bytes=sum(row["bytes"] for row in traffic),
        queues=len(queues),
        busiest_queue_share=max(queues.values()) / messages,
        first_store_timestamp=_time(min(row["first"] for row in traffic)),
        last_store_timestamp=_time(max(row["last"] for row in traffic)),
        record_bytes_p50=percentile(sizes, 50) or 0,
        record_bytes_max=percentile(sizes, 100) or 0,
        latency_ms_p50=percentile(latencies, 50),
        latency_ms_p95=percentile(latencies, 95),
        latency_ms_p99=percentile(latencies, 99),
        latency_ms_max=percentile(latencies, 100),
        skewed=sum(row["messages"] for row in latencies if row["range"] < 0),
    )


def percentile(ranges: list[dict[str, Any]], percent: int) -> int | None:
    """Return the maximum of the range that contains a percentile, or None if there are no values."""
    # Round up, so that a percentile of few values is one of these values.
    left = -(-sum(row["messages"] for row in ranges) * percent // 100)
    for row in sorted(ranges, key=lambda row: row["range"]):
        left -= row["messages"]
        if left <= 0:
            return int(row["high"])
    return None


def _powers(rows: list[dict[str, Any]]) -> list[Range]:
    """Merge fine ranges into ranges that begin at powers of two, and all negative values into one range."""
    sums: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        cell = sums[row["topic"], -1 if row["range"] < 0 else row["low"].bit_length()]
        cell[0] += row["messages"]
        cell[1] = min(cell[1], row["low"])
    return [
        Range(topic, lowest, -1, count) if bits < 0 else Range(topic, (1 << bits) >> 1, (1 << bits) - 1, count)
        for (topic, bits), (count, lowest) in sorted(sums.items())
    ]


def _group(topic: str) -> str:
    return topic.removeprefix(DLQ_PREFIX) if topic.startswith(DLQ_PREFIX) else group_of_retry_topic(topic)


def _time(microseconds: int) -> datetime:
    """Convert µs to a datetime. A time out of range becomes the first or last datetime."""
    try:
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=microseconds)
    except OverflowError:
        return (datetime.max if microseconds > 0 else datetime.min).replace(tzinfo=UTC)


# ---------------------------------------------------------------- lag and waiting messages


def _lags(
    spark: SparkSession, options: StoreOptions, segments: Sequence[Segment], newest: datetime | None
) -> list[Lag]:
    (rows,) = run_tasks(spark, lambda one: list(_lag_rows(one, segments, newest)), [options])
    return sorted(rows, key=lambda one: (-one.lag, one.group, one.topic, one.queue_id))


def _lag_rows(options: StoreOptions, segments: Sequence[Segment], newest: datetime | None) -> Iterator[Lag]:
    (columns,) = TABLES[Entity.OFFSETS].rows(options, read_plan(options, ()))
    files_of = functools.cache(lambda topic: find_queue_files(options.path, [topic]))
    for group, topic, queue_id, offset, end, lag in zip(*columns.values(), strict=True):
        if not group.startswith(SYSTEM_GROUP_PREFIX) and group not in SYSTEM_GROUPS:
            stored_ms = _stored_ms(files_of(topic), segments, queue_id, offset) if lag else None
            lag_ms = (
                None if stored_ms is None or newest is None else max(round(newest.timestamp() * 1000) - stored_ms, 0)
            )
            yield Lag(group, topic, queue_id, offset, end, lag, lag_ms if lag else 0)


def _stored_ms(files: Sequence[QueueFile], segments: Sequence[Segment], queue_id: int, offset: int) -> int | None:
    """Return the store time of the first message at or after an offset in a queue, or None if the log does not have the
    message."""
    for file in files:
        if file.queue_id != queue_id or (not file.is_batch and file.first + file.size // ENTRY_BYTES <= offset):
            continue
        numbers, entries = queue_entries(file, with_codes=False)
        at = int(np.searchsorted(numbers + message_counts(file, entries), offset, side="right"))
        if at == len(numbers):
            continue
        place = int(entries["offset"][at])
        for segment in segments:
            if segment.base_offset <= place < segment.base_offset + segment.size:
                positions = [place - segment.base_offset]
                for part in scan.pick(map_records(segment.path, positions), segment.base_offset, positions):
                    if isinstance(part, Records):
                        return int(part.field("store_timestamp")[0])
    return None


def _waiting(
    spark: SparkSession,
    options: StoreOptions,
    segments: Sequence[Segment],
    splits: Sequence[Split],
    entity: Entity,
    columns: tuple[str, str],
) -> list[Waiting]:
    """Count the waiting messages of an entity by the first column. The second column is the time: return its minimum
    and maximum.
    """
    parts, plan = list(TABLES[entity].parts(options, segments, splits)), read_plan(options, ())
    sums: dict[str, Waiting] = {}
    found = run_tasks(spark, lambda part: list(_waiting_rows(entity, part, plan, *columns)), parts, core_count(spark))
    for one in chain.from_iterable(found):
        known = sums.setdefault(one.name, Waiting(one.name, 0, one.first, one.last))
        known.messages += one.messages
        known.first, known.last = min(known.first, one.first), max(known.last, one.last)
    return [sums[name] for name in sorted(sums, key=lambda name: (len(name), name))]


def _waiting_rows(entity: Entity, part: Any, plan: ReadPlan, group: str, time: str) -> Iterator[Waiting]:
    for rows in TABLES[entity].rows(part, plan):
        times = rows[time] if isinstance(rows[time], pa.Array) else pa.array(rows[time])
        table = pa.table({"name": pa.array(rows[group]), "time": times.cast(pa.int64())})
        grouped = table.group_by("name").aggregate([([], "count_all"), ("time", "min"), ("time", "max")])
        for name, count, first, last in zip(*grouped.to_pydict().values(), strict=True):
            yield Waiting(str(name), count, _time(first), _time(last))
