"""The broker's runtime info (remoting.md §6.6)."""

from __future__ import annotations

import json
import os
import re

import pytest

from rmqkit.broker.operations.brokers import ALWAYS, disk_ratio, run_time_text
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.brokers import bytes_text
from rmqkit.protocol.schemas.send import SendMessageRequest
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.virtual_time import run as run_virtual

NEEDED_BY_CLUSTER_LIST = """
    brokerActive putTps getTransferredTps sendThreadPoolQueueSize pullThreadPoolQueueSize ackThreadPoolQueueSize
    sendThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueHeadWaitTimeMills ackThreadPoolQueueHeadWaitTimeMills
    pageCacheLockTimeMills earliestMessageTimeStamp commitLogDiskRatio timerReadBehind timerOffsetBehind
    timerCongestNum timerEnqueueTps timerDequeueTps brokerVersionDesc msgPutTotalYesterdayMorning
    msgPutTotalTodayMorning msgPutTotalTodayNow msgGetTotalYesterdayMorning msgGetTotalTodayMorning msgGetTotalTodayNow
""".split()


async def ask_runtime_info(client, address):
    answer = await client.call(address, request(RequestCode.GET_BROKER_RUNTIME_INFO), 60_000)
    return json.loads(answer.body)["table"]


def with_broker(root, scenario):
    async def main():
        clock, client = StandingClock(1_795_224_574_705), RemotingClient()
        broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
        store = StoreSettings(commit_log_file_bytes=1 << 20)
        async with Standalone(root, broker=broker, store=store, clock=clock) as both:
            try:
                await scenario(clock, client, both.broker_address)
            finally:
                await client.close()

    run_virtual(main())


@pytest.mark.virtual_time
def test_a_fresh_broker(tmp_path):
    async def scenario(clock, client, address):
        clock.ms += 431_500
        table = await ask_runtime_info(client, address)
        assert list(table) == sorted(table)
        assert all(isinstance(value, str) for value in table.values())
        assert set(NEEDED_BY_CLUSTER_LIST) <= set(table)
        assert {
            "brokerVersionDesc": "V5_4_0",
            "brokerVersion": "493",
            "brokerActive": "true",
            "bootTimestamp": "1795224574705",
            "runtime": "[ 0 days, 0 hours, 7 minutes, 11 seconds ]",
            "commitLogMaxOffset": "0",
            "earliestMessageTimeStamp": "-1",
            "dispatchBehindBytes": "0",
            "remainHowManyDataToFlush": "0 B",
            "sendThreadPoolQueueSize": "0",
            **ALWAYS,
        }.items() <= table.items()
        assert table["commitLogDiskRatio"] == table[f"commitLogDiskRatio_{tmp_path / 'commitlog'}"]
        assert re.fullmatch(r"Total : \d+\.\d [KMGTP]iB, Free : \d+(\.\d)? .*\.", table["commitLogDirCapacity"])

    with_broker(tmp_path, scenario)


@pytest.mark.virtual_time
def test_a_message_moves_the_bounds_of_the_log(tmp_path):
    async def scenario(clock, client, address):
        header = SendMessageRequest(
            producer_group="p",
            topic="T",
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=0,
            sys_flag=0,
            born_timestamp=1_700_000_000_000,
            flag=0,
        )
        sent = await client.call(address, request(RequestCode.SEND_MESSAGE, header, b"hello"), 60_000)
        assert sent.code == 0
        table = await ask_runtime_info(client, address)
        assert table["commitLogMinOffset"] == "0"
        assert int(table["commitLogMaxOffset"]) > len(b"hello")
        assert table["dispatchBehindBytes"] == "0"
        assert table["earliestMessageTimeStamp"] == "1795224574705"

    with_broker(tmp_path, scenario)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (252 << 30, "252.0 GiB"),
        (1 << 60, "1.0 EiB"),
        (1 << 70, "1024.0 EiB"),
    ],
)
def test_bytes_are_reported_in_the_largest_unit(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "[ 0 days, 0 hours, 0 minutes, 0 seconds ]"),
        (431_999, "[ 0 days, 0 hours, 7 minutes, 11 seconds ]"),
        (93_784_000, "[ 1 days, 2 hours, 3 minutes, 4 seconds ]"),
    ],
)
def test_run_time_is_reported_in_the_tools_form(ms, text):
    assert run_time_text(ms) == text


@pytest.mark.parametrize(
    ("blocks", "free", "available", "ratio"),
    [(252, 231, 70, 0.24), (100, 100, 90, 0.0), (0, 0, 0, 0.0), (9, 0, 0, 1.0)],
)
def test_the_ratio_of_a_disk_is_rounded_up(monkeypatch, tmp_path, blocks, free, available, ratio):
    shown = os.statvfs_result((4096, 4096, blocks, free, available, 0, 0, 0, 0, 255))
    monkeypatch.setattr("rmqkit.system.disk.space", lambda path: shown)
    assert disk_ratio(tmp_path) == ratio
