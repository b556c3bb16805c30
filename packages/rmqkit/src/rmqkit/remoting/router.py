"""The table from request codes to handlers (``processRequestCommand`` and its processor table).

`Router` holds the handlers of a port. `answers` marks a method as the handler of a code. `AdminAddresses` are the
addresses from which a server can be changed, by default only its own machine (``adminAllowedAddresses``). Apache's
servers accept administrative requests from all addresses.

A handler of frequent requests is a plain function. It returns the reply, or None if it replies later with
`Connection.send` or not at all (one-way). `Router.fast_path` handles the most frequent requests before their handlers,
many in one call. A handler of rare requests may be a coroutine function; the router owns its task. An exception becomes
SYSTEM_ERROR with its text, as in the reference, and is logged once.
Source: remoting.md §2, behaviour.md §2.4.

`decode_body` reads JSON bodies on the loop, if they can be read quickly:

=======================  ===================  =======================================================================
body                     maximum on the loop  examples
=======================  ===================  =======================================================================
strict JSON of the type  1 MiB                nearly all: heartbeats, locks, lists of topics and groups
other JSON               16 KiB               Java's dialect, enums as numbers: read by Python, 2 µs for each byte
=======================  ===================  =======================================================================

Longer bodies are refused. Bodies with more than `OBJECTS_MAX` objects are refused, too, because small objects take as
much time as large objects. Some codes, such as the codes for static topics, have longer valid bodies in the dialect.
Their handlers read the bodies in a thread (`decode_aside`).

`settings_reply` and `change_settings` let operators read and change the settings of brokers and name servers
(``Configuration``). A request changes all its settings or none. Keys that need a restart and keys of the black list get
NO_PERMISSION with Java's remark. Invalid keys and values get SYSTEM_ERROR with the reason. When the reply is sent, the
changes are in effect and stored in the configuration file.
Source: remoting.md §4.2, §4.4; behaviour.md §1.7, §9.9.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from rmqkit.errors import BodyError, PeerRefused, ProtocolError, SettingsError, StoreUnavailable
from rmqkit.protocol.codes import ResponseCode, request_name, version_number
from rmqkit.protocol.command import Command, Frame, each_frame, reply
from rmqkit.protocol.core import ACKS, AckedOffsets, Acks, Sends, SendsReader
from rmqkit.protocol.fastjson import decode_as
from rmqkit.remoting.address import AdminAddresses
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Tasks
from rmqkit.settings import Configuration, parse_properties

Handler = Callable[[Connection, Command], "Command | Awaitable[Command | None] | None"]

# A check before a request is handled. It returns the remark of the refusal (NO_PERMISSION), or None.
Refusal = Callable[[Connection, Command], str | None]

# A handler of several acks of popped messages. It returns False, without changes, if each ack must be handled alone.
TakeAcks = Callable[[Connection, list[AckedOffsets]], bool]
FastPath = Callable[[Connection, list[Frame | Sends]], Iterable[Frame]]

# The remark of the reference for a full lane.
OVERLOADED = "[OVERLOAD]system busy, start flow control for a while"

_GO_AWAY_SINCE = version_number(5, 3, 1)
_NOBODY: tuple[None, None] = (None, None)

_log = logging.getLogger(__name__)


class Lane:
    """A limit for the requests of one kind that run at the same time. The reference limits the queue of a thread pool.
    Requests beyond ``requests_max`` get SYSTEM_BUSY. One-way requests are dropped."""

    __slots__ = ("name", "requests", "requests_max")

    def __init__(self, name: str, requests_max: int) -> None:
        self.name = name
        self.requests_max = requests_max
        self.requests = 0


class Router:
    """The handlers of one listening port or one client. Use it only on the event loop.
    ``refusal``: checks every request before its handler.
    ``batch``: a context manager around the handling of several requests of one read.
    ``sends``: reads plain sends for ``fast_path``, and acks for ``take_acks``.
    ``take_acks``: handles several acks of popped messages together.
    ``fast_path(connection, frames)`` stores and answers sequences of plain sends, and yields every other frame. Handle
    each yielded frame before requesting the next frame, to preserve the order within a connection. ``fast_path`` is not
    called for a single frame without a body, because such a frame cannot be a send."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        self.batch: Callable[[], AbstractContextManager[None]] | None = None
        self.fast_path: FastPath | None = None
        self.take_acks: TakeAcks | None = None
        self.sends: SendsReader | None = None
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
        """Return True if no coroutine handler is running."""
        return not self._tasks

    def register(self, code: int, handler: Handler, lane: Lane | None = None) -> None:
        """Set the handler of a request code. The code must not have a handler yet. ``lane``: limits the number of
        requests that run at the same time."""
        assert code not in self._handlers, f"code {code} has no handler yet"
        self._handlers[int(code)] = (handler, lane)

    def go_away(self) -> None:
        """Answer all further requests with GO_AWAY, if the peer knows this code. Source: remoting.md §2."""
        self._is_going_away = True

    def remaining(self, connection: Connection, units: list[Frame | Sends | Acks]) -> Iterable[Frame]:
        """Return the requests of one read that must be handled one by one. While the caller iterates, `fast_path`
        handles the plain sends in between."""
        # The fast path neither checks nor refuses requests.
        if self.fast_path is None or self._refusal is not None or self._is_going_away:
            return each_frame(units)
        if len(units) == 1:  # the usual case, without a loop
            first = units[0]
            has_acks = type(first) is ACKS
            if not has_acks and isinstance(first, Frame) and not first.body:
                return units  # type: ignore[return-value]
        else:
            has_acks = any(type(unit) is ACKS for unit in units)
        if has_acks:
            return self._remaining_of_acks(connection, units)
        return self.fast_path(connection, units)  # type: ignore[arg-type]

    def _remaining_of_acks(self, connection: Connection, units: list[Any]) -> Iterator[Frame]:
        """Yield the requests that `remaining` returns, for units that contain acks."""
        assert self.fast_path is not None, "the port has a fast path"
        for unit in units:
            if type(unit) is not ACKS:
                yield from self.fast_path(connection, [unit])
            elif self.take_acks is None or not self.take_acks(connection, unit.pops):
                yield from each_frame([unit])

    def acks_at_once(self, connection: Connection, acks: list[AckedOffsets]) -> bool:
        """Handle several acks together. Return False, without changes, if each ack must be handled alone."""
        if self.take_acks is None or self._refusal is not None or self._is_going_away:
            return False
        return self.take_acks(connection, acks)

    def handle(self, connection: Connection, command: Command) -> None:
        """Handle one request. Its reply is written together with the other replies of this tick."""
        handler, lane = self._handlers.get(command.code, _NOBODY)
        # Check the lane before the signature, because checking signatures takes time.
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
                answer = failure(connection, command, error)
        if answer is None:
            return
        if isinstance(answer, Command):
            if not command.is_one_way:
                connection.send(answer)
            else:
                connection.on_one_way_reply(command, answer)
            return
        if lane is not None:
            lane.requests += 1
        self._tasks.start(self._finish(connection, command, answer, lane), "request")

    async def close(self) -> None:
        """Cancel the running coroutine handlers."""
        await self._tasks.close()

    async def _finish(
        self, connection: Connection, command: Command, answer: Awaitable[Command | None], lane: Lane | None
    ) -> None:
        try:
            response = await answer
        except Exception as error:  # noqa: BLE001 - the outer edge of a request: answered and logged once
            response = failure(connection, command, error)
        finally:
            if lane is not None:
                lane.requests -= 1  # also after a cancellation; otherwise the lane would fill up
                assert lane.requests >= 0, f"no more requests leave lane {lane.name} than enter it"
        if response is not None:
            (connection.on_one_way_reply(command, response) if command.is_one_way else connection.send(response))


def failure(connection: Connection, command: Command, error: Exception) -> Command:
    """Return the reply to a request after its handler raised an error, and log the error."""
    if isinstance(error, PeerRefused):
        return reply(command, error.code, error.remark)
    if isinstance(error, ProtocolError):
        connection.warn(f"{request_name(command.code)} of {connection.peer} cannot be read: {error}")
    elif isinstance(error, StoreUnavailable):
        connection.warn(f"{request_name(command.code)} of {connection.peer} failed: {error}")
    else:
        _log.error("%s of %s failed", request_name(command.code), connection.peer, exc_info=error)
    return reply(command, ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")


def for_admins(handler: Handler, allowed: AdminAddresses) -> Handler:
    """Return a handler that accepts requests from allowed addresses and replies NO_PERMISSION to all others."""

    def guarded(connection: Connection, command: Command) -> object:
        if allowed.include(connection.hops):
            return handler(connection, command)
        return reply(
            command,
            ResponseCode.NO_PERMISSION,
            f"{connection.peer} may not change this server: adminAllowedAddresses={allowed}; "
            "ask at 127.0.0.1 on its machine, or add the address to that setting",
        )

    return guarded  # type: ignore[return-value]


# The maximum number of running requests of a lane (the queues of thread pools in behaviour.md §1.1, §2.4).
LANE_REQUESTS_MAX = 10_000

M = TypeVar("M", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class _Answered:
    code: int
    admins_only: bool
    lane: str | None


def answers(code: int, *, admins_only: bool = False, lane: str | None = None) -> Callable[[M], M]:
    """Mark a method of an `Answering` as the handler of a code.
    ``admins_only``: accept the request only from ``adminAllowedAddresses``, because it changes the server.
    ``lane``: the name of the lane that limits the running requests of all codes with this lane in the class."""

    def mark(method: M) -> M:
        method.__dict__.setdefault("answered", []).append(_Answered(code, admins_only, lane))
        return method

    return mark


class Answering:
    """A base class for classes with handlers. `answers` marks the methods that are handlers."""

    def __init__(self, admins: AdminAddresses) -> None:
        self._admins = admins
        self._lanes: dict[str, Lane] = {}

    def register(self, router: Router) -> None:
        """Register the handlers at a port. All ports share the lanes."""
        # Register only methods of the class itself: otherwise the codes of a base class would be registered twice.
        for name, method in vars(type(self)).items():
            for answered in getattr(method, "answered", ()):
                handler = getattr(self, name)
                if answered.admins_only:
                    handler = for_admins(handler, self._admins)
                router.register(answered.code, handler, self._lane(answered.lane))

    def _lane(self, name: str | None) -> Lane | None:
        return None if name is None else self._lanes.setdefault(name, Lane(name, LANE_REQUESTS_MAX))


T = TypeVar("T")

STRICT_BYTES_MAX = 1 << 20
OBJECTS_MAX = 24_000
_SURELY_FEW_BYTES = 64 << 10
SLOW_BYTES_MAX = 16 << 10
# The maximum size of a body for a thread: a static topic with about 5,000 queues.
ASIDE_BYTES_MAX = 1 << 20


def decode_body(command: Command, body_type: type[T]) -> T:
    """Return the body of a request as a value of a type.
    Raises BodyError: the body does not fit the type, or is too long to be read on the loop."""
    body = command.payload
    if len(body) > STRICT_BYTES_MAX:
        raise BodyError(f"the body has {len(body)} bytes: {STRICT_BYTES_MAX} are read of {request_name(command.code)}")
    if len(body) > _SURELY_FEW_BYTES and (count := body.count(b"{")) > OBJECTS_MAX:
        raise BodyError(f"the body has {count} objects: {OBJECTS_MAX} are read of {request_name(command.code)}")
    return decode_as(body, body_type, slow_bytes_max=SLOW_BYTES_MAX)


async def decode_aside(command: Command, body_type: type[T]) -> T:
    """Return the body of a request as a value of a type, read in a thread. Use this for codes with long bodies in the
    dialect.
    Raises BodyError: the body does not fit the type, or is too long."""
    body = command.payload
    if len(body) > ASIDE_BYTES_MAX:
        raise BodyError(f"the body has {len(body)} bytes: {ASIDE_BYTES_MAX} are read of {request_name(command.code)}")
    return await asyncio.to_thread(decode_as, body, body_type)


# Three times the length of all settings of Apache's broker.
_TEXT_BYTES_MAX = 64 << 10
# An escape that Java's reader of properties rejects.
_BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u(?![0-9a-fA-F]{4})")


def settings_reply(configuration: Configuration, command: Command, header: Any = None) -> Command:
    """Return a reply with all settings, sorted, one setting per line."""
    text = "".join(f"{key}={value}\n" for key, value in configuration.texts().items())
    return reply(command, header=header, body=text.encode())


def change_settings(
    configuration: Configuration, command: Command, black_list: str, without_effect: Collection[str]
) -> Command:
    """Change all requested settings or none, and return the reply. ``black_list``: keys, separated by semicolons."""
    if len(command.payload) > _TEXT_BYTES_MAX:
        remark = f"settings of {len(command.payload)} bytes: {_TEXT_BYTES_MAX} are read"
        return reply(command, ResponseCode.SYSTEM_ERROR, remark)
    properties = _properties(command.payload)
    if properties is None:
        return reply(command, ResponseCode.SYSTEM_ERROR, "string2Properties error")
    if not {"rocketmqHome", *black_list.split(";")}.isdisjoint(properties) or configuration.is_frozen(properties):
        return reply(command, ResponseCode.NO_PERMISSION, "Can not update config in black list.")
    if useless := sorted(properties.keys() & set(without_effect)):
        remark = f"{', '.join(useless)}: without effect here; nothing was changed"
        return reply(command, ResponseCode.SYSTEM_ERROR, remark)
    try:
        configuration.change(properties)
    except SettingsError as error:
        return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
    return reply(command)


def _properties(body: bytes) -> dict[str, str] | None:
    """Return the properties in a text, or None if Java cannot read the text."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if _BAD_ESCAPE.search(text) else parse_properties(text)
