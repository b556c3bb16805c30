"""The checkpoint: how far log, queues and index are on the disk (``StoreCheckpoint``).

======  ====================  ==========================================================
offset  field                 value
======  ====================  ==========================================================
0       physicMsgTimestamp    storeTimestamp of the newest message covered by a log flush
8       logicsMsgTimestamp    the same of a thorough queue flush
16      indexMsgTimestamp     end timestamp of the newest full index file
24      masterFlushedOffset   5.x
32      confirmPhyOffset      5.x: offset of the last valid message found at recovery
40      logicsPhysicalOffset  5.5: the log and all queues are on the disk up to this offset; 0 if unknown
======  ====================  ==========================================================

Recovery considers a record flushed if its storeTimestamp is not later than these timestamps. This requires ascending
times: if the clock is set back, `step_back` lowers the timestamps on the disk before the first record with an earlier
time. The timestamps do not rise again until the clock has passed its former time.

The recovery of rmqkit does not read ``logicsPhysicalOffset``. A broker of 5.5 starts its recovery at the log file that
contains this offset, so the offset must not exceed the end of the log or the end of the queues on the disk.

All numbers are big-endian i64 in a file of 4096 bytes; the rest is zero. Source: store.md §8.1, delta-5.5.md §3.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from rmqkit.system import disk, threads

__all__ = ["CHECKPOINT_BYTES", "Checkpoint"]

_log = logging.getLogger(__name__)
_FIELDS = struct.Struct(">6q")
CHECKPOINT_BYTES = 4096
_SAFETY_MS = 3000


class Checkpoint:
    """The six numbers and their file. Any thread can call `save`, `reach` and `step_back`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.physic_timestamp = 0
        self.logics_timestamp = 0
        self.index_timestamp = 0
        self.master_flushed_offset = 0
        self.confirm_physical_offset = 0
        self.logics_physical_offset = 0
        self._held_until = 0
        self._saved: bytes | None = None
        self._lock = threads.RLock()

    def load(self) -> None:
        """Read the file. If the file is missing or incomplete, all numbers stay 0 and recovery starts at the
        beginning.
        """
        try:
            content = disk.read_file(self.path)
        except FileNotFoundError:
            return
        if len(content) < _FIELDS.size:
            found = self.path, len(content), CHECKPOINT_BYTES
            _log.warning("%s has %d bytes, expected %d: recovering from the first file", *found)
            return
        self.physic_timestamp, self.logics_timestamp, self.index_timestamp, *offsets = _FIELDS.unpack_from(content)
        self.master_flushed_offset, self.confirm_physical_offset, self.logics_physical_offset = offsets
        # Save even without a change: the content may be in the page cache only, after a failed sync of another process.

    def reach(self, *, physic: int = 0, logics: int = 0, index: int = 0) -> None:
        """Raise the timestamps to the times that a flush reached."""
        with self._lock:
            physic, logics, index = (0 if one <= self._held_until else one for one in (physic, logics, index))
            self.physic_timestamp = max(physic, self.physic_timestamp)
            self.logics_timestamp = max(logics, self.logics_timestamp)
            self.index_timestamp = max(index, self.index_timestamp)

    def before_cut(self, log_end: int) -> None:
        """Reset the offset of the queues, also on the disk, before the log is cut below this offset.
        Raises OSError: the checkpoint cannot be saved."""
        if self.logics_physical_offset > log_end:
            self.logics_physical_offset = 0
            self.save()

    def step_back(self, before_ms: int, now_ms: int) -> None:
        """Lower the timestamps, also on the disk, before the first record with an earlier time than the previous
        record.
        Raises OSError: the checkpoint cannot be saved."""
        with self._lock:
            # A flush must not raise the timestamps until the clock has passed the former time: they would cover records
            # that are not yet written.
            self._held_until = max(before_ms, self._held_until)
            earlier_ms = now_ms - 1  # with `now_ms`, a file that ends now would count as flushed
            if earlier_ms < max(self.physic_timestamp, self.logics_timestamp, self.index_timestamp):
                self.physic_timestamp = min(earlier_ms, self.physic_timestamp)
                self.logics_timestamp = min(earlier_ms, self.logics_timestamp)
                self.index_timestamp = min(earlier_ms, self.index_timestamp)
                self.save()

    def save(self) -> None:
        """Write and sync the file if anything changed. Raises OSError: the write failed."""
        with self._lock:
            times = self.physic_timestamp, self.logics_timestamp, self.index_timestamp
            offsets = self.master_flushed_offset, self.confirm_physical_offset, self.logics_physical_offset
            packed = _FIELDS.pack(*times, *offsets)
            if packed == self._saved:
                return
            self._saved = None  # after a failed write the content of the file is unknown
            descriptor = disk.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if disk.size_of(descriptor) != CHECKPOINT_BYTES:
                    disk.truncate(descriptor, CHECKPOINT_BYTES)
                disk.write_all(descriptor, packed, 0)
                disk.sync_data(descriptor)
            finally:
                disk.close(descriptor)
            self._saved = packed

    @property
    def min_timestamp(self) -> int:
        """Store time up to which log and queues are certainly on the disk."""
        return max(0, min(self.physic_timestamp, self.logics_timestamp) - _SAFETY_MS)
