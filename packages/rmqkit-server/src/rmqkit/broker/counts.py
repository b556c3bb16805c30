"""Prometheus counters, which are updated when requests complete. They exist only if an exporter is configured.

The parts of the broker call `Counts` once per request or once per run of requests, never once per message. `Statistics`
counts the messages delivered to groups.

Differences from the reference: half messages that check-back reads are not in `messages_out`. A dead letter that was a
retried message is counted for its consumer group and topic. (The reference counts it for the producer group and the
retry topic.) The count of half messages begins at the start of the broker.
Use this module only on the event loop, except ``flush_ms``. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rmqkit.clock import Clock
from rmqkit.exporter import Meter, MeteredConnection
from rmqkit.metrics import Histogram, histogram
from rmqkit.protocol import names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.core import Sends
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record, batch_bounds
from rmqkit.store.message_store import DispatchRequest, InnerMessage, PutResult, PutStatus, StoredSends

__all__ = ["NOT_COUNTED", "Counts", "Noted", "text"]

# The prefixes of topics with messages that are counted neither as received nor as delivered.
NOT_COUNTED = (names.RETRY_PREFIX, names.DLQ_PREFIX)

_Key = tuple[str, ...]
_SCHEDULE = (names.SCHEDULE_TOPIC, "SCHEDULE_CONSUMER")
_KINDS_MAX = 1024
_NOTED_MAX = 256
_PUTS_MAX = 128
_DELAYS = ("DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "__STARTDELIVERTIME")
_DELAY_ENTRIES = tuple(f"\x02{name}\x01".encode() for name in _DELAYS)


class _Came:
    """The messages of one kind that a topic received."""

    __slots__ = ("bytes", "messages", "sizes")

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self.sizes = histogram("rocketmq_message_size")

    def add(self, size: int, count: int) -> None:
        """Count a message, or a batch of ``count`` messages. ``size``: the total bytes."""
        self.messages += count
        self.bytes += size
        self.sizes.observe(size // count)

    def add_all(self, sizes: Sequence[int]) -> None:
        """Count one message for each size in bytes."""
        self.messages += len(sizes)
        self.bytes += sum(sizes)
        self.sizes.observe_all(sizes)


class Noted:
    """Messages of one topic, request code and kind. They are added to the counters together, at a fraction of the cost.

    Attributes:
        sizes: the bytes of the messages' records.
        came, latency: the counters to which the messages are added.
        alone_ms: the times until the answers to single messages.
        runs_ms, counts: the times until the answers to runs, and the number of messages in each run.
    """

    __slots__ = ("alone_ms", "came", "counts", "latency", "runs_ms", "sizes")

    def __init__(self, came: _Came, latency: Histogram) -> None:
        self.came = came
        self.latency = latency
        self.sizes: list[int] = []
        self.alone_ms: list[float] = []
        self.runs_ms: list[float] = []
        self.counts: list[int] = []

    def fold(self) -> None:
        """Add the noted messages to the counters."""
        assert len(self.runs_ms) == len(self.counts), "each run has a time and a number of messages"
        if self.sizes:
            self.came.add_all(self.sizes)
            self.latency.observe_all(self.alone_ms)
            self.latency.observe_each(self.runs_ms, self.counts)
            for noted in (self.sizes, self.alone_ms, self.runs_ms, self.counts):
                noted.clear()


class Counts:
    """The counters of a broker.

    Attributes:
        connection: makes connections that measure the time until their answers.
        came: received messages by topic and kind.
        totals, times: counters and histograms by metric and label values. The label values of a topic and a group do
            not include ``is_system``.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._monotonic_ms = clock.monotonic_ms
        self._puts: list[tuple[str, bytes, int, int]] = []
        self._by_kind: dict[tuple[str, int, str], Noted] = {}
        self.meter = Meter(
            also={
                RequestCode.UPDATE_AND_CREATE_TOPIC: self._topic_created,
                RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._group_created,
            }
        )
        self.connection = partial(MeteredConnection, meter=self.meter)
        self.flush_ms = histogram("rmqkit_flush_latency")
        self.dispatch_ms = histogram("rmqkit_dispatch_latency")
        self.lag_ms = histogram("rmqkit_event_loop_lag")
        self.came: dict[tuple[str, str], _Came] = defaultdict(_Came)
        self.totals: dict[str, Counter[_Key]] = defaultdict(Counter)
        self.times: dict[str, dict[_Key, Histogram]] = defaultdict(dict)

    # ---- received messages

    def sends(self, kinds: Iterable[tuple[str, int, str, list[int]]], ms: float | None) -> None:
        """Count plain sends that were stored with one write. ``kinds``: topic, request code, kind, and the bytes of
        each message. ``ms``: the time until the answers; None if the sends are not answered yet."""
        for topic, code, kind, sizes in kinds:
            noted = self._kind(topic, code, kind)
            noted.sizes += sizes
            if ms is None:
                pass
            elif len(sizes) == 1:
                noted.alone_ms.append(ms)
            else:
                noted.runs_ms.append(ms)
                noted.counts.append(len(sizes))
            if len(noted.sizes) >= _NOTED_MAX:
                noted.fold()

    def batch(self, sends: Sends, ms: float | None) -> None:
        """Count the messages of a batch, like `sends`. The batch has only the total bytes of its messages."""
        ((topic, code, kind, (size,)),) = sends.kinds
        noted = self._kind(topic, code, kind)
        noted.came.add(size, len(sends))
        if ms is not None:
            noted.latency.observe(ms)

    def answered_late(self, requests: Mapping[int, int], response_code: int, since_ms: float) -> None:
        """Count the answers to plain sends that waited. ``requests``: the number of sends by request code."""
        ms = self._monotonic_ms() - since_ms
        for code, count in requests.items():
            self.meter.latency[code, response_code, False, "success"].observe(ms, count)

    def put(self, message: InnerMessage, put: PutResult, count: int = 1) -> None:
        """Count a message that was stored for a producer. ``count``: the number of messages of a batch."""
        if put.status is not PutStatus.OK:
            return
        if message.topic.startswith(NOT_COUNTED):
            self.given_up(message)
            return
        self._note(message, put, count)
        if message.topic == names.HALF_TOPIC:
            self.totals["rocketmq_half_messages"][_real_topic(message.properties),] += 1

    def put_batch(self, message: InnerMessage, put: PutResult) -> None:
        """Count the messages of a batch like `put`, even if the batch is stored as one record."""
        count = len(put.physical_offsets)
        self.put(message, put, count if count > 1 else max(1, len(batch_bounds(message.body))))

    def fold(self) -> None:
        """Add all noted messages to the counters."""
        for noted in self._by_kind.values():
            noted.fold()
        puts, self._puts = self._puts, []
        for topic, properties, size, count in puts:
            self.came[topic, kind_of(properties)].add(size, count)

    def delivered(self, message: InnerMessage, put: PutResult) -> None:
        """Count a delayed message that was stored in its real topic."""
        self.totals["rocketmq_messages_out_total"][_SCHEDULE] += 1
        self.totals["rocketmq_throughput_out_total"][_SCHEDULE] += put.end_offset - put.physical_offset
        self._note(message, put, 1)

    def _note(self, message: InnerMessage, put: PutResult, count: int) -> None:
        self._puts.append((message.topic, message.properties, put.end_offset - put.physical_offset, count))
        if len(self._puts) >= _PUTS_MAX:
            self.fold()

    def _kind(self, topic: str, code: int, kind: str) -> Noted:
        found = self._by_kind.get((topic, code, kind))
        if found is None:
            if len(self._by_kind) >= _KINDS_MAX:
                self._drop_kinds()
            # Add messages that are not counted to an entry outside the tables. Then single messages need no special
            # case.
            came = _Came() if topic.startswith(NOT_COUNTED) else self.came[topic, kind]
            latency = self.meter.latency[code, ResponseCode.SUCCESS, False, "success"]
            found = self._by_kind[topic, code, kind] = Noted(came, latency)
        return found

    def _drop_kinds(self) -> None:
        self.fold()
        self._by_kind.clear()

    # ---- later events of messages

    def dispatched(self, requests: Sequence[DispatchRequest]) -> None:
        """Count messages that became readable, with the time that the first message needed."""
        if requests:
            first = requests if isinstance(requests, StoredSends) else requests[0]
            self.dispatch_ms.observe(max(0, self._clock.now_ms() - first.store_timestamp), len(requests))

    def decided(self, half: Record, *, is_commit: bool) -> None:
        """Count the decision of a transaction."""
        topic = (_real_topic(half.properties),)
        self.totals["rocketmq_commit_messages_total" if is_commit else "rocketmq_rollback_messages_total"][topic] += 1
        open_ones = self.totals["rocketmq_half_messages"]
        open_ones[topic] = max(0, open_ones[topic] - 1)  # half messages from before the start are not included
        if is_commit:
            seconds = (self._clock.now_ms() - half.born_timestamp) // 1000
            self._observe("rocketmq_finish_message_latency", topic, seconds)

    def given_up(self, message: InnerMessage) -> None:
        """Count a dead letter. Other messages, and messages that a client sends to a dead letter topic itself, are not
        counted."""
        if message.topic.startswith(names.DLQ_PREFIX) and message.reconsume_times:
            topic = (find_property(message.properties, b"RETRY_TOPIC") or b"").decode("utf-8", "replace")
            group = message.topic.removeprefix(names.DLQ_PREFIX)
            self.totals["rocketmq_send_to_dlq_messages_total"][topic, group] += 1

    def drop_topics(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the counters of deleted topics."""
        self.fold()
        finished = self.times["rocketmq_finish_message_latency"]
        tables: list[dict[Any, Any]] = [self.came, finished, *self.totals.values()]
        for table in tables:
            for key in [key for key in table if is_gone(key[0])]:
                del table[key]
                # Drop the noted kinds, too: they refer to entries of the tables, and one of these entries is dropped.
                self._drop_kinds()

    # ---- inside

    def _topic_created(self, request: Command, answer: Command, ms: float) -> None:
        is_system = names.is_system_topic(decode_fields(request).get("topic", ""))
        self._observe("rocketmq_topic_create_execution_time", (_status(answer), text(is_system)), ms)

    def _group_created(self, request: Command, answer: Command, ms: float) -> None:
        self._observe("rocketmq_consumer_group_create_execution_time", (_status(answer),), ms)

    def _observe(self, name: str, key: _Key, value: float) -> None:
        table = self.times[name]
        (table.get(key) or table.setdefault(key, histogram(name))).observe(value)


def _real_topic(properties: bytes) -> str:
    return (find_property(properties, b"REAL_TOPIC") or b"").decode("utf-8", "replace")


def kind_of(properties: bytes) -> str:
    """Return the ``message_type`` of a message with a property string."""
    if b"__SHARDINGKEY\x01" not in properties and b"TRAN_MSG\x01" not in properties and b"DEL" not in properties:
        return "normal"
    entries = b"\x02" + properties
    if b"\x02TRAN_MSG\x01true" in entries:
        return "transaction"
    if b"\x02__SHARDINGKEY\x01" in entries:
        return "fifo"
    return "delay" if any(entry in entries for entry in _DELAY_ENTRIES) else "normal"


def text(value: bool) -> str:
    return "true" if value else "false"


def _status(answer: Command) -> str:
    return "success" if answer.code == ResponseCode.SUCCESS else "failure"
