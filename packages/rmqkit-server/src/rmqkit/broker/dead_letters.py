"""The last place of messages that were acknowledged and can never be stored where they belong.

A broker puts stored messages again: delayed and timed ones when they are due, popped ones that nobody acknowledged.
The store may refuse such a copy for good: the queues of its topic became batch queues, or a checksum leaves no room for
its properties. To try it again holds up the messages behind it, and to drop it loses a message that was acknowledged.

=====================================  ============================================
message                                goes to
=====================================  ============================================
popped by a group                      ``%DLQ%<group>``
delayed or timed, for a retry topic    ``%DLQ%<group>``
delayed or timed, for any other topic  ``%DLQ%CID_RMQ_SYS_UNDELIVERABLE``
=====================================  ============================================

It gets the properties ``rmqkit_reason`` and ``DLQ_ORIGIN_TOPIC``, where there is room for them, and an ERROR line says
the same. Loop only. Apache's broker tries a delayed message for ever, and drops a timed one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from rmqkit.broker.messages import changed, to_dead_letters
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import RETRY_PREFIX, SYSTEM_GROUP_PREFIX, group_of_retry_topic
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["UNDELIVERABLE_GROUP", "DeadLetters", "is_hopeless"]

UNDELIVERABLE_GROUP = SYSTEM_GROUP_PREFIX + "UNDELIVERABLE"
_HOPELESS = (PutStatus.MESSAGE_ILLEGAL, PutStatus.PROPERTIES_SIZE_EXCEEDED)

_log = logging.getLogger(__name__)


def is_hopeless(put: PutResult) -> bool:
    """Return True if the store refuses a message whenever it is put."""
    return put.status in _HOPELESS


class DeadLetters:
    """Puts messages into dead letters.

    Args:
        ensure_topic: makes a topic with a number of queues if there is none; raises StoreUnavailable.
    """

    def __init__(self, store: MessageStore, ensure_topic: Callable[[str, int], object]) -> None:
        self._store = store
        self._ensure_topic = ensure_topic

    def put(self, message: InnerMessage, refused: PutResult, kind: str, group: str | None = None) -> PutResult | None:
        """Put a message that the store refused for good into the dead letters of a group, or of the one that its topic
        names. Returns None when that is done, else why it has to be tried again.
        ``kind``: what logs call these messages. Raises StoreUnavailable: the topic cannot be made."""
        if group is None:
            is_retry = message.topic.startswith(RETRY_PREFIX)
            group = group_of_retry_topic(message.topic) if is_retry else UNDELIVERABLE_GROUP
        reason = f"{kind} message for {message.topic} cannot be stored: {refused.status.name}, {refused.reason}"
        bare = to_dead_letters(message, group)
        self._ensure_topic(bare.topic, 1)
        told = changed(
            bare, {property_names.DEAD_LETTER_REASON: reason, property_names.DLQ_ORIGIN_TOPIC: message.topic}
        )
        same = msgspec.structs.replace(message, topic=bare.topic, queue_id=0)
        put = refused
        for one in (told, bare, same):
            put = self._store.put(one)
            if put.status is PutStatus.OK:
                _log.error("%s; it is in %s at %d", reason, one.topic, put.queue_offset)
                return None
            if not is_hopeless(put):
                return put
        _log.error("%s; %s refuses it, too, so it is lost: %s", reason, bare.topic, put.reason)
        return None
