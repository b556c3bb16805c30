"""Name servers and brokers of both makers work together, and a name server may stop and restart.

Java clients work with both mixtures. Brokers register with every name server again and again, so a name server that
restarts empty is complete after one registration interval. Meanwhile clients use the others.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmqkit import Message, Producer, PullConsumer
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import loads
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.client import RemotingClient
from tests.interop import standalone
from tests.interop.apache import (
    BROKER_NAME,
    CLUSTER,
    ask,
    run_apache_broker,
    run_apache_name_server,
)
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit
from tests.interop.probe import ProbeRun, run_probe
from tests.interop.server_process import ServerProcess, wait_until
from tests.interop.standalone import run_name_server
from tests.patience import producing, pulling
from tests.ports import free_port

COUNT = 200
INNER = {"accessKey": "inner", "secretKey": "inner-secret"}
READY_SECONDS = 150
STOP_SECONDS = 150
REGISTER_INTERVAL_SECONDS = 10
"""The shortest allowed interval (`registerNameServerPeriod=10000`)."""
MARGIN_SECONDS = 120


@contextmanager
def run_broker(work_dir: Path, name_servers: str) -> Iterator[tuple[ServerProcess, str]]:
    """Run our broker and yield its process and address. It must stop cleanly."""
    conf = {
        "brokerName": "broker-rmqkit",
        "listenPort": 0,
        "registerNameServerPeriod": REGISTER_INTERVAL_SECONDS * 1000,
    }
    with standalone.run_broker(work_dir / "store", work_dir, name_servers, conf) as (process, address):
        yield process, address
        assert process.stop(signal.SIGTERM, STOP_SECONDS) == 0, process.log_tail()


def probe(kit: ApacheKit, namesrv: str, work_dir: Path) -> ProbeRun:
    return run_probe(
        kit,
        "both",
        namesrv=namesrv,
        topic="Mixed",
        count=COUNT,
        consumers={"group-mixed": "*", "group-filtered": "TagA || TagC"},
        work_dir=work_dir,
    )


def route_request(topic: str) -> Command:
    return Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": topic})


def is_known(namesrv: str, topic: str) -> bool:
    try:
        return ask(namesrv, route_request(topic)).code == ResponseCode.SUCCESS
    except OSError:
        return False


def members(namesrv: str) -> dict[str, str]:
    """Return the brokers of the name, by their true ids."""
    fields = {"clusterName": CLUSTER, "brokerName": BROKER_NAME}
    answer = ask(namesrv, Command(RequestCode.GET_BROKER_MEMBER_GROUP, fields=fields))
    group: dict[str, str] = loads(answer.payload)["brokerMemberGroup"]["brokerAddrs"]
    return group


def queues_and_addresses(namesrv: str) -> tuple[list[int], list[dict[str, str]]]:
    """Return permissions and broker addresses in the route of a topic that every broker has."""
    route = loads(ask(namesrv, route_request("BenchmarkTest")).payload)
    return [queue["perm"] for queue in route["queueDatas"]], [broker["brokerAddrs"] for broker in route["brokerDatas"]]


def check(run: ProbeRun) -> None:
    assert run.exit_code == 0, run.outcome
    received = run.received_by("group-mixed")
    assert len(run.sent) == len(received) >= COUNT
    assert {message.msg_id for message in received} == {message.msg_id for message in run.sent}


def test_apache_s_broker_and_clients_use_our_name_server(apache_kit: ApacheKit, tmp_path: Path) -> None:
    with (
        run_name_server(tmp_path) as (_, namesrv),
        run_apache_broker(apache_kit, tmp_path / "store", tmp_path, namesrv) as (broker, broker_addr),
    ):
        check(probe(apache_kit, namesrv, tmp_path))
        members = ask(namesrv, Command(RequestCode.GET_BROKER_CLUSTER_INFO)).payload
        assert f'0:"{broker_addr}"'.encode() in members
        broker.kill()
        wait_until(lambda: not is_known(namesrv, "Mixed"), MARGIN_SECONDS, "end of the killed broker's routes")


@pytest.mark.parametrize("version", ["5.4.0", "4.9.4"])
def test_apache_s_broker_may_compress_its_registration(version: str, tmp_path: Path) -> None:
    kit, compressed = kit_or_skip(version), {"compressedRegister": "true"}
    with (
        run_name_server(tmp_path) as (_, namesrv),
        run_apache_broker(kit, tmp_path / "store", tmp_path, namesrv, compressed) as (_, broker_addr),
    ):
        route = loads(ask(namesrv, route_request("TBW102")).payload)
        assert [broker["brokerAddrs"] for broker in route["brokerDatas"]] == [{"0": broker_addr}]
        assert [(queue["readQueueNums"], queue["perm"]) for queue in route["queueDatas"]] == [(8, 7)]


def test_apache_s_broker_signs_its_registration(tmp_path: Path) -> None:
    """Our name server requires signatures here; a broker that does not sign is refused."""
    inner = f"innerClientAuthenticationCredentials={json.dumps(INNER)}"
    conf = f'authenticationEnabled=true\ninitAuthenticationUser={{"username":"root","password":"secret12"}}\n{inner}\n'
    signs = {
        **dict(line.split("=", 1) for line in conf.splitlines()),
        "authenticationProvider": "org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": (
            "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
        ),
        "authConfigPath": tmp_path / "auth",
        "brokerZoneName": "z",
    }
    inner_user = Credentials(access_key=INNER["accessKey"], secret_key=INNER["secretKey"])
    with (
        run_name_server(tmp_path, conf=conf) as (_, namesrv),
        run_apache_broker(
            kit_or_skip("5.4.0"), tmp_path / "store", tmp_path, namesrv, signs, credentials=inner_user
        ) as (_, broker_addr),
    ):
        assert members(namesrv) == {"0": broker_addr}
        assert asyncio.run(asked_fully(broker_addr, inner_user)) == ResponseCode.SUCCESS
        unsigned = Command(RequestCode.UNREGISTER_BROKER, fields={"brokerName": BROKER_NAME})
        assert ask(namesrv, unsigned).code == ResponseCode.NO_PERMISSION


async def asked_fully(address: str, user: Credentials) -> int:
    """Return a broker's answer to our client, whose signatures cover more fields than Apache's."""
    client = RemotingClient(credentials=user)
    try:
        command = Command(RequestCode.GET_TOPIC_CONFIG, fields={"topic": "TBW102"})
        return (await client.call(address, command, MARGIN_SECONDS * 1000)).code
    finally:
        await client.close()


def test_our_broker_and_apache_s_clients_use_apache_s_name_server(apache_kit: ApacheKit, tmp_path: Path) -> None:
    with (
        run_apache_name_server(apache_kit, tmp_path) as (_, namesrv),
        run_broker(tmp_path, namesrv) as (broker, broker_addr),
    ):
        check(probe(apache_kit, namesrv, tmp_path))
        members = ask(namesrv, Command(RequestCode.GET_BROKER_CLUSTER_INFO)).payload
        assert f'0:"{broker_addr}"'.encode() in members
        assert broker.stop(signal.SIGTERM, STOP_SECONDS) == 0
        wait_until(lambda: not is_known(namesrv, "Mixed"), MARGIN_SECONDS, "end of the stopped broker's routes")


@pytest.mark.faults
def test_apache_s_slave_acts_as_master_at_our_name_server(apache_kit: ApacheKit, tmp_path: Path) -> None:
    acting = {"enableSlaveActingMaster": "true"}
    slave_conf = {**acting, "brokerId": 1, "brokerRole": "SLAVE"}
    folders = {name: tmp_path / name for name in ("master", "slave")}
    for folder in folders.values():
        folder.mkdir()
    with (
        run_name_server(tmp_path, conf="supportActingMaster=true\nnotifyMinBrokerIdChanged=true\n") as (_, namesrv),
        run_apache_broker(apache_kit, tmp_path / "m", folders["master"], namesrv, acting) as (master, master_addr),
        run_apache_broker(apache_kit, tmp_path / "s", folders["slave"], namesrv, slave_conf) as (_, slave_addr),
    ):
        wait_until(lambda: members(namesrv) == {"0": master_addr, "1": slave_addr}, READY_SECONDS, "both in the group")
        assert queues_and_addresses(namesrv) == ([6], [{"0": master_addr, "1": slave_addr}])
        master.kill()
        wait_until(lambda: members(namesrv) == {"1": slave_addr}, MARGIN_SECONDS, "end of the killed master")
        assert queues_and_addresses(namesrv) == ([4], [{"0": slave_addr}]), "the slave is readable without a master"


@pytest.mark.faults
def test_one_of_two_name_servers_may_die_and_come_back(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    with (
        run_name_server(tmp_path, ports[0]) as (first, first_addr),
        run_name_server(tmp_path, ports[1]) as (_, second_addr),
        run_broker(tmp_path, f"{first_addr};{second_addr}"),
    ):
        assert is_known(first_addr, "TBW102")
        assert is_known(second_addr, "TBW102")
        asyncio.run(send_while_one_dies(first, f"{first_addr};{second_addr}"))
        assert is_known(second_addr, "Before")
        assert is_known(second_addr, "After")
        with run_name_server(tmp_path, ports[0]):
            patience_seconds = REGISTER_INTERVAL_SECONDS + MARGIN_SECONDS
            wait_until(lambda: is_known(first_addr, "After"), patience_seconds, f"broker at {first_addr} again")
            assert is_known(first_addr, "Before")
            asyncio.run(read_everything(first_addr))


async def send_while_one_dies(name_server: ServerProcess, name_servers: str) -> None:
    """Use one producer that started before and one that starts later. New topics need a name server for their route."""
    async with Producer("old", name_servers, settings=producing()) as old:
        for _ in range(20):
            await old.send(Message(topic="Before", body=b"before"))
        name_server.kill()
        async with Producer("new", name_servers, settings=producing()) as new:
            for producer in (old, new):
                for topic in ("Before", "After"):
                    await producer.send(Message(topic=topic, body=b"after"))


async def read_everything(name_servers: str) -> None:
    """Check that a client that knows only the restarted name server finds all sent messages."""
    bodies: dict[str, list[bytes]] = {"Before": [], "After": []}
    async with PullConsumer("reader", name_servers, settings=pulling()) as consumer:
        for topic, found in bodies.items():
            for queue in await consumer.queues(topic):
                offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
                while offset < end:
                    result = await consumer.pull(queue, offset)
                    found += [message.body for message in result.messages]
                    offset = result.next_begin_offset
    assert sorted(bodies["Before"]) == [b"after"] * 2 + [b"before"] * 20
    assert bodies["After"] == [b"after"] * 2
