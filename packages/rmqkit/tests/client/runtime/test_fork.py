"""Clients and ``fork``: started clients belong to the parent. In the child they start again, or an error asks for it.

Each program runs in its own process, so that the fork does not affect the tests' threads.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit import sync
from tests.client.peers import standalone
from tests.sources import ROOT

PATIENT = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests import patience
patience.be_patient()
"""

IN_CHILDREN = """
import json, logging, os, sys, warnings
logging.getLogger("rmqkit").addHandler(logging.NullHandler())
warnings.simplefilter("ignore")  # newer Pythons warn of every fork of a process with threads
if sys.argv[2] == "asyncio":
    sys.modules["uvloop"] = None
from rmqkit import ClientError, Message, sync

def in_child(work):
    "What work() returns in a forked child that ends as a program does."
    readable, writable = os.pipe()
    if not (child := os.fork()):
        os.close(readable)
        with os.fdopen(writable, "w") as answer:
            json.dump(work(), answer)
        sys.exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    return json.loads(text)
"""

PRELOADED = """
import gc

def connections(producer):
    pooled = producer._client._runtime.remoting._connections.values()
    return sorted(one._transport.get_extra_info("sockname") for one in pooled)

def work():
    sent = [producer.send(Message(topic="T", body=b"child")).msg_id for _ in range(5)]
    producer.close()
    return [producer._client._runtime.client_id, sent]

def drops_it():
    global producer
    del producer
    gc.collect()
    return ["", []]

producer = sync.Producer("PG", sys.argv[1])
producer.start()
sent = [producer.send(Message(topic="T", body=b"parent")).msg_id]
own = connections(producer)
ids = [producer._client._runtime.client_id]
for child in (work, drops_it, work, lambda: in_child(work)):
    client_id, there = in_child(child)
    ids.append(client_id)
    sent += there
    sent.append(producer.send(Message(topic="T", body=b"parent")).msg_id)
assert connections(producer) == own, "the parent's connections are not touched"
producer.close()
print(json.dumps([ids, sent]))
"""

STARTED_IN_CHILD = """
import threading
seen = threading.Event()
producer = sync.Producer("PG", sys.argv[1])
consumer = sync.PushConsumer("CG", sys.argv[1])
consumer.subscribe("T", "*", lambda message: seen.set())
made = producer._client._runtime.client_id

def work():
    with producer, consumer:
        while not seen.is_set():
            producer.send(Message(topic="T", body=b"x"))
            seen.wait(0.05)
        return producer._client._runtime.client_id

ids = [in_child(work), in_child(work)]
with producer:
    producer.send(Message(topic="T", body=b"x"))
print(json.dumps([made, *ids]))
"""

CONSUMER = """
consumer = sync.PushConsumer("CG", sys.argv[1])
consumer.subscribe("T", "*", lambda message: None)
consumer.start()

def work():
    errors = []
    for use in (consumer.status, consumer.start, lambda: next(consumer.messages())):
        try:
            use()
        except ClientError as error:
            errors.append(str(error))
    consumer.close()
    return errors

errors = in_child(work)
assert consumer.status().state == "started"
consumer.close()
print(json.dumps(errors))
"""

ON_LOOPS = """
import asyncio
from rmqkit import ClientRuntime, Producer

if sys.argv[2] == "asyncio":
    loop = asyncio.new_event_loop()
else:
    import uvloop
    loop = uvloop.new_event_loop()
runtime = ClientRuntime(sys.argv[1])
started, later, sharing = Producer("A", sys.argv[1]), Producer("B", sys.argv[1]), Producer("C", runtime=runtime)

async def begin():
    await runtime.start()
    await started.start()
    await started.send(Message(topic="T", body=b"parent"))

def child():
    async def work():
        said = []
        for use in (started.start(), started.send(Message(topic="T", body=b"x")), sharing.start()):
            try:
                await use
            except ClientError as error:
                said.append(str(error).replace(runtime.client_id, "ID"))
        await started.close()
        await runtime.close()
        async with later, Producer("A", sys.argv[1]) as anew:
            for producer in (later, anew):
                await producer.send(Message(topic="T", body=b"child"))
        return said

    return asyncio.run(work())

async def end():
    await started.send(Message(topic="T", body=b"parent"))
    async with later, sharing:
        await sharing.send(Message(topic="T", body=b"parent"))
    await started.close()
    await runtime.close()

loop.run_until_complete(begin())
said = in_child(child)
loop.run_until_complete(end())
loop.close()
print(json.dumps(said))
"""

POOL = """
import logging, multiprocessing, os, sys, warnings
from rmqkit import Message, sync

logging.getLogger("rmqkit").addHandler(logging.NullHandler())

producer = None

def work(number):
    global producer
    if producer is None:
        producer = sync.Producer("PG", sys.argv[1])
        producer.start()
    return os.getpid(), producer.send(Message(topic="T", body=b"%d" % number)).msg_id

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sent = [work(0)]
    replaced_after = 3 if sys.argv[2] == "fork" else None
    with multiprocessing.get_context(sys.argv[2]).Pool(2, maxtasksperchild=replaced_after) as pool:
        sent += pool.map(work, range(1, 13), chunksize=1)
        sent.append(work(13))
        pool.close()
        pool.join()
    producer.close()
    assert len({msg_id for _, msg_id in sent}) == 14
    assert len({process for process, _ in sent}) >= (5 if replaced_after else 2)
    print("sent")
"""


def run(tmp_path: Path, program: str, loop: str, *, messages: int | None = None) -> str:
    """Return the output of a program that gets a name server. Check the number of messages in topic T afterwards."""
    path = tmp_path / "program.py"
    path.write_text(PATIENT + program)
    with standalone(tmp_path) as namesrv:
        command = [sys.executable, str(path), namesrv, loop]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        if messages is not None:
            with sync.PullConsumer("reader", namesrv) as reader:
                assert sum(reader.max_offset(queue) for queue in reader.queues("T")) == messages
    return done.stdout


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_producer_started_before_the_fork_continues_in_parent_and_children(tmp_path, loop):
    ids, sent = json.loads(run(tmp_path, IN_CHILDREN + PRELOADED, loop, messages=20))
    assert len(sent) == len(set(sent)) == 20
    assert len(set(ids)) == 5, "each process has a client id of its own"


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_clients_made_before_the_fork_are_started_after_it(tmp_path, loop):
    ids = json.loads(run(tmp_path, IN_CHILDREN + STARTED_IN_CHILD, loop))
    assert len(set(ids)) == 3, "each process has a client id of its own"


def test_a_consumer_started_before_the_fork_is_the_parents(tmp_path):
    said = json.loads(run(tmp_path, IN_CHILDREN + CONSUMER, "uvloop"))
    assert said == 3 * [
        (
            "consumer of group CG is the parent process's, from before a fork: make a new one here, or start it only "
            "after the fork"
        )
    ]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_coroutine_clients_say_that_they_are_the_parents(tmp_path, loop):
    said = json.loads(run(tmp_path, IN_CHILDREN + ON_LOOPS, loop, messages=5))
    left_behind = (
        "producer of group A is the parent process's, from before a fork: make a new one here, or start it only after "
        "the fork"
    )
    assert said == [
        left_behind,
        left_behind,
        (
            "client ID was started before this process was forked, its connections belong to the parent: create a new "
            "client here"
        ),
    ]


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_pools_of_processes_send(tmp_path, method):
    assert run(tmp_path, POOL, method, messages=14) == "sent\n"


def test_a_client_is_not_sent_to_another_process():
    with pytest.raises(TypeError, match=r"^a Producer cannot be sent to another process: make one there$"):
        pickle.dumps(sync.Producer("PG", "127.0.0.1:1"))
