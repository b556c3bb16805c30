"""Tables of Delta Lake and Iceberg over the files of an archive, created without Spark jars.

The files already exist. A run adds them to the table in one transaction, so readers of the table see all files of a run
or none. Each table stores the number of the last added run. Therefore a repeated publication (after a kill) changes
nothing.

=======  ==================================================  =============================================
format   table                                               stores the run in
=======  ==================================================  =============================================
delta    the archive's folder; ``day`` is a column           the application transaction ``rmqkit.archive``
iceberg  ``rmqkit.messages`` of the catalog; ``day`` hidden  the table property ``rmqkit.archive-run``
=======  ==================================================  =============================================

Without ``catalog`` properties the Iceberg catalog is an SQLite file in the archive's folder. The property ``table`` is
the table's name. All other properties belong to pyiceberg (``type``, ``uri``, ...).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from rmqkit import extras
from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.archive_files import DAY, ArchivedFile
from rmqkit.spark.jobs.archive_target import Commit, Run, Target

TABLE_FORMATS = ("parquet", "delta", "iceberg")
_APPLICATION = "rmqkit.archive"
_RUN_PROPERTY = "rmqkit.archive-run"
_TABLE = "rmqkit.messages"
_MS_MAX = 253_402_300_800_000  # the year 10000


def committer(table_format: str, target: Target, schema: pa.Schema, catalog: Mapping[str, str]) -> Commit:
    """Return the function that commits the files of a run to the table.
    Raises SettingsError: the format is unknown, or Iceberg needs a catalog.
    Raises ExtraMissing: the library of the format is not installed."""
    if table_format == "parquet":
        return lambda run: None
    if table_format == "delta":
        _need("deltalake", table_format)
        return lambda run: _commit_delta(run, target, schema)
    if table_format == "iceberg":
        _need("pyiceberg.catalog", table_format)
        if not target.is_local and not catalog.keys() - {"table"}:
            raise SettingsError(f"Iceberg archive {target.root} needs a catalog: give its properties (type, uri, ...)")
        return lambda run: _commit_iceberg(run, target, schema, catalog)
    raise SettingsError(f"format {table_format!r} is not known: choose from {', '.join(TABLE_FORMATS)}")


def _need(module: str, table_format: str) -> None:
    import importlib

    with extras.needed(table_format, f"format {table_format}"):
        importlib.import_module(module)


# ---------------------------------------------------------------- Delta


def commit_delta(
    target: Target, schema: pa.Schema, run: Run, actions: list[Any], application: str, partition_by: Sequence[str] = ()
) -> None:
    """Add files to the table in a folder, in one transaction, unless the table has the run already. A column that the
    table lacks is added. Create the table if it does not exist."""
    from deltalake import CommitProperties, DeltaTable, Schema, Transaction
    from deltalake.transaction import create_table_with_add_actions

    columns, by = Schema.from_arrow(schema), list(partition_by)
    once = CommitProperties(app_transactions=[Transaction(application, run.number)])
    if not DeltaTable.is_deltatable(target.root):
        create_table_with_add_actions(target.root, columns, actions, partition_by=by, commit_properties=once)
        return
    table = DeltaTable(target.root)
    # A run that was killed after this commit is finished again. The number in the table prevents adding its files
    # twice.
    if not actions or (table.transaction_version(application) or 0) >= run.number:
        return
    known = {field.name for field in table.schema().fields}
    if lacking := [field for field in columns.fields if field.name not in known]:
        table.alter.add_columns(lacking)
        table = DeltaTable(target.root)
    table.create_write_transaction(actions, "append", table.schema(), by, commit_properties=once)


def _commit_delta(run: Run, target: Target, schema: pa.Schema) -> None:
    partition_by = run.settings.partition_by
    columns = schema.append(pa.field(DAY, pa.date32())) if DAY in partition_by else schema
    commit_delta(target, columns, run, [_added(file, partition_by) for file in run.files], _APPLICATION, partition_by)


def _added(file: ArchivedFile, partition_by: Sequence[str]) -> Any:
    from deltalake.transaction import AddAction

    values = {"topic": file.topic, DAY: file.day}
    low: dict[str, Any] = {"commitLogOffset": file.offset_min}
    high: dict[str, Any] = {"commitLogOffset": file.offset_max}
    # Readers always read a file without bounds, but may skip a file with wrong bounds.
    if file.stored_min_ms is not None and file.stored_max_ms is not None and file.stored_max_ms < _MS_MAX:
        low["storeTimestamp"], high["storeTimestamp"] = _iso(file.stored_min_ms), _iso(file.stored_max_ms)
    return AddAction(
        path=file.path,
        size=file.bytes,
        partition_values={name: values[name] for name in partition_by},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps({"numRecords": file.rows, "minValues": low, "maxValues": high}),
    )


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---------------------------------------------------------------- Iceberg


def _commit_iceberg(run: Run, target: Target, schema: pa.Schema, given: Mapping[str, str]) -> None:
    name = given.get("table", _TABLE)
    own = {"type": "sql", "uri": f"sqlite:///{target.root}/catalog.db", "warehouse": target.uri}
    with opened_catalog("rmqkit", {key: text for key, text in given.items() if key != "table"} or own) as catalog:
        table = _table(catalog, name, target, schema, run.settings.partition_by)
        if table.location().rstrip("/") != target.uri:
            raise SettingsError(
                f"Iceberg table {name} is at {table.location()}, not at {target.uri}: name another table"
            )
        if int(table.properties.get(_RUN_PROPERTY, 0)) >= run.number:
            return
        # Add files and number in one transaction. After a kill between two transactions, the next run would add the
        # files again.
        with table.transaction() as transaction:
            if run.files:
                transaction.add_files([f"{target.uri}/{file.path}" for file in run.files])
            transaction.set_properties({_RUN_PROPERTY: str(run.number)})


@contextmanager
def opened_catalog(name: str, properties: Mapping[str, str]) -> Iterator[Any]:
    """Open an Iceberg catalog. ``properties`` are added to those of its name in pyiceberg's own settings."""
    from pyiceberg.catalog import load_catalog

    log = logging.getLogger("pyiceberg.io.pyarrow")  # warns of every column without statistics
    level = log.level
    log.setLevel(logging.ERROR)
    catalog = load_catalog(name, **properties)
    try:
        yield catalog
    finally:
        catalog.close()
        log.setLevel(level)


def _table(catalog: Any, name: str, target: Target, schema: pa.Schema, partition_by: tuple[str, ...]) -> Any:
    """Return the table. Create it first if it does not exist."""
    from pyiceberg.transforms import DayTransform, IdentityTransform

    if not catalog.table_exists(name):
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        with (
            catalog.create_table_transaction(name, schema=schema, location=target.uri) as transaction,
            transaction.update_spec() as spec,
        ):
            for part in partition_by:
                column, transform = ("storeTimestamp", DayTransform()) if part == DAY else (part, IdentityTransform())
                spec.add_field(column, transform, part)
    return catalog.load_table(name)
