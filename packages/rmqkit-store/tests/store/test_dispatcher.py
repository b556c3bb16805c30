"""From the log to the queues: store.md §4.2, §11."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import decode_properties, encode_properties, find_keys, java_hash
from rmqkit.protocol.record import decode_record
from rmqkit.store.dispatcher import Dispatcher, DispatchRequest, queue_tags_code, request_of
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.queues.consume_queue import ENTRY, ConsumeQueue
from rmqkit.store.queues.queue_ext import QueueExt, is_address
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.settings import StoreSettings, parse_delay_levels
from rmqkit.testing.clock import StandingClock
from tests.examples import examples
from tests.golden_stores import GoldenStore, unpack_golden
from tests.store.stores import (
    golden_settings,
    message,
    opened,
    put_all,
    read_all,
    replace_queue_writes,
    small_settings,
    tree,
)

DELAYS = parse_delay_levels(StoreSettings().message_delay_level)


@pytest.mark.parametrize(
    ("topic", "properties", "code"),
    [
        ("T", {}, 0),
        ("T", {"TAGS": "TagA"}, 2598919),
        ("T", {"TAGS": "TagA", "DELAY": "3"}, 2598919),
        ("SCHEDULE_TOPIC_XXXX", {"TAGS": "TagA", "DELAY": "3"}, 5_000 + 10_000),
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": "99"}, 5_000 + 7_200_000),
        ("SCHEDULE_TOPIC_XXXX", {"TAGS": "TagA", "DELAY": "0"}, 2598919),
        ("SCHEDULE_TOPIC_XXXX", {"TAGS": "TagA"}, 2598919),
        ("SCHEDULE_TOPIC_XXXX", {"TAGS": "TagA", "DELAY": "soon"}, 2598919),
    ],
)
def test_tag_code(topic: str, properties: dict[str, str], code: int) -> None:
    assert queue_tags_code(topic, encode_properties(properties), 5_000, DELAYS) == code


@given(st.lists(st.sampled_from([b"TAGS", b"XTAGS", b"\x01", b"\x02", b"a", b"b"]), max_size=12))
def test_tag_code_is_the_hash_of_the_decoded_property(parts: list[bytes]) -> None:
    properties = b"".join(parts)
    tags = decode_properties(properties).get("TAGS")
    assert queue_tags_code("T", properties, 0, DELAYS) == (0 if tags is None else java_hash(tags))


@given(
    st.text(min_size=1, max_size=8, alphabet=st.characters(exclude_characters="/\0\x01\x02", codec="utf-8")),
    st.sampled_from([{}, {"TAGS": "a"}, {"TAGS": "ü", "KEYS": "k"}, {"DELAY": "2", "TAGS": "b"}]),
    st.sampled_from([0, 0x1, 0x8, 0x4, 0xC]),
)
def test_what_put_knows_is_what_the_record_says(
    tmp_path_factory: pytest.TempPathFactory, topic: str, properties: dict[str, str], sys_flag: int
) -> None:
    seen: list[DispatchRequest] = []
    with opened(tmp_path_factory.mktemp("s"), on_arrival=seen.extend) as store:
        for name in (topic, "SCHEDULE_TOPIC_XXXX"):
            result = store.put(message(name, body=b"b", sys_flag=sys_flag, **properties))
            if result.reason:
                assert name in (".", "..")
                continue
            record = store.log.record_at(result.physical_offset)
            assert record is not None
            dispatched, read = seen.pop(), request_of(decode_record(record), DELAYS)
            assert dispatched == msgspec.structs.replace(read, keys=find_keys(read.properties))


def arrival(queue_offset: int, *, topic: str = "T", sys_flag: int = 0) -> DispatchRequest:
    return DispatchRequest(topic, 0, queue_offset, 0, 1000 + queue_offset, queue_offset * 100, 100, sys_flag, b"")


@pytest.fixture
def queues(tmp_path: Path) -> ConsumeQueues:
    return ConsumeQueues(tmp_path, small_settings())


def max_offset(queues: ConsumeQueues, topic: str = "T") -> int:
    queue = queues.get(topic, 0)
    return 0 if queue is None else queue.max_offset


def test_records_are_dispatched_up_to_the_limit_in_order(queues: ConsumeQueues) -> None:
    seen: list[list[DispatchRequest]] = []
    dispatcher = Dispatcher(queues, seen.append)
    dispatcher.submit([arrival(0)], 100, 0)
    dispatcher.submit([arrival(1), arrival(2)], 300, 100)
    assert (max_offset(queues), dispatcher.position, len(dispatcher.pending)) == (1, 100, 1)
    dispatcher.run(299)
    assert max_offset(queues) == 1, "a batch is dispatched whole"
    dispatcher.run(300)
    assert (max_offset(queues), dispatcher.position, len(dispatcher.pending)) == (3, 300, 0)
    assert seen == [[arrival(0)], [arrival(1), arrival(2)]]
    assert dispatcher.dispatched_timestamp == 1002


def test_waiting_records_are_one_write_for_each_queue(queues: ConsumeQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(queues)
    for topic in "AB":
        dispatcher.submit([arrival(0, topic=topic)], 100, 100)
    for number in range(1, 7):
        for topic in "AB":
            dispatcher.submit([arrival(number, topic=topic)], number * 100 + 100, 100)
    writes: list[int] = []
    real = os.pwrite
    counting = lambda fd, data, at: (writes.append(len(data)), real(fd, data, at))[1]  # noqa: E731
    monkeypatch.setattr("rmqkit.system.disk.pwrite", counting)
    dispatcher.run(700)
    assert writes == [120, 120] and max_offset(queues, "A") == max_offset(queues, "B") == 7


KINDS = st.sampled_from([0, 0, 0, 0x1, 0x8, 0x4, 0xC, 0x80])


@given(st.lists(st.tuples(st.sampled_from("AB"), KINDS), max_size=30), st.integers(0, 30), st.booleans())
def test_waiting_records_come_to_the_queues_as_single_ones_do(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, int]], repeated: int, has_ext: bool
) -> None:
    found = []
    settings = small_settings(enable_consume_queue_ext=has_ext)
    for limit in (1 << 30, 0):
        root = tmp_path_factory.mktemp("s")
        queues, told = ConsumeQueues(root, settings), []
        dispatcher = Dispatcher(queues, told.extend)
        numbers = {"A": 0, "B": 5}
        for i, (topic, sys_flag) in enumerate(records):
            numbers[topic] += sys_flag not in (0x4, 0xC)
            one = DispatchRequest(topic, 0, max(0, numbers[topic] - 1), i, 1000 + i, i * 100, 100, sys_flag, b"")
            if limit == 0 and i < repeated:
                dispatcher.apply(one)  # as an interrupted earlier try did
            dispatcher.submit([one], i * 100 + 100, limit)
        dispatcher.run(1 << 30)
        queues.close()
        facts = [(q.topic, q.min_offset, q.max_offset, q.max_physical_offset) for q in queues]
        found.append((told, dispatcher.position, dispatcher.dispatched_timestamp, sorted(facts), queue_files(root)))
    assert found[0] == found[1]


@pytest.mark.parametrize("sys_flag", [0x4, 0xC])
def test_prepared_and_rolled_back_records_are_in_no_queue(queues: ConsumeQueues, sys_flag: int) -> None:
    Dispatcher(queues).submit([arrival(0, sys_flag=sys_flag)], 100, 100)
    assert len(queues) == 0


@pytest.mark.parametrize("topic", ["../../etc", "a/b", "..", ".", "", "a\0b"])
def test_topic_that_is_no_directory_is_left_out(queues: ConsumeQueues, tmp_path: Path, topic: str) -> None:
    dispatcher = Dispatcher(queues)
    dispatcher.submit([arrival(0, topic=topic)], 100, 100)
    assert len(queues) == 0 and dispatcher.position == 100
    assert list(tmp_path.iterdir()) == []


def test_refusing_disk_stops_the_dispatcher_until_it_takes_more(
    queues: ConsumeQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    dispatcher = Dispatcher(queues)
    monkeypatch.setattr("rmqkit.system.disk.pwrite", fail)
    dispatcher.submit([arrival(0)], 100, 100)
    dispatcher.submit([arrival(1)], 200, 200)
    assert dispatcher.failure is not None and dispatcher.failure.errno == errno.ENOSPC
    assert (dispatcher.position, len(dispatcher.pending)) == (0, 2)
    monkeypatch.undo()
    dispatcher.run(200)
    assert dispatcher.failure is None
    assert (dispatcher.position, max_offset(queues)) == (200, 2)


def test_unexpected_error_of_a_queue_refuses_puts_and_no_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, every later put, pull and retention cycle raised it when it dispatched the record."""

    def fail(*arguments: object) -> None:
        raise AssertionError("entry i lies at i * 20")

    with opened(tmp_path / "s") as store:
        put_all(store, message(body=b"first"))
        with monkeypatch.context() as patch:
            patch.setattr(ConsumeQueue, "_take", fail)
            put_all(store, message(body=b"in the log"))
            for _ in range(3):
                refused = store.put(message())
                assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE
                assert "unexpected AssertionError: entry i lies at i * 20" in refused.reason
                assert store.max_offset("TopicTest", 0) == 1
                store.retention_round()
        put_all(store, message(body=b"after"))
        assert [record.body for record in read_all(store, "TopicTest")] == [b"first", b"in the log", b"after"]
    assert len([record for record in caplog.records if record.exc_info]) == 1


# ---- the golden logs, dispatched again


def dispatched_again(golden: GoldenStore, settings: StoreSettings, to: Path) -> Path:
    """Return a store built from the golden log alone."""
    (to / "commitlog").parent.mkdir(parents=True)
    shutil.copytree(golden.root / "commitlog", to / "commitlog")
    (to / "abort").touch()
    store = MessageStore(to, settings, is_batch_topic="GoldInnerBatch".__eq__)
    store.open()
    store.close()
    return to


def queue_files(root: Path, folder: str = "consumequeue") -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and "%LMQ%" not in str(path)
    }


def test_queues_come_out_byte_for_byte(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0-ipv6-crc", tmp_path)
    again = dispatched_again(golden, golden_settings(golden), tmp_path / "again")
    assert queue_files(again) == queue_files(golden.root)


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4"])
def test_queues_with_extension_say_the_same(tmp_path: Path, name: str) -> None:
    golden = unpack_golden(name, tmp_path)
    settings = golden_settings(golden)
    again = dispatched_again(golden, settings, tmp_path / "again")
    ours, theirs = said_by_queues(again, settings), said_by_queues(golden.root, settings)
    assert ours.keys() == theirs.keys() and len(theirs) > 300
    assert ours == theirs


def said_by_queues(root: Path, settings: StoreSettings) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """Return file and position → offset, size, and the tag code and store time of the addressed unit."""
    said: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for name, content in queue_files(root).items():
        ext = QueueExt(
            (root / name.replace("consumequeue", "consumequeue_ext")).parent, settings.consume_queue_ext_file_bytes
        )
        ext.queue.load()
        for i, (physical_offset, size, code) in enumerate(ENTRY.iter_unpack(content)):
            if size:
                assert is_address(code)
                unit = ext.read(code)
                assert unit is not None
                said[name, i] = (physical_offset, size, unit.tags_code, unit.store_timestamp)
        ext.queue.close()
    return said


def test_dispatching_the_same_log_twice_changes_nothing(tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0-ipv6-crc", tmp_path)
    again = dispatched_again(golden, golden_settings(golden), tmp_path / "again")
    before = queue_files(again)
    (again / "abort").touch()
    with opened(again, golden_settings(golden)):
        pass
    assert queue_files(again) == before


def test_every_put_is_reported_once_and_a_batch_together(tmp_path: Path) -> None:
    seen: list[list[DispatchRequest]] = []
    with opened(tmp_path / "s", on_arrival=seen.append) as store:
        put_all(store, message(TAGS="TagA"), message())
    assert [[one.queue_offset for one in arrivals] for arrivals in seen] == [[0], [1]]
    assert seen[0][0].tags_code == 2598919


# ---- several puts together


def test_what_is_put_together_costs_one_write_per_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[int] = []
    with opened(tmp_path / "s", on_arrival=lambda arrivals: arrived.append(len(arrivals))) as store:
        put_all(store, message(queue_id=0), message(queue_id=1))
        writes: list[int] = []
        real = os.pwrite
        counting = lambda fd, data, at: (writes.append(len(data)), real(fd, data, at))[1]  # noqa: E731
        replace_queue_writes(monkeypatch, counting)
        with store.batch():
            put_all(store, *(message(queue_id=i % 2) for i in range(6)))
            assert arrived == [1, 1]
        assert writes == [] and arrived == [1, 1, 6]
        assert store.queues.write_held()
        assert writes == [80, 80]
        assert store.max_offset("TopicTest", 0) == store.max_offset("TopicTest", 1) == 4


def test_a_read_among_what_is_put_together_sees_it(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, store.batch():
        put_all(store, message(), message())
        assert store.max_offset("TopicTest", 0) == 2
        put_all(store, message())
        assert store.max_offset("TopicTest", 0) == 3


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 0x4, 0x8, 0xC])), max_size=30), st.integers(0, 30))
def test_together_leaves_the_files_that_one_by_one_leaves(tmp_path_factory, puts, cut):
    folder = tmp_path_factory.mktemp("together")
    messages = [message(queue_id=i, sys_flag=flag, TAGS=f"t{i}", KEYS="k") for i, flag in puts]
    with opened(folder / "single", clock=StandingClock()) as store:
        put_all(store, *messages)
    with opened(folder / "together", clock=StandingClock()) as store:
        for part in (messages[:cut], messages[cut:]):
            with store.batch():
                put_all(store, *part)
    single, together = (
        {
            name: digest
            for name, digest in tree(folder / name_of).items()
            if "index" not in name and name != "checkpoint"
        }
        for name_of in ("single", "together")
    )
    assert single == together
    indexes = [
        [path.read_bytes() for path in sorted((folder / name / "index").glob("*"))] for name in ("single", "together")
    ]
    assert indexes[0] == indexes[1]
