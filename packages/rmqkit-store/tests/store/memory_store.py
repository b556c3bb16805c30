"""A store in memory with the answers of `MessageStore`: the model in the tests of the file store.

It stores one list of records per queue and does all work in the slow and obvious way. Numbers, offsets, record bytes,
statuses and limits are those of a file store with the same settings and clock. There is no disk that could fill up or
fail: every record is durable at once and counts as in memory. `truncate` has the effect of a power cut on a log, and
`drop_before` that of retention. Batch queues are not supported.
Owner thread only. Source: store.md §3.6, §3.7, §16.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from msgspec.structs import asdict

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import BodyError
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, find_property
from rmqkit.protocol.record import (
    BLANK_BYTES,
    TRAILER_BYTES,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    BatchEntry,
    decode_batch,
    encode_record,
    seal,
    with_room_for_crc,
)
from rmqkit.store.dispatcher import DispatchRequest, queue_tags_code
from rmqkit.store.index.index import KeyQuery
from rmqkit.store.inner_message import InnerMessage, PutResult, PutStatus
from rmqkit.store.queues.queue_ext import ExtUnit
from rmqkit.store.queues.table import topic_fault
from rmqkit.store.reader import EntryTest, GetResult, GetStatus
from rmqkit.store.settings import StoreSettings, parse_delay_levels

__all__ = ["MemoryStore"]

_ENTRY_BYTES = 20


class MemoryStore:
    """A store without files, with the arguments of `MessageStore`.

    Attributes:
        min_physical_offset, max_physical_offset: start and end of the log; -1 and 0 without a record.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_arrival: Callable[[list[DispatchRequest]], None] | None = None,
    ) -> None:
        self.min_physical_offset, self.max_physical_offset = -1, 0
        self.is_writable = False
        self._settings = settings
        self._clock = clock
        self._on_arrival = on_arrival
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._trailer_bytes = TRAILER_BYTES + 1 if settings.append_property_crc else 0
        self._log: dict[int, tuple[DispatchRequest, bytes]] = {}
        self._queues: dict[tuple[str, int], list[DispatchRequest]] = {}
        self._min_offsets: dict[tuple[str, int], int] = {}

    @property
    def durable_offset(self) -> int:
        """The end of the log: records in memory count as durable."""
        return self.max_physical_offset

    @property
    def dispatched_offset(self) -> int:
        """The end of the log: every stored record is readable."""
        return self.max_physical_offset

    def open(self) -> None:
        """Accept messages."""
        self.is_writable = True

    def close(self) -> None:
        """Accept no more messages. The stored messages stay readable."""
        self.is_writable = False

    def batch(self) -> AbstractContextManager[None]:
        """Return a context without effect: records are readable at once anyway."""
        return nullcontext()

    def request_flush(self) -> None:
        """There is nothing to flush."""

    def dispatch(self) -> None:
        """There is nothing to dispatch."""

    # ---- putting

    def put(self, message: InnerMessage) -> PutResult:
        """Append one message."""
        return self._put(message, [BatchEntry(message.body, message.properties, message.flag)])

    def put_run(self, messages: list[InnerMessage]) -> None:
        """Append messages one by one: lists gain nothing from a run."""

    def put_batch(self, message: InnerMessage) -> PutResult:
        """Append the members of a wire batch body, all or nothing."""
        try:
            entries = decode_batch(message.body)
        except BodyError as error:
            return PutResult(PutStatus.MESSAGE_ILLEGAL, reason=str(error))
        appended = self._put(message, entries)
        if appended.status is PutStatus.OK:
            appended.physical_offsets = tuple(at for at in self._log if at >= appended.physical_offset)
        return appended

    def _put(self, message: InnerMessage, entries: list[BatchEntry]) -> PutResult:
        status, reason = self._refusal(message, entries)
        if status is not PutStatus.OK:
            return PutResult(status, reason=reason)
        queue = self._queues.setdefault((message.topic, message.queue_id), [])
        if message.sys_flag & TRANSACTION_MASK in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK):
            queue = []  # a half message is in none
        if self._trailer_bytes:
            entries = [BatchEntry(one.body, with_room_for_crc(one.properties), one.flag) for one in entries]
        now, first = self._clock.now_ms(), len(queue)
        start = self._place(sum(len(_record(message, entry, 0, 0, 0)) for entry in entries))
        arrivals = [self._append(message, entry, number, now) for number, entry in enumerate(entries, first)]
        queue += arrivals
        if self._on_arrival is not None:
            self._on_arrival(arrivals)
        return PutResult(PutStatus.OK, start, self.max_physical_offset, first, now)

    def _append(self, message: InnerMessage, entry: BatchEntry, queue_offset: int, now_ms: int) -> DispatchRequest:
        place, at = (message.topic, message.queue_id), self.max_physical_offset
        record = _record(message, entry, queue_offset, at, now_ms)
        record = seal(record) if self._trailer_bytes else record
        properties = record[len(record) - len(entry.properties) :]
        code = queue_tags_code(message.topic, properties, now_ms, self._delays_ms)
        arrival = DispatchRequest(*place, queue_offset, code, now_ms, at, len(record), message.sys_flag, properties)
        self._log[at] = arrival, record
        self.max_physical_offset += len(record)
        return arrival

    def _place(self, size: int) -> int:
        """Begin a new file if the last one has no room. Source: store.md §3.6."""
        file_bytes = self._settings.commit_log_file_bytes
        if size + BLANK_BYTES > -self.max_physical_offset % file_bytes and self.max_physical_offset % file_bytes:
            self.max_physical_offset += -self.max_physical_offset % file_bytes
        self.min_physical_offset = max(0, self.min_physical_offset)
        return self.max_physical_offset

    def _refusal(self, message: InnerMessage, entries: list[BatchEntry]) -> tuple[PutStatus, str]:
        if not self.is_writable:
            return PutStatus.SERVICE_NOT_AVAILABLE, "the store is closed"
        if reason := topic_fault(message.topic, message.queue_id):
            return PutStatus.MESSAGE_ILLEGAL, reason
        if any(len(one.properties) + self._trailer_bytes > PROPERTIES_BYTES_MAX for one in entries):
            return PutStatus.PROPERTIES_SIZE_EXCEEDED, f"properties of more than {PROPERTIES_BYTES_MAX} bytes"
        if not entries or len(message.body) > self._settings.message_bytes_max:
            return PutStatus.MESSAGE_ILLEGAL, f"{len(entries)} messages in a body of {len(message.body)} bytes"
        return PutStatus.OK, ""

    # ---- reading

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int,
        codes: frozenset[int] | None = None,
        accept: Callable[[memoryview], bool] | None = None,
        accept_entry: EntryTest | None = None,
        joins: bool = False,
    ) -> GetResult:
        """Read messages from an offset on. Source: store.md §16.1."""
        queue = self._queues.get((topic, queue_id), [])
        low, high = self.min_offset(topic, queue_id), len(queue)
        if not queue:
            return GetResult(GetStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        if queue_offset < low:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, low, low, high)
        if queue_offset >= high:
            status = GetStatus.OFFSET_OVERFLOW_ONE if queue_offset == high else GetStatus.OFFSET_OVERFLOW_BADLY
            return GetResult(status, high, low, high)
        settings, count_max = self._settings, max(1, count_max)
        result = GetResult(GetStatus.NO_MATCHED_MESSAGE, queue_offset, low, high)
        for arrival in queue[queue_offset : self._scan_end(queue_offset, count_max)]:
            size = sum(map(len, result.records)) + arrival.size
            is_full = len(result.records) == min(count_max, settings.transfer_count_in_memory_max)
            if result.records and (is_full or size > settings.transfer_bytes_in_memory_max):
                break
            result.next_begin_offset += 1
            unit = ExtUnit(arrival.tags_code, arrival.store_timestamp) if settings.enable_consume_queue_ext else None
            if codes is not None and arrival.tags_code not in codes:
                continue
            if accept_entry is not None and not accept_entry(arrival.tags_code, unit):
                continue
            record = self.record_at(arrival.physical_offset)
            if record is None and not result.records:
                result.status = GetStatus.MESSAGE_WAS_REMOVING
            if record is not None and (accept is None or accept(record)):
                result.records.append(record)
                result.status = GetStatus.FOUND
        if joins and len(result.records) > 1:
            result.joined_count = len(result.records)
            result.records = [memoryview(b"".join(result.records))]
        return result

    def _scan_end(self, queue_offset: int, count_max: int) -> int:
        """Return the end offset of a read: it scans a bounded number of entries, in one queue file."""
        per_file = -(-self._settings.consume_queue_file_bytes // _ENTRY_BYTES)
        scanned = max(-(-self._settings.filter_bytes_max // _ENTRY_BYTES), count_max)
        return min(queue_offset + scanned, (queue_offset // per_file + 1) * per_file)

    def entries(
        self, topic: str, queue_id: int, queue_offset: int, *, count_max: int
    ) -> list[tuple[int, int, int, int | None]]:
        """Yield next offset, physicalOffset, size and tag code of the messages from an offset on."""
        if queue_offset < self.min_offset(topic, queue_id):
            return []
        end = min(queue_offset + count_max, self._scan_end(queue_offset, count_max))
        found = self._queues.get((topic, queue_id), [])[queue_offset:end]
        return [(one.queue_offset + 1, one.physical_offset, one.size, one.tags_code) for one in found]

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset after the last message."""
        return len(self._queues.get((topic, queue_id), []))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first readable message."""
        return self._min_offsets.get((topic, queue_id), 0)

    def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """Return the storeTimestamp of the first readable message, or -1 without messages."""
        return self.store_time_at(topic, queue_id, self.min_offset(topic, queue_id))

    def store_time_at(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Return the storeTimestamp of a message, or -1 if the message does not exist."""
        if not self.min_offset(topic, queue_id) <= queue_offset < self.max_offset(topic, queue_id):
            return -1
        return self._queues[topic, queue_id][queue_offset].store_timestamp

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool = False) -> int:
        """Return the first offset at or after a time; ``upper``: the last at or before it. Source: store.md §16.2."""
        low, high = self.min_offset(topic, queue_id), self.max_offset(topic, queue_id)
        times = [self.store_time_at(topic, queue_id, number) for number in range(low, high)]
        if upper:
            return low + max(0, bisect_right(times, timestamp_ms) - 1)
        return low + bisect_left(times, timestamp_ms)

    def is_in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if the message exists."""
        return 0 <= queue_offset < self.max_offset(topic, queue_id)

    def record_at(self, physical_offset: int) -> memoryview | None:
        """Return the record that begins at a physical offset, or None."""
        stored = self._log.get(physical_offset)
        return None if stored is None or physical_offset < self.min_physical_offset else memoryview(stored[1])

    @property
    def log(self) -> MemoryStore:
        return self

    def copy(self, physical_offset: int, size: int) -> bytes | None:
        """Return a copy of a record, or None."""
        record = self.record_at(physical_offset)
        return None if record is None or len(record) != size else bytes(record)

    def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> KeyQuery:
        """Return the records with a key: ``UNIQ_KEY``, a word of ``KEYS``, ``T#`` + tags. Source: store.md §7.5."""
        found = [one for one, _ in self._log.values() if one.topic == topic and key in _keys(one)]
        wanted = [one.physical_offset for one in found if begin_ms <= one.store_timestamp <= end_ms]
        return KeyQuery(wanted[-min(count_max, self._settings.query_count_max) :])

    # ---- deleting

    def delete_topic(self, *topics: str) -> None:
        """Delete the queues of topics; their records stay in the log."""
        for place in [place for place in self._queues if place[0] in topics]:
            del self._queues[place]
            self._min_offsets.pop(place, None)

    def truncate(self, physical_offset: int) -> None:
        """Remove every record that ends after a physical offset, and end the log there."""
        self.max_physical_offset = physical_offset
        self._log = {at: one for at, one in self._log.items() if at + len(one[1]) <= physical_offset}
        for place, queue in self._queues.items():
            self._queues[place] = [one for one in queue if one.physical_offset in self._log]

    def drop_before(self, physical_offset: int) -> None:
        """Begin the log at a physical offset, and every queue at its first message from there on."""
        self.min_physical_offset = physical_offset
        for place, queue in self._queues.items():
            self._min_offsets[place] = sum(one.physical_offset < physical_offset for one in queue)


def _record(message: InnerMessage, entry: BatchEntry, queue_offset: int, physical_offset: int, now_ms: int) -> bytes:
    """Return the bytes of one message of a put."""
    others = ("topic", "body", "string", "flag", "keys", "values", "was_accepted")
    same = {name: value for name, value in asdict(message).items() if name not in others}
    return encode_record(
        topic=message.topic.encode(),
        flag=entry.flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp=now_ms,
        body=entry.body,
        properties=entry.properties,
        **same,
    )


def _keys(arrival: DispatchRequest) -> set[str]:
    """Return the index keys of a record; a rolled-back message has none. Source: store.md §7.2."""
    if arrival.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
        return set()
    unique, keys, tags = (find_property(arrival.properties, name) or b"" for name in (b"UNIQ_KEY", b"KEYS", b"TAGS"))
    return {unique.decode(), *keys.decode().split(" "), f"T#{tags.decode()}" if tags else ""} - {""}
