"""What the dispatcher needs to know about a whole run of records, worked out with numpy: `Arrival` in columns.

The facts are those of `arrival_of` and `key_hashes` for every record, and tested equal to them; what comes out of
property strings is `PropertyColumns`' work. The delay topic and inner batches are left to the plain code.

Costs about 1 µs a record for the queues and another 1 µs for its keys. Import needs numpy: see `scan`.
Source: store.md §3.4, §4.2, §7.2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rmqkit.protocol.names import SCHEDULE_TOPIC
from rmqkit.protocol.record import INNER_BATCH, TRANSACTION_MASK, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from rmqkit.store.dispatcher import Arrival, arrival_of, batch_count, queue_tags_code
from rmqkit.store.index.property_columns import PropertyColumns
from rmqkit.store.log.filler import FILLER_TOPIC
from rmqkit.store.log.property_crc import CRC_NAME, TRAILER_BYTES
from rmqkit.store.log.scan import Records, crc_matches

__all__ = ["Arrivals"]

Ints = NDArray[np.int64]
_TOPICS_COMPARED = 32
_NEWEST_MAX = 16


class Arrivals:
    """A run of records, as the dispatcher sees it.

    Attributes:
        records: the run.
        topics: the distinct topics in it; a topic that is not UTF-8 is None.
        topic: which of them is each record's.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        topics, self.topic = _distinct_topics(records)
        self.topics = [_text_or_none(topic) for topic in topics]
        self._tags_codes: Ints | None = None

    def __len__(self) -> int:
        return len(self.records)

    def head(self, count: int) -> Arrivals:
        """The first records only."""
        return self if count >= len(self) else Arrivals(self.records.take(slice(count)))

    def text_only(self) -> Arrivals:
        """The records before the first one whose topic is not UTF-8: that is no record (`decode_record`)."""
        if None not in self.topics:
            return self
        return self.head(int(np.argmax(self.topic == self.topics.index(None))))

    @property
    def offsets(self) -> Ints:
        return self.records.base_offset + self.records.positions

    @functools.cached_property
    def queue_offsets(self) -> Ints:
        return self.records.field("queue_offset")

    @functools.cached_property
    def store_timestamps(self) -> Ints:
        return self.records.field("store_timestamp")

    @functools.cached_property
    def sys_flags(self) -> Ints:
        return self.records.field("sys_flag")

    def rows_of(self, topic: str) -> Ints:
        """Rows of the records of a topic."""
        return np.flatnonzero(self.topic == self.topics.index(topic)) if topic in self.topics else np.empty(0, "i8")

    def dispatched(self) -> Ints:
        """Rows of the records that are in queues: all but the transaction markers of old stores."""
        kinds = self.sys_flags & TRANSACTION_MASK
        return np.flatnonzero((kinds != TRANSACTION_PREPARED) & (kinds != TRANSACTION_ROLLBACK))

    def lost_bytes(self) -> int:
        """How many bytes fillers stand for; `is_filler` says of one record whether it is one."""
        topics = [i for i, topic in enumerate(self.topics) if topic and FILLER_TOPIC.startswith(topic)]
        if not topics:
            return 0
        is_rollback = self.sys_flags & TRANSACTION_MASK == TRANSACTION_ROLLBACK
        rows = np.isin(self.topic, topics) & is_rollback & (self.records.properties_bytes == 0)
        return int(self.records.field("prepared_transaction_offset")[rows].sum())

    def groups(self) -> Iterable[tuple[str, int, Ints]]:
        """Topic, queue id and the ascending rows of every queue that has records here.
        The transaction markers of old stores are in none."""
        return self._groups

    @functools.cached_property
    def _groups(self) -> list[tuple[str, int, Ints]]:
        groups: list[tuple[str, int, Ints]] = []
        rows = self.dispatched()
        keys = (self.topic[rows] << 32) + self.records.field("queue_id")[rows]
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.diff(keys[order])) + 1
        for group in np.split(rows[order], cuts) if len(rows) else ():
            topic = self.topics[self.topic[group[0]]]
            assert topic is not None, "text_only came before"
            groups.append((topic, int(self.records.heads["queue_id"][group[0]]), group))
        return groups

    def newest(self, delays_ms: tuple[int, ...]) -> list[Arrival]:
        """The newest record of each queue and tag code, up to `_NEWEST_MAX` of a queue: whoever waits for one of these
        queues hears of it, at once if any tag is good or a common one is wanted, without a cost for each record."""
        codes = self.tags_codes(delays_ms)
        rows: list[int] = []
        for _, _, group in self.groups():
            newest_first = group[::-1]
            _, at = np.unique(codes[newest_first], return_index=True)
            rows += newest_first[np.sort(at)[:_NEWEST_MAX]].tolist()
        return [arrival_of(self.records.record(row), delays_ms) for row in sorted(rows)]

    def tags_codes(self, delays_ms: tuple[int, ...]) -> Ints:
        """What the queue entry of each record says as its tags code; of one store with the same delays every time."""
        if self._tags_codes is not None:
            return self._tags_codes
        codes = self._tags_codes = np.zeros(len(self), "i8")
        rows, at, end = self._properties.values(b"TAGS")
        hashes = self._properties.hashes(at, end, np.zeros(len(rows), "u4"))
        codes[rows] = hashes.astype("u4").view("i4")
        if SCHEDULE_TOPIC in self.topics:
            for row in np.flatnonzero(self.topic == self.topics.index(SCHEDULE_TOPIC)).tolist():
                timestamp = int(self.store_timestamps[row])
                properties = self.records.record(row).properties
                codes[row] = queue_tags_code(SCHEDULE_TOPIC, properties, timestamp, delays_ms)
        return codes

    @functools.cached_property
    def batch_counts(self) -> Ints:
        """Messages in each record."""
        counts = np.ones(len(self), "i8")
        for row in np.flatnonzero(self.sys_flags & INNER_BATCH).tolist():
            counts[row] = batch_count(self.records.record(row).properties)
        return counts

    def keys(self, *, with_tags: bool) -> tuple[Ints, Ints]:
        """The index entries of the run in their order: row and hash of each.
        ``with_tags``: whether TAGS is a key, too, as with 5.4 brokers."""
        rows, hashes = self._properties.keys(self.topics, self.topic, with_tags=with_tags)
        is_indexed = self.sys_flags[rows] & TRANSACTION_MASK != TRANSACTION_ROLLBACK
        return rows[is_indexed], hashes[is_indexed]

    def suspects(self) -> Ints:
        """Rows whose checksums are worth a closer look: body CRC, zeros at the end, a CRC of the whole record."""
        records = self.records
        octets, ends = np.frombuffer(records.buffer, "u1"), records.positions + records.sizes
        has_properties = records.properties_bytes > 0
        is_odd = ~crc_matches(records) | (has_properties & (octets[ends - 1] == 0))
        at = np.maximum(records.properties_at, ends - TRAILER_BYTES)
        is_sealed = ends - at >= len(CRC_NAME)
        for i, octet in enumerate(CRC_NAME):
            is_sealed &= octets[np.minimum(at + i, ends - 1)] == octet
        return np.flatnonzero(is_odd | is_sealed)

    def in_light_queues(self) -> Ints:
        """Rows of the records that may be in light queues, too."""
        return self._properties.values(b"INNER_MULTI_DISPATCH")[0]

    @functools.cached_property
    def _properties(self) -> PropertyColumns:
        buffer, records = self.records.buffer, self.records
        ends = (records.properties_at + records.properties_bytes).tolist()
        return PropertyColumns([buffer[at:end] for at, end in zip(records.properties_at.tolist(), ends, strict=True)])


def _distinct_topics(records: Records) -> tuple[list[bytes], Ints]:
    """The topics of a run, and which of them is each record's. Few topics are told apart eight octets at a time, which
    is several times as fast as looking every record's up."""
    octets = np.frombuffer(records.buffer, "u1")
    words = np.lib.stride_tricks.as_strided(octets, (len(octets) - 7, 8), (1, 1), writeable=False)
    ends, topic = records.topic_at + records.topic_bytes, np.empty(len(records), "i8")
    numbers: dict[bytes, int] = {}
    for length in np.flatnonzero(np.bincount(records.topic_bytes)).tolist():
        rows = np.flatnonzero(records.topic_bytes == length)
        places = [*range(-length, -8, 8), -8]  # the last word begins before a short topic
        columns = [words[ends[rows] + place].view(">u8")[:, 0] for place in places]
        if length < 8:
            columns[-1] = columns[-1] & np.uint64((1 << 8 * length) - 1)
        while len(rows) and len(numbers) < _TOPICS_COMPARED:
            is_same = np.logical_and.reduce([column == column[0] for column in columns])
            end = int(ends[rows[0]])
            topic[rows[is_same]] = numbers.setdefault(octets[end - length : end].tobytes(), len(numbers))
            rows, columns = rows[~is_same], [column[~is_same] for column in columns]
        for row, end in zip(rows.tolist(), ends[rows].tolist(), strict=True):
            topic[row] = numbers.setdefault(octets[end - length : end].tobytes(), len(numbers))
    return list(numbers), topic


def _text_or_none(topic: bytes) -> str | None:
    try:
        return topic.decode()
    except UnicodeDecodeError:
        return None
