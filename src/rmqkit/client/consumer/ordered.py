"""The orderly consume service runs the handlers of a queue one after the other (``ConsumeMessageOrderlyService``).

==========================  ==================================================================================
a handler …                 then
==========================  ==================================================================================
returns                     the messages are consumed, the next ones of the queue follow
raises                      the queue stands still for ``suspend_queue_ms``; then the same messages again
… for the last time         after ``retries_max`` failures the message goes to the dead letters, the queue moves on
… `ConsumeLater` (-1)       the same at once
==========================  ==================================================================================

No other client handles messages of the queue meanwhile: the broker keeps it for us (`locks`), except in broadcasting,
where nothing is shared. Where its lock is not certain, the queue stands still. Workers take queues in turn, one batch
each; a queue is in at most one worker's hands (``ProcessQueue.is_scheduled``).
Loop only. Source: behaviour.md §8.10.
"""

from __future__ import annotations

import itertools

from rmqkit.client.consumer.consume import ConcurrentConsumeService, ConsumeLater, log_failure, restore_topic
from rmqkit.client.consumer.process_queue import Failure, ProcessQueue
from rmqkit.errors import RmqError
from rmqkit.protocol.message import ReceivedMessage

_LOCK_PAUSE_MS = 3000.0
_TO_DEAD_LETTERS = -1


class OrderlyConsumeService(ConcurrentConsumeService):
    """Runs handlers in the order of each queue."""

    _is_ordered = True
    _retries_unless_set = -1

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            restore_topic(message, self._runtime.namespace)
        if not process_queue.is_scheduled:
            self._schedule(process_queue)

    async def expire(self, process_queue: ProcessQueue) -> None:
        """An ordered queue waits for its handler, however long it takes."""

    def _schedule(self, process_queue: ProcessQueue) -> None:
        # Set by whoever schedules, so that `put` never hands a queue to a second worker.
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
        """Handle the queue's next messages; returns the ms that the queue stands still after."""
        if self._locks is not None and not self._locks.is_held(process_queue.queue):
            await self._locks.lock([process_queue.queue])
            if not self._locks.is_held(process_queue.queue):
                return _LOCK_PAUSE_MS
        # Taken only now: while the lock was asked for, the queue may have been dropped or begun anew.
        messages = self._next(process_queue)
        if process_queue.is_dropped or not messages:  # the lock may be that of the queue's next time here
            return 0.0
        error = await self._call(process_queue, messages)
        if error is None:
            self.consumed(process_queue, *messages)
            return 0.0
        return 0.0 if await self._is_given_up(process_queue, messages, error) else self._settings.suspend_queue_ms

    def _next(self, process_queue: ProcessQueue) -> list[ReceivedMessage]:
        """Take the lowest messages, as many as one call of the handler takes."""
        messages = process_queue.lowest(1)
        if not messages:
            return []
        topic = messages[0].topic
        listener = self._listener_of(topic)
        if listener is not None and listener.batch_max is not None:
            lowest = process_queue.lowest(listener.batch_max)
            messages = list(itertools.takewhile(lambda message: message.topic == topic, lowest))
        return messages

    async def _is_given_up(
        self, process_queue: ProcessQueue, messages: list[ReceivedMessage], error: BaseException
    ) -> bool:
        """Count a failure; returns whether the queue moves on, because no message is to be tried again here."""
        later = error if isinstance(error, ConsumeLater) else ConsumeLater()
        named = messages if later.messages is None else later.messages
        first = next((i for i, message in enumerate(messages) if any(message is one for one in named)), len(messages))
        # What follows the first one that failed fails with it: consuming it now would break the order.
        self.consumed(process_queue, *messages[:first])
        failed = messages[first:]
        if failed:
            log_failure(failed, error)
        for message in failed:
            is_last = later.delay_level == _TO_DEAD_LETTERS or 0 <= self._retries_max <= message.reconsume_times
            if not is_last or not await self._is_dead_lettered(message):
                for one in failed:
                    one.reconsume_times += 1
                process_queue.failure = Failure(message, error)
                return False
            self.consumed(process_queue, message)
        return True

    async def _is_dead_lettered(self, message: ReceivedMessage) -> bool:
        """Send a message to the dead letters; returns whether it is there. In broadcasting it is only logged."""
        if self._settings.is_broadcasting:
            return True
        try:
            await self._send_back(message, _TO_DEAD_LETTERS)
        except RmqError:
            return await self._send_to_retry_topic(message)
        return True
