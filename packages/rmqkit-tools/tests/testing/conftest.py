"""The asserts of a cluster wait as long here as everything else does."""

from __future__ import annotations

import pytest

from rmqkit.testing import LocalCluster
from tests.waiting import SECONDS


@pytest.fixture(autouse=True)
def patient_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in (LocalCluster.assert_consumed, LocalCluster.assert_dlq, LocalCluster.assert_nothing_pending):
        monkeypatch.setitem(check.__kwdefaults__, "timeout", SECONDS)
