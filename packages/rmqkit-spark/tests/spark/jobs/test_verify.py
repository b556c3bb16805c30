"""Tasks have the findings of `rmqkit.store.offline.check`, for every damage and every split of the log."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import StoreError, StoreLocked
from rmqkit.spark.jobs.verify import Verified, verify
from rmqkit.store.offline import check as fsck
from rmqkit.store.offline.findings import Kind, Report
from rmqkit.store.settings import StoreSettings
from tests.examples import examples
from tests.golden_stores import unpack_golden
from tests.spark.local_tasks import LOCAL
from tests.spark.messages import plain_records

# The cases of the plain check, which run here as well, by tasks:
from tests.store.offline.test_fsck import (  # noqa: F401
    any_golden,
    damaged,
    golden,
    test_a_batch_entry_with_another_count,
    test_a_flipped_bit_in_a_body,
    test_a_flipped_bit_outside_of_the_body_of_a_record_with_a_crc,
    test_a_golden_store_is_sound_and_stays_as_it_is,
    test_a_missing_segment_and_a_file_that_is_none,
    test_a_queue_entry_that_points_elsewhere,
    test_a_queue_that_is_ahead_of_the_log,
    test_a_queue_that_lacks_its_last_entry_or_all,
    test_a_torn_record_at_the_end,
    test_a_truncated_index_file,
    test_a_truncated_queue_file,
    test_a_truncated_segment,
    test_a_wrong_tags_code,
    test_an_address_without_a_unit,
    test_an_extension_unit_of_a_wrong_size,
    test_an_extension_unit_of_another_message,
    test_an_index_hash_of_no_key_of_its_record,
    test_blanks_fill_the_start_of_a_queue_and_nothing_else,
    test_damage_in_an_index_file,
    test_everything_of_a_golden_store_is_looked_at,
    test_file_sizes_are_found_without_a_configuration_when_the_index_has_the_default_sizes,
    test_stale_records_behind_the_end_are_no_damage,
    test_the_walk_continues_after_a_record_without_magic,
    test_two_entries_in_the_wrong_order,
    test_unknown_index_sizes_have_to_be_said,
    test_what_retention_removed_is_no_damage,
    test_zeros_in_the_middle_are_damage,
    without_ext,
)
from tests.store.stores import golden_settings, message, opened, put_all, small_settings, tree

SPLITS = (1_500, 40_000, 1 << 20)


@pytest.fixture(autouse=True)
def by_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of the plain check call this one."""
    by_tasks = functools.partial(verify, LOCAL, split_bytes=20_000)
    monkeypatch.setattr("tests.store.offline.test_fsck.verify", lambda root, *sizes: by_tasks(str(root), *sizes))


def as_report(verified: Verified) -> Report:
    """Return the report that the plain check returns."""
    return Report(**{name: getattr(verified, name) for name in Report.__struct_fields__})


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, without_ext: Any) -> list[tuple[Path, StoreSettings]]:  # noqa: F811
    """Stores to be damaged: of real brokers, with extension and batch queues, and one with plain queues."""
    unpacked = [unpack_golden(name, tmp_path_factory.mktemp("golden")) for name in ("5.4.0", "4.9.4", "5.4.0-ipv6-crc")]
    return [without_ext, *((store.root, golden_settings(store)) for store in unpacked)]


@examples(25)
@given(
    which=st.integers(0, 3),
    tree_name=st.sampled_from(["commitlog", "commitlog", "consumequeue", "batchconsumequeue", "index"]),
    file=st.floats(0, 0.999),
    place=st.floats(0, 0.999),
    noise=st.binary(min_size=1, max_size=40) | st.sampled_from([bytes(3000), b"\xff" * 300]),
    split_bytes=st.sampled_from(SPLITS),
    is_unclean=st.booleans(),
)
def test_any_damage_is_found_as_without_tasks(stores, which, tree_name, file, place, noise, split_bytes, is_unclean):
    root, sizes = stores[which]
    tree_name = tree_name if (root / tree_name).is_dir() else "consumequeue"
    path, before = damaged(root / tree_name, file, place, noise)
    try:
        if is_unclean:
            (root / "abort").touch()
        expected = fsck.verify(root, sizes)
        found = verify(LOCAL, str(root), sizes, split_bytes=split_bytes)
        assert as_report(found) == expected
        assert sum(one.records for one in found.segments) == expected.checked["records"]
        assert sum(one.damaged_bytes for one in found.segments) == expected.damaged_bytes
        assert sum(one.bad_crcs for one in found.segments) == expected.counts["body CRC"]
    finally:
        path.write_bytes(before)
        (root / "abort").unlink(missing_ok=True)


def test_counts_of_the_files_of_a_log(tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    segments = sorted((store.root / "commitlog").iterdir())
    data = bytearray(segments[1].read_bytes())
    records = plain_records(bytes(data))
    at = [record.physical_offset - int(segments[1].name) for record in records]
    data[at[3] + 4] ^= 1  # no magic
    data[at[7] + 88] ^= 1  # another body
    segments[1].write_bytes(data)
    found = verify(LOCAL, str(store.root), golden_settings(store), split_bytes=10_000)
    count = found.segments[1]
    assert (count.segment, count.base_offset) == (str(segments[1]), int(segments[1].name))
    assert (count.records, count.damages, count.bad_crcs) == (len(records) - 1, 1, 1)
    assert count.damaged_bytes == records[3].size
    assert count.bytes + count.damaged_bytes + count.blank_bytes == len(data)
    assert [one.damages for one in found.segments] == [0, 1] + [0] * (len(segments) - 2)


def test_stale_bytes_behind_the_end_count_nowhere(golden) -> None:  # noqa: F811
    path = max((golden.root / "commitlog").iterdir())
    end = int(golden.manifest["commitLogMaxOffset"]) % 131072
    data = path.read_bytes()
    path.write_bytes(data[:end] + b"stale" + data[end + 5 :])
    found = verify(LOCAL, str(golden.root), golden_settings(golden))
    assert found.is_sound
    assert {(one.damages, one.damaged_bytes) for one in found.segments} == {(0, 0)}


def test_stale_records_behind_a_blank_are_no_split_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(commit_log_file_bytes=1 << 16)) as store:
        put_all(store, *(message(body=b"%d" % i) for i in range(20)))
    path = tmp_path / "s/commitlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    offsets = [record.physical_offset for record in plain_records(bytes(data))]
    for offset in offsets[11:]:  # stored before the log was cut and the file filled again
        data[offset + 56 : offset + 64] = (1).to_bytes(8, "big")
    data[offsets[10] : offsets[10] + 8] = (len(data) - offsets[10]).to_bytes(4, "big") + b"\xcb\xd4\x31\x94"
    path.write_bytes(data)
    for split_bytes in (offsets[1], offsets[9], 1 << 20):
        found = verify(LOCAL, str(tmp_path / "s"), small_settings(commit_log_file_bytes=1 << 16), log_only=True,
                       split_bytes=split_bytes)  # fmt: skip
        assert (found.is_sound, found.checked["records"]) == (True, 10)
        assert found.segments[0].blank_bytes == len(data) - offsets[10]


def test_only_the_log_is_looked_at_when_that_is_wanted(golden) -> None:  # noqa: F811
    for name in ("consumequeue", "index"):
        for path in (golden.root / name).rglob("*0"):
            if path.is_file():
                path.write_bytes(b"x")
    found = verify(LOCAL, str(golden.root), log_only=True)
    assert found.is_sound
    assert found.checked["records"] == 534


def test_a_store_in_use_is_looked_at_when_requested(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(KEYS=f"k{i}") for i in range(30)))
        with pytest.raises(StoreLocked):
            verify(LOCAL, str(tmp_path / "s"), small_settings())
        found = verify(LOCAL, str(tmp_path / "s"), small_settings(), read_only=True)
        assert (found.is_sound, found.is_live, found.checked["records"]) == (True, True, 30)
    with pytest.raises(StoreError, match="is not a store"):
        verify(LOCAL, str(tmp_path / "t"))


@pytest.mark.spark
def test_on_spark(spark: Any, golden) -> None:  # noqa: F811
    sizes = golden_settings(golden)
    before = tree(golden.root)
    found = verify(spark, str(golden.root), sizes, split_bytes=30_000)
    assert as_report(found) == fsck.verify(golden.root, sizes)
    assert found.is_sound
    assert tree(golden.root) == before
    path = golden.root / "commitlog" / f"{131072:020d}"
    data = bytearray(path.read_bytes())
    data[5000:5100] = bytes(100)
    path.write_bytes(data)
    found = verify(spark, str(golden.root), sizes, split_bytes=30_000)
    assert as_report(found) == fsck.verify(golden.root, sizes)
    assert found.counts[Kind.RECORD] + found.counts[Kind.BODY_CRC] >= 1
