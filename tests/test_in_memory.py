"""Temporary files are in memory only where this is large, and where TMPDIR names no other place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import in_memory
from tests.in_memory import FREE_BYTES, NOEXEC, use_memory


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the numbers of a folder with room for the files, on a machine with as much memory."""
    found = SimpleNamespace(f_bavail=FREE_BYTES >> 12, f_frsize=1 << 12, f_flag=0, kib=FREE_BYTES >> 10)
    monkeypatch.setattr(in_memory.os, "statvfs", lambda folder: found)
    monkeypatch.setattr(in_memory.Path, "read_text", lambda path: f"MemTotal: 1 kB\nMemAvailable:   {found.kib} kB\n")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    monkeypatch.setenv("TMPDIR", "")  # so that the value of the run is restored, or none
    monkeypatch.delenv("TMPDIR")
    return found


def test_files_are_in_memory_where_it_has_room(tmp_path: Path) -> None:
    assert use_memory(tmp_path)
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)


@pytest.mark.parametrize(
    "lack", [{"f_bavail": (FREE_BYTES >> 12) - 1}, {"kib": (FREE_BYTES >> 10) - 1}, {"f_flag": NOEXEC}]
)
def test_files_stay_on_the_disk_where_memory_lacks(lack: dict[str, int], room: SimpleNamespace, tmp_path: Path) -> None:
    vars(room).update(lack)
    assert not use_memory(tmp_path)
    assert "TMPDIR" not in os.environ


def test_files_stay_where_tmpdir_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert not use_memory(tmp_path)
    assert os.environ["TMPDIR"] == "/elsewhere"


def test_files_stay_on_the_disk_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: Path) -> os.statvfs_result:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(in_memory.os, "statvfs", missing)
    assert not use_memory(tmp_path / "missing")
