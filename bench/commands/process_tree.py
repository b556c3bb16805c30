"""CPU time of this process and all its descendants, from ``/proc`` of Linux.

If a process waits for its children, its own entry includes their time. If it ignores SIGCHLD, it does not: then the
last measured time of its exited children is added (Spark's Python daemon ends idle workers in this way).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from msgspec import Struct

__all__ = ["ProcessTree"]

_Key = tuple[int, int]
"""Process id and start time, because ids are reused."""


class _Process(Struct):
    parent: int
    started: int
    ticks: int


class ProcessTree:
    """The descendants of this process, without those in ``excluded`` and their descendants."""

    def __init__(self) -> None:
        self.excluded: set[int] = set()
        self._unwaited: dict[_Key, int] = {}

    def cpu_seconds(self) -> float:
        """Return the user and system seconds that they have used so far."""
        tree = self._tree()
        # While processes exit, their time may move to their parents.
        while (again := self._tree()).keys() != tree.keys():
            tree = again
        deaf = {one for one in {process.parent for process in tree.values()} if one in tree and _ignores_children(one)}
        present = {(one, process.started): process for one, process in tree.items()}
        self._unwaited |= {key: process.ticks for key, process in present.items() if process.parent in deaf}
        gone = sum(ticks for key, ticks in self._unwaited.items() if key not in present)
        return (sum(process.ticks for process in tree.values()) + gone) / os.sysconf("SC_CLK_TCK")

    def _tree(self) -> dict[int, _Process]:
        processes = dict(_processes())
        return {one: process for one, process in processes.items() if self._is_ours(one, processes)}

    def _is_ours(self, process: int, processes: dict[int, _Process]) -> bool:
        while process in processes and process != os.getpid() and process not in self.excluded:
            process = processes[process].parent
        return process == os.getpid()


def _processes() -> list[tuple[int, _Process]]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just exited
            continue
        process = _Process(parent=int(fields[1]), started=int(fields[19]), ticks=sum(map(int, fields[11:15])))
        found.append((int(stat.parent.name), process))
    return found


def _ignores_children(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGCHLD - 1) & 1)
