"""A log without its first files: the start logs a warning, unless our retention deleted the files."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from rmqkit.store.log import commit_log
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.findings import Kind
from rmqkit.testing.clock import StandingClock
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings

SETTINGS = small_settings()
FULL = 86
TOPIC = "TopicTest"
GONE = (
    "8192 bytes from 00000000000000000000 to before 00000000000000008192 are gone: "
    "deleted by the retention of another broker, or lost"
)


def fill(store: MessageStore, count: int = 20) -> None:
    """Put messages, 4 to a log file."""
    put_all(store, *(message(body=bytes([i]) * 900) for i in range(count)))


def stopped(tmp_path: Path, *, is_clean: bool) -> Path:
    """A store of several log files, stopped or killed."""
    root = tmp_path / "store"
    with opened(root) as store:
        fill(store)
        if not is_clean:
            return copy_store(root, tmp_path / "killed")
    return root


def drop_first_files(root: Path, count: int = 2) -> None:
    for path in sorted((root / "commitlog").iterdir())[:count]:
        path.unlink()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "are gone" in text]


def missing(root: Path) -> list[str]:
    return [str(one) for one in verify(root, SETTINGS).findings if one.kind is Kind.FILE_MISSING]


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_missing_first_files_are_reported_once_by_the_start_and_until_then_by_verify(
    is_clean: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = stopped(tmp_path, is_clean=is_clean)
    assert not missing(root)
    drop_first_files(root)
    expected = f"{root}/commitlog/{8192:020d} at 0: file missing: expected {0:020d} to be the first file, found {GONE}"
    assert missing(root) == [expected]
    with opened(root) as store:
        assert read_all(store, TOPIC)[-1].body == bytes([19]) * 900
        assert not missing_while_open(root)
    assert told(caplog) == [f"store {root}: the log began at 0 and begins at 8192: {GONE}"]
    assert [one.levelno for one in caplog.records if "are gone" in one.getMessage()] == [logging.WARNING]
    caplog.clear()
    with opened(root):
        pass
    assert not caplog.messages
    assert not missing(root)


def missing_while_open(root: Path) -> list[str]:
    report = verify(root, SETTINGS, read_only=True)
    return [str(one) for one in report.findings if one.kind is Kind.FILE_MISSING]


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_files_that_our_retention_deleted_are_not_reported(
    is_clean: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    with opened(root, clock=StandingClock(0), disk_used_percent=lambda path: FULL) as store:
        fill(store)
        assert store.retention_round().log_files > 0
        assert store.min_physical_offset > 0
        assert not missing_while_open(root)
        killed = copy_store(root, tmp_path / "killed")
    root = root if is_clean else killed
    assert not missing(root)
    caplog.clear()
    with opened(root) as store:
        assert store.min_physical_offset > 0
    assert not told(caplog)


def test_the_start_is_noted_before_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill in between leaves files before the noted start. This is no reason for a log line."""
    root = tmp_path / "store"
    with opened(root, clock=StandingClock(0), disk_used_percent=lambda path: FULL) as store:
        fill(store)
        queue, killed = store.log.queue, tmp_path / "killed"
        drop = queue.drop_front
        monkeypatch.setattr(queue, "drop_front", lambda test: (copy_store(root, killed), drop(test))[1])
        assert store.retention_round().log_files > 0
        noted = commit_log.noted_start(killed)
        assert noted == store.min_physical_offset > 0
    with opened(killed) as store:
        assert store.min_physical_offset == 0
    assert commit_log.noted_start(killed) == 0
    assert not told(caplog)


def test_a_full_disk_that_refuses_the_note_gets_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    real, refused = commit_log.write_note, []

    def write(path: Path, note: object) -> None:
        if not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, note)

    with opened(root, clock=StandingClock(0), disk_used_percent=lambda path: FULL) as store:
        fill(store)
        monkeypatch.setattr(commit_log, "write_note", write)
        assert store.retention_round().log_files > 0
        assert refused
        assert commit_log.noted_start(root) == store.min_physical_offset


def test_a_store_that_never_had_a_note_is_opened_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = stopped(tmp_path, is_clean=True)
    (root / "logstart").unlink()
    drop_first_files(root)
    assert not missing(root)
    with opened(root):
        pass
    assert not told(caplog)
    assert commit_log.noted_start(root) == 8192


def test_a_note_that_cannot_be_read_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = stopped(tmp_path, is_clean=True)
    (root / "logstart").write_bytes(b"00000000\n{}")
    with opened(root):
        pass
    assert "logstart cannot be read: where the log began is not compared with it" in caplog.text
    assert commit_log.noted_start(root) == 0


def test_a_slave_notes_where_its_masters_log_made_it_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "slave"
    with (
        opened(tmp_path / "master") as master,
        opened(root, is_replica=True) as slave,
    ):
        assert commit_log.noted_start(root) is None
        fill(master)
        at = 4096
        while part := master.log_part(at, 4096):
            slave.replica.append(at, part)
            at += len(part)
        while slave.dispatch():
            pass
        assert commit_log.noted_start(root) == 4096
        killed = copy_store(root, tmp_path / "killed")
    assert not missing(killed)
    drop_first_files(killed, 1)
    assert len(missing(killed)) == 1
    with opened(killed, is_replica=True):
        pass
    assert len(told(caplog)) == 1
    for path in (killed / "commitlog").iterdir():
        path.unlink()
    with opened(killed, is_replica=True):  # to be filled again from the start of its master's log
        assert commit_log.noted_start(killed) is None
    assert len(told(caplog)) == 1
