"""Name servers and brokers with answers set by the test. They record their requests.

They are built on the project's own listening side, so everything a client does crosses a real loopback socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.protocol.schemas.clients import ConsumerIds, HeartbeatData
from rmqkit.protocol.schemas.topics import BrokerData, QueueData, TopicRoute
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import ServerTls
from rmqkit.standalone import Standalone
from tests.waiting import SECONDS as SECONDS
from tests.waiting import until as until


@contextlib.contextmanager
def standalone(root: Path, **parts: Any) -> Iterator[str]:
    """Our name server and broker on a loop and in a thread of their own; yields the name server's address.
    ``parts`` are further arguments of `Standalone`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    cluster = Standalone(root / "store", **parts)
    try:
        asyncio.run_coroutine_threadsafe(cluster.start(), loop).result(SECONDS)
        yield cluster.namesrv_address
        asyncio.run_coroutine_threadsafe(cluster.stop(), loop).result(SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


Answer = Callable[[Command], "Command | None"]


class Peer:
    """One listening program.

    Attributes:
        requests: every request, oldest first.
        connections: over which they came.
    """

    def __init__(self, tls: ServerTls | None = None) -> None:
        self.requests: list[Command] = []
        self.connections: list[Connection] = []
        self._answers: dict[int, Answer] = {}
        dispatch = Router()
        for code in RequestCode:
            dispatch.register(code, self._handle)
        self._server = RemotingServer(dispatch, tls=tls)
        self.address = ""

    def answer(self, code: int, answer: Answer) -> None:
        """Let a function answer the requests of a code. None means no answer."""
        self._answers[code] = answer

    def asked(self, code: int) -> list[dict[str, str]]:
        """Return the fields of all requests of a code."""
        return [decode_fields(command) for command in self.requests if command.code == code]

    async def start(self, port: int = 0) -> None:
        port = await self._server.listen("127.0.0.1", port)
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.close()

    def _handle(self, connection: Connection, command: Command) -> Command | None:
        self.requests.append(command)
        if connection not in self.connections:
            self.connections.append(connection)
        answer = self._answers.get(command.code)
        return reply(command, ResponseCode.SYSTEM_ERROR, "not scripted") if answer is None else answer(command)


class Cluster:
    """One name server and some brokers, each a master of its own name ``broker-0`` …; topics are added by `topic`."""

    def __init__(self, brokers: int = 1) -> None:
        self.name_server = Peer()
        self.brokers = [Peer() for _ in range(brokers)]
        self.routes: dict[str, TopicRoute] = {}
        self.heartbeats: list[HeartbeatData] = []
        self.name_server.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, self._route)
        for broker in self.brokers:
            broker.answer(RequestCode.HEART_BEAT, self._heartbeat)
            broker.answer(RequestCode.UNREGISTER_CLIENT, reply)
            broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self._members)
            broker.answer(RequestCode.UPDATE_CONSUMER_OFFSET, reply)
            broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, lambda command: offset(command, 0))
            broker.answer(RequestCode.PULL_MESSAGE, lambda command: None)  # held
            broker.answer(RequestCode.SEND_MESSAGE_V2, stored)
            broker.answer(RequestCode.SEND_BATCH_MESSAGE, stored)

    @property
    def broker(self) -> Peer:
        return self.brokers[0]

    @property
    def namesrv(self) -> str:
        return self.name_server.address

    def topic(self, topic: str, queues: int = 4, perm: int = 6, **extra: Any) -> None:
        """Create queues of a topic on every broker."""
        self.routes[topic] = TopicRoute(
            queue_datas=[QueueData(f"broker-{i}", queues, queues, perm) for i in range(len(self.brokers))],
            broker_datas=[
                BrokerData("TestCluster", f"broker-{i}", {0: broker.address}) for i, broker in enumerate(self.brokers)
            ],
            **extra,
        )

    async def __aenter__(self) -> Cluster:
        for peer in (self.name_server, *self.brokers):
            await peer.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for peer in (self.name_server, *self.brokers):
            await peer.stop()

    def _route(self, command: Command) -> Command:
        route = self.routes.get(decode_fields(command)["topic"])
        if route is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, "No topic route info in name server")
        return reply(command, body=msgspec.json.encode(route))

    def _heartbeat(self, command: Command) -> Command:
        self.heartbeats.append(msgspec.json.decode(command.body, type=HeartbeatData))
        return reply(command)

    def _members(self, command: Command) -> Command:
        group = decode_fields(command)["consumerGroup"]
        ids = {
            heartbeat.clientID
            for heartbeat in self.heartbeats
            if any(data.group_name == group for data in heartbeat.consumerDataSet)
        }
        if not ids:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return reply(command, body=msgspec.json.encode(ConsumerIds(sorted(ids))))


def stored(command: Command, code: int = ResponseCode.SUCCESS) -> Command:
    """The answer to a send."""
    fields = decode_fields(command)
    answered = {
        "msgId": "7F0000010000559700000000000000AB",
        "queueId": fields["e"],
        "queueOffset": "7",
        "transactionId": "T",
        "MSG_REGION": "DefaultRegion",
    }
    return reply(command, code, fields=answered)


def refused(code: int, remark: str = "no") -> Answer:
    """Answers that refuse."""
    return lambda command: reply(command, code, remark)


def offset(command: Command, value: int) -> Command:
    """The answer to a question for an offset."""
    return reply(command, fields={"offset": str(value)})


def pulled(command: Command, code: int, next_offset: int, body: bytes = b"", *, broker_id: int = 0) -> Command:
    """The answer to a pull."""
    fields = {
        "suggestWhichBrokerId": str(broker_id),
        "nextBeginOffset": str(next_offset),
        "minOffset": "0",
        "maxOffset": "100",
    }
    return reply(command, code, fields=fields, body=body)
