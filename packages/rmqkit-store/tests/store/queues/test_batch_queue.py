"""Inner batches and their queue: store.md §3.7, §6."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmqkit.errors import StoreMismatch
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import BatchEntry, decode_batch, decode_record, encode_batch
from rmqkit.store.message_store import GetStatus, InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.queues.batch_queue import BATCH_ENTRY, BatchQueue
from tests.golden_stores import unpack_golden
from tests.store.stores import copy_store, golden_settings, message, opened, read_all, small_settings

TOPIC = "BatchTopic"
IS_BATCH = TOPIC.__eq__


def new_queue(root: Path) -> BatchQueue:
    return BatchQueue("T", 0, root / "batchconsumequeue" / "T" / "0", 10 * 46, {})


def fill(queue: BatchQueue, count: int, first: int = 0) -> BatchQueue:
    """Put entries of 3 messages and 100 bytes."""
    for i in range(first, first + count):
        queue.append_batch(i * 3, 3, i * 100, 100, -1, 5000 + i)
    return queue


def reloaded(root: Path) -> BatchQueue:
    queue = new_queue(root)
    queue.load()
    queue.recover()
    return queue


def test_entry_bytes(tmp_path: Path) -> None:
    queue = new_queue(tmp_path)
    queue.append_batch(0x50, 7, 0x1122334455, 0x1F4, -2, 0x99)
    content = queue.queue.path_of(0).read_bytes()[:46]
    assert content == bytes.fromhex(
        "0000001122334455 000001f4 fffffffffffffffe 0000000000000099 0000000000000050 0007 ffffffff 00000000"
    )
    queue.close()


def test_bounds_come_from_the_entries(tmp_path: Path) -> None:
    queue = fill(new_queue(tmp_path), 25)
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 75, 2500)
    again = reloaded(tmp_path)
    assert (again.min_offset, again.max_offset, again.max_physical_offset) == (0, 75, 2500)
    fill(again, 2, first=25)
    assert again.max_offset == 81
    queue.close()
    again.close()


def test_dispatching_twice_changes_nothing(tmp_path: Path) -> None:
    queue = fill(fill(new_queue(tmp_path), 5), 5)
    assert queue.max_offset == 15 and queue.end_index == 5
    queue.close()


@pytest.mark.parametrize(("offset", "place"), [(0, 0), (2, 0), (3, 1), (29, 9), (30, 10), (74, 24), (75, -1)])
def test_message_is_found_in_the_record_that_holds_it(tmp_path: Path, offset: int, place: int) -> None:
    queue = fill(new_queue(tmp_path), 25)
    assert queue.index_of(offset) == place
    assert queue.place(offset) == ((place * 100, 100) if place >= 0 else (-1, 0))
    queue.close()


@pytest.mark.parametrize(
    "damage",
    [
        BATCH_ENTRY.pack(-1, 1, 0, 0, 0, 1, -1, 0),
        BATCH_ENTRY.pack(1, 0, 0, 0, 0, 1, -1, 0),
        BATCH_ENTRY.pack(1, 1, 0, 0, -1, 1, -1, 0),
        BATCH_ENTRY.pack(1, 1, 0, 0, 0, 0, -1, 0),
    ],
)
def test_recovery_stops_at_the_first_invalid_entry(tmp_path: Path, damage: bytes) -> None:
    queue = fill(new_queue(tmp_path), 9)
    queue.queue.files[0].write(4 * 46, damage)
    assert reloaded(tmp_path).max_offset == 12
    queue.close()


@pytest.mark.parametrize(("end", "max_offset"), [(0, 0), (100, 3), (101, 6), (1500, 45)])
def test_physical_cut(tmp_path: Path, end: int, max_offset: int) -> None:
    queue = fill(new_queue(tmp_path), 25)
    queue.truncate_physical(end)
    assert queue.max_offset == max_offset
    queue.close()


@pytest.mark.parametrize(
    ("min_physical_offset", "min_offset"), [(0, 0), (1, 3), (900, 27), (901, 30), (2400, 72), (9999, 75)]
)
def test_min_offset_follows_the_log(tmp_path: Path, min_physical_offset: int, min_offset: int) -> None:
    queue = fill(new_queue(tmp_path), 25)
    queue.correct_min_offset(min_physical_offset)
    assert queue.min_offset == min_offset
    queue.close()


@pytest.mark.parametrize(("base", "min_offset"), [(0, 0), (3, 0), (30, 0), (45, 0)])
def test_later_batch_with_a_taken_number_takes_its_place(tmp_path: Path, base: int, min_offset: int) -> None:
    queue = fill(new_queue(tmp_path), 25)
    queue.append_batch(base, 2, 9900, 100, -1, 6000)
    assert (queue.min_offset, queue.max_offset, queue.place(base + 1)) == (min_offset, base + 2, (9900, 100))
    assert not base or queue.place(base - 1) == (base // 3 * 100 - 100, 100)
    queue.close()


# ---- in the store


def batch_of(count: int, **properties: Any) -> InnerMessage:
    entries = [BatchEntry(b"m%d" % i, b"TAGS\x01x\x02") for i in range(count)]
    return message(TOPIC, body=encode_batch(entries), **({"UNIQ_KEY": "U", "TAGS": "TagA"} | properties))


def put_batches(store: MessageStore, *counts: int) -> list[PutResult]:
    results = [store.put_batch(batch_of(count)) for count in counts]
    assert [result.status for result in results] == [PutStatus.OK] * len(counts), results
    return results


def test_batch_is_one_record_that_numbers_its_messages(tmp_path: Path) -> None:
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        results = put_batches(store, 3, 2)
        assert [result.queue_offset for result in results] == [0, 3]
        assert results[1].physical_offsets == (results[1].physical_offset,)
        record = decode_record(store.log.record_at(results[1].physical_offset) or b"", verify_crc=True)
        assert record.sys_flag == 0xC0 and record.queue_offset == 3
        assert [entry.body for entry in decode_batch(record.body)] == [b"m0", b"m1"]
        properties = decode_properties(record.properties)
        assert (properties["INNER_NUM"], properties["INNER_BASE"], properties["TAGS"]) == ("2", "3", "TagA")
        assert (store.min_offset(TOPIC, 0), store.max_offset(TOPIC, 0)) == (0, 5)
        assert store.put_batch(batch_of(1)).queue_offset == 5
    assert not (tmp_path / "s" / "consumequeue" / TOPIC).exists()
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        assert store.put_batch(batch_of(1)).queue_offset == 6


def test_news_of_a_batch(tmp_path: Path) -> None:
    seen: list[Any] = []
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH, on_arrival=seen.extend) as store:
        put_batches(store, 3, 2)
    assert [(one.queue_offset, one.batch_count) for one in seen] == [(0, 3), (3, 2)]


@pytest.mark.parametrize(
    ("offset", "count_max", "first", "following"),
    [(0, 4, 0, 3), (0, 5, 0, 5), (1, 2, 0, 3), (4, 99, 3, 15), (14, 1, 9, 15)],
)
def test_reading_whole_records(tmp_path: Path, offset: int, count_max: int, first: int, following: int) -> None:
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        put_batches(store, 3, 2, 4, 6)  # 0-2, 3-4, 5-8, 9-14
        found = store.get(TOPIC, 0, offset, count_max=count_max)
        assert found.status is GetStatus.FOUND
        assert (decode_record(found.records[0]).queue_offset, found.next_begin_offset) == (first, following)
        assert store.get(TOPIC, 0, 15, count_max=1).status is GetStatus.OFFSET_OVERFLOW_ONE
        assert store.is_in_memory(TOPIC, 0, 7)


def test_tags_of_the_batch_are_filtered(tmp_path: Path) -> None:
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        put_batches(store, 3)
        assert store.put_batch(batch_of(2, TAGS="TagB")).status is PutStatus.OK
        found = store.get(TOPIC, 0, 0, count_max=9, codes=frozenset([2598920]))
        assert [decode_record(record).queue_offset for record in found.records] == [3]


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda store: store.put(message(TOPIC)), "is BatchCQ: it stores batches with a UNIQ_KEY"),
        (lambda store: store.put_batch(batch_of(2, UNIQ_KEY="")), "is BatchCQ: it stores batches with a UNIQ_KEY"),
        (lambda store: store.put(message("T", INNER_NUM=2)), "is not BatchCQ: it stores no inner batches"),
        (lambda store: store.put(message("T", sys_flag=0x80)), "is not BatchCQ: it stores no inner batches"),
    ],
)
def test_what_the_queue_cannot_hold_is_refused(
    tmp_path: Path, put: Callable[[MessageStore], PutResult], reason: str
) -> None:
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        result = put(store)
        assert result.status is PutStatus.MESSAGE_ILLEGAL and reason in result.reason
        assert store.max_physical_offset == 0


def test_crash_loses_no_batch(tmp_path: Path) -> None:
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        put_batches(store, *range(1, 16))
        copy = copy_store(store.root, tmp_path / "copy")
    (copy / "checkpoint").unlink(missing_ok=True)
    with opened(copy, is_batch_topic=IS_BATCH) as store:
        assert [record.queue_offset for record in read_all(store, TOPIC)] == [i * (i + 1) // 2 for i in range(15)]
        assert store.max_offset(TOPIC, 0) == 120


def test_topic_of_the_other_kind_is_refused_at_start(tmp_path: Path) -> None:
    with opened(tmp_path / "s", is_batch_topic=IS_BATCH) as store:
        put_batches(store, 2)
    with pytest.raises(StoreMismatch, match=r"BatchTopic holds queues of type BatchCQ: set its queue.type to BatchCQ"):
        MessageStore(tmp_path / "s", small_settings()).open()


# ---- the golden store


def test_queue_comes_out_byte_for_byte(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    (golden.root / "commitlog").rename(again / "commitlog")
    (again / "abort").touch()
    with opened(again, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__):
        pass

    def files(root: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (root / "batchconsumequeue/GoldInnerBatch/0").iterdir()}

    assert files(again) == files(golden.root)
    assert len(files(again)) == 3


def test_golden_batches_read_as_the_manifest_says(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    place = "GoldInnerBatch", 0
    queue = next(one for one in golden.manifest["queues"] if one["topic"] == place[0])
    expected = [one for one in golden.manifest["messages"] if one["topic"] == place[0]]
    with opened(golden.root, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__) as store:
        assert (store.min_offset(*place), store.max_offset(*place)) == (queue["minOffset"], queue["maxOffset"])
        assert store.earliest_store_time(*place) == queue["earliestMsgStoreTime"]
        assert store.get(*place, 118, count_max=1).next_begin_offset == queue["pullAtMaxPlus7"]["nextBeginOffset"]
        records = read_all(store, *place)
        members = [
            (record.queue_offset + i, entry.body.decode())
            for record in records
            for i, entry in enumerate(decode_batch(record.body))
        ]
        assert members == sorted((one["queueOffset"], one["bodyText"]) for one in expected)
        for query in golden.manifest["offsetByTimestamp"]:
            if query["topic"] == place[0]:
                assert store.offset_by_time(*place, query["timestamp"]) == query["offset"], query
