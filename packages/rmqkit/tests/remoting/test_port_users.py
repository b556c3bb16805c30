"""The programs that listen on a port, as errors and `rmq doctor` name them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rmqkit.remoting.port_users import in_use_by, port_users

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = (
    "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"
)


def machine(proc: Path, *command: str, comm: str = "python3", state: str = "0A", table: str = "tcp") -> Path:
    """A machine where process 77 runs a command and has a socket on port 10911."""
    (proc / "net").mkdir(parents=True)
    (proc / "net" / table).write_text(HEAD + LINE.format(port=10911, state=state, inode=4242))
    (proc / "77/fd").mkdir(parents=True)
    (proc / "77/fd/5").symlink_to("socket:[4242]")
    (proc / "77/fd/6").symlink_to("/dev/null")
    (proc / "77/comm").write_text(comm + "\n")
    (proc / "77/cmdline").write_text("\0".join([*command, ""]))
    return proc


@pytest.mark.parametrize(
    ("command", "said", "is_broker"),
    [
        (["/venv/bin/python", "/venv/bin/rmq", "broker", "--port", "10911"], "the rmq broker, pid 77", True),
        (["python3", "-m", "rmqkit", "standalone"], "the rmq broker, pid 77", True),
        (["python3", "/usr/bin/rmq", "--debug", "namesrv"], "the rmq name server, pid 77", False),
        (["python3", "-m", "pytest", "packages/rmqkit"], "python3, pid 77", False),
        (["python3", "/usr/bin/rmq", "tail", "broker"], "python3, pid 77", False),
        ([], "python3, pid 77", False),
    ],
)
def test_the_user_of_a_port_is_named(tmp_path: Path, command: list[str], said: str, is_broker: bool) -> None:
    (user,) = port_users(10911, machine(tmp_path, *command))
    assert (user.pid, str(user), user.is_broker) == (77, said, is_broker)
    assert in_use_by(10911, tmp_path) == f"in use by {said}"
    assert port_users(10912, tmp_path) == []


@pytest.mark.parametrize(("state", "table", "count"), [("01", "tcp", 0), ("0A", "tcp6", 1)])
def test_only_a_socket_that_listens_uses_a_port(tmp_path: Path, state: str, table: str, count: int) -> None:
    assert len(port_users(10911, machine(tmp_path, state=state, table=table))) == count


def test_a_user_that_cannot_be_seen(tmp_path: Path) -> None:
    assert in_use_by(10911, tmp_path) == "in use by a program that cannot be seen from here"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux tells who listens")
def test_this_process_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert [one.pid for one in port_users(listening.getsockname()[1])] == [os.getpid()]
