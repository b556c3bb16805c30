"""Which files a log has, where it ends, and how it is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from rmqkit.arrow.fs import Segment, data_end, find_segments, local_path, map_file
from rmqkit.arrow.options import CorruptRecords
from rmqkit.arrow.reader import read_split
from rmqkit.arrow.splits import Anchors, Split, grouped, plan_splits
from rmqkit.errors import StoreError, StoreMismatch
from rmqkit.protocol.record import decode_record, layout_of, pack_blank
from rmqkit.spark.jobs.log_ranges import log_splits
from rmqkit.spark.source.store import read_plan, store_options
from rmqkit.store.log import scan
from rmqkit.store.log.scan import FALSE_BLANK, Damage, Records
from rmqkit.store.log.view import LogView
from rmqkit.store.queues.consume_queue import ENTRY
from tests.golden_stores import unpack_golden
from tests.spark.messages import plain_records, record_at, segment_of

_SIZE = 2000


def _log(root: Path, *segments: bytes, first: int = 0) -> Path:
    """Write a commit log of full-size files."""
    folder = root / "commitlog"
    folder.mkdir(parents=True, exist_ok=True)
    for i, segment in enumerate(segments):
        (folder / f"{first + i * _SIZE:020d}").write_bytes(segment.ljust(_SIZE, b"\0"))
    return root


def _full(base_offset: int) -> bytes:
    return segment_of([record_at] * 8, base_offset=base_offset, size=_SIZE)


def _part(base_offset: int, count: int = 3) -> bytes:
    return segment_of([record_at] * count, base_offset=base_offset)


def _plan(root: Path, split_bytes: int = 1 << 20) -> list[tuple[int, int, int]]:
    splits = plan_splits(find_segments(str(root), []), split_bytes)
    assert all(split.path.endswith(f"{split.base_offset:020d}") for split in splits)
    return [(split.base_offset, split.low, split.high) for split in splits]


def test_full_files_are_read_whole_and_the_newest_up_to_its_last_record(tmp_path: Path) -> None:
    root = _log(tmp_path, _full(0), _full(_SIZE), _part(2 * _SIZE))
    end = len(_part(2 * _SIZE))
    assert _plan(root) == [(0, 0, _SIZE), (_SIZE, 0, _SIZE), (2 * _SIZE, 0, end)]


def test_preallocated_files_are_left_out(tmp_path: Path) -> None:
    root = _log(tmp_path, _full(0), _part(_SIZE), b"", b"")
    assert _plan(root) == [(0, 0, _SIZE), (_SIZE, 0, len(_part(_SIZE)))]


def test_the_newest_file_may_be_full(tmp_path: Path) -> None:
    root = _log(tmp_path, _full(0), _full(_SIZE), b"")
    end = plain_records(_full(_SIZE))[-1]
    assert _plan(root) == [(0, 0, _SIZE), (_SIZE, 0, end.physical_offset + end.size - _SIZE)]


def test_a_log_whose_first_files_are_gone_is_read_from_where_it_begins(tmp_path: Path) -> None:
    root = _log(tmp_path, _full(5 * _SIZE), _part(6 * _SIZE), first=5 * _SIZE)
    assert [base for base, _, _ in _plan(root)] == [5 * _SIZE, 6 * _SIZE]


def test_an_empty_store_has_no_splits(tmp_path: Path) -> None:
    assert _plan(_log(tmp_path)) == []
    assert _plan(_log(tmp_path, b"")) == []


@pytest.mark.parametrize("split_bytes", [1, 100, 1000, 40_000])
def test_splits_cover_a_real_log_without_gaps(split_bytes: int, tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    starts = {
        record.physical_offset
        for path in (store.root / "commitlog").iterdir()
        for record in plain_records(path.read_bytes())
    }
    plan = _plan(store.root, split_bytes)
    for (base, low, high), following in zip(plan, [*plan[1:], None], strict=True):
        assert low < high
        assert low == 0 or base + low in starts
        if following is not None:
            assert base + high == following[0] + following[1]
    assert plan[0][:2] == (0, 0)
    assert plan[-1][0] + plan[-1][2] == int(store.manifest["commitLogMaxOffset"])


def forged_log(root: Path, *, queues: bool) -> tuple[bytes, int]:
    """A log whose second message has a record in its body that is right in every part; returns the log, and where the
    third record begins."""

    def record_at_start(physical_offset: int) -> bytes:
        return record_at(physical_offset, queue_offset=0)

    def forger(physical_offset: int) -> bytes:
        forged = record_at(physical_offset + layout_of(0).head_bytes, body=b"forged", queue_offset=1)
        return record_at(physical_offset, body=forged, queue_offset=1)

    segment = segment_of([record_at_start, forger, lambda at: record_at(at, queue_offset=2)])
    records = plain_records(segment)
    assert decode_record(records[1].body).physical_offset == segment.index(records[1].body), "the forger was lucky"
    _log(root, segment)
    if queues:
        folder = root / "consumequeue" / "orders" / "1"
        folder.mkdir(parents=True)
        entries = b"".join(ENTRY.pack(one.physical_offset, one.size, 0) for one in records)
        (folder / f"{0:020d}").write_bytes(entries.ljust(2000, b"\0"))
    return segment, records[2].physical_offset


@pytest.mark.parametrize("queues", [True, False])
def test_a_record_in_a_body_is_no_boundary(queues: bool, tmp_path: Path) -> None:
    segment, third = forged_log(tmp_path, queues=queues)
    first = plain_records(segment)[1].physical_offset
    for split_bytes in range(first + 1, third + 1, 20):
        assert _plan(tmp_path, split_bytes) == [(0, 0, third), (0, third, len(segment))]
        view = LogView([(tmp_path / "commitlog" / f"{0:020d}", 0)])
        assert [split.low for split in log_splits(view, split_bytes)] == [0, third]


def test_an_entry_of_a_queue_is_a_boundary_without_a_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, third = forged_log(tmp_path, queues=True)
    _log(tmp_path, segment, _part(_SIZE))  # the end of the newest file is found by a walk
    monkeypatch.setattr(scan, "_first_behind", None)
    assert _plan(tmp_path, third - 1)[:2] == [(0, 0, third), (0, third, _SIZE)]


def test_a_topic_that_is_no_name_of_a_folder_is_not_looked_for(tmp_path: Path) -> None:
    forged_log(tmp_path, queues=True)
    anchors = Anchors(str(tmp_path / "commitlog" / f"{0:020d}"))
    assert anchors.point_at(decode_record(record_at(0, queue_offset=0)))
    for changed in (
        {"topic": b"../consumequeue/orders"}, {"topic": b".."}, {"topic": b""}, {"topic": b"orders\0"},
        {"queue_offset": -1}, {"queue_offset": 3}, {"queue_offset": 100}, {"queue_id": 2}, {"body": b"longer"},
    ):  # fmt: skip
        assert not anchors.point_at(decode_record(record_at(0, **{"queue_offset": 0, **changed})))


def test_a_false_blank_hides_no_records(tmp_path: Path) -> None:
    whole = bytearray(_full(0))
    second = plain_records(whole)[1].physical_offset
    whole[second : second + 8] = pack_blank(int.from_bytes(whole[second : second + 4], "big"))
    root, count = _log(tmp_path, bytes(whole), _part(_SIZE)), len(plain_records(_full(0)))
    (split, _) = plan_splits(find_segments(str(root), []), 1 << 20)
    plan = read_plan(store_options({"path": str(root)}), ["queueOffset"])
    said = f"damage at byte {second} .*: a blank that says {len(record_at(0))} bytes where {_SIZE - second} are left"
    with pytest.raises(StoreError, match=said):
        list(read_split(split, plan))
    skipping = replace(plan, corrupt_records=CorruptRecords.SKIP)
    assert sum(map(len, read_split(split, skipping))) == count - 1
    log = LogView(sorted((path, int(path.name)) for path in (root / "commitlog").iterdir()))
    for parts in (log.walk(), log.runs()):
        (damage,) = (part for _, part in parts if isinstance(part, Damage))
        assert (damage.position, damage.end) == (second, 2 * second)


@pytest.mark.parametrize(
    ("sizes", "split_bytes", "expected"),
    [
        ([], 1 << 27, []),
        ([1 << 20] * 200, 1 << 27, [12] * 16 + [8]),
        ([1 << 20] * 8, 1 << 27, [4, 4]),
        ([1 << 16] * 200, 1 << 27, [64, 64, 64, 8]),
        ([1 << 16] * 8, 1 << 16, [1] * 8),
        ([1 << 27] * 3, 1 << 27, [1, 1, 1]),
        ([(1 << 27) + 5, 10, 1 << 27], 1 << 27, [1, 1, 1]),
    ],
)
def test_small_splits_share_a_task(sizes: list[int], split_bytes: int, expected: list[int]) -> None:
    splits = [Split(f"/{number}", number, 0, size) for number, size in enumerate(sizes)]
    groups = grouped(splits, split_bytes)
    assert [split for group in groups for split in group] == splits
    assert list(map(len, groups)) == expected


def test_a_missing_file_in_the_middle_is_named(tmp_path: Path) -> None:
    root = _log(tmp_path, _full(0), _full(_SIZE), _part(2 * _SIZE))
    (root / "commitlog" / f"{_SIZE:020d}").unlink()
    with pytest.raises(StoreMismatch, match=f"commit log bytes {_SIZE} to {2 * _SIZE} are missing before .*: restore"):
        _plan(root)


def test_two_copies_of_a_file_are_named(tmp_path: Path) -> None:
    _log(tmp_path / "a", _full(0))
    _log(tmp_path / "b", _part(0))
    with pytest.raises(StoreMismatch, match=r"reaches into .*: keep one copy"):
        find_segments("", [str(tmp_path / "a" / "commitlog"), str(tmp_path / "b" / "commitlog")])


def test_directories_of_one_log_are_merged_by_file_name(tmp_path: Path) -> None:
    _log(tmp_path / "a", _full(0))
    _log(tmp_path / "b", _full(_SIZE), first=_SIZE)
    _log(tmp_path / "a", _part(2 * _SIZE), first=2 * _SIZE)
    folders = [str(tmp_path / name / "commitlog") for name in ("b", "a")]
    assert [segment.base_offset for segment in find_segments("", folders)] == [0, _SIZE, 2 * _SIZE]


def test_other_files_of_the_directory_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    root = _log(tmp_path, _part(0))
    (root / "commitlog" / "lock").write_text("lock")
    (root / "commitlog" / f"{_SIZE:020d}").touch()
    assert len(find_segments(str(root), [])) == 1


def test_a_directory_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="commitlog does not exist: give the store directory"):
        find_segments(str(tmp_path), [])
    (tmp_path / "commitlog").touch()
    with pytest.raises(StoreError, match="commitlog is not a directory: give the store directory"):
        find_segments(str(tmp_path), [])


def test_paths_may_be_file_addresses() -> None:
    assert local_path("file:///data/store") == local_path("file:/data/store") == Path("/data/store")
    assert local_path("store").is_absolute()
    with pytest.raises(StoreError, match="s3://bucket/store is not on a file system"):
        local_path("s3://bucket/store")


def test_a_file_that_has_vanished_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "00000000000000000000")
    for attempt in (lambda: map_file(path), lambda: data_end(path, 10), lambda: plan_splits([Segment(path, 0, 9)], 9)):
        with pytest.raises(StoreError, match=r"has vanished since the query was planned: .*; load the store again"):
            attempt()


def test_the_hole_of_a_preallocated_file_is_not_data(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(_part(0))
    os.truncate(path, 64 << 20)
    assert len(_part(0)) <= data_end(str(path), 64 << 20) < 1 << 20
    path.write_bytes(b"")
    os.truncate(path, 1 << 20)
    assert data_end(str(path), 1 << 20) == 0


def test_a_split_holds_a_place_and_nothing_else() -> None:
    assert Split("/s", 0, 1, 2).__struct_fields__ == ("path", "base_offset", "low", "high")


# ---------------------------------------------------------------- files and records that seem to be the end


def test_a_missing_newest_file_before_a_preallocated_one_is_named(tmp_path: Path) -> None:
    root = _log(tmp_path, _full(0), _part(_SIZE), bytes(_SIZE))
    assert len(_plan(root)) == 2
    (root / "commitlog" / f"{_SIZE:020d}").unlink()
    said = f"commit log bytes {_SIZE} to {2 * _SIZE} are missing before .*{2 * _SIZE}: restore"
    with pytest.raises(StoreMismatch, match=said):
        _plan(root)


@pytest.mark.parametrize("is_newest", [False, True])
def test_a_false_blank_that_says_what_is_left_hides_no_records(is_newest: bool, tmp_path: Path) -> None:
    whole = bytearray(_full(0))
    second = plain_records(whole)[1].physical_offset
    whole[second : second + 8] = pack_blank(_SIZE - second)
    count = len(plain_records(_full(0)))
    root = _log(tmp_path, bytes(whole), bytes(_SIZE) if is_newest else _part(_SIZE))
    split = plan_splits(find_segments(str(root), []), 1 << 20)[0]
    plan = read_plan(store_options({"path": str(root)}), ["queueOffset"])
    with pytest.raises(StoreError, match=f"damage at byte {second} .*: {FALSE_BLANK}"):
        list(read_split(split, plan))
    skipping = replace(plan, corrupt_records=CorruptRecords.SKIP)
    assert sum(map(len, read_split(split, skipping))) == count - 1
    log = LogView(sorted((path, int(path.name)) for path in (root / "commitlog").iterdir()))
    for parts in (log.walk(), log.runs()):
        (damage,) = (part for _, part in parts if isinstance(part, Damage))
        assert (damage.position, damage.end, damage.reason) == (second, 2 * second, FALSE_BLANK)
    for split_bytes in (1, second, 3 * second):
        parts = scan.split(bytes(whole), 0, _SIZE, split_bytes)
        walked = [part for low, high in parts for part in scan.walk(bytes(whole), 0, low, high)]
        assert sum(len(part) for part in walked if isinstance(part, Records)) == count - 1


@pytest.mark.parametrize(("stored", "is_stale"), [(-1, True), (0, False), (1, False)])
def test_a_record_behind_a_blank_is_stale_if_it_was_stored_before_the_last_one(stored: int, is_stale: bool) -> None:
    """A recovery cut the log, the file was filled again, and a blank closed it before bytes of the old log."""
    stored_ms = 1_700_000_000_005
    data = bytearray(segment_of([record_at, record_at]))
    blank_at, size = len(data), len(data) + 1000
    data += pack_blank(1000) + bytes(12)
    stale_at = len(data)
    data += record_at(stale_at, store_timestamp=stored_ms + stored)
    data += bytes(size - len(data))
    found = [(part.position, part.end) for part in scan.walk(bytes(data), 0) if isinstance(part, Damage)]
    assert found[:1] == ([] if is_stale else [(blank_at, stale_at)])
