"""A broker over its socket: the reference's checks, codes and remarks.

Source: behaviour.md §3.1, §4.1, §5.2; remoting.md §4.3.
"""

from __future__ import annotations

import asyncio
import json
import os
import time

import msgspec
import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.filter.subscription import subscription
from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.bodies.clients import ConsumerData, HeartbeatData, ProducerData
from rmqkit.protocol.bodies.topics import TopicRoute
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, decode_header, request
from rmqkit.protocol.fastjson import decode_as, loads
from rmqkit.protocol.headers.clients import ConsumerGroupRequest, UnregisterClientRequest, ViewMessageRequest
from rmqkit.protocol.headers.offsets import (
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from rmqkit.protocol.headers.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.headers.send import SendMessageRequest, SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.headers.topics import CreateTopicRequest, TopicRequest
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.dispatch import Dispatch
from rmqkit.standalone import Standalone
from rmqkit.store.settings import FlushDiskType, StoreSettings

ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. msg body length limit 4194304B, "
    "msg properties length limit 32KB."
)
FAQ = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."


class Cluster:
    """A standalone and one client connection to it."""

    def __init__(self, root, **settings):
        broker = BrokerSettings(
            listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", **settings.pop("broker", {})
        )
        store = StoreSettings(**{"commit_log_file_bytes": 1 << 20, **settings.pop("store", {})})
        self.standalone = Standalone(root, broker=broker, store=store)
        self.notices: list[str] = []
        self.client = self.new_client()

    def new_client(self):
        dispatch = Dispatch()
        dispatch.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self.notified)
        return RemotingClient(dispatch)

    def notified(self, connection, command):
        self.notices.append(decode_header(command, ConsumerGroupRequest).consumer_group)

    async def call(self, code, header=None, body=b"", client=None):
        return await (client or self.client).call(self.standalone.broker_address, request(code, header, body), 10_000)

    async def send(self, topic="T", body=b"hello", properties="", code=RequestCode.SEND_MESSAGE_V2, **fields):
        header_type = SendMessageRequest if code == RequestCode.SEND_MESSAGE else SendMessageV2Request
        header = header_type(
            producer_group="p",
            topic=topic,
            default_topic=fields.pop("default_topic", "TBW102"),
            default_topic_queue_nums=fields.pop("queues", 4),
            queue_id=fields.pop("queue_id", 0),
            sys_flag=0,
            born_timestamp=1_700_000_000_000,
            flag=fields.pop("flag", 0),
            properties=properties,
            **fields,
        )
        return await self.call(code, header, body)

    async def pull(self, offset=0, topic="T", queue_id=0, expression="*", flags=PullFlag.SUBSCRIPTION, **fields):
        client = fields.pop("client", None)
        header = PullMessageRequest(
            consumer_group=fields.pop("group", "g"),
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            max_msg_nums=fields.pop("count", 32),
            sys_flag=flags,
            commit_offset=fields.pop("commit", 0),
            suspend_timeout_millis=fields.pop("suspend_ms", 15_000),
            sub_version=fields.pop("version", 0),
            subscription=expression,
            **fields,
        )
        return await self.call(RequestCode.PULL_MESSAGE, header, client=client)

    async def heartbeat(self, client_id, *topics, client=None, group="g", version=1, **fields):
        subscriptions = [subscription(t, e, version=version) for t, e in topics]
        data = HeartbeatData(
            clientID=client_id,
            consumerDataSet=[ConsumerData(group_name=group, subscription_data_set=subscriptions, **fields)],
            producerDataSet=[ProducerData("p")],
        )
        return await self.call(RequestCode.HEART_BEAT, body=msgspec.json.encode(data), client=client)

    async def number(self, code, header):
        return int(decode_fields(await self.call(code, header)).get("offset", -99))

    async def __aenter__(self):
        await self.standalone.start()
        return self

    async def __aexit__(self, *exc_info):
        await self.client.close()
        await self.standalone.stop()


@pytest.fixture
def run(tmp_path):
    def runner(scenario, **settings):
        async def main():
            async with Cluster(tmp_path / "store", **settings) as cluster:
                await scenario(cluster)

        asyncio.run(main())

    return runner


# -- send


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
def test_a_message_is_stored_and_read_back_with_what_the_broker_adds(run, code):
    async def scenario(cluster):
        sent = await cluster.send(properties="TAGS\x01A\x02UNIQ_KEY\x01ABC", code=code, flag=7)
        header = decode_header(sent, SendMessageResponse)
        assert (sent.code, header.queue_id, header.queue_offset, header.transaction_id) == (0, 0, 0, "ABC")
        fields = decode_fields(sent)
        assert (fields["MSG_REGION"], fields["TRACE_ON"]) == ("DefaultRegion", "true")
        ip, port, offset = decode_offset_id(header.msg_id)
        assert (f"{ip}:{port}", offset) == (cluster.standalone.broker_address, 0)

        pulled = await cluster.pull()
        assert (pulled.code, pulled.remark) == (ResponseCode.SUCCESS, "FOUND")
        assert decode_header(pulled, PullMessageResponse) == PullMessageResponse(0, 1, 0, 1, 0, 0)
        (message,) = read_messages(pulled.body)
        assert (message.body, message.flag, message.msg_id, message.offset_msg_id) == (
            b"hello",
            7,
            "ABC",
            header.msg_id,
        )
        assert message.properties == {
            "TAGS": "A",
            "UNIQ_KEY": "ABC",
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
            "CLUSTER": "DefaultCluster",
        }
        assert message.born_timestamp == 1_700_000_000_000
        assert message.born_host.startswith("127.0.0.1:")

    run(scenario)


def test_a_missing_unique_key_is_made_by_the_broker(run):
    async def scenario(cluster):
        made = decode_header(await cluster.send(), SendMessageResponse).transaction_id
        (message,) = read_messages((await cluster.pull()).body)
        assert message.properties["UNIQ_KEY"] == made == message.msg_id
        assert len(made) == 32

    run(scenario)


def test_names_the_broker_stamps_are_replaced_not_doubled(run):
    async def scenario(cluster):
        await cluster.send(properties="CLUSTER\x01other\x02POP_CK\x01x\x02a\x01\x02UNIQ_KEY\x01K\x02b\x01c\x02")
        (message,) = read_messages((await cluster.pull()).body)
        assert message.properties == {
            "UNIQ_KEY": "K",
            "b": "c",
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
            "CLUSTER": "DefaultCluster",
        }

    run(scenario)


def test_a_batch_is_stored_as_consecutive_messages_with_their_own_properties(run):
    async def scenario(cluster):
        await cluster.send()
        entries = [BatchEntry(b"m%d" % i, b"TAGS\x01%c\x02UNIQ_KEY\x01K%d\x02" % (65 + i, i)) for i in range(3)]
        batch = encode_batch(entries)
        sent = await cluster.send(
            body=batch, code=RequestCode.SEND_BATCH_MESSAGE, batch=True, properties="UNIQ_KEY\x01B\x02"
        )
        header = decode_header(sent, SendMessageResponse)
        assert (sent.code, header.queue_offset, header.transaction_id) == (0, 1, "B")
        messages = read_messages((await cluster.pull(1)).body)
        assert [m.body for m in messages] == [b"m0", b"m1", b"m2"]
        assert [m.queue_offset for m in messages] == [1, 2, 3]
        assert [m.properties for m in messages] == [{"TAGS": t, "UNIQ_KEY": f"K{i}"} for i, t in enumerate("ABC")]
        assert header.msg_id.split(",") == [m.offset_msg_id for m in messages]

    run(scenario)


@pytest.mark.parametrize(
    ("send", "code", "remark"),
    [
        (
            {"topic": "a b"},
            ResponseCode.INVALID_PARAMETER,
            "The specified topic: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        ),
        (
            {"topic": "x" * 128},
            ResponseCode.INVALID_PARAMETER,
            f"The specified topic: {'x' * 128}, is longer than topic max length: 127",
        ),
        (
            {"topic": "SCHEDULE_TOPIC_XXXX"},
            ResponseCode.NO_PERMISSION,
            "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden.",
        ),
        (
            {"default_topic": "nothing"},
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic[T] not exist, apply first please!{FAQ}",
        ),
        (
            {"body": bytes((4 << 20) + 1)},
            ResponseCode.MESSAGE_ILLEGAL,
            ILLEGAL,
        ),
        (
            {"properties": "a\x01" + "b" * 32767},
            ResponseCode.MESSAGE_ILLEGAL,
            ILLEGAL,
        ),
        (
            {"properties": "TRAN_MSG\x01true\x02"},
            ResponseCode.NO_PERMISSION,
            "the broker[127.0.0.1] sending transaction message is forbidden",
        ),
        (
            {"properties": "TIMER_DELAY_SEC\x015\x02"},
            ResponseCode.SYSTEM_ERROR,
            "accurate timer message is not enabled, timerWheelEnable is false",
        ),
        (
            {"properties": "DELAY\x013\x02"},
            ResponseCode.SYSTEM_ERROR,
            "delay levels are not supported by this broker: send the message without property DELAY",
        ),
        (
            {"topic": "%RETRY%g", "code": RequestCode.SEND_BATCH_MESSAGE},
            ResponseCode.MESSAGE_ILLEGAL,
            "batch request does not support retry group %RETRY%g",
        ),
    ],
)
def test_refused_sends(run, send, code, remark):
    async def scenario(cluster):
        answer = await cluster.send(**send)
        assert (answer.code, answer.remark) == (code, remark)
        assert decode_fields(answer) == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}

    run(scenario, store={"commit_log_file_bytes": 16 << 20} if "body" in send else {})


def test_a_queue_beyond_the_topic_s_is_refused(run):
    async def scenario(cluster):
        await cluster.send()
        answer = await cluster.send(queue_id=4)
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert answer.remark.startswith(
            "request queueId[4] is illegal, TopicConfig [topicName=T, readQueueNums=4, writeQueueNums=4, perm=RW-, "
            "topicFilterType=SINGLE_TAG, topicSysFlag=0, order=false, attributes={}] Producer: 127.0.0.1:"
        )
        anywhere = decode_header(await cluster.send(queue_id=-1), SendMessageResponse)
        assert 0 <= anywhere.queue_id < 4

    run(scenario)


def test_without_auto_creation_a_topic_has_to_be_made(run):
    async def scenario(cluster):
        answer = await cluster.send()
        assert (answer.code, answer.remark) == (17, f"topic[T] not exist, apply first please!{FAQ}")
        header = CreateTopicRequest("T", "TBW102", 2, 2, 6, "SINGLE_TAG")
        assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
        assert (await cluster.send()).code == 0

    run(scenario, broker={"auto_create_topic": False})


def test_a_one_way_send_is_stored_and_not_answered(run):
    async def scenario(cluster):
        await cluster.send()
        header = SendMessageV2Request("p", "T", "TBW102", 4, 0, 0, 1, 0)
        command = request(RequestCode.SEND_MESSAGE_V2, header, b"quiet", one_way=True)
        await cluster.client.send_one_way(cluster.standalone.broker_address, command, 1000)
        pulled = await cluster.pull(1, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)
        assert [m.body for m in read_messages(pulled.body)] == [b"quiet"]

    run(scenario)


def test_a_retried_message_beyond_the_limit_goes_to_the_dead_letters(run):
    async def scenario(cluster):
        await cluster.heartbeat("c1", ("T", "*"))
        again = await cluster.send("%RETRY%g", reconsume_times=2, max_reconsume_times=2)
        given_up = await cluster.send("%RETRY%g", reconsume_times=3, max_reconsume_times=2, body=b"dead")
        assert (again.code, given_up.code) == (0, 0)
        assert [m.reconsume_times for m in read_messages((await cluster.pull(topic="%RETRY%g")).body)] == [2]
        assert [m.body for m in read_messages((await cluster.pull(topic="%DLQ%g")).body)] == [b"dead"]

    run(scenario)


def test_under_sync_flush_the_answer_means_that_it_is_on_disk(run):
    async def scenario(cluster):
        answers = await asyncio.gather(*(cluster.send(body=b"%d" % i) for i in range(50)))
        assert {answer.code for answer in answers} == {0}
        store = cluster.standalone._broker._parts.store
        assert store.durable_offset == store.max_physical_offset > 50 * 91

    run(scenario, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH})


def test_a_full_disk_refuses_sends_until_the_next_round_finds_room(run, monkeypatch):
    free_blocks = 9
    monkeypatch.setattr("rmqkit.broker.server._FIRST_RETENTION_SECONDS", 0.01)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, 100, *[free_blocks] * 2, 0, 0, 0, 0, 255)))

    async def answer_with(cluster, code):
        async with asyncio.timeout(20):
            while (answer := await cluster.send()).code != code:
                await asyncio.sleep(0.01)
        return answer

    async def scenario(cluster):
        nonlocal free_blocks
        answer = await answer_with(cluster, ResponseCode.SERVICE_NOT_AVAILABLE)
        assert "disk full, CL: 0.91 CQ: 0.91 INDEX: 0.91" in answer.remark
        free_blocks = 61
        assert (await answer_with(cluster, ResponseCode.SUCCESS)).remark is None

    run(scenario, store={"clean_resource_interval_ms": 100})


# -- pull


def test_offsets_outside_the_queue_are_moved(run):
    async def scenario(cluster):
        await cluster.send()
        for offset, code, remark, following in [
            (1, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 1),
            (8, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 1),
        ]:
            answer = await cluster.pull(offset)
            assert (answer.code, answer.remark) == (code, remark)
            assert decode_header(answer, PullMessageResponse).next_begin_offset == following
        empty = await cluster.pull(queue_id=1)
        assert (empty.code, empty.remark) == (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")
        empty = await cluster.pull(5, queue_id=1)
        assert (empty.code, empty.remark) == (ResponseCode.PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE")

    run(scenario)


def test_a_tag_expression_filters(run):
    async def scenario(cluster):
        for tag in "ABCAB":
            await cluster.send(properties=f"TAGS\x01{tag}\x02")
        assert [m.tags for m in read_messages((await cluster.pull(expression="A || C")).body)] == ["A", "C", "A"]
        nothing = await cluster.pull(expression="Z")
        assert (nothing.code, nothing.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
        assert decode_header(nothing, PullMessageResponse).next_begin_offset == 5

    run(scenario)


def test_a_held_pull_is_answered_by_the_message_it_waits_for(run):
    async def scenario(cluster):
        await cluster.send()
        waiting = asyncio.ensure_future(
            cluster.pull(1, expression="B", flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=60_000)
        )
        while not len(cluster.standalone._broker._parts.long_polling):
            await asyncio.sleep(0)
        await cluster.send(properties="TAGS\x01A\x02")
        assert not waiting.done()
        await cluster.send(properties="TAGS\x01B\x02", body=b"for me")
        assert [m.body for m in read_messages((await waiting).body)] == [b"for me"]

    run(scenario)


def test_a_held_pull_ends_when_its_time_is_up(run):
    async def scenario(cluster):
        await cluster.send()
        answer = await cluster.pull(1, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=50)
        assert (answer.code, decode_header(answer, PullMessageResponse).next_begin_offset) == (19, 1)

    run(scenario)


def test_a_pull_whose_client_is_gone_is_not_held_on(run):
    async def scenario(cluster):
        await cluster.send()
        other = cluster.new_client()
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        waiting = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=60_000, client=other))
        held = cluster.standalone._broker._parts.long_polling
        while not len(held):
            await asyncio.sleep(0)
        await other.close()
        await asyncio.gather(waiting, return_exceptions=True)
        while len(held):
            await asyncio.sleep(0)

    run(scenario)


@pytest.mark.parametrize(
    ("pull", "code", "remark"),
    [
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST, f"topic[none] not exist, apply first please!{FAQ}"),
        (
            {"queue_id": 4},
            ResponseCode.INVALID_PARAMETER,
            "queueId[4] is illegal, topic:[T] topicConfig.readQueueNums:[4] consumer:[127.0.0.1:",
        ),
        ({"queue_id": -1}, ResponseCode.INVALID_PARAMETER, "queueId[-1] is illegal"),
        (
            {"group": "a b"},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            "subscription group [a b] does not exist, ",
        ),
        ({"flags": 0}, ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist"),
        (
            {"expression": "||"},
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            "parse the consumer's subscription failed",
        ),
        (
            {"expression_type": "SQL92"},
            ResponseCode.SYSTEM_ERROR,
            "The broker does not support consumer to filter message by SQL92",
        ),
    ],
)
def test_refused_pulls(run, pull, code, remark):
    async def scenario(cluster):
        await cluster.send()
        answer = await cluster.pull(**pull)
        assert answer.code == code
        assert answer.remark.startswith(remark)
        decode_header(answer, PullMessageResponse)

    run(scenario)


def test_registered_subscriptions_filter_and_have_to_be_the_newest(run):
    async def scenario(cluster):
        for tag in "AB":
            await cluster.send(properties=f"TAGS\x01{tag}\x02")
        await cluster.heartbeat("c1", ("T", "B"), version=5)
        assert [m.tags for m in read_messages((await cluster.pull(flags=0, version=5)).body)] == ["B"]
        for pull, code in [
            ({"version": 6}, ResponseCode.SUBSCRIPTION_NOT_LATEST),
            ({"topic": "%RETRY%g"}, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ]:
            assert (await cluster.pull(flags=0, **pull)).code == code

    run(scenario)


def test_a_pull_commits_the_offset_it_carries(run):
    async def scenario(cluster):
        await cluster.send()
        await cluster.pull(flags=PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET, commit=1)
        assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest("g", "T", 0)) == 1

    run(scenario)


# -- offsets


def test_committed_offsets_survive_a_restart(tmp_path):
    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            await cluster.send()
            await cluster.pull()
            for offset in (5, 3):  # a smaller one is accepted
                update = UpdateConsumerOffsetRequest("g", "T", 0, offset)
                assert (await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, update)).code == 0

    async def second():
        async with Cluster(tmp_path / "store") as cluster:
            query = QueryConsumerOffsetRequest("g", "T", 0)
            assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, query) == 3
            assert [m.body for m in read_messages((await cluster.pull()).body)] == [b"hello"]

    asyncio.run(first())
    asyncio.run(second())
    stored = loads((tmp_path / "store/config/consumerOffset.json").read_bytes())
    assert stored["offsetTable"] == {"T@g": {"0": 3}}
    assert stored["groupTopicMap"] == {"g": ["T"]}


def test_without_a_committed_offset_the_rule_of_the_first_message_holds(run):
    async def scenario(cluster):
        await cluster.send()
        for queue_id, zero, code in [(0, None, 0), (1, None, 22), (0, False, 22)]:
            header = QueryConsumerOffsetRequest("new", "T", queue_id, zero)
            assert (await cluster.call(RequestCode.QUERY_CONSUMER_OFFSET, header)).code == code

    run(scenario)


@pytest.mark.parametrize(
    ("header", "code", "remark"),
    [
        (UpdateConsumerOffsetRequest("nobody", "T", 0, 1), 26, "Group nobody not exist!"),
        (UpdateConsumerOffsetRequest("g", "none", 0, 1), 17, "Topic none not exist!"),
        (UpdateConsumerOffsetRequest("g", "T", None, 1), 29, "QueueId is null, topic is T"),
        (UpdateConsumerOffsetRequest("g", "T", 0), 29, "Offset is null, topic is T"),
    ],
)
def test_refused_commits(run, header, code, remark):
    async def scenario(cluster):
        await cluster.send()
        await cluster.pull()
        answer = await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        assert (answer.code, answer.remark) == (code, remark)

    run(scenario)


def test_bounds_and_times_of_a_queue(run):
    async def scenario(cluster):
        before = int(time.time() * 1000)
        for _ in range(3):
            await cluster.send()
        queue = QueueRequest("T", 0)
        assert await cluster.number(RequestCode.GET_MAX_OFFSET, queue) == 3
        assert await cluster.number(RequestCode.GET_MIN_OFFSET, queue) == 0
        assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("none", 0)) == 0
        search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        assert await cluster.number(search, SearchOffsetRequest("T", 0, before - 1)) == 0
        assert await cluster.number(search, SearchOffsetRequest("T", 0, before + 3_600_000)) == 3
        assert await cluster.number(search, SearchOffsetRequest("T", 0, before + 3_600_000, "upper")) == 2
        times = [await cluster.call(RequestCode.GET_EARLIEST_MSG_STORETIME, QueueRequest("T", q)) for q in (0, 1)]
        earliest, none = (int(decode_fields(answer)["timestamp"]) for answer in times)
        assert before <= earliest <= before + 60_000
        assert none == -1

    run(scenario)


def test_a_message_is_viewed_by_its_place(run):
    async def scenario(cluster):
        header = decode_header(await cluster.send(), SendMessageResponse)
        offset = decode_offset_id(header.msg_id)[2]
        answer = await cluster.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset))
        assert [m.offset_msg_id for m in read_messages(answer.body)] == [header.msg_id]
        missing = await cluster.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(999_999))
        assert (missing.code, missing.remark) == (1, "can not find message by the offset, 999999")

    run(scenario)


# -- clients and topics


def test_members_of_a_group_are_listed_and_told_of_changes(run):
    async def scenario(cluster):
        beat = await cluster.heartbeat("c1", ("T", "*"))
        assert decode_fields(beat) == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "false"}
        other = cluster.new_client()
        await cluster.heartbeat("c2", ("T", "*"), client=other)
        answer = await cluster.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))
        assert sorted(json.loads(answer.body)["consumerIdList"]) == ["c1", "c2"]
        while len(cluster.notices) < 3:  # c1 on its own, then c1 and c2
            await asyncio.sleep(0)
        await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c2", None, "g"), client=other)
        while len(cluster.notices) < 4:
            await asyncio.sleep(0)
        await other.close()
        assert set(cluster.notices) == {"g"}
        await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1", "p", "g"))
        answer = await cluster.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))
        assert (answer.code, answer.remark) == (1, "no consumer for this group, g")

    run(scenario)


def test_a_closed_connection_leaves_its_groups(run):
    async def scenario(cluster):
        other = cluster.new_client()
        await cluster.heartbeat("c1", ("T", "*"), client=other)
        await other.close()
        while (await cluster.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))).code == 0:
            await asyncio.sleep(0)

    run(scenario)


def test_a_heartbeat_makes_the_retry_topic_and_the_name_server_knows_it(run):
    async def scenario(cluster):
        await cluster.heartbeat("c1", ("T", "*"))
        while True:
            answer = await cluster.client.call(
                cluster.standalone.namesrv_address,
                request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("%RETRY%g")),
                5000,
            )
            if answer.code == 0:
                break
        (queues,) = decode_as(answer.body, TopicRoute).queue_datas
        assert (queues.broker_name, queues.read_queue_nums, queues.perm) == ("broker-a", 1, 6)

    run(scenario)


@pytest.mark.parametrize(
    ("header", "code", "remark"),
    [
        (
            CreateTopicRequest("TBW102", "", 1, 1, 6, "SINGLE_TAG"),
            29,
            "The topic[TBW102] is conflict with system topic.",
        ),
        (CreateTopicRequest("", "", 1, 1, 6, "SINGLE_TAG"), 29, "The specified topic is blank."),
        (
            CreateTopicRequest("T", "", 1, 1, 6, "SINGLE_TAG", attributes="+message.type=MIXED"),
            29,
            "MIXED message type is not supported.",
        ),
        (CreateTopicRequest("T", "", 1, 1, 6, "SINGLE_TAG", attributes="+a=b"), 1, "unsupported key: a"),
        (CreateTopicRequest("T", "", 1, 1, 6, "SINGLE_TAG", attributes="+message.type=X"), 1, "value is not in set: X"),
    ],
)
def test_refused_topics(run, header, code, remark):
    async def scenario(cluster):
        answer = await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        assert (answer.code, answer.remark) == (code, remark)

    run(scenario)


def test_a_topic_is_changed_and_keeps_its_attributes(run, tmp_path):
    async def scenario(cluster):
        for attributes, queues in (("+message.type=DELAY", 2), ("", 3)):
            header = CreateTopicRequest("T", "TBW102", queues, queues, 6, "SINGLE_TAG", attributes=attributes)
            assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
        stored = json.loads((tmp_path / "store/config/topics.json").read_text())["topicConfigTable"]["T"]
        assert (stored["readQueueNums"], stored["attributes"]) == (3, {"message.type": "DELAY"})

    run(scenario)


def test_an_unknown_request_is_not_supported(run):
    async def scenario(cluster):
        answer = await cluster.call(4711)
        assert (answer.code, answer.remark) == (3, " request type 4711 not supported")

    run(scenario)


def test_a_request_without_its_fields_names_the_first_missing_one(run):
    async def scenario(cluster):
        answer = await cluster.call(RequestCode.PULL_MESSAGE)
        assert (answer.code, "consumerGroup" in answer.remark) == (1, True)

    run(scenario)


def test_a_pull_beyond_those_that_may_wait_is_refused_as_busy(run, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.long_polling.HELD_MAX", 1)

    async def scenario(cluster):
        await cluster.send()
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        waiting = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=60_000))
        held = cluster.standalone._broker._parts.long_polling
        while not held.is_full:
            await asyncio.sleep(0)
        refused = await cluster.pull(1, flags=flags)
        assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
        await cluster.send()
        assert (await waiting).code == 0
        assert not held.is_full

    run(scenario)


def test_a_send_beyond_those_that_may_wait_for_the_disk_is_refused_as_busy(run, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.durability.WAITING_MAX", 0)

    async def scenario(cluster):
        refused = await cluster.send()
        assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
        assert (await cluster.pull()).code == ResponseCode.TOPIC_NOT_EXIST

    run(scenario, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH})
