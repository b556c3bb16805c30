"""Sends to lite topics: the property ``__LITE_TOPIC`` names a lite topic of the message's topic.

The broker checks the name, because it reaches it on every path, and makes the store enter the message in the light
queue. A batch in one lite topic is usually stored by the fast path. This module splits the other batches with lite
topics, or refuses them. Apache's broker checks no names, and stores the messages of a batch in no lite topic.
Source: lite.md §3, §4.
"""

from __future__ import annotations

from collections.abc import Mapping

from rmqkit.broker.durability import Refusal
from rmqkit.broker.messages import TIMER_NAMES, changed
from rmqkit.errors import BodyError
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.names import lite_queue, lite_topic_fault
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import batch_bounds
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.lite.lite_queues import LITE_MARK
from rmqkit.store.message_store import InnerMessage

__all__ = ["in_lite_topic", "lite_members", "lite_refusal"]

_OTHER_TYPES = (
    (property_names.TRANSACTION_PREPARED, "TRANSACTION"),
    (property_names.DELAY, "DELAY"),
    *((name, "DELAY") for name in TIMER_NAMES),
    (property_names.PRIORITY, "PRIORITY"),
)
"""Properties that a message of a lite topic cannot have, with the type of such a message."""
_MIXED = "a batch has messages of one lite topic only"


def lite_refusal(topic: TopicConfig, properties: Mapping[str, str]) -> Refusal | None:
    """Return the reason to refuse a message with a lite topic, or None."""
    name = properties.get(property_names.LITE_TOPIC)
    if not name:
        return None
    fault = lite_topic_fault(name)
    if fault is None and topic.is_lite:
        other = next((kind for one, kind in _OTHER_TYPES if one in properties), None)
        if other is not None:
            fault = f"TopicMessageType validate failed, the expected type is LITE, but actual type is {other}"
    return None if fault is None else (ResponseCode.MESSAGE_ILLEGAL, fault)


def in_lite_topic(message: InnerMessage, topic: TopicConfig, *, has_light: bool) -> InnerMessage:
    """Return a message that the store enters in its lite topic. ``has_light``: every topic has lite topics, as at
    Apache's brokers with ``enableLmq``."""
    name = message.parsed.get(property_names.LITE_TOPIC)
    if not name or message.topic != topic.topic_name or not (topic.is_lite or has_light):
        return message
    return changed(message, {property_names.INNER_MULTI_DISPATCH: lite_queue(message.topic, name)})


def lite_members(message: InnerMessage, topic: TopicConfig, *, has_light: bool) -> list[InnerMessage] | Refusal | None:
    """Return the messages of a batch with a lite topic, to store them one by one. Return None for any other batch, and
    a refusal if a name is not allowed or the batch has several lite topics."""
    if LITE_MARK not in message.body or not (topic.is_lite or has_light):
        return None
    try:
        bounds = batch_bounds(message.body)
    except BodyError:
        return None  # the store has the refusal
    members: list[InnerMessage] = []
    lite_topics: set[str | None] = set()
    for flag, body_at, at, end in bounds:
        properties = decode_properties(bytes(message.body[at:end]))
        refusal = lite_refusal(topic, properties)
        if refusal is not None:
            return refusal
        lite_topics.add(properties.get(property_names.LITE_TOPIC))
        body = bytes(message.body[body_at : at - 2])
        members.append(_member(message, body, flag, properties))
    if lite_topics == {None}:
        return None
    if len(lite_topics) > 1:
        return ResponseCode.MESSAGE_ILLEGAL, _MIXED
    return [in_lite_topic(one, topic, has_light=has_light) for one in members]


def _member(batch: InnerMessage, body: bytes, flag: int, properties: dict[str, str]) -> InnerMessage:
    return InnerMessage(
        topic=batch.topic,
        queue_id=batch.queue_id,
        body=body,
        string=None,
        values=properties,
        flag=flag,
        sys_flag=batch.sys_flag,
        born_timestamp=batch.born_timestamp,
        born_host=batch.born_host,
        store_host=batch.store_host,
        reconsume_times=batch.reconsume_times,
    )
