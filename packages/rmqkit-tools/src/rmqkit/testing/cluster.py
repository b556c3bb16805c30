"""Servers inside the process of a test: a name server, brokers and their slaves, on free ports, with temporary stores.

One thread with one event loop runs all servers of a cluster. So clients in the test's own thread or loop, in other
processes, and in other languages can use real servers on real ports. No thread, port or file is left afterwards.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self, TypeVar, Unpack

from rmqkit.broker.context import BrokerContext
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import STANDALONE, BrokerSettings
from rmqkit.errors import SettingsError
from rmqkit.namesrv.server import KV_FILE, NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, Credentials
from rmqkit.remoting.router import Refusal
from rmqkit.settings import load
from rmqkit.store.settings import StoreSettings
from rmqkit.testing.asserts import Asserts
from rmqkit.testing.chaos import Chaos, ChaosDispatch, Dials
from rmqkit.testing.clock import LoopThread, VirtualClock

__all__ = ["LocalBroker", "LocalCluster"]

T = TypeVar("T")

_HOST = "127.0.0.1"
_SOURCE = "a LocalCluster's settings"
_OWN: dict[str, object] = {
    **STANDALONE,
    "bindAddress": _HOST,
    "brokerIP1": _HOST,
    "listenPort": 0,
    "mappedFileSizeCommitLog": 64 << 20,
    "mappedFileSizeConsumeQueue": 200_000,
    "maxHashSlotNum": 10_000,
    "maxIndexNum": 40_000,
    "diskMaxUsedSpaceRatio": 95,
}
"""The default settings of a test's broker; the files are sparse."""


class LocalBroker:
    """One broker of a `LocalCluster`.

    Attributes:
        name, is_slave: a master and its slaves have the same name.
        dials: the current values of the chaos dials (see `rmqkit.testing.chaos`).
        store_root: the directory of the store, which exists from the first start until the cluster is closed.
    """

    def __init__(self, cluster: LocalCluster, **settings: object) -> None:
        texts = {key: _text(value) for key, value in settings.items()}
        loaded = load([BrokerSettings, StoreSettings, AuthenticationSettings], texts, source=_SOURCE)
        for key, nearest in loaded.unknown:
            raise SettingsError(f"{_SOURCE}: {key} is unknown{f'; did you mean {nearest}?' if nearest else ''}")
        self._settings, self._store_settings, self._users = loaded.values
        self._cluster = cluster
        self._broker: Broker | None = None
        self._dispatches: list[ChaosDispatch] = []
        self._ports = contextlib.ExitStack()
        self.name: str = self._settings.broker_name
        self.is_slave: bool = self._settings.broker_id > 0
        self.dials = Chaos()
        self.store_root = Path()

    @property
    def address(self) -> str:
        """The address for clients, ``host:port``; empty while the broker is stopped."""
        return "" if self._broker is None else self._broker.address

    @property
    def credentials(self) -> Credentials | None:
        """The first user, for clients; None if clients need no user."""
        checks = Authentication.of(self._users)
        if checks is None:
            return None
        return Credentials(checks.initial.username or "", checks.initial.password or "")

    @property
    def context(self) -> BrokerContext | None:
        """The broker's context, for use in `LocalCluster.look`; None while the broker is stopped."""
        return None if self._broker is None else self._broker.context

    def start(self) -> None:
        """Start the broker. After `stop`, it has the same port and store again. Raises StoreError, ListenFailed: see
        `rmqkit.broker.server.Broker`."""
        self._cluster.run(self._start)

    def stop(self) -> None:
        """Stop the broker cleanly. If it is stopped already, nothing happens."""
        self._cluster.run(self._stop)

    def chaos(self, **dials: Unpack[Dials]) -> Chaos:
        """Set the dials of this broker; see `LocalCluster.chaos`."""
        chaos = Chaos(**dials)
        self._cluster.look(partial(self.turn, chaos))
        return chaos

    def turn(self, chaos: Chaos) -> None:
        """Set the chaos dials of this broker. Call this method only on the event loop."""
        self.dials = chaos
        for dispatch in self._dispatches:
            dispatch.turn(chaos)

    async def _start(self) -> None:
        assert self._broker is None, f"{self.name} runs"
        settings, cluster = self._settings, self._cluster
        if not settings.listen_port:
            settings.listen_port = _hold_ports(self._ports)
        settings.namesrv_addr = cluster.name_server
        self.store_root = cluster.folder / f"{self.name}-{settings.broker_id}"
        self._dispatches.clear()
        broker = Broker(
            settings,
            self._store_settings,
            self.store_root,
            clock=cluster.clock,
            authentication=self._users,
            dispatch=self._new_dispatch,
        )
        await broker.start()
        self._broker = broker
        for dispatch in self._dispatches:
            dispatch.clients = broker.context.clients
        self.turn(self.dials)

    def close(self) -> None:
        """Stop the broker permanently and release its ports."""
        self.stop()
        self._ports.close()

    async def _stop(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    def _new_dispatch(self, refusal: Refusal | None) -> ChaosDispatch:
        self._dispatches.append(ChaosDispatch(refusal))
        return self._dispatches[-1]


class LocalCluster(Asserts):
    """A name server and brokers::

        with LocalCluster(brokers=2, slaves=1, settings={"autoCreateTopicEnable": False}) as cluster:
            producer = sync.Producer("orders", cluster.name_server)

    Args:
        brokers: the number of masters, each with its own name.
        slaves: the number of slaves of each master.
        settings: the settings of all brokers, by the keys of a ``broker.conf``; a dict is written as JSON. With
            ``authenticationEnabled`` slaves need ``innerClientAuthenticationCredentials``, too.
    Raises SettingsError: a setting is unknown or not valid.

    Attributes:
        name_server: the name server's address for clients, ``host:port``.
        brokers, slaves: the masters and the slaves, sorted by name.
        clock: the servers' time.
    """

    def __init__(self, *, brokers: int = 1, slaves: int = 0, settings: Mapping[str, object] | None = None) -> None:
        self._stack = contextlib.ExitStack()
        masters = [{**_OWN, **(settings or {}), "brokerName": f"broker-{number}"} for number in range(brokers)]
        self.brokers = [LocalBroker(self, **own) for own in masters]
        self.slaves = [
            LocalBroker(self, **{**own, "brokerRole": "SLAVE", "brokerId": number})
            for own in masters
            for number in range(1, slaves + 1)
        ]
        self.name_server = ""
        self.folder = Path()

    def start(self) -> Self:
        """Start all servers. When this returns, the brokers are registered. After an error (see `LocalBroker.start`),
        all servers are stopped."""
        with contextlib.ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="rmqkit-", ignore_cleanup_errors=True)
            self.folder = Path(stack.enter_context(folder))
            self._thread = LoopThread("rmqkit servers")
            stack.callback(self._thread.close)
            self.clock = VirtualClock(self._thread)
            kv = str(self.folder / KV_FILE)
            settings = NamesrvSettings(listen_port=0, bind_address=_HOST, kv_config_path=kv)

            async def start_name_server() -> NameServer:
                name_server = NameServer(settings, self.clock)
                await name_server.start()
                return name_server

            name_server = self.run(start_name_server)
            stack.callback(self.run, name_server.stop)
            self.name_server = name_server.address
            for broker in (*self.brokers, *self.slaves):
                stack.callback(broker.close)
                broker.start()
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Stop all servers and delete their stores."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic on every master, or change its number of queues. Name servers know it when this returns."""

        async def create() -> None:
            for context in self.masters():
                context.topics.put(TopicConfig(topic, queues, queues))
                await context.topics_published()

        self.run(create)

    def chaos(self, **dials: Unpack[Dials]) -> Chaos:
        """Set the chaos dials of all brokers. Without arguments, all dials are off.
        Raises SettingsError: a share is not between 0 and 1, or a time is negative."""
        chaos = Chaos(**dials)
        for broker in (*self.brokers, *self.slaves):
            self.look(partial(broker.turn, chaos))
        return chaos

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a coroutine function on the event loop of the servers, and wait for its result."""
        return self._thread.run(work)

    def look(self, work: Callable[[], T]) -> T:
        """Call a function on the event loop of the servers, where you can use their objects."""

        async def on_loop() -> T:
            return work()

        return self.run(on_loop)

    def masters(self) -> list[BrokerContext]:
        """Return the contexts of the running masters, for use on their loop."""
        return [broker.context for broker in self.brokers if broker.context is not None]


def _text(value: object) -> str:
    """Return a setting's value as in a file."""
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _hold_ports(stack: contextlib.ExitStack) -> int:
    """Return a free port for a broker whose VIP port (-2) and HA port (+1) are free, too.

    Bound sockets that do not listen reserve the ports while the broker is stopped. The broker can bind the same ports.
    """
    while True:
        with contextlib.ExitStack() as held:
            port = 0
            try:
                for step in (0, -2, 1):
                    holder = held.enter_context(_hold_port(port and port + step))
                    port = port or holder.getsockname()[1]
            except OSError:
                continue
            stack.push(held.pop_all())
            return port


def _hold_port(port: int) -> socket.socket:
    """Return a socket bound to a free port (0: any port); a server can bind the same port.
    Raises OSError: the port is in use, maybe by another reserving socket."""
    holder = socket.socket()
    try:
        holder.bind((_HOST, port))
    except OSError:
        holder.close()
        raise
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
