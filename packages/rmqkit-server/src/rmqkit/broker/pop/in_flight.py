"""The in-flight pops of a broker: their state, the time at which their messages are redelivered, and their records.

Due times are grouped in slots of `_SLOT_MS`, and a heap holds the slots. Most check points are acknowledged and leave
their slot long before the slot is due. `PopCounts` holds the counters for Prometheus:

==========================  ==========================================================================================
``…_in_message_total``      check points and acknowledged messages
``…_out_message_total``     completed check points and acknowledged messages. Subtract the check points of this metric
                            from those of the other to get the pending check points. (Apache's broker counts all
                            records that its revive service reads, and some of them twice)
``…_lag``, ``…_latency``    overdue check points that are not revived yet, and by how many ms the oldest is overdue
==========================  ==========================================================================================

Use this module only on the event loop. Source: behaviour.md §4.9, §4.12, §9.10.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec
from msgspec import UNSET, Struct

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.metrics import histogram
from rmqkit.protocol.properties import TIMER_DELIVER_MS, encode_properties
from rmqkit.protocol.schemas.pop import PopCheckPoint, StoredAck
from rmqkit.store.message_store import InnerMessage, PutStatus

__all__ = [
    "ACK",
    "ACKS_TAG",
    "ACK_TAG",
    "CHECK_POINT",
    "CHECK_POINT_TAG",
    "AckKey",
    "ExpiryWheel",
    "InFlightPop",
    "NewCheckPoint",
    "PopCounts",
    "QueueKey",
    "ReviveRecords",
]

CHECK_POINT_TAG, ACK_TAG, ACKS_TAG = "ck", "ack", "bAck"
_write = msgspec.json.Encoder().encode
_PROPERTIES = {
    # Apache's broker reads the current time from TIMER_DELIVER_MS of the newest record. Without the property, nothing
    # becomes due there.
    tag: encode_properties({TIMER_DELIVER_MS: "%d", "UNIQ_KEY": "%s", "TAGS": tag}).decode()
    for tag in (CHECK_POINT_TAG, ACK_TAG, ACKS_TAG)
}

_SLOT_MS = 100
CHECK_POINT, ACK = "CK", "ACK"
"""The kinds of records in metrics."""
_OK = PutStatus.OK  # reading an enumeration member costs a call, and so does ``+=`` on a Counter

AckKey = tuple[str, str, int, int, int]
"""The key of a pop in acks: topic, group, queue id, start offset, pop time."""

QueueKey = tuple[str, str, int]
"""Topic, group and queue id."""


# Compared by identity (eq=False): slots use the pop as a key while `left` changes.
class InFlightPop(Struct, eq=False):
    """One pop of one queue that still has unacknowledged messages. This is a check point in memory.

    Attributes:
        key: the key of the pop in acks.
        left: the queue offsets of the messages that are not acknowledged.
        due_ms: the time at which these messages are redelivered, ms since the epoch.
        revive_offset: the offset of the check point in the revive queue, -1 until it is stored.
        unwritten: offsets of acknowledged messages whose acks are not stored yet.
        is_suspended: the redelivery of these messages does not count as a retry.
    """

    key: AckKey
    queue_key: QueueKey
    left: set[int]
    due_ms: int
    revive_queue_id: int
    revive_offset: int
    # msgspec copies an empty default list for each pop.
    unwritten: list[int] = []
    is_suspended: bool = False

    @property
    def topic(self) -> str:
        return self.key[0]

    @property
    def group(self) -> str:
        return self.key[1]

    @property
    def queue_id(self) -> int:
        return self.key[2]

    @property
    def pop_time(self) -> int:
        return self.key[4]


class NewCheckPoint(Struct):
    """A check point that is not stored yet, and the group's offset before and after the pop."""

    pending: InFlightPop
    message: InnerMessage
    before: int
    after: int


class ExpiryWheel:
    """The stored check points by due time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: dict[int, dict[InFlightPop, None]] = {}
        self._numbers: list[int] = []

    def due(self) -> Iterator[InFlightPop]:
        """Yield the due check points. The caller removes or postpones each check point. A check point that the caller
        leaves becomes due again a moment later, after the other check points."""
        end, numbers = self._clock.now_ms() // _SLOT_MS, self._numbers
        # Read only slots that are over: a message may be redelivered a little late, but not early.
        while numbers and numbers[0] < end:
            slot = self._slots[numbers[0]]
            if slot:
                pending = next(iter(slot))
                # Postpone before the yield: otherwise a caller that fails would get the same check point in a loop.
                self.postpone(pending, _SLOT_MS)
                assert pending not in slot, "a yielded check point is in a later slot"
                yield pending
            else:
                del self._slots[heapq.heappop(numbers)]

    def late(self) -> Iterator[tuple[InFlightPop, int]]:
        """Yield each overdue check point and the number of ms since its due time."""
        now_ms = self._clock.now_ms()
        for slot in [slot for number, slot in self._slots.items() if number * _SLOT_MS <= now_ms]:
            yield from ((pending, now_ms - pending.due_ms) for pending in slot if pending.due_ms < now_ms)

    def postpone(self, pending: InFlightPop, ms: int) -> None:
        """Make a check point due later, even if the clock was set back."""
        self.leave(pending)
        # Change the due time between `leave` and `enter`: both compute the slot from the due time.
        pending.due_ms = max(pending.due_ms, self._clock.now_ms()) + ms
        self.enter(pending)

    def enter(self, pending: InFlightPop) -> None:
        """Add an in-flight pop to its slot, which follows from its due time."""
        number = pending.due_ms // _SLOT_MS
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._numbers, number)
        slot[pending] = None

    def leave(self, pending: InFlightPop) -> None:
        """Remove an in-flight pop, if it is in its slot."""
        slot = self._slots.get(pending.due_ms // _SLOT_MS)
        if slot is not None:
            slot.pop(pending, None)


class ReviveRecords:
    """The factory of the revive topic's records. The records are check points (tag ``ck``), acks of one message (tag
    ``ack``) and acks of several messages of one pop (tag ``bAck``). Apache's broker can read the records."""

    def __init__(self, topic: str, settings: BrokerSettings, clock: Clock, store_host: bytes) -> None:
        self._topic = topic
        self._settings = settings
        self._clock = clock
        self._store_host = store_host

    def check_point(self, pending: InFlightPop, offsets: list[int], invisible_ms: int) -> InnerMessage:
        """Return the check point record of a pop. ``offsets``: the offsets of the popped messages."""
        topic, group, queue_id, start, pop_time = pending.key
        assert all(offset >= start for offset in offsets), "no offset is less than the start offset"
        name = self._settings.broker_name
        check_point = PopCheckPoint(
            broker_name=name,
            group=group,
            diffs=[offset - start for offset in offsets],
            invisible_time=invisible_ms,
            count=len(offsets),
            pop_time=pop_time,
            queue_id=queue_id,
            revive_time=pending.due_ms,
            start_offset=start,
            suspends=pending.is_suspended or UNSET,
            topic=topic,
        )
        unique_key = f"{topic}@{queue_id}@{start}@{group}@{pop_time}@{name}@ck"
        return self._message(pending.revive_queue_id, CHECK_POINT_TAG, unique_key, _write(check_point))

    def ack(self, pending: InFlightPop, offsets: list[int]) -> InnerMessage:
        """Return the record that acknowledges some messages of a pop."""
        assert offsets, "an ack has at least one offset"
        topic, group, queue_id, start, pop_time = pending.key
        # Apache's broker expects one offset with the tag `ack` and a list of offsets with the tag `bAck`.
        name, is_one = self._settings.broker_name, len(offsets) == 1
        body = StoredAck(
            ack_offset=offsets[0] if is_one else -1,
            broker_name=name,
            group=group,
            pop_time=pop_time,
            queue_id=queue_id,
            start_offset=start,
            topic=topic,
        )
        if not is_one:
            body.ack_offsets = offsets
        key = f"{topic}@{queue_id}@{body.ack_offset}@{group}@{pop_time}@{name}@ack"
        return self._message(pending.revive_queue_id, ACK_TAG if is_one else ACKS_TAG, key, _write(body))

    def _message(self, queue_id: int, tag: str, unique_key: str, body: bytes) -> InnerMessage:
        now_ms, host = self._clock.now_ms(), self._store_host
        # These two separators end names and values in a property string. In a key they would create other properties.
        if "\x01" in unique_key or "\x02" in unique_key:
            raise ValueError(f"{unique_key!r} contains the separator 0x01 or 0x02: rename topic, group or broker")
        properties = (_PROPERTIES[tag] % (now_ms, unique_key)).encode("utf-8", "replace")
        keys = (unique_key.encode("utf-8", "replace"), b"", tag.encode())
        return InnerMessage(self._topic, queue_id, body, properties, 0, 0, now_ms, host, host, keys=keys)


class PopCounts:
    """The counters of POP. The keys are label values in the order of the metrics' table.

    Attributes:
        put: stored records by topic, group, kind (`CHECK_POINT` or `ACK`) and status of the put.
        done: completed records by topic, group, kind and revive queue.
        revived: redelivered messages by topic, group and status of the put.
        scan_ms: the time that a write of the delayed acks takes.
    """

    def __init__(self) -> None:
        self.put: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.done: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.revived: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.scan_ms = histogram("rocketmq_pop_buffer_scan_time_consume")

    def has_put(self, topic: str, group: str, kind: str, status: PutStatus, count: int = 1) -> None:
        """Count check points or acknowledged messages by the status of their put."""
        ended = "PUT_OK" if status is _OK else status.value
        self.put[topic, group, kind, ended] += count

    def drop_topics(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the counters of deleted topics."""
        for table in (self.put, self.done, self.revived):
            for key in [key for key in table if is_gone(key[0])]:
                del table[key]
