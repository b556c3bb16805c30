"""Power cuts under a store at work: a seeded workload on a disk that forgets, cuts at many times, and what has to hold.

Everything runs in one thread and depends on the seed alone. What the store's threads do happens between two operations
of its owner (`Recorder.before`), and what the owner does while a flush waits for the disk happens inside the sync
(`Recorder.while_syncing`): the interleavings real threads have, at places that can be repeated.

After a cut the store is opened, which recovers it, and then:

- every message below ``durable_offset`` is there, unless retention deleted its log file (what SYNC_FLUSH acknowledged,
  what ASYNC_FLUSH reported);
- every message read is the one put at that offset of that queue, properties and all; offsets have no gap;
- `fsck.verify` finds nothing; a further start changes no byte; the last saved configuration is there;
- further puts are taken, numbered on, and read.

Recovery is itself work on a disk: it and the puts after it are recorded, and cut again.
"""

from __future__ import annotations

import concurrent.futures
import logging
import random
import shutil
import traceback
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import Record, decode_record
from rmqkit.store import commit_log, fsck
from rmqkit.store.json_files import JsonFile
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from tests.faults.disk import CutStyle, Recorder
from tests.store.stores import StepClock, message, tree

PLAIN = ["A", "B", "%RETRY%g", "SCHEDULE_TOPIC_XXXX"]
BATCHED = "Batched"
_NEVER = 1 << 62
Key = tuple[str, int, int]


@dataclass
class Stored:
    """One record put: what has to be read again."""

    key: Key
    physical_offset: int
    end_offset: int
    body: bytes
    properties: bytes
    count: int = 1
    time: int = 0


@dataclass
class Ledger:
    """What is known about a store from outside, with the times at which it came to be known.

    Attributes:
        stored: by topic, queue id and queue offset.
        durable: when which ``durable_offset`` was reported.
        deleted: from when on log files up to an offset may be gone.
        saved: when which configuration was saved; None as time for those of before.
    """

    stored: dict[Key, Stored] = field(default_factory=dict)
    durable: list[tuple[int, int]] = field(default_factory=list)
    deleted: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    begun: list[tuple[int, int]] = field(default_factory=list)

    def durable_at(self, time: int) -> int:
        return max((offset for at, offset in self.durable if at <= time), default=0)

    def deleted_at(self, time: int) -> int:
        return max((offset for at, offset in self.deleted if at <= time), default=0)

    def safe_at(self, time: int) -> list[Stored]:
        """What a power cut at a time may not take."""
        low, times = self.deleted_at(time), [at for at, _ in self.durable if at <= time]
        highest = [0]  # told at a time or later; a start may cut a blank off the end, and with it the offset
        for _, offset in reversed(self.durable[: len(times)]):
            highest.append(max(highest[-1], offset))
        highest.reverse()
        return [
            one
            for one in self.stored.values()
            if one.physical_offset >= low and one.end_offset <= highest[bisect_left(times, one.time)]
        ]

    def saved_at(self, time: int) -> tuple[int, int]:
        """The oldest and the newest configuration that may be there."""
        low = max((number for at, number in self.saved if at <= time), default=0)
        return low, max((number for at, number in self.begun if at <= time), default=low)


class _WhenAsked(concurrent.futures.Future[Any]):
    """A result worked out when somebody wants it, or when its turn comes."""

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
    """Stands for the thread that makes log files: it comes to its work at any time before somebody needs the file."""

    def __init__(self, *arguments: object) -> None:
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


def random_settings(chance: random.Random, flush_disk_type: FlushDiskType, **changes: Any) -> StoreSettings:
    """Small files of many sizes; background rounds come when the workload says so."""
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


class Work:
    """One store at work on a recorded disk."""

    def __init__(self, base: Path, settings: StoreSettings, chance: random.Random, recorder: Recorder) -> None:
        self.base, self.settings, self.chance, self.recorder = base, settings, chance, recorder
        self.ledger = Ledger()
        self.epochs: list[tuple[int, Ledger]] = []
        self.clock = StepClock()
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
        """What was known at a time."""
        return next((ledger for end, ledger in self.epochs if time < end), self.ledger)

    def told(self) -> None:
        """Note what the store says is durable."""
        assert self.store is not None and self.store.failure is None
        self.ledger.durable.append((self.recorder.time, self.store.durable_offset))

    # ---- what threads do

    def _between(self) -> None:
        """Before any operation of the owner a flush thread may have its turn."""
        if self._is_flushing or self._is_busy or self.chance.random() > 0.02:
            return
        self._is_flushing, self._is_busy = True, True
        for allocation in tuple(_allocations):
            allocation.run()
        self.flush()
        self._is_flushing, self._is_busy = False, False

    def _meanwhile(self) -> None:
        """While a flush thread waits for the disk the owner works on."""
        if self._is_flushing and not self._is_busy and self.chance.random() < 0.3:
            self._is_busy = True
            for _ in range(self.chance.randint(1, 3)):
                self.put_something()
            self._is_busy = False

    def flush(self) -> None:
        """One round of a flush thread."""
        assert self.store is not None
        flusher = self.store._flusher
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

    # ---- what the owner does

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
        self.clock.now += self.chance.choice([0, 0, 1, 50, 900, 2500])
        return result

    def put(self) -> None:
        assert self.store is not None
        topic, queue_id, body = self.chance.choice(PLAIN), self.chance.randrange(3), self._body()
        extra = {"DELAY": "3"} if topic == "SCHEDULE_TOPIC_XXXX" else {}
        one = message(topic, queue_id, body, properties=self._properties(**extra), flag=self._number)
        if result := self._accepted(self.store.put(one)):
            key = topic, queue_id, result.queue_offset
            self.note(Stored(key, result.physical_offset, result.end_offset, body, one.properties))

    def put_batch(self) -> None:
        assert self.store is not None
        topic, queue_id = self.chance.choice(PLAIN[:3]), self.chance.randrange(3)
        entries = [BatchEntry(self._body(), self._properties()) for _ in range(self.chance.randint(1, 5))]
        if sum(len(entry.body) + len(entry.properties) + 150 for entry in entries) > 4000:
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
        """Know from now on what was just read, all of it durable."""
        time, old = self.recorder.time, self.ledger
        self.epochs.append((time, old))
        for one in found.values():
            one.time = time
        self.ledger = Ledger(dict(found), [(time, self.store.durable_offset)], [], [(time, saved)], [(time, saved)])

    def retention(self) -> None:
        assert self.store is not None
        begun = self.recorder.time
        self._disk_percent = 87  # files go whatever their age, puts are taken
        self.store.retention_round()
        self._disk_percent = 0
        self.ledger.deleted.append((begun, self.store.min_physical_offset))

    def save(self) -> None:
        self._saved += 1
        self.ledger.begun.append((self.recorder.time, self._saved))
        self.config.save({"number": self._saved, "filling": "x" * self.chance.choice([0, 900, 9000])})
        self.ledger.saved.append((self.recorder.time, self._saved))

    def step(self) -> None:
        """One thing a broker may do next."""
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


# ---- what has to hold


def settings_of(seed: int, **changes: Any) -> StoreSettings:
    chance = random.Random(f"{seed} settings")
    return random_settings(chance, chance.choice(list(FlushDiskType)), **changes)


class PowerCuts:
    """One workload, and as many cuts of it as are asked for.

    Args:
        folder: an empty directory for the store and what cuts leave of it.
    """

    def __init__(self, seed: int, folder: Path, **changes: Any) -> None:
        self.seed = seed
        self.folder = folder
        self.settings = settings_of(seed, **changes)
        chance = random.Random(f"{seed} work")
        base = folder / "whole"
        base.mkdir()
        self.recorder = Recorder(base)
        with _Quiet(), self.recorder:
            work = Work(base, self.settings, chance, self.recorder)
            work.open()
            for _ in range(chance.choice([60, 200, 350])):
                work.step()
            work.close()
        self.work = work
        assert self.recorder.live_tree() == _tree_of(base), "the recorder saw everything that was done"

    def cut(self, number: int) -> str:
        """Cut once, check, and cut the recovery too; returns what was done in a few words.

        Raises:
            AssertionError: something that has to hold does not.
        """
        chance = random.Random(f"{self.seed} cut {number}")
        return self._cut(self.work, chance, number, depth=0)

    def _cut(self, before: Work, chance: random.Random, number: int, depth: int) -> str:
        recorder = before.recorder
        time = _time_of_cut(recorder, chance)
        ledger = before.ledger_at(time)
        style = CutStyle.any(chance)
        base = self.folder / f"cut-{number}-{depth}"
        recorder.cut(time, style, chance, base)
        words = f"at {time} of {recorder.time}, {style.pages}{' loose' if style.is_loose else ''}"
        try:
            again = Recorder(base)
            with _Quiet(), again:
                after = Work(base, self.settings, chance, again)
                after.clock.now = before.clock.now + 10_000
                after._number = before._number + 1_000_000
                after._saved = before._saved
                _check_recovered(after, ledger, time)
                for _ in range(chance.choice([5, 30])):
                    after.step()
                after.close()
                _check_at_rest(after)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            raise AssertionError(f"power cut {words}: {type(error).__name__} in {where}: {error}") from error
        deeper = ""
        try:
            if depth < 2 and chance.random() < 0.4:
                deeper = ", then " + self._cut(after, chance, number, depth + 1)
        except AssertionError as error:
            raise AssertionError(f"power cut {words}, then {error}") from error
        shutil.rmtree(base)
        return words + deeper


def _time_of_cut(recorder: Recorder, chance: random.Random) -> int:
    """Any time, or one right behind something that matters."""
    if recorder.of_interest and chance.random() < 0.6:
        return min(recorder.time, chance.choice(recorder.of_interest) + chance.choice([0, 0, 1, 2]))
    return chance.randint(0, recorder.time)


def _check_recovered(after: Work, ledger: Ledger, time: int) -> None:
    """Open what a cut left, and compare it with what is known of the store that was cut."""
    fresh = after.ledger
    # until it is open, what was known before holds
    safe = {one.key for one in ledger.safe_at(time)}
    fresh.stored = {key: replace(one, time=0 if key in safe else _NEVER) for key, one in ledger.stored.items()}
    fresh.durable = [(0, ledger.durable_at(time))]
    fresh.deleted = [(0, ledger.deleted_at(time))]
    low, high = ledger.saved_at(time)
    fresh.saved, fresh.begun = [(0, low)], [(0, high)]
    store = after.open()
    found = read_everything(store)
    for one in found.values():
        known = ledger.stored.get(one.key)
        assert known is not None, f"{one.key} was never put: {one.body[:40]!r}"
        assert (one.body, one.count) == (known.body, known.count), f"{one.key} has another body: {one.body[:40]!r}"
        assert one.properties.startswith(known.properties), f"{one.key} has other properties: {one.properties!r}"
        assert one.physical_offset == known.physical_offset, f"{one.key} lies elsewhere"
    lost = sorted(safe - set(found))
    assert not lost, f"{len(lost)} durable messages are lost, the first is {lost[0]}; {ledger.durable_at(time)=}"
    value = after.config.load(dict)
    number = 0 if value is None else value["number"]
    assert low <= number <= high, f"configuration {number}, expected {low} to {high}"
    # from here on the store is what was read
    after.restart_ledger(found, number)


def read_everything(store: MessageStore) -> dict[Key, Stored]:
    """Every readable message of every queue, compared with the log."""
    found: dict[Key, Stored] = {}
    for topic, queue_id in list(store._queues.table):
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


def _check_at_rest(after: Work) -> None:
    """A closed store is whole by every measure, and starting it once more changes nothing."""
    root = after.base / "store"
    report = fsck.verify(root, after.settings)
    assert report.is_sound and not report.is_unclean, "\n".join(map(str, report.findings[:5]))
    closed = tree(root)
    store = after.open()
    found = read_everything(store)
    missing = [one.key for one in after.ledger.safe_at(after.recorder.time) if one.key not in found]
    assert not missing, f"{missing[0]} is gone after a clean stop"
    after.close()
    changed = {name for name, _ in tree(root).items() ^ closed.items()}
    allowed = {"checkpoint"}  # it says where recovery found the last record
    if after.settings.transient_store_pool:
        allowed.add(max(name for name in closed if name.startswith("commitlog/")))  # a blank without a next file goes
    assert changed <= allowed, f"a clean start and stop changes {changed}"


def _tree_of(base: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(base)): None if path.is_dir() else path.read_bytes() for path in base.rglob("*")}


class _Quiet:
    """Log files are made when somebody needs them, and what the store logs is not shown."""

    def __enter__(self) -> None:
        self._patch = mock.patch.object(commit_log, "ThreadPoolExecutor", _Allocation)
        self._patch.start()
        self._level = logging.getLogger("rmqkit").level
        logging.getLogger("rmqkit").setLevel(logging.CRITICAL)

    def __exit__(self, *exc_info: object) -> None:
        self._patch.stop()
        logging.getLogger("rmqkit").setLevel(self._level)
