"""A batch of many messages put in steps: the result equals that of `put_batch`. Source: store.md §3.6, §3.7."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.record import BatchEntry, encode_batch, is_long_batch
from rmqkit.store import long_batch
from rmqkit.store.dispatcher import DispatchRequest
from rmqkit.store.long_batch import LongBatch
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.examples import examples
from tests.store.stores import HOST_V6, message, opened, put_all, read_all, small_settings, tree

LARGE = StoreSettings(
    commit_log_file_bytes=1 << 20, consume_queue_file_bytes=2000, hash_slot_count=99, index_entry_count=5000
)
SEALED = StoreSettings(
    commit_log_file_bytes=1 << 20, hash_slot_count=99, index_entry_count=5000, append_property_crc=True
)


def put_in_steps(store: MessageStore, one: InnerMessage, *between: InnerMessage) -> tuple[PutResult, LongBatch]:
    """Put a long batch, with other messages between its steps."""
    batch, others = LongBatch(one), iter(between)
    for _ in store.prepare(batch):
        put_all(store, *itertools.islice(others, 1))
    put_all(store, *others)
    result = store.put_long_batch(batch)
    while store.dispatch():
        pass
    return result, batch


def batch_of(count: int, **fields: object) -> InnerMessage:
    return message(body=encode_batch([BatchEntry(b"%d" % i, b"KEYS\x01k%d\x02" % i) for i in range(count)]), **fields)


@examples(15)
@given(
    st.lists(
        st.builds(
            BatchEntry,
            st.binary(max_size=200),
            st.sampled_from([b"", b"TAGS\x01a\x02KEYS\x01k\x02", b"KEYS\x01" + b"x y" * 2000, b"a\x01b", bytes(600)]),
            st.integers(0, 9),
        ),
        max_size=12,
    ),
    st.sampled_from([LARGE, SEALED, small_settings()]),
    st.booleans(),
    st.sampled_from([0, 2, 0x30]),
)
def test_it_leaves_the_files_that_a_batch_leaves(tmp_path_factory, entries, settings, v6, sys_flag):
    folder = tmp_path_factory.mktemp("long")
    one = message(body=encode_batch(entries), sys_flag=sys_flag, reconsume_times=2)
    one.born_host = HOST_V6 if v6 else one.born_host
    told: dict[str, list[DispatchRequest]] = {"plain": [], "long": []}
    results: list[PutResult] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_batch, "_AT_ONCE", 3)
        patch.setattr(long_batch, "_OFFSETS", 2)
        for name in told:
            with opened(folder / name, settings, clock=StandingClock(), on_arrival=told[name].extend) as store:
                put_all(store, message())
                if name == "plain":
                    results.append(store.put_batch(one))
                else:
                    result, batch = put_in_steps(store, one)
                    if result.status is PutStatus.OK:
                        result.physical_offsets = tuple(itertools.chain(*batch.physical_offsets()))
                    results.append(result)
                put_all(store, message())
    assert results[0] == results[1]
    assert told["plain"] == told["long"]
    trees = [{k: v for k, v in tree(folder / name).items() if k != "checkpoint" and "index" not in k} for name in told]
    assert trees[0] == trees[1]
    indexes = [[path.read_bytes() for path in sorted((folder / name / "index").glob("*"))] for name in told]
    assert indexes[0] == indexes[1]


def test_others_are_put_meanwhile_and_it_lies_together_behind_them(tmp_path: Path) -> None:
    with opened(tmp_path / "s", StoreSettings(commit_log_file_bytes=1 << 20)) as store:
        others = [message(body=b"other%d" % i) for i in range(8)]
        result, _ = put_in_steps(store, batch_of(3000), *others)
        assert (result.status, result.queue_offset) == (PutStatus.OK, 8)
        bodies = [record.body for record in read_all(store, "TopicTest")]
        assert bodies == [*(one.body for one in others), *(b"%d" % i for i in range(3000))]


def test_it_is_reported_in_parts_and_what_is_put_next_comes_behind(tmp_path: Path) -> None:
    told: list[int] = []
    settings = StoreSettings(commit_log_file_bytes=1 << 20)
    with opened(tmp_path / "s", settings, on_arrival=lambda arrivals: told.append(len(arrivals))) as store:
        batch = LongBatch(batch_of(2000))
        for _ in store.prepare(batch):
            pass
        store.put_long_batch(batch)
        assert told == []
        assert store.dispatch()
        assert told == [512]
        assert store.max_offset("TopicTest", 0) == 512, "reads dispatch none of it"
        assert told == [512]
        put_all(store, message(body=b"next"))
        assert told == [512, 512], "a put dispatches a part, too"
        while store.dispatch():
            pass
        assert sum(told) == 2001
        assert max(told) == 512
        assert read_all(store, "TopicTest")[-1].body == b"next"


def test_under_sync_flush_it_is_readable_when_it_is_on_the_disk(tmp_path: Path) -> None:
    settings = StoreSettings(commit_log_file_bytes=1 << 20, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    with opened(tmp_path / "s", settings) as store:
        batch = LongBatch(batch_of(1500))
        for _ in store.prepare(batch):
            pass
        result = store.put_long_batch(batch)
        if store.durable_offset < result.end_offset:
            assert not store.dispatch()
    with opened(tmp_path / "s", settings) as store:
        assert len(read_all(store, "TopicTest")) == 1500, "the close dispatches the rest"


def test_a_store_that_was_closed_meanwhile_takes_none_of_it(tmp_path: Path) -> None:
    with opened(tmp_path / "s", LARGE) as store:
        batch = LongBatch(batch_of(100))
        for _ in store.prepare(batch):
            pass
    assert store.put_long_batch(batch).status is PutStatus.SERVICE_NOT_AVAILABLE


def test_a_topic_deleted_meanwhile_begins_again(tmp_path: Path) -> None:
    with opened(tmp_path / "s", StoreSettings(commit_log_file_bytes=1 << 20)) as store:
        put_all(store, message())
        batch = LongBatch(batch_of(1500))
        for _ in store.prepare(batch):
            pass
        store.delete_topic("TopicTest")
        assert store.put_long_batch(batch).queue_offset == 0
        assert store.dispatch()
        store.delete_topic("TopicTest")
        assert not list((tmp_path / "s" / "consumequeue").glob("TopicTest"))


@pytest.mark.parametrize(
    ("entries", "is_long"),
    [
        ([BatchEntry(b"", b"")] * 10, False),
        ([BatchEntry(b"", b"")] * 11, True),
        ([BatchEntry(b"x" * 999, b"")], False),
        ([BatchEntry(b"", b"p" * 100)], False),
        ([BatchEntry(b"", b"p" * 50), BatchEntry(b"", b"p" * 51)], True),
    ],
)
def test_a_batch_is_long_by_its_messages_and_their_properties(entries: list[BatchEntry], is_long: bool) -> None:
    assert is_long_batch(encode_batch(entries), count_max=10, properties_bytes_max=100) is is_long


@pytest.mark.parametrize("body", [b"", bytes(5000), b"\xff" * 5000, encode_batch([BatchEntry(b"", b"p" * 90)])[:-1]])
def test_what_is_no_batch_is_not_long(body: bytes) -> None:
    assert not is_long_batch(body, count_max=10, properties_bytes_max=100)
