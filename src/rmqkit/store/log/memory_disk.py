"""A store on a tmpfs without room: refused, where a look at a file would end the process.

Log files are sparse and read through a mapping. On a tmpfs the first look at a page that was never written takes
memory, and where there is none left the kernel answers with SIGBUS, which no program survives. Recovery looks at a few
pages behind the last record; so there has to be room for some when a store is opened. Files on disks need none.
"""

from __future__ import annotations

import os
from pathlib import Path

from rmqkit.errors import StoreError

__all__ = ["check_room"]

_NEEDED_BYTES = 1 << 20
_MOUNTS = Path("/proc/self/mountinfo")


def check_room(path: Path) -> None:
    """Raises StoreError: a directory, or the one it will be made in, lies on a tmpfs that is full."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = os.statvfs(path)
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < _NEEDED_BYTES and _is_tmpfs(path):
        raise StoreError(
            f"{path} lies on a tmpfs with {free_bytes} bytes free, and a start needs {_NEEDED_BYTES}: delete files "
            f"there, or make it larger (mount -o remount,size=... {_mount_point(path)})"
        )


def _is_tmpfs(path: Path) -> bool:
    return any(kind == "tmpfs" for kind, _ in _mounts_of(path))


def _mount_point(path: Path) -> str:
    return next((point for _, point in _mounts_of(path)), str(path))


def _mounts_of(path: Path) -> list[tuple[str, str]]:
    """Kind and mount point of the file system of a path; nothing where the kernel does not tell."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return []
    return [(words[words.index("-") + 1], words[4]) for words in lines if words[2] == number and "-" in words]
