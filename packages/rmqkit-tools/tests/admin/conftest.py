"""One name server with brokers broker-a and broker-b for the tests of a file: use topics and groups of your own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from rmqkit.admin import Admin
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

SECONDS = 60


@pytest.fixture(scope="module")
def name_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the name server."""
    root = tmp_path_factory.mktemp("admin")
    first = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    addresses: list[str] = []
    ready, loops = threading.Event(), []
    stopping = asyncio.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with Standalone(root / "a", broker=first) as standalone:
            addresses.append(standalone.namesrv_address)
            settings = BrokerSettings(
                listen_port=0,
                bind_address="127.0.0.1",
                broker_name="broker-b",
                namesrv_addr=standalone.namesrv_address,
                server_side_reset=False,
            )
            light = StoreSettings(enable_light_queues=True, enable_multi_dispatch=True)
            other = Broker(settings, light, root / "b")
            await other.start()
            ready.set()
            await stopping.wait()
            await other.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(SECONDS)
    yield addresses[0]
    loops[0].call_soon_threadsafe(stopping.set)
    thread.join(SECONDS)


@pytest.fixture
async def admin(name_servers: str) -> AsyncIterator[Admin]:
    """Talks to both brokers; its tests are marked ``real_time``."""
    async with Admin(name_servers) as it:
        yield it
