"""Recovery: store.md §12, compared with the real broker's recovery of damaged copies of one store."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rmqkit.errors import StoreDamaged
from rmqkit.protocol.record import decode_record, iter_records
from rmqkit.store.message_store import PutStatus
from rmqkit.store.settings import StoreSettings
from tests.examples import examples
from tests.golden_stores import golden_manifest
from tests.sources import ROOT
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings, tree

GOLDEN = ROOT / "tests" / "golden"
FILE_BYTES = 4096


# ---- damaged copies of the golden store


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with gzip.open(GOLDEN / "expected-5.4.0-unclean.json.gz") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def unclean_settings() -> StoreSettings:
    conf = golden_manifest("5.4.0")["brokerConf"]
    return StoreSettings(
        commit_log_file_bytes=int(conf["mappedFileSizeCommitLog"]),
        consume_queue_file_bytes=int(conf["mappedFileSizeConsumeQueue"]),
        consume_queue_ext_file_bytes=int(conf["mappedFileSizeConsumeQueueExt"]),
        hash_slot_count=int(conf["maxHashSlotNum"]),
        index_entry_count=int(conf["maxIndexNum"]),
        enable_consume_queue_ext=True,
    )


def write_at(root: Path, physical_offset: int, data: bytes) -> None:
    file_bytes = 131072
    path = root / "commitlog" / f"{physical_offset - physical_offset % file_bytes:020d}"
    with open(path, "r+b") as file:
        file.seek(physical_offset % file_bytes)
        file.write(data)


def damage(variant: str, root: Path, last: dict[str, int]) -> None:
    """Damage a store in the same way as the copy that the real broker opened."""
    offset, size = last["physicalOffset"], last["size"]
    log = (root / "commitlog" / f"{offset - offset % 131072:020d}").read_bytes()
    if variant in ("torn-zero", "clean-flag-torn"):
        write_at(root, offset + size // 2, bytes(size - size // 2))
        if variant == "clean-flag-torn":
            (root / "abort").unlink()
    elif variant == "torn-flip":
        write_at(root, offset + 98, bytes([log[offset % 131072 + 98] ^ 0xFF]))
    elif variant == "torn-size":
        write_at(root, offset, struct.pack(">i", size - 1))
    elif variant == "no-cq":
        shutil.rmtree(root / "consumequeue")
    elif variant == "no-index-cq":
        for folder in ("consumequeue", "consumequeue_ext", "index"):
            shutil.rmtree(root / folder)
        (root / "checkpoint").unlink()
    else:
        assert variant == "as-killed"


@pytest.mark.parametrize(
    "variant", ["as-killed", "clean-flag-torn", "no-cq", "no-index-cq", "torn-flip", "torn-size", "torn-zero"]
)
def test_damaged_copy_recovers_as_the_real_broker_did(variant: str, expected: dict[str, Any], tmp_path: Path) -> None:
    with tarfile.open(GOLDEN / "store-5.4.0-unclean.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "store"
    was = next(one for one in expected["variants"] if one["variant"] == variant)
    damage(variant, root, was["lastRecord"])
    after = was["after"]
    by_place = {(one["topic"], one["queueId"], one["queueOffset"]): one for one in expected["messages"]}
    with opened(root, unclean_settings()) as store:
        assert store.max_physical_offset == int(after["commitLogMaxOffset"])
        assert store.min_physical_offset == int(after["commitLogMinOffset"])
        for queue in after["queues"]:
            topic, queue_id = queue["topic"], queue["queueId"]
            bounds = (store.min_offset(topic, queue_id), store.max_offset(topic, queue_id))
            first = 0 if variant == "no-cq" else queue["minOffset"]  # Java's recovery loses the entries before the scan
            assert bounds == (first, queue["maxOffset"]), queue
            records = read_all(store, topic, queue_id)
            assert len(records) == queue["messages"] + queue["minOffset"] - first
            for record in records:
                was_sent = by_place[topic, queue_id, record.queue_offset]
                assert (record.physical_offset, record.size) == (was_sent["physicalOffset"], was_sent["size"])
        for asked in after["queryByKey"]:
            found = store.query(asked["topic"], asked["key"], 64, 0, 1 << 62).physical_offsets
            assert found == asked["physicalOffsets"] or "error" in asked
    assert not (root / "abort").exists()


# ---- stores of our own, crashed


def crashed(tmp_path: Path, count: int, settings: StoreSettings | None = None) -> Path:
    """Return a copy of the files of an open store with some messages."""
    with opened(tmp_path / "live", settings) as store:
        put_all(store, *(message(queue_id=i % 2, body=bytes([i]) * 300) for i in range(count)))
        return copy_store(store.root, tmp_path / "crashed")


@pytest.mark.parametrize("count", [0, 1, 7, 9, 10, 50])
def test_kill_loses_nothing(tmp_path: Path, count: int) -> None:
    root = crashed(tmp_path, count)
    with opened(root) as store:
        bodies = [record.body[0] for queue_id in (0, 1) for record in read_all(store, "TopicTest", queue_id)]
    assert sorted(bodies) == list(range(count))


def test_offsets_continue_after_a_crash(tmp_path: Path) -> None:
    root = crashed(tmp_path, 10)
    with opened(root) as store:
        result = store.put(message(body=b"next"))
        assert result.status is PutStatus.OK and result.queue_offset == 5
        assert [record.body for record in read_all(store, "TopicTest")][-1] == b"next"


def last_file(root: Path) -> Path:
    return max(path for path in (root / "commitlog").iterdir() if any(path.read_bytes()))


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


@pytest.mark.parametrize("is_clean", [True, False])
def test_log_cut_at_any_byte_of_the_last_record(tmp_path: Path, is_clean: bool) -> None:
    origin = crashed(tmp_path, 3)
    raw = last_file(origin).read_bytes()
    records = list(iter_records(raw))
    start, size = records[-1].physical_offset, records[-1].size
    for kept in range(0, size - len("..TopicTest.."), 9):  # the bytes after the body have no checksum
        root = copy_store(origin, tmp_path / f"cut-{kept}")
        if is_clean:
            (root / "abort").unlink()
        last_file(root).write_bytes(raw[: start + kept] + bytes(FILE_BYTES - start - kept))
        with opened(root) as store:
            assert store.max_physical_offset == start
            assert (store.max_offset("TopicTest", 0), store.max_offset("TopicTest", 1)) == (1, 1)
            assert store.put(message(body=b"new")).physical_offset == start
        shutil.rmtree(root)


def test_stale_bytes_behind_the_cut_never_come_back(tmp_path: Path) -> None:
    root = crashed(tmp_path, 6)
    path = last_file(root)
    second = list(iter_records(path.read_bytes()))[1]
    edit(path, lambda content: content.__setitem__(second.physical_offset + 4, 0))
    with opened(root) as store:
        assert store.max_physical_offset == second.physical_offset
    assert not any(path.read_bytes()[second.physical_offset :])


def test_record_of_another_place_ends_the_log(tmp_path: Path) -> None:
    root = crashed(tmp_path, 3)
    path = last_file(root)
    records = list(iter_records(path.read_bytes()))
    raw = path.read_bytes()[: records[0].size]

    def repeat(content: bytearray) -> None:
        end = records[-1].physical_offset + records[-1].size
        content[end : end + len(raw)] = raw

    edit(path, repeat)
    with opened(root) as store:
        assert store.max_physical_offset == records[-1].physical_offset + records[-1].size


def test_blank_without_a_next_file_is_written_again(tmp_path: Path) -> None:
    root = crashed(tmp_path, 12)
    names = sorted(path.name for path in (root / "commitlog").iterdir())
    first = (root / "commitlog" / names[0]).read_bytes()
    end = sum(record.size for record in iter_records(first))
    for name in names[1:]:
        (root / "commitlog" / name).unlink()
    with opened(root) as store:
        assert store.max_physical_offset == end
        results = put_all(store, *(message(body=bytes(300)) for _ in range(2)))
        assert results[0].physical_offset == FILE_BYTES
    assert (root / "commitlog" / names[0]).read_bytes() == first


def test_blank_with_an_empty_next_file_continues_there(tmp_path: Path) -> None:
    root = crashed(tmp_path, 12)
    names = sorted(path.name for path in (root / "commitlog").iterdir())
    (root / "commitlog" / names[1]).write_bytes(bytes(FILE_BYTES))
    with opened(root) as store:
        assert store.max_physical_offset == FILE_BYTES
        assert store.put(message()).physical_offset == FILE_BYTES


def test_file_made_ahead_is_accepted_and_dropped(tmp_path: Path) -> None:
    root = crashed(tmp_path, 3)
    ahead = root / "commitlog" / f"{FILE_BYTES:020d}"
    ahead.write_bytes(bytes(FILE_BYTES))
    with opened(root) as store:
        assert store.max_offset("TopicTest", 0) == 2
    assert not ahead.exists()


def test_queue_entries_behind_the_log_end_go(tmp_path: Path) -> None:
    root = crashed(tmp_path, 20)
    for path in sorted((root / "commitlog").iterdir())[1:]:
        path.write_bytes(bytes(FILE_BYTES))
    with opened(root) as store:
        readable = sum(len(read_all(store, "TopicTest", queue_id)) for queue_id in (0, 1))
        assert readable == len(list(iter_records((root / "commitlog" / ("0" * 20)).read_bytes())))
        assert store.max_offset("TopicTest", 0) + store.max_offset("TopicTest", 1) == readable


def test_without_any_log_the_queues_go_too(tmp_path: Path) -> None:
    root = crashed(tmp_path, 10)
    shutil.rmtree(root / "commitlog")
    with opened(root) as store:
        assert store.max_offset("TopicTest", 0) == 0
        assert store.put(message()).queue_offset == 0


@pytest.mark.parametrize("is_clean", [True, False])
def test_lost_queues_are_built_again(tmp_path: Path, is_clean: bool) -> None:
    root = crashed(tmp_path, 30)
    shutil.rmtree(root / "consumequeue")
    if is_clean:
        (root / "abort").unlink()
    with opened(root) as store:
        assert [len(read_all(store, "TopicTest", queue_id)) for queue_id in (0, 1)] == [15, 15]


def test_entries_missing_after_a_clean_stop_are_dispatched(tmp_path: Path) -> None:
    root = crashed(tmp_path, 10)
    (root / "abort").unlink()
    for path in (root / "consumequeue").rglob("0*0"):
        if path.is_file():
            edit(path, lambda content: content.__setitem__(slice(60, 200), bytes(140)))
    with opened(root) as store:
        assert [store.max_offset("TopicTest", queue_id) for queue_id in (0, 1)] == [5, 5]


def test_clean_start_reads_one_record_however_long_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(body=bytes(300)) for _ in range(60)))
        end = store.max_physical_offset
    decoded: list[int] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        decoded.append(1)
        return decode_record(*arguments, **options)

    monkeypatch.setattr("rmqkit.store.log.recovery.decode_record", counting)
    with opened(tmp_path / "s") as store:
        assert store.max_physical_offset == end
        assert (
            len(decoded) <= 3
        )  # the newest record again as the first one of the scan, and bytes after it that are no record


def test_clean_start_finds_what_no_queue_knows_yet(tmp_path: Path) -> None:
    root = crashed(tmp_path, 20)
    (root / "abort").unlink()
    shutil.rmtree(root / "consumequeue" / "TopicTest" / "1")
    path = root / "consumequeue" / "TopicTest" / "0" / ("0" * 20)
    edit(path, lambda content: content.__setitem__(slice(60, 200), bytes(140)))
    with opened(root) as store:
        assert store.max_offset("TopicTest", 0) == 10


def test_walk_starts_where_the_checkpoint_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = crashed(tmp_path, 60)
    names = sorted(path.name for path in (root / "commitlog").iterdir())
    timestamp = next(iter_records((root / "commitlog" / names[3]).read_bytes())).store_timestamp
    (root / "checkpoint").write_bytes(struct.pack(">5q", timestamp + 3000, timestamp + 3000, 0, 0, 0) + bytes(4056))
    shutil.rmtree(root / "consumequeue")
    with opened(root) as store:
        assert store.min_offset("TopicTest", 0) == 0
    found = re.search(
        r"TopicTest-0: messages of the log were not in it: (\d+) messages entered from the log", caplog.text
    )
    assert found is not None, "the scan began after the first file"
    assert 0 < int(found[1]) < 60


def test_body_crc_is_checked_only_when_asked(tmp_path: Path) -> None:
    root = crashed(tmp_path, 3)
    edit(last_file(root), lambda content: content.__setitem__(100, 0x55))
    unchecked = copy_store(root, tmp_path / "unchecked")
    with opened(root) as store:
        assert store.max_physical_offset == 0
    with opened(unchecked, small_settings(check_crc_on_recover=False)) as store:
        assert len(read_all(store, "TopicTest", 0)) == 2


def test_checksum_of_the_whole_record_guards_every_field(tmp_path: Path) -> None:
    root = crashed(tmp_path, 3, small_settings(append_property_crc=True))
    edit(last_file(root), lambda content: content.__setitem__(19, 0x55))  # the flag, in no body CRC
    other = copy_store(root, tmp_path / "other")
    with opened(root) as store:
        assert store.max_offset("TopicTest", 0) == 2
    with opened(other, small_settings(force_verify_property_crc=True)) as store:
        assert store.max_physical_offset == 0


def test_recovering_twice_is_recovering_once(tmp_path: Path) -> None:
    root = crashed(tmp_path, 25)
    with opened(root):
        pass
    once = tree(root)
    with opened(root):
        pass
    assert tree(root) == once


# ---- in bulk


def damaged(origin: Path, to: Path, flips: list[tuple[float, int]]) -> Path:
    """Return a copy of a crashed store with flipped bits in its log. The places are fractions of the log."""
    root = copy_store(origin, to)
    files = sorted((root / "commitlog").iterdir())
    for share, bit in flips:
        place = int(share * len(files) * FILE_BYTES)
        edit(files[place // FILE_BYTES], lambda content, at=place % FILE_BYTES, bit=bit: flip(content, at, bit))
    return root


def flip(content: bytearray, at: int, bit: int) -> None:
    content[at] ^= 1 << bit


@pytest.fixture(scope="module")
def many_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a crashed store with queues of several topics, gaps in queue offsets, tags, keys and two index files."""
    root = tmp_path_factory.mktemp("kinds") / "live"
    with opened(root) as store:
        for i in range(70):
            put_all(
                store,
                message(
                    ("A", "B", "SCHEDULE_TOPIC_XXXX")[i % 3],
                    queue_id=i % 2,
                    body=bytes([i]) * (i * 7 % 300),
                    TAGS=f"tag{i % 4}",
                    KEYS=f"k{i} shared",
                    UNIQ_KEY=f"{i:032X}",
                    DELAY=i % 5,
                ),
            )
        return copy_store(store.root, root.with_name("crashed"))


@examples(15, suppress=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 7)), max_size=3),
    has_queues=st.booleans(),
    is_clean=st.booleans(),
    bulk_from=st.sampled_from([0, 500, 5000]),
)
def test_the_walk_in_bulk_recovers_as_the_plain_one(
    many_kinds: Path,
    tmp_path_factory: pytest.TempPathFactory,
    flips: list[tuple[float, int]],
    has_queues: bool,
    is_clean: bool,
    bulk_from: int,
) -> None:
    results = []
    for name, bytes_before in (("bulk", bulk_from), ("plain", 1 << 40)):
        folder = tmp_path_factory.mktemp(name)
        root = damaged(many_kinds, folder / "s", flips)
        if not has_queues:
            shutil.rmtree(root / "consumequeue")
        if is_clean:
            (root / "abort").unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rmqkit.store.log.recovery.BULK_FROM_BYTES", bytes_before)
            found: Any
            try:
                with opened(root) as store:
                    found = store.max_physical_offset, store.query("A", "shared", 64, 0, 1 << 62).physical_offsets
            except StoreDamaged as error:
                found = str(error).replace(str(root), "")
        compared = root if isinstance(found, tuple) else root / "commitlog"
        files = {path: digest for path, digest in tree(compared).items() if path != "checkpoint"}
        results.append((found, files))
        shutil.rmtree(folder)
    assert results[0] == results[1]


def test_the_walk_in_bulk_needs_numpy_and_the_plain_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = crashed(tmp_path, 30)
    monkeypatch.setattr("rmqkit.store.log.recovery.BULK_FROM_BYTES", 0)
    monkeypatch.setattr("rmqkit.store.log.recovery.has_numpy", lambda: False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with opened(root) as store:
        assert len(read_all(store, "TopicTest", 0)) == 15


@pytest.mark.parametrize("changes", [{"force_verify_property_crc": True}, {"check_crc_on_recover": False}, {}])
def test_checksums_in_bulk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, bool]) -> None:
    sealed = small_settings(append_property_crc=True)
    root = crashed(tmp_path, 30, sealed)
    records = [record for path in sorted((root / "commitlog").iterdir()) for record in iter_records(path.read_bytes())]
    flag_at = records[20].physical_offset + 19  # in no body CRC
    body_at = records[25].physical_offset + 100
    for at in (flag_at, body_at):
        path = root / "commitlog" / f"{at - at % FILE_BYTES:020d}"
        edit(path, lambda content, at=at: flip(content, at % FILE_BYTES, 3))
    monkeypatch.setattr("rmqkit.store.log.recovery.BULK_FROM_BYTES", 0)
    with opened(root, small_settings(**changes)) as store:
        kept = sum(store.max_offset("TopicTest", queue_id) for queue_id in (0, 1))
    assert kept == (20 if "force_verify_property_crc" in changes else 30 if changes else 25)
