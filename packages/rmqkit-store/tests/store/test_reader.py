"""Results of reads, row by row: store.md §16, §17.1."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import tags_code
from rmqkit.protocol.record import decode_record, has_sound_body
from rmqkit.store.message_store import GetResult, GetStatus, MessageStore
from rmqkit.store.queues.consume_queue import ENTRY, ENTRY_BYTES
from rmqkit.testing.clock import StandingClock
from tests.examples import examples
from tests.golden_stores import unpack_golden
from tests.store.stores import golden_settings, message, opened, put_all, small_settings

TAG_A, TAG_B = tags_code("TagA"), tags_code("TagB")
RECORD_BYTES = 200


def sized(store: MessageStore, count: int, *, size: int = RECORD_BYTES, tags: str = "TagA", queue_id: int = 0) -> None:
    """Put messages whose records have this size."""
    empty = len(store.log.record_at(put_all(store, message("Probe", body=b"", TAGS=tags))[0].physical_offset) or b"")
    body = bytes(size - empty - len("TopicTest") + len("Probe"))
    put_all(store, *(message(queue_id=queue_id, body=body, TAGS=tags) for _ in range(count)))


def offsets(found: GetResult) -> list[int]:
    return [decode_record(record).queue_offset for record in found.records]


def roomy(**changes: Any) -> Any:
    return small_settings(commit_log_file_bytes=1 << 20, consume_queue_file_bytes=2000 * 20, **changes)


def test_unknown_and_empty_queues(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        found = store.get("TopicTest", 0, 5, count_max=1)
        assert (found.status, found.next_begin_offset) == (GetStatus.NO_MESSAGE_IN_QUEUE, 0)
        assert (store.max_offset("TopicTest", 0), store.min_offset("TopicTest", 0)) == (0, 0)
        assert store.earliest_store_time("TopicTest", 0) == -1
        assert store.offset_by_time("TopicTest", 0, 5) == 0
        assert not store.is_in_memory("TopicTest", 0, 0)


@pytest.mark.parametrize(
    ("offset", "status", "following"),
    [
        (-1, GetStatus.OFFSET_TOO_SMALL, 0),
        (5, GetStatus.OFFSET_OVERFLOW_ONE, 5),
        (6, GetStatus.OFFSET_OVERFLOW_BADLY, 5),
        (12, GetStatus.OFFSET_OVERFLOW_BADLY, 5),
        (4, GetStatus.FOUND, 5),
    ],
)
def test_offsets_at_the_bounds(tmp_path: Path, offset: int, status: GetStatus, following: int) -> None:
    with opened(tmp_path / "s") as store:
        sized(store, 5)
        found = store.get("TopicTest", 0, offset, count_max=32)
        assert (found.status, found.next_begin_offset, found.min_offset, found.max_offset) == (status, following, 0, 5)


def test_records_are_the_stored_bytes(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        result = put_all(store, message(body=b"hello", TAGS="a"))[0]
        record = store.get("TopicTest", 0, 0, count_max=1).records[0]
        assert record == store.log.record_at(result.physical_offset)
        assert decode_record(record).body == b"hello"


def test_messages_wanted(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        sized(store, 40)
        assert offsets(store.get("TopicTest", 0, 3, count_max=5)) == [3, 4, 5, 6, 7]
        assert offsets(store.get("TopicTest", 0, 3, count_max=0)) == [3]


def test_messages_allowed_from_memory(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        sized(store, 40)
        found = store.get("TopicTest", 0, 0, count_max=1000)
        assert len(found.records) == 32 and found.next_begin_offset == 32


def test_bytes_allowed_from_memory(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy(transfer_bytes_in_memory_max=3 * RECORD_BYTES)) as store:
        sized(store, 10)
        assert len(store.get("TopicTest", 0, 0, count_max=32).records) == 3


def test_first_message_is_always_allowed(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy(transfer_bytes_in_memory_max=1, transfer_bytes_on_disk_max=1)) as store:
        sized(store, 10)
        assert offsets(store.get("TopicTest", 0, 7, count_max=32)) == [7]
        assert offsets(store.get("TopicTest", 0, 7, count_max=32, codes=frozenset([TAG_A]))) == [7]


def test_far_behind_the_end_counts_as_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy(memory_ratio_max=0)) as store:
        sized(store, 40)
        found = store.get("TopicTest", 0, 0, count_max=32)
        assert len(found.records) == 8 and found.suggest_slave
        assert not store.is_in_memory("TopicTest", 0, 0)
    with opened(tmp_path / "s", roomy(memory_ratio_max=0, transfer_bytes_on_disk_max=2 * RECORD_BYTES)) as store:
        assert len(store.get("TopicTest", 0, 0, count_max=32).records) == 2


def test_near_the_end_counts_as_memory(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        sized(store, 4)
        assert store.is_in_memory("TopicTest", 0, 0)
        assert not store.is_in_memory("TopicTest", 0, 4)
        assert not store.get("TopicTest", 0, 0, count_max=32).suggest_slave


def test_read_ends_with_the_queue_file(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:  # 10 entries per file
        sized(store, 15)
        assert store.get("TopicTest", 0, 7, count_max=32).next_begin_offset == 10
        assert store.get("TopicTest", 0, 10, count_max=32).next_begin_offset == 15


def test_read_crosses_log_files(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(consume_queue_file_bytes=4000)) as store:
        sized(store, 60)
        assert offsets(store.get("TopicTest", 0, 10, count_max=32)) == list(range(10, 42))


# ---- tags


def test_wanted_tags_only(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        for tags in ("TagA", "TagB", "TagA", "TagC"):
            put_all(store, message(TAGS=tags))
        put_all(store, message())
        assert offsets(store.get("TopicTest", 0, 0, count_max=32, codes=frozenset([TAG_A]))) == [0, 2]
        assert offsets(store.get("TopicTest", 0, 0, count_max=32, codes=frozenset([TAG_A, TAG_B]))) == [0, 1, 2]
        found = store.get("TopicTest", 0, 0, count_max=32, codes=frozenset([77]))
        assert (found.status, found.next_begin_offset, found.records) == (GetStatus.NO_MATCHED_MESSAGE, 5, [])


def test_scan_continues_after_the_last_match_until_the_pull_is_full(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        for tags in ("TagA", "TagB", "TagA", "TagB", "TagA"):
            put_all(store, message(TAGS=tags))
        assert store.get("TopicTest", 0, 0, count_max=2, codes=frozenset([TAG_A])).next_begin_offset == 3
        assert store.get("TopicTest", 0, 1, count_max=9, codes=frozenset([TAG_B])).next_begin_offset == 5


def test_scan_is_bounded(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy(filter_bytes_max=400)) as store:
        sized(store, 50)
        assert store.get("TopicTest", 0, 0, count_max=5, codes=frozenset([77])).next_begin_offset == 20
        assert store.get("TopicTest", 0, 0, count_max=30, codes=frozenset([77])).next_begin_offset == 30


def test_tags_through_the_extension(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy(enable_consume_queue_ext=True)) as store:
        for tags in ("TagA", "TagB", "TagA"):
            put_all(store, message(TAGS=tags))
        assert offsets(store.get("TopicTest", 0, 0, count_max=32, codes=frozenset([TAG_B]))) == [1]
    with opened(tmp_path / "s", roomy()) as store:  # addresses without the extension: the client filters
        assert offsets(store.get("TopicTest", 0, 0, count_max=32, codes=frozenset([TAG_B]))) == [0, 1, 2]


def test_test_of_the_record_itself(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        put_all(store, *(message(body=bytes([i])) for i in range(6)))
        found = store.get("TopicTest", 0, 0, count_max=32, accept=lambda record: decode_record(record).body[0] % 2 == 1)
        assert offsets(found) == [1, 3, 5] and found.next_begin_offset == 6


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(["TagA", "TagB"]), st.sampled_from([0, 0, 1])),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 39),
    st.integers(1, 40),
    st.integers(300, 3000),
    st.integers(1, 32),
)
@examples(40)
def test_fast_way_equals_the_general_one(
    tmp_path_factory: pytest.TempPathFactory,
    sent: list[tuple[int, str, int]],
    start: int,
    count_max: int,
    bytes_max: int,
    messages_max: int,
) -> None:
    limits = {"transfer_bytes_in_memory_max": bytes_max, "transfer_count_in_memory_max": messages_max}
    with opened(tmp_path_factory.mktemp("s"), small_settings(**limits)) as store:
        put_all(store, *(message(queue_id=at, body=bytes(size), TAGS=tags) for size, tags, at in sent))
        fast = store.get("TopicTest", 0, start, count_max=count_max)
        general = store.get("TopicTest", 0, start, count_max=count_max, accept=lambda record: True)
        assert fast == general
        both = store.get("TopicTest", 0, start, count_max=count_max, codes=frozenset([TAG_A, TAG_B]))
        assert fast == both
        for codes in (None, frozenset([TAG_A])):
            pieces = store.get("TopicTest", 0, start, count_max=count_max, codes=codes)
            assert_joined_alike(store, pieces, start, count_max, codes)


def assert_joined_alike(
    store: MessageStore, pieces: GetResult, start: int, count_max: int, codes: frozenset[int] | None
) -> None:
    """Check that joined records, of the core and of its twin, equal the single records."""
    core = store.reader._select
    for select in {core, None}:
        store.reader._select = select
        joined = store.get("TopicTest", 0, start, count_max=count_max, codes=codes, joins=True)
        assert b"".join(joined.records) == b"".join(pieces.records)
        assert joined.count == pieces.count == len(pieces.records)
        assert (joined.size, joined.next_begin_offset) == (pieces.size, pieces.next_begin_offset)
        assert (joined.status, joined.max_offset) == (pieces.status, pieces.max_offset)
    store.reader._select = core


def test_records_of_batches_are_one_slice_of_the_log(tmp_path: Path) -> None:
    with opened(tmp_path / "s", roomy()) as store:
        put_all(store, *(message(body=bytes([i])) for i in range(6)))
        found = store.get("TopicTest", 0, 1, count_max=4, joins=True)
        assert (found.count, len(found.records)) == (4, 1)
        if store.reader._select is not None:
            assert found.records[0].obj is store.log.queue.files[-1].view.obj
        put_all(store, message(queue_id=1), message(body=b"6"))
        found = store.get("TopicTest", 0, 1, count_max=9, joins=True)
        assert (found.count, len(found.records), isinstance(found.records[0].obj, bytes)) == (6, 1, True)


# ---- deleted records


def test_records_of_deleted_files_are_skipped(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(consume_queue_file_bytes=4000)) as store:
        sized(store, 60)
    (tmp_path / "s" / "commitlog" / f"{4096:020d}").unlink()
    with opened(tmp_path / "s", small_settings(consume_queue_file_bytes=4000)) as store:
        first = store.get("TopicTest", 0, 0, count_max=32)
        assert first.status is GetStatus.FOUND
        gone = [offset for offset in range(60) if offset not in set(_follow(store))]
        assert gone == list(range(gone[0], gone[-1] + 1)) and len(gone) > 10
        found = store.get("TopicTest", 0, gone[0], count_max=5)
        assert found.status is GetStatus.FOUND and offsets(found) == list(range(gone[-1] + 1, gone[-1] + 6))
        last = store.get("TopicTest", 0, gone[0], count_max=32, accept=lambda record: False)
        assert last.status in (GetStatus.NO_MATCHED_MESSAGE, GetStatus.MESSAGE_WAS_REMOVING)


def _follow(store: MessageStore) -> list[int]:
    seen: list[int] = []
    offset = 0
    while offset < store.max_offset("TopicTest", 0):
        found = store.get("TopicTest", 0, offset, count_max=32)
        seen += offsets(found)
        offset = found.next_begin_offset
    return seen


def test_missing_queue_file_leads_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "s") as store:
        sized(store, 35)
    (tmp_path / "s" / "consumequeue" / "TopicTest" / "0" / f"{200:020d}").unlink()
    monkeypatch.setattr("rmqkit.store.message_store.mend_queues", lambda *_: False)
    with opened(tmp_path / "s") as store:
        found = store.get("TopicTest", 0, 13, count_max=32)
        assert (found.status, found.next_begin_offset) == (GetStatus.OFFSET_FOUND_NULL, 20)


def test_only_deleted_records_are_being_removed(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(consume_queue_file_bytes=4000)) as store:
        sized(store, 10)
        sized(store, 40, queue_id=1)
    (tmp_path / "s" / "commitlog" / f"{4096:020d}").unlink()
    with opened(tmp_path / "s", small_settings(consume_queue_file_bytes=4000)) as store:
        found = store.get("TopicTest", 1, 12, count_max=5)
        assert found.status is GetStatus.FOUND
        found = store.get("TopicTest", 1, 12, count_max=1, codes=frozenset([77]))
        assert found.status is GetStatus.NO_MATCHED_MESSAGE


# ---- time


def timed(tmp_path: Path, *times: int) -> MessageStore:
    clock = StandingClock()
    store = MessageStore(tmp_path / "s", small_settings(), clock=clock)
    store.open()
    for time in times:
        clock.ms = time
        put_all(store, message())
    return store


@pytest.mark.parametrize(
    ("timestamp", "lower", "upper"),
    [(0, 0, 0), (10, 0, 0), (11, 1, 0), (20, 1, 3), (25, 4, 3), (30, 4, 4), (31, 5, 4), (99, 5, 4)],
)
def test_offset_by_time(tmp_path: Path, timestamp: int, lower: int, upper: int) -> None:
    store = timed(tmp_path, 10, 20, 20, 20, 30)
    assert store.offset_by_time("TopicTest", 0, timestamp) == lower
    assert store.offset_by_time("TopicTest", 0, timestamp, upper=True) == upper
    assert store.earliest_store_time("TopicTest", 0) == 10
    assert [store.store_time_at("TopicTest", 0, offset) for offset in (-1, 0, 4, 5)] == [-1, 10, 30, -1]
    store.close()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(0, 200))
@examples(40)
def test_offset_by_time_agrees_with_a_plain_search(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], timestamp: int
) -> None:
    times = [sum(steps[: i + 1]) for i in range(len(steps))]
    store = timed(tmp_path_factory.mktemp("t"), *times)
    lower = next((i for i, time in enumerate(times) if time >= timestamp), len(times))
    upper = max((i for i, time in enumerate(times) if time <= timestamp), default=0)
    assert store.offset_by_time("TopicTest", 0, timestamp) == lower
    assert store.offset_by_time("TopicTest", 0, timestamp, upper=True) == upper
    store.close()


@pytest.mark.parametrize("name", ["5.4.0", "5.4.0-ipv6-crc"])
def test_golden_time_queries(tmp_path: Path, name: str) -> None:
    golden = unpack_golden(name, tmp_path)
    with opened(golden.root, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__) as store:
        for query in golden.manifest["offsetByTimestamp"]:
            if query["topic"] == "GoldInnerBatch":
                continue
            place = query["topic"], query["queueId"], query["timestamp"]
            answer = store.offset_by_time(*place), store.offset_by_time(*place, upper=True)
            assert answer == (query["lower"], query["upper"]), query


# ---- entries that point nowhere


def entry_of(root: Path, queue_id: int, number: int) -> tuple[Path, int]:
    """Return the file and the position of a queue entry, with ten entries per file."""
    folder = root / "consumequeue" / "TopicTest" / str(queue_id)
    return folder / f"{number // 10 * 200:020d}", number % 10 * ENTRY_BYTES


def damaged(root: Path, name: str) -> None:
    """Damage the middle of an older queue file or of the log, which a start does not check."""
    path, position = entry_of(root, 0, 5)
    content = path.read_bytes()
    physical_offset, size, code = ENTRY.unpack_from(content, position)
    other_path, other_position = entry_of(root, 1, 5)
    other = other_path.read_bytes()[other_position : other_position + ENTRY_BYTES]
    start = physical_offset - physical_offset % 4096
    log = root / "commitlog" / f"{start:020d}"
    in_log = physical_offset - start
    record = log.read_bytes()[in_log : in_log + size]
    path, position, data = {
        "zeros": (path, position, bytes(ENTRY_BYTES)),
        "negative": (path, position, ENTRY.pack(physical_offset, -1, code)),
        "offset": (path, position, ENTRY.pack(physical_offset ^ 4, size, code)),
        "far offset": (path, position, ENTRY.pack(physical_offset | 1 << 40, size, code)),
        "size": (path, position, ENTRY.pack(physical_offset, size + 8, code)),
        "other queue": (path, position, other),
        "log zeros": (log, in_log, bytes(size)),
        "log place": (log, in_log + 28, struct.pack(">q", 7)),
        "log topic": (log, in_log + record.index(b"TopicTest"), b"topicTest"),
        "log lengths": (log, in_log + 84, struct.pack(">i", 5000)),
        "log body": (log, in_log + 88 + 30, b"\1"),
        "log crc": (log, in_log + 8, bytes(4)),
        "log number": (log, in_log + 20, struct.pack(">q", 5 | 1 << 59)),
        "log next number": (log, in_log + 20, struct.pack(">q", 6)),
    }[name]
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def everything(store: MessageStore, count_max: int, **options: Any) -> list[int]:
    """Return the offsets that a consumer reads if it follows ``next_begin_offset``."""
    got: list[int] = []
    offset = 0
    while offset < store.max_offset("TopicTest", 0):
        found = store.get("TopicTest", 0, offset, count_max=count_max, **options)
        assert found.status in (GetStatus.FOUND, GetStatus.MESSAGE_WAS_REMOVING)
        assert found.next_begin_offset > offset
        got += offsets(found)
        offset = found.next_begin_offset
    return got


@pytest.mark.parametrize(
    "name",
    (
        "zeros,negative,offset,far offset,size,other queue,log zeros,log place,log topic,log lengths,log body,log crc,"
        "log number,log next number"
    ).split(","),
)
def test_an_entry_that_points_nowhere_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with opened(tmp_path / "s") as store:
        for _ in range(25):
            put_all(store, message(body=bytes(60), TAGS="TagA"), message(queue_id=1, body=bytes(60)))
    damaged(tmp_path / "s", name)
    with opened(tmp_path / "s") as store:
        caplog.clear()
        left = [number for number in range(25) if number != 5]
        for count_max in (1, 32):
            assert everything(store, count_max) == left
            assert everything(store, count_max, accept=lambda record: True) == left
        assert everything(store, 32, codes=frozenset({TAG_A})) == left
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 1, "one log line for a queue"
    assert "TopicTest-0: skipping message 5" in said[0] and f"run: rmq store verify {tmp_path / 's'}" in said[0]


def test_what_this_process_wrote_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def is_sound(record: memoryview) -> bool:
        looked_at.append(len(decode_record(record).body))
        return has_sound_body(record)

    monkeypatch.setattr("rmqkit.store.reader.has_sound_body", is_sound)
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(body=bytes(30), TAGS="TagA") for _ in range(5)))
        assert offsets(store.get("TopicTest", 0, 0, count_max=32)) == [0, 1, 2, 3, 4] and not looked_at
    with opened(tmp_path / "s") as store:
        put_all(store, message(body=bytes(31)))
        assert offsets(store.get("TopicTest", 0, 0, count_max=32)) == [0, 1, 2, 3, 4, 5] and looked_at == [30] * 5
        looked_at.clear()
        store.get("TopicTest", 0, 0, count_max=32, codes=frozenset({TAG_B}))
        assert not looked_at, "unwanted bodies are not read"


def test_records_that_all_lie_at_too_low_a_place_are_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broker whose log skips numbers writes such entries."""
    with opened(tmp_path / "s", roomy()) as store:
        places = [one.physical_offset for one in put_all(store, *(message(body=bytes(60)) for _ in range(9)))]
    log = tmp_path / "s" / "commitlog" / f"{0:020d}"
    with open(log, "r+b") as file:
        for number, at in enumerate(places[5:], 5):
            file.seek(at + 20)
            file.write(struct.pack(">q", number + 3))
    with opened(tmp_path / "s", roomy()) as store:
        caplog.clear()
        assert offsets(store.get("TopicTest", 0, 0, count_max=32)) == [0, 1, 2, 3, 4, 8, 9, 10, 11]
        assert [offsets(store.get("TopicTest", 0, at, count_max=1)) for at in (4, 5, 8)] == [[4], [8], [11]]
    assert not [one for one in caplog.records if "skipping message" in one.getMessage()]


def test_light_queues_have_other_numbers_than_their_records(tmp_path: Path) -> None:
    options = {"enable_light_queues": True, "enable_multi_dispatch": True}
    with opened(tmp_path / "s", roomy(**options)) as store:
        put_all(store, *(message() for _ in range(4)), message(INNER_MULTI_DISPATCH="%LMQ%a"))
        put_all(store, message(queue_id=1, INNER_MULTI_DISPATCH="%LMQ%a"))
        last = put_all(store, message(queue_id=1, INNER_MULTI_DISPATCH="%LMQ%a"))[0].physical_offset
        put_all(store, message(queue_id=1, INNER_MULTI_DISPATCH="%LMQ%a"), message("Other"))
    with open(tmp_path / "s" / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(last + 88)
        file.write(b"H")
    with opened(tmp_path / "s", roomy(**options)) as store:
        found = [decode_record(one) for one in store.get("%LMQ%a", 0, 0, count_max=32).records]
        assert [(one.queue_id, one.queue_offset) for one in found] == [(0, 4), (1, 0), (1, 2)]
