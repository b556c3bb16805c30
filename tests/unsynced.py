"""fsync and fdatasync without effect in this process.

Written data is visible to every process, also after a SIGKILL. Only a power failure loses it, and tests simulate power
failures on a disk in memory (`rmqkit.testing.simulation`). Most tests of a broker spent half of their time on syncs.
Servers in processes of their own sync as usual.
"""

from __future__ import annotations

import os


def leave_unsynced() -> None:
    """Make fsync and fdatasync return at once. A bad descriptor still raises OSError."""
    os.fsync = _fsync
    if hasattr(os, "fdatasync"):
        os.fdatasync = _fdatasync


def _fsync(fd: int) -> None:
    os.fstat(fd)


def _fdatasync(fd: int) -> None:
    os.fstat(fd)
