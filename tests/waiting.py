"""How long a test waits for what has to come: one number for all, as it only matters where a test fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SECONDS = 60.0
"""Longer than anything takes on a busy machine; less than a test may take (`timeout` in ``pyproject.toml``)."""


async def until(condition: Callable[[], object], what: str = "what should come", seconds: float = SECONDS) -> None:
    """Wait until a condition holds. Raises AssertionError naming what was waited for."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None
