"""``rmq bench store``: the store's work per second, compared with a naive implementation (`naive_store`).

Every figure is the best of some rounds. A round runs our way, then the naive way, so that both have the same
conditions. Rates are per CPU second of the calling thread, which depends least on other load. If the work waits for the
disk or another thread, rates are per wall second. The files are in a temporary directory and small enough for the page
cache.
"""

from __future__ import annotations

import mmap
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.commands.naive_store import NaiveStore, naive_walk
from rmqkit.protocol.record import BatchEntry, encode_batch, pack_host
from rmqkit.store.dispatcher import Dispatcher, DispatchRequest, queue_tags_code
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.log.scan import Records, crc_matches, walk
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.queues.table import ConsumeQueues
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
"""Work that returns how many times it was done."""
Figures = Iterator[dict[str, Any]]


def measure(*, messages: int, body_bytes: int, directory: Path | None) -> list[dict[str, Any]]:
    """Return all figures.

    Args:
        messages: number of puts in a round.
        directory: the parent of the temporary directory, None for the system's default.
    """
    with tempfile.TemporaryDirectory(prefix="rmq-bench-", dir=directory) as folder:
        bench = _Bench(Path(folder), messages, body_bytes)
        return [*bench.puts(), *bench.synchronous_puts(), *bench.dispatch(), *bench.reads(), *bench.walks()]


class _Bench:
    def __init__(self, root: Path, count: int, body_bytes: int) -> None:
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
    def _store(self, on_durable: Any = None, **settings: Any) -> Iterator[MessageStore]:
        store_settings = StoreSettings(message_index_enable=False, **settings)
        with closing(MessageStore(next(self._names), store_settings, on_durable=on_durable)) as store:
            store.open()
            yield store

    def _naive(self) -> closing[NaiveStore]:
        return closing(NaiveStore(next(self._names)))

    def _put(self, put: Callable[[InnerMessage], PutResult | None], messages: Sequence[InnerMessage]) -> int:
        for message in messages:
            done = put(message)
            assert done is None or done.status is PutStatus.OK
        return self._count

    def puts(self) -> Figures:
        def put_all(store: MessageStore | NaiveStore) -> Work:
            return partial(self._put, store.put, self._messages)

        def put_batches(store: MessageStore | NaiveStore) -> Work:
            return partial(self._put, store.put_batch, self._batches)

        with self._store() as ours, self._naive() as naive:
            yield _figure("put", put_all(ours), put_all(naive), 120_000)
            yield _figure(f"put in batches of {_BATCH}", put_batches(ours), put_batches(naive), 400_000)
        with self._store(transient_store_pool=True) as ours, self._naive() as naive:
            yield _figure("put, transient store pool", put_all(ours), put_all(naive), 120_000)

    def synchronous_puts(self) -> Figures:
        """Measure puts that wait for the disk: many waiters share a flush, one waiter has its own."""
        alone = self._messages[:_ALONE_MAX]
        is_durable = threading.Event()

        def put_waiting(store: MessageStore, waiters: int, messages: Sequence[InnerMessage]) -> int:
            """Put with this number of producers, each of which waits for its message before it sends the next."""
            waiting: deque[int] = deque()
            for message in messages:
                waiting.append(store.put(message).end_offset)
                store.request_flush()
                while len(waiting) >= waiters:
                    is_durable.clear()
                    if store.durable_offset < waiting[0]:
                        assert is_durable.wait(_WAIT_SECONDS), "the disk answers in time"
                    while waiting and waiting[0] <= store.durable_offset:
                        waiting.popleft()
                    store.dispatch()
            return len(messages)

        def put_naively(naive: NaiveStore) -> int:
            for message in alone:
                naive.put(message, sync=True)
            return len(alone)

        with self._store() as unhurried:
            start = time.perf_counter()
            put_rate = self._put(unhurried.put, self._messages) / (time.perf_counter() - start)
        sync = {"flush_disk_type": FlushDiskType.SYNC_FLUSH, "on_durable": lambda offset, error: is_durable.set()}
        with self._store(**sync) as ours, self._naive() as naive:
            many = partial(put_waiting, ours, _WAITERS, self._messages[: _WAITERS * 40])
            one, naively = partial(put_waiting, ours, 1, alone), partial(put_naively, naive)
            figure = _figure(f"put, SYNC_FLUSH, {_WAITERS} waiters", many, naively, waits=True)
            yield figure | {"target": round(min(20 * figure["naive"], 0.6 * put_rate))}
            yield _figure("put, SYNC_FLUSH, one waiter", one, naively, waits=True)

    def dispatch(self) -> Figures:
        """Measure the way from a stored record to its queue entry, and to the index."""
        size = 200 + len(self._messages[0].body)

        def dispatch_all(index: bool) -> int:
            root = next(self._names)
            keys = MessageIndex(root / "index", 5_000_000, 20_000_000, tags_as_keys=False) if index else None
            queues = ConsumeQueues(root, StoreSettings())
            dispatcher = Dispatcher(queues, None, keys)
            end, offsets = 0, [0] * _QUEUES
            for message in self._messages:
                topic, queue_id, properties = message.topic, message.queue_id, message.properties
                code = queue_tags_code(topic, properties, 1, ())
                arrival = DispatchRequest(topic, queue_id, offsets[queue_id], code, 1, end, size, 0, properties)
                offsets[queue_id] += 1
                end += size
                dispatcher.submit([arrival], end, end)
            if keys is not None:
                keys.enter()
                keys.close()
            queues.close()
            return self._count

        def dispatch_naively(index: bool) -> int:
            with self._naive() as naive:
                for i, message in enumerate(self._messages):
                    naive.dispatch(message.topic, message.queue_id, i * size, size, message.properties, index=index)
            return self._count

        for what, index, target in (("queue only", False, 300_000), ("queue and unique key", True, 120_000)):
            works = partial(dispatch_all, index), partial(dispatch_naively, index)
            yield _figure(f"dispatch, {what}", *works, target)

    def reads(self) -> Figures:
        starts = range(0, self._count // _QUEUES - _PULL, _PULL // 2)
        with self._store() as ours, self._naive() as naive:
            self._put(ours.put, self._messages)
            self._put(naive.put, self._messages)

            def get() -> int:
                for start in starts:
                    assert len(ours.get(_TOPIC, 0, start, count_max=_PULL).records) == _PULL
                return len(starts) * _PULL

            def get_naively() -> int:
                for start in starts:
                    assert len(naive.get(_TOPIC, 0, start, _PULL)) == _PULL
                return len(starts) * _PULL

            yield _figure(f"get {_PULL} by queue offset", get, get_naively, 1_000_000)

    def walks(self) -> Figures:
        """Measure scans of a whole log, and the recovery of a store that was not closed."""
        with self._store() as store:
            self._put(store.put, self._messages)
            root, end = store.root, store.max_physical_offset
        with (
            (root / "commitlog" / f"{0:020d}").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log,
            memoryview(log) as view,
        ):
            verify = partial(_verify, log, end)
            naively = partial(naive_walk, view, end)
            yield _figure("verify walker", verify, lambda: naively()[0], 1_000_000, unit="records/s")
            works = partial(verify, check_crc=True), lambda: naively(check_crc=True)[1]
            yield _figure("verify walker with CRC", *works, 1_000_000_000, unit="body bytes/s")
            yield self._recovery(root, view, end)

    def _recovery(self, root: Path, view: memoryview, end: int) -> dict[str, Any]:
        """Measure a start after a crash without a checkpoint: the whole log is checked and dispatched again."""

        def recover() -> int:
            (root / "abort").touch()
            (root / "checkpoint").unlink(missing_ok=True)
            with closing(MessageStore(root, StoreSettings(message_index_enable=False))) as store:
                store.open()
                assert store.max_physical_offset == end
            return end

        def recover_naively() -> int:
            with self._naive() as naive:
                naive_walk(view, end, check_crc=True, store=naive)
            return end

        what = "recovery without checkpoint"
        return _figure(what, recover, recover_naively, 1_000_000_000, unit="bytes/s", waits=True)


def _verify(log: mmap.mmap, end: int, *, check_crc: bool = False) -> int:
    """Return the number of records of a log, or the bytes of their bodies when these are checked."""
    count = body_bytes = 0
    for records in walk(log, 0, 0, end):
        assert isinstance(records, Records), "the log is not damaged"
        assert not check_crc or crc_matches(records).all()
        count += len(records)
        body_bytes += int(records.body_bytes.sum())
    return body_bytes if check_crc else count


def _message(queue_id: int, body: bytes, properties: bytes) -> InnerMessage:
    return InnerMessage(_TOPIC, queue_id, body, properties, 0, 0, 1_700_000_000_000, _HOST, _HOST)


def _figure(
    what: str, ours: Work, naive: Work, target: int = 0, *, unit: str = "messages/s", waits: bool = False
) -> dict[str, Any]:
    """Return both rates of a piece of work, in wall time if it waits. ``times`` is the ratio of ours to the naive
    one.
    """
    clock = time.perf_counter_ns if waits else time.thread_time_ns
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
        "clock": "wall" if waits else "CPU",
    }
