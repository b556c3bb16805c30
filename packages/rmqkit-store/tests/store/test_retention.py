"""Retention: time, choice and effects of deletions, and full disks. store.md §4.4, §4.5, §7.4, §15."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rmqkit.errors import SettingsError
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import encode_record
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.message_store import GetStatus, MessageStore, PutStatus
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.retention import Cause, Decision, DiskUse, Retention, decide, parse_hours, used_percent
from rmqkit.store.settings import StoreSettings
from rmqkit.system import disk
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import golden_manifest, unpack_golden
from tests.open_files import open_files
from tests.store.inside import next_file_of
from tests.store.stores import (
    HOST,
    golden_settings,
    message,
    opened,
    put_all,
    read_all,
    small_settings,
    tree,
)
from tests.waiting import SECONDS

NOON = int(datetime(2027, 1, 15, 12, 30).timestamp()) * 1000
FOUR = int(datetime(2027, 1, 15, 4, 59, 59).timestamp()) * 1000
HOUR_SECONDS = 3600
IDLE, FULL = 20, 91
TOPIC = "TopicTest"


class Disk:
    """The usage of the disks in percent, by directory name."""

    def __init__(self, percent: int = IDLE, **by_name: int) -> None:
        self.percent = percent
        self.by_name = by_name

    def __call__(self, path: Path) -> int:
        return self.by_name.get(path.name, self.percent)


def filled(root: Path, clock: StandingClock, disk: Disk, **changes: Any) -> AbstractContextManager[MessageStore]:
    """Open a store with 4 messages per log file, 10 per queue file and 8 per index file."""
    settings = small_settings(index_entry_count=9, **changes)
    return opened(root, settings, clock=clock, disk_used_percent=disk)


def fill(store: MessageStore, count: int = 40) -> None:
    """Put messages, each with its number as key and in its body."""
    put_all(store, *(message(body=bytes([i]) * 900, KEYS=f"k{i}") for i in range(count)))
    assert offsets_of(store, 0) == [0]


def age(store: MessageStore, clock: StandingClock, expired: int) -> None:
    """Make the first log files 73 hours old and the others one hour. The file created ahead exists."""
    if next_file_of(store.log)._made is not None:
        next_file_of(store.log)._made.result(SECONDS)
    for i, path in enumerate(sorted((store.root / "commitlog").iterdir())):
        seconds = clock.ms // 1000 - (73 if i < expired else 1) * HOUR_SECONDS
        os.utime(path, (seconds, seconds))


def offsets_of(store: MessageStore, key: int) -> list[int]:
    return store.query(TOPIC, f"k{key}", 1, 0, 1 << 62).physical_offsets


def starts(store: MessageStore, folder: str) -> list[int]:
    return sorted(int(path.name) for path in (store.root / folder).iterdir())


# ---- deciding


@pytest.mark.parametrize(
    ("log", "queues", "is_hour", "is_requested", "expected"),
    [
        (0, 0, False, False, Decision()),
        (75, 75, False, False, Decision()),
        (75, 75, True, True, Decision(Cause.HOUR)),
        (75, 75, False, True, Decision(Cause.REQUEST)),
        (76, 0, False, False, Decision(Cause.DISK)),
        (0, 76, True, False, Decision(Cause.DISK)),
        (85, 85, False, False, Decision(Cause.DISK)),
        (86, 0, False, False, Decision(Cause.DISK, is_forced=True)),
        (0, 86, False, False, Decision(Cause.DISK, is_forced=True)),
        (90, 90, False, False, Decision(Cause.DISK, is_forced=True)),
        (91, 0, False, False, Decision(Cause.DISK, is_forced=True, is_log_disk_full=True)),
        (0, 91, False, False, Decision(Cause.DISK, is_forced=True, is_queue_disk_full=True)),
    ],
)
def test_ratios_hours_and_requests_decide(
    log: int, queues: int, is_hour: bool, is_requested: bool, expected: Decision
) -> None:
    use = DiskUse(log, queues, 0)
    assert decide(StoreSettings(), use, is_hour=is_hour, is_requested=is_requested) == expected


@pytest.mark.parametrize(("percent", "is_full"), [(91, True), (90, True), (86, True), (85, False), (20, False)])
def test_full_disk_stays_full_until_it_is_below_the_forcible_ratio(percent: int, is_full: bool) -> None:
    before = Decision(Cause.DISK, is_forced=True, is_log_disk_full=True)
    use = DiskUse(percent, IDLE, IDLE)
    assert decide(StoreSettings(), use, is_hour=False, is_requested=False, before=before).is_disk_full is is_full


@pytest.mark.parametrize(
    ("key", "value", "percent", "expected"),
    [
        ("disk_warning_percent", 99, 91, Decision(Cause.DISK, is_forced=True, is_log_disk_full=True)),
        ("disk_warning_percent", 1, 35, Decision()),
        ("disk_clean_forcibly_percent", 99, 86, Decision(Cause.DISK, is_forced=True)),
        ("disk_clean_forcibly_percent", 1, 30, Decision()),
        ("disk_clean_forcibly_percent", 1, 31, Decision(Cause.DISK, is_forced=True)),
        ("disk_used_percent_max", 1, 10, Decision()),
        ("disk_used_percent_max", 1, 11, Decision(Cause.DISK)),
        ("clean_forcibly", False, 91, Decision(Cause.DISK, is_log_disk_full=True)),
    ],
)
def test_ratios_are_kept_within_their_bounds(key: str, value: int, percent: int, expected: Decision) -> None:
    changes: dict[str, Any] = {key: value}
    settings = StoreSettings(**changes)
    assert decide(settings, DiskUse(percent, 0, 0), is_hour=False, is_requested=False) == expected


@pytest.mark.parametrize(("text", "hours"), [("04", {4}), ("4; 05;23", {4, 5, 23}), ("00;", {0}), ("", set())])
def test_hours_are_read(text: str, hours: set[int]) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["24", "-1", "four", "04,05", "٤"])
def test_hours_that_are_none_keep_the_store_from_being_made(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=f"^deleteWhen={text}: '{text}' must be an hour from 00 to 23"):
        MessageStore(tmp_path / "s", small_settings(delete_when=text))


def test_disk_of_a_directory_to_be_made_is_that_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        return os.statvfs_result((4096, 4096, 1000, 301, 200, 0, 0, 0, 0, 255))

    monkeypatch.setattr("rmqkit.system.disk.space", statvfs)
    assert used_percent(tmp_path / "a" / "b") == 78, "699 of 899 blocks, 77.75 %"
    assert asked == [tmp_path]


# ---- by age


def test_expired_files_go_in_the_hour_and_everything_follows(tmp_path: Path) -> None:
    clock = StandingClock(NOON)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        age(store, clock, expired=6)
        before = tree(store.root)
        idle = store.retention_round()
        assert (idle.decision.cause, idle.log_files, tree(store.root)) == (Cause.NONE, 0, before)
        clock.ms = FOUR
        age(store, clock, expired=6)
        done = store.retention_round()
        assert (done.decision.cause, done.log_files, done.queue_files, done.index_files) == (Cause.HOUR, 6, 2, 3)
        assert (store.min_physical_offset, store.min_offset(TOPIC, 0)) == (6 * 4096, 24)
        assert starts(store, "commitlog")[0] == 6 * 4096
        assert starts(store, "consumequeue/TopicTest/0") == [400, 600]
        assert len(starts(store, "index")) == 2
        assert (offsets_of(store, 0), offsets_of(store, 24)) == ([], [6 * 4096])
        assert [record.body[0] for record in read_all(store, TOPIC)] == list(range(24, 40))
        assert store.retention_round().log_files == 0


def test_reader_below_the_new_start_is_reported_where_to_continue(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        age(store, clock, expired=3)
        store.retention_round()
        found = store.get(TOPIC, 0, 11, count_max=32)
        assert (found.status, found.next_begin_offset, found.min_offset) == (GetStatus.OFFSET_TOO_SMALL, 12, 12)
        assert store.get(TOPIC, 0, 12, count_max=1).status is GetStatus.FOUND


def test_reader_of_a_deleted_file_reads_on(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        records = store.get(TOPIC, 0, 0, count_max=4).records
        expected = [bytes(record) for record in records]
        age(store, clock, expired=1)
        assert store.retention_round().log_files == 1
        assert store.log.record_at(0) is None
        assert [bytes(record) for record in records] == expected


def test_first_file_that_is_not_expired_ends_the_round(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        age(store, clock, expired=10)
        path = store.root / "commitlog" / f"{2 * 4096:020d}"
        seconds = FOUR // 1000 - 72 * HOUR_SECONDS
        os.utime(path, (seconds + 1, seconds + 1))
        assert store.retention_round().log_files == 2
        os.utime(path, (seconds, seconds))
        assert store.retention_round().log_files == 7, "the newest stays, however old it is"
        assert store.min_offset(TOPIC, 0) == 36


def test_file_that_somebody_deleted_is_expired(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        age(store, clock, expired=0)
        (store.root / "commitlog" / f"{0:020d}").unlink()
        assert store.retention_round().log_files == 1


def test_file_that_cannot_be_deleted_stays_readable_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = disk.remove

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path.name == f"{2 * 4096:020d}":
            raise OSError(30, "Read-only file system")
        remove(path, missing_ok=missing_ok)

    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        age(store, clock, expired=4)
        monkeypatch.setattr(disk, "remove", refuse)
        with pytest.raises(OSError, match="Read-only"):
            store.retention_round()
        monkeypatch.undo()
        assert (store.min_physical_offset, store.min_offset(TOPIC, 0)) == (2 * 4096, 8)
        assert store.log.record_at(2 * 4096) is not None
        assert [store.retention_round().log_files, store.min_offset(TOPIC, 0)] == [2, 16]


def test_request_deletes_at_any_hour_for_20_rounds(tmp_path: Path) -> None:
    clock = StandingClock(NOON)
    with filled(tmp_path / "s", clock, Disk(), delete_file_batch_max=1) as store:
        fill(store, 100)
        age(store, clock, expired=25)
        store.retention.request()
        rounds = [store.retention_round() for _ in range(21)]
        assert [one.decision.cause for one in rounds] == [Cause.REQUEST] * 20 + [Cause.NONE]
        assert [one.log_files for one in rounds] == [1] * 20 + [0]


def test_bounds_are_the_same_after_a_restart(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        put_all(store, message("Old", body=bytes(900)))
        put_all(store, *(message(body=bytes([i]) * 900) for i in range(40)))
        age(store, clock, expired=5)
        assert store.retention_round().log_files == 5
        bounds = [(store.min_offset(name, 0), store.max_offset(name, 0)) for name in ("Old", TOPIC)]
        log_bounds = store.min_physical_offset, store.max_physical_offset
        assert bounds == [(1, 1), (19, 40)]
        assert store.get("Old", 0, 0, count_max=1).status is GetStatus.OFFSET_TOO_SMALL
    with filled(tmp_path / "s", clock, Disk()) as store:
        assert [(store.min_offset(name, 0), store.max_offset(name, 0)) for name in ("Old", TOPIC)] == bounds
        assert (store.min_physical_offset, store.max_physical_offset) == log_bounds
        assert store.put(message("Old")).queue_offset == 1, "the numbering goes on"


def test_files_a_crash_left_behind_go_with_the_next_round_that_deletes(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
    for path in sorted((tmp_path / "s" / "commitlog").iterdir())[:6]:
        path.unlink()
    with filled(tmp_path / "s", clock, Disk()) as store:
        age(store, clock, expired=0)
        assert store.min_offset(TOPIC, 0) == 24
        done = store.retention_round()
        assert (done.log_files, done.queue_files, done.index_files) == (0, 2, 3)
        assert store.min_offset(TOPIC, 0) == 24


def test_extension_files_follow(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    sizes = {"enable_consume_queue_ext": True, "consume_queue_ext_file_bytes": 104}
    with filled(tmp_path / "s", clock, Disk(), **sizes) as store:
        fill(store)
        age(store, clock, expired=6)
        units = starts(store, "consumequeue_ext/TopicTest/0")
        assert units == list(range(0, 832, 104)), "five units of 20 bytes a file, and 4 bytes free"
        done = store.retention_round()
        kept = starts(store, "consumequeue_ext/TopicTest/0")
        assert done.queue_files == 2 + len(units) - len(kept)
        assert kept == units[4:], "unit 24 is the last of the fifth file"
        assert store.get(TOPIC, 0, 24, count_max=32, codes=frozenset({0})).status is GetStatus.FOUND


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        put_all(store, *(message(f"T{i % 20}", body=bytes(300)) for i in range(300)))
    with filled(tmp_path / "s", clock, Disk()) as store:
        age(store, clock, expired=5)
        before = len(open_files(tmp_path))
        assert store.retention_round().log_files == 5
        store.retention.close()  # waits for the thread
        assert len(open_files(tmp_path)) <= before


# ---- by disk use


def test_above_the_forcible_ratio_files_go_of_any_age(tmp_path: Path) -> None:
    clock, disk = StandingClock(NOON), Disk(86)
    with filled(tmp_path / "s", clock, disk, delete_file_batch_max=4) as store:
        fill(store)
        age(store, clock, expired=1)
        assert [store.retention_round().log_files for _ in range(4)] == [4, 4, 1, 0]
        assert (store.min_offset(TOPIC, 0), store.retention.decision.is_disk_full) == (36, False)
        put_all(store, message())


def test_without_force_only_expired_files_go(tmp_path: Path) -> None:
    clock, disk = StandingClock(NOON), Disk(FULL)
    with filled(tmp_path / "s", clock, disk, clean_forcibly=False) as store:
        fill(store)
        age(store, clock, expired=1)
        assert [store.retention_round().log_files for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("full", ["commitlog", "consumequeue"])
def test_full_disk_refuses_puts_until_a_round_finds_room(tmp_path: Path, full: str) -> None:
    disk = Disk(39, **{full: FULL})
    with filled(tmp_path / "s", StandingClock(NOON), disk) as store:
        put_all(store, message())
        store.retention_round()
        refused = store.put(message())
        use = "CL: 0.91 CQ: 0.39" if full == "commitlog" else "CL: 0.39 CQ: 0.91"
        assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE
        assert refused.reason == (
            f"disk full, {use} INDEX: 0.39: refused above diskSpaceWarningLevelRatio 0.90, "
            "accepted again at 0.85: free space on the disk"
        )
        assert store.put_batch(message()).status is PutStatus.SERVICE_NOT_AVAILABLE
        assert (store.retention.decision.is_disk_full, store.is_writable) == (True, False)
        assert len(read_all(store, TOPIC)) == 1
        disk.by_name[full] = 86
        assert store.retention_round().decision.is_disk_full, "between the ratios it stays as it is"
        disk.by_name.clear()
        assert store.put(message()).status is PutStatus.SERVICE_NOT_AVAILABLE, "measured by rounds alone"
        store.retention_round()
        assert (store.retention.decision.is_disk_full, store.is_writable) == (False, True)
        put_all(store, message())


# ---- the log alone


def log_of_files(root: Path, settings: StoreSettings, count: int) -> CommitLog:
    """Return a log of this number of full files and one further record."""
    log = CommitLog(root, settings)
    log.resume()
    for _ in range(count * 4 + 1):
        at = log.place(1000)
        log.append(encoded(at), NOON)
    return log


def encoded(physical_offset: int) -> bytes:
    record = encode_record(
        topic=b"T",
        queue_id=0,
        flag=0,
        queue_offset=0,
        physical_offset=physical_offset,
        sys_flag=0,
        born_timestamp=NOON,
        born_host=HOST,
        store_timestamp=NOON,
        store_host=HOST,
        reconsume_times=0,
        prepared_transaction_offset=0,
        body=bytes(1000 - 92),
        properties=encode_properties({}),
    )
    assert len(record) == 1000
    return record


@pytest.mark.parametrize(
    ("dispatched_offset", "count"), [(0, 0), (4095, 0), (4096, 1), (3 * 4096 - 1, 2), (1 << 60, 5)]
)
def test_records_that_are_not_dispatched_stay(tmp_path: Path, dispatched_offset: int, count: int) -> None:
    settings = small_settings()
    log, queues = log_of_files(tmp_path, settings, 5), ConsumeQueues(tmp_path, settings)
    retention = Retention(tmp_path, log, queues, None, settings, StandingClock(NOON), Disk(FULL))
    assert retention.run(dispatched_offset).log_files == count
    assert log.min_offset == count * 4096
    log.close()


def test_least_used_log_directory_counts_and_full_ones_get_no_new_files(tmp_path: Path) -> None:
    settings = small_settings(store_path_commit_log=f"{tmp_path}/a,{tmp_path}/b")
    log, queues = CommitLog(tmp_path, settings), ConsumeQueues(tmp_path, settings)
    disk = Disk(IDLE, a=FULL, b=40)
    retention = Retention(tmp_path, log, queues, None, settings, StandingClock(NOON), disk)
    assert retention.run(0).use == DiskUse(40, IDLE, IDLE)
    assert [log.queue.path_of(start).parent.name for start in (0, 4096, 8192)] == ["b", "b", "b"]
    disk.by_name["b"] = 86
    assert retention.run(0).decision == Decision(Cause.DISK, is_forced=True)
    assert [log.queue.path_of(start).parent.name for start in (0, 4096, 8192)] == ["a", "b", "a"], "no better one"


def test_disk_that_cannot_be_asked_changes_nothing(tmp_path: Path) -> None:
    def broken(path: Path) -> int:
        raise OSError(5, "Input/output error")

    with opened(tmp_path / "s", clock=StandingClock(FOUR), disk_used_percent=broken) as store:
        put_all(store, message())
        with pytest.raises(OSError, match="Input/output error"):
            store.retention_round()
        put_all(store, message())


# ---- as real brokers do it


def test_golden_store_that_loses_two_files_reads_as_a_real_broker_reads_it(tmp_path: Path) -> None:
    golden, retained = unpack_golden("5.4.0", tmp_path), golden_manifest("5.4.0-retained")
    batch_topics = {path.name for path in (golden.root / "batchconsumequeue").iterdir()}
    for path in sorted((golden.root / "commitlog").iterdir())[:2]:
        os.utime(path, (0, 0))
    with opened(
        golden.root,
        golden_settings(golden, fileReservedTime="400000"),
        clock=StandingClock(FOUR),
        is_batch_topic=batch_topics.__contains__,
        disk_used_percent=Disk(),
    ) as store:
        assert store.retention_round().log_files == 2
        assert store.min_physical_offset == int(retained["commitLogMinOffset"])
        # Left out: the real broker went on to deliver to GoldDelay, and it had deleted no queue files, so that
        # it looked for the start of GoldInnerBatch in a file which is gone here. Nothing in that queue is readable.
        queues = [one for one in retained["queues"] if one["topic"] not in ("GoldDelay", "GoldInnerBatch")]
        assert [bounds(store, one["topic"], one["queueId"]) for one in queues] == [
            (one["minOffset"], one["maxOffset"], one["earliestMsgStoreTime"]) for one in queues
        ]
        assert sum(one["minOffset"] > 0 for one in queues) == 13


def bounds(store: MessageStore, topic: str, queue_id: int) -> tuple[int, int, int]:
    return (
        store.min_offset(topic, queue_id),
        store.max_offset(topic, queue_id),
        store.earliest_store_time(topic, queue_id),
    )


# ---- deleted files


def test_bytes_of_deleted_files_are_given_back_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's own close must not be the last one, because the kernel takes long to free 1 GiB."""
    closed: set[str] = set()
    close, clock = os.close, StandingClock(FOUR)

    def close_and_tell(descriptor: int) -> None:
        if os.fstat(descriptor).st_nlink == 0:
            closed.add(threading.current_thread().name)
        close(descriptor)

    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        held = store.get(TOPIC, 0, 0, count_max=1).records[0]
        before = bytes(held)
        age(store, clock, expired=4)
        monkeypatch.setattr("rmqkit.system.disk.close", close_and_tell)
        assert store.retention_round().log_files == 4
        store.retention.close()
        monkeypatch.undo()
        assert closed == {"store-delete"}
        assert bytes(held) == before, "a reader's slice outlives the file"


def test_blocks_of_deleted_files_are_free_after_the_store_is_closed(tmp_path: Path) -> None:
    clock = StandingClock(FOUR)
    with filled(tmp_path / "s", clock, Disk()) as store:
        fill(store)
        age(store, clock, expired=4)
        assert store.retention_round().log_files == 4
    assert open_files(tmp_path) == []
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
