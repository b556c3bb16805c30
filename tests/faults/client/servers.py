"""Our servers as processes that can be killed and restarted on the same ports."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rmqkit.remoting.address import split_address
from tests.interop.server_process import ServerProcess
from tests.ports import free_port

READY_SECONDS = 150
_RMQ = Path(sys.executable).with_name("rmq")
HOST = "127.0.0.1"
PROXIED_HOST = "127.0.0.2"
"""The address that a broker registers if clients connect through a proxy."""


class Server:
    """One process. For ``port`` 0 it chooses a free port, which it retains over restarts."""

    def __init__(self, name: str, options: Sequence[str], folder: Path, *, port: int = 0) -> None:
        self._name = name
        self._options = list(options)
        self._log = folder / f"{name}.log"
        self._process: ServerProcess | None = None
        self._port = port or free_port(-2, 1)
        self.address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self._name} is running"
        return self._process.pid

    async def start(self) -> None:
        """Start the process, after the first time on the same port. Return when it is ready."""
        kind = self._name.rstrip("0123456789")
        options = [*self._options, "--port", str(self._port)]
        self._process = ServerProcess([_RMQ, kind, *options], self._log)
        ready = await asyncio.to_thread(self._process.wait_ready, rf"^ready {kind}=(\S+)", READY_SECONDS)
        self.address = ready[1]

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()


class Servers:
    """Name servers and one broker over a store that remains; all are killed at the end.

    Args:
        conf: lines for the broker's file.
        is_proxied: the broker registers the address `PROXIED_HOST`.
    """

    def __init__(self, folder: Path, *, name_servers: int = 1, conf: str = "", is_proxied: bool = False) -> None:
        self._file = folder / "broker.conf"
        told = PROXIED_HOST if is_proxied else HOST
        self._file.write_text(f"brokerIP1={told}\nbrokerName=broker-a\n{conf}\n")
        self._folder = folder
        self.name_servers = [Server(f"namesrv{i}", ["--host", HOST], folder) for i in range(name_servers)]
        self.broker = Server("broker", [], folder)

    @property
    def namesrv_addr(self) -> str:
        """Return the name servers' addresses for clients."""
        return ";".join(server.address for server in self.name_servers)

    @property
    def broker_target(self) -> str:
        """Return the address on which the broker listens, which may differ from the registered one."""
        return f"{HOST}:{split_address(self.broker.address)[1]}"

    async def __aenter__(self) -> Self:
        try:
            for server in self.name_servers:
                await server.start()
            options = ["--host", HOST, "--store", str(self._folder / "store"), "--config", str(self._file)]
            self.broker = Server("broker", [*options, "--name-servers", self.namesrv_addr], self._folder)
            await self.broker.start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self.broker, *self.name_servers):
            server.kill()
