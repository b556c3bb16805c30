"""Clients of every kind under load while a server or connection fails, and the verdict on them.

::

    async with Trial(namesrv) as trial:
        await trial.work(2)                 # seconds
        ...                                 # break something
        await trial.work(2)
        await trial.settle()                # all that was acknowledged has arrived
    trial.judge()

Intervals are short, so that two rebalance intervals take seconds instead of most of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import (
    ProducerSettings,
    PullConsumerSettings,
    Pulling,
    PushConsumerSettings,
    StartFrom,
)
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.peers import until
from tests.faults.client.ledger import Ledger, Place, arrival_of
from tests.patience import TIMEOUT_MS, as_users_have_it, pulling

REBALANCE_SECONDS = 4.0
STALL_SECONDS_MAX = 2 * REBALANCE_SECONDS
SETTLE_SECONDS = 100.0
TEST_SECONDS_MAX = 600.0
SENDERS = 4
SEND_TRIES = 3
ANSWERS_LEAST = 30
GROUPS = ("pushed", "polled", "ordered")
CONF = """
flushConsumerOffsetInterval=500
mappedFileSizeCommitLog=16777216
"""
"""Lines for the broker: it saves offsets twice a second, so that a kill repeats little more than half a second of
messages.
"""

_QUICK = {
    "rebalance_interval_ms": int(REBALANCE_SECONDS * 1000),
    "heartbeat_interval_ms": 1000,
    "route_interval_ms": 1000,
    "persist_interval_ms": 300,
    "pull": Pulling(error_pause_ms=200, suspend_ms=1000, timeout_ms=2000),
    "api_timeout_ms": 10_000,
    "start_from": StartFrom.FIRST_OFFSET,
}
PUSHED = PushConsumerSettings(**_QUICK)
POLLED = PullConsumerSettings(**_QUICK)
SENDING = ProducerSettings(
    send_timeout_ms=1500, retries=SEND_TRIES - 1, route_interval_ms=1000, heartbeat_interval_ms=1000
)
PATIENT = msgspec.structs.replace(SENDING, send_timeout_ms=TIMEOUT_MS, try_timeout_ms=-1)


def on_real_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine function as a test on a real loop, with longer time-outs, because servers start slowly on a busy
    machine.
    """

    @pytest.mark.timeout(TEST_SECONDS_MAX + 100)
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        with as_users_have_it():
            asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_SECONDS_MAX))

    return run


class Trial:
    """A producer, two push consumers of a group, a pull consumer, an ordered consumer; `rate` messages a second.

    `take_over_seconds` is the maximal age of a consumption that is repeated because the queue was taken over before its
    offset was saved; outages are added. `patient`: no send may fail on a busy machine.

    Attributes:
        ledger: the sends and arrivals.
        outages: the times in which no message could be consumed, by `outage`.
    """

    def __init__(
        self,
        namesrv: str,
        *,
        topic: str = "Trial",
        rate: int = 200,
        take_over_seconds: float = 6.0,
        patient: bool = False,
    ) -> None:
        self.ledger = Ledger()
        self.outages: list[tuple[float, float]] = []
        self.producer = Producer("PG-trial", namesrv, settings=PATIENT if patient else SENDING)
        self.namesrv = namesrv
        self.topic = topic
        self._take_over_seconds = take_over_seconds
        self._pause = SENDERS / rate
        self._numbers = itertools.count()
        self._stack = contextlib.AsyncExitStack()
        self._is_sending = True
        self._senders: list[asyncio.Task[None]] = []
        self._before: set[asyncio.Task[object]] = set()
        self._threads_before: set[threading.Thread] = set()
        self._stored: dict[int, list[tuple[Place, str]]] | None = None
        self._left: list[str] = []

    async def __aenter__(self) -> Trial:
        self._before = asyncio.all_tasks()
        self._threads_before = set(threading.enumerate())
        await self._stack.enter_async_context(self.producer)
        await self._send(next(self._numbers))
        for i in range(2):
            await self._stack.enter_async_context(self._pushed("pushed", f"pushed {i}"))
        await self._stack.enter_async_context(self._pushed("ordered", "ordered", ordered=True))
        poller = PullConsumer("CG-polled", self.namesrv, settings=POLLED)
        poller.subscribe(self.topic)
        await self._stack.enter_async_context(poller)
        self._polling = asyncio.create_task(self._poll(poller), name="trial")
        self._senders = [asyncio.create_task(self._keep_sending(), name="trial") for _ in range(SENDERS)]
        await until(lambda: all(len(self.ledger.arrivals[group]) > 20 for group in GROUPS), "the first messages")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in (self._polling, *self._senders):
            task.cancel()
        ended = await asyncio.gather(self._polling, *self._senders, return_exceptions=True)
        self.ledger.undocumented += [error for error in ended if isinstance(error, Exception)]
        await self._stack.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):  # wait until the threads have exited
                while self._leftovers():
                    await asyncio.sleep(0.01)
        self._left = self._leftovers()

    async def work(self, seconds: float) -> None:
        """Let the clients work for some seconds."""
        await asyncio.sleep(seconds)

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """Record an outage: no message can be consumed in the block."""
        down = time.monotonic()
        yield
        self.outages.append((down, time.monotonic()))

    async def arrivals(self, count: int) -> None:
        """Wait until every group got ``count`` more messages and the producer some answers, which shows that they work
        again."""
        wanted = {group: len(self.ledger.arrivals[group]) + count for group in GROUPS}
        acknowledged = len(self.ledger.acknowledged) + ANSWERS_LEAST
        await until(
            lambda: (
                len(self.ledger.acknowledged) >= acknowledged
                and all(len(self.ledger.arrivals[group]) >= least for group, least in wanted.items())
            ),
            f"{count} messages in every group",
            SETTLE_SECONDS,
        )

    async def settle(self) -> None:
        """Stop sending and wait until every group has all messages. Then read the stored ones."""
        self._is_sending = False
        await asyncio.gather(*self._senders)
        with contextlib.suppress(AssertionError):  # `judge` names the missing messages
            await until(lambda: not any(self.ledger.lost(group) for group in GROUPS), "everything", SETTLE_SECONDS)
        self._stored = await self._read_stored()

    def judge(self, *, in_doubt_max: int | None = None) -> None:
        """Print the figures. Raise AssertionError if one of them is wrong."""
        ledger = self.ledger
        duplicates = {group: dict(ledger.duplicates(group)) for group in GROUPS}
        stalls = {group: max(ledger.stalls(group, self.outages).values()).seconds for group in GROUPS}
        print(
            f"{len(ledger.acknowledged)} sent, {len(ledger.in_doubt)} in doubt, again {duplicates}, longest stall "
            + ", ".join(f"{group} {seconds:.2f} s" for group, seconds in stalls.items())
        )
        assert len(ledger.acknowledged) >= ANSWERS_LEAST, "messages were sent"
        longest_outage = max((up - down for down, up in self.outages), default=0.0)
        assert not ledger.undocumented, f"send raised {ledger.undocumented[0]!r}"
        for group in GROUPS:
            assert not ledger.lost(group), f"{group} never got {sorted(ledger.lost(group))[:10]}"
            assert not ledger.strangers(group), f"{group} got what was never sent: {ledger.strangers(group)}"
            assert not duplicates[group].get("unexplained"), f"{group}: {duplicates[group]}"
            assert ledger.oldest_taken_over(group) < self._take_over_seconds + longest_outage, (
                "no consumed offset stays unsaved for longer than the limit"
            )
            assert stalls[group] <= STALL_SECONDS_MAX, f"{group} stood still: {ledger.stalls(group, self.outages)}"
        assert self._stored is not None, "`settle` was called"
        ledger.check_stored(self._stored, SEND_TRIES)
        assert in_doubt_max is None or len(ledger.in_doubt) <= in_doubt_max, Counter(
            str(error) for error in ledger.in_doubt.values()
        )
        assert not ledger.order_broken("ordered"), ledger.order_broken("ordered")
        assert not self._left, f"left behind: {self._left}"

    # -- inside

    def _pushed(self, group: str, member: str, *, ordered: bool = False) -> PushConsumer:
        consumer = PushConsumer(f"CG-{group}", self.namesrv, settings=PUSHED, ordered=ordered)

        @consumer.on(self.topic)
        async def handle(message: ReceivedMessage) -> None:
            self.ledger.arrived(group, member, message)

        return consumer

    async def _poll(self, consumer: PullConsumer) -> None:
        while True:
            for message in await consumer.poll(1):
                self.ledger.arrived("polled", "polled", message)

    async def _keep_sending(self) -> None:
        while self._is_sending:
            await self._send(next(self._numbers))
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))

    async def _send(self, number: int) -> None:
        try:
            result = await self.producer.send(Message(topic=self.topic, body=b"%d " % number + bytes(number % 1000)))
        except RmqError as error:
            self.ledger.failed(number, error)
            await asyncio.sleep(self._pause)
        else:
            self.ledger.sent(number, result)

    async def _read_stored(self) -> dict[int, list[tuple[Place, str]]]:
        stored: defaultdict[int, list[tuple[Place, str]]] = defaultdict(list)
        async with PullConsumer("CG-auditor", self.namesrv, settings=pulling()) as reader:
            for queue in await reader.queues(self.topic):
                for message in await _all_of(reader, queue):
                    stored[arrival_of(message, "").number].append((arrival_of(message, "").place, message.msg_id))
        return stored

    def _leftovers(self) -> list[str]:
        tasks = asyncio.all_tasks() - self._before
        threads = set(threading.enumerate()) - self._threads_before
        # The proxy's tasks, and the loop's threads that start servers, belong to the test.
        return [one.get_name() for one in tasks if one.get_name() != "proxy"] + [
            one.name for one in threads if not one.name.startswith("asyncio_")
        ]


async def _all_of(reader: PullConsumer, queue: MessageQueue) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    offset, end = await reader.min_offset(queue), await reader.max_offset(queue)
    while offset < end:
        result = await reader.pull(queue, offset)
        found += result.messages
        offset = result.next_begin_offset
    return found
