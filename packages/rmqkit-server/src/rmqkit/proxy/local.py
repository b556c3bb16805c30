"""A connection without a socket: a caller in the broker's process uses the same handlers as remote peers.

The gRPC endpoint has a `LocalConnection` for each client. Handlers and tables use it like any other connection: answers
are matched to callers by opaque, and requests and notices are passed to `on_request`. Use this module only on the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ConnectionLost
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import (
    JSON,
    RESPONSE,
    Body,
    Command,
    FrameSplitter,
    decode_command,
    each_frame,
    encode_command,
    frame_start,
)
from rmqkit.protocol.core import CoreFault
from rmqkit.remoting.connection import Connection, RequestHandling

Answered = Callable[[Command | ConnectionLost], None]
"""Receives an answer, or the reason why there will be no answer."""


class LocalConnection(Connection):
    """Requests to a router in the same process.

    Args:
        router: handles the requests.
        on_request: receives notices and requests to this client; returns the future of the answer to a request.
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
        self._asked: dict[int, Answered] = {}
        self._gathered: list[Command | list[Body]] = []

    def moved_to(self, peername: tuple[str, int]) -> None:
        """Store the new address of the client."""
        self.hops, self.addresses = [], ()
        self._name_peer(peername)

    def request(self, command: Command, *, gathers: bool = False) -> asyncio.Future[Command]:
        """Handle a request, and return the future of its answer.
        ``gathers``: handle the request together with the other requests of this loop tick, like requests in one read of
        a socket. Plain sends are then stored together.
        """
        answer: asyncio.Future[Command] = self._loop.create_future()
        if not self._is_open:
            answer.set_exception(ConnectionLost(self.peer, self._closed_because))
            return answer
        command.opaque = self._ask(partial(_settle, answer))
        if not gathers:
            self._router.handle(self, command)
            return answer
        self._gathered.append(command)
        if len(self._gathered) == 1:
            self._loop.call_soon(self.handle_gathered)
        return answer

    def request_soon(self, command: Command, answered: Answered) -> None:
        """Handle a request, and pass its answer to ``answered``, now or later."""
        if not self._is_open:
            answered(ConnectionLost(self.peer, self._closed_because))
            return
        command.opaque = self._ask(answered)
        self._router.handle(self, command)

    def gather(self, header: tuple[bytes, bytes], body: bytes, answered: Answered) -> None:
        """Collect a request until the caller calls `handle_gathered`, and pass its answer to ``answered``.
        ``header``: the JSON before and after the opaque."""
        if not self._is_open:
            answered(ConnectionLost(self.peer, self._closed_because))
            return
        text = b"%b%d%b" % (header[0], self._ask(answered), header[1])
        self._gathered.append([frame_start(JSON, len(text), len(body)) + text, body])

    def handle_gathered(self) -> None:
        """Handle the collected requests, like requests in one read of a socket."""
        gathered, self._gathered = self._gathered, []
        self.active_ms = self._clock.monotonic_ms()
        if len(gathered) == 1 and isinstance(only := gathered[0], Command):
            self._router.handle(self, only)
        elif gathered:
            pieces = [encode_command(one) if isinstance(one, Command) else one for one in gathered]
            try:
                self._handle_all(self._splitter.feed(b"".join([piece for some in pieces for piece in some])))
            except CoreFault as error:
                self.close(f"a fault of the compiled core: {error}")

    def _ask(self, answered: Answered) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        assert self._opaque not in self._asked, "fewer than 2**31 requests are pending"
        self._asked[self._opaque] = answered
        return self._opaque

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
        elif (answered := self._asked.pop(command.opaque, None)) is not None:
            answered(command)

    def send_successes(self, opaques: list[int]) -> None:
        for opaque in opaques:
            if (answered := self._asked.pop(opaque, None)) is not None:
                answered(Command(ResponseCode.SUCCESS, opaque, RESPONSE))

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
        """Do nothing: gRPC calls have no order among each other."""

    def go_on(self) -> None:
        """Do nothing, like `hold`."""

    def cork(self) -> None:
        """Do nothing: no socket is written."""

    def flush(self) -> None:
        """Do nothing: no socket is written."""

    def close(self, reason: str = "") -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._closed_because = reason or "it was closed here"
        asked, self._asked = self._asked, {}
        for answered in asked.values():
            answered(ConnectionLost(self.peer, self._closed_because))
        if not self.closed.done():
            self.closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)
        # Break the reference cycle of these callbacks, the client and this connection: servers rarely collect cycles.
        self._on_close, self._on_request = None, _ask_nobody

    def abort(self) -> None:
        self.close()


def _settle(answer: asyncio.Future[Command], outcome: Command | ConnectionLost) -> None:
    if answer.done():
        return
    if isinstance(outcome, ConnectionLost):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _ask_nobody(command: Command) -> None:
    """Ignore a command to a closed client."""
