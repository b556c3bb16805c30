"""Filters drop messages by their heads and topics, before anything else of them is decoded.

=================================  ==============================================================
column                             decided on
=================================  ==============================================================
topic                              the few distinct topics of a batch, each once
queueId, reconsumeTimes            numbers of the heads
bornTimestamp, storeTimestamp      the same, in microseconds, as Spark compares them
=================================  ==============================================================

Only columns that an inner batch and its members share are here. A null fails every condition, as in SQL.
They come from the options of `rmqkit.spark.source.store`; `topic_in` is ``topic``. Source: spark.md §2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.spark.fs import Segment, map_records
from rmqkit.spark.kernels.batch import topics_of
from rmqkit.spark.kernels.columns import to_microseconds
from rmqkit.store.bulk import scan
from rmqkit.store.bulk.scan import Records

_NUMBERS = {"queueId": "queue_id", "reconsumeTimes": "reconsume_times"}
_TIMES = {"bornTimestamp": "born_timestamp", "storeTimestamp": "store_timestamp"}
_TEXTS = {"topic"}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
}
_TEXT_TESTS: dict[str, Callable[[str, str], bool]] = {
    "StringStartsWith": str.startswith,
    "StringEndsWith": str.endswith,
    "StringContains": operator.contains,
}


_EQUAL = {"EqualTo", "EqualNullSafe", "In"}
_LOWER = {"GreaterThan", "GreaterThanOrEqual", *_EQUAL}
_UPPER = {"LessThan", "LessThanOrEqual", *_EQUAL}
_CLOCK_SLACK_US = 60_000_000


class Condition(Struct, frozen=True):
    """One condition on one column.

    Attributes:
        column: its Spark name.
        kind: how it is compared, by the name of Spark's filter class.
        values: what the column is compared with: numbers, texts, or µs since the epoch.
        negated: whether rows pass that do not meet it (nulls never pass).
    """

    column: str
    kind: str
    values: tuple[Any, ...]
    negated: bool = False


def topic_in(topics: Iterable[str]) -> Condition:
    """The condition that a message belongs to one of some topics."""
    return Condition("topic", "In", tuple(topics))


def wanted(conditions: Iterable[Condition], column: str) -> list[Any]:
    """The values to which conditions restrict a column; none means any."""
    sets = [
        set(one.values)
        for one in conditions
        if one.column == column and one.kind in ("In", "EqualTo", "EqualNullSafe") and not one.negated
    ]
    return sorted(set.intersection(*sets)) if sets else []


def within_times(segments: Sequence[Segment], conditions: Iterable[Condition]) -> list[Segment]:
    """The files of a log that can have messages of the wanted store times.

    A file ends before the first message of the next, give or take what a clock was set back (`_CLOCK_SLACK_US`). Files
    are left out at the two ends only, so that the rest is still one log."""
    low, high = bounds([one for one in conditions if one.column == "storeTimestamp" and not one.negated])
    kept = list(segments)
    while len(kept) > 1 and high is not None and _first_stored(kept[-1]) > high + _CLOCK_SLACK_US:
        kept.pop()
    while len(kept) > 1 and low is not None and 0 < _first_stored(kept[1]) < low - _CLOCK_SLACK_US:
        kept.pop(0)
    return kept


def bounds(conditions: Iterable[Condition]) -> tuple[int | None, int | None]:
    """The least and the greatest value that conditions on one column leave; None for any."""
    lows = [min(one.values) for one in conditions if one.kind in _LOWER]
    highs = [max(one.values) for one in conditions if one.kind in _UPPER]
    return max(lows, default=None), min(highs, default=None)


def _first_stored(segment: Segment) -> int:
    """µs of the first message of a file; 0 when it begins with none, which says nothing."""
    for part in scan.pick(map_records(segment.path, [0]), segment.base_offset, [0]):
        if isinstance(part, Records):
            return int(part.field("store_timestamp")[0]) * 1000
    return 0


def matches(records: Records, conditions: Iterable[Condition]) -> NDArray[np.bool_]:
    """Which records meet all conditions."""
    met = np.ones(len(records), bool)
    for condition in conditions:
        met &= _meets(records, condition)
    return met


def _meets(records: Records, condition: Condition) -> NDArray[np.bool_]:
    if condition.column in _TEXTS:
        topics = topics_of(records)
        texts = [topic.decode("utf-8", "replace") for topic in topics.dictionary.to_pylist()]
        distinct = np.array([_test(condition, text) for text in texts], bool)
        met: NDArray[np.bool_] = distinct[topics.indices.to_numpy()] ^ condition.negated
        return met
    if condition.column in _TIMES:
        numbers, known = to_microseconds(records.field(_TIMES[condition.column]))
        return (_compare(condition, numbers) ^ condition.negated) & known
    return _compare(condition, records.field(_NUMBERS[condition.column])) ^ condition.negated


def _compare(condition: Condition, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    if condition.kind == "IsNotNull":
        return np.ones(len(numbers), bool)
    if condition.kind == "In":
        return np.isin(numbers, condition.values)
    met: NDArray[np.bool_] = _COMPARISONS[condition.kind](numbers, condition.values[0])
    return met


def _test(condition: Condition, text: str) -> bool:
    if condition.kind == "IsNotNull":
        return True
    if condition.kind == "In":
        return text in condition.values
    if condition.kind in _TEXT_TESTS:
        return _TEXT_TESTS[condition.kind](text, condition.values[0])
    # Spark orders strings by their UTF-8 bytes; for code points that is the order of Python's strings, too.
    return bool(_COMPARISONS[condition.kind](text, condition.values[0]))
