"""Findings against real servers that get worse in eight ways, each seen within two samples; and a healthy cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rmqkit import Message, PopConsumer, Producer, PushConsumer, StartFrom
from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.health import Finding, Severity, findings
from rmqkit.admin.diagnosis.survey import survey, well_text
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.clock import SystemClock
from rmqkit.console import Console
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.admin.test_dead import die
from tests.console.asgi import Browser

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)


class OwnClock(SystemClock):
    """A wall clock that can be set.

    Attributes:
        ahead_ms: by how much it is ahead.
    """

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class World:
    """Two name servers, a master and its slave, and a topic.

    Attributes:
        stop: ends what a way to get worse has started.
    """

    patch: pytest.MonkeyPatch
    both: Standalone
    second: NameServer
    slave: Broker
    clock: OwnClock
    admin: Admin

    def __init__(self) -> None:
        self.stop: Callable[[], object] = lambda: None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, root: Path) -> AsyncIterator[World]:
        world = cls()
        world.clock = OwnClock()
        kv = NamesrvSettings(listen_port=0, bind_address="127.0.0.1", kv_config_path=str(root / "kv.json"))
        world.second = NameServer(kv)
        await world.second.start()
        own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
        async with Standalone(root / "a", broker=own, clock=world.clock) as world.both:
            copy = BrokerSettings(
                listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", broker_id=1,
                broker_role=BrokerRole.SLAVE, namesrv_addr=world.both.namesrv_address,
            )  # fmt: skip
            world.slave = Broker(copy, StoreSettings(), root / "b")
            await world.slave.start()
            async with Admin(f"{world.both.namesrv_address};{world.second.address}") as world.admin:
                await world.admin.topics.create("Orders", read_queues=2, write_queues=2)
                await world.admin.groups.update("billing", {})
                try:
                    yield world
                finally:
                    await world.slave.stop()
                    await world.second.stop()

    @property
    def namesrv(self) -> str:
        return self.both.namesrv_address

    async def send(self, count: int, topic: str = "Orders") -> None:
        async with Producer("shop", self.namesrv) as producer:
            for number in range(count):
                await producer.send(Message(topic=topic, body=b"%d" % number))

    async def sending(self) -> None:
        """Send a few messages a second until this is cancelled."""
        while True:
            await self.send(20)
            await asyncio.sleep(2)


# -- the eight ways


async def lag(world: World) -> None:
    """The only consumer of a group has committed an offset, and goes."""
    consumer = PushConsumer("billing", world.namesrv, settings=FIRST)
    consumer.subscribe("Orders", handler=lambda _: None)
    await world.send(10)
    async with consumer:
        await asyncio.sleep(20)
    sending = asyncio.create_task(world.sending())
    world.stop = sending.cancel


async def dead_letters(world: World) -> None:
    await die(world.admin, "billing", 3)


async def disk(world: World) -> None:
    world.patch.setattr("rmqkit.broker.operations.brokers.disk_ratio", lambda _: 0.8)


async def slave(world: World) -> None:
    await world.slave.stop()


async def name_server(world: World) -> None:
    await world.second.stop()


async def popped(world: World) -> None:
    """Clients pop, and do not acknowledge."""
    await world.send(200)

    async def popping() -> None:
        async with PopConsumer("billing", world.namesrv, settings=FIRST) as consumer:
            while True:
                await consumer.pop("Orders", max_count=2, invisible_time=600)
                await asyncio.sleep(3)

    task = asyncio.create_task(popping())
    world.stop = task.cancel
    await asyncio.sleep(35)


async def half_messages(world: World) -> None:
    """A producer does not decide, and goes."""
    async with TransactionProducer(
        "shop", world.namesrv, execute=lambda *_: TransactionState.UNKNOWN, check=lambda _: TransactionState.UNKNOWN
    ) as producer:
        await producer.send_half(Message(topic="Orders", body=b"x"))
    await asyncio.sleep(150)


async def clock(world: World) -> None:
    world.clock.ahead_ms = 20_000


WAYS: dict[str, tuple[Callable[[World], Awaitable[None]], str]] = {
    "lag": (lag, "group billing is "),
    "dead letters": (dead_letters, "group billing has 3 dead letters"),
    "disk": (disk, "the disk of broker-a"),
    "slave": (slave, "broker-a"),
    "name server": (name_server, "name server "),
    "popped": (popped, "group billing has popped "),
    "half messages": (half_messages, "a half message on broker-a has waited "),
    "clock": (clock, "the clock of broker-a is "),
}


def wrong(found: list[Finding]) -> list[str]:
    return [one.text for one in found if one.severity is not Severity.NOTE]


@pytest.mark.parametrize("way", WAYS)
async def test_what_gets_worse_is_found_within_two_samples(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worsen, text = WAYS[way]
    async with World.running(tmp_path) as world:
        world.patch = monkeypatch
        before = findings(await survey(world.admin))
        assert wrong(before) == []
        async with Console(f"{world.namesrv};{world.second.address}") as console:
            browser = Browser(console)
            await browser.get("/local/")
            await worsen(world)
            found = findings(await survey(world.admin))
            assert wrong(found), way
            assert all(text in one for one in wrong(found)), (way, found)
            # The console follows the same rules: within a minute after the page was opened it shows the same.
            for _ in range(8):
                shown = (await browser.json("/local/"))["findings"]
                if is_shown := any(text in one["text"] and one["severity"] != "note" for one in shown):
                    break
                await asyncio.sleep(10)
            assert is_shown, (way, shown)
            if found[0].kind == "group":
                page = await browser.json(f"/local/groups/{found[0].name}")
                assert [one["text"] for one in page["findings"]] == [
                    one["text"] for one in (await browser.json("/local/"))["findings"] if one["kind"] == "group"
                ]
                assert "in order</span>" not in (await browser.get(f"/local/groups/{found[0].name}")).text
        world.stop()


@pytest.mark.slow
async def test_a_healthy_cluster_under_load_has_no_findings_for_five_minutes(tmp_path: Path) -> None:
    handled: dict[str, int] = {}

    def handler(name: str) -> Callable[[ReceivedMessage], Awaitable[None]]:
        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(0.05)
            handled[name] = handled.get(name, 0) + 1

        return handle

    async with World.running(tmp_path) as world, contextlib.AsyncExitStack() as stack:
        for kind, name in ((PushConsumer, "billing"), (PopConsumer, "stock"), (PushConsumer, "audit")):
            consumer = kind(name, world.namesrv, settings=FIRST)
            topic = "Rare" if name == "audit" else "Orders"
            if topic == "Rare":
                await world.admin.topics.create("Rare", read_queues=1, write_queues=1)
            consumer.on(topic)(handler(name))
            await stack.enter_async_context(consumer)
        producer = await stack.enter_async_context(Producer("shop", world.namesrv))
        commit = TransactionState.COMMIT
        half = TransactionProducer("bank", world.namesrv, execute=lambda *_: commit, check=lambda _: commit)
        await stack.enter_async_context(half)

        async def load() -> None:
            for number in range(1_000_000):
                await producer.send(Message(topic="Orders", body=b"x", delay_level=int(number % 50 == 0)))
                if number % 40 == 0:
                    await half.send_half(Message(topic="Orders", body=b"x"))
                if number % 120 == 0:  # a message now and then: the one before it is minutes old
                    await producer.send(Message(topic="Rare", body=b"x"))
                await asyncio.sleep(0.5)

        loading = asyncio.create_task(load())
        async with Console(world.namesrv) as console:
            browser = Browser(console)
            for _ in range(10):
                snapshot = await survey(world.admin)
                assert findings(snapshot) == []
                assert snapshot.troubles == {}
                assert (await browser.json("/local/"))["findings"] == []
                await asyncio.sleep(20)
        assert "the lag of 3 groups, by two looks 10 s apart" in well_text(snapshot)
        assert min(handled.values()) >= 4, handled
        assert handled["billing"] > 500, handled
        loading.cancel()


async def test_one_look_claims_nothing_of_lags(tmp_path: Path) -> None:
    from rmqkit.admin.diagnosis.survey import look

    async with World.running(tmp_path) as world:
        await lag(world)
        await asyncio.sleep(30)
        taken = await look(world.admin)
        assert findings(taken.snapshot) == []
        assert (
            well_text(taken.snapshot) == "nothing is wrong at a first look; whether groups keep up needs a second one"
        )
        world.stop()
