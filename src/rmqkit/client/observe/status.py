"""What consumers and producers tell about themselves: typed, and as text a table. Source: behaviour.md §7.5, §8.6."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec import Struct

from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["BrokerStatus", "MemberStatus", "ProducerStatus", "QueueState", "QueueStatus", "utc"]


class QueueState(enum.Enum):
    """What a queue is doing (`watch` says when)."""

    MOVING = "moving"
    CAUGHT_UP = "caught up"
    PAUSED = "paused"
    TAKING_OVER = "taking over"
    WAITING_FOR_LOCK = "waiting for lock"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    FULL = "full"
    FAILING = "failing"
    BUSY = "busy"
    WAITING_FOR_TURN = "waiting for turn"


class QueueStatus(Struct, kw_only=True):
    """One queue of a consumer.

    Attributes:
        consumed_offset: the first offset that is not consumed; None before it is known where to begin.
        pulled_offset: the next offset to pull.
        max_offset: one past the last message, as the broker told with the last pull.
        held_messages, held_bytes: pulled and not consumed.
        reason: what the state is about: message, limit, address, code.
        since_ms: when it came into this state, in ms since the epoch.
        is_stalled: whether it stands still.
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
        """Messages that are stored and not consumed, as far as it is known."""
        if self.max_offset is None or self.consumed_offset is None:
            return None
        return max(0, self.max_offset - self.consumed_offset)


class MemberStatus(Struct, kw_only=True):
    """One consumer; ``state`` is that of the client, ``missing_topics`` are subscribed and have no queues to read."""

    group: str
    client_id: str
    state: str
    queues: list[QueueStatus]
    missing_topics: list[str]

    @property
    def backlog(self) -> int:
        """Messages that are stored and not consumed, as far as it is known."""
        return sum(one.backlog or 0 for one in self.queues)

    @property
    def stalled(self) -> list[QueueStatus]:
        """The queues that stand still."""
        return [one for one in self.queues if one.is_stalled]

    def __str__(self) -> str:
        head = f"consumer of group {self.group}, client {self.client_id}: {self.state}, {len(self.queues)} queues, "
        head += f"backlog {self.backlog}, {len(self.stalled)} stand still"
        if self.missing_topics:
            head += f"; no queues of {', '.join(self.missing_topics)}"
        titles = ("topic", "broker", "queue", "consumed", "pulled", "max", "held", "bytes", "since", "state")
        return "\n".join((head, *_table(titles, (_row(one) for one in self.queues))))


class BrokerStatus(Struct, kw_only=True):
    """A broker that a producer knows.

    Attributes:
        avoided_ms: how much longer sends keep away from it, 0 for not at all (``avoid_slow_brokers``).
        is_reachable: whether sends succeed, as far as it is known.
    """

    name: str
    broker_id: int
    address: str
    is_connected: bool
    avoided_ms: float = 0.0
    is_reachable: bool = True


class ProducerStatus(Struct, kw_only=True):
    """One producer; ``state`` is that of the client."""

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
    """Lines of columns; the last one is as wide as it likes."""
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
    """A time as people read it."""
    return datetime.fromtimestamp(at_ms / 1000.0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _connection(one: BrokerStatus) -> str:
    return ("open" if one.is_connected else "none") + ("" if one.is_reachable else ", not reachable")
