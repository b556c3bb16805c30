"""A seeded workload on a store with a recorded disk: the operations of a broker, and the results that its clients know.

Everything runs in one thread and depends on the seed alone. The work of the store's threads happens between two
operations of its owner (`Recorder.before`). The work of the owner while a flush waits for the disk happens inside the
sync (`Recorder.while_syncing`). These are the interleavings of real threads, in a repeatable order.
"""

from __future__ import annotations

import concurrent.futures
import logging
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.store.files import JsonFile
from rmqkit.store.log import recovery
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.system import threads
from rmqkit.testing.clock import StandingClock
from tests.faults.disk import Recorder
from tests.store.stores import message

PLAIN = ["A", "B", "%RETRY%g", "SCHEDULE_TOPIC_XXXX"]
BATCHED = "Batched"
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
    time: int = 0


@dataclass
class Ledger:
    """The facts that are known about a store from outside, with the times at which they became known.

    Attributes:
        stored: by topic, queue id and queue offset.
        durable: the reported values of ``durable_offset``, with their times.
        deleted: times from which log files up to an offset may be missing.
        begun, saved: when saving of a configuration started, and when it was done.
    """

    stored: dict[Key, Stored] = field(default_factory=dict)
    durable: list[tuple[int, int]] = field(default_factory=list)
    deleted: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    begun: list[tuple[int, int]] = field(default_factory=list)

    def safe_at(self, time: int) -> list[Stored]:
        """Return the records that a power cut at a time may not lose."""
        low, times = greatest_at(self.deleted, time), [at for at, _ in self.durable if at <= time]
        highest = [0]  # reported now or later; a start may cut a blank off the end, and with it the offset
        for _, offset in reversed(self.durable[: len(times)]):
            highest.append(max(highest[-1], offset))
        highest.reverse()
        return [
            one
            for one in self.stored.values()
            if one.physical_offset >= low and one.end_offset <= highest[bisect_left(times, one.time)]
        ]

    def saved_at(self, time: int) -> tuple[int, int]:
        """Return the oldest and the newest configuration that a power cut may leave."""
        low = greatest_at(self.saved, time)
        return low, max(low, greatest_at(self.begun, time))


def greatest_at(told: list[tuple[int, int]], time: int) -> int:
    """Return the greatest number reported up to a time, 0 before the first."""
    return max((number for at, number in told if at <= time), default=0)


class Work:
    """One store at work on a recorded disk."""

    def __init__(self, base: Path, settings: StoreSettings, chance: random.Random, recorder: Recorder) -> None:
        self.base, self.settings, self.chance, self.recorder = base, settings, chance, recorder
        self.ledger = Ledger()
        self.epochs: list[tuple[int, Ledger]] = []
        self.clock = StandingClock()
        self.config = JsonFile(base / "store" / "config" / "numbers.json")
        self._disk_percent = 0
        self._number = 0
        self._saved = 0
        self._is_flushing = False
        self._is_busy = False
        self.store: MessageStore | None = None

    @property
    def _has_pool(self) -> bool:
        return self.settings.transient_store_pool

    # ---- opening and closing

    def open(self) -> MessageStore:
        store = MessageStore(
            self.base / "store",
            self.settings,
            clock=self.clock,
            is_batch_topic=lambda topic: topic == BATCHED,
            disk_used_percent=lambda path: self._disk_percent,
        )
        store.open()
        self.store = store
        self.told()
        self.recorder.before, self.recorder.while_syncing = self._between, self._meanwhile
        return store

    def close(self) -> None:
        assert self.store is not None
        self.recorder.before = self.recorder.while_syncing = lambda: None
        self.store.close()
        self.told()
        self.store = None

    def ledger_at(self, time: int) -> Ledger:
        """Return the ledger of a time."""
        return next((ledger for end, ledger in self.epochs if time < end), self.ledger)

    def told(self) -> None:
        """Record the offset that the store reports as durable."""
        assert self.store is not None and self.store.failure is None
        self.ledger.durable.append((self.recorder.time, self.store.durable_offset))

    # ---- work of the store's threads

    def _between(self) -> None:
        """Run a flush thread's work, at random, before an operation of the owner."""
        if self._is_flushing or self._is_busy or self.chance.random() > 0.02:
            return
        self._is_flushing, self._is_busy = True, True
        for allocation in tuple(_allocations):
            allocation.run()
        self.flush()
        self._is_flushing, self._is_busy = False, False

    def _meanwhile(self) -> None:
        """Run work of the owner while a flush thread waits for the disk."""
        if self._is_flushing and not self._is_busy and self.chance.random() < 0.3:
            self._is_busy = True
            for _ in range(self.chance.randint(1, 3)):
                self.put_something()
            self._is_busy = False

    def flush(self) -> None:
        """Run one flush cycle of a flush thread."""
        assert self.store is not None
        flusher = self.store.flusher
        if self._has_pool and self.chance.random() < 0.7:
            flusher.commit(0)
        kind = self.chance.random()
        if kind < 0.6:
            flusher.flush_log()
        elif kind < 0.85:
            flusher.flush_queues(0)
        else:
            flusher.flush_queues(self.chance.choice([1, 100, 8192]))
        self.told()

    # ---- work of the owner

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
        return encode_properties({"KEYS": f"k{self._number} same", "TAGS": f"t{self._number % 5}"} | properties)

    def _body(self) -> bytes:
        self._number += 1
        return b"%d " % self._number + self._text(0, self.chance.choice([20, 200, 600]))

    def _accepted(self, result: PutResult) -> PutResult | None:
        if result.status is PutStatus.OS_PAGE_CACHE_BUSY and self._has_pool:
            return None
        assert result.status is PutStatus.OK, result
        self.clock.ms += self.chance.choice([0, 0, 1, 50, 900, 2500])
        if self.chance.random() < 0.01:  # the system clock is changed
            self.clock.ms -= self.chance.choice([1, 4000, 60_000])
        return result

    def put(self) -> None:
        assert self.store is not None
        topic, queue_id, body = self.chance.choice(PLAIN), self.chance.randrange(3), self._body()
        extra = {"DELAY": "3", "REAL_TOPIC": "A", "REAL_QID": "0"} if topic == "SCHEDULE_TOPIC_XXXX" else {}
        one = message(topic, queue_id, body, string=self._properties(**extra), flag=self._number)
        if result := self._accepted(self.store.put(one)):
            key = topic, queue_id, result.queue_offset
            self.note(Stored(key, result.physical_offset, result.end_offset, body, one.properties))

    def put_batch(self) -> None:
        assert self.store is not None
        topic, queue_id = self.chance.choice(PLAIN[:3]), self.chance.randrange(3)
        entries = [BatchEntry(self._body(), self._properties()) for _ in range(self.chance.randint(1, 5))]
        if sum(len(entry.body) + len(entry.properties) + 150 for entry in entries) > 3400:
            entries = entries[:1]
        if result := self._accepted(self.store.put_batch(message(topic, queue_id, encode_batch(entries)))):
            ends = [*result.physical_offsets[1:], result.end_offset]
            for i, (entry, start, end) in enumerate(zip(entries, result.physical_offsets, ends, strict=True)):
                key = topic, queue_id, result.queue_offset + i
                self.note(Stored(key, start, end, entry.body, entry.properties))

    def put_inner_batch(self) -> None:
        assert self.store is not None
        entries = [BatchEntry(self._body()[:300], b"") for _ in range(self.chance.randint(1, 5))]
        body = encode_batch(entries)
        one = message(BATCHED, self.chance.randrange(2), body, UNIQ_KEY=f"{self._number:032d}")
        if result := self._accepted(self.store.put_batch(one)):
            key = BATCHED, one.queue_id, result.queue_offset
            self.note(Stored(key, result.physical_offset, result.end_offset, body, b"", len(entries)))

    def note(self, stored: Stored) -> None:
        stored.time = self.recorder.time
        assert stored.key not in self.ledger.stored, f"{stored.key} was given twice"
        self.ledger.stored[stored.key] = stored

    def restart_ledger(self, found: dict[Key, Stored], saved: int) -> None:
        """Replace the ledger by the content that was just read, all of it durable."""
        time, old = self.recorder.time, self.ledger
        self.epochs.append((time, old))
        for one in found.values():
            one.time = time
        self.ledger = Ledger(dict(found), [(time, self.store.durable_offset)], [], [(time, saved)], [(time, saved)])

    def retention(self) -> None:
        assert self.store is not None
        begun = self.recorder.time
        self._disk_percent = 87  # delete files of any age, but accept puts
        self.store.retention_round()
        self._disk_percent = 0
        self.ledger.deleted.append((begun, self.store.min_physical_offset))

    def save(self) -> None:
        self._saved += 1
        self.ledger.begun.append((self.recorder.time, self._saved))
        self.config.save({"number": self._saved, "filling": "x" * self.chance.choice([0, 900, 9000])})
        self.ledger.saved.append((self.recorder.time, self._saved))

    def step(self) -> None:
        """Run one random operation of a broker."""
        assert self.store is not None
        kind = self.chance.random()
        if kind < 0.8:
            self.put_something()
        elif kind < 0.93:
            self._is_flushing = True
            self.flush()
            self._is_flushing = False
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
        if self.store is not None and self.chance.random() < 0.5:
            self.store.dispatch()


# ---- the store in a single thread


def random_settings(chance: random.Random, flush_disk_type: FlushDiskType, **changes: Any) -> StoreSettings:
    """Return settings with small files of random sizes. The workload itself calls the background work."""
    never = 3_600_000
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
        "flush_disk_type": flush_disk_type,
        "flush_interval_ms": never,
        "queue_flush_interval_ms": never,
        "delete_file_batch_max": chance.choice([1, 2, 5]),
    }
    if flush_disk_type is FlushDiskType.ASYNC_FLUSH and chance.random() < 0.3:
        values |= {"transient_store_pool": True, "transient_store_pool_size": 4, "commit_interval_ms": never}
    return StoreSettings(**(values | changes))


class _WhenAsked(concurrent.futures.Future[Any]):
    """A result that is computed when it is needed, or when its turn comes."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work: Callable[[], Any] | None = work

    def run(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            try:
                self.set_result(work())
            except BaseException as error:  # noqa: BLE001 - as executors do
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(timeout)


class _Allocation:
    """A replacement of the thread that creates log files: it creates a file at any time before the file is needed."""

    def __init__(self) -> None:
        self.jobs: list[_WhenAsked] = []
        _allocations.append(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _WhenAsked:
        job = _WhenAsked(lambda: function(*arguments))
        self.jobs.append(job)
        return job

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop().run()

    def shutdown(self) -> None:
        self.run()
        _allocations.remove(self)


_allocations: list[_Allocation] = []


def _pool(workers: int, name: str) -> Any:
    return _Allocation() if name == "store-allocate" else concurrent.futures.ThreadPoolExecutor(workers, name)


@contextmanager
def quiet(bulk_from_bytes: int) -> Iterator[None]:
    """Create log files when they are needed, scan in bulk early in recovery, and show no logs."""
    logger = logging.getLogger("rmqkit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with (
        threads.replaced({"Pool": _pool}),
        mock.patch.object(recovery, "BULK_FROM_BYTES", bulk_from_bytes),
    ):
        try:
            yield
        finally:
            logger.setLevel(level)
