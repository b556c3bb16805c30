"""The table of clients stays small if a client invents ids, and no other client is locked out."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.proxy.service import clients as module
from tests.proxy.calling import ADDRESSES, METHODS, Call, served


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "PASSING_OF_ORIGIN_MAX", 8)
    monkeypatch.setattr(module, "HOLDING_OF_ORIGIN_MAX", 4)
    monkeypatch.setattr(module, "CLIENTS_MAX", 20)


@pytest.fixture
async def caller(tmp_path):
    async with served(tmp_path) as it:
        it.topic()
        it.at = lambda client_id, host: at(it, client_id, host)
        yield it


def at(caller, client_id, host):
    """Call QueryRoute from an address, and return the code."""

    async def ask():
        call = Call({"x-mq-client-id": client_id}, None)
        call.peername = (host, 50_000)
        method = METHODS["QueryRoute"]
        answer = await caller.endpoint.unary(method, call, method.request(topic={"name": "T"}, endpoints=ADDRESSES))
        return answer.status.code

    return ask()


async def test_invented_ids_push_out_each_other_and_nobody_else(caller):
    await caller.consumer("T", "G")
    assert await caller.at("quiet", "10.0.0.8") == 20000
    for number in range(100):
        assert await caller.at(f"invented-{number}", "10.6.6.6") == 20000
    clients = caller.endpoint.clients
    assert len(clients) == 2 + 8
    assert clients.find("c1").settings is not None and clients.find("quiet") is not None
    assert clients.find("invented-99") is not None and clients.find("invented-91") is None
    assert await caller.at("new", "10.0.0.9") == 20000
    assert await caller.at("invented-0", "10.6.6.6") == 20000, "a forgotten client is known again"


async def test_the_client_that_called_last_is_forgotten_last(caller):
    for number in range(8):
        await caller.at(f"a{number}", "10.0.0.1")
    await caller.at("a0", "10.0.0.1")
    await caller.at("a8", "10.0.0.1")
    find = caller.endpoint.clients.find
    assert find("a0") is not None and find("a1") is None


async def test_clients_with_calls_under_way_are_not_forgotten(caller):
    for number in range(8):
        await caller.at(f"a{number}", "10.0.0.1")
        caller.endpoint.clients.find(f"a{number}").calls = 1
    assert await caller.at("a8", "10.0.0.1") == 42900
    assert await caller.at("b", "10.0.0.2") == 20000, "another address is not affected"
    caller.endpoint.clients.find("a3").calls = 0
    assert await caller.at("a8", "10.0.0.1") == 20000
    assert caller.endpoint.clients.find("a3") is None
    for client in caller.endpoint.clients:
        client.calls = 0


async def test_a_full_table_forgets_of_the_address_with_most_clients(caller):
    for number in range(8):
        await caller.at(f"a{number}", "10.0.0.1")
    for number in range(6):
        await caller.at(f"b{number}", "10.0.0.2")
        await caller.at(f"c{number}", f"10.0.1.{number}")
    assert len(caller.endpoint.clients) == 20
    assert await caller.at("d", "10.0.0.4") == 20000
    assert len(caller.endpoint.clients) == 20
    assert caller.endpoint.clients.find("a0") is None


async def test_registered_clients_of_one_address_are_bounded_and_leave_room(caller):
    several = [caller.other(f"p{number}") for number in range(6)]
    codes = []
    for one in several[:4]:
        await one.producer("T")
    for one in several[4:]:
        answer = await one.ask("Heartbeat", group={"name": "G"}, client_type=3)
        codes.append((answer.status.code, answer.status.message))
    text = "flow limit: 4 clients of address 10.0.0.7 are registered"
    assert codes == [(42900, text)] * 2
    assert (await several[0].ask("NotifyClientTermination")).status.code == 20000
    assert (await several[4].ask("Heartbeat", group={"name": "G"}, client_type=3)).status.code == 20000
    assert caller.endpoint.clients.holding == {("address", "10.0.0.7"): 4}


async def test_silent_clients_leave_no_row_behind(caller):
    for number in range(4):
        await caller.other(f"p{number}").producer("T")
        await caller.at(f"a{number}", "10.0.0.1")
    for _ in range(50):
        await asyncio.sleep(0)
    clients = caller.endpoint.clients
    for client in clients:
        client.seen_ms, client.stream = -1e9, None
    clients.drop_silent()
    assert len(clients) == 0 and not clients.passing and not clients.holding
