"""The tables of `rmqkit.spark.jobs.audit`: the workers reduce the log of a store to small tables, which are added
up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from rmqkit.arrow.fs import map_range
from rmqkit.arrow.reader import ReadPlan, read_parts
from rmqkit.arrow.schema import Column
from rmqkit.arrow.splits import Split
from rmqkit.protocol import properties as names
from rmqkit.protocol.names import DLQ_PREFIX, RETRY_PREFIX
from rmqkit.protocol.record import TRANSACTION_MASK
from rmqkit.spark.jobs.log_ranges import SegmentCounts, add_up, counted
from rmqkit.spark.jobs.summary import record_bytes
from rmqkit.store.kernels.columns import property_value
from rmqkit.store.log import scan

READ = (
    *("topic", "queueId", "keys", "bornTimestamp", "storeTimestamp", "storeSize", "commitLogOffset", "sysFlag"),
    "reconsumeTimes",
)
_MARKS = (("realTopic", names.REAL_TOPIC), ("retryTopic", names.RETRY_TOPIC), ("dlqTopic", "DLQ_ORIGIN_TOPIC"))
_KEYS_MAX = 4096
_FINE_BITS = 7
"""Number of leading bits that determine the range of a value. Each value below 2 to this power has its own range."""

REDUCED: dict[str, tuple[list[str], dict[str, str]]] = {
    "traffic": (["topic", "queueId", "period"], {"messages": "sum", "bytes": "sum", "first": "min", "last": "max"}),
    "sizes": (["topic", "range"], {"messages": "sum", "low": "min", "high": "max"}),
    "latencies": (["topic", "range"], {"messages": "sum", "low": "min", "high": "max"}),
    "keys": (["topic", "key"], {"messages": "sum"}),
    "retries": (["topic", "origin", "times"], {"messages": "sum", "first": "min", "last": "max"}),
}
"""The tables by name: the columns to group by, and the aggregation of each other column."""


class Reduced(Struct):
    """The reduced content of some splits, with one table for each name in `REDUCED`."""

    tables: dict[str, pa.Table]
    keys_undercount: int
    segments: list[SegmentCounts]


def reduce_split(split: Split, plan: ReadPlan, period_seconds: int) -> Reduced:
    """Reduce one split to tables."""
    marks = [Column(name, "string", property_value(value)) for name, value in _MARKS]
    plan = replace(plan, columns=(*plan.columns, *marks))
    counts, buffer = SegmentCounts.of(split), map_range(split.path, split.low, split.high)
    walk = scan.walk(buffer, split.base_offset, split.low, split.high, rows_max=plan.batch_rows)
    parts = [_tables(batch, period_seconds) for batch in read_parts(split, counted(walk, counts, split), plan)]
    return _added(parts, 0, [counts])


def add(one: Reduced, other: Reduced) -> Reduced:
    undercount = one.keys_undercount + other.keys_undercount
    return _added([one.tables, other.tables], undercount, add_up([*one.segments, *other.segments]))


def _added(parts: Sequence[dict[str, pa.Table]], undercount: int, segments: list[SegmentCounts]) -> Reduced:
    """Add up the tables of several parts. Keep only the most frequent keys."""
    tables: dict[str, pa.Table] = {}
    for name, (keys, sums) in REDUCED.items():
        whole = [part[name] for part in parts if name in part]
        if whole:
            grouped = pa.concat_tables(whole).group_by(keys).aggregate(list(sums.items()))
            tables[name] = grouped.select([*keys, *(f"{column}_{how}" for column, how in sums.items())]).rename_columns(
                [*keys, *sums]
            )
    if "keys" in tables and len(tables["keys"]) > _KEYS_MAX:
        by_count = tables["keys"].sort_by([("messages", "descending")])
        # No dropped key has more messages than the first dropped key. Each reduction may drop the same key again, so
        # these bounds are added up.
        undercount += by_count["messages"][_KEYS_MAX].as_py()
        tables["keys"] = by_count.slice(0, _KEYS_MAX).combine_chunks()
    return Reduced(tables, undercount, segments)


def _tables(batch: pa.RecordBatch, period_seconds: int) -> dict[str, pa.Table]:
    """Convert a batch of messages to tables. Their rows are not grouped yet."""
    topic, count = batch["topic"], len(batch)
    stored, born = (batch[name].cast(pa.int64()).fill_null(0) for name in ("storeTimestamp", "bornTimestamp"))
    stored_us = stored.to_numpy()
    ones = pa.array(np.ones(count, "i8"))
    sizes, is_first = record_bytes(batch)
    tables = {
        "traffic": pa.table(
            {
                "topic": topic,
                "queueId": batch["queueId"],
                "period": pa.array(stored_us // (period_seconds * 1_000_000)),
                "messages": ones,
                "bytes": pa.array(sizes),
                "first": stored,
                "last": stored,
            }
        ),
        "sizes": value_ranges(topic.filter(pa.array(is_first)), sizes[is_first]),
    }
    # Latency excludes delayed, retried and half messages: their store time does not show the duration of a send.
    is_direct = pc.and_(pc.is_null(batch["realTopic"]), pc.equal(batch["reconsumeTimes"], 0))
    is_direct = pc.and_(is_direct, pa.array(batch["sysFlag"].to_numpy() & TRANSACTION_MASK == 0))
    is_direct = pc.and_(is_direct, pc.and_(batch["bornTimestamp"].is_valid(), batch["storeTimestamp"].is_valid()))
    latency_ms = (stored_us - born.to_numpy()) // 1000
    tables["latencies"] = value_ranges(topic.filter(is_direct), latency_ms[is_direct.to_numpy(zero_copy_only=False)])

    lists = pc.split_pattern(batch["keys"].fill_null(""), " ")
    keys = pa.table({"topic": topic.take(pc.list_parent_indices(lists)), "key": lists.flatten()})
    keys = keys.filter(pc.not_equal(keys["key"], ""))
    tables["keys"] = keys.append_column("messages", pa.array(np.ones(len(keys), "i8")))

    is_back = pc.or_(pc.starts_with(topic, RETRY_PREFIX), pc.starts_with(topic, DLQ_PREFIX))
    tables["retries"] = pa.table(
        {
            "topic": topic,
            "origin": pc.coalesce(batch["dlqTopic"], batch["retryTopic"]),
            "times": batch["reconsumeTimes"],
            "messages": ones,
            "first": stored,
            "last": stored,
        }
    ).filter(is_back)
    return tables


def value_ranges(topic: pa.Array, values: NDArray[np.int64]) -> pa.Table:
    """Group values into ranges by their leading bits. All negative values are one range."""
    bits = np.frexp(np.maximum(values, 0).astype("f8"))[1].astype("i8")
    # The number includes the shift. Otherwise ranges of different widths with equal leading bits would be merged.
    shift = np.maximum(bits - _FINE_BITS, 0)
    number = np.where(values < 0, -1, (shift << 32) | (values >> shift))
    low, ones = pa.array(values), pa.array(np.ones(len(values), "i8"))
    return pa.table({"topic": topic, "range": pa.array(number), "messages": ones, "low": low, "high": low})
