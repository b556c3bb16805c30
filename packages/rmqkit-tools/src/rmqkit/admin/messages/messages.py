"""Messages: find them by id, key or place; send them, send them again, push them to a consumer.

Java's commands are ``queryMsgById``, ``queryMsgByKey``, ``queryMsgByUniqueKey``, ``queryMsgByOffset``, ``sendMessage``,
``queryCq``. `traces_of` returns the traces of a message (``queryMsgTraceById``). `rmqkit.admin.pulls` finds messages by
time.

An id of 32 or 56 hexadecimal digits may be an *offset message id*, with a broker and a place in the broker's log, or a
*unique key*, which is in the index of a topic. Any other text can only be a unique key. `Messages.find` tries all
possible kinds. Source: behaviour.md §8.16, §9.7, §9.9; remoting.md §4.3.6, §4.4, §7.4.
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Mapping
from operator import attrgetter

from msgspec import Struct

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.cluster.brokers import STORED
from rmqkit.admin.cluster.clients import Clients, tried
from rmqkit.admin.pulls import readers
from rmqkit.errors import BodyError, ClientError, PeerRefused, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.ids import UniqueKeys, decode_offset_id
from rmqkit.protocol.message import Message, ReceivedMessage, copied, read_messages
from rmqkit.protocol.names import AUTO_CREATE_TOPIC, HALF_TOPIC, TRACE_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, is_light
from rmqkit.protocol.properties import INNER_MULTI_DISPATCH
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.clients import ConsumeDirectlyRequest, ConsumeMessageDirectlyResult, MessageQueue
from rmqkit.protocol.schemas.pull import QueryConsumeQueueBody, QueryConsumeQueueRequest, QueryMessageRequest
from rmqkit.protocol.schemas.send import (
    RecallMessageRequest,
    ResumeCheckRequest,
    SendMessageResponse,
    SendMessageV2Request,
)
from rmqkit.protocol.trace import (
    ConsumeReturn,
    EndTransactionTrace,
    PublishTrace,
    SubscribeAfterTrace,
    SubscribeBeforeTrace,
    Trace,
    decode_traces,
)
from rmqkit.remoting.address import join_address, split_address
from rmqkit.remoting.client import expect_success
from rmqkit.sentences import _, joined

__all__ = ["Messages", "Sent", "TraceRow", "traces_of"]

_FOREVER_MS = (1 << 63) - 1
_UNIQUE_KEY_COUNT = 32
_PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"
_RELAY_TIMEOUT_MS = 15_000.0


class Sent(Struct, rename="camel", kw_only=True):
    """The place where a message was stored. ``send_result`` is ``SEND_OK`` or a lower level of durability."""

    broker_name: str
    queue_id: int
    send_result: str
    msg_id: str
    offset_msg_id: str
    queue_offset: int


class Messages:
    """Operations on messages. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls
        self._keys: UniqueKeys | None = None

    # -- looking up

    async def find(self, msg_id: str, topic: str = "", kind: str = "") -> ReceivedMessage:
        """Return a message by its id. With ``kind`` = ``offset`` or ``key``, the id is tried only as this kind.
        Raises UnknownName: there is no such message. The text of the error names the tried kinds.
        Raises SettingsError: the id is the offset message id of one message and the unique key of another."""
        found: dict[str, ReceivedMessage] = {}
        misses: list[str] = []
        if kind != "key":
            at = await self._named_place(msg_id, misses)
            if at is not None:
                found[f"the offset message id of a message in topic {at.topic}"] = at
        if topic and kind != "offset":
            same = await self.by_key(topic, msg_id, is_unique=True)
            if same and same[0].offset_msg_id not in [one.offset_msg_id for one in found.values()]:
                found[f"the unique key of one in topic {topic}"] = same[0]
            if not found:
                misses.append(await self._miss_as_key(topic, msg_id))
        elif kind != "offset":
            misses.append(_("as a unique key it needs its topic: give it with -t"))
        if len(found) > 1:
            one, other = found
            text = _(
                "id {id} is {one} and {other}: say which with --kind offset or --kind key",
                id=msg_id,
                one=one,
                other=other,
            )
            raise SettingsError(text)
        if not found:
            raise UnknownName("message", msg_id, _("the cluster"), remedy=joined("; ", misses))
        return next(iter(found.values()))

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        count_max: int = 64,
        is_unique: bool = False,
        with_unique: bool = False,
        brokers: Mapping[str, str] | None = None,
    ) -> list[ReceivedMessage]:
        """Return the messages with a key, in store order. ``is_unique``: compare unique keys. ``with_unique``: compare
        keys and unique keys. ``brokers`` (addresses by name) replaces the brokers of the topic's route. The error of a
        broker is raised only if no other broker has a message. Raises UnknownName: there is no such topic."""
        asked = await readers(self._calls, topic) if brokers is None else brokers
        header = QueryMessageRequest(
            topic=topic,
            key=key,
            max_num=_UNIQUE_KEY_COUNT if is_unique else count_max,
            begin_timestamp=begin_ms,
            end_timestamp=_FOREVER_MS if end_ms is None else end_ms,
            is_unique_key=is_unique or None,
        )

        async def query(address: str) -> bytes:
            answer = await self._calls.call(address, request(RequestCode.QUERY_MESSAGE, header))
            return b"" if answer.code == ResponseCode.QUERY_NOT_FOUND else expect_success(answer, address).payload

        answers, failures = await tried(asked.values(), query)
        several = [one for name, at in asked.items() for one in read_messages(answers.get(at, b""), name)]
        # Brokers compare only hashes of keys, and two keys may have the same hash.
        wanted = [
            one
            for one in several
            if one.topic == topic
            and ((key in one.keys and not is_unique) or (key == one.msg_id and (is_unique or with_unique)))
        ]
        if failures and not wanted:
            raise failures[0]
        places = {(one.broker_name, one.queue_id, one.queue_offset): one for one in wanted}
        return sorted(places.values(), key=attrgetter("store_timestamp", "physical_offset"))[:count_max]

    async def at(self, topic: str, broker: str, queue_id: int, offset: int) -> ReceivedMessage:
        """Return the message at an offset of a queue, even if the topic has no permission to read. ``topic`` may be the
        name of a light queue, whose queue id is 0.
        Raises UnknownName: the queue has no such offset."""
        address = await self._calls.address(broker)
        header = QueryConsumeQueueRequest(topic=topic, queue_id=queue_id, index=offset, count=1)
        answer = await self._calls.call(address, request(RequestCode.QUERY_CONSUME_QUEUE, header))
        body = answer.payload if answer.code == ResponseCode.SUCCESS else b""
        for entry in decode_as(body, QueryConsumeQueueBody).queue_data or () if body else ():
            for message in await self.at_place(address, entry.physic_offset):
                # A record has its offset in the queue of its topic, not its offsets in light queues.
                light = message.properties.get(INNER_MULTI_DISPATCH, "").split(",") if is_light(topic) else ()
                if topic in light or message.queue_offset == offset:
                    message.broker_name = broker
                    return message
        queue = MessageQueue(topic, broker, queue_id)
        low, high = [await ask(address, queue) for ask in (self._calls.min_offset, self._calls.max_offset)]
        has = _("it has {low} to {high}", low=low, high=high - 1) if high > low else _("it has no messages")
        raise UnknownName(
            _("message at offset"),
            str(offset),
            _("queue {queue} of {topic} on {broker}", queue=queue_id, topic=topic, broker=broker),
            remedy=has,
        )

    async def at_place(self, address: str, physical_offset: int) -> list[ReceivedMessage]:
        """Return the message at an offset of a broker's log, or all messages of a batch. The list is empty if no
        message begins at this offset."""
        try:
            body = await self._calls.view_message(address, "", physical_offset)
            return read_messages(body)
        except PeerRefused as error:
            if error.code != ResponseCode.SYSTEM_ERROR:
                raise
        except BodyError:  # Apache's brokers return the bytes at the offset, even if they are not a record
            pass
        return []

    async def entries(
        self, topic: str, queue_id: int, index: int, count: int = 10, *, broker: str | None = None, group: str = ""
    ) -> QueryConsumeQueueBody:
        """Return entries of a consume queue from an offset, with the verdict of a group's filter. An empty queue has no
        entries.
        Raises SettingsError: several brokers have the topic, and ``broker`` is not given.
        Raises PeerRefused: there is no such queue. Raises UnknownName: the queue has no such offset."""
        brokers = await self._calls.masters_of_topic(topic)
        if broker is None and len(brokers) > 1:
            raise SettingsError(
                _(
                    "on which broker? topic {topic} is on several, name one with -b: {brokers}",
                    topic=topic,
                    brokers=", ".join(brokers),
                )
            )
        address = next(iter(brokers.values())) if broker is None else await self._calls.address(broker)
        header = QueryConsumeQueueRequest(
            topic=topic, queue_id=queue_id, index=index, count=count, consumer_group=group or None
        )
        answer = await self._calls.call(address, request(RequestCode.QUERY_CONSUME_QUEUE, header))
        if not answer.payload and (low := await self._place_if_empty(address, topic, queue_id)) is not None:
            return QueryConsumeQueueBody(min_queue_index=low, max_queue_index=low)
        if not expect_success(answer, address).payload:
            raise UnknownName("entry", str(index), address, remedy=answer.remark or _("the queue ends before it"))
        return decode_as(answer.payload, QueryConsumeQueueBody)

    async def _place_if_empty(self, address: str, topic: str, queue_id: int) -> int | None:
        """Return the offset of the next message of an empty queue; None if the queue has messages, or does not exist.
        The route shows if a queue exists, because a broker does not know a queue before its first message."""
        known = (await self._calls.route(topic)).queue_datas
        if not any(0 <= queue_id < max(one.read_queue_nums, one.write_queue_nums) for one in known):
            return None
        queue, calls = MessageQueue(topic, "", queue_id), self._calls
        low, high = await calls.min_offset(address, queue), await calls.max_offset(address, queue)
        return low if low >= high else None

    # -- changing

    async def push(self, message: ReceivedMessage, group: str, client_id: str) -> ConsumeMessageDirectlyResult:
        """Make a client of a group handle a message now. Raises UnknownName: the client is not in the group."""
        members = [one.client_id for one in (await Clients(self._calls).consumers(group)).connection_set]
        if client_id not in members:
            raise UnknownName("client", client_id or _("without an id"), _("group {group}", group=group), members)
        header = ConsumeDirectlyRequest(
            consumer_group=group, client_id=client_id, msg_id=message.offset_msg_id, topic=message.topic
        )
        code = RequestCode.CONSUME_MESSAGE_DIRECTLY
        answer = await self._calls.ask(await self._home(message), code, header, timeout_ms=_RELAY_TIMEOUT_MS)
        return decode_as(answer.payload, ConsumeMessageDirectlyResult)

    async def send(self, message: Message, *, broker: str | None = None, queue_id: int | None = None) -> Sent:
        """Send a message to any queue, or to a certain broker or queue.
        Raises UnknownName: there is no such topic. Raises ClientError: the topic has no such writable queue."""
        from rmqkit.client.producer.encode import encode_message
        from rmqkit.client.runtime.routes import publish_queues
        from rmqkit.client.runtime.settings import ProducerSettings

        queues = [
            queue
            for queue in publish_queues(message.topic, await self._calls.route(message.topic))
            if broker in (None, queue.broker_name) and queue_id in (None, queue.queue_id)
        ]
        if not queues:
            wanted = "queue" if queue_id is None else _("queue {id}", id=queue_id)
            if broker:
                wanted = _("{queue} on {broker}", queue=wanted, broker=broker)
            look = _("see its queues: rmq topic route {topic}", topic=shlex.quote(message.topic))
            raise ClientError(
                _("topic {topic} has no {wanted} to send to; {look}", topic=message.topic, wanted=wanted, look=look)
            )
        queue = random.choice(queues)
        prepared = encode_message(message, message.msg_id or self._next_key(), ProducerSettings())
        header = SendMessageV2Request(
            producer_group=_PRODUCER_GROUP,
            topic=message.topic,
            default_topic=AUTO_CREATE_TOPIC,
            default_topic_queue_nums=4,
            queue_id=queue.queue_id,
            sys_flag=prepared.sys_flag,
            born_timestamp=self._calls.clock.now_ms(),
            flag=prepared.flag,
            properties=prepared.properties,
        )
        address = await self._calls.address(queue.broker_name)
        answer = await self._calls.call(address, request(RequestCode.SEND_MESSAGE_V2, header, prepared.body))
        if answer.code not in STORED:
            raise PeerRefused(answer.code, answer.remark, address)
        stored = decode_header(answer, SendMessageResponse)
        return Sent(
            broker_name=queue.broker_name,
            queue_id=stored.queue_id,
            send_result=STORED[answer.code],
            msg_id=prepared.msg_id,
            offset_msg_id=stored.msg_id,
            queue_offset=stored.queue_offset,
        )

    async def resend(self, message: ReceivedMessage) -> Sent:
        """Send a stored message to its topic again. Consumers can detect the duplicate by its unique key."""
        return await self.send(Message(topic=message.topic, msg_id=message.msg_id, **copied(message)))

    @property
    def now_ms(self) -> int:
        """The current time in ms."""
        return self._calls.clock.now_ms()

    async def may_recall(self, broker: str) -> bool:
        """Return True if a broker allows recalls. Apache's brokers have the setting since 5.4."""
        code = RequestCode.GET_BROKER_CONFIG
        config = await self._calls.fetch_properties(await self._calls.address(broker), code)
        return config.get("recallMessageEnable") == "true"

    async def recall(self, topic: str, broker: str, handle: str) -> str:
        """Recall a timed message by its handle, and return its unique key.
        Raises PeerRefused: the broker does not have ``recallMessageEnable=true``, or the message is due."""
        header = RecallMessageRequest(producer_group=_PRODUCER_GROUP, topic=topic, recall_handle=handle, bname=broker)
        return await self._calls.recall(await self._calls.address(broker), header)

    async def resume(self, msg_id: str) -> ReceivedMessage:
        """Make the broker check back a half message that it has given up.

        ``msg_id`` is an offset message id or a unique key. Raises UnknownName: there is no such half message.
        """
        brokers = await self._calls.masters()
        copies = [
            message  # each check-back stores another copy of the half message
            for topic in (HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC)
            for message in await self.by_key(topic, msg_id, is_unique=True, brokers=brokers)
        ]
        found = copies[-1] if copies else await self.find(msg_id, kind="offset")
        header = ResumeCheckRequest(topic=found.topic, msg_id=found.offset_msg_id)
        await self._calls.ask(await self._home(found), RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
        return found

    # -- inside

    async def _named_place(self, msg_id: str, misses: list[str]) -> ReceivedMessage | None:
        """Return the message with an offset message id, or add the reason for a failure to ``misses``."""
        try:
            ip, port, physical_offset = decode_offset_id(msg_id)
        except ValueError:
            misses.append(_("it is not an offset message id, which has 32 or 56 hexadecimal digits"))
            return None
        if not 0 < port < 1 << 16:
            misses.append(_("it is not an offset message id, its port would be {port}", port=port))
            return None
        address = join_address(ip, port)
        known = {
            one
            for data in (await self._calls.cluster()).broker_addr_table.values()
            for one in data.broker_addrs.values()
        }
        if address not in known:
            misses.append(
                _("as an offset message id it is of {address}, which no broker of the cluster has", address=address)
            )
            return None
        for message in await self.at_place(address, physical_offset) if physical_offset >= 0 else ():
            if message.offset_msg_id == msg_id.upper():
                (message.broker_name,) = await self._calls.masters(broker=address)
                return message
        misses.append(
            _(
                "as an offset message id it is of {address}, which has no message at {offset}",
                address=address,
                offset=physical_offset,
            )
        )
        return None

    async def _miss_as_key(self, topic: str, msg_id: str) -> str:
        """Return the error text for an id that is not a unique key in a topic."""
        count = len(await self.by_key(topic, msg_id))
        if count:
            return _(
                "as a key topic {topic} has it {count} times: rmq message by-key {topic} {id}",
                topic=shlex.quote(topic),
                count=count,
                id=shlex.quote(msg_id),
            )
        return _("topic {topic} has no message with that unique key or key", topic=topic)

    async def _home(self, message: ReceivedMessage) -> str:
        """Return the address of the master that has a message. Another broker may have stored it before a fail-over."""
        return (await self._calls.masters()).get(message.broker_name or "", message.store_host)

    def _next_key(self) -> str:
        if self._keys is None:
            host = pack_host("127.0.0.1", 0)[:4]
            self._keys = UniqueKeys(host, os.getpid(), random.getrandbits(32))
        return self._keys.next(self._calls.clock.now_ms())


class TraceRow(Struct, rename="camel", kw_only=True):
    """One traced action on a message. The two traces of a handler's start and end are one row, ``Sub``."""

    kind: str
    group: str
    client_host: str
    timestamp: int
    cost_ms: int | None = None
    status: str = ""
    retry_times: int | None = None


async def traces_of(messages: Messages, msg_id: str, trace_topic: str = TRACE_TOPIC) -> list[TraceRow]:
    """Return the traces of a message by its unique key, in order of time.
    Raises UnknownName: there is no trace of the message, or no trace topic."""
    try:
        written = await messages.by_key(trace_topic, msg_id)
    except UnknownName as error:
        raise UnknownName("topic", trace_topic, error.asked, remedy=_("no client has traced anything yet")) from None
    records = [
        (message, trace)  # the traces of a handler's start and end may be in two messages
        for message in written
        for trace in _readable(message)
        if trace.msg_id == msg_id
    ]
    ends = {trace.request_id: trace for __, trace in records if isinstance(trace, SubscribeAfterTrace)}
    begun = {trace.request_id for __, trace in records if isinstance(trace, SubscribeBeforeTrace)}
    rows = [
        _row(message, trace, ends.get(trace.request_id) if isinstance(trace, SubscribeBeforeTrace) else trace)
        for message, trace in records
        if not (isinstance(trace, SubscribeAfterTrace) and trace.request_id in begun)
    ]
    if not rows:
        remedy = _("clients send traces with the setting trace, some seconds later")
        raise UnknownName(_("trace of message"), msg_id, _("topic {topic}", topic=trace_topic), remedy=remedy)
    return sorted(rows, key=lambda row: row.timestamp)


def _readable(message: ReceivedMessage) -> list[Trace]:
    """Return the traces in a message of the trace topic. The list is empty if the message cannot be decoded."""
    try:
        return decode_traces(message.body)
    except BodyError:
        return []


def _row(message: ReceivedMessage, begin: Trace, end: Trace | None) -> TraceRow:
    row = TraceRow(
        kind=str(begin.__struct_config__.tag).removesuffix("Before").removesuffix("After"),
        group=begin.group or "",
        client_host=split_address(message.born_host)[0],
        timestamp=begin.timestamp or message.born_timestamp,
        retry_times=begin.retry_times if isinstance(begin, SubscribeBeforeTrace) else None,
    )
    match end:
        case None:
            row.status = _("under way")
        case SubscribeAfterTrace():
            names = {int(code): code.name.lower().replace("_", " ") for code in ConsumeReturn}
            row.cost_ms, row.status = end.cost_ms, names.get(end.context_code, str(end.context_code))
        case EndTransactionTrace():
            row.status = end.state or ""
        case PublishTrace():
            row.cost_ms, row.client_host = end.cost_ms, end.client_host or row.client_host
            row.status = "success" if end.success else "failed"
        case _:
            row.status = "success" if getattr(end, "success", False) else "failed"
    return row
