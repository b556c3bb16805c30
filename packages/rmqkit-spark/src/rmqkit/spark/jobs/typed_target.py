"""The tables that a stream appends its batches to: each batch once, in Parquet, Delta or Iceberg.

=======================  ===========================================  ================================================
target                   table                                        stores the number of the last batch in
=======================  ===========================================  ================================================
parquet://PATH, or PATH  the Parquet files in the folder              the manifest
delta://PATH             the folder                                   the manifest, and the application transaction
                                                                      ``rmqkit.table`` of the commit with the files
iceberg://CATALOG/TABLE  a table of pyiceberg's catalog               the manifest, and the table property
                                                                      ``rmqkit.table-batch`` of the same commit
=======================  ===========================================  ================================================

Tasks write files to ``_table/staging``. The driver publishes them as a run of an archive
(`rmqkit.spark.jobs.archive_target` has the steps): manifest, moves, the lake's commit, rename of the manifest. The
number of a run is the number of Spark's batch plus 1. A batch that was killed before its manifest is discarded, and
Spark repeats it. A batch that was killed later is finished by the next start, and its repetition finds its number and
adds nothing. A manifest also has the query (the checkpoint) and the columns of the body. Only the last manifest is
stored. A reader of a plain Parquet folder may see a part of a batch while its files are moved.

Merged files are published in the same way, with the number of the last batch, so their manifest replaces the manifest
of the batch. It names the files that they replace. In a plain folder the replaced files are deleted before the merged
files get their places, so no row is there twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Struct

from rmqkit import extras
from rmqkit.arrow.fs import resolve
from rmqkit.errors import SettingsError, StoreError
from rmqkit.spark.jobs.archive_files import ArchivedFile
from rmqkit.spark.jobs.archive_target import ArchiveSettings, Commit, Run, Target
from rmqkit.spark.jobs.lake import TABLE_FORMATS, commit_delta, opened_catalog
from rmqkit.spark.jobs.typed_files import DataFile, data_files, groups, merged
from rmqkit.spark.jobs.typed_schema import RowSchema, TypedColumn

_APPLICATION = "rmqkit.table"
_BATCH_PROPERTY = "rmqkit.table-batch"
_REJECTED = "_rejected"


class Place(Struct, frozen=True):
    """A table's format, and its path, address, or name with its catalog."""

    table_format: str
    text: str

    @classmethod
    def of(cls, text: str) -> Place:
        """Parse a target. Raises SettingsError: it has no path, or the name of an Iceberg table is incomplete."""
        table_format, mark, rest = text.partition("://")
        if not mark or table_format not in TABLE_FORMATS:
            table_format, rest = "parquet", text
        place = cls(table_format, rest.rstrip("/"))
        catalog, _, table = place.text.partition("/")
        if not place.text or (table_format == "iceberg" and not (catalog and table.strip(".").count("."))):
            raise SettingsError(
                f"target {text!r} is no table: write PATH, delta://PATH or iceberg://CATALOG/NAMESPACE.TABLE"
            )
        return place

    @property
    def rejected(self) -> Place:
        """The table for the messages that do not fit."""
        return Place(self.table_format, self.text + _REJECTED)


class TypedTable:
    """A table that is open for batches. Its lock prevents other jobs.
    ``target`` is the folder of the files."""

    def __init__(
        self,
        target: Target,
        commit: Commit,
        files: Callable[[], list[DataFile]],
        table_format: str,
        runs: Sequence[Run],
    ) -> None:
        self.target = target
        self._commit = commit
        self._files = files
        self._format = table_format
        self._runs = list(runs)

    @property
    def number(self) -> int:
        """The number of the last batch, 0 for a new table."""
        return self._runs[-1].number if self._runs else 0

    @property
    def schema(self) -> str:
        """The digest of the schema that sorted the messages of the last batch; empty for a new table."""
        return self._runs[-1].settings.options["schema"] if self._runs else ""

    def check(self, number: int, query: str) -> None:
        """Check that a batch is the next one, or an earlier one. ``query`` is the id of the checkpoint.
        Raises SettingsError: the batch is of another checkpoint. Raises StoreError: earlier batches are missing."""
        before = self._runs[-1].settings.options["query"] if self._runs else query
        if before != query:
            raise SettingsError(
                f"table {self.target.root} belongs to another checkpoint (query {before}): give that checkpoint, or"
                " another target"
            )
        if number > self.number + 1:
            raise StoreError(
                f"table {self.target.root} ends with batch {self.number - 1}, the checkpoint is at batch {number - 1}:"
                " restore the table, or start with a new checkpoint and a new target"
            )

    def publish(self, number: int, query: str, files: list[ArchivedFile], schema: RowSchema) -> bool:
        """Add the files of a batch. Return False if the table already has the batch. Raises: as `check`."""
        self.check(number, query)
        if number <= self.number:
            return False
        columns = msgspec.json.encode(schema.columns).decode()
        facts = {"query": query, "schema": schema.digest, "columns": columns}
        run = Run(number, ArchiveSettings(self._format, (), facts), [], files)
        self.target.publish(run, self._commit)
        # Every manifest names its number, so the last one is enough.
        for old in self._runs:
            self.target.filesystem().delete_file(f"{self.target.folder}/{old.number:06d}.json")
        self._runs = [run]
        return True

    def compact(self) -> None:
        """Merge the small files. The merged files are published as a second run with the number of the last batch."""
        if not self._runs:
            return
        if self._format == "delta":
            from deltalake import DeltaTable

            DeltaTable(self.target.root).optimize.compact()
            return
        grouped = list(groups(self._files()))
        if grouped:
            files = [file for group in grouped for file in merged(self.target, self.number, group)]
            run = Run(self.number, self._runs[-1].settings, [], files, [path for group in grouped for path in group])
            self.target.publish(run, self._commit)
            self._runs = [run]


@contextmanager
def opened_table(
    place: Place, schema: pa.Schema, columns: Sequence[TypedColumn] | None, catalog: Mapping[str, str]
) -> Iterator[TypedTable]:
    """Create or open a table, lock it, and finish a batch that was killed during its publication.

    Args:
        schema: all columns of the table.
        columns: the columns of the body, or None for the table of rejected rows.

    Raises:
        SettingsError: the columns do not continue the table, the folder has other files, or the catalog is unknown.
        StoreError: another job writes to the table, or a file of it is missing.
        ExtraMissing: the library of the format is not installed.
    """
    with ExitStack() as stack:
        target, commit, files = _connected(place, schema, catalog, stack)
        stack.enter_context(target.held(("metadata", "data") if place.table_format == "iceberg" else ()))
        for run in [*target.runs(), *target.pending()][-1:]:
            if columns is not None:
                before = msgspec.json.decode(run.settings.options["columns"], type=list[TypedColumn])
                check_columns(target.root, before, columns)
            if run.settings.table_format != place.table_format:
                raise SettingsError(
                    f"table {target.root} has the format {run.settings.table_format}: write it before ://"
                )
        target.recover(commit)
        yield TypedTable(target, commit, files, place.table_format, target.runs())


def check_columns(table: str, before: Sequence[TypedColumn], now: Sequence[TypedColumn]) -> None:
    """Raise SettingsError if rows with the columns ``now`` cannot be appended to rows with the columns ``before``."""
    found = {column.name: column for column in now}
    for old in before:
        new = found.pop(old.name, None)
        if new is None:
            raise SettingsError(f"table {table} has the column {old.name}, the schema has not: keep the property")
        if new.type != old.type:
            raise SettingsError(
                f"table {table}: column {old.name} is {old.type}, the schema says {new.type}: keep the type, or give"
                " another target and checkpoint"
            )
        if new.is_required and not old.is_required:
            raise SettingsError(f"table {table}: older rows may lack {old.name}: keep the property optional")
    for new in found.values() if before else ():
        if new.is_required:
            raise SettingsError(f"table {table}: older rows lack the new property {new.name}: make it optional")


def _connected(
    place: Place, schema: pa.Schema, catalog: Mapping[str, str], stack: ExitStack
) -> tuple[Target, Commit, Callable[[], list[DataFile]]]:
    """Return the folder of a table, the function that commits a batch to it, and the function that lists its files."""
    if place.table_format == "iceberg":
        with extras.needed("iceberg", "an Iceberg table"):
            from pyiceberg.exceptions import NoSuchPropertyException
        catalog_name, _, name = place.text.partition("/")
        try:
            opened = stack.enter_context(opened_catalog(catalog_name, catalog))
        except (ValueError, NoSuchPropertyException) as error:
            raise SettingsError(
                f"catalog {catalog_name} cannot be opened: {' '.join(str(error).split())}: give its properties (type,"
                " uri, ...) with --catalog"
            ) from None
        root = _iceberg_location(opened, name, schema)
        target = Target(resolve(root), "_table", "typed table")
        commit = partial(_commit_iceberg, opened, name, target, schema)
        return target, commit, lambda: list(_iceberg_files(opened.load_table(name), target))
    target = Target(resolve(place.text), "_table", "typed table")
    files = partial(data_files, target)
    if place.table_format == "parquet":
        return target, lambda run: None, files
    with extras.needed("delta", "a Delta table"):
        import deltalake  # noqa: F401 - fail before the first batch
    return target, partial(_commit_delta, target, schema), files


def _commit_delta(target: Target, schema: pa.Schema, run: Run) -> None:
    from deltalake.transaction import AddAction

    now_ms = int(time.time() * 1000)
    actions = [
        AddAction(file.path, file.bytes, {}, now_ms, True, f'{{"numRecords": {file.rows}}}') for file in run.files
    ]
    commit_delta(target, schema, run, actions, _APPLICATION)


def _iceberg_location(catalog: Any, name: str, schema: pa.Schema) -> str:
    """Return the location of a table. Create the table first if it is missing.
    Raises SettingsError: another program made the table."""
    if not catalog.table_exists(name):
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        catalog.create_table(name, schema, properties={_BATCH_PROPERTY: "0"})
    table = catalog.load_table(name)
    if _BATCH_PROPERTY not in table.properties:
        raise SettingsError(f"Iceberg table {name} was made by another program: give the name of a new table")
    return str(table.location())


def _iceberg_files(table: Any, target: Target) -> dict[DataFile, Any]:
    """Return the files of this job in the table's current version, with pyiceberg's objects. Files with deleted rows,
    or of other programs, are left out."""
    found = [task.file for task in table.scan().plan_files() if not task.delete_files]
    named = {file.file_path.removeprefix(f"{target.uri}/"): file for file in found}
    return {DataFile(path, file.file_size_in_bytes): file for path, file in named.items() if "/" not in path}


def _commit_iceberg(catalog: Any, name: str, target: Target, schema: pa.Schema, run: Run) -> None:
    table = catalog.load_table(name)
    if run.replaced:
        replaced = [one for file, one in _iceberg_files(table, target).items() if file.path in run.replaced]
        # Files are missing if a merge was killed after this commit. Then, or if another program deleted rows since the
        # files were read, the merged files must not be added.
        if len(replaced) == len(run.replaced):
            with table.transaction() as transaction:
                with transaction.update_snapshot().overwrite() as overwrite:
                    for one in replaced:
                        overwrite.delete_data_file(one)
                transaction.add_files([f"{target.uri}/{file.path}" for file in run.files])
        return
    if not run.files or int(table.properties[_BATCH_PROPERTY]) >= run.number:
        return
    # Columns, files and number in one transaction: after a kill between two, the files would be added again.
    with table.transaction() as transaction:
        with transaction.update_schema() as columns:
            columns.union_by_name(schema)
        transaction.add_files([f"{target.uri}/{file.path}" for file in run.files])
        transaction.set_properties({_BATCH_PROPERTY: str(run.number)})
