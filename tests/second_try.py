"""A second run, alone, for failed tests that start other people's programs.

Java, Go, Node and C++ clients have time-outs of 3 s and races of their own, which show on a busy machine. With
``--second-try`` the failed tests run again at the end in a new process with no other tests, if they are in at most
`MOST` files. The run fails unless they pass. The limit is in files, because the tests of a file share their programs:
one pause of one broker fails a dozen tests. The first failures stay on the screen. Any other failure is final.
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
    """A pytest plug-in that collects the failed tests and runs them again at the end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._failed: dict[str, None] = {}  # a test may fail, and its teardown may fail too

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        names = list(self._failed)
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not may_try_again(names):
            return
        self._terminal.section(f"a second try, alone, of {len(names)} failed tests")
        self._terminal.line("\n".join(names))
        if subprocess.run([sys.executable, "-m", "pytest", *names], check=False).returncode == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.OK
            self._terminal.line(f"FAILED BESIDE OTHERS, PASSED ALONE: {' '.join(names)}", yellow=True)


def may_try_again(tests: Iterable[str]) -> bool:
    """Return True if the tests are in few files, and all of them start other people's programs."""
    files = {test.partition("::")[0] for test in tests}
    return 0 < len(files) <= MOST and all(file.startswith(FOLDER) for file in files)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and config.getoption("second_try"):
        config.pluginmanager.register(SecondTry(terminal))
