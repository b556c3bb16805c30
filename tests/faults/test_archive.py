"""Nothing is lost when a store and its archive are killed: the short form of `make archive-kills`."""

from __future__ import annotations

import pytest

from tests.faults.archive import run


@pytest.mark.faults
@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path):
    outcome = run(tmp_path, 20, 5, most_turns=3)
    assert (outcome.lost, outcome.twice, outcome.is_ordered) == ([], [], True)
    assert outcome.told >= 20 * 40 - 40
    assert outcome.archived > outcome.told // 4
