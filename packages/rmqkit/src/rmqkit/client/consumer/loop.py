"""Loops for one queue: the pull loop (``pullMessage``), and scheduled pulls by the program.

The pull loop pulls messages, passes them on and immediately pulls again. A broker without new messages holds the
request for up to 15 s. The loop waits while the process queue is full.

========================  =====================================================================================
response                  action
========================  =====================================================================================
FOUND                     unpack, compare tags exactly, pass on; continue at the next offset
NO_NEW, NO_MATCHED        if no message is held, everything before the next offset is consumed; continue
OFFSET_ILLEGAL            save and freeze the offset of the response, give the queue up; it restarts there with the
                          next rebalance
FLOW_CONTROL              retry after 20 ms
SUBSCRIPTION_NOT_LATEST   retry after 100 ms: the heartbeat with the newer subscription is on its way
anything else             retry after 1 s; a broker that does not know the subscription gets a heartbeat
========================  =====================================================================================

If the body of a record cannot be unpacked, the record would stop the queue for ever. Therefore the loop sends it to the
dead letters of the group.

A scheduled pull (``MQPullConsumerScheduleService``) calls a task of the program repeatedly, one call at a time. The
task pulls, consumes and commits, and returns the pause before the next call. Use this module only on the event loop.
Source: behaviour.md §8.1, §8.6, §8.9; remoting.md §9.5.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import cast

from msgspec import Struct

from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.consumer.offsets import RemoteOffsetStore
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.runtime.namespace import remove_namespace
from rmqkit.client.runtime.routes import LOGICAL_BROKER_PREFIX, MASTER_ID
from rmqkit.client.runtime.settings import StartFrom
from rmqkit.errors import BodyError, ConnectFailed, ConnectionLost, PeerRefused, RemotingError, RmqError
from rmqkit.filter import matches_tags
from rmqkit.protocol import properties as names
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import ReceivedMessage, messages_of_record, records_of
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.record import COMPRESSED, NEED_UNWRAP
from rmqkit.protocol.schemas.clients import MessageQueue, SubscriptionData
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.rpc import Pulled, PullStatus
from rmqkit.times import Duration, duration_ms

_log = logging.getLogger(__name__)
SubscriptionOf = Callable[[str], SubscriptionData | None]

_FLOW_CONTROL_PAUSE_MS = 20.0
_OVERTAKEN_PAUSE_MS = 100.0
_HALF_HOUR_MS = 30 * 60_000
_NOT_KNOWN_THERE = frozenset((ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST))

PullTask = Callable[[MessageQueue], "Awaitable[Duration | None] | Duration | None"]
"""A function that pulls from a queue: a coroutine function on the loop, or a plain function in a thread. It returns the
time until the next call, or None for the usual pause."""

scheduled_call: contextvars.ContextVar[ProcessQueue | None] = contextvars.ContextVar("scheduled_call", default=None)
"""The process queue of the scheduled task that runs in this context, or None."""

_FINISH_SECONDS = 30.0


@dataclass(eq=False)
class PullLoop:
    """A loop that fills one process queue. If the broker declares the offset illegal, ``on_illegal`` gives the queue
    up, and the queue restarts at the offset in the broker's response. If ``is_member`` is False, each pull request
    includes its own subscription."""

    context: ConsumerContext
    process_queue: ProcessQueue
    subscription_of: SubscriptionOf
    on_illegal: Callable[[ProcessQueue, int], Awaitable[None]]
    is_member: bool = True

    def __post_init__(self) -> None:
        self._runtime, self._queue = self.context.runtime, self.process_queue.queue
        # Ordered queues do not commit in a pull: a commit that arrives after the last save would move the group's
        # offset back.
        self._commits = self.context.locks is None and not self.context.settings.is_broadcasting

    async def run(self, pause_ms: float) -> None:
        """Pull until the queue is dropped. During a pause before the first pull, the former owner can save its
        offset.
        """
        process_queue = self.process_queue
        process_queue.is_taking_over = pause_ms > 0
        try:
            while not process_queue.is_dropped:
                if pause_ms:
                    process_queue.is_begun.set()
                    await asyncio.sleep(pause_ms / 1000.0)
                    process_queue.is_taking_over = False
                try:
                    pause_ms = await self._step()
                except RmqError as error:
                    process_queue.error = error
                    pause_ms = self._pause_after(error)
        finally:
            process_queue.is_begun.set()

    async def _step(self) -> float:
        """Pull once. Return the pause after the pull in ms."""
        process_queue = self.process_queue
        subscription = self.subscription_of(self._queue.topic)
        if subscription is None:
            return self.context.settings.pull.error_pause_ms
        if process_queue.next_offset is None:
            process_queue.next_offset = await self._start_offset()
            known = self.context.offsets.known(self._queue)
            if known is None or known < process_queue.next_offset:
                # Save the offset, so that a group that began at the end misses no message while it is away, and gets no
                # older messages. For a new queue the broker returned 0, and 0 would be saved otherwise.
                self.context.consume_service.advance_to(process_queue, process_queue.next_offset)
        process_queue.is_begun.set()
        await process_queue.wait_for_room()
        if not process_queue.is_dropped:
            asked_offset = process_queue.next_offset
            pulled = await self._pull(subscription, asked_offset)
            # A seek replaces this process queue, so only this loop moves its next offset.
            assert process_queue.next_offset == asked_offset, "one loop per queue"
            # Wait after the pull, too: the broker may hold a pull for 15 s, and the queue may have been paused
            # meanwhile.
            await process_queue.wait_until_resumed()
            if pulled.status is PullStatus.OFFSET_ILLEGAL:
                _log.warning("offset %d of %s is not valid: %s", process_queue.next_offset, self._queue, pulled)
                await self.on_illegal(process_queue, pulled.next_begin_offset)
            elif self._is_current(subscription):
                await self._accept(subscription, pulled)
        return 0.0

    def _is_current(self, asked: SubscriptionData) -> bool:
        """Return True if the subscription has not changed since the pull was sent.

        If it was replaced during the pull, the broker may have omitted messages that match now. The loop then pulls
        from the same offset again.
        """
        now = self.subscription_of(self._queue.topic)
        return now is not None and (now.sub_string, now.expression_type) == (asked.sub_string, asked.expression_type)

    async def _pull(self, subscription: SubscriptionData, offset: int) -> Pulled:
        broker_id, address = self._runtime.routes.broker_for(self._queue, self.process_queue.broker_id)
        commit_offset = self.context.offsets.known(self._queue) or 0
        flags = PullFlag.SUSPEND
        # Never commit 0, which also means "unknown". Do not commit to a slave, because a slave does not forward
        # offsets.
        if commit_offset > 0 and broker_id == MASTER_ID and self._commits:
            flags |= PullFlag.COMMIT_OFFSET
        if not self.is_member:
            flags |= PullFlag.SUBSCRIPTION
        settings = self.context.settings
        header = PullMessageRequest(
            consumer_group=self.context.group,
            topic=self._queue.topic,
            queue_id=self._queue.queue_id,
            queue_offset=offset,
            max_msg_nums=min(settings.pull.count, self.process_queue.window),
            sys_flag=int(flags),
            commit_offset=commit_offset,
            suspend_timeout_millis=settings.pull.suspend_ms,
            sub_version=subscription.sub_version,
            subscription=None if self.is_member else subscription.sub_string,
            expression_type=subscription.expression_type,
            max_msg_bytes=settings.pull.bytes_max,
            bname=self._runtime.routes.broker_of(self._queue),
        )
        clock, process_queue = self._runtime.clock, self.process_queue
        asked_ms = clock.now_ms()
        try:
            pulled = await self._runtime.calls.pull(address, header, settings.pull.timeout_ms)
        except PeerRefused:
            self._runtime.absences.answers(address)
            raise
        self._runtime.absences.answers(address)
        process_queue.broker_id = pulled.suggested_broker_id
        process_queue.max_offset = pulled.max_offset
        process_queue.error = None
        process_queue.pulled_ms = clock.now_ms()
        if pulled.status is PullStatus.FOUND:
            process_queue.stats.pulls += 1
            process_queue.stats.pull_ms += process_queue.pulled_ms - asked_ms
        return pulled

    async def _accept(self, subscription: SubscriptionData, pulled: Pulled) -> None:
        if pulled.status is PullStatus.FOUND:
            messages, unreadable = self._unpack(subscription, pulled)
            for message in unreadable:
                await self.context.consume_service.unreadable(message)
            self.process_queue.stats.pulled += len(messages)
            self.context.consume_service.put(self.process_queue, self.process_queue.put(messages))
        # Advance only after the messages are in the process queue, so that no message is skipped after an error above.
        self.process_queue.next_offset = pulled.next_begin_offset
        if not len(self.process_queue):
            self.context.consume_service.advance_to(self.process_queue, pulled.next_begin_offset)

    def _unpack(
        self, subscription: SubscriptionData, pulled: Pulled
    ) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Return the decoded messages of a pull that match the subscription, and the matching messages with unreadable
        bodies.
        """
        # A broker compares only the hashes of tags, so the client compares their texts (behaviour.md §8.6).
        messages, unreadable = unpack(pulled.body, self._queue.broker_name)
        place_in(self._queue, (*messages, *unreadable), pulled.offset_delta)
        unreadable = [message for message in unreadable if matches_tags(subscription, message.tags)]
        matching = [message for message in messages if matches_tags(subscription, message.tags)]
        remove_namespace(self._runtime.namespace, (*matching, *unreadable))
        # Create these texts once for all messages of a response.
        min_offset, max_offset = str(pulled.min_offset), str(pulled.max_offset)
        for message in matching:
            message.properties[names.MIN_OFFSET] = min_offset
            message.properties[names.MAX_OFFSET] = max_offset
            message.properties.pop(names.CONSUME_START_TIME, None)  # set by another client
        return matching, unreadable

    async def _start_offset(self) -> int:
        """Return the start offset: the offset saved at the broker or, if there is none, the offset that the settings
        require (behaviour.md §8.9).
        Raises RemotingError, PeerRefused: the broker did not return the offset."""
        start_from = self.context.settings.start_from
        saved = await self.context.offsets.fetch(self._queue)
        (_, address), calls = self._runtime.routes.broker_for(self._queue), self._runtime.calls
        is_retry = self._queue.topic.startswith(RETRY_PREFIX)
        if (
            start_from is StartFrom.NEW_MESSAGES
            and saved == 0
            and not is_retry
            and isinstance(self.context.offsets, RemoteOffsetStore)
        ):  # a broker always returns 0 for a new queue
            saved = await calls.committed_offset(address, self.context.group, self._queue, is_stored=True)
        if saved is not None:
            return saved
        match start_from:
            case StartFrom.FIRST_OFFSET:
                return 0
            case StartFrom.LAST_OFFSET | StartFrom.NEW_MESSAGES:
                # Start at the beginning of a retry topic: its messages have failed once, and must be consumed again.
                return 0 if is_retry else await calls.max_offset(address, self._queue)
            case StartFrom.TIMESTAMP:
                if is_retry:
                    return await calls.max_offset(address, self._queue)
                at_ms = self.context.settings.start_timestamp_ms or self._runtime.clock.now_ms() - _HALF_HOUR_MS
                return await calls.search_offset(address, self._queue, at_ms)

    def _asked_address(self, error: ConnectFailed | ConnectionLost) -> str:
        """Return the address of the broker that failed, in the form of the routes. Heartbeats and other queues use the
        same form."""
        try:
            return self._runtime.routes.broker_for(self._queue, self.process_queue.broker_id)[1]
        except ConnectFailed:
            return error.address

    def _pause_after(self, error: RmqError) -> float:
        """Log a failed pull. Return the pause after it in ms."""
        code = error.code if isinstance(error, PeerRefused) else None
        if code == ResponseCode.FLOW_CONTROL:
            return _FLOW_CONTROL_PAUSE_MS
        if code in _NOT_KNOWN_THERE:
            self._runtime.heartbeat_soon()
        if isinstance(error, RemotingError):  # the name servers may know the new broker by now
            self._runtime.refresh_routes_soon()
        if code == ResponseCode.SUBSCRIPTION_NOT_LATEST:  # the pull arrived before the heartbeat with the new version
            return _OVERTAKEN_PAUSE_MS
        what = f"pulling {self._queue} for group {self.context.group}"
        if isinstance(error, ConnectFailed | ConnectionLost):
            self._runtime.absences.lost(self._asked_address(error), error, what)
        else:
            _log.warning("%s: %s", what, error)
        return self.context.settings.pull.error_pause_ms


def place_in(queue: MessageQueue, messages: Iterable[ReceivedMessage], offset_delta: int) -> None:
    """Replace the broker's queue id and offset in the messages of a static topic by the queue id and offset of the
    topic."""
    if queue.broker_name.startswith(LOGICAL_BROKER_PREFIX):
        for message in messages:
            message.queue_id = queue.queue_id
            message.queue_offset += offset_delta


def unpack(body: bytes, broker_name: str) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
    """Decode the records of a response. Return the messages, and the messages with unreadable bodies as they are
    stored.
    Raises BodyError: the body does not consist of records. The caller must not skip it, because messages may follow."""
    messages: list[ReceivedMessage] = []
    unreadable: list[ReceivedMessage] = []
    for record in records_of(body):
        try:
            messages += list(messages_of_record(record, broker_name))
        except BodyError as error:
            place = f"offset {record.queue_offset} in queue {record.queue_id} of {record.topic} at {broker_name}"
            _log.error("cannot unpack %s: %s", place, error)
            # Without these flags, the record is decoded with its stored body. The dead letter then contains this body.
            record.sys_flag &= ~(COMPRESSED | NEED_UNWRAP)
            unreadable += messages_of_record(record, broker_name)
    return messages, unreadable


class PullSchedule(Struct):
    """The program's task that pulls a topic's queues, and the usual pause between two calls in ms."""

    task: PullTask
    pause_ms: float


@dataclass(eq=False)
class ScheduledPull:
    """A loop that calls the program's task for one queue."""

    schedule: PullSchedule
    process_queue: ProcessQueue
    error_pause_ms: float

    async def run(self, pause_ms: float) -> None:
        """Call the task until the queue is dropped. After a cancellation, a running call has 30 s to finish."""
        queue = self.process_queue.queue
        while True:
            await asyncio.sleep(pause_ms / 1000.0)
            await self.process_queue.wait_until_resumed()
            if self.process_queue.is_dropped:
                return
            call = asyncio.create_task(self._call(queue), name=f"scheduled pull of {queue}")
            try:
                pause_ms = await asyncio.shield(call)
            except asyncio.CancelledError:
                # The call may be between its pull and its commit. If it were cancelled there, the same messages would
                # be delivered again.
                await asyncio.wait([call], timeout=_FINISH_SECONDS)
                call.cancel()
                raise

    async def _call(self, queue: MessageQueue) -> float:
        scheduled_call.set(self.process_queue)
        task = self.schedule.task
        try:
            if inspect.iscoroutinefunction(task):
                pause = await cast("Awaitable[Duration | None]", task(queue))
            else:
                pause = cast("Duration | None", await asyncio.to_thread(task, queue))
            return self.schedule.pause_ms if pause is None else duration_ms(pause, "the pause of a scheduled pull")
        except Exception as error:  # noqa: BLE001 - the outer edge of a program's task, which is called again
            _log.warning("scheduled pull of %s failed", queue, exc_info=error)
            return self.error_pause_ms
