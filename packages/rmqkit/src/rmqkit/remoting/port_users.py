"""The programs that listen on a port of this machine, read from Linux's ``/proc``.

`in_use_by` returns a text for errors, such as ``in use by the rmq broker, pid 4711``. Processes of other users and of
other containers are not visible. On macOS no process is visible.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PortUser", "in_use_by", "port_users"]

_PROC = Path("/proc")
_LISTEN = "0A"
_SERVERS = {
    "standalone": "broker",
    "broker": "broker",
    "namesrv": "name server",
    "proxy": "proxy",
    "console": "console",
}
"""Command of ``rmq`` that listens on a port → name of the program in texts."""


@dataclass(frozen=True, slots=True)
class PortUser:
    """A process that listens on a port. ``is_broker``: the process is a broker of rmqkit."""

    pid: int
    program: str
    is_broker: bool = False

    def __str__(self) -> str:
        return f"{self.program}, pid {self.pid}"


def in_use_by(port: int, proc: Path = _PROC) -> str:
    """Return a part of a sentence that names the programs on a port."""
    users = port_users(port, proc)
    return f"in use by {' and '.join(map(str, users)) or 'a program that cannot be seen from here'}"


def port_users(port: int, proc: Path = _PROC) -> list[PortUser]:
    """Return the processes that listen on a port and are visible to this user."""
    sockets = set()
    for table in ("net/tcp", "net/tcp6"):
        for line in _read(proc / table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    pids = set()
    for handle in proc.glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if str(handle.readlink()) in sockets:
                pids.add(int(handle.parts[-3]))
    return [_user(pid, proc / str(pid)) for pid in sorted(pids)]


def _user(pid: int, folder: Path) -> PortUser:
    words = _read(folder / "cmdline").split("\0")
    starts = [at for at, word in enumerate(words) if word.rpartition("/")[2] in ("rmq", "rmqkit")]
    command = next((word for word in words[starts[0] + 1 :] if not word.startswith("-")), "") if starts else ""
    if command in _SERVERS:
        return PortUser(pid, f"the rmq {_SERVERS[command]}", _SERVERS[command] == "broker")
    return PortUser(pid, _read(folder / "comm").strip() or "a program")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
