"""One connection to a cluster for all producers and consumers of a program."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from rmqkit.client.consumer.allocate import Allocate, averagely
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.consumer.reader import ReadFrom, Start, TopicReader, Wanted, check_wanted, start_of
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import Check, Execute, TransactionProducer
from rmqkit.client.runtime import process
from rmqkit.client.runtime.lifecycle import Client
from rmqkit.client.runtime.process import closing_order
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import (
    ClientSettings,
    ProducerSettings,
    PullConsumerSettings,
    PushConsumerSettings,
    check,
)
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, SettingsError
from rmqkit.filter import TAG
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.times import Duration, duration_ms

__all__ = ["ConnectedClients", "connect"]

C = TypeVar("C", bound=Client)

_log = logging.getLogger(__name__)


def connect(
    name_servers: str | Sequence[str] | None = None,
    *,
    settings: ClientSettings | None = None,
    clock: Clock = SYSTEM_CLOCK,
    hooks: Sequence[Hook] = (),
    wait_ready: Duration = 0,
) -> ConnectedClients:
    """Connect a program to a cluster, for all its producers and consumers::

        async with rmqkit.connect("127.0.0.1:9876") as mq, mq.producer("shop") as producer:
            await producer.send("Orders", b"17")

    Args:
        name_servers: the same as for a `Producer`.
        settings: settings of the connections: TLS, credentials, intervals. Settings of a single client do not change
            the connections.
        hooks: the hooks of every producer and consumer.
        wait_ready: the same as for a `Producer`.

    Raises SettingsError: an address or a setting is not valid. Raises TimeIllegal: the time is not valid."""
    return ConnectedClients(name_servers, settings=settings, clock=clock, hooks=hooks, wait_ready=wait_ready)


class ConnectedClients:
    """Producers and consumers that share connections, routes and heartbeats. `connect` returns it.

    You can create clients before you enter this object, so that a web application can declare them in a module. Start
    each client with ``async with`` or ``start()``, after this object. When this object closes, it closes the clients
    that are still open: consumers first, because their handlers may still send. For each group, you can create one
    producer and one consumer here.
    """

    def __init__(
        self,
        name_servers: str | Sequence[str] | None,
        *,
        settings: ClientSettings | None,
        clock: Clock,
        hooks: Sequence[Hook],
        wait_ready: Duration,
    ) -> None:
        self._wait_ms = duration_ms(wait_ready, "wait_ready")
        self._runtime = ClientRuntime(name_servers, settings=check(settings or ClientSettings()), clock=clock)
        self._hooks = tuple(hooks)
        self._clients: list[Client] = []
        self._readers: set[TopicReader] = set()
        self._is_open = self._is_closed = False

    async def __aenter__(self) -> Self:
        """Start the connections. Raises NoRoute: no name server answers, as in the `start` of a client. Raises
        ClientError: this object is closed."""
        await self._runtime.start()
        try:
            await self._runtime.reach(self._wait_ms)
        except BaseException:
            await self._runtime.close()
            raise
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open, self._is_closed = False, True
        await asyncio.gather(*(reader.close() for reader in self._readers))
        for together in closing_order(self._clients):
            await asyncio.gather(*(client.close() for client in together))
        await self._runtime.close()

    def producer(self, group: str, *, settings: ProducerSettings | None = None) -> Producer:
        """Create a `Producer`. Raises ClientError: this object is closed. Raises SettingsError: the same as for
        `Producer`.
        """
        return self._added(Producer(group, **self._shared(settings)))

    def transaction_producer(
        self, group: str, *, execute: Execute, check: Check, settings: ProducerSettings | None = None
    ) -> TransactionProducer:
        """Create a `TransactionProducer`. Raises the same errors as `producer`."""
        return self._added(TransactionProducer(group, execute=execute, check=check, **self._shared(settings)))

    def consumer(
        self,
        group: str,
        *,
        settings: PushConsumerSettings | None = None,
        ordered: bool = False,
        allocate: Allocate = averagely,
    ) -> PushConsumer:
        """Create a `PushConsumer`. Raises the same errors as `producer`."""
        shared = self._shared(settings)
        return self._added(PushConsumer(group, ordered=ordered, allocate=allocate, **shared))

    def pop_consumer(
        self, group: str, *, settings: PushConsumerSettings | None = None, ordered: bool = False
    ) -> PopConsumer:
        """Create a `PopConsumer`. Raises the same errors as `producer`."""
        return self._added(PopConsumer(group, ordered=ordered, **self._shared(settings)))

    def pull_consumer(
        self, group: str, *, settings: PullConsumerSettings | None = None, allocate: Allocate = averagely
    ) -> PullConsumer:
        """Create a `PullConsumer`. Raises the same errors as `producer`."""
        return self._added(PullConsumer(group, allocate=allocate, **self._shared(settings)))

    def read(
        self,
        topic: str,
        expression: str = "*",
        *,
        expression_type: str = TAG,
        start: ReadFrom = "first",
        keys: Collection[str] = (),
        stop_at_end: bool = False,
        group: str = TOOLS_GROUP,
    ) -> AsyncGenerator[ReceivedMessage]:
        """Read a topic without a group: no offsets are saved, and other consumers are not affected::

            async for message in mq.read("Orders", start=timedelta(hours=1)):
                print(message.keys, message.body)

        The loop first yields the stored messages of all queues in the order of their store time, and then new messages
        as they arrive. The loop ends when this object is closed. If you leave the loop earlier, the reading stops.

        Args:
            expression, expression_type: the same as for `PushConsumer.subscribe`. The brokers filter.
            start: ``"first"`` is the first stored message. ``"new"`` is the end of every queue. A `datetime` or a
                number of seconds since the epoch is a point in time. A `timedelta` is a time before now.
                To continue an earlier loop, pass the next offset of each queue,
                ``{MessageQueue("Orders", "broker-a", 0): 17}``. Other queues are read from their first message.
            keys: return only messages with one of these keys or message ids.
            stop_at_end: end after the messages that were stored when the loop began.
            group: the group of the requests, for brokers that check permissions. No client joins the group.

        Raises SettingsError: an argument is not valid. Raises ClientError: this object is not open. The loop raises
        NoRoute if the topic does not exist, and PeerRefused if a broker refuses. If a broker is unreachable, the loop
        logs this and retries until the broker is reachable.
        """
        self._check_open()
        wanted, begin = Wanted(expression, expression_type, keys), start_of(start, self._runtime.clock.now_ms())
        check_wanted(topic, wanted)
        if stop_at_end and begin == Start():
            raise SettingsError("start='new' with stop_at_end=True reads nothing: choose another start")
        consumer = self._added(PullConsumer(group, runtime=self._runtime))

        def note(text: str) -> None:
            _log.warning("reading of topic %s: %s", topic, text)

        reader = TopicReader(consumer, topic, begin, wanted, note, stop_at_end=stop_at_end)
        return self._read(consumer, reader)

    async def _read(self, consumer: PullConsumer, reader: TopicReader) -> AsyncGenerator[ReceivedMessage]:
        self._check_open()
        self._readers.add(reader)
        try:
            async with consumer, reader:
                while messages := await reader.next():
                    for message in messages:
                        yield message
        finally:
            self._readers.discard(reader)

    async def ping(self) -> None:
        """Send a request to a name server as a health check.
        Raises NoRoute: no name server answers. Raises ClientError: this object is not open."""
        self._check_open()
        await self._runtime.reach()

    async def run(self) -> None:
        """Start the producers and consumers created by this object, and run them in the same way as `rmqkit.run`."""
        self._check_open()
        await process.run(*self._clients)

    def _shared(self, settings: ClientSettings | None) -> dict[str, Any]:
        self._check_not_closed()
        return {"settings": settings, "runtime": self._runtime, "hooks": self._hooks}

    def _added(self, client: C) -> C:
        self._clients = [one for one in self._clients if not one.is_closed]
        self._clients.append(client)
        return client

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise ClientError("the connection is closed: make a new one with rmqkit.connect(…)")

    def _check_open(self) -> None:
        self._check_not_closed()
        if not self._is_open:
            raise ClientError("the connection is not open: use it inside 'async with rmqkit.connect(…)'")
