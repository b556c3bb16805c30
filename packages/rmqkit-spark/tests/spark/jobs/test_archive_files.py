"""Parquet files of an archive, without Spark: the rows of a split, by partition, within bounds, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from rmqkit.arrow.options import CorruptRecords, VerifyCrc
from rmqkit.arrow.reader import ReadPlan
from rmqkit.arrow.schema import MESSAGE_COLUMNS
from rmqkit.arrow.splits import Split
from rmqkit.errors import StoreError
from rmqkit.spark.jobs import archive_files
from rmqkit.spark.jobs.archive import ArchivePlan, SplitFiles, archive_split
from rmqkit.spark.jobs.archive_files import PARTITION_COLUMNS, difference, partition_folder
from rmqkit.spark.jobs.archive_target import Target
from tests.examples import examples
from tests.spark.messages import MakeRecord, plain_rows, record_at, record_makers, rows_of, segment_of

_DAY_MS = 86_400_000
_BASE = 1 << 30


def _at(**changed: Any) -> MakeRecord:
    return lambda offset: record_at(offset, **changed)


def _archived(
    folder: Path, makers: Sequence[MakeRecord], partition_by: Sequence[str] = PARTITION_COLUMNS, **read: Any
) -> SplitFiles:
    """The files that a task makes of one log file; they are in ``folder / "staged"``."""
    return _archived_bytes(folder, segment_of(makers, base_offset=_BASE), partition_by, **read)


def _archived_bytes(folder: Path, segment: bytes, partition_by: Sequence[str] = (), **read: Any) -> SplitFiles:
    path = folder / f"{_BASE:020d}"
    path.write_bytes(segment)
    plan = ArchivePlan(
        Target(str(folder)),
        "staged",
        tuple(partition_by),
        ReadPlan(columns=MESSAGE_COLUMNS, **read),
        has_bodies_crc=True,
    )
    return archive_split(plan, Split(str(path), _BASE, 0, len(segment)))


def _rows(folder: Path, done: SplitFiles) -> list[dict[str, Any]]:
    tables = [pq.ParquetFile(folder / "staged" / file.path).read() for file in done.files]
    rows = rows_of([batch for table in tables for batch in table.to_batches()])
    return sorted(rows, key=lambda row: (row["commitLogOffset"], row["queueOffset"]))


@examples(60)
@given(
    makers=st.lists(record_makers(), max_size=8),
    partition_by=st.sampled_from([(), ("topic",), ("day",), ("day", "topic")]),
)
def test_the_rows_of_any_records_are_in_the_files(
    tmp_path_factory: pytest.TempPathFactory, makers: list[MakeRecord], partition_by: Sequence[str]
) -> None:
    folder = tmp_path_factory.mktemp("archive")
    done = _archived(folder, makers, partition_by, corrupt_records=CorruptRecords.SKIP)
    readable = plain_rows_of(makers)
    assert _rows(folder, done) == readable
    assert done.rows == sum(file.rows for file in done.files) == len(readable)
    assert done.records == len(makers)
    files = SubTreeFileSystem(str(folder / "staged"), LocalFileSystem())
    assert [difference(files, file.path, file, reads_all=True) for file in done.files] == [""] * len(done.files)


def plain_rows_of(makers: Sequence[MakeRecord]) -> list[dict[str, Any]]:
    """Return the plain decoder's rows of the records that it can read."""
    rows: list[dict[str, Any]] = []
    at = _BASE
    for make in makers:
        record = make(at)
        try:
            rows += plain_rows(record)
        except Exception as error:  # noqa: BLE001 - bodies that cannot be unpacked are left out here, too
            assert type(error).__name__ == "BodyError", error
        at += len(record)
    return rows


def test_files_are_where_their_partition_says(tmp_path: Path) -> None:
    makers = [
        _at(topic=b"%RETRY%g|1", store_timestamp=_DAY_MS),
        _at(topic=b"orders", store_timestamp=2 * _DAY_MS - 1),
        _at(topic=b"orders", store_timestamp=2 * _DAY_MS),
        _at(topic=b"orders", store_timestamp=_DAY_MS),
    ]
    done = _archived(tmp_path, makers)
    found = {(file.path.rpartition("/")[0], file.topic, file.day, file.rows) for file in done.files}
    assert found == {
        ("topic=%25RETRY%25g%7C1/day=1970-01-02", "%RETRY%g|1", "1970-01-02", 1),
        ("topic=orders/day=1970-01-02", "orders", "1970-01-02", 2),
        ("topic=orders/day=1970-01-03", "orders", "1970-01-03", 1),
    }
    assert all(Path(file.path).name.startswith(f"{_BASE:020d}-") for file in done.files)
    [ordered] = [file for file in done.files if file.rows == 2]
    size = len(record_at(0))
    assert ordered.segment == _BASE
    assert (ordered.stored_min_ms, ordered.stored_max_ms) == (_DAY_MS, 2 * _DAY_MS - 1)
    assert ordered.offset_max - ordered.offset_min == 2 * size


def test_folders_are_escaped_as_hive_has_it() -> None:
    assert partition_folder(["topic"], ["a%b/c=d:e"]) == "topic=a%25b%2Fc%3Dd%3Ae"
    assert partition_folder(["topic", "day"], ["日本-x_1", None]) == "topic=日本-x_1/day=__HIVE_DEFAULT_PARTITION__"
    assert partition_folder([], []) == ""
    with pytest.raises(StoreError, match="too long for a folder's name: archive without topic"):
        partition_folder(["topic"], ["x" * 250])


def test_what_is_collected_and_open_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_files, "COLLECTED_BYTES_MAX", 2000)
    monkeypatch.setattr(archive_files, "OPEN_FILES_MAX", 2)
    makers = [_at(topic=f"t{i % 5}".encode(), queue_offset=i, body=b"x" * 100) for i in range(40)]
    open_at_once: list[int] = []
    closed = archive_files.PartitionFiles._create

    def counted(self: archive_files.PartitionFiles, *given: Any) -> Any:
        file = closed(self, *given)
        open_at_once.append(len(self._open) + 1)
        return file

    monkeypatch.setattr(archive_files.PartitionFiles, "_create", counted)
    done = _archived(tmp_path, makers, ("topic",), batch_rows=4)
    assert max(open_at_once) == 2
    assert len(done.files) > 5
    assert len({file.path for file in done.files}) == len(done.files)
    assert [row["queueOffset"] for row in _rows(tmp_path, done)] == list(range(40))


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    done = _archived(tmp_path, [_at(body=b"hello" * 100), _at(body=b"world" * 100)], ())
    [file] = done.files
    files = SubTreeFileSystem(str(tmp_path / "staged"), LocalFileSystem())
    path = tmp_path / "staged" / file.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert (
        difference(files, file.path, file, reads_all=False) == f"has {len(whole) - 1} bytes, written were {len(whole)}"
    )
    path.write_bytes(whole[:-4] + b"nope")
    assert difference(files, file.path, file, reads_all=False).startswith("cannot be read: ")
    for at in (4, len(whole) // 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert difference(files, file.path, file, reads_all=True).startswith("has CRC ")
    path.unlink()
    assert difference(files, file.path, file, reads_all=False) == f"has no bytes, written were {len(whole)}"


def test_other_rows_and_bodies_are_found(tmp_path: Path) -> None:
    [one] = _archived(tmp_path, [_at(body=b"1"), _at(body=b"2")], ()).files
    files = SubTreeFileSystem(str(tmp_path / "staged"), LocalFileSystem())
    assert "has 2 rows of" in difference(files, one.path, replace(one, rows=3), reads_all=False)
    assert "has 2 rows of" in difference(files, one.path, replace(one, offset_max=0), reads_all=False)
    assert "gives bodies of CRC" in difference(files, one.path, replace(one, bodies_crc=1), reads_all=True)


def test_what_gives_no_row_is_counted(tmp_path: Path) -> None:
    good, wrong = record_at(_BASE), bytearray(record_at(_BASE + len(record_at(0))))
    wrong[90] ^= 1  # in the body: the CRC does not match
    broken = b"\xff" * 100
    last = record_at(_BASE + len(good) + len(wrong) + len(broken))
    segment = bytes(good + wrong + broken + last)
    with pytest.raises(StoreError, match="damage at byte"):
        _archived_bytes(tmp_path, segment)
    done = _archived_bytes(tmp_path, segment, corrupt_records=CorruptRecords.SKIP)
    assert (done.records, done.rows, done.lost, done.counts.damages, done.counts.bad_crcs) == (3, 3, 1, 1, 0)
    with pytest.raises(
        StoreError, match=rf"commitLogOffset {_BASE + len(good)} does not match its CRC; verifyCrc=drop"
    ):
        _archived_bytes(tmp_path, segment, corrupt_records=CorruptRecords.SKIP, verify_crc=VerifyCrc.FAIL)
    done = _archived_bytes(tmp_path, segment, corrupt_records=CorruptRecords.SKIP, verify_crc=VerifyCrc.DROP)
    assert (done.records, done.rows, done.lost, done.counts.bad_crcs) == (3, 2, 2, 1)


def test_files_hold_all_columns_with_their_types(tmp_path: Path) -> None:
    [file] = _archived(tmp_path, [_at()]).files
    schema = pq.read_schema(tmp_path / "staged" / file.path)
    assert schema.names == [column.name for column in MESSAGE_COLUMNS]
    assert schema.field("storeTimestamp").type == pa.timestamp("us", tz="UTC")
    metadata = pq.read_metadata(tmp_path / "staged" / file.path)
    assert {metadata.row_group(0).column(i).compression for i in range(metadata.num_columns)} == {"ZSTD"}
