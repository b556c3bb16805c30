"""The pop loop of one queue, or of all a broker has of a topic (``DefaultMQPushConsumerImpl.popMessage``).

The loop asks for messages, hands them over and asks again at once; a broker that has none holds the request.

================  ==========================================================================
answer            then
================  ==========================================================================
FOUND             hold and hand over what matches; the rest is acknowledged; pop on
NOT_FOUND         pop on
POLLING_FULL      again after 1 s
FLOW_CONTROL      again after 20 ms
anything else     again after 1 s
================  ==========================================================================

A record whose body cannot be unpacked goes to the dead letters. Source: behaviour.md §8.13.
"""

from __future__ import annotations

import uuid

from rmqkit.client.consumer.loop import PullLoop
from rmqkit.client.pop.session import PopProcessQueue
from rmqkit.client.runtime.requests import PopStatus

__all__ = ["PopLoop"]


class PopLoop(PullLoop):
    """Keeps the process queue of a queue to pop filled."""

    _attempt_id: str | None = None

    async def run(self, pause_ms: float) -> None:
        """Pop until the queue is dropped, at once: there is no former owner whose offset matters."""
        await super().run(0.0)

    async def _step(self) -> float:
        """One pop; ms to pause after it."""
        process_queue, clock, settings = self._process_queue, self._runtime.clock, self._member.settings
        assert isinstance(process_queue, PopProcessQueue), "a queue to pop has a process queue of that kind"
        subscription, pops = self._subscription_of(self._queue.topic), process_queue.pops
        if subscription is None:
            return settings.error_pause_ms
        await process_queue.wait_for_room()
        if pops.is_ordered:
            await pops.flush()
            self._attempt_id = self._attempt_id or uuid.uuid4().hex
        if process_queue.is_dropped:
            return 0.0
        asked_ms = clock.monotonic_ms()
        result = await pops.pop(
            self._queue,
            subscription,
            count=pops.settings.pop_count,
            invisible_ms=pops.settings.pop_invisible_ms,
            poll_ms=settings.suspend_ms,
            attempt_id=self._attempt_id,
        )
        self._attempt_id = process_queue.error = None
        process_queue.pulled_ms = clock.now_ms()
        took_ms = clock.monotonic_ms() - asked_ms
        if result.status is PopStatus.FOUND:
            process_queue.rates.pulls += 1
            process_queue.rates.pull_ms += took_ms
            process_queue.rates.pulled += len(result.messages)
        self._member.sink.put(process_queue, process_queue.put(result.messages))
        process_queue.max_offset = process_queue.position + len(process_queue) + result.rest_count
        for message in result.unwanted:
            pops.ack_soon(message)
        for message in result.unreadable:
            await self._member.sink.unreadable(message)
            pops.ack_soon(message)
        # A broker whose clock is ahead finds every request too old and does not wait.
        is_hasty = result.status is PopStatus.NOT_FOUND and took_ms < settings.suspend_ms / 2
        return settings.error_pause_ms if is_hasty or result.status is PopStatus.POLLING_FULL else 0.0
