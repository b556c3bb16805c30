"""A connection without a socket: a caller in the broker's own process uses the handlers that remote peers use.

The gRPC endpoint has one for each of its clients. Handlers and tables take it for a connection like others: what they
answer finds the caller by its opaque, what they ask or tell goes to `on_request`. Loop only. Source: grpc.md §16.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ConnectionLost
from rmqkit.protocol.command import RESPONSE, Body, Command, FrameSplitter, decode_command, each_frame, encode_command
from rmqkit.remoting.connection import Connection, RequestHandling


class LocalConnection(Connection):
    """Requests to a router of the same process.

    Args:
        router: answers what is asked.
        on_request: takes what handlers tell this client, and what they ask it; returns the answer to a question.
        on_close: called once, by `close`.
    """

    def __init__(
        self,
        router: RequestHandling,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_request: Callable[[Command], asyncio.Future[Command] | None] = lambda command: None,
        on_close: Callable[[Connection], None] | None = None,
    ) -> None:
        super().__init__(router, clock=clock, on_close=on_close)
        self._on_request = on_request
        self._is_open = True
        self._asked: dict[int, asyncio.Future[Command]] = {}
        self._gathered: list[Command] = []

    def moved_to(self, peername: tuple[str, int]) -> None:
        """Take the address that the client has now."""
        self.hops, self.addresses = [], ()
        self._name_peer(peername)

    def request(self, command: Command, *, gathers: bool = False) -> asyncio.Future[Command]:
        """Have a request handled; the future holds the answer. One that is cancelled is not answered.
        ``gathers``: with all others of this tick, as what a socket brings in one read: plain sends are stored at once.
        """
        answer: asyncio.Future[Command] = self._loop.create_future()
        if not self._is_open:
            answer.set_exception(ConnectionLost(self.peer, self._closed_because))
            return answer
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        assert self._opaque not in self._asked, "2**31 requests are not under way at a time"
        command.opaque = self._opaque
        self._asked[self._opaque] = answer
        if not gathers:
            self._router.handle(self, command)
            return answer
        self._gathered.append(command)
        if len(self._gathered) == 1:
            self._loop.call_soon(self._handle_gathered)
        return answer

    def _handle_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        self.active_ms = self._clock.monotonic_ms()
        if len(gathered) == 1:
            self._router.handle(self, gathered[0])
        else:
            self._handle_all(self._splitter.feed(b"".join(piece for one in gathered for piece in encode_command(one))))

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_writable(self) -> bool:
        return self._is_open

    @property
    def unsent_bytes(self) -> int:
        return 0

    def send(self, command: Command) -> None:
        if not self._is_open:
            return
        if not command.flag & RESPONSE:
            self._on_request(command)
        elif (answer := self._asked.pop(command.opaque, None)) is not None and not answer.done():
            answer.set_result(command)

    def send_frame(self, *pieces: Body) -> None:
        for one in each_frame(FrameSplitter().feed(b"".join(pieces))):
            self.send(decode_command(one))

    def call(self, command: Command, timeout_ms: float) -> asyncio.Future[Command]:
        answer = self._on_request(command) if self._is_open else None
        if answer is None:
            answer = self._loop.create_future()
            answer.set_exception(ConnectionLost(self.peer, "the client does not answer requests"))
        return answer

    def hold(self) -> None:
        """Nothing is held: calls of gRPC have no order among themselves."""

    def go_on(self) -> None:
        """Nothing was held."""

    def cork(self) -> None:
        """Nothing is written."""

    def flush(self) -> None:
        """Nothing is written."""

    def close(self, reason: str = "") -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._closed_because = reason or "it was closed here"
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(self.peer, self._closed_because))
        if not self.closed.done():
            self.closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)
        # Both hold the client, which holds this: servers collect cycles too seldom to leave these to them.
        self._on_close, self._on_request = None, _ask_nobody

    def abort(self) -> None:
        self.close()


def _ask_nobody(command: Command) -> None:
    """What is told to a client that has gone."""
