"""A seeded workload on a store in a simulated world: the operations of a broker, and the results that its clients know.

`Work` runs in the main coroutine of a simulated process. The threads of the store are threads of the world: they flush,
commit and create files between the calls of the disk, in an order that the seed decides. The workload sleeps between
its steps, so that the intervals of these threads pass. `Ledger` is outside of the world: a power cut does not reach it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import BatchEntry, Record, decode_record, encode_batch
from rmqkit.store.files import JsonFile
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.testing.simulation import Machine
from tests.store.stores import message

PLAIN = ["A", "B", "%RETRY%g", "SCHEDULE_TOPIC_XXXX"]
BATCHED = "Batched"
_INTERVALS_MS = [1, 10, 100]
Key = tuple[str, int, int]


@dataclass
class Stored:
    """One record that was put and must be read again."""

    key: Key
    physical_offset: int
    end_offset: int
    body: bytes
    properties: bytes
    count: int = 1

    def is_of(self, topic: str, queue_id: int, body: bytes, properties: bytes, count: int = 1) -> bool:
        """Return True if the record has the content of a put. The store appends properties of its own."""
        content = *self.key[:2], self.body, self.count
        return content == (topic, queue_id, body, count) and self.properties.startswith(properties)


def read_everything(store: MessageStore) -> dict[Key, Stored]:
    """Return every readable message of every queue, compared with the log."""
    found: dict[Key, Stored] = {}
    for topic, queue_id in list(store.queues.table):
        offset, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        while offset < end:
            result = store.get(topic, queue_id, offset, count_max=32)
            assert result.records, f"{topic}-{queue_id}: nothing at {offset} of {end}: {result.status}"
            for raw in result.records:
                record = decode_record(raw, 0, verify_crc=True)
                one = _stored(record)
                assert one.key == (topic, queue_id, offset), f"{topic}-{queue_id} has {one.key} at {offset}"
                found[one.key] = one
                offset += one.count
            following = result.next_begin_offset
            assert offset == following, f"{topic}-{queue_id}: read up to {offset}, next is {following} of {end}"
        assert offset == end, f"{topic}-{queue_id}: read up to {offset} of {end}"
    return found


def _stored(record: Record) -> Stored:
    key = record.topic, record.queue_id, record.queue_offset
    is_inner = record.topic == BATCHED
    count = int(record.properties.split(b"INNER_NUM\x01")[1].split(b"\x02")[0]) if is_inner else 1
    end = record.physical_offset + record.size
    return Stored(key, record.physical_offset, end, bytes(record.body), bytes(record.properties), count)


@dataclass
class Ledger:
    """The facts that are known about a store from outside.

    Attributes:
        stored: the records that were put, by topic, queue id and queue offset.
        putting: the content of the put that has not returned.
        safe: the keys of the records that were reported as durable.
        cached: the keys of other records that a kill left in the page cache, until a power cut.
        gone_before: records before this physical offset may be deleted.
        begun, saved: the newest configuration whose save began, and the newest one whose save returned.
        number: the number of messages so far.
    """

    stored: dict[Key, Stored] = field(default_factory=dict)
    putting: list[tuple[Any, ...]] = field(default_factory=list)
    safe: set[Key] = field(default_factory=set)
    cached: set[Key] = field(default_factory=set)
    gone_before: int = 0
    begun: int = 0
    saved: int = 0
    number: int = 0
    _waiting: deque[Stored] = field(default_factory=deque)

    def note(self, stored: Iterable[Stored]) -> None:
        """Enter the records of a put that was accepted."""
        for one in stored:
            assert one.key not in self.stored, f"{one.key} was given twice"
            self.stored[one.key] = one
            self._waiting.append(one)

    def reach(self, durable_offset: int) -> None:
        """Enter the offset up to which a store reports its log as durable."""
        while self._waiting and self._waiting[0].end_offset <= durable_offset:
            self.safe.add(self._waiting.popleft().key)

    def keep_cached(self, committed_offset: int) -> None:
        """Enter the offset up to which the log of a killed process is in the page cache."""
        self.cached.update(one.key for one in self._waiting if one.end_offset <= committed_offset)

    def check(self, found: dict[Key, Stored], number: int) -> None:
        """Compare the content of a store, and the number of its configuration, after a power cut."""
        for one in found.values():
            known = self.stored.get(one.key)
            if known is None:
                assert any(one.is_of(*put) for put in self.putting), f"{one.key} was never put: {one.body[:40]!r}"
                continue
            is_same = one.is_of(*known.key[:2], known.body, known.properties, known.count)
            assert is_same, f"{one.key} has another content: {one.body[:40]!r} {one.properties!r}"
            assert one.physical_offset == known.physical_offset, f"{one.key} is in another place"
        missing = sorted((self.safe | self.cached) - found.keys())
        lost = [self.stored[key] for key in missing if self.stored[key].physical_offset >= self.gone_before]
        assert not lost, f"{len(lost)} durable messages are lost, the first is {lost[0]}"
        assert self.saved <= number <= self.begun, f"configuration {number}, expected {self.saved} to {self.begun}"

    def restart(self, found: dict[Key, Stored], number: int) -> None:
        """Continue with the content that was read after a recovery: all of it is durable."""
        self.stored, self.safe, self.saved, self.begun = dict(found), set(found), number, number
        self.putting, self.gone_before = [], 0
        self.cached.clear()
        self._waiting.clear()


class Work:
    """One store at work in a process of a simulated machine."""

    def __init__(self, machine: Machine, settings: StoreSettings, chance: random.Random, ledger: Ledger) -> None:
        self.machine, self.settings, self.chance, self.ledger = machine, settings, chance, ledger
        self.root = machine.disk.path / "store"
        self.config = JsonFile(self.root / "config" / "numbers.json")
        self._disk_percent = 0

    # ---- opening and closing

    def open(self) -> MessageStore:
        self.store = MessageStore(
            self.root,
            self.settings,
            is_batch_topic=lambda topic: topic == BATCHED,
            disk_used_percent=lambda path: self._disk_percent,
        )
        self.store.open()
        return self.store

    def close(self) -> None:
        self.store.close()
        self.report()
        assert self.ledger.safe == self.ledger.stored.keys(), "a clean stop makes everything durable"

    def report(self) -> None:
        """Enter the offset that the store reports as durable."""
        self.ledger.reach(self.store.durable_offset)

    def load_number(self) -> int:
        """Return the number of the configuration, 0 if none was saved."""
        value = self.config.load(dict)
        return 0 if value is None else int(value["number"])

    # ---- puts

    def put_something(self) -> None:
        kind = self.chance.random()
        if kind < 0.75:
            self.put()
        elif kind < 0.9:
            self.put_batch()
        else:
            self.put_inner_batch()

    def _text(self, low: int, high: int) -> bytes:
        return self.chance.randbytes(self.chance.randint(low, high)).hex().encode()

    def _properties(self, **properties: str) -> bytes:
        if not properties and self.chance.random() < 0.1:
            return b""
        if self.chance.random() < 0.15:
            properties["long"] = self._text(200, 900).decode()
        number = self.ledger.number
        return encode_properties({"KEYS": f"k{number} same", "TAGS": f"t{number % 5}"} | properties)

    def _body(self) -> bytes:
        self.ledger.number += 1
        return b"%d " % self.ledger.number + self._text(0, self.chance.choice([20, 200, 600]))

    def _is_accepted(self, result: PutResult) -> bool:
        self.ledger.putting = []
        if result.status is PutStatus.OS_PAGE_CACHE_BUSY and self.settings.transient_store_pool:
            return False
        assert result.status is PutStatus.OK, result
        self.machine.skew_ms += self.chance.choice([0, 0, 1, 50, 900, 2500])
        if self.chance.random() < 0.01:  # the system clock is changed
            self.machine.skew_ms -= self.chance.choice([1, 4000, 60_000])
        return True

    def put(self) -> None:
        topic, queue_id, body = self.chance.choice(PLAIN), self.chance.randrange(3), self._body()
        extra = {"DELAY": "3", "REAL_TOPIC": "A", "REAL_QID": "0"} if topic == "SCHEDULE_TOPIC_XXXX" else {}
        one = message(topic, queue_id, body, string=self._properties(**extra), flag=self.ledger.number)
        self.ledger.putting = [(topic, queue_id, body, one.properties)]
        result = self.store.put(one)
        if self._is_accepted(result):
            key = topic, queue_id, result.queue_offset
            self.ledger.note([Stored(key, result.physical_offset, result.end_offset, body, one.properties)])

    def put_batch(self) -> None:
        topic, queue_id = self.chance.choice(PLAIN[:3]), self.chance.randrange(3)
        entries = [BatchEntry(self._body(), self._properties()) for _ in range(self.chance.randint(1, 5))]
        if sum(len(entry.body) + len(entry.properties) + 150 for entry in entries) > 3400:
            entries = entries[:1]
        self.ledger.putting = [(topic, queue_id, entry.body, entry.properties) for entry in entries]
        result = self.store.put_batch(message(topic, queue_id, encode_batch(entries)))
        if self._is_accepted(result):
            ends = [*result.physical_offsets[1:], result.end_offset]
            self.ledger.note(
                Stored((topic, queue_id, result.queue_offset + i), start, end, entry.body, entry.properties)
                for i, (entry, start, end) in enumerate(zip(entries, result.physical_offsets, ends, strict=True))
            )

    def put_inner_batch(self) -> None:
        entries = [BatchEntry(self._body()[:300], b"") for _ in range(self.chance.randint(1, 5))]
        body, queue_id = encode_batch(entries), self.chance.randrange(2)
        self.ledger.putting = [(BATCHED, queue_id, body, b"", len(entries))]
        result = self.store.put_batch(message(BATCHED, queue_id, body, UNIQ_KEY=f"{self.ledger.number:032d}"))
        if self._is_accepted(result):
            key = BATCHED, queue_id, result.queue_offset
            self.ledger.note([Stored(key, result.physical_offset, result.end_offset, body, b"", len(entries))])

    # ---- other operations

    def retention(self) -> None:
        ledger, settings = self.ledger, self.settings
        first = max(0, self.store.min_physical_offset)
        ledger.gone_before = first + settings.delete_file_batch_max * settings.commit_log_file_bytes
        self._disk_percent = 87  # delete files of any age, but accept puts
        self.store.retention_round()
        self._disk_percent = 0
        ledger.gone_before = self.store.min_physical_offset

    def save(self) -> None:
        self.ledger.begun += 1
        self.config.save({"number": self.ledger.begun, "filling": "x" * self.chance.choice([0, 900, 9000])})
        self.ledger.saved = self.ledger.begun

    async def wait_until_durable(self) -> None:
        """Request a flush, and wait until the log is durable, as senders do under SYNC_FLUSH."""
        end = self.store.max_physical_offset
        self.store.request_flush()
        while self.store.durable_offset < end:
            await asyncio.sleep(0.001)

    async def step(self) -> None:
        """Run one random operation of a broker."""
        kind = self.chance.random()
        if kind < 0.84:
            self.put_something()
        elif kind < 0.93:
            await self.wait_until_durable()
        elif kind < 0.96:
            self.store.dispatch()
            self.store.query("A", "same", 32, 0, 1 << 62)
        elif kind < 0.975:
            self.save()
        elif kind < 0.99:
            self.retention()
        else:
            self.close()
            self.open()
        self.report()
        if self.chance.random() < 0.5:
            self.store.dispatch()
        if self.chance.random() < 0.3:
            await asyncio.sleep(self.chance.choice([0.0005, 0.005, 0.05]))
            self.report()


def random_settings(chance: random.Random) -> StoreSettings:
    """Return settings with small files of random sizes, and intervals of the store's threads that a workload of some
    seconds has many of."""
    values: dict[str, Any] = {
        "commit_log_file_bytes": chance.choice([4096, 8192, 24_576, 65_536]),
        "consume_queue_file_bytes": chance.choice([200, 1000, 8000, 20_000]),
        "batch_consume_queue_file_bytes": chance.choice([460, 4600, 9200]),
        "enable_consume_queue_ext": chance.random() < 0.4,
        "consume_queue_ext_file_bytes": chance.choice([128, 4096, 12_288]),
        "hash_slot_count": chance.choice([16, 700, 3000]),
        "index_entry_count": chance.choice([50, 500]),
        "message_index_enable": chance.random() < 0.9,
        "append_property_crc": chance.random() < 0.2,
        "flush_disk_type": chance.choice(list(FlushDiskType)),
        "flush_interval_ms": chance.choice(_INTERVALS_MS),
        "flush_least_pages": chance.choice([0, 1, 4]),
        "flush_thorough_interval_ms": chance.choice(_INTERVALS_MS),
        "queue_flush_interval_ms": chance.choice(_INTERVALS_MS),
        "queue_flush_least_pages": chance.choice([0, 1, 2]),
        "queue_flush_thorough_interval_ms": chance.choice(_INTERVALS_MS),
        "commit_interval_ms": chance.choice(_INTERVALS_MS),
        "commit_least_pages": chance.choice([0, 1, 4]),
        "commit_thorough_interval_ms": chance.choice(_INTERVALS_MS),
        "delete_file_batch_max": chance.choice([1, 2, 5]),
    }
    if values["flush_disk_type"] is FlushDiskType.ASYNC_FLUSH and chance.random() < 0.3:
        values |= {"transient_store_pool": True, "transient_store_pool_size": 4}
    return StoreSettings(**values)
