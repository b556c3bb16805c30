"""Power cuts in five workloads, six in each, and a test that the simulated disk forgets what a real disk may forget.

``make test`` runs two of the workloads, ``make kill T=store`` makes thousands of cuts. A failure names its seed and
cut: ``python -m tests.faults.crash --seed S --cut N``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rmqkit.system import disk
from tests.examples import chosen_seed, many
from tests.faults.disk import CutStyle, Recorder
from tests.faults.power_cut import PowerCuts

WORKLOADS = 5
CUTS = 6
_seed = chosen_seed()


@pytest.mark.faults
@pytest.mark.parametrize("number", range(min(WORKLOADS, many(WORKLOADS))))
def test_store_survives_power_cuts(tmp_path: Path, number: int) -> None:
    print(f"seed {_seed + number}")
    cuts = PowerCuts(_seed + number, tmp_path)
    for cut in range(CUTS):
        try:
            cuts.cut(cut)
        except AssertionError as error:
            raise AssertionError(f"--seed {_seed + number} --cut {cut}: {error}") from error


# ---- the disk itself


def write(path: Path, data: bytes, position: int = 0, *, sync: bool = False) -> None:
    fd = disk.open(path, os.O_RDWR | os.O_CREAT)
    disk.pwrite(fd, data, position)
    if sync:
        disk.sync_data(fd)
    disk.close(fd)


def states(recorder: Recorder, folder: Path, style: CutStyle, count: int = 60) -> set[tuple[tuple[str, bytes], ...]]:
    """Return the different states that cuts at the end leave."""
    found = set()
    for seed in range(count):
        to = folder / f"{style.pages}-{seed}"
        recorder.cut(recorder.time, style, random.Random(seed), to)
        files = [path for path in to.rglob("*") if path.is_file()]
        found.add(tuple(sorted((str(path.relative_to(to)), path.read_bytes()) for path in files)))
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    base.mkdir()
    return base


def test_synced_bytes_and_names_stay(base: Path, tmp_path: Path) -> None:
    with Recorder(base) as recorder:
        write(base / "f", b"a" * 5000, sync=True)
        directory = disk.open(base, os.O_RDONLY)
        disk.sync_file(directory)
        disk.close(directory)
    for pages in ("old", "mixed", "torn"):
        assert states(recorder, tmp_path, CutStyle(pages, is_loose=True)) == {(("f", b"a" * 5000),)}


def test_pages_that_were_not_synced_are_there_or_not(base: Path, tmp_path: Path) -> None:
    write(base / "f", b"a" * 8192)
    with Recorder(base) as recorder:
        write(base / "f", b"b" * 8192)
    found = states(recorder, tmp_path, CutStyle("mixed", is_loose=False))
    pages = {(dict(state)["f"][:4096][:1], dict(state)["f"][4096:][:1]) for state in found}
    assert pages == {(b"a", b"a"), (b"a", b"b"), (b"b", b"a"), (b"b", b"b")}
    assert all(len(set(dict(state)["f"][:4096])) == 1 for state in found)


def test_torn_pages_have_whole_sectors(base: Path, tmp_path: Path) -> None:
    write(base / "f", b"a" * 4096)
    with Recorder(base) as recorder:
        write(base / "f", b"b" * 4096)
    found = [dict(state)["f"] for state in states(recorder, tmp_path, CutStyle("torn", is_loose=False))]
    assert any(0 < content.count(b"b") < 4096 for content in found)
    assert all(len(set(content[at : at + 512])) == 1 for content in found for at in range(0, 4096, 512))


def test_names_come_and_go_in_their_order(base: Path, tmp_path: Path) -> None:
    with Recorder(base) as recorder:
        write(base / "a", b"")
        disk.rename(base / "a", base / "b")
        write(base / "c", b"")
        disk.remove(base / "b")
    names = {
        tuple(name for name, _ in state) for state in states(recorder, tmp_path, CutStyle("mixed", is_loose=False))
    }
    assert names == {(), ("a",), ("b",), ("b", "c"), ("c",)}


def test_sync_of_a_file_brings_the_journal_before_it(base: Path, tmp_path: Path) -> None:
    with Recorder(base) as recorder:
        write(base / "first", b"")
        write(base / "second", b"2", sync=True)
        write(base / "third", b"")
    names = {
        tuple(name for name, _ in state) for state in states(recorder, tmp_path, CutStyle("mixed", is_loose=False))
    }
    assert names == {("first", "second"), ("first", "second", "third")}
    loose = {tuple(name for name, _ in state) for state in states(recorder, tmp_path, CutStyle("old", is_loose=True))}
    assert () in loose


def test_file_rewritten_holds_the_old_or_the_new_bytes(base: Path, tmp_path: Path) -> None:
    write(base / "f", b"old")
    with Recorder(base) as recorder:
        fd = disk.open(base / "f", os.O_RDWR | os.O_TRUNC)
        disk.pwrite(fd, b"newer", 0)
        disk.close(fd)
    found = {dict(state)["f"] for state in states(recorder, tmp_path, CutStyle("mixed", is_loose=False))}
    assert found == {b"old", b"", b"\0" * 5, b"newer"}


def test_what_was_recorded_is_what_was_done(base: Path) -> None:
    with Recorder(base) as recorder:
        disk.make_directory(base / "d")
        disk.make_directory(base / "d")
        write(base / "d" / "f", b"abc", 2)
        fd = disk.open(base / "d" / "f", os.O_RDWR)
        disk.truncate(fd, 4)
        disk.close(fd)
        disk.make_directories(base / "gone" / "below")
        write(base / "gone" / "below" / "f", b"x")
        disk.remove_tree(base / "gone")
        disk.remove(base / "missing", missing_ok=True)
    assert recorder.live_tree() == {"d": None, "d/f": b"\0\0ab"}
    assert (base / "d" / "f").read_bytes() == b"\0\0ab"
