"""A simulated cluster: name servers, masters and slaves, each on a machine of its own.

A service manager starts a server again some seconds after it ended by itself or was killed, until `Server.stop` or
`Server.power_off` is called. All servers use their usual ports.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import STANDALONE, BrokerSettings
from rmqkit.errors import SettingsError
from rmqkit.namesrv.server import KV_FILE, NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.address import AdminAddresses
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.settings import Configuration, load
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from rmqkit.testing.simulation.world import Process, World

__all__ = ["BrokerServer", "Cluster", "NameServerServer", "Server"]

_SOURCE = "the settings of a simulated cluster"
_RESTART_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_MACHINES = "10.0.0.0/16"
SMALL: dict[str, object] = {
    **STANDALONE,
    "mappedFileSizeCommitLog": 64 << 10,
    "mappedFileSizeConsumeQueue": 2000,
    "mappedFileSizeLiteQueue": 5600,
    "mapperFileSizeBatchConsumeQueue": 4600,
    "mappedFileSizeTimerLog": 6800,
    "maxHashSlotNum": 500,
    "maxIndexNum": 400,
    "fileReservedTime": 100_000,
    "adminAllowedAddresses": _MACHINES,
}
"""The default settings of a simulated broker: small files, so that a short run has many."""


class Server:
    """A server that can be started and stopped again and again, on one disk.

    Attributes:
        name: the name of the server and of its machine.
        process: its present process, or None.
        deaths: how often its process ended, by itself or by a fault.
        failures: the errors with which its process ended by itself.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.machine = world.machine(name)
        self.process: Process | None = None
        self.deaths = 0
        self.failures: list[str] = []
        self._is_wanted = False
        self._starts_again = False
        self._stops: asyncio.Event | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_alive

    def start(self) -> None:
        """Start the server, and let the service manager keep it running. If it runs already, nothing happens."""
        self._is_wanted = True
        if not self.is_running:
            self._stops = None
            self.process = self.world.process(self.name, self._main)
            self.process.on_end = self._ended

    def stop(self) -> None:
        """Stop the server cleanly. It runs until its stop is complete: see `is_running`."""
        self._is_wanted = self._starts_again = False
        if self.process is not None and self.process.is_alive:
            if self._stops is None:  # it has not begun
                self.process.kill()
            else:
                self.process.loop.call_soon_threadsafe(self._stops.set)

    def kill(self, restart_seconds: float = _RESTART_SECONDS) -> None:
        """Kill the process. The service manager starts it after a time."""
        if self.process is not None and self.process.is_alive:
            self.process.kill()
            self.died(restart_seconds)

    def lose_power(self, restart_seconds: float = _RESTART_SECONDS) -> None:
        """Cut the power of the machine. The server starts after a time."""
        self.machine.lose_power()
        self.died(restart_seconds)

    def died(self, restart_seconds: float = _RESTART_SECONDS) -> None:
        """Count a death by a fault, and start the server after a time."""
        self.deaths += 1
        self.forget()
        self.restart_after(restart_seconds)

    def forget(self) -> None:
        """Forget the objects of the dead process."""

    def restart_after(self, seconds: float) -> None:
        """Start the server after a time, unless it was stopped meanwhile."""
        self.world.after(seconds, self._restart)

    def _restart(self) -> None:
        if self._is_wanted:
            self.start()

    def _ended(self, process: Process) -> None:
        if process.error is not None:
            self.failures.append(repr(process.error))
        self.died()

    def start_when_stopped(self) -> None:
        """Start the server as soon as its clean stop is complete, unless it is stopped again meanwhile."""
        self._starts_again = True
        self._start_again()

    def _start_again(self) -> None:
        if not self._starts_again:
            return
        if self.is_running and not self._is_wanted:
            self.world.after(_LOOK_SECONDS, self._start_again)
        else:
            self.start()

    async def _main(self) -> None:
        self._stops = asyncio.Event()
        await self.serve(self._stops)

    async def serve(self, stops: asyncio.Event) -> None:
        """Run the server until an event is set, then stop it."""
        raise NotImplementedError


class NameServerServer(Server):
    """A name server. ``name_server``: the running one, or None."""

    name_server: NameServer | None = None

    @property
    def address(self) -> str:
        return f"{self.machine.host}:9876"

    def forget(self) -> None:
        self.name_server = None

    async def serve(self, stops: asyncio.Event) -> None:
        root = self.machine.disk.path
        settings = NamesrvSettings(
            bind_address=self.machine.host,
            kv_config_path=str(root / KV_FILE),
            admin_addresses=AdminAddresses(_MACHINES),
        )
        server = NameServer(settings)
        await server.start()
        self.name_server = server
        try:
            await stops.wait()
        finally:
            await server.stop()


class BrokerServer(Server):
    """A broker. ``broker``: the running one, or None."""

    broker: Broker | None = None

    def __init__(self, world: World, name: str, settings: Mapping[str, object]) -> None:
        super().__init__(world, name)
        self.settings = dict(settings)
        self._work: list[asyncio.Task[object]] = []
        self.root: Path = self.machine.disk.path / "store"

    @property
    def address(self) -> str:
        return f"{self.machine.host}:10911"

    def on_loop(self, work: Callable[[Broker], Coroutine[Any, Any, object]]) -> None:
        """Call a coroutine function with the running broker, on its loop."""
        process, broker = self.process, self.broker
        assert process is not None, f"{self.name} runs"
        assert broker is not None, f"{self.name} has started"
        process.loop.call_soon(lambda: self._work.append(process.loop.create_task(work(broker))))

    def loaded(self) -> tuple[BrokerSettings, StoreSettings, AuthenticationSettings]:
        """Return the present settings. Raises SettingsError: a setting is unknown or not valid."""
        texts = {key: _text(value) for key, value in self.settings.items()}
        found = load([BrokerSettings, StoreSettings, AuthenticationSettings], texts, source=_SOURCE)
        for key, nearest in found.unknown:
            raise SettingsError(f"{_SOURCE}: {key} is unknown{f'; did you mean {nearest}?' if nearest else ''}")
        settings, store_settings, users = found.values
        settings.bind_address = settings.broker_ip1 = self.machine.host
        return settings, store_settings, users

    def forget(self) -> None:
        self.broker = None

    async def serve(self, stops: asyncio.Event) -> None:
        settings, store_settings, users = self.loaded()
        configuration = Configuration([settings, store_settings, users])
        broker = Broker(settings, store_settings, self.root, authentication=users, configuration=configuration)
        await broker.start()
        self.broker = broker
        try:
            await stops.wait()
        finally:
            self.broker = None
            await broker.stop()


class Cluster:
    """Name servers and brokers of a world.

    Args:
        brokers: the number of masters.
        slaves: the number of slaves of each master.
        settings: the settings of all brokers, by the keys of a ``broker.conf``, over `SMALL`.

    Attributes:
        name_servers, masters, slaves: the servers.
    """

    def __init__(
        self,
        world: World,
        *,
        brokers: int = 1,
        slaves: int = 0,
        name_servers: int = 1,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.world = world
        self.name_servers = [NameServerServer(world, f"namesrv-{number}") for number in range(name_servers)]
        addresses = ";".join(server.address for server in self.name_servers)
        common = {**SMALL, "namesrvAddr": addresses, **(settings or {})}
        self.masters = [
            BrokerServer(world, f"broker-{number}", {**common, "brokerName": f"broker-{number}"})
            for number in range(brokers)
        ]
        self.slaves = [
            BrokerServer(
                world,
                f"{master.name}-slave-{number}",
                {**master.settings, "brokerRole": "SLAVE", "brokerId": number},
            )
            for master in self.masters
            for number in range(1, slaves + 1)
        ]

    @property
    def brokers(self) -> list[BrokerServer]:
        """All masters and slaves."""
        return [*self.masters, *self.slaves]

    @property
    def servers(self) -> list[Server]:
        """All servers."""
        return [*self.name_servers, *self.brokers]

    @property
    def addresses(self) -> str:
        """The name servers' addresses for clients."""
        return ";".join(server.address for server in self.name_servers)

    def start(self) -> None:
        """Start all servers."""
        for server in self.servers:
            server.start()

    def stop(self) -> None:
        """Stop all servers cleanly."""
        for server in self.servers:
            server.stop()


def _text(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
