"""Commands of Apache's mqadmin for topics, groups, offsets and messages, with Apache's broker and with ours.

Each side runs one list of commands in one JVM, both at the same time, while a consumer of ours is online at both
brokers. Addresses, ids, times and positions in the log are replaced before outputs are compared.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from rmqkit.filter import subscription
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, reply, request
from rmqkit.protocol.schemas.clients import (
    ConsumerData,
    ConsumerRunningInfo,
    HeartbeatData,
    MessageQueue,
    ProcessQueueInfo,
)
from rmqkit.protocol.schemas.offsets import UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.send import SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.mqadmin import named_outputs
from tests.interop.standalone import run_standalone
from tests.patience import TIMEOUT_MS

TOPIC, MESSAGES, ORDERED = "BrokerAdmin", "BrokerAdminMessages", "BrokerAdminOrdered"
GROUP, TWIN, ONLINE = "broker_admin", "broker_admin_twin", "broker_admin_online"
CLIENT_ID = "192.0.2.1@broker-admin"
UNIQUE_KEY = "7F0000010001234518B4AAC210FB0000"  # the end is the number of the message
MESSAGE_COUNT = 3
HEARTBEAT_SECONDS = 5

COMMANDS = {
    "create a topic": f"updateTopic -b BROKER -t {TOPIC} -r 4 -w 4",
    "add an attribute": f"updateTopic -b BROKER -t {TOPIC} -r 4 -w 4 -a +message.type=DELAY",
    "add a wrong attribute": f"updateTopic -b BROKER -t {TOPIC} -r 4 -w 4 -a +message.type=X",
    "create a system topic": "updateTopic -b BROKER -t TBW102 -r 4 -w 4",
    "create an ordered topic": f"updateTopic -c {CLUSTER} -t {ORDERED} -r 2 -w 2 -o true",
    "close a topic to producers": f"updateTopicPerm -b BROKER -t {TOPIC} -p 4",
    "route of a closed topic": f"topicRoute -t {TOPIC}",
    "open a topic again": f"updateTopicPerm -b BROKER -t {TOPIC} -p 6",
    "topic status": f"topicStatus -t {MESSAGES}",
    "status of an empty topic": f"topicStatus -t {TOPIC}",
    "create a group": f"updateSubGroup -b BROKER -g {GROUP} -r 3",
    "create another group": f"updateSubGroup -c {CLUSTER} -g {TWIN} -q 2",
    "create an illegal group": "updateSubGroup -b BROKER -g a.b",
    "create a retry topic": f"updateTopic -b BROKER -t %RETRY%{GROUP} -r 1 -w 1",
    "create another retry topic": f"updateTopic -b BROKER -t %RETRY%{TWIN} -r 1 -w 1",
    "group": f"getConsumerConfig -g {GROUP}",
    "query by key": f"queryMsgByKey -t {MESSAGES} -k key-0",
    "query by a missing key": f"queryMsgByKey -t {MESSAGES} -k nothing",
    "query by unique key": f"queryMsgByUniqueKey -t {MESSAGES} -i {UNIQUE_KEY}",
    "query by id": f"queryMsgById -t {MESSAGES} -i {UNIQUE_KEY}",
    "query by offset": f"queryMsgByOffset -t {MESSAGES} -b {BROKER_NAME} -i 0 -o 1",
    "print messages": f"printMsg -t {MESSAGES} -d true",
    "consume messages": f"consumeMessage -t {MESSAGES} -b {BROKER_NAME} -i 0",
    "send a message": f"sendMessage -t {MESSAGES} -p sent -k sent -c tag -b {BROKER_NAME} -i 1",
    "connections": f"consumerConnection -g {ONLINE}",
    "connections of nobody": f"consumerConnection -g {GROUP}",
    "producers of nobody": f"producerConnection -g nobody -t {MESSAGES}",
    "status of a consumer": f"consumerStatus -g {ONLINE} -i {CLIENT_ID}",
    "status of nobody": f"consumerStatus -g {ONLINE} -i nobody",
    "have a consumer handle a message": f"queryMsgById -t {MESSAGES} -i {UNIQUE_KEY} -g {ONLINE} -d {CLIENT_ID}",
    "progress of a group online": f"consumerProgress -g {ONLINE}",
    "reset to the end": f"resetOffsetByTime -g {GROUP} -t {MESSAGES} -s -1",
    "reset by force": f"resetOffsetByTime -g {GROUP} -t {MESSAGES} -s now -f true",
    "reset to the start": f"resetOffsetByTime -g {GROUP} -t {MESSAGES} -s 1",
    "reset one queue": f"resetOffsetByTime -b BROKER -g {GROUP} -t {MESSAGES} -s -1 -q 0 -o 2",
    "reset beyond the end": f"resetOffsetByTime -b BROKER -g {GROUP} -t {MESSAGES} -s -1 -q 0 -o 99",
    "reset a missing group": f"resetOffsetByTime -g broker_admin_nobody -t {MESSAGES} -s -1",
    "reset on a missing topic": f"resetOffsetByTime -g {GROUP} -t Missing -s -1",
    "clone offsets": f"cloneGroupOffset -s {GROUP} -d {TWIN} -t {MESSAGES}",
    "progress": f"consumerProgress -g {GROUP}",
    "progress of the clone": f"consumerProgress -g {TWIN}",
    "skip what is left": f"skipAccumulatedMessage -g {GROUP} -t {MESSAGES}",
    "progress after skipping": f"consumerProgress -g {GROUP}",
    "delete a group": f"deleteSubGroup -b BROKER -g {TWIN} -r true",
    "progress of a deleted group": f"consumerProgress -g {TWIN}",
    "delete a group of a cluster": f"deleteSubGroup -c {CLUSTER} -g {GROUP} -r true",
    "delete a topic": f"deleteTopic -c {CLUSTER} -t {TOPIC}",
    "delete a system topic": f"deleteTopic -c {CLUSTER} -t TBW102",
    "status of a deleted topic": f"topicStatus -t {TOPIC}",
    "route of a deleted topic": f"topicRoute -t {TOPIC}",
}


@dataclass
class Side:
    """One broker, its tool's outputs, and the requests that our consumer got through it."""

    namesrv: str
    broker: str
    work_dir: Path
    outputs: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[int, dict[str, str]]] = field(default_factory=list)

    async def run(self, kit: ApacheKit) -> None:
        client = RemotingClient(self._answers())
        try:
            message_id = await self._prepare(client)
            beating = asyncio.create_task(self._keep_online(client))
            found = await asyncio.to_thread(named_outputs, kit, COMMANDS, self.namesrv, self.broker, self.work_dir)
            beating.cancel()
            self.outputs = {name: text.replace(message_id, "MESSAGE") for name, text in found.items()}
        finally:
            await client.close()

    async def _keep_online(self, client: RemotingClient) -> None:
        """Send heartbeats: brokers forget a client that is silent for two minutes, and on a busy machine the commands
        may take that long.
        """
        while True:
            await self._beat(client)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _beat(self, client: RemotingClient) -> None:
        consumer = ConsumerData(group_name=ONLINE, subscription_data_set=[subscription(MESSAGES, "tag", version=1)])
        beat = msgspec.json.encode(HeartbeatData(clientID=CLIENT_ID, consumerDataSet=[consumer]))
        await self._ask(client, Command(RequestCode.HEART_BEAT, body=beat))

    def _answers(self) -> Router:
        queue = MessageQueue(MESSAGES, BROKER_NAME, 0)
        properties = {"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY", "PROP_CONSUMER_START_TIMESTAMP": "1700000000000"}
        info = ConsumerRunningInfo(properties=properties, mq_table={queue: ProcessQueueInfo(commit_offset=1)})
        bodies = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: fastjson.dumps(info),
            RequestCode.CONSUME_MESSAGE_DIRECTLY: b'{"consumeResult":"CR_SUCCESS","order":false,"autoCommit":true}',
        }

        def answer(connection: Connection, command: Command) -> Command:
            self.asked.append((command.code, decode_fields(command)))
            return reply(command, body=bodies[RequestCode(command.code)])

        dispatch = Router()
        dispatch.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, lambda connection, command: None)
        for code in bodies:
            dispatch.register(code, answer)
        return dispatch

    async def _prepare(self, client: RemotingClient) -> str:
        """Send messages, set an offset of a connected group, and create routes to both. Return the id of the first
        message.
        """
        message_id = ""
        for number in range(MESSAGE_COUNT):
            keys = {"UNIQ_KEY": f"{UNIQUE_KEY[:-1]}{number}", "KEYS": f"key-{number}", "TAGS": "tag"}
            header = SendMessageV2Request(
                producer_group="p",
                topic=MESSAGES,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1_700_000_000_000,
                flag=0,
                properties="".join(f"{name}\x01{value}\x02" for name, value in keys.items()),
            )
            sent = await self._ask(client, request(RequestCode.SEND_MESSAGE_V2, header, b"hello"))
            message_id = message_id or decode_header(sent, SendMessageResponse).msg_id
        await self._beat(client)
        offset = UpdateConsumerOffsetRequest(ONLINE, MESSAGES, 0, 2)
        await self._ask(client, request(RequestCode.UPDATE_CONSUMER_OFFSET, offset))
        for topic in (MESSAGES, f"%RETRY%{ONLINE}"):
            command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest(topic))
            while (await client.call(self.namesrv, command, TIMEOUT_MS)).code != ResponseCode.SUCCESS:
                await asyncio.sleep(0.01)
        return message_id

    async def _ask(self, client: RemotingClient, command: Command) -> Command:
        answer = await client.call(self.broker, command, TIMEOUT_MS)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return answer


@pytest.fixture(scope="module")
def sides(
    apache: ApachePair, apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Side, Side]]:
    """Return Apache's side and ours, after all commands."""
    ours = tmp_path_factory.mktemp("ours")
    config = ours / "broker.conf"
    config.write_text(f"brokerClusterName={CLUSTER}\nbrokerName={BROKER_NAME}\n")
    with run_standalone(ours / "store", ours, "-c", str(config)) as running:
        both = (
            Side(apache.namesrv_addr, apache.broker_addr, tmp_path_factory.mktemp("theirs")),
            Side(running.namesrv_addr, running.broker_addr, ours),
        )

        async def run() -> None:
            await asyncio.wait_for(asyncio.gather(*(side.run(apache_kit) for side in both)), 1000)

        asyncio.run(run())
        yield both


def comparable(text: str) -> str:
    """Return a text without addresses, ids, times and positions in the log, with one blank between columns."""
    for pattern, word in (
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"\b([0-9A-F]{32}|[0-9A-F]{56})\b", "ID"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "WHEN"),
        (r"\b\d{13}\b", "MS"),
        (r"(CommitLog Offset: +|commitLogOffset=|@)\d+", r"\1PLACE"),
        (r"[ \t]+", " "),
    ):
        text = re.sub(pattern, word, text)
    return text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_is_the_same(sides: tuple[Side, Side], name: str) -> None:
    theirs, ours = sides
    assert comparable(ours.outputs[name]) == comparable(theirs.outputs[name]) != ""


def test_the_consumer_was_asked_the_same(sides: tuple[Side, Side]) -> None:
    theirs, ours = sides

    def asked(side: Side) -> set[tuple[int, tuple[tuple[str, str], ...]]]:
        return {(code, tuple(sorted(fields.items()))) for code, fields in side.asked}

    def without_ids(side: Side) -> set[tuple[int, str]]:
        return {(code, comparable(str(fields))) for code, fields in asked(side)}

    assert without_ids(ours) == without_ids(theirs)
    assert {code for code, _ in asked(ours)} == {307, 309}


def test_the_outputs_show_what_was_done(sides: tuple[Side, Side]) -> None:
    """The comparison would also hold if both sides failed."""
    _, ours = sides
    succeeded = {
        "create a topic": "create topic to BROKER success.",
        "create an ordered topic": "isOrder=true",
        "close a topic to producers": "from 6 to 4 in BROKER success",
        "create a group": "create subscription group to BROKER success.",
        "query by key": UNIQUE_KEY,
        "query by unique key": f"Topic: {MESSAGES}",
        "query by id": f"Topic: {MESSAGES}",
        "query by offset": "Queue Offset: 1",
        "consume messages": "hello",
        "send a message": "SEND_OK",
        "connections": CLIENT_ID,
        "reset one queue": "reset consumer offset to 2",
        "status of a consumer": "PROP_CONSUME_TYPE : CONSUME_PASSIVELY",
        "have a consumer handle a message": "CR_SUCCESS",
        "clone offsets": "clone group offset success",
        "progress": "Consume Diff Total: 2",
        "progress after skipping": "Consume Diff Total: 0",
        "delete a group": "success",
        "delete a topic": f"delete topic [{TOPIC}] from cluster [{CLUSTER}] success.",
    }
    shown = {name: re.sub(r"[ \t]+", " ", ours.outputs[name]) for name in succeeded}
    assert {name: text for name, text in shown.items() if succeeded[name] not in text} == {}
