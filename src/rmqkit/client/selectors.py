"""Functions that choose the queue of a message: ``(queues, message) -> queue``. Source: behaviour.md §7.7."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.hashing import java_hash
from rmqkit.protocol.message import Message

__all__ = ["Selector", "at_random", "by_hash", "by_sharding_key"]

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue | None]


def by_hash(key: str) -> Selector:
    """Messages with equal keys go to the same queue, the one Java's ``SelectMessageQueueByHash`` chooses."""
    return lambda queues, message: _by_text(queues, key)


def by_sharding_key(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """As `by_hash`, by the message's own sharding key."""
    if message.sharding_key is None:
        raise ValueError(f"message for topic {message.topic} has no sharding_key to choose a queue by: set one")
    return _by_text(queues, message.sharding_key)


def at_random(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """Any queue."""
    return random.choice(queues)


def _by_text(queues: Sequence[MessageQueue], key: str) -> MessageQueue:
    """Java's ``%`` keeps the sign of the hash, so |hash % n| is |hash| % n."""
    return queues[abs(java_hash(key)) % len(queues)]
