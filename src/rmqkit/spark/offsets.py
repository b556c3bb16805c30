"""Offsets say where a read of live topics is: the next message of every queue; ranges say what one task reads.

``{"orders": {"broker-a": {"0": 123, "1": 77}}}`` is what Spark keeps and what options say; an offset is that of the
next message, so an end is exclusive. In options -2 is the earliest message and -1 the end as it is; neither is ever
stored. Pure. Source: spark.md §6, §8.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue

EARLIEST = -2
LATEST = -1

Offsets = dict[MessageQueue, int]


class Range(Struct, frozen=True):
    """Messages of a queue: offsets from ``low`` up to ``high``."""

    queue: MessageQueue
    low: int
    high: int


def to_json(offsets: Mapping[MessageQueue, int]) -> dict[str, Any]:
    """Offsets as Spark keeps them."""
    told: dict[str, Any] = {}
    for queue, offset in sorted(offsets.items()):
        told.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return told


def from_json(told: Mapping[str, Any]) -> Offsets:
    """The opposite of `to_json`. Raises ValueError: it has another shape."""
    offsets: Offsets = {}
    try:
        for topic, brokers in told.items():
            for broker_name, queues in brokers.items():
                for queue_id, offset in queues.items():
                    if isinstance(offset, bool) or not isinstance(offset, int):
                        raise ValueError(f"{offset!r} is no offset")
                    offsets[MessageQueue(topic, broker_name, int(queue_id))] = offset
    except AttributeError:
        raise ValueError('it must look like {"topic":{"broker-a":{"0":123}}}') from None
    return offsets


def read_option(name: str, text: str) -> Offsets | None:
    """Offsets that an option gives; None for one of the words that stand for all queues.
    Raises SettingsError: it is neither."""
    if not text.startswith("{"):
        return None
    try:
        return from_json(json.loads(text))
    except ValueError as error:
        raise SettingsError(f"rocketmq: option {name} cannot be used: {error}") from None


def limited(start: Offsets, end: Offsets, count_max: int) -> Offsets:
    """``end`` drawn nearer, so that about ``count_max`` messages lie between: of each queue in proportion to what it
    has, but at least one of each that has any."""
    backlog = {queue: max(offset - start.get(queue, offset), 0) for queue, offset in end.items()}
    total = sum(backlog.values())
    if total <= count_max:
        return dict(end)
    taken = {queue: max(1, count * count_max // total) if count else 0 for queue, count in backlog.items()}
    return {queue: offset - backlog[queue] + taken[queue] for queue, offset in end.items()}


def ranges(start: Offsets, end: Offsets, *, parts_min: int = 0, count_max: int = 0) -> Iterator[Range]:
    """What lies between, in pieces for tasks, none larger than ``count_max``; with ``parts_min`` at least so many
    pieces where there are as many messages, large queues being cut first."""
    whole = {queue: (start[queue], high) for queue, high in sorted(end.items()) if start.get(queue, high) < high}
    total = sum(high - low for low, high in whole.values())
    for queue, (low, high) in whole.items():
        parts = -(-(high - low) * parts_min // total) if len(whole) < parts_min else 1
        if count_max:
            parts = max(parts, -(-(high - low) // count_max))
        bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
        yield from (Range(queue, one, other) for one, other in itertools.pairwise(bounds) if one < other)
