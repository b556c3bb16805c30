"""The read of one pop from the queues of a topic and of the group's retry topics (``popMsgFromQueue``).

==========================  ==========================================================================================
queues                      the requested queue, or all queues. One pop in five reads the retry topics first, the other
                            pops read them last. A pop in order does not read retry topics
first queue                 a random queue, then downwards (``priorityOrderAsc`` false: upwards). For a topic with
                            ``message.type=PRIORITY``, ``priority.factor`` (of the group) percent of the pops begin with
                            the last (false: the first) queue and read retry topics later
first offset                the group's committed offset. For a group without an offset, the start of the queue. With
                            ``initMode`` 1 the end of the queue, unless the whole queue is still in memory
changes                     a check point for each queue, and the group's offset moves past the messages. In order: the
                            popped messages are recorded, and the group's offset moves to the first of them
an illegal offset           is corrected, and the queue is read again, but only once
deleted from the log        messages are fetched before the pop if another place has them, from one queue at a time:
                            `pop` returns `Missing` and changes nothing. With `Fetched` messages it reads only their
                            queue
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
"""The revive queue id in handles of messages that were popped in order. These messages have no check point."""

_VERSIONS = ((RETRY_TOPIC_V2, "+"), (RETRY_TOPIC_V1, "_"))
_MOVED = (GetStatus.OFFSET_TOO_SMALL, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.OFFSET_FOUND_NULL)
_NOT_IN_LOG = GetStatus.NOT_IN_LOG
_FROM_END = 1
_HEAD = struct.Struct(">i16xq")
"""The size and the queue offset at the start of a record."""
_PRIORITY_FACTOR_MAX = 100
_NOTICED_MAX = 64
"""The number of queue entries to read together for a notification."""
_READ = int(Permission.READ)  # an operation with the enum member costs two calls


class PopRead:
    """One pop. It reads messages, queue after queue, and makes their check points.

    Attributes:
        records: stored records, joined where possible, and rewritten records of retry topics.
        taken: the number of messages in ``records``.
        rest: the number of further messages in the queues.
        check_points: the check points to store before the records are sent.
        blocked_until: the time when the first blocked queue of a pop in order is free, ms since the epoch.
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
        # All queues share one pop time: the answer has a single pop time, and the handles contain it.
        self._pop_time = self._pop.clock.now_ms()
        self._revive_queue = 0
        self._is_by_priority = False
        self.records: list[Body] = []
        self.taken = 0
        self.rest = 0
        self.check_points: list[NewCheckPoint] = []
        self.blocked_until: int | None = None

    def pop(self, header: PopMessageRequest) -> Missing | None:
        """Pop messages. If messages have to be fetched first, change nothing and return their place.
        Raises PeerRefused: the first offset of a new group is not known yet."""
        # Search for missing messages before any change: a pop cannot be undone.
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
            # The messages are in flight since their check points were made. Without `withdraw` they would stay hidden.
            self._pop.check_points.withdraw(self.check_points)
            raise
        return None

    def peek(self) -> None:
        """Read messages without popping them."""
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
        """Return True if there is a message in a queue that is not blocked. Tags are compared if the queue has only a
        few messages to read (``maxMessageFilterNumForNotification``). Other filters are ignored."""
        for topic, _, queue_ids in self._topics(with_retries=not in_order, retries_first=False):
            for queue_id in queue_ids:
                if in_order and self._is_blocked(topic, queue_id, attempt_id):
                    continue
                offset, codes = self._offset(topic, queue_id), self._filter_of(topic).codes
                count = self._store.max_offset(topic, queue_id) - offset
                is_compared = codes is not None and count < self._context.settings.notification_entries_max
                if count > 0 and not (
                    is_compared and self._has_no_tag_of(codes or frozenset(), topic, queue_id, offset)
                ):
                    return True
        return False

    def answer(self, header: PopMessageRequest) -> PopMessageResponse:
        """Return the header of the answer."""
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
        """Return the place of the first messages that this pop needs and that were deleted from the log, or None.
        Raises PeerRefused: the first offset of a new group is not known yet."""
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
        """Return the filter for a topic. Messages of a retry topic have passed the filter in their original topic."""
        return self._wanted if topic == self._topic else EVERYTHING

    def _topics(self, *, with_retries: bool, retries_first: bool) -> list[tuple[str, str, Sequence[int]]]:
        """Return the topics with their marks in handles and their queue ids, in the order in which they are read."""
        own = (self._topic, NORMAL_TOPIC, self._own_queues())
        if not with_retries:
            return [own]
        retries = self._retries()
        if self._fetched is not None:  # messages of other queues would take the room of the fetched messages
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
        """Return the ids of all queues, in the order in which they are read."""
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
        # Set the offset even if nothing can be popped: a new group begins now, and must not skip messages that arrive
        # before its next pop.
        offset = before = self._start(header, topic, queue_id)
        if self._is_too_full(topic, queue_id):
            return self._add_rest(topic, queue_id, offset)
        found = self._get(topic, queue_id, offset)
        # The offset was illegal, for example because retention deleted messages: read again from the corrected offset.
        if found.status in _MOVED:
            before = self._move(topic, queue_id, before, found.next_begin_offset)
            found = self._get(topic, queue_id, found.next_begin_offset)
        following = found.next_begin_offset
        if found.records:
            offsets = _offsets_of(found, offset)
            assert offsets[0] <= offsets[-1] < following, "the next offset is after all popped messages"
            while check_points.is_taken(topic, group, queue_id, offsets[0], self._pop_time):
                if self.check_points:  # all check points of an answer have the same pop time
                    return self._add_rest(topic, queue_id, offset)
                self._pop_time += 1  # the same messages were popped in this millisecond, before an offset reset
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
        # Older clients read one number per queue. Without it they treat each delivery as the first.
        self._tries[OrderKey(NORMAL_TOPIC, queue_id)] = min(tries.get(one, 0) for one in offsets)
        # Commit the offset of the first message: in order, acks move the offset past the messages.
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
        """Return a record of a retry topic with its original topic and its handle. If the properties have no room for
        the handle, return the record unchanged: clients then make the handle from the retry topic, as with
        `pops_keep_retry_topic`."""
        record = decode_record(raw)
        mark = encode_properties({property_names.POP_CHECK_POINT: encode_pop_handle(handle)})
        # Some brokers and clients omit the last separator. Without it the handle would become part of the last value.
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
            # Keep the stored CRC: a new CRC would hide that the body changed on the disk.
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
        """Return the offset where a pop begins. Commit the offset if the group has none."""
        offsets, group, batch = self._offsets, self._group, self._pop.batch
        # Apply a reset first: it makes the state of this batch and of ordered pops invalid.
        if offsets.take_reset(group, topic, queue_id) is not None:
            self._pop.orders.remove_queue(topic, group, queue_id)
            batch.next_offsets.pop((topic, group, queue_id), None)
        end = batch.next_offsets.get((topic, group, queue_id))
        if end is not None:
            return end
        offset = offsets.get(group, topic, queue_id)
        if offset is None:
            # Commit now: with ``initMode`` 1 the group begins at the end, and the next pop would skip messages that
            # arrive before it.
            offset = self._beginning(topic, queue_id, from_end=header.init_mode == _FROM_END)
            offsets.commit(group, topic, queue_id, offset)
        return offset

    def _offset(self, topic: str, queue_id: int, *, from_end: bool = False) -> int:
        """Return the offset where a pop would begin."""
        offset = self._pop.batch.next_offsets.get((topic, self._group, queue_id))
        if offset is None:
            offset = self._offsets.get(self._group, topic, queue_id)
        return self._beginning(topic, queue_id, from_end=from_end) if offset is None else offset

    def _beginning(self, topic: str, queue_id: int, *, from_end: bool) -> int:
        """Return the first offset of a new group."""
        # Read a retry topic from its first message: beginning at the end would lose messages to redeliver.
        if not from_end or topic != self._topic:
            return self._context.first_offset(topic, queue_id)
        low = self._store.min_offset(topic, queue_id)
        if low <= 0 and self._store.is_in_memory(topic, queue_id, 0):
            return 0
        return max(0, self._store.max_offset(topic, queue_id) - 1)

    def _move(self, topic: str, queue_id: int, before: int, offset: int) -> int:
        """Move the group's offset without a check point, unless this tick's batch has a check point to store first.
        Return the new offset, or ``before`` if the offset did not move."""
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
            joins=topic == self._topic,  # records of retry topics stay separate: they are rewritten one by one
        )
        return self._from_fetched(topic, queue_id, offset, found) if found.status is _NOT_IN_LOG else found

    def _from_fetched(self, topic: str, queue_id: int, offset: int, deleted: GetResult) -> GetResult:
        """Return the fetched messages of a queue. If there are none, the result is empty and the group's offset does
        not move."""
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

    def _has_no_tag_of(self, codes: frozenset[int], topic: str, queue_id: int, offset: int) -> bool:
        """Return True if no entry from an offset on has one of the tag codes."""
        end = self._store.max_offset(topic, queue_id)
        while offset < end:
            entries = self._store.entries(topic, queue_id, offset, count_max=_NOTICED_MAX)
            # The code None belongs to an entry without its extension unit: the message may have the tag. Without
            # entries the messages are in another place, and may have it, too.
            if not entries or any(code is None or code in codes for *_, code in entries):
                return False
            offset = entries[-1][0]
        return True

    def _add_rest(self, topic: str, queue_id: int, offset: int) -> None:
        self.rest += max(0, self._store.max_offset(topic, queue_id) - offset)

    def _add_rests(self, header: PopMessageRequest, topic: str, queue_ids: Sequence[int]) -> None:
        """Add the unread messages of queues that this pop does not read to ``rest``. Also commit the first offset of a
        new group in these queues."""
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
    """Return the offsets of the records that were read from an offset on. The offsets are mostly consecutive."""
    if found.next_begin_offset - offset == found.count:
        return list(range(offset, found.next_begin_offset))
    return [number for piece in found.records for number in _numbers(piece)]


def _numbers(records: memoryview) -> Iterator[int]:
    """Yield the queue offsets of joined records."""
    at = 0
    while at < len(records):
        size, number = _HEAD.unpack_from(records, at)
        yield number
        at += size


def _is_by_priority(topic: TopicConfig | None, group: SubscriptionGroupConfig | None, chance: float) -> bool:
    """Return True if a pop reads the queue of the highest priority first. ``chance``: a random number, at least 0 and
    less than 100. It has to be less than the group's ``priority.factor``."""
    if topic is None or (topic.attributes or {}).get("message.type") != "PRIORITY":
        return False
    text = "" if group is None else (group.attributes or {}).get("priority.factor", "")
    return chance < (int(text) if text.isascii() and text.isdigit() else _PRIORITY_FACTOR_MAX)
