"""Timed messages and RECALL_MESSAGE over the wire (behaviour.md §3.4, §3.9, §9.3).

Codes and remarks are compared with a real 5.4.0 broker's in tests/interop/test_client_codes.py.
"""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.ids import RecallHandle, decode_recall_handle, encode_recall_handle
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.names import HALF_TOPIC, TIMER_TOPIC
from rmqkit.protocol.schemas.brokers import TimerMetrics, decode_timer_checkpoint
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import ILLEGAL, Cluster
from tests.waiting import SECONDS

RECALLS = {"broker": {"recall_messages": True}}
QUICK = {"timer_precision_ms": 10}
"""A message comes within some 10 ms of its time."""


def now_ms():
    return SYSTEM_CLOCK.now_ms()


def timer_of(cluster):
    return cluster.standalone.broker.context.timer


async def kept(cluster, count):
    async with asyncio.timeout(SECONDS):
        while (
            timer_of(cluster).offset_behind
            or cluster.standalone.broker.context.store.max_offset(TIMER_TOPIC, 0) < count
        ):
            await asyncio.sleep(0.005)


async def bodies(cluster, count, topic="T"):
    found = []
    async with asyncio.timeout(SECONDS):
        while len(found) < count:
            answer = await cluster.pull(len(found), topic=topic)
            found += [one.body for one in read_messages(answer.body)] if answer.code == 0 else []
            await asyncio.sleep(0.005)
    return found


async def recall(cluster, handle, topic="T"):
    return await cluster.ask(RequestCode.RECALL_MESSAGE, producerGroup="p", topic=topic, recallHandle=handle)


@pytest.mark.parametrize("flush", list(FlushDiskType))
async def test_a_timed_message_comes_later_unless_it_is_called_back(flush, tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": flush, **QUICK}, **RECALLS) as cluster:
        at_ms = now_ms() + 5000
        handles = []
        for number in range(3):
            properties = f"TIMER_DELIVER_MS\x01{at_ms}\x02UNIQ_KEY\x01U{number}\x02"
            answer = await cluster.send(body=b"%d" % number, properties=properties)
            fields = decode_fields(answer)
            assert (answer.code, fields["queueId"], fields["transactionId"]) == (0, "0", f"U{number}")
            handles.append(fields["recallHandle"])
        out_ms = (at_ms - 1) // 10 * 10
        assert decode_recall_handle(handles[1]) == RecallHandle("T", "broker-a", out_ms, "U1")
        answer = await recall(cluster, handles[1])
        assert (answer.code, decode_fields(answer)["msgId"]) == (0, "U1")
        await kept(cluster, 4)
        assert await bodies(cluster, 2) == [b"0", b"2"]


@pytest.mark.parametrize(
    ("handle", "code", "remark"),
    [
        (RecallHandle("T", "broker-a", 5, "K"), ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid"),
        (RecallHandle("U", "broker-a", 5, "K"), ResponseCode.ILLEGAL_OPERATION, "recall failed, topic not match"),
        (
            RecallHandle("T", "broker-b", 5, "K"),
            ResponseCode.ILLEGAL_OPERATION,
            "recall failed, broker service not available",
        ),
        (RecallHandle("N", "broker-a", 5, "K"), ResponseCode.TOPIC_NOT_EXIST, "recall failed, the topic[N] not exist"),
    ],
)
async def test_a_recall_that_cannot_be_is_refused(handle, code, remark, tmp_path):
    async with Cluster(tmp_path / "store", **RECALLS) as cluster:
        await cluster.send()
        topic = "N" if handle.topic == "N" else "T"
        answer = await recall(cluster, encode_recall_handle(handle), topic)
        assert (answer.code, answer.remark) == (code, remark)


async def test_recalls_have_to_be_allowed(cluster):
    answer = await recall(cluster, "x")
    assert (answer.code, answer.remark) == (
        ResponseCode.NO_PERMISSION,
        "recall failed, operation is forbidden",
    )


async def test_without_the_wheel_timed_messages_are_refused(tmp_path):
    async with Cluster(tmp_path / "store", store={"timer_wheel_enable": False}) as cluster:
        answer = await cluster.send(properties="TIMER_DELAY_SEC\x015\x02")
        remark = "accurate timer message is not enabled, timerWheelEnable is false"
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, remark)
        for code in (RequestCode.GET_TIMER_CHECK_POINT, RequestCode.GET_TIMER_METRICS):
            assert (await cluster.ask(code)).code == ResponseCode.SYSTEM_ERROR


async def test_a_batch_is_not_for_a_time(cluster):
    answer = await cluster.send(properties="TIMER_DELAY_SEC\x015\x02", batch=True)
    assert (answer.code, answer.remark) == (ResponseCode.MESSAGE_ILLEGAL, ILLEGAL)


async def test_a_half_message_waits_for_its_time_once_it_is_committed(tmp_path):
    async with Cluster(tmp_path / "store", store=QUICK) as cluster:
        half = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02TIMER_DELIVER_MS\x01{now_ms() + 3000}\x02"
        fields = decode_fields(await cluster.send(body=b"committed", properties=half, sys_flag=4))
        store = cluster.standalone.broker.context.store
        assert (store.max_offset(HALF_TOPIC, 0), store.max_offset(TIMER_TOPIC, 0)) == (1, 0)
        offset = int(fields["msgId"][16:], 16)
        ended = await cluster.ask(
            RequestCode.END_TRANSACTION,
            producerGroup="p",
            tranStateTableOffset=0,
            commitLogOffset=offset,
            commitOrRollback=8,
        )
        assert (ended.code, store.max_offset(TIMER_TOPIC, 0)) == (0, 1)
        assert await bodies(cluster, 1) == [b"committed"]


async def test_the_state_is_reported(cluster):
    await cluster.send(properties="TIMER_DELAY_SEC\x0150\x02")
    await kept(cluster, 1)
    metrics = decode_as((await cluster.ask(RequestCode.GET_TIMER_METRICS)).payload, TimerMetrics)
    assert {topic: one.count for topic, one in metrics.timing_count.items()} == {"T": 1}
    checkpoint = decode_timer_checkpoint((await cluster.ask(RequestCode.GET_TIMER_CHECK_POINT)).payload)
    assert checkpoint.last_timer_queue_offset == checkpoint.master_timer_queue_offset == 1
    table = decode_as((await cluster.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).payload, dict)["table"]
    assert {table[name] for name in ("timerReadBehind", "timerOffsetBehind")} <= {"0", "1"}
    assert table["timerCongestNum"] == "1"
