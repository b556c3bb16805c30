"""Work in flight when a client is closed. Source: behaviour.md §7.12, §8.12."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rmqkit import sync
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer import transaction
from rmqkit.client.producer.accumulator import SendManyFailed
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_hash
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import Batching, ProducerSettings
from rmqkit.errors import ClientError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.standalone import Standalone
from tests.client.peers import Cluster, offset, standalone, stored, until
from tests.client.pops import PopBroker, popped, records

SINGLE, BATCH, ROUTE = (
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
)


class Held:
    """A broker that holds its answers to requests of some codes until the test releases them."""

    def __init__(self, peer, *codes):
        self.peer, self.commands = peer, []
        for code in codes:
            peer.answer(code, self.commands.append)

    async def until(self, count=1):
        await until(lambda: len(self.commands) >= count, f"{count} requests that are held")

    def answer(self, answer):
        for command in self.commands:
            self.peer.connections[0].send(answer(command))
        self.commands.clear()


def message(body=b"x"):
    return Message(topic="T", body=body)


async def closing_of(client):
    """The end of a client, as far as it goes by itself."""
    closing = asyncio.create_task(client.close())
    for _ in range(100):
        await asyncio.sleep(0)
    return closing


async def refused(call):
    with pytest.raises(ClientError, match=r"^producer of group PG is closed: make a new one$"):
        await call


async def test_closing_waits_for_sends_under_way_and_refuses_new_ones():
    async with Cluster() as cluster:
        cluster.topic("T")
        producer = Producer("PG", cluster.namesrv)
        await producer.start()
        held = Held(cluster.broker, SINGLE, BATCH)
        sends = [
            asyncio.create_task(one)
            for one in (
                producer.send(message()),
                producer.send_batch([message(), message()]),
                producer.send_many([message(bytes(2_000_000)), message(bytes(2_000_000)), message()]),
            )
        ]
        await held.until(4)
        closing = await closing_of(producer)
        await refused(producer.send(message()))
        await refused(producer.send_many([message()]))
        while not closing.done():
            held.answer(stored)
            await asyncio.sleep(0)
        assert len((await asyncio.gather(*sends))[2]) == 3
        assert cluster.broker.requests[-1].code == RequestCode.UNREGISTER_CLIENT


async def test_a_send_that_waits_for_its_route_when_the_producer_is_closed_goes_out():
    for settings in (ProducerSettings(), ProducerSettings(batch=Batching(auto=True))):
        async with Cluster() as cluster:
            cluster.topic("T")
            producer = Producer("PG", cluster.namesrv, settings=settings)
            await producer.start()
            held = Held(cluster.name_server, ROUTE)
            sends = [
                asyncio.create_task(producer.send(message())),
                asyncio.create_task(producer.send(message(), selector=by_hash("k"))),
            ]
            await held.until()
            closing = await closing_of(producer)
            held.answer(cluster._route)
            assert len(await asyncio.gather(*sends)) == 2
            await closing


async def test_open_batches_go_out_at_once_and_are_waited_for():
    slow = ProducerSettings(batch=Batching(auto=True, delay_ms=30_000))
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        producer = Producer("PG", cluster.namesrv, settings=slow)
        await producer.start()
        held = Held(cluster.broker, BATCH)
        sends = [asyncio.create_task(producer.send(message())) for _ in range(3)]
        await asyncio.sleep(0)
        assert held.commands == []
        closing = asyncio.create_task(producer.close())
        await held.until()
        held.answer(stored)
        assert len(await asyncio.gather(*sends)) == 3
        await closing


@pytest.mark.parametrize("kind", ["endless", "idle"])
async def test_messages_that_continue_for_ever_are_not_waited_for(kind):
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield message(b"%d" % taken[-1])

    more = asyncio.Event()

    async def idle():
        taken.append(0)
        yield message()
        await more.wait()
        yield message()
        raise AssertionError("asked for more")

    async with Cluster() as cluster:
        cluster.topic("T")
        producer = Producer(
            "PG", cluster.namesrv, settings=ProducerSettings(batch=Batching(bytes=1024, delay_ms=30_000))
        )
        await producer.start()
        held = Held(cluster.broker, BATCH)
        sending = asyncio.create_task(producer.send_many(endless() if kind == "endless" else idle()))
        await until(lambda: taken, "the first message")
        closing = asyncio.create_task(producer.close())
        while not closing.done():
            held.answer(stored)
            await asyncio.sleep(0)
        more.set()
        with pytest.raises(SendManyFailed, match=r"1 of .* messages not sent.* PG was closed") as raised:
            await sending
        *sent, last = raised.value.results
        assert (len(sent), type(last)) == (max(taken) if kind == "endless" else 1, ClientError)


async def test_what_was_sent_one_way_is_written_before_the_connection_closes(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as other:
        (queue, *_) = await other.queues("T")
        producer = Producer("PG", cluster.namesrv_address)
        await producer.start()
        sends = [asyncio.create_task(producer.send_one_way(message(bytes(100_000)), queue=queue)) for _ in range(50)]
        await asyncio.sleep(0)
        await producer.close()
        await asyncio.gather(*sends)
        assert (await other.send(message(), queue=queue)).queue_offset == 50


async def test_closing_waits_for_local_transactions_and_reports_how_they_ended():
    begun, end = asyncio.Event(), asyncio.Event()

    async def execute(message, argument):
        begun.set()
        await end.wait()
        return TransactionState.COMMIT

    async with Cluster() as cluster:
        cluster.topic("T")
        producer = TransactionProducer("PG", cluster.namesrv, execute=execute, check=execute)
        await producer.start()
        sending = asyncio.create_task(producer.send_in_transaction(message()))
        await begun.wait()
        closing = await closing_of(producer)
        end.set()
        assert (await sending).state is TransactionState.COMMIT
        await closing
        (told,) = cluster.broker.asked(RequestCode.END_TRANSACTION)
        assert told["commitOrRollback"] == "8"


async def test_a_local_transaction_that_never_ends_is_left_to_the_checks(monkeypatch, caplog):
    monkeypatch.setattr(transaction, "_FINISH_SECONDS", 0.01)
    begun = asyncio.Event()

    async def execute(message, argument):
        begun.set()
        await asyncio.Event().wait()

    async with Cluster() as cluster:
        cluster.topic("T")
        producer = TransactionProducer("PG", cluster.namesrv, execute=execute, check=execute)
        await producer.start()
        sending = asyncio.create_task(producer.send_in_transaction(message()))
        await begun.wait()
        await producer.close()
        assert "producer of group PG is closed with 1 transactions under way" in caplog.text
        assert not sending.done()
        sending.cancel()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_local_transaction_may_close_its_own_producer(tmp_path, in_thread):
    def execute_in_thread(message, argument):
        producer.close()
        return TransactionState.COMMIT

    async def execute(message, argument):
        await producer._client.close()
        return TransactionState.COMMIT

    with standalone(tmp_path) as namesrv:
        function = execute_in_thread if in_thread else execute
        producer = sync.TransactionProducer("PG", namesrv, execute=function, check=function)
        producer.start()
        assert producer.send_in_transaction(message()).state is TransactionState.COMMIT
        producer.close()


def test_a_blocking_producer_waits_for_the_sends_of_other_threads(tmp_path):
    with standalone(tmp_path) as namesrv:
        producer = sync.Producer("PG", namesrv)
        producer.start()
        begun, outcomes = threading.Semaphore(0), []

        def send():
            begun.release()
            try:
                while True:
                    outcomes.append(producer.send(message()).status.name)
            except ClientError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
            begun.acquire()
        producer.close()
        for thread in threads:
            thread.join()
        assert set(outcomes) - {"SEND_OK"} == {"producer of group PG is closed: make a new one"}


async def test_acks_under_way_are_answered_before_a_pop_consumer_is_gone():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(RequestCode.POP_MESSAGE, popped(*records(0, 1)))
        consumer = PopConsumer("CG", cluster.namesrv)
        await consumer.start()
        first, second = await consumer.pop("T")
        held = Held(cluster.broker, RequestCode.ACK_MESSAGE)
        acking = asyncio.create_task(consumer.ack(first))
        await held.until()
        closing = await closing_of(consumer)
        with pytest.raises(ClientError, match=r"^pop consumer of group CG is closed: make a new one$"):
            await consumer.ack(second)
        held.answer(reply)
        await acking
        await closing


async def test_a_handler_acknowledges_and_puts_off_also_while_its_consumer_closes():
    begun, end, outcomes = asyncio.Event(), asyncio.Event(), []
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        broker = PopBroker(cluster.broker, popped(*records(0)))
        consumer = PopConsumer("CG", cluster.namesrv)

        @consumer.on("T")
        async def handler(one):
            begun.set()
            await end.wait()
            await consumer.ack(one)
            outcomes.append(one)

        await consumer.start()
        await begun.wait()
        closing = await closing_of(consumer)
        end.set()
        await closing
        assert (len(outcomes), broker.acked, broker.changed) == (1, [0], [])


async def test_a_commit_under_way_is_answered_before_a_pull_consumer_is_gone():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        consumer = PullConsumer("CG", cluster.namesrv)
        await consumer.start()
        held = Held(cluster.broker, RequestCode.UPDATE_CONSUMER_OFFSET)
        committing = asyncio.create_task(consumer.commit(MessageQueue("T", "broker-0", 0), 7))
        await held.until()
        closing = await closing_of(consumer)
        held.answer(reply)
        await committing
        await closing


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_scheduled_pull_may_close_its_own_consumer(tmp_path, in_thread):
    ended = threading.Event()

    def in_a_thread(queue):
        consumer.close()
        ended.set()

    async def on_the_loop(queue):
        await consumer._client.close()
        ended.set()

    with standalone(tmp_path) as namesrv:
        with sync.Producer("PG", namesrv) as producer:
            producer.send(message())
        consumer = sync.PullConsumer("CG", namesrv)
        consumer.schedule("T", in_a_thread if in_thread else on_the_loop)
        consumer.start()
        assert ended.wait(20), "closing waits for the call that closes"
        consumer.close()


async def test_a_seek_under_way_takes_no_queue_of_a_consumer_that_is_closed():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(RequestCode.GET_MAX_OFFSET, lambda command: offset(command, 10))
        consumer = PullConsumer("CG", cluster.namesrv)
        consumer.subscribe("T")
        await consumer.start()
        await until(consumer.held_queues, "the queue")
        held = Held(cluster.broker, RequestCode.GET_MIN_OFFSET)
        seeking = asyncio.create_task(consumer.seek(*consumer.held_queues(), 5))
        await held.until()
        closing = await closing_of(consumer)
        held.answer(lambda command: offset(command, 0))
        await asyncio.gather(seeking, closing, return_exceptions=True)
        await until(
            lambda: not any(task.get_name().startswith("pull ") for task in asyncio.all_tasks()), "end of its pulls"
        )
