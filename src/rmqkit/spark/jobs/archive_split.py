"""One task of an archive run: a split of the log → Parquet files in staging, and what became of its records.

Batches come from the reader of ``rocketmq-store``, so an archive has the rows that a read of the store has. What gives
no row is counted: damage and bodies that cannot be unpacked when they are to be skipped, wrong CRCs when they are to be
dropped. Source: spark.md §5.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from rmqkit.errors import StoreError
from rmqkit.spark.fs import map_range
from rmqkit.spark.jobs.archive_files import ArchivedFile, PartitionFiles
from rmqkit.spark.jobs.archive_target import Target
from rmqkit.spark.jobs.counts import SegmentCounts, counted
from rmqkit.spark.options import VerifyCrc
from rmqkit.spark.source.filters import matches
from rmqkit.spark.source.reader import ReadPlan, read_parts
from rmqkit.spark.source.splits import Split
from rmqkit.store.bulk import scan
from rmqkit.store.bulk.scan import Damage, Records, crc_matches

__all__ = ["ArchivePlan", "SplitFiles", "archive_split"]


class ArchivePlan(Struct, frozen=True):
    """What every task has to know: ``folder`` is where in the target its files go."""

    target: Target
    folder: str
    partition_by: tuple[str, ...]
    read: ReadPlan
    has_bodies_crc: bool = False


class SplitFiles(Struct):
    """What a task made of its split; of its ``records`` those that were wanted gave ``rows``, or were ``lost``."""

    files: list[ArchivedFile]
    counts: SegmentCounts
    records: int = 0
    rows: int = 0
    lost: int = 0


def archive_split(plan: ArchivePlan, split: Split) -> SplitFiles:
    """What one task does: write the messages of a split.
    Raises StoreError: there is damage, and the plan says to fail."""
    buffer = map_range(split.path, split.low, split.high)
    done = SplitFiles([], SegmentCounts.of(split))
    # a task that is tried again, or twice at a time, has files of its own; only those of a success are published
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
    unfiltered = replace(plan.read, conditions=(), verify_crc=VerifyCrc.NONE)
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
    """The parts of a walk, records that no row is made of left out, and the others counted."""
    for part in parts:
        if isinstance(part, Damage):
            done.lost += 1
            yield part
            continue
        records = part.take(matches(part, read.conditions)) if read.conditions else part
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
