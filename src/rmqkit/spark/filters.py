"""Conditions on messages that are decided before anything but the heads and topics is decoded.

=================================  ==============================================================
column                             decided on
=================================  ==============================================================
topic                              the few distinct topics of a batch, each once
queueId, reconsumeTimes            numbers of the heads
bornTimestamp, storeTimestamp      the same, in microseconds, as Spark compares them
=================================  ==============================================================

Only columns that an inner batch and its members share are here. A null fails every condition, as in SQL.
`from_spark` turns Spark's pushed filters into conditions; `topic_in` is the ``topic`` option. Source: spark.md §2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.spark.kernels.batch import topics_of
from rmqkit.spark.kernels.columns import to_microseconds
from rmqkit.store.scan import Records

__all__ = ["Condition", "from_spark", "matches", "topic_in"]

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


class Condition(Struct, frozen=True):
    """One condition on one column.

    Attributes:
        column: its Spark name.
        kind: the name of Spark's filter class, or ``In``, ``IsNotNull``.
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


def from_spark(pushed: Any) -> Condition | None:
    """The condition of one of Spark's ``Filter`` objects; None when Spark has to decide it itself."""
    negated = type(pushed).__name__ == "Not"
    if negated:
        pushed = pushed.child
    kind = type(pushed).__name__
    column = ".".join(getattr(pushed, "attribute", ()))
    if column not in _NUMBERS and column not in _TIMES and column not in _TEXTS:
        return None
    if kind == "IsNotNull":
        return None if negated else Condition(column, kind, ())
    tests = _TEXT_TESTS if column in _TEXTS else {}
    if kind not in _COMPARISONS and kind not in tests and kind != "In":
        return None
    if negated and kind == "EqualNullSafe":  # the one negation that nulls pass
        return None
    given = pushed.value if kind == "In" else (pushed.value,)
    values = tuple(_comparable(column, value) for value in given)
    if None in values:  # a type that is not the column's, or a null, which has SQL's own rules
        return None
    return Condition(column, kind, values, negated)


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


def _comparable(column: str, value: Any) -> Any:
    if column in _TEXTS:
        return value if isinstance(value, str) else None
    if column in _TIMES:
        return _microseconds(value) if isinstance(value, datetime) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _microseconds(moment: datetime) -> int:
    """µs since the epoch; a time without a zone is local, as Spark hands timestamps to Python."""
    return (moment.astimezone(UTC) - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
