"""The message trace, a record of this client's actions on messages in the trace topic (``AsyncTraceDispatcher``).

========================  =====================================================================================
record                    written
========================  =====================================================================================
Pub                       after a broker stored a message or a batch; not after a one-way or failed send
SubBefore, SubAfter       before and after a handler call; both when a message is polled
EndTransaction            when the end of a transaction is sent to its broker
Recall                    after a broker answered a recall, with ``trace_recalls``
========================  =====================================================================================

The trace omits the trace topic itself, messages with TRACE_ON=false, responses of brokers that disable tracing, and
received messages without a region (messages of a batch have no region). A queue holds at most 2048 records of sends and
handler calls. Records are dropped and counted if they do not fit or cannot be sent. One task sends them: immediately if
``trace_batch_count`` records wait, otherwise every 5 s. A trace message contains records of one topic, at most 128 000
bytes. It is sent to a broker that has the topic. Its keys are the ids and keys of the traced messages. Use this module
only on the event loop.
Source: behaviour.md §7.11, §9.7; remoting.md §7.7.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from rmqkit.client.observe.hooks import (
    BackgroundHook,
    ConsumeOutcome,
    Consumption,
    Recall,
    Sending,
    SendOutcome,
    SendStatus,
    TransactionEnd,
)
from rmqkit.client.producer.encode import encode_message
from rmqkit.client.producer.sender import Sender
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings, SendLimits, Tracing
from rmqkit.errors import RmqError
from rmqkit.protocol import properties as names
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.trace import (
    EndTransactionTrace,
    PublishTrace,
    RecallTrace,
    SubscribeAfterTrace,
    SubscribeBeforeTrace,
    Trace,
    TracedType,
    encode_traces,
)
from rmqkit.remoting.tasks import Tasks

_ACTS_MAX = 2048
_FLUSH_INTERVAL_MS = 5000.0
_SEND_TIMEOUT_MS = 5000.0
_BODY_BYTES_MAX = 128_000
_KEYS_CHARACTERS_MAX = 16_000
"""The maximum number of characters of the keys, far less than the properties of a message can contain. A handler of
large batches may have a thousand ids in one call.
"""

_SENDS_MAX = 8
_REPORT_INTERVAL_MS = 60_000.0
_NO_REGION = "DefaultRegion"
_log = logging.getLogger(__name__)


class _Act(Struct):
    """One send or one handler call: a trace record for each message, and the keys of these records
    (``TraceContext``)."""

    topic: str
    records: list[tuple[Trace, str]]


class MessageTrace(BackgroundHook):
    """The trace of one client. ``dropped`` is the number of acts that are not in the trace topic."""

    def __init__(self, runtime: ClientRuntime, group: str, kind: str, tracing: Tracing) -> None:
        self.dropped = 0
        self._runtime = runtime
        self._clock = runtime.clock
        self._group = group
        self._topic = tracing.topic
        self._batch_count = tracing.batch_count
        self._has_recalls = tracing.recalls
        self._own = ProducerSettings(limits=SendLimits(message_bytes_max=_BODY_BYTES_MAX))
        self._sender = Sender(runtime, f"_INNER_TRACE_PRODUCER-{group}-{kind}", self._own)
        self._acts: deque[_Act] = deque()
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        self._sending: asyncio.Task[None] | None = None
        self._is_closing = False
        self._reported_ms = -_REPORT_INTERVAL_MS

    def start(self) -> None:
        self._sending = self._tasks.start(self._run(), f"trace of group {self._group}")

    async def close(self) -> None:
        """Send the waiting records for at most 5 s, then stop."""
        self._is_closing = True
        self._wake.set()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=_SEND_TIMEOUT_MS / 1000.0)
        await self._tasks.close()
        self.dropped += len(self._acts)
        if self.dropped:
            _log.warning("%d trace records of group %s were not sent", self.dropped, self._group)

    # -- called by clients

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None] | None:
        # A trace of the trace's own sends would never end.
        if sending.messages[0].topic == self._topic:
            return None
        return lambda outcome: self._sent(sending, outcome)

    def consuming(self, consumption: Consumption) -> Callable[[ConsumeOutcome], None] | None:
        messages = [one for one in consumption.messages if one.properties.get(names.TRACE_ON) != "false"]
        region_id = messages[-1].properties.get(names.MSG_REGION) if messages else None
        if region_id is None or messages[0].topic == self._topic:
            return None
        begun_ms = self._clock.now_ms()
        request_id = self._runtime.keys.next(begun_ms)
        self._add(
            messages[0].topic,
            [
                (
                    SubscribeBeforeTrace(
                        timestamp=begun_ms,
                        region_id=region_id,
                        group=self._group,
                        request_id=request_id,
                        msg_id=message.msg_id,
                        retry_times=message.reconsume_times,
                        keys=message.properties.get(names.KEYS),
                    ),
                    _words(message.msg_id, message.properties.get(names.KEYS)),
                )
                for message in messages
            ],
        )
        count = len(consumption.messages)
        return lambda outcome: self._consumed(messages, request_id, begun_ms, count, outcome)

    def transaction_ended(self, end: TransactionEnd) -> None:
        message = end.message
        if message.topic == self._topic:
            return
        received = message.properties if isinstance(message, ReceivedMessage) else {}
        keys = received.get(names.KEYS) if isinstance(message, ReceivedMessage) else _keys(message)
        trace = EndTransactionTrace(
            timestamp=self._clock.now_ms(),
            region_id=received.get(names.MSG_REGION) or _NO_REGION,
            group=self._group,
            topic=message.topic,
            msg_id=end.msg_id,
            tags=message.tags,
            keys=keys,
            store_host=end.address,
            msg_type=TracedType.COMMITTED,
            transaction_id=end.transaction_id,
            state=end.state,
            from_check=end.is_checked,
        )
        self._add(message.topic, [(trace, _words(end.msg_id, keys))])

    def recalled(self, recall: Recall) -> None:
        if self._has_recalls:
            trace = RecallTrace(
                self._clock.now_ms(), _NO_REGION, self._group, recall.topic, recall.msg_id, recall.error is None
            )
            self._add(recall.topic, [(trace, recall.msg_id)])

    # -- internals

    def _sent(self, sending: Sending, outcome: SendOutcome) -> None:
        result = outcome.result
        if result is None or not outcome.is_traced:
            return
        message = sending.messages[0]
        kind = TracedType.HALF if sending.is_half else TracedType.NORMAL
        trace = PublishTrace(
            timestamp=outcome.tried_ms,
            region_id=outcome.region_id,
            group=self._group,
            topic=message.topic,
            msg_id=result.msg_id,
            tags=None if sending.is_batch else message.tags,
            keys=None if sending.is_batch else _keys(message),
            store_host=outcome.address,
            body_bytes=outcome.body_bytes,
            cost_ms=self._clock.now_ms() - outcome.tried_ms,
            msg_type=TracedType.DELAYED if message.is_delayed else kind,
            offset_msg_id=result.offset_msg_id,
            success=result.status is SendStatus.SEND_OK,
        )
        self._add(message.topic, [(trace, _words(result.msg_id, trace.keys))])

    def _consumed(
        self, messages: Sequence[ReceivedMessage], request_id: str, begun_ms: int, count: int, outcome: ConsumeOutcome
    ) -> None:
        now_ms = self._clock.now_ms()
        records: list[tuple[Trace, str]] = [
            (
                SubscribeAfterTrace(
                    request_id=request_id,
                    msg_id=message.msg_id,
                    cost_ms=(now_ms - begun_ms) // count,
                    success=outcome.error is None,
                    keys=message.properties.get(names.KEYS),
                    context_code=outcome.returned,
                    timestamp=now_ms,
                    group=self._group,
                ),
                _words(message.msg_id, message.properties.get(names.KEYS)),
            )
            for message in messages
        ]
        self._add(messages[0].topic, records)

    def _add(self, topic: str, records: list[tuple[Trace, str]]) -> None:
        # Drop the act if the queue is full: the trace must never slow down or stop the client.
        if len(self._acts) >= _ACTS_MAX:
            self._drop(1, f"{_ACTS_MAX} wait already")
            return
        self._acts.append(_Act(topic, records))
        if len(self._acts) >= self._batch_count:
            self._wake.set()

    def _drop(self, count: int, reason: object) -> None:
        self.dropped += count
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._reported_ms >= _REPORT_INTERVAL_MS:
            self._reported_ms = now_ms
            _log.warning("%d trace records of group %s were dropped so far: %s", self.dropped, self._group, reason)

    async def _run(self) -> None:
        while self._acts or not self._is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_INTERVAL_MS / 1000.0):
                    await self._wake.wait()
            while self._acts:
                acts = [self._acts.popleft() for _ in range(min(self._batch_count * _SENDS_MAX, len(self._acts)))]
                batches = (acts[at : at + self._batch_count] for at in range(0, len(acts), self._batch_count))
                await asyncio.gather(*(self._send(batch) for batch in batches))
                # There is no await after the check for an empty queue, so a later act sets the event again.
            self._wake.clear()

    async def _send(self, acts: list[_Act]) -> None:
        for topic in dict.fromkeys(act.topic for act in acts):
            for body, keys in _packed([record for act in acts if act.topic == topic for record in act.records]):
                await self._send_about(topic, body, keys, sum(act.topic == topic for act in acts))

    async def _send_about(self, topic: str, body: bytes, keys: list[str], count: int) -> None:
        message = Message(topic=self._topic, body=body, keys=keys)
        try:
            prepared = encode_message(message, self._runtime.keys.next(self._clock.now_ms()), self._own)
            # Send the message to a broker that has the traced topic, as the reference does.
            brokers = set(self._runtime.routes.brokers_of(topic))
            queue = (await self._sender.queues(self._topic)).first(lambda one: one.broker_name in brokers)
            await self._sender.send(prepared, timeout_ms=_SEND_TIMEOUT_MS, queue=queue)
        except RmqError as error:
            self._drop(count, error)


def _packed(records: list[tuple[Trace, str]]) -> Iterator[tuple[bytes, list[str]]]:
    """Pack records into bodies within the limits, each with the keys of its records. Records that the format cannot
    represent are omitted."""
    lines: list[bytes] = []
    keys: dict[str, None] = {}
    body_bytes = keys_characters = 0
    for trace, words in records:
        try:
            line = encode_traces([trace])
        except ValueError:
            continue
        if lines and (body_bytes + len(line) > _BODY_BYTES_MAX or keys_characters + len(words) > _KEYS_CHARACTERS_MAX):
            yield b"".join(lines), list(keys)
            lines, keys, body_bytes, keys_characters = [], {}, 0, 0
        lines.append(line)
        keys.update(dict.fromkeys(words.split()))
        body_bytes += len(line)
        keys_characters += len(words) + 1
    if lines:
        yield b"".join(lines), list(keys)


def _words(msg_id: str, keys: str | None) -> str:
    return f"{msg_id} {keys}" if keys else msg_id


def _keys(message: Message) -> str | None:
    """Return the KEYS property of a sent message."""
    return (message.keys if isinstance(message.keys, str) else " ".join(message.keys)) or None
