"""Sends: the reference's checks, codes and remarks (behaviour.md §3.1, remoting.md §4.3.1)."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, request
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import BatchEntry, decode_record, encode_batch
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageResponse
from rmqkit.protocol.schemas.send import SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.schemas.topics import CreateTopicRequest, TopicConfig
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import FAQ, ILLEGAL, Cluster
from tests.waiting import SECONDS

BATCH = encode_batch([BatchEntry(b"one", b"UNIQ_KEY\x01K1\x02"), BatchEntry(b"two", b"UNIQ_KEY\x01K2\x02")])

TOO_FAR = (
    "timer message illegal, the delay time should not be bigger than the max delay 259200000ms; "
    "or if set del msg, the delay time should be bigger than the current time"
)


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
async def test_a_message_is_stored_and_read_back_with_what_the_broker_adds(code, cluster):
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


async def test_a_missing_unique_key_is_made_by_the_broker(cluster):
    made = decode_header(await cluster.send(), SendMessageResponse).transaction_id
    (message,) = read_messages((await cluster.pull()).body)
    assert message.properties["UNIQ_KEY"] == made == message.msg_id
    assert len(made) == 32


async def test_names_the_broker_stamps_are_replaced_not_doubled(cluster):
    await cluster.send(properties="CLUSTER\x01other\x02POP_CK\x01x\x02a\x01\x02UNIQ_KEY\x01K\x02b\x01c\x02")
    (message,) = read_messages((await cluster.pull()).body)
    assert message.properties == {
        "UNIQ_KEY": "K",
        "b": "c",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }


async def test_a_batch_is_stored_as_consecutive_messages_with_their_own_properties(cluster):
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
            {"properties": "TIMER_DELAY_SEC\x01260000\x02"},
            ResponseCode.MESSAGE_ILLEGAL,
            TOO_FAR,
        ),
        (
            {"topic": "%RETRY%g", "code": RequestCode.SEND_BATCH_MESSAGE, "batch": True},
            ResponseCode.MESSAGE_ILLEGAL,
            "batch request does not support retry group %RETRY%g",
        ),
        (
            {"topic": "%RETRY%" + "x" * 121, "code": RequestCode.SEND_BATCH_MESSAGE, "batch": True},
            ResponseCode.MESSAGE_ILLEGAL,
            "message topic length too long 128",
        ),
        (
            {"topic": "x" * 128, "code": RequestCode.SEND_BATCH_MESSAGE, "batch": True},
            ResponseCode.INVALID_PARAMETER,
            f"The specified topic: {'x' * 128}, is longer than topic max length: 127",
        ),
        ({"body": BATCH, "batch": True, "properties": "DELAY\x011\x02"}, ResponseCode.MESSAGE_ILLEGAL, ILLEGAL),
        ({"body": BATCH, "batch": True, "sys_flag": 4}, ResponseCode.MESSAGE_ILLEGAL, ILLEGAL),
        ({"body": BATCH[:-1], "batch": True}, ResponseCode.MESSAGE_ILLEGAL, ILLEGAL),
        (
            {"topic": "%RETRY%a b"},
            ResponseCode.INVALID_PARAMETER,
            "The specified topic: %RETRY%a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        ),
        (
            {"topic": "%RETRY%" + "g" * 121},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group not exist, {'g' * 121} {FAQ}",
        ),
    ],
)
async def test_refused_sends(send, code, remark, tmp_path):
    async with Cluster(
        tmp_path / "store", store={"commit_log_file_bytes": 16 << 20} if "body" in send else {}
    ) as cluster:
        answer = await cluster.send(**send)
        assert (answer.code, answer.remark) == (code, remark)
        assert decode_fields(answer) == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


@pytest.mark.parametrize(
    ("send", "remark"),
    [
        ({"body": b""}, "the message has no body"),
        ({"body": b"", "batch": True}, "the message has no body"),
        ({"properties": "DELAY\x01x\x02"}, 'HeaderError: property DELAY is not a number: "x"'),
        ({"properties": "DELAY\x0199999999999\x02"}, 'HeaderError: property DELAY is not a number: "99999999999"'),
    ],
)
async def test_what_ends_in_an_exception_at_the_reference_is_answered_without_fields(send, remark, cluster):
    answer = await cluster.send(**send)
    assert (answer.code, answer.remark, decode_fields(answer)) == (ResponseCode.SYSTEM_ERROR, remark, {})
    assert (await cluster.send()).code == 0


async def test_which_fields_of_a_header_may_be_missing_or_unreadable(cluster):
    long = {"producerGroup": "p", "topic": "T", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4", "queueId": "0"}
    long |= {"sysFlag": "0", "bornTimestamp": "1", "flag": "0", "reconsumeTimes": "0", "unitMode": "false"}
    short = dict(zip("abcdefghjk", long.values(), strict=True))

    async def codes(cluster, code, fields, wrong):
        """Return the codes of sends with one field that is missing, wrong, or out of bounds."""
        changed = [{k: v for k, v in fields.items() if k != name} for name in fields]
        changed += [fields | {name: value} for name in wrong for value in ("x", "", "9" * 20)]
        return [
            (
                await cluster.client.call(
                    cluster.standalone.broker_address, Command(code, fields=one, body=b"x"), 60_000
                )
            ).code
            for one in changed
        ]

    await cluster.send()
    numbers = ["defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag", "reconsumeTimes", "unitMode"]
    missing = [0, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    wrong = [0, 0, 0, *[1] * 12, *[0] * 6]
    assert await codes(cluster, RequestCode.SEND_MESSAGE, long, numbers) == missing + wrong
    wrong = [*[1] * 18, 0, 0, 0]
    assert await codes(cluster, RequestCode.SEND_MESSAGE_V2, short, "defghjk") == missing + wrong


async def test_a_broker_that_takes_no_sends_yet_says_until_when(tmp_path):
    until_ms = 4_102_444_800_123

    async with Cluster(tmp_path / "store", broker={"accept_sends_from_ms": until_ms}) as cluster:
        answer = await cluster.send()
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until_ms // 1000))
        assert (answer.code, answer.remark) == (1, f"broker unable to service, until {until},123")


async def test_a_read_only_broker_refuses_sends_to_ordered_topics_only(tmp_path):
    async with Cluster(tmp_path / "store", broker={"broker_permission": 4}) as cluster:
        topics = cluster.standalone.broker.context.topics
        topics.put(TopicConfig("Ordered", 1, 1, 6, order=True))
        answer = await cluster.send("Ordered")
        assert (answer.code, answer.remark) == (16, "the broker[127.0.0.1] sending message is forbidden")
        assert (await cluster.send("T")).code == 0


async def test_a_compacted_topic_needs_keys(cluster):
    topic = TopicConfig(topic_name="C", attributes={"cleanup.policy": "COMPACTION"})
    cluster.standalone.broker.context.topics.put(topic)  # as in a store of Apache's: no request creates such a topic
    for properties in ("", "KEYS\x01  \x02"):
        answer = await cluster.send("C", properties=properties)
        assert (answer.code, answer.remark) == (13, "Required message key is missing")
    assert (await cluster.send("C", properties="KEYS\x01k\x02")).code == 0
    (message,) = read_messages((await cluster.pull(topic="C")).body)
    assert message.keys == ["k"]


async def test_messages_of_a_multi_tag_topic_are_marked(cluster):
    header = CreateTopicRequest("M", "TBW102", 1, 1, 6, "MULTI_TAG")
    assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
    await cluster.send("M")
    (message,) = read_messages((await cluster.pull(topic="M")).body)
    assert message.sys_flag == 2


async def test_an_inner_batch_is_stored_as_one_record_and_its_answer_names_its_key(cluster):
    header = CreateTopicRequest("I", "TBW102", 1, 1, 6, "SINGLE_TAG", attributes="+queue.type=BatchCQ")
    assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
    sent = await cluster.send("I", BATCH, "UNIQ_KEY\x01B\x02", RequestCode.SEND_BATCH_MESSAGE, batch=True)
    answer = decode_header(sent, SendMessageResponse)
    assert (sent.code, answer.batch_uniq_id, answer.transaction_id, answer.queue_offset) == (0, "B", "B", 0)
    assert "," not in answer.msg_id
    store = cluster.standalone.broker.context.store
    assert store.max_offset("I", 0) == 2
    record = decode_record(store.log.record_at(decode_offset_id(answer.msg_id)[2]))
    assert decode_properties(record.properties).keys() == {
        *("UNIQ_KEY", "MSG_REGION", "TRACE_ON", "CLUSTER", "INNER_NUM", "INNER_BASE")
    }


async def test_whether_a_body_is_a_batch_is_said_by_the_header(cluster):
    await cluster.send(body=BATCH, code=RequestCode.SEND_BATCH_MESSAGE)
    await cluster.send(body=BATCH, code=RequestCode.SEND_MESSAGE, batch=True)
    assert [m.body for m in read_messages((await cluster.pull()).body)] == [BATCH, b"one", b"two"]


async def test_a_delayed_message_is_answered_with_its_own_queue_and_comes_when_it_is_due(cluster):
    sent = await cluster.send(properties="DELAY\x011\x02TIMER_DELAY_SEC\x0190\x02UNIQ_KEY\x01K\x02", queue_id=2)
    answer = decode_header(sent, SendMessageResponse)
    assert (sent.code, answer.queue_id, answer.queue_offset, answer.transaction_id) == (0, 2, 0, "K")
    store = cluster.standalone.broker.context.store
    stored = decode_record(store.log.record_at(decode_offset_id(answer.msg_id)[2]))
    assert (stored.topic, stored.queue_id) == ("SCHEDULE_TOPIC_XXXX", 0)
    pulled = await cluster.pull(queue_id=2, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)
    (message,) = read_messages(pulled.body)
    assert message.store_timestamp - stored.store_timestamp >= 1000
    assert message.properties == {
        "DELAY": "1",
        "REAL_TOPIC": "T",
        "REAL_QID": "2",
        "UNIQ_KEY": "K",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }


@pytest.mark.parametrize(
    ("properties", "fields"),
    [
        ("DELAY\x010\x02", {}),
        ("DELAY\x01-3\x02", {}),
        ("TIMER_DELAY_SEC\x015\x02TIMER_OUT_MS\x011\x02", {}),
    ],
)
async def test_what_requests_no_delay_comes_at_once(properties, fields, cluster):
    assert (await cluster.send(properties=properties, **fields)).code == 0
    assert len(read_messages((await cluster.pull()).body)) == 1


async def test_a_queue_beyond_the_topic_s_is_refused(tmp_path):
    async with Cluster(tmp_path / "store") as cluster:
        await cluster.send()
        answer = await cluster.send(queue_id=4)
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert answer.remark.startswith(
            "request queueId[4] is illegal, TopicConfig [topicName=T, readQueueNums=4, writeQueueNums=4, perm=RW-, "
            "topicFilterType=SINGLE_TAG, topicSysFlag=0, order=false, attributes={}] Producer: 127.0.0.1:"
        )
        anywhere = decode_header(await cluster.send(queue_id=-1), SendMessageResponse)
        assert 0 <= anywhere.queue_id < 4


async def test_without_auto_creation_a_topic_has_to_be_made(tmp_path):
    async with Cluster(tmp_path / "store", broker={"auto_create_topic": False}) as cluster:
        answer = await cluster.send()
        assert (answer.code, answer.remark) == (17, f"topic[T] not exist, apply first please!{FAQ}")
        header = CreateTopicRequest("T", "TBW102", 2, 2, 6, "SINGLE_TAG")
        assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
        assert (await cluster.send()).code == 0


async def test_a_one_way_send_is_stored_and_not_answered(cluster):
    await cluster.send()
    header = SendMessageV2Request("p", "T", "TBW102", 4, 0, 0, 1, 0)
    command = request(RequestCode.SEND_MESSAGE_V2, header, b"quiet", one_way=True)
    await cluster.client.send_one_way(cluster.standalone.broker_address, command, 60_000)
    pulled = await cluster.pull(1, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)
    assert [m.body for m in read_messages(pulled.body)] == [b"quiet"]


async def test_a_retried_message_beyond_the_limit_goes_to_the_dead_letters(cluster):
    await cluster.heartbeat("c1", ("T", "*"))
    again = await cluster.send("%RETRY%g", reconsume_times=2, max_reconsume_times=2)
    given_up = await cluster.send("%RETRY%g", reconsume_times=3, max_reconsume_times=2, body=b"dead")
    assert (again.code, given_up.code) == (0, 0)
    assert [m.reconsume_times for m in read_messages((await cluster.pull(topic="%RETRY%g")).body)] == [2]
    assert [m.body for m in read_messages((await cluster.pull(topic="%DLQ%g")).body)] == [b"dead"]


async def test_a_retried_message_of_a_group_that_consumes_in_order_goes_to_the_dead_letters(cluster):
    await cluster.heartbeat("c1", ("T", "*"))
    locks = cluster.standalone.broker.context.queue_locks
    locks.lock("g", "c1", [MessageQueue("T", "broker-a", 0)])
    assert (await cluster.send("%RETRY%g", properties="DELAY\x013\x02", body=b"locked")).code == 0
    (message,) = read_messages((await cluster.pull(topic="%DLQ%g")).body)
    assert (message.body, message.properties["DELAY"]) == (b"locked", "-1")
    locks.unlock("g", "c1", [MessageQueue("T", "broker-a", 0)])
    assert (await cluster.send("%RETRY%g", body=b"free")).code == 0
    assert [m.body for m in read_messages((await cluster.pull(topic="%RETRY%g")).body)] == [b"free"]


async def test_an_old_client_s_limit_of_retries_is_not_requested(cluster):
    await cluster.heartbeat("c1", ("T", "*"))
    header = SendMessageV2Request("p", "%RETRY%g", "TBW102", 1, 0, 0, 1, 0, reconsume_times=3, max_reconsume_times=1)
    old = request(RequestCode.SEND_MESSAGE_V2, header, b"x")
    old.version = 120
    assert (await cluster.client.call(cluster.standalone.broker_address, old, 60_000)).code == 0
    assert len(read_messages((await cluster.pull(topic="%RETRY%g")).body)) == 1


async def test_under_sync_flush_the_answer_means_that_it_is_on_disk(tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster:
        answers = await asyncio.gather(*(cluster.send(body=b"%d" % i) for i in range(50)))
        assert {answer.code for answer in answers} == {0}
        store = cluster.standalone.broker.context.store
        assert store.durable_offset == store.max_physical_offset > 50 * 91


async def test_a_full_disk_refuses_sends_until_the_next_round_finds_room(tmp_path, monkeypatch):
    free_blocks, block = 9, 1 << 20  # a start on a tmpfs needs a MiB
    monkeypatch.setattr("rmqkit.broker.server._FIRST_RETENTION_SECONDS", 0.01)

    def space(path):
        return os.statvfs_result((block, block, 100, free_blocks, free_blocks, 0, 0, 0, 0, 255))

    monkeypatch.setattr("rmqkit.system.disk.space", space)

    async def answer_with(cluster, code):
        async with asyncio.timeout(SECONDS):
            while (answer := await cluster.send()).code != code:
                await asyncio.sleep(0.01)
        return answer

    async with Cluster(tmp_path / "store", store={"clean_resource_interval_ms": 100}) as cluster:
        answer = await answer_with(cluster, ResponseCode.SERVICE_NOT_AVAILABLE)
        assert "disk full, CL: 0.91 CQ: 0.91 INDEX: 0.91" in answer.remark
        free_blocks = 61
        assert (await answer_with(cluster, ResponseCode.SUCCESS)).remark is None


async def test_a_send_beyond_those_that_may_wait_for_the_disk_is_refused_as_busy(monkeypatch, tmp_path):
    monkeypatch.setattr("rmqkit.broker.durability.WAITING_MAX", 0)

    async with Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster:
        refused = await cluster.send()
        assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
        assert (await cluster.pull()).code == ResponseCode.TOPIC_NOT_EXIST


async def test_with_the_transient_pool_a_held_pull_is_answered_by_the_commit(tmp_path):
    async with Cluster(tmp_path / "store", store={"transient_store_pool": True, "commit_interval_ms": 20}) as cluster:
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        assert (await cluster.send(body=b"1")).code == 0
        answers = [await cluster.pull(0, flags=flags, suspend_ms=20_000)]
        held = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=20_000))
        assert (await cluster.send(body=b"2")).code == 0
        answers.append(await held)
        assert [message.body for answer in answers for message in read_messages(answer.body)] == [b"1", b"2"]


async def test_without_a_free_buffer_a_send_is_refused_as_busy(tmp_path):
    never = {"commit_interval_ms": 3_600_000}
    async with Cluster(
        tmp_path / "store", store={"transient_store_pool": True, "transient_store_pool_size": 1, **never}
    ) as cluster:
        answers = [await cluster.send(body=bytes(300_000)) for _ in range(4)]
        assert [answer.code for answer in answers] == [0, 0, 0, ResponseCode.SYSTEM_BUSY]
        assert answers[-1].remark == "[PC_SYNCHRONIZED]broker busy, start flow control for a while"


async def test_a_message_that_would_create_too_many_light_queues_is_refused(tmp_path):
    light = {"enable_light_queues": True, "enable_multi_dispatch": True, "light_queue_count_max": 1}
    async with Cluster(tmp_path / "store", store=light) as cluster:
        answers = [await cluster.send(properties=f"INNER_MULTI_DISPATCH\x01%LMQ%{name}\x02") for name in "aba"]
    remark = "[LMQ_CONSUME_QUEUE_NUM_EXCEEDED]lmq consume queue num exceeded."
    assert [answer.code for answer in answers] == [0, ResponseCode.LMQ_QUOTA_EXCEEDED, 0]
    assert answers[1].remark == remark
