"""Checks of an archive, repairs of damaged segments, and the segments that a store accepts as those of its log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rmqkit.errors import StoreError
from rmqkit.store.archive.archive import Archive, segment_name
from rmqkit.store.archive.contents import identity_of
from rmqkit.store.archive.identity import NOTE, LogIdentity, adopt, identity_in
from rmqkit.store.archive.places import Folder, place_at
from rmqkit.store.archive.seal import Work, seal
from rmqkit.store.archive.verify import found_in, repair, verify
from rmqkit.store.settings import StoreSettings
from tests.cli.in_process import rmq
from tests.store.stores import message, opened

FILE_BYTES = 16 << 10
OWN, OTHER = "11" * 16, "22" * 16


def logged(root: Path, count: int = 60, body: bytes = b"own") -> list[Path]:
    """Create a store with some log files and return the full ones."""
    with opened(root, StoreSettings(commit_log_file_bytes=FILE_BYTES)) as store:
        for number in range(count):
            store.put(message(topic="T", queue_id=number % 2, body=body + bytes(1000), KEYS=f"k{number}"))
        store.flusher.flush_log()
        return [file.path for file in store.log.queue.files[:-1]]


def archived(files: list[Path], folder: Path, log_id: str = OWN) -> Folder:
    place = Folder(folder)
    for path in files:
        seal(Work(str(path), int(path.name), "", "", with_tags=False, log_id=log_id), place)
    return place


def first_record(files: list[Path]):
    """The log files of a store."""
    known = {int(path.name): path for path in files}

    def begin(start: int) -> bytes | None:
        if start not in known:
            return None
        content = known[start].read_bytes()
        return content[: int.from_bytes(content[:4], "big")]

    return begin


@pytest.fixture
def own(tmp_path):
    files = logged(tmp_path / "store")
    return files, archived(files, tmp_path / "archive" / "broker-a"), tmp_path / "archive" / "broker-a"


def path_of(folder: Path, number: int) -> Path:
    return folder / segment_name(number * FILE_BYTES)


def test_a_sound_archive_has_no_problems(own):
    files, place, _ = own
    report = verify(place)
    assert report.is_sound and report.log == OWN
    assert report.segments == len(files) >= 4
    assert 50 <= report.records <= 60


@pytest.mark.parametrize("share", [0.02, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 0.9999])
def test_every_changed_byte_is_found_and_repaired(own, tmp_path, share):
    _, place, folder = own
    path = path_of(folder, 1)
    before = path.read_bytes()
    content = bytearray(before)
    content[int(len(content) * share)] ^= 0x10
    path.write_bytes(content)
    (problem,) = verify(place).problems
    assert (problem.name, problem.start, problem.end) == (path.name, FILE_BYTES, 2 * FILE_BYTES)
    report = repair(place, verify(place), tmp_path / "store", StoreSettings())
    assert report.is_sound and report.repaired == [path.name]
    assert path.read_bytes() == before


def test_a_flipped_bit_anywhere_in_a_segment_is_found(own):
    _, place, folder = own
    path = path_of(folder, 0)
    before = path.read_bytes()
    for position in range(0, len(before), max(1, len(before) // 150)):
        content = bytearray(before)
        content[position] ^= 1
        path.write_bytes(content)
        assert [problem.name for problem in verify(place).problems] == [path.name], position


@pytest.mark.parametrize("kept", [0, 10, 500])
def test_cut_and_missing_segments_are_repaired(own, tmp_path, kept):
    _, place, folder = own
    path_of(folder, 2).unlink()
    path_of(folder, 1).write_bytes(path_of(folder, 1).read_bytes()[:kept])
    texts = {problem.name: problem.text for problem in verify(place).problems}
    assert texts[segment_name(2 * FILE_BYTES)] == "it is missing"
    assert segment_name(FILE_BYTES) in texts[segment_name(FILE_BYTES)]
    report = repair(place, verify(place), tmp_path / "store", StoreSettings())
    assert report.is_sound and len(report.repaired) == 2


def test_what_the_store_has_no_more_stays_a_problem(own, tmp_path):
    files, place, folder = own
    path_of(folder, 0).write_bytes(b"nothing")
    files[0].unlink()
    report = repair(place, verify(place), tmp_path / "store", StoreSettings())
    (problem,) = report.problems
    assert problem.text.endswith("has no full log file of it") and report.repaired == []


def test_a_wrong_name_a_copy_and_another_logs_segment_are_named(own, tmp_path):
    _, place, folder = own
    path_of(folder, 3).rename(path_of(folder, 30))
    shutil.copy(path_of(folder, 0), path_of(folder, 20))
    archived(logged(tmp_path / "other", body=b"other"), tmp_path / "b", OTHER)
    shutil.copy(path_of(tmp_path / "b", 1), path_of(folder, 1))
    texts = [str(problem) for problem in verify(place).problems]
    assert any(f"rename it to {segment_name(3 * FILE_BYTES)}" in text for text in texts)
    assert any("has the same log: remove one" in text for text in texts)
    assert any(f"belongs to log {OTHER}, the others to {OWN}: remove it" in text for text in texts)
    foreign = path_of(folder, 1).read_bytes()
    report = repair(place, verify(place), tmp_path / "store", StoreSettings())
    assert not report.is_sound and path_of(folder, 1).read_bytes() == foreign, "another log's segment is not replaced"


def test_nothing_is_repaired_from_another_log(own, tmp_path):
    _, place, folder = own
    path_of(folder, 1).unlink()
    logged(tmp_path / "other", body=b"other")
    with pytest.raises(StoreError, match="has another log than the archive"):
        repair(place, verify(place), tmp_path / "other", StoreSettings())
    (tmp_path / "other" / "commitlog").rename(tmp_path / "other" / "gone")
    with pytest.raises(StoreError, match="it is unknown whether it has this log"):
        repair(place, verify(place), tmp_path / "other", StoreSettings())
    assert not path_of(folder, 1).exists()


def test_a_folder_without_segments_is_named(tmp_path):
    with pytest.raises(StoreError, match="give the folder of a broker"):
        verify(place_at(str(tmp_path)))


def test_the_command_exits_with_1_until_the_archive_is_repaired(own, tmp_path):
    _, _, folder = own
    assert rmq("archive", "verify", str(folder)).returncode == 0
    path_of(folder, 1).write_bytes(b"cut")
    failed = rmq("archive", "verify", str(folder), "--json")
    found = json.loads(failed.stdout)
    assert failed.returncode == 1 and not found["is_sound"]
    assert [problem["name"] for problem in found["problems"]] == [segment_name(FILE_BYTES)]
    repaired = rmq("archive", "verify", str(folder), "--repair-from", str(tmp_path / "store"))
    assert repaired.returncode == 0 and f"written again: {segment_name(FILE_BYTES)}" in repaired.stdout


# ---------------------------------------------------------------- which segments belong to a log


def settled(root: Path, files: list[Path], place: Folder, *, makes: bool = True) -> tuple[LogIdentity, int]:
    root.mkdir(exist_ok=True)
    identity = LogIdentity(root, first_record(files), makes=makes)
    return identity, Archive(place, identity).refresh()


def test_the_first_master_makes_an_identity_and_keeps_it(tmp_path):
    place = Folder(tmp_path / "archive")
    identity, _ = settled(tmp_path / "s", [], place)
    assert len(identity.log) == 32
    again, _ = settled(tmp_path / "s", [], place)
    assert again.log == identity.log == identity_in(tmp_path / "s")
    other, _ = settled(tmp_path / "t", [], place)
    assert other.log != identity.log


def test_segments_without_an_identity_still_open(tmp_path):
    files = logged(tmp_path / "store")
    place = archived(files, tmp_path / "archive", log_id="")
    left = files[2:]  # the log began later when the release was installed
    identity, count = settled(tmp_path / "s", left, place)
    assert count == len(files) and identity.log
    _, count = settled(tmp_path / "s", [], place)
    assert count == len(files), "the note lists them, when their log files are gone"


def test_a_segment_without_an_identity_that_comes_later_needs_its_log_file(tmp_path, caplog):
    files = logged(tmp_path / "store")
    place = archived(files[:2], tmp_path / "archive", log_id="")
    settled(tmp_path / "s", files, place)
    archived(logged(tmp_path / "other", body=b"other"), tmp_path / "b", log_id="")
    shutil.copy(path_of(tmp_path / "b", 2), path_of(tmp_path / "archive", 2))
    _, count = settled(tmp_path / "s", [], place)
    assert count == 2 and "belongs to another log" in caplog.text
    archived(files[2:3], tmp_path / "archive", log_id="")
    _, count = settled(tmp_path / "s", files[2:], place)
    assert count == 3


def test_a_lost_note_is_learned_from_a_log_file_that_was_archived(own, tmp_path):
    files, place, _ = own
    identity, count = settled(tmp_path / "s", files[-1:], place)
    assert (identity.log, count) == (OWN, len(files))


def test_a_master_that_cannot_know_refuses_and_a_slave_follows(own, tmp_path):
    files, place, folder = own
    with pytest.raises(StoreError, match="run: rmq archive adopt /"):
        settled(tmp_path / "s", [], place)
    assert not (tmp_path / "s" / NOTE).exists()
    slave, count = settled(tmp_path / "slave", [], place, makes=False)
    assert (slave.log, count) == (OWN, len(files))
    assert rmq("archive", "adopt", str(folder), str(tmp_path / "s")).returncode == 0
    master, count = settled(tmp_path / "s", [], place)
    assert (master.log, count) == (OWN, len(files))


def test_a_slave_waits_for_the_identity_of_its_master(tmp_path):
    files = logged(tmp_path / "store")
    place = archived(files[:2], tmp_path / "archive", log_id="")
    slave = LogIdentity(tmp_path / "store", first_record(files), makes=False)
    archive = Archive(place, slave)
    assert (archive.refresh(), slave.log) == (2, "")
    archived(files[2:], tmp_path / "archive")
    assert archive.refresh() == len(files) - 2
    assert slave.log == OWN
    archive = Archive(place, LogIdentity(tmp_path / "store", first_record([]), makes=False))
    assert archive.refresh() == len(files)


def test_an_archive_of_two_logs_is_adopted_by_nobody(own, tmp_path):
    _, place, folder = own
    archived(logged(tmp_path / "other", body=b"other"), tmp_path / "b", OTHER)
    shutil.copy(path_of(tmp_path / "b", 1), path_of(folder, 1))
    with pytest.raises(StoreError, match="name 2 logs"):
        adopt(tmp_path, found_in(place))
    with pytest.raises(StoreError, match="it is unknown whether the log is the same one"):
        settled(tmp_path / "slave", [], place, makes=False)


def test_a_segment_of_another_log_is_not_replaced(own, tmp_path):
    files, place, folder = own
    before = path_of(folder, 0).read_bytes()
    with pytest.raises(StoreError, match=f"of log {OWN}, and this is log {OTHER}"):
        archived(files, folder, OTHER)
    assert path_of(folder, 0).read_bytes() == before
    assert identity_of(first_record(files)(0)) == found_in(place)[0].directory.identity
