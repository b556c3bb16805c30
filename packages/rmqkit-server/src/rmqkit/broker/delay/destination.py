"""The destination of due messages: the broker's own log, or the masters of other brokers.

=======================  ==============================================================================================
REAL_TOPIC, REAL_QID     the topic and the queue of a message. A message without them is dropped and logged
master                   stores the messages in its log immediately, consecutive messages of one sender with one write
acting master            cannot store messages in its log: it sends all messages of a batch concurrently to other
                         brokers (`RemotePut`)
can never be stored      goes to `DeadLetters`. (The reference retries the message without limit and holds up the
                         messages after it)
=======================  ==============================================================================================

The delivery loops of the delay levels and of the timer are coroutines. They wait only in `Destination.put`, which never
waits if messages are stored here. For a master, `Destination.run` therefore runs a loop to its end without a task. For
an acting master it starts a task.

Use this module only on the event loop. Source: behaviour.md §9.2, §9.3, §10.5.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from rmqkit.broker.dead_letters import DeadLetters, is_hopeless
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record
from rmqkit.remoting.tasks import Tasks
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["Destination", "Handed", "OnDelivered", "Refused", "RemotePut"]

RemotePut = Callable[[InnerMessage], Awaitable[bool]]
"""A function that sends a message to another broker and returns True if the other broker stored it."""

OnDelivered = Callable[[InnerMessage, PutResult], None]
"""A function that is called with every message that was stored in its real topic, and with its position."""

_REAL_TOPIC = property_names.REAL_TOPIC.encode()
_REAL_QUEUE_ID = property_names.REAL_QUEUE_ID.encode()
_INNER_NUM = property_names.INNER_NUM.encode()

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The store, the disk or another broker accepts no message now. The caller retries later."""


@dataclass(slots=True)
class Handed:
    """The result of the delivery of a batch.

    Attributes:
        stored: one value per message: True if the message is done, False if it has to be retried.
        failure: the reason why a message has to be retried; None if all are done.
    """

    stored: list[bool]
    failure: Exception | None = None

    @property
    def passed(self) -> int:
        """The number of messages before the first message that has to be retried."""
        return sum(takewhile(bool, self.stored))


class Destination:
    """The real topics of due messages, in this broker's log or at other brokers.

    Args:
        kind: the name of these messages in logs.
        dead_letters: receives messages that can never be stored. None: use dead letters without a table of topics.

    Attributes:
        remote_put: sends a message to another broker; None if this broker stores messages in its log.
        end_offset: the end of the last message that was stored in this broker's log.
    """

    def __init__(
        self, store: MessageStore, kind: str, on_delivered: OnDelivered | None, dead_letters: DeadLetters | None = None
    ) -> None:
        self._store = store
        self._dead_letters = dead_letters or DeadLetters(store, lambda topic, queue_count: None)
        self._kind = kind
        self._on_delivered = on_delivered
        self._tasks = Tasks()
        self.remote_put: RemotePut | None = None
        self.end_offset = 0

    @property
    def is_remote(self) -> bool:
        """Return True if messages go to other brokers."""
        return self.remote_put is not None

    def place_of(self, record: Record, *, forbidden: bytes | None = None) -> tuple[str, int] | None:
        """Return the real topic and queue of a message; None if they are missing, or the topic is ``forbidden``."""
        topic = find_property(record.properties, _REAL_TOPIC)
        queue_id = find_property(record.properties, _REAL_QUEUE_ID)
        if topic is None or queue_id is None or not queue_id.isdigit() or topic == forbidden:
            _log.error(
                "%s message at %d is dropped: it is for %s-%s", self._kind, record.physical_offset, topic, queue_id
            )
            return None
        return topic.decode("utf-8", "replace"), int(queue_id)

    # ---- delivery loops

    def run(self, delivery: Coroutine[Any, Any, None], name: str) -> None:
        """Run a delivery loop: to its end if messages are stored here, otherwise in a task."""
        if self.is_remote:
            self._tasks.start(delivery, name)
            return
        try:
            delivery.send(None)
        except StopIteration:
            return
        raise AssertionError("a delivery into the own log never waits")

    async def finish(self) -> None:
        """Wait for the delivery loops that run in tasks."""
        await self._tasks.finish()

    # ---- messages

    async def put(self, messages: Sequence[InnerMessage | None]) -> Handed:
        """Store messages here without waiting, or send them to other brokers. A None in ``messages`` is in the place of
        a message that is not delivered."""
        if self.remote_put is not None:
            return await self._send(messages, self.remote_put)
        # Wake the readers once for all messages: without the batch each put would run the listeners.
        with self._store.batch():
            return self.put_here(messages)

    def put_here(self, messages: Sequence[InnerMessage | None]) -> Handed:
        """Store messages in this broker's log in their order. Stop at the first message that the store does not accept
        now."""
        passed, failure = 0, None
        try:
            for _, alike in groupby(messages, _alike):
                group = list(alike)
                if self._put_run(group):
                    passed += len(group)
                    continue
                for message in group:
                    if message is not None:
                        self._put_one(message)
                    passed += 1
        except Exception as error:  # noqa: BLE001 - the caller needs to know which messages were stored before it
            failure = error
        stored = [index < passed or message is None for index, message in enumerate(messages)]
        return Handed(stored, failure)

    def _put_run(self, group: Sequence[InnerMessage | None]) -> bool:
        """Store messages that are `_alike` with one write. Return False and store nothing if this is impossible."""
        run = [message for message in group if message is not None]
        if len(run) < 2 or _INNER_NUM in run[0].properties:
            return False
        for message in run:
            message.index_keys()
        arrivals = self._store.put_run(run)
        if arrivals is None:
            return False
        for message, at in zip(run, arrivals, strict=True):
            end = at.physical_offset + at.size
            self._stored(message, PutResult(PutStatus.OK, at.physical_offset, end, at.queue_offset, at.store_timestamp))
        return True

    def _put_one(self, message: InnerMessage) -> None:
        """Store a message. Store it in the dead letters if its topic can never accept it.
        Raises Refused, StoreUnavailable: the message has to be retried."""
        put = self._store.put(message)
        if is_hopeless(put):
            refused = self._dead_letters.put(message, put, self._kind)
            if refused is not None:
                raise Refused(f"{refused.status.value} {refused.reason}")
        elif put.status is not PutStatus.OK:
            raise Refused(f"{put.status.value} {put.reason}")
        else:
            self._stored(message, put)

    def _stored(self, message: InnerMessage, put: PutResult) -> None:
        self.end_offset = put.end_offset
        # A message that goes to the timer topic again is not delivered yet.
        if self._on_delivered is not None and message.topic != TIMER_TOPIC:
            self._on_delivered(message, put)

    async def _send(self, messages: Sequence[InnerMessage | None], remote_put: RemotePut) -> Handed:
        """Send all messages concurrently to other brokers."""
        answers = iter(await asyncio.gather(*(remote_put(message) for message in messages if message is not None)))
        stored = [message is None or next(answers) for message in messages]
        refused = stored.count(False)
        failure = Refused(f"{refused} of {len(stored)} messages were not stored by another broker") if refused else None
        return Handed(stored, failure)


def _alike(message: InnerMessage | None) -> tuple[bytes, bytes, bool] | None:
    """Return the values that have to be equal in messages stored with one write."""
    if message is None:
        return None
    return message.born_host, message.store_host, _INNER_NUM in message.properties
