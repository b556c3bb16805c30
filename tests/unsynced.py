"""Files of this process are not waited for until they are on the disk.

What was written is there for every process, also after a SIGKILL; only a machine that loses its power needs more, and
no test can take that away: `tests.faults.disk` plays it back from the calls. Half of what most tests of a broker took
was the disk. Servers in processes of their own sync as users have it.
"""

from __future__ import annotations

import os


def leave_unsynced() -> None:
    """Let fsync and fdatasync return at once. Raises OSError where they do: no such descriptor."""
    os.fsync = _fsync
    if hasattr(os, "fdatasync"):
        os.fdatasync = _fdatasync


# Two functions: disks that refuse one of them know it by its identity.
def _fsync(fd: int) -> None:
    os.fstat(fd)


def _fdatasync(fd: int) -> None:
    os.fstat(fd)
