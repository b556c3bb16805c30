"""The knowledge of the clients of a simulated cluster: sent messages, and the calls of handlers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rmqkit.client.observe.hooks import SendResult, SendStatus
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import lite_number


class Kind(Enum):
    """The kind of a send."""

    PLAIN = "plain"
    BATCH = "batch"
    ORDERED = "ordered"
    LEVEL = "delay level"
    TIMED = "timed"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    ONE_WAY = "one-way"
    FLEETING = "fleeting"
    SESSION = "session"


class State(Enum):
    """The knowledge of the sender."""

    RUNNING = "running"
    ACKNOWLEDGED = "acknowledged"
    IN_DOUBT = "in doubt"


class Place(NamedTuple):
    """The place of a stored message."""

    topic: str
    broker: str
    queue_id: int
    offset: int


@dataclass(slots=True)
class Sent:
    """One message.

    Attributes:
        sender: the process that sends it.
        due: seconds of the world before which the message must not be delivered, or 0.
        place: where it was stored, if the answer says it and the message is not moved later.
    """

    number: int
    topic: str
    kind: Kind
    body: bytes
    at: float
    sender: str = ""
    state: State = State.RUNNING
    place: Place | None = None
    due: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Arrival:
    """One call of a handler."""

    number: int
    member: str
    place: Place
    at: float
    is_retried: bool
    ended: float | None = None
    failed: bool = False


@dataclass
class Ledger:
    """Sends by number, and arrivals by group. ``deleted``: the messages that the retention deleted."""

    sent: dict[int, Sent] = field(default_factory=dict)
    arrivals: dict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    by_number: dict[str, dict[int, list[Arrival]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    by_place: dict[Place, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)

    def begin(self, topic: str, kind: Kind, at: float, size: int, sender: str) -> Sent:
        """Note a send before it begins."""
        number = len(self.sent) + 1
        body = b"%d " % number + bytes((number * 7 + i) % 251 for i in range(size))
        one = self.sent[number] = Sent(number, topic, kind, body, at, sender)
        return one

    def acknowledged(self, one: Sent, result: SendResult, index: int = 0, *, session: str = "") -> None:
        """Note the answer to a send. ``index``: of the message in its batch. ``session``: its lite topic."""
        if result.status is not SendStatus.SEND_OK:
            one.state, one.error = State.IN_DOUBT, result.status.name
            return
        one.state = State.ACKNOWLEDGED
        queue = result.queue
        if one.kind in (Kind.PLAIN, Kind.BATCH, Kind.ORDERED):
            one.place = Place(one.topic, queue.broker_name, queue.queue_id, result.queue_offset + index)
        elif one.kind is Kind.SESSION and result.lite_offset is not None:
            one.place = Place(session, queue.broker_name, 0, result.lite_offset)
        if one.place is not None:
            self.by_place[one.place] = one.number

    def failed(self, one: Sent, error: BaseException) -> None:
        """Note a failed send: the message may be stored or not."""
        one.state, one.error = State.IN_DOUBT, repr(error)

    def arrived(self, group: str, member: str, message: Any, at: float) -> Arrival:
        """Note the start of a handler."""
        number = number_of(message.body)
        place = place_of(message, message.broker_name)
        arrival = Arrival(number, member, place, at, message.reconsume_times > 0)
        self.arrivals[group].append(arrival)
        self.by_number[group][number].append(arrival)
        one = self.sent.get(number)
        if one is None or bytes(message.body) != one.body:
            self.findings.append(f"{group} got a message that was never sent: {bytes(message.body)[:40]!r}")
        elif one.kind is Kind.ROLLED_BACK:
            self.findings.append(f"{group} got {number}, which was rolled back")
        return arrival

    def wanted(self, topics: set[str]) -> list[Sent]:
        """Return the acknowledged messages of topics that must be delivered."""
        return [
            one
            for one in self.sent.values()
            if one.state is State.ACKNOWLEDGED
            and one.topic in topics
            and one.kind is not Kind.ROLLED_BACK
            and one.number not in self.deleted
        ]

    def missing(self, group: str, topics: set[str]) -> list[Sent]:
        """Return the messages that must be delivered to a group, and were not handled yet."""
        handled = self.by_number[group]
        return [
            one
            for one in self.wanted(topics)
            if not any(arrival.ended is not None and not arrival.failed for arrival in handled.get(one.number, ()))
        ]


def place_of(message: ReceivedMessage, broker: str) -> Place:
    """Return the place of a message: of a lite topic's message, its place there."""
    if message.lite_topic is not None:
        return Place(message.lite_topic, broker, 0, lite_number(message.properties))
    return Place(message.topic, broker, message.queue_id, message.queue_offset)


def number_of(body: bytes) -> int:
    """Return the number of a message."""
    return int(bytes(body).split(b" ", 1)[0])
