"""Sending to brokers: which queue, how often, and what the answer means (``sendDefaultImpl``).

==========================================  ========================================================================
outcome of a try                            then
==========================================  ========================================================================
stored (SEND_OK)                            return it
stored, but not flushed or replicated       return it; with ``retryAnotherBrokerWhenNotStoreOK`` the next try
no address, no connection, no answer, or    next try, on another broker where there is one
one that cannot be read
refused with a code of `RETRYABLE`          next try
refused with any other code                 raise PeerRefused at once
==========================================  ========================================================================

All tries share one budget of time. A queue chosen by the caller gets one try. A message may be stored twice when an
answer was lost; consumers tell by its unique key. Beyond ``sends_max`` sends or ``sends_bytes_max`` bytes of bodies,
sends wait in line, at the cost of their own time. Not here: checks and compression (`outgoing`), which brokers are
avoided (`faults`). Loop only.
Source: behaviour.md §7.5, §7.6; remoting.md §4.3.1, §9.4.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Coroutine
from typing import Any, TypeVar

from msgspec import Struct

from rmqkit.client.faults import FaultTable
from rmqkit.client.hooks import SendOutcome
from rmqkit.client.outgoing import Outgoing
from rmqkit.client.routes import NOT_REGISTERED, PublishQueues
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.settings import ProducerSettings
from rmqkit.client.status import BrokerStatus, ProducerStatus
from rmqkit.errors import (
    ClientError,
    ConnectFailed,
    HeaderError,
    NoRoute,
    PeerRefused,
    RemotingError,
    RmqError,
    SendFailed,
)
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, request
from rmqkit.protocol.headers.send import SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.properties import MSG_REGION, TRACE_ON
from rmqkit.remoting.permits import Permits

__all__ = ["RETRYABLE", "SendResult", "SendStatus", "Sender"]

R = TypeVar("R")

RETRYABLE = frozenset(
    (
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    )
)
"""Refusals after which another broker is tried."""


class SendStatus(enum.Enum):
    """How safely a message is stored; all of them count as sent."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


_STATUS: dict[int, SendStatus] = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}


class SendResult(Struct, gc=False):
    """Where a message was stored.

    Attributes:
        msg_id: the unique key the client gave; of a batch those of its messages, joined by commas.
        offset_msg_id: the id the broker gave: its address and the place in its log; of a batch joined by commas.
        queue_offset: position in the queue; of a batch that of its first message.
        transaction_id: as the broker answered it.
        recall_handle: what `Producer.recall` takes; only of messages with a time of delivery.
    """

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None


class Sender:
    """Sends prepared messages for one group."""

    def __init__(self, runtime: ClientRuntime, group: str, settings: ProducerSettings) -> None:
        self._runtime = runtime
        self._remoting = runtime.remoting
        self._clock = runtime.clock
        self._group = group
        self._settings = settings
        self._permits = Permits(settings.sends_max, settings.sends_bytes_max)
        self._faults = FaultTable(runtime.clock) if settings.avoid_slow_brokers else None

    async def queues(self, topic: str, timeout_ms: float | None = None) -> PublishQueues:
        """The queues of a topic, known within the time, else of ``send_timeout_ms``.
        Raises NoRoute: there are none, or no name server answered."""
        known = self._runtime.routes.known_publish_queues(topic)
        if known is not None:
            return known
        settings = self._settings
        timeout_ms = settings.send_timeout_ms if timeout_ms is None else timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._runtime.routes.publish_queues(
                    topic, settings.template_topic, settings.template_queue_count
                )
        except TimeoutError:
            asked = ", ".join(self._runtime.name_servers)
            where = f"no name server said in {timeout_ms:.0f} ms where topic {topic} is"
            raise NoRoute(f"{where}, asked {asked}: look whether they run and can be reached") from None

    def status(self, state: str) -> ProducerStatus:
        """Connections, faults and what is under way; ``state`` is that of the client."""
        runtime, faults = self._runtime, self._faults
        return ProducerStatus(
            group=self._group,
            client_id=runtime.client_id,
            state=state,
            name_servers=runtime.name_servers,
            brokers=[
                BrokerStatus(
                    name=name,
                    broker_id=broker_id,
                    address=address,
                    is_connected=self._remoting.connected(address) is not None,
                    avoided_ms=0.0 if faults is None else faults.avoided_ms(name),
                    is_reachable=faults is None or faults.is_reachable(name),
                )
                for name, ids in sorted(runtime.routes.brokers.items())
                for broker_id, address in sorted(ids.items())
            ],
            sends_under_way=self._settings.sends_max - self._permits.free,
            bytes_under_way=self._settings.sends_bytes_max - self._permits.free_bytes,
        )

    async def send(self, message: Outgoing, *, timeout_ms: float, queue: MessageQueue | None = None) -> SendResult:
        """Send until a broker has stored the message; to one queue only if it is given.
        Raises NoRoute: the topic has no queues, or no name server says in time where they are.
        Raises PeerRefused: a broker refused it in a way that no other broker would change.
        Raises SendFailed: every try failed, or the time is over."""
        if message.tell is not None:
            return await self._told(message, self.send(message, timeout_ms=timeout_ms, queue=queue))
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        body_bytes = len(message.body)
        if not self._permits.take_now(body_bytes) and not await self._permits.take(timeout_ms, body_bytes):
            limit = f"{self._settings.sends_max} sends (backPressureForAsyncSendNum)"
            if self._permits.free > 0:
                limit = f"{self._settings.sends_bytes_max} bytes (backPressureForAsyncSendSize)"
            raise SendFailed(message.topic, [], ClientError(f"{timeout_ms:.0f} ms in line behind {limit}: slow down"))
        try:
            return await self._send(message, deadline_ms, queue)
        finally:
            self._permits.give_back(body_bytes)

    async def _send(self, message: Outgoing, deadline_ms: float, queue: MessageQueue | None) -> SendResult:
        left_ms = deadline_ms - self._clock.monotonic_ms()
        queues = await self.queues(message.topic, left_ms) if queue is None else PublishQueues([queue])
        tries = 1 + self._settings.retries if queue is None else 1
        brokers: list[str] = []
        failure: RmqError | None = None
        not_safe: SendResult | None = None
        for tries_left in range(tries - 1, -1, -1):
            started_ms = self._clock.monotonic_ms()
            left_ms = deadline_ms - started_ms
            if left_ms <= 0 and brokers:
                break
            chosen = self._pick(queues, brokers[-1] if brokers else None)
            brokers.append(chosen.broker_name)
            try:
                result = await self._try(message, chosen, self._try_timeout_ms(left_ms, tries_left))
            except (RemotingError, HeaderError) as error:
                failure = error
                self._note(chosen, started_ms, is_isolated=True)
                self._runtime.refresh_routes_soon()
            except PeerRefused as error:
                self._note(chosen, started_ms, is_isolated=True, is_reachable=error.code not in RETRYABLE)
                if error.code not in RETRYABLE:
                    raise
                failure = error
            else:
                self._note(chosen, started_ms)
                if result.status is SendStatus.SEND_OK or not self._settings.retry_not_stored:
                    return result
                not_safe = result
        if not_safe is not None:
            return not_safe
        assert failure is not None, "a try ends with a result or a failure"
        raise SendFailed(message.topic, brokers, failure) from failure

    async def send_one_way(self, message: Outgoing, *, timeout_ms: float, queue: MessageQueue | None = None) -> None:
        """Write the message to a connection; nobody tells whether it was stored.
        Raises NoRoute: the topic has no queues.
        Raises ConnectFailed: the broker cannot be reached."""
        if message.tell is not None:
            return await self._told(message, self.send_one_way(message, timeout_ms=timeout_ms, queue=queue))
        chosen = queue or self._pick(await self.queues(message.topic, timeout_ms))
        command = self._command(message, chosen, one_way=True)
        address = self._master_address(chosen)
        if message.outcome is not None:
            message.outcome.address, message.outcome.tried_ms = address, self._clock.now_ms()
        await self._remoting.send_one_way(address, command, timeout_ms)
        return None

    async def _told(self, message: Outgoing, sending: Coroutine[Any, Any, R]) -> R:
        """Send where hooks are told of it."""
        tell, message.tell = message.tell, None
        assert tell is not None, "hooks prepared the message"
        message.outcome = outcome = SendOutcome(body_bytes=len(message.body))
        try:
            result = await sending
        except BaseException as error:
            outcome.error = error
            raise
        else:
            outcome.result = result if isinstance(result, SendResult) else None
            return result
        finally:
            tell(outcome)

    async def _try(self, message: Outgoing, queue: MessageQueue, timeout_ms: float) -> SendResult:
        address = self._master_address(queue)
        if message.outcome is not None:
            message.outcome.address, message.outcome.tried_ms = address, self._clock.now_ms()
        answer = await self._remoting.call(address, self._command(message, queue), timeout_ms)
        if message.outcome is not None:
            fields = decode_fields(answer)
            message.outcome.region_id = fields.get(MSG_REGION) or message.outcome.region_id
            message.outcome.is_traced = fields.get(TRACE_ON) != "false"
        status = _STATUS.get(answer.code)
        if status is None:
            raise PeerRefused(answer.code, answer.remark, address)
        stored = decode_header(answer, SendMessageResponse)
        if stored.queue_id != queue.queue_id:
            queue = MessageQueue(queue.topic, queue.broker_name, stored.queue_id)
        found = stored.queue_offset, stored.transaction_id, stored.recall_handle
        return SendResult(status, message.msg_id, stored.msg_id, queue, *found)

    def _command(self, message: Outgoing, queue: MessageQueue, *, one_way: bool = False) -> Command:
        settings = self._settings
        header = SendMessageV2Request(
            producer_group=self._group,
            topic=message.topic,
            default_topic=settings.template_topic,
            default_topic_queue_nums=settings.template_queue_count,
            queue_id=queue.queue_id,
            sys_flag=message.sys_flag,
            born_timestamp=self._clock.now_ms(),
            flag=message.flag,
            properties=message.properties,
            reconsume_times=message.reconsume_times or None,
            max_reconsume_times=message.retries_max,
            batch=message.is_batch or None,
            bname=self._runtime.routes.broker_of(queue),
        )
        code = RequestCode.SEND_BATCH_MESSAGE if message.is_batch else RequestCode.SEND_MESSAGE_V2
        if message.is_reply:
            code = RequestCode.SEND_REPLY_MESSAGE_V2
        return request(code, header, message.body, one_way=one_way)

    def _pick(self, queues: PublishQueues, last_broker: str | None = None) -> MessageQueue:
        return queues.pick(last_broker) if self._faults is None else self._faults.pick(queues, last_broker)

    def _note(
        self, queue: MessageQueue, started_ms: float, *, is_isolated: bool = False, is_reachable: bool = True
    ) -> None:
        if self._faults is not None:
            latency_ms = self._clock.monotonic_ms() - started_ms
            self._faults.note(queue.broker_name, latency_ms, is_isolated=is_isolated, is_reachable=is_reachable)

    def _master_address(self, queue: MessageQueue) -> str:
        address = self._runtime.routes.address(self._runtime.routes.broker_of(queue))
        if address is None:
            raise ConnectFailed(queue.broker_name, "no route names its master", NOT_REGISTERED)
        return address

    def _try_timeout_ms(self, left_ms: float, tries_left: int) -> float:
        """What one try may take; the last one all that is left."""
        limit_ms = self._settings.try_timeout_ms
        return max(1.0, min(left_ms, limit_ms) if limit_ms > 0 and tries_left else left_ms)
