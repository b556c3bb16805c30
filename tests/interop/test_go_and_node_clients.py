"""Apache's Go client and the Node client ali-ons: they report the same results with Apache's servers and with our
plug-in's.

Each program runs once with each server, with every kind of send and consumer of the client (`go/main.go`,
`node/client.js`), and a second time to check the offsets of groups. If a tool or a download is missing, the tests are
skipped, even if Java is required.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rmqkit import Message, sync
from rmqkit.admin import Admin
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from rmqkit.testing import LocalCluster
from rmqkit.testing.clock import VirtualClock
from tests.faults.spark.servers import set_queues
from tests.interop.apache import QUICK_CONF, ask
from tests.interop.go_and_node import Program, prepare_go, prepare_node, told
from tests.interop.kit import Unavailable
from tests.interop.server_process import wait_until
from tests.waiting import SECONDS

GO_SCENARIOS = [
    "admin",
    "broadcast",
    "delayed",
    "filters",
    "orderly",
    "pulled",
    "refused",
    "request",
    "retried",
    "sends",
]
GO_SCENARIOS += ["traced", "transaction"]
NODE_SCENARIOS = ["broadcast", "filters", "retried", "sends"]
LATER = "again"


def prepared(prepare: Callable[[], Program]) -> Program:
    try:
        return prepare()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def go() -> Program:
    return prepared(prepare_go)


@pytest.fixture(scope="module")
def node() -> Program:
    return prepared(prepare_node)


@pytest.fixture(scope="module", params=["apache", "rmqkit"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Return the addresses of a name server and of a broker."""
    if request.param == "apache":
        pair = request.getfixturevalue("apache")
        yield pair.namesrv_addr, pair.broker_addr
        return
    quick = {key: value for key, value in QUICK_CONF.items() if key != "waitTimeMillsInSendQueue"}
    with LocalCluster(settings={**quick, "enablePropertyFilter": "true"}) as cluster:
        yield cluster.name_server, cluster.brokers[0].address


@pytest.fixture(scope="module")
def told_by_go(go: Program, server: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("go")
    return go.run(home, *server, "Go", *GO_SCENARIOS) | go.run(home, *server, "Go", LATER)


@pytest.fixture(scope="module")
def told_by_node(node: Program, server: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("node")
    for name in NODE_SCENARIOS:
        for topic, queue_count in ((f"Node-{name}", 4), (f"%RETRY%Node-{name}", 1)):
            set_queues(server[1], topic, queue_count)
            wait_until(lambda topic=topic: is_known(server[0], topic), SECONDS, f"route of {topic}")
    return node.run(home, *server, "Node", *NODE_SCENARIOS) | node.run(home, *server, "Node", LATER)


def is_known(name_server: str, topic: str) -> bool:
    answer = ask(name_server, Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": topic}))
    return answer.code == ResponseCode.SUCCESS


@pytest.mark.parametrize("scenario", [*GO_SCENARIOS, LATER])
def test_a_go_client_sees_the_same_of_every_server(scenario: str, told_by_go: dict[str, Any], go: Program) -> None:
    assert told_by_go[scenario] == go.outcome[scenario]


@pytest.mark.parametrize("scenario", [*NODE_SCENARIOS, LATER])
def test_a_node_client_sees_the_same_of_every_server(
    scenario: str, told_by_node: dict[str, Any], node: Program
) -> None:
    assert told_by_node[scenario] == node.outcome[scenario]


async def see_offset_and_stacks(name_server: str, group: str) -> None:
    """Wait until the client reports an offset after the message. It also reports its stacks."""
    async with Admin(name_server) as admin, asyncio.timeout(SECONDS):
        while True:
            (told,) = (await admin.clients.running(group, stacks=True)).values()
            assert told is not None
            assert "goroutine" in (told.jstack or "")
            if any(queue.commit_offset == 1 for queue in told.mq_table.values()):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["go", "node"])
def test_the_plugin_sees_what_a_program_in_another_language_consumes(
    kind: str,
    request: pytest.FixtureRequest,
    rmq_broker: LocalCluster,
    rmq_clock: VirtualClock,
    rmq_producer: sync.Producer,
    tmp_path: Path,
) -> None:
    program: Program = request.getfixturevalue(kind)
    rmq_broker.create_topic("Tea")
    rmq_broker.create_topic("%RETRY%Tea", queues=1)
    rmq_producer.send(Message(topic="Tea", body=b"ready", delay_level=18))
    running = program.start(tmp_path, rmq_broker.name_server, rmq_broker.brokers[0].address, "Tea", "stay")
    rmq_clock.advance(hours=2)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    if kind == "go":  # only this client answers operators
        asyncio.run(see_offset_and_stacks(rmq_broker.name_server, "Tea"))
    assert told(running)["stay"] == {"bodies": ["ready"]}
    rmq_broker.assert_consumed("Tea", "Tea", count=1)
    rmq_broker.assert_nothing_pending()
