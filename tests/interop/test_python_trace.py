"""The trace topic and namespaces with a real Apache broker, compared with Java clients that do the same.

Source: behaviour.md §7.11, §9.7; remoting.md §3.2, §7.7.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import StartFrom, Tracing
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.names import TRACE_TOPIC
from rmqkit.protocol.trace import decode_traces
from tests.client.peers import until
from tests.interop.apache import ApachePair, ask
from tests.interop.mqadmin import run_mqadmin
from tests.interop.probe import PROBE_HEAP_MB
from tests.patience import producing, pulling, pushing

SECONDS = 300.0
TRACED = producing(trace=Tracing(recalls=True))
FIRST = pushing(trace=Tracing(), start_from=StartFrom.FIRST_OFFSET, suspend_queue_ms=10)
POLLED = pulling(trace=Tracing(), start_from=StartFrom.FIRST_OFFSET)
JAVA_RECALLS = "-Dcom.rocketmq.recall.default.trace.enable=true"


@pytest.fixture(scope="module")
def java(apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run Java programs with the same work as ours, at the same time."""
    ask(apache.broker_addr, Command(RequestCode.UPDATE_BROKER_CONFIG, body=b"recallMessageEnable=true"))
    running = {}
    for command, *options in (("acts", "--name", "TraceJava"), ("exchange", "--name", "Spaced", "--namespace", "NsA")):
        arguments = [command, "--namesrv", apache.namesrv_addr, *options]
        work_dir = tmp_path_factory.mktemp(command)
        program, *rest = apache.kit.jvm("interop.TraceProbe", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
        running[command] = subprocess.Popen(
            [program, JAVA_RECALLS, *rest], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


def test_namespaces_are_shared_with_java_clients_and_kept_apart(apache, java):
    async def scenario() -> None:
        namesrv, seen = apache.namesrv_addr, {"NsA": Counter(), "NsB": Counter()}

        def consumer(namespace: str) -> PushConsumer:
            made = PushConsumer(
                "Spaced-python",
                namesrv,
                settings=pushing(namespace=namespace, start_from=FIRST.start_from),
            )

            @made.on("Spaced-T")
            async def note(message: ReceivedMessage) -> None:
                seen[namespace][message.topic, message.body] += 1
                if message.body == b"from Python" and message.reconsume_times == 0:
                    raise ConsumeLater(1)

            return made

        for namespace, body in (("NsA", b"from Python"), ("NsB", b"other")):
            async with Producer("Spaced-P", namesrv, settings=producing(namespace=namespace)) as producer:
                sent = await producer.send(Message(topic="Spaced-T", body=body))
            assert sent.queue.topic == "Spaced-T"
        async with consumer("NsA"), consumer("NsB"):
            await until(lambda: seen["NsA"].total() >= 3 and seen["NsB"], "messages of both namespaces", SECONDS)
        assert seen["NsA"] == {("Spaced-T", b"from Python"): 2, ("Spaced-T", b"from Java"): 1}
        assert seen["NsB"] == {("Spaced-T", b"other"): 1}
        async with PullConsumer("Spaced-reader", namesrv, settings=pulling()) as reader:
            assert len(await reader.queues("NsA%Spaced-T")) == 4
            assert len(await reader.queues("%RETRY%NsA%Spaced-python")) == 1

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    output, _ = java["exchange"].communicate(timeout=SECONDS)
    assert java["exchange"].returncode == 0, output
    assert sorted(output.splitlines()) == ["Spaced-T from Java", "Spaced-T from Python"]


def test_the_trace_of_the_same_acts_is_that_of_a_java_client(apache, java, tmp_path):
    asyncio.run(asyncio.wait_for(acts(apache.namesrv_addr, "TracePyth"), SECONDS))
    output, _ = java["acts"].communicate(timeout=SECONDS)
    assert java["acts"].returncode == 0, output
    traces = asyncio.run(asyncio.wait_for(read_traces(apache.namesrv_addr), SECONDS))
    ours, theirs = (
        sorted(alike(line, name) for one in traces for line in lines(one, name)) for name in ("TracePyth", "TraceJava")
    )
    assert ours == theirs
    assert {line.partition("|")[0] for line in ours} == {"Pub", "SubBefore", "SubAfter", "EndTransaction", "Recall"}
    for one in traces:
        assert set(one.keys) == keys_in(one)
    mqadmin_reads_it(apache, traces, tmp_path)


def mqadmin_reads_it(apache: ApachePair, traces: list[ReceivedMessage], tmp_path: Path) -> None:
    """Check the output of `mqadmin queryMsgTraceById` for a message that we sent, and that failed and then succeeded
    here.
    """
    (sent,) = [
        line for one in traces for line in lines(one, "TracePyth") if "|TracePyth-T|" in line and "|A|k1" in line
    ]
    msg_id = sent.split("|")[5]
    command = ["queryMsgTraceById", "-i", msg_id, "-n", apache.namesrv_addr]
    (shown,) = run_mqadmin(apache.kit, [command], tmp_path)
    words = [line.split() for line in shown.splitlines()]
    assert ["Pub", "TracePyth-P"] in [row[:2] for row in words]
    (begun, *_) = [row for row in words if row[:1] == ["Pub"]]
    assert begun[-1] == "success"
    # In the order of a hash table.
    assert sorted(row[-1] for row in words if row[:2] == ["Sub", "TracePyth-C"]) == ["failed", "success"], shown


async def acts(namesrv: str, name: str) -> None:
    """Do the work of `TraceProbe acts`, in the same order."""
    async with Producer(f"{name}-P", namesrv, settings=TRACED) as producer:
        await producer.send(Message(topic=f"{name}-T", body=b"plain"))
        await producer.send(Message(topic=f"{name}-T", body=b"tagged", tags="A", keys=["k1", "k2"]))
        await producer.send(Message(topic=f"{name}-T", body=b"delayed", tags="A", delay_level=1))
        pair = [
            Message(topic=f"{name}-T", body=b"one", tags="A", keys="k3"),
            Message(topic=f"{name}-T", body=b"two", tags="B"),
        ]
        await producer.send_batch(pair)
        await producer.send_one_way(Message(topic=f"{name}-T", body=b"one way"))
        await producer.send(Message(topic=f"{name}-Large", body=b"x" * 5000))
        await producer.send(Message(topic=f"{name}-Large", body=b"ordered", sharding_key="s"))
        later = round(time.time() * 1000) + 60_000
        timed = await producer.send(Message(topic=f"{name}-Timed", body=b"recalled", deliver_at=later / 1000))
        assert timed.recall_handle is not None
        await producer.recall(timed.recall_handle)
    await transactions(namesrv, name)
    await consumes(PushConsumer(f"{name}-C", namesrv, settings=FIRST), f"{name}-T", 8)
    await consumes(PushConsumer(f"{name}-O", namesrv, settings=FIRST, ordered=True), f"{name}-Large", 3)
    async with PullConsumer(f"{name}-L", namesrv, settings=POLLED) as poller:
        poller.subscribe(f"{name}-Large")
        polled = 0
        while polled < 2:
            polled += len(await poller.poll(20_000))


async def transactions(namesrv: str, name: str) -> None:
    checked = asyncio.Event()

    async def execute(message: Message, state: TransactionState) -> TransactionState:
        return state

    async def check(message: ReceivedMessage) -> TransactionState:
        asyncio.get_running_loop().call_later(1, checked.set)
        return TransactionState.COMMIT

    async with TransactionProducer(f"{name}-X", namesrv, execute=execute, check=check, settings=TRACED) as producer:
        topic = f"{name}-X"
        await producer.send_in_transaction(
            Message(topic=topic, body=b"c", tags="A", keys="k4"), TransactionState.COMMIT
        )
        await producer.send_in_transaction(Message(topic=topic, body=b"r"), TransactionState.ROLLBACK)
        await producer.send_in_transaction(Message(topic=topic, body=b"u"), TransactionState.UNKNOWN)
        await checked.wait()


async def consumes(consumer: PushConsumer, topic: str, count: int) -> None:
    seen: Counter[bytes] = Counter()

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        seen[message.body] += 1
        if seen[message.body] == 1 and message.body in (b"plain", b"ordered"):
            raise ConsumeLater
        if seen[message.body] == 1 and message.body == b"tagged":
            raise ValueError("not yet")

    async with consumer:
        await until(lambda: seen.total() >= count, f"{count} messages of {topic}", SECONDS)


async def read_traces(namesrv: str) -> list[ReceivedMessage]:
    """Return all messages of the trace topic."""
    found: list[ReceivedMessage] = []
    async with PullConsumer("Trace-reader", namesrv, settings=pulling()) as reader:
        for queue in await reader.queues(TRACE_TOPIC):
            offset, end = 0, await reader.max_offset(queue)
            while offset < end:
                pulled = await reader.pull(queue, offset)
                found += pulled.messages
                offset = pulled.next_begin_offset
    return found


def lines(message: ReceivedMessage, name: str) -> list[str]:
    """Return the records of clients whose names have this prefix, their fields joined by a bar."""
    records = message.body.decode().replace("\x01", "|").split("\x02")
    return [record for record in records if f"|{name}-" in record]


def alike(line: str, name: str) -> str:
    """Return a record without values that differ between runs: names, ids, times, and the store's address."""
    fields = line.replace(name, "Trace").split("|")
    cost = {"Pub": 10, "SubAfter": 3}.get(fields[0])
    if cost is not None:
        assert int(fields[cost]) < SECONDS * 1000
        fields[cost] = "COST"
    # The body size of a batch depends on its members' ids, which are longer if Java finds an IPv6 address.
    if "," in fields[5]:
        fields[9] = str(int(fields[9]) - len(fields[5]))
    line = re.sub(r"[0-9A-F]{32,}", "ID", "|".join(fields))
    return re.sub(r"\|\d{13}(?=\||$)", "|TIME", line)


def keys_in(message: ReceivedMessage) -> set[str]:
    """Return the expected keys of a trace message: the ids and keys of its records."""
    records = decode_traces(message.body)
    words = {str(record.msg_id) for record in records}
    return words.union(*((getattr(record, "keys", None) or "").split() for record in records))
