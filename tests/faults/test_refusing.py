"""A disk that refuses writes under a broker: thirty rounds of `tests.faults.refusing` with the core, ten without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rmqkit.core import CORE
from tests.faults.refusing import FILES, OPERATIONS, Case, choose, run_case, table

pytestmark = pytest.mark.faults

ROUNDS = {"core": 30, "plain Python": 10}


def test_thirty_rounds_cover_files_and_operations() -> None:
    chosen = choose(30, 1)
    assert len(set(chosen)) == 30
    assert {case.files for case in chosen} == set(FILES) and {case.operation for case in chosen} == set(OPERATIONS)


@pytest.mark.parametrize("way", [pytest.param("core", marks=pytest.mark.slow), "plain Python"])
def test_a_broker_continues_by_itself_after_its_disk_refused(way: str) -> None:
    is_plain = way == "plain Python"
    if not is_plain and CORE.fault:
        pytest.skip("there is no compiled core")
    command = [sys.executable, "-m", "tests.faults.refusing", "--rounds", str(ROUNDS[way]), "--seed", "1"]
    environment = os.environ | ({"RMQKIT_NATIVE": "0"} if is_plain else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{ROUNDS[way]} rounds" in done.stdout and "0 rounds wrong" in done.stdout


@pytest.mark.virtual_time
def test_a_round_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round finds a broker that ignores a refused flush."""
    monkeypatch.setattr("rmqkit.store.put.Appender._write", lambda appender, data, now_ms: None)
    case = Case("commitlog", "write", "ENOSPC", "once", 0)
    outcome = run_case(case)
    assert outcome.faults
    assert "1 rounds wrong" in table({case: outcome})
