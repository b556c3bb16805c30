"""Brokers' requests to consumers, sent through our own broker or as scripted commands.

Source: behaviour.md §5.3, §8.15; remoting.md §4.5, §6.4.11, §6.4.12.
"""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.handlers import ClientRequestHandlers
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.errors import PeerRefused
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import (
    ConsumeDirectlyRequest,
    ConsumeMessageDirectlyResult,
    ConsumerRunningInfo,
    MessageQueue,
    RunningInfoRequest,
)
from rmqkit.protocol.schemas.offsets import ConsumerStatus, ConsumerStatusRequest, ResetOffsetRequest
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.standalone import Standalone
from tests.client.inside import coordinator_of, runtime_of
from tests.client.peers import until
from tests.waiting import SECONDS

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=10)


class Operator:
    """Ten messages in one queue, a consumer of group CG and an operator's connection."""

    def __init__(self, root, handler=None, **broker) -> None:
        settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", **broker)
        self.cluster = Standalone(root / "store", broker=settings)
        self.seen = []
        self.handler = handler or self.seen.append

    async def __aenter__(self):
        await self.cluster.__aenter__()
        async with Producer("PG", self.cluster.namesrv_address) as producer:
            self.queue = (await producer.queues("T"))[1]
            for i in range(10):
                self.sent = await producer.send(Message(topic="T", body=b"%d" % i), queue=self.queue)
        self.consumer = PushConsumer("CG", self.cluster.namesrv_address, settings=FIRST)
        self.consumer.subscribe("T", "*", self.handler)
        await self.consumer.start()
        self.client = RemotingClient(Router())
        return self

    async def __aexit__(self, *exc_info):
        await self.client.close()
        await self.consumer.close()
        await self.cluster.__aexit__(*exc_info)

    async def ask(self, code, header):
        return await self.client.call(self.cluster.broker_address, request(code, header), 60_000)

    async def consumed(self):
        await until(
            lambda: coordinator_of(self.consumer).offsets_of("T").get(self.queue) == 10, "everything is consumed"
        )

    @property
    def client_id(self):
        return runtime_of(self.consumer).client_id


async def test_a_reset_by_clients_has_them_start_over(tmp_path):
    async with Operator(tmp_path, server_side_reset=False) as it:
        await it.consumed()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SECONDS
        header = ResetOffsetRequest(topic="T", group="CG", timestamp=0, is_force=True)
        while (await it.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)).code and loop.time() < deadline:
            await asyncio.sleep(0.01)  # until the broker has an offset of every queue
        await until(lambda: len(it.seen) == 20, "everything once more")
        assert sorted(message.body for message in it.seen[10:]) == [b"%d" % i for i in range(10)]


async def test_a_reset_waits_for_handlers_and_ignores_queues_of_others(tmp_path):
    gate, running = asyncio.Event(), []

    async def handler(message):
        running.append(message.queue_offset)
        await gate.wait()

    async with Operator(tmp_path, handler) as it:
        await until(lambda: running, "a handler")
        coordinator = coordinator_of(it.consumer)
        elsewhere = MessageQueue("T", "elsewhere", 0)
        resetting = asyncio.create_task(coordinator.reset_offsets({it.queue: 8, elsewhere: 3}))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not resetting.done()
        gate.set()
        await resetting
        running.clear()
        await until(lambda: sorted(running) == [8, 9], "from the new offset on")


async def test_a_status_reports_the_offsets_of_a_topic(tmp_path):
    async with Operator(tmp_path) as it:
        await it.consumed()
        answer = await it.ask(
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, ConsumerStatusRequest("T", "CG", it.client_id)
        )
        status = fastjson.decode_as(answer.body, ConsumerStatus)
        assert status.consumer_table[it.client_id][it.queue] == 10
        assert {queue.topic for queue in status.consumer_table[it.client_id]} == {"T"}


async def test_running_information_reports_where_threads_and_tasks_stand_if_asked(tmp_path):
    gate, running = asyncio.Event(), []

    async def waiting_for_the_gate(message):
        running.append(message)
        await gate.wait()

    async with Operator(tmp_path, waiting_for_the_gate) as it:
        await until(lambda: running, "a handler")
        answer = await it.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, RunningInfoRequest("CG", it.client_id, True))
        jstack = fastjson.decode_as(answer.body, ConsumerRunningInfo).jstack
        gate.set()
    lines = jstack.splitlines()
    assert "thread MainThread" in lines
    calls = lines[lines.index("task handler 0 of group CG") + 1 :]
    assert next(i for i, line in enumerate(calls) if "ConcurrentConsumeService._work" in line) == 0
    assert any("waiting_for_the_gate" in line and "test_handlers.py" in line for line in calls)


async def test_running_information_reports_settings_subscriptions_and_queues_but_no_secrets(tmp_path):
    async with Operator(tmp_path) as it:
        await it.consumed()
        answer = await it.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, RunningInfoRequest("CG", it.client_id))
        info = fastjson.decode_as(answer.body, ConsumerRunningInfo)
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert info.properties["PROP_CONSUMEORDERLY"] == "false"
        assert info.properties["consumeThreadMax"] == "20"
        assert info.properties["PROP_CLIENT_VERSION"].startswith("V5_")
        assert not {"secretKey", "accessKey"} & info.properties.keys()
        assert {one.topic for one in info.subscription_set} == {"T", "%RETRY%CG"}
        held = info.mq_table[it.queue]
        assert (held.commit_offset, held.cached_msg_count, held.droped, held.locked) == (10, 0, False, False)
        assert held.last_consume_timestamp >= held.last_pull_timestamp - 60_000 > 0


async def test_what_a_queue_holds_is_reported(tmp_path):
    gate = asyncio.Event()

    async def handler(message):
        await gate.wait()

    async with Operator(tmp_path, handler) as it:
        await until(lambda: coordinator_of(it.consumer).running_info().mq_table.get(it.queue), "the queue")
        table = coordinator_of(it.consumer).process_queues
        await until(lambda: len(table[it.queue]) == 10, "all messages are here")
        held = coordinator_of(it.consumer).running_info().mq_table[it.queue]
        assert (held.cached_msg_min_offset, held.cached_msg_max_offset, held.cached_msg_count) == (0, 9, 10)
        gate.set()


@pytest.mark.parametrize(
    ("error", "result", "remark"),
    [
        (None, "CR_SUCCESS", None),
        (ConsumeLater(3), "CR_LATER", "ConsumeLater: to be consumed again at delay level 3"),
        (ValueError("no stock"), "CR_THROW_EXCEPTION", "ValueError: no stock"),
    ],
)
async def test_a_message_is_consumed_directly_once(tmp_path, error, result, remark):
    calls = []

    async def handler(message):
        calls.append(message)
        if len(calls) > 10 and error is not None:
            raise error

    async with Operator(tmp_path, handler) as it:
        await it.consumed()
        header = ConsumeDirectlyRequest(consumer_group="CG", client_id=it.client_id, msg_id=it.sent.offset_msg_id)
        answer = await it.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        told = fastjson.decode_as(answer.body, ConsumeMessageDirectlyResult)
        assert (told.consume_result, told.remark, told.order, told.auto_commit) == (result, remark, False, True)
        assert [message.body for message in calls[10:]] == [b"9"]
        assert coordinator_of(it.consumer).offsets_of("T")[it.queue] == 10


class Connection:
    peer = "127.0.0.1:1"


async def test_a_group_that_is_not_here_is_reported():
    inquiries = ClientRequestHandlers({})
    info = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RunningInfoRequest("other", "c"))
    with pytest.raises(PeerRefused, match="The Consumer Group <other> not exist in this consumer"):
        inquiries.running_info(Connection(), info)
    directly = request(RequestCode.CONSUME_MESSAGE_DIRECTLY, ConsumeDirectlyRequest(consumer_group="other"))
    with pytest.raises(PeerRefused, match="The Consumer Group <other> not exist in this consumer"):
        await inquiries.consume_directly(Connection(), directly)
