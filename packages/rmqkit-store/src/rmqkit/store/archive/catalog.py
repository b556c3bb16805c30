"""The table of an archive in an Iceberg catalog: the segments of one log, as they are, without a copy.

A catalog is a text: the kind and the address of a catalog of pyiceberg (``sql:sqlite:////var/rmq/catalog.db``,
``rest:https://catalog.example``), or a name in ``~/.pyiceberg.yaml``. A catalog by its address has the name ``rmqkit``,
which a catalog in a database stores beside each table. `add_segments` runs after a segment was verified,
in the process that wrote it. It compares the segments with the files of the table:

======================  ===============================================================================================
segment                 action
======================  ===============================================================================================
not in the table        added
in the table            nothing: a process that died after the commit adds no row twice
with another length     its former rows are removed and the file is added, in one commit: it was written again
without messages        nothing
of another log          nothing
======================  ===============================================================================================

A segment that was deleted from the archive stays in the table until somebody removes its rows. Not handled here: the
rows of one segment are never changed, and a failure stops neither the archive nor retention.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from rmqkit import extras
from rmqkit.errors import StoreError
from rmqkit.store.archive.archive import segments_in
from rmqkit.store.archive.places import Place, shown
from rmqkit.store.archive.rows import SCHEMA
from rmqkit.store.archive.segment import Directory, SegmentFile

__all__ = ["add_segments"]

_KIND = re.compile(r"(bigquery|dynamodb|glue|hive|in-memory|rest|sql):(.*)", re.DOTALL)


def add_segments(place: Place, catalog: str, table_name: str, log_id: str) -> int:
    """Add the segments of a log that its table lacks. Create the table if it does not exist. Return the number of added
    segments.

    Raises:
        ExtraMissing: pyiceberg is not installed.
        StoreError: the catalog cannot be reached, or refuses the change.
        OSError: the place cannot be read.
    """
    with extras.needed("iceberg", "archiveCatalog"):
        import pyiceberg.catalog
    sizes = segments_in(place)
    # It warns of every column without statistics.
    logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)
    kind = _KIND.fullmatch(catalog)
    properties = {} if kind is None else {"type": kind[1], "uri": kind[2]}
    # pyiceberg, its catalogs and their clients raise errors of many kinds. They have no common class.
    try:
        opened = pyiceberg.catalog.load_catalog("rmqkit" if kind else catalog, **properties)
        try:
            table = _table(opened, table_name, place.uri)
            return _add_missing(table, place, sizes, log_id)
        finally:
            opened.close()
    except StoreError:
        raise
    except Exception as error:
        named = shown(catalog)  # the error may repeat the address, with its password
        reason = f"{type(error).__name__}: {error}".replace(catalog, named)
        raise StoreError(f"table {table_name} of catalog {named}: {reason}") from error


def _table(catalog: Any, name: str, uri: str) -> Any:
    """Return the table. Create it beside the segments if it does not exist, unless the catalog has a warehouse."""
    if not catalog.table_exists(name):
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        has_warehouse = "warehouse" in catalog.properties or catalog.properties.get("type") == "rest"
        location = None if has_warehouse else f"{uri}/table"
        # Without this property, maintenance of the table deletes files that no snapshot has, and these are segments.
        return catalog.create_table(name, SCHEMA, location=location, properties={"gc.enabled": "false"})
    return catalog.load_table(name)


def _add_missing(table: Any, place: Place, sizes: dict[str, int], log_id: str) -> int:
    files = table.inspect.data_files()
    known = dict(zip(files["file_path"].to_pylist(), files["file_size_in_bytes"].to_pylist(), strict=True))
    added, replaced = list[str](), list[Directory]()
    for name, size in sorted(sizes.items()):
        path = f"{place.uri}/{name}"
        if known.get(path) == size:
            continue
        directory = _directory(place, name, size)
        if directory is None or directory.log != log_id or not any(queue.topic for queue in directory.queues):
            continue
        added.append(path)
        if path in known:
            replaced.append(directory)
    if added:
        with table.transaction() as transaction:
            for directory in replaced:
                transaction.delete(_rows_of(place.name, directory))
            # The names were compared above. The check of pyiceberg does not see the rows that were removed here.
            transaction.add_files(added, check_duplicate_files=False)
    return len(added)


def _directory(place: Place, name: str, size: int) -> Directory | None:
    """Return the directory of a segment, or None if it is damaged."""
    try:
        return SegmentFile(name, lambda position, count: place.read(name, position, count), size).directory
    except StoreError:
        return None


def _rows_of(broker_name: str, directory: Directory) -> Any:
    """Return the filter for all rows of a segment. Every row of its file meets the filter, so no file is rewritten."""
    from pyiceberg import expressions

    build: Any = expressions  # its annotations do not know its constructors
    begin = build.GreaterThanOrEqual("commitLogOffset", directory.start)
    end = build.LessThan("commitLogOffset", directory.end)
    return build.And(build.EqualTo("brokerName", broker_name), begin, end)
