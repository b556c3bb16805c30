"""Streams without a server: name server and broker run in the process of the program.

The first process that opens a folder runs the servers. Other processes of the same machine, such as further workers of
a web server, connect to them. The folder has the address in ``streams.address``.
"""

from __future__ import annotations

import asyncio
import importlib
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rmqkit.errors import ClientError, ExtraMissing, NoRoute, RemotingError, StoreLocked
from rmqkit.extras import install
from rmqkit.streams.streams import Streams, open  # noqa: A004
from rmqkit.times import Duration

__all__ = ["EmbeddedStreams", "embedded"]

_ADDRESS = "streams.address"
_TRIES = 100
_PAUSE_SECONDS = 0.1


def embedded(
    folder: str | Path,
    parent: str = "Streams",
    *,
    expire_after: Duration | None = None,
    linger: Duration = 0,
    waiting_max: int = 4096,
) -> EmbeddedStreams:
    """Open streams in a folder, without a server to install::

        async with rmqkit.streams.embedded("data/", expire_after=3600) as streams:
            await streams.append("session-42", "Hello")

    Args:
        folder: the folder of the events, created if it is missing.
        parent, expire_after, linger, waiting_max: the same as for `open`.

    Raises SettingsError: an argument is not valid. Entering the result raises ExtraMissing if the servers are not
    installed."""
    return EmbeddedStreams(
        Path(folder), parent, {"expire_after": expire_after, "linger": linger, "waiting_max": waiting_max}
    )


class EmbeddedStreams:
    """The asynchronous context of `embedded`.

    Attributes:
        is_owner: whether this process runs the servers.
    """

    def __init__(self, folder: Path, parent: str, options: dict[str, Any]) -> None:
        self._folder = folder
        self._parent = parent
        self._options = options
        self._stack = AsyncExitStack()
        self.is_owner = False
        open("127.0.0.1:1", parent, **options)  # check the arguments now

    async def __aenter__(self) -> Streams:
        try:
            return await self._enter()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _enter(self) -> Streams:
        last: Exception = ClientError(f"{self._folder} is used by another process that does not answer")
        for _ in range(_TRIES):
            try:
                address = await self._serve()
            except StoreLocked:
                found = self._read_address()
                if found is None:
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                address = found
            try:
                return await self._stack.enter_async_context(open(address, self._parent, **self._options))
            except (NoRoute, RemotingError) as error:
                if self.is_owner:
                    raise
                last = error
                await asyncio.sleep(_PAUSE_SECONDS)
        raise last

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _serve(self) -> str:
        """Run the servers. Return the address of the name server. Raises StoreLocked: another process runs them."""
        try:
            standalone = importlib.import_module("rmqkit.standalone").Standalone
        except ImportError as error:
            raise ExtraMissing(
                "rmqkit.streams.embedded", error.name or "rmqkit.standalone", install("server")
            ) from None
        servers = await self._stack.enter_async_context(standalone(self._folder / "store"))
        self.is_owner = True
        path = self._folder / _ADDRESS
        path.write_text(servers.namesrv_address)
        self._stack.callback(path.unlink, missing_ok=True)
        return str(servers.namesrv_address)

    def _read_address(self) -> str | None:
        path = self._folder / _ADDRESS
        try:
            return path.read_text().strip() or None
        except OSError:
            return None
