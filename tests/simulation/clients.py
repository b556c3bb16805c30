"""The clients of a simulated cluster: producers and consumers, each in a process of its own, which is started again
after it ended, until the run stops it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rmqkit.client.consumer.dedupe import RedisDedupe
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import MessageModel, Popping, ProducerSettings, PushConsumerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message
from rmqkit.testing.simulation import Process
from tests.simulation import lives
from tests.simulation.ledger import Kind, Ledger, Sent, number_of

if TYPE_CHECKING:
    from tests.simulation.run import Run

TOPIC, ORDERED, DELAYED, CHATS = "Plain", "Ordered", "Delayed", "Chats"
TOPICS = {TOPIC, ORDERED, DELAYED}
TOPICS_OF = {
    "push": {TOPIC, DELAYED, ORDERED},
    "ordered": {ORDERED},
    "pop": {TOPIC, DELAYED},
    "broadcast": {TOPIC},
    "once": {TOPIC},
    "pull": {TOPIC},
    "fleeting": {lives.TOPIC},
    "lite": {CHATS},
}
_TOPICS_OF_KINDS = {
    Kind.ORDERED: ORDERED,
    Kind.LEVEL: DELAYED,
    Kind.TIMED: DELAYED,
    Kind.FLEETING: lives.TOPIC,
    Kind.SESSION: CHATS,
}
SESSIONS = ["s1", "s2", "s3", "s4"]
"""The lite topics below `CHATS`."""
_LEVELS = {1: 1.0, 2: 5.0}
_SLOW_SECONDS = 3.0
_BATCH = 3
_KEYS = 5
_RESTART_SECONDS = 1.0


class ClientProcess:
    """A client that can be killed, stopped and started again."""

    def __init__(self, run: Run, name: str, main: Callable[[ClientProcess], Awaitable[None]]) -> None:
        self.run = run
        self.name = name
        self._main = main
        self._is_wanted = False
        self.stops: asyncio.Event | None = None
        self.process: Process | None = None
        self.incarnation = 0

    @property
    def chance(self) -> random.Random:
        """A generator for the present process."""
        return self.run.world.chance("client", self.name, self.incarnation)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_alive

    def start(self) -> None:
        self._is_wanted = True
        if not self.is_running:
            self.incarnation += 1
            self.stops = None
            self.process = self.run.world.process(self.name, self._begin)
            self.process.on_end = lambda _: self.restart_after(_RESTART_SECONDS)

    def stop(self) -> None:
        self._is_wanted = False
        self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """Let the client close itself. It starts again, unless `stop` was called."""
        if self.process is not None and self.process.is_alive:
            if self.stops is None:
                self.process.kill()
            else:
                self.process.loop.call_soon(self.stops.set)

    def kill(self, restart_seconds: float) -> None:
        if self.process is not None and self.process.is_alive:
            self.process.kill()
        self.restart_after(restart_seconds)

    def restart_after(self, seconds: float) -> None:
        self.run.world.after(seconds, lambda: self.start() if self._is_wanted else None)

    async def _begin(self) -> None:
        self.stops = asyncio.Event()
        await self._main(self)


# ---------------------------------------------------------------- producers


async def produce(client: ClientProcess) -> None:
    """Send messages of all kinds until the time of sends is over."""
    run, plan, chance = client.run, client.run.plan, client.chance
    assert client.stops is not None

    def outcome(message: Any, _: Any = None) -> TransactionState:
        one = run.ledger.sent[number_of(message.body)]
        if chance.random() < 0.2:
            return TransactionState.UNKNOWN
        return TransactionState.COMMIT if one.kind is Kind.COMMITTED else TransactionState.ROLLBACK

    async def execute(message: Any, argument: Any) -> TransactionState:
        return outcome(message)

    async def check(message: Any) -> TransactionState:
        return outcome(message)

    settings = ProducerSettings(send_timeout_ms=8000)
    producer = TransactionProducer("P", run.cluster.addresses, execute=execute, check=check, settings=settings)
    async with producer:
        # Brokers ask only producers that know them, from a send: a restarted producer may have nothing more to send.
        # Without a route the send fails, for example because the name server restarted, too: the producer tries again.
        while not client.stops.is_set() and not await _send(producer, run, chance, Kind.PLAIN):
            await _pause(client.stops, _RESTART_SECONDS)
        while not client.stops.is_set() and run.is_sending:
            await _send(producer, run, chance, plan.kinds[chance.randrange(len(plan.kinds))])
            await _pause(client.stops, plan.pace * (0.5 + chance.random()))
        await client.stops.wait()  # a checker of transactions, until the end


async def _pause(stops: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stops.wait()
    except TimeoutError:
        return


async def _send(producer: TransactionProducer, run: Run, chance: random.Random, kind: Kind) -> bool:
    """Send a message or a batch. Return True if a broker acknowledged it."""
    ledger, world = run.ledger, run.world
    topic = _TOPICS_OF_KINDS.get(kind, TOPIC)
    sizes = [chance.randrange(run.plan.body_bytes) for _ in range(_BATCH if kind is Kind.BATCH else 1)]
    sender = world.current_process
    assert sender is not None, "a process sends"
    some = [ledger.begin(topic, kind, world.now, size, f"{sender.name} {sender.number}") for size in sizes]
    messages = [Message(topic=topic, body=one.body, keys=[f"k{one.number}"]) for one in some]
    first = messages[0]
    try:
        match kind:
            case Kind.BATCH:
                result = await producer.send_batch(messages)
            case Kind.ONE_WAY:
                await producer.send_one_way(first)
                ledger.failed(some[0], RmqError("one-way"))
                return False
            case Kind.COMMITTED | Kind.ROLLED_BACK:
                result = (await producer.send_in_transaction(first)).sent
            case _:
                _set_order_and_time(first, some[0], kind, chance, world.now)
                result = await producer.send(first)
    except RmqError as error:
        for one in some:
            ledger.failed(one, error)
        return False
    for i, one in enumerate(some):
        ledger.acknowledged(one, result, i, session=first.lite_topic or "")
    return True


def _set_order_and_time(message: Message, one: Sent, kind: Kind, chance: random.Random, now: float) -> None:
    if kind is Kind.ORDERED:
        message.sharding_key = f"key-{chance.randrange(_KEYS)}"
    elif kind is Kind.SESSION:
        message.lite_topic = chance.choice(SESSIONS)
    elif kind is Kind.LEVEL:
        message.delay_level = chance.choice(list(_LEVELS))
        one.due = now + _LEVELS[message.delay_level]
    elif kind is Kind.TIMED:
        message.delay = chance.choice([1.0, 3.0, 8.0])
        one.due = now + float(message.delay)


# ---------------------------------------------------------------- consumers


def consumer_main(group: str, kind: str) -> Callable[[ClientProcess], Awaitable[None]]:
    """Return the main function of a member of a group."""

    async def consume(client: ClientProcess) -> None:
        assert client.stops is not None
        consumer = _consumer(client, group, kind)
        chance = client.chance

        async def handle(message: Any) -> None:
            if kind == "fleeting":
                client.run.lives.arrived(message)
            await handled(client, group, message, chance)

        seen = RedisDedupe(client.run.keys.client(), lease_seconds=20) if kind == "once" else None
        for topic in sorted(TOPICS_OF[kind]):
            consumer.on(topic, dedupe=seen)(handle)
        async with consumer:
            await client.stops.wait()

    return consume


async def handled(client: ClientProcess, group: str, message: Any, chance: random.Random) -> None:
    """Handle a message. Raises ConnectionError: this call of the handler fails."""
    run = client.run
    arrival = run.ledger.arrived(group, f"{client.name}.{client.incarnation}", message, run.world.now)
    if chance.random() < run.plan.slow_share:
        seconds = chance.random() * _SLOW_SECONDS
        await asyncio.sleep(seconds / 10 if run.is_healed else seconds)  # a backlog must end within the bound
    arrival.failed = chance.random() < run.plan.failing_share and not run.is_healed
    arrival.ended = run.world.now
    if arrival.failed:
        raise ConnectionError("a handler that fails")


def _consumer(client: ClientProcess, group: str, kind: str) -> PushConsumer:
    run = client.run
    common: dict[str, Any] = {"heartbeat_interval_ms": 5000, "retries_max": 100}
    if kind == "pop":
        settings = PushConsumerSettings(pop=Popping(invisible_ms=15_000), **common)
        return PopConsumer(group, run.cluster.addresses, settings=settings)
    if kind == "broadcast":
        folder = run.world.machine(client.name).disk.path / "offsets"
        settings = PushConsumerSettings(message_model=MessageModel.BROADCASTING, offsets_dir=str(folder), **common)
        return PushConsumer(group, run.cluster.addresses, settings=settings)
    return PushConsumer(
        group, run.cluster.addresses, settings=PushConsumerSettings(**common), ordered=kind == "ordered"
    )


class Keys:
    """A key-value server that never fails, beside the simulated network: the part of Redis that `RedisDedupe` uses."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._values: dict[str, tuple[str, float]] = {}

    def client(self) -> Keys:
        return self

    async def __aenter__(self) -> Keys:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing."""

    async def set(self, name: str, value: str, *, px: int, nx: bool = False) -> bool:
        await asyncio.sleep(0.001)
        if nx and self._found(name) is not None:
            return False
        self._values[name] = value, self._run.world.now + px / 1000
        return True

    async def get(self, name: str) -> str | None:
        await asyncio.sleep(0.001)
        return self._found(name)

    async def eval(self, script: str, count: int, name: str, token: str) -> None:
        """Remove a key if it has a value: the only script that is used."""
        await asyncio.sleep(0.001)
        if self._found(name) == token:
            del self._values[name]

    def _found(self, name: str) -> str | None:
        value, end = self._values.get(name, (None, 0.0))
        return value if end > self._run.world.now else None


__all__ = ["CHATS", "SESSIONS", "TOPICS", "TOPICS_OF", "ClientProcess", "Ledger", "consumer_main", "handled", "produce"]
