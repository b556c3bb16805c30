"""The console stays small: `docs/decisions/0012-a-console-that-changes-things.md`."""

from __future__ import annotations

from pathlib import Path

import pytest

import rmqkit.console

FOLDER = Path(rmqkit.console.__file__).parent


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [("**/*.py", 9_420), ("html/templates/*.html", 1_800), ("html/static/*.js", 400), ("html/static/*.css", 700)],
)
def test_the_console_has_no_more_lines_than_its_bound(pattern: str, lines: int) -> None:
    assert 0 < sum(len(path.read_text().splitlines()) for path in FOLDER.glob(pattern)) <= lines
