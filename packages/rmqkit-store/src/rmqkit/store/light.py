"""Light queues: additional queues that contain the same stored message (``LmqDispatch``, ``MultiDispatchUtils``).

===========================  =========================================================================================
property                     content
===========================  =========================================================================================
``INNER_MULTI_DISPATCH``     names ``%LMQ%…``, separated by commas: the producer requests these queues
``INNER_MULTI_QUEUE_OFFSET`` the message's number in each queue; the broker assigns them when it stores the message
===========================  =========================================================================================

A light queue is the consume queue with its name and id 0. Its entries point at records of other topics. Messages of
retry topics, the delay topic and the broker's own topics are in no light queue: they enter light queues when they are
put to their real topic. Members of a batch get no numbers. A name that is listed twice is numbered once, and counts
twice, as in Apache's brokers. At a name that is not the name of a light queue, 5.4.0 stops its dispatch permanently,
because such a name gets an empty number. Such messages are refused here.

The light queue of a lite topic, ``%LMQ%$parent$lite``, is in `rmqkit.store.lite`; every other one is a consume queue.
Source: store.md §11; behaviour.md §9.6; lite.md §4, §5.
"""

from __future__ import annotations

from collections.abc import Sequence

from rmqkit.protocol.names import (
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_TOPIC_PREFIX,
    is_light,
    split_lite_queue,
)
from rmqkit.protocol.properties import find_property, in_stored_order
from rmqkit.store.lite.lite_queues import EPOCH_MARK, LiteQueue
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.table import ConsumeQueues, topic_fault

__all__ = ["MULTI_DISPATCH", "light_fault", "light_names", "light_numbers", "numbered", "too_many"]

MULTI_DISPATCH = b"INNER_MULTI_DISPATCH\x01"
_NOT_IN_ANY = (RETRY_PREFIX, SYSTEM_TOPIC_PREFIX)


def light_names(topic: str, properties: bytes) -> list[str]:
    """Return the names of the light queues that a message of a topic requests."""
    if MULTI_DISPATCH not in properties or topic.startswith(_NOT_IN_ANY) or topic in (SCHEDULE_TOPIC, HALF_TOPIC):
        return []
    listed = (find_property(properties, MULTI_DISPATCH[:-1]) or b"").decode("utf-8", "replace")
    return listed.rstrip(",").split(",") if listed.strip() else []


def light_fault(names: list[str], topic: str) -> str:
    """Return the reason why a message of a topic cannot be in light queues, or an empty text."""
    for name in names:
        if not is_light(name) or topic_fault(name, 0):
            return f"INNER_MULTI_DISPATCH names {name!r}: a light queue's name begins with %LMQ%"
        lite = split_lite_queue(name)
        if lite is not None and lite[0] != topic:
            return f"INNER_MULTI_DISPATCH names {name!r}: lite topic {lite[1]} belongs to {lite[0]}, not to {topic}"
    return ""


def numbered(properties: bytes, light: Sequence[ConsumeQueueBase | LiteQueue]) -> bytes:
    """Return the stored properties of a message, with its number in each of its light queues, and the life of its lite
    topic after the first one."""
    numbers = b",".join([b"%d" % queue.next_offset for queue in light])
    if not properties.endswith(b"\x02"):
        properties += b"\x02"
    epoch = max((one.epoch for one in light if isinstance(one, LiteQueue)), default=0)
    if epoch > 1 or (epoch and EPOCH_MARK in properties):  # a producer must not choose the life
        properties += b"%b%d\x02" % (EPOCH_MARK, epoch)
    return in_stored_order(properties + b"INNER_MULTI_QUEUE_OFFSET\x01%b\x02" % numbers)


def light_numbers(topic: str, properties: bytes) -> dict[str, int]:
    """Return the light queues of a stored message, with its number in each queue."""
    names = light_names(topic, properties)
    numbers = (find_property(properties, b"INNER_MULTI_QUEUE_OFFSET") or b"").split(b",") if names else []
    if len(numbers) != len(names):
        return {}
    found = zip(names, numbers, strict=True)
    return {name: int(number) for name, number in found if number.isdigit() and not light_fault([name], topic)}


def too_many(queues: ConsumeQueues, names: list[str], count_max: int) -> bool:
    """Return True if these names would add a light queue to a store that already has the maximum number of light
    queues.
    """
    if len(queues) <= count_max or all((name, 0) in queues.table for name in names):
        return False
    return sum(map(is_light, (topic for topic, _ in queues.table))) >= count_max
