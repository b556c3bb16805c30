"""The objects of a behaviour: a shared peer, and a scene of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rmqkit import (
    Message,
    NoRoute,
    Producer,
    PullConsumer,
    PushConsumer,
    PushConsumerSettings,
    ReceivedMessage,
    StartFrom,
    TransactionProducer,
)
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.producer.transaction import Check, Execute
from rmqkit.client.runtime.lifecycle import Client
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.clients import ClientConnection, ProducerConnection, ProducerGroupRequest
from rmqkit.protocol.schemas.topics import (
    CreateTopicRequest,
    DeleteTopicRequest,
    RouteRequest,
    TopicRequest,
    TopicRoute,
)
from tests.interop.apache import ask
from tests.interop.kit import ApacheKit
from tests.patience import TIMEOUT_MS, producing, pulling

C = TypeVar("C", bound=Client)
T = TypeVar("T")

JAVA_HEAP_MB = 200
JAVA_SECONDS_MAX = 300
POLL_SECONDS = 0.02


@dataclass(slots=True)
class Peer:
    """A running name server and broker, `rmq standalone` ("ours") or Apache's ("apache"). No behaviour changes them."""

    name: str
    namesrv_addr: str
    broker_addr: str
    broker_name: str
    cluster: str
    work_dir: Path
    kit: Callable[[], ApacheKit]
    """Returns Apache's Java programs, or skips the test without Java."""
    kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Objects that are closed with the peer."""
    java_permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    _shared: dict[object, asyncio.Task[Any]] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.name == "ours"

    async def shared(self, make: Callable[[Peer], Coroutine[Any, Any, T]]) -> T:
        """Return an object that several behaviours share. The first caller creates it."""
        if make not in self._shared:
            self._shared[make] = asyncio.create_task(make(self))
        made: T = await asyncio.shield(self._shared[make])
        return made


class Scene:
    """Names that no other behaviour uses, and clients that are closed at its end.

    Attributes:
        topic: a topic name. `create_topic` or a first send creates the topic.
        group: a group name, of producers or consumers.
    """

    def __init__(self, peer: Peer, name: str) -> None:
        self.peer = peer
        self.name = re.sub(r"[^a-zA-Z0-9_-]", "-", name)[:60]
        self.topic = f"T{self.name}"
        self.group = f"G{self.name}"
        self.namesrv = peer.namesrv_addr
        self.broker_name = peer.broker_name
        self._clients = contextlib.AsyncExitStack()
        self._reader: PullConsumer | None = None
        self._sender: Producer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._clients.__aexit__(kind, error, trace)

    # -- clients

    def closing(self, client: C) -> C:
        """Close a client at the end of the scene."""
        self._clients.push_async_callback(client.close)
        return client

    async def producer(self, group: str | None = None, **settings: Any) -> Producer:
        """Return a started producer. `settings` are fields of `ProducerSettings`."""
        made = self.closing(Producer(group or self.group, self.namesrv, settings=producing(**settings)))
        await made.start()
        return made

    async def sender(self) -> Producer:
        """Return the same producer every time, in a separate group, for behaviours of consumers."""
        if self._sender is None:
            self._sender = await self.producer(f"S{self.name}")
        return self._sender

    async def transaction_producer(
        self, execute: Execute, check: Check, group: str | None = None, *, hooks: Sequence[Hook] = (), **settings: Any
    ) -> TransactionProducer:
        """Return a started producer of transactions."""
        made = self.closing(
            TransactionProducer(
                group or self.group,
                self.namesrv,
                settings=producing(**settings),
                execute=execute,
                check=check,
                hooks=hooks,
            )
        )
        await made.start()
        return made

    async def pull_consumer(self, group: str | None = None, **settings: Any) -> PullConsumer:
        """Return a started pull consumer. `settings` are fields of `PullConsumerSettings`."""
        made = PullConsumer(group or self.group, self.namesrv, settings=pulling(**quick_consumer(settings)))
        await self.closing(made).start()
        return made

    def push_consumer(self, group: str | None = None, **settings: Any) -> PushConsumer:
        """Return a push consumer that is not subscribed or started yet. By default it starts at the first message and
        rebalances twice a second. `settings` are fields of `PushConsumerSettings`."""
        made = PushConsumer(
            group or self.group, self.namesrv, settings=PushConsumerSettings(**quick_consumer(settings))
        )
        return self.closing(made)

    # -- topics

    async def create_topic(
        self,
        topic: str | None = None,
        *,
        queues: int = 1,
        read_queues: int | None = None,
        perm: int = 6,
        order: bool = False,
        attributes: str | None = None,
    ) -> str:
        """Create or change a topic (the scene's own by default) and wait until the name server shows it."""
        topic = topic or self.topic
        header = CreateTopicRequest(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=queues if read_queues is None else read_queues,
            write_queue_nums=queues,
            perm=perm,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=order,
            attributes=attributes,
        )
        await self.ask_broker(request(RequestCode.UPDATE_AND_CREATE_TOPIC, header))

        def is_shown(route: TopicRoute | None) -> bool:
            shown = (
                [(data.write_queue_nums, data.read_queue_nums, data.perm) for data in route.queue_datas]
                if route
                else []
            )
            return shown == [(header.write_queue_nums, header.read_queue_nums, perm)]

        while not is_shown(await self.route(topic)):
            await asyncio.sleep(POLL_SECONDS)
        return topic

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic from the broker and the name server."""
        await self.ask_broker(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic)))
        await self.ask_name_server(
            request(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest(topic, cluster_name=self.peer.cluster))
        )
        while await self.route(topic) is not None:
            await asyncio.sleep(POLL_SECONDS)

    async def route(self, topic: str) -> TopicRoute | None:
        """Return the name server's route of a topic."""
        command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteRequest(topic, accept_standard_json_only=True))
        answer = await asyncio.to_thread(ask, self.namesrv, command)
        return decode_as(answer.payload, TopicRoute) if answer.code == ResponseCode.SUCCESS else None

    # -- stored messages

    async def reader(self, **settings: Any) -> PullConsumer:
        """Return a pull consumer in a separate group, for reading stored messages, with these settings."""
        if self._reader is None:
            self._reader = await self.pull_consumer(f"R{self.name}", **settings)
        return self._reader

    async def stored(self, count: int, topic: str | None = None) -> list[ReceivedMessage]:
        """Return the messages of a topic, queue by queue, as soon as there are at least ``count``."""
        reader = await self.reader()
        while True:
            found: list[ReceivedMessage] = []
            with contextlib.suppress(NoRoute):
                for queue in await reader.queues(topic or self.topic):
                    offset = 0
                    while messages := (result := await reader.pull(queue, offset)).messages:
                        found += messages
                        offset = result.next_begin_offset
            if len(found) >= count:
                return found
            await asyncio.sleep(POLL_SECONDS)

    async def sent_and_stored(self, message: Message, **settings: Any) -> ReceivedMessage:
        """Send one message to the scene's topic and read it."""
        producer = await self.producer(**settings)
        await producer.send(message)
        (one,) = await self.stored(1, message.topic)
        return one

    # -- requests of an operator, and Java programs

    async def producers(self) -> list[ClientConnection]:
        """Return the producers of the scene's group that the broker knows."""
        header = ProducerGroupRequest(self.group)
        answer = await self.ask_anyway(request(RequestCode.GET_PRODUCER_CONNECTION_LIST, header))
        is_known = answer.code == ResponseCode.SUCCESS
        return decode_as(answer.payload, ProducerConnection).connection_set if is_known else []

    async def ask_broker(self, command: Command) -> Command:
        """Send a request over a new connection. Every answer but success fails."""
        return await self._asked(self.peer.broker_addr, command)

    async def ask_name_server(self, command: Command) -> Command:
        """Send a request to the name server, as `ask_broker` does to the broker."""
        return await self._asked(self.namesrv, command)

    async def ask_anyway(self, command: Command) -> Command:
        """Send a request to the broker, and return its answer even if it is a refusal."""
        return await asyncio.to_thread(ask, self.peer.broker_addr, command)

    async def _asked(self, address: str, command: Command) -> Command:
        answer = await asyncio.to_thread(ask, address, command)
        assert answer.code == ResponseCode.SUCCESS, f"{command.code} was answered with {answer.code}: {answer.remark}"
        return answer

    async def java(self, main: str, arguments: Sequence[object]) -> list[dict[str, Any]]:
        """Run one of the Java programs to its end with ``--namesrv`` and ``--out``. Return its events."""
        kit = await asyncio.to_thread(self.peer.kit)
        work_dir = self.peer.work_dir / self.name
        work_dir.mkdir(exist_ok=True)
        out = work_dir / f"{main}.jsonl"
        arguments = [*arguments, "--namesrv", self.namesrv, "--out", out]
        command = kit.jvm(f"interop.{main}", arguments, heap_mb=JAVA_HEAP_MB, work_dir=work_dir)
        async with self.peer.java_permits:
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=JAVA_SECONDS_MAX
            )
        events = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        assert events, f"{main} ended with {done.returncode} and wrote nothing: {(done.stdout + done.stderr)[-2000:]}"
        return events


def quick_consumer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a consumer with short intervals."""
    quick = {
        "start_from": StartFrom.FIRST_OFFSET,
        "rebalance_interval_ms": 500,
        "persist_interval_ms": 200,
        "route_interval_ms": 1000,
        "heartbeat_interval_ms": 1000,
        "take_over_pause_ms": 100,
        "api_timeout_ms": TIMEOUT_MS,
    }
    return quick | settings
