"""Messages that wait inside a broker: delays, transactions and pops, counted as in the broker's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rmqkit import Message, PopConsumer, Producer, TransactionProducer, TransactionState
from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.causes import Cause
from rmqkit.admin.explain import Explainer, explain
from rmqkit.admin.messages.listing import Budget
from rmqkit.admin.messages.timed import still_waiting
from rmqkit.admin.messages.waiting import pending_pops, undecided
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli.admin import waiting as command
from rmqkit.cli.frame.nouns import View, show
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.console import Console
from rmqkit.metrics import ExporterType
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import HALF_TOPIC
from rmqkit.sentences import plain
from rmqkit.standalone import Standalone
from tests.broker.test_metrics import told
from tests.client.messages import received
from tests.console.asgi import Browser
from tests.console.test_changes import token_of

POINT = {"bn": "b", "c": "g", "it": 60_000, "n": 3, "pt": 1_000, "q": 0, "so": 10, "t": "T"}
ACK = {"bn": "b", "c": "g", "pt": 1_000, "q": 0, "so": 10, "t": "T"}


@asynccontextmanager
async def cluster(root: Path, **settings: object) -> AsyncIterator[tuple[Standalone, Admin]]:
    broker = BrokerSettings(
        listen_port=0, bind_address="127.0.0.1", exporter_type=ExporterType.PROM, exporter_port=0, **settings
    )
    async with Standalone(root, broker=broker) as both, Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        yield both, admin


def printed(view: View, capsys: pytest.CaptureFixture[str]) -> tuple[str, object]:
    """Return the output of a command as text and as JSON."""
    show(view, as_json=False)
    text = capsys.readouterr().out
    show(view, as_json=True)
    return text, msgspec.json.decode(capsys.readouterr().out)


def record(number: int, tags: str, body: bytes, **properties: str) -> ReceivedMessage:
    return received(number, body, topic="X", properties={"TAGS": tags} | properties)


async def test_delay_levels_and_timers_are_counted_as_the_broker_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tmp_path) as (both, admin), Producer("p", both.namesrv_address) as producer:
        began_ms = SYSTEM_CLOCK.now_ms()
        for level, count in ((5, 3), (18, 2)):
            for _ in range(count):
                await producer.send(Message(topic="Orders", body=b"x", delay_level=level))
        for ahead_s, count in ((200, 4), (7_200, 3), (100_000, 2)):
            for _ in range(count):
                await producer.send(Message(topic="Orders", body=b"x", delay=(ahead_s * 1000) / 1000))
        timer = both.broker.context.timer
        while timer is None or timer.pending < 9:
            await asyncio.sleep(0.1)
        (found,) = await admin.waiting.delays()
        metrics = await told(both.metrics_addresses[1])
        text, parsed = printed(await command.delays(admin), capsys)

    assert "1 min " in text and "timed messages: 9" in text and "more than" in text
    assert parsed == msgspec.to_builtins([found], str_keys=True, enc_hook=plain)
    levels = {one.level: one for one in found.levels if one.waiting}
    assert {level: (one.waiting, one.delay_ms) for level, one in levels.items()} == {5: (3, 60_000), 18: (2, 7_200_000)}
    assert 0 <= (levels[5].next_due_ms or 0) - began_ms - 60_000 < 5_000
    assert found.timed == metrics["rocketmq_timer_dequeue_lag"]["local", "disk"] == 9
    assert found.timed_by_topic == {"Orders": metrics["rocketmq_timing_messages"]["local", "disk", "Orders"]}
    snapshot = metrics["rocketmq_timer_message_snapshot"]
    assert found.due_within_s == {int(bound): count for (*_, bound), count in snapshot.items()}
    assert {bound: count for bound, count in found.due_within_s.items() if count} == {300: 4, 14_400: 3}
    assert (found.due_later, found.behind_ms, found.trouble) == (2, 0, "")


def timer_record(number: int, key: str, due_ms: int, **more: str) -> ReceivedMessage:
    own = {"REAL_TOPIC": "T", "REAL_QID": "0", "TIMER_OUT_MS": str(due_ms), "UNIQ_KEY": key}
    return record(number, "A", b"x", **own, **more)


def test_timed_messages_that_wait_are_distinguished_from_those_that_do_not() -> None:
    records = [
        timer_record(0, "first-stage", 9_000),
        timer_record(1, "recalled", 9_000),
        timer_record(2, "over", 4_999),
        timer_record(3, "recalled-by-5.3", 9_000),
        timer_record(4, "same-key-other-time", 9_000),
        timer_record(5, "recalled", 9_000, TIMER_DEL_UNIQKEY="recalled"),
        timer_record(6, "x", 9_000, TIMER_DEL_UNIQKEY="T+recalled-by-5.3"),
        timer_record(7, "x", 8_000, TIMER_DEL_UNIQKEY="same-key-other-time"),
        timer_record(8, "first-stage", 9_000, TIMER_ROLL_TIMES="1"),
        timer_record(9, "twice", 7_000),
        timer_record(10, "twice", 7_000),
        record(11, "A", b"no time"),
    ]
    found = still_waiting("b", reversed(records), 5_000)
    assert [(one.offset, one.msg_id) for one in found] == [
        (10, "twice"), (9, "twice"), (8, "first-stage"), (4, "same-key-other-time"),
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["cancel", "deliver"])
async def test_a_timed_message_is_listed_and_cancelled_or_delivered_now(
    tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        cluster(tmp_path, recall_messages=True) as (both, admin),
        Producer("p", both.namesrv_address) as producer,
        Console(both.namesrv_address) as console,
    ):
        for ahead_s in (7_200, 100_000, 3_600):
            await producer.send("Orders", b"x", keys=[f"in-{ahead_s}"], delay=ahead_s)
        browser = Browser(console)
        shown = (await browser.json("/local/waiting/timed"))["found"]
        assert [one["keys"] for one in shown["rows"]] == [["in-3600"], ["in-7200"], ["in-100000"]]
        text, _ = printed(await command.timed(admin), capsys)
        assert "in-3600" in text and "3 timed messages wait" in text
        assert (await browser.json("/local/waiting/timed?topic=Other"))["found"]["matched"] == 0

        first = shown["rows"][0]
        review = await browser.post(
            "/local/waiting/timed", {"do": way, "broker": first["broker"], "offset": str(first["offset"])}
        )
        token = token_of(review)
        for _ in range(2):  # pressed twice, it is done once
            done = await browser.post("/local/waiting/timed", {"review": token})
            assert done.status == 200, done.text
        left = await admin.waiting.timed()
        assert [one.keys for one in left.rows] == [["in-7200"], ["in-100000"]]
        at_once = (await admin.topics.status("Orders")).queues
        assert sum(one.max_offset for one in at_once) == (way == "deliver")
        timer = both.broker.context.timer
        while timer is None or timer.pending > 2:
            await asyncio.sleep(600)
        ends = (await admin.topics.status("Orders")).queues
        assert sum(one.max_offset for one in ends) == (way == "deliver"), "what was recalled does not come"
        if way == "deliver":
            (copy,) = await admin.messages.by_key("Orders", "in-3600")
            assert (copy.msg_id, copy.body) == (first["msgId"], b"x")


async def test_a_viewer_and_a_broker_that_recalls_nothing_refuse(tmp_path: Path) -> None:
    async with cluster(tmp_path, recall_messages=False) as (both, _), Producer("p", both.namesrv_address) as producer:
        await producer.send("Orders", b"x", delay=3_600)
        for read_only, status, why in ((True, 403, "read-only"), (False, 400, "recallMessageEnable=true")):
            async with Console(both.namesrv_address, read_only=read_only) as console:
                browser = Browser(console)
                (one,) = (await browser.json("/local/waiting/timed"))["found"]["rows"]
                form = {"do": "cancel", "broker": one["broker"], "offset": str(one["offset"])}
                answer = await browser.post("/local/waiting/timed", form)
                assert (answer.status, why in answer.text) == (status, True), answer.text


DUE_S = {10: 10_000, 100: 15_000, 200: 5_000, 7_200: 20_000, 40_000: 15_000, 86_000: 5_000, 100_000: 30_000}
"""100,000 timed messages: how many are due in so many seconds."""


@pytest.mark.slow
async def test_100_000_timers_by_due_time(tmp_path: Path) -> None:
    """The command line, the console's page and the broker's metrics have the same counts of them."""
    async with cluster(tmp_path) as (both, admin), Producer("p", both.namesrv_address) as producer:
        left = [ahead_s for ahead_s, count in sorted(DUE_S.items(), reverse=True) for _ in range(count)]
        due_ms = {ahead_s: SYSTEM_CLOCK.now_ms() + 600_000 + ahead_s * 1000 for ahead_s in DUE_S}

        async def send() -> None:
            while left:
                await producer.send(Message(topic="Orders", body=b"x", deliver_at=due_ms[left.pop()] / 1000))

        await asyncio.gather(*(send() for _ in range(200)))
        timer = both.broker.context.timer
        while timer is None or timer.pending < sum(DUE_S.values()):
            await asyncio.sleep(0.1)
        async with Console(both.namesrv_address) as console:
            while (left_ms := due_ms[10] - 10_000 - SYSTEM_CLOCK.now_ms()) > 0:
                await asyncio.sleep(left_ms / 1000)
            (found,) = await admin.waiting.delays()
            metrics = await told(both.metrics_addresses[1])
            (page,) = (await Browser(console).json("/local/waiting/delays"))["brokers"]

    assert found.timed == page["timed"] == metrics["rocketmq_timer_dequeue_lag"]["local", "disk"] == 100_000
    assert found.timed_by_topic == page["timedByTopic"] == {"Orders": 100_000}
    assert metrics["rocketmq_timing_messages"]["local", "disk", "Orders"] == 100_000
    snapshot = {int(bound): count for (*_, bound), count in metrics["rocketmq_timer_message_snapshot"].items()}
    assert found.due_within_s == snapshot == {int(bound): count for bound, count in page["dueWithinS"].items()}
    bounds = sorted(snapshot)
    expected = dict.fromkeys(bounds, 0)
    for ahead_s, count in DUE_S.items():
        for bound in [one for one in bounds if ahead_s < one][:1]:
            expected[bound] += count
    assert snapshot == expected
    assert found.due_later == page["dueLater"] == 100_000 - sum(expected.values())


async def test_half_messages_in_each_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def execute(message: Message, argument: object) -> TransactionState:
        return TransactionState.COMMIT

    async def check(message: ReceivedMessage) -> TransactionState:
        return TransactionState.UNKNOWN

    async with cluster(tmp_path, transaction_checks_max=1) as (both, admin):
        producer = TransactionProducer("shop", both.namesrv_address, execute=execute, check=check)
        async with producer:
            given_up = await producer.send_half(Message(topic="Orders", body=b"a"))
            await asyncio.sleep(45)  # virtual, as all sleeps here: the first round of check-back
            asked = await producer.send_half(Message(topic="Orders", body=b"b"))
            await asyncio.sleep(30)
            new = await producer.send_half(Message(topic="Orders", body=b"c"))
            await producer.send_in_transaction(Message(topic="Orders", body=b"d"))
            await asyncio.sleep(4)  # op messages are collected for 3 s
            found = await admin.waiting.transactions()
            metrics = await told(both.metrics_addresses[1])
            text, parsed = printed(await command.transactions(admin), capsys)
            short = await admin.waiting.transactions(budget=Budget(messages=1))

    assert "1 new, 1 asked, 1 ended, 1 given up" in text
    assert parsed == msgspec.to_builtins(found, enc_hook=plain)
    assert found.counts == {"new": 1, "asked": 1, "ended": 1, "given up": 1}
    rows = {one.state: one for one in found.rows}
    assert {state: one.msg_id for state, one in rows.items()} == {
        "new": new.msg_id,
        "asked": asked.msg_id,
        "given up": given_up.msg_id,
    }
    assert [(one.topic, one.group, one.asked) for one in found.rows if one.state != "given up"] == [
        ("Orders", "shop", 1),
        ("Orders", "shop", 0),
    ]
    # The metric counts what nobody decided, also what was given up.
    assert metrics["rocketmq_half_messages"] == {("Orders",): sum(found.counts.values()) - found.counts["ended"]}
    assert (found.is_whole, short.is_whole, found.troubles) == (True, False, {})


async def test_a_check_during_the_search_does_not_end_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check stores the half message again, and passes the copy that the search found before."""

    async def execute(message: Message, argument: object) -> TransactionState:
        return TransactionState.UNKNOWN

    async def check(message: ReceivedMessage) -> TransactionState:
        return TransactionState.UNKNOWN

    searched: list[int] = []
    is_ended = Explainer._is_ended

    async def slow(explainer: Explainer, address: str, half: ReceivedMessage) -> bool:
        searched.append(half.queue_offset)
        if len(searched) < 3:
            await asyncio.sleep(45)
        return await is_ended(explainer, address, half)

    monkeypatch.setattr(Explainer, "_is_ended", slow)
    async with cluster(tmp_path, transaction_checks_max=10) as (both, admin):
        producer = TransactionProducer("shop", both.namesrv_address, execute=execute, check=check)
        async with producer:
            sent = await producer.send_half(Message(topic="Orders", body=b"a"))
            pending = await explain(admin, "Orders", "billing", sent.msg_id)
            await asyncio.sleep(1_000)
            found = await explain(admin, "Orders", "billing", sent.msg_id)
    assert pending.cause is Cause.TRANSACTION_PENDING
    assert searched[0] == 0 < searched[1] < searched[2], "each search is for the newest copy"
    assert found.cause is Cause.GIVEN_UP


async def test_pending_check_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(tmp_path) as (both, admin):
        consumer = PopConsumer("billing", both.namesrv_address)
        async with Producer("p", both.namesrv_address) as producer, consumer:
            for number in range(6):
                await producer.send(Message(topic="Orders", body=b"%d" % number))
            popped: list[ReceivedMessage] = []
            while len(popped) < 6:
                popped += await consumer.pop("Orders", max_count=3, invisible_time=600)
            await consumer.ack(popped[1])
            await asyncio.sleep(2)
            found = await admin.waiting.pops()
            metrics = await told(both.metrics_addresses[1])
            text, parsed = printed(await command.pop(admin), capsys)

    assert "5 messages of 2 pops are invisible, 0 overdue" in text
    assert parsed == msgspec.to_builtins(found, enc_hook=plain)
    came = sum(
        count for (*_, kind, _), count in metrics["rocketmq_pop_revive_in_message_total"].items() if kind == "CK"
    )
    gone = sum(
        count
        for (*_, kind, _), count in metrics.get("rocketmq_pop_revive_out_message_total", {}).items()
        if kind == "CK"
    )
    assert found.check_points == came - gone
    assert (found.messages, found.overdue, found.by_group) == (5, 0, {"Orders billing": 5})
    assert sorted(offset for one in found.rows for offset in one.offsets) == [0, 2, 3, 4, 5]
    assert all(one.due_ms - one.popped_ms == 600_000 for one in found.rows)


def test_the_last_copy_of_a_half_message_stands_for_it() -> None:
    first = received(0, b"x", topic=HALF_TOPIC, properties={"UNIQ_KEY": "A", "REAL_TOPIC": "T", "PGROUP": "p"})
    copy = received(1, b"x", topic=HALF_TOPIC, properties=first.properties | {"TRANSACTION_CHECK_TIMES": "1"})
    assert [(one.state, one.queue_offset, one.asked) for one in undecided("b", [first, copy], [])] == [("asked", 1, 1)]
    assert [one.state for one in undecided("b", [first, copy], [record(0, "d", b"7,0,")])] == ["ended"]
    assert [one.state for one in undecided("b", [first], [record(0, "x", b"0"), record(1, "d", b"a,,-1")])] == ["new"]


@pytest.mark.parametrize(
    ("acks", "left"),
    [
        ([], [10, 11, 12]),
        ([("ack", ACK | {"ao": 11})], [10, 12]),
        ([("bAck", ACK | {"ao": -1, "aol": [10, 12]})], [11]),
        ([("ack", ACK | {"ao": 11, "pt": 2_000})], [10, 11, 12]),
    ],
)
def test_acks_take_messages_from_their_check_point(acks: list[tuple[str, dict]], left: list[int]) -> None:
    records = [record(n, tag, msgspec.json.encode(body)) for n, (tag, body) in enumerate([("ck", POINT), *acks])]
    (found,) = pending_pops("b", [*records, record(9, "ck", b"{"), record(9, "ack", b"[]")])
    assert (found.offsets, found.popped_ms, found.due_ms) == (left, 1_000, 61_000)


def test_what_is_acknowledged_is_not_pending() -> None:
    gone = {"ao": -1, "aol": [10, 11, 12]}
    records = [record(0, "ck", msgspec.json.encode(POINT)), record(1, "bAck", msgspec.json.encode(ACK | gone))]
    assert pending_pops("b", records) == []
