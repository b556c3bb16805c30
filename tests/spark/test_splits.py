"""Which files a log has, where it ends, and how it is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rmqkit.arrow.fs import Segment, data_end, find_segments, local_path, map_file
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import StoreError, StoreMismatch
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
