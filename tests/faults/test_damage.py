"""A short form of ``make kill T=damage``: thirty damages to stopped and killed stores, all of them reported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.damage import rounds

SEEDS = list(range(3076, 3106))


@pytest.mark.faults
@pytest.mark.slow
def test_no_damage_is_silent(tmp_path: Path) -> None:
    results = asyncio.run(rounds(SEEDS, tmp_path))
    failed = [f"{one}\n  " + "\n  ".join(one.failures) for one in results if one.failures]
    assert not failed, "\n".join(failed)
    assert sum(one.lost > 0 for one in results) >= 3 and any(one.outcome.startswith("refused") for one in results)
