"""The watcher: what it asks and how often, a broker that hangs, what is unknown. On virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from pathlib import Path

from rmqkit import Producer, PushConsumer, PushConsumerSettings, StartFrom
from rmqkit.admin import Admin
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.console import Console
from rmqkit.console.watch.figures import values_of
from rmqkit.console.watch.watcher import STEP, Watcher, _steps, _turn
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.admin.things import send
from tests.console.asgi import Browser, served


async def test_nobody_looks_so_it_asks_once_a_minute(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, console, browser):
        asked: Counter[int] = Counter()
        env = console.envs["local"]
        count = env.count

        def note(address: str, command: Command) -> None:
            asked[command.code] += 1
            count(address, command)

        env.count = note  # type: ignore[method-assign]
        await asyncio.sleep(130)
        assert 2 <= asked[RequestCode.GET_BROKER_RUNTIME_INFO] <= 3
        asked.clear()
        for _ in range(4):
            await browser.get("/local/")
            await asyncio.sleep(30)
        assert 10 <= asked[RequestCode.GET_BROKER_RUNTIME_INFO] <= 13
        assert asked[RequestCode.GET_ALL_TOPIC_CONFIG] <= 5
        assert asked[RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG] == 0  # Apache's broker would create the group


async def test_rates_come_from_where_topics_end(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        for _ in range(8):
            await browser.get("/local/topics")
            await send(admin, *(Message(topic="Orders", body=b"x") for _ in range(50)))
            await asyncio.sleep(10)
        rows = (await browser.json("/local/topics"))["topics"]["rows"]
        (orders,) = [row for row in rows if row["name"] == "Orders"]
        assert 4 <= orders["inTps"] <= 6


async def test_the_rate_out_is_that_of_all_groups_together(tmp_path: Path) -> None:
    """A group that the watcher sees for the first time has consumed nothing yet."""
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        broker = both.broker.context.settings.broker_name
        address, queue = await admin.calls.address(broker), MessageQueue("Orders", broker, 0)
        await send(admin, *(Message(topic="Orders", body=b"x") for _ in range(600)))
        for group in ("fast", "slow"):
            await admin.groups.update(group, {})
        for look in range(8):
            await browser.get("/local/topics")
            await admin.calls.commit_offset(address, "fast", queue, 40 * look)
            if look > 2:
                await admin.calls.commit_offset(address, "slow", queue, 200 + 10 * look)
            await asyncio.sleep(10)
        (orders,) = [row for row in (await browser.json("/local/topics"))["topics"]["rows"] if row["name"] == "Orders"]
        assert 4 <= orders["outTps"] <= 6


async def test_the_age_of_half_messages(tmp_path: Path) -> None:
    """Check-backs store a half message again and again: it is as old as it was born."""
    state = TransactionState.UNKNOWN
    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        watcher = Watcher(admin)

        async def age() -> float | None:
            watcher.refresh()
            await watcher.round()
            return {figure: value for figure, _, value in values_of(watcher.snapshot)}["half"]

        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        assert await age() == 0
        async with TransactionProducer(
            "shop", both.namesrv_address, execute=lambda *_: state, check=lambda _: state
        ) as producer:
            await producer.send_half(Message(topic="Orders", body=b"x"))
            await asyncio.sleep(130)
            assert 130 <= (await age() or 0) < 135
            state = TransactionState.COMMIT
            await asyncio.sleep(130)
        assert await age() == 0


async def test_a_broker_that_hangs_makes_its_cells_unknown(tmp_path: Path) -> None:
    """Requests to the second broker are never answered; the first one's figures stay fresh, and pages are quick."""
    async with Standalone(tmp_path / "a") as both:
        settings = BrokerSettings(
            listen_port=0, bind_address="127.0.0.1", broker_name="b-hangs", namesrv_addr=both.namesrv_address
        )
        other = Broker(settings, StoreSettings(), tmp_path / "b")
        await other.start()
        try:
            async with Console(both.namesrv_address) as console:
                browser = Browser(console)
                watcher = console.envs["local"].watcher
                calls = watcher.admin.calls.remoting
                usual = calls.call

                async def call(address: str, command: Command, timeout_ms: float) -> Command:
                    if address == other.address and hangs:
                        await asyncio.sleep(1e6)
                    return await usual(address, command, timeout_ms)

                hangs = False
                calls.call = call  # type: ignore[method-assign]
                await browser.get("/local/brokers")
                await asyncio.sleep(20)
                assert not (await browser.json("/local/brokers"))["troubles"]
                hangs = True
                await asyncio.sleep(30)
                loop = asyncio.get_running_loop()
                began = loop.time()
                values = await browser.json("/local/brokers")
                assert loop.time() - began < 0.05
                assert values["troubles"] == {other.address: "no answer within 3 s"}
                assert values["since"][other.address] < values["atMs"]
                assert [one["kind"] for one in (await browser.json("/local/"))["findings"]][:1] == ["broker"]
                totals = (await browser.json("/local/"))["totals"]
                assert (totals["silent"], totals["inTps"]) == (1, None)  # unknown is not zero
                assert "0/s" not in (await browser.get("/local/brokers")).text.split("b-hangs")[1].split("</tr>")[0]
                fresh = {state.row.addr: state for state in watcher.snapshot.brokers}[both.broker_address]
                assert fresh.trouble == ""
        finally:
            await other.stop()


async def test_a_snapshot_of_many_topics_is_made_in_many_turns() -> None:
    async def made() -> list[int]:
        return [number async for number in _steps(range(3 * STEP))]

    making, turns = asyncio.create_task(made()), 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 3
    assert making.result() == list(range(3 * STEP))


def test_whose_turn_it_is() -> None:
    waiting: deque[str] = deque()
    known = set("abcdef")
    assert _turn(waiting, known, ["f"], 3) == ["f", "a", "b"]
    assert _turn(waiting, known, [], 3) == ["c", "d", "e"]
    assert _turn(waiting, known, ["a", "b", "c", "d"], 2) == ["a", "b"]
    assert _turn(waiting, known, [], 3) == ["f"]
    assert _turn(waiting, known, [], 3) == ["a", "b", "c"]
    assert _turn(deque(), set(), [], 3) == []


async def test_consumed_is_the_rate_of_committed_offsets(tmp_path: Path) -> None:
    """A handler that does 2 messages a second gets 8: the others are pulled, and wait on the client."""
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        settings = PushConsumerSettings(handlers_max=1, start_from=StartFrom.FIRST_OFFSET, drain_ms=0)
        consumer = PushConsumer("slow", both.namesrv_address, settings=settings)

        @consumer.on("Orders")
        async def handle(message: object) -> None:
            await asyncio.sleep(0.5)

        async with consumer, Producer("shop", both.namesrv_address) as producer:
            for number in range(8 * 70):
                await producer.send(Message(topic="Orders", body=b"x"))
                await asyncio.sleep(1 / 8)
                if number % 40 == 0:
                    await browser.get("/local/groups/slow")
            page = await browser.json("/local/groups/slow")
            assert 1.5 <= page["consumed"] <= 2.5
            assert 5 <= page["state"]["trend"] <= 7
            (finding,) = page["findings"]
            assert "falling back by" in finding["text"]
            (shown,) = (await browser.json("/local/"))["findings"]
            assert shown["text"] == finding["text"], "the overview and the group's page say the same"
