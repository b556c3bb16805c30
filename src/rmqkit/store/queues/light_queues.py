"""Light queues: further queues that one stored message is in, too (``LmqDispatch``, ``MultiDispatchUtils``).

===========================  =========================================================================================
property                     holds
===========================  =========================================================================================
``INNER_MULTI_DISPATCH``     names ``%LMQ%…``, separated by commas: the producer asks for these queues
``INNER_MULTI_QUEUE_OFFSET`` the message's number in each; the broker gives them when it stores the message
===========================  =========================================================================================

A light queue is the consume queue of id 0 of its name; its entries point at records of other topics. Retry topics, the
delay topic and the broker's own are in none: their messages are when they are put to their real topic. Members of a
batch get no numbers. A name that stands twice is numbered once, and counts twice, as with Apache's brokers.
Source: behaviour.md §9.6; store.md §11. (Checked with 5.4.0: one name that is none of a light queue stops its dispatch
for good, as it gets an empty number. Such messages are refused here.)
"""

from __future__ import annotations

from rmqkit.protocol.names import HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, SYSTEM_TOPIC_PREFIX, is_light
from rmqkit.protocol.properties import find_property, in_stored_order
from rmqkit.store.queues.base import LogicQueue
from rmqkit.store.queues.table import ConsumeQueues, topic_fault

__all__ = ["MULTI_DISPATCH", "light_fault", "light_names", "light_numbers", "numbered", "too_many"]

MULTI_DISPATCH = b"INNER_MULTI_DISPATCH\x01"
_NOT_IN_ANY = (RETRY_PREFIX, SYSTEM_TOPIC_PREFIX)


def light_names(topic: str, properties: bytes) -> list[str]:
    """The queues that a message of a topic asks for."""
    if MULTI_DISPATCH not in properties or topic.startswith(_NOT_IN_ANY) or topic in (SCHEDULE_TOPIC, HALF_TOPIC):
        return []
    listed = (find_property(properties, MULTI_DISPATCH[:-1]) or b"").decode("utf-8", "replace")
    return listed.rstrip(",").split(",") if listed.strip() else []


def light_fault(names: list[str]) -> str:
    """Why a message cannot be in the queues it asks for, or an empty text."""
    wrong = next((name for name in names if not is_light(name) or topic_fault(name, 0)), None)
    return "" if wrong is None else f"INNER_MULTI_DISPATCH names {wrong!r}: a light queue's name begins with %LMQ%"


def numbered(properties: bytes, light: list[LogicQueue]) -> bytes:
    """The properties of a message, as they are stored, with its number in each of its light queues."""
    numbers = b",".join([b"%d" % queue.next_offset for queue in light])
    if not properties.endswith(b"\x02"):
        properties += b"\x02"
    return in_stored_order(properties + b"INNER_MULTI_QUEUE_OFFSET\x01%b\x02" % numbers)


def light_numbers(topic: str, properties: bytes) -> dict[str, int]:
    """The light queues that a stored message is in, with its number in each."""
    names = light_names(topic, properties)
    numbers = (find_property(properties, b"INNER_MULTI_QUEUE_OFFSET") or b"").split(b",") if names else []
    if len(numbers) != len(names):
        return {}
    found = zip(names, numbers, strict=True)
    return {name: int(number) for name, number in found if number.isdigit() and not light_fault([name])}


def too_many(queues: ConsumeQueues, names: list[str], count_max: int) -> bool:
    """Whether a store that has more light queues than it may would get another one for these names."""
    if len(queues) <= count_max or all((name, 0) in queues.table for name in names):
        return False
    return sum(map(is_light, (topic for topic, _ in queues.table))) >= count_max
