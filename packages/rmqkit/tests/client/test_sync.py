"""The blocking facade: the same names, the same arguments, one loop thread."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmqkit import sync
from rmqkit.client import connect as connected
from rmqkit.client.consumer import pull as pull_consumer
from rmqkit.client.consumer import push as push_consumer
from rmqkit.client.pop import consumer as pop_consumer
from rmqkit.client.producer import producer, transaction
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.errors import ClientError, MessageIllegal, SettingsError
from rmqkit.protocol.message import Message
from tests.client.peers import standalone

PAIRS = [
    (sync.Producer, producer.Producer),
    (sync.TransactionProducer, transaction.TransactionProducer),
    (sync.PullConsumer, pull_consumer.PullConsumer),
    (sync.PushConsumer, push_consumer.PushConsumer),
    (sync.PopConsumer, pop_consumer.PopConsumer),
]
INTERNAL: set[str] = set()
FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)


def public_methods(client: type) -> set[str]:
    return {
        name for name, member in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")
    } - INTERNAL


@pytest.mark.parametrize(("blocking", "original"), PAIRS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_names_arguments_and_texts_are_the_original_ones(blocking, original):
    assert public_methods(blocking) == public_methods(original)
    assert str(inspect.signature(blocking)) == str(inspect.signature(original))
    for name in public_methods(original) - {"messages"}:
        ours, theirs = getattr(blocking, name), getattr(original, name)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
        assert ours.__doc__ == theirs.__doc__, name
        assert not inspect.iscoroutinefunction(ours), name


def test_a_connection_has_the_original_names_and_arguments():
    ours, theirs = sync.ConnectedClients, connected.ConnectedClients
    assert public_methods(ours) == public_methods(theirs)
    for name in public_methods(theirs):
        assert inspect.signature(getattr(ours, name)).parameters == inspect.signature(getattr(theirs, name)).parameters
    assert inspect.signature(sync.connect).parameters == inspect.signature(connected.connect).parameters


def test_all_kinds_of_clients_share_a_connection(tmp_path):
    seen: list[bytes] = []
    everything = threading.Event()

    def take(message) -> None:
        seen.append(message.body)
        if len(seen) == 2:
            everything.set()

    with standalone(tmp_path) as namesrv, sync.connect(namesrv, wait_ready=30) as mq:
        consumer, popping, producer = mq.consumer("billing"), mq.pop_consumer("couriers"), mq.producer("shop")
        for one in (consumer, popping):
            one.subscribe("Orders", handler=take)
        with producer, consumer, popping, mq.pull_consumer("audit") as reader:
            assert isinstance(producer, sync.Producer)
            assert producer.send("Orders", b"17").status.name == "SEND_OK"
            assert everything.wait(60)
            assert sum(reader.max_offset(queue) for queue in reader.queues("Orders")) == 1
        mq.ping()
        left_open = mq.producer("late")
        left_open.start()
    assert left_open.is_closed
    with pytest.raises(ClientError, match="the connection is closed"):
        mq.producer("too late")
    with pytest.raises(ClientError, match="the connection is closed"):
        mq.ping()


def test_messages_go_out_and_come_in(tmp_path):
    with standalone(tmp_path) as namesrv:
        with sync.Producer("PG", namesrv) as sender:
            sent = {sender.send(Message(topic="T", body=b"%d" % i)).msg_id for i in range(20)}
            sent |= set(sender.send_batch([Message(topic="T", body=b"x")] * 3).msg_id.split(","))
        received: dict[str, str] = {}
        everything = threading.Event()
        consumer = sync.PushConsumer("CG", namesrv, settings=FIRST)

        @consumer.on("T")
        def handler(message):
            received[message.msg_id] = threading.current_thread().name
            if len(received) == 23:
                everything.set()

        with consumer:
            assert everything.wait(60), f"{len(received)} of 23 messages"
            assert {queue.topic for queue in consumer.held_queues()} >= {"T"}
        assert received.keys() == sent
        assert all(name.startswith("rmqkit CG") for name in received.values())
        with sync.PullConsumer("CG", namesrv) as reader:
            assert sum(reader.committed(queue) or 0 for queue in reader.queues("T")) == 23


def test_transactions_requests_and_many_messages_work_without_a_loop(tmp_path):
    def execute(message, argument):
        assert sender.send(Message(topic="Audit", body=message.msg_id.encode())), "the facade may be used here"
        return argument

    with standalone(tmp_path) as namesrv, sync.Producer("PG", namesrv) as sender:
        assert len(sender.send_many(Message(topic="T", body=b"%d" % i) for i in range(100))) == 100
        with sync.TransactionProducer("TG", namesrv, execute=execute, check=lambda message: None) as shop:
            result = shop.send_in_transaction(Message(topic="T", body=b"x"), transaction.TransactionState.COMMIT)
            assert result.state is transaction.TransactionState.COMMIT
        consumer = sync.PushConsumer("CG", namesrv, settings=FIRST)

        @consumer.on("Questions")
        def handler(message):
            sender.reply(message, message.body.upper())

        with consumer:
            assert sender.request(Message(topic="Questions", body=b"x"), timeout=60).body == b"X"


def test_messages_are_iterated(tmp_path):
    with standalone(tmp_path) as namesrv:
        with sync.Producer("PG", namesrv) as sender:
            for i in range(5):
                sender.send(Message(topic="T", body=b"%d" % i))
        seen = []
        consumer = sync.PushConsumer("CG", namesrv, settings=FIRST)
        consumer.subscribe("T")
        with consumer:
            for message in consumer.messages():
                seen.append(message.body)
                if len(seen) == 5:
                    break
        assert sorted(seen) == [b"0", b"1", b"2", b"3", b"4"]


def test_any_thread_may_use_a_client_and_all_share_one_loop_thread(tmp_path):
    with standalone(tmp_path) as namesrv, sync.Producer("PG", namesrv) as sender, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: sender.send(Message(topic="T", body=b"%d" % i)), range(200)))
        assert len({result.msg_id for result in results}) == 200
        assert [thread.name for thread in threading.enumerate()].count("rmqkit portal") == 1


def test_errors_are_the_same(tmp_path):
    with standalone(tmp_path) as namesrv:
        sender = sync.Producer("PG", namesrv)
        with pytest.raises(ClientError, match="is not started"):
            sender.send("T", b"x")
        with sender, pytest.raises(MessageIllegal):
            sender.send("T", b"")
        sender.close()


def test_it_refuses_to_wait_for_itself(tmp_path):
    with standalone(tmp_path) as namesrv, sync.Producer("PG", namesrv) as sender:
        sender.send(Message(topic="T", body=b"x"))
        errors = []
        consumer = sync.PushConsumer("CG", namesrv, settings=FIRST)
        done = threading.Event()

        @consumer.on("T")
        async def handler(message):
            try:
                sender.send(Message(topic="U", body=b"x"))
            except RuntimeError as error:
                errors.append(str(error))
                done.set()

        with consumer:
            assert done.wait(60)
        assert errors == ["a blocking client cannot be used on its own loop: use rmqkit's coroutines there"]


PROGRAM = """
import sys, threading
from rmqkit import Message, PushConsumerSettings, StartFrom, sync
producer = sync.Producer("PG", sys.argv[1])
producer.start()
for i in range(10):
    producer.send(Message(topic="T", body=b"%d" % i))
consumer = sync.PushConsumer("CG", sys.argv[1], settings=PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET))
everything = threading.Event()
seen = []
@consumer.on("T")
def handler(message):
    seen.append(message)
    if len(seen) == 10:
        everything.set()
consumer.start()
assert everything.wait(60)
print("end of program")
"""


def test_a_program_that_closes_nothing_ends_cleanly_and_its_offsets_are_saved(tmp_path):
    with standalone(tmp_path) as namesrv:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, namesrv],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "end of program\n", "")
        with sync.PullConsumer("CG", namesrv) as reader:
            assert sum(reader.committed(queue) or 0 for queue in reader.queues("T")) == 10


def test_a_topic_is_read_without_a_group(tmp_path):
    with (
        standalone(tmp_path) as namesrv,
        sync.connect(namesrv, wait_ready=30) as mq,
        mq.producer("shop") as producer,
        mq.pull_consumer("audit") as known,
    ):
        producer.send("Orders", b"0")
        assert known.queues("Orders")
        assert [one.body for one in mq.read("Orders", stop_at_end=True)] == [b"0"]
        seen = []
        for message in mq.read("Orders"):
            seen.append(message.body)
            if len(seen) == 2:
                break
            producer.send("Orders", b"1")
        assert seen == [b"0", b"1"]
        with pytest.raises(SettingsError, match="give 'first', 'new'"):
            mq.read("Orders", start=17)
