"""Where messages go that are due, by a delay level or at a time: into the own log, or to another broker's master.

=======================  ==============================================================================================
REAL_TOPIC, REAL_QID     say where; without them a message is dropped and logged
master                   `Destination.put`; what the store refuses for now is tried again by whoever asked
acting master            has no log to put messages into: `Destination.put_remote` hands them to `RemotePut`
can never be stored      goes to `DeadLetters`: the reference tries it for ever, and holds up what is behind it
=======================  ==============================================================================================

Loop only. Source: behaviour.md §9.2, §9.3, §10.5.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rmqkit.broker.dead_letters import DeadLetters, is_hopeless
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["Destination", "OnDelivered", "RemotePut"]

RemotePut = Callable[[InnerMessage], Awaitable[bool]]
"""Puts a message at another broker; whether it is stored there."""

OnDelivered = Callable[[InnerMessage, PutResult], None]
"""Called with every message that was put where it belongs, and where it is."""

_REAL_TOPIC = property_names.REAL_TOPIC.encode()
_REAL_QUEUE_ID = property_names.REAL_QUEUE_ID.encode()

_log = logging.getLogger(__name__)


class Destination:
    """Puts messages where they belong.

    Args:
        kind: what logs call these messages.
        dead_letters: get what can never be stored; without a table of topics, if it is None.

    Attributes:
        remote_put: puts a message at another broker; None where the own log takes them.
        end_offset: the end of the last message that was put into the own log.
    """

    def __init__(
        self, store: MessageStore, kind: str, on_delivered: OnDelivered | None, dead_letters: DeadLetters | None = None
    ) -> None:
        self._store = store
        self._dead_letters = dead_letters or DeadLetters(store, lambda topic, queue_count: None)
        self._kind = kind
        self._on_delivered = on_delivered
        self.remote_put: RemotePut | None = None
        self.end_offset = 0

    def place_of(self, record: Record, *, forbidden: bytes | None = None) -> tuple[str, int] | None:
        """Topic and queue that a message is for; None when it names none, or the ``forbidden`` topic."""
        topic = find_property(record.properties, _REAL_TOPIC)
        queue_id = find_property(record.properties, _REAL_QUEUE_ID)
        if topic is None or queue_id is None or not queue_id.isdigit() or topic == forbidden:
            _log.error(
                "%s message at %d is dropped: it is for %s-%s", self._kind, record.physical_offset, topic, queue_id
            )
            return None
        return topic.decode("utf-8", "replace"), int(queue_id)

    def put(self, message: InnerMessage, *, is_delivery: bool = True) -> PutResult | None:
        """Put a message into the own log; None when it can never be stored, and is in the dead letters. What is
        refused is to be tried again. Raises StoreUnavailable: the same."""
        put = self._store.put(message)
        if is_hopeless(put):
            return self._dead_letters.put(message, put, self._kind)
        if put.status is PutStatus.OK:
            self.end_offset = put.end_offset
            if is_delivery:
                self.delivered(message, put)
        return put

    def delivered(self, message: InnerMessage, put: PutResult) -> None:
        """Say that a message is where it belongs."""
        if self._on_delivered is not None:
            self._on_delivered(message, put)

    async def put_remote(self, messages: Sequence[InnerMessage]) -> list[bool]:
        """Put messages at other brokers, all at a time; which of them are stored there."""
        assert self.remote_put is not None, "an acting master puts messages at other brokers"
        return await asyncio.gather(*map(self.remote_put, messages))
