"""What our producer can do besides sending, against Apache's broker and against ours.

Source: behaviour.md §7.8–§7.10, §9.1–§9.3.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmqkit.client.producer import Producer
from rmqkit.client.pull_consumer import PullConsumer
from rmqkit.client.push_consumer import PushConsumer
from rmqkit.client.settings import PushConsumerSettings, StartFrom
from rmqkit.client.transaction import TransactionProducer, TransactionState
from rmqkit.errors import NoRoute, ReplyTimedOut
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.message import Message, ReceivedMessage
from tests.interop.apache import QUICK_CONF, ApachePair, ask
from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB
from tests.interop.standalone import run_standalone

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
SECONDS = 60
EARLY_MS_MAX = 1000
"""Times of delivery are rounded down to this."""


@pytest.fixture(scope="module", params=["apache", "standalone"])
def namesrv(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of either pair; both have short delays and ask about transactions soon."""
    if request.param == "apache":
        yield request.getfixturevalue("apache").namesrv_addr
        return
    work_dir = tmp_path_factory.mktemp("standalone")
    conf = work_dir / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in QUICK_CONF.items()))
    with run_standalone(work_dir / "store", work_dir, "--config", str(conf)) as running:
        yield running.namesrv_addr
        running.stop()


def run(scenario: object) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            await scenario  # type: ignore[misc]

    asyncio.run(main())


async def stored(namesrv: str, topic: str, is_enough: Callable[[list[ReceivedMessage]], bool]) -> list[ReceivedMessage]:
    """The messages of a topic, as soon as they are enough."""
    async with PullConsumer(f"CG-{topic}", namesrv) as consumer:
        while True:
            found: list[ReceivedMessage] = []
            try:
                for queue in await consumer.queues(topic):
                    offset = 0
                    while messages := (result := await consumer.pull(queue, offset)).messages:
                        found += messages
                        offset = result.next_begin_offset
            except NoRoute:
                pass
            if is_enough(found):
                return found
            await asyncio.sleep(0.1)


def test_delay_levels_hold_messages_back(namesrv: str) -> None:
    async def scenario() -> None:
        async with Producer("PG-levels", namesrv) as producer:
            for level in (2, 1, 0):
                await producer.send(Message(topic="Levels", body=b"%d" % level, delay_level=level))
        found = await stored(namesrv, "Levels", lambda found: len(found) == 3)
        waits_ms = {int(one.body): one.store_timestamp - one.born_timestamp for one in found}
        assert waits_ms[0] < 1000 <= waits_ms[1]
        assert waits_ms[2] >= 2000

    run(scenario())


def test_times_of_delivery_hold_messages_back(apache: ApachePair) -> None:
    async def scenario() -> None:
        async with Producer("PG-times", apache.namesrv_addr) as producer:
            at_ms = int(time.time() * 1000) + 3000
            await producer.send(Message(topic="Times", body=b"at", deliver_at_ms=at_ms))
            await producer.send(Message(topic="Times", body=b"after", delay_ms=3000))
            await producer.send(Message(topic="Times", body=b"past", deliver_at_ms=at_ms - 100_000))
        found = await stored(apache.namesrv_addr, "Times", lambda found: len(found) == 3)
        stored_ms = {one.body: one.store_timestamp for one in found}
        assert stored_ms[b"past"] < at_ms - EARLY_MS_MAX
        assert min(stored_ms[b"at"], stored_ms[b"after"]) >= at_ms - 2 * EARLY_MS_MAX

    run(scenario())


def test_a_message_is_called_back_before_its_time(apache: ApachePair) -> None:
    async def scenario() -> None:
        changed = Command(RequestCode.UPDATE_BROKER_CONFIG, body=b"recallMessageEnable=true")
        assert ask(apache.broker_addr, changed).code == 0
        async with Producer("PG-recall", apache.namesrv_addr) as producer:
            messages = [Message(topic="Recalled", body=b"%d" % i, delay_ms=4000) for i in range(3)]
            sent = [await producer.send(message) for message in messages]
            handle = sent[1].recall_handle
            assert handle is not None
            assert await producer.recall(handle) == sent[1].msg_id
            await producer.send(Message(topic="Recalled", body=b"last", delay_ms=6000))
        found = await stored(apache.namesrv_addr, "Recalled", lambda found: b"last" in {one.body for one in found})
        assert sorted(one.body for one in found) == [b"0", b"2", b"last"]

    run(scenario())


def test_transactions_end_as_the_program_says(namesrv: str) -> None:
    async def scenario() -> None:
        asked: list[tuple[bytes, str]] = []

        async def execute(message: Message, argument: TransactionState) -> TransactionState:
            if message.body == b"raises":
                raise ValueError("no stock")
            return argument

        def check(message: ReceivedMessage) -> TransactionState:
            asked.append((message.body, message.msg_id))
            return ROLLBACK if message.body == b"unknown-rollback" else COMMIT

        wanted = {
            b"commit": COMMIT,
            b"rollback": ROLLBACK,
            b"unknown-commit": UNKNOWN,
            b"unknown-rollback": UNKNOWN,
            b"raises": UNKNOWN,
            b"large" * 2000: COMMIT,
        }
        ids = {}
        async with TransactionProducer("TG-python", namesrv, execute=execute, check=check) as producer:
            for body, state in wanted.items():
                result = await producer.send_in_transaction(Message(topic="Trans", body=body, tags="A"), state)
                assert result.state is state
                ids[body] = result.sent.msg_id
            committed = {b"commit", b"unknown-commit", b"raises", b"large" * 2000}
            found = await stored(namesrv, "Trans", lambda found: len(found) >= len(committed))
            while b"unknown-rollback" not in {body for body, _ in asked}:
                await asyncio.sleep(0.05)
        assert {one.body: one.msg_id for one in found} == {body: ids[body] for body in committed}
        assert len(found) == len(committed)
        assert set(asked) >= {(body, ids[body]) for body in (b"unknown-commit", b"unknown-rollback", b"raises")}

    run(scenario())


def test_transactions_of_a_java_producer_that_is_gone_are_checked_here(
    namesrv: str, apache_kit: ApacheKit, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["run", "--namesrv", namesrv, "--topic", "Left", "--out", out, "--checks-max", 1]
    arguments += ["--timeout-seconds", 0]  # it sends, waits for nothing and leaves the group
    command = apache_kit.jvm("interop.TransactionProbe", arguments, heap_mb=PROBE_HEAP_MB, work_dir=tmp_path)

    async def scenario() -> None:
        asked: set[str] = set()

        async def check(message: ReceivedMessage) -> TransactionState:
            asked.update(message.keys)
            return COMMIT

        async with (
            Producer("PG-left", namesrv) as first,
            TransactionProducer("probe-transactions", namesrv, execute=lambda *_: None, check=check) as producer,
        ):
            await first.send(Message(topic="Left", body=b"so that the topic is there", keys=["first"]))
            await producer.queues("Left")
            await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=SECONDS)
            events = [json.loads(line) for line in out.read_text().splitlines()]
            sent = {event["kind"] for event in events if event["event"] == "sent"}
            answered_there = {event["kind"] for event in events if event["event"] == "question"}
            undecided = {kind for kind in sent if not kind.startswith(("commit", "rollback"))} - answered_there
            assert undecided
            committed = {kind for kind in sent if kind.startswith("commit")} | undecided | {"first"}

            def are_all(found: list[ReceivedMessage]) -> bool:
                return {key for one in found for key in one.keys} >= committed

            found = await stored(namesrv, "Left", are_all)
        assert asked >= undecided
        assert "rollback:unknown" not in {key for one in found for key in one.keys}

    run(scenario())


def test_requests_are_replied_to_by_a_consumer(namesrv: str) -> None:
    async def scenario() -> None:
        consumer = PushConsumer("CG-replier", namesrv, settings=FIRST)
        async with Producer("PG-asker", namesrv) as producer, Producer("PG-replier", namesrv) as replier:

            @consumer.on("Asked", "add")
            async def handler(message: ReceivedMessage) -> None:
                a, b = message.body.split(b"+")
                await replier.reply(message, b"%d" % (int(a) + int(b)) * 2000, properties={"by": "python"})

            async with consumer:
                asked = [Message(topic="Asked", body=b"%d+%d" % (i, i), tags="add") for i in range(10)]
                replies = await asyncio.gather(*(producer.request(one, timeout_ms=40_000) for one in asked))
                assert [reply.body for reply in replies] == [b"%d" % (2 * i) * 2000 for i in range(10)]
                assert {reply.properties["by"] for reply in replies} == {"python"}
                with pytest.raises(ReplyTimedOut):
                    await producer.request(Message(topic="Asked", body=b"1", tags="subtract"), timeout_ms=500)

    run(scenario())


def test_many_messages_in_batches_have_the_places_that_are_told(namesrv: str) -> None:
    async def scenario() -> None:
        messages = [Message(topic="Many", body=b"%d" % i, keys=[f"k{i}"]) for i in range(3000)]
        async with Producer("PG-many", namesrv) as producer:
            results = await producer.send_many(messages)
        found = await stored(namesrv, "Many", lambda found: len(found) >= len(messages))
        places = {(one.broker_name, one.queue_id, one.queue_offset): one for one in found}
        assert len(places) == len(messages)
        for message, result in zip(messages, results, strict=True):
            one = places[result.queue.broker_name, result.queue.queue_id, result.queue_offset]
            assert (one.body, one.keys) == (message.body, list(message.keys))
            assert (one.msg_id, one.offset_msg_id) == (result.msg_id, result.offset_msg_id)

    run(scenario())
