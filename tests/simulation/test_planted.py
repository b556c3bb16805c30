"""Each planted fault is found with its known seed, for the right reason, and the same run without the fault is sound.
``make planted`` searches from the first seed on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_planted_fault_is_found_for_the_right_reason_and_its_run_without_it_is_sound() -> None:
    """All runs are in one process: the hash seed of this one is not 0, and the imports cost as much as a run."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.planted", "--known"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(PLANTED) == 34


def test_the_names_of_the_planted_faults_differ() -> None:
    assert len({planted.name for planted in PLANTED}) == len(PLANTED)
