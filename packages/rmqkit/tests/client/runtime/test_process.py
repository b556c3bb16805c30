"""Programs that run their clients until a signal: real processes, at our broker."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

import rmqkit
from rmqkit import ClientError, Message, Producer, PullConsumer, PushConsumer, sync
from rmqkit.client.runtime import process
from tests.client.inside import runtime_of
from tests.client.peers import Cluster, standalone, until
from tests.waiting import SECONDS

BEGIN = """
import asyncio, sys, time
from pathlib import Path
import rmqkit
from rmqkit import Message, Producer, PushConsumer, PushConsumerSettings, StartFrom, sync

name_server, may_end = sys.argv[1], Path(sys.argv[2])
settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0, persist_interval_ms=600_000)
"""

AWAITED = """
async def main():
    consumer = PushConsumer("G", name_server, settings=settings)

    @consumer.on("T")
    async def handle(message):
        print("begun", flush=True)
        while not may_end.exists():
            await asyncio.sleep(0.01)
        print("handled", flush=True)

    await consumer.run()
    print("closed", flush=True)

asyncio.run(main())
"""

WINDOWS = """
class Loop(asyncio.SelectorEventLoop):
    def add_signal_handler(self, *args):
        raise NotImplementedError
    def remove_signal_handler(self, *args):
        raise NotImplementedError

asyncio.set_event_loop_policy(None)
asyncio.new_event_loop = Loop
asyncio.events.new_event_loop = Loop
"""

SEVERAL = """
async def main():
    consumer = PushConsumer("G", name_server, settings=settings)
    producer = Producer("P", name_server)

    @consumer.on("T")
    async def handle(message):
        await producer.send(Message(topic="Begun", body=b"x"))
        print("begun", flush=True)
        while not may_end.exists():
            await asyncio.sleep(0.01)
        await producer.send(Message(topic="Done", body=b"x"))
        print("handled", flush=True)

    await rmqkit.run(consumer, producer)
    print("closed", flush=True)

asyncio.run(main())
"""

BLOCKING = """
consumer = sync.PushConsumer("G", name_server, settings=settings)
producer = sync.Producer("P", name_server)

@consumer.on("T")
def handle(message):
    producer.send(Message(topic="Begun", body=b"x"))
    print("begun", flush=True)
    while not may_end.exists():
        time.sleep(0.01)
    producer.send(Message(topic="Done", body=b"x"))
    print("handled", flush=True)

sync.run(consumer, producer)
print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    with standalone(tmp_path_factory.mktemp("running")) as address:
        yield address


@pytest.mark.parametrize(
    ("program", "number"),
    [
        (AWAITED, signal.SIGTERM),
        (AWAITED, signal.SIGINT),
        (WINDOWS + AWAITED, signal.SIGTERM),
        (SEVERAL, signal.SIGTERM),
        (BLOCKING, signal.SIGTERM),
        (BLOCKING, signal.SIGINT),
    ],
    ids=["SIGTERM", "SIGINT", "no add_signal_handler", "several", "blocking", "blocking SIGINT"],
)
def test_a_signal_lets_handlers_finish_and_saves_what_they_did(namesrv, tmp_path, request, program, number):
    name = request.node.callspec.id.replace(" ", "-").replace("_", "-")
    program = BEGIN + program.replace('"G"', f'"G-{name}"').replace('"T"', f'"T-{name}"')
    with sync.Producer("sender", namesrv) as producer:
        sent = producer.send(Message(topic=f"T-{name}", body=b"x"))
    may_end = tmp_path / "may-end"
    command = [sys.executable, "-c", program, namesrv, str(may_end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        may_end.touch()
        rest, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, rest, errors) == (0, "handled\nclosed\n", "")
    with sync.PullConsumer(f"G-{name}", namesrv) as reader:
        assert reader.committed(sent.queue) == 1


def test_a_second_signal_ends_a_program_at_once(namesrv, tmp_path):
    program = BEGIN + "import logging\nlogging.basicConfig(level=logging.INFO)\n" + AWAITED
    program = program.replace('"G"', '"G-twice"').replace('"T"', '"T-twice"')
    with sync.Producer("sender", namesrv) as producer:
        producer.send(Message(topic="T-twice", body=b"x"))
    command = [sys.executable, "-c", program, namesrv, str(tmp_path / "never")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert any("SIGTERM: finishing the work in progress" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == -signal.SIGTERM


@pytest.mark.real_time
async def test_it_returns_when_its_clients_are_closed_and_leaves_signals_as_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with Cluster() as cluster:
        producer, consumer = Producer("PG", cluster.namesrv), PushConsumer("CG", cluster.namesrv)
        consumer.subscribe("T", handler=print)
        running = asyncio.create_task(rmqkit.run(producer, consumer))
        await until(lambda: consumer._is_started and consumer._starting is None, "both are started")
        await asyncio.gather(producer.close(), consumer.close())
        await running
        assert producer.is_closed and consumer.is_closed
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.real_time
async def test_what_is_started_already_is_only_closed_and_a_start_that_fails_closes_the_rest():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        closed = PushConsumer("CG", cluster.namesrv)
        closed.subscribe("T", handler=print)
        twin = Producer("PG", runtime=runtime_of(producer))
        with pytest.raises(ClientError, match="producer group PG exists"):
            await rmqkit.run(producer, closed, twin)
        assert producer.is_closed and closed.is_closed and twin.is_closed


def test_producers_start_before_consumers_and_close_after_them():
    consumer, first, second = PushConsumer("G", "a:1"), Producer("P", "a:1"), Producer("Q", "a:1")
    assert process.starting_order([consumer, first, second]) == [first, second, consumer]
    assert process.closing_order([first, consumer, second]) == [[consumer], [first, second]]


@pytest.mark.real_time
async def test_who_cancels_it_has_the_clients_closed():
    async with Cluster() as cluster:
        producer = Producer("PG", cluster.namesrv)
        running = asyncio.create_task(producer.run())
        await until(lambda: not producer.is_new, "it is started")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert producer.is_closed


@pytest.mark.real_time
async def test_without_clients_or_elsewhere_than_in_the_main_thread_it_refuses():
    with pytest.raises(ClientError, match=r"^run\(\) has no clients: give it at least one$"):
        await rmqkit.run()
    with pytest.raises(ClientError, match=r"^run\(\) has no clients"):
        sync.run()
    told = []

    def elsewhere():
        try:
            asyncio.run(rmqkit.run(PullConsumer("G", "127.0.0.1:1")))
        except ClientError as error:
            told.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert told == ["run() is not in the main thread, where signals arrive: use 'with' and close() here"]
