"""POP sessions. A broker delivers messages, and hides them from the group until they are acknowledged or their time
expires.

======================================  ======================================================================
request                                 use
======================================  ======================================================================
POP_MESSAGE (200050)                    get messages, each with a handle in its property POP_CK
ACK_MESSAGE (200051)                    acknowledge one message
BATCH_ACK_MESSAGE (200151)              acknowledge the messages of one broker that waited for an earlier ack
CHANGE_MESSAGE_INVISIBLETIME (200053)   set when a message is delivered again; the message gets a new handle
======================================  ======================================================================

A message without an acknowledgement is delivered again through the group's retry topic for its topic, and its count of
deliveries increases by one. While the client holds a message (`PopProcessQueue`), it renews the invisible time, so that
no other member gets the message. A message is delivered a second time if its acknowledgement is lost, or if its
invisible time expires because the broker did not answer.

Acknowledgements identify messages by their handles (POP_CK). If a broker rewrites the messages of retry topics, it sets
their handles itself. For all other messages, strings in the response contain the start of each queue's messages.

Inner batches are not supported: brokers can acknowledge their messages only together (the first acknowledgement
counts).
Use this module only on the event loop. Source: behaviour.md §4.7–§4.11, §8.13; remoting.md §4.6.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.client.consumer.loop import unpack
from rmqkit.client.consumer.process_queue import NOTHING_HELD, ProcessQueue
from rmqkit.client.observe.status import ConsumerStats
from rmqkit.client.runtime.late import LateBrokers
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.errors import ClientError, RemotingError, RmqError
from rmqkit.filter import matches_tags
from rmqkit.protocol import properties as names
from rmqkit.protocol.ids import (
    NORMAL_TOPIC,
    RETRY_TOPIC_V1,
    RETRY_TOPIC_V2,
    OrderKey,
    PopHandle,
    PopQueue,
    decode_order_counts,
    decode_pop_handle,
    decode_start_offsets,
    encode_acked,
    encode_pop_handle,
)
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic, with_namespace
from rmqkit.protocol.schemas.clients import MessageQueue, SubscriptionData
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckBody,
    ChangeInvisibleTimeRequest,
    PopMessageRequest,
    PopMessageResponse,
)
from rmqkit.remoting.client import Failures
from rmqkit.remoting.tasks import Tasks
from rmqkit.rpc import Popped, PopStatus

_log = logging.getLogger(__name__)
ANY_QUEUE = -1
"""The queue id that means all queues of a broker."""

_ANSWER_MS = 10_000
"""The timeout of a pop, in addition to the time for which the broker may hold the request."""

_ACK_TRIES = 3
_ACK_PAUSE_MS = 1000.0
_RELEASE_MS = 1000
_NO_SPAN = 1 << 63
_FOREVER = float("inf")

_SEPARATORS = {RETRY_TOPIC_V1: "_", RETRY_TOPIC_V2: "+"}


class PopResult(Struct):
    """The messages of a pop: the messages that match the subscription, the messages with a different tag that has the
    same hash, and the messages with unreadable bodies. All of them must be acknowledged. The broker has ``rest_count``
    more messages."""

    status: PopStatus
    rest_count: int
    messages: list[ReceivedMessage]
    unwanted: list[ReceivedMessage]
    unreadable: list[ReceivedMessage]


class _Lease(Struct):
    """The time when a message becomes visible again, and the time until which it is renewed. Both are monotonic."""

    expires_ms: float
    limit_ms: float


class PopProcessQueue(ProcessQueue):
    """The messages that were popped from a queue, or from all queues of a broker.
    There is no offset. `position` is the number of finished messages, and `max_offset` adds the held messages and the
    messages that the broker still has."""

    is_popped = True

    def __init__(self, queue: MessageQueue, session: PopSession, *, bytes_max: int, stats: ConsumerStats) -> None:
        held_max = session.settings.pop.held_max
        super().__init__(queue, messages_max=held_max, bytes_max=bytes_max, span_max=_NO_SPAN, stats=stats)
        self.session = session
        self.leases: dict[int, _Lease] = {}
        self._done_count = 0

    def __contains__(self, message: ReceivedMessage) -> bool:
        return id(message) in self._messages

    @property
    def has_room(self) -> bool:
        """Return True if more messages can be popped. In ordered consumption, all popped messages must be consumed
        first."""
        return not self._messages if self.session.is_ordered else super().has_room

    @property
    def position(self) -> int:
        """The number of consumed or expired messages."""
        return self._done_count

    @property
    def bounds(self) -> tuple[int, int]:
        """Zeros, because messages of different queues have no common offsets."""
        return 0, 0

    def put(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Hold popped messages until the invisible time after now has passed."""
        new, now_ms, settings = list(messages), self.session.clock.monotonic_ms(), self.session.settings
        limit_ms = _FOREVER if self.session.is_ordered else now_ms + settings.consume_timeout_minutes * 60_000
        for message in new:
            self._messages[id(message)] = message
            self.leases[id(message)] = _Lease(now_ms + settings.pop.invisible_ms, limit_ms)
            self.body_bytes += len(message.body)
        return new

    def remove(self, message: ReceivedMessage) -> int:
        if self._messages.pop(id(message), None) is None:
            return NOTHING_HELD
        del self.leases[id(message)]
        self._done_count += 1
        assert len(self.leases) == len(self._messages), "every held message has a lease"
        self.body_bytes -= len(message.body)
        self._changed.set()
        return self._done_count

    def lowest(self, count: int) -> list[ReceivedMessage]:
        """Return at most ``count`` messages, in the order in which they were popped."""
        return list(islice(self._messages.values(), count))

    def not_begun(self) -> list[ReceivedMessage]:
        """Return the messages for which no handler has started."""
        return [one for one in self._messages.values() if names.CONSUME_START_TIME not in one.properties]

    def due(self, now_ms: float) -> list[ReceivedMessage]:
        """Return the messages with an invisible time that must be renewed. Remove expired messages. In ordered
        consumption, also remove all messages after an expired message."""
        due: list[ReceivedMessage] = []
        for message in self.lowest(len(self)):
            lease = self.leases.get(id(message))
            if lease is None:
                continue
            if lease.expires_ms <= now_ms:
                said = "message %s of %s is handled for too long, or no broker answers: it is redelivered"
                _log.warning(said, message.msg_id, message.topic)
                for lapsed in self.lowest(len(self)) if self.session.is_ordered else [message]:
                    self.remove(lapsed)
            elif lease.expires_ms - now_ms < self.session.settings.pop.invisible_ms / 2 and now_ms < lease.limit_ms:
                due.append(message)
        return due


class PopSession:
    """The pops of one group: its requests, its popped queues (`queues`), and its held messages."""

    def __init__(
        self, runtime: ClientRuntime, group: str, settings: PushConsumerSettings, *, is_ordered: bool = False
    ) -> None:
        self.settings = settings
        self.is_ordered = is_ordered
        self.queues: set[MessageQueue] = set()
        self.clock = runtime.clock
        self._runtime = runtime
        self._group = group
        self._late = LateBrokers(f"group {group}")
        self._held: set[PopProcessQueue] = set()
        self._acks: defaultdict[str, list[Receipt]] = defaultdict(list)
        self._ackers: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._pops: set[asyncio.Task[Popped]] = set()

    def start(self) -> None:
        """Start to renew the invisible time of the held messages."""
        self._tasks.start(self._renew(), f"invisible times of group {self._group}")

    async def close(self) -> None:
        """Send the remaining acknowledgements, and let the brokers deliver the held messages to other members soon."""
        # Release the messages before waiting for the acknowledgements, so that other members may get them during the
        # close.
        await self._release([message for one in self._held for message in one.lowest(len(one))])
        await self.flush()
        await self._tasks.close()

    def process_queue(self, queue: MessageQueue, *, bytes_max: int, stats: ConsumerStats) -> PopProcessQueue:
        """Create a process queue with messages that stay invisible to others while they are held."""
        # A dropped queue remains until it is empty, because the invisible time of its messages must still be renewed.
        self._held = {one for one in self._held if len(one) or not one.is_dropped}
        process_queue = PopProcessQueue(queue, self, bytes_max=bytes_max, stats=stats)
        self._held.add(process_queue)
        return process_queue

    # -- requests

    async def pop(
        self,
        queue: MessageQueue,
        subscription: SubscriptionData,
        *,
        count: int,
        invisible_ms: int,
        poll_ms: int,
        attempt_id: str | None = None,
    ) -> PopResult:
        """Return at most ``count`` messages, but never more than 32. A broker without messages may wait ``poll_ms`` for
        the first one. Messages that arrive after a cancellation are released. Raises RemotingError, PeerRefused,
        HeaderError."""
        header = PopMessageRequest(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            max_msg_nums=count,
            invisible_time=invisible_ms,
            poll_time=poll_ms,
            born_time=self.clock.now_ms(),
            init_mode=0 if self.settings.start_from is StartFrom.FIRST_OFFSET else 1,
            exp_type=subscription.expression_type,
            exp=subscription.sub_string,
            order=self.is_ordered or None,
            attempt_id=attempt_id,
            bname=queue.broker_name,
        )
        address = await self._runtime.routes.find_address(queue.broker_name, queue.topic)
        # Use a separate task, because the broker hides the messages even if this call is cancelled.
        asked = asyncio.create_task(self._runtime.calls.pop(address, header, poll_ms + _ANSWER_MS))
        self._pops.add(asked)  # it ends with the response, or with its connection
        asked.add_done_callback(self._pops.discard)
        try:
            popped = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._tasks.start(self._release_late(asked, queue), f"pop of {queue} that nobody waits for")
            raise
        if popped.was_late:
            self._late.warn(queue.broker_name)
        messages, unreadable = self._read(popped, queue)
        unwanted = [one for one in messages if not matches_tags(subscription, one.tags)]
        messages = [one for one in messages if matches_tags(subscription, one.tags)]
        return PopResult(popped.status, popped.header.rest_num, messages, unwanted, unreadable)

    async def ack(self, messages: Collection[ReceivedMessage]) -> None:
        """Acknowledge messages and wait for the brokers. Raises RemotingError, PeerRefused.
        Raises ClientError: a message was not popped."""
        by_broker: defaultdict[str, list[Receipt]] = defaultdict(list)
        for message in messages:
            self._stop_holding(message)
            receipt = receipt_of(message)
            by_broker[receipt.handle.broker_name].append(receipt)
        await asyncio.gather(*(self._ack(broker_name, receipts) for broker_name, receipts in by_broker.items()))

    def ack_soon(self, message: ReceivedMessage) -> None:
        """Acknowledge a message in the background, in one request with other messages. A failure is logged."""
        self._ack_soon(receipt_of(message))

    async def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed or has failed."""
        while self._ackers:
            await asyncio.wait(list(self._ackers.values()))

    async def change_invisible_time(
        self, message: ReceivedMessage, invisible_ms: int, *, suspend: bool = False
    ) -> None:
        """Let the broker deliver a message again after ``invisible_ms``, unless the message is acknowledged before this
        time. With ``suspend`` this delivery does not count as a retry.
        Raises RemotingError, PeerRefused. Raises ClientError: the message was not popped."""
        receipt = receipt_of(message)
        handle = await self._ask_invisible_time(receipt, invisible_ms, suspend=suspend)
        # In ordered consumption, a change causes no second delivery, because only the newest handle exists.
        if not self.is_ordered and (renewed := receipt_of(message)) != receipt:
            self._ack_soon(renewed)  # renewed meanwhile: each change is a separate delivery
        message.properties[names.POP_CHECK_POINT] = encode_pop_handle(handle)
        for process_queue in self._held:
            if (lease := process_queue.leases.get(id(message))) is not None:
                lease.expires_ms = self.clock.monotonic_ms() + invisible_ms

    # -- internals

    def _read(self, popped: Popped, queue: MessageQueue) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        messages, unreadable = unpack(popped.body, queue.broker_name)
        give_handles([*messages, *unreadable], popped.header, queue)
        return messages, unreadable

    async def _address(self, receipt: Receipt) -> str:
        return await self._runtime.routes.find_address(receipt.handle.broker_name, receipt.topic)

    async def _ack(self, broker_name: str, receipts: list[Receipt]) -> None:
        assert all(one.handle.broker_name == broker_name for one in receipts), "all acks are for one broker"
        address, calls = await self._address(receipts[0]), self._runtime.calls
        if len(receipts) > 1:
            body = BatchAckBody(broker_name=broker_name, acks=batch_acks(self._group, receipts))
            await calls.ack_batch(address, body)
            return
        (receipt,) = receipts
        header = AckMessageRequest(
            consumer_group=self._group,
            topic=receipt.real_topic(self._group, self._runtime.namespace),
            queue_id=receipt.handle.queue_id,
            extra_info=encode_pop_handle(receipt.handle),
            offset=receipt.queue_offset,
            bname=broker_name,
        )
        await calls.ack(address, header)

    def _ack_soon(self, receipt: Receipt) -> None:
        broker_name = receipt.handle.broker_name
        self._acks[broker_name].append(receipt)
        if broker_name not in self._ackers:
            name = f"acks of group {self._group} to {broker_name}"
            self._ackers[broker_name] = self._tasks.start(self._send_acks(broker_name), name)

    async def _send_acks(self, broker_name: str) -> None:
        try:
            while receipts := self._acks.pop(broker_name, None):
                await self._ack_or_log(broker_name, receipts)
        finally:
            del self._ackers[broker_name]

    async def _ack_or_log(self, broker_name: str, receipts: list[Receipt]) -> None:
        failures = Failures()
        for left in reversed(range(_ACK_TRIES)):
            try:
                return await self._ack(broker_name, receipts)
            except RmqError as error:
                failures.note(error)
                if not left or not isinstance(error, RemotingError):
                    _log.warning(
                        "%d acks of group %s failed, so their messages are delivered again: %s",
                        len(receipts),
                        self._group,
                        failures.cause if isinstance(error, RemotingError) else error,
                    )
                    return None
            await asyncio.sleep(_ACK_PAUSE_MS / 1000.0)
        return None

    async def _ask_invisible_time(self, receipt: Receipt, invisible_ms: int, *, suspend: bool = False) -> PopHandle:
        handle, offset = receipt.handle, receipt.queue_offset
        header = ChangeInvisibleTimeRequest(
            consumer_group=self._group,
            topic=receipt.real_topic(self._group, self._runtime.namespace),
            queue_id=handle.queue_id,
            extra_info=encode_pop_handle(handle),
            offset=offset,
            invisible_time=invisible_ms,
            suspend=suspend or None,
            bname=handle.broker_name,
        )
        answer = await self._runtime.calls.change_invisible_time(await self._address(receipt), header)
        return replace(
            handle,
            check_point_offset=offset,
            pop_time=answer.pop_time,
            invisible_time=answer.invisible_time,
            revive_queue_id=answer.revive_qid,
        )

    async def _renew(self) -> None:
        while True:
            # Renew after each sixth of the invisible time: a renewal is due after half of the time, and two more
            # attempts remain.
            await asyncio.sleep(self.settings.pop.invisible_ms / 6000.0)
            now_ms, held = self.clock.monotonic_ms(), list(self._held)
            await asyncio.gather(*(self._renew_one(one, message) for one in held for message in one.due(now_ms)))
            for one in held:
                if one.is_dropped:
                    await self._release(one.not_begun())

    async def _renew_one(self, process_queue: PopProcessQueue, message: ReceivedMessage) -> None:
        asked_ms, invisible_ms = self.clock.monotonic_ms(), self.settings.pop.invisible_ms
        try:
            receipt = receipt_of(message)
            handle = await self._ask_invisible_time(receipt, invisible_ms)
            lease = process_queue.leases.get(id(message))
            if lease is not None and receipt_of(message) == receipt:
                # Count from the time of the request, because the broker starts to count later.
                lease.expires_ms = asked_ms + invisible_ms
                message.properties[names.POP_CHECK_POINT] = encode_pop_handle(handle)
            elif not self.is_ordered:
                self._ack_soon(Receipt(message.topic, handle))  # it was acknowledged meanwhile, with the old handle
        except RmqError as error:
            _log.warning(
                "cannot extend the invisible time of message %s of %s: %s", message.msg_id, message.topic, error
            )

    async def _release_late(self, asked: asyncio.Task[Popped], queue: MessageQueue) -> None:
        try:
            messages, unreadable = self._read(await asked, queue)
        except RmqError:
            return
        await self._release([*messages, *unreadable])

    async def _release(self, messages: list[ReceivedMessage]) -> None:
        results = await asyncio.gather(
            # No handler has failed, so this redelivery must not bring the messages closer to the dead letters.
            *(self.change_invisible_time(message, _RELEASE_MS, suspend=True) for message in messages),
            return_exceptions=True,
        )
        for message, result in zip(messages, results, strict=True):
            self._stop_holding(message)
            if isinstance(result, RmqError):
                _log.warning("could not return message %s of %s: %s", message.msg_id, message.topic, result)
            elif isinstance(result, BaseException):
                raise result

    def _stop_holding(self, message: ReceivedMessage) -> None:
        for process_queue in self._held:
            process_queue.remove(message)


class Receipt(Struct, frozen=True):
    """The topic and the handle that identify a popped message in acknowledgements and changes.

    The receipt does not change when the message changes.
    """

    topic: str
    handle: PopHandle

    @property
    def queue_offset(self) -> int:
        """The offset of the message in the queue from which it was popped."""
        assert self.handle.queue_offset is not None, "`receipt_of` completes handles"
        return self.handle.queue_offset

    def real_topic(self, group: str, namespace: str) -> str:
        """Return the topic from which the message was popped: the topic of the message, or a retry topic of the group.

        A retry topic has no namespace prefix.
        """
        separator = _SEPARATORS.get(self.handle.retry)
        if separator is None:
            return self.topic
        return pop_retry_topic(group, with_namespace(namespace, self.topic), separator)


def receipt_of(message: ReceivedMessage) -> Receipt:
    """Return the handle of a popped message. Raises ClientError: the message was not popped. Raises HeaderError: its
    handle is damaged."""
    text = message.properties.get(names.POP_CHECK_POINT)
    if text is None:
        raise ClientError(f"message {message.msg_id} has no property {names.POP_CHECK_POINT}: it was not popped")
    handle = decode_pop_handle(text)
    if handle.queue_offset is None:
        handle = replace(handle, queue_offset=message.queue_offset)
    return Receipt(message.topic, handle)


def give_handles(messages: list[ReceivedMessage], header: PopMessageResponse, queue: MessageQueue) -> None:
    """Complete popped messages. Set the requested topic, the handle if the broker did not set it, and in ordered
    consumption the number of deliveries. Raises HeaderError: the strings of the response cannot be read."""
    starts = decode_start_offsets(header.start_offset_info or "")
    counts = decode_order_counts(header.order_count_info or "")
    for message in messages:
        retry, queue_id, offset = _retry_mark(message.topic), message.queue_id, message.queue_offset
        if names.POP_CHECK_POINT not in message.properties:
            handle = PopHandle(
                check_point_offset=starts.setdefault(PopQueue(retry, queue_id), offset),
                pop_time=header.pop_time,
                invisible_time=header.invisible_time,
                revive_queue_id=header.revive_qid,
                retry=retry,
                broker_name=queue.broker_name,
                queue_id=queue_id,
                queue_offset=offset,
            )
            message.properties[names.POP_CHECK_POINT] = encode_pop_handle(handle)
        else:
            receipt_of(message)  # check the broker's handle; if it is damaged, the whole response is refused
        # In ordered consumption, the broker itself counts deliveries. The record contains its deliveries through the
        # retry topic.
        count = counts.get(OrderKey(retry, queue_id, offset)) or counts.get(OrderKey(retry, queue_id)) or 0
        message.reconsume_times = count or message.reconsume_times
        message.properties.setdefault(names.FIRST_POP_TIME, str(header.pop_time))
        message.properties.pop(names.CONSUME_START_TIME, None)  # set by another client
        message.topic = queue.topic


def batch_acks(group: str, receipts: Iterable[Receipt]) -> list[BatchAck]:
    """Combine the acknowledgements for one broker into a batch that has one entry for each pop and queue."""
    offsets: defaultdict[Receipt, list[int]] = defaultdict(list)
    for one in receipts:
        # The acknowledgements of one pop and queue differ only in the offset, and each offset is a bit in the entry.
        offsets[replace(one, handle=replace(one.handle, queue_offset=None))].append(one.queue_offset)
    return [
        BatchAck(
            group=group,
            topic=pop.topic,
            retry=pop.handle.retry,
            start_offset=pop.handle.check_point_offset,
            queue_id=pop.handle.queue_id,
            revive_queue_id=pop.handle.revive_queue_id,
            pop_time=pop.handle.pop_time,
            invisible_time=pop.handle.invisible_time,
            acked=encode_acked(pop.handle.check_point_offset, those),
        )
        for pop, those in offsets.items()
    ]


def _retry_mark(topic: str) -> str:
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL_TOPIC
    return RETRY_TOPIC_V2 if "+" in topic else RETRY_TOPIC_V1
