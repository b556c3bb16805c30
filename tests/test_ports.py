"""Every port of ``docs/explanation/security.md``, used by an unsigned client, by a user without rights and by another
user: none of them reaches the topic of the first user."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from rmqkit.broker.settings import BrokerSettings, HaAddresses
from rmqkit.console import Console
from rmqkit.metrics import ExporterType
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.proxy.remote.users import ProxyUserSettings
from rmqkit.proxy.schema.messages import methods
from rmqkit.proxy.server.server import Proxy, ProxySettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.standalone import Standalone
from tests.broker.stranger import ask
from tests.broker.test_strangers import QUERY, VIEW, send, with_rights
from tests.console.asgi import Browser
from tests.ports import free_port

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "security.md"
SECRET = "secret12"
INNER = '{"accessKey":"inner","secretKey":"innersecret"}'
USERS = AuthenticationSettings(
    enabled=True,
    authorization_enabled=True,
    initial_user='{"username":"root","password":"secret12"}',
    inner_credentials=INNER,
)
METHODS = {method.name: method for method in methods()}
ROUTE, PULL, REGISTER, REFUSED, UNAUTHORIZED = 105, 11, 103, 16, 40100
VISITORS = {"a stranger": None, "a user without rights": "nora", "another user": "mallory"}


@dataclass
class World:
    """Servers with users and policies. Topic B with one message belongs to bob, topic M to mallory."""

    both: Standalone
    proxy: Proxy
    console: Console
    message_id: str
    vip: str

    @property
    def ha(self) -> str:
        host, _, port = self.both.broker.address.rpartition(":")
        return f"{host}:{int(port) + 1}"


@asynccontextmanager
async def world(root: Path) -> AsyncIterator[World]:
    port = free_port(-2, 1)
    own = BrokerSettings(
        listen_port=port,
        grpc_port=0,
        bind_address="127.0.0.1",
        broker_ip1="127.0.0.1",
        ha_addresses=HaAddresses("10.0.0.0/8"),
        exporter_type=ExporterType.PROM,
        exporter_port=0,
    )
    names = NamesrvSettings(listen_port=0, bind_address="127.0.0.1", exporter_type=ExporterType.PROM, exporter_port=0)
    async with Standalone(root, namesrv=names, broker=own, authentication=USERS) as both:
        address = both.broker.address
        for topic in ("B", "M"):
            both.broker.context.topics.ensure(topic, 1)
        await both.broker.context.topics_published()
        await with_rights(address, "bob", "Topic:B", "Group:bob")
        await with_rights(address, "mallory", "Topic:M", "Group:mallory")
        await with_rights(address, "nora", "Topic:nothing")
        message_id = await send(address, "B", "KEYS\x01k\x02", "bob")
        users = ProxyUserSettings(authentication_enabled=True, authorization_enabled=True, inner_credentials=INNER)
        settings = ProxySettings(
            namesrv_addr=both.namesrv_address,
            grpc_port=0,
            remoting_port=0,
            bind_address="127.0.0.1",
            exporter_type=ExporterType.PROM,
            exporter_port=0,
        )
        proxy = Proxy(settings, users)
        await proxy.start()
        try:
            async with Console(both.namesrv_address, login=True) as console:
                yield World(both, proxy, console, message_id, f"127.0.0.1:{port - 2}")
        finally:
            await proxy.stop()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


# ---- what a client reaches: "all", or "nothing" of bob's topic


async def _remoting(address: str, user: str | None, world: World) -> str:
    """Send to bob's topic, pull it, look up its messages by key and by id."""
    values = ("p", "B", "TBW102", "4", "0", "0", "1700000000000", "0", "", "0", "false")
    answers = [
        await ask(address, 310, b"forged", user, **dict(zip("abcdefghijk", values, strict=True))),
        await ask(address, QUERY, b"", user, topic="B", key="k", maxNum="9", beginTimestamp="0", endTimestamp="9" * 13),
        await ask(address, VIEW, b"", user, topic="B", offset=str(int(world.message_id[16:], 16))),
    ]
    return _said(all(answer.code for answer in answers), b"".join(answer.body for answer in answers))


async def _pull(address: str, user: str | None, world: World) -> str:
    fields = {"queueId": "0", "queueOffset": "0", "maxMsgNums": "9", "sysFlag": "4", "commitOffset": "0"}
    more = {"suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0"}
    answer = await ask(address, PULL, b"", user, topic="B", consumerGroup="bob", **fields, **more)
    return _said(answer.code == REFUSED, answer.body)


async def _broker(user: str | None, world: World) -> str:
    address = world.both.broker.address
    assert await _pull(address, user, world) == "nothing"
    return await _remoting(address, user, world)


async def _vip(user: str | None, world: World) -> str:
    return await _remoting(world.vip, user, world)


async def _proxy_remoting(user: str | None, world: World) -> str:
    return await _remoting(world.proxy.remoting_address, user, world)


async def _names(user: str | None, world: World) -> str:
    """Request the route of bob's topic, and register a broker under the name of the running one."""
    route = await ask(world.both.namesrv_address, ROUTE, b"", user, topic="B")
    fields = {"brokerName": "broker-a", "brokerAddr": "10.6.6.6:1", "clusterName": "DefaultCluster", "brokerId": "0"}
    forged = await ask(world.both.namesrv_address, REGISTER, b"", user, haServerAddr="10.6.6.6:2", **fields)
    assert forged.code == REFUSED, forged.remark
    return "all" if route.code == 0 else "nothing"


async def _ha(user: str | None, world: World) -> str:
    reader, writer = await asyncio.open_connection(*world.ha.rsplit(":", 1))
    writer.write(bytes(8))  # a slave with an empty log
    try:
        got = await reader.read()
    except ConnectionError:
        got = b""
    writer.close()
    return "nothing" if not got else "all"


def _metadata(user: str | None) -> list[tuple[str, str]]:
    found = [("x-mq-client-id", f"{user}@1"), ("x-mq-language", "GO"), ("x-mq-client-version", "5.1.2")]
    if user is None:
        return found
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hmac.digest(SECRET.encode(), date.encode(), "sha1").hex()
    words = f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, Signature={digest}"
    return [*found, ("x-mq-date-time", date), ("authorization", words)]


async def _grpc(address: str, user: str | None) -> str:
    """Request the route, send, and receive."""
    codes = []
    asked = {
        "QueryRoute": {"topic": {"name": "B"}},
        "SendMessage": {"messages": [{"topic": {"name": "B"}, "body": b"forged"}]},
        "ReceiveMessage": {"group": {"name": "bob"}, "message_queue": {"topic": {"name": "B"}}},
    }
    async with grpc.aio.insecure_channel(address) as channel:
        for name, fields in asked.items():
            method, path = METHODS[name], f"/apache.rocketmq.v2.MessagingService/{name}"
            content = method.request(**fields).SerializeToString()
            if name == "ReceiveMessage":
                call = channel.unary_stream(path)(content, metadata=_metadata(user), timeout=20)
                answers = [method.response.FromString(one) async for one in call]
                codes += [answer.status.code for answer in answers if answer.HasField("status")]
                assert not any(answer.HasField("message") for answer in answers)
            else:
                answer = await channel.unary_unary(path)(content, metadata=_metadata(user), timeout=20)
                codes.append(method.response.FromString(answer).status.code)
    return "nothing" if set(codes) == {UNAUTHORIZED} else "all"


async def _broker_grpc(user: str | None, world: World) -> str:
    return await _grpc(world.both.broker.grpc_address, user)


async def _proxy_grpc(user: str | None, world: World) -> str:
    return await _grpc(world.proxy.address, user)


async def _metrics(user: str | None, world: World) -> str:
    addresses = [*world.both.metrics_addresses, world.proxy.metrics_address]
    assert all(addresses) and len(addresses) == 3
    heads = []
    for address in addresses:
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        content = await reader.read()
        assert b"body of B" not in content
        heads.append(content[:15])
        writer.close()
    return "all" if set(heads) == {b"HTTP/1.1 200 OK"} else "nothing"


async def _console(user: str | None, world: World) -> str:
    browser = Browser(world.console)
    if user is not None:
        assert (await browser.post("/login", {"name": user, "secret": SECRET})).status == 303
    env = next(iter(world.console.envs))
    pages = [
        await browser.get(f"/{env}/{path}")
        for path in (f"topics/B/m/{world.message_id}", "topics/B/messages", "topics/B/tail", "topics/B")
    ]
    if user is None:
        assert {page.status for page in pages} == {303}, "every page redirects to the login page"
    return _said(True, "".join(page.text for page in pages).encode())


def _said(is_refused: bool, content: bytes) -> str:
    return "nothing" if is_refused and b"body of B" not in content else "all"


Probe = Callable[[str | None, World], Awaitable[str]]

PORTS: dict[str, tuple[Probe, str]] = {
    "Name server": (_names, "all"),
    "Broker": (_broker, "nothing"),
    "VIP port": (_vip, "nothing"),
    "HA port": (_ha, "nothing"),
    "gRPC port of the broker": (_broker_grpc, "nothing"),
    "Proxy, gRPC": (_proxy_grpc, "nothing"),
    "Proxy, remoting": (_proxy_remoting, "nothing"),
    "Console": (_console, "nothing"),
    "Metrics": (_metrics, "all"),
}
"""The probes, by the port's name in the table of the page: how a client tries to reach bob's topic, and the result with
users and policies. Routes and metrics are public, as the page documents."""


@pytest.mark.real_time
@pytest.mark.parametrize("visitor", VISITORS)
async def test_a_port_gives_a_visitor_what_the_page_says(servers: World, visitor: str) -> None:
    found = {name: await probe(VISITORS[visitor], servers) for name, (probe, _) in PORTS.items()}
    assert found == {name: expected for name, (_, expected) in PORTS.items()}


@pytest.mark.real_time
async def test_the_owner_gets_what_others_do_not(servers: World) -> None:
    """Without this test the probes could request something that nobody may have."""
    for name in ("Broker", "VIP port", "gRPC port of the broker", "Proxy, gRPC", "Proxy, remoting"):
        probe, _ = PORTS[name]
        if name == "Broker":
            probe = _owner_pulls
        assert await probe("bob", servers) == "all", name


async def _owner_pulls(user: str | None, world: World) -> str:
    return await _remoting(world.both.broker.address, user, world)


def test_the_page_names_every_port() -> None:
    rows = re.findall(r"^\| \*\*([^*]+)\*\*", PAGE.read_text(), re.MULTILINE)
    assert set(PORTS) <= set(rows), rows
    assert json.dumps(sorted(rows)) == json.dumps(sorted(set(rows))), "each port has one row"
