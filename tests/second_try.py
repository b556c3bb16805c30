"""A second, lone try for tests that failed beside others while they drove other people's programs.

Java, Go, Node and C++ clients bring time-outs of 3 s and races of their own to a busy machine. With ``--second-try``
at most `MOST` of their tests run again at the end, in a fresh process with nothing beside them; the run fails unless
they pass. Tests of one file whose setup failed count as one: they share a program. What failed first stays on the
screen. Any other failure is final.
"""

import subprocess
import sys
from collections.abc import Iterable

import pytest

FOLDER = "tests/interop/"
MOST = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", action="store_true", help="run a few failed tests of other programs again, alone")


class SecondTry:
    """Collects what failed, and tries it again when everything else is done."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._failed: dict[str, str] = {}  # what counts as one failure, by test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            is_shared = report.when == "setup"
            self._failed[report.nodeid] = report.nodeid.partition("::")[0] if is_shared else report.nodeid

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        names = list(self._failed)
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not may_try_again(self._failed.values()):
            return
        self._terminal.section(f"a second try, alone, of {len(names)} failed tests")
        self._terminal.line("\n".join(names))
        if subprocess.run([sys.executable, "-m", "pytest", *names], check=False).returncode == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.OK
            self._terminal.line(f"FAILED BESIDE OTHERS, PASSED ALONE: {' '.join(names)}", yellow=True)


def may_try_again(failures: Iterable[str]) -> bool:
    """Return True if these are few, and all of other people's programs."""
    names = set(failures)
    return 0 < len(names) <= MOST and all(name.startswith(FOLDER) for name in names)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and config.getoption("second_try"):
        config.pluginmanager.register(SecondTry(terminal))
