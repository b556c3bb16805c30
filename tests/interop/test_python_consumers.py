"""Our consumers' other ways against a real Apache broker: ordered, broadcasting, batches, polling, what operators ask,
and a group that Java and Python members share.

Source: behaviour.md §8.8, §8.10, §8.14, §8.15; store.md §9.8.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from rmqkit.client.consuming import ConsumeLater
from rmqkit.client.producer import Producer
from rmqkit.client.pull_consumer import PullConsumer
from rmqkit.client.push_consumer import PushConsumer
from rmqkit.client.settings import MessageModel, PullConsumerSettings, PushConsumerSettings, StartFrom
from rmqkit.errors import NoRoute
from rmqkit.protocol import fastjson
from rmqkit.protocol.bodies.clients import ConsumerIds, MessageQueue
from rmqkit.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.headers.clients import ConsumerGroupRequest
from rmqkit.protocol.headers.consumers import ConsumeDirectlyRequest, RunningInfoRequest
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.dispatch import Dispatch
from tests.client.peers import until
from tests.interop.apache import ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB
from tests.interop.test_python_client import run, share

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, suspend_queue_ms=10)
POLLED = PullConsumerSettings(start_from=StartFrom.FIRST_OFFSET, auto_commit=False)
MIXED_MESSAGES = 4000


async def send(namesrv: str, topic: str, count: int, *, first: int = 0) -> list[MessageQueue]:
    """So many numbered messages in each queue of a topic."""
    async with Producer(f"PG-{topic}", namesrv) as producer:
        queues = await producer.queues(topic)
        await asyncio.gather(*(send_to(producer, queue, first, count) for queue in queues))
        return queues


async def send_to(producer: Producer, queue: MessageQueue, first: int, count: int) -> None:
    for i in range(first, first + count):
        message = Message(topic=queue.topic, body=b"%d" % i, tags="AB"[i % 2], properties={"number": str(i)})
        await producer.send(message, queue=queue, timeout_ms=10_000)


def test_ordered_members_take_over_in_order_and_retry_in_place(apache: ApachePair) -> None:
    async def scenario() -> None:
        namesrv = apache.namesrv_addr
        queues = await send(namesrv, "PyOrdered", 40)
        seen: defaultdict[int, list[int]] = defaultdict(list)
        running: set[int] = set()

        async def handler(one: ReceivedMessage) -> None:
            assert one.queue_id not in running, "two handlers in one queue"
            running.add(one.queue_id)
            await asyncio.sleep(0.001)
            running.discard(one.queue_id)
            seen[one.queue_id].append(int(one.body))
            if one.body == b"7" and one.reconsume_times < 2:
                raise ValueError("not yet")

        one, two = (PushConsumer("CG-py-ordered", namesrv, settings=FIRST, ordered=True) for _ in range(2))
        for member in (one, two):
            member.subscribe("PyOrdered", "*", handler)
        async with one:
            await until(lambda: all(seen[queue.queue_id][-1:] == [39] for queue in queues), "the first messages", 40)
            async with two:
                await send(namesrv, "PyOrdered", 40, first=40)
                await until(lambda: share(one, "PyOrdered") == share(two, "PyOrdered") == 2, "two queues each", 40)
            await send(namesrv, "PyOrdered", 10, first=80)
            await until(lambda: all(seen[queue.queue_id][-1:] == [89] for queue in queues), "everything", 40)
        for numbers in seen.values():
            assert numbers == [*range(7), 7, 7, *range(7, 90)]

    run(scenario())


def test_what_an_ordered_handler_gives_up_is_in_the_dead_letters(apache: ApachePair) -> None:
    async def scenario() -> None:
        namesrv, seen = apache.namesrv_addr, []
        (queue, *_) = await send(namesrv, "PyGivenUp", 1)
        consumer = PushConsumer("CG-given-up", namesrv, settings=FIRST, ordered=True)

        @consumer.on("PyGivenUp")
        async def handler(one: ReceivedMessage) -> None:
            seen.append(one.queue_id)
            if one.queue_id == queue.queue_id:
                raise ConsumeLater(-1)

        async with consumer, PullConsumer("CG-reader", namesrv) as reader:
            await until(lambda: len(seen) >= 4, "a message of each queue", 40)
            dead: list[ReceivedMessage] = []
            async with asyncio.timeout(30):
                while not dead:
                    with contextlib.suppress(NoRoute):
                        (dead_queue,) = await reader.queues("%DLQ%CG-given-up")
                        dead = (await reader.pull(dead_queue, 0)).messages
                    await asyncio.sleep(0.05)
        assert (dead[0].body, dead[0].properties["RETRY_TOPIC"]) == (b"0", "PyGivenUp")
        assert seen.count(queue.queue_id) == 1

    run(scenario())


def test_every_broadcasting_member_gets_every_message(apache: ApachePair, tmp_path: Path) -> None:
    async def scenario() -> None:
        namesrv = apache.namesrv_addr
        await send(namesrv, "PyBroadcast", 5)
        seen: dict[str, list[bytes]] = {"one": [], "two": []}
        members = []
        for name, bodies in seen.items():
            settings = PushConsumerSettings(
                message_model=MessageModel.BROADCASTING,
                start_from=StartFrom.FIRST_OFFSET,
                instance_name=name,
                offsets_dir=str(tmp_path),
            )
            member = PushConsumer("CG-broadcast", namesrv, settings=settings)

            def keep(messages: list[ReceivedMessage], bodies: list[bytes] = bodies) -> None:
                bodies.extend(one.body for one in messages)

            member.subscribe("PyBroadcast", "*", keep, batch_max=4)
            members.append(member)
            await member.start()
        await until(lambda: all(len(bodies) == 20 for bodies in seen.values()), "everything, two times", 40)
        for member in members:
            await member.close()

    run(scenario())
    assert len(list(tmp_path.glob("*/CG-broadcast/offsets.json"))) == 2


def test_polling_seeks_commits_and_filters(apache: ApachePair) -> None:
    async def scenario() -> None:
        namesrv = apache.namesrv_addr
        queues = await send(namesrv, "PyPolled", 10)

        async def numbers(consumer: PullConsumer, count: int) -> list[int]:
            found: list[int] = []
            while len(found) < count:
                found += [int(one.body) for one in await consumer.poll(10_000)]
            return found

        assigned = PullConsumer("CG-polled", namesrv, settings=POLLED)
        assigned.assign(queues[:1])
        async with assigned:
            assert await numbers(assigned, 10) == list(range(10))
            await assigned.commit()
            assert await assigned.committed(queues[0]) == 10
            await assigned.seek(queues[0], 6)
            assert await numbers(assigned, 4) == [6, 7, 8, 9]
            await assigned.seek_to_begin(queues[0])
            assert await numbers(assigned, 10) == list(range(10))
        by_sql = PullConsumer("CG-polled-sql", namesrv, settings=POLLED)
        by_sql.subscribe("PyPolled", "number BETWEEN 3 AND 4", expression_type="SQL92")
        async with by_sql:
            assert sorted(await numbers(by_sql, 8)) == [3] * 4 + [4] * 4

    run(scenario())


def test_an_operator_asks_through_the_broker(apache: ApachePair) -> None:
    async def scenario() -> None:
        await send(apache.namesrv_addr, "PyAsked", 3)
        seen: list[ReceivedMessage] = []
        consumer = PushConsumer("CG-asked", apache.namesrv_addr, settings=FIRST)
        consumer.subscribe("PyAsked", "*", seen.append)
        async with consumer, operator(apache) as (client, broker):
            await until(lambda: len(seen) == 12, "all messages", 40)
            ((client_id, info),) = (await running_info(client, broker, "CG-asked")).items()
            assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
            assert {queue for queue in info.mq_table if queue.topic == "PyAsked"} == {
                queue for queue in consumer.held_queues() if queue.topic == "PyAsked"
            }
            header = ConsumeDirectlyRequest(
                consumer_group="CG-asked", client_id=client_id, msg_id=seen[0].offset_msg_id, topic="PyAsked"
            )
            answer = await client.call(broker, request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header), 10_000)
            result = fastjson.decode_as(answer.payload, ConsumeMessageDirectlyResult)
            assert (answer.code, result.consume_result) == (0, "CR_SUCCESS")
            assert (len(seen), seen[12].body) == (13, seen[0].body)

    run(scenario())


def test_java_and_python_members_share_an_ordered_group(
    apache: ApachePair, apache_kit: ApacheKit, tmp_path: Path
) -> None:
    """Queues change hands while messages flow: in order, nothing left out, and never in two hands."""
    arguments = [apache.namesrv_addr, "PyMixed", MIXED_MESSAGES]
    command = apache_kit.jvm("interop.OrderedReader", arguments, heap_mb=PROBE_HEAP_MB, work_dir=tmp_path)
    java: defaultdict[int, list[int]] = defaultdict(list)
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read() -> None:
        assert reader.stdout is not None
        for line in reader.stdout:
            queue_id, offset = line.split()
            java[int(queue_id)].append(int(offset))

    reading = threading.Thread(target=read)
    reading.start()

    async def scenario() -> None:
        python: defaultdict[int, list[int]] = defaultdict(list)
        await until(lambda: len(java) == 4, "Java reads every queue", 60)
        member = PushConsumer("ordered-reader", apache.namesrv_addr, settings=FIRST, ordered=True)

        @member.on("PyMixed")
        async def handler(one: ReceivedMessage) -> None:
            python[one.queue_id].append(one.queue_offset)
            await asyncio.sleep(0.001)

        async with member, operator(apache) as (client, broker):
            await until(lambda: share(member, "PyMixed") == 2 and len(python) == 2, "two queues for Python", 40)
            tables = [
                {
                    queue.queue_id
                    for queue, held in info.mq_table.items()
                    if queue.topic == "PyMixed" and not held.droped
                }
                for info in (await running_info(client, broker, "ordered-reader")).values()
            ]
            assert sorted(map(len, tables)) == [2, 2], "each has two queues"
            assert set.union(*tables) == set(java), "and nobody the same ones"
            everything = set(range(MIXED_MESSAGES // 4))
            await until(
                lambda: all({*java[i], *python.get(i, ())} == everything for i in range(4)), "every message", 60
            )
        for queue_id in range(4):
            for offsets in (java[queue_id], python.get(queue_id, [])):
                assert all(after == before + 1 for before, after in pairwise(offsets)), "in order, nothing twice"
        for queue_id, offsets in python.items():
            # Java saves its offset before its last handler ends: that one message comes to Python once more.
            assert max(java[queue_id]) <= min(offsets), "what has changed hands stays there"

    try:
        run(scenario())
    finally:
        reader.kill()
        reading.join()
        reader.communicate()


@contextlib.asynccontextmanager
async def operator(apache: ApachePair):  # type: ignore[no-untyped-def]
    """A connection of an operator and the broker's address."""
    client = RemotingClient(Dispatch())
    try:
        yield client, apache.broker_addr
    finally:
        await client.close()


async def running_info(client: RemotingClient, broker: str, group: str) -> dict[str, ConsumerRunningInfo]:
    """What each member of a group says of itself, by client id."""
    asked = request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest(group))
    ids = fastjson.decode_as((await client.call(broker, asked, 10_000)).payload, ConsumerIds).consumer_id_list
    told = {}
    for client_id in ids:
        header = RunningInfoRequest(group, client_id)
        answer = await client.call(broker, request(RequestCode.GET_CONSUMER_RUNNING_INFO, header), 20_000)
        told[client_id] = fastjson.decode_as(answer.payload, ConsumerRunningInfo)
    return told
