"""`make again` counts the failed runs, and names the failed tests."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.tree.again import ROOT, summary

PRINTED = """
FAILED tests/a/test_b.py::test_c[1-2] - AssertionError: no
ERROR tests/a/test_d.py::test_e
= 1 failed, 8746 passed, 70 skipped, 1 error in 413.46s (0:06:53) =
"""


def test_a_run_is_summed_up() -> None:
    assert summary(PRINTED) == {
        "result": "1 failed, 8746 passed, 70 skipped, 1 error in 413.46s (0:06:53)",
        "failed": ["tests/a/test_b.py::test_c[1-2]", "tests/a/test_d.py::test_e"],
    }
    assert summary("8747 passed in 3.10s")["result"] == "8747 passed in 3.10s"
    assert summary("make: no rule") == {"result": "no result", "failed": []}


def test_one_failed_run_fails_all(tmp_path) -> None:
    mark = tmp_path / "mark"
    fails_once = f"test -e {mark} || {{ touch {mark}; echo '1 failed in 0.1s'; exit 1; }}; echo '1 passed in 0.1s'"
    command = [sys.executable, "-m", "tests.tree.again", "--runs", "2", "--busy", "1", "sh", "-c", fails_once]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    first, second, last = map(json.loads, done.stdout.splitlines())
    assert (first["exit"], first["result"]) == (1, "1 failed in 0.1s")
    assert (second["exit"], second["result"]) == (0, "1 passed in 0.1s")
    assert (last, done.returncode) == ({"runs": 2, "runs_failed": 1}, 1)
