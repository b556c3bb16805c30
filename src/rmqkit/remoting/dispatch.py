"""From a request's code to the function that answers it (``processRequestCommand`` and its processor table).

A hot handler is a plain function: it returns the reply, or None when there is none yet (it parks the request and
answers later with `Connection.send`) or none at all (one-way). The hottest requests are answered before that, many at
once: `Dispatch.rest`. A rare handler may be a coroutine function; its task is owned here. An exception becomes
SYSTEM_ERROR with its text, as the reference answers; it is logged once.
Source: remoting.md §2, behaviour.md §2.4.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rmqkit.errors import PeerRefused, ProtocolError
from rmqkit.protocol.codes import ResponseCode, version_number
from rmqkit.protocol.command import Command, reply
from rmqkit.protocol.frame import Frame
from rmqkit.remoting.tasks import Tasks

if TYPE_CHECKING:
    from rmqkit.remoting.connection import Connection

__all__ = ["OVERLOADED", "Dispatch", "Handler", "Lane", "Refusal"]

Handler = Callable[["Connection", Command], "Command | Awaitable[Command | None] | None"]

Refusal = Callable[["Connection", Command], str | None]
"""Looks at a request before it is handled: the remark for one that is not let in (NO_PERMISSION), else None."""

Rest = Callable[["Connection", list[Frame]], Iterable[Frame]]

OVERLOADED = "[OVERLOAD]system busy, start flow control for a while"
"""The reference's remark for a full lane."""

_GO_AWAY_SINCE = version_number(5, 3, 1)
_NOBODY: tuple[None, None] = (None, None)

_log = logging.getLogger(__name__)


class Lane:
    """Requests of one kind that are under way at a time (a thread pool's queue in the reference).
    Beyond ``requests_max`` the answer is SYSTEM_BUSY, and one-way requests are dropped."""

    __slots__ = ("name", "requests", "requests_max")

    def __init__(self, name: str, requests_max: int) -> None:
        self.name = name
        self.requests_max = requests_max
        self.requests = 0


class Dispatch:
    """The handlers of one listening port or one client; loop only.
    ``refusal``: looks at every request first.
    ``together``: wraps the handling of several requests that one read brought.
    ``rest``: answers what it can of them all at once, and gives the others in their order; each one has to be handled
    before it is asked for the next. It is not asked about a single one without a body, which is no send."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        self.together: Callable[[], AbstractContextManager[None]] | None = None
        self.rest: Rest | None = None
        self._refusal = refusal
        self._handlers: dict[int, tuple[Handler, Lane | None]] = {}
        self._tasks = Tasks()
        self._is_going_away = False

    @property
    def codes(self) -> frozenset[int]:
        """The request codes that have a handler."""
        return frozenset(self._handlers)

    @property
    def lanes(self) -> set[Lane]:
        """The lanes of all handlers."""
        return {lane for _, lane in self._handlers.values() if lane is not None}

    @property
    def is_idle(self) -> bool:
        """Whether no coroutine handler runs."""
        return not self._tasks

    def register(self, code: int, handler: Handler, lane: Lane | None = None) -> None:
        """Answer a request code with a handler, its only one; a lane bounds how many coroutines of it run at once."""
        assert code not in self._handlers, f"code {code} has a handler already"
        self._handlers[int(code)] = (handler, lane)

    def go_away(self) -> None:
        """Answer new requests with GO_AWAY from now on, where the peer knows it. Source: remoting.md §2."""
        self._is_going_away = True

    def unanswered(self, connection: Connection, frames: list[Frame]) -> Iterable[Frame]:
        """The requests of one read that have to be handled one by one, after `rest` has answered those before."""
        if self.rest is None or self._refusal is not None or self._is_going_away:
            return frames
        if len(frames) == 1 and not frames[0].body:
            return frames
        return self.rest(connection, frames)

    def handle(self, connection: Connection, command: Command) -> None:
        """Answer one request; the reply goes out with the others of this tick."""
        handler, lane = self._handlers.get(command.code, _NOBODY)
        if self._is_going_away and command.version > _GO_AWAY_SINCE:
            answer: Command | Awaitable[Command | None] | None = reply(
                command, ResponseCode.GO_AWAY, "this process is shutting down"
            )
        elif handler is None:
            remark = f" request type {command.code} not supported"
            answer = reply(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
        elif lane is not None and lane.requests >= lane.requests_max:
            answer = reply(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
        elif self._refusal is not None and (refused := self._refusal(connection, command)) is not None:
            answer = reply(command, ResponseCode.NO_PERMISSION, refused)
        else:
            try:
                answer = handler(connection, command)
            except Exception as error:  # noqa: BLE001 - the outer edge of a request: answered and logged once
                answer = _failure(connection, command, error)
        if answer is None:
            return
        if isinstance(answer, Command):
            if not command.is_one_way:
                connection.send(answer)
            else:
                connection.keep_back(command, answer)
            return
        if lane is not None:
            lane.requests += 1
        self._tasks.start(self._finish(connection, command, answer, lane), "request")

    async def close(self) -> None:
        """End the coroutine handlers that still run."""
        await self._tasks.close()

    async def _finish(
        self, connection: Connection, command: Command, answer: Awaitable[Command | None], lane: Lane | None
    ) -> None:
        try:
            response = await answer
        except Exception as error:  # noqa: BLE001 - the outer edge of a request: answered and logged once
            response = _failure(connection, command, error)
        finally:
            if lane is not None:
                lane.requests -= 1
        if response is not None:
            (connection.keep_back(command, response) if command.is_one_way else connection.send(response))


def _failure(connection: Connection, command: Command, error: Exception) -> Command:
    """The reply to a request whose handler raised."""
    if isinstance(error, PeerRefused):
        return reply(command, error.code, error.remark)
    if isinstance(error, ProtocolError):
        _log.warning("request %s of %s cannot be read: %s", command.code, connection.peer, error)
    else:
        _log.error("request %s of %s failed", command.code, connection.peer, exc_info=error)
    return reply(command, ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
