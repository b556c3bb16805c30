"""Handlers for the requests that brokers send to clients, mostly on behalf of an operator
(``ClientRemotingProcessor``).

======================================  ======================================================================
request                                 response
======================================  ======================================================================
CHECK_TRANSACTION_STATE (39)            none; the transaction producer sends the outcome of the transaction later
NOTIFY_CONSUMER_IDS_CHANGED (40)        none; the consumer rebalances its queues
RESET_CONSUMER_CLIENT_OFFSET (220)      none; handlers finish, the queues restart at the given offsets
GET_CONSUMER_STATUS_FROM_CLIENT (221)   queue → offset
GET_CONSUMER_RUNNING_INFO (307)         settings, subscriptions, the state of each queue
CONSUME_MESSAGE_DIRECTLY (309)          the result of the handler, which runs once
PUSH_REPLY_MESSAGE_TO_CLIENT (326)      success; the reply goes to the `Producer.request` that waits for it
======================================  ======================================================================

A broker pushes a reply over the connection with the heartbeats of the client id (``RequestFutureHolder``)::

    request()   CORRELATION_ID, REPLY_TO_CLIENT = client id, TTL ──> topic ──> consumer
    the caller <── PUSH_REPLY_MESSAGE_TO_CLIENT ── broker <── <cluster>_REPLY_TOPIC, MSG_TYPE=reply ── reply()

Use this module only on the event loop. Source: behaviour.md §3.8, §5.3, §7.10, §8.15; remoting.md §4.3.7, §4.5,
§6.4.11, §6.4.12.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping
from types import CoroutineType, FrameType
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rmqkit.client.runtime.namespace import remove_namespace, rename_topics
from rmqkit.clock import Clock
from rmqkit.errors import BodyError, PeerRefused
from rmqkit.protocol import fastjson
from rmqkit.protocol import properties as names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.names import with_namespace, without_namespace
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.clients import (
    ConsumeDirectlyRequest,
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerGroupRequest,
    ConsumerRunningInfo,
    MessageQueue,
    RunningInfoRequest,
)
from rmqkit.protocol.schemas.offsets import (
    ConsumerStatus,
    ConsumerStatusRequest,
    ResetClientOffsetRequest,
    ResetOffsetBody,
)
from rmqkit.protocol.schemas.send import PushReplyRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router

_log = logging.getLogger(__name__)
_REPLY = "reply"


class GroupConsumer(Protocol):
    """The methods of a consumer that its client instance and these handlers call."""

    def consumer_data(self) -> ConsumerData | None:
        """Return the consumer's group and subscriptions for heartbeats, or None if it has no subscription: an empty
        list would mean to brokers that the group has no subscription."""
        ...

    def rebalance_soon(self) -> None:
        """Rebalance soon, because members, routes or subscriptions have changed."""
        ...

    async def reset_offsets(self, offsets: dict[MessageQueue, int]) -> None: ...

    def offsets_of(self, topic: str) -> dict[MessageQueue, int]: ...

    def running_info(self) -> ConsumerRunningInfo: ...

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        """Run the handler once. Raises ClientError: there is no handler."""
        ...


class ClientRequestHandlers:
    """The handlers of brokers' requests, for the consumers of each group."""

    def __init__(self, consumers: Mapping[str, GroupConsumer], namespace: str = "") -> None:
        self._consumers = consumers
        self._namespace = namespace

    def register(self, dispatch: Router) -> None:
        dispatch.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self.ids_changed)
        dispatch.register(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self.reset)
        dispatch.register(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, self.status)
        dispatch.register(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info)
        dispatch.register(RequestCode.CONSUME_MESSAGE_DIRECTLY, self.consume_directly)

    def ids_changed(self, connection: Connection, command: Command) -> None:
        """Rebalance a group after members have joined or left."""
        consumer = self._consumers.get(self._bare(decode_header(command, ConsumerGroupRequest).consumer_group))
        if consumer is not None:
            consumer.rebalance_soon()

    async def reset(self, connection: Connection, command: Command) -> None:
        consumer = self._consumers.get(self._bare(decode_header(command, ResetClientOffsetRequest).group))
        if consumer is not None:
            offsets = fastjson.decode_as(command.payload, ResetOffsetBody).offset_table
            await consumer.reset_offsets(rename_topics(offsets, self._bare))

    def status(self, connection: Connection, command: Command) -> Command:
        """Return a group's offsets in a topic."""
        header = decode_header(command, ConsumerStatusRequest)
        consumer = self._consumers.get(self._bare(header.group))
        offsets = {} if consumer is None else consumer.offsets_of(self._bare(header.topic))
        return reply(command, body=fastjson.dumps(ConsumerStatus(rename_topics(offsets, self._full))))

    def running_info(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, RunningInfoRequest)
        info = self._consumer(header.consumer_group).running_info()
        if header.jstack_enable:
            info.jstack = _stacks()
        # Names inside the client have no namespace. The operator must see them with the namespace, as brokers do.
        info.subscription_set = [replace(one, topic=self._full(one.topic)) for one in info.subscription_set]
        info.mq_table = rename_topics(info.mq_table, self._full)
        info.mq_pop_table = rename_topics(info.mq_pop_table, self._full)
        info.status_table = {self._full(topic): status for topic, status in info.status_table.items()}
        info.user_consumer_info = {self._full(queue): why for queue, why in info.user_consumer_info.items()}
        return reply(command, body=fastjson.dumps(info))

    async def consume_directly(self, connection: Connection, command: Command) -> Command:
        """Run the handler once for the message in the request."""
        header = decode_header(command, ConsumeDirectlyRequest)
        consumer = self._consumer(header.consumer_group)
        # Use only the first message: all messages of an inner batch have the id that the operator passed.
        (message,) = read_messages(command.payload, header.broker_name)[:1] or (None,)
        if message is None:
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, "the request has no message to consume", connection.peer)
        remove_namespace(self._namespace, [message])
        return reply(command, body=msgspec.json.encode(await consumer.consume_directly(message)))

    def _bare(self, name: str) -> str:
        return without_namespace(self._namespace, name)

    def _full(self, name: str) -> str:
        return with_namespace(self._namespace, name)

    def _consumer(self, group: str) -> GroupConsumer:
        consumer = self._consumers.get(self._bare(group))
        if consumer is None:
            remark = f"The Consumer Group <{group}> not exist in this consumer"
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, remark, "")
        return consumer


def _stacks() -> str:
    """Return the stacks of the threads of this process and of the tasks of its loop (``jstack``), outermost call
    first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        (f"thread {names.get(ident, ident)}", [*traceback.walk_stack(frame)][::-1])
        for ident, frame in sys._current_frames().items()
    ]
    # Suspended tasks have no thread, so only this shows a coroutine that hangs.
    found += [(f"task {task.get_name()}", [*_awaits(task.get_coro())]) for task in asyncio.all_tasks()]
    lines = []
    for name, stack in sorted(found, key=lambda one: one[0]):
        lines.append(name)
        lines += [f"  {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})" for frame, line in stack]
    return "\n".join(lines)


def _awaits(coroutine: object) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a suspended coroutine; each frame awaits the next one."""
    while isinstance(coroutine, CoroutineType) and (frame := coroutine.cr_frame) is not None:
        yield frame, frame.f_lineno
        coroutine = coroutine.cr_await


class Reply(Struct):
    """The reply of a consumer to a request.

    Attributes:
        body: the decompressed body.
        properties: the properties of the reply, including RocketMQ's own properties.
        flag: the number that the replier set.
        born_timestamp: the time when the reply was sent, in ms since the epoch, from the clock of the replier.
        born_host: the address of the replier, ``ip:port``.
    """

    body: bytes
    properties: dict[str, str]
    flag: int
    born_timestamp: int
    born_host: str


class PendingReplies:
    """The requests of one client instance that wait for their replies (``RequestFutureHolder``)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Reply]] = {}

    @contextlib.contextmanager
    def expect(self, client_id: str, timeout_ms: float) -> Iterator[tuple[dict[str, str], asyncio.Future[Reply]]]:
        """Expect a reply inside the ``with`` block. Yield the properties that make a message a request, and the future
        of the reply."""
        correlation_id = str(uuid.uuid4())
        properties = {
            names.CORRELATION_ID: correlation_id,
            names.REPLY_TO_CLIENT: client_id,
            names.TIME_TO_LIVE: str(int(timeout_ms)),
        }
        # Register the future before the request is sent, because the reply may arrive before the send returns.
        future = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        try:
            yield properties, future
        finally:
            del self._waiting[correlation_id]

    def accept_reply(self, connection: Connection, command: Command) -> Command:
        """Pass a reply to the request that waits for it (PUSH_REPLY_MESSAGE_TO_CLIENT)."""
        header = decode_header(command, PushReplyRequest)
        properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
        properties[names.ARRIVE_TIME] = str(self._clock.now_ms())
        try:
            body = decompress(command.payload, header.sys_flag)
        except BodyError as error:
            _log.warning("a reply from %s cannot be read: %s", header.born_host, error)
            return reply(command, ResponseCode.SYSTEM_ERROR, "process reply message fail")
        future = self._waiting.get(properties.get(names.CORRELATION_ID, ""))
        # Return success nevertheless. After an error, the broker would push the reply again, although no request waits
        # for it.
        if future is None or future.done():
            _log.warning(
                "ignoring a reply from %s: it is late, a duplicate, or belongs to no request", header.born_host
            )
        else:
            future.set_result(Reply(body, properties, header.flag, header.born_timestamp, header.born_host))
        return reply(command)
