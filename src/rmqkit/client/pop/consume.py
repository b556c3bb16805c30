"""Handlers on popped messages (``ConsumeMessagePopConcurrentlyService``), beside such on pulled ones.

==========================  ==================================================================================
a handler …                 then
==========================  ==================================================================================
returns                     the message is acknowledged
raises                      the broker delivers it again after the step of `BACK_OFF_SECONDS` that its count of
                            deliveries, or the level of a `ConsumeLater`, says; or after its ``invisible_ms``
… for the last time         after ``retries_max`` failures, or at level -1, it goes to the dead letters
runs long                   the message stays ours, up to ``consume_timeout_minutes``; then it comes again
==========================  ==================================================================================

A Java client acknowledges what failed too often, and nobody has it then; here it goes to the dead letters first, as
with brokers' proxies, and is acknowledged when it is there. In order the rest of a queue waits here for what failed.
Loop only. Source: behaviour.md §4.12, §8.13.
"""

from __future__ import annotations

import logging

from rmqkit.client.consumer.consume import ConsumeLater, Consuming
from rmqkit.client.consumer.ordered import OrderedConsuming
from rmqkit.client.consumer.process_queue import NOTHING_HELD, ProcessQueue
from rmqkit.client.pop.session import PopProcessQueue
from rmqkit.errors import RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import pop_retry_topic, without_namespace

__all__ = ["BACK_OFF_SECONDS", "OrderedPopConsuming", "PopConsuming"]

BACK_OFF_SECONDS = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_TO_DEAD_LETTERS = -1

_log = logging.getLogger(__name__)


class PopConsuming(Consuming):
    """The workers of a consumer that has queues to pop; others may be pulled."""

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        prefix = pop_retry_topic(self._group, "")  # pulled by a group that popped before
        for message in messages:
            if message.topic.startswith(prefix):
                message.topic = without_namespace(self._runtime.namespace, message.topic.removeprefix(prefix))
        super().put(process_queue, messages)

    def consumed(self, process_queue: ProcessQueue, *messages: ReceivedMessage) -> None:
        """Messages are done with: acknowledge them, or let the offset advance."""
        if not isinstance(process_queue, PopProcessQueue):
            super().consumed(process_queue, *messages)
            return
        for message in messages:
            if process_queue.remove(message) != NOTHING_HELD:
                process_queue.pops.ack_soon(message)

    async def expire(self, process_queue: ProcessQueue) -> None:
        """What was popped lapses by itself."""
        if not isinstance(process_queue, PopProcessQueue):
            await super().expire(process_queue)

    async def _handle(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        here = [message for message in messages if message in process_queue]  # what lapsed in line is not
        if isinstance(process_queue, PopProcessQueue):
            for message in here:
                if 0 <= self._retries_max < message.reconsume_times:
                    await self._give_up(process_queue, message)
            here = [message for message in here if message in process_queue]
        if here or not messages:
            await super()._handle(process_queue, here)

    async def _come_again(
        self, process_queue: ProcessQueue, message: ReceivedMessage, level: int, error: BaseException
    ) -> None:
        if not isinstance(process_queue, PopProcessQueue):
            await super()._come_again(process_queue, message, level, error)
        elif level == _TO_DEAD_LETTERS or message.reconsume_times >= self._retries_max:
            await self._give_up(process_queue, message)
        else:
            process_queue.remove(message)
            step = min(level or message.reconsume_times, len(BACK_OFF_SECONDS) - 1)
            chosen_ms = error.invisible_ms if isinstance(error, ConsumeLater) else None
            invisible_ms = BACK_OFF_SECONDS[step] * 1000 if chosen_ms is None else chosen_ms
            try:
                await process_queue.pops.change_invisible_time(message, invisible_ms)
            except RmqError as failed:
                _log.warning(
                    "message %s of %s comes again when its time is over: %s", message.msg_id, message.topic, failed
                )

    async def _give_up(self, process_queue: PopProcessQueue, message: ReceivedMessage) -> None:
        """To the dead letters, and only then acknowledged; else it comes again when its time is over."""
        if await self._is_dead_letter(message):
            self.consumed(process_queue, message)
        else:
            process_queue.remove(message)

    async def _is_dead_letter(self, message: ReceivedMessage) -> bool:
        try:
            await self._send_back(message, _TO_DEAD_LETTERS)
        except RmqError as error:
            _log.warning("message %s of %s is no dead letter: %s", message.msg_id, message.topic, error)
            return False
        return True


class OrderedPopConsuming(PopConsuming, OrderedConsuming):
    """The workers of a consumer that pops in order."""

    async def _is_away(self, message: ReceivedMessage) -> bool:
        return await self._is_dead_letter(message)
