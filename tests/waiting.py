"""The time that tests wait for expected events: one number for all, because only failing tests wait until its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0
"""Longer than any expected event takes on a busy machine, and less than the time limit of a test (`timeout` in
``pyproject.toml``).
"""


async def until(condition: Callable[[], object], what: str = "what should come", seconds: float = SECONDS) -> None:
    """Wait until a condition holds. Raises AssertionError with the description of the condition."""
    if (idle := getattr(asyncio.get_running_loop(), "idle", None)) is not None:  # in a simulated world
        deadline = time.monotonic() + seconds  # real time: only a failing test waits as long
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            await idle()
        return
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None
