"""A master and its slave as processes that can be killed and restarted, and proxies on both links between them.

::

    slave ──── registers ────► name server        answers brokerIP2:haListenPort and brokerIP1:listenPort
      ├─── replication proxy ─► master, HA port
      └─────── normal proxy ──► master, port ◄──── senders

The master registers another loopback address than the one on which it listens. The proxies listen on its ports there.
Requests of the test itself go directly to the master. In these tests replication detects dead links within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.remoting.client import RemotingClient, expect_success
from rmqkit.settings import load
from rmqkit.store.settings import StoreSettings
from tests.faults.client.proxy import Cut, Dials, Proxy
from tests.faults.client.servers import HOST, PROXIED_HOST, Server
from tests.faults.spark.servers import set_queues
from tests.ports import free_ports

__all__ = ["BROKER", "MASTER", "QUEUES", "SLAVE", "TOPIC", "Fault", "Pair", "store_settings"]

MASTER, SLAVE = "master", "slave"
BROKER, TOPIC, QUEUES = "broker-a", "Replicated", 4
CONVERGE_SECONDS = 150.0
ASK_TIMEOUT_MS = 10_000
SLOW_BYTES_PER_SECOND = 200_000
CUT_BYTES_MAX = 60_000
_POLL_SECONDS = 0.02

STORE: Mapping[str, object] = {
    "flushDiskType": "SYNC_FLUSH",
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
    "diskMaxUsedSpaceRatio": 95,
}
"""Small files. The check opens the stores with these settings too."""
CONF: Mapping[str, object] = {
    "brokerName": BROKER,
    "slaveReadEnable": "true",
    "haSendHeartbeatInterval": 300,
    "haHousekeepingInterval": 1500,
    "registerNameServerPeriod": 10_000,
    **STORE,
}
MASTER_CONF: Mapping[str, object] = {
    "brokerRole": "SYNC_MASTER",
    "brokerId": 0,
    "inSyncReplicas": 2,
    "slaveTimeout": 1500,
    "brokerIP1": PROXIED_HOST,
    "brokerIP2": PROXIED_HOST,
}
SLAVE_CONF: Mapping[str, object] = {"brokerRole": "SLAVE", "brokerId": 1, "brokerIP1": HOST}


def store_settings() -> StoreSettings:
    """Return the settings of both stores."""
    properties = {key: str(value) for key, value in STORE.items()}
    settings: StoreSettings = load([StoreSettings], properties, source="the pair").values[0]
    return settings


class Fault(enum.Enum):
    """A fault of a link."""

    NONE = "whole"
    CUT = "cut"
    """Every connection is cut once."""
    TORN = "torn"
    """Every new connection breaks after some bytes, often inside a frame."""
    DELAYED = "delayed"
    SLOW = "slow"
    HALF_OPEN = "half-open"
    """No data passes, and neither end notices it."""

    def dials(self, chance: random.Random) -> Dials:
        """Return the proxy's dials for this fault."""
        match self:
            case Fault.TORN:
                return Dials(cut=lambda: Cut.any(chance, CUT_BYTES_MAX))
            case Fault.DELAYED:
                return Dials(delay_seconds=chance.choice([0.02, 0.1, 0.5]))
            case Fault.SLOW:
                return Dials(bytes_per_second=SLOW_BYTES_PER_SECOND)
            case Fault.HALF_OPEN:
                return Dials(is_black_hole=True)
            case _:
                return Dials()

    def befall(self, link: Proxy, chance: random.Random) -> None:
        """Apply the fault to a link until another fault is applied."""
        link.dials = self.dials(chance)
        if self in (Fault.CUT, Fault.TORN):
            link.break_all()


class Pair:
    """A name server, a master, a slave and the proxies; all are killed at the end.

    Attributes:
        brokers, stores: by role; the folders of their stores.
        replication, normal: the links from the slave to the HA port, and from all clients to the normal port.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (_, port, ha_port), (_, slave_port, slave_ha_port) = free_ports(), free_ports()
        self._ports = {MASTER: port, SLAVE: slave_port}
        self._ha_ports = {MASTER: ha_port, SLAVE: slave_ha_port}
        self.stores = {role: folder / role for role in (MASTER, SLAVE)}
        self.name_server = Server("namesrv0", ["--host", HOST], folder)
        self.replication = Proxy(f"{HOST}:{ha_port}", PROXIED_HOST, ha_port)
        self.normal = Proxy(f"{HOST}:{port}", PROXIED_HOST, port)
        self.brokers = {MASTER: self._broker("broker0", MASTER), SLAVE: self._broker("broker1", SLAVE)}
        self._stack = contextlib.AsyncExitStack()
        self.remoting = RemotingClient()

    def _broker(self, name: str, role: str) -> Server:
        options = ["--host", HOST, "--store", str(self.stores[role]), "--config", str(self._conf_file(role))]
        return Server(name, options, self._folder, port=self._ports[role])

    def _conf_file(self, role: str) -> Path:
        return self._folder / f"{role}.conf"

    def log_text(self, role: str) -> str:
        """Return the log of a broker since its last start."""
        return (self._folder / f"broker{int(role == SLAVE)}.log").read_text(errors="replace")

    def address(self, role: str) -> str:
        """Return the address on which a broker listens, which may differ from the registered one."""
        return f"{HOST}:{self._ports[role]}"

    def configure(self, role: str, **changes: object) -> None:
        """Write a broker's file, for its next start."""
        own = {"haListenPort": self._ha_ports[role], "namesrvAddr": self.name_server.address}
        conf = {**CONF, **(MASTER_CONF if role == MASTER else SLAVE_CONF), **own, **changes}
        self._conf_file(role).write_text("".join(f"{key}={value}\n" for key, value in conf.items()))

    async def __aenter__(self) -> Self:
        try:
            await self.name_server.start()
            for proxy in (self.replication, self.normal):
                await self._stack.enter_async_context(proxy)
            for role, broker in self.brokers.items():
                self.configure(role)
                await broker.start()
            for role in self.brokers:
                await asyncio.to_thread(set_queues, self.address(role), TOPIC, QUEUES)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (*self.brokers.values(), self.name_server):
            server.kill()
        await self.remoting.close()
        await self._stack.aclose()

    async def ask(self, role: str, command: Command) -> Command:
        """Return a broker's answer to a request. Raises RemotingError: there is no answer."""
        return await self.remoting.call(self.address(role), command, ASK_TIMEOUT_MS)

    async def replication_state(self) -> HaRuntimeInfo:
        """Return the master's state of its log and of the slave's. Raises RmqError: the master does not answer."""
        answer = await self.ask(MASTER, Command(RequestCode.GET_BROKER_HA_STATUS))
        return decode_as(expect_success(answer, self.address(MASTER)).payload, HaRuntimeInfo)

    async def converge(self) -> int:
        """Wait until the slave has the whole log of a master that gets no more messages. Return the end of the log.
        Raises AssertionError: the slave does not catch up."""
        told = "no answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONVERGE_SECONDS):
                while True:
                    with contextlib.suppress(RmqError):
                        state = await self.replication_state()
                        end, slaves = state.master_commit_log_max_offset, state.ha_connection_info
                        told = f"{end}, {slaves}"
                        if [one.slave_ack_offset for one in slaves] == [end]:
                            return end
                    await asyncio.sleep(_POLL_SECONDS)
        raise AssertionError(f"the logs are not equal {CONVERGE_SECONDS:g} s later: {told}")
