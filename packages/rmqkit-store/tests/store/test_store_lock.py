"""One broker per directory, Java's included: store.md §8.3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.errors import StoreLocked
from rmqkit.store.files import StoreLock

HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""
TRY = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    sys.exit(7)
"""


def foreign_try(path: Path) -> int:
    return subprocess.run([sys.executable, "-c", TRY, str(path / "lock")], timeout=200, check=False).returncode


def test_file_says_lock(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path)
    lock.acquire()
    assert (tmp_path / "lock").read_bytes() == b"lock"
    lock.release()


def test_another_process_is_kept_out_until_release(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path)
    lock.acquire()
    assert foreign_try(tmp_path) == 7
    lock.release()
    assert foreign_try(tmp_path) == 0


def test_second_store_of_this_process_is_kept_out_and_does_not_break_the_lock(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path)
    lock.acquire()
    with pytest.raises(StoreLocked, match="is in use by another process: stop that broker"):
        StoreLock(tmp_path / "x" / "..").acquire()
    assert foreign_try(tmp_path) == 7, "the failed try closed no descriptor of the file"
    lock.release()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    StoreLock(tmp_path / "missing").check()
    StoreLock(tmp_path).check()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lock").touch()
    StoreLock(tmp_path).check()
    assert (tmp_path / "lock").read_bytes() == b""


def test_lock_held_elsewhere(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLocked):
            StoreLock(tmp_path).check()
        with pytest.raises(StoreLocked):
            StoreLock(tmp_path).acquire()
        assert (tmp_path / "lock").read_bytes() == b""
        holder.stdin.close()
    lock = StoreLock(tmp_path)
    lock.acquire()
    lock.release()
