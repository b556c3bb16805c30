"""A name server and broker in one port, which serves given records of one queue: for pulls that no real broker answers
so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.schemas.offsets import OffsetResponse
from rmqkit.protocol.schemas.pull import PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.topics import BrokerData, QueueData, TopicRoute
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer

__all__ = ["BROKER", "TOPIC", "PulledBroker", "Stored"]

TOPIC, BROKER = "T", "broker-a"


class Stored(msgspec.Struct):
    """A record, and the offsets that it has: several if it is an inner batch."""

    record: bytes
    low: int
    high: int


class PulledBroker:
    """A broker whose only queue has some records.

    Attributes:
        records: the records of the queue, in order.
        faults: response codes of the next pulls, which then have no messages.
        pulled: the offset and the number of messages of each pull.
        asked: set by the first request for an offset.
        released: the broker answers requests for offsets when this is set.
    """

    def __init__(self) -> None:
        self.records: Sequence[Stored] = []
        self.faults: list[int] = []
        self.pulled: list[tuple[int, int]] = []
        self.asked, self.released = threading.Event(), threading.Event()
        self.released.set()
        router = Router()
        router.register(RequestCode.GET_ROUTEINFO_BY_TOPIC, self._route)
        router.register(RequestCode.GET_MIN_OFFSET, lambda _, command: self._offset(command, self.low))
        router.register(RequestCode.GET_MAX_OFFSET, lambda _, command: self._offset(command, self.high))
        router.register(RequestCode.PULL_MESSAGE, self._pull)
        self._router = router
        self._server = RemotingServer(router)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pulled broker")
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._listen(0)
        return self

    def restart(self) -> None:
        """Close all connections, and listen on the same port again."""
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result()
        self._server = RemotingServer(self._router)
        self._listen(int(self.address.rpartition(":")[2]))

    def _listen(self, port: int) -> None:
        listening = asyncio.run_coroutine_threadsafe(self._server.listen("127.0.0.1", port), self._loop)
        self.address = f"127.0.0.1:{listening.result()}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def low(self) -> int:
        """The offset of the first message."""
        return self.records[0].low if self.records else 0

    @property
    def high(self) -> int:
        """The offset after the last message."""
        return self.records[-1].high if self.records else 0

    def _route(self, _: Connection, command: Command) -> Command:
        brokers = [BrokerData("DefaultCluster", BROKER, {0: self.address})]
        route = TopicRoute([QueueData(BROKER, 1, 1, 6, 0)], brokers)
        return reply(command, body=msgspec.json.encode(route))

    def _offset(self, command: Command, offset: int) -> Command:
        self.asked.set()
        self.released.wait()
        return reply(command, header=OffsetResponse(offset))

    def _pull(self, _: Connection, command: Command) -> Command:
        asked = decode_header(command, PullMessageRequest)
        self.pulled.append((asked.queue_offset, asked.max_msg_nums))
        found = [one for one in self.records if one.high > asked.queue_offset][: asked.max_msg_nums]
        code, following = ResponseCode.SUCCESS, found[-1].high if found else self.high
        if self.faults:
            code, found = ResponseCode(self.faults.pop(0)), []
            following = asked.queue_offset
        elif asked.queue_offset < self.low:
            code, following, found = ResponseCode.PULL_OFFSET_MOVED, self.low, []
        elif not found:
            code = ResponseCode.PULL_NOT_FOUND
        header = PullMessageResponse(0, following, self.low, self.high)
        return reply(command, code, header=header, body=b"".join(one.record for one in found))
