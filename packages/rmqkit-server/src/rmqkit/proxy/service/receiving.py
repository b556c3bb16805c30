"""ReceiveMessage, AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue (``ReceiveMessageActivity``,
``AckMessageActivity``): POP for gRPC clients.

A receive is one pop over all queues of a broker, held until there is a message or the polling time has passed. Its
answer is a stream: a status, the messages, the time of writing. Messages that were popped and cannot be written are
redelivered after a second. Clients may send any handle: the broker checks that the named message exists.
Source: grpc.md §5.5 to §5.10, §8.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from rmqkit.clock import Clock, SteadyClock
from rmqkit.core import CORE
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.filter import matches_tags, subscription
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.core import GrpcAck
from rmqkit.protocol.ids import NORMAL_TOPIC
from rmqkit.protocol.message import records_of
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import COMPRESSED, Record
from rmqkit.protocol.schemas.clients import SubscriptionData
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.lite import PopLiteMessageRequest, PopLiteMessageResponse
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    PopMessageRequest,
    PopMessageResponse,
)
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest
from rmqkit.proxy.backend import Backend, Peer
from rmqkit.proxy.schema.checks import (
    INVISIBLE_MS_MAX,
    RESERVED_AND_HIDDEN,
    check_group,
    check_lite_topic,
    check_topic,
    duration_ms,
    sql_or_tags,
)
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.records import (
    DELIVERED_BYTES_MAX,
    Handle,
    Popped,
    handles_of,
    lite_handles_of,
    lite_offset,
    message_of,
    read_handle,
)
from rmqkit.proxy.schema.status import OK, Code, Refused, acked_answer, code_of_broker, refusal_of, status
from rmqkit.proxy.service.client_settings import retry_waits_ms
from rmqkit.proxy.service.clients import AnswerWith, Call, Client
from rmqkit.proxy.service.lite_subscriptions import LiteSubscriptions
from rmqkit.proxy.service.receipt_handles import Renewals
from rmqkit.remoting.tasks import Tasks

__all__ = ["Receiving", "Write", "WriteFramed", "read_ack"]

_BATCH_MAX = 32
_POLL_MS_MIN, _POLL_MS_MAX = 5000, 20_000
_INVISIBLE_MS_MIN = 10_000
_RENEWED_MS = 60_000
_RELEASED_MS = 1000
_REQUEST_TIMEOUT_MS = 3000
_SETTINGS_WAIT_SECONDS = 1.0
_FROM_MAX = 1
_TAGS = "TAG"
_ENTRIES_MAX = 10_000
_LITE_MARK = property_names.LITE_TOPIC.encode()
_INT64_MAX = (1 << 63) - 1
_SLICE = 128
"""Number of entries of a call after which it yields to other tasks."""

_ANSWER_BYTES_MAX = 64 << 20
"""Maximum bytes of decompressed bodies in one answer; later bodies are delivered as they are stored."""

_log = logging.getLogger(__name__)

_ReceiveResponse = message_class("ReceiveMessageResponse")
_AckRequest = message_class("AckMessageRequest")
_AckResponse = message_class("AckMessageResponse")
_AckEntry = message_class("AckMessageResultEntry")
_ChangeResponse = message_class("ChangeInvisibleDurationResponse")
_ForwardResponse = message_class("ForwardMessageToDeadLetterQueueResponse")

Write = Callable[[Any], Awaitable[None]]
WriteFramed = Callable[[list[bytes]], Awaitable[int]]
"""Sends as many of the framed messages as the client accepts now, at least one. Returns the number of sent messages."""


@dataclass(slots=True)
class _Receive:
    """A receive request that passed the checks; times in ms. ``is_lite``: a lite consumer receives from its lite
    topics."""

    group: str
    topic: str
    filter_type: str
    filter_text: str
    broker: str
    count: int
    invisible_ms: int
    poll_ms: int
    tries_max: int
    renews: bool
    message_topic: str
    is_lite: bool


class Receiving:
    """Pops, acks, and changes of invisible times."""

    def __init__(self, backend: Backend, lite: LiteSubscriptions, clock: Clock) -> None:
        self._backend = backend
        self._lite = lite
        self._clock = clock
        # The times in handles are from the broker's clock for pops, which also never moves backwards.
        self._handle_clock = SteadyClock(clock)
        self._plain = CORE.grpc_messages(RESERVED_AND_HIDDEN)
        self._read_ack = CORE.read_grpc_ack or read_ack
        self._returning = Tasks()
        self.renewals = Renewals(self, self._handle_clock)

    async def close(self, seconds: float) -> None:
        """Release messages that no client has received and messages that clients hold, for redelivery soon.
        Messages that are not released within ``seconds`` are redelivered after their invisible time."""
        try:
            async with asyncio.timeout(seconds):
                # Run both concurrently: a broker that does not answer must not delay the requests to other brokers.
                await asyncio.gather(self._returning.finish(), self.renewals.release_all())
        except TimeoutError:
            _log.info("not all messages were returned to a broker; it redelivers them after their invisible time")
        finally:
            await self._returning.close()

    # -- ReceiveMessage

    async def receive(self, call: Call, client: Client, asked: Any, write: Write, write_framed: WriteFramed) -> None:
        """Answer a receive. Raises Refused: the request is not valid, or there is no message."""
        wanted = await self._checked(call, client, asked)
        if wanted.is_lite:
            answer = await self._pop_lite(client, wanted, asked.attempt_id or None)
        else:
            answer = await self._wait(client, wanted, self._pop_request(client, wanted, asked.attempt_id or None))
        match answer.code:
            case ResponseCode.SUCCESS:
                await self._deliver(client, wanted, answer, write, write_framed)
            case ResponseCode.POLLING_TIMEOUT | ResponseCode.PULL_NOT_FOUND:
                raise Refused(Code.MESSAGE_NOT_FOUND, "no new message")
            case ResponseCode.POLLING_FULL:
                raise Refused(Code.TOO_MANY_REQUESTS, "polling full")
            case code:
                raise Refused(code_of_broker(code), answer.remark or f"the broker answered with code {code}")

    def _pop_request(self, client: Client, wanted: _Receive, attempt_id: str | None) -> Command:
        header = PopMessageRequest(
            consumer_group=wanted.group,
            topic=wanted.topic,
            queue_id=-1,
            max_msg_nums=wanted.count,
            invisible_time=wanted.invisible_ms,
            poll_time=wanted.poll_ms,
            born_time=self._clock.now_ms(),
            init_mode=_FROM_MAX,
            exp_type=wanted.filter_type,
            exp=wanted.filter_text,
            order=client.is_fifo,
            attempt_id=attempt_id,
        )
        return request(RequestCode.POP_MESSAGE, header)

    async def _pop_lite(self, client: Client, wanted: _Receive, attempt_id: str | None) -> Command:
        """Return the answer to a pop of a client's lite topics. A broker that has restarted gets the client's lite
        topics first."""
        header = PopLiteMessageRequest(
            client_id=client.id,
            consumer_group=wanted.group,
            topic=wanted.topic,
            max_msg_num=wanted.count,
            invisible_time=wanted.invisible_ms,
            poll_time=wanted.poll_ms,
            born_time=self._clock.now_ms(),
            attempt_id=attempt_id,
            resync=client.lite is not None or None,
        )
        answer = await self._wait(client, wanted, request(RequestCode.POP_LITE_MESSAGE, header))
        if answer.code == ResponseCode.ILLEGAL_OPERATION and header.resync:
            await self._lite.restore(client, wanted.broker)
            header.resync, header.born_time = None, self._clock.now_ms()
            answer = await self._wait(client, wanted, request(RequestCode.POP_LITE_MESSAGE, header))
        return answer

    async def _wait(self, client: Client, wanted: _Receive, command: Command) -> Command:
        assert client.peer is not None, "the client of a call has a peer"
        timeout_ms = wanted.poll_ms + _POLL_MS_MIN
        return await client.peer.wait(wanted.broker, command, timeout_ms, lambda late: self._unclaimed(wanted, late))

    async def _checked(self, call: Call, client: Client, asked: Any) -> _Receive:
        """Check a receive, in the reference's order."""
        if client.settings is None and not asked.auto_renew:
            # The SimpleConsumer of the Python SDK sends this call before its settings can arrive.
            await client.wait_for_settings(_SETTINGS_WAIT_SECONDS)
        if client.is_lite:
            self._check_lite(client)
        poll_ms = self._poll_ms(call, client, asked)
        topic = check_topic(asked.message_queue.topic.name)
        group = check_group(asked.group.name)
        invisible_ms = _RENEWED_MS if asked.auto_renew else _invisible_ms(asked)
        # Lite consumers have no filter.
        filter_type, filter_text = (_TAGS, "*") if client.is_lite else sql_or_tags(asked.filter_expression)
        route = await self._backend.route(topic)
        if route is None:
            raise Refused(Code.TOPIC_NOT_FOUND, no_route(topic))
        broker = self._backend.readable_broker(asked.message_queue.broker.name, route)
        if broker is None:
            raise Refused(Code.FORBIDDEN, "no readable queue")
        config = await self._backend.group(group) or SubscriptionGroupConfig()
        if client.settings is None and config.lite_parent is not None:
            raise Refused(Code.BAD_REQUEST, "client settings not found")
        return _Receive(
            group,
            topic,
            filter_type,
            filter_text,
            broker,
            max(0, min(asked.batch_size, _BATCH_MAX)),
            invisible_ms,
            poll_ms,
            config.retry_max_times + 1,
            asked.auto_renew,
            topic,
            client.is_lite,
        )

    def _check_lite(self, client: Client) -> None:
        if client.stream is None:
            raise Refused(Code.BAD_REQUEST, f"The client [{client.id}] is disconnected.")
        count = self.renewals.count_of(client.id)
        if count > self._lite.limits.renewed_max:
            text = f"The client [{client.id}] has too many unacked messages. Unacked count: {count}"
            raise Refused(Code.FORBIDDEN, text)

    @staticmethod
    def _poll_ms(call: Call, client: Client, asked: Any) -> int:
        """Return the time to wait for a message, in ms: the requested time, within limits and the call's deadline."""
        left = call.seconds_left()
        left_ms = None if left is None else int(left * 1000)
        if asked.HasField("long_polling_timeout"):
            poll_ms = duration_ms(asked.long_polling_timeout, Code.BAD_REQUEST)
        elif left_ms is None:
            poll_ms = _POLL_MS_MAX
        else:
            settings = client.settings
            has_timeout = settings is not None and settings.HasField("request_timeout")
            timeout = duration_ms(settings.request_timeout, Code.BAD_REQUEST) if has_timeout else _REQUEST_TIMEOUT_MS
            poll_ms = left_ms - timeout // 2
        poll_ms = max(_POLL_MS_MIN, min(poll_ms, _POLL_MS_MAX))
        if left_ms is None or poll_ms <= left_ms:
            return poll_ms
        if left_ms >= _POLL_MS_MIN:
            return left_ms
        # Compared as text, as in the reference: clients before 5.0.3 do not know the code.
        is_old = call.metadata.get("x-mq-client-version", "") < "5.0.3"
        text = "The deadline time remaining is not enough for polling, please check network condition"
        raise Refused(Code.BAD_REQUEST if is_old else Code.ILLEGAL_POLLING_TIME, text)

    async def _deliver(
        self, client: Client, wanted: _Receive, answer: Command, write: Write, write_framed: WriteFramed
    ) -> None:
        """Write the popped messages. Release messages that were not written, for redelivery soon."""
        header = decode_header(answer, PopMessageResponse)
        if (rows := self._encoded(wanted, answer, header)) is not None:
            return await self._deliver_encoded(client, wanted, header, rows, write, write_framed)
        left = _popped(wanted, answer)
        try:
            left = await self._kept(client, wanted, left)
            if not left:
                raise Refused(Code.MESSAGE_NOT_FOUND, "no match message")
            await write(_ReceiveResponse(status=OK))
            messages = await _messages(left, wanted.message_topic)
            for message in messages:
                await write(_ReceiveResponse(message=message))
                # Remove a message from ``left`` only after the write: if the call is cut, all messages in ``left`` are
                # redelivered.
                popped = left.pop(0)
                if wanted.renews:
                    message_id = message.system_properties.message_id
                    self.renewals.add(client.id, wanted.group, wanted.topic, message_id, popped.handle)
        finally:
            if left:
                self._give_back_soon(wanted, [one.handle for one in left])
        return None

    def _encoded(
        self, wanted: _Receive, answer: Command, header: PopMessageResponse
    ) -> list[tuple[bytes, str, str, int, int]] | None:
        """Return the popped messages as encoded by the compiled core, or None if the core cannot encode them."""
        if self._plain is None or header.order_count_info or wanted.is_lite:
            return None
        payload = bytes(answer.payload)
        # The core does not know lite topics. Their dead letters, and their parents, are consumed by regular groups.
        if _LITE_MARK in payload:
            return None
        by_tags = _tags_of(wanted)
        return self._plain.encode(
            payload,
            wanted.topic,
            wanted.broker,
            f"{header.pop_time} {header.invisible_time} {header.revive_qid}",
            header.start_offset_info or "",
            wanted.tries_max,
            None if by_tags is None else by_tags.tags_set or None,
        )

    async def _deliver_encoded(
        self,
        client: Client,
        wanted: _Receive,
        header: PopMessageResponse,
        rows: list[tuple[bytes, str, str, int, int]],
        write: Write,
        write_framed: WriteFramed,
    ) -> None:
        """Write the messages that the compiled core has encoded, like `_deliver`."""
        # Number of messages that the client has received. The other messages are redelivered if the client disconnects.
        sent = 0
        try:
            await write(_ReceiveResponse(status=OK))
            while sent < len(rows):
                sent += await write_framed([row[0] for row in rows[sent:]])
        finally:
            if wanted.renews:
                group, broker = wanted.group, wanted.broker
                held = [((group, row[1], NORMAL_TOPIC, broker, row[3], row[4]), row[2]) for row in rows[:sent]]
                self.renewals.add_texts(client.id, wanted.topic, held, header.pop_time + header.invisible_time)
            if sent < len(rows):
                self._give_back_soon(wanted, [read_handle(row[2]) for row in rows[sent:]])

    async def _kept(self, client: Client, wanted: _Receive, popped: list[Popped]) -> list[Popped]:
        """Return the messages to deliver. Ack messages of other tags that have the same hash. Move messages with too
        many deliveries to the dead letters."""
        kept = []
        by_tags = _tags_of(wanted)
        assert client.peer is not None, "the client of a call has a peer"
        for one in popped:
            if by_tags is not None and not matches_tags(by_tags, one.properties.get(property_names.TAGS)):
                await self._ack(client.peer, wanted.group, wanted.topic, one.handle)
            elif one.deliveries > wanted.tries_max:
                await self._give_up(client.peer, wanted.group, wanted.topic, one.handle)
            else:
                kept.append(one)
        return kept

    def _unclaimed(self, wanted: _Receive, answer: Command) -> None:
        """Release the messages that were popped for a cancelled receive, for redelivery soon."""
        if answer.code == ResponseCode.SUCCESS:
            self._give_back_soon(wanted, [one.handle for one in _popped(wanted, answer)])

    def _give_back_soon(self, wanted: _Receive, handles: Sequence[Handle]) -> None:
        self._returning.start(self._give_back(wanted, handles), f"return of messages of {wanted.topic}")

    async def _give_back(self, wanted: _Receive, handles: Sequence[Handle]) -> None:
        for handle in handles:
            try:
                await self.change(wanted.group, wanted.topic, handle, _RELEASED_MS)
            except RmqError as error:
                _log.info("a message of %s is delivered again when its invisible time ends: %s", wanted.topic, error)

    # -- AckMessage

    def ack_at_once(self, call: Call, client: Client, content: bytes, answer: AnswerWith) -> bool:
        """Handle an ack of one message, together with the other acks of the same read. Return False if `ack` must
        handle it. Raises Refused or DecodeError: `ack` will raise the same error."""
        backend = self._backend.at_once
        assert backend is not None, "the broker is in this process"
        if (ack := self._read_ack(content)) is None:
            return False
        topic, group, message_id, text, retry, broker, queue_id, offset, start, pop_time, invisible_ms, revive = ack
        check_topic(topic)
        check_group(group)
        if not backend.is_broker(broker) or pop_time + invisible_ms <= self._handle_clock.now_ms():
            return False
        # This check is the last, because it changes state: after False another task repeats all checks.
        if not self.renewals.let_go(client.id, (group, message_id, retry, broker, queue_id, offset), text):
            return False
        assert client.peer is not None, "the client of a call has a peer"
        if retry != NORMAL_TOPIC:
            topic = read_handle(text).topic_of(topic, group)
        pop = topic, group, queue_id, start, pop_time, revive
        backend.gather_ack(client.peer, pop, offset, text, answer(partial(_acked, message_id, text)))
        return True

    async def ack(self, client: Client, asked: Any) -> Any:
        topic, group = check_topic(asked.topic.name), check_group(asked.group.name)
        if not asked.entries:
            raise Refused(Code.INTERNAL_SERVER_ERROR, "ack message result is empty")
        if len(asked.entries) > _ENTRIES_MAX:
            raise Refused(Code.BAD_REQUEST, f"{len(asked.entries)} acks in one call: the limit is {_ENTRIES_MAX}")
        results = []
        for number, entry in enumerate(asked.entries, 1):
            result = await self._ack_entry(client, topic, group, entry)
            results.append(_AckEntry(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=result))
            # A broker in this process answers without waiting: 10,000 acks would hold its loop for 0.4 s.
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        codes = {result.status.code for result in results}
        overall = status(codes.pop() if len(codes) == 1 else Code.MULTIPLE_RESULTS)
        return _AckResponse(status=overall, entries=results)

    async def _ack_entry(self, client: Client, topic: str, group: str, entry: Any) -> Any:
        assert client.peer is not None, "the client of a call has a peer"
        try:
            handle = await self._known(entry.receipt_handle, entry.lite_topic)
            handle = await self.renewals.take(client.id, group, entry.message_id, handle)
            self._check_live(handle)
            await self._ack(client.peer, group, topic, handle)
        except RmqError as error:
            refused = refusal_of(error)
            return status(refused.code, refused.text)
        return OK

    async def _ack(self, peer: Peer, group: str, topic: str, handle: Handle) -> None:
        answer = await peer.ask(handle.pop.broker_name, _ack_request(group, topic, handle))
        if answer.code != ResponseCode.SUCCESS:
            raise _not_acked(answer)

    # -- ChangeInvisibleDuration

    async def change_invisible(self, client: Client, asked: Any) -> Any:
        topic, group = check_topic(asked.topic.name), check_group(asked.group.name)
        invisible_ms = duration_ms(asked.invisible_duration, Code.ILLEGAL_INVISIBLE_TIME)
        if invisible_ms < 0:
            raise Refused(Code.ILLEGAL_INVISIBLE_TIME, "the invisibleTime is too small. min is 0")
        if invisible_ms > INVISIBLE_MS_MAX:
            raise Refused(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too large. max is {INVISIBLE_MS_MAX}")
        handle = await self._known(asked.receipt_handle, asked.lite_topic)
        # Stop the renewal: push consumers send this request after a handler failed, to have the message redelivered.
        handle = await self.renewals.take(client.id, group, asked.message_id, handle)
        self._check_live(handle)
        assert client.peer is not None, "the client of a call has a peer"
        changed = await self._change(client.peer, group, topic, handle, invisible_ms, suspend=asked.suspend)
        return _ChangeResponse(status=OK, receipt_handle=changed.text)

    async def change(self, group: str, topic: str, handle: Handle, invisible_ms: int) -> Handle:
        """Change an invisible time in the endpoint's own name, and return the new handle. Raises RmqError."""
        return await self._change(self._backend.own, group, topic, handle, invisible_ms)

    async def retry_ms(self, group: str, deliveries: int) -> int:
        """Return the wait of the group before a redelivery, in ms."""
        waits = retry_waits_ms(await self._backend.group(group) or SubscriptionGroupConfig())
        return waits[min(deliveries, len(waits)) - 1]

    async def _change(
        self, peer: Peer, group: str, topic: str, handle: Handle, invisible_ms: int, *, suspend: bool = False
    ) -> Handle:
        header = ChangeInvisibleTimeRequest(
            consumer_group=group,
            topic=handle.topic_of(topic, group),
            queue_id=handle.pop.queue_id,
            extra_info=handle.extra_info,
            offset=handle.offset,
            invisible_time=invisible_ms,
            suspend=suspend or None,
            lite_topic=handle.lite_topic or None,
        )
        answer = await peer.ask(handle.pop.broker_name, request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header))
        _expect(answer, "change invisible time failed")
        renewed = decode_header(answer, ChangeInvisibleTimeResponse)
        if handle.lite_topic and not renewed.pop_time:
            return handle  # the message was acked or redelivered meanwhile
        pop = structs.replace(
            handle.pop,
            check_point_offset=handle.offset,
            pop_time=renewed.pop_time,
            invisible_time=renewed.invisible_time,
            revive_queue_id=renewed.revive_qid,
        )
        return replace(handle, pop=pop)

    # -- ForwardMessageToDeadLetterQueue

    async def forward(self, client: Client, asked: Any) -> Any:
        topic, group = check_topic(asked.topic.name), check_group(asked.group.name)
        handle = await self._known(asked.receipt_handle, asked.lite_topic)
        if handle.physical_offset < 0:
            raise Refused(Code.INVALID_RECEIPT_HANDLE, "commit log offset is empty")
        handle = await self.renewals.take(client.id, group, asked.message_id, handle)
        assert client.peer is not None, "the client of a call has a peer"
        await self._give_up(client.peer, group, topic, handle)
        return _ForwardResponse(status=status(Code.OK, "0"))

    async def _give_up(self, peer: Peer, group: str, topic: str, handle: Handle) -> None:
        """Move a message to the group's dead letters, and ack it."""
        # Clients can invent handles. Without this check a client could move any message of the log to the dead letters
        # of its own group, even from a topic that it must not read.
        record = await self._backend.message_at(handle.pop.broker_name, handle.physical_offset)
        if record is None or not _is_of(handle, record, handle.topic_of(topic, group)):
            raise Refused(Code.INVALID_RECEIPT_HANDLE, "the handle names a place in the log of another message")
        header = ConsumerSendBackRequest(
            offset=handle.physical_offset,
            group=group,
            delay_level=-1,
            origin_topic=topic,
            max_reconsume_times=0,
        )
        answer = await peer.ask(handle.pop.broker_name, request(RequestCode.CONSUMER_SEND_MSG_BACK, header))
        _expect(answer, "the message is not put to the dead letters")
        await self._ack(peer, group, topic, handle)

    # -- inside

    async def _known(self, text: str, lite_topic: str) -> Handle:
        """Return the handle of a request. ``lite_topic``: from the request; handles of this endpoint contain it, too.
        Raises Refused: the handle is not valid."""
        handle = read_handle(text)
        if lite_topic and handle.lite_topic not in ("", lite_topic):
            text = f"the message of the handle is in lite topic {handle.lite_topic}, not in {lite_topic}"
            raise Refused(Code.INVALID_RECEIPT_HANDLE, text)
        if lite_topic and not handle.lite_topic:  # a handle of Apache's proxy
            handle = replace(handle, lite_topic=check_lite_topic(lite_topic))
        if not await self._backend.has_broker(handle.pop.broker_name):
            raise Refused(Code.INVALID_RECEIPT_HANDLE, f"cannot find broker {handle.pop.broker_name}")
        return handle

    def _check_live(self, handle: Handle) -> None:
        if handle.expires_ms <= self._handle_clock.now_ms():
            raise Refused(Code.INVALID_RECEIPT_HANDLE, "receipt handle is expired")


def no_route(topic: str) -> str:
    """Return the text of a refusal for a topic without a route. Test suites of SDKs expect this text."""
    return (
        f"CODE: 17  DESC: No topic route info in name server for the topic: {topic}\n"
        "For more information, please visit the url, https://rocketmq.apache.org/docs/bestPractice/06FAQ"
    )


def _tags_of(wanted: _Receive) -> SubscriptionData | None:
    """Return the wanted tags, or None for all messages. They are checked here, because brokers compare only hashes."""
    if wanted.filter_type != _TAGS or wanted.filter_text == "*":
        return None
    return subscription(wanted.topic, wanted.filter_text)


def read_ack(content: bytes) -> GrpcAck | None:
    """Return the ack of an AckMessage with one entry, as `Core.read_grpc_ack` does; None for other requests.
    Raises Refused or DecodeError."""
    asked = _AckRequest.FromString(content)
    if len(asked.entries) != 1:
        return None
    (entry,), topic, group = asked.entries, asked.topic.name, asked.group.name
    pop, text = (handle := read_handle(entry.receipt_handle)).pop, entry.receipt_handle
    if handle.lite_topic or entry.lite_topic:
        return None
    numbers = pop.queue_id, handle.offset, pop.check_point_offset, pop.pop_time, pop.invisible_time, pop.revive_queue_id
    # A broker packs these numbers into check points.
    if min(numbers) < 0 or max(numbers) > _INT64_MAX:
        return None
    return topic, group, entry.message_id, text, pop.retry, pop.broker_name, *numbers


def _popped(wanted: _Receive, answer: Command) -> list[Popped]:
    """Return the messages of a pop's answer with their handles."""
    records = list(records_of(answer.payload))
    if wanted.is_lite:
        return lite_handles_of(records, decode_header(answer, PopLiteMessageResponse), wanted.topic, wanted.broker)
    return handles_of(records, decode_header(answer, PopMessageResponse), wanted.broker)


def _is_of(handle: Handle, record: Record, topic: str) -> bool:
    """Return True if a record is the message of a handle. ``topic``: the topic from which the message was popped."""
    if record.topic != topic:
        return False
    if not handle.lite_topic:
        return (record.queue_id, record.queue_offset) == (handle.pop.queue_id, handle.offset)
    properties = decode_properties(record.properties)
    lite_topic = properties.get(property_names.LITE_TOPIC)
    return (lite_topic, lite_offset(topic, properties)) == (handle.lite_topic, handle.offset)


def _invisible_ms(asked: Any) -> int:
    invisible_ms = duration_ms(asked.invisible_duration, Code.ILLEGAL_INVISIBLE_TIME)
    if invisible_ms < _INVISIBLE_MS_MIN:
        raise Refused(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too small. min is {_INVISIBLE_MS_MIN}")
    if invisible_ms > INVISIBLE_MS_MAX:
        raise Refused(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too large. max is {INVISIBLE_MS_MAX}")
    return invisible_ms


def _ack_request(group: str, topic: str, handle: Handle) -> Command:
    header = AckMessageRequest(
        consumer_group=group,
        topic=handle.topic_of(topic, group),
        queue_id=handle.pop.queue_id,
        extra_info=handle.extra_info,
        offset=handle.offset,
        lite_topic=handle.lite_topic or None,
    )
    return request(RequestCode.ACK_MESSAGE, header)


def _acked(message_id: str, text: str, came: Command) -> tuple[Code, bytes]:
    """Return the code and the encoded answer to an ack of one message."""
    if came.code == ResponseCode.SUCCESS:
        return Code.OK, acked_answer(message_id, text)
    refused = refusal_of(_not_acked(came))
    entry = _AckEntry(message_id=message_id, receipt_handle=text, status=status(refused.code, refused.text))
    return refused.code, _AckResponse(status=status(refused.code), entries=[entry]).SerializeToString()


def _not_acked(answer: Command) -> RmqError:
    """Return the error for a broker's refusal of an ack."""
    text = "ack failed: status is abnormal"
    if answer.code == ResponseCode.NO_MESSAGE:
        return Refused(Code.INTERNAL_SERVER_ERROR, text)
    return PeerRefused(answer.code, answer.remark or text, "the broker")


def _expect(answer: Command, otherwise: str) -> None:
    if answer.code != ResponseCode.SUCCESS:
        raise PeerRefused(answer.code, answer.remark or otherwise, "the broker")


async def _messages(popped: Sequence[Popped], topic: str) -> list[Any]:
    """Return the messages for delivery."""
    # Decompress in a thread, because a few KiB may become many MiB, which would block the event loop.
    if any(one.record.sys_flag & COMPRESSED for one in popped):
        return await asyncio.to_thread(_delivered, popped, topic)
    return _delivered(popped, topic)


def _delivered(popped: Sequence[Popped], topic: str) -> list[Any]:
    left, messages = _ANSWER_BYTES_MAX, []
    for one in popped:
        message = message_of(
            one.record,
            one.properties,
            topic,
            handle=one.handle.text,
            deliveries=one.deliveries,
            body_bytes_max=min(left, DELIVERED_BYTES_MAX),
            queue_offset=one.handle.offset if one.handle.lite_topic else None,
        )
        left = max(0, left - len(message.body))
        messages.append(message)
    return messages
