"""A report about the code blocks of the pages: the number of blocks that ran, and the others with the reason."""

from __future__ import annotations

import pytest

from tests.docs.pages import PAGES, blocks_of_all


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    tests = [report for report in reports if getattr(report, "when", "") == "call"]
    if not any(report.nodeid.startswith("tests/docs/test_blocks.py") for report in tests):
        return
    blocks = blocks_of_all(PAGES)
    left_out = [block for block in blocks if block.not_run]
    terminalreporter.section("code blocks of the documents")
    for block in left_out:
        terminalreporter.line(f"not run: {block.place}: {block.not_run}")
    terminalreporter.line(f"{sum(block.is_run for block in blocks)} are run, {len(left_out)} are not")
