"""Functions that choose the queue of a message: ``(queues, message) -> queue``. Source: behaviour.md §7.7."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rmqkit.errors import MessageIllegal
from rmqkit.protocol.message import Message
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.schemas.clients import MessageQueue

__all__ = ["PlacedMessage", "Selector", "at_random", "by_hash", "by_place", "by_sharding_key"]

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue | None]


class PlacedMessage(Message, kw_only=True):
    """A message, and the queue that it asks for: of a broker, or of the first one by name that has it."""

    queue_id: int | None = None
    broker_name: str | None = None

    @property
    def is_placed(self) -> bool:
        """Whether it says itself which queue it goes to."""
        return self.queue_id is not None or self.sharding_key is not None


def by_hash(key: str) -> Selector:
    """Sends messages with equal keys to the same queue, the one Java's ``SelectMessageQueueByHash`` chooses."""
    return lambda queues, message: _by_text(queues, key)


def by_sharding_key(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Chooses as `by_hash`, by the message's own sharding key."""
    if message.sharding_key is None:
        raise ValueError(f"message for topic {message.topic} has no sharding_key to choose a queue by: set one")
    return _by_text(queues, message.sharding_key)


def by_place(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Chooses the queue that a placed message asks for. Raises MessageIllegal: its topic has no such queue."""
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
    """Chooses any queue."""
    return random.choice(queues)


def _by_text(queues: Sequence[MessageQueue], key: str) -> MessageQueue:
    """Java's ``%`` keeps the sign of the hash, so |hash % n| is |hash| % n."""
    return queues[abs(java_hash(key)) % len(queues)]
