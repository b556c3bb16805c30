"""The record of sent and consumed messages, and the check of it.

Messages are numbers. A send is acknowledged or in doubt. An arrival has its group, member, place and time. Times are
monotonic: all processes of a machine share that clock.

==============  ========================================================================================================
duplicate       reason, if at-least-once allows it
==============  ========================================================================================================
stored twice    the answer to a send was lost and the send was retried: two places, one unique key
taken over      the queue changed hands, and the last offsets of the previous member were not saved
sent back       a handler failed: the message was redelivered from the retry topic
unexplained     none of these: a failure
==============  ========================================================================================================
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rmqkit.client.observe.hooks import SendResult
from rmqkit.errors import NoRoute, PeerRefused, RmqError, SendFailed
from rmqkit.protocol.message import ReceivedMessage

DOCUMENTED = (NoRoute, PeerRefused, SendFailed)
"""Errors that `Producer.send` may raise when servers fail."""

SAME_OWNER_SECONDS = 0.1
"""A queue cannot be lost, assigned to another member and be back within this time."""


class Place(NamedTuple):
    """The place of a stored message."""

    queue: str
    offset: int


class Acknowledged(NamedTuple):
    """A send that succeeded."""

    place: Place
    msg_id: str
    at: float


class Arrival(NamedTuple):
    """One call of a handler."""

    number: int
    place: Place
    member: str
    at: float
    is_retried: bool = False


class Ledger:
    """The sends of one run, and its arrivals by group."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, Acknowledged] = {}
        self.in_doubt: dict[int, RmqError] = {}
        self.arrivals: defaultdict[str, list[Arrival]] = defaultdict(list)
        self._arrived: defaultdict[str, set[int]] = defaultdict(set)
        self.undocumented: list[BaseException] = []

    def sent(self, number: int, result: SendResult) -> None:
        """Record an acknowledged send."""
        place = Place(f"{result.queue.broker_name}/{result.queue.queue_id}", result.queue_offset)
        self.acknowledged[number] = Acknowledged(place, result.msg_id, time.monotonic())

    def failed(self, number: int, error: RmqError) -> None:
        """Record a send that raised: the message may be stored or not."""
        self.in_doubt[number] = error
        if not isinstance(error, DOCUMENTED):
            self.undocumented.append(error)

    def arrived(self, group: str, member: str, message: ReceivedMessage) -> None:
        """Record a consumed message."""
        self.note(group, arrival_of(message, member))

    def note(self, group: str, arrival: Arrival) -> None:
        """Record an arrival, perhaps from another process."""
        self.arrivals[group].append(arrival)
        self._arrived[group].add(arrival.number)

    # -- judging

    def lost(self, group: str) -> set[int]:
        """Return the numbers that were acknowledged but not consumed."""
        return self.acknowledged.keys() - self._arrived[group]

    def strangers(self, group: str) -> set[int]:
        """Return the numbers that were consumed but never sent."""
        return self._arrived[group] - self.acknowledged.keys() - self.in_doubt.keys()

    def duplicates(self, group: str) -> Counter[str]:
        """Count the repeated arrivals by explanation."""
        return Counter(one.why for one in explained(self.arrivals[group]))

    def oldest_taken_over(self, group: str) -> float:
        """Return the longest time in seconds for which a consumed message was not saved when another member took
        over.
        """
        return max((one.age for one in explained(self.arrivals[group]) if one.why == "taken over"), default=0.0)

    def stalls(self, group: str, outages: Sequence[tuple[float, float]] = ()) -> dict[str, Stall]:
        """Return the longest time in which each queue had messages but no arrival. Outages do not count."""
        stored: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for one in self.acknowledged.values():
            stored[one.place.queue].append((one.at, one.place.offset))
        consumed: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for arrival in self.arrivals[group]:
            consumed[arrival.place.queue].append((arrival.at, arrival.place.offset))
        return {queue: longest_stall(stored[queue], consumed[queue], outages) for queue in stored}

    def order_broken(self, group: str) -> list[str]:
        """Return the arrivals that skipped a message. A queue advances by one, but it may go back."""
        reached: defaultdict[str, int] = defaultdict(lambda: -1)
        broken: list[str] = []
        for arrival in sorted(self.arrivals[group], key=lambda one: one.at):
            queue, offset = arrival.place
            if offset > reached[queue] + 1:
                broken.append(f"{queue}: {offset} was handled after {reached[queue]}")
            reached[queue] = offset
        return broken

    def check_stored(self, stored: dict[int, list[tuple[Place, str]]], tries: int) -> None:
        """Compare the stored messages with the sent ones. Raises AssertionError: they do not agree."""
        for number, one in self.acknowledged.items():
            assert (one.place, one.msg_id) in stored.get(number, []), (
                f"{number} is not where it was acknowledged: {one}"
            )
        for number, copies in stored.items():
            assert number in self.acknowledged or number in self.in_doubt, f"{number} was never sent: {copies}"
            assert len(copies) <= tries, f"{number} was tried {tries} times and is stored at {copies}"
            assert len({key for _, key in copies}) == 1, f"one send of {number} has several keys: {copies}"


def arrival_of(message: ReceivedMessage, member: str) -> Arrival:
    """Return a message as an arrival."""
    place = Place(f"{message.broker_name}/{message.queue_id}", message.queue_offset)
    return Arrival(int(message.body.split()[0]), place, member, time.monotonic(), message.reconsume_times > 0)


class Duplicate(NamedTuple):
    """A repeated arrival: its reason, and the seconds since the previous arrival."""

    why: str
    arrival: Arrival
    age: float


def explained(arrivals: Iterable[Arrival]) -> list[Duplicate]:
    """Return the repeated arrivals."""
    found: list[Duplicate] = []
    earlier: defaultdict[int, list[Arrival]] = defaultdict(list)
    for arrival in sorted(arrivals, key=lambda one: one.at):
        if before := earlier[arrival.number]:
            found.append(Duplicate(_why(arrival, before), arrival, arrival.at - before[-1].at))
        before.append(arrival)
    return found


def _why(arrival: Arrival, before: list[Arrival]) -> str:
    if arrival.is_retried or any(one.is_retried for one in before):
        return "sent back"
    same_place = [one for one in before if one.place == arrival.place]
    if not same_place:
        return "stored twice"
    last = same_place[-1]
    if last.member != arrival.member or arrival.at - last.at > SAME_OWNER_SECONDS:
        return "taken over"
    return "unexplained"


class Stall(NamedTuple):
    """The time for which a queue stood still, and the time at which it continued."""

    seconds: float
    until: float


def longest_stall(
    stored: Iterable[tuple[float, int]],
    consumed: Iterable[tuple[float, int]],
    outages: Sequence[tuple[float, float]] = (),
) -> Stall:
    """Return the longest time without consumption while messages waited.

    Both arguments are pairs of time and offset. A wait starts at the last consumption, or at the first message that was
    stored after it, if that is later. It starts again at the end of an outage.
    """
    waiting = deque(sorted(stored))
    done: set[int] = set()
    longest, last = Stall(0.0, 0.0), float("-inf")
    for at, offset in sorted(consumed):
        while waiting and waiting[0][1] in done:
            waiting.popleft()
        if waiting:
            begin = max(last, waiting[0][0])
            for down, up in sorted(outages):
                if down < at and begin < up:
                    begin = min(up, at)
            longest = max(longest, Stall(at - begin, at))
        done.add(offset)
        last = at
    return longest
