"""The table of coverage adds up files by package."""

import pytest

from tests.coverage_table import rows


def summary(covered: int, lines: int, taken: int, branches: int) -> dict[str, dict[str, int]]:
    counts = {"covered_lines": covered, "num_statements": lines, "covered_branches": taken, "num_branches": branches}
    return {"summary": counts}


def test_files_are_added_up_by_package_and_in_all() -> None:
    files = {
        "packages/rmqkit-store/src/rmqkit/store/put.py": summary(90, 100, 5, 10),
        "packages/rmqkit-store/src/rmqkit/store/flush.py": summary(10, 100, 5, 10),
        "packages/rmqkit/src/rmqkit/times.py": summary(100, 100, 0, 0),
    }
    assert list(rows({"files": files})) == [
        ("rmqkit", 100.0, 0.0, 100),
        ("rmqkit-store", 50.0, 50.0, 200),
        ("in all", pytest.approx(200 / 3), 50.0, 300),
    ]
