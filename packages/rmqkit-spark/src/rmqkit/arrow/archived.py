"""The rows of messages that only the archive of a store has: those of log files that the broker deleted.

The segments of an archive are Parquet files with the columns of messages (`rmqkit.store.archive.rows`), so Arrow reads
them. A row of the archive that is also in the log is omitted: a segment counts up to the beginning of the log. Rows of
the archive are in the order of their files, and in each file by topic, queue and offset. The members of an inner batch
are one row. ``_corrupt`` is null: a broker compared each segment with its log file before it deleted the file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs

from rmqkit.arrow.fs import RemotePath, filesystem_at, resolve
from rmqkit.arrow.options import CorruptRecords
from rmqkit.arrow.reader import Condition, ReadPlan
from rmqkit.arrow.schema import CORRUPT_COLUMN, MESSAGE_COLUMNS, arrow_schema
from rmqkit.errors import StoreError
from rmqkit.store.archive.archive import Found, segments_in
from rmqkit.store.archive.identity import identity_in
from rmqkit.store.archive.places import Place, place_at
from rmqkit.store.archive.verify import found_in

__all__ = ["read_archive"]

_SCHEMA = arrow_schema([*MESSAGE_COLUMNS, CORRUPT_COLUMN])


def read_archive(
    archive: str, root: str, log_begin: int, plan: ReadPlan, wanted: pc.Expression | None
) -> Iterator[pa.RecordBatch]:
    """Return batches of the archived messages before the beginning of a log that meet a plan and a filter. The segments
    are listed before the first batch is read.

    Args:
        archive: folder or address of the segments of one broker.
        root: the store of the log. Segments of other logs are omitted.

    Raises:
        StoreError: the archive has no segments of the log, a segment is damaged, or some are missing before the log
            begins and the plan does not skip damage.
        OSError: the archive cannot be reached.
    """
    place = place_at(archive)
    segments = _segments(place, root, log_begin, is_strict=plan.corrupt_records is CorruptRecords.FAIL)
    return _rows(archive, place, [one.name for one in segments], _filter(plan, log_begin, wanted), plan)


def _segments(place: Place, root: str, log_begin: int, *, is_strict: bool) -> list[Found]:
    found, sizes = found_in(place), segments_in(place)
    repair = f"run: rmq archive verify {place}"
    if not sizes:
        raise StoreError(f"archive {place} has no segments: give the folder of a broker, such as {place}/broker-a")
    damaged = sorted(sizes.keys() - {one.name for one in found})
    if damaged and is_strict:
        raise StoreError(f"archive {place}: {damaged[0]} is damaged; {repair}")
    log_id = "" if isinstance(resolve(root), RemotePath) else identity_in(Path(resolve(root)))
    own = [one for one in found if not log_id or one.directory.log in ("", log_id)]
    if found and not own:
        raise StoreError(f"archive {place} is of log {found[0].directory.log}, and store {root} has log {log_id}")
    own = [one for one in own if one.directory.start < log_begin]
    bounds = [*((one.directory.start, one.directory.end) for one in own), (log_begin, log_begin)]
    for (_, end), (start, _) in itertools.pairwise(bounds):
        if end < start and is_strict:
            raise StoreError(f"archive {place} and the log lack the bytes from {end} to {start}; {repair}")
    return own


def _filter(plan: ReadPlan, log_begin: int, wanted: pc.Expression | None) -> pc.Expression:
    found = pc.field("commitLogOffset") < log_begin
    for condition in plan.conditions:
        found &= _expression(condition)
    if plan.tags:
        found &= pc.field("tags").isin(sorted(plan.tags))
    if plan.keys:
        words = "|".join(re.escape(key) for key in sorted(plan.keys))
        has_key = pc.match_substring_regex(pc.field("keys"), rf"(^|\s)({words})($|\s)")
        found &= pc.coalesce(has_key, pc.scalar(False)) | pc.field("msgId").isin(sorted(plan.keys))
    return found if wanted is None else found & wanted


def _expression(condition: Condition) -> pc.Expression:
    field, kind = pc.field(condition.column), _SCHEMA.field(condition.column).type
    values = [pa.scalar(value, pa.int64()).cast(kind) if pa.types.is_timestamp(kind) else value
              for value in condition.values]  # fmt: skip
    if condition.kind == "In":
        return field.isin(pa.array(values, kind))
    assert condition.kind in ("GreaterThanOrEqual", "LessThan"), "options make no other conditions"
    return field >= values[0] if condition.kind == "GreaterThanOrEqual" else field < values[0]


def _rows(
    archive: str, place: Place, names: list[str], wanted: pc.Expression, plan: ReadPlan
) -> Iterator[pa.RecordBatch]:
    if not names:
        return
    is_remote = isinstance(resolve(archive), RemotePath)
    filesystem: Any
    filesystem, folder = filesystem_at(archive) if is_remote else (pafs.LocalFileSystem(), resolve(archive))
    options = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
    format_ = pads.ParquetFileFormat(default_fragment_scan_options=options)
    paths = [f"{folder}/{name}" for name in names]
    segments = pads.dataset(paths, schema=_SCHEMA, format=format_, filesystem=filesystem)
    schema = arrow_schema(plan.columns)
    try:
        for batch in segments.to_batches(columns=schema.names, filter=wanted, batch_readahead=2, fragment_readahead=1):
            if len(batch):
                yield batch.cast(schema)
    except (OSError, pa.ArrowInvalid) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"archive {place}: {reason}; run: rmq archive verify {place}") from None
