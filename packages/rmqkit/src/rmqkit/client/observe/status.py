"""Status of producers and consumers, as objects and as tables, and the rates of a topic (``ConsumerStatsManager``).

Pull loops and handlers increase plain counters (`ConsumerStats`). Every 10 s the counters are sampled. A rate is
computed from the difference between the counters and the sample of a minute ago, or of the start. Failures are counted
for the last hour.
Source: behaviour.md §7.5, §8.6, §8.15.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec import Struct

from rmqkit.protocol.schemas.clients import ConsumeStatus, MessageQueue

SAMPLE_INTERVAL_MS = 10_000
_MINUTE_MS = 60_000
# The samples of one hour, and one more for the first difference.
_SAMPLES_MAX = 361


class QueueState(enum.Enum):
    """The state of a queue of a consumer."""

    MOVING = "moving"
    """The offset of the queue increases."""
    CAUGHT_UP = "caught up"
    """There is no backlog."""
    PAUSED = "paused"
    """The program has paused the queue."""
    TAKING_OVER = "taking over"
    """The consumer has just got the queue. The former owner may still save its offset."""
    WAITING_FOR_LOCK = "waiting for lock"
    """Another member of the group has the lock of the broker, or the lock has expired (ordered consumption)."""
    UNREACHABLE = "unreachable"
    """The broker does not answer, or it is in no route."""
    REFUSED = "refused"
    """The broker answers with an error code."""
    FULL = "full"
    """A limit of held messages or bytes stops the pulls (flow control)."""
    FAILING = "failing"
    """The handler fails repeatedly on the first message."""
    BUSY = "busy"
    """The handler is working on the first message."""
    WAITING_FOR_TURN = "waiting for turn"
    """No handler has started with the first message, or the program does not poll it."""


class QueueStatus(Struct, kw_only=True):
    """The status of one queue of a consumer.

    Attributes:
        queue: the queue.
        state: the state of the queue.
        reason: the reason for the state: a message, a limit, an address, or a code.
        since_ms: the time when this state began, in ms since the epoch.
        is_stalled: True if the queue has a backlog and does not advance.
        consumed_offset: the first offset that is not consumed; None if the start offset is not known yet.
        pulled_offset: the next offset to pull.
        max_offset: one past the offset of the last message, according to the response to the last pull.
        held_messages: the number of messages that are pulled and not consumed yet.
        held_bytes: the size of these messages.
    """

    queue: MessageQueue
    state: QueueState
    reason: str = ""
    since_ms: int = 0
    is_stalled: bool = False
    consumed_offset: int | None = None
    pulled_offset: int | None = None
    max_offset: int | None = None
    held_messages: int = 0
    held_bytes: int = 0

    @property
    def backlog(self) -> int | None:
        """The number of stored messages that are not consumed yet, or None if it is unknown."""
        if self.max_offset is None or self.consumed_offset is None:
            return None
        return max(0, self.max_offset - self.consumed_offset)


class MemberStatus(Struct, kw_only=True):
    """The status of a consumer. ``print`` it to get a table.

    Attributes:
        group: the consumer group.
        client_id: the client id of the consumer.
        state: the state of the client: not started, started, closed.
        queues: the status of each queue that the consumer owns.
        missing_topics: subscribed topics without queues to read.
    """

    group: str
    client_id: str
    state: str
    queues: list[QueueStatus]
    missing_topics: list[str]

    @property
    def backlog(self) -> int:
        """The number of stored messages in all queues that are not consumed yet. Queues with an unknown backlog do not
        count."""
        return sum(one.backlog or 0 for one in self.queues)

    @property
    def stalled(self) -> list[QueueStatus]:
        """The queues that have a backlog and do not advance."""
        return [one for one in self.queues if one.is_stalled]

    def __str__(self) -> str:
        head = f"consumer of group {self.group}, client {self.client_id}: {self.state}, {len(self.queues)} queues, "
        head += f"backlog {self.backlog}, {len(self.stalled)} stand still"
        if self.missing_topics:
            head += f"; no queues of {', '.join(self.missing_topics)}"
        titles = ("topic", "broker", "queue", "consumed", "pulled", "max", "held", "bytes", "since", "state")
        return "\n".join((head, *_table(titles, (_row(one) for one in self.queues))))


class BrokerStatus(Struct, kw_only=True):
    """The status of a broker according to a producer.

    Attributes:
        name: the name of the broker.
        broker_id: the id of the broker; 0 is the master.
        address: the address of the broker, ``host:port``.
        is_connected: True if there is a connection.
        avoided_ms: the remaining time in ms in which sends avoid this broker; 0 means that they do not avoid it
            (``avoid_slow_brokers``).
        is_reachable: True if sends succeed, as far as is known.
    """

    name: str
    broker_id: int
    address: str
    is_connected: bool
    avoided_ms: float = 0.0
    is_reachable: bool = True


class ProducerStatus(Struct, kw_only=True):
    """The status of a producer. ``print`` it to get a table.

    Attributes:
        group: the producer group.
        client_id: the client id of the producer.
        state: the state of the client: not started, started, closed.
        name_servers: the addresses of the name servers.
        brokers: the brokers that the producer knows.
        sends_under_way: the number of sends without a response so far.
        bytes_under_way: the size of these sends in bytes.
    """

    group: str
    client_id: str
    state: str
    name_servers: list[str]
    brokers: list[BrokerStatus]
    sends_under_way: int
    bytes_under_way: int

    def __str__(self) -> str:
        head = f"producer of group {self.group}, client {self.client_id}: {self.state}, {self.sends_under_way} sends "
        head += f"({self.bytes_under_way} bytes) under way, name servers {', '.join(self.name_servers)}"
        rows = (
            (one.name, one.broker_id, one.address, _connection(one), f"{one.avoided_ms:.0f} ms") for one in self.brokers
        )
        return "\n".join((head, *_table(("broker", "id", "address", "connection", "avoided for"), rows)))


def _table(titles: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> Iterator[str]:
    """Yield the lines of a table. The last column is not padded."""
    texts = [titles, *(tuple("-" if cell is None else str(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)][:-1]
    for text in texts:
        yield "  ".join((*(cell.ljust(width) for cell, width in zip(text, widths, strict=False)), text[-1]))


def _row(one: QueueStatus) -> tuple[object, ...]:
    state = f"{one.state.value}: {one.reason}" if one.reason else one.state.value
    offsets = (one.consumed_offset, one.pulled_offset, one.max_offset)
    where = (one.queue.topic, one.queue.broker_name, one.queue.queue_id)
    return (*where, *offsets, one.held_messages, one.held_bytes, utc(one.since_ms), state)


def utc(at_ms: int) -> str:
    """Return a time in ms since the epoch as readable text."""
    return datetime.fromtimestamp(at_ms / 1000.0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _connection(one: BrokerStatus) -> str:
    return ("open" if one.is_connected else "none") + ("" if one.is_reachable else ", not reachable")


class ConsumerStats:
    """Counters and durations of the pulls and the handler calls for one topic, since ``at_ms`` (monotonic).

    ``pulls`` and ``pull_ms`` are the number and the duration of responses with messages, and ``pulled`` is the number
    of these messages. ``calls`` and ``call_ms`` are the number and the duration of handler calls, and ``consumed`` and
    ``failed`` are the numbers of their messages."""

    __slots__ = ("_samples", "call_ms", "calls", "consumed", "failed", "pull_ms", "pulled", "pulls")

    def __init__(self, at_ms: float) -> None:
        self.pulls = self.pulled = self.calls = self.consumed = self.failed = 0
        self.pull_ms = self.call_ms = 0.0
        self._samples = deque([(at_ms, *self._counters())], _SAMPLES_MAX)

    def sample(self, at_ms: float) -> None:
        """Store a sample of the counters if the last sample is old enough."""
        if at_ms - self._samples[-1][0] >= SAMPLE_INTERVAL_MS:
            self._samples.append((at_ms, *self._counters()))

    def status(self, at_ms: float) -> ConsumeStatus:
        """Return means and rates of the last minute, and the failures of the last hour."""
        # Use the oldest sample of the last minute. If there is none, use the last sample.
        then = next((one for one in self._samples if at_ms - one[0] <= _MINUTE_MS), self._samples[-1])
        seconds = max(at_ms - then[0], 1.0) / 1000.0
        pulls, pull_ms, pulled, calls, call_ms, consumed, failed = (
            now - before for now, before in zip(self._counters(), then[1:], strict=True)
        )
        return ConsumeStatus(
            pull_rt=pull_ms / pulls if pulls else 0.0,
            pull_tps=pulled / seconds,
            consume_rt=call_ms / calls if calls else 0.0,
            consume_ok_tps=consumed / seconds,
            consume_failed_tps=failed / seconds,
            consume_failed_msgs=self.failed - int(self._samples[0][-1]),
        )

    def _counters(self) -> tuple[float, ...]:
        return (self.pulls, self.pull_ms, self.pulled, self.calls, self.call_ms, self.consumed, self.failed)
