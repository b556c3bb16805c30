"""The messages of a store as Arrow tables for Polars, pandas and DuckDB, without a broker, Java or Spark.

::

    from rmqkit.arrow import dataset, scan, to_polars

    for batch in scan("/data/store", topic="Orders", columns=["queueOffset", "body"]):
        ...                                          # pyarrow record batches, in the order of the log
    frame = to_polars("/data/store", topic="Orders", start="2026-01-31T00:00")

    import duckdb
    messages = dataset("/data/store")                # DuckDB finds the variable by its name
    duckdb.sql("select topic, count(*) from messages where queueId = 0 group by topic").show()

======================  ========================================================================================
`scan`                  a ``pyarrow.RecordBatchReader``: can be read once, with one batch in memory at a time
`dataset`               a ``pyarrow.dataset.Dataset``: can be read any number of times; the columns and filters of
                        DuckDB and Polars are applied during the read
`to_polars`,            a whole data frame
`to_pandas`
======================  ========================================================================================

The columns and their types are the same as in Spark's format ``rocketmq-store``, and the same kernels create them. The
store may belong to a running broker: a read returns the records that were complete when the read began. This package
needs the extra ``arrow``.

`plan` selects the parts of the store to read: files (`fs`), byte ranges of the log (`splits`), records that queues and
the index point at (`queue_files`). `reader` filters records by head and topic and decodes them. `schema` selects
columns, and `rmqkit.store.kernels` creates them in bulk. `store_dataset` applies columns and filters during the read,
`archived` adds the segments of an archive, and `query` runs SQL. Spark's source uses the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from os import PathLike
from typing import TYPE_CHECKING, Any

from rmqkit import extras
from rmqkit.arrow.options import CorruptRecords, OffsetsFrom, VerifyCrc
from rmqkit.errors import SettingsError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from rmqkit.arrow.store_dataset import StoreDataset

__all__ = ["dataset", "scan", "to_pandas", "to_polars"]

DAMAGE_HINT = "corrupt='skip' reads on, 'report' shows it in rows"

Moment = datetime | int | str
"""A time: a datetime (without a zone: local), ms since the epoch, or ISO text."""


# Long: the function declares and describes its options.
def dataset(
    store: str | PathLike[str],
    *,
    topic: str | Iterable[str] = (),
    queue: int | Iterable[int] = (),
    tags: str = "*",
    key: str | Iterable[str] = (),
    columns: Iterable[str] = (),
    start: Moment | None = None,
    end: Moment | None = None,
    offsets_from: str = "walk",
    corrupt: str = "fail",
    verify_crc: str = "none",
    broker_name: str = "",
    log_paths: Iterable[str] = (),
    index_slot_count: int = 5_000_000,
    archive: str | PathLike[str] = "",
) -> StoreDataset:
    """Return the messages of a store as a dataset.

    Args:
        store: the store directory (``storePathRootDir``), or an address of pyarrow.fs such as ``s3://bucket/store``.
        topic, queue: only messages of these topics and queue ids; empty for all.
        tags: only messages with one of these tags, ``a || b``; ``*`` for all.
        key: only messages with one of these keys or unique keys. This needs a topic, and reads by the index.
        columns: only these columns, in this order; empty for all (`rmqkit.arrow.schema.MESSAGE_COLUMNS`).
        start, end: only messages stored at or after ``start``, and before ``end``.
        offsets_from: ``walk`` reads the log. ``consumequeue`` reads the records that the queues point at. This is
            faster for few messages, and omits messages that no consumer can get.
        corrupt: treatment of damage: ``fail``, ``skip``, or ``report`` in extra rows, with the column ``_corrupt``.
        verify_crc: ``none``, or the treatment of a wrong CRC: ``fail``, ``drop``, or ``column`` (mark in ``_corrupt``).
        broker_name: text of the column ``brokerName``, because records do not contain the broker name.
        log_paths: directories of the commit log, if it is not in the store directory.
        index_slot_count: the broker's ``maxHashSlotNum``, for ``key``.
        archive: the folder or address of the broker's segments (``archive`` and the broker's name). The messages of log
            files that the broker deleted come first; no message comes twice (`rmqkit.arrow.archived`).

    Raises:
        SettingsError: an argument is not valid, or a column does not exist.
        ExtraMissing: pyarrow or numpy is not installed.
    """
    with extras.needed("arrow", "a table of a store"):
        from rmqkit.arrow.store_dataset import StoreDataset
    from rmqkit.arrow.fs import resolve
    from rmqkit.arrow.reader import ReadPlan, Selection
    from rmqkit.arrow.schema import CORRUPT_COLUMN, MESSAGE_COLUMNS, choose
    from rmqkit.filter import subscription

    corrupt_records, crc = _one_of(CorruptRecords, "corrupt", corrupt), _one_of(VerifyCrc, "verify_crc", verify_crc)
    reports = corrupt_records is CorruptRecords.REPORT or crc is VerifyCrc.COLUMN
    available = [*MESSAGE_COLUMNS, CORRUPT_COLUMN] if reports else list(MESSAGE_COLUMNS)
    root = resolve(str(store))
    times = (0 if start is None else _ms(start, "start"), 0 if end is None else _ms(end, "end"))
    names = _several(columns)
    try:
        wanted_tags = subscription("*", tags).tags_set
    except ValueError as error:
        raise SettingsError(f"tags {tags!r}: {error}") from None
    plan = ReadPlan(
        columns=(),
        selection=Selection.of(_several(topic), _several(queue), *times),
        verify_crc=crc,
        corrupt_records=corrupt_records,
        broker_name=broker_name,
        keys=frozenset(_several(key)),
        tags=frozenset(wanted_tags),
        damage_hint=DAMAGE_HINT,
        crc_hint="verify_crc='drop' leaves such messages out, 'column' marks them",
    )
    return StoreDataset(
        root,
        choose(available, names, root) if names else available,
        plan,
        log_paths=_several(log_paths),
        offsets_from=_one_of(OffsetsFrom, "offsets_from", offsets_from),
        index_slot_count=index_slot_count,
        archive=str(archive),
    )


def scan(store: str | PathLike[str], **options: Any) -> pa.RecordBatchReader:
    """Return the messages of a store as record batches, in the order of the log. ``options`` are the arguments of
    `dataset`.

    The returned reader can be read once. Reading raises StoreError if a file is damaged or was deleted.
    Raises SettingsError: an option is not valid. Raises StoreError: the store does not exist or cannot be read."""
    return dataset(store, **options).reader()


def to_polars(store: str | PathLike[str], **options: Any) -> polars.DataFrame:
    """Return the messages of a store as a Polars data frame. Options as in `dataset`, errors as in `scan`.
    For a lazy frame: ``polars.scan_pyarrow_dataset(dataset(store))``."""
    import polars

    frame = polars.from_arrow(scan(store, **options).read_all())
    assert isinstance(frame, polars.DataFrame), "Polars converts a table to a data frame"
    return frame


def to_pandas(store: str | PathLike[str], **options: Any) -> pandas.DataFrame:
    """Return the messages of a store as a pandas data frame. Options as in `dataset`, errors as in `scan`."""
    return scan(store, **options).read_pandas()


def _several(given: Any) -> list[Any]:
    """Return a list: a single value becomes a list of one item."""
    return [given] if isinstance(given, str | int) else list(given)


def _one_of(kind: Any, name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(f"{name}={text!r} must be one of {', '.join(one.value for one in kind)}") from None


def _ms(moment: Moment, name: str) -> int:
    try:
        if isinstance(moment, str):
            moment = int(moment) if moment.isdecimal() else datetime.fromisoformat(moment)
        return moment if isinstance(moment, int) else round(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        raise SettingsError(f"{name}={moment!r} must be a datetime, ms since the epoch, or an ISO time") from None
