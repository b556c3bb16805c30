"""CONSUMER_SEND_MSG_BACK: retry by delay level, dead letters, and the answers of the reference (behaviour.md §3.7)."""

from __future__ import annotations

import pytest

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest, SendMessageResponse
from rmqkit.store.message_store import PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import FAQ, Cluster

LEVELS = {"message_delay_level": "1s 2s 1s 1s 5s"}


def context_of(cluster):
    return cluster.standalone.broker.context


async def sent_offset(cluster, **fields):
    """Send a message and return its log offset."""
    answer = decode_header(
        await cluster.send(properties="UNIQ_KEY\x01K\x02KEYS\x01k\x02", **fields), SendMessageResponse
    )
    return decode_offset_id(answer.msg_id)[2], answer.msg_id


async def send_back(cluster, offset, level=0, group="g", version=None, **fields):
    header = ConsumerSendBackRequest(offset=offset, group=group, delay_level=level, **fields)
    command = request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    command.version = version or command.version
    return await cluster.client.call(cluster.standalone.broker_address, command, 60_000)


def newest(cluster, topic, queue_id):
    """Return the newest record of a queue."""
    store = context_of(cluster).store
    found = store.get(topic, queue_id, store.max_offset(topic, queue_id) - 1, count_max=1)
    return decode_record(found.records[0])


async def retried(cluster, offset, group="g"):
    """Return the next message of a group's retry topic, as a waiting consumer gets it."""
    topic = f"%RETRY%{group}"
    pulled = await cluster.pull(offset, topic=topic, group=group, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)
    (message,) = read_messages(pulled.body)
    return message


async def test_a_message_is_redelivered_after_its_delay_with_where_it_came_from(tmp_path):
    async with Cluster(tmp_path / "store", store=LEVELS) as cluster:
        offset, first_id = await sent_offset(cluster, flag=7)
        assert (await send_back(cluster, offset)).code == 0
        stored = newest(cluster, "SCHEDULE_TOPIC_XXXX", 2)
        assert decode_properties(stored.properties)["DELAY"] == "3"
        message = await retried(cluster, 0)
        assert (message.topic, message.body, message.flag, message.reconsume_times) == ("%RETRY%g", b"hello", 7, 1)
        assert message.properties == {
            "UNIQ_KEY": "K",
            "KEYS": "k",
            "RETRY_TOPIC": "T",
            "ORIGIN_MESSAGE_ID": first_id,
            "WAIT": "false",
            "DELAY": "3",
            "REAL_TOPIC": "%RETRY%g",
            "REAL_QID": "0",
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
            "CLUSTER": "DefaultCluster",
        }
        assert message.born_timestamp == 1_700_000_000_000
        assert message.store_timestamp >= stored.store_timestamp + 1000

        again = decode_offset_id(message.offset_msg_id)[2]
        assert (await send_back(cluster, again)).code == 0
        second = await retried(cluster, 1)
        assert second.reconsume_times == 2
        wanted = {"RETRY_TOPIC": "T", "ORIGIN_MESSAGE_ID": first_id, "DELAY": "4"}
        assert {name: second.properties[name] for name in wanted} == wanted


async def test_a_level_requested_is_taken(tmp_path):
    async with Cluster(tmp_path / "store", store=LEVELS) as cluster:
        offset, _ = await sent_offset(cluster)
        for level, queue_id, count in ((1, 0, 1), (5, 4, 1), (99, 4, 2)):
            assert (await send_back(cluster, offset, level)).code == 0
            assert newest(cluster, "SCHEDULE_TOPIC_XXXX", queue_id).reconsume_times == 1
            assert context_of(cluster).store.max_offset("SCHEDULE_TOPIC_XXXX", queue_id) == count


@pytest.mark.parametrize("fields", [{"level": -1}, {"max_reconsume_times": 0}, {"level": 4, "max_reconsume_times": -7}])
async def test_a_message_that_is_given_up_is_a_dead_letter_at_once(fields, tmp_path):
    async with Cluster(tmp_path / "store", store=LEVELS) as cluster:
        offset, first_id = await sent_offset(cluster)
        assert (await send_back(cluster, offset, **fields)).code == 0
        (message,) = read_messages((await cluster.pull(topic="%DLQ%g")).body)
        wanted = {"RETRY_TOPIC": "T", "ORIGIN_MESSAGE_ID": first_id, "DELAY": "0", "WAIT": "false"}
        assert {name: message.properties[name] for name in wanted} == wanted
        assert "REAL_TOPIC" not in message.properties
        assert message.reconsume_times == 1
        topic = context_of(cluster).topics.get("%DLQ%g")
        assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (1, 1, 6)


async def test_a_message_is_given_up_after_the_group_s_last_try(tmp_path):
    async with Cluster(tmp_path / "store", store=LEVELS) as cluster:
        context_of(cluster).groups.get("g").retry_max_times = 1
        offset, _ = await sent_offset(cluster)
        assert (await send_back(cluster, offset, 1, max_reconsume_times=9, version=100)).code == 0  # limit: old client
        message = await retried(cluster, 0)
        assert (await send_back(cluster, decode_offset_id(message.offset_msg_id)[2], 1)).code == 0
        (dead,) = read_messages((await cluster.pull(topic="%DLQ%g")).body)
        assert dead.reconsume_times == 2


async def test_the_retry_topic_gets_the_group_s_queues(tmp_path):
    async with Cluster(tmp_path / "store", store=LEVELS) as cluster:
        context_of(cluster).groups.get("g").retry_queue_nums = 3
        offset, _ = await sent_offset(cluster)
        for _ in range(40):
            assert (await send_back(cluster, offset, 1, unit_mode=True)).code == 0
        topic = context_of(cluster).topics.get("%RETRY%g")
        assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm, topic.topic_sys_flag) == (3, 3, 6, 2)
        store = context_of(cluster).store
        records = store.get("SCHEDULE_TOPIC_XXXX", 0, 0, count_max=40).records
        wanted = {decode_properties(decode_record(one).properties)["REAL_QID"] for one in records}
        assert wanted == {"0", "1", "2"}


async def test_a_group_without_retry_queues_drops_the_message(cluster):
    context_of(cluster).groups.get("g").retry_queue_nums = 0
    offset, _ = await sent_offset(cluster)
    end = context_of(cluster).store.max_physical_offset
    assert (await send_back(cluster, offset)).code == 0
    assert context_of(cluster).store.max_physical_offset == end


async def test_where_no_message_begins_nothing_is_found(cluster):
    await sent_offset(cluster)
    end = context_of(cluster).store.max_physical_offset
    for offset in (-1, 1, 99, 10**9, (1 << 63) - 1, -(1 << 63)):
        answer = await send_back(cluster, offset)
        assert (answer.code, answer.remark) == (1, f"look message by offset failed, {offset}")
    assert context_of(cluster).store.max_physical_offset == end


async def test_a_group_that_cannot_be_is_reported_so(cluster):
    offset, _ = await sent_offset(cluster)
    for group in ("a b", "", "x" * 121):
        answer = await send_back(cluster, offset, group=group)
        assert (answer.code, answer.remark) == (26, f"subscription group not exist, {group} {FAQ}")


async def test_a_read_only_broker_takes_nothing_back(tmp_path):
    async with Cluster(tmp_path / "store", broker={"broker_permission": 4}) as cluster:
        offset, _ = await sent_offset(cluster)
        answer = await send_back(cluster, offset)
        assert (answer.code, answer.remark) == (16, "the broker[127.0.0.1] sending message is forbidden")


async def test_a_retry_topic_that_is_not_writable_takes_nothing_back(cluster):
    offset, _ = await sent_offset(cluster)
    context_of(cluster).topics.ensure("%RETRY%g", 1).perm = 4
    answer = await send_back(cluster, offset)
    assert (answer.code, answer.remark) == (16, "the topic[%RETRY%g] sending message is forbidden")


async def test_what_the_store_does_not_take_is_answered_with_its_status(monkeypatch, cluster):
    offset, _ = await sent_offset(cluster)
    refused = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="full")
    monkeypatch.setattr(context_of(cluster).store, "put", lambda message: refused)
    answer = await send_back(cluster, offset)
    assert (answer.code, answer.remark) == (1, "SERVICE_NOT_AVAILABLE")


GOOD = {"offset": "0", "group": "g", "delayLevel": "1", "unitMode": "false", "maxReconsumeTimes": "3"}


async def test_fields_that_are_missing_or_unreadable(cluster):
    """An optional field that cannot be read counts as missing, as it does where Java's reflection reads headers."""
    needed = ("offset", "group", "delayLevel")

    await sent_offset(cluster)
    for name in GOOD:
        for value in (None, *(("abc", "", "9" * 20) if name != "group" else ())):
            fields = {**GOOD, name: value} if value is not None else {k: v for k, v in GOOD.items() if k != name}
            command = Command(RequestCode.CONSUMER_SEND_MSG_BACK, fields=fields)
            answer = await cluster.client.call(cluster.standalone.broker_address, command, 60_000)
            wanted = ResponseCode.SYSTEM_ERROR if name in needed else ResponseCode.SUCCESS
            assert answer.code == wanted, (name, value, answer.remark)
    assert (await cluster.send()).code == 0


async def test_under_sync_flush_the_answer_means_that_the_copy_is_on_disk(tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH, **LEVELS}) as cluster:
        offset, _ = await sent_offset(cluster)
        store = context_of(cluster).store
        for level in (-1, 1):
            assert (await send_back(cluster, offset, level)).code == 0
            assert store.durable_offset == store.max_physical_offset


async def test_a_flush_that_takes_too_long_is_no_success(monkeypatch, tmp_path):
    async with Cluster(
        tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH, "sync_flush_timeout_ms": 50}
    ) as cluster:
        offset, _ = await sent_offset(cluster)
        store = context_of(cluster).store
        monkeypatch.setattr(store, "request_flush", lambda: None)
        monkeypatch.setattr(store.flusher, "flush_log", lambda: None)
        answer = await send_back(cluster, offset)
        monkeypatch.undo()
        assert (answer.code, answer.remark) == (1, "FLUSH_DISK_TIMEOUT")


async def test_beyond_what_may_wait_for_the_disk_it_is_refused_as_busy(monkeypatch, tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster:
        offset, _ = await sent_offset(cluster)
        monkeypatch.setattr("rmqkit.broker.durability.WAITING_MAX", 0)
        assert (await send_back(cluster, offset)).code == ResponseCode.SYSTEM_BUSY
