"""The short forms of `make kill T=archive` and `make kill T=archive-damage`."""

from __future__ import annotations

import pytest

from tests.faults.archive import run
from tests.faults.archive_damage import run as damage


@pytest.mark.faults
@pytest.mark.slow
def test_six_kills_lose_nothing(tmp_path):
    outcome = run(tmp_path, 6, 5, most_turns=3)
    assert (outcome.lost, outcome.twice, outcome.is_ordered) == ([], [], True)
    assert outcome.told >= 6 * 40 - 40
    assert outcome.archived > outcome.told // 4


@pytest.mark.faults
@pytest.mark.slow
def test_ten_rounds_of_damage_lose_nothing_in_silence(tmp_path):
    outcome = damage(tmp_path, 10, 3)
    assert (outcome.silent, outcome.wrong) == ([], [])
    assert outcome.named > 500, "ERROR lines name the lost messages"
    assert len(outcome.faults) >= 5
