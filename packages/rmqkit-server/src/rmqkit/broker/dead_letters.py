"""Dead letters: the place for stored messages that can never be stored again in their real topic.

A broker stores some messages again: delayed and timed messages when they are due, and popped messages without an ack.
The store may refuse the copy permanently, because the queues of its topic became batch queues, or because a checksum
leaves no room for its properties. A retry would hold up later messages. Without a dead letter a message would be lost
although its send has succeeded.

=====================================  ============================================
message                                goes to
=====================================  ============================================
popped by a group                      ``%DLQ%<group>``
delayed or timed, for a retry topic    ``%DLQ%<group>``
delayed or timed, for any other topic  ``%DLQ%CID_RMQ_SYS_UNDELIVERABLE``
=====================================  ============================================

The message gets the properties ``rmqkit_reason`` and ``DLQ_ORIGIN_TOPIC`` if there is room for them. The reason is
logged as an error. Use this module only on the event loop. (Apache's broker retries a delayed message without limit,
and drops a timed message.)
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
    """Return True if the store will never accept a message."""
    return put.status in _HOPELESS


class DeadLetters:
    """The dead letters of a broker.

    Args:
        ensure_topic: creates a missing topic with a number of queues. May raise StoreUnavailable.
    """

    def __init__(self, store: MessageStore, ensure_topic: Callable[[str, int], object]) -> None:
        self._store = store
        self._ensure_topic = ensure_topic

    def put(self, message: InnerMessage, refused: PutResult, kind: str, group: str | None = None) -> PutResult | None:
        """Put a message into the dead letters of a group, after the store has refused the message permanently. Return
        None if the message needs no further put: it is stored, or it is lost, which is logged. Otherwise return the
        result of the last put: the caller must retry.
        ``kind``: the name of these messages in logs. ``group``: None for the default group of the table above.
        Raises StoreUnavailable: the topic cannot be created."""
        if group is None:
            is_retry = message.topic.startswith(RETRY_PREFIX)
            group = group_of_retry_topic(message.topic) if is_retry else UNDELIVERABLE_GROUP
        reason = f"{kind} message for {message.topic} cannot be stored: {refused.status.name}, {refused.reason}"
        bare = to_dead_letters(message, group)
        self._ensure_topic(bare.topic, 1)
        with_reason = changed(
            bare, {property_names.DEAD_LETTER_REASON: reason, property_names.DLQ_ORIGIN_TOPIC: message.topic}
        )
        same = msgspec.structs.replace(message, topic=bare.topic, queue_id=0)
        put = refused
        for one in (with_reason, bare, same):
            put = self._store.put(one)
            if put.status is PutStatus.OK:
                _log.error("%s; it is in %s at %d", reason, one.topic, put.queue_offset)
                return None
            if not is_hopeless(put):
                return put
        _log.error("%s; %s refuses it, too, so it is lost: %s", reason, bare.topic, put.reason)
        return None
