"""A name server with supportActingMaster and brokers that come and go, all in one loop."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.namesrv.server import KV_FILE, NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.topics import TopicRoute
from rmqkit.remoting.client import RemotingClient
from rmqkit.store.settings import StoreSettings
from tests.broker.replication.inside import close_ports
from tests.store.stores import copy_store

SECONDS = 60.0
MASTER, SLAVE = BrokerRole.ASYNC_MASTER, BrokerRole.SLAVE


class Brokers:
    """Brokers by folder name, which is broker name and id: ``a-0`` is the master of ``a``, ``a-1`` its slave."""

    def __init__(self, root: Path, *, store=None, **settings):
        self.root = root
        self.settings = settings
        self.store_settings = {"commit_log_file_bytes": 1 << 20, **(store or {})}
        self.name_server = NameServer(
            NamesrvSettings(
                listen_port=0,
                bind_address="127.0.0.1",
                kv_config_path=str(root / KV_FILE),
                support_acting_master=True,
                notify_min_broker_id_changed=True,
            )
        )
        self.running: dict[str, Broker] = {}
        self.client = RemotingClient()

    async def start(self, name: str) -> Broker:
        """Start a broker on its folder, on free ports."""
        broker_name, broker_id = name.split("-")
        broker = Broker(
            BrokerSettings(
                broker_name=broker_name,
                broker_id=int(broker_id),
                broker_role=MASTER if broker_id == "0" else SLAVE,
                listen_port=0,
                bind_address="127.0.0.1",
                namesrv_addr=self.name_server.address,
                slave_read=True,
                **self.settings,
            ),
            StoreSettings(**self.store_settings),
            self.root / name,
        )
        await broker.start()
        self.running[name] = broker
        return broker

    async def stop(self, name: str) -> None:
        await self.running.pop(name).stop()

    async def crash(self, name: str) -> None:
        """Stop a broker, and restore its folder to the state before the stop."""
        # Close the ports before the copy: otherwise slaves could still read messages and offsets that are not in it.
        await close_ports(self.running[name])
        left = copy_store(self.root / name, self.root / f"{name}.left")
        await self.stop(name)
        shutil.rmtree(self.root / name)
        left.rename(self.root / name)

    def context(self, name: str):
        return self.running[name].context

    async def ask(self, name: str, code: int, body: bytes = b"", **fields) -> Command:
        command = Command(code, fields={key: str(value) for key, value in fields.items()} or None, body=body)
        return await self.client.call(self.running[name].address, command, 60_000)

    async def route(self, topic: str) -> TopicRoute | None:
        command = Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": topic})
        answer = await self.client.call(self.name_server.address, command, 60_000)
        return decode_as(answer.payload, TopicRoute) if answer.code == 0 else None

    async def addresses(self, topic: str, broker_name: str) -> dict[int, str]:
        """Return the addresses of a broker name by broker id, as the route of the topic has them."""
        route = await self.route(topic)
        groups = [] if route is None else route.broker_datas
        return next((group.broker_addrs for group in groups if group.broker_name == broker_name), {})

    async def until_copied(self, master: str, slave: str) -> None:
        """Wait until a slave has all messages of its master and can read them."""
        own, copy = self.context(master).store, self.context(slave).store
        async with asyncio.timeout(SECONDS):
            while copy.dispatched_offset < own.max_physical_offset:
                await asyncio.sleep(0.01)

    async def __aenter__(self) -> Brokers:
        await self.name_server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.client.close()
        for name in list(self.running):
            await self.stop(name)
        await self.name_server.stop()
