"""``rmq bench store``: what the store does in a second, beside the naive way to do the same (`naive_store`).

Every figure is the best of some rounds; a round does it our way, then the naive way, so that both see the same machine.
Rates of work are per second of CPU of the calling thread, which other load on the machine changes least; where the disk
or another thread is waited for, per second of the clock. The files lie in a temporary directory and are small enough
for the page cache.
"""

from __future__ import annotations

import mmap
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rmqkit.cli.naive_store import NaiveStore, naive_walk
from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.record import pack_host
from rmqkit.store.consume_queues import ConsumeQueues
from rmqkit.store.dispatcher import Arrival, Dispatcher, queue_tags_code
from rmqkit.store.index_file import MessageIndex
from rmqkit.store.message_store import MessageStore, PutMessage, PutStatus
from rmqkit.store.scan import Records, crc_matches, walk
from rmqkit.store.settings import FlushDiskType, StoreSettings

__all__ = ["measure"]

_ROUNDS = 3
_TOPIC = "BenchTopic"
_HOST = pack_host("127.0.0.1", 10911)
_QUEUES = 4
_BATCH = 64
_PULL = 32
_WAITERS = 256
_ALONE_MAX = 200
_SEED = 1
_WAIT_SECONDS = 30.0

Work = Callable[[], int]
"""Does something and returns how many times."""


def measure(*, messages: int, body_bytes: int, directory: Path | None) -> list[dict[str, Any]]:
    """All figures.

    Args:
        messages: put in a round.
        directory: where the temporary directory is made, None for the system's place.
    """
    with tempfile.TemporaryDirectory(prefix="rmq-bench-", dir=directory) as folder:
        bench = _Bench(Path(folder), messages, body_bytes)
        return [*bench.puts(), *bench.synchronous_puts(), *bench.dispatch(), *bench.reads(), *bench.walks()]


class _Bench:
    def __init__(self, root: Path, count: int, body_bytes: int) -> None:
        self._root = root
        self._count = count
        body = random.Random(_SEED).randbytes(body_bytes)
        keys = (b"%08X%04X" % (0x1234_0000 + i // 16, i & 0xFFFF) for i in range(count))
        properties = [b"UNIQ_KEY\x017F00000100002A139A5A%b\x02WAIT\x01true\x02TAGS\x01TagA\x02" % key for key in keys]
        self._messages = [_message(i % _QUEUES, body, properties[i]) for i in range(count)]
        self._batches = [
            _message(0, encode_batch(BatchEntry(body, one) for one in properties[i : i + _BATCH]), b"")
            for i in range(0, count, _BATCH)
        ]
        self._names = (root / str(number) for number in range(1 << 30))

    @contextmanager
    def _store(self, **settings: Any) -> Iterator[MessageStore]:
        store = MessageStore(next(self._names), StoreSettings(**({"message_index_enable": False} | settings)))
        store.open()
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def _naive(self) -> Iterator[NaiveStore]:
        store = NaiveStore(next(self._names))
        try:
            yield store
        finally:
            store.close()

    # ---- puts

    def _put_all(self, store: MessageStore) -> int:
        for message in self._messages:
            assert store.put(message).status is PutStatus.OK
        return self._count

    def puts(self) -> Iterator[dict[str, Any]]:
        def put_batches(store: MessageStore) -> int:
            for batch in self._batches:
                assert store.put_batch(batch).status is PutStatus.OK
            return self._count

        def put_naively(store: NaiveStore) -> int:
            for message in self._messages:
                store.put(message)
            return self._count

        def put_batches_naively(store: NaiveStore) -> int:
            for batch in self._batches:
                store.put_batch(batch)
            return self._count

        with self._store() as ours, self._naive() as naive:
            yield _figure("put", "messages/s", lambda: self._put_all(ours), lambda: put_naively(naive), 120_000)
            yield _figure(
                f"put in batches of {_BATCH}",
                "messages/s",
                lambda: put_batches(ours),
                lambda: put_batches_naively(naive),
                400_000,
            )
        with self._store(transient_store_pool=True) as ours, self._naive() as naive:
            yield _figure(
                "put, transient store pool",
                "messages/s",
                lambda: self._put_all(ours),
                lambda: put_naively(naive),
                120_000,
            )

    def synchronous_puts(self) -> Iterator[dict[str, Any]]:
        """Puts that wait for the disk: many waiters share a flush, one has each to itself."""
        alone = min(self._count, _ALONE_MAX)

        def put_alone(store: NaiveStore) -> int:
            for message in self._messages[:alone]:
                store.put(message, sync=True)
            return alone

        is_durable = threading.Event()
        store = MessageStore(
            next(self._names),
            StoreSettings(message_index_enable=False, flush_disk_type=FlushDiskType.SYNC_FLUSH),
            on_durable=lambda offset, error: is_durable.set(),
        )

        def put_waiting(waiters: int, count: int) -> int:
            """Puts of so many producers, each of which waits for its message before it sends the next."""
            waiting: deque[int] = deque()
            for message in self._messages[:count]:
                waiting.append(store.put(message).end_offset)
                store.request_flush()
                while len(waiting) >= waiters:
                    is_durable.clear()
                    if store.durable_offset < waiting[0]:
                        assert is_durable.wait(_WAIT_SECONDS), "the disk answers"
                    while waiting and waiting[0] <= store.durable_offset:
                        waiting.popleft()
                    store.dispatch()
            return count

        store.open()
        try:
            with self._naive() as naive:
                figure = _figure(
                    f"put, SYNC_FLUSH, {_WAITERS} waiters",
                    "messages/s",
                    lambda: put_waiting(_WAITERS, min(self._count, _WAITERS * 40)),
                    lambda: put_alone(naive),
                    clock=time.perf_counter_ns,
                )
                with self._store() as unhurried:
                    start = time.perf_counter()
                    put_rate = self._put_all(unhurried) / (time.perf_counter() - start)
                figure["target"] = round(min(20 * figure["naive"], 0.6 * put_rate))
                yield figure
                yield _figure(
                    "put, SYNC_FLUSH, one waiter",
                    "messages/s",
                    lambda: put_waiting(1, alone),
                    lambda: put_alone(naive),
                    clock=time.perf_counter_ns,
                )
        finally:
            store.close()

    # ---- dispatch

    def dispatch(self) -> Iterator[dict[str, Any]]:
        """From the facts of a stored record to its queue entry, and to the index."""
        size = 200 + len(self._messages[0].body)

        def dispatch_all(*, index: bool) -> int:
            root = next(self._names)
            keys = MessageIndex(root / "index", 5_000_000, 20_000_000, tags_as_keys=False) if index else None
            queues = ConsumeQueues(root, StoreSettings())
            dispatcher = Dispatcher(queues, None, keys)
            end, offsets = 0, [0] * _QUEUES
            for message in self._messages:
                topic, queue_id, properties = message.topic, message.queue_id, message.properties
                code = queue_tags_code(topic, properties, 1, ())
                arrival = Arrival(topic, queue_id, offsets[queue_id], code, 1, end, size, 0, properties)
                offsets[queue_id] += 1
                end += size
                dispatcher.submit([arrival], end, end)
            if keys is not None:
                keys.enter()
                keys.close()
            queues.close()
            return self._count

        def dispatch_naively(*, index: bool) -> int:
            with self._naive() as naive:
                for i, message in enumerate(self._messages):
                    naive.dispatch(message.topic, message.queue_id, i * size, size, message.properties, index=index)
            return self._count

        for what, index, target in (("queue only", False, 300_000), ("queue and unique key", True, 120_000)):
            yield _figure(
                f"dispatch, {what}",
                "messages/s",
                lambda index=index: dispatch_all(index=index),  # type: ignore[misc]
                lambda index=index: dispatch_naively(index=index),  # type: ignore[misc]
                target,
            )

    # ---- reads

    def reads(self) -> Iterator[dict[str, Any]]:
        in_queue = self._count // _QUEUES
        starts = range(0, in_queue - _PULL, _PULL // 2)
        with self._store() as ours, self._naive() as naive:
            for message in self._messages:
                ours.put(message)
                naive.put(message)

            def get() -> int:
                for start in starts:
                    assert len(ours.get(_TOPIC, 0, start, count_max=_PULL).records) == _PULL
                return len(starts) * _PULL

            def get_naively() -> int:
                for start in starts:
                    assert len(naive.get(_TOPIC, 0, start, _PULL)) == _PULL
                return len(starts) * _PULL

            yield _figure(f"get {_PULL} by queue offset", "messages/s", get, get_naively, 1_000_000)

    # ---- whole logs

    def walks(self) -> Iterator[dict[str, Any]]:
        """Walks over a whole log, and the recovery of a store that was not closed in order."""
        with self._store() as store:
            root = store.root
            for message in self._messages:
                store.put(message)
            end = store.max_physical_offset
        path = root / "commitlog" / f"{0:020d}"
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log,
            memoryview(log) as view,
        ):
            yield from self._walks(log, view, end)
            yield self._recovery(root, view, end)

    def _walks(self, log: mmap.mmap, view: memoryview, end: int) -> Iterator[dict[str, Any]]:
        def verify(*, check_crc: bool) -> int:
            count = body_bytes = 0
            for records in walk(log, 0, 0, end):
                assert isinstance(records, Records), "nothing is damaged"
                assert not check_crc or crc_matches(records).all()
                count += len(records)
                body_bytes += int(records.body_bytes.sum())
            return body_bytes if check_crc else count

        yield _figure(
            "verify walker", "records/s", lambda: verify(check_crc=False), lambda: naive_walk(view, end)[0], 1_000_000
        )
        yield _figure(
            "verify walker with CRC",
            "body bytes/s",
            lambda: verify(check_crc=True),
            lambda: naive_walk(view, end, check_crc=True)[1],
            1_000_000_000,
        )

    def _recovery(self, root: Path, view: memoryview, end: int) -> dict[str, Any]:
        """A start after a crash that left no checkpoint: the whole log is checked and dispatched again."""

        def recover() -> int:
            (root / "abort").touch()
            (root / "checkpoint").unlink(missing_ok=True)
            store = MessageStore(root, StoreSettings(message_index_enable=False))
            store.open()
            assert store.max_physical_offset == end
            store.close()
            return end

        def recover_naively() -> int:
            with self._naive() as naive:
                naive_walk(view, end, check_crc=True, store=naive)
            return end

        what = "recovery without checkpoint"
        return _figure(what, "bytes/s", recover, recover_naively, 1_000_000_000, clock=time.perf_counter_ns)


def _message(queue_id: int, body: bytes, properties: bytes) -> PutMessage:
    return PutMessage(_TOPIC, queue_id, body, properties, 0, 0, 1_700_000_000_000, _HOST, _HOST)


def _figure(
    what: str, unit: str, ours: Work, naive: Work, target: int = 0, *, clock: Callable[[], int] = time.thread_time_ns
) -> dict[str, Any]:
    """Both rates of a piece of work; ``times`` says how much faster ours is."""
    rates: dict[str, float] = {"ours": 0.0, "naive": 0.0}
    for _ in range(_ROUNDS):
        for name, work in (("ours", ours), ("naive", naive)):
            start = clock()
            done = work()
            rates[name] = max(rates[name], done * 1e9 / (clock() - start))
    return {
        "figure": what,
        "ours": round(rates["ours"]),
        "naive": round(rates["naive"]),
        "times": round(rates["ours"] / rates["naive"], 1),
        "target": target,
        "unit": unit,
        "clock": "CPU" if clock is time.thread_time_ns else "wall",
    }
