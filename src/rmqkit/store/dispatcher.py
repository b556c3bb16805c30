"""The dispatcher: what the log says goes to the queues, and then to who waits (``ReputMessageService``).

The log is the only truth; queues are derived from it by this one piece of code, whether a record was appended a moment
ago or is read again by recovery. After an append the facts of the record are at hand (`Arrival`) and nothing is
decoded; `arrival_of` gives the same facts for a decoded record.

A record may be dispatched when it counts as stored: at once under ASYNC_FLUSH, when it is on the disk under SYNC_FLUSH.
Until then it waits in order in ``pending``. A disk that refuses a queue entry blocks the dispatcher at that record:
``failure`` says why, the store takes no further messages, and the next `run` tries again.
Owner thread only. Source: store.md §4.2, §11.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import chain, islice, takewhile

from msgspec import Struct

from rmqkit.protocol.hashing import encoded_tags_code
from rmqkit.protocol.names import SCHEDULE_TOPIC
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import (
    INNER_BATCH,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Record,
)
from rmqkit.store.batch_queue import BatchQueue
from rmqkit.store.consume_queue import ENTRY, ConsumeQueue
from rmqkit.store.consume_queues import ConsumeQueues, topic_fault
from rmqkit.store.delay_levels import delivery_time
from rmqkit.store.index_file import MessageIndex
from rmqkit.store.logic_queue import LogicQueue

__all__ = ["Arrival", "Dispatcher", "arrival_of", "queue_tags_code"]

_log = logging.getLogger(__name__)
_pack_entry = ENTRY.pack
_TAGS = b"TAGS\x01"
_TOGETHER = 1024
_NOT_PLAIN = TRANSACTION_MASK | INNER_BATCH
_PLAIN = frozenset((0, TRANSACTION_COMMIT))


class Arrival(Struct, gc=False):
    """What the dispatcher passes on about one record (``DispatchRequest``).

    Attributes:
        queue_offset: number of the message in its queue.
        tags_code: hash of its tags, or its delivery time in the delay topic.
        physical_offset, size: where the record lies in the log, in bytes.
        properties: the stored property string.
        batch_count: messages in the record, for an inner batch; its ``queue_offset`` is the first one's.
    """

    topic: str
    queue_id: int
    queue_offset: int
    tags_code: int
    store_timestamp: int
    physical_offset: int
    size: int
    sys_flag: int
    properties: bytes
    batch_count: int = 1


def queue_tags_code(topic: str, properties: bytes, store_timestamp: int, delays_ms: tuple[int, ...]) -> int:
    """The tag code of a record: the hash of TAGS, in the delay topic the delivery time. Source: store.md §4.2."""
    if topic == SCHEDULE_TOPIC:
        level = _delay_level(properties)
        if level > 0:
            return delivery_time(delays_ms, level, store_timestamp)
    before, found, behind = properties.rpartition(_TAGS)
    if not found:
        return 0
    tags: bytes | None = behind.partition(b"\x02")[0]
    if not tags or (before and before[-1] != 2):  # empty, or the end of another name
        tags = find_property(properties, b"TAGS")
    return 0 if tags is None else encoded_tags_code(tags)


def _delay_level(properties: bytes) -> int:
    try:
        return int(find_property(properties, b"DELAY") or b"0")
    except ValueError:
        return 0


def _batch_count(properties: bytes) -> int:
    """INNER_NUM of an inner batch; 1 when it is missing."""
    try:
        return max(1, int(find_property(properties, b"INNER_NUM") or b"1"))
    except ValueError:
        return 1


def arrival_of(record: Record, delays_ms: tuple[int, ...]) -> Arrival:
    """The facts of a decoded record."""
    code = queue_tags_code(record.topic, record.properties, record.store_timestamp, delays_ms)
    return Arrival(
        record.topic,
        record.queue_id,
        record.queue_offset,
        code,
        record.store_timestamp,
        record.physical_offset,
        record.size,
        record.sys_flag,
        record.properties,
        _batch_count(record.properties) if record.sys_flag & INNER_BATCH else 1,
    )


class Dispatcher:
    """Carries records from the log to the queues, in log order.

    Args:
        on_arrival: told of records, in log order, after they are in the queues.
        index: where keys are entered, if they are (``messageIndexEnable``).
        bitmap_of: makes the filter bitmap of a record, empty for none; asked before the record is entered.

    Attributes:
        gathers: whether records wait for the next `run` although they could be dispatched: while several are about to
            come, which then cost one write per queue.
        position: physical offset up to which everything was dispatched.
        pending: what waits: physical end and the records that end there.
        failure: why the dispatcher stands still, or None.
        dispatched_timestamp: storeTimestamp of the newest record dispatched.
    """

    def __init__(
        self,
        queues: ConsumeQueues,
        on_arrival: Callable[[list[Arrival]], None] | None = None,
        index: MessageIndex | None = None,
        bitmap_of: Callable[[Arrival], bytes] | None = None,
    ) -> None:
        self.gathers = False
        self.position = 0
        self.pending: deque[tuple[int, list[Arrival]]] = deque()
        self.failure: OSError | None = None
        self.dispatched_timestamp = 0
        self._queues = queues
        self._on_arrival = on_arrival
        self._index = index
        self._bitmap_of = bitmap_of

    def without_index(self) -> Dispatcher:
        """One that enters records in the same queues only."""
        return Dispatcher(self._queues, bitmap_of=self._bitmap_of)

    def submit(self, arrivals: list[Arrival], end: int, limit: int) -> None:
        """Take over what was just appended up to ``end``, one record or the members of a batch.

        It is dispatched at once if it lies before ``limit``, unless the dispatcher gathers.
        """
        if self.gathers:
            self.pending.append((end, arrivals))
            return
        if not self.pending and end <= limit and self._dispatch([arrivals], end):
            self._tell(arrivals)
            return
        self.pending.append((end, arrivals))
        self.run(limit)

    def run(self, limit: int) -> None:
        """Dispatch what waits, up to a physical offset; stands still, with ``failure``, when the disk refuses."""
        pending = self.pending
        while pending and pending[0][0] <= limit:
            ready = list(islice(pending, _TOGETHER))
            if ready[-1][0] > limit:
                ready = list(takewhile(lambda one: one[0] <= limit, ready))
            puts = [arrivals for _, arrivals in ready]
            if not self._dispatch(puts, ready[-1][0]):
                return
            for _ in ready:
                pending.popleft()
            self._tell(list(chain.from_iterable(puts)))

    def _tell(self, arrivals: list[Arrival]) -> None:
        if self._on_arrival is not None:
            self._on_arrival(arrivals)

    def _dispatch(self, puts: list[list[Arrival]], end: int) -> bool:
        """Enter the records that end at a physical offset; False when the disk refuses."""
        try:
            if len(puts) == 1 and len(puts[0]) == 1:
                self.apply(puts[0][0])
            else:
                self._apply_all(puts)
        except OSError as error:
            if self.failure is None:
                _log.error("consume queue or index cannot be written, no more messages are accepted: %s", error)
            self.failure = error
            return False
        self.failure = None
        self.position = end
        return True

    def apply(self, arrival: Arrival) -> None:
        """Enter one record into the queues and the index; repeated calls change nothing.

        Raises:
            OSError: the disk refused.
        """
        self._append(arrival)
        if self._index is not None:
            self._enter_keys(self._index, arrival)
        self.dispatched_timestamp = arrival.store_timestamp

    def _apply_all(self, puts: list[list[Arrival]]) -> None:
        """Enter several records, those of one queue with one write where the queue lets it be done."""
        groups: dict[tuple[str, int], list[Arrival]] = {}
        for arrivals in puts:
            first = arrivals[0]
            key = first.topic, first.queue_id
            if key in groups:
                groups[key] += arrivals
            else:
                groups[key] = arrivals[:]
        for key, group in groups.items():
            if not self._append_run(self._queues.table.get(key), group):
                for arrival in group:
                    self._append(arrival)
        if self._index is not None:
            self._index.put_all(
                [
                    (one.topic, one.physical_offset, one.store_timestamp, one.properties)
                    for one in chain.from_iterable(puts)
                    if one.sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK
                ]
            )
        self.dispatched_timestamp = puts[-1][-1].store_timestamp

    def _append_run(self, queue: LogicQueue | None, arrivals: list[Arrival]) -> bool:
        """Index records of a consume queue with one write; False when they have to go one by one."""
        if not isinstance(queue, ConsumeQueue) or not {one.sys_flag & _NOT_PLAIN for one in arrivals} <= _PLAIN:
            return False
        first, last = arrivals[0], arrivals[-1]
        if last.queue_offset - first.queue_offset != len(arrivals) - 1:
            return False
        entries = b"".join([_pack_entry(one.physical_offset, one.size, one.tags_code) for one in arrivals])
        return queue.append_run(first.queue_offset, first.physical_offset, last.physical_offset + last.size, entries)

    def _append(self, arrival: Arrival) -> None:
        kind = arrival.sys_flag & TRANSACTION_MASK
        if kind in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK):
            return
        queue = self._queues.table.get((arrival.topic, arrival.queue_id)) or self._new_queue(arrival)
        if queue is None:
            return
        if arrival.sys_flag & INNER_BATCH and isinstance(queue, BatchQueue):
            queue.append_batch(
                arrival.queue_offset,
                arrival.batch_count,
                arrival.physical_offset,
                arrival.size,
                arrival.tags_code,
                arrival.store_timestamp,
            )
        else:
            queue.append(
                arrival.queue_offset,
                arrival.physical_offset,
                arrival.size,
                arrival.tags_code,
                arrival.store_timestamp,
                b"" if self._bitmap_of is None else self._bitmap_of(arrival),
            )

    def _enter_keys(self, index: MessageIndex, arrival: Arrival) -> None:
        if arrival.sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK:
            index.put(arrival.topic, arrival.physical_offset, arrival.store_timestamp, arrival.properties)

    def _new_queue(self, arrival: Arrival) -> LogicQueue | None:
        """The queue of a first record; None when its topic can have none."""
        if topic_fault(arrival.topic, arrival.queue_id):
            _log.error("record at %d is in no queue: its topic cannot be a directory", arrival.physical_offset)
            return None
        return self._queues.obtain(arrival.topic, arrival.queue_id)
