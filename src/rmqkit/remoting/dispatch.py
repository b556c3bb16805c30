"""From a request's code to the function that answers it (``processRequestCommand`` and its processor table).

A hot handler is a plain function: it returns the reply, or None when there is none yet (it parks the request and
answers later with `Connection.send`) or none at all (one-way). A rare handler may be a coroutine function; its task is
owned here. An exception becomes SYSTEM_ERROR with its text, as the reference answers; it is logged once.
Source: remoting.md §2, behaviour.md §2.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rmqkit.errors import PeerRefused, ProtocolError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, reply

if TYPE_CHECKING:
    from rmqkit.remoting.connection import Connection

__all__ = ["Dispatch", "Handler"]

Handler = Callable[["Connection", Command], "Command | Awaitable[Command | None] | None"]

_log = logging.getLogger(__name__)


class Dispatch:
    """The handlers of one listening port or one client; loop only."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self, code: int, handler: Handler) -> None:
        """Answer a request code with a handler; a code has one handler."""
        assert code not in self._handlers, f"code {code} has a handler already"
        self._handlers[int(code)] = handler

    def handle(self, connection: Connection, command: Command) -> None:
        """Answer one request; the reply goes out with the others of this tick."""
        handler = self._handlers.get(command.code)
        if handler is None:
            answer: Command | Awaitable[Command | None] | None = reply(
                command,
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                f" request type {command.code} not supported",
            )
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
            return
        task = asyncio.ensure_future(self._finish(connection, command, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the coroutine handlers that still run."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, connection: Connection, command: Command, answer: Awaitable[Command | None]) -> None:
        try:
            response = await answer
        except Exception as error:  # noqa: BLE001 - the outer edge of a request: answered and logged once
            response = _failure(connection, command, error)
        if response is not None and not command.is_one_way:
            connection.send(response)


def _failure(connection: Connection, command: Command, error: Exception) -> Command:
    """The reply to a request whose handler raised."""
    if isinstance(error, PeerRefused):
        return reply(command, error.code, error.remark)
    if isinstance(error, ProtocolError):
        _log.warning("request %s of %s cannot be read: %s", command.code, connection.peer, error)
    else:
        _log.error("request %s of %s failed", command.code, connection.peer, exc_info=error)
    return reply(command, ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
