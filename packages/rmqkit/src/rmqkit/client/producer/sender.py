"""Sends to brokers: choice of the queue, retries, and the meaning of the response (``sendDefaultImpl``).

==========================================  ========================================================================
result of an attempt                        action
==========================================  ========================================================================
stored (SEND_OK)                            return the result
stored, but not flushed or replicated       return the result; with ``retryAnotherBrokerWhenNotStoreOK`` up to two
                                            retries
no address, no connection, no response, or  retry, on another broker if possible
an unreadable response
refused with a code of `PASSING`            retry, as above
refused with another code of `RETRYABLE`    retry, as above, at most twice
refused with any other code                 raise PeerRefused immediately
==========================================  ========================================================================

All attempts share one timeout. They continue until it expires, unless ``retries`` limits their number. A retry begins
only if 100 ms are left. The error contains the most frequent cause, followed by the other errors. An attempt without a
response ends after ``try_timeout_ms``, and the next such attempt after twice this time. Each of these attempts may
store the message. Consumers recognize duplicates by the unique key. There is a pause before another attempt at the same
broker (`Backoff`).

If the caller chose a queue, the message is sent to this queue only. While such a message is retried, later messages for
the same queue wait. This preserves the order of the first attempts (`QueueRetries`).

If ``sends_max`` sends or ``sends_bytes_max`` bytes of bodies are in flight, further sends wait. Their timeout begins
after the wait. Checks and compression are in `encode`; limits of retries and avoided brokers are in `faults`.
Use this module only on the event loop. Source: behaviour.md §7.5, §7.6; remoting.md §4.3.1, §9.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rmqkit.client.observe.hooks import SendOutcome, SendResult, SendStatus
from rmqkit.client.observe.status import BrokerStatus, ProducerStatus
from rmqkit.client.producer.encode import EncodedMessage
from rmqkit.client.producer.faults import BACKOFF_MS, PASSING, RETRYABLE, FaultTable, QueueRetries, Tries
from rmqkit.client.runtime.routes import NOT_REGISTERED, PublishQueues
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import (
    ClientError,
    ConnectFailed,
    HeaderError,
    NoRoute,
    PeerRefused,
    RemotingError,
    SendFailed,
)
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, request
from rmqkit.protocol.properties import MSG_REGION, TRACE_ON
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.send import SendMessageResponse, SendMessageV2Request
from rmqkit.remoting.client import TRY_MS_MIN, Backoff, Failures, Permits

R = TypeVar("R")

_STATUS: dict[int, SendStatus] = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}


class Sender:
    """The sender of encoded messages for one group (``sendDefaultImpl``)."""

    def __init__(self, runtime: ClientRuntime, group: str, settings: ProducerSettings) -> None:
        self._runtime = runtime
        self._remoting = runtime.remoting
        self._clock = runtime.clock
        self._group = group
        self._settings = settings
        self._permits = Permits(settings.limits.sends_max, settings.limits.sends_bytes_max)
        self._queue_retries: dict[MessageQueue, QueueRetries] = {}
        self._faults = FaultTable(runtime.clock) if settings.avoid_slow_brokers else None

    async def queues(self, topic: str, timeout_ms: float | None = None) -> PublishQueues:
        """Return the queues of a topic within the timeout, or within ``send_timeout_ms``.
        Raises NoRoute: there are no queues, or no name server answered."""
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
            known = self._runtime.routes.known_publish_queues(topic)
            if known is not None:  # it has just arrived
                return known
            asked = ", ".join(self._runtime.name_servers)
            where = f"no name server returned the route of topic {topic} in {timeout_ms:.0f} ms"
            raise NoRoute(f"{where}, asked {asked}: check whether they run and can be reached") from None

    def status(self, state: str) -> ProducerStatus:
        """Return the connections, the faults and the sends in flight. ``state`` is the state of the client."""
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
            sends_under_way=self._settings.limits.sends_max - self._permits.free,
            bytes_under_way=self._settings.limits.sends_bytes_max - self._permits.free_bytes,
        )

    async def send(
        self, message: EncodedMessage, *, timeout_ms: float, queue: MessageQueue | None = None
    ) -> SendResult:
        """Send a message until a broker has stored it. With ``queue``, send it only to this queue.
        Raises NoRoute: the topic has no queues, or no name server returned them in time.
        Raises PeerRefused: a broker refused the message, and other brokers would refuse it, too.
        Raises SendFailed: every attempt failed, or the timeout expired."""
        if message.on_end is not None:
            return await self._send_with_hooks(message, self.send(message, timeout_ms=timeout_ms, queue=queue))
        body_bytes = len(message.body)
        # Do not await if nothing waits: most sends never have to wait.
        if not self._permits.take_now(body_bytes):
            await self._wait_in_line(message.topic, body_bytes)
        try:
            # The timeout begins after the wait for other sends, so that the wait does not cause a failure.
            return await self._send(message, self._clock.monotonic_ms() + timeout_ms, queue)
        finally:
            self._permits.give_back(body_bytes)

    async def _wait_in_line(self, topic: str, body_bytes: int) -> None:
        settings = self._settings
        line_ms = settings.line_timeout_ms
        if not await self._permits.take(None if line_ms < 0 else line_ms, body_bytes):
            limit = f"{settings.limits.sends_max} sends (backPressureForAsyncSendNum)"
            if self._permits.free > 0:
                limit = f"{settings.limits.sends_bytes_max} bytes (backPressureForAsyncSendSize)"
            raise SendFailed(topic, [], ClientError(f"{line_ms} ms in line behind {limit}: slow down"))

    async def _send(self, message: EncodedMessage, deadline_ms: float, queue: MessageQueue | None) -> SendResult:
        if queue is None:
            return await self._send_anywhere(message, deadline_ms)
        tries = Tries(self._settings.retries if self._settings.retry_chosen_queue else 0)
        retries = self._queue_retries.get(queue)
        if retries is None:
            result = await self._try_noted(message, queue, deadline_ms, tries)
            if result is not None:
                return result
            is_known = self._runtime.routes.has_known(self._runtime.routes.broker_of(queue))
            # If no route ever contained the broker, the program made a mistake, and retries would not help.
            if not is_known or not tries.may_go_on or self._left_ms(deadline_ms) <= TRY_MS_MIN:
                return tries.outcome(message.topic)
                # From now on, every send to the queue uses this object until no send remains. This preserves the order.
            retries = self._queue_retries.setdefault(queue, QueueRetries())
        retries.users += 1
        try:
            # asyncio's locks are fair, so sends get the lock in the order in which they failed or arrived.
            if not await self._has_turn(retries, deadline_ms):
                if not tries.failures:
                    tries.failures.note(ConnectFailed(queue.broker_name, "earlier sends still wait"))
                return tries.outcome(message.topic)
            try:
                while tries.may_go_on and (not tries.brokers or self._left_ms(deadline_ms) > TRY_MS_MIN):
                    if tries.brokers:
                        await self._pause(tries.backoff.next_ms(), deadline_ms)
                    result = await self._try_noted(message, queue, deadline_ms, tries)
                    if result is not None:
                        return result
                return tries.outcome(message.topic)
            finally:
                retries.turn.release()
        finally:
            retries.users -= 1
            assert retries.users >= 0, "every decrement has an increment"
            if not retries.users and self._queue_retries.get(queue) is retries:
                del self._queue_retries[queue]

    async def _send_anywhere(self, message: EncodedMessage, deadline_ms: float) -> SendResult:
        tries = Tries(self._settings.retries)
        tried_since_pause: set[str] = set()
        queues: PublishQueues | None = None
        while tries.may_go_on:
            if tries.brokers and self._left_ms(deadline_ms) <= TRY_MS_MIN:
                break
                # The route may be better now. While it has no master, use the old queues.
            queues = self._runtime.routes.known_publish_queues(message.topic) or queues
            if queues is None:
                queues = await self._found_queues(message.topic, deadline_ms)
            chosen = self._pick(queues, tries.brokers[-1] if tries.brokers else None)
            # Try other brokers immediately. Try the same broker only after a pause, because it may be restarting.
            if chosen.broker_name in tried_since_pause:
                await self._pause(tries.backoff.next_ms(), deadline_ms)
                tried_since_pause.clear()
            tried_since_pause.add(chosen.broker_name)
            result = await self._try_noted(message, chosen, deadline_ms, tries)
            if result is not None:
                return result
        return tries.outcome(message.topic)

    async def _found_queues(self, topic: str, deadline_ms: float) -> PublishQueues:
        """Return the queues of a topic. If the topic has none now, wait for the master.
        Raises NoRoute: the same as for `queues`."""
        backoff, failures = Backoff(*BACKOFF_MS), Failures()
        while not failures or self._left_ms(deadline_ms) > TRY_MS_MIN:
            try:
                return await self.queues(topic, self._left_ms(deadline_ms))
            except NoRoute as error:
                if not self._settings.retries or not self._runtime.routes.lacks_master(topic):
                    raise
                failures.note(error)
                self._runtime.refresh_routes_soon()
                await self._pause(backoff.next_ms(), deadline_ms)
        # Raise the first response of the name servers instead of a timeout.
        raise failures.cause from None

    async def _has_turn(self, retries: QueueRetries, deadline_ms: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, self._left_ms(deadline_ms)) / 1000):
                await retries.turn.acquire()
        except TimeoutError:
            return False
        return True

    async def _pause(self, pause_ms: float, deadline_ms: float) -> None:
        """Pause before a retry. The pause before the last attempt is shorter, so that the attempt has enough time."""
        await asyncio.sleep(max(1.0, min(pause_ms, self._left_ms(deadline_ms) - TRY_MS_MIN)) / 1000)

    def _left_ms(self, deadline_ms: float) -> float:
        return deadline_ms - self._clock.monotonic_ms()

    async def _try_noted(
        self, message: EncodedMessage, queue: MessageQueue, deadline_ms: float, tries: Tries
    ) -> SendResult | None:
        """Try once, and record the result in ``tries``. Return None if the message must be sent again.
        Raises PeerRefused: other brokers would refuse the message, too."""
        started_ms = self._clock.monotonic_ms()
        timeout_ms = tries.timeout_ms(deadline_ms - started_ms, self._settings.try_timeout_ms)
        tries.begins(queue.broker_name)
        try:
            result = await self._try(message, queue, timeout_ms)
        except (RemotingError, HeaderError) as error:
            # A HeaderError means an unreadable response. The send is retried as after a missing response. The number of
            # retries is limited, because waiting does not help.
            tries.failed(error, is_passing=isinstance(error, RemotingError))
            self._note(queue, started_ms, is_isolated=True)
            self._runtime.refresh_routes_soon()
            return None
        except PeerRefused as error:
            # If the message is the cause of the refusal, the broker still counts as reachable.
            self._note(queue, started_ms, is_isolated=True, is_reachable=error.code not in RETRYABLE)
            if error.code not in RETRYABLE:
                raise
                # A refused reply is not retried for long: the requester may be gone.
            tries.failed(error, is_passing=error.code in PASSING and not message.is_reply)
            return None
        self._note(queue, started_ms)
        if result.status is SendStatus.SEND_OK or not self._settings.retry_not_stored:
            return result
        tries.stored_less_safely(result)
        return None

    async def send_one_way(
        self, message: EncodedMessage, *, timeout_ms: float, queue: MessageQueue | None = None
    ) -> None:
        """Write the message to a connection. There is no response.
        Raises NoRoute: the topic has no queues.
        Raises ConnectFailed: the broker cannot be reached."""
        if message.on_end is not None:
            return await self._send_with_hooks(message, self.send_one_way(message, timeout_ms=timeout_ms, queue=queue))
        chosen = queue or self._pick(await self.queues(message.topic, timeout_ms))
        command = self._command(message, chosen, one_way=True)
        # A slave accepts no messages. If there is no master, raise the error now, because no later error would be
        # noticed.
        address = self._master_address(chosen)
        if message.outcome is not None:
            message.outcome.address, message.outcome.tried_ms = address, self._clock.now_ms()
        await self._remoting.send_one_way(address, command, timeout_ms)
        return None

    async def _send_with_hooks(self, message: EncodedMessage, sending: Coroutine[Any, Any, R]) -> R:
        """Send a message, and call the hooks before and after the send."""
        # Clear ``on_end`` before ``sending`` runs: ``sending`` calls `send` again, and `send` returns to this method
        # while the message has an ``on_end``.
        on_end, message.on_end = message.on_end, None
        assert on_end is not None, "hooks prepared the message"
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
            on_end(outcome)

    async def _try(self, message: EncodedMessage, queue: MessageQueue, timeout_ms: float) -> SendResult:
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
        # Use the queue id of the response, because the broker makes the final choice of the queue.
        if stored.queue_id != queue.queue_id:
            queue = MessageQueue(queue.topic, queue.broker_name, stored.queue_id)
        found = (
            *(stored.queue_offset, stored.transaction_id, stored.recall_handle),
            *(stored.lite_offset, stored.lite_epoch),
        )
        return SendResult(status, message.msg_id, stored.msg_id, queue, *found)

    def _command(self, message: EncodedMessage, queue: MessageQueue, *, one_way: bool = False) -> Command:
        settings = self._settings
        header = SendMessageV2Request(
            producer_group=self._group,
            topic=message.topic,
            default_topic=settings.template_topic,
            default_topic_queue_nums=settings.template_queue_count,
            queue_id=queue.queue_id,
            sys_flag=message.sys_flag,
            born_timestamp=message.born_ms or self._clock.now_ms(),
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
