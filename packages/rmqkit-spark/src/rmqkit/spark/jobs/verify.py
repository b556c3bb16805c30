"""Verification of a store, with the checks of ``rmq store verify``, on all cores.

======  ===================================================  ===========================================================
stage   one task per                                         checks
======  ===================================================  ===========================================================
1       split of the log (`check_split`)                     every record: its fields, its offset, its body's CRC on the
                                                             mapped bytes, and the CRC of the whole record if it has
                                                             one; it also finds the entries of queues and index files
                                                             that are equal to the expected entries
2       index file, or queues of about the same size         all other entries of the files, one by one, and extension
        (`check_files`)                                      units, chains and headers
driver  –                                                    the end of the log, file names and sizes, ends of queues,
                                                             checkpoint and configuration
======  ===================================================  ===========================================================

A store at an address is copied first (`rmqkit.spark.jobs.staged`). The Python workers run the code of
`rmqkit.store.offline.check`, and return counts, findings and ranges of numbers. They read the store at the same path as
the driver. Source: store.md §2-§8, §12.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from rmqkit.arrow.fs import RemotePath, resolve
from rmqkit.arrow.splits import Split
from rmqkit.spark.jobs.log_ranges import (
    LogRange,
    SegmentCounts,
    disk_errors,
    in_log,
    log_splits,
    task_count,
    walked,
)
from rmqkit.spark.jobs.staged import settings_at, staged
from rmqkit.spark.jobs.tasks import core_count, run_tasks
from rmqkit.spark.session import address
from rmqkit.store.bulk import DispatchColumns
from rmqkit.store.log.view import LogView, Segment
from rmqkit.store.offline.bulk_compare import Ranges
from rmqkit.store.offline.check import (
    LogDamage,
    QueueStat,
    check_other_files,
    check_records,
    is_held,
    open_log,
    queue_ends,
    tally,
)
from rmqkit.store.offline.findings import Kind, Report, entries_of
from rmqkit.store.offline.queue_check import DerivedFiles, Equal, FileSizes, QueueEnd
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Checked", "Files", "Seen", "Verified", "check_files", "check_split", "joined", "verify"]

_SPLIT_BYTES = 128 << 20
_TASK_BYTES = 32 << 20
_TASKS_PER_CORE = 3


class Verified(Report):
    """A `Report` with the counts of the log files."""

    segments: list[SegmentCounts] = field(default_factory=list)


class Checked(Struct):
    """The input of every task. If ``sizes`` is None, the tasks check only the log."""

    root: Path
    settings: StoreSettings
    sizes: FileSizes | None


class Seen(Struct):
    """The result of checking the records of a range."""

    report: Report
    tallies: dict[tuple[str, int], QueueStat]
    equal: Equal


class Files(Struct):
    """The input of one task in the second stage: the files to check, the entries in them that were found equal, and the
    log for comparison."""

    log: list[tuple[Path, int]]
    log_end: int
    report: Report
    queues: list[tuple[Path, Ranges]] = field(default_factory=list)
    index: list[tuple[Path, Ranges]] = field(default_factory=list)
    newest_index: str = ""


def verify(
    spark: SparkSession,
    path: str,
    settings: StoreSettings | None = None,
    *,
    read_only: bool = False,
    log_only: bool = False,
    split_bytes: int = _SPLIT_BYTES,
    work_dir: str = "",
) -> Verified:
    """Check every record, queue entry, extension unit and index chain of a store.

    Args:
        settings: the settings of the store's broker. By default the size of a file is compared with files of its kind.
        read_only: whether to check a store that a broker uses, in its current state.
        log_only: whether to check only the commit log.
        work_dir: folder for the temporary copy of a store at an address (`rmqkit.spark.jobs.staged`).

    Raises:
        StoreLocked: a broker holds the lock of the store.
        StoreError: the store is missing, its index sizes are unknown, or a file cannot be read.
    """
    path, settings = address(spark, path), settings_at(path, settings)
    with staged(spark, path, work_dir, lambda tree: not log_only or tree == "commitlog") as root:
        report = _verified(spark, root, settings, read_only, log_only, split_bytes)
    source = resolve(path)
    if isinstance(source, RemotePath):
        for named in [*report.findings, *report.open_ends, *filter(None, [report.tail])]:
            named.path = named.path.replace(str(root), source)
        report.gaps = {(name.replace(str(root), source), at): end for (name, at), end in report.gaps.items()}
        for segment in report.segments:
            segment.segment = segment.segment.replace(str(root), source)
    return report


def _verified(
    spark: SparkSession, root: Path, settings: StoreSettings | None, read_only: bool, log_only: bool, split_bytes: int
) -> Verified:
    used = settings or StoreSettings()
    report = Verified(is_live=is_held(root, read_only), is_unclean=(root / "abort").exists())
    log = open_log(root, settings, report)
    sizes = None if log_only else FileSizes.of(root, used, are_set=settings is not None)
    plan, splits = Checked(root, used, sizes), log_splits(log, split_bytes)
    found = chain.from_iterable(run_tasks(spark, partial(check_split, plan), splits, task_count(splits)))
    derived = DerivedFiles(root, log, used, report, sizes) if sizes is not None else None
    seen = joined(log, report, found, derived)
    if derived is not None:
        queues, index = _shared(log, report, derived, seen.equal, core_count(spark))
        checked = run_tasks(spark, partial(check_files, plan), [*queues, *index])
        # Results are in the order of the tasks: the results of queues first, which contain the ends of the queues.
        for part, ends in checked[: len(queues)]:
            report.join(part)
            derived.ends |= ends
        derived.check_ends(queue_ends(root, log, seen.tallies))
        derived.check_missing_index()
        for part, _ in checked[len(queues) :]:
            report.join(part)
        check_other_files(root, log, report, settings, seen.tallies)
    return report


class _Checks:
    """The checks of the records of one range."""

    def __init__(self, plan: Checked, start: int) -> None:
        self._seen = Seen(Report(), {}, Equal())
        self._derived: DerivedFiles | None = None
        if plan.sizes is not None:
            # Use an empty log, because a task has only its split. The second stage does the checks that need other
            # files.
            log, report = LogView([]), self._seen.report
            self._derived = DerivedFiles(plan.root, log, plan.settings, report, plan.sizes, compared_from=start)

    def add(self, segment: Segment, arrivals: DispatchColumns) -> None:
        self._seen.report.checked["records"] += len(arrivals)
        check_records(segment, arrivals, self._seen.report)
        tally(arrivals, self._seen.tallies)
        if self._derived is not None:
            self._derived.compare(arrivals)

    def result(self) -> Seen:
        if self._derived is not None:
            self._seen.equal = self._derived.equal()
        return self._seen


def check_split(plan: Checked, split: Split) -> list[tuple[LogRange, Seen]]:
    """Check the records of a split (stage 1). Return its log ranges with their results.
    Raises StoreError: a file cannot be read."""
    with disk_errors(plan.root):
        return list(walked(split, partial(_Checks, plan)))


def check_files(plan: Checked, files: Files) -> tuple[Report, dict[tuple[str, str, int], QueueEnd]]:
    """Check some files (stage 2). Return the findings and the ends of their queues.
    Raises StoreError: see `check_split`."""
    assert plan.sizes is not None, "stage 2 runs only with the sizes of files"
    with disk_errors(plan.root):
        log = LogView(files.log)
        log.end = files.log_end
        derived = DerivedFiles(plan.root, log, plan.settings, files.report, plan.sizes)
        for folder, equal in files.queues:
            derived.check_queue(folder, equal)
        for path, equal in files.index:
            derived.check_index(path, equal, is_newest=path.name == files.newest_index)
    return files.report, derived.ends


def joined(
    log: LogView, report: Verified, found: Iterable[tuple[LogRange, Seen]], derived: DerivedFiles | None
) -> Seen:
    """Join the results of stage 1 (`check_split`) for all ranges up to the end of the log, and return the joined
    result. Add the findings and counts of these ranges to the report."""
    counts: dict[Path, SegmentCounts] = {}
    damages = LogDamage(report)
    whole = Seen(report, {}, Equal())
    for segment, (_, seen) in damages.passed(in_log(log, found, counts)):
        report.join(seen.report)
        counts[segment.path].bad_crcs += seen.report.counts[Kind.BODY_CRC]
        whole.equal.join(seen.equal)
        for key, stat in seen.tallies.items():
            if (before := whole.tallies.get(key)) is not None:
                before.join(stat)
            else:
                whole.tallies[key] = stat
    # Check after the last range, because only then ``log.end`` is known.
    damages.check_tail(derived.indexed_end if derived is not None else lambda: 0)
    damages.check_behind(log)
    # Stale bytes of a crash after the end were counted as damage, because the end was not known then.
    if damages.stale is not None:
        segment, damage = damages.stale
        counts[segment.path].damages -= 1
        counts[segment.path].damaged_bytes -= damage.end - damage.position
        assert counts[segment.path].damaged_bytes >= 0, "only counted damage is subtracted"
    report.segments = list(counts.values())
    return whole


def _shared(
    log: LogView, report: Report, derived: DerivedFiles, equal: Equal, cores: int
) -> tuple[list[Files], list[Files]]:
    """Distribute queues over tasks of about the same size, and index files over one task each."""
    files = [(segment.path, segment.start) for segment in log.segments]

    def new_task() -> Files:
        return Files(files, log.end, Report(is_live=report.is_live, is_unclean=report.is_unclean))

    folders = derived.queue_folders()
    sizes = [sum(path.stat().st_size for path in entries_of(folder)) for folder in folders]
    share = max(_TASK_BYTES, sum(sizes) // (_TASKS_PER_CORE * cores))
    queues, taken = [new_task()] if folders else [], 0
    for folder, size in zip(folders, sizes, strict=True):
        if taken > share:
            queues.append(new_task())
            taken = 0
        queues[-1].queues.append((folder, equal.queues.get(folder, Ranges())))
        taken += size
    index = []
    paths = derived.index_paths()
    for path in paths:
        index.append(new_task())
        index[-1].newest_index = paths[-1].name
        index[-1].index.append((path, equal.index.get(path, Ranges())))
    assert sum(len(task.queues) for task in queues) == len(folders), "each queue is checked by one task"
    return queues, index
