"""All tests here compare the compiled core with its twins: without a core they are skipped."""

from __future__ import annotations

import pytest

from rmqkit.core import CORE


@pytest.fixture(autouse=True)
def core() -> None:
    if CORE.fault:
        pytest.skip(f"there is no compiled core: {CORE.fault}")
