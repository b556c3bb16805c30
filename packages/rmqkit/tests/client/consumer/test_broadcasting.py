"""Broadcasting: every member gets every message, without redelivery. Source: behaviour.md §5.6, §8.8, §8.9."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import MessageModel, PushConsumerSettings, StartFrom
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.standalone import Standalone
from tests.client.inside import coordinator_of, runtime_of
from tests.client.messages import record
from tests.client.peers import Cluster, pulled, until


def member(namesrv: str, offsets_dir: Path, name: str, handler, **settings) -> PushConsumer:
    values = {"message_model": MessageModel.BROADCASTING, "start_from": StartFrom.FIRST_OFFSET, **settings}
    consumer = PushConsumer(
        "CG", namesrv, settings=PushConsumerSettings(instance_name=name, offsets_dir=str(offsets_dir), **values)
    )
    consumer.subscribe("T", "*", handler)
    return consumer


async def test_every_member_gets_every_message_and_continues_where_it_was(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        for i in range(20):
            await producer.send(Message(topic="T", body=b"%d" % i))
        seen: dict[str, list[bytes]] = {"one": [], "two": []}
        expected = 20
        for _ in range(2):
            members = [
                member(cluster.namesrv_address, tmp_path, name, lambda m, name=name: seen[name].append(m.body))
                for name in seen
            ]
            for one in members:
                await one.start()
            await until(lambda: all(len(bodies) >= expected for bodies in seen.values()), "all")  # noqa: B023
            for one in members:
                await one.close()
            for bodies in seen.values():
                assert sorted(bodies, key=int) == [b"%d" % i for i in range(expected)]
            await producer.send(Message(topic="T", body=b"20"))
            expected = 21


async def test_a_new_member_begins_at_the_end_and_misses_nothing_while_it_is_away(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await producer.send(Message(topic="T", body=b"old"))
        seen, away = [], None
        for _ in range(2):
            consumer = member(
                cluster.namesrv_address,
                tmp_path,
                "one",
                lambda m: seen.append(m.body),
                start_from=StartFrom.LAST_OFFSET,
            )
            async with consumer:
                await until(lambda: len(coordinator_of(consumer).offsets_of("T")) == 4, "four offsets")  # noqa: B023
                if away:
                    await until(lambda: seen, "what was sent meanwhile")
            away = await producer.send(Message(topic="T", body=b"away"))
        assert seen == [b"away"]


async def test_a_time_to_begin_at_chooses_the_first_message_stored_at_it_or_later(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queue = (await producer.queues("T"))[0]
        await producer.send(Message(topic="T", body=b"old"), queue=queue)
        async with PullConsumer("reader", cluster.namesrv_address) as reader:
            (old,) = (await reader.pull(queue, 0)).messages
            await until(lambda: SYSTEM_CLOCK.now_ms() > old.store_timestamp, "a later millisecond")
            await producer.send(Message(topic="T", body=b"new"), queue=queue)
            (new,) = (await reader.pull(queue, 1)).messages
        seen = []
        consumer = member(
            cluster.namesrv_address,
            tmp_path,
            "one",
            lambda message: seen.append(message.body),
            start_from=StartFrom.TIMESTAMP,
            start_timestamp_ms=new.store_timestamp,
        )
        async with consumer:
            await until(lambda: seen, "a message")
        assert seen == [b"new"]


async def test_a_failure_is_logged_and_nothing_is_redelivered(tmp_path, caplog):
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        answers = [lambda command: pulled(command, 0, 2, record(0) + record(1))]
        cluster.broker.answer(RequestCode.PULL_MESSAGE, lambda command: answers.pop()(command) if answers else None)

        async def handler(message):
            raise ValueError("no stock")

        consumer = member(cluster.namesrv, tmp_path, "one", handler)
        async with consumer:
            await until(
                lambda: coordinator_of(consumer).offsets_of("T") == {MessageQueue("T", "broker-0", 0): 2}, "both"
            )
        asked = {command.code for command in cluster.broker.requests}
        assert not asked & {
            RequestCode.CONSUMER_SEND_MSG_BACK,
            RequestCode.SEND_MESSAGE_V2,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            RequestCode.QUERY_CONSUMER_OFFSET,
        }
        (data,) = cluster.heartbeats[-1].consumerDataSet
        assert (data.message_model, [one.topic for one in data.subscription_data_set]) == ("BROADCASTING", ["T"])
        no_commit = int(PullFlag.SUSPEND)
        assert {fields["sysFlag"] for fields in cluster.broker.asked(RequestCode.PULL_MESSAGE)} == {str(no_commit)}
    assert [entry.levelno for entry in caplog.records if "handler failed" in entry.getMessage()] == [
        logging.WARNING
    ] * 2


def test_the_client_id_stays_the_same_so_that_the_file_is_found_again():
    settings = PushConsumerSettings(message_model=MessageModel.BROADCASTING, client_ip="10.0.0.1")
    assert runtime_of(PushConsumer("CG", "a:1", settings=settings)).client_id == "10.0.0.1@DEFAULT"
    clustering = PushConsumer("CG", "a:1", settings=PushConsumerSettings(client_ip="10.0.0.1"))
    assert runtime_of(clustering).client_id != "10.0.0.1@DEFAULT"


@pytest.mark.parametrize("model", list(MessageModel))
def test_only_clustering_has_a_retry_topic(model):
    consumer = PushConsumer("CG", "a:1", settings=PushConsumerSettings(message_model=model))
    consumer.subscribe("T", handler=print)
    topics = [one.topic for one in coordinator_of(consumer).consumer_data().subscription_data_set]
    assert topics == (["T"] if model is MessageModel.BROADCASTING else ["%RETRY%CG", "T"])
