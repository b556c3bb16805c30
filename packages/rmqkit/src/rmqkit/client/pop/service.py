"""Consumption of popped messages: assignment by brokers, pop loop, handlers (``ConsumeMessagePop…Service``).

======================  ========================================  =========================================
the broker's response   a push consumer                           a pop consumer
======================  ========================================  =========================================
queues to pop           pops them                                 pops them
queues to pull          pulls them, and the retries of earlier    pops all queues of every broker together
                        pops
code 3, no strategy     computes the assignment like the others   pops all queues of every broker together
no request (in order)                                             pops each queue separately
======================  ========================================  =========================================

Queue -1 of a broker means all of its queues. If the mode of a queue changes, the member gives the queue up, and takes
it again in the next rebalance. If a broker still holds a pop request (up to 15 s), its response may contain a message
that is also pulled. The message is then handled twice.

================  ==========================================================================
response to pop   action (``popMessage``)
================  ==========================================================================
FOUND             hold and handle the matching messages, acknowledge the others; pop again
NOT_FOUND         pop again
POLLING_FULL      pop again after 1 s
FLOW_CONTROL      pop again after 20 ms
anything else     pop again after 1 s
================  ==========================================================================

If the body of a record cannot be unpacked, the record goes to the dead letters.

==========================  ==================================================================================
a handler …                 effect
==========================  ==================================================================================
returns                     the message is acknowledged
raises                      the broker delivers the message again after a step of `BACK_OFF_SECONDS`: its count of
                            deliveries, or the level of a `ConsumeLater`, selects the step; or after the ``delay``
                            of a `ConsumeLater`
… for the last time         after ``retries_max`` failures, or at level -1, the message goes to the dead letters
runs long                   the member holds the message for up to ``consume_timeout_minutes``; then the broker
                            delivers it again
==========================  ==================================================================================

If a message has failed too often, a Java client acknowledges it, and the message is lost. This client first sends the
message to the dead letters, as the proxies of brokers do, and then acknowledges it. In ordered consumption, the other
messages of the queue wait for the failed message.
Use this module only on the event loop. Source: behaviour.md §4.12, §4.15, §8.4, §8.13; remoting.md §4.6.1.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from rmqkit.client.consumer import allocate as strategies
from rmqkit.client.consumer.allocate import Allocate
from rmqkit.client.consumer.assignment import AssignedQueues, QueueOwner, Rebalance
from rmqkit.client.consumer.consume import ConcurrentConsumeService, ConsumeLater
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.consumer.group import GroupCoordinator
from rmqkit.client.consumer.loop import PullLoop
from rmqkit.client.consumer.ordered import OrderlyConsumeService
from rmqkit.client.consumer.process_queue import NOTHING_HELD, ProcessQueue
from rmqkit.client.consumer.reasons import Reason
from rmqkit.client.observe.status import ConsumerStats
from rmqkit.client.pop.session import ANY_QUEUE, PopProcessQueue, PopSession
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.filter import TAG
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic, with_namespace, without_namespace
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pop import Assignment, QueryAssignmentBody
from rmqkit.rpc import PopStatus

_log = logging.getLogger(__name__)
BACK_OFF_SECONDS = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_TO_DEAD_LETTERS = -1
_NO_ACK = "no consumer acknowledged it in time, at any of its tries"

_STRATEGIES: dict[Allocate, str] = {strategies.averagely: "AVG", strategies.averagely_by_circle: "AVG_BY_CIRCLE"}
_POP = "POP"


class PopConsumeService(ConcurrentConsumeService):
    """A consume service with workers that run handlers on popped messages (``ConsumeMessagePopConcurrentlyService``)
    and on pulled messages.
    """

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        prefix = pop_retry_topic(self.group, "")  # pulled by a group that popped before
        for message in messages:
            if message.topic.startswith(prefix):
                message.topic = without_namespace(self.runtime.namespace, message.topic.removeprefix(prefix))
        super().put(process_queue, messages)

    def consumed(self, process_queue: ProcessQueue, *messages: ReceivedMessage) -> None:
        """Acknowledge consumed messages, or raise the offset of a pulled queue."""
        if not isinstance(process_queue, PopProcessQueue):
            super().consumed(process_queue, *messages)
            return
        for message in messages:
            # Do not acknowledge an expired message: it is delivered again, and the next receiver acknowledges it.
            if process_queue.remove(message) != NOTHING_HELD:
                process_queue.session.ack_soon(message)

    async def expire(self, process_queue: ProcessQueue) -> None:
        """Send back pulled messages with handlers that run too long. Popped messages need no action, because their
        invisible time expires."""
        if not isinstance(process_queue, PopProcessQueue):
            await super().expire(process_queue)

    async def _handle(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        here = [message for message in messages if message in process_queue]  # expired ones are not
        if isinstance(process_queue, PopProcessQueue):
            for message in here:
                if 0 <= self._retries_of(message) < message.reconsume_times:
                    await self._give_up(process_queue, message, Reason(_NO_ACK, tries=message.reconsume_times))
            here = [message for message in here if message in process_queue]
        if here or not messages:
            await super()._handle(process_queue, here)

    async def _retry_message(self, process_queue: ProcessQueue, message: ReceivedMessage, error: BaseException) -> None:
        level, chosen_ms = self._when(message, error)
        suspends = isinstance(error, ConsumeLater) and error.suspend
        if not isinstance(process_queue, PopProcessQueue):
            await super()._retry_message(process_queue, message, error)
        elif self._is_last(message, level) and not suspends:
            await self._give_up(process_queue, message, self.reason_of(error, message))
        else:
            # Remove the message first, so that the session does not renew the invisible time that is set here.
            process_queue.remove(message)
            # The step depends on the broker's count of deliveries, so another member continues with the next step.
            step = min(level or message.reconsume_times, len(BACK_OFF_SECONDS) - 1)
            invisible_ms = BACK_OFF_SECONDS[step] * 1000 if chosen_ms is None else chosen_ms
            try:
                await process_queue.session.change_invisible_time(message, invisible_ms, suspend=suspends)
            except RmqError as failed:
                _log.warning(
                    "message %s of %s is delivered again when its invisible time ends: %s",
                    message.msg_id,
                    message.topic,
                    failed,
                )

    async def _give_up(self, process_queue: PopProcessQueue, message: ReceivedMessage, reason: Reason) -> None:
        """Send a message to the dead letters, and then acknowledge it.

        If the send fails, the message is delivered again when its invisible time expires.
        """
        if await self._is_dead_letter(message, reason):
            self.consumed(process_queue, message)
        else:
            process_queue.remove(message)

    async def _is_dead_letter(self, message: ReceivedMessage, reason: Reason) -> bool:
        try:
            await self._send_back(message, _TO_DEAD_LETTERS, reason)
        except RmqError as error:
            _log.warning("cannot send message %s of %s to the dead letters: %s", message.msg_id, message.topic, error)
            return False
        return True


class OrderlyPopConsumeService(PopConsumeService, OrderlyConsumeService):
    """A consume service with workers that run handlers on popped messages in the order of each queue."""

    async def _is_dead_lettered(self, message: ReceivedMessage, reason: Reason) -> bool:
        return await self._is_dead_letter(message, reason)


class PopLoop(PullLoop):
    """A loop that fills the process queue of a popped queue."""

    _attempt_id: str | None = None

    async def run(self, pause_ms: float) -> None:
        """Pop until the queue is dropped. There is no pause at the beginning, because no former owner has an offset to
        save.
        """
        await super().run(0.0)

    async def _step(self) -> float:
        """Pop once. Return the pause after the pop in ms."""
        process_queue, clock, settings = self.process_queue, self._runtime.clock, self.context.settings
        assert isinstance(process_queue, PopProcessQueue), "a popped queue has a PopProcessQueue"
        subscription, session = self.subscription_of(self._queue.topic), process_queue.session
        if subscription is None:
            return settings.pull.error_pause_ms
        await process_queue.wait_for_room()
        if session.is_ordered:
            # In ordered consumption, a broker delivers nothing while acknowledgements are missing. The attempt id
            # identifies a pop with a lost response: the broker then delivers the same messages again.
            await session.flush()
            self._attempt_id = self._attempt_id or uuid.uuid4().hex
        if process_queue.is_dropped:
            return 0.0
        asked_ms = clock.monotonic_ms()
        result = await session.pop(
            self._queue,
            subscription,
            count=session.settings.pop.count,
            invisible_ms=session.settings.pop.invisible_ms,
            poll_ms=settings.pull.suspend_ms,
            attempt_id=self._attempt_id,
        )
        self._attempt_id = process_queue.error = None
        process_queue.pulled_ms = clock.now_ms()
        took_ms = clock.monotonic_ms() - asked_ms
        if result.status is PopStatus.FOUND:
            process_queue.stats.pulls += 1
            process_queue.stats.pull_ms += took_ms
            process_queue.stats.pulled += len(result.messages)
        self.context.consume_service.put(process_queue, process_queue.put(result.messages))
        process_queue.max_offset = process_queue.position + len(process_queue) + result.rest_count
        for message in result.unwanted:
            session.ack_soon(message)
        for message in result.unreadable:
            await self.context.consume_service.unreadable(message)
            session.ack_soon(message)
        # If the clock of a broker is ahead, the broker considers every request too old and does not wait.
        is_hasty = result.status is PopStatus.NOT_FOUND and took_ms < settings.pull.suspend_ms / 2
        return settings.pull.error_pause_ms if is_hasty or result.status is PopStatus.POLLING_FULL else 0.0


class BrokerRebalance(Rebalance):
    """A rebalance that requests this member's queues from brokers, and the mode of each queue: popped or pulled
    (``QUERY_ASSIGNMENT``)."""

    def __init__(self, context: ConsumerContext, owner: QueueOwner, session: PopSession, *, only_pops: bool) -> None:
        super().__init__(context, owner)
        self._session = session
        self._only_pops = only_pops
        self._strategy = _STRATEGIES.get(context.allocate)
        self._retried: set[str] = set()

    async def _queues_of(self, topic: str, held: set[MessageQueue]) -> tuple[set[MessageQueue], int]:
        readable = self._runtime.routes.subscribe_queues(topic)
        if not readable:
            return held, 1
        if self._only_pops and self._session.is_ordered:
            return self._with_modes(topic, set(), set(readable))
        assigned = await self._ask(topic)
        popped = {one.message_queue for one in assigned or () if one.mode == _POP}
        if self._only_pops:
            everywhere = {MessageQueue(topic, queue.broker_name, ANY_QUEUE) for queue in readable}
            return self._with_modes(topic, set(), popped or everywhere)
        if assigned is None:
            queues, members = await super()._queues_of(topic, held)
            wanted, is_settled = self._with_modes(topic, queues, set())
            return wanted, members if is_settled else 0
        pulled = {one.message_queue for one in assigned} - popped
        retry = pop_retry_topic(self._group, with_namespace(self._runtime.namespace, topic))
        if pulled and not popped and topic not in self._retried and not topic.startswith(RETRY_PREFIX):
            # The retry topic of the group contains the retries of earlier pops. A pop reads this topic automatically,
            # but a pull does not.
            self._retried.add(topic)
            self._owner.subscribe(retry, "*", TAG)
        elif popped and topic in self._retried:
            # A `PopSession` reads this topic, too. Therefore save the pulled offset first; the mode changes with the
            # next rebalance.
            self._retried.discard(topic)
            self._owner.unsubscribe(retry)
            return held, 0
        return self._with_modes(topic, pulled, popped)

    async def _ask(self, topic: str) -> list[Assignment] | None:
        """Request this member's queues from a broker. Return None if the broker does not assign queues."""
        if self._strategy is None:
            return None
        asked = QueryAssignmentBody(
            topic=topic, consumer_group=self._group, client_id=self._runtime.client_id, strategy_name=self._strategy
        )
        calls, address = self._runtime.calls, self._some_broker(topic)
        try:
            assigned = await calls.assignments(address, asked)
            if not assigned:  # there are no queues, or the broker does not know this client
                await self._runtime.heartbeat()
                assigned = await calls.assignments(address, asked)
        except PeerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            return None
        return assigned

    def _with_modes(
        self, topic: str, pulled: set[MessageQueue], popped: set[MessageQueue]
    ) -> tuple[set[MessageQueue], int]:
        """Return the queues to own, and the assumed number of members. Queues that change between popped and pulled are
        omitted. The number is 0 if there are such queues, 2 if another member may have owned one of the pulled queues,
        otherwise 1."""
        assert not pulled & popped, "no queue is both pulled and popped"
        before = {queue for queue in self._session.queues if queue.topic == topic}
        self._session.queues.difference_update(before)
        self._session.queues.update(popped)
        changed = (before & pulled) | ((popped & self._owner.held_queues()) - before)
        return (pulled | popped) - changed, 0 if changed else 2 if pulled else 1


@dataclass(eq=False)
class PopAssignedQueues(AssignedQueues):
    """The queues of this member. The brokers determine which queues are popped; the others are pulled."""

    session: PopSession

    def _make_process_queue(self, queue: MessageQueue, bytes_max: int, stats: ConsumerStats) -> ProcessQueue:
        if queue in self.session.queues:
            return self.session.process_queue(queue, bytes_max=bytes_max, stats=stats)
        return super()._make_process_queue(queue, bytes_max, stats)

    def _make_loop(self, process_queue: ProcessQueue, *, is_member: bool) -> PullLoop:
        if not process_queue.is_popped:
            return super()._make_loop(process_queue, is_member=is_member)
        return PopLoop(self.context, process_queue, self.subscriptions.get, self._offset_illegal, is_member=is_member)


class PopGroupCoordinator(GroupCoordinator):
    """Coordinator of a member with queues that are assigned by brokers. With ``only_pops``, all queues are popped."""

    def __init__(self, context: ConsumerContext, session: PopSession, *, only_pops: bool) -> None:
        self._session = session
        self._only_pops = only_pops
        super().__init__(context)

    def _make_queues(self) -> AssignedQueues:
        return PopAssignedQueues(self._context, self.subscriptions, self.rebalance_soon, self._session)

    def _make_rebalance(self) -> Rebalance:
        return BrokerRebalance(self._context, self, self._session, only_pops=self._only_pops)
