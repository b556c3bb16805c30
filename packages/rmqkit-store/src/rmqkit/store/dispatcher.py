"""The dispatcher (``ReputMessageService``), which copies records from the log to the queues and then notifies
listeners.

The queues are derived from the log, and only by this module: for a record that was just appended, and for a record that
recovery reads. After an append the facts of the record are known (`DispatchRequest`), so that nothing is decoded.
`request_of` returns the same facts for a decoded record.

A record can be dispatched when it counts as stored. Under ASYNC_FLUSH this is immediately. Under SYNC_FLUSH this is
when the record is on the disk. Until then the record waits in order in ``pending``. If a queue entry cannot be written,
the dispatcher stops at the record: ``failure`` holds the error, the store accepts no more messages, and the next `run`
retries. An unexpected error is handled in the same way; otherwise every later read and put would raise it.

An index failure never stops the dispatcher. While the index files cannot be written, the index falls behind
(`MessageIndex.behind_from`). `catch_up` enters the missing keys from the log, `_MISSED_MAX` records with each dispatch
and each retention cycle.
Use this module only in the owner thread of the store. Source: store.md §4.2, §11.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice, starmap, takewhile
from typing import overload

import msgspec

from rmqkit.protocol.core import Sends
from rmqkit.protocol.names import SCHEDULE_TOPIC, lite_queue, split_lite_queue
from rmqkit.protocol.properties import encoded_tags_code, find_property
from rmqkit.protocol.record import (
    INNER_BATCH,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Record,
)
from rmqkit.store.dispatch_request import DispatchRequest
from rmqkit.store.index.index import KeyRows, MessageIndex
from rmqkit.store.light import light_numbers
from rmqkit.store.lite.lite_queues import LITE_MARK, LiteQueues
from rmqkit.store.lite.run import LiteRun
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BatchQueue
from rmqkit.store.queues.consume_queue import ENTRY, ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues, topic_fault
from rmqkit.store.settings import delivery_time

__all__ = ["DispatchRequest", "Dispatcher", "StoredSends", "batch_count", "queue_tags_code", "request_of"]

_log = logging.getLogger(__name__)
_pack_entry = ENTRY.pack
_TAGS = b"\x02TAGS\x01"
_TOGETHER = 1024
_MISSED_MAX = 128
"""Maximum number of records that one `Dispatcher.catch_up` reads. They are read one by one, which takes a few
milliseconds.
"""
_RETRY_MS = 1000
_NOT_PLAIN = TRANSACTION_MASK | INNER_BATCH
_PLAIN = frozenset((0, TRANSACTION_COMMIT))


class StoredSends(Sequence[DispatchRequest]):
    """The requests of plain sends that were stored together, followed by their copies for the light queues of lite
    topics. They are created on first access, which is rare.

    Attributes:
        enter: enters all requests into their queues, or returns False if they must be entered one by one.
        lite: the lite topics of the messages, or None if no message is in a lite topic.
        store_timestamp: storeTimestamp of all requests.
    """

    __slots__ = ("_first_offset", "_made", "_sends", "_with_tags", "enter", "lite", "store_timestamp")

    def __init__(
        self,
        sends: Sends,
        first_offset: int,
        store_timestamp: int,
        enter: Callable[[], bool],
        lite: LiteRun | None = None,
        *,
        with_tags: bool,
    ) -> None:
        self._sends = sends
        self.lite = lite
        self.enter = enter
        self._first_offset = first_offset
        self._with_tags = with_tags
        self._made: list[DispatchRequest] | None = None
        self.store_timestamp = store_timestamp

    def __len__(self) -> int:
        return len(self._sends) + sum(1 for _ in self.lite_topics())

    @overload
    def __getitem__(self, at: int, /) -> DispatchRequest: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[DispatchRequest]: ...
    def __getitem__(self, at: int | slice, /) -> DispatchRequest | list[DispatchRequest]:
        return [*self.made, *self.lights][at]

    def __iter__(self) -> Iterator[DispatchRequest]:
        return iter([*self.made, *self.lights])

    @property
    def places(self) -> list[tuple[str, int]]:
        """The topic and the queue id of each queue to which the sends go, without light queues."""
        return [(topic, queue_id) for topic, queue_id, _, _ in self._sends.queues]

    @property
    def light_places(self) -> list[tuple[str, int]]:
        """The same for the light queues."""
        return [(lite_queue(parent, name), 0) for parent, name in dict.fromkeys(self.lite_topics())]

    def lite_topics(self) -> Iterator[tuple[str, str]]:
        """Yield parent and lite topic of the messages in lite topics."""
        if self.lite is not None:
            yield from self.lite.lite_topics()

    def requests_of(self, queues: Container[tuple[str, int]]) -> Iterator[DispatchRequest]:
        """Yield the requests of some queues, in the order of all requests. ``queues`` may change in between. The
        requests of other queues are not made."""
        sends = self._sends
        rows = sends.requests(self._with_tags)
        for row in rows if any(place in queues for place in self.places) else ():
            if (row[0], row[1]) in queues:
                yield DispatchRequest(*row)
        lite = sends.lite if self.lite is not None else ()
        before, light = None, ""
        for row, place, number in zip(rows, lite, sends.lite_numbers if lite else (), strict=False):
            if place[1] and place != before:
                before, light = place, lite_queue(*place)
            if place[1] and (light, 0) in queues:
                yield DispatchRequest(light, 0, number, *row[3:])

    @property
    def made(self) -> list[DispatchRequest]:
        """The requests without the copies for light queues, as a list."""
        if self._made is None:
            self._made = list(starmap(DispatchRequest, self._sends.requests(self._with_tags)))
        return self._made

    @property
    def keys(self) -> KeyRows | None:
        """The keys for the index, if the compiled core computed them."""
        rows = self._sends.index_rows(self._with_tags)
        if rows is None:
            return None
        count = len(self._sends)
        return KeyRows(self._first_offset, self._sends.last_offset, self.store_timestamp, count, rows[1], rows[0])

    def enter_lite(self, lite: LiteQueues, end: int) -> None:
        """Enter the messages that are in lite topics into their light queues. Messages that are entered already are
        skipped. ``end``: the physical end of the last record. Raises OSError: a file cannot be written."""
        assert self.lite is not None, "messages are in lite topics"
        if not lite.enter_run(self.lite, self._first_offset, end):
            lite.enter(self.lights)

    @property
    def lights(self) -> list[DispatchRequest]:
        """A copy of each request that is in a lite topic, for its light queue."""
        if self.lite is None:
            return []
        sends = self._sends
        return [
            msgspec.structs.replace(one, topic=lite_queue(parent, name), queue_id=0, queue_offset=number)
            for one, (parent, name), number in zip(self.made, sends.lite, sends.lite_numbers, strict=True)
            if name
        ]


def queue_tags_code(
    topic: str, properties: bytes, store_timestamp: int, delays_ms: tuple[int, ...], tags: bytes | None = None
) -> int:
    """Return the tag code of a record: the hash of TAGS, or the delivery time in the delay topic. Source: store.md
    §4.2.
    ``tags``: the value of TAGS if it is known, empty if the record has no tags."""
    if topic == SCHEDULE_TOPIC:
        level = _delay_level(properties)
        if level > 0:
            return delivery_time(delays_ms, level, store_timestamp)
    if tags is not None:
        return encoded_tags_code(tags)
    at = properties.rfind(_TAGS)
    if at < 0 and not properties.startswith(_TAGS[1:]):
        return 0
    start = at + len(_TAGS)
    end = properties.find(b"\x02", start)
    tags = properties[start:] if end < 0 else properties[start:end]
    if at < 0 or not tags:
        tags = find_property(properties, b"TAGS")
    return 0 if tags is None else encoded_tags_code(tags)


def _delay_level(properties: bytes) -> int:
    try:
        return int(find_property(properties, b"DELAY") or b"0")
    except ValueError:
        return 0


def batch_count(properties: bytes) -> int:
    """Return INNER_NUM of an inner batch, or 1 if it is missing."""
    try:
        return max(1, int(find_property(properties, b"INNER_NUM") or b"1"))
    except ValueError:
        return 1


def request_of(record: Record, delays_ms: tuple[int, ...]) -> DispatchRequest:
    """Return the dispatch request of a decoded record."""
    code = queue_tags_code(record.topic, record.properties, record.store_timestamp, delays_ms)
    return DispatchRequest(
        record.topic,
        record.queue_id,
        record.queue_offset,
        code,
        record.store_timestamp,
        record.physical_offset,
        record.size,
        record.sys_flag,
        record.properties,
        batch_count(record.properties) if record.sys_flag & INNER_BATCH else 1,
    )


class Dispatcher:
    """The dispatcher that enters the records of the log into the queues, in log order.

    Args:
        on_arrival: called with records, in log order, after they are in the queues.
        index: the index for the keys; None without an index (``messageIndexEnable``).
        bitmap_of: returns the filter bitmap of a record, or empty bytes; called before the record is entered.
        has_light: whether records are also entered in light queues (``enableMultiDispatch``). Lite topics do not need
            it.
        lite: the light queues of lite topics.
        read_log: returns the records between two physical offsets, up to a maximum number, and the end of the last
            record.

    Attributes:
        is_batching: whether records wait for the next `run` even if they could be dispatched. Set while more records
            are about to arrive: dispatching them together costs one write per queue.
        position: physical offset up to which everything was dispatched.
        pending: the waiting records, as pairs: a physical end, and the records that were put together before this end.
            The records are a list or `StoredSends`. Any other value is a part of a long batch, and the dispatch creates
            its requests.
        failure: the error that stopped the dispatcher, or None.
        dispatched_timestamp: storeTimestamp of the newest dispatched record.
        tags_as_keys: whether TAGS are keys of the index.
    """

    def __init__(
        self,
        queues: ConsumeQueues,
        on_arrival: Callable[[Sequence[DispatchRequest]], None] | None = None,
        index: MessageIndex | None = None,
        bitmap_of: Callable[[DispatchRequest], bytes] | None = None,
        *,
        has_light: bool = False,
        lite: LiteQueues | None = None,
        read_log: Callable[[int, int, int], tuple[list[DispatchRequest], int]] = lambda start, end, count_max: (
            [],
            end,
        ),
    ) -> None:
        self.is_batching = False
        self.position = 0
        self.pending: deque[tuple[int, Iterable[DispatchRequest]]] = deque()
        self.failure: OSError | None = None
        self.dispatched_timestamp = 0
        self._queues = queues
        self._on_arrival = on_arrival
        self._index = index
        self._bitmap_of = bitmap_of
        self._read_log = read_log
        self._retry_at = 0
        self.has_light = has_light
        self._lite = lite
        self.tags_as_keys = index is not None and index.tags_as_keys

    def without_index(self) -> Dispatcher:
        """Return a dispatcher for the same queues that enters each record in its own queue only."""
        return Dispatcher(self._queues, bitmap_of=self._bitmap_of, lite=self._lite)

    def submit(self, arrivals: list[DispatchRequest] | StoredSends, end: int, limit: int) -> None:
        """Accept one or more records that were just appended together, up to ``end``.
        Dispatch them immediately if they end at or before ``limit`` and ``is_batching`` is False."""
        if not self.pending and end <= limit and not self.is_batching and self._dispatch(arrivals, end):
            return
        self.pending.append((end, arrivals))
        if not self.is_batching:
            self.run(limit)

    @property
    def has_part_next(self) -> bool:
        """Return True if a part of a long batch is the first pending item."""
        return bool(self.pending) and not isinstance(self.pending[0][1], (list, StoredSends))

    def submit_parts(self, parts: Iterable[tuple[int, Iterable[DispatchRequest]]]) -> None:
        """Accept a long batch that was just appended, as parts with their physical ends.
        Each `run` dispatches one part."""
        self.pending += parts

    def run(self, limit: int) -> bool:
        """Dispatch pending records up to a physical offset, but at most one part of a long batch. If a file cannot be
        written, set ``failure`` and stop. Return True if more records can be dispatched immediately."""
        pending = self.pending
        while pending and pending[0][0] <= limit:
            part = pending[0][1]
            if isinstance(part, StoredSends):
                if not self._dispatch(part, pending[0][0], 1):
                    return False
                continue
            if not isinstance(part, list):
                # Dispatch only one part per call: a whole batch of 190,000 messages would block the owner's event loop.
                is_done = self._dispatch(list(part), pending[0][0], 1)
                return is_done and bool(pending) and pending[0][0] <= limit
            ready = list(takewhile(lambda one: _is_ready(one, limit), islice(pending, _TOGETHER)))
            arrivals = part if len(ready) == 1 else [one for _, put in ready for one in put]
            if not self._dispatch(arrivals, ready[-1][0], len(ready)):
                return False
        return False

    def _dispatch(self, arrivals: Sequence[DispatchRequest], end: int, pending_count: int = 0) -> bool:
        """Enter the records before a physical end and notify the listener. Return False if a write fails.
        ``pending_count``: the number of items in ``pending`` that contain these records."""
        # `StoredSends.enter_lite` enters plain sends in their lite topics. They are in no other light queue.
        light = [] if isinstance(arrivals, StoredSends) else self._light_requests(arrivals)
        try:
            if not isinstance(arrivals, StoredSends):
                self._enter(arrivals)
            elif self._bitmap_of is not None or not arrivals.enter():
                self._enter(arrivals.made)
            if light:
                self._enter_light(light)
            elif isinstance(arrivals, StoredSends) and arrivals.lite is not None and self._lite is not None:
                arrivals.enter_lite(self._lite, end)
            self._enter_keys(arrivals)
        except OSError as error:
            self._stand_still(error)
            return False
        except Exception as error:  # noqa: BLE001 - every later read and put would raise it
            self._stand_still(_unexpected(error))
            return False
        # Set after the whole run is entered. If a write fails, the next attempt enters the
        # run again, which is harmless.
        assert end >= self.position, "records are dispatched in log order"
        self.failure = None
        self.position = end
        # Remove the items before the listener is called: a listener may read immediately, and a read dispatches pending
        # items.
        for _ in range(pending_count):
            self.pending.popleft()
        self._tell(arrivals, light)
        if self._index is not None and self._index.is_behind:
            self.catch_up()
        return True

    def catch_up(self, *, is_paced: bool = True) -> bool:
        """Enter missing keys if the index is behind. Return True if more keys can be entered immediately.
        ``is_paced``: whether a retry waits until a message is dispatched that was stored at least a second after the
        failed attempt."""
        index = self._index
        if index is None or not index.is_behind or (is_paced and self.dispatched_timestamp < self._retry_at):
            return False
        is_taken = index.retry()
        if is_taken and (start := index.behind_from) is not None:
            missed, end = self._read_log(start, self.position, _MISSED_MAX)
            is_taken = index.put_missed(_indexed(missed), end, is_last=end >= self.position)
        # Avoid a system call per message while the disk fails.
        self._retry_at = 0 if is_taken else self.dispatched_timestamp + _RETRY_MS
        return is_taken and index.behind_from is not None

    def _tell(self, arrivals: Sequence[DispatchRequest], light: list[DispatchRequest]) -> None:
        on_lite = None if self._lite is None else self._lite.on_arrival
        if isinstance(arrivals, StoredSends):
            if self._on_arrival is not None:
                self._on_arrival(arrivals)
            if on_lite is not None and arrivals.lite is not None:
                on_lite(arrivals.lite_topics())
            return
        if self._on_arrival is not None:
            self._on_arrival([*arrivals, *light] if light else arrivals)
        if on_lite is not None and light:
            places = [split_lite_queue(one.topic) for one in light]
            on_lite([place for place in places if place is not None])

    def submit_run(self, enter: Callable[[], list[DispatchRequest]], end: int) -> None:
        """Accept many records up to ``end`` in one call, while nothing is pending.
        ``enter``: enters the records and returns the records to report, including records of light queues."""
        assert not self.pending, "records are dispatched in log order"
        try:
            arrivals = enter()
        except OSError as error:
            self._stand_still(error)
            return
        except Exception as error:  # noqa: BLE001 - as in `_dispatch`
            self._stand_still(_unexpected(error))
            return
        assert end >= self.position, "records are dispatched in log order"
        self.failure = None
        self.position = end
        self._tell(arrivals, [])
        if self._index is not None and self._index.is_behind:
            self.catch_up()

    def _stand_still(self, error: OSError) -> None:
        if self.failure is None and not isinstance(error, BlockingIOError):  # a temporary condition
            _log.error(
                "consume queue cannot be written, no more messages are accepted: %s", error, exc_info=error.__cause__
            )
        self.failure = error

    def apply(self, arrival: DispatchRequest) -> None:
        """Enter one record into the queues and the index. A repeated call changes nothing.
        Raises OSError: a file cannot be written."""
        self._append(arrival)
        self._enter_light(self._light_requests([arrival]))
        self._enter_keys([arrival])

    def _enter(self, arrivals: Sequence[DispatchRequest]) -> None:
        if len(arrivals) == 1:
            self._append(arrivals[0])
        else:
            self._append_all(arrivals)

    def enter_light(
        self,
        arrivals: Sequence[DispatchRequest],
        only: Container[tuple[str, int]] | None = None,
        *,
        has_light: bool = True,
    ) -> list[DispatchRequest]:
        """Enter records into their light queues, or only into the light queues in ``only``. A repeated call changes
        nothing. ``has_light``: False for lite topics only.
        Return a copy of each record for each light queue. Raises OSError: a file cannot be written."""
        light = _all_light(arrivals) if has_light else _of_lite_topics(arrivals)
        light = [one for one in light if only is None or (one.topic, one.queue_id) in only]
        self._enter_light(light)
        return light

    def _light_requests(self, arrivals: Sequence[DispatchRequest]) -> list[DispatchRequest]:
        return _all_light(arrivals) if self.has_light else _of_lite_topics(arrivals)

    def _enter_light(self, light: list[DispatchRequest]) -> None:
        lite: list[DispatchRequest] = []
        for one in light:
            if split_lite_queue(one.topic):
                lite.append(one)
            else:
                self._append(one)
        if lite and self._lite is not None:
            self._lite.enter(lite)

    def enter_own(self, arrival: DispatchRequest) -> None:
        """Enter a record only into its own queue. A repeated call changes nothing.
        Raises OSError: a file cannot be written."""
        self._append(arrival)

    def _append_all(self, arrivals: Sequence[DispatchRequest]) -> None:
        """Enter several records, with one write per queue if possible."""
        if not self._append_run(arrivals):
            groups: dict[tuple[str, int], list[DispatchRequest]] = {}
            for arrival in arrivals:
                key = arrival.topic, arrival.queue_id
                group = groups.get(key)
                if group is None:
                    groups[key] = [arrival]
                else:
                    group.append(arrival)
            for group in groups.values():
                if len(group) == 1 or len(groups) == 1 or not self._append_run(group):
                    for arrival in group:
                        self._append(arrival)

    def _append_run(self, arrivals: Sequence[DispatchRequest]) -> bool:
        """Append the entries of records of one consume queue with one write. Return False if one write is not possible.
        All records belong to the same queue if the first and the last record do, and the numbers of these two differ by
        the number of records."""
        first, last = arrivals[0], arrivals[-1]
        if last.queue_offset - first.queue_offset != len(arrivals) - 1 or last.queue_id != first.queue_id:
            return False
        queue = self._queues.table.get((first.topic, first.queue_id))
        if last.topic != first.topic or not isinstance(queue, ConsumeQueue):
            return False
        if not {one.sys_flag & _NOT_PLAIN for one in arrivals} <= _PLAIN:
            return False
        entries = b"".join([_pack_entry(one.physical_offset, one.size, one.tags_code) for one in arrivals])
        return queue.append_run(first.queue_offset, first.physical_offset, last.physical_offset + last.size, entries)

    def _append(self, arrival: DispatchRequest) -> None:
        # Old brokers wrote these markers. A half message became readable only with the record that its commit wrote.
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

    def _enter_keys(self, arrivals: Sequence[DispatchRequest]) -> None:
        sends = arrivals if isinstance(arrivals, StoredSends) else None
        if self._index is not None:
            if sends is not None and (rows := sends.keys) is not None:
                self._index.put_rows(rows)
            else:
                self._index.put_all(_indexed(arrivals if sends is None else sends.made))
        self.dispatched_timestamp = (arrivals[-1] if sends is None else sends).store_timestamp

    def _new_queue(self, arrival: DispatchRequest) -> ConsumeQueueBase | None:
        """Return a new queue for its first record, or None if the topic name is invalid or the topic was deleted."""
        # Recovery also reads records of deleted topics: a new queue for them would restore the deleted messages.
        if arrival.physical_offset < self._queues.deleted_ends.get(arrival.topic, -1):
            return None
        if topic_fault(arrival.topic, arrival.queue_id):
            _log.error("record at %d is in no queue: its topic cannot be a directory", arrival.physical_offset)
            return None
        return self._queues.obtain(arrival.topic, arrival.queue_id)


def _indexed(arrivals: Iterable[DispatchRequest]) -> list[DispatchRequest]:
    """Return the records that can have keys."""
    return [one for one in arrivals if one.sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK]


def _unexpected(error: Exception) -> OSError:
    """Return an OSError that replaces an unexpected exception of another type."""
    failure = OSError(errno.EIO, f"unexpected {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _is_ready(pending: tuple[int, Iterable[DispatchRequest]], limit: int) -> bool:
    """Return True if a pending item can be dispatched together with the items before it."""
    return pending[0] <= limit and isinstance(pending[1], list)


def _of_lite_topics(arrivals: Sequence[DispatchRequest]) -> list[DispatchRequest]:
    """Return a copy of each record for its lite topic. Records of other topics have no copy."""
    marked = [one for one in arrivals if LITE_MARK in one.properties]
    return [one for one in _all_light(marked) if is_own_lite_queue(one)] if marked else []


def is_own_lite_queue(light: DispatchRequest) -> bool:
    """Return True if a copy of a record is for the lite topic that the record's properties name."""
    place, name = split_lite_queue(light.topic), find_property(light.properties, LITE_MARK[:-1])
    return place is not None and name is not None and place[1].encode() == name


def _all_light(arrivals: Sequence[DispatchRequest]) -> list[DispatchRequest]:
    """Return a copy of each record for each of its light queues."""
    return [
        msgspec.structs.replace(one, topic=name, queue_id=0, queue_offset=number)
        for one in arrivals
        for name, number in light_numbers(one.topic, one.properties).items()
    ]
