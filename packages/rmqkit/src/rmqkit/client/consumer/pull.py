"""The pull consumer: programs request messages (``DefaultLitePullConsumer`` and ``DefaultMQPullConsumer``).

===============  ===============================================================================================
a program calls  the consumer
===============  ===============================================================================================
`subscribe`      is a member of its group: queues are shared, pulled in the background, returned by `poll`
`assign`         reads these queues, pulled in the background, returned by `poll`; brokers do not know of it
`schedule`       is a member of its group, and repeatedly calls a task of the program for each of its queues
only `pull`      does nothing by itself: the program passes queue and offset, and saves offsets
===============  ===============================================================================================

Stored messages can be looked up, too (``MQAdminImpl``): by id (`view_message`) and by key (`query_messages`).
Source: behaviour.md §8.1, §8.14, §8.16; remoting.md §4.3.2, §4.3.3, §4.3.6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from msgspec import Struct, field

from rmqkit.client.consumer.allocate import Allocate, averagely
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.consumer.group import Consumer, GroupCoordinator, offsets_of
from rmqkit.client.consumer.loop import PullSchedule, PullTask, place_in, scheduled_call, unpack
from rmqkit.client.consumer.poll import MessageStream, PollBuffer
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.runtime.lifecycle import keeps_open
from rmqkit.client.runtime.namespace import remove_namespace
from rmqkit.client.runtime.routes import LOGICAL_BROKER_PREFIX
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PullConsumerSettings, check
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, NoRoute, PeerRefused, RmqError
from rmqkit.filter import TAG, matches_tags, subscription
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, QueryMessageRequest
from rmqkit.remoting.address import join_address
from rmqkit.rpc import PullStatus
from rmqkit.times import Duration, Moment, duration_ms, moment_ms

_UNIQUE_KEY_COUNT = 32
_THREE_DAYS_MS = 3 * 24 * 3_600_000
_FOREVER_MS = (1 << 63) - 1


class PullResult(Struct):
    """The result of a pull.

    Attributes:
        status: FOUND, or the reason why no messages were found.
        next_begin_offset: the offset for the next pull, with any status.
        min_offset: the first offset of the queue.
        max_offset: one past the last offset of the queue.
        messages: the messages that match the expression.
        unreadable: the messages with bodies that cannot be decompressed; they contain the stored bodies. They are
            logged as errors.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: list[ReceivedMessage]
    unreadable: list[ReceivedMessage] = field(default_factory=list)


class PullConsumer(Consumer):
    """A consumer that returns messages when your program requests them::

        consumer = PullConsumer("audit", name_servers="127.0.0.1:9876")
        consumer.subscribe("Orders", "new || changed")
        async with consumer:
            while messages := await consumer.poll(timeout=10):
                ...                                  # the next poll, or commit(), acknowledges them

    or queue by queue, with your own offsets::

        async with PullConsumer("audit", name_servers="127.0.0.1:9876") as consumer:
            for queue in await consumer.queues("Orders"):
                offset = await consumer.committed(queue) or await consumer.min_offset(queue)
                result = await consumer.pull(queue, offset)
                ...
                await consumer.commit(queue, result.next_begin_offset)

    Every coroutine method raises RemotingError if a broker does not answer, and PeerRefused if a broker refuses.
    `committed` and `commit` read and save the offsets of the group. The other arguments are the same as for a
    `PushConsumer`.
    Raises SettingsError: a name, an address or a setting is not valid."""

    _kind = "pull consumer"

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None = None,
        *,
        settings: PullConsumerSettings | None = None,
        allocate: Allocate = averagely,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
        hooks: Sequence[Hook] = (),
        wait_ready: Duration = 0,
    ) -> None:
        self.settings = check(settings or PullConsumerSettings())
        super().__init__(group, name_servers, self.settings, runtime, clock, hooks, wait_ready)
        self._clock = self._runtime.clock
        self._suggested: dict[MessageQueue, int] = {}
        self._offsets = offsets_of(self._runtime, group, self.settings)
        self._poll_buffer = PollBuffer(self._offsets, auto_commit=self.settings.auto_commit)
        self._coordinator = GroupCoordinator(
            ConsumerContext(
                self._runtime, group, self.settings, self._offsets, self._poll_buffer, allocate, "CONSUME_ACTIVELY"
            )
        )
        self._opening: asyncio.Task[None] | None = None
        self._has_stopped = False
        self._streams = []

    # -- background pulls

    def subscribe(self, topic: str, expression: str = "*", *, expression_type: str = TAG) -> None:
        """Subscribe to a topic, before or after the start. The members of the group share its queues.

        ``expression`` is ``*`` for all messages, ``A || B`` for tags, or with ``expression_type="SQL92"`` a SQL92
        expression.
        Raises SettingsError: the topic or the expression is not valid.
        Raises ClientError: you have called `assign`, or another consumer of this runtime uses the group."""
        self._check_mode(is_wrong=self._coordinator.is_manual)
        self._coordinator.subscribe(topic, expression, expression_type)
        self._open_later()

    def assign(self, queues: Collection[MessageQueue], expression: str = "*", *, expression_type: str = TAG) -> None:
        """Read exactly these queues, independently of other members of the group. You can call it before or after the
        start.
        Raises SettingsError: the same as for `subscribe`. Raises ClientError: you have called `subscribe`."""
        self._check_mode(is_wrong=bool(self._coordinator.subscriptions) and not self._coordinator.is_manual)
        self._coordinator.assign(queues, expression, expression_type)
        self._open_later()

    def schedule(self, topic: str, task: PullTask, *, pause: Duration = 0.2) -> None:
        """Subscribe to a topic, and call ``task(queue)`` repeatedly for each queue that this consumer owns.

        In the task, call `pull` and `commit`. A coroutine function runs on the event loop, a plain function in a
        thread. The task returns the time until its next call, or None for ``pause``: seconds or a `timedelta`. If the
        task raises, it is called again after ``pull.error_pause_ms``. The calls for one queue run one after the other.
        Calls for different queues can run at the same time. Before the consumer gives up a queue or closes, it waits
        for the running call, at most 30 s.
        Raises SettingsError, ClientError: the same as for `subscribe`."""
        self._check_mode(is_wrong=self._coordinator.is_manual)
        self._coordinator.schedule(topic, PullSchedule(task, duration_ms(pause, "pause")))
        self._open_later()

    async def poll(self, timeout: Duration = 5.0, *, max_count: int | None = None) -> list[ReceivedMessage]:
        """Return the next messages: at most ``max_count``, all from one queue. Return an empty list after the timeout.
        ``timeout`` is a number of seconds or a `timedelta`.

        This call acknowledges the messages of the previous poll. Their offsets are saved within seconds. If
        ``auto_commit`` is off, only `commit` saves them.
        Raises ClientError: you have not called `subscribe` or `assign`, or the time is not valid."""
        self._check_polling()
        messages = await self._poll_buffer.poll(duration_ms(timeout, "timeout"), max_count)
        self._hooks.polled(self.group, messages)
        return messages

    def messages(self) -> MessageStream:
        """Iterate over the messages with ``async for`` while the consumer is open. Do not combine this with `poll`.

        A message is acknowledged when you request the next message, or when the consumer is closed without an
        exception.
        Raises ClientError: you have not called `subscribe` or `assign`."""
        self._check_polling()
        return self._stream_of(self._poll_buffer)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at an offset of a queue.
        Raises ClientError: this consumer does not own the queue, or the queue does not have the offset."""
        low, high = await asyncio.gather(self.min_offset(queue), self.max_offset(queue))
        if not low <= offset <= high:
            raise ClientError(
                f"Seek offset illegal, seek offset = {offset}, min offset = {low}, max offset = {high} in {queue}: "
                "seek between them"
            )
        # Restart the queue first, then set the position. In the other order, the old queue could change the position
        # again.
        await self._coordinator.start_at(queue, offset)
        self._poll_buffer.seek(queue, self._coordinator.process_queues.get(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue at the first stored message. Raises ClientError: this consumer does not own the queue."""
        await self.seek(queue, await self.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue with new messages only. Raises ClientError: this consumer does not own the queue."""
        await self.seek(queue, await self.max_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, moment: Moment) -> None:
        """Continue at the first message stored at or after a time: a `datetime`, or seconds since the epoch.
        Raises ClientError: this consumer does not own the queue, or the time is not valid."""
        await self.seek(queue, await self.search_offset(queue, moment))

    # -- queue by queue

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic, sorted.
        Raises ClientError: the name of the topic is not valid.
        Raises NoRoute: the topic does not exist."""
        self._check_started()
        return await self._runtime.routes.readable_queues(topic)

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: str = "*",
        *,
        max_count: int = 32,
        wait: Duration = 0,
        expression_type: str = TAG,
    ) -> PullResult:
        """Read at most ``max_count`` messages of a queue, starting at an offset. A broker may return fewer.

        If there is no message, the broker waits for the first one for ``wait``: seconds or a `timedelta`.
        ``expression`` selects tags; ``*`` means all messages.
        Raises ClientError: the expression or the time is not valid.
        Raises BodyError: the response does not consist of messages."""
        self._check_started()
        suspend_ms = round(duration_ms(wait, "wait"))
        address = await self._address(queue, self._suggested.get(queue, 0))
        try:
            wanted = subscription(queue.topic, expression, expression_type=expression_type)
        except ValueError as error:
            raise ClientError(str(error)) from None
        header = PullMessageRequest(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_count,
            # Send the expression, because no heartbeat contains it. Do not set COMMIT_OFFSET: the 0 below would set the
            # group's offset to the start of the queue.
            sys_flag=int(PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if suspend_ms else 0)),
            commit_offset=0,
            suspend_timeout_millis=suspend_ms,
            sub_version=self._clock.now_ms(),
            subscription=wanted.sub_string,
            expression_type=wanted.expression_type,
            bname=self._runtime.routes.broker_of(queue),
        )
        pulled = await self._runtime.calls.pull(address, header, self.settings.request_timeout_ms + suspend_ms)
        self._suggested[queue] = pulled.suggested_broker_id
        body = pulled.body if pulled.status is PullStatus.FOUND else b""
        messages, unreadable = unpack(body, queue.broker_name)
        place_in(queue, (*messages, *unreadable), pulled.offset_delta)
        remove_namespace(self._runtime.namespace, (*messages, *unreadable))
        return PullResult(
            pulled.status,
            pulled.next_begin_offset,
            pulled.min_offset,
            pulled.max_offset,
            # Brokers compare only the hashes of tags, so the response may contain messages with other tags of the same
            # hash.
            [message for message in messages if matches_tags(wanted, message.tags)],
            [message for message in unreadable if matches_tags(wanted, message.tags)],
        )

    @keeps_open
    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the first stored message."""
        return await self._runtime.calls.min_offset(await self._address(queue), queue)

    @keeps_open
    async def max_offset(self, queue: MessageQueue) -> int:
        """Return one past the offset of the last message."""
        return await self._runtime.calls.max_offset(await self._address(queue), queue)

    @keeps_open
    async def search_offset(self, queue: MessageQueue, moment: Moment) -> int:
        """Return the offset of the first message stored at or after a time: a `datetime`, or seconds since the epoch.
        Raises TimeIllegal: the time is not valid."""
        timestamp_ms = moment_ms(moment, "moment")
        return await self._runtime.calls.search_offset(await self._address(queue), queue, timestamp_ms)

    @keeps_open
    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the saved offset of the group, or None if the broker has no offset."""
        return await self._runtime.calls.committed_offset(await self._address(queue), self.group, queue, is_stored=True)

    @keeps_open
    async def commit(self, queue: MessageQueue | None = None, offset: int | None = None) -> None:
        """Save the group's offsets in all polled queues. With ``queue``, save only the offset in this queue:
        ``offset``, or the polled position. ``offset`` belongs to the next message to consume, and can be less than the
        saved offset.

        A broker refuses the offset of an unknown group. A group is known after its first pull."""
        if queue is not None and offset is not None:
            positions = {queue: offset}
        else:
            self._poll_buffer.settle()
            positions = {one: at for one, at in self._poll_buffer.positions().items() if queue in (None, one)}
        for one, at in positions.items():
            if one in self._coordinator.process_queues or self.settings.is_broadcasting:
                self._offsets.set_to(one, at)  # not for queues of other members, which this client does not save later
        if self.settings.is_broadcasting:
            await self._offsets.save_all()
        else:
            await asyncio.gather(*(self._commit(one, at) for one, at in positions.items()))

    # -- message lookup

    async def view_message(self, topic: str, msg_id: str) -> ReceivedMessage | None:
        """Look up a message of a topic by its ``msg_id`` or ``offset_msg_id``. Return None if no broker has it.
        Raises ClientError: no broker of the topic has the address in the ``offset_msg_id`` now.
        Raises NoRoute: the topic does not exist."""
        self._check_started()
        return await view_message(self._runtime, topic, msg_id)

    async def query_messages(
        self, topic: str, key: str, *, max_count: int = 32, begin: Moment | None = None, end: Moment | None = None
    ) -> list[ReceivedMessage]:
        """Find the messages of a topic by one of their keys, stored from ``begin`` to ``end``: a `datetime` each, or
        seconds since the epoch.
        Raises TimeIllegal: a time is not valid.
        Raises NoRoute: the topic does not exist."""
        self._check_started()
        begin_ms = 0 if begin is None else moment_ms(begin, "begin")
        end_ms = None if end is None else moment_ms(end, "end")
        return await query_messages(self._runtime, topic, key, max_count, begin_ms, end_ms)

    # -- internals

    def _check_started(self) -> None:
        is_closing = self._closing is not None and not self._closing.done()
        if not is_closing or self._opening is None or self._has_stopped:
            super()._check_started()  # during the close, running scheduled pulls may still commit

    def _check_mode(self, *, is_wrong: bool) -> None:
        if is_wrong:
            raise ClientError(f"Subscribe and assign are mutually exclusive. {self._described} did the other: use two")

    def _check_polling(self) -> None:
        super()._check_started()
        if not self._coordinator.subscriptions:
            raise ClientError(f"{self._described} has no queues to poll: subscribe to a topic or assign queues")

    def _open_later(self, *, is_late: bool = True) -> None:
        """Start to pull in the background when the client is started and has subscriptions."""
        if self._is_started and self._opening is None:
            if not self._coordinator.is_manual:
                self._runtime.register_consumer(self.group, self._coordinator)
            opening = self._coordinator.open(is_late=is_late)
            self._opening = asyncio.create_task(opening, name=f"opening of {self._described}")

    async def _open(self) -> None:
        if self._coordinator.subscriptions:
            self._open_later(is_late=False)
            assert self._opening is not None, "the client is started"
            await self._opening

    async def _finish(self) -> None:
        if self._opening is not None:
            # Stop the pulls before the messages are marked as consumed: messages pulled later would never be returned.
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._coordinator.stop()
            self._has_stopped = True
            self._poll_buffer.settle()
            for stream in self._streams:
                stream.settle()
            self._poll_buffer.close()
        await self._calls_ended()
        if self._opening is not None:
            await self._coordinator.leave()

    @property
    def _is_in_handler(self) -> bool:
        return scheduled_call.get() in self._coordinator.process_queues.values()

    def _abandon(self) -> None:
        self._poll_buffer.abandon()
        super()._abandon()

    async def _commit(self, queue: MessageQueue, offset: int) -> None:
        await self._runtime.calls.commit_offset(await self._address(queue), self.group, queue, offset)

    async def _address(self, queue: MessageQueue, broker_id: int = 0) -> str:
        routes = self._runtime.routes
        if routes.broker_of(queue).startswith(LOGICAL_BROKER_PREFIX):  # its route is not known yet
            await routes.refresh(queue.topic)
        return await routes.find_address(routes.broker_of(queue), queue.topic, broker_id)


async def view_message(runtime: ClientRuntime, topic: str, msg_id: str) -> ReceivedMessage | None:
    """Look up a message by its offset message id at the broker in the id, otherwise by its unique key.
    Raises NoRoute: the topic does not exist.
    Raises ClientError: no broker of the topic has the address in the id now."""
    brokers = await _brokers(runtime, topic)
    try:
        ip, port, physical_offset = decode_offset_id(msg_id)
    except ValueError:
        ip, port, physical_offset = "", 0, 0
    named = join_address(ip, port)
    for name, address in brokers:
        if address == named:
            return await _at_offset(runtime, topic, name, address, physical_offset)
    # A broker searches the index files of the requested period. First search the files of the last days, then all
    # files.
    for begin_ms in (runtime.clock.now_ms() - _THREE_DAYS_MS, 0):
        found = await _query(
            runtime, brokers, topic, msg_id, _UNIQUE_KEY_COUNT, begin_ms, _FOREVER_MS, is_unique_key=True
        )
        for message in found:
            if message.msg_id == msg_id:
                return message
    # A unique key has the same number of digits, but almost never a valid port at this position.
    if 0 < port < 1 << 16 and physical_offset >= 0:
        now = ", ".join(address for _, address in brokers)
        raise ClientError(
            f"message id {msg_id} is of {named}, which no broker of topic {topic} has now (they have {now}): if the "
            "broker has moved, look the message up by its unique key (UNIQ_KEY)"
        )
    return None


async def query_messages(
    runtime: ClientRuntime, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int | None
) -> list[ReceivedMessage]:
    """Look up the messages with a key at every broker of the topic. Return them in the order of their store time.
    Raises NoRoute: the topic does not exist."""
    end_ms = _FOREVER_MS if end_ms is None else end_ms
    found = await _query(
        runtime, await _brokers(runtime, topic), topic, key, count_max, begin_ms, end_ms, is_unique_key=None
    )
    # If two keys of a message have the same hash, the message is in the index twice.
    places = {(one.broker_name, one.queue_id, one.queue_offset): one for one in found if key in one.keys}
    return sorted(places.values(), key=lambda message: message.store_timestamp)[:count_max]


async def _brokers(runtime: ClientRuntime, topic: str) -> list[tuple[str, str]]:
    """Return the name and the address of one broker of each name. The master is preferred."""
    if not runtime.routes.brokers_of(topic):
        await runtime.routes.refresh(topic)
    found = [(name, runtime.routes.any_address(name)) for name in runtime.routes.brokers_of(topic)]
    if not found:
        raise NoRoute(f"no broker has topic {topic}: create it, or send a message to it first")
    return [(name, address[1]) for name, address in found if address is not None]


async def _at_offset(
    runtime: ClientRuntime, topic: str, name: str, address: str, physical_offset: int
) -> ReceivedMessage | None:
    try:
        messages = read_messages(await runtime.calls.view_message(address, topic, physical_offset), name)
    except PeerRefused as error:
        if error.code == ResponseCode.SYSTEM_ERROR:  # the broker has no message there
            return None
        raise
    remove_namespace(runtime.namespace, messages)
    return next((message for message in messages if message.topic == topic), None)


async def _query(
    runtime: ClientRuntime,
    brokers: list[tuple[str, str]],
    topic: str,
    key: str,
    count_max: int,
    begin_ms: int,
    end_ms: int,
    *,
    is_unique_key: bool | None,
) -> list[ReceivedMessage]:
    """Query all brokers for a key. The brokers compare only hashes, so the caller must compare the key.
    Raises RemotingError, PeerRefused: nothing was found, and a broker did not answer or refused."""
    header = QueryMessageRequest(
        topic=topic,
        key=key,
        max_num=count_max,
        begin_timestamp=begin_ms,
        end_timestamp=end_ms,
        is_unique_key=is_unique_key,
    )
    calls = (runtime.calls.query_messages(address, header) for _, address in brokers)
    found: list[ReceivedMessage] = []
    failed: RmqError | None = None
    for (name, _), answer in zip(brokers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, RmqError):
            failed = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            messages = read_messages(answer, name)
            remove_namespace(runtime.namespace, messages)
            found += [message for message in messages if message.topic == topic]
    if failed is not None and not found:
        raise failed
    return found
