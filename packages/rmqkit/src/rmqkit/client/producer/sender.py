"""Sending to brokers: which queue, how often, and what the answer means (``sendDefaultImpl``).

==========================================  ========================================================================
outcome of a try                            then
==========================================  ========================================================================
stored (SEND_OK)                            return it
stored, but not flushed or replicated       return it; with ``retryAnotherBrokerWhenNotStoreOK`` the next try, twice
no address, no connection, no answer, or    next try, on another broker where there is one
one that cannot be read
refused with a code of `PASSING`            next try, as above
refused with another code of `RETRYABLE`    next try, as above, twice at most
refused with any other code                 raise PeerRefused at once
==========================================  ========================================================================

All tries share one budget of time, and go on until it is used up unless ``retries`` says how many there may be. A
further try begins only with 100 ms left; the error names the cause of most tries, and then the other errors. A try
that is not answered ends after ``try_timeout_ms``, the next such one after twice the time: a message may be stored by
each of them, and consumers tell by its unique key. Before a broker is tried again there is a pause (`Backoff`).

A message for a queue that the caller chose goes to that queue only. While one such message is tried again, those for
the same queue wait behind it, so the order in which they were first tried is kept (`QueueRetries`).

Beyond ``sends_max`` sends or ``sends_bytes_max`` bytes of bodies, sends wait in line; their time begins when it is
their turn. Not here: checks and compression (`encode`), how long is tried and which brokers are avoided (`faults`).
Loop only. Source: behaviour.md §7.5, §7.6; remoting.md §4.3.1, §9.4.
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
    """Sends encoded messages for one group (``sendDefaultImpl``)."""

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
        """Get the queues of a topic within the time, or within ``send_timeout_ms``.
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
            known = self._runtime.routes.known_publish_queues(topic)
            if known is not None:  # it came just now
                return known
            asked = ", ".join(self._runtime.name_servers)
            where = f"no name server returned the route of topic {topic} in {timeout_ms:.0f} ms"
            raise NoRoute(f"{where}, asked {asked}: check whether they run and can be reached") from None

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
            sends_under_way=self._settings.limits.sends_max - self._permits.free,
            bytes_under_way=self._settings.limits.sends_bytes_max - self._permits.free_bytes,
        )

    async def send(
        self, message: EncodedMessage, *, timeout_ms: float, queue: MessageQueue | None = None
    ) -> SendResult:
        """Send until a broker has stored the message; to one queue only if it is given.
        Raises NoRoute: the topic has no queues, or no name server says in time where they are.
        Raises PeerRefused: a broker refused it in a way that no other broker would change.
        Raises SendFailed: every try failed, or the time is over."""
        if message.on_end is not None:
            return await self._send_with_hooks(message, self.send(message, timeout_ms=timeout_ms, queue=queue))
        body_bytes = len(message.body)
        # Without an await where nothing waits: most sends never see the line.
        if not self._permits.take_now(body_bytes):
            await self._wait_in_line(message.topic, body_bytes)
        try:
            # The time begins here, after the line: a queue of sends is no reason for any of them to fail.
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
            # A broker that no route ever named is a mistake of the program: more tries would find it no better.
            if not is_known or not tries.may_go_on or self._left_ms(deadline_ms) <= TRY_MS_MIN:
                return tries.outcome(message.topic)
            # From here on every send to the queue goes through this, until none is left: order is kept.
            retries = self._queue_retries.setdefault(queue, QueueRetries())
        retries.users += 1
        try:
            # asyncio's locks are fair: it is the order in which sends failed, or came.
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
            assert retries.users >= 0, "a send leaves the line once"
            if not retries.users and self._queue_retries.get(queue) is retries:
                del self._queue_retries[queue]

    async def _send_anywhere(self, message: EncodedMessage, deadline_ms: float) -> SendResult:
        tries = Tries(self._settings.retries)
        tried_since_pause: set[str] = set()
        queues: PublishQueues | None = None
        while tries.may_go_on:
            if tries.brokers and self._left_ms(deadline_ms) <= TRY_MS_MIN:
                break
            # An own topic's route may have changed for the better; while it has no master the queues are the old ones.
            queues = self._runtime.routes.known_publish_queues(message.topic) or queues
            if queues is None:
                queues = await self._found_queues(message.topic, deadline_ms)
            chosen = self._pick(queues, tries.brokers[-1] if tries.brokers else None)
            # Other brokers at once, the same one only after a pause: it may be just restarting.
            if chosen.broker_name in tried_since_pause:
                await self._pause(tries.backoff.next_ms(), deadline_ms)
                tried_since_pause.clear()
            tried_since_pause.add(chosen.broker_name)
            result = await self._try_noted(message, chosen, deadline_ms, tries)
            if result is not None:
                return result
        return tries.outcome(message.topic)

    async def _found_queues(self, topic: str, deadline_ms: float) -> PublishQueues:
        """Get the queues of a topic, and wait for the master of one that has none just now.
        Raises NoRoute: as `queues`."""
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
        # The reason is the first answer of the name servers, not the time that is over.
        raise failures.cause from None

    async def _has_turn(self, retries: QueueRetries, deadline_ms: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, self._left_ms(deadline_ms)) / 1000):
                await retries.turn.acquire()
        except TimeoutError:
            return False
        return True

    async def _pause(self, pause_ms: float, deadline_ms: float) -> None:
        """Pause before a further try. Before the last try the pause is shorter, so that the try has enough time."""
        await asyncio.sleep(max(1.0, min(pause_ms, self._left_ms(deadline_ms) - TRY_MS_MIN)) / 1000)

    def _left_ms(self, deadline_ms: float) -> float:
        return deadline_ms - self._clock.monotonic_ms()

    async def _try_noted(
        self, message: EncodedMessage, queue: MessageQueue, deadline_ms: float, tries: Tries
    ) -> SendResult | None:
        """Try once and note in ``tries`` how it went; None when there is nothing to return yet.
        Raises PeerRefused: in a way that no other broker would change."""
        started_ms = self._clock.monotonic_ms()
        timeout_ms = tries.timeout_ms(deadline_ms - started_ms, self._settings.try_timeout_ms)
        tries.begins(queue.broker_name)
        try:
            result = await self._try(message, queue, timeout_ms)
        except (RemotingError, HeaderError) as error:
            # A HeaderError is an answer that cannot be read: tried again like silence, but counted, since time does not
            # mend it.
            tries.failed(error, is_passing=isinstance(error, RemotingError))
            self._note(queue, started_ms, is_isolated=True)
            self._runtime.refresh_routes_soon()
            return None
        except PeerRefused as error:
            # Refused for the message's own sake, the broker still counts as reachable.
            self._note(queue, started_ms, is_isolated=True, is_reachable=error.code not in RETRYABLE)
            if error.code not in RETRYABLE:
                raise
            # A refused reply is not tried for long: who waits for it may be gone.
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
        """Write the message to a connection; no answer says whether it was stored.
        Raises NoRoute: the topic has no queues.
        Raises ConnectFailed: the broker cannot be reached."""
        if message.on_end is not None:
            return await self._send_with_hooks(message, self.send_one_way(message, timeout_ms=timeout_ms, queue=queue))
        chosen = queue or self._pick(await self.queues(message.topic, timeout_ms))
        command = self._command(message, chosen, one_way=True)
        # A slave takes no messages; without a master it is an error at once, as nobody would see it later.
        address = self._master_address(chosen)
        if message.outcome is not None:
            message.outcome.address, message.outcome.tried_ms = address, self._clock.now_ms()
        await self._remoting.send_one_way(address, command, timeout_ms)
        return None

    async def _send_with_hooks(self, message: EncodedMessage, sending: Coroutine[Any, Any, R]) -> R:
        """Send between the hooks' begin and end."""
        # Cleared before ``sending`` runs: ``sending`` calls `send` again, which returns to this method while the
        # message has an ``on_end``.
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
        # The answer counts: in the end it is the broker that chooses the queue.
        if stored.queue_id != queue.queue_id:
            queue = MessageQueue(queue.topic, queue.broker_name, stored.queue_id)
        found = stored.queue_offset, stored.transaction_id, stored.recall_handle
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
