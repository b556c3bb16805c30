"""A slave's log: a master's bytes in parts of any size, and the dispatch of their records. store.md §3.6, §11, §21.

Literals are Apache's: bytes that its 5.4.0 master sent, and the logs and queues of the golden stores.
"""

from __future__ import annotations

import gzip
import itertools
import mmap
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmqkit.errors import LogDiverged, StoreError, StoreUnavailable
from rmqkit.protocol.record import BLANK_BYTES, BLANK_MAGIC, BatchEntry, decode_record, encode_batch
from rmqkit.store import replica as replication
from rmqkit.store.message_store import DispatchRequest, MessageStore, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.system import disk as system_disk
from rmqkit.testing.clock import StandingClock
from tests.examples import examples, many
from tests.faults.refusals import BROKEN, NO_SPACE, RefusingDisk
from tests.store.offline.test_golden_rebuild import GOLDEN, IS_BATCH, contents, queues_with_bitmaps, unpacked
from tests.store.stores import (
    HOST_V6,
    copy_store,
    message,
    opened,
    put_all,
    read_all,
    small_settings,
)
from tests.store.test_flush import Rounds

FILE_BYTES = 4096
Part = tuple[int, bytes]
QUIET = {"flush_interval_ms": 3_600_000, "queue_flush_interval_ms": 3_600_000}

both_paths = pytest.mark.parametrize("is_bulk", [False, True], ids=["one by one", "bulk"])
slow = examples(30, suppress=[HealthCheck.function_scoped_fixture])
slower = settings(slow, max_examples=many(6))


@pytest.fixture(autouse=True)
def path_of_dispatch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the bulk or the single dispatch of records for any number of waiting bytes."""
    is_bulk = request.node.callspec.params.get("is_bulk", False) if hasattr(request.node, "callspec") else False
    monkeypatch.setattr(replication, "_BULK_FROM_BYTES", 1 if is_bulk else 1 << 40)


def quiet(**changes: Any) -> StoreSettings:
    """Return settings with small files and without periodic flushes."""
    return small_settings(**(QUIET | changes))


def parts_of(master: MessageStore, part_bytes: int = 1 << 20, start: int | None = None) -> list[Part]:
    """Return the parts of a master's log as the master sends them to a slave."""
    at = max(0, master.min_physical_offset) if start is None else start
    parts: list[Part] = []
    while part := master.log_part(at, part_bytes):
        parts.append((at, bytes(part)))
        at += len(part)
    return parts


def split(parts: Iterable[Part], sizes: Iterator[int]) -> Iterator[Part]:
    """Return the parts cut into smaller ones."""
    for at, data in parts:
        done = 0
        while done < len(data):
            size = next(sizes)
            yield at + done, data[done : done + size]
            done += size


def append_all(slave: MessageStore, parts: Iterable[Part], *, dispatching: bool = False) -> None:
    for at, data in parts:
        slave.replica.append(at, data)
        if dispatching:
            slave.dispatch()


def dispatch_all(slave: MessageStore) -> None:
    while slave.dispatch():
        pass


def everything(store: MessageStore) -> dict[tuple[str, int], list[Any]]:
    return {place: read_all(store, *place) for place in sorted(store.queue_ends())}


def fill(store: MessageStore, count: int = 40) -> None:
    """Put messages of all lengths into several files, some with an IPv6 host, some in batches."""
    for i in range(count):
        host: dict[str, Any] = {"born_host": HOST_V6} if i % 5 == 0 else {}
        put_all(
            store, message(queue_id=i % 3, body=bytes([i]) * (i * 37 % 700), TAGS=f"t{i % 4}", KEYS=f"k{i}", **host)
        )
    members = [BatchEntry(bytes([i]) * 50, b"UNIQ_KEY\x01%d\x02" % i, 0) for i in range(8)]
    assert store.put_batch(message(body=encode_batch(members))).status is PutStatus.OK


# ---- bytes of Apache's master


def golden_frames(name: str) -> list[Part]:
    raw = gzip.decompress((GOLDEN / f"ha-5.4.0-from-{name}.bin.gz").read_bytes())
    frames, at = [], 0
    while at < len(raw):
        offset, size = struct.unpack_from(">qi", raw, at)
        frames.append((offset, raw[at + 12 : at + 12 + size]))
        at += 12 + size
    return frames


GOLDEN_END = 401_770
"""Behind it the master went on; the golden store ends here."""


def test_empty_slave_gets_the_newest_file_of_apaches_master(tmp_path: Path) -> None:
    golden, store_settings = unpacked("5.4.0", tmp_path)
    frames = golden_frames("0")
    assert frames[0][0] == 393_216 and frames[-1] == (402_469, b"")
    with opened(tmp_path / "slave", store_settings, is_batch_topic=IS_BATCH, is_replica=True) as slave:
        append_all(slave, frames)
        dispatch_all(slave)
        assert (slave.min_physical_offset, slave.max_physical_offset) == (393_216, 402_469)
        assert slave.dispatched_offset == 402_469
        found = {record.physical_offset: record for records in simple(slave) for record in records}
    with opened(golden, store_settings, is_batch_topic=IS_BATCH) as master:
        theirs = {r.physical_offset: r for records in simple(master) for r in records if r.physical_offset >= 393_216}
    assert len(theirs) > 20
    assert {at: record for at, record in found.items() if at < GOLDEN_END} == theirs
    assert [path.name for path in (tmp_path / "slave/commitlog").iterdir()] == ["00000000000000393216"]


def simple(store: MessageStore) -> Iterator[list[Any]]:
    for topic, queue_id in store.queue_ends():
        if not IS_BATCH(topic):
            yield read_all(store, topic, queue_id)


@both_paths
@slower
@given(sizes=st.lists(st.integers(300, 40_000), min_size=1), often=st.integers(1, 9))
def test_parts_of_apaches_master_make_its_queues(
    is_bulk: bool, sizes: list[int], often: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("golden")
    golden, store_settings = unpacked("5.4.0", tmp_path)
    log = [(int(path.name), path.read_bytes()) for path in sorted((golden / "commitlog").iterdir())]
    ahead = [(at, data[: 300_000 - at]) for at, data in log if at < 300_000]
    frames = [(at, data[: GOLDEN_END - at]) for at, data in golden_frames("300000")]
    with opened(tmp_path / "slave", store_settings, is_batch_topic=IS_BATCH, is_replica=True) as slave:
        for i, part in enumerate(split([*ahead, *frames], itertools.cycle(sizes))):
            slave.replica.append(*part)
            if i % often == 0:
                slave.dispatch()
        assert slave.max_physical_offset == GOLDEN_END
    compare(golden, tmp_path / "slave")
    shutil.rmtree(tmp_path)


@both_paths
@pytest.mark.parametrize("name", ["4.9.4", "5.4.0-ipv6-crc", "5.4.0-unclean"])
def test_logs_of_apaches_masters_make_their_queues(name: str, is_bulk: bool, tmp_path: Path) -> None:
    golden, store_settings = unpacked(name, tmp_path / "golden")
    with opened(unpacked(name, tmp_path / "copy")[0], store_settings, is_batch_topic=IS_BATCH) as master:
        parts = parts_of(master, 1000)
    with opened(tmp_path / "slave", store_settings, is_batch_topic=IS_BATCH, is_replica=True) as slave:
        append_all(slave, parts)
    compare(golden, tmp_path / "slave", with_index="unclean" not in name)


def compare(golden: Path, slave: Path, *, with_index: bool = True) -> None:
    """Compare all files that a log determines, byte for byte."""
    filtered = queues_with_bitmaps(golden)
    for folder in ("consumequeue", "consumequeue_ext", "batchconsumequeue"):
        theirs = {path: raw for path, raw in contents(golden, folder).items() if not is_of(path, filtered)}
        assert {path: raw for path, raw in contents(slave, folder).items() if not is_of(path, filtered)} == theirs
    if with_index:
        assert list(contents(slave, "index").values()) == list(contents(golden, "index").values())


def is_of(path: str, queues: set[str]) -> bool:
    return "/".join(Path(path).parts[1:3]) in queues


# ---- a master of our own


@both_paths
@slow
@given(
    lengths=st.lists(st.integers(0, 1500), max_size=30),
    sizes=st.lists(st.integers(1, 5000), min_size=1),
    often=st.integers(1, 9),
    mode=st.sampled_from(FlushDiskType),
)
def test_slave_is_its_masters_equal(
    is_bulk: bool, lengths: list[int], sizes: list[int], often: int, mode: FlushDiskType, tmp_path_factory: Any
) -> None:
    tmp_path: Path = tmp_path_factory.mktemp("pair")
    store_settings = quiet(flush_disk_type=mode)
    with opened(tmp_path / "master", quiet()) as master:
        put_all(master, *(message(queue_id=n % 2, body=bytes(n), KEYS=str(n)) for n in lengths))
        with opened(tmp_path / "slave", store_settings, is_replica=True) as slave:
            for i, part in enumerate(split(parts_of(master), itertools.cycle(sizes))):
                slave.replica.append(*part)
                if i % often == 0:
                    slave.dispatch()
                assert slave.dispatched_offset <= (slave.max_physical_offset if mode.value[0] == "A" else 0)
        assert slave.max_physical_offset == master.max_physical_offset
    for folder in ("consumequeue", "index"):
        assert list(contents(tmp_path / "slave", folder).values()) == list(
            contents(tmp_path / "master", folder).values()
        )
    for path, raw in contents(tmp_path / "slave", "commitlog").items():
        assert (tmp_path / "master" / path).read_bytes() == raw
    shutil.rmtree(tmp_path)


@both_paths
def test_slave_opens_as_master_and_continues(is_bulk: bool, tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        fill(master)
        parts, theirs, ends = parts_of(master), everything(master), master.queue_ends()
    with opened(tmp_path / "slave", is_replica=True) as slave:
        append_all(slave, parts)
        dispatch_all(slave)
        assert everything(slave) == theirs
    assert not (tmp_path / "slave/abort").exists()
    with opened(tmp_path / "slave") as promoted:
        assert everything(promoted) == theirs
        added = put_all(promoted, message(queue_id=2, body=b"goes on"))[0]
        assert added.queue_offset == ends["TopicTest", 2]
        behind = parts_of(promoted, start=parts[-1][0] + len(parts[-1][1]))
    with opened(tmp_path / "master", is_replica=True) as follower:
        append_all(follower, behind)
        dispatch_all(follower)
        assert read_all(follower, "TopicTest", 2)[-1].body == b"goes on"


def test_log_of_an_empty_slave_begins_with_any_file(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        fill(master)
        start = master.file_start(master.dispatched_offset)
        assert start == master.file_starts[-1] >= 2 * FILE_BYTES
        parts = parts_of(master, 100, start)
    with opened(tmp_path / "slave"):
        copy_store(tmp_path / "slave", tmp_path / "killed")  # with the file that a master makes ahead
    (tmp_path / "killed/commitlog").mkdir(exist_ok=True)
    (tmp_path / "killed/commitlog" / f"{0:020d}").write_bytes(bytes(FILE_BYTES))
    for name in ("slave", "killed"):
        with opened(tmp_path / name, is_replica=True) as slave:
            with pytest.raises(StoreError, match=f"from {start + 1} on and ours ends at 0.*mappedFileSizeCommitLog is"):
                slave.replica.append(start + 1, b"x")
            append_all(slave, parts)
            dispatch_all(slave)
            assert slave.min_physical_offset == start
            assert slave.dispatched_offset == slave.max_physical_offset == parts[-1][0] + len(parts[-1][1])
            theirs = everything(slave)
            assert sum(map(len, theirs.values())) >= 8
        with opened(tmp_path / name) as store:
            assert store.file_starts == [start] and everything(store) == theirs


def test_slave_takes_no_messages(tmp_path: Path) -> None:
    with opened(tmp_path, quiet(transient_store_pool=True), is_replica=True, disk_used_percent=lambda _: 1) as slave:
        for _ in range(2):
            for put in (slave.put, slave.put_batch):
                refused = put(message())
                assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE and "send to its master" in refused.reason
            assert slave.put_run([message()]) is None and not slave.is_writable
            slave.retention_round()
        assert slave.max_physical_offset == 0


# ---- the master's side


def test_parts_end_with_files_and_with_what_is_dispatched(tmp_path: Path) -> None:
    rounds = Rounds()
    store_settings = quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    with opened(tmp_path, store_settings, on_durable=rounds) as master:
        assert not len(master.log_part(0, 100)) and master.file_start(0) == 0
        fill(master)
        assert not len(master.log_part(0, 100)), "not durable yet"
        master.request_flush()
        end = master.max_physical_offset
        rounds.wait(lambda told: told == (end, None))
        master.dispatch()
        parts = parts_of(master)
        assert [at for at, _ in parts] == master.file_starts
        assert [at + len(data) for at, data in parts] == [*master.file_starts[1:], end]
        assert b"".join(data for _, data in parts_of(master, 77)) == b"".join(data for _, data in parts)
        put_all(master, message())
        assert not len(master.log_part(end, 100)) and len(master.log_part(end - 10, 100)) == 10
        assert [master.file_start(at) for at in (0, 1, FILE_BYTES, end)] == [0, 0, FILE_BYTES, master.file_starts[-1]]
        for offset in (-1, master.max_physical_offset + 1):
            with pytest.raises(StoreError, match=f"requests it from {offset} on"):
                master.log_part(offset, 100)


def test_part_stays_valid_when_its_file_goes(tmp_path: Path) -> None:
    with opened(tmp_path, small_settings(file_reserved_hours=0, delete_when="")) as master:
        fill(master)
        part, raw = master.log_part(0, 1000), bytes(master.log_part(0, 1000))
        master.retention.request()
        while master.min_physical_offset == 0:
            master.retention_round()
        assert part == raw
        with pytest.raises(StoreError, match="requests it from 0 on"):
            master.log_part(0, 1000)


# ---- another history


def records_of(parts: list[Part]) -> list[tuple[int, int]]:
    """Return physical offset and size of every record and of every blank."""
    found: list[tuple[int, int]] = []
    for start, data in parts:
        at = 0
        while at < len(data):
            size = struct.unpack_from(">i", data, at)[0]
            found.append((start + at, size))
            at += size
    return found


def poke(parts: list[Part], offset: int, data: bytes) -> list[Part]:
    """Return the parts with changed bytes at a place."""
    changed = []
    for at, raw in parts:
        if at <= offset < at + len(raw):
            raw = raw[: offset - at] + data + raw[offset - at + len(data) :]
        changed.append((at, raw))
    return changed


FOREIGN = {
    "zeros": (0, bytes(BLANK_BYTES), "magic 00000000, which are not a record"),
    "text": (0, b"hello, world", "which are not a record"),
    "magic": (4, b"\xdb", "which are not a record"),
    "another place": (35, b"\x01", "a record with the offset"),
    "too small": (0, struct.pack(">i", 90), "a record of 90 bytes where the file has"),
    "too large": (0, struct.pack(">i", FILE_BYTES), f"a record of {FILE_BYTES} bytes where the file has"),
    "negative": (0, struct.pack(">i", -1), "a record of -1 bytes"),
    "early end of file": (0, struct.pack(">ii", 500, BLANK_MAGIC), "the end of a file with 500 bytes left where"),
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> list[Part]:
    """Return the log of a master."""
    with opened(tmp_path_factory.mktemp("origin")) as master:
        fill(master, 12)
        return parts_of(master)


@both_paths
@pytest.mark.parametrize("part_bytes", [1 << 20, 333, 13, 1])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_continuation_ends_the_log(
    kind: str, part_bytes: int, is_bulk: bool, origin: list[Part], tmp_path: Path
) -> None:
    at, data, found = FOREIGN[kind]
    places = records_of(origin)
    number = next(i for i, (offset, _) in enumerate(places) if offset > FILE_BYTES) + 2
    offset = places[number][0]
    changed = split(poke(origin, offset + at, data), itertools.repeat(part_bytes))
    with opened(tmp_path / "slave", is_replica=True) as slave:
        with pytest.raises(
            LogDiverged, match=f"from physical offset {offset} on: .*{found}.*; if the messages of the master"
        ) as raised:
            append_all(slave, changed, dispatching=True)
        dispatch_all(slave)
        assert raised.value.physical_offset == offset == slave.max_physical_offset == slave.dispatched_offset
        assert slave.replica.divergence is raised.value
        with pytest.raises(LogDiverged, match=f"from physical offset {offset} on"):
            slave.replica.append(offset, b"more")
        served = sorted(record.physical_offset for records in everything(slave).values() for record in records)
        before = [one for one, size in places if one < offset and one + size != FILE_BYTES]
        assert served == before == sorted(itertools.chain(*map(slave.replica.record_starts, slave.file_starts)))
        last = slave.replica.last_record()
        assert last is not None and last[0] == before[-1]
    with opened(tmp_path / "slave") as store:
        assert store.max_physical_offset == offset


@both_paths
@pytest.mark.parametrize("place", ["body length", "topic length", "properties length", "topic"])
def test_record_whose_parts_do_not_add_up_ends_the_log(
    place: str, is_bulk: bool, origin: list[Part], tmp_path: Path
) -> None:
    places = records_of(origin)
    offset, size = places[3]
    raw = origin[0][1][offset : offset + size]
    at, data = {
        "body length": (84, b"\x70"),
        "topic length": (raw.index(b"TopicTest") - 1, b"\x0b"),
        "properties length": (raw.index(b"TopicTest") + 9, b"\x7f"),
        "topic": (raw.index(b"TopicTest"), b"\xff"),
    }[place]
    with opened(tmp_path, is_replica=True) as slave:
        append_all(slave, poke(origin, offset + at, data))
        with pytest.raises(LogDiverged, match=f"from physical offset {offset} on"):
            dispatch_all(slave)
        assert not slave.dispatch() and slave.replica.divergence is not None
        assert slave.max_physical_offset == slave.dispatched_offset == offset
        assert sum(map(len, everything(slave).values())) == 3
        last = slave.replica.last_record()
        assert last is not None and last[0] == places[2][0]
        with pytest.raises(LogDiverged):
            slave.replica.append(offset, b"more")


def is_head_kept(log: bytes, changed: bytes, at: int) -> bool:
    """Return True if size, magic and physical offset of a record are unchanged, or the eight bytes of a blank."""
    is_blank = struct.unpack_from(">i", log, at + 4)[0] == BLANK_MAGIC
    ranges = [(at, at + 8)] if is_blank else [(at, at + 8), (at + 28, at + 36)]
    return all(log[low:high] == changed[low:high] for low, high in ranges)


@slow
@given(data=st.data(), part_bytes=st.integers(1, 6000))
def test_foreign_bytes_are_never_served_as_records(
    data: st.DataObject, part_bytes: int, origin: list[Part], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("foreign")
    log = b"".join(raw for _, raw in origin)
    offset = data.draw(st.integers(0, len(log) - 1))
    foreign = data.draw(st.binary(min_size=1, max_size=len(log) - offset))
    changed = log[:offset] + foreign + log[offset + len(foreign) :]
    files = [(at, changed[at : at + FILE_BYTES]) for at in range(0, len(changed), FILE_BYTES)]
    with opened(tmp_path, is_replica=True) as slave:
        with suppress(LogDiverged):
            append_all(slave, split(files, itertools.repeat(part_bytes)))
        with suppress(LogDiverged):
            dispatch_all(slave)
        sound = [at for at, _ in records_of(origin) if is_head_kept(log, changed, at)]
        first_foreign = next((at for at, _ in records_of(origin) if at not in sound), len(log))
        assert slave.dispatched_offset <= first_foreign
        served = [record.physical_offset for records in everything(slave).values() for record in records]
        assert set(served) <= set(sound)
        assert slave.replica.divergence is not None or slave.max_physical_offset == len(log)
    shutil.rmtree(tmp_path)


def test_parts_that_do_not_fit_the_log(origin: list[Part], tmp_path: Path) -> None:
    with opened(tmp_path / "a", is_replica=True) as slave:
        slave.replica.append(0, origin[0][1][:1000])
        for offset in (0, 999, 1001, FILE_BYTES):
            with pytest.raises(StoreError, match=f"from {offset} on and ours ends at 1000: connect to it again"):
                slave.replica.append(offset, origin[0][1][1000:1100])
        slave.replica.append(1000, b"")
        append_all(slave, [(1000, origin[0][1][1000:]), *origin[1:]])
        dispatch_all(slave)
        assert slave.dispatched_offset == origin[-1][0] + len(origin[-1][1])
    smaller = small_settings(commit_log_file_bytes=2048)
    remedy = "where a file ends at 2048; open a new store with the mappedFileSizeCommitLog"
    with opened(tmp_path / "b", smaller, is_replica=True) as slave, pytest.raises(LogDiverged, match=remedy):
        append_all(slave, origin)


# ---- torn ends


def test_torn_tail_is_cut_wherever_the_link_broke(origin: list[Part], tmp_path: Path) -> None:
    places = records_of(origin[:2])
    number = next(i for i, (offset, _) in enumerate(places) if offset == FILE_BYTES) - 2
    begin, size = places[number]
    stops = [*range(begin, begin + size + 1), *range(begin + size, FILE_BYTES + 130)]
    log = b"".join(raw for _, raw in origin[:2])
    with opened(tmp_path, quiet(), is_replica=True) as slave:
        slave.replica.append(0, log[:begin])
        for stop in stops:
            at = slave.max_physical_offset
            for low, high in ((at, min(stop, FILE_BYTES)), (max(at, FILE_BYTES), stop)):
                if low < high:
                    slave.replica.append(low, log[low:high])
            end = slave.replica.cut_torn_tail()
            assert (
                end == max(at for at in (0, *(at + n for at, n in places)) if at <= stop) == slave.max_physical_offset
            )
            last = slave.replica.last_record()
            assert last is not None and last[0] + len(last[1]) in (end, begin + size)
        append_all(slave, [(slave.max_physical_offset, log[slave.max_physical_offset :]), *origin[2:]])
        dispatch_all(slave)
        assert slave.dispatched_offset == origin[-1][0] + len(origin[-1][1])


def test_bytes_that_were_cut_are_not_durable(origin: list[Part], tmp_path: Path) -> None:
    rounds = Rounds()
    with opened(tmp_path, quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH), is_replica=True, on_durable=rounds) as slave:
        slave.replica.append(0, origin[0][1][:1000])
        slave.request_flush()
        rounds.wait(lambda told: told == (1000, None))
        end = slave.replica.cut_torn_tail()
        assert 0 < end < 1000 and slave.durable_offset == end
        slave.replica.append(end, origin[0][1][end:2000])
        assert slave.durable_offset == end


@slow
@given(sizes=st.lists(st.integers(1, 900), min_size=1), kill=st.integers(0, 60), often=st.integers(1, 9))
def test_killed_slave_continues(
    sizes: list[int], kill: int, often: int, origin: list[Part], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("killed")
    parts = list(split(origin, itertools.cycle(sizes)))
    log = b"".join(raw for _, raw in origin)
    with opened(tmp_path / "live", quiet(), is_replica=True) as slave:
        for i, part in enumerate(parts[:kill]):
            slave.replica.append(*part)
            if i % often == 0:
                slave.dispatch()
        dispatch_all(slave)
        served, end = everything(slave), slave.max_physical_offset
        copy_store(tmp_path / "live", tmp_path / "copy")
    with opened(tmp_path / "copy", quiet(), is_replica=True) as slave:
        ends = [0, *(at + size for at, size in records_of(origin))]
        found = slave.max_physical_offset
        # Of a blank only the first eight bytes count: the rest of the file is undefined.
        blanks = [(at, at + size) for at, size in records_of(origin) if (at + size) % FILE_BYTES == 0]
        assert found == max(one for one in ends if one <= end) or any(found in blank for blank in blanks)
        assert everything(slave) == served
        rest = [(at, log[at : at - at % FILE_BYTES + FILE_BYTES]) for at in [found, *range(found + 1, len(log))]
                if at == found or at % FILE_BYTES == 0]  # fmt: skip
        append_all(slave, rest)
        dispatch_all(slave)
        assert slave.dispatched_offset == len(log)
    shutil.rmtree(tmp_path)


# ---- the disk


@pytest.fixture
def disk() -> Iterator[RefusingDisk]:
    with RefusingDisk().installed() as disk:
        yield disk


@both_paths
def test_only_durable_records_are_dispatched(is_bulk: bool, origin: list[Part], tmp_path: Path) -> None:
    rounds = Rounds()
    with opened(tmp_path, quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH), is_replica=True, on_durable=rounds) as slave:
        slave.replica.append(0, origin[0][1][:1500])
        assert not slave.dispatch() and slave.dispatched_offset == 0 == slave.durable_offset
        slave.request_flush()
        rounds.wait(lambda told: told == (1500, None))
        slave.replica.append(1500, origin[0][1][1500:])
        dispatch_all(slave)
        assert slave.dispatched_offset == max(at for at, _ in records_of(origin) if at <= 1500)


@both_paths
def test_failed_flush_makes_nothing_durable_or_readable(
    is_bulk: bool, origin: list[Part], disk: RefusingDisk, tmp_path: Path
) -> None:
    rounds = Rounds()
    with opened(tmp_path, quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH), is_replica=True, on_durable=rounds) as slave:
        append_all(slave, origin)
        disk.refuse(BROKEN, "sync_data", path="commitlog")
        slave.request_flush()
        rounds.wait(lambda told: told[1] is not None)
        slave.dispatch()
        assert (slave.durable_offset, slave.dispatched_offset) == (0, 0)
        assert slave.failure is not None and rounds.told == [(0, slave.failure)]
        with pytest.raises(StoreUnavailable, match="flush failed: errno 5"):
            slave.replica.append(slave.max_physical_offset, b"more")
    assert (tmp_path / "abort").exists()


@both_paths
def test_a_slave_continues_after_a_refused_flush(
    is_bulk: bool, origin: list[Part], disk: RefusingDisk, tmp_path: Path
) -> None:
    """The part that is not on the disk may begin and end inside of records."""
    rounds, log = Rounds(), origin[0][1]
    with opened(tmp_path, quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH), is_replica=True, on_durable=rounds) as slave:
        slave.replica.append(0, log[:1010])
        slave.request_flush()
        rounds.wait(lambda told: told == (1010, None))
        slave.replica.append(1010, log[1010:2500])
        disk.refuse(BROKEN, "sync_data", path="commitlog")
        for _ in range(2):
            rounds.told.clear()
            slave.request_flush()
            rounds.wait(lambda told: told[1] is not None)
            with pytest.raises(StoreUnavailable, match="flush failed: errno 5"):
                slave.replica.append(2500, log[2500:])
        disk.repair()
        rounds.told.clear()
        slave.request_flush()
        rounds.wait(lambda told: told[1] is not None and "the last record is incomplete" in str(told[1]))
        end = slave.replica.cut_torn_tail()  # as a new link does
        assert end < 2500
        slave.request_flush()
        rounds.wait(lambda told: told == (end, None))
        append_all(slave, [(end, log[end:]), *origin[1:]])
        slave.request_flush()
        rounds.wait(lambda told: told == (slave.max_physical_offset, None))
        dispatch_all(slave)
        assert slave.dispatch_behind_bytes == 0
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("taken_bytes", [0, 1, 700])
def test_refused_append_is_done_again(taken_bytes: int, origin: list[Part], disk: RefusingDisk, tmp_path: Path) -> None:
    log = origin[0][1]
    with opened(tmp_path, quiet(), is_replica=True) as slave:
        slave.replica.append(0, log[:1010])
        disk.refuse(NO_SPACE, "pwrite", path="commitlog", taken_bytes=taken_bytes)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                slave.replica.append(1010, log[1010:2500])
            assert slave.max_physical_offset == 1010 and slave.replica.divergence is None
        disk.repair()
        append_all(slave, [(1010, log[1010:]), *origin[1:]])
        dispatch_all(slave)
        assert slave.dispatched_offset == origin[-1][0] + len(origin[-1][1])


@pytest.mark.parametrize("operation", ["open", "truncate"])
def test_refused_file_is_made_again(operation: str, origin: list[Part], disk: RefusingDisk, tmp_path: Path) -> None:
    with opened(tmp_path, quiet(), is_replica=True) as slave:
        disk.refuse(NO_SPACE, operation, path="commitlog")
        for start in (FILE_BYTES, FILE_BYTES):
            with pytest.raises(OSError, match="No space"):
                slave.replica.append(start, origin[1][1])
            assert slave.max_physical_offset == 0
        disk.repair()
        append_all(slave, origin[1:])
        assert slave.min_physical_offset == FILE_BYTES


@both_paths
def test_refused_queue_entry_blocks_until_it_is_taken(
    is_bulk: bool,
    origin: list[Part],
    disk: RefusingDisk,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rmqkit.store.queues.table.HELD_BYTES_MAX", 0)
    with opened(tmp_path, quiet(), is_replica=True) as slave:
        append_all(slave, origin)
        disk.refuse(NO_SPACE, "pwrite", path="consumequeue/TopicTest/1")
        dispatch_all(slave)
        assert slave.failure and slave.dispatch_behind_bytes
        assert "consume queue cannot be written" in caplog.text
        disk.repair()
        dispatch_all(slave)
        assert slave.dispatch_behind_bytes == 0
        ours = everything(slave)
    with opened(tmp_path / "again", is_replica=True) as other:
        append_all(other, origin)
        dispatch_all(other)
        assert everything(other) == ours


def test_far_behind_the_page_cache_drops_what_is_durable_and_dispatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops only whole steps, only far before the dispatched offset, and none twice."""
    step, kept = mmap.PAGESIZE, 4 * mmap.PAGESIZE
    for name, value in {"RELEASED": step, "CACHED": kept, "FAR_BEHIND": 5000, "BULK_FROM": 1}.items():
        monkeypatch.setattr(replication, f"_{name}_BYTES", value)
    dropped: list[tuple[int, int]] = []
    drop_cached = system_disk.drop_cached

    def noted(fd: int, position: int, size: int) -> None:
        start = int(Path(f"/proc/self/fd/{fd}").readlink().name) + position
        assert start + size <= min(slave.durable_offset, slave.dispatched_offset - kept)
        dropped.append((start, start + size))
        drop_cached(fd, position, size)

    monkeypatch.setattr(system_disk, "drop_cached", noted)
    files = {"commit_log_file_bytes": 32 * step}
    with opened(tmp_path / "master", small_settings(**files)) as master:
        put_all(master, *(message(queue_id=i % 2, body=bytes([i]) * 1000) for i in range(250)))
        parts, entries = parts_of(master, 10_000), everything(master)
    rounds = Rounds()
    with opened(tmp_path / "slave", quiet(**files), is_replica=True, on_durable=rounds) as slave:
        cut = next(i for i, (at, _) in enumerate(parts) if at >= 40 * step)
        append_all(slave, parts[:4], dispatching=True)
        assert slave.dispatched_offset - step > kept and not dropped, "nothing is on the disk"
        slave.request_flush()
        rounds.wait(lambda told: told == (parts[4][0], None))
        append_all(slave, parts[4:cut], dispatching=True)
        assert dropped and parts[4][0] < slave.dispatched_offset - kept, "the rest is not on the disk"
        count = len(dropped)
        slave.request_flush()
        rounds.wait(lambda told: told == (parts[cut][0], None))
        append_all(slave, split(parts[cut : cut + 2], itertools.repeat(2000)), dispatching=True)
        assert len(dropped) == count, "few bytes wait"
        slave.request_flush()
        rounds.wait(lambda told: told == (parts[cut + 2][0], None))
        append_all(slave, parts[cut + 2 :], dispatching=True)
        assert len(dropped) > count
        dispatch_all(slave)
        assert everything(slave) == entries
    assert all(start % step == 0 == end % step for start, end in dropped)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(dropped))


# ---- callbacks


@both_paths
def test_dispatched_records_are_reported(is_bulk: bool, origin: list[Part], tmp_path: Path) -> None:
    told: list[DispatchRequest] = []
    with opened(tmp_path, is_replica=True, on_arrival=told.extend) as slave:
        append_all(slave, origin)
        assert slave.dispatch_behind_bytes == slave.max_physical_offset
        dispatch_all(slave)
        assert slave.dispatch_behind_bytes == 0
        all_of = {place: len(records) for place, records in everything(slave).items()}
    assert [one.physical_offset for one in told] == sorted({one.physical_offset for one in told})
    newest: dict[tuple[str, int], int] = {}
    for one in told:
        newest[one.topic, one.queue_id] = one.queue_offset + 1
    assert newest == all_of
    assert is_bulk is (len(told) < sum(all_of.values()))


def test_a_run_reports_the_newest_record_of_every_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_BULK_FROM_BYTES", 1)
    with opened(tmp_path / "master", small_settings(commit_log_file_bytes=1 << 20)) as master:
        put_all(master, *(message(queue_id=i % 2, TAGS=f"t{i % 3}") for i in range(30)))
        put_all(master, *(message("Many", TAGS=f"t{i}") for i in range(100)))
        parts = parts_of(master)
    told: list[DispatchRequest] = []
    with opened(
        tmp_path / "slave", small_settings(commit_log_file_bytes=1 << 20), is_replica=True, on_arrival=told.extend
    ) as slave:
        append_all(slave, parts)
        dispatch_all(slave)
    wanted = {("TopicTest", i % 2, i // 2) for i in range(24, 30)} | {("Many", 0, i) for i in range(84, 100)}
    assert {(one.topic, one.queue_id, one.queue_offset) for one in told} == wanted


# ---- the end of the log, and places in it


def test_last_record_and_places_of_records(origin: list[Part], tmp_path: Path) -> None:
    records = [(at, size) for at, size in records_of(origin) if (at + size) % FILE_BYTES]
    log = b"".join(raw for _, raw in origin)
    with opened(tmp_path, is_replica=True) as slave:
        assert slave.replica.last_record() is None and slave.file_starts == [] == slave.replica.record_starts(0)
        append_all(slave, origin)
        offset, size = records[-1]
        assert slave.replica.last_record() == (offset, log[offset : offset + size])
        for start in slave.file_starts:
            assert slave.replica.record_starts(start) == [at for at, _ in records if start <= at < start + FILE_BYTES]
    with opened(tmp_path, is_replica=True) as slave:
        assert slave.replica.last_record() == (offset, log[offset : offset + size])


def test_times_that_step_back_lower_the_checkpoint(tmp_path: Path) -> None:
    clock = StandingClock()
    with opened(tmp_path / "master", clock=clock) as master:
        for step_ms in (0, 5000, -60_000, 59_000):
            clock.ms += step_ms
            put_all(master, message())
        parts = parts_of(master)
    stored = [decode_record(parts[0][1], at).store_timestamp for at, _ in records_of(parts)]
    with opened(tmp_path / "slave", quiet(), is_replica=True) as slave:
        append_all(slave, parts)
        dispatch_all(slave)
        assert [record.store_timestamp for record in read_all(slave, "TopicTest")] == stored
    numbers = struct.unpack_from(">qq", (tmp_path / "slave/checkpoint").read_bytes())
    assert max(numbers) <= min(stored), "a later time would vouch for records that are not on the disk"


def test_bytes_behind_a_blank_are_kept_as_they_are(origin: list[Part], tmp_path: Path) -> None:
    blank, size = next((at, size) for at, size in records_of(origin) if (at + size) % FILE_BYTES == 0)
    assert size > BLANK_BYTES
    changed = poke(origin, blank + BLANK_BYTES, b"?" * (size - BLANK_BYTES))
    for part_bytes in (1 << 20, 7):
        root = tmp_path / str(part_bytes)
        with opened(root, is_replica=True) as slave:
            append_all(slave, split(changed, itertools.repeat(part_bytes)))
            dispatch_all(slave)
            assert slave.dispatched_offset == origin[-1][0] + len(origin[-1][1])
        assert (root / "commitlog" / f"{0:020d}").read_bytes() == changed[0][1]


def test_close_cuts_a_torn_tail(origin: list[Part], tmp_path: Path) -> None:
    end = max(at for at, _ in records_of(origin) if at <= 1000)
    with opened(tmp_path, is_replica=True) as slave:
        slave.replica.append(0, origin[0][1][:1000])
    assert not (tmp_path / "abort").exists()
    raw = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
    assert raw == origin[0][1][:end] + bytes(FILE_BYTES - end)
