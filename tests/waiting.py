"""How long a test waits for what has to come: one number for all, as it only matters where a test fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.virtual_time import VirtualLoop

SECONDS = 60.0
"""Longer than anything takes on a busy machine; less than a test may take (`timeout` in ``pyproject.toml``)."""


async def until(condition: Callable[[], object], what: str = "what should come", seconds: float = SECONDS) -> None:
    """Wait until a condition holds. Raises AssertionError naming what was waited for."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        deadline = time.monotonic() + seconds  # threads may have to do it, and these live in real time
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            await loop.idle()
        return
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None
