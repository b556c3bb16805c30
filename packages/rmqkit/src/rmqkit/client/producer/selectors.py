"""Functions that choose the queue of a message: ``(queues, message) -> queue``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rmqkit.errors import MessageIllegal
from rmqkit.protocol.message import Message
from rmqkit.protocol.properties import java_hash, lite_queue_id
from rmqkit.protocol.schemas.clients import MessageQueue

__all__ = ["PlacedMessage", "Selector", "at_random", "by_hash", "by_lite_topic", "by_place", "by_sharding_key"]

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue | None]


class PlacedMessage(Message, kw_only=True):
    """A message that specifies its queue.

    Attributes:
        queue_id: the id of the queue; None means that the sharding key determines the queue.
        broker_name: the broker; None means the first broker, by name, that has such a queue.
    """

    body: bytes
    queue_id: int | None = None
    broker_name: str | None = None

    @property
    def is_placed(self) -> bool:
        """Return True if the message itself determines its queue."""
        return self.queue_id is not None or self.sharding_key is not None


def by_hash(key: str) -> Selector:
    """Return a selector that uses the hash of a key, as Java's ``SelectMessageQueueByHash`` does. Equal keys have the
    same queue."""
    return lambda queues, message: _by_text(queues, key)


def by_sharding_key(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Choose the queue by the hash of the sharding key of the message."""
    if message.sharding_key is None:
        raise ValueError(f"message for topic {message.topic} has no sharding_key to choose a queue by: set one")
    return _by_text(queues, message.sharding_key)


def by_lite_topic(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Choose the queue by the lite topic of the message, as RocketMQ's proxies do. All messages of a lite topic have
    the same queue while the number of queues does not change."""
    if message.lite_topic is None:
        raise ValueError(f"message for topic {message.topic} has no lite_topic to choose a queue by: set one")
    return queues[lite_queue_id(message.lite_topic, len(queues))]


def by_place(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Return the queue of a `PlacedMessage`. Raises MessageIllegal: the topic does not have this queue."""
    queue_id = message.queue_id if isinstance(message, PlacedMessage) else None
    if not isinstance(message, PlacedMessage) or queue_id is None:
        return by_sharding_key(queues, message)
    names = (message.broker_name,) if message.broker_name else {queue.broker_name for queue in queues}
    found = min((one for one in queues if one.queue_id == queue_id and one.broker_name in names), default=None)
    if found is None:
        ids = sorted({queue.queue_id for queue in queues if queue.broker_name in names})
        where = f" at broker {message.broker_name}" if message.broker_name else ""
        there = ids or f"queues at {', '.join(sorted({queue.broker_name for queue in queues})) or 'no broker'}"
        raise MessageIllegal(f"topic {message.topic} has no queue {queue_id} to send to{where}: it has {there}")
    return found


def at_random(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Choose a random queue."""
    return random.choice(queues)


def _by_text(queues: Sequence[MessageQueue], key: str) -> MessageQueue:
    """Return a queue by hash as Java does. In Java, ``%`` preserves the sign, so |hash % n| equals |hash| % n."""
    return queues[abs(java_hash(key)) % len(queues)]
