"""The store as a whole: opening, putting, closing, and the golden stores. store.md §3.6, §3.7, §8, §10, §14."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rmqkit.errors import StoreError, StoreLocked, StoreMismatch
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import MAGIC_V1, MAGIC_V2, BatchEntry, decode_record, encode_batch, has_sound_crc
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.message_store import GetStatus, MessageStore, PutStatus
from rmqkit.store.offline.check import verify
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import unpack_golden
from tests.store.inside import next_file_of
from tests.store.stores import (
    BORN_MS,
    HOST,
    HOST_V6,
    copy_store,
    golden_settings,
    message,
    opened,
    put_all,
    read_all,
    replace_queue_writes,
    small_settings,
    tree,
)
from tests.waiting import SECONDS

# ---- opening and closing


def test_new_store_makes_its_directory(tmp_path: Path) -> None:
    root = tmp_path / "a" / "store"
    with opened(root) as store:
        assert (root / "abort").read_text() == str(os.getpid())
        assert (store.min_physical_offset, store.max_physical_offset, store.durable_offset) == (-1, 0, 0)
        assert store.is_writable and store.failure is None
    assert sorted(tree(root)) == ["checkpoint", "commitlog", "lock", "logstart", "queueends"]


def test_clean_close_leaves_what_java_leaves(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        timestamp = put_all(store, message(TAGS="a"))[0].store_timestamp
    index = next((tmp_path / "s" / "index").iterdir()).name
    assert sorted(name for name, digest in tree(tmp_path / "s").items() if digest != "directory") == [
        "checkpoint",
        "commitlog/00000000000000000000",
        "consumequeue/TopicTest/0/00000000000000000000",
        f"index/{index}",
        "indexfiles",  # ours
        "lock",
        "logstart",  # ours
        "queueends",  # ours
    ]
    assert (tmp_path / "s" / "checkpoint").read_bytes()[:16] == timestamp.to_bytes(8, "big") * 2


def test_messages_and_numbers_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(body=bytes([i])) for i in range(30)))
    with opened(tmp_path / "s") as store:
        assert [record.body[0] for record in read_all(store, "TopicTest")] == list(range(30))
        assert store.put(message()).queue_offset == 30


def test_open_store_is_locked(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        assert next_file_of(store.log)._made is not None
        next_file_of(store.log)._made.result(SECONDS)  # the first file, which another thread creates
        before = tree(store.root)
        with pytest.raises(StoreLocked):
            MessageStore(store.root, small_settings()).open()
        assert tree(store.root) == before
        put_all(store, message())


def test_locked_store_is_not_even_looked_at(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message())
        (store.root / "commitlog" / "half-made").touch()
        with pytest.raises(StoreLocked):
            MessageStore(store.root, small_settings()).open()
        (store.root / "commitlog" / "half-made").unlink()


def test_closed_store_refuses(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message())
    store.close()
    result = store.put(message())
    assert (result.status, result.reason) == (PutStatus.SERVICE_NOT_AVAILABLE, "the store is closed")
    assert not store.is_writable


def test_other_file_sizes_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    before = tree(golden.root)
    for key, value in (
        ("mappedFileSizeCommitLog", "65536"),
        ("mappedFileSizeConsumeQueue", "4000"),
        ("mappedFileSizeConsumeQueueExt", "8192"),
    ):
        with pytest.raises(StoreMismatch, match=rf"bytes and {key} says {value}: set {key}"):
            MessageStore(golden.root, golden_settings(golden, **{key: value})).open()
        assert tree(golden.root) == before


def test_directory_that_is_no_queue_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message())
    (tmp_path / "s" / "consumequeue" / "TopicTest" / "zero").mkdir()
    before = tree(tmp_path / "s")
    with pytest.raises(StoreMismatch, match="its name is not a number"):
        MessageStore(tmp_path / "s", small_settings()).open()
    assert tree(tmp_path / "s") == before


def test_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"")
    with pytest.raises(StoreMismatch, match="is a file: give a directory"):
        MessageStore(tmp_path / "s", small_settings()).open()


def test_unreadable_place_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("rmqkit.system.disk.make_directory", fail)
    with pytest.raises(StoreError, match=r"cannot open store .*: errno 13 Permission denied"):
        MessageStore(tmp_path / "s", small_settings()).open()


def test_failed_recovery_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message())

    def fail(self: object, **options: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("rmqkit.store.queues.table.ConsumeQueues.recover", fail)
    with pytest.raises(StoreError, match="cannot recover store"):
        MessageStore(tmp_path / "s", small_settings()).open()
    monkeypatch.undo()
    with opened(tmp_path / "s") as store:
        assert len(read_all(store, "TopicTest")) == 1


# ---- putting


def test_every_field_is_stored(tmp_path: Path) -> None:
    clock = StandingClock(BORN_MS + 77)
    with opened(tmp_path / "s", clock=clock) as store:
        put_all(store, message(queue_id=3))
        result = put_all(
            store,
            message(
                queue_id=3,
                body=b"body",
                flag=-7,
                sys_flag=0x301,
                born_host=HOST_V6,
                reconsume_times=4,
                prepared_transaction_offset=99,
                TAGS="a",
            ),
        )[0]
        record = decode_record(store.log.record_at(result.physical_offset) or b"", verify_crc=True)
    assert (record.topic, record.queue_id, record.body) == ("TopicTest", 3, b"body")
    assert (record.flag, record.sys_flag, record.reconsume_times) == (-7, 0x311, 4)
    assert (record.born_timestamp, record.store_timestamp) == (BORN_MS, BORN_MS + 77)
    assert (record.born_host, record.store_host) == (HOST_V6, HOST)
    assert (record.prepared_transaction_offset, record.properties) == (99, b"TAGS\x01a\x02")
    assert (record.queue_offset, result.queue_offset, result.store_timestamp) == (1, 1, BORN_MS + 77)
    assert (record.physical_offset, result.end_offset) == (result.physical_offset, record.physical_offset + record.size)


def test_queues_count_separately(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        numbers = [
            store.put(message(topic, queue_id)).queue_offset
            for topic, queue_id in [("A", 0), ("A", 1), ("A", 0), ("B", 0), ("A", 0), ("B", 0)]
        ]
    assert numbers == [0, 0, 1, 0, 2, 1]


@pytest.mark.parametrize(("sys_flag", "number"), [(0x4, 0), (0xC, 0), (0x8, 2)])
def test_prepared_and_rolled_back_records_get_no_number(tmp_path: Path, sys_flag: int, number: int) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message(), message())
        assert put_all(store, message(sys_flag=sys_flag))[0].queue_offset == number
        assert put_all(store, message())[0].queue_offset == (3 if number else 2)
        assert len(read_all(store, "TopicTest")) == (4 if number else 3)


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"topic": "t" * 128}, PutStatus.MESSAGE_ILLEGAL, "topic of 128 bytes, at most 127"),
        ({"topic": "ä" * 64}, PutStatus.MESSAGE_ILLEGAL, "topic of 128 bytes, at most 127"),
        ({"topic": "%RETRY%" + "g" * 249}, PutStatus.MESSAGE_ILLEGAL, "topic of 256 bytes, at most 255"),
        ({"topic": "%DLQ%" + "g" * 123}, PutStatus.MESSAGE_ILLEGAL, "topic of 128 bytes, at most 127"),
        ({"topic": "../up"}, PutStatus.MESSAGE_ILLEGAL, "cannot be the name of a directory"),
        ({"topic": ""}, PutStatus.MESSAGE_ILLEGAL, "cannot be the name of a directory"),
        ({"queue_id": -1}, PutStatus.MESSAGE_ILLEGAL, "queue id -1 is negative"),
        ({"body": bytes(2001)}, PutStatus.MESSAGE_ILLEGAL, "body of 2001 bytes, maxMessageSize is 2000"),
        ({"string": bytes(32768)}, PutStatus.PROPERTIES_SIZE_EXCEEDED, "properties of 32768 bytes, at most 32767"),
        ({"body": bytes(1900), "string": b"p" * 2000}, PutStatus.MESSAGE_ILLEGAL, "fit into no log file"),
    ],
)
def test_illegal_message_is_refused_and_leaves_no_trace(
    tmp_path: Path, fields: dict[str, Any], status: PutStatus, reason: str
) -> None:
    with opened(tmp_path / "s", small_settings(message_bytes_max=2000)) as store:
        result = store.put(message(**fields))
        assert result.status is status and reason in result.reason
        assert store.max_physical_offset == 0 and len(store.queues) == 0


@pytest.mark.parametrize(
    ("topic", "magic"), [("t" * 127, MAGIC_V1), ("%RETRY%" + "g" * 121, MAGIC_V2), ("%RETRY%" + "g" * 248, MAGIC_V2)]
)
def test_long_topics_are_stored_as_version_two(tmp_path: Path, topic: str, magic: int) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message(topic), message(topic))
    with opened(tmp_path / "s") as store:
        assert [record.magic for record in read_all(store, topic)] == [magic, magic]


def test_version_two_can_be_switched_off(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(auto_message_version_on_topic_length=False)) as store:
        assert store.put(message("%RETRY%" + "g" * 121)).status is PutStatus.MESSAGE_ILLEGAL


def test_checksum_of_the_record_is_appended(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(append_property_crc=True)) as store:
        batch = message(body=encode_batch([BatchEntry(b"a", b"K\x01v\x02"), BatchEntry(b"b", b"")]))
        results = [*put_all(store, message(TAGS="TagA")), store.put_batch(batch)]
        offsets = [results[0].physical_offset, *results[1].physical_offsets]
        assert all(has_sound_crc(store.log.record_at(offset) or b"") for offset in offsets)
        assert [record.body for record in read_all(store, "TopicTest")] == [b"hello", b"a", b"b"]


def test_full_disk_refuses_and_takes_more_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message(body=b"before"))

        def fail(descriptor: int, data: bytes, position: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("rmqkit.system.disk.pwrite", fail)
        for _ in range(3):
            result = store.put(message(body=b"refused"))
            assert result.status is PutStatus.SERVICE_NOT_AVAILABLE
            assert result.reason == "log cannot be written: errno 28 No space left on device"
        monkeypatch.undo()
        put_all(store, message(body=b"after"))
        assert caplog.messages == [f"no messages are accepted: {result.reason}", "messages are accepted again"]
        assert [record.body for record in read_all(store, "TopicTest")] == [b"before", b"after"]


def test_full_disk_at_the_queue_holds_back_further_puts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.store.queues.table.HELD_BYTES_MAX", 20)
    with opened(tmp_path / "s") as store:
        put_all(store, message(body=b"0"))
        replace_queue_writes(monkeypatch, lambda descriptor, data, position: 0)
        assert store.put(message(body=b"1")).status is PutStatus.OK, "it is in the log"
        refused = store.put(message(body=b"2"))
        assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE
        assert refused.reason.startswith("consume queue cannot be written: errno 28")
        assert store.max_offset("TopicTest", 0) == 1
        monkeypatch.undo()
        put_all(store, message(body=b"3"))
        assert [record.body for record in read_all(store, "TopicTest")] == [b"0", b"1", b"3"]


def test_entries_that_the_disk_refuses_are_held_and_the_checkpoint_stays_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(body=b"0"))
        store.flusher.flush_queues()
        before = (tmp_path / "s" / "checkpoint").read_bytes()
        replace_queue_writes(monkeypatch, lambda descriptor, data, position: 0)
        put_all(store, message(body=b"1"))
        for _ in range(2):
            store.flusher.flush_queues()
        said = "consume queues cannot be written, their newest entries stay in memory: "
        assert [text for text in caplog.messages if "consume" in text] == [
            f"{said}[Errno 28] no space left for {tmp_path / 's' / 'consumequeue/TopicTest/0/00000000000000000000'}"
        ]
        assert (tmp_path / "s" / "checkpoint").read_bytes() == before
        assert [record.body for record in read_all(store, "TopicTest")] == [b"0", b"1"]
        assert store.failure is None
    assert (tmp_path / "s" / "abort").exists(), "the next start dispatches the entry again"
    monkeypatch.undo()
    with opened(tmp_path / "s", settings) as store:
        assert [record.body for record in read_all(store, "TopicTest")] == [b"0", b"1"]


def test_a_copy_of_a_running_store_has_every_message_after_a_flush_round_or_a_recovery(tmp_path: Path) -> None:
    settings = small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(body=b"0"), message(body=b"1"))
        killed = copy_store(store.root, tmp_path / "killed")
        store.flusher.flush_queues()
        entries = (tmp_path / "s/consumequeue/TopicTest/0/00000000000000000000").read_bytes()
    assert entries[20:24] == bytes(4) and entries[28:32] != bytes(4), "there are two"
    assert verify(killed, settings).is_sound, "the next start enters them"
    (killed / "abort").unlink()
    assert not verify(killed, settings).is_sound
    (killed / "abort").touch()
    with opened(killed) as store:
        assert [record.body for record in read_all(store, "TopicTest")] == [b"0", b"1"]


def test_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "s") as store:

        def fail(queue: FileQueue, start: int) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        put_all(store, message(body=bytes(3000)))
        next_file_of(store.log).close()
        monkeypatch.setattr(FileQueue, "create", fail)
        result = store.put(message(body=bytes(3000)))
        assert result.status is PutStatus.CREATE_MAPPED_FILE_FAILED
        assert result.reason == "no new log file: errno 24 Too many open files"
        monkeypatch.undo()
        put_all(store, message(body=bytes(3000)))


# ---- batches


def batch_of(*entries: BatchEntry, **fields: Any) -> Any:
    return message(body=encode_batch(entries), **fields)


def test_members_become_records_of_their_own(tmp_path: Path) -> None:
    tags = encode_properties({"TAGS": "TagA"})
    with opened(tmp_path / "s") as store:
        put_all(store, message())
        entries = [BatchEntry(b"a", tags, 1), BatchEntry(b"", b"", 2), BatchEntry(b"ccc", b"K\x01v", 3)]
        result = store.put_batch(batch_of(*entries, sys_flag=0x2, born_host=HOST_V6, reconsume_times=1))
        assert result.status is PutStatus.OK and result.queue_offset == 1
        records = [
            decode_record(store.log.record_at(offset) or b"", verify_crc=True) for offset in result.physical_offsets
        ]
        assert records == read_all(store, "TopicTest")[1:]
        assert [record.queue_offset for record in records] == [1, 2, 3]
        assert [(record.body, record.properties, record.flag) for record in records] == [
            (entry.body, entry.properties, entry.flag) for entry in entries
        ]
        assert {(record.sys_flag, record.born_host, record.reconsume_times) for record in records} == {
            (0x12, HOST_V6, 1)
        }
        ends = [record.physical_offset + record.size for record in records]
        assert (result.physical_offset, result.end_offset) == (records[0].physical_offset, ends[-1])
        assert [record.physical_offset for record in records[1:]] == ends[:-1], "one after the other"
        found = store.get("TopicTest", 0, 1, count_max=9, codes=frozenset([2598919]))
        assert len(found.records) == 1


def test_batch_stays_in_one_file(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message(body=bytes(3000)))
        result = store.put_batch(batch_of(*[BatchEntry(bytes(200), b"")] * 4))
        assert result.physical_offset == 4096
        assert [record.queue_offset for record in read_all(store, "TopicTest")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the batch holds no message"),
        (b"\0\0\0", "batch entry at byte 0 is cut off"),
        (encode_batch([BatchEntry(bytes(1500), b"")] * 3), "fit into no log file"),
        (encode_batch([BatchEntry(bytes(50), b"")] * 40), "a batch of 6000 bytes fits into no log file"),
    ],
)
def test_illegal_batch_is_refused_whole(tmp_path: Path, body: bytes, reason: str) -> None:
    with opened(tmp_path / "s") as store:
        result = store.put_batch(message(body=body))
        assert result.status is PutStatus.MESSAGE_ILLEGAL and reason in result.reason
        assert store.max_physical_offset == 0


def test_batch_is_one_write_and_one_piece_of_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    with opened(tmp_path / "s", on_arrival=lambda arrivals: seen.append(len(arrivals))) as store:
        writes: list[int] = []
        real = os.pwrite
        counting = lambda fd, data, at: (writes.append(len(data)), real(fd, data, at))[1]  # noqa: E731
        monkeypatch.setattr("rmqkit.system.disk.pwrite", counting)
        store.put_batch(batch_of(*[BatchEntry(b"x", b"")] * 5))
        assert len(writes) == 1 and seen == [5]
        store.put_batch(batch_of(*[BatchEntry(b"x", b"")] * 5))
        assert store.queues.write_held()
        assert writes[1:] == [505, 200], "and one for the entries"


# ---- topics


def test_sealed_batch_is_that_of_sealed_messages(tmp_path: Path) -> None:
    settings, tags = small_settings(append_property_crc=True), b"TAGS\x01TagA"
    with opened(tmp_path / "s", settings, clock=StandingClock()) as store:
        put_all(store, message(body=b"a", string=tags), message(body=b"", string=b""))
        store.put_batch(batch_of(BatchEntry(b"a", tags), BatchEntry(b"", b"")))
        records = [bytes(record) for record in store.get("TopicTest", 0, 0, count_max=4).records]
        assert all(map(has_sound_crc, records))
        assert [record[40:-11] for record in records[:2]] == [record[40:-11] for record in records[2:]]
        assert len(store.get("TopicTest", 0, 0, count_max=4, codes=frozenset([2598919])).records) == 2


def test_deleted_topic_begins_again(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(enable_consume_queue_ext=True)) as store:
        put_all(store, message("Gone"), message("Gone", 1), message("Stays"))
        store.delete_topic("Gone")
        assert not list((tmp_path / "s").glob("consumequeue*/Gone"))
        assert store.get("Gone", 0, 0, count_max=1).status is GetStatus.NO_MESSAGE_IN_QUEUE
        assert put_all(store, message("Gone"))[0].queue_offset == 0
        assert len(read_all(store, "Stays")) == 1
    with opened(tmp_path / "s", small_settings(enable_consume_queue_ext=True)) as store:
        assert [len(read_all(store, topic)) for topic in ("Gone", "Stays")] == [1, 1]


# ---- golden stores


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"])
def test_golden_store_reads_as_its_manifest_says(tmp_path: Path, name: str) -> None:
    golden = unpack_golden(name, tmp_path)
    with opened(golden.root, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__) as store:
        assert store.max_physical_offset == int(golden.manifest["commitLogMaxOffset"])
        assert store.min_physical_offset == int(golden.manifest["commitLogMinOffset"])
        for queue in golden.manifest["queues"]:
            place = queue["topic"], queue["queueId"]
            if place[0] == "GoldInnerBatch":
                continue
            assert (store.min_offset(*place), store.max_offset(*place)) == (queue["minOffset"], queue["maxOffset"])
            assert store.earliest_store_time(*place) == queue["earliestMsgStoreTime"]
            if "pullAtMax" in queue:
                for asked in (queue["pullAtMax"], queue["pullAtMaxPlus7"]):
                    found = store.get(*place, asked["offset"], count_max=32)
                    is_one = found.status is GetStatus.OFFSET_OVERFLOW_ONE
                    assert asked["status"] == ("NO_NEW_MSG" if is_one else "OFFSET_ILLEGAL")
                    assert found.next_begin_offset == asked["nextBeginOffset"]
    assert not (golden.root / "abort").exists()


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"])
def test_every_golden_message_is_read(tmp_path: Path, name: str) -> None:
    golden = unpack_golden(name, tmp_path)
    with opened(golden.root, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__) as store:
        expected = {
            (one["topic"], one["queueId"], one["queueOffset"]): (one["physicalOffset"], one["size"], one["bodyCRC"])
            for one in golden.manifest["messages"]
            if one["topic"] != "GoldInnerBatch"
        }
        read = {
            (record.topic, record.queue_id, record.queue_offset): (record.physical_offset, record.size, record.body_crc)
            for topic, queue_id in {place[:2] for place in expected}
            for record in read_all(store, topic, queue_id)
        }
        assert read == expected


def test_golden_store_is_unchanged_by_open_and_close(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    before = tree(golden.root)
    with opened(golden.root, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__):
        pass
    after = tree(golden.root)
    assert {name for name in before | after if before.get(name) != after.get(name)} <= {
        "lock",
        "checkpoint",
        "logstart",
        "queueends",
        "indexfiles",
    }


def test_golden_store_continues_with_new_messages(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    settings = golden_settings(golden)
    with opened(golden.root, settings, is_batch_topic="GoldInnerBatch".__eq__) as store:
        before = store.max_offset("GoldPlain", 0)
        put_all(store, *(message("GoldPlain", body=bytes(500)) for _ in range(300)))
    shutil.rmtree(golden.root / "index", ignore_errors=True)
    with opened(golden.root, settings, is_batch_topic="GoldInnerBatch".__eq__) as store:
        assert store.max_offset("GoldPlain", 0) == before + 300
        assert len(read_all(store, "GoldPlain")) == before + 300


def test_a_store_that_was_killed_is_recovered_where_abort_is_missing(tmp_path: Path) -> None:
    """Entries that the queues held in memory are only in the log. Without the recovery they would be lost unnoticed."""
    store = MessageStore(tmp_path / "s", small_settings(queue_flush_interval_ms=3_600_000))
    store.open()
    try:
        put_all(store, *(message(body=b"%d" % i) for i in range(10)), message(queue_id=1))
        store.flusher.flush_log()
        store.queues.table[
            "TopicTest", 1
        ].write_held()  # a start that assumes a stop in order reads only after this place
        copy_store(tmp_path / "s", tmp_path / "killed")
    finally:
        store.close()
    (tmp_path / "killed" / "abort").unlink(missing_ok=True)
    with opened(tmp_path / "killed") as again:
        assert again.max_offset("TopicTest", 0) == 10


def logics_physical_offset(root):
    return int.from_bytes((root / "checkpoint").read_bytes()[40:48])


def test_the_check_point_says_how_far_the_queues_are_on_the_disk(tmp_path):
    root = tmp_path / "store"
    with opened(root) as store:
        put_all(store, *(message(body=b"x" * 500) for _ in range(20)))
        store.flusher.flush_log()
        store.flusher.flush_queues()
        assert logics_physical_offset(root) == store.max_physical_offset
        flushed = store.max_physical_offset
        put_all(store, message())
        store.flusher.flush_queues()  # the log of the last message is not on the disk yet
        assert logics_physical_offset(root) == flushed
    assert logics_physical_offset(root) > flushed


def test_a_check_point_of_another_broker_never_stays_past_the_end_of_the_log(tmp_path):
    root, killed = tmp_path / "store", tmp_path / "killed"
    with opened(root) as store:
        put_all(store, *(message(body=b"x" * 500) for _ in range(20)))
        store.flusher.flush_log()
        store.flusher.flush_queues()
        copy_store(root, killed)
    content = bytearray((killed / "checkpoint").read_bytes())
    content[40:48] = (1 << 40).to_bytes(8)
    (killed / "checkpoint").write_bytes(content)
    with opened(killed) as store:
        assert logics_physical_offset(killed) == store.max_physical_offset
    (killed / "checkpoint").write_bytes(content)
    shutil.rmtree(killed / "commitlog")
    with opened(killed):
        assert logics_physical_offset(killed) == 0


def test_a_kill_in_the_middle_of_a_recovery_leaves_no_trusted_queues(tmp_path, monkeypatch):
    root, killed = tmp_path / "store", tmp_path / "killed"
    with opened(root) as store:
        put_all(store, *(message(body=b"x" * 500) for _ in range(20)))
        store.flusher.flush_log()
        store.flusher.flush_queues()
        copy_store(root, killed)
    assert logics_physical_offset(killed) > 0
    monkeypatch.setattr("rmqkit.store.message_store.find_log_end", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), opened(killed):
        pass
    assert logics_physical_offset(killed) == 0
