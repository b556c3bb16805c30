"""Commands about groups, offsets, consumers, producers and messages: their output for people and programs."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rmqkit import sync
from rmqkit.admin import Admin
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli import app
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.errors import RmqError, exit_code
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.fastjson import dumps
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import ConsumerConnection, MessageQueue
from rmqkit.protocol.schemas.topics import BrokerData, ClusterInfo
from tests.admin.test_clients import status_when
from tests.admin.things import find_when_indexed, make_topic, send
from tests.cli.answering import body, serving
from tests.client.peers import SECONDS, standalone

TOPIC = "Cli"
OFTEN = PushConsumerSettings(persist_interval_ms=50)
BODIES = (b"text\nof two lines", b"\xff\x00", b"third", b"fourth")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A broker with a topic of two queues, four messages, group ``behind`` at offset 1 of queue 0, group ``online``."""
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")

    async def fill(name_servers):
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            await make_topic(admin, TOPIC, ["broker-a"])
            messages = [Message(topic=TOPIC, body=one, keys=[f"k{n}", "k"]) for n, one in enumerate(BODIES)]
            sent = await send(admin, *messages)
            await find_when_indexed(admin, TOPIC, sent[-1].msg_id)
            await admin.groups.update("behind", {})
            address = await admin.calls.address("broker-a")
            await admin.calls.commit_offset(address, "behind", MessageQueue(TOPIC, "broker-a", 0), 1)
            return sent, address

    async def is_online(name_servers):
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            found = await status_when(admin, "online", lambda found: not found.verdict.troubles)
            while len((await admin.groups.progress("online")).queues) < 3:  # it commits what it passed
                await asyncio.sleep(0.02)
            return next(iter(found.clients))

    with standalone(tmp_path_factory.mktemp("cli"), broker=settings) as name_servers:
        sent, address = asyncio.run(fill(name_servers))
        with sync.PushConsumer("online", name_servers, settings=OFTEN) as consumer:
            consumer.subscribe(TOPIC, "*", lambda message: None)
            client = asyncio.run(is_online(name_servers))
            yield SimpleNamespace(name_servers=name_servers, address=address, sent=sent, client=client)


def rmq(world, *arguments):
    return CliRunner().invoke(app, [*arguments, "-n", world.name_servers], env={"NAMESRV_ADDR": None})


def shown(world, *arguments):
    """Run a command that has to succeed, and return its output for a person."""
    done = rmq(world, *arguments)
    assert done.exit_code == 0, f"{done.output}{done.exception!r}"
    return done.stdout


def lines(world, *arguments):
    """The JSON lines of a command that has to succeed."""
    return [json.loads(line) for line in shown(world, *arguments, "--json").splitlines()]


def test_messages_are_listed_a_line_each(world):
    text = shown(world, "message", "list", TOPIC)
    assert [line.split(" ", 2)[2] for line in text.splitlines()] == [
        f"broker-a:{n % 2} {n // 2} {one.msg_id} keys=k{n} k {seen}"
        for n, (one, seen) in enumerate(
            zip(world.sent, ("text·of two lines", "\\xff·", "third", "fourth"), strict=True)
        )
    ]


def test_messages_are_listed_as_json_lines(world):
    found = lines(world, "message", "list", TOPIC, "-l", "2")
    assert [one["msgId"] for one in found] == [one.msg_id for one in world.sent[:2]]
    assert (found[0]["body"], "body" in found[1]) == ("text\nof two lines", False)
    assert base64.b64decode(found[1]["bodyBase64"]) == BODIES[1]
    assert found[0]["keys"] == ["k0", "k"]


def test_an_empty_queue_has_no_entries_and_is_no_error(world):
    shown(world, "topic", "create", "Silent", "-b", "broker-a", "-r", "2", "-w", "2")
    assert shown(world, "message", "entries", "Silent", "1", "0") == "the queue is empty; its next message gets 0\n\n"
    (body,) = lines(world, "message", "entries", "Silent", "1", "0")
    assert (body["queueData"], body["maxQueueIndex"]) == ([], 0)
    assert "9@Silent is not exist" in str(rmq(world, "message", "entries", "Silent", "9", "0").exception)


def test_an_empty_list_is_reported_and_no_error(world):
    done = rmq(world, "message", "list", TOPIC, "--to", "1")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"rmq: topic {TOPIC} has no matching message\n")


def test_a_message_is_shown_with_its_body(world):
    first, second = world.sent[:2]
    text = shown(world, "message", "show", first.msg_id, TOPIC)
    assert f"offset message id  {first.offset_msg_id}" in text
    assert "body (17 bytes):\ntext\nof two lines\n" in text
    assert "body: 2 bytes that are not UTF-8 text" in shown(world, "message", "show", second.offset_msg_id)
    assert (
        lines(world, "admin", "queryMsgByOffset", "-t", TOPIC, "-b", "broker-a", "-i", "0", "-o", "1")[0]["body"]
        == "third"
    )
    (several,) = lines(world, "message", "by-key", TOPIC, "k")
    assert len(several) == 4


def test_a_client_handles_a_message(world):
    first = world.sent[0]
    for command in (
        ["message", "push", first.offset_msg_id, TOPIC, "online", world.client],
        ["admin", "queryMsgById", "-t", TOPIC, "-i", first.msg_id, "-g", "online", "-d", world.client],
    ):
        assert lines(world, *command)[0]["consumeResult"] == "CR_SUCCESS"


def test_progress_is_a_table_and_a_line(world):
    text = shown(world, "group", "progress", "behind")
    assert text.endswith("0.00 messages/s pulled, 3 behind, 0 in flight\n")
    assert "CONSUMER OFFSET" in text
    (row,) = [row for row in lines(world, "admin", "consumerProgress")[0] if row["group"] == "behind"]
    assert (row["diffTotal"], row["count"], row["consumeType"]) == (3, 0, "")
    assert shown(world, "group", "progress", "online", "-s", "true").count(world.client) == 3


def test_a_group_is_changed_field_by_field(world):
    command = ["admin", "updateSubGroup", "-g", "made", "-s", "false", "-r", "2", "--attributes", "+priority.factor=3"]
    (found,) = lines(world, *command)
    assert found["broker-a"] | {"consumeEnable": False, "retryMaxTimes": 2} == found["broker-a"]
    assert found["broker-a"]["attributes"] == {"priority.factor": "3"}
    assert "retryMaxTimes" in shown(world, "group", "show", "made")
    assert '"made"' in shown(world, "group", "export")
    text = shown(world, "admin", "deleteSubGroup", "-g", "made", "-r", "false")
    assert text == "group made deleted at broker-a, its offsets kept\n"


def test_a_group_is_moved(world):
    shown(world, "group", "create", "moved")
    rows = lines(world, "admin", "resetOffsetByTime", "-g", "moved", "-t", TOPIC, "-s", "-1")[0]
    assert [(row["queueId"], row["offset"]) for row in rows] == [(0, 2), (1, 2)]
    assert [row["offset"] for row in lines(world, "offset", "clone", "behind", "moved", TOPIC)[0]] == [1]
    assert [row["offset"] for row in lines(world, "offset", "skip", "moved", TOPIC)[0]] == [2, 2]
    assert "OFFSET" in shown(world, "offset", "reset", "moved", TOPIC, "2026-01-31#12:00:00:000")


def test_clients_are_shown(world):
    assert world.client in shown(world, "consumer", "connections", "online")
    text = shown(world, "consumer", "status", "online", "-s")
    well = "clients in order: the same subscriptions, no stuck client; to see whether the group keeps up, run: "
    assert text.endswith(f"{well}rmq cluster findings\n")
    assert "thread MainThread" in text
    assert shown(world, "producer", "list") == ""


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        (["group", "show", "behin"], 5, "did you mean behind"),
        (["group", "progress", "nobody"], 5, "has no group nobody"),
        (["group", "delete", "nobody"], 5, "make it with: rmq group create"),
        (["consumer", "status", "behind"], 5, "not online; start one of its consumers"),
        (["producer", "connections", "nobody"], 5, "no producer group nobody"),
        (["message", "list", "Cly"], 5, "did you mean Cli"),
        (["message", "show", "nothing", TOPIC], 5, "no message nothing"),
        (["message", "by-key", TOPIC, "nothing"], 5, "no message with key nothing"),
        (["message", "trace", "nothing"], 5, "has no topic RMQ_SYS_TRACE_TOPIC; no client has traced"),
        (["namesrv", "kv-get", "none", "nothing"], 5, "namespace none has no key nothing"),
        (["topic", "allocate", TOPIC, "-i", ","], 2, "give at least one client"),
        (["offset", "reset", "nobody", TOPIC, "now"], 5, "Group nobody does not exist"),
        (["offset", "reset", "behind", "Cly", "now"], 5, "did you mean Cli"),
        (["message", "list", TOPIC, "--from", "noon"], 2, "time 'noon' must be"),
        (["message", "list", TOPIC, "--tags", "||"], 2, "contains no tag"),
        (["message", "show", "x", "--kind", "both"], 2, "must be offset or key"),
        (["message", "show", "nothing", TOPIC, "-g", "online"], 5, "no message"),
        (["message", "at", TOPIC, "broker-a", "x", "0"], 2, "queue x must be a number"),
        (["offset", "reset", "behind", TOPIC, "now", "-q", "1"], 2, "a queue needs its broker"),
        (["group", "mode", "behind", TOPIC, "PUSH"], 2, "must be PULL or POP"),
        (["group", "create", "x", "-p", "{"], 2, "retry policy {"),
        (["group", "create", "x", "--attributes", "a=b"], 2, "must be +name=value to set it"),
        (["group", "create", "x", "-s", "maybe"], 2, "maybe"),
    ],
)
def test_what_is_wrong_is_one_line_with_an_exit_code(world, command, code, expected):
    done = rmq(world, *command)
    if isinstance(done.exception, RmqError):
        assert (exit_code(done.exception), str(done.exception).count("\n")) == (code, 0)
        told = str(done.exception)
    else:
        assert done.exit_code == code, repr(done.exception)
        told = " ".join(done.output.replace("│", " ").split())
    assert expected in told


def test_one_queue_is_not_reset_where_clients_would_reset_all(world):
    def cluster(address):
        return dumps(ClusterInfo({"b": BrokerData("C", "b", {0: address})}, {"C": ["b"]}))

    answers = {
        RequestCode.GET_BROKER_CLUSTER_INFO: body(cluster),
        RequestCode.GET_BROKER_CONFIG: body(b"useServerSideResetOffset=false\n"),
        RequestCode.GET_CONSUMER_CONNECTION_LIST: body(dumps(ConsumerConnection())),
    }
    with serving(answers) as address:
        done = rmq(SimpleNamespace(name_servers=address), "offset", "reset", "g", TOPIC, "now", "-b", "b", "-q", "1")
    assert "stop the clients of group g first" in str(done.exception)
