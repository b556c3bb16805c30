"""Streams without a server: name server and broker run in the process of the program.

The first process that opens a folder runs the servers. Other processes of the same machine, such as further workers of
a web server, connect to them. The folder has the address in ``streams.address``. The file stays when the process exits:
the next process that runs the servers takes the same port, so that the others find them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rmqkit.errors import ClientError, ExtraMissing, NoRoute, RemotingError, StoreLocked
from rmqkit.extras import install
from rmqkit.remoting.listening import ListenFailed
from rmqkit.streams.streams import Streams, open  # noqa: A004
from rmqkit.times import Duration

__all__ = ["EmbeddedStreams", "embedded"]

_ADDRESS = "streams.address"
_TRIES = 100
_PORT_MAX = 65_535
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
        """Run the servers, at the port of the last time if it is free. Return the address of the name server.
        Raises StoreLocked: another process runs them."""
        port = (self._read_address() or "").rpartition(":")[2]
        if port.isascii() and port.isdigit() and int(port) <= _PORT_MAX:
            with contextlib.suppress(ListenFailed):  # another program uses the port
                return await self._serve_at(int(port))
        return await self._serve_at(0)

    async def _serve_at(self, port: int) -> str:
        try:
            standalone = importlib.import_module("rmqkit.standalone").Standalone
            settings = importlib.import_module("rmqkit.namesrv.settings").NamesrvSettings
        except ImportError as error:
            raise ExtraMissing(
                "rmqkit.streams.embedded", error.name or "rmqkit.standalone", install("server")
            ) from None
        namesrv = settings(listen_port=port, bind_address="127.0.0.1")
        servers = await self._stack.enter_async_context(standalone(self._folder / "store", namesrv=namesrv))
        self.is_owner = True
        (self._folder / _ADDRESS).write_text(servers.namesrv_address)
        return str(servers.namesrv_address)

    def _read_address(self) -> str | None:
        path = self._folder / _ADDRESS
        try:
            return path.read_text().strip() or None
        except OSError:
            return None
