"""The rows of messages that only the archive of a store has: those of log files that the broker deleted.

The segments of an archive are Parquet files with the columns of messages (`rmqkit.store.archive.rows`), so Arrow reads
them. A row of the archive that is also in the log is omitted: a segment counts up to the beginning of the log. Rows of
the archive are in the order of their files, and in each file by topic, queue and offset. ``_corrupt`` is null: a broker
compared each segment with its log file before it deleted the file.

The members of an inner batch are one row of the segment. The record is rebuilt from this row, and decoded like a record
of the log: one row per member, after the other rows of the segment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
from msgspec import Struct
from msgspec.structs import replace

from rmqkit.arrow.fs import RemotePath, Segment, filesystem_at, resolve
from rmqkit.arrow.options import VerifyCrc
from rmqkit.arrow.reader import EVERYTHING, ReadPlan, Selection, read_parts
from rmqkit.arrow.schema import CORRUPT_COLUMN, MESSAGE_COLUMNS, arrow_schema
from rmqkit.arrow.splits import Split
from rmqkit.errors import StoreError
from rmqkit.protocol.record import INNER_BATCH, NEED_UNWRAP
from rmqkit.store.archive.archive import Found, segments_in
from rmqkit.store.archive.identity import identity_in
from rmqkit.store.archive.places import Place, place_at
from rmqkit.store.archive.rows import SCHEMA, records_of
from rmqkit.store.archive.verify import found_in
from rmqkit.store.log import scan

__all__ = ["ArchivedFile", "plan_archive", "read_archived"]

_OFFSET_MAX = 2**63 - 1
_SCHEMA = arrow_schema([*MESSAGE_COLUMNS, CORRUPT_COLUMN])
_INNER = pa.scalar(INNER_BATCH | NEED_UNWRAP, pa.int32())
_IS_INNER = pc.bit_wise_and(pc.field("sysFlag"), _INNER) == _INNER


class ArchivedFile(Struct, frozen=True):
    """A segment to read: the archive, the name of the segment, and the beginning of the log, from which on the log has
    the messages."""

    archive: str
    name: str
    log_begin: int


def plan_archive(archive: str, root: str, segments: Sequence[Segment], *, is_strict: bool) -> list[ArchivedFile]:
    """Return the segments with messages from before the beginning of a log, oldest first.

    Args:
        archive: folder or address of the segments of one broker.
        root: the store of the log. Segments of other logs are omitted.
        segments: the files of the log.
        is_strict: whether damaged and missing segments are errors.

    Raises:
        StoreError: the archive has no segments of the log, or a segment is damaged or missing.
        OSError: the archive cannot be reached.
    """
    log_begin = segments[0].base_offset if segments else _OFFSET_MAX
    found = _segments(place_at(archive), root, log_begin, is_strict=is_strict)
    return [ArchivedFile(archive, one.name, log_begin) for one in found]


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
    bounds = [(one.directory.start, one.directory.end) for one in own]
    bounds += [(log_begin, log_begin)] if log_begin < _OFFSET_MAX else []
    for (_, end), (start, _) in itertools.pairwise(bounds):
        if end < start and is_strict:
            raise StoreError(f"archive {place} and the log lack the bytes from {end} to {start}; {repair}")
    return own


def _records_wanted(selection: Selection, log_begin: int) -> pc.Expression:
    """Return the condition for rows of selected records. The members of an inner batch share the compared columns."""
    found = pc.field("commitLogOffset") < log_begin
    if selection.topics:
        found &= pc.field("topic").isin(selection.topics)
    if selection.queue_ids:
        found &= pc.field("queueId").isin(pa.array(selection.queue_ids, pa.int32()))
    if selection.start_us:
        found &= pc.field("storeTimestamp") >= _time(selection.start_us)
    if selection.end_us:
        found &= pc.field("storeTimestamp") < _time(selection.end_us)
    return found


def _messages_wanted(plan: ReadPlan, wanted: pc.Expression | None) -> pc.Expression:
    """Return the condition for rows of single messages."""
    found = pc.scalar(True) if wanted is None else wanted
    if plan.tags:
        found &= pc.field("tags").isin(sorted(plan.tags))
    if plan.lite_topics:
        found &= pc.field("lite_topic").isin(sorted(plan.lite_topics))
    if plan.lite_prefix:
        found &= pc.coalesce(pc.starts_with(pc.field("lite_topic"), plan.lite_prefix), pc.scalar(False))
    if plan.keys:
        words = "|".join(re.escape(key) for key in sorted(plan.keys))
        has_key = pc.match_substring_regex(pc.field("keys"), rf"(^|\s)({words})($|\s)")
        found &= pc.coalesce(has_key, pc.scalar(False)) | pc.field("msgId").isin(sorted(plan.keys))
    return found


def _time(microseconds: int) -> pa.Scalar:
    return pa.scalar(microseconds, pa.int64()).cast(_SCHEMA.field("storeTimestamp").type)


def read_archived(file: ArchivedFile, plan: ReadPlan, wanted: pc.Expression | None = None) -> Iterator[pa.RecordBatch]:
    """Read the messages of a segment that meet a plan and a filter. Raises StoreError: the segment is damaged or was
    deleted."""
    path = resolve(file.archive)
    filesystem: Any
    filesystem, folder = filesystem_at(path.root) if isinstance(path, RemotePath) else (pafs.LocalFileSystem(), path)
    options = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
    format_ = pads.ParquetFileFormat(default_fragment_scan_options=options)
    schema, records = arrow_schema(plan.columns), _records_wanted(plan.selection, file.log_begin)
    try:
        rows = pads.dataset([f"{folder}/{file.name}"], schema=_SCHEMA, format=format_, filesystem=filesystem)
        # Row groups have bounds of topics, so only those of topics with inner batches are read twice.
        inner = rows.to_table(["topic"], filter=records & _IS_INNER)["topic"].unique() if plan.unwrap else ()
        singles = records & ~_IS_INNER if len(inner) else records
        condition = singles & _messages_wanted(plan, wanted)
        for batch in rows.to_batches(columns=schema.names, filter=condition, batch_readahead=2):
            if len(batch):
                yield batch.cast(schema)
        if len(inner):
            batches = records & pc.field("topic").isin(inner) & _IS_INNER
            for batch in rows.replace_schema(SCHEMA).to_batches(filter=batches):
                yield from _members(file, batch, plan, wanted)
    except (OSError, pa.ArrowInvalid) as error:
        reason = " ".join(str(error).split())
        shown = str(path)
        raise StoreError(f"archive {shown}: {reason}; run: rmq archive verify {shown}") from None


def _members(
    file: ArchivedFile, rows: pa.RecordBatch, plan: ReadPlan, wanted: pc.Expression | None
) -> Iterator[pa.RecordBatch]:
    """Decode the members of the inner batches in some rows of a segment."""
    if not len(rows):
        return
    content = b"".join(records_of(pa.Table.from_batches([rows])).to_pylist())
    plan = replace(plan, selection=EVERYTHING, choose=None, verify_crc=VerifyCrc.NONE)
    plan = replace(plan, broker_name=rows["brokerName"][0].as_py() or plan.broker_name)
    for batch in read_parts(Split(f"{file.archive}/{file.name}", 0, 0, len(content)), [scan.pulled(content)], plan):
        found = batch if wanted is None else batch.filter(wanted)
        if len(found):
            yield found
