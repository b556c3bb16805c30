"""Power cuts under 24 workloads. ``make test`` runs eight of them, ``make kill T=store`` thousands. A failure names its
seed: ``python -m tests.faults.crash --seed S --cuts 1 --kills 0``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import chosen_seed, many
from tests.faults.power_cut import PowerCuts

WORKLOADS = 24
_seed = chosen_seed()


@pytest.mark.faults
@pytest.mark.parametrize("number", range(min(WORKLOADS, many(WORKLOADS))))
def test_store_survives_power_cuts(tmp_path: Path, number: int) -> None:
    print(f"--seed {_seed + number}")
    PowerCuts(_seed + number, tmp_path).run()
