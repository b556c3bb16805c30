"""The push consumer: against our own name server and broker, and its protocol against scripted ones.

Source: behaviour.md §8.3, §8.4, §8.6–8.9; remoting.md §9.6.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import HoldLimits, PushConsumerSettings, StartFrom
from rmqkit.errors import NoRoute, PeerRefused, SettingsError
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.standalone import Standalone
from tests.client.inside import coordinator_of
from tests.client.messages import record
from tests.client.peers import Cluster, offset, pulled, refused, until
from tests.ports import free_ports

PULL, SAVE, LEAVE = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNREGISTER_CLIENT
QUICK = PushConsumerSettings(take_over_pause_ms=400, start_from=StartFrom.FIRST_OFFSET)


class Received:
    """A handler that records its messages."""

    def __init__(self) -> None:
        self.messages = []

    async def __call__(self, message) -> None:
        self.messages.append(message)

    @property
    def bodies(self):
        return sorted(message.body for message in self.messages)


def bodies(*numbers: int) -> list[bytes]:
    return sorted(b"%d" % number for number in numbers)


async def send(producer: Producer, *numbers: int, topic: str = "T", tags: str | None = None) -> None:
    await asyncio.gather(*(producer.send(Message(topic=topic, body=b"%d" % i, tags=tags)) for i in numbers))


# -- against our own broker


async def sent_to_the_retry_topic(tmp_path, group, *topics):
    """Send a message to a group's retry topic itself; return what each topic's handler gets, and the dead letters."""
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        for topic in topics:
            await send(producer, 1, topic=topic)
        received = {topic: Received() for topic in topics}
        consumer = PushConsumer(group, cluster.namesrv_address, settings=QUICK)
        for topic, handler in received.items():
            consumer.subscribe(topic, "*", handler)
        retry, offsets = f"%RETRY%{group}", cluster.broker.context.offsets
        async with consumer:
            await until(lambda: all(one.messages for one in received.values()), "the messages of the topics")
            await producer.send(Message(topic=retry, body=b"2"))
            await until(
                lambda: consumer.status().queues and _is_done(consumer, retry), "the message of the retry topic"
            )
        assert offsets.get(group, retry, 0) == 1
        dead = cluster.broker.context.store.max_offset(f"%DLQ%{group}", 0)
        return [one.bodies for one in received.values()], dead


def _is_done(consumer, topic):
    return any(one.queue.topic == topic and one.consumed_offset == 1 for one in consumer.status().queues)


async def test_what_is_sent_to_the_retry_topic_itself_goes_to_the_only_handler(tmp_path):
    """It lacks RETRY_TOPIC. Before, no handler consumed it, and it blocked the offset of the retry topic forever."""
    assert await sent_to_the_retry_topic(tmp_path, "CG", "T") == ([bodies(1, 2)], 0)


async def test_what_is_sent_to_the_retry_topic_itself_is_a_dead_letter_if_there_are_several_handlers(tmp_path, caplog):
    found, dead = await sent_to_the_retry_topic(tmp_path, "CG", "T", "U")
    assert (found, dead) == ([bodies(1), bodies(1)], 1)
    assert "it was sent to %RETRY%CG itself, has no property RETRY_TOPIC" in caplog.text


async def test_every_message_is_received_once(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, *range(100))
        received = Received()
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        consumer.subscribe("T", "*", received)
        async with consumer:
            await until(lambda: len(received.messages) == 100, "the stored messages")
            await send(producer, *range(100, 200))
            await until(lambda: len(received.messages) == 200, "the new messages")
            assert received.bodies == bodies(*range(200))


async def test_a_consumer_may_be_started_before_its_topic_exists(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        received = Received()
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        consumer.subscribe("T", "*", received)
        async with consumer:
            assert consumer.held_queues() == set()
            await send(producer, 1, 2, 3)
            await until(lambda: len(received.messages) == 3, "three messages")


async def test_tags_choose(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, *range(10), tags="A")
        await send(producer, *range(10, 20), tags="B")
        await send(producer, *range(20, 30), tags="C")
        await send(producer, *range(30, 40))
        received = Received()
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        consumer.on("T", "A || C")(received)
        async with consumer:
            await until(lambda: len(received.messages) == 20, "the messages with tag A or C")
            assert received.bodies == bodies(*range(10), *range(20, 30))


async def test_two_members_share_the_queues_and_every_message_goes_to_one_of_them(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, *range(100))
        first, second = Received(), Received()
        one = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        two = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        one.subscribe("T", "*", first)
        two.subscribe("T", "*", second)

        def share(consumer):
            return len([queue for queue in consumer.held_queues() if queue.topic == "T"])

        async with one:
            await until(lambda: len(first.messages) == 100, "the first member reads all")
            async with two:
                await until(lambda: (share(one), share(two)) == (2, 2), "two queues each")
                await send(producer, *range(100, 300))
                await until(lambda: len(first.messages) + len(second.messages) >= 300, "all messages")
                assert len(second.messages) == 100
            await until(lambda: share(one) == 4, "the first member has all queues again")
            await send(producer, *range(300, 400))
            await until(lambda: len(first.messages) + len(second.messages) >= 400, "all messages")
        counted = Counter(message.msg_id for message in (*first.messages, *second.messages))
        assert len(counted) == 400
        assert set(counted.values()) == {1}


async def test_a_restarted_consumer_continues_where_it_was(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, *range(50))
        for sent in (range(50), range(50, 80)):
            await send(producer, *[number for number in sent if number >= 50])
            received = Received()
            consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
            consumer.subscribe("T", "*", received)
            async with consumer:
                await until(lambda: len(received.messages) >= len(sent), "the rest")  # noqa: B023 - awaited here
            assert received.bodies == bodies(*sent)


async def test_closing_lets_handlers_finish_and_saves_their_offsets(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, 1)
        gate, running, done = asyncio.Event(), asyncio.Event(), []
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)

        @consumer.on("T")
        async def handler(message):
            running.set()
            await gate.wait()
            done.append(message)

        await consumer.start()
        await running.wait()
        closing = asyncio.create_task(consumer.close())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.set()
        await closing
        (message,) = done
        async with PullConsumer("CG", cluster.namesrv_address) as reader:
            assert await reader.committed(MessageQueue("T", message.broker_name, message.queue_id)) == 1


async def test_messages_come_one_by_one_and_each_is_consumed_when_the_next_is_requested(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, *range(10))
        seen = []
        for stop_after in (4, 6):
            consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
            consumer.subscribe("T")
            async with consumer:
                count = 0
                async for message in consumer.messages():
                    seen.append(message.body)
                    count += 1
                    if count == stop_after:
                        break
        assert sorted(seen) == bodies(*range(10))


async def test_a_message_whose_processing_raised_is_redelivered(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, 1)
        seen = []
        for raising in (True, False):
            consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
            consumer.subscribe("T")
            try:
                async with consumer:
                    async for message in consumer.messages():
                        seen.append(message.msg_id)
                        if raising:
                            raise ValueError("no stock")
                        break
            except ValueError:
                assert raising
        assert len(seen) == 2
        assert len(set(seen)) == 1


async def test_topics_may_be_subscribed_and_given_up_while_it_runs(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, 1, topic="First")
        await send(producer, 2, topic="Second")
        received = Received()
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        consumer.subscribe("First", "*", received)
        async with consumer:
            await until(lambda: received.bodies == bodies(1), "the first topic")
            consumer.subscribe("Second", "*", received)
            await until(lambda: received.bodies == bodies(1, 2), "the second topic")
            consumer.unsubscribe("First")
            await until(
                lambda: {queue.topic for queue in consumer.held_queues()} <= {"Second", "%RETRY%CG"},
                "the first is gone",
            )
            await send(producer, 3, topic="First")
            await send(producer, 4, topic="Second")
            await until(lambda: received.bodies == bodies(1, 2, 4), "only the second")


@pytest.mark.real_time  # a thread waits for the loop
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_handler_may_close_its_own_consumer_and_its_message_counts(tmp_path, ordered, in_thread):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        sent = await producer.send(Message(topic="T", body=b"x"))
        closed = asyncio.Event()
        # With the drain time this long, waiting for itself would not end before the test's deadline.
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, drain_ms=3_600_000)
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=settings, ordered=ordered)
        loop = asyncio.get_running_loop()

        async def handler(message):
            await consumer.close()
            closed.set()

        def plain_handler(message):
            asyncio.run_coroutine_threadsafe(handler(message), loop).result(60)

        consumer.subscribe("T", "*", plain_handler if in_thread else handler)
        await consumer.start()
        await closed.wait()
        await consumer.close()
        async with PullConsumer("CG", cluster.namesrv_address) as reader:
            assert await reader.committed(sent.queue) == 1


async def test_paused_queues_are_not_handled_until_they_are_resumed(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queues = await producer.queues("T")
        received = Received()
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        consumer.subscribe("T", "*", received)
        async with consumer:
            await send(producer, 0)
            await until(lambda: received.messages, "the first message")
            await until(lambda: set(queues) <= consumer.held_queues(), "all queues")
            consumer.pause(queues[0])
            for queue in queues:
                await producer.send(Message(topic="T", body=b"%d" % queue.queue_id), queue=queue)
            await until(lambda: len(received.messages) == 4, "the other queues go on")
            assert queues[0].queue_id not in [message.queue_id for message in received.messages[1:]]
            consumer.pause()
            consumer.resume()
            await until(lambda: len(received.messages) == 5, "the paused queue, too")


async def test_the_limits_of_a_topic_are_shared_by_its_queues():
    async with Cluster() as cluster:
        cluster.topic("T", queues=3)
        settings = PushConsumerSettings(limits=HoldLimits(topic_messages_max=10, topic_mib_max=2))
        consumer = PushConsumer("CG", cluster.namesrv, settings=settings)
        consumer.subscribe("T", "*", Received())
        async with consumer:
            await until(lambda: len(consumer.held_queues()) == 3, "three queues")
            limits = {(one.messages_max, one.bytes_max) for one in coordinator_of(consumer).process_queues.values()}
            assert limits == {(3, 1 << 20)}


@pytest.mark.parametrize("batch_max", [0, 1025])
def test_the_size_of_batches_has_bounds(batch_max):
    with pytest.raises(SettingsError, match=f"batch_max is {batch_max}: it must be at least 1 and at most 1024"):
        PushConsumer("CG", "a:1").subscribe("T", "*", print, batch_max=batch_max)


async def test_batches_come_in_and_are_consumed(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queue = (await producer.queues("T"))[0]
        for i in range(50):
            await producer.send(Message(topic="T", body=b"%d" % i), queue=queue)
        calls = []
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)

        @consumer.on("T", batch_max=8)
        def handler(messages):
            calls.append([int(message.body) for message in messages])

        async with consumer:
            await until(lambda: sum(map(len, calls)) == 50, "all messages")
        assert max(map(len, calls)) == 8
        assert sorted(number for call in calls for number in call) == list(range(50))


# -- what crosses the wire


async def test_it_says_hello_before_it_pulls_and_leaves_when_it_is_closed():
    async with Cluster() as cluster:
        cluster.topic("T", queues=2)
        cluster.broker.answer(
            PULL,
            lambda command: pulled(command, 0, 1, record(0)) if len(cluster.broker.asked(PULL)) == 1 else None,
        )
        received = Received()
        consumer = PushConsumer("CG", cluster.namesrv)
        consumer.subscribe("T", "A || B", received)
        async with consumer:
            await until(lambda: len(cluster.broker.asked(PULL)) == 3, "pulls on both queues")
            codes = [command.code for command in cluster.broker.requests]
            assert codes.index(RequestCode.HEART_BEAT) < codes.index(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
            (data,) = cluster.heartbeats[-1].consumerDataSet
            versions = {one.topic: one.sub_version for one in data.subscription_data_set}
            first = {
                one.topic: one.sub_version for one in cluster.heartbeats[0].consumerDataSet[0].subscription_data_set
            }
            assert versions["T"] > first["T"], "the queues changed: brokers take the newest subscription"
            assert {int(fields["subVersion"]) for fields in cluster.broker.asked(PULL)} == {versions["T"]}
            assert (data.group_name, data.consume_type, data.message_model, data.consume_from_where) == (
                "CG",
                "CONSUME_PASSIVELY",
                "CLUSTERING",
                "CONSUME_FROM_FIRST_OFFSET",
            )
            subscriptions = {
                one.topic: (one.sub_string, one.tags_set, one.code_set) for one in data.subscription_data_set
            }
            assert subscriptions == {"T": ("A || B", ["A", "B"], [65, 66]), "%RETRY%CG": ("*", [], [])}
        codes = [command.code for command in cluster.broker.requests]
        assert codes[-1] == LEAVE
        (fields,) = cluster.broker.asked(LEAVE)
        assert fields["consumerGroup"] == "CG"
        (saved,) = [fields for fields in cluster.broker.asked(SAVE) if fields["commitOffset"] != "0"]
        assert (saved["topic"], saved["commitOffset"]) == ("T", "1"), "record 0 has no tag, so it counts as consumed"
        assert received.messages == []


async def test_an_illegal_offset_is_saved_and_the_queue_begins_there():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        saved = {"offset": 50}

        def save(command):
            saved["offset"] = int(cluster.broker.asked(SAVE)[-1]["commitOffset"])
            return reply(command)

        def pull(command):
            return pulled(command, 21, 7) if len(cluster.broker.asked(PULL)) == 1 else None

        cluster.broker.answer(PULL, pull)
        cluster.broker.answer(SAVE, save)
        cluster.broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, lambda command: offset(command, saved["offset"]))
        consumer = PushConsumer("CG", cluster.namesrv)
        consumer.subscribe("T", "*", Received())
        async with consumer:
            await until(lambda: len(cluster.broker.asked(PULL)) == 2, "pulling begins anew")
        assert [fields["queueOffset"] for fields in cluster.broker.asked(PULL)] == ["50", "7"]
        assert cluster.broker.asked(SAVE)[0]["commitOffset"] == "7"


async def test_a_queue_is_given_up_when_its_handlers_had_a_moment_to_finish(monkeypatch):
    monkeypatch.setattr("rmqkit.client.consumer.assignment._HAND_OVER_MS", 60_000)
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        answers = [lambda command: pulled(command, 0, 3, record(0) + record(1) + record(2))]
        cluster.broker.answer(PULL, lambda command: answers.pop()(command) if answers else None)
        gate, running = asyncio.Event(), []
        consumer = PushConsumer("CG", cluster.namesrv, settings=PushConsumerSettings(handlers_max=1))

        @consumer.on("T")
        async def handler(message):
            running.append(message.queue_offset)
            await gate.wait()

        async with consumer:
            await until(lambda: running, "a handler")
            queue = MessageQueue("T", "broker-0", 0)
            giving_up = asyncio.create_task(coordinator_of(consumer).change_queues([], [queue], is_shared=True))
            for _ in range(100):
                await asyncio.sleep(0)
            assert cluster.broker.asked(SAVE) == []
            gate.set()
            await giving_up
            assert [fields["commitOffset"] for fields in cluster.broker.asked(SAVE)] == ["1"]
            assert running == [0], "no other handler was started"


async def test_offsets_are_saved_every_few_seconds():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        answers = [lambda command: pulled(command, 0, 3, record(0) + record(1) + record(2))]
        cluster.broker.answer(PULL, lambda command: answers.pop()(command) if answers else None)
        consumer = PushConsumer("CG", cluster.namesrv, settings=PushConsumerSettings(persist_interval_ms=10))
        consumer.subscribe("T", "*", Received())
        async with consumer:
            await until(lambda: cluster.broker.asked(SAVE), "an offset is saved")
            await until(lambda: cluster.broker.asked(SAVE)[-1]["commitOffset"] == "3", "the last offset is saved")


async def test_an_sql_subscription_is_checked_by_the_broker_at_the_start():
    async with Cluster() as cluster:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.CHECK_CLIENT_CONFIG, refused(23, "at line 1: unexpected AND"))
        consumer = PushConsumer("CG", cluster.namesrv)
        consumer.subscribe("T", "a > 1 AND AND", Received(), expression_type="SQL92")
        with pytest.raises(PeerRefused, match="unexpected AND"):
            await consumer.start()
        assert b'"expressionType":"SQL92"' in next(
            command.body for command in cluster.broker.requests if command.code == RequestCode.CHECK_CLIENT_CONFIG
        )


async def test_without_a_name_server_it_does_not_start():
    consumer = PushConsumer("CG", "127.0.0.1:1")
    consumer.subscribe("T", "*", Received())
    with pytest.raises(NoRoute, match=r"cannot connect to 127\.0\.0\.1:1"):
        await consumer.start()


@pytest.mark.parametrize(
    ("topic", "expression", "text"),
    [
        ("a b", "*", "The specified topic: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("T", "||", "subscription to topic T: subscription expression '||' contains no tag: use '*' or 'A || B'"),
    ],
)
def test_subscriptions_are_checked(topic, expression, text):
    with pytest.raises(SettingsError) as caught:
        PushConsumer("CG", "a:1").subscribe(topic, expression)
    assert str(caught.value) == text


async def test_clients_survive_a_restart_of_name_server_and_broker(tmp_path):
    ports = free_ports()
    namesrv = NamesrvSettings(listen_port=ports[0], bind_address="127.0.0.1")
    broker = BrokerSettings(listen_port=ports[1], bind_address="127.0.0.1")
    async with Standalone(tmp_path / "store", namesrv=namesrv, broker=broker) as cluster:
        name_server = cluster.namesrv_address
        stored: set[str] = set()
        received = Received()
        consumer = PushConsumer("CG", name_server, settings=QUICK)
        consumer.subscribe("T", "*", received)
        producer = Producer("PG", name_server)
        await producer.start()

        async def send_one() -> bool:
            stored.add((await producer.send(Message(topic="T", body=b"x"))).msg_id)
            return True

        for _ in range(50):
            assert await send_one()
        await consumer.start()
        await until(lambda: len(received.messages) == 50, "the messages before the restart")
    sending = asyncio.create_task(send_one())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sending.done()
    async with Standalone(tmp_path / "store", namesrv=namesrv, broker=broker):
        assert await sending
        for _ in range(50):
            assert await send_one()
        await until(lambda: stored <= {message.msg_id for message in received.messages}, "the rest")
        await consumer.close()
        await producer.close()


async def test_a_topic_made_after_the_start_is_found_soon_by_a_runtime_that_runs_already():
    loop = asyncio.get_running_loop()
    async with Cluster() as cluster:
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.start()
        await asyncio.sleep(3)  # it has looked for its topics, of which there were none
        consumer = PushConsumer("G", runtime=runtime)
        consumer.subscribe("T", handler=print)
        async with consumer:
            begun = loop.time()
            cluster.topic("T")
            await until(consumer.held_queues, "the queues")
            assert loop.time() - begun < 10
        await runtime.close()
