"""`rmq proxy`: one endpoint in front of several brokers. Source: grpc.md §11."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.errors import SettingsError
from rmqkit.metrics import ExporterType
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.proxy.server.server import Proxy, ProxySettings
from rmqkit.proxy.service.endpoint import Endpoint
from rmqkit.remoting.address import AdminAddresses, split_address
from rmqkit.store.settings import StoreSettings
from tests.proxy.calling import ADDRESSES, METHODS, Caller, message, receive_request, remote_backend
from tests.proxy.test_grpc_server import METADATA, Stubs, born_host_behind_a_balancer, servers

OK = 20000
NAMES = ("broker-a", "broker-b")


@asynccontextmanager
async def cluster(root):
    """A name server, two brokers with a topic of two queues each, and a client of an endpoint in front of them."""
    async with asyncio.timeout(1000):
        namesrv = NameServer(NamesrvSettings(listen_port=0, bind_address="127.0.0.1", kv_config_path=f"{root}/kv.json"))
        await namesrv.start()
        brokers = [
            Broker(
                BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name=name, namesrv_addr=namesrv.address),
                StoreSettings(commit_log_file_bytes=1 << 20),
                root / name,
            )
            for name in NAMES
        ]
        for broker in brokers:
            await broker.start()
            broker.context.topics.ensure("T", 2)
            await broker.context.topics_published()
        clock = brokers[0].context.clock
        backend = remote_backend(namesrv.address, clock)
        endpoint = Endpoint(backend, clock, port=8081)
        try:
            caller = Caller(endpoint, brokers[0].context)
            caller.brokers, caller.namesrv_address = brokers, namesrv.address
            yield caller
        finally:
            await backend.close()
            for broker in brokers:
                await broker.stop()
            await namesrv.stop()


@pytest.fixture
async def caller(tmp_path):
    async with cluster(tmp_path) as it:
        yield it


async def test_a_route_has_the_queues_of_all_brokers(caller):
    answer = await caller.ask("QueryRoute", topic={"name": "T"}, endpoints=ADDRESSES)
    assert sorted((queue.broker.name, queue.id) for queue in answer.message_queues) == [
        (name, number) for name in NAMES for number in range(2)
    ]
    assert {queue.broker.endpoints.addresses[0].host for queue in answer.message_queues} == {"10.0.0.9"}
    group = {"topic": {"name": "T"}, "group": {"name": "G"}, "endpoints": ADDRESSES}
    told = await caller.ask("QueryAssignment", **group)
    assert sorted((one.message_queue.broker.name, one.message_queue.id) for one in told.assignments) == [
        (name, -1) for name in NAMES
    ]


async def test_sends_take_turns_and_receives_name_their_broker(caller):
    for number in range(8):
        assert (await caller.send(message_id=f"ID{number}")).status.code == OK
    ends = [[broker.context.store.bounds("T", queue_id)[1] for queue_id in range(2)] for broker in caller.brokers]
    assert ends == [[2, 2], [2, 2]]
    found = []
    for name in NAMES:
        status, messages = await caller.receive(broker=name)
        assert status.code == OK
        assert {one.system_properties.receipt_handle.split(" ")[5] for one in messages} == {name}
        for one in messages:
            found.append(one.system_properties.message_id)
            answer = await caller.ack(one.system_properties.receipt_handle, message_id=found[-1])
            assert answer.status.code == OK
    assert sorted(found) == [f"ID{number}" for number in range(8)]


async def test_a_broker_that_is_gone_is_reported(caller):
    await caller.send()
    await caller.send()
    await caller.brokers[1].stop()
    codes = {(await caller.send(message_id=f"ID{number}")).status.code for number in range(4)}
    assert codes == {OK, 50400}


async def test_a_handle_of_nobodys_broker(caller):
    answer = await caller.ack("0 1 2 3 0 nobody 0 0 0")
    assert (answer.status.code, answer.entries[0].status.message) == (40013, "cannot find broker nobody")


@pytest.mark.real_time
async def test_a_proxy_has_a_port_of_its_own(tmp_path):
    async with servers(tmp_path, grpc_port=-1) as running:
        running.broker.context.topics.ensure("T", 1)
        await running.broker.context.topics_published()
        settings = ProxySettings(
            namesrv_addr=running.namesrv_address, grpc_port=0, remoting_port=-1, bind_address="127.0.0.1"
        )
        async with Proxy(settings) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
            request = METHODS["SendMessage"].request(messages=[message()])
            assert (await Stubs(channel).SendMessage(request, metadata=METADATA)).status.code == OK


@pytest.mark.real_time
async def test_who_a_balancer_names_is_the_peer_of_a_proxy(tmp_path):
    async with servers(tmp_path, grpc_port=-1) as running:
        running.broker.context.topics.ensure("T", 1)
        await running.broker.context.topics_published()
        at = {"namesrv_addr": running.namesrv_address, "grpc_port": 0, "remoting_port": -1, "bind_address": "127.0.0.1"}
        async with Proxy(ProxySettings(**at, proxy_addresses=AdminAddresses("loopback"))) as proxy:
            assert await born_host_behind_a_balancer(proxy.address) == "203.0.113.9:4321"


async def test_a_proxy_needs_a_name_server():
    with pytest.raises(SettingsError, match="a proxy needs a name server: set namesrvAddr or -n"):
        await Proxy(ProxySettings(grpc_port=0)).start()


@pytest.mark.real_time
async def test_a_proxy_reports_prometheus_what_it_answers(tmp_path):
    async with servers(tmp_path, grpc_port=-1) as running:
        running.broker.context.topics.ensure("T", 1)
        await running.broker.context.topics_published()
        settings = ProxySettings(
            namesrv_addr=running.namesrv_address,
            grpc_port=0,
            remoting_port=-1,
            bind_address="127.0.0.1",
            exporter_type=ExporterType.PROM,
            exporter_port=0,
        )
        async with Proxy(settings) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
            stubs = Stubs(channel)
            stream = stubs.Telemetry(metadata=METADATA)
            await stream.write(METHODS["Telemetry"].request(settings={"client_type": 1, "publishing": {}}))
            await stream.read()
            for topic in ("T", "X"):
                request = METHODS["SendMessage"].request(messages=[message(topic)])
                await stubs.SendMessage(request, metadata=METADATA)
            assert [item async for item in stubs.ReceiveMessage(receive_request("T"), metadata=METADATA, timeout=30)]
            reader, writer = await asyncio.open_connection(*split_address(proxy.metrics_address))
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            text = (await reader.read()).decode()
            writer.close()
    own = f'node_id="{proxy.address}",node_type="proxy"'
    wanted = {
        f'rocketmq_proxy_up{{{own},proxy_mode="cluster"}} 1.0',
        f"rmqkit_proxy_clients{{{own}}} 1.0",
        f"rmqkit_proxy_streams{{{own}}} 1.0",
        f"rmqkit_proxy_calls{{{own}}} 0.0",
        f"rmqkit_proxy_held_messages{{{own}}} 0.0",
        *(
            f'rmqkit_proxy_answers_total{{code="{code}",method="{method}",{own}}} 1.0'
            for method, code in (
                ("SendMessage", "OK"),
                ("SendMessage", "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"),
                ("ReceiveMessage", "OK"),
            )
        ),
    }
    assert wanted <= set(text.splitlines()), text


async def test_receives_that_name_no_broker_take_turns_among_those_that_are_read(caller):
    for number in range(8):
        await caller.send(message_id=f"ID{number}")
    found = [(await caller.receive(broker=""))[1] for _ in NAMES]
    brokers = [{one.system_properties.receipt_handle.split(" ")[5] for one in messages} for messages in found]
    assert sorted(map(sorted, brokers)) == [["broker-a"], ["broker-b"]]
    assert sum(map(len, found)) == 8


async def test_what_one_proxy_delivered_another_takes_back(caller):
    """The second proxy needs only the handle, so the end of the first one stops nothing but its renewals."""
    for number in range(4):
        await caller.send(message_id=f"ID{number}")
    found = (await caller.receive(broker="broker-a", batch_size=1))[1][0]
    clock = caller.brokers[0].context.clock
    backend = remote_backend(caller.namesrv_address, clock)
    other = Caller(Endpoint(backend, clock, port=8081), caller.context)
    try:
        changed = await other.change(found.system_properties.receipt_handle, 20)
        assert changed.status.code == OK
        assert (await other.ack(changed.receipt_handle)).status.code == OK
        await asyncio.sleep(60)
        left = (await other.receive(broker="broker-a", invisible=600))[1]
        assert found.system_properties.message_id not in {one.system_properties.message_id for one in left}
        assert len(left) == 1
    finally:
        await backend.close()
