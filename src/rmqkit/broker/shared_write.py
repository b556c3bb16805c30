"""One write of a table for all changes that come in one turn of the loop; their answers wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rmqkit.errors import StoreUnavailable

__all__ = ["SharedWrite"]


class SharedWrite:
    """Loop only. ``write``: brings all changes to the disk, or takes them back and raises StoreUnavailable."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._round: asyncio.Future[None] | None = None

    async def done(self) -> None:
        """Wait until the changes made before are on the disk. Raises StoreUnavailable: they were taken back."""
        if self._round is None:
            loop = asyncio.get_running_loop()
            self._round = loop.create_future()
            loop.call_soon(self._run, self._round)
        await asyncio.shield(self._round)

    def _run(self, waiting: asyncio.Future[None]) -> None:
        self._round = None
        try:
            self._write()
        except StoreUnavailable as error:
            waiting.set_exception(error)
        else:
            waiting.set_result(None)
