"""Broken, full or read-only disks under a store and a broker: the broker gives the documented answer and logs no
traceback, and after repair and restart every acknowledged message exists. Source: store.md §13, §14."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmqkit.errors import StoreError, StoreUnavailable
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.pull import QueryMessageRequest
from rmqkit.protocol.schemas.topics import CreateTopicRequest
from rmqkit.store.files import JsonFile
from rmqkit.store.index import index as message_index
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.offline import check as fsck
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.broker.cluster import Cluster
from tests.faults.refusals import BROKEN, NO_SPACE, READ_ONLY, RefusingDisk
from tests.store.stores import BORN_MS, message, opened, put_all, read_all, small_settings, tree
from tests.waiting import SECONDS, until

pytestmark = pytest.mark.faults


@pytest.fixture
def disk() -> Iterator[RefusingDisk]:
    with RefusingDisk().installed() as disk:
        yield disk


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that the log has one line for each fault of the disk, and no traceback."""
    yield
    assert [record for record in caplog.records if record.exc_info] == []


def wait_until(test: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not test():
        assert time.monotonic() < deadline
        os.sched_yield()


def quiet(**changes: Any) -> StoreSettings:
    """Return settings without periodic background work."""
    return small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000, **changes)


def bodies(store: MessageStore, topic: str = "TopicTest") -> list[bytes]:
    return [bytes(record.body) for record in read_all(store, topic)]


def check_sound(root: Path, settings: StoreSettings, expected: list[bytes]) -> None:
    """Restart and check that all expected messages exist and the store is sound."""
    with opened(root, settings) as store:
        assert bodies(store) == expected
        put_all(store, message(body=b"goes on"))
    report = fsck.verify(root, settings)
    assert report.is_sound, report.findings[:3]


# ---- full disk, one operation after the other

FULL = [
    pytest.param("open", "commitlog", PutStatus.CREATE_MAPPED_FILE_FAILED, id="name of a log file"),
    pytest.param("truncate", "commitlog", PutStatus.CREATE_MAPPED_FILE_FAILED, id="length of a log file"),
    pytest.param("sync_file", "commitlog", PutStatus.CREATE_MAPPED_FILE_FAILED, id="directory of a log file"),
    pytest.param("pwrite", "commitlog", PutStatus.SERVICE_NOT_AVAILABLE, id="record"),
]


@pytest.mark.parametrize(("operation", "path", "status"), FULL)
def test_put_that_finds_no_room_is_refused_and_the_next_continues(
    tmp_path: Path, disk: RefusingDisk, operation: str, path: str, status: PutStatus
) -> None:
    settings, taken = quiet(), []
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(body=b"first"))
        taken.append(b"first")
        disk.refuse(NO_SPACE, operation, path=path)
        refused = []
        for number in range(12):  # the next file is allocated already
            result = store.put(message(body=b"%d" % number + bytes(1500)))
            if result.status is PutStatus.OK:
                taken.append(b"%d" % number + bytes(1500))
            else:
                refused.append(result)
        assert {result.status for result in refused} == {status}
        assert all("errno 28 No space left on device" in result.reason for result in refused)
        disk.repair()
        put_all(store, message(body=b"after"))
        taken.append(b"after")
        assert bodies(store) == taken
        assert store.failure is None
    check_sound(tmp_path / "s", settings, taken)


def test_record_written_in_part_leaves_nothing(tmp_path: Path, disk: RefusingDisk) -> None:
    settings = quiet()
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(body=b"first"))
        disk.refuse(NO_SPACE, "pwrite", path="commitlog", taken_bytes=150)
        result = store.put(message(body=b"x" * 500))
        assert result.status is PutStatus.SERVICE_NOT_AVAILABLE
        disk.repair()
        put_all(store, message(body=b"second"))
        assert bodies(store) == [b"first", b"second"]
    check_sound(tmp_path / "s", settings, [b"first", b"second"])


@pytest.mark.parametrize("taken_bytes", [0, 7])
def test_full_disk_of_a_queue_stops_puts_until_it_has_room(
    tmp_path: Path, disk: RefusingDisk, taken_bytes: int
) -> None:
    settings = quiet(index_entry_count=40)
    stored = [b"first"]
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(body=b"first", KEYS="k"))
        disk.refuse(NO_SPACE, "pwrite", "open", "truncate", path="/consumequeue", taken_bytes=taken_bytes)
        for number in range(50):
            result = store.put(message(body=b"%d" % number, KEYS="k"))
            if result.status is not PutStatus.OK:
                break
            stored.append(b"%d" % number)
        assert result.status is PutStatus.SERVICE_NOT_AVAILABLE
        assert "errno 28 No space left on device" in result.reason
        assert store.put(message()).status is PutStatus.SERVICE_NOT_AVAILABLE
        disk.repair()
        put_all(store, message(body=b"after", KEYS="k"))  # messages that were stored but not indexed come first
        stored.append(b"after")
        assert bodies(store) == stored
        assert len(store.query("TopicTest", "k", 64, 0, 1 << 62).physical_offsets) == len(stored)
    check_sound(tmp_path / "s", settings, stored)


@pytest.mark.parametrize("taken_bytes", [0, 7])
@pytest.mark.parametrize("operations", [("pwrite",), ("open",), ("truncate",), ("reserve",)])
def test_full_disk_of_the_index_leaves_it_behind_and_stops_nothing(
    tmp_path: Path,
    disk: RefusingDisk,
    taken_bytes: int,
    operations: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The index records only the place of the missing entries, and adds them later from several log files."""
    monkeypatch.setattr(message_index, "_WAITING_MAX", 8)
    clock = StandingClock(BORN_MS)
    settings = quiet(index_entry_count=40)
    sent = [b"%d" % number for number in range(150)]
    with opened(tmp_path / "s", settings, clock=clock) as store:
        put_all(store, message(body=b"first", KEYS="k0"))
        disk.refuse(NO_SPACE, *operations, path="/index", taken_bytes=taken_bytes)
        for number, body in enumerate(sent):
            clock.ms += 20
            put_all(store, message(body=body, KEYS=f"k{number} k"))
        index = store._index
        assert index.is_behind and len(index._waiting) <= 8
        tries = disk.count
        assert 1 <= tries <= 8, "one try a second, not one for each message"
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            store.query("TopicTest", "k149", 64, 0, 1 << 62)
        assert bodies(store) == [b"first", *sent]
        disk.repair()
        clock.ms += 2000
        put_all(store, message(body=b"after", KEYS="k150"))
        while store.dispatch():
            pass
        assert not index.is_behind
        for number in range(151):
            assert store.query("TopicTest", f"k{number}", 64, 0, 1 << 62).physical_offsets, number
        found = store.query("TopicTest", "k", 64, 0, 1 << 62).physical_offsets
        assert len(found) == len(set(found)) == 64
    told = [record.levelname for record in caplog.records if "index" in record.name]
    assert told == ["ERROR", "WARNING"]
    check_sound(tmp_path / "s", settings, [b"first", *sent, b"after"])


def test_index_that_is_behind_at_a_stop_is_not_a_clean_one(
    tmp_path: Path, disk: RefusingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(body=b"first", KEYS="k"))
        disk.refuse(NO_SPACE, path="/index")
    assert (tmp_path / "s" / "abort").exists()
    assert "run: rmq store rebuild /" in caplog.text
    disk.repair()
    with opened(tmp_path / "s", quiet()) as store:
        assert store.query("TopicTest", "k", 64, 0, 1 << 62).physical_offsets == [0]


def test_full_disk_of_the_checkpoint_holds_up_nothing(
    tmp_path: Path, disk: RefusingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    settings = quiet()
    with opened(tmp_path / "s", settings) as store:
        disk.refuse(NO_SPACE, path="checkpoint")
        put_all(store, message(body=b"first"))
        for _ in range(2):
            store.flusher.flush_queues()
            put_all(store, message(body=b"goes on"))
        assert store.flusher.behind is not None and store.failure is None
    assert (tmp_path / "s" / "abort").exists()
    assert caplog.text.count("so a start after a crash takes longer") == 1
    disk.repair()
    check_sound(tmp_path / "s", settings, [b"first", b"goes on", b"goes on"])


@pytest.mark.parametrize("operation", ["make_directory", "rename", "open", "pwrite", "sync_file"])
def test_configuration_that_cannot_be_saved_stays_as_it_was(tmp_path: Path, disk: RefusingDisk, operation: str) -> None:
    file = JsonFile(tmp_path / "config" / "topics.json")
    if operation != "make_directory":
        file.save({"number": 1})
    disk.refuse(NO_SPACE, operation, path="config")
    try:
        file.save({"number": 2})
        saved = True
    except StoreUnavailable as error:
        assert "errno 28 No space left on device" in str(error)
        saved = False
    disk.repair()
    value = JsonFile(tmp_path / "config" / "topics.json").load(dict)
    assert saved or value in ({"number": 1}, {"number": 2}, None if operation == "make_directory" else {"number": 1})
    file.save({"number": 3})
    assert file.load(dict) == {"number": 3}


# ---- read-only disk


def test_store_on_a_read_only_disk_does_not_open(tmp_path: Path, disk: RefusingDisk) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(body=b"first"))
    before = tree(tmp_path / "s")
    disk.refuse(READ_ONLY)
    store = MessageStore(tmp_path / "s", quiet())
    with pytest.raises(StoreError, match="errno 30 Read-only file system"):
        store.open()
    disk.repair()
    assert tree(tmp_path / "s") == before
    check_sound(tmp_path / "s", quiet(), [b"first"])


def test_disk_that_becomes_read_only_refuses_puts_and_keeps_reads(tmp_path: Path, disk: RefusingDisk) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(body=b"first"))
        disk.refuse(READ_ONLY)
        result = store.put(message())
        assert result.status is PutStatus.SERVICE_NOT_AVAILABLE
        assert "errno 30 Read-only file system" in result.reason
        assert bodies(store) == [b"first"]
    assert (tmp_path / "s" / "abort").exists(), "a stop that could not write leaves the abort file"
    disk.repair()
    check_sound(tmp_path / "s", quiet(), [b"first"])


@pytest.mark.parametrize("times", [1, 3, None])
@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("operation", ["open", "pwrite", "truncate", "sync_file", "sync_data", "remove", "rename"])
def test_a_start_that_the_disk_refuses_loses_nothing(
    tmp_path: Path, disk: RefusingDisk, operation: str, times: int | None, *, is_clean: bool
) -> None:
    """A start raises one line or succeeds, and the next start succeeds: lock, abort file, notes and recovery."""
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, *(message(body=b"%d" % number, KEYS="k") for number in range(30)))
    if not is_clean:
        (tmp_path / "s" / "abort").touch()
        (tmp_path / "s" / "queueends").unlink(missing_ok=True)
    disk.refuse(NO_SPACE, operation, path=str(tmp_path), times=times)
    store = MessageStore(tmp_path / "s", quiet())
    try:
        store.open()
    except StoreError as error:
        assert "errno 28 No space left on device" in str(error)
    else:
        store.close()
    disk.repair()
    check_sound(tmp_path / "s", quiet(), [b"%d" % number for number in range(30)])


# ---- over the wire


def test_sends_over_a_broken_disk(
    tmp_path: Path, disk: RefusingDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting send gets SYSTEM_ERROR with the errno. Later sends get SERVICE_NOT_AVAILABLE until the disk works
    again.
    """
    monkeypatch.setattr("rmqkit.store.flush._RETRY_MS", 1)
    store = {"flush_disk_type": FlushDiskType.SYNC_FLUSH}

    async def breaks() -> None:
        async with Cluster(tmp_path, store=store) as cluster:
            assert (await cluster.send(body=b"kept")).code == ResponseCode.SUCCESS
            disk.refuse(BROKEN, "sync_data", path="commitlog")
            answers = await asyncio.gather(*(cluster.send(body=b"lost") for _ in range(5)))
            later = await cluster.send(body=b"refused")
            assert later.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert {answer.code for answer in answers} <= {
                ResponseCode.SYSTEM_ERROR,
                ResponseCode.SERVICE_NOT_AVAILABLE,
            }
            waited = [answer for answer in answers if answer.code == ResponseCode.SYSTEM_ERROR]
            assert waited and {answer.remark for answer in waited} == {"flush failed: errno 5 Input/output error"}
            pulled = await cluster.pull()
            assert pulled.code == ResponseCode.SUCCESS and b"kept" in pulled.body and b"lost" not in pulled.body
            disk.repair()
            async with asyncio.timeout(SECONDS):
                while (await cluster.send(body=b"after")).code != ResponseCode.SUCCESS:
                    pass
            pulled = await cluster.pull()
            assert b"kept" in pulled.body and b"after" in pulled.body

    asyncio.run(breaks())
    assert any(
        record.levelno == logging.CRITICAL and "errno 5 Input/output error" in record.getMessage()
        for record in caplog.records
    )
    assert not list(tmp_path.rglob("abort"))


@pytest.mark.parametrize(
    ("operation", "path", "code"),
    [
        ("pwrite", "commitlog", ResponseCode.SERVICE_NOT_AVAILABLE),
        ("truncate", "commitlog", ResponseCode.SYSTEM_ERROR),
    ],
)
def test_sends_over_a_full_disk(
    tmp_path: Path, disk: RefusingDisk, operation: str, path: str, code: ResponseCode
) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, store={"commit_log_file_bytes": 4096}) as cluster:
            assert (await cluster.send(body=b"kept")).code == ResponseCode.SUCCESS
            disk.refuse(NO_SPACE, operation, path=path)
            codes = [(await cluster.send(body=bytes(1500))).code for _ in range(9)]
            assert codes[-1] == code and set(codes) <= {code, ResponseCode.SUCCESS}
            disk.repair()
            assert (await cluster.send(body=b"after")).code == ResponseCode.SUCCESS
            stored = b"".join(
                [(await cluster.pull(offset=offset, count=1)).body for offset in range(codes.count(0) + 2)]
            )
            assert b"kept" in stored and b"after" in stored

    asyncio.run(run())


def test_a_query_over_a_full_disk_of_the_index_says_so(tmp_path: Path, disk: RefusingDisk) -> None:
    """The message with the key may exist: an answer "not found" would be wrong."""
    header = QueryMessageRequest(topic="T", key="k", max_num=8, begin_timestamp=0, end_timestamp=1 << 62)

    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            disk.refuse(NO_SPACE, path="/index")
            assert (await cluster.send(properties="KEYS\x01k\x02")).code == ResponseCode.SUCCESS
            for _ in range(2):
                refused = await cluster.call(RequestCode.QUERY_MESSAGE, header)
                assert refused.code == ResponseCode.SYSTEM_ERROR
                assert "the index is behind the log, so key k is not known" in (refused.remark or "")
            disk.repair()
            found = await cluster.call(RequestCode.QUERY_MESSAGE, header)
            assert found.code == ResponseCode.SUCCESS and b"hello" in found.body

    asyncio.run(run())


def test_tables_that_find_no_room_are_one_line_each_however_often_they_are_tried(
    tmp_path: Path, disk: RefusingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def full() -> None:
        async with Cluster(tmp_path, broker={"offset_persist_interval_ms": 100}) as cluster:
            assert (await cluster.send()).code == ResponseCode.SUCCESS
            disk.refuse(NO_SPACE, path="consumerOffset.json.tmp")
            offsets = cluster.standalone.broker.context.offsets
            offsets.commit("g", "T", 0, 1)
            await until(lambda: disk.count >= 4, "tries")
            disk.repair()
            await until(lambda: not offsets.is_dirty, "a disk with room")

    asyncio.run(full())
    told = [record.getMessage() for record in caplog.records if record.name == "rmqkit.remoting.tasks"]
    path = tmp_path / "config/consumerOffset.json"
    assert told == [f"offset table: a round failed: cannot write {path}: errno 28 No space left on device"]


@pytest.mark.parametrize(("used", "answer"), [(95, ResponseCode.SERVICE_NOT_AVAILABLE), (50, ResponseCode.SUCCESS)])
def test_broker_on_a_disk_over_its_mark_refuses_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, answer: int, caplog: pytest.LogCaptureFixture
) -> None:
    figures = SimpleNamespace(f_blocks=100, f_bfree=100 - used, f_bavail=100 - used, f_frsize=1 << 30)
    monkeypatch.setattr("rmqkit.system.disk.space", lambda path: figures)

    async def start() -> None:
        async with Cluster(tmp_path) as cluster:
            assert (await cluster.send()).code == answer

    asyncio.run(start())
    assert caplog.text.count("disk full, CL: 0.95") == (used == 95)


def test_topic_that_cannot_be_saved_is_refused(tmp_path: Path, disk: RefusingDisk) -> None:
    header = CreateTopicRequest(
        topic="New",
        default_topic="TBW102",
        read_queue_nums=4,
        write_queue_nums=4,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )

    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            disk.refuse(NO_SPACE, path="config")
            refused = await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
            assert refused.code == ResponseCode.SYSTEM_ERROR
            assert "errno 28" in (refused.remark or "")
            disk.repair()
            assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == ResponseCode.SUCCESS

    asyncio.run(run())


# ---- real file systems


def in_mount_namespace(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount. Skip the test if mounting is not allowed."""
    flags = ["-m"] if os.geteuid() == 0 else ["-r", "-m"]
    probe = subprocess.run(["unshare", *flags, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"a private mount is not permitted here: {probe.stderr.strip()}")
    return subprocess.run(
        ["unshare", *flags, "sh", "-ec", script, "sh", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("flush_disk_type", list(FlushDiskType))
def test_small_disk_fills_up_and_gets_room_again(tmp_path: Path, flush_disk_type: FlushDiskType) -> None:
    script = (
        'mount -t tmpfs -o size=4m none "$2"; exec "$1" -c "from tests.faults.test_disk import fill; fill()" "$2" "$3"'
    )
    (tmp_path / "mount").mkdir()
    done = in_mount_namespace(script, sys.executable, str(tmp_path / "mount"), flush_disk_type.value)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.stdout.startswith("refused"), done.stdout


def fill() -> None:
    """Put until a disk is full, free space, and continue. Every stored message must exist, also after a restart."""
    folder, flush_disk_type = Path(sys.argv[1]), FlushDiskType(sys.argv[2])
    settings = small_settings(
        commit_log_file_bytes=65_536, flush_disk_type=flush_disk_type, flush_interval_ms=5, disk_warning_percent=90
    )
    filler = folder / "filler"
    taken: list[bytes] = []
    with opened(folder / "s", settings) as store:
        filler.write_bytes(bytes(3_650_000))  # after the start, which needs 1 MiB

        def put(number: int) -> PutStatus:
            body = b"%d " % number + bytes(number % 3000)
            result = store.put(message(body=body, KEYS=f"k{number}"))
            if result.status is PutStatus.OK:
                taken.append(body)
                store.request_flush()
            return result.status

        statuses = [put(number) for number in range(1000)]
        refused = {status for status in statuses if status is not PutStatus.OK}
        assert refused and refused <= {PutStatus.SERVICE_NOT_AVAILABLE, PutStatus.CREATE_MAPPED_FILE_FAILED}, refused
        filler.unlink()
        assert put(1000) is PutStatus.OK
        wait_until(lambda: store.durable_offset == store.max_physical_offset)
        assert bodies(store) == taken
    with opened(folder / "s", settings) as store:
        assert bodies(store) == taken
    report = fsck.verify(folder / "s", settings)
    assert report.is_sound, report.findings[:3]
    print("refused", len([status for status in statuses if status is not PutStatus.OK]), "of", len(statuses))


def test_store_on_a_disk_mounted_read_only(tmp_path: Path) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(body=b"first"))
    before = tree(tmp_path / "s")
    script = 'mount --bind "$2" "$2"; mount -o remount,ro,bind "$2"; exec "$1" -m rmqkit broker --help >/dev/null; '
    script = (
        'mount --bind "$2" "$2"; mount -o remount,ro,bind "$2"; '
        'exec "$1" -c "from tests.faults.test_disk import open_read_only; open_read_only()" "$2"'
    )
    done = in_mount_namespace(script, sys.executable, str(tmp_path / "s"))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "errno 30 Read-only file system" in done.stdout
    assert tree(tmp_path / "s") == before
    check_sound(tmp_path / "s", quiet(), [b"first"])


def open_read_only() -> None:
    """Try to open a store, and print the reason for the failure."""
    with contextlib.suppress(StoreError) as _:
        try:
            MessageStore(Path(sys.argv[1]), quiet()).open()
        except StoreError as error:
            print(error)
            raise
