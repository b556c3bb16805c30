"""Puts: from a message to a record in the log (``CommitLog.asyncPutMessage`` and its encoder).

check → number in the queue → place in the log → one ``pwrite`` → dispatch. Each message of a batch becomes a record.
One write stores all records of a batch in one file. In a topic with batch queues, a batch becomes one record that holds
the numbers of all its messages (*inner batch*).

A refused message leaves no trace. A record is dispatched later than the put in two cases: under SYNC_FLUSH when it is
on the disk, with the transient store pool when it is committed. See `Appender.dispatch`.
Use this module only in the owner thread of the store. Source: store.md §3.6, §3.7, §14.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, pairwise

import msgspec

from rmqkit.clock import Clock
from rmqkit.errors import BodyError
from rmqkit.protocol.core import Sends
from rmqkit.protocol.names import RETRY_PREFIX, lite_queue, split_lite_queue
from rmqkit.protocol.properties import NO_KEYS, PROPERTIES_BYTES_MAX, encoded_tags_code, find_property, in_stored_order
from rmqkit.protocol.record import (
    BATCH_ENTRY_BYTES_MIN,
    BLANK_BYTES,
    INNER_BATCH,
    NEED_UNWRAP,
    TRAILER_BYTES,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    BatchBounds,
    BatchEntry,
    RecordRow,
    batch_bounds,
    encode_batch,
    encode_record,
    encode_records,
    seal,
    with_room_for_crc,
)
from rmqkit.store.dispatcher import Dispatcher, DispatchRequest, StoredSends, queue_tags_code
from rmqkit.store.flush import Flusher
from rmqkit.store.inner_message import InnerMessage, PutResult, PutStatus
from rmqkit.store.light import MULTI_DISPATCH, light_fault, light_names, numbered, too_many
from rmqkit.store.lite.lite_queues import LITE_MARK, LiteQueue, LiteQueues
from rmqkit.store.lite.run import LiteRun
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.mapped_file import SECTOR_BYTES
from rmqkit.store.long_batch import LongBatch
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BatchQueue
from rmqkit.store.queues.consume_queue import ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues, topic_fault
from rmqkit.store.settings import FlushDiskType, StoreSettings, parse_delay_levels

__all__ = ["Appender"]

_log = logging.getLogger(__name__)

_INNER_NUM = b"INNER_NUM\x01"
_BATCH_COUNT_MAX = 32767
_NOT_PLAIN = TRANSACTION_MASK | INNER_BATCH
_pack_length = struct.Struct(">h").pack
_SECTOR = bytes(SECTOR_BYTES)
_TORN = f"the properties end with a zero byte, or hold {SECTOR_BYTES} in a row"
_TOPIC_BYTES_MAX = 127
_RETRY_TOPIC_BYTES_MAX = 255
_V1_OVERHEAD_BYTES = 91
_V6_EXTRA_BYTES = 12
_FIXED_BYTES_MAX = _V1_OVERHEAD_BYTES + 1 + 2 * _V6_EXTRA_BYTES + _RETRY_TOPIC_BYTES_MAX + BLANK_BYTES
assert _FIXED_BYTES_MAX + PROPERTIES_BYTES_MAX < 64 << 10, "a record is less than maxMessageSize + 64 KiB (§3.6)"


class Appender:
    """The part of a store that appends messages.

    Attributes:
        is_open: whether the store accepts messages at all.
        dispatcher: the dispatcher for the appended records.
        refusal: the reason why the store accepts no messages at present, or an empty text.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        dispatcher: Dispatcher,
        flusher: Flusher,
        settings: StoreSettings,
        clock: Clock,
        lite: LiteQueues,
    ) -> None:
        self.is_open = False
        self.refusal = ""
        self._logged_reason = ""
        self._commit_log = log
        self._queues = queues
        self.dispatcher = dispatcher
        self._flusher = flusher
        self._settings = settings
        self._clock = clock
        self._is_sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._is_readable_at_once = not self._is_sync and log.pool is None
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._trailer_bytes = TRAILER_BYTES + 1 if settings.append_property_crc else 0
        self._has_light = settings.enable_light_queues
        self._lite = lite
        self._variable_bytes_max = settings.commit_log_file_bytes - _FIXED_BYTES_MAX

    def dispatch(self) -> bool:
        """Dispatch the durable records under SYNC_FLUSH, otherwise the committed records, but only one part of a long
        batch.
        Return True if more can be dispatched immediately."""
        return bool(self.dispatcher.pending) and self.dispatcher.run(self._readable_offset)

    def batch(self) -> AbstractContextManager[None]:
        """Return a context manager. All messages that are put inside become readable at its end, which costs less than
        making each message readable after its put.
        A read inside the context makes them readable earlier."""
        return _Batch(self)

    @property
    def properties_bytes_max(self) -> int:
        """Maximum length of a property string that can be stored. A record checksum needs space after it."""
        return PROPERTIES_BYTES_MAX - self._trailer_bytes

    @property
    def _readable_offset(self) -> int:
        return self._flusher.durable_offset if self._is_sync else self._commit_log.committed_offset

    def put(self, message: InnerMessage) -> PutResult:
        """Append one message. It is readable when `put` returns. Under SYNC_FLUSH it is readable only after it is
        durable, with the pool only after it is committed.
        """
        queue = self._queues.table.get((message.topic, message.queue_id))
        refused = self._refuse(message, is_new=queue is None)
        if refused is not None:
            return refused
        queue = queue or self._queues.obtain(message.topic, message.queue_id)
        if (
            message.sys_flag & INNER_BATCH
            or isinstance(queue, BatchQueue)
            or (message.keys is None and _INNER_NUM in message.properties)
        ):
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=_inner_batch_fault(queue))
        properties = message.properties
        if (self._has_light or LITE_MARK in properties) and (names := light_names(message.topic, properties)):
            if not self._has_light:
                names = [name for name in names if name == _own_lite_queue(message.topic, properties)]
            if names:
                return self._append_with_light(queue, message, names)
        return self._append(queue, message)

    def _append_with_light(self, queue: ConsumeQueueBase, message: InnerMessage, names: list[str]) -> PutResult:
        """Append one message that is in light queues, too. It gets the next number of each of them."""
        if reason := light_fault(names, message.topic):
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=reason)
        old, new = _split_light(names)
        if reason := self._too_many(old, new):
            return PutResult(PutStatus.LIGHT_QUEUES_EXCEEDED, reason=reason)
        light: list[ConsumeQueueBase | LiteQueue] = [
            self._lite.obtain(name) if name in new else self._queues.obtain(name, 0) for name in names
        ]
        properties = numbered(message.properties, light)
        if len(properties) + self._trailer_bytes > PROPERTIES_BYTES_MAX:
            appended = PutResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, reason=f"properties of {len(properties)} bytes")
        else:
            numbers = [one.next_offset for one in light]
            appended = self._append(queue, msgspec.structs.replace(message, string=properties))
            appended.light_offset = numbers[0]
            appended.lite_epoch = max((one.epoch for one in light if isinstance(one, LiteQueue)), default=0)
        for one in light:
            if isinstance(one, LiteQueue):
                one.put(is_stored=appended.status is PutStatus.OK)
            elif appended.status is PutStatus.OK:
                one.next_offset += one is not queue
        return appended

    def _too_many(self, light: list[str], lite: list[str]) -> str:
        """Return the reason why no more light queues can be created, or an empty text if none would be."""
        limits, count_max = self._settings.limits_light_queues, self._settings.light_queue_count_max
        if limits and too_many(self._queues, light, count_max):
            return "maxLmqConsumeQueueNum light queues exist"
        count_max = self._settings.lite_topic_count_max
        if len(self._lite.table) >= count_max and any(self._lite.queue(name) is None for name in lite):
            return f"maxLiteTopicNum={count_max} lite topics exist"
        return ""

    def put_batch(self, message: InnerMessage) -> PutResult:
        """Append a wire batch body: one record per message, or one inner batch if the topic has batch queues.
        All its messages are stored in one file. Source: store.md §3.7."""
        queue = self._queues.table.get((message.topic, message.queue_id))
        refused = self._refuse(message, is_new=queue is None)
        if refused is not None:
            return refused
        try:
            bounds = batch_bounds(message.body)
        except BodyError as error:
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=str(error))
        if not bounds:
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason="the batch holds no message")
        if _has_torn_member(message.body, bounds):
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=_TORN)
        queue = queue or self._queues.obtain(message.topic, message.queue_id)
        if isinstance(queue, BatchQueue):
            return self._put_inner_batch(queue, message, len(bounds))
        return self._put_members(queue, message, bounds)

    def _put_inner_batch(self, queue: BatchQueue, message: InnerMessage, count: int) -> PutResult:
        """Append a batch as one record that holds the queue offsets of ``count`` messages."""
        if find_property(message.properties, b"UNIQ_KEY") is None or count > _BATCH_COUNT_MAX:
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=_inner_batch_fault(queue))
        properties = message.properties
        if properties and not properties.endswith(b"\x02"):
            properties += b"\x02"
        properties = in_stored_order(
            properties + b"INNER_NUM\x01%d\x02INNER_BASE\x01%d\x02" % (count, queue.next_offset)
        )
        if len(properties) + self._trailer_bytes > PROPERTIES_BYTES_MAX:
            return PutResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, reason=f"properties of {len(properties)} bytes")
        inner = msgspec.structs.replace(
            message, string=properties, sys_flag=message.sys_flag | INNER_BATCH | NEED_UNWRAP
        )
        appended = self._append(queue, inner, count)
        if appended.status is PutStatus.OK:
            appended.physical_offsets = (appended.physical_offset,)
        return appended

    def _append(self, queue: ConsumeQueueBase, message: InnerMessage, count: int = 1) -> PutResult:
        """Append one record that occupies ``count`` offsets of its queue, and dispatch it."""
        sys_flag, properties, body = message.sys_flag, message.properties, message.body
        kind = sys_flag & TRANSACTION_MASK
        is_numbered = kind != TRANSACTION_PREPARED and kind != TRANSACTION_ROLLBACK
        queue_offset = queue.next_offset if is_numbered else 0
        if self._trailer_bytes:
            properties = with_room_for_crc(properties)
        log, now, physical_offset, record = self._commit_log, self._clock.now_ms(), -1, b""
        try:
            if now < log.last_store_timestamp:
                self._flusher.step_back(now)
            while physical_offset != (placed := log.place(len(record)) if record else log.max_offset):
                physical_offset = placed  # encode again if a new file begins: cheaper than computing each size
                record = encode_record(
                    topic=queue.topic_utf8,
                    queue_id=message.queue_id,
                    flag=message.flag,
                    queue_offset=queue_offset,
                    physical_offset=physical_offset,
                    sys_flag=sys_flag,
                    born_timestamp=message.born_timestamp,
                    born_host=message.born_host,
                    store_timestamp=now,
                    store_host=message.store_host,
                    reconsume_times=message.reconsume_times,
                    prepared_transaction_offset=message.prepared_transaction_offset,
                    body=body,
                    properties=properties,
                )
        except OSError as error:
            return self._not_taken(_no_file(error))
        except struct.error as error:
            return _out_of_range(error)
        if self._trailer_bytes:
            record = seal(record)
            properties = record[-len(properties) :]
        if (refused := self._write(record, now)) is not None:
            return refused
        if is_numbered:
            queue.next_offset = queue_offset + count
        size = len(record)
        end = physical_offset + size
        topic, queue_id, keys = message.topic, message.queue_id, message.index_keys()
        code = queue_tags_code(topic, properties, now, self._delays_ms, keys[2])
        arrival = DispatchRequest(
            topic, queue_id, queue_offset, code, now, physical_offset, size, sys_flag, properties, count, keys
        )
        self.dispatcher.submit([arrival], end, end if self._is_readable_at_once else self._readable_offset)
        return PutResult(PutStatus.OK, physical_offset, end, queue_offset, now)

    def _put_members(self, queue: ConsumeQueueBase, message: InnerMessage, bounds: list[BatchBounds]) -> PutResult:
        """Append every message of a batch as its own record, with one write for all records."""
        body = message.body
        if self._trailer_bytes:
            body = encode_batch(
                BatchEntry(bytes(body[body_at : at - 2]), with_room_for_crc(bytes(body[at:end])), flag)
                for flag, body_at, at, end in bounds
                if end - at + self._trailer_bytes <= PROPERTIES_BYTES_MAX
            )
            if len(bounds) != len(bounds := batch_bounds(body)):
                return PutResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, reason="a member's properties are too long")
        fixed_bytes = _record_bytes(queue.topic_utf8, message, 0, 0)
        total_bytes = (fixed_bytes - BATCH_ENTRY_BYTES_MIN) * len(bounds) + len(body)
        if total_bytes + BLANK_BYTES > self._settings.commit_log_file_bytes:
            return _too_long_for_file(total_bytes)
        now = self._clock.now_ms()
        physical_offset = self._place(total_bytes, now)
        if isinstance(physical_offset, PutResult):
            return physical_offset
        try:
            data, sizes = encode_records(
                _batch_rows(body, bounds, message, queue),
                physical_offset=physical_offset,
                born_host=message.born_host,
                store_timestamp=now,
                store_host=message.store_host,
            )
        except struct.error as error:
            return _out_of_range(error)
        assert len(data) == total_bytes, "the records have the computed size"
        starts = tuple(accumulate(sizes, initial=physical_offset))
        if self._trailer_bytes:
            data = b"".join([seal(data[a - physical_offset : b - physical_offset]) for a, b in pairwise(starts)])
        if (refused := self._write(data, now)) is not None:
            return refused
        first, end = queue.next_offset, physical_offset + total_bytes
        assert end == starts[-1] == self._commit_log.max_offset, "the log ends with the last message of the batch"
        queue.next_offset = first + len(sizes)
        arrivals: list[DispatchRequest] = []
        topic, queue_id, sys_flag, delays_ms = message.topic, message.queue_id, message.sys_flag, self._delays_ms
        for queue_offset, (at, size, bound) in enumerate(zip(starts, sizes, bounds, strict=False), first):
            properties_end = at - physical_offset + size
            properties = data[properties_end - bound[3] + bound[2] : properties_end]
            code = queue_tags_code(topic, properties, now, delays_ms)
            arrivals.append(DispatchRequest(topic, queue_id, queue_offset, code, now, at, size, sys_flag, properties))
        self.dispatcher.submit(arrivals, end, end if self._is_readable_at_once else self._readable_offset)
        return PutResult(PutStatus.OK, physical_offset, end, first, now, starts[:-1])

    def prepare(self, batch: LongBatch) -> Iterator[None]:
        """Prepare a long batch in steps. Each step takes a few milliseconds. Nothing is stored."""
        message, body = batch.message, batch.message.body
        batch.refused = self._refuse(message, is_new=(message.topic, message.queue_id) not in self._queues.table)
        try:
            for bounds in batch.walk() if batch.refused is None else ():
                if _has_torn_member(body, bounds):
                    batch.refused = PutResult(PutStatus.MESSAGE_ILLEGAL, reason=_TORN)
                    return
                yield
        except BodyError as error:
            batch.refused = PutResult(PutStatus.MESSAGE_ILLEGAL, reason=str(error))
            return
        if batch.refused is None and not batch.count:
            batch.refused = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="the batch holds no message")
        if batch.refused is not None:
            return
        queue = self._queues.obtain(message.topic, message.queue_id)
        if isinstance(queue, BatchQueue):
            return
        fixed_bytes = _record_bytes(queue.topic_utf8, message, 0, self._trailer_bytes) - BATCH_ENTRY_BYTES_MIN
        total_bytes = fixed_bytes * batch.count + len(body)
        if total_bytes + BLANK_BYTES > self._settings.commit_log_file_bytes:
            batch.refused = _too_long_for_file(total_bytes)
            return
        try:
            yield from batch.encode(queue.topic_field, has_crc=bool(self._trailer_bytes))
        except struct.error as error:
            batch.refused = _out_of_range(error)
        if batch.size + BLANK_BYTES > self._settings.commit_log_file_bytes:  # a checksum may need a separator before it
            batch.refused = _too_long_for_file(batch.size)

    def put_long_batch(self, batch: LongBatch) -> PutResult:
        """Append a batch like `put_batch`, after all steps of `prepare`. One write stores the batch, which takes at
        most 40 ms for 190,000 messages. The messages are readable when `dispatch`, repeated until it returns False, has
        dispatched them. `LongBatch.physical_offsets` yields their physical offsets."""
        message = batch.message
        is_new = (message.topic, message.queue_id) not in self._queues.table
        refused = batch.refused or self._refuse(message, is_new=is_new)
        if refused is not None:
            return refused
        queue = self._queues.obtain(message.topic, message.queue_id)
        if isinstance(queue, BatchQueue):
            return self._put_inner_batch(queue, message, batch.count)
        if not batch.is_encoded:  # the topic had batch queues during `prepare`
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=_inner_batch_fault(queue))
        now = self._clock.now_ms()
        physical_offset = self._place(batch.size, now)
        if isinstance(physical_offset, PutResult):
            return physical_offset
        first = queue.next_offset
        data = batch.settle(queue_offset=first, physical_offset=physical_offset, store_timestamp=now)
        if (refused := self._write(data, now)) is not None:
            return refused
        assert self._commit_log.max_offset == physical_offset + batch.size, "the log ends with the batch"
        queue.next_offset = first + batch.count
        self.dispatcher.submit_parts(batch.parts(self._delays_ms))
        return PutResult(PutStatus.OK, physical_offset, physical_offset + batch.size, first, now)

    # Long: the hot path is one loop without a call for each message.
    def put_run(self, messages: Sequence[InnerMessage]) -> list[DispatchRequest] | None:
        """Append plain messages of one sender in order with one write. The effect is the same as one `put` for each
        message.
        Return the requests for the dispatcher. Return None, with nothing done, if the messages must be put one by one:
        a message is not plain, is refused or opens a queue, the log file has no space for all messages, or the write
        failed."""
        log, table, dispatcher = self._commit_log, self._queues.table, self.dispatcher
        now = self._clock.now_ms()
        if self._trailer_bytes or not self._takes_runs(now):
            return None
        if self._has_light and any(MULTI_DISPATCH in one.properties for one in messages):
            return None
        numbers: dict[ConsumeQueueBase, int] = {}
        rows: list[RecordRow] = []
        body_bytes_max = self._settings.message_bytes_max
        for one in messages:
            queue, body, properties = table.get((one.topic, one.queue_id)), one.body, one.string
            if type(queue) is not ConsumeQueue or one.keys is None or properties is None or one.sys_flag & _NOT_PLAIN:
                return None
            properties_bytes = len(properties)
            if properties_bytes >= SECTOR_BYTES or properties[-1:] == b"\0" or len(body) > body_bytes_max:
                return None
            number = numbers.get(queue, queue.next_offset)
            numbers[queue] = number + 1
            rows.append(
                (
                    queue.topic_field,
                    one.queue_id,
                    one.flag,
                    number,
                    one.sys_flag,
                    one.born_timestamp,
                    one.reconsume_times,
                    body,
                    _pack_length(properties_bytes) + properties,
                )
            )
        first, at = messages[0], log.max_offset
        try:
            data, sizes = encode_records(
                rows, physical_offset=at, born_host=first.born_host, store_timestamp=now, store_host=first.store_host
            )
            if not log.has_room(len(data)):
                return None
        except (OSError, struct.error):
            return None
        if self._write(data, now) is not None:
            return None
        arrivals: list[DispatchRequest] = []
        for one, row, size in zip(messages, rows, sizes, strict=True):
            keys, string = one.keys or NO_KEYS, one.string or b""
            code = encoded_tags_code(keys[2])
            arrivals.append(
                DispatchRequest(one.topic, one.queue_id, row[3], code, now, at, size, one.sys_flag, string, 1, keys)
            )
            at += size
        assert at == log.max_offset, "the log ends with the run"
        # Set the offsets after the write. If they were set before a failed write, the queue would have a gap that stops
        # consumers.
        for queue, number in numbers.items():
            assert number > queue.next_offset, "queue offsets only grow"
            queue.next_offset = number
        dispatcher.submit(arrivals, at, at if self._is_readable_at_once else self._readable_offset)
        return arrivals

    def put_sends(self, sends: Sends, born_host: bytes, store_host: bytes) -> int | None:
        """Append plain sends that were read together, like `put_run`. Return the physical offset at which they end, or
        None. The topics of messages in lite topics are their parents: the caller has checked it.
        """
        log, now = self._commit_log, self._clock.now_ms()
        if not self._takes_runs(now) or sends.body_bytes_max > self._settings.message_bytes_max:
            return None
        places, table = sends.queues, self._queues.table
        queues: list[ConsumeQueue] = []
        numbers: list[int] = []
        for topic, queue_id, _, _ in places:
            queue = table.get((topic, queue_id))
            if type(queue) is not ConsumeQueue:
                return None
            queues.append(queue)
            numbers.append(queue.next_offset)
        run: LiteRun | None = None
        if parents := sends.lite_parents:
            run = self._lite.assign(sends, parents, self._settings.lite_topic_count_max)
            if run is None:
                return None
        try:
            data = sends.encode(numbers, log.max_offset, born_host, now, store_host, bool(self._trailer_bytes))
        except ValueError:
            data = b""
        if not data or not log.has_room(len(data)) or self._write(data, now) is not None:
            if run is not None:
                self._lite.give_up(run)
            return None
        if run is not None:
            sends.stored_lite(self._lite.table.nexts)
        sends.forget_bodies()
        # Set the offsets after the write. If they were set before a failed write, the queue would have a gap that stops
        # consumers.
        for queue, (_, _, count, _) in zip(queues, places, strict=True):
            queue.next_offset += count
        end, dispatcher = log.max_offset, self.dispatcher
        enter = partial(_enter_runs, queues, numbers, sends)
        arrivals = StoredSends(sends, end - len(data), now, enter, run, with_tags=dispatcher.tags_as_keys)
        dispatcher.submit(arrivals, end, end if self._is_readable_at_once else self._readable_offset)
        return end

    def _takes_runs(self, now: int) -> bool:
        """Return True if several messages can be stored with one write at this time."""
        flusher = self._flusher
        has_failed = flusher.failure or flusher.commit_failure or self.dispatcher.failure
        # `put` handles a clock that went back, and returns the reason of a failure.
        is_refused = has_failed or self.refusal or not self.is_open
        return not is_refused and now >= self._commit_log.last_store_timestamp

    def _refuse(self, message: InnerMessage, *, is_new: bool) -> PutResult | None:
        """Return a result with the first reason to refuse a message, or None if there is no reason.
        Source: store.md §3.6, §14."""
        flusher = self._flusher
        has_failed = flusher.failure is not None or flusher.commit_failure is not None
        if has_failed or self.dispatcher.failure is not None or self.refusal or not self.is_open:
            reason = self._unavailable()
            if reason:
                return PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason=reason)
        if is_new:
            reason = self._topic_fault(message)
            if reason:
                return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=reason)
        properties = message.properties
        properties_bytes = len(properties) + self._trailer_bytes
        if properties_bytes > PROPERTIES_BYTES_MAX:
            reason = f"properties of {properties_bytes} bytes, at most {PROPERTIES_BYTES_MAX}"
            return PutResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, reason=reason)
        body_bytes = len(message.body)
        if body_bytes > self._settings.message_bytes_max and not message.was_accepted:
            reason = f"body of {body_bytes} bytes, maxMessageSize is {self._settings.message_bytes_max}"
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=reason)
        if (properties_bytes >= SECTOR_BYTES or properties[-1:] == b"\0") and _looks_torn(properties):
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=_TORN)
        if body_bytes + properties_bytes > self._variable_bytes_max:
            reason = f"body and properties of {body_bytes + properties_bytes} bytes fit into no log file"
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=reason)
        return None

    def _topic_fault(self, message: InnerMessage) -> str:
        """Return the reason why no queue can be created for a topic, or an empty text."""
        is_long_allowed = message.topic.startswith(RETRY_PREFIX) and self._settings.auto_message_version_on_topic_length
        limit = _RETRY_TOPIC_BYTES_MAX if is_long_allowed else _TOPIC_BYTES_MAX
        topic_bytes = len(message.topic.encode("utf-8", "replace"))
        if topic_bytes > limit:
            return f"topic of {topic_bytes} bytes, at most {limit}"
        return topic_fault(message.topic, message.queue_id)

    def _place(self, size: int, now_ms: int) -> int | PutResult:
        """Return the physical offset for records of a total size, all in one file.
        If no file can be created, return the result of the failed put.
        """
        try:
            if now_ms < self._commit_log.last_store_timestamp:
                self._flusher.step_back(now_ms)
            return self._commit_log.place(size)
        except OSError as error:
            return self._not_taken(_no_file(error))

    def _write(self, data: bytes | bytearray, now_ms: int) -> PutResult | None:
        """Write to the log. If the write fails, return the result of the failed put."""
        try:
            self._commit_log.append(data, now_ms)
        except OSError as error:
            return self._not_taken(_not_written(error))
        if self._logged_reason:
            _log.warning("messages are accepted again")
            self._logged_reason = ""
        return None

    def _not_taken(self, refused: PutResult) -> PutResult:
        """Log the reason why no messages are accepted. Log the same reason only once. Return ``refused``."""
        if self._logged_reason != refused.reason:
            _log.error("no messages are accepted: %s", refused.reason)
            self._logged_reason = refused.reason
        return refused

    def _unavailable(self) -> str:
        """Return the reason why no message is accepted, or an empty text.
        Retry a flush or a dispatch that failed before, for example because the disk was full."""
        if not self.is_open:
            return "the store is closed"
        if (error := self._flusher.failure) is not None:
            self._flusher.request_again()
            return f"flush failed: errno {error.errno} {error.strerror}"
        if (error := self._flusher.commit_failure) is not None:
            return f"log cannot be written: errno {error.errno} {error.strerror}"
        self.dispatch()
        if (error := self.dispatcher.failure) is not None:
            return f"consume queue cannot be written: errno {error.errno} {error.strerror}"
        return self.refusal


def _own_lite_queue(topic: str, properties: bytes) -> str | None:
    """Return the light queue of the lite topic that a message of a topic names."""
    name = find_property(properties, LITE_MARK[:-1])
    return None if name is None else lite_queue(topic, name.decode("utf-8", "replace"))


def _split_light(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the light queues that have files of their own, and those of lite topics."""
    new = [name for name in names if split_lite_queue(name)]
    return [name for name in names if name not in new], new


class _Batch(AbstractContextManager[None]):
    """The context manager of `Appender.batch`.

    It is entered at every read of a connection, and a generator would cost five times as much.
    """

    __slots__ = ("_appender",)

    def __init__(self, appender: Appender) -> None:
        self._appender = appender

    def __enter__(self) -> None:
        self._appender.dispatcher.is_batching = True

    def __exit__(self, *raised: object) -> None:
        self._appender.dispatcher.is_batching = False
        self._appender.dispatch()


def _enter_runs(queues: list[ConsumeQueue], numbers: list[int], sends: Sends) -> bool:
    """Append the entries of several queues with one write per queue. Return False if they must be appended one by one,
    where entries that are already written are skipped. Raises OSError: a file cannot be written."""
    for queue, number, (entries, start, end) in zip(queues, numbers, sends.queue_entries(), strict=True):
        if not queue.append_run(number, start, end, entries):
            return False
    return True


def _batch_rows(
    body: bytes, bounds: list[BatchBounds], message: InnerMessage, queue: ConsumeQueueBase
) -> list[RecordRow]:
    """Return the rows of a batch. Both a batch entry and a record end with the length of the properties and the
    properties.
    """
    topic, queue_id, kind = queue.topic_field, message.queue_id, message.sys_flag
    born, times = message.born_timestamp, message.reconsume_times
    return [
        (topic, queue_id, flag, number, kind, born, times, body[body_at : at - 2], body[at - 2 : end])
        for number, (flag, body_at, at, end) in enumerate(bounds, queue.next_offset)
    ]


def _looks_torn(properties: bytes) -> bool:
    """Return True if recovery would take a record with these properties for torn by a power cut."""
    return properties[-1:] == b"\0" or (len(properties) >= SECTOR_BYTES and _SECTOR in properties)


def _has_torn_member(body: bytes, bounds: list[BatchBounds]) -> bool:
    """Return True if recovery would take a record of a batch message for torn."""
    suspect = [one for one in bounds if one[3] - one[2] >= SECTOR_BYTES or body[one[3] - 1] == 0]
    return any(_looks_torn(body[at:end]) for _, _, at, end in suspect)


def _record_bytes(topic: bytes, message: InnerMessage, body_bytes: int, properties_bytes: int) -> int:
    """Return the size of the record that `encode_record` creates. Source: store.md §3.1."""
    size = _V1_OVERHEAD_BYTES + len(topic) + body_bytes + properties_bytes
    if len(topic) > _TOPIC_BYTES_MAX:
        size += 1
    if len(message.born_host) == 20:
        size += _V6_EXTRA_BYTES
    if len(message.store_host) == 20:
        size += _V6_EXTRA_BYTES
    return size


def _inner_batch_fault(queue: ConsumeQueueBase) -> str:
    if isinstance(queue, BatchQueue):
        return (
            f"queue.type of topic {queue.topic} is BatchCQ: it stores batches with a UNIQ_KEY and at most "
            f"{_BATCH_COUNT_MAX} messages, nothing else"
        )
    return f"queue.type of topic {queue.topic} is not BatchCQ: it stores no inner batches"


def _too_long_for_file(total_bytes: int) -> PutResult:
    return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=f"a batch of {total_bytes} bytes fits into no log file")


def _out_of_range(error: struct.error) -> PutResult:
    return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=f"a number of the message fits into no record: {error}")


def _no_file(error: OSError) -> PutResult:
    if isinstance(error, BlockingIOError):
        return PutResult(PutStatus.OS_PAGE_CACHE_BUSY, reason=str(error.strerror))
    return PutResult(
        PutStatus.CREATE_MAPPED_FILE_FAILED, reason=f"no new log file: errno {error.errno} {error.strerror or error}"
    )


def _not_written(error: OSError) -> PutResult:
    return PutResult(
        PutStatus.SERVICE_NOT_AVAILABLE, reason=f"log cannot be written: errno {error.errno} {error.strerror or error}"
    )
