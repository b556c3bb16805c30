"""The archive of a commit log: its full files as a table of Parquet files that the broker's retention does not delete.

::

    archive(spark, "/data/store", "/data/archive")
    spark.read.parquet("/data/archive").where("topic = 'orders' and day = '2026-11-21'")

=========  =========================================================================================================
step       action
=========  =========================================================================================================
plan       the files of the log except the newest, after the end of the last run; the log is compared with the
           manifests, so that an archive never contains two logs
write      in the Python workers (`archive_split`): records → Parquet files by topic and day of ``storeTimestamp``;
           the JVM only gets one row per file
verify     every file is read again: size, rows and offsets must be the written ones, and the rows of a segment must
           match its records; with ``verify="full"`` also every byte and body, and every CRC in the log
publish    files become visible, then the lake's transaction, then the manifest (`archive_target`)
delete     on request: log files that are archived completely, if every byte of their Parquet files is right
=========  =========================================================================================================

Spark infers the types of partition folders. If all topics look like numbers, topic 007 becomes 7: pass a schema, or
disable ``spark.sql.sources.partitionColumnTypeInference.enabled``. The column in the files is text.

While a broker runs, only the broker deletes: the log files of a live store are listed, but not deleted. After an
unclean shutdown log files are not deleted, either, because the queues may have to be rebuilt from the log.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from rmqkit.arrow.fs import RemotePath, Segment, find_segments, local_path, map_range
from rmqkit.arrow.options import VerifyCrc
from rmqkit.arrow.reader import EVERYTHING, ReadPlan, matches, read_parts
from rmqkit.arrow.schema import arrow_schema
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import SettingsError, StoreError, StoreLocked, StoreMismatch
from rmqkit.spark.jobs.archive_files import PARTITION_COLUMNS, ArchivedFile, PartitionFiles, difference
from rmqkit.spark.jobs.archive_target import ArchivedSegment, ArchiveSettings, Run, Target
from rmqkit.spark.jobs.lake import committer
from rmqkit.spark.jobs.log_ranges import SegmentCounts, add_up, counted
from rmqkit.spark.jobs.tasks import core_count, run_tasks
from rmqkit.spark.options import StoreOptions, words
from rmqkit.spark.session import address
from rmqkit.spark.source.store import read_plan, refuse_archive, store_options
from rmqkit.store.files import StoreLock, sync_directory
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Damage, Records, crc_matches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Archived", "archive"]

_OPTIONS = (
    "topic", "includeBody", "includeProperties", "decompress", "unwrap", "brokerName", "storePathCommitLog",
    "splitBytes", "batchRows", "verifyCrc", "corruptRecordMode",
)  # fmt: skip
_SHAPING = _OPTIONS[:6]
"""Options that change the rows: they must be the same in all runs, and their defaults archive the whole log."""

_EDGE_BYTES = 4096
_HOUR_S = 3600


class Archived(Struct):
    """The result of a run.

    Attributes:
        target: the archive.
        run: the number of the manifest; 0 if there was nothing new.
        records, rows, files, bytes: the numbers that the run added. Rows are messages, bytes are bytes of the files.
        lost: number of damaged places and records without a row, if damage is skipped.
        missing_bytes: bytes of the log that were deleted before they were archived.
        deletable: log files that can be deleted, if the caller requested the deletion.
        deleted: "yes" if the log files were deleted, otherwise the reason why they were not.
        segments: the parts of each log file that the run read.
    """

    target: str
    run: int = 0
    records: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    lost: int = 0
    missing_bytes: int = 0
    deletable: list[str] = field(default_factory=list)
    deleted: str = ""
    segments: list[SegmentCounts] = field(default_factory=list)


# Long: the function declares and describes its options.
def archive(
    spark: SparkSession,
    path: str,
    target: str,
    options: Mapping[str, str] | None = None,
    *,
    table_format: str = "parquet",
    partition_by: Sequence[str] = PARTITION_COLUMNS,
    includes_newest: bool = False,
    verify: str = "footers",
    delete_after_hours: float | None = None,
    catalog: Mapping[str, str] | None = None,
) -> Archived:
    """Add the new messages of a store to its archive. The first run creates the archive.

    Args:
        target: a folder, or an address of ``pyarrow.fs``. It must be an archive of this store, or empty.
        options: options of ``rocketmq-store``: topic, verifyCrc, corruptRecordMode, splitBytes, ...
        table_format: parquet, delta or iceberg.
        partition_by: topic, day, both or none.
        includes_newest: whether to archive also the newest file, up to its last record. The next run continues there.
        verify: footers, or full.
        delete_after_hours: delete archived log files that were last written more than this number of hours ago.
        catalog: properties of the Iceberg catalog.

    Raises:
        SettingsError: an option is not valid, or differs from the settings of the archive.
        StoreError: the log is damaged (see corruptRecordMode), a file differs from the written file, or another run is
            active. Nothing was published.
        StoreMismatch: the archive belongs to another store.
    """
    path, target = address(spark, path), address(spark, target)
    parsed, settings = _settings(path, options or {}, table_format, partition_by, verify)
    if delete_after_hours is not None:
        _check_is_whole(settings)
    is_full = verify == "full"
    if is_full and parsed.verify_crc is VerifyCrc.NONE:
        parsed = replace(parsed, verify_crc=VerifyCrc.FAIL)
    read = read_plan(parsed, ())
    place = Target.of(target)
    commit = committer(table_format, place, arrow_schema(read.columns), catalog or {})
    segments = find_segments(parsed.path, words(parsed.log_paths))
    with place.held():
        _check_same([*place.runs(), *place.pending()], settings, segments, place)
        # Recover before planning. A run that was killed during its publication belongs to the archive: without it, its
        # messages would be archived twice.
        place.recover(commit)
        runs = place.runs()
        if is_full:
            verify_files(spark, place, [file for run in runs for file in run.files], reads_all=True)
        done = Archived(str(place.root))
        splits, newest = _new_splits(segments, runs, parsed.split_bytes, done)
        kept = [split for split in splits if includes_newest or split.path != newest]
        if kept:
            number = max((run.number for run in runs), default=0) + 1
            plan = ArchivePlan(place, place.staging(number), tuple(partition_by), read, is_full)
            run = _written(spark, kept, plan, Run(number, settings, [], []), done, {one.path: one for one in segments})
            assert sum(file.rows for file in run.files) == done.rows, "the files have all rows"
            place.publish(run, commit)
            runs.append(run)
        if delete_after_hours is not None:
            _delete(spark, parsed.path, segments, newest, runs, place, delete_after_hours, done)
    return done


# ---------------------------------------------------------------- settings and plan


def _settings(
    path: str, options: Mapping[str, str], table_format: str, partition_by: Sequence[str], verify: str
) -> tuple[StoreOptions, ArchiveSettings]:
    known = {name.lower(): name for name in _OPTIONS}
    refuse_archive(store_options({**options, "path": path}), "archive")
    for name in options:
        if name.lower() not in known:
            raise SettingsError(f"archive: option {name!r} cannot be used here: choose from {', '.join(_OPTIONS)}")
    parsed = store_options({**options, "path": path})
    for value, allowed in ((parsed.verify_crc, "none fail drop"), (parsed.corrupt_records, "fail skip")):
        if value.value not in allowed.split():
            raise SettingsError(f"archive: {value.value!r} makes rows that are not messages: choose from {allowed}")
    for name in partition_by:
        if name not in PARTITION_COLUMNS:
            raise SettingsError(f"archive: cannot partition by {name!r}: choose from {', '.join(PARTITION_COLUMNS)}")
    if verify not in ("footers", "full"):
        raise SettingsError(f"archive: verify={verify!r} is not known: choose from footers, full")
    shaping = {known[name.lower()]: text for name, text in options.items() if known[name.lower()] in _SHAPING}
    return parsed, ArchiveSettings(table_format, tuple(partition_by), dict(sorted(shaping.items())))


def _check_is_whole(settings: ArchiveSettings) -> None:
    for name in ("topic", "includeBody", "includeProperties"):
        if name in settings.options:
            raise SettingsError(
                f"archive: with {name}={settings.options[name]} not all of the log is kept: delete nothing"
            )


def _check_same(runs: Sequence[Run], settings: ArchiveSettings, segments: Sequence[Segment], target: Target) -> None:
    """Compare the settings and the log with earlier runs. Raises SettingsError, StoreMismatch: they differ."""
    if runs and runs[-1].settings != settings:
        before = runs[-1].settings
        names = [name for name in settings.__struct_fields__ if getattr(before, name) != getattr(settings, name)]
        differences = ", ".join(f"{name}={getattr(before, name)}, not {getattr(settings, name)}" for name in names)
        raise SettingsError(f"archive {target.root} was made with {differences}: use the same, or another target")
    by_offset = {segment.base_offset: segment for segment in segments}
    for known in (known for run in runs for known in run.segments):
        segment = by_offset.get(known.base_offset)
        if segment and (segment.size != known.size or _edges_crc(segment, known.low, known.high) != known.edges_crc):
            raise StoreMismatch(
                f"{segment.path} is not the file of that name in the archive {target.root}: give each store its own"
            )


def _edges_crc(segment: Segment, low: int, high: int) -> int:
    """Return the CRC-32 of the first and last bytes between two physical offsets."""
    low, high = low - segment.base_offset, high - segment.base_offset
    crc = 0
    for first, end in ((low, min(low + _EDGE_BYTES, high)), (max(low, high - _EDGE_BYTES), high)):
        with memoryview(map_range(segment.path, first, end)) as view:
            crc = zlib.crc32(view[first:end], crc)
    return crc


def _new_splits(
    segments: Sequence[Segment], runs: Sequence[Run], split_bytes: int, done: Archived
) -> tuple[list[Split], str]:
    """Return the splits of the log that are not archived, and the path of the newest file with records."""
    # Use the end of the archived bytes, not of a file: with includes_newest a run ends inside a file.
    low = max((known.high for run in runs for known in run.segments), default=0)
    todo = [segment for segment in segments if segment.base_offset + segment.size >= low]
    if runs and todo:
        done.missing_bytes = max(0, todo[0].base_offset - low)
    splits = plan_splits(todo, split_bytes)
    fresh = [
        replace(split, low=max(split.low, low - split.base_offset))
        for split in splits
        if split.base_offset + split.high > low
    ]
    return fresh, splits[-1].path if splits else ""


# ---------------------------------------------------------------- writing and verifying


def _written(
    spark: SparkSession, splits: Sequence[Split], plan: ArchivePlan, run: Run, done: Archived, files: dict[str, Segment]
) -> Run:
    """Write and verify the files of a run. Return its manifest.
    Raises StoreError: see `archive`; the written files are removed."""
    try:
        made = run_tasks(spark, partial(archive_split, plan), splits)
        run.files = [file for one in made for file in one.files]
        verify_files(spark, plan.target, run.files, folder=plan.folder, reads_all=plan.has_bodies_crc)
        for path in dict.fromkeys(split.path for split in splits):
            run.segments.append(_segment(files[path], splits, made, run.files))
    except Exception:
        plan.target.discard()
        raise
    done.run, done.files, done.bytes = run.number, len(run.files), sum(file.bytes for file in run.files)
    done.records, done.rows, done.lost = (
        sum(getattr(one, name) for one in made) for name in ("records", "rows", "lost")
    )
    done.segments = add_up(one.counts for one in made)
    return run


def _segment(
    segment: Segment, splits: Sequence[Split], made: Sequence[SplitFiles], files: Sequence[ArchivedFile]
) -> ArchivedSegment:
    """Return the archived part of one file. Raises StoreError: the rows of the files do not match the records."""
    ours = [(split, one) for split, one in zip(splits, made, strict=True) if split.path == segment.path]
    low, high = (segment.base_offset + at for at in (ours[0][0].low, ours[-1][0].high))
    records, rows, lost = (sum(getattr(one, name) for _, one in ours) for name in ("records", "rows", "lost"))
    kept = sum(file.rows for file in files if file.segment == segment.base_offset)
    if kept != rows:
        raise StoreError(f"{segment.path} has {rows} messages, its files in the archive {kept}: archive it again")
    return ArchivedSegment(
        segment.base_offset, segment.size, low, high, records, rows, lost, _edges_crc(segment, low, high)
    )


def verify_files(
    spark: SparkSession, target: Target, files: Sequence[ArchivedFile], *, folder: str = "", reads_all: bool
) -> None:
    """Read files again, in the workers. Raises StoreError: a file differs from the written file."""
    if not files:
        return
    check = partial(_differences, target, folder, reads_all)
    tasks = min(len(files), 4 * core_count(spark))
    wrong = list(chain.from_iterable(run_tasks(spark, check, [files[i::tasks] for i in range(tasks)])))
    if wrong:
        more = f" (and {len(wrong) - 1} more files)" if len(wrong) > 1 else ""
        raise StoreError(f"{wrong[0]}{more}: restore it, or archive the log again into another target")


def _differences(target: Target, folder: str, reads_all: bool, files: Sequence[ArchivedFile]) -> list[str]:
    filesystem, found = target.filesystem(), []
    for file in files:
        path = f"{folder}/{file.path}" if folder else file.path
        if reason := difference(filesystem, path, file, reads_all=reads_all):
            found.append(f"{target.root}/{path} {reason}")
    return found


# ---------------------------------------------------------------- deleting


def _delete(
    spark: SparkSession,
    path: str,
    segments: Sequence[Segment],
    newest: str,
    runs: Sequence[Run],
    target: Target,
    hours: float,
    done: Archived,
) -> None:
    """Delete log files, oldest first, up to the first file that must remain. Raises StoreError: the archive is
    damaged.
    """
    covered: Counter[int] = Counter()
    for known in (known for run in runs for known in run.segments):
        covered[known.base_offset] += known.high - known.low if not known.lost else 0
    expired = []
    for segment in segments:
        if (
            segment.path == newest
            or covered[segment.base_offset] != segment.size
            or isinstance(segment.path, RemotePath)
            or Path(segment.path).stat().st_mtime > time.time() - hours * _HOUR_S
        ):
            break
        expired.append(segment)
    done.deletable = [segment.path for segment in expired]
    if not expired:
        return
    # Read every byte of the archived files again first: after the deletion they are the only copy of these messages.
    bases = {segment.base_offset for segment in expired}
    files = [file for run in runs for file in run.files if file.segment in bases]
    verify_files(spark, target, files, reads_all=True)
    root = local_path(path)
    # Lock the store only for the deletion: reading the archive takes long, and no broker can start during the lock.
    lock = StoreLock(root)
    try:
        lock.acquire()
    except StoreLocked:
        done.deleted = "no: a broker has the store, and deletes by its own rules (fileReservedTime)"
        return
    try:
        if (root / "abort").exists():
            done.deleted = "no: the broker was not stopped in order: start it once, it repairs its queues from the log"
            return
        # Delete the oldest file first: a log without its oldest files is valid, a log with a gap is not readable.
        for segment in expired:
            Path(segment.path).unlink(missing_ok=True)
            sync_directory(Path(segment.path).parent)
        done.deleted = "yes"
    finally:
        lock.release()


# ---------------------------------------------------------------- inside a task


class ArchivePlan(Struct, frozen=True):
    """The facts about a run that every task needs. ``folder`` is the folder for the files of the run, inside the
    target.
    """

    target: Target
    folder: str
    partition_by: tuple[str, ...]
    read: ReadPlan
    has_bodies_crc: bool = False


class SplitFiles(Struct):
    """The files that a task wrote for its split. ``records`` counts the records that matched the conditions, ``rows``
    the messages in these records, and ``lost`` the damaged places and the records without a message."""

    files: list[ArchivedFile]
    counts: SegmentCounts
    records: int = 0
    rows: int = 0
    lost: int = 0


def archive_split(plan: ArchivePlan, split: Split) -> SplitFiles:
    """Write the messages of a split. This is the work of one task.
    Raises StoreError: the split is damaged, and the plan does not allow damage."""
    buffer = map_range(split.path, split.low, split.high)
    done = SplitFiles([], SegmentCounts.of(split))
    # Each attempt of a task writes its own files, even if two attempts run at the same time. Only the files of a
    # successful attempt are published.
    stem = f"{split.base_offset + split.low:020d}-{uuid.uuid4().hex[:8]}"
    files = PartitionFiles(
        plan.target.filesystem(),
        plan.folder,
        stem,
        segment=split.base_offset,
        partition_by=plan.partition_by,
        has_bodies_crc=plan.has_bodies_crc,
    )
    walk = scan.walk(buffer, split.base_offset, split.low, split.high, rows_max=plan.read.batch_rows)
    parts = _wanted(counted(walk, done.counts, split), plan.read, done)
    # `_wanted` has already applied both, because it counts the excluded records.
    unfiltered = replace(plan.read, selection=EVERYTHING, verify_crc=VerifyCrc.NONE)
    found, last = 0, -1
    for batch in read_parts(split, parts, unfiltered):
        offsets = batch["commitLogOffset"].to_numpy()
        if len(offsets):  # members of an inner batch share the offset of their record
            found += int(np.count_nonzero(np.diff(offsets, prepend=last)))
            last = int(offsets[-1])
            done.rows += len(offsets)
            files.add(batch)
    done.files = files.close()
    done.lost += done.records - found
    return done


def _wanted(parts: Iterator[Records | Damage], read: ReadPlan, done: SplitFiles) -> Iterator[Records | Damage]:
    """Yield the parts of a walk without unwanted records, and count the wanted records."""
    for part in parts:
        if isinstance(part, Damage):
            done.lost += 1
            yield part
            continue
        records = part if read.selection == EVERYTHING else part.take(matches(part, read.selection))
        done.records += len(records)
        if read.verify_crc is not VerifyCrc.NONE and not (is_right := crc_matches(records)).all():
            wrong = records.take(~is_right)
            if read.verify_crc is VerifyCrc.FAIL:
                at = int(wrong.field("physical_offset")[0])
                raise StoreError(
                    f"{done.counts.segment}: the body at commitLogOffset {at} does not match its CRC; verifyCrc=drop"
                    " leaves such messages out"
                )
            done.counts.bad_crcs += len(wrong)
            records = records.take(is_right)
        yield records
