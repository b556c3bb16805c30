"""Batches of a typed table: each is added once, in every format, also after a kill at each step of a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from rmqkit.errors import SettingsError, StoreError
from rmqkit.spark.jobs import archive_target, typed_files
from rmqkit.spark.jobs.archive_files import ArchivedFile
from rmqkit.spark.jobs.archive_target import Target
from rmqkit.spark.jobs.typed_files import DataFile, groups
from rmqkit.spark.jobs.typed_schema import RowSchema, TypedColumn
from rmqkit.spark.jobs.typed_target import Place, TypedTable, check_columns, opened_table

FORMATS = ("parquet", "delta", "iceberg")
ID = TypedColumn("id", "int64", is_required=True)
NAME = TypedColumn("name", "string", is_required=False)
SCHEMA = pa.schema([("id", pa.int64())])
IDS = RowSchema("s", '{"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}')
NAMED = RowSchema("s", IDS.text.replace("}}", '}, "name": {"type": "string"}}'))


class Killed(BaseException):
    """The process ends here."""


class Lake:
    """A folder with one table of a format."""

    def __init__(self, root: Path, table_format: str) -> None:
        self.place = Place.of(
            {"parquet": f"{root}/t", "delta": f"delta://{root}/t"}.get(table_format, "iceberg://c/n.t")
        )
        self.catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}"}

    @contextmanager
    def opened(self, schema: pa.Schema = SCHEMA, columns: tuple[TypedColumn, ...] = (ID,)) -> Iterator[TypedTable]:
        with opened_table(self.place, schema, columns, self.catalog) as table:
            yield table

    def rows(self) -> list[dict[str, Any]]:
        """Read the table with the library of its format."""
        if self.place.table_format == "iceberg":
            catalog = load_catalog("c", **self.catalog)
            rows = catalog.load_table("n.t").scan().to_arrow()
            catalog.close()
        elif self.place.table_format == "delta":
            rows = DeltaTable(self.place.text).to_pyarrow_table()
        else:
            rows = pa.concat_tables(
                map(pq.read_table, sorted(Path(self.place.text).glob("*.parquet"))), promote_options="default"
            )
        return sorted(rows.to_pylist(), key=lambda row: int(row["id"]))

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows()]


@pytest.fixture(params=FORMATS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake(tmp_path, request.param)


def staged(table: TypedTable, number: int, rows: pa.Table) -> list[ArchivedFile]:
    """Write a file of a batch, as a task does."""
    target: Target = table.target
    folder = Path(target.root, target.staging(number))
    folder.mkdir(parents=True)
    path = f"{number}-{rows['id'][0]}.parquet"
    pq.write_table(rows, folder / path)
    size = (folder / path).stat().st_size
    return [ArchivedFile(path, 0, None, None, len(rows), size, 0, 0, None, None, 0)]


def ids(*numbers: int) -> pa.Table:
    return pa.table({"id": list(numbers)}, schema=SCHEMA)


def add(table: TypedTable, number: int, rows: pa.Table, schema: RowSchema = IDS) -> bool:
    return table.publish(number, "q", staged(table, number, rows), schema)


def test_a_repeated_batch_is_not_added_twice(lake: Lake) -> None:
    with lake.opened() as table:
        assert add(table, 1, ids(1, 2))
        assert add(table, 2, ids(3))
        assert not add(table, 2, ids(3))
    with lake.opened() as table:
        assert (table.number, table.schema) == (2, IDS.digest)
        assert not add(table, 2, ids(3))
        assert add(table, 3, ids(4))
    assert lake.ids() == [1, 2, 3, 4]


def _before(original: Callable[..., Any], count: int) -> Callable[..., Any]:
    left = iter(range(count))

    def call(*given: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return original(*given)

    return call


# The moves of a batch: its manifest becomes final, its file gets its place, its manifest gets its last name.
@pytest.mark.parametrize(("moves", "is_final"), [(0, False), (1, True), (2, True)])
def test_a_batch_that_was_killed_is_there_once_after_its_repetition(
    lake: Lake, moves: int, is_final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lake.opened() as table:
        add(table, 1, ids(1))
    with monkeypatch.context() as patched, lake.opened() as table:
        patched.setattr(archive_target, "_move", _before(archive_target._move, moves))
        with pytest.raises(Killed):
            add(table, 2, ids(2, 3))
    with lake.opened() as table:
        assert table.number == (2 if is_final else 1)
        assert lake.ids() == ([1, 2, 3] if is_final else [1])
        assert add(table, 2, ids(2, 3)) is not is_final
    assert lake.ids() == [1, 2, 3]


def test_a_batch_without_rows_counts_and_changes_nothing(lake: Lake) -> None:
    with lake.opened() as table:
        assert add(table, 1, ids(1))
        assert table.publish(2, "q", [], IDS)
        assert not table.publish(2, "q", [], IDS)
        assert add(table, 3, ids(3))
    assert lake.ids() == [1, 3]


def test_a_new_optional_column_is_null_in_older_rows(lake: Lake) -> None:
    wider = pa.schema([*SCHEMA, ("name", pa.string())])
    with lake.opened() as table:
        add(table, 1, ids(1))
    with lake.opened(wider, (ID, NAME)) as table:
        add(table, 2, pa.table({"id": [2], "name": ["b"]}, schema=wider), NAMED)
    assert lake.rows() == [{"id": 1, "name": None}, {"id": 2, "name": "b"}]
    with (
        pytest.raises(SettingsError, match="has the column name, the schema has not: keep the property"),
        lake.opened(),
    ):
        pass


def test_another_checkpoint_and_a_gap_are_refused(lake: Lake) -> None:
    with lake.opened() as table:
        with pytest.raises(StoreError, match=r"ends with batch -1, the checkpoint is at batch 1: restore the table"):
            add(table, 2, ids(2))
        add(table, 1, ids(1))
        with pytest.raises(SettingsError, match=r"belongs to another checkpoint \(query q\): give that checkpoint"):
            table.check(1, "r")


def test_a_table_is_of_one_job_at_a_time(tmp_path: Path) -> None:
    lake = Lake(tmp_path, "parquet")
    with lake.opened(), pytest.raises(StoreError, match="another run writes to the typed table"), lake.opened():
        pass


def test_files_and_tables_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "notes.txt").touch()
    with (
        pytest.raises(SettingsError, match=r"is not empty \(notes.txt\) and no typed table"),
        Lake(tmp_path, "delta").opened(),
    ):
        pass
    lake = Lake(tmp_path, "iceberg")
    catalog = load_catalog("c", **lake.catalog)
    catalog.create_namespace("n")
    catalog.create_table("n.t", SCHEMA)
    catalog.close()
    with pytest.raises(SettingsError, match=r"Iceberg table n.t was made by another program"), lake.opened():
        pass
    lake.catalog = {"type": "nothing"}
    with pytest.raises(SettingsError, match=r"catalog c cannot be opened: .*: give its properties"), lake.opened():
        pass


def test_another_format_of_a_table_is_refused(tmp_path: Path) -> None:
    with Lake(tmp_path, "parquet").opened() as table:
        add(table, 1, ids(1))
    with pytest.raises(SettingsError, match=r"has the format parquet"), Lake(tmp_path, "delta").opened():
        pass


def data_file_count(lake: Lake) -> int:
    if lake.place.table_format == "delta":
        return len(DeltaTable(lake.place.text).file_uris())
    if lake.place.table_format == "parquet":
        return len(list(Path(lake.place.text).glob("*.parquet")))
    catalog = load_catalog("c", **lake.catalog)
    count = len(list(catalog.load_table("n.t").scan().plan_files()))
    catalog.close()
    return count


def test_small_files_are_merged(lake: Lake) -> None:
    with lake.opened() as table:
        table.compact()
        for number in (1, 2, 3):
            add(table, number, ids(number))
        table.compact()
        assert data_file_count(lake) == 1
        table.compact()
        assert not add(table, 3, ids(3))
        assert add(table, 4, ids(4))
        assert (data_file_count(lake), lake.ids()) == (2, [1, 2, 3, 4])
        table.compact()
    with lake.opened() as table:
        assert not add(table, 4, ids(4))
        assert add(table, 5, ids(5))
    assert (data_file_count(lake), lake.ids()) == (2, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(("limit", "row_groups"), [(1 << 20, 1), (15, 2)])
def test_rows_of_small_files_share_row_groups(
    tmp_path: Path, limit: int, row_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed_files, "ROW_GROUP_BYTES", limit)
    lake = Lake(tmp_path, "parquet")
    with lake.opened() as table:
        for number in (1, 2, 3):
            add(table, number, ids(number))
        table.compact()
    [path] = Path(lake.place.text).glob("*.parquet")
    assert (pq.read_metadata(path).num_row_groups, lake.ids()) == (row_groups, [1, 2, 3])


def test_merged_files_have_nulls_in_new_columns(lake: Lake) -> None:
    with lake.opened() as table:
        add(table, 1, ids(1))
    wider = pa.schema([*SCHEMA, ("name", pa.string())])
    with lake.opened(wider, (ID, NAME)) as table:
        add(table, 2, pa.table({"id": [2], "name": ["b"]}, schema=wider), NAMED)
        table.compact()
    assert data_file_count(lake) == 1
    assert lake.rows() == [{"id": 1, "name": None}, {"id": 2, "name": "b"}]


# The moves of a merge are those of a batch. The replaced files of a plain folder are deleted after the first move.
@pytest.mark.parametrize("table_format", ["parquet", "iceberg"])
@pytest.mark.parametrize(("moves", "left"), [(0, [1, 2]), (1, []), (2, [1, 2])])
def test_a_merge_that_was_killed_is_finished_by_the_next_run_and_no_row_is_there_twice(
    tmp_path: Path, table_format: str, moves: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, table_format)
    with lake.opened() as table:
        add(table, 1, ids(1))
        add(table, 2, ids(2))
    with monkeypatch.context() as patched, lake.opened() as table:
        patched.setattr(archive_target, "_move", _before(archive_target._move, moves))
        with pytest.raises(Killed):
            table.compact()
    if left or table_format == "iceberg":
        assert lake.ids() == [1, 2]
    else:
        assert list(Path(lake.place.text).glob("*.parquet")) == []
    with lake.opened() as table:
        assert table.number == 2
        assert (data_file_count(lake), lake.ids()) == (1 if moves else 2, [1, 2])
        assert not add(table, 2, ids(2))
        assert add(table, 3, ids(3))
    assert lake.ids() == [1, 2, 3]


def test_a_killed_merge_of_an_iceberg_table_is_committed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path, "iceberg")
    with lake.opened() as table:
        add(table, 1, ids(1))
        add(table, 2, ids(2))
    with monkeypatch.context() as patched, lake.opened() as table:
        patched.setattr(archive_target, "_move", _before(archive_target._move, 2))
        with pytest.raises(Killed):
            table.compact()
    snapshots = snapshot_count(lake)
    with lake.opened():
        pass
    assert (snapshot_count(lake), lake.ids()) == (snapshots, [1, 2])


def test_rows_that_another_program_deletes_during_a_merge_stay_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, "iceberg")
    with lake.opened() as table:
        for number in (1, 2, 3):
            add(table, number, ids(number))
    with monkeypatch.context() as patched, lake.opened() as table:
        patched.setattr(archive_target, "_move", _before(archive_target._move, 1))
        with pytest.raises(Killed):
            table.compact()
    catalog = load_catalog("c", **lake.catalog)
    catalog.load_table("n.t").delete("id == 1")
    catalog.close()
    with lake.opened() as table:
        assert (data_file_count(lake), lake.ids()) == (2, [2, 3])
        table.compact()
    assert (data_file_count(lake), lake.ids()) == (1, [2, 3])


def snapshot_count(lake: Lake) -> int:
    catalog = load_catalog("c", **lake.catalog)
    count = len(catalog.load_table("n.t").snapshots())
    catalog.close()
    return count


def test_only_small_files_are_merged_and_not_into_too_large_ones() -> None:
    small = typed_files.SMALL_BYTES
    files = [DataFile(f"{i}", small - 1) for i in range(6)] + [DataFile("a", small)]
    assert list(groups(files)) == [["0", "1", "2", "3"], ["4", "5"]]
    assert list(groups(files[:1])) == []
    assert list(groups(files[4:])) == [["4", "5"]]


@pytest.mark.parametrize(
    ("text", "place", "rejected"),
    [
        ("lake/orders/", Place("parquet", "lake/orders"), "lake/orders_rejected"),
        ("parquet:///data/orders", Place("parquet", "/data/orders"), "/data/orders_rejected"),
        ("s3://bucket/orders", Place("parquet", "s3://bucket/orders"), "s3://bucket/orders_rejected"),
        ("delta://s3://bucket/orders", Place("delta", "s3://bucket/orders"), "s3://bucket/orders_rejected"),
        ("iceberg://prod/shop.orders", Place("iceberg", "prod/shop.orders"), "prod/shop.orders_rejected"),
    ],
)
def test_targets_have_a_format_and_a_place(text: str, place: Place, rejected: str) -> None:
    assert Place.of(text) == place
    assert place.rejected == Place(place.table_format, rejected)


@pytest.mark.parametrize("text", ["", "delta://", "iceberg://orders", "iceberg://prod/orders"])
def test_a_target_without_a_table_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"is no table: write PATH, delta://PATH or iceberg://CATALOG"):
        Place.of(text)


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ([ID], "has the column name, the schema has not: keep the property"),
        ([ID, TypedColumn("name", "int64", is_required=False)], "column name is string, the schema says int64"),
        ([ID, TypedColumn("name", "string", is_required=True)], "older rows may lack name: keep the property optional"),
        (
            [ID, NAME, TypedColumn("n", "int64", is_required=True)],
            "older rows lack the new property n: make it optional",
        ),
    ],
)
def test_a_schema_that_does_not_continue_the_table_is_refused(now: list[TypedColumn], text: str) -> None:
    with pytest.raises(SettingsError, match=f"table t.* {text}"):
        check_columns("t", [ID, NAME], now)


def test_columns_may_be_added_and_become_optional() -> None:
    check_columns("t", [ID], [TypedColumn("id", "int64", is_required=False), NAME])
    check_columns("t", [], [ID])
