"""What every run reports besides pass and fail, the seconds of each file and folder, and how two processes share tests.

Set-up and tear-down count, so a session-wide fixture shows up in the file that first asked for it. With ``-n 2`` the
tests of a file stay in one process, and so do all that share what is dear to start: a pair of Apache's servers, a Spark
session. Files that start servers of their own wait for them beside the others.
"""

import functools
import logging
import re
from collections import Counter
from collections.abc import Generator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest
from hypothesis import settings

from tests import examples, patience, unsynced
from tests.interop.sharing import shares_servers

settings.load_profile(examples.SAME)
# On loopback only this process can be late.
patience.be_patient()
unsynced.leave_unsynced()

pytest_plugins = ["tests.second_try", "tests.spark.session", "tests.virtual_time"]

INTEROP, SPARK = "tests/interop/", "tests/spark/"
PAGES, PAGES_WITH_SPARK = "tests/docs/test_blocks.py", "tests/docs/test_blocks.py::test_a_page_with_spark"
TAKES_SESSION = re.compile(r"[(, ]spark(: SparkSession)?[,)]")
"""An argument of a test that is the session."""

CAPTURED_LINES = 20
ROOT = Path(__file__).parents[1]

_seconds_per_file: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes put what takes longest first: what is left at the end can then be shared out."""
    if not hasattr(config, "workerinput"):
        return
    order = [INTEROP, SPARK]
    items.sort(key=lambda item: order.index(group) if (group := _group(item.nodeid)) in order else _rank(group))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


def _group(nodeid: str) -> str:
    """The tests that run one after the other in one process: with the shared servers, with the session, of a file."""
    file = nodeid.partition("::")[0]
    if file.startswith(INTEROP) and shares_servers(ROOT / file):
        return INTEROP
    if nodeid.startswith(PAGES_WITH_SPARK) or (file != PAGES and _takes_session(file)):
        return SPARK
    return file


def _rank(file: str) -> int:
    """What is left at the end are small files."""
    return 2 if file.startswith((INTEROP, SPARK, "tests/faults/")) else 3


@functools.cache
def _takes_session(file: str) -> bool:
    return TAKES_SESSION.search((ROOT / file).read_text(encoding="utf-8")) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of what a failed test printed and logged the last lines: the rest hides why it failed."""
    report = yield
    report.sections = [(name, "\n".join(text.splitlines()[-CAPTURED_LINES:])) for name, text in report.sections]
    return report


class Failures:
    """Tells each failure when it happens: a run that is cut short, or takes long, would tell none."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.splitlines()[-CAPTURED_LINES:]
            self._terminal.write_line(f"\n{report.when} of {report.nodeid} failed:", red=True)
            self._terminal.write_line("\n".join(lines))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Failures(terminal))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Leave the log to the next test as it was.

    What a command set up goes to a stderr that was this test's alone, or to a file that is gone. To loggers that keep
    what they have to themselves pytest adds its own handlers; those of Spark give them a format that nothing expects.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) in (logging.StreamHandler, RotatingFileHandler):  # those of pytest are kinds of them
            root.removeHandler(handler)
            handler.close()
    for logger in root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    capture = item.config.pluginmanager.getplugin("logging-plugin")
    for handler in (capture.caplog_handler, capture.report_handler):
        handler.setFormatter(capture.formatter)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds_per_file[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _seconds_per_file:
        return
    per_folder: Counter[str] = Counter()
    for file, seconds in _seconds_per_file.items():
        per_folder["/".join(file.split("/")[:2])] += seconds  # type: ignore[assignment]
    for kind, seconds_per in (("file", _seconds_per_file), ("folder", per_folder)):
        terminalreporter.section(f"seconds per {kind}")
        for name, seconds in seconds_per.most_common():
            terminalreporter.line(f"{seconds:8.2f}  {name}")
    terminalreporter.line(f"{sum(_seconds_per_file.values()):8.2f}  in all")
