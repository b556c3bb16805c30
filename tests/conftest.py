"""What every test run reports besides pass and fail: the seconds each test file took.

Set-up and tear-down count, so a session-wide fixture shows up in the file that first asked for it.
"""

from collections import Counter

import pytest

_seconds_per_file: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds_per_file[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _seconds_per_file:
        return
    terminalreporter.section("seconds per file")
    for file, seconds in _seconds_per_file.most_common():
        terminalreporter.line(f"{seconds:8.2f}  {file}")
    terminalreporter.line(f"{sum(_seconds_per_file.values()):8.2f}  in all")
