"""SendMessage, RecallMessage, EndTransaction and check-backs (``SendMessageActivity``, ``EndTransactionActivity``).

All messages of a call are sent to one queue. A hash of the message group or the lite topic selects the queue, the same
queue in all proxies. Messages without a group are sent to the next queue. Only the messages of several lite topics may
have different queues of one broker; they are sent in one request for each lite topic.

A broker ends a transaction by the log offset of its half message, but SDKs send only the transaction id. Therefore the
endpoint stores the offsets by transaction id until the transaction has ended, and a minute longer for repeated
requests. Source: grpc.md §5.4, §5.11, §5.13, §6.1, §9.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.core import CORE
from rmqkit.errors import HeaderError, PeerRefused, RmqError
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, encode_command, request
from rmqkit.protocol.compression import Compression
from rmqkit.protocol.core import GrpcSendsReader
from rmqkit.protocol.ids import decode_offset_id, decode_recall_handle
from rmqkit.protocol.names import AUTO_CREATE_TOPIC
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties
from rmqkit.protocol.record import (
    COMPRESSED,
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    BatchEntry,
    decode_record,
    encode_batch,
)
from rmqkit.protocol.schemas.send import (
    CheckTransactionRequest,
    EndTransactionRequest,
    RecallMessageRequest,
    RecallMessageResponse,
    SendMessageResponse,
    SendMessageV2Request,
)
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.proxy.backend import Backend, BrokerQueues, Route
from rmqkit.proxy.schema.checks import BODY_BYTES_MAX, REFUSED, check_messages, check_sent, check_topic, timestamp_ms
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.records import (
    TRACE_CONTEXT,
    TRANSACTION_TYPE,
    jump_hash,
    message_of,
    properties_of,
    type_of,
    zlib_of,
)
from rmqkit.proxy.schema.status import OK, Code, Refused, code_of_broker, refusal_of, sent_answer, status
from rmqkit.proxy.service.clients import AnswerWith, Call, Client
from rmqkit.proxy.service.receiving import no_route
from rmqkit.remoting.address import join_address

__all__ = ["Sending"]

_GZIP = 2
_WRITE = int(Permission.WRITE)  # combining enum flags takes microseconds
_DEFAULT_QUEUE_COUNT = 4
_COMMIT, _ROLLBACK = 1, 2
_SERVER_CHECK = 2
_TRANSACTIONS_MAX = 100_000
_OPEN_MS_MAX, _ENDED_MS_MAX = 2 * 3_600_000.0, 60_000.0
"""Times to store an open half message, whose check-back may be delayed by an hour, and an ended half message."""
_RESERVED_BYTES = 256
"""Bytes that a broker may add to a property string: region, cluster, trace."""

_SendRequest = message_class("SendMessageRequest")
_SendResponse = message_class("SendMessageResponse")
_SendEntry = message_class("SendResultEntry")
_RecallResponse = message_class("RecallMessageResponse")
_EndResponse = message_class("EndTransactionResponse")
_TelemetryCommand = message_class("TelemetryCommand")

# The message was stored, but not as durably as requested.
_UNSAFE = {
    ResponseCode.FLUSH_DISK_TIMEOUT: (Code.MASTER_PERSISTENCE_TIMEOUT, "FLUSH_DISK_TIMEOUT"),
    ResponseCode.FLUSH_SLAVE_TIMEOUT: (Code.SLAVE_PERSISTENCE_TIMEOUT, "FLUSH_SLAVE_TIMEOUT"),
    ResponseCode.SLAVE_NOT_AVAILABLE: (Code.HA_NOT_AVAILABLE, "SLAVE_NOT_AVAILABLE"),
}


class _Stored(Struct, rename={"queue_offset": "queueOffset"}):
    """The queue offset in a broker's answer to a send."""

    queue_offset: int


@dataclass(slots=True)
class _Half:
    """A half message. ``users``: the users who have the right to end the transaction: its sender, and the users who
    received check-backs.
    ``ended``: the resolution, or None. ``since_ms``: monotonic time when the half message was stored here."""

    broker: str
    queue_offset: int
    physical_offset: int
    users: frozenset[str | None]
    ended: int | None = None
    since_ms: float = 0.0


_Halves = OrderedDict[tuple[str, str], _Half]
"""Half messages by topic and transaction id, oldest first."""


class Sending:
    """Sends, recalls and transactions."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._turn = random.randrange(1 << 16)
        self._halves: _Halves = OrderedDict()
        self._ended: _Halves = OrderedDict()
        self._plain = None if backend.at_once is None else plain_sends()

    # -- SendMessage

    def send_at_once(self, call: Call, client: Client, content: bytes, answer: AnswerWith) -> bool:
        """Handle a plain send. Return False for other sends, which `send` must handle. Raises Refused."""
        backend = self._backend.at_once
        assert backend is not None, "the broker is in this process"
        if self._plain is None or (plain := self._plain.read(content, join_address(*call.peername))) is None:
            return False
        topic, message_id, group, properties, body, born_ms = plain
        route = backend.route_at_once(check_topic(topic))
        if route is None:
            return False
        check_sent(route.message_type, "FIFO" if group else "NORMAL", topic)
        queues, queue_id = self._queue(route, group)
        assert client.peer is not None, "the client of a call has a peer"
        name = topic.encode()
        before, behind = _PLAIN_HEADER
        values = name, name, queue_id, born_ms, _encode_json(properties), _encode_json(queues.name)

        def sent(response: Command) -> tuple[Code, bytes]:
            if response.code == ResponseCode.SUCCESS:
                return Code.OK, sent_answer(message_id, decode_header(response, _Stored).queue_offset)
            found = self._sent(topic, [message_id], "NORMAL", queues.name, response, client.user)
            return Code(found.status.code), found.SerializeToString()

        backend.gather_send(client.peer, (before % values, behind), body, answer(sent))
        return True

    async def send(self, call: Call, client: Client, asked: Any) -> Any:
        messages = asked.messages
        topic = check_messages(messages, self._clock.now_ms())
        born_host = join_address(*call.peername)
        properties = [properties_of(message, born_host) for message in messages]
        kinds = [type_of(one) for one in properties]
        if len(messages) > 1 and any(kind in ("DELAY", "TRANSACTION", "PRIORITY") for kind in kinds):
            # In a batch these messages would block the reference's timer for ever.
            raise Refused(Code.BAD_REQUEST, "delayed, transactional and prioritised messages are sent one by one")
        if messages[0].system_properties.message_type == TRANSACTION_TYPE and messages[0].system_properties.HasField(
            "delivery_timestamp"
        ):
            text = "TopicMessageType validate failed, a transactional message has no delivery time"
            raise Refused(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, text)
        route = await self._backend.route(topic)
        for kind in kinds if "LITE" in kinds else kinds[:1]:
            check_sent("UNSPECIFIED" if route is None else route.message_type, kind, topic)
        if route is None:
            raise Refused(Code.TOPIC_NOT_FOUND, no_route(topic))
        lite_topics = {message.system_properties.lite_topic for message in messages}
        if len(lite_topics) > 1:
            return await self._send_mixed(call, client, route, messages)
        group = messages[0].system_properties.message_group if len(messages) == 1 else ""
        queues, queue_id = self._queue(route, group or lite_topics.pop())
        encoded = [encode_properties(one) for one in properties]
        if max(map(len, encoded)) > PROPERTIES_BYTES_MAX - _RESERVED_BYTES:
            text = f"the message's properties have {max(map(len, encoded))} bytes: {PROPERTIES_BYTES_MAX} are stored"
            raise Refused(Code.MESSAGE_PROPERTIES_TOO_LARGE, text)
        born_ms = timestamp_ms(messages[0].system_properties.born_timestamp, Code.BAD_REQUEST)
        if kinds[0] == "TRANSACTION":
            # Brokers discard old half messages. The reference stores 0, which is the year 1970.
            born_ms = born_ms or self._clock.now_ms()
        bodies, sys_flag = await _bodies(messages)
        if kinds[0] == "TRANSACTION":
            sys_flag |= TRANSACTION_PREPARED
        command = _command(bodies, topic, queue_id, encoded, sys_flag, queues.name, born_ms)
        assert client.peer is not None, "the client of a call has a peer"
        answer = await client.peer.ask(queues.name, command)
        ids = [message.system_properties.message_id for message in messages]
        return self._sent(topic, ids, kinds[0], queues.name, answer, client.user)

    async def _send_mixed(self, call: Call, client: Client, route: Route, messages: Any) -> Any:
        """Send the messages of several lite topics, which must have their queues at one broker. Raises Refused, before
        any message is sent."""
        by_lite: dict[str, list[int]] = {}
        for number, message in enumerate(messages):
            by_lite.setdefault(message.system_properties.lite_topic, []).append(number)
        if "" in by_lite or len({self._queue(route, lite_topic)[0].name for lite_topic in by_lite}) > 1:
            text = "the messages of one call are in lite topics of several brokers: send them in separate calls"
            raise Refused(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, text)
        entries = [_SendEntry() for _ in messages]
        for numbers in by_lite.values():
            part = _SendRequest(messages=[messages[number] for number in numbers])
            try:
                answer = await self.send(call, client, part)
            except RmqError as error:
                refused = refusal_of(error)
                failed = status(refused.code, refused.text)
                answer = _SendResponse(status=failed, entries=[_SendEntry(status=failed) for _ in numbers])
            for number, entry in zip(numbers, answer.entries, strict=True):
                entries[number].CopyFrom(entry)
        codes = {entry.status.code for entry in entries}
        overall = entries[0].status if len(codes) == 1 else status(Code.MULTIPLE_RESULTS)
        return _SendResponse(status=overall, entries=entries)

    def _queue(self, route: Route, group: str) -> tuple[BrokerQueues, int]:
        """Return the queue of a message group or a lite topic, or the next queue."""
        writable = [one for one in route.brokers if one.broker_id == 0 and one.permission & _WRITE]
        # All proxies use the same order, because the queue of a message group is an index into all queues.
        if len(writable) > 1:
            writable.sort(key=lambda queues: queues.name)
        count = sum([one.write_queue_count for one in writable])
        if count <= 0:
            raise Refused(Code.FORBIDDEN, "no writable queue")
        if group:
            number = jump_hash(group, count)
        else:
            self._turn += 1
            number = self._turn % count
        for one in writable:
            if number < one.write_queue_count:
                return one, number
            number -= one.write_queue_count
        raise AssertionError("a number below the total number of queues is the index of a queue")

    def _sent(self, topic: str, ids: list[str], kind: str, broker: str, answer: Command, user: str | None) -> Any:
        """Return the answer to a send, with an entry for each message."""
        if answer.code in _UNSAFE:
            code, name = _UNSAFE[ResponseCode(answer.code)]
            failed = status(code, f"send message failed, sendStatus={name}")
            return _SendResponse(status=failed, entries=[_SendEntry(status=failed) for _ in ids])
        if answer.code != ResponseCode.SUCCESS:
            raise Refused(code_of_broker(answer.code), answer.remark or f"code {answer.code}")
        header = decode_header(answer, SendMessageResponse)
        if kind == "TRANSACTION":
            place = decode_offset_id(header.msg_id)[2]
            self._keep(self._halves, (topic, ids[0]), _Half(broker, header.queue_offset, place, frozenset([user])))
        entries = [
            _SendEntry(
                status=OK,
                message_id=one,
                transaction_id=one,
                offset=header.queue_offset + number,
                recall_handle=header.recall_handle or "",
            )
            for number, one in enumerate(ids)
        ]
        return _SendResponse(status=OK, entries=entries)

    # -- RecallMessage

    async def recall(self, client: Client, asked: Any) -> Any:
        topic = check_topic(asked.topic.name)
        route = await self._backend.route(topic)
        check_sent("UNSPECIFIED" if route is None else route.message_type, "DELAY", topic)
        try:
            handle = decode_recall_handle(asked.recall_handle)
        except HeaderError:
            raise Refused(Code.BAD_REQUEST, "recall handle is invalid") from None
        if not await self._backend.has_broker(handle.broker_name):
            raise Refused(Code.BAD_REQUEST, f"recall handle is invalid: cannot find broker {handle.broker_name}")
        header = RecallMessageRequest(producer_group=topic, topic=topic, recall_handle=asked.recall_handle)
        assert client.peer is not None, "the client of a call has a peer"
        answer = await client.peer.ask(handle.broker_name, request(RequestCode.RECALL_MESSAGE, header))
        if answer.code != ResponseCode.SUCCESS:
            raise Refused(code_of_broker(answer.code), answer.remark or "recall failed")
        return _RecallResponse(status=OK, message_id=decode_header(answer, RecallMessageResponse).msg_id)

    # -- transactions

    async def end_transaction(self, client: Client, asked: Any) -> Any:
        """Commit or roll back. A repeated request gets the same answer, without another commit."""
        topic = check_topic(asked.topic.name)
        if not asked.transaction_id.strip():
            raise Refused(Code.INVALID_TRANSACTION_ID, "transaction id cannot be empty")
        key = topic, asked.transaction_id
        half = self._halves.get(key) or self._ended.get(key)
        is_own = half is not None and client.user in half.users
        if half is None or not is_own or half.ended not in (None, asked.resolution):
            raise Refused(Code.INVALID_TRANSACTION_ID, "cannot found transaction data")
        if asked.resolution not in (_COMMIT, _ROLLBACK) or half.ended is not None:
            return _EndResponse(status=OK)
        header = EndTransactionRequest(
            topic=topic,
            producer_group=topic,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.physical_offset,
            commit_or_rollback=TRANSACTION_COMMIT if asked.resolution == _COMMIT else TRANSACTION_ROLLBACK,
            from_transaction_check=asked.source == _SERVER_CHECK,
            msg_id=asked.message_id or None,
            transaction_id=asked.transaction_id,
            bname=half.broker,
        )
        half.ended = asked.resolution  # set before the request: a concurrent second call would commit again
        assert client.peer is not None, "the client of a call has a peer"
        try:
            answer = await client.peer.ask(half.broker, request(RequestCode.END_TRANSACTION, header))
            if answer.code not in (ResponseCode.SUCCESS, *_UNSAFE):
                raise PeerRefused(answer.code, answer.remark, half.broker)
        except BaseException:
            # Also after a cancellation: the client's next try must send a request to the broker.
            half.ended = None
            raise
        if self._halves.get(key) is half:
            del self._halves[key]
        self._keep(self._ended, key, half)
        return _EndResponse(status=OK)

    def check_back(self, client: Client, command: Command) -> None:
        """Pass a broker's check-back of a half message to the client, over its stream."""
        header = decode_header(command, CheckTransactionRequest)
        record = decode_record(command.payload)
        properties = decode_properties(record.properties)
        transaction_id = header.transaction_id or header.msg_id or ""
        key = record.topic, transaction_id
        known = self._halves.get(key)
        users = frozenset([client.user]) | (frozenset() if known is None else known.users)
        half = _Half(header.bname or "", header.tran_state_table_offset, header.commit_log_offset, users)
        # Store the half message even without a stream: the client may end the transaction by itself, with this id.
        self._keep(self._halves, key, half)
        if client.stream is None:
            return  # the broker repeats the check-back
        asking = _TelemetryCommand()
        message = message_of(record, properties, record.topic)
        asking.recover_orphaned_transaction_command.message.CopyFrom(message)
        asking.recover_orphaned_transaction_command.transaction_id = transaction_id
        client.stream.send(asking)

    @property
    def transaction_counts(self) -> tuple[int, int]:
        """Numbers of open transactions and of recently ended transactions."""
        return len(self._halves), len(self._ended)

    def drop_old(self) -> None:
        """Drop old half messages."""
        now_ms = self._clock.monotonic_ms()
        for halves, ms_max in ((self._halves, _OPEN_MS_MAX), (self._ended, _ENDED_MS_MAX)):
            while halves and next(iter(halves.values())).since_ms < now_ms - ms_max:
                halves.popitem(last=False)

    def _keep(self, halves: _Halves, key: tuple[str, str], half: _Half) -> None:
        half.since_ms = self._clock.monotonic_ms()
        halves[key] = half
        halves.move_to_end(key)
        if len(halves) > _TRANSACTIONS_MAX:
            halves.popitem(last=False)  # the broker's check-back adds the half message again


async def _bodies(messages: Any) -> tuple[list[bytes], int]:
    """Return the bodies to store, and their bits of sysFlag. A gzip body is converted to zlib, because remoting clients
    expect zlib. The bodies of a batch share one sysFlag, and are not converted."""
    bodies = [message.body for message in messages]
    if messages[0].system_properties.body_encoding != _GZIP:
        return bodies, 0
    if len(bodies) > 1:
        return bodies, COMPRESSED
    body = await asyncio.to_thread(zlib_of, bodies[0])
    return ([bodies[0]], COMPRESSED) if body is None else ([body], COMPRESSED | Compression.ZLIB)


def plain_sends() -> GrpcSendsReader | None:
    """Return the compiled core's reader of plain sends; None without a core."""
    own = {property_names.SHARDING_KEY, TRACE_CONTEXT}  # user properties of these names replace the endpoint's
    return CORE.grpc_sends(REFUSED | own, BODY_BYTES_MAX, PROPERTIES_BYTES_MAX - _RESERVED_BYTES)


def _command(
    bodies: list[bytes], topic: str, queue_id: int, encoded: list[bytes], sys_flag: int, broker: str, born_ms: int
) -> Command:
    header = SendMessageV2Request(
        producer_group=topic,
        topic=topic,
        default_topic=AUTO_CREATE_TOPIC,
        default_topic_queue_nums=_DEFAULT_QUEUE_COUNT,
        queue_id=queue_id,
        sys_flag=sys_flag,
        born_timestamp=born_ms,
        flag=0,
        reconsume_times=0,
        unit_mode=False,
        bname=broker,
    )
    if len(bodies) == 1:
        header.properties = encoded[0].decode()
        return request(RequestCode.SEND_MESSAGE_V2, header, bodies[0])
    header.batch = True
    entries = [BatchEntry(body, text) for body, text in zip(bodies, encoded, strict=True)]
    return request(RequestCode.SEND_BATCH_MESSAGE, header, encode_batch(entries))


def _plain_header() -> tuple[bytes, bytes]:
    """Return two parts of a plain send's header: a format with the variable fields, and the text after the opaque."""
    texts = {"<topic>": b"%b", "1234567": b"%d", "7654321": b"%d", '"<properties>"': b"%b", '"<broker>"': b"%b"}
    sample = _command([b""], "<topic>", 1234567, [b"<properties>"], 0, "<broker>", 7654321)
    header = b"".join(map(bytes, encode_command(sample)))[8:].replace(b"%", b"%%")
    for mark, form in texts.items():
        header = header.replace(mark.encode(), form)
    before, found, behind = header.partition(b'"opaque":0')
    assert found, "a request has an opaque"
    return before + b'"opaque":', behind.replace(b"%%", b"%")


_PLAIN_HEADER = _plain_header()
_encode_json = msgspec.json.Encoder().encode
