"""What every run reports besides pass and fail, the seconds of each file and folder, and how processes share tests.

Set-up and tear-down count, so a session-wide fixture shows up in the file that first asked for it. With ``-n 3`` the
tests of a file stay in one process, and so do all that share a pair of Apache's servers. Files that need a Spark
session go to one process: each session costs 15 s of CPU before it is warm. The pages of the documents are shared out
one by one. Files that start servers of their own wait for them beside the others.
"""

import functools
import gc
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Generator
from logging.handlers import RotatingFileHandler
from typing import Any

import pytest
from hypothesis import settings

from tests import examples, in_memory, patience, unsynced
from tests.interop.sharing import PAIR, PROXY, shared_servers
from tests.sources import ROOT, room

if sys.dont_write_bytecode:
    # Otherwise each program that a test starts compiles all that it imports. `make test` does the same.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / ".cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
in_memory.use_memory()
settings.load_profile(examples.SAME)
# On loopback only this process can be late.
patience.be_patient()
unsynced.leave_unsynced()
# There is one port of that number: servers that tests start take another, or none.
os.environ["RMQCONF_grpcServerPort"] = "-1"  # noqa: SIM112 - keys are spelled as in broker.conf
# Not the clusters and the replays of whoever runs the tests.
os.environ["XDG_CONFIG_HOME"] = str(ROOT / ".cache" / "config")
os.environ["XDG_STATE_HOME"] = str(ROOT / ".cache" / "state")
os.environ.pop("RMQ_PROFILE", None)

pytest_plugins = ["tests.integration", "tests.second_try", "tests.spark.session", "tests.virtual_time"]

INTEROP = PAIR
PAGES, PAGES_WITH_SPARK = "tests/docs/test_blocks.py", "tests/docs/test_blocks.py::test_a_page_with_spark"
TAKES_SESSION = re.compile(r"[(, ]spark(: SparkSession)?[,)]")
"""An argument of a test that is the session."""

LONG = (
    PROXY,
    "packages/rmqkit-spark/tests/spark/test_cluster.py",
    "tests/faults/spark/test_eos.py",
    "tests/faults/spark/test_streams.py",
    "tests/faults/test_damage.py",
    "tests/fuzz/test_fuzz.py",
    "packages/rmqkit-server/tests/broker/test_loop_not_held.py",
    "packages/rmqkit-tools/tests/admin/test_findings.py",
)
"""Files that take long and need no session of the process, the longest first."""

OF_PROCESSES = (
    INTEROP,
    "tests/faults/",
    PAGES,
    "packages/rmqkit-contrib/",
    "tests/tree/test_examples.py",
    "tests/deploy/",
    "packages/rmqkit-tools/tests/cli/",
)
"""Files that wait for programs now and then: beside them other tests go on, at the end nothing would."""

CAPTURED_LINES = 20

_seconds_per_file: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes put what takes longest first: what is left at the end can then be shared out."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(_group(item.nodeid)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage until all modules are imported, and leave them out later: that saves a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        """Gives a process that asks for work the first group that it may take."""

        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            with_session = {one for one, groups in self.assigned_work.items() if any(map(_takes_session, groups))}
            if with_session and node not in with_session:
                group = next((one for one in self.workqueue if not _takes_session(one)), next(iter(self.workqueue)))
                self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Groups(config, log)


def _group(nodeid: str) -> str:
    """The tests that run one after the other in one process: with the shared servers, of a file, of a page."""
    file = nodeid.partition("::")[0]
    if file.startswith(INTEROP) and (servers := shared_servers(ROOT / file)):
        return servers
    return nodeid if file == PAGES and "::test_a_page_" in nodeid else file


def _rank(group: str) -> tuple[int, int]:
    """What is left at the end are small files."""
    if group in LONG:
        return 2, LONG.index(group)
    if group == INTEROP:
        return 0, 0
    if _takes_session(group):
        return 1, 0
    return (3 if group.startswith(OF_PROCESSES) else 4), 0


@functools.cache
def _takes_session(group: str) -> bool:
    if group in (PAIR, PROXY) or group.startswith(PAGES):
        return group.startswith(PAGES_WITH_SPARK)
    return TAKES_SESSION.search((ROOT / group).read_text(encoding="utf-8")) is not None


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
        per_folder[room(file)] += seconds  # type: ignore[assignment]
    for kind, seconds_per in (("file", _seconds_per_file), ("folder", per_folder)):
        terminalreporter.section(f"seconds per {kind}")
        for name, seconds in seconds_per.most_common():
            terminalreporter.line(f"{seconds:8.2f}  {name}")
    terminalreporter.line(f"{sum(_seconds_per_file.values()):8.2f}  in all")
