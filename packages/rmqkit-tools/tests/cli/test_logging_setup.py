"""The log of a server: text or JSON lines, to stderr or to files that stay small."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from rmqkit.cli.servers.logging_setup import LogFormat, LoggingSettings, LogLevels, reopen, set_up
from rmqkit.errors import SettingsError

LOG = logging.getLogger("rmqkit.tests")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root, known = logging.getLogger(), dict(logging.Logger.manager.loggerDict)
    handlers, level, levels = list(root.handlers), root.level, {name: logging.getLogger(name).level for name in known}
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)
    for name, former in levels.items():
        logging.getLogger(name).setLevel(former)


def test_lines_for_people_go_to_stderr(capsys):
    set_up(LoggingSettings())
    LOG.info("too low")
    LOG.warning("queue %s", 3)
    assert capsys.readouterr().err.endswith(" WARNING rmqkit.tests: queue 3\n")


def test_json_lines_are_one_object_each_errors_too(capsys):
    set_up(LoggingSettings(log_format=LogFormat.JSON))
    LOG.warning("two\nlines “quoted”")
    try:
        raise ValueError("why")
    except ValueError:
        LOG.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["time"].endswith("+00:00")
    assert {**first, "time": ""} == {
        "time": "",
        "level": "WARNING",
        "logger": "rmqkit.tests",
        "message": "two\nlines “quoted”",
    }
    assert second["exception"].endswith("ValueError: why")


def test_files_are_bounded_in_bytes_and_in_number(tmp_path):
    path = tmp_path / "logs/broker.log"
    set_up(LoggingSettings(log_file=str(path), log_file_bytes_max=4096, log_file_count=3))
    for number in range(400):
        LOG.warning("line %03d %s", number, "x" * 40)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["broker.log", "broker.log.1", "broker.log.2"]
    assert all(0 < file.stat().st_size <= 4096 for file in files)
    assert "line 399" in path.read_text()


def test_a_file_that_was_moved_away_is_rebuilt(tmp_path):
    path = tmp_path / "broker.log"
    set_up(LoggingSettings(log_file=str(path)))
    LOG.warning("before")
    path.rename(tmp_path / "moved")
    reopen()
    LOG.warning("after")
    assert "before" in (tmp_path / "moved").read_text()
    assert "after" in path.read_text()


def test_parts_have_levels_of_their_own(capsys):
    store = logging.getLogger("rmqkit.tests.store")
    set_up(LoggingSettings(log_level=LogLevels("ERROR, rmqkit.tests.store=debug")))
    LOG.warning("hidden")
    store.debug("shown")
    LogLevels("INFO").apply()
    LOG.info("shown now")
    store.debug("hidden now")
    lines = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["shown", "shown now"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "a-file").touch()
    with pytest.raises(
        SettingsError, match=rf"cannot write the log to {tmp_path}/a-file/x: .*; choose another logFile"
    ):
        set_up(LoggingSettings(log_file=str(tmp_path / "a-file/x")))
