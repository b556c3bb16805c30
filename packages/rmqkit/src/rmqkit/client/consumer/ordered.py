"""The orderly consume service, which runs the handlers of a queue one after the other
(``ConsumeMessageOrderlyService``).

==========================  ==================================================================================
a handler …                 effect
==========================  ==================================================================================
returns                     the messages are consumed, the next messages of the queue follow
raises                      the queue pauses for ``suspend_queue_ms``; then the same messages are handled again
… for the last time         after ``retries_max`` failures the message goes to the dead letters, the queue continues
… `Reject`                  the same immediately
==========================  ==================================================================================

No other client handles messages of the queue at the same time. The broker locks the queue for this client
(LOCK_BATCH_MQ), except in broadcasting, in which queues are not shared. A broker's lock expires 60 s after the last
request. The client relies on it for 30 s, and renews it every 20 s. While the lock is not certain, the queue pauses.
The steps before the next owner gets a queue have this order: the handler returns, the offset is saved, the lock is
released.

The workers take queues in turn, one batch each. At most one worker has a queue (``ProcessQueue.is_scheduled``).
Use this module only on the event loop. Source: behaviour.md §2.7, §8.10; remoting.md §4.3.5.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable

from rmqkit.client.consumer.consume import (
    ConcurrentConsumeService,
    ConsumeLater,
    DeadLetters,
    log_failure,
    restore_topic,
)
from rmqkit.client.consumer.process_queue import Failure, ProcessQueue
from rmqkit.client.consumer.reasons import Reason
from rmqkit.client.runtime.routes import NOT_REGISTERED
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import ConnectFailed, RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue

LOCAL_LOCK_MS = 30_000
"""The time in ms for which this client relies on a lock after the broker granted it. The broker holds the lock twice as
long.
"""

_log = logging.getLogger(__name__)
_LOCK_PAUSE_MS = 3000.0
_TO_DEAD_LETTERS = -1


class OrderlyConsumeService(ConcurrentConsumeService):
    """A consume service with workers that run handlers in the order of each queue."""

    locks: ClientQueueLocks | None = None
    """The locks of this member's queues; None if no other member can lock them."""

    _is_ordered = True
    _retries_unless_set = -1

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            restore_topic(message, self.runtime.namespace)
        if not process_queue.is_scheduled:
            self._schedule(process_queue)

    async def expire(self, process_queue: ProcessQueue) -> None:
        """Do nothing: an ordered queue waits for its handler without a time limit."""

    def _schedule(self, process_queue: ProcessQueue) -> None:
        # Set this flag with every scheduling, so that `put` never passes a queue to a second worker.
        process_queue.is_scheduled = len(process_queue) > 0
        if process_queue.is_scheduled:
            self._ready.put_nowait((process_queue, []))

    async def _handle(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        pause_ms = await self._step(process_queue)
        if pause_ms:
            self._call_later(pause_ms, lambda: self._schedule(process_queue))
        else:
            self._schedule(process_queue)

    async def _step(self, process_queue: ProcessQueue) -> float:
        """Handle the queue's next messages. Return the pause of the queue after them in ms."""
        if self.locks is not None and not self.locks.is_held(process_queue.queue):
            await self.locks.lock([process_queue.queue])
            if not self.locks.is_held(process_queue.queue):
                return _LOCK_PAUSE_MS
        # Take the messages after the lock request, because the queue may be dropped or restarted during the request.
        messages = self._next(process_queue)
        if process_queue.is_dropped or not messages:  # the lock may belong to a restart of the queue
            return 0.0
        error = await self._call(process_queue, messages)
        if error is None:
            self.consumed(process_queue, *messages)
            return 0.0
        if await self._is_given_up(process_queue, messages, error):
            return 0.0
        pause_ms = self._when(messages[0], error)[1]
        return self.settings.suspend_queue_ms if pause_ms is None else pause_ms

    def _next(self, process_queue: ProcessQueue) -> list[ReceivedMessage]:
        """Return the messages with the lowest offsets for one call of the handler."""
        messages = process_queue.lowest(1)
        if not messages:
            return []
        topic = messages[0].topic
        listener = self.listener_of(topic)
        if listener is not None and listener.batch_max is not None:
            lowest = process_queue.lowest(listener.batch_max)
            messages = list(itertools.takewhile(lambda message: message.topic == topic, lowest))
        return messages

    async def _is_given_up(
        self, process_queue: ProcessQueue, messages: list[ReceivedMessage], error: BaseException
    ) -> bool:
        """Count a failure. Return True if the queue can continue because no message must be retried here."""
        if isinstance(error, DeadLetters):
            return await self._are_given_up(process_queue, error)
        later = error if isinstance(error, ConsumeLater) else ConsumeLater()
        named = messages if later.messages is None else later.messages
        first = next((i for i, message in enumerate(messages) if any(message is one for one in named)), len(messages))
        # The messages after the first failed message fail, too: consuming them now would break the order.
        self.consumed(process_queue, *messages[:first])
        failed = messages[first:]
        if failed:
            log_failure(failed, error)
        for message in failed:
            is_last = later.delay_level == _TO_DEAD_LETTERS or 0 <= self._retries_of(message) <= message.reconsume_times
            if not is_last or not await self._is_dead_lettered(message, self.reason_of(error, message)):
                for one in failed:
                    one.reconsume_times += 1
                process_queue.failure = Failure(message, error)
                return False
            self.consumed(process_queue, message)
        return True

    async def _are_given_up(self, process_queue: ProcessQueue, error: DeadLetters) -> bool:
        """Send to the dead letters the messages that no handler can process. The rest of their batch is handled
        afterwards. Return True if all were sent."""
        log_failure(error.messages, error)
        for message in error.messages:
            if not await self._is_dead_lettered(message, self.reason_of(error, message)):
                process_queue.failure = Failure(message, error)
                return False
            self.consumed(process_queue, message)
        return True

    async def _is_dead_lettered(self, message: ReceivedMessage, reason: Reason) -> bool:
        """Send a message to the dead letters. Return True if it is stored. In broadcasting, nothing is sent and the
        result is True.
        """
        if self.settings.is_broadcasting:
            return True
        try:
            await self._send_back(message, _TO_DEAD_LETTERS, reason)
        except RmqError:
            return await self._send_to_retry_topic(message)
        return True


class ClientQueueLocks:
    """The queue locks of one member of a group. ``asked`` are the queues that brokers may have locked for this member.
    ``errors`` are the errors of brokers that did not answer the last request.
    """

    def __init__(self, runtime: ClientRuntime, group: str) -> None:
        self._runtime = runtime
        self._group = group
        self._granted_ms: dict[MessageQueue, float] = {}
        self.asked: set[MessageQueue] = set()
        self.errors: dict[str, RmqError] = {}

    def is_held(self, queue: MessageQueue) -> bool:
        """Return True if the lock is certain: the broker granted it so recently that it cannot have expired."""
        granted_ms = self._granted_ms.get(queue)
        return granted_ms is not None and self._runtime.clock.monotonic_ms() - granted_ms < LOCAL_LOCK_MS

    def error_of(self, queue: MessageQueue) -> RmqError | None:
        """Return the error of the last lock request to the broker of a queue, or None if the request succeeded."""
        return self.errors.get(self._runtime.routes.broker_of(queue))

    def granted_at_ms(self, queue: MessageQueue) -> int:
        """Return the time when a broker last granted a lock, in ms since the epoch; 0 if the client has no lock."""
        granted_ms = self._granted_ms.get(queue)
        clock = self._runtime.clock
        return 0 if granted_ms is None else clock.now_ms() - round(clock.monotonic_ms() - granted_ms)

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues or renew their locks. Return the queues that another client has locked. If a broker does not
        answer, this is logged, and the state of the locks of its queues does not change."""
        refused = await asyncio.gather(*(self._lock(name, some) for name, some in self._by_broker(queues).items()))
        return set().union(*refused)

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Release locks. A lock that cannot be released expires after 60 s."""
        await asyncio.gather(*(self._unlock(name, some) for name, some in self._by_broker(queues).items()))

    async def _lock(self, broker_name: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        address = self._runtime.routes.address(broker_name)
        # Use the time of the request, not of the response: the broker's 60 s may have begun before the response
        # arrived.
        asked_ms = self._runtime.clock.monotonic_ms()
        try:
            if address is None:
                raise ConnectFailed(broker_name, "no route names its master", NOT_REGISTERED)
            self.asked.update(queues)  # if the response is lost, the lock must be released, too
            granted = await self._runtime.calls.lock_queues(address, self._group, self._runtime.client_id, queues)
        except RmqError as error:
            if self.errors.get(broker_name) is None:
                _log.warning("cannot lock queues of group %s at broker %s: %s", self._group, broker_name, error)
            self.errors[broker_name] = error
            return set()
        self.errors.pop(broker_name, None)
        self._granted_ms.update(dict.fromkeys(granted, asked_ms))
        refused = set(queues) - granted
        for queue in refused:
            self._granted_ms.pop(queue, None)
        self.asked -= refused
        return refused

    async def _unlock(self, broker_name: str, queues: list[MessageQueue]) -> None:
        # Remove the lock here before the broker releases it: a handler must not start when another member can have the
        # lock.
        for queue in queues:
            self._granted_ms.pop(queue, None)
        self.asked.difference_update(queues)
        address = self._runtime.routes.address(broker_name)
        try:
            if address is not None:
                await self._runtime.calls.unlock_queues(address, self._group, self._runtime.client_id, queues)
        except RmqError as error:
            _log.warning("cannot unlock queues of group %s at broker %s: %s", self._group, broker_name, error)

    def _by_broker(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        grouped: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            grouped[self._runtime.routes.broker_of(queue)].append(queue)
        return grouped
