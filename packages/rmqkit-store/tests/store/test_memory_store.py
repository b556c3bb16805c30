"""The store in memory: tests beyond its use as a model. Source: store.md §3.6, §16.1."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rmqkit.protocol.record import BatchEntry, decode_record, encode_batch
from rmqkit.store.message_store import DispatchRequest, GetStatus, MessageStore, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.store.memory_store import MemoryStore
from tests.store.stores import message, opened, small_settings

NOW_MS = 1_800_000_000_000
Store = MessageStore | MemoryStore


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock(NOW_MS)


@pytest.fixture
def store(clock: StandingClock) -> MemoryStore:
    store = MemoryStore(small_settings(), clock=clock)
    store.open()
    return store


@pytest.fixture(params=["files", "memory"])
def either(request: pytest.FixtureRequest, tmp_path: Path, clock: StandingClock) -> Iterator[Store]:
    """Yield a file store or a store in memory."""
    with ExitStack() as stack:
        if request.param == "files":
            yield stack.enter_context(opened(tmp_path, clock=clock))
        else:
            store = MemoryStore(small_settings(), clock=clock)
            store.open()
            yield store


@pytest.mark.parametrize("name", [name for name in vars(MemoryStore) if name[0] != "_" and hasattr(MessageStore, name)])
def test_both_stores_are_asked_in_the_same_way(name: str) -> None:
    theirs, ours = getattr(MessageStore, name), getattr(MemoryStore, name)
    if callable(ours):
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    else:
        assert type(ours) is type(theirs)


def test_records_come_joined_for_those_who_want_them_so(either: Store) -> None:
    for body in (b"a", b"bc"):
        either.put(message(body=body))
    each = either.get("TopicTest", 0, 0, count_max=32)
    joined = either.get("TopicTest", 0, 0, count_max=32, joins=True)
    assert (each.count, joined.count, joined.next_begin_offset) == (2, 2, 2)
    assert b"".join(each.records) == b"".join(joined.records)


def test_message_is_numbered_stored_and_found(either: Store) -> None:
    put = either.put(message(body=b"hello", TAGS="TagA", KEYS="k1 k2"))
    assert (put.status, put.physical_offset, put.queue_offset, put.store_timestamp) == (PutStatus.OK, 0, 0, NOW_MS)
    record = decode_record(either.get("TopicTest", 0, 0, count_max=32).records[0])
    assert (record.body, record.queue_offset, record.store_timestamp) == (b"hello", 0, NOW_MS)
    assert put.end_offset == record.size == either.max_physical_offset
    assert either.query("TopicTest", "k2", 32, 0, NOW_MS + 1000).physical_offsets == [0]
    assert either.log.record_at(0) is not None and either.log.record_at(1) is None
    assert either.log.copy(0, record.size) == bytes(either.log.record_at(0) or b"")
    assert either.entries("TopicTest", 0, 0, count_max=9) == [(1, 0, record.size, 2598919)]
    assert either.is_in_memory("TopicTest", 0, 0) and not either.is_in_memory("TopicTest", 0, 1)


def test_record_that_does_not_fit_begins_the_next_file(either: Store) -> None:
    first = either.put(message(body=bytes(3000)))
    second = either.put(message(body=bytes(1000)))
    assert (first.physical_offset, second.physical_offset) == (0, 4096)


def test_batch_is_numbered_from_its_first_message(either: Store) -> None:
    either.put(message())
    put = either.put_batch(message(body=encode_batch([BatchEntry(b"a", b""), BatchEntry(b"b", b"")])))
    assert (put.queue_offset, len(put.physical_offsets)) == (1, 2)
    assert [decode_record(one).body for one in either.get("TopicTest", 0, 1, count_max=32).records] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("offset", "status", "following"),
    [
        (-1, GetStatus.OFFSET_TOO_SMALL, 0),
        (0, GetStatus.FOUND, 2),
        (2, GetStatus.OFFSET_OVERFLOW_ONE, 2),
        (3, GetStatus.OFFSET_OVERFLOW_BADLY, 2),
    ],
)
def test_status_of_a_read(either: Store, offset: int, status: GetStatus, following: int) -> None:
    for _ in range(2):
        either.put(message())
    found = either.get("TopicTest", 0, offset, count_max=32)
    assert (found.status, found.next_begin_offset, found.min_offset, found.max_offset) == (status, following, 0, 2)


def test_queue_that_nobody_wrote_to_holds_no_message(either: Store) -> None:
    found = either.get("Unknown", 0, 5, count_max=32)
    assert (found.status, found.next_begin_offset) == (GetStatus.NO_MESSAGE_IN_QUEUE, 0)


def test_time_finds_the_first_and_the_last_message(either: Store, clock: StandingClock) -> None:
    for ms in (0, 10, 0, 10):
        clock.ms += ms
        either.put(message())
    times = [NOW_MS - 1, NOW_MS, NOW_MS + 10, NOW_MS + 15, NOW_MS + 20, NOW_MS + 21]
    assert [either.offset_by_time("TopicTest", 0, one) for one in times] == [0, 0, 1, 3, 3, 4]
    assert [either.offset_by_time("TopicTest", 0, one, upper=True) for one in times] == [0, 0, 2, 2, 3, 3]


def test_closed_store_takes_nothing(either: Store) -> None:
    either.close()
    assert either.put(message()).status is PutStatus.SERVICE_NOT_AVAILABLE and not either.is_writable


def test_deleted_topic_starts_over(either: Store) -> None:
    for _ in range(3):
        either.put(message())
    either.delete_topic("TopicTest")
    assert either.max_offset("TopicTest", 0) == 0
    assert either.put(message()).queue_offset == 0


def test_power_cut_takes_whole_records(store: MemoryStore) -> None:
    ends = [store.put(message()).end_offset for _ in range(3)]
    store.truncate(ends[1])
    assert (store.max_offset("TopicTest", 0), store.max_physical_offset) == (2, ends[1])
    assert store.put(message()).queue_offset == 2


def test_log_that_begins_later_raises_min_offsets(store: MemoryStore) -> None:
    ends = [store.put(message()).end_offset for _ in range(3)]
    store.drop_before(ends[1])
    assert store.min_offset("TopicTest", 0) == 2
    assert store.get("TopicTest", 0, 1, count_max=32).status is GetStatus.OFFSET_TOO_SMALL
    assert store.log.record_at(0) is None


def test_arrivals_are_reported_once_per_put(clock: StandingClock) -> None:
    told: list[list[DispatchRequest]] = []
    store = MemoryStore(small_settings(), clock=clock, on_arrival=told.append)
    store.open()
    store.put(message())
    store.put_batch(message(body=encode_batch([BatchEntry(b"a", b""), BatchEntry(b"b", b"")])))
    assert [[one.queue_offset for one in arrivals] for arrivals in told] == [[0], [1, 2]]
