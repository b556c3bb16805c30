"""Our servers or Apache's, whose broker can be killed and restarted on its port over its store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from tests.faults.client.servers import Servers
from tests.interop.apache import (
    BROKER_CONF,
    BROKER_HEAP_MB,
    HOST,
    NAME_SERVER_HEAP_MB,
    READY_SECONDS,
    ask,
    register_now,
    start_apache,
)
from tests.interop.kit import default_version, prepare
from tests.interop.server_process import ServerProcess
from tests.ports import free_ports

__all__ = ["APACHE", "OURS", "ApacheServers", "servers", "set_queues"]

OURS, APACHE = "rmqkit", "apache"
_PACKAGE = "org.apache.rocketmq"


class ApacheProcess:
    """One of Apache's servers, with the methods of `Server`."""

    def __init__(self, name: str, main: str, conf: Mapping[str, object], heap_mb: int, folder: Path) -> None:
        self._arguments = (name, f"{_PACKAGE}.{main}", conf, heap_mb, folder)
        self._kit = prepare(default_version())
        self._process: ServerProcess | None = None
        self.address = f"{HOST}:{conf['listenPort']}"
        self._namesrv = str(conf.get("namesrvAddr", ""))

    async def start(self) -> None:
        """Start the server, and wait until the name server knows a broker. Return when it is ready."""
        self._process = await asyncio.to_thread(start_apache, self._kit, *self._arguments)
        await asyncio.to_thread(self._process.wait_ready, "boot success", READY_SECONDS)
        if self._namesrv:
            await asyncio.to_thread(register_now, self._namesrv, self.address)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()


class ApacheServers:
    """A name server and a broker; both are killed at the end."""

    def __init__(self, folder: Path, conf: Mapping[str, object]) -> None:
        namesrv_port, port, ha_port = free_ports()
        own = {"listenPort": namesrv_port, "bindAddress": HOST}
        self.name_server = ApacheProcess("namesrv", "namesrv.NamesrvStartup", own, NAME_SERVER_HEAP_MB, folder)
        self.namesrv_addr = self.name_server.address
        store = folder / "store"
        broker_conf = {
            **BROKER_CONF,
            "listenPort": port,
            "bindAddress": HOST,
            "haListenPort": ha_port,
            "brokerIP1": HOST,
            "namesrvAddr": self.namesrv_addr,
            "storePathRootDir": store,
            "storePathCommitLog": store / "commitlog",
            "mappedFileSizeConsumeQueue": 6_000_000,
            "maxHashSlotNum": 100_000,
            "maxIndexNum": 400_000,
            **conf,
        }
        self.broker = ApacheProcess("broker", "broker.BrokerStartup", broker_conf, BROKER_HEAP_MB, folder)

    async def __aenter__(self) -> Self:
        try:
            await self.name_server.start()
            await self.broker.start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self.broker, self.name_server):
            server.kill()


def servers(which: str, folder: Path, conf: Mapping[str, object]) -> Servers | ApacheServers:
    """Return a name server and a broker of a kind, not started. ``conf`` is the broker's configuration.
    Raises Unavailable: the machine cannot run Apache's servers."""
    if which == APACHE:
        return ApacheServers(folder, conf)
    # The port of gRPC is the same for all brokers of a machine, so another program's broker may have it after a kill.
    own = {"grpcServerPort": -1, **conf}
    return Servers(folder, conf="".join(f"{name}={value}\n" for name, value in own.items()))


def set_queues(broker_addr: str, topic: str, count: int) -> None:
    """Create a topic, or increase its queues."""
    fields = {"topic": topic, "defaultTopic": "TBW102", "perm": "6", "topicFilterType": "SINGLE_TAG"}
    fields |= {"readQueueNums": str(count), "writeQueueNums": str(count), "topicSysFlag": "0", "order": "false"}
    answer = ask(broker_addr, Command(RequestCode.UPDATE_AND_CREATE_TOPIC, fields=fields))
    assert answer.code == ResponseCode.SUCCESS, f"{broker_addr} answered {answer.code}: {answer.remark}"
