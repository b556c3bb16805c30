"""Check points and acks of popped messages (``PopBufferMergeService``, the reading part of ``PopReviveService``).

A pop stores one *check point* per queue in the revive topic before its messages are sent. Acks that arrive together are
stored with one write, as one record per pop. Pending check points are also in memory, so the broker reads the revive
topic only when it starts. It begins after the committed offset of the group CID_RMQ_SYS_REVIVE_GROUP, which is the
offset of the last record before all pending records.

============================  =======================================================================================
difference from reference     details
============================  =======================================================================================
records go directly to the    the due times are in memory, so no timer is needed. Apache's broker can read such a
revive topic, not through     store: it waits for the time in the check point
the timer wheel
``enablePopBufferMerge``      delays only acks, for a moment: after a kill -9 the messages of delayed acks are
                              redelivered. Check points are never delayed
acks without a pending pop    are not stored
============================  =======================================================================================

`PopWriteBatch` stores the records of all pops and acks of one loop tick at the end of the tick. When a check point is
stored, the group's offset moves and the messages are sent. Until then, the next pop of the queue begins at
`PopWriteBatch.next_offsets`. A crash in between neither delivers nor loses a message. If the store refuses a check
point, its messages are popped again.

With ASYNC_FLUSH a crash loses only the writes that the operating system loses. Use this module only on the event loop.
Source: behaviour.md §4.7 to §4.10, §4.12.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from rmqkit.broker.pop.in_flight import (
    ACK,
    ACK_TAG,
    ACKS_TAG,
    CHECK_POINT,
    CHECK_POINT_TAG,
    AckKey,
    ExpiryWheel,
    InFlightPop,
    NewCheckPoint,
    PopCounts,
    QueueKey,
    ReviveRecords,
)
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.clock import Clock
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.command import Command
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.pop import PopCheckPoint, StoredAck
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["REVIVE_GROUP", "AnswerAcks", "CheckPointStore", "PopWriteBatch", "Waiting", "revive_topic"]

REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
_READ_COUNT = 32
_NEVER_MS = 1 << 63
_OK = PutStatus.OK  # reading an enumeration member costs a call

_read_check_point = msgspec.json.Decoder(PopCheckPoint).decode
_read_ack = msgspec.json.Decoder(StoredAck).decode

_log = logging.getLogger(__name__)


def revive_topic(cluster_name: str) -> str:
    """Return the topic in which a cluster's brokers store check points and acks."""
    return f"rmq_sys_REVIVE_LOG_{cluster_name}"


class CheckPointStore:
    """The check points of in-flight pops, in memory and in the revive topic.

    Attributes:
        in_flight: unacknowledged messages by topic, group and queue id.
        counts: counters for metrics.
    """

    def __init__(
        self,
        store: MessageStore,
        groups: GroupTable,
        offsets: OffsetTable,
        settings: BrokerSettings,
        clock: Clock,
        store_host: bytes,
    ) -> None:
        self._store = store
        self._groups = groups
        self._offsets = offsets
        self._settings = settings
        self._clock = clock
        self._topic = revive_topic(settings.cluster_name)
        self._records = ReviveRecords(self._topic, settings, clock, store_host)
        self._read: dict[int, int] = {}
        self._queues: dict[int, dict[int, InFlightPop]] = {}
        self._table: dict[AckKey, InFlightPop] = {}
        self._expiry = ExpiryWheel(clock)
        self._unwritten: dict[AckKey, InFlightPop] = {}
        self._committed: dict[int, int] = {}
        self._offsets_at_ms = self._groups_at_ms = _NEVER_MS
        self._revive_queue_ids: Iterator[int] = itertools.repeat(0)
        self.in_flight: dict[QueueKey, int] = {}
        self.counts = PopCounts()

    def __len__(self) -> int:
        """Return the number of pending check points."""
        return len(self._table)

    @property
    def pending(self) -> dict[AckKey, set[int]]:
        """The unacknowledged offsets by the key of their pop."""
        return {key: set(one.left) for key, one in self._table.items()}

    def load(self, queue_count: int, *, offsets_at_ms: int, groups_at_ms: int) -> None:
        """Read the pending check points from the store, which is open.

        ``offsets_at_ms``: the time when the groups' offsets were last written. Messages that were popped after this
        time, before a crash, are not popped again but are redelivered when their invisible time is over.
        ``groups_at_ms``: the time when the groups were last written. A group that popped after this time is created
        again: without the group its messages would not be redelivered.
        """
        self._offsets_at_ms, self._groups_at_ms = offsets_at_ms, groups_at_ms
        self._revive_queue_ids = itertools.cycle(range(queue_count))
        for queue_id in range(queue_count):
            committed = self._offsets.get(REVIVE_GROUP, self._topic, queue_id)
            low, high = self._store.bounds(self._topic, queue_id)
            if committed is not None and committed >= high:
                # A power cut took the records up to this offset. New records get the same offsets: the next start has
                # to read them.
                committed = high - 1
                self._offsets.commit(REVIVE_GROUP, self._topic, queue_id, committed)
            # The committed offset is the offset of the last completed record, as in Apache's revive service. Read from
            # the next record.
            self._read[queue_id] = low if committed is None else max(low, committed + 1)
            self._queues[queue_id] = {}
        self._committed.clear()
        # Reset the times after this call: later calls of `follow` read only records that are older than both tables.
        self.follow()
        self._offsets_at_ms = self._groups_at_ms = _NEVER_MS

    def has_queue(self, queue_id: int) -> bool:
        """Return True if the revive topic has this queue."""
        return queue_id in self._queues

    def next_queue(self) -> int:
        """Return the revive queue id for the next pop."""
        return next(self._revive_queue_ids)

    def add(
        self,
        topic: str,
        group: str,
        queue_id: int,
        offsets: list[int],
        *,
        pop_time: int,
        invisible_ms: int,
        queue: int,
        suspends: bool = False,
    ) -> PutResult:
        """Make and store a check point of popped messages. The messages can be sent afterwards. The arguments are the
        same as for `new`."""
        one = self.new(
            topic,
            group,
            queue_id,
            offsets,
            pop_time=pop_time,
            invisible_ms=invisible_ms,
            queue=queue,
            suspends=suspends,
        )
        return self.store([one], {})[0][0]

    def new(
        self,
        topic: str,
        group: str,
        queue_id: int,
        offsets: list[int],
        *,
        pop_time: int,
        invisible_ms: int,
        queue: int,
        before: int = -1,
        after: int = -1,
        suspends: bool = False,
    ) -> NewCheckPoint:
        """Make a check point of popped messages. The messages are in flight from now on, and the caller has to `store`
        the check point next. The caller also ensures that no other pop has the same key (`is_taken`).
        ``queue``: the queue id of the revive topic. ``before``, ``after``: the group's offset before and after the pop.
        `store` moves the offset. ``suspends``: the redelivery of the messages does not count as a retry."""
        start, due_ms = offsets[0], pop_time + invisible_ms
        key, queue_key = (topic, group, queue_id, start, pop_time), (topic, group, queue_id)
        pending = InFlightPop(key, queue_key, set(offsets), due_ms, queue, -1)
        if suspends:
            pending.is_suspended = True
        assert key not in self._table, "pending pops have different keys"
        assert key not in self._unwritten, "no unwritten acks of another pop have this key"
        # Make the record first: it raises ValueError for names that a record cannot hold, and in this case nothing must
        # change.
        message = self._records.check_point(pending, offsets, invisible_ms)
        self._count_in(pending)
        return NewCheckPoint(pending, message, before, after)

    def store(
        self, new: list[NewCheckPoint], acks: Mapping[AckKey, Iterable[int]]
    ) -> tuple[list[PutResult], list[PutResult | None]]:
        """Store check points, and after them the acks of some pops, with one write.
        If a check point is refused, later check points of its queue are refused, too, because the group's offset does
        not move. Return one result per check point, and one result per pop as in `ack`."""
        merges = self._settings.pop_buffer_merge
        left = [self._left(key, offsets) for key, offsets in acks.items()]
        messages = [one.message for one in new]
        if not merges:
            messages += [self._records.ack(pending, offsets) for pending, offsets in left if pending is not None]
        run = self._put_run(messages) if len(messages) > 1 else None
        puts: list[PutResult] = []
        refused: dict[QueueKey, PutResult] = {}
        for number, one in enumerate(new):
            put = run[number] if run is not None else refused.get(one.pending.queue_key) or self._put(one.message)
            puts.append(put)
            self._marked(one, put)
            if put.status is not _OK:
                refused[one.pending.queue_key] = put
        # Check points are before acks in the run: a reader must never find an ack before its check point.
        following = iter(run[len(new) :]) if run is not None else map(self._put, messages[len(new) :])
        results: list[PutResult | None] = []
        for pending, offsets in left:
            ended = None
            if pending is not None and merges:
                self._put_off(pending, offsets)
            elif pending is not None:
                ended = next(following)
                self._count_acks(pending, len(offsets), ended.status)
                # If the ack is refused, the client gets an error. The message stays in flight and is redelivered later.
                if ended.status is _OK:
                    self._done(pending, offsets)
            results.append(ended)
        return puts, results

    def withdraw(self, new: Iterable[NewCheckPoint]) -> None:
        """Drop check points that were not stored. Their messages are not sent."""
        # `store` may have failed half way: stored check points stay in flight, and refused check points are removed
        # already.
        for pending in [one.pending for one in new]:
            if pending.revive_offset < 0 and self._table.get(pending.key) is pending:
                self._count_out(pending, len(pending.left))

    def is_taken(self, topic: str, group: str, queue_id: int, start_offset: int, pop_time: int) -> bool:
        """Return True if a pending pop, or a pop with unwritten acks, has this key. An ack finds its pop by the key."""
        key = topic, group, queue_id, start_offset, pop_time
        return key in self._table or key in self._unwritten

    def ack(self, acks: Mapping[AckKey, Iterable[int]]) -> list[PutResult | None]:
        """Store that messages of some pops are consumed. Return one result per pop. A result is None if nothing was
        stored: no message is pending, or the ack is delayed (``enablePopBufferMerge``)."""
        return self.store([], acks)[1]

    @property
    def buffered(self) -> tuple[int, int]:
        """The number of check points with unwritten acks, and the number of unwritten acks."""
        return len(self._unwritten), sum(len(pending.unwritten) for pending in self._unwritten.values())

    @property
    def late(self) -> dict[int, tuple[int, int]]:
        """The number of overdue check points, and the ms since the oldest due time, by revive queue."""
        late = dict.fromkeys(self._queues, (0, 0))
        for pending, late_ms in self._expiry.late():
            count, ms = late[pending.revive_queue_id]
            late[pending.revive_queue_id] = count + 1, max(ms, late_ms)
        return late

    def revived(self, pending: InFlightPop, offsets: list[int]) -> None:
        """Remove redelivered or deleted messages from a pop.

        If the store refuses the ack record, `write_acks` stores it later. Without the record the messages would be
        redelivered again after a restart.
        """
        # Callers put the messages into the retry topic first: a crash in between repeats a message, but loses none.
        put = self._put(self._records.ack(pending, offsets))
        self._done(pending, offsets)
        if put.status is not _OK:
            self._write_later(pending, offsets)

    def due(self) -> Iterator[InFlightPop]:
        """Yield the due check points. A check point stays due until all its messages are `revived` or it is
        postponed."""
        return self._expiry.due()

    def postpone(self, pending: InFlightPop, ms: int) -> None:
        """Make a check point due again later."""
        self._expiry.postpone(pending, ms)

    def follow(self) -> None:
        """Read the records that are in the revive topic at the start, and records that other programs put there later.
        Do nothing while acks are unwritten: completed check points of this broker would become pending again."""
        if self._unwritten:
            return
        for queue_id, position in self._read.items():
            while position < self._store.max_offset(self._topic, queue_id):
                found = self._store.get(self._topic, queue_id, position, count_max=_READ_COUNT)
                for raw in found.records:
                    self._read_one(queue_id, raw)
                # Stop if a read makes no progress, to avoid an endless loop. The next call tries again.
                if found.next_begin_offset <= position:
                    break
                self._read[queue_id] = position = found.next_begin_offset

    def write_acks(self) -> None:
        """Store the delayed acks. The next call retries acks that the store refuses."""
        started_ms = self._clock.monotonic_ms()
        several = list(self._unwritten.values())
        puts = self._put_all([self._records.ack(pending, pending.unwritten) for pending in several])
        for pending, put in zip(several, puts, strict=True):
            if put.status is _OK:
                del self._unwritten[pending.key]
                pending.unwritten = []
        self.counts.scan_ms.observe(self._clock.monotonic_ms() - started_ms)

    def commit(self) -> None:
        """Move the revive group's offsets up to the first pending record."""
        unwritten = {queue: min(those) for queue, those in _by_queue(self._unwritten.values()).items()}
        for queue_id, waiting in self._queues.items():
            end = min(next(iter(waiting), self._read[queue_id]), unwritten.get(queue_id, self._read[queue_id]))
            # A restart reads from this offset: a lower offset repeats messages, a higher offset loses messages.
            assert self._committed.get(queue_id, 0) <= end <= self._read[queue_id], "the revive offset never falls"
            self._committed[queue_id] = end
            if end and self._offsets.get(REVIVE_GROUP, self._topic, queue_id) != end - 1:
                self._offsets.commit(REVIVE_GROUP, self._topic, queue_id, end - 1)

    def needed_from(self) -> int | None:
        """Return the physical offset of the oldest revive record that a restart has to read, or None."""
        found = [
            entry[1]
            for queue_id, offset in self._committed.items()
            for entry in self._store.entries(self._topic, queue_id, offset, count_max=1)
        ]
        return min(found, default=None)

    # -- inside

    def _left(self, key: AckKey, offsets: Iterable[int]) -> tuple[InFlightPop | None, list[int]]:
        """Return the pop with this key, and the offsets that are still pending. Return None and no offsets if no offset
        is pending."""
        pending = self._table.get(key)
        # No client has the handle before the check point is stored. An ack with a guessed handle would complete a pop
        # that may still be refused.
        if pending is None or pending.revive_offset < 0:
            return None, []
        # Select only pending offsets: a repeated ack, or an ack of a redelivered message, is not stored again.
        left = sorted(pending.left.intersection(offsets))
        return (pending, left) if left else (None, left)

    def _marked(self, one: NewCheckPoint, put: PutResult) -> None:
        """Record that a check point is stored and move the group's offset, or drop a refused check point."""
        pending = one.pending
        topic, group, queue_id = pending.queue_key
        self.counts.has_put(topic, group, CHECK_POINT, put.status)
        if put.status is not _OK:
            return self._count_out(pending, len(pending.left))
        assert put.queue_offset >= 0, "a stored record has an offset"
        # Schedule the check point only when it is stored: a restart would lose a check point without a record.
        pending.revive_offset = put.queue_offset
        self._wait_for(pending)
        if (
            one.after != one.before and self._offsets.get(group, topic, queue_id) == one.before
        ):  # unless the offset was set meanwhile
            self._offsets.commit(group, topic, queue_id, one.after)
        return None

    def _put_off(self, pending: InFlightPop, offsets: list[int]) -> None:
        self._done(pending, offsets)
        self._count_acks(pending, len(offsets), _OK)
        self._write_later(pending, offsets)

    def _write_later(self, pending: InFlightPop, offsets: list[int]) -> None:
        assert pending.left.isdisjoint(offsets), "acknowledged messages are not in flight"
        pending.unwritten += offsets
        self._unwritten[pending.key] = pending

    def _count_acks(self, pending: InFlightPop, count: int, status: PutStatus) -> None:
        topic, group, *_ = pending.key
        self.counts.has_put(topic, group, ACK, status, count)
        if status is _OK:
            self.counts.done[topic, group, ACK, str(pending.revive_queue_id)] += count

    def _put(self, message: InnerMessage) -> PutResult:
        put = self._store.put(message)
        if put.status is _OK:
            self._know(message.queue_id, put.queue_offset)
        return put

    def _put_all(self, messages: list[InnerMessage]) -> list[PutResult]:
        """Put messages with one write. If the store does not accept them together, put them one by one."""
        run = self._put_run(messages) if len(messages) > 1 else None
        return [self._put(message) for message in messages] if run is None else run

    def _put_run(self, messages: list[InnerMessage]) -> list[PutResult] | None:
        """Put messages with one write. Return None and store nothing if the store does not accept them together."""
        run = self._store.put_run(messages)
        if run is None:
            return None
        read, results = self._read, list[PutResult]()
        for one in run:
            queue_offset = one.queue_offset
            if read.get(one.queue_id) == queue_offset:  # like `_know`, without the call
                read[one.queue_id] = queue_offset + 1
            results.append(PutResult(_OK, one.physical_offset, one.physical_offset + one.size, queue_offset))
        return results

    def _know(self, queue_id: int, queue_offset: int) -> None:
        """Move the read position past a record that this broker put, if the record is the next one to read."""
        # A gap before the record contains records of other programs, such as check points of Apache's broker that the
        # timer delivers. `follow` reads these records, and this record again, which changes nothing.
        if queue_offset == self._read.get(queue_id):
            self._read[queue_id] += 1

    def _read_one(self, queue_id: int, raw: memoryview) -> None:
        try:
            record = decode_record(raw)
            tag = find_property(record.properties, b"TAGS")
            if tag == CHECK_POINT_TAG.encode():
                check_point = _read_check_point(record.body)
                if check_point.pop_time > min(self._groups_at_ms, self._offsets_at_ms):
                    # `get` creates a group that the crash lost. Without the group its messages would be dropped.
                    self._groups.get(check_point.group)
                if check_point.pop_time > self._offsets_at_ms:
                    self._take_offset(check_point)
                self._load(check_point, check_point.offsets_left, queue_id, record.queue_offset)
            elif tag in (ACK_TAG.encode(), ACKS_TAG.encode()):
                self._take_ack(_read_ack(record.body))
        except (RecordCorrupt, msgspec.DecodeError) as error:
            _log.warning("revive queue %d has a message that is neither check point nor ack: %s", queue_id, error)

    def _take_offset(self, popped: PopCheckPoint) -> None:
        """Move the group's offset to the end of a pop that happened after the offsets were written."""
        end = popped.start_offset + max(popped.diffs or [popped.count - 1]) + 1
        committed = self._offsets.get(popped.group, popped.topic, popped.queue_id)
        # Move only forward: messages in flight must not be popped again before their invisible time is over.
        if committed is None or committed < end:
            self._offsets.commit(popped.group, popped.topic, popped.queue_id, end)

    def _load(self, popped: PopCheckPoint, left: set[int], revive_queue_id: int, revive_offset: int) -> None:
        """Add a check point that was read from the revive topic to the pending check points."""
        topic, group, queue_id, pop_time = popped.topic, popped.group, popped.queue_id, popped.pop_time
        key = (topic, group, queue_id, popped.start_offset, pop_time)
        # If the pop time is in the future, the clock was set back since the pop: start its invisible time now.
        due_ms = min(pop_time, self._clock.now_ms()) + popped.invisible_time
        # `follow` may read a record that this broker put, after a record of another program. Count the pop only once.
        if left and key not in self._table:
            pending = InFlightPop(key, (topic, group, queue_id), left, due_ms, revive_queue_id, revive_offset)
            pending.is_suspended = popped.suspends is True
            self._count_in(pending)
            self._wait_for(pending)

    def _count_in(self, pending: InFlightPop) -> None:
        queue_key = pending.queue_key
        self._table[pending.key] = pending
        self.in_flight[queue_key] = self.in_flight.get(queue_key, 0) + len(pending.left)

    def _count_out(self, pending: InFlightPop, count: int) -> None:
        """Remove a pop. ``count``: the number of its messages that were in flight until now."""
        in_flight, queue_key = self.in_flight, pending.queue_key
        in_flight[queue_key] -= count
        assert in_flight[queue_key] >= 0, "no more messages are acknowledged than were popped"
        if not in_flight[queue_key]:
            del in_flight[queue_key]
        del self._table[pending.key]

    def _wait_for(self, pending: InFlightPop) -> None:
        """Schedule a stored check point for its due time."""
        waiting, revive_offset = self._queues[pending.revive_queue_id], pending.revive_offset
        is_late = waiting and next(reversed(waiting)) > revive_offset
        waiting[revive_offset] = pending
        if is_late:  # a record of another program, read after a record of this broker: `commit` relies on the order
            self._queues[pending.revive_queue_id] = dict(sorted(waiting.items()))
        self._expiry.enter(pending)

    def _take_ack(self, ack: StoredAck) -> None:
        pending = self._table.get((ack.topic, ack.group, ack.queue_id, ack.start_offset, ack.pop_time))
        if pending is not None:
            offsets = ack.ack_offsets if ack.ack_offset < 0 and ack.ack_offsets else [ack.ack_offset]
            self._done(pending, pending.left.intersection(offsets))

    def _done(self, pending: InFlightPop, offsets: Iterable[int]) -> None:
        left = pending.left
        before = len(left)
        left.difference_update(offsets)
        if left:
            self.in_flight[pending.queue_key] -= before - len(left)
            return
        self._count_out(pending, before)
        topic, group, _ = pending.queue_key
        assert pending.revive_offset >= 0, "a completed check point is stored"
        del self._queues[pending.revive_queue_id][pending.revive_offset]
        self.counts.done[topic, group, CHECK_POINT, str(pending.revive_queue_id)] += 1
        self._expiry.leave(pending)


def _by_queue(several: Iterable[InFlightPop]) -> dict[int, list[int]]:
    """Return the revive offsets of pops by revive queue."""
    in_order = sorted(several, key=attrgetter("revive_queue_id"))
    groups = itertools.groupby(in_order, key=attrgetter("revive_queue_id"))
    return {queue: [one.revive_offset for one in those] for queue, those in groups}


Waiting = list[tuple[Connection, Command | list[int]]]
"""Connections with the request to answer, or with the opaques of several requests that arrived together."""

AnswerAcks = Callable[[AckKey, PutResult | None, Waiting], None]
"""A function that is called with the result of the acks of a pop. The result is None if nothing was stored."""


class PopWriteBatch:
    """The records of the pops and acks of one loop tick. They are stored with one write at the end of the tick.

    Attributes:
        next_offsets: the offset after the messages that this batch popped, by queue. It is not committed yet.
    """

    def __init__(self, check_points: CheckPointStore) -> None:
        self._check_points = check_points
        self._loop = asyncio.get_running_loop()
        self.next_offsets: dict[QueueKey, int] = {}
        self._connections: dict[Connection, None] = {}
        self._new: list[NewCheckPoint] = []
        self._pop_answers: list[tuple[int, Callable[[PutResult], None]]] = []
        self._acks: dict[AckKey, tuple[list[int], Waiting, AnswerAcks]] = {}

    def pop(self, connection: Connection, new: list[NewCheckPoint], answer: Callable[[PutResult], None]) -> None:
        """Store check points and call ``answer`` with the result of the last put, or of the first refused put."""
        assert new, "a pop without check points is answered at once"
        self._begin(connection)
        # Add them in the order of the requests: `end` assigns the results by position.
        self._new += new
        self._pop_answers.append((len(new), answer))
        for one in new:
            self.next_offsets[one.pending.queue_key] = one.after

    def ack(self, key: AckKey, offset: int, connection: Connection, command: Command, answer: AnswerAcks) -> None:
        """Store that a message is consumed. Acks of one pop are answered together."""
        self._begin(connection)
        gathered = self._acks.get(key)
        if gathered is None:
            gathered = self._acks[key] = [], [], answer
        gathered[0].append(offset)
        gathered[1].append((connection, command))

    def ack_all(
        self, key: AckKey, offsets: list[int], connection: Connection, opaques: list[int], answer: AnswerAcks
    ) -> None:
        """Do the same as `ack` for messages of one pop whose requests arrived together."""
        self._begin(connection)
        gathered = self._acks.get(key)
        if gathered is None:
            gathered = self._acks[key] = [], [], answer
        gathered[0].extend(offsets)
        gathered[1].append((connection, opaques))

    def end(self) -> None:
        """Store and answer the requests of this tick. Write to each connection once."""
        # Empty the batch first: requests that arrive while the answers are sent belong to the next batch.
        connections, new, pops, acks = self._connections, self._new, self._pop_answers, self._acks
        self._connections, self._new, self._pop_answers, self._acks = {}, [], [], {}
        try:
            puts, acked = self._check_points.store(new, {key: offsets for key, (offsets, _, _) in acks.items()})
        except Exception as error:  # noqa: BLE001 - the outer edge of these requests: answered and logged once
            _log.exception("cannot store %d check points and the acks of %d pops", len(new), len(acks))
            failed = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason=f"{type(error).__name__}: {error}")
            puts, acked = [failed] * len(new), [failed] * len(acks)
            self._check_points.withdraw(new)
        assert (len(puts), len(acked)) == (len(new), len(acks)), "each request has one answer"
        # `store` has moved the groups' offsets. Messages of refused check points are popped again.
        self.next_offsets.clear()
        for connection in connections:
            connection.cork()
        at = 0
        for count, answer in pops:
            for put in puts[at : at + count]:
                if put.status is not _OK:
                    break
            at += count
            try:
                answer(put)
            except Exception:  # noqa: BLE001 - a fault of one request must not reach another
                _log.exception("cannot answer a pop")
        for ended, (key, (_, waiting, answer_acks)) in zip(acked, acks.items(), strict=True):
            try:
                answer_acks(key, ended, waiting)
            except Exception:  # noqa: BLE001 - a fault of one request must not reach another
                _log.exception("cannot answer acks of %s", key)
        for connection in connections:
            try:
                connection.flush()
            except Exception:  # noqa: BLE001 - a fault of one connection must not reach another
                _log.exception("cannot write the answers to %s", connection.peer)

    def _begin(self, connection: Connection) -> None:
        if not self._connections:
            self._loop.call_soon(self.end)
        self._connections[connection] = None
