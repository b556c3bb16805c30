"""The consumer of lite topics of RocketMQ 5.5, over remoting.

A `LiteConsumer` is a member of a lite group, which is bound to one parent topic. It subscribes by itself: two members
of a group may have different lite topics. For each master of the parent it has one waiting pop. It sends its whole set
of lite topics after the start, every 30 seconds, and when a broker does not know it: brokers store subscriptions only
in memory. Messages of a lite topic are in order: while one is neither acknowledged nor given back, the group gets no
further messages of its lite topic. Source: lite.md §6 to §8.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from rmqkit.client.observe.hooks import Hook
from rmqkit.client.runtime.late import LateBrokers
from rmqkit.client.runtime.lifecycle import Client, keeps_open
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PushConsumerSettings, check
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import MessageIllegal, PeerRefused, RmqError, SettingsError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.ids import PopHandle, decode_lite_counts, encode_pop_handle
from rmqkit.protocol.message import ReceivedMessage, messages_of_record, records_of
from rmqkit.protocol.names import lite_topic_fault, topic_fault
from rmqkit.protocol.properties import lite_number
from rmqkit.protocol.schemas.groups import GroupRequest, SubscriptionGroupConfig
from rmqkit.protocol.schemas.lite import (
    ADD,
    COMPLETE_ADD,
    COMPLETE_REMOVE,
    MAX,
    MIN,
    OFFSET,
    POLICY,
    REMOVE,
    TAIL,
    TIMESTAMP,
    LiteSubscription,
    LiteSubscriptionCtlBody,
    OffsetOption,
    PopLiteMessageRequest,
    PopLiteMessageResponse,
)
from rmqkit.protocol.schemas.pop import AckMessageRequest, ChangeInvisibleTimeRequest
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest
from rmqkit.remoting.tasks import Tasks
from rmqkit.rpc import NEVER_LATE_MS, is_late
from rmqkit.times import Duration, Moment, duration_ms, moment_ms

__all__ = ["Last", "LiteConsumer", "LiteMessage", "LiteStart"]

_log = logging.getLogger(__name__)

_SYNC_SECONDS = 30.0
_POLL_MS = 15_000
_ANSWER_MS = 5_000
_PAUSE_SECONDS = 1.0
_REVIVE_QUEUE = 999


class Last(Struct, frozen=True):
    """A start in a lite topic: its last messages.

    Attributes:
        count: number of messages.
    """

    count: int


LiteStart: TypeAlias = Literal["first", "new"] | int | Last | Moment | timedelta
"""The start of a group in a lite topic: the first stored message, new messages only, a number, the last messages, a
`datetime`, or a period before now."""


class LiteMessage(ReceivedMessage, kw_only=True):
    """A message of a lite topic.

    Attributes:
        number: its number in the lite topic.
        handle: the delivery that `ack`, `nack` and `suspend` mean.
        consumer: the consumer that received it.
    """

    number: int
    handle: PopHandle
    consumer: LiteConsumer

    async def ack(self) -> None:
        """Acknowledge the message. Without it, the message is delivered again when its invisible time is over.
        Raises RemotingError, PeerRefused: the broker does not answer, or refuses."""
        await self.consumer.ack(self)

    async def nack(self, delay: Duration = 0) -> None:
        """Get the message again after a delay: seconds or a `timedelta`. The delivery counts as a failure.
        Raises RemotingError, PeerRefused."""
        await self.consumer.give_back(self, delay, counts=True)

    async def suspend(self, delay: Duration) -> None:
        """Pause the lite topic: seconds or a `timedelta`. The message is redelivered afterwards, and the delivery
        does not count as a failure. Raises RemotingError, PeerRefused."""
        await self.consumer.give_back(self, delay, counts=False)


class LiteConsumer(Client):
    """A consumer of lite topics::

        async with LiteConsumer("answers", "Chats", name_servers="127.0.0.1:9876") as consumer:
            await consumer.subscribe("session-42")
            async for message in consumer:
                ...
                await message.ack()

    Every coroutine method raises RemotingError if a broker does not answer, and PeerRefused if a broker refuses.

    Args:
        group: the group. It is created, bound to the parent, if it is missing.
        parent: the topic below which the lite topics are.
        name_servers, settings, runtime, clock, hooks: the same as for a `PushConsumer`.
        invisible_time: the time after which a message that was not acknowledged is delivered again: seconds or a
            `timedelta`.
        count_max: number of messages of a pop, 1 to 32.
        deliveries_max: number of deliveries after which a message goes to the dead letters of the group.
        attributes: attributes of a group that is created, such as ``{"lite.sub.model": "Exclusive"}``.

    Attributes:
        taken: lite topics that another member of an exclusive group has taken, in the order of the notices.

    Raises SettingsError: an argument is not valid."""

    _kind = "lite consumer"

    def __init__(
        self,
        group: str,
        parent: str,
        name_servers: str | Sequence[str] | None = None,
        *,
        settings: PushConsumerSettings | None = None,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
        hooks: Sequence[Hook] = (),
        invisible_time: Duration = 60,
        count_max: int = 32,
        deliveries_max: int = 17,
        attributes: dict[str, str] | None = None,
    ) -> None:
        super().__init__(group, name_servers, check(settings or PushConsumerSettings()), runtime, clock, hooks)
        fault = topic_fault(parent)
        if fault is not None:
            raise SettingsError(fault)
        if not 1 <= count_max <= 32:
            raise SettingsError(f"count_max={count_max} must be from 1 to 32")
        self.parent = parent
        self.taken: list[str] = []
        self._invisible_ms = round(duration_ms(invisible_time, "invisible_time"))
        self._count_max = count_max
        self._deliveries_max = deliveries_max
        self._attributes = dict(attributes or {})
        self._names: set[str] = set()
        self._client_id = f"{self._runtime.client_id}@{uuid.uuid4().hex[:8]}"
        self._messages: asyncio.Queue[LiteMessage] = asyncio.Queue(count_max)
        self._tasks = Tasks()
        self._late = LateBrokers(self._described)
        self._popping: dict[str, asyncio.Task[None]] = {}

    def __aiter__(self) -> AsyncIterator[LiteMessage]:
        return self.messages()

    async def messages(self) -> AsyncIterator[LiteMessage]:
        """Iterate over the messages of the subscribed lite topics while the consumer is open."""
        self._check_started()
        while not self._closed.is_set():
            getting = asyncio.ensure_future(self._messages.get())
            closing = asyncio.ensure_future(self._closed.wait())
            try:
                await asyncio.wait((getting, closing), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    return
                yield getting.result()
            finally:
                getting.cancel()
                closing.cancel()

    @keeps_open
    async def subscribe(self, *names: str, start: LiteStart | None = None) -> None:
        """Subscribe to lite topics.

        Args:
            names: the names. A name needs no message yet.
            start: where the group begins; None: where it stands, or at the first message.

        Raises MessageIllegal: a name is not allowed. Raises TimeIllegal: the start is not a valid time."""
        self._check_names(names)
        option = None if start is None else self._option(start)
        await self._change_everywhere(ADD, names, option)
        self._names.update(names)

    @keeps_open
    async def unsubscribe(self, *names: str) -> None:
        """Unsubscribe from lite topics. Messages that were received can still be acknowledged."""
        self._names.difference_update(names)
        await self._change_everywhere(REMOVE, names)

    @property
    def names(self) -> frozenset[str]:
        """The subscribed lite topics."""
        return frozenset(self._names)

    @keeps_open
    async def ack(self, message: LiteMessage) -> None:
        """Acknowledge a message."""
        handle = message.handle
        header = AckMessageRequest(
            consumer_group=self.group,
            topic=self.parent,
            queue_id=0,
            extra_info=encode_pop_handle(handle),
            offset=message.number,
            lite_topic=message.lite_topic,
            bname=handle.broker_name,
        )
        await self._runtime.calls.ack(await self._address(handle.broker_name), header)

    @keeps_open
    async def give_back(self, message: LiteMessage, delay: Duration, *, counts: bool) -> None:
        """Get a message again after a delay. ``counts``: whether the delivery counts as a failure."""
        handle = message.handle
        header = ChangeInvisibleTimeRequest(
            consumer_group=self.group,
            topic=self.parent,
            queue_id=0,
            extra_info=encode_pop_handle(handle),
            offset=message.number,
            invisible_time=round(duration_ms(delay, "delay")),
            suspend=None if counts else True,
            lite_topic=message.lite_topic,
            bname=handle.broker_name,
        )
        await self._runtime.calls.change_invisible_time(await self._address(handle.broker_name), header)

    # -- inside

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            fault = lite_topic_fault(name)
            if fault is not None:
                raise MessageIllegal(f"lite topic {name!r}: {fault}")

    def _option(self, start: LiteStart) -> OffsetOption:
        if isinstance(start, Last):
            return OffsetOption(TAIL, start.count)
        if start == "first":
            return OffsetOption(POLICY, MIN)
        if start == "new":
            return OffsetOption(POLICY, MAX)
        if isinstance(start, int):
            return OffsetOption(OFFSET, start)
        if isinstance(start, timedelta):
            return OffsetOption(TIMESTAMP, self._runtime.clock.now_ms() - round(start.total_seconds() * 1000))
        return OffsetOption(TIMESTAMP, moment_ms(start, "start"))

    def _register(self) -> None:
        self._runtime.lite_members[self._client_id] = self._taken

    def _taken(self, name: str) -> None:
        if name in self._names:
            self._names.discard(name)
            self.taken.append(name)
            _log.info("%s: another member has taken lite topic %s", self._described, name)

    async def _open(self) -> None:
        await self._ensure_group()
        await self._sync_all()
        self._tasks.start(self._keep_synced(), f"subscriptions of {self._described}")

    async def _finish(self) -> None:
        self._runtime.lite_members.pop(self._client_id, None)
        await self._tasks.close()
        try:
            await self._change_everywhere(COMPLETE_REMOVE, ())
        except RmqError as error:
            _log.info("%s: its subscriptions end later: %s", self._described, error)

    async def _ensure_group(self) -> None:
        """Create the group at every master that does not have it."""
        wanted = {"lite.bind.topic": self.parent, **self._attributes}
        attributes = {f"+{name}": value for name, value in wanted.items()}
        for address in await self._runtime.master_addresses():
            known = await self._group_at(address)
            bound = None if known is None else (known.attributes or {}).get("lite.bind.topic")
            if bound == self.parent:
                continue
            if bound is not None:
                raise SettingsError(
                    f"group {self.group} is bound to topic {bound}, not to {self.parent}: choose another"
                )
            config = SubscriptionGroupConfig(group_name=self.group, attributes=attributes)
            body = msgspec.json.encode(config)
            await self._runtime.calls.ask(address, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)

    async def _group_at(self, address: str) -> SubscriptionGroupConfig | None:
        try:
            return await self._runtime.calls.fetch(
                SubscriptionGroupConfig, address, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequest(self.group)
            )
        except PeerRefused as error:
            if error.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                return None
            raise

    async def _brokers(self) -> list[str]:
        queues = await self._runtime.routes.publish_queues(self.parent, "", 0)
        return sorted({queue.broker_name for queue in queues.queues})

    async def _address(self, broker_name: str) -> str:
        return await self._runtime.routes.find_address(broker_name, self.parent)

    async def _change_everywhere(self, action: str, names: Iterable[str], option: OffsetOption | None = None) -> None:
        """Send a change of the subscriptions to every broker of the parent."""
        brokers = await self._brokers()
        await asyncio.gather(*(self._change_at(broker, action, names, option) for broker in brokers))

    async def _change_at(
        self, broker_name: str, action: str, names: Iterable[str], option: OffsetOption | None = None
    ) -> None:
        change = LiteSubscription(
            action=action,
            client_id=self._client_id,
            group=self.group,
            topic=self.parent,
            lite_topic_set=sorted(names),
            offset_option=option,
        )
        body = msgspec.json.encode(LiteSubscriptionCtlBody([change]))
        await self._runtime.calls.ask(await self._address(broker_name), RequestCode.LITE_SUBSCRIPTION_CTL, body=body)

    async def _keep_synced(self) -> None:
        """Send the whole set of lite topics regularly, and pop at every broker of the parent."""
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            await self._sync_all()

    async def _sync_all(self) -> None:
        for broker_name in await self._brokers():
            try:
                await self._change_at(broker_name, COMPLETE_ADD, self._names)
            except RmqError as error:
                if not self._popping:
                    raise
                _log.warning("%s: its subscriptions are sent again: %s", self._described, error)
            if broker_name not in self._popping:
                popping = self._tasks.start(self._pop_all(broker_name), f"pops of {self._described} at {broker_name}")
                self._popping[broker_name] = popping

    async def _pop_all(self, broker_name: str) -> None:
        """Pop at a broker until the consumer closes. Messages of a cancelled pop are redelivered after their time."""
        attempt = uuid.uuid4().hex
        while True:
            try:
                messages = await self._pop(broker_name, attempt)
            except PeerRefused as error:
                if error.code == ResponseCode.ILLEGAL_OPERATION:
                    await self._resync(broker_name)
                    continue
                _log.warning("%s: %s", self._described, error)
            except RmqError as error:
                _log.info("%s: %s", self._described, error)
                self._runtime.refresh_routes_soon()
            else:
                attempt = uuid.uuid4().hex  # the same attempt only after a lost answer
                for message in messages:
                    await self._messages.put(message)
                continue
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _resync(self, broker_name: str) -> None:
        try:
            await self._change_at(broker_name, COMPLETE_ADD, self._names)
        except RmqError as error:
            _log.info("%s: %s", self._described, error)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _pop(self, broker_name: str, attempt: str) -> list[LiteMessage]:
        header = PopLiteMessageRequest(
            client_id=self._client_id,
            consumer_group=self.group,
            topic=self.parent,
            max_msg_num=self._count_max,
            invisible_time=self._invisible_ms,
            poll_time=_POLL_MS,
            born_time=self._runtime.clock.now_ms(),
            attempt_id=attempt,
            bname=broker_name,
            resync=True,
        )
        address = await self._address(broker_name)
        asked = request(RequestCode.POP_LITE_MESSAGE, header)
        answer = await self._runtime.remoting.call(address, asked, _POLL_MS + _ANSWER_MS)
        if is_late(answer):
            header.poll_time, header.born_time = 0, NEVER_LATE_MS
            asked = request(RequestCode.POP_LITE_MESSAGE, header)
            answer = await self._runtime.remoting.call(address, asked, _ANSWER_MS)
            self._late.warn(broker_name)
            if answer.code == ResponseCode.POLLING_TIMEOUT:
                await asyncio.sleep(_PAUSE_SECONDS)
        if answer.code in (ResponseCode.POLLING_TIMEOUT, ResponseCode.POLLING_FULL):
            return []
        if answer.code != ResponseCode.SUCCESS:
            raise PeerRefused(answer.code, answer.remark, address)
        found = decode_header(answer, PopLiteMessageResponse)
        counts = decode_lite_counts(found.order_count_info or "")
        messages: list[LiteMessage] = []
        for i, record in enumerate(records_of(answer.payload)):
            tries = counts[i] if i < len(counts) else 0
            for message in messages_of_record(record, broker_name):
                made = self._made(message, found, tries)
                if tries >= self._deliveries_max:
                    await self._give_up(made, address)
                else:
                    messages.append(made)
        return messages

    def _made(self, message: ReceivedMessage, found: PopLiteMessageResponse, tries: int) -> LiteMessage:
        number = lite_number(message.properties)
        handle = PopHandle(
            check_point_offset=number,
            pop_time=found.pop_time,
            invisible_time=found.invisible_time,
            revive_queue_id=_REVIVE_QUEUE,
            retry="0",
            broker_name=message.broker_name or "",
            queue_id=0,
            queue_offset=number,
        )
        fields = {name: getattr(message, name) for name in ReceivedMessage.__struct_fields__}
        return LiteMessage(**{**fields, "reconsume_times": tries}, number=number, handle=handle, consumer=self)

    async def _give_up(self, message: LiteMessage, address: str) -> None:
        """Move a message that failed too often to the dead letters, and acknowledge it."""
        header = ConsumerSendBackRequest(
            offset=message.physical_offset,
            group=self.group,
            delay_level=-1,
            origin_msg_id=message.offset_msg_id,
            origin_topic=self.parent,
            max_reconsume_times=0,
        )
        try:
            await self._runtime.calls.send_back(address, header)
            await self.ack(message)
        except RmqError as error:
            _log.warning("%s: message %s cannot become a dead letter: %s", self._described, message.msg_id, error)
