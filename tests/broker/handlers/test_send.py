"""Sends: the reference's checks, codes and remarks (behaviour.md §3.1, remoting.md §4.3.1)."""

from __future__ import annotations

import asyncio
import os

import pytest

from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, decode_header, request
from rmqkit.protocol.headers.pull import PullFlag, PullMessageResponse
from rmqkit.protocol.headers.send import SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.headers.topics import CreateTopicRequest
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import FAQ, ILLEGAL


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


def test_a_send_beyond_those_that_may_wait_for_the_disk_is_refused_as_busy(run, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.durability.WAITING_MAX", 0)

    async def scenario(cluster):
        refused = await cluster.send()
        assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
        assert (await cluster.pull()).code == ResponseCode.TOPIC_NOT_EXIST

    run(scenario, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH})
