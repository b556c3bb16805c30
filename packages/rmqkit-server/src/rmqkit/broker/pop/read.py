"""One pop's way through the queues of a topic and of the group's retry topics of it (``popMsgFromQueue``).

==========================  ==========================================================================================
which queues                the one that is named, or all from a random one on; one pop in five tries the retry topics
                            before, the others after these; a pop in order does without them
which queue first           any, then downwards (``priorityOrderAsc`` false: upwards); of a topic with
                            ``message.type=PRIORITY`` always the last (the first), and retries after them, in so many
                            percent of the pops as the group's ``priority.factor`` says
where it begins             the group's committed offset; a group that is new there: the start of the queue, or with
                            ``initMode`` 1 its end, unless the whole queue still is in memory
what it leaves behind       a check point for each queue and the offset behind what was read; in order: what was popped,
                            and the offset of its first message
an offset that is illegal   is corrected, and read from again once
deleted from the log        messages that another place has are fetched before the pop, of one queue at a time: `pop`
                            returns them as `Missing` and changes nothing. With `Fetched` messages it reads that queue
                            and no other one
==========================  ==========================================================================================

Source: behaviour.md §4.8, §4.14.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from rmqkit.broker.older import Fetched, Missing
from rmqkit.broker.pop.in_flight import NewCheckPoint
from rmqkit.broker.pop.service import PopContext
from rmqkit.broker.tables.filters import EVERYTHING, PullFilter
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.command import Body
from rmqkit.protocol.ids import (
    NORMAL_TOPIC,
    RETRY_TOPIC_V1,
    RETRY_TOPIC_V2,
    OrderKey,
    PopHandle,
    PopQueue,
    encode_message_offsets,
    encode_order_counts,
    encode_pop_handle,
    encode_start_offsets,
)
from rmqkit.protocol.names import pop_retry_topic
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, encode_properties
from rmqkit.protocol.record import decode_record, encode_record
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.pop import PollingInfoRequest, PopMessageRequest, PopMessageResponse
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.store.message_store import GetResult, GetStatus

__all__ = ["ORDER_REVIVE_QUEUE", "PopRead"]

ORDER_REVIVE_QUEUE = 999
"""Stands for the revive queue in handles of what was popped in order: it has no check point."""

_VERSIONS = ((RETRY_TOPIC_V2, "+"), (RETRY_TOPIC_V1, "_"))
_MOVED = (GetStatus.OFFSET_TOO_SMALL, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.OFFSET_FOUND_NULL)
_NOT_IN_LOG = GetStatus.NOT_IN_LOG
_FROM_END = 1
_HEAD = struct.Struct(">i16xq")
"""size and queueOffset at the start of a record."""
_PRIORITY_FACTOR_MAX = 100
_READ = int(Permission.READ)  # an operation with the member itself costs two calls


class PopRead:
    """Reads the messages of one pop, queue after queue, and makes their check points.

    Attributes:
        records: stored records, joined where possible, or rewritten records of retry topics.
        taken: the number of these records.
        rest: the number of further messages in the queues.
        check_points: the check points to store before the records leave.
        blocked_until: when a queue that is blocked for a pop in order is free, ms since the epoch.
    """

    def __init__(
        self,
        context: PopContext,
        header: PollingInfoRequest,
        *,
        count: int,
        wanted: PullFilter = EVERYTHING,
        fetched: Fetched | None = None,
    ) -> None:
        assert context.pop is not None, "a master pops"
        self._context = context
        self._pop = context.pop
        self._store = context.store
        self._offsets = context.offsets
        self._group = header.consumer_group
        self._topic = header.topic
        self._queue_id = header.queue_id
        self._count = count
        self._wanted = wanted
        self._fetched = fetched
        self._starts: dict[PopQueue, int] = {}
        self._found: dict[PopQueue, list[int]] = {}
        self._tries: dict[OrderKey, int] = {}
        # One time for all queues: handles carry it, and the client sends it back with each ack.
        self._pop_time = self._pop.clock.now_ms()
        self._revive_queue = 0
        self._is_by_priority = False
        self.records: list[Body] = []
        self.taken = 0
        self.rest = 0
        self.check_points: list[NewCheckPoint] = []
        self.blocked_until: int | None = None

    def pop(self, header: PopMessageRequest) -> Missing | None:
        """Take messages, or return those that have to be fetched first.
        Raises PeerRefused: it is not known yet where a new group begins."""
        # Before anything changes: a pop cannot be taken back.
        if self._store.older is not None and self._fetched is None and (missing := self._missing(header)) is not None:
            return missing
        self._revive_queue = ORDER_REVIVE_QUEUE if header.order else self._pop.check_points.next_queue()
        chance, settings = random.random() * 100, self._context.settings
        topic, group = self._context.topics.get(self._topic), self._context.groups.get(self._group)
        self._is_by_priority = not header.order and _is_by_priority(topic, group, chance)
        percent = settings.pop_retry_percent_by_priority if self._is_by_priority else settings.pop_retry_percent
        is_retry_first = chance < percent
        try:
            for name, mark, queue_ids in self._topics(with_retries=not header.order, retries_first=is_retry_first):
                for number, queue_id in enumerate(queue_ids):
                    if header.order:
                        self._pop_in_order(header, name, queue_id)
                    elif self.taken < self._count:
                        self._pop_queue(header, name, mark, queue_id)
                    else:
                        self._add_rests(header, name, queue_ids[number:])
                        break
        except BaseException:
            # Check points count from when they are made: without this their messages would stay in flight for ever.
            self._pop.check_points.withdraw(self.check_points)
            raise
        return None

    def peek(self) -> None:
        """Look at messages without a trace."""
        for topic, _, queue_ids in self._topics(with_retries=True, retries_first=random.randrange(5) == 0):
            for queue_id in queue_ids:
                offset = self._offset(topic, queue_id)
                if self.taken < self._count:
                    found = self._get(topic, queue_id, offset)
                    self.records += found.records
                    self.taken += found.count
                    offset = found.next_begin_offset
                self._add_rest(topic, queue_id, offset)

    def has_message(self, in_order: bool, attempt_id: str | None) -> bool:
        """Return True if there is a message that is not blocked; filters are not asked."""
        for topic, _, queue_ids in self._topics(with_retries=not in_order, retries_first=False):
            for queue_id in queue_ids:
                if in_order and self._is_blocked(topic, queue_id, attempt_id):
                    continue
                if self._store.max_offset(topic, queue_id) > self._offset(topic, queue_id):
                    return True
        return False

    def answer(self, header: PopMessageRequest) -> PopMessageResponse:
        """The answer's header."""
        return PopMessageResponse(
            pop_time=self._pop_time,
            invisible_time=header.invisible_time,
            revive_qid=self._revive_queue,
            rest_num=self.rest,
            start_offset_info=encode_start_offsets(self._starts),
            msg_offset_info=encode_message_offsets(self._found),
            order_count_info=encode_order_counts(self._tries) if header.order else None,
        )

    # -- inside

    def _missing(self, header: PopMessageRequest) -> Missing | None:
        """Return the first messages that this pop needs and that the log has deleted.
        Raises PeerRefused: it is not known yet where a new group begins."""
        is_from_end = header.init_mode == _FROM_END
        for topic, _, queue_ids in self._topics(with_retries=not header.order, retries_first=False):
            for queue_id in queue_ids:
                offset = self._offset(topic, queue_id, from_end=is_from_end)
                if self._store.is_older(topic, queue_id, offset) and not (
                    header.order and self._is_blocked(topic, queue_id, header.attempt_id)
                ):
                    return Missing(topic, queue_id, offset, self._count, self._filter_of(topic))
        return None

    def _filter_of(self, topic: str) -> PullFilter:
        """Return the filter for a topic. Messages of a retry topic have passed the filter before, and name another
        topic."""
        return self._wanted if topic == self._topic else EVERYTHING

    def _topics(self, *, with_retries: bool, retries_first: bool) -> list[tuple[str, str, Sequence[int]]]:
        """Topics, their marks in handles, and their queue ids in the order in which they are asked."""
        own = (self._topic, NORMAL_TOPIC, self._own_queues())
        if not with_retries:
            return [own]
        retries = self._retries()
        if self._fetched is not None:  # with the messages of other queues there would be no room for these
            return [one for one in (own, *retries) if one[0] == self._fetched.topic]
        return [*retries, own] if retries_first else [own, *retries]

    def _own_queues(self) -> Sequence[int]:
        if self._queue_id >= 0:
            return (self._queue_id,)
        if self._fetched is not None and self._fetched.topic == self._topic:
            return (self._fetched.queue_id,)
        config = self._context.topics.get(self._topic)
        return self._in_turn(0 if config is None else config.read_queue_nums)

    def _in_turn(self, count: int) -> Sequence[int]:
        """The ids of all queues, in the order in which they are asked."""
        first = 0 if self._is_by_priority else int(random.random() * count)
        ids = [*range(first, count), *range(first)]
        return ids[::-1] if self._context.settings.higher_queues_first else ids

    def _retries(self) -> list[tuple[str, str, Sequence[int]]]:
        retries: list[tuple[str, str, Sequence[int]]] = []
        for mark, separator in _VERSIONS if self._context.settings.retry_topic_v2 else _VERSIONS[1:]:
            topic = pop_retry_topic(self._group, self._topic, separator)
            config = self._context.topics.get(topic)
            if config is not None and config.perm & _READ:
                retries.append((topic, mark, self._in_turn(config.read_queue_nums)))
        return retries

    def _pop_queue(self, header: PopMessageRequest, topic: str, mark: str, queue_id: int) -> None:
        group, check_points = self._group, self._pop.check_points
        # Also where nothing can be taken: a group that is new here begins now, not behind what comes until its next
        # pop.
        offset = before = self._start(header, topic, queue_id)
        if self._is_too_full(topic, queue_id):
            return self._add_rest(topic, queue_id, offset)
        found = self._get(topic, queue_id, offset)
        # Retention deleted the next messages: read again from the first message that is left.
        if found.status in _MOVED:
            before = self._move(topic, queue_id, before, found.next_begin_offset)
            found = self._get(topic, queue_id, found.next_begin_offset)
        following = found.next_begin_offset
        if found.records:
            offsets = _offsets_of(found, offset)
            assert offsets[0] <= offsets[-1] < following, "a group goes on behind what it popped"
            while check_points.is_taken(topic, group, queue_id, offsets[0], self._pop_time):
                if self.check_points:  # one answer has one pop time
                    return self._add_rest(topic, queue_id, offset)
                self._pop_time += 1  # of a queue that was set back in this millisecond
            self.check_points.append(
                check_points.new(
                    topic,
                    group,
                    queue_id,
                    offsets,
                    pop_time=self._pop_time,
                    invisible_ms=header.invisible_time,
                    queue=self._revive_queue,
                    before=before,
                    after=following,
                )
            )
            self._collect(header, PopQueue(mark, queue_id), topic, found, offsets)
        elif following != offset:
            self._move(topic, queue_id, before, following)
        self.rest += max(0, found.max_offset - following)
        return None

    def _pop_in_order(self, header: PopMessageRequest, topic: str, queue_id: int) -> None:
        offset = self._start(header, topic, queue_id)
        if self._is_blocked(topic, queue_id, header.attempt_id) or self.taken >= self._count:
            return
        found = self._get(topic, queue_id, offset)
        if found.status in _MOVED:
            self._offsets.commit(self._group, topic, queue_id, found.next_begin_offset)
            found = self._get(topic, queue_id, found.next_begin_offset)
        if not found.records:
            if found.next_begin_offset != offset:
                self._offsets.commit(self._group, topic, queue_id, found.next_begin_offset)
            return
        offsets, queue = _offsets_of(found, offset), PopQueue(NORMAL_TOPIC, queue_id)
        tries = self._pop.orders.popped(
            topic,
            self._group,
            queue_id,
            offsets,
            attempt_id=header.attempt_id,
            pop_time=self._pop_time,
            invisible_ms=header.invisible_time,
        )
        self._tries |= {OrderKey(NORMAL_TOPIC, queue_id, one): count for one, count in tries.items()}
        # For clients older than the counts by offset: they read one number for a queue, else each try is the first.
        self._tries[OrderKey(NORMAL_TOPIC, queue_id)] = min(tries.get(one, 0) for one in offsets)
        # To the first of them, not behind: in order, the offset moves on by acks.
        self._offsets.commit(self._group, topic, queue_id, offsets[0])
        self._collect(header, queue, topic, found, offsets)
        self._add_rest(topic, queue_id, found.next_begin_offset)

    def _collect(
        self, header: PopMessageRequest, queue: PopQueue, topic: str, found: GetResult, offsets: list[int]
    ) -> None:
        self._starts[queue] = offsets[0]
        self._found[queue] = offsets
        settings = self._context.settings
        self.taken += found.count
        self._context.statistics.given(topic, self._group, queue.queue_id, found.count, found.size, 0.0)
        if not header.order:
            self._context.statistics.popped(topic, self._group, "CK")
        if queue.retry == NORMAL_TOPIC or settings.pops_keep_retry_topic:
            self.records += found.records
            return
        handle = PopHandle(
            check_point_offset=offsets[0],
            pop_time=self._pop_time,
            invisible_time=header.invisible_time,
            revive_queue_id=self._revive_queue,
            retry=queue.retry,
            broker_name=settings.broker_name,
            queue_id=queue.queue_id,
        )
        self.records += [
            self._rewritten(raw, replace(handle, queue_offset=offset))
            for raw, offset in zip(found.records, offsets, strict=True)
        ]

    def _rewritten(self, raw: memoryview, handle: PopHandle) -> bytes | memoryview:
        """A record of a retry topic, with the topic it came from and its handle. Where its properties leave no room for
        the handle it stays as it is: clients make the handle of the topic then, as `pops_keep_retry_topic` has them."""
        record = decode_record(raw)
        mark = encode_properties({property_names.POP_CHECK_POINT: encode_pop_handle(handle)})
        # Some brokers and clients leave out the last separator: appended to that, the handle would be part of a value.
        ending = b"" if not record.properties or record.properties.endswith(b"\x02") else b"\x02"
        if len(record.properties) + len(ending) + len(mark) > PROPERTIES_BYTES_MAX:
            return raw
        return encode_record(
            topic=self._topic.encode(),
            queue_id=record.queue_id,
            flag=record.flag,
            queue_offset=record.queue_offset,
            physical_offset=record.physical_offset,
            sys_flag=record.sys_flag,
            born_timestamp=record.born_timestamp,
            born_host=record.born_host,
            store_timestamp=record.store_timestamp,
            store_host=record.store_host,
            reconsume_times=record.reconsume_times,
            prepared_transaction_offset=record.prepared_transaction_offset,
            body=record.body,
            properties=record.properties + ending + mark,
            # The one that was stored: a new one would vouch for a body that changed on the disk.
            crc=record.body_crc,
        )

    def _is_blocked(self, topic: str, queue_id: int, attempt_id: str | None) -> bool:
        until = self._pop.orders.blocked_until(topic, self._group, queue_id, attempt_id)
        if until is not None:
            self.blocked_until = until if self.blocked_until is None else min(until, self.blocked_until)
        return until is not None

    def _is_too_full(self, topic: str, queue_id: int) -> bool:
        settings, check_points = self._context.settings, self._pop.check_points
        if len(check_points) >= settings.pop_check_points_max:
            return True
        place = topic, self._group, queue_id
        return settings.pop_in_flight_limited and check_points.in_flight.get(place, 0) >= settings.pop_in_flight_max

    def _start(self, header: PopMessageRequest, topic: str, queue_id: int) -> int:
        """Return where a pop begins; from now on that is the group's offset."""
        offsets, group, batch = self._offsets, self._group, self._pop.batch
        # Before anything else is looked at: what this batch or an ordered pop knows of the queue is void then.
        if offsets.take_reset(group, topic, queue_id) is not None:
            self._pop.orders.remove_queue(topic, group, queue_id)
            batch.next_offsets.pop((topic, group, queue_id), None)
        end = batch.next_offsets.get((topic, group, queue_id))
        if end is not None:
            return end
        offset = offsets.get(group, topic, queue_id)
        if offset is None:
            # Committed at once: with ``initMode`` 1 the end moves on, and what comes before the next pop would be
            # skipped.
            offset = self._beginning(topic, queue_id, from_end=header.init_mode == _FROM_END)
            offsets.commit(group, topic, queue_id, offset)
        return offset

    def _offset(self, topic: str, queue_id: int, *, from_end: bool = False) -> int:
        """Return where a pop would begin."""
        offset = self._pop.batch.next_offsets.get((topic, self._group, queue_id))
        if offset is None:
            offset = self._offsets.get(self._group, topic, queue_id)
        return self._beginning(topic, queue_id, from_end=from_end) if offset is None else offset

    def _beginning(self, topic: str, queue_id: int, *, from_end: bool) -> int:
        """Return where a group begins that is new."""
        # What lies in a retry topic was popped by the group before: begun at its end, it would be lost.
        if not from_end or topic != self._topic:
            return self._context.first_offset(topic, queue_id)
        low = self._store.min_offset(topic, queue_id)
        if low <= 0 and self._store.is_in_memory(topic, queue_id, 0):
            return 0
        return max(0, self._store.max_offset(topic, queue_id) - 1)

    def _move(self, topic: str, queue_id: int, before: int, offset: int) -> int:
        """Move the group on without a check point, unless one of this turn is to be stored first; its offset then."""
        if (topic, self._group, queue_id) in self._pop.batch.next_offsets:
            return before
        self._offsets.commit(self._group, topic, queue_id, offset)
        return offset

    def _get(self, topic: str, queue_id: int, offset: int) -> GetResult:
        wanted = self._filter_of(topic)
        found = self._store.get(
            topic,
            queue_id,
            offset,
            count_max=self._count - self.taken,
            codes=wanted.codes,
            accept=wanted.accept,
            accept_entry=wanted.accept_entry,
            joins=topic == self._topic,  # records of retry topics are rewritten one by one
        )
        return self._from_fetched(topic, queue_id, offset, found) if found.status is _NOT_IN_LOG else found

    def _from_fetched(self, topic: str, queue_id: int, offset: int, deleted: GetResult) -> GetResult:
        """Return the fetched messages of a queue. A pop finds nothing where none were fetched, and leaves the group at
        its offset."""
        found = GetResult(GetStatus.NO_MATCHED_MESSAGE, offset, deleted.min_offset, deleted.max_offset)
        fetched = self._fetched
        if fetched is None or (fetched.topic, fetched.queue_id, fetched.queue_offset) != (topic, queue_id, offset):
            return found
        count = self._count - self.taken
        found.records, found.next_begin_offset = fetched.found.records[:count], fetched.found.next_begin_offset
        if len(fetched.found.records) > count:
            _, found.next_begin_offset = _HEAD.unpack_from(fetched.found.records[count])
        found.size = sum(map(len, found.records))
        if found.records:
            found.status = GetStatus.FOUND
        return found

    def _add_rest(self, topic: str, queue_id: int, offset: int) -> None:
        self.rest += max(0, self._store.max_offset(topic, queue_id) - offset)

    def _add_rests(self, header: PopMessageRequest, topic: str, queue_ids: Sequence[int]) -> None:
        """Count what queues have that are not asked any more; a group that is new there begins here, too."""
        group, next_offsets, committed = (
            self._group,
            self._pop.batch.next_offsets,
            self._offsets.queues(self._group, topic),
        )
        for queue_id, high in zip(queue_ids, self._store.max_offsets(topic, queue_ids), strict=True):
            offset = committed.get(queue_id, -1)
            if next_offsets:
                offset = next_offsets.get((topic, group, queue_id), offset)
            if offset < 0:
                offset = self._start(header, topic, queue_id)
            if high > offset:
                self.rest += high - offset


def _offsets_of(found: GetResult, offset: int) -> list[int]:
    """The offsets of what was read from an offset on; mostly one behind the other."""
    if found.next_begin_offset - offset == found.count:
        return list(range(offset, found.next_begin_offset))
    return [number for piece in found.records for number in _numbers(piece)]


def _numbers(records: memoryview) -> Iterator[int]:
    """The queue offsets of records that lie one behind the other."""
    at = 0
    while at < len(records):
        size, number = _HEAD.unpack_from(records, at)
        yield number
        at += size


def _is_by_priority(topic: TopicConfig | None, group: SubscriptionGroupConfig | None, chance: float) -> bool:
    """Return True if a pop takes what has the highest priority first. ``chance``: from 0 to below 100, the dice of
    this pop; of so many in a hundred as the group's ``priority.factor`` says it is so."""
    if topic is None or (topic.attributes or {}).get("message.type") != "PRIORITY":
        return False
    text = "" if group is None else (group.attributes or {}).get("priority.factor", "")
    return chance < (int(text) if text.isascii() and text.isdigit() else _PRIORITY_FACTOR_MAX)
