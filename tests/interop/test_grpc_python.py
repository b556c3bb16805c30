"""Apache's Python SDK for gRPC at our endpoint: every type of message, retries, dead letters, recall, check-back.

The program `python_sdk/client.py` runs in an environment of its own, made once from ``requirements/sdk.txt``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from rmqkit.admin import Admin
from tests.interop.apache import HOST, ApachePair
from tests.interop.go_and_node import prepare_python_sdk, told
from tests.interop.kit import Unavailable
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ

CONF = "transactionTimeOut=1000\ntransactionCheckInterval=2000\n"
TOPICS = {"normal": "NORMAL", "fifo": "FIFO", "delay": "DELAY", "transaction": "TRANSACTION", "failing": "NORMAL"}


@pytest.fixture(scope="module", params=["broker", "proxy"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What the program tells: of the endpoint inside our broker, and of `rmq proxy` in front of Apache's broker."""
    try:
        sdk = prepare_python_sdk()
    except Unavailable as reason:
        pytest.skip(str(reason))
    home = tmp_path_factory.mktemp("sdk")
    with ExitStack() as stack:
        if request.param == "broker":
            config = home / "broker.conf"
            config.write_text(CONF)
            ports = ("--namesrv-port", "0", "--port", "0", "--set", "grpcServerPort=0")
            command = [RMQ, "standalone", *ports, "--store", home / "store", "-c", config]
            ready = r"^ready namesrv=(?P<names>\S+) broker=(?P<broker>\S+) grpc=(?P<grpc>\S+) store="
        else:
            apache: ApachePair = request.getfixturevalue("apache")
            stack.enter_context(recalls(apache))
            command = [RMQ, "proxy", "-n", apache.namesrv_addr, "--port", "0", "--host", HOST]
            ready = r"^ready grpc=(?P<grpc>\S+)"
        process = stack.enter_context(ServerProcess(command, home / "server.log"))
        at = process.wait_ready(ready, READY_SECONDS).groupdict()
        if request.param == "proxy":
            at |= {"names": apache.namesrv_addr, "broker": apache.broker_addr}
        asyncio.run(make(at["names"], at["broker"]))
        yield told(sdk.start(home, at["grpc"]))


@contextmanager
def recalls(apache: ApachePair) -> Iterator[None]:
    """Apache's broker with recall, which is off as it is shipped."""
    asyncio.run(set_recall(apache, "true"))
    yield
    asyncio.run(set_recall(apache, "false"))


async def set_recall(apache: ApachePair, value: str) -> None:
    async with Admin(apache.namesrv_addr) as admin:
        await admin.brokers.update_config({"recallMessageEnable": value}, apache.broker_addr)


async def make(name_server: str, broker: str) -> None:
    """The topics and groups of the program."""
    async with Admin(name_server) as admin:
        for topic, kind in TOPICS.items():
            await admin.topics.create(topic, broker=broker, attributes=f"+message.type={kind}")
        await admin.groups.update("G-fifo", {"consume_message_orderly": True}, broker)
        await admin.groups.update("G-failing", {"retry_max_times": 1}, broker)


def test_a_plain_message_comes_as_it_was_sent(outcome):
    assert outcome["normal"] == ["hello", "a", ["k1"], {"x": "y"}, 1, True]
    assert outcome["changed"] == ["changed", 1, 2]


def test_a_group_in_order(outcome):
    assert outcome["fifo"] == [[f"f{number}", 1, "g"] for number in range(5)]
    assert outcome["order"]


def test_delays_transactions_and_recall(outcome):
    assert outcome["pushed"] == ["checked", "commit", "due", "past"]
    assert outcome["recalled"]
    assert outcome["asked"] == ["checked"]


def test_retries_and_dead_letters(outcome):
    attempts = [["fails", 1, ""], ["fails", 2, ""], ["fails once", 1, ""], ["fails once", 2, ""]]
    assert outcome["failing"] == attempts
    assert outcome["dead"] == ["fails"]


def test_a_message_of_another_type_is_refused(outcome):
    assert "40014" in outcome["refused"] or "not match" in outcome["refused"], outcome["refused"]
