"""The checkpoint: how far log, queues and index were on the disk (``StoreCheckpoint``).

======  ====================  ==========================================================
offset  field                 value
======  ====================  ==========================================================
0       physicMsgTimestamp    storeTimestamp of the newest message covered by a log flush
8       logicsMsgTimestamp    the same of a thorough queue flush
16      indexMsgTimestamp     end timestamp of the newest full index file
24      masterFlushedOffset   5.x
32      confirmPhyOffset      5.x: offset of the last valid message found at recovery
======  ====================  ==========================================================

Big-endian i64 in a file of 4096 bytes, the rest zero. Source: store.md §8.1.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from pathlib import Path

__all__ = ["CHECKPOINT_BYTES", "Checkpoint"]

_log = logging.getLogger(__name__)
_FIELDS = struct.Struct(">5q")
CHECKPOINT_BYTES = 4096
_SAFETY_MS = 3000


class Checkpoint:
    """The five numbers and their file; `save` may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.physic_timestamp = 0
        self.logics_timestamp = 0
        self.index_timestamp = 0
        self.master_flushed_offset = 0
        self.confirm_physical_offset = 0
        self._saved: bytes | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the file; without one, or with one cut off, everything is 0 and recovery starts at the front."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        if len(content) < _FIELDS.size:
            _log.warning(
                "%s has %d bytes, expected %d: recovering from the first file",
                self.path,
                len(content),
                CHECKPOINT_BYTES,
            )
            return
        (
            self.physic_timestamp,
            self.logics_timestamp,
            self.index_timestamp,
            self.master_flushed_offset,
            self.confirm_physical_offset,
        ) = _FIELDS.unpack_from(content)
        self._saved = content[: _FIELDS.size]

    def save(self) -> None:
        """Write the file and wait for the disk, if anything changed.

        Raises:
            OSError: the disk refused.
        """
        with self._lock:
            packed = self._packed()
            if packed == self._saved:
                return
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(descriptor).st_size != CHECKPOINT_BYTES:
                    os.ftruncate(descriptor, CHECKPOINT_BYTES)
                os.pwrite(descriptor, packed, 0)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            self._saved = packed

    def _packed(self) -> bytes:
        return _FIELDS.pack(
            self.physic_timestamp,
            self.logics_timestamp,
            self.index_timestamp,
            self.master_flushed_offset,
            self.confirm_physical_offset,
        )

    @property
    def min_timestamp(self) -> int:
        """Store time up to which log and queues are certainly on the disk."""
        return max(0, min(self.physic_timestamp, self.logics_timestamp) - _SAFETY_MS)
