"""The base of all request handlers of a broker, and the queue numbers of static topics.

The handlers of a room get the broker's context as the Protocol of that room and use nothing else of it. Requests for
static topics have a queue's number in the whole topic: handlers below `by_global_number` get its number on this broker.
Source: remoting.md §4.6.2.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.filter import sql92
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Answering, answers

__all__ = ["Handlers", "OwnAddress", "answers", "by_global_number", "needs_parser", "when_prepared", "when_published"]


class HandlerContext(Protocol):
    """The parts of the broker that all handlers need."""

    settings: BrokerSettings


class NumberedQueuesContext(HandlerContext, Protocol):
    """The parts of the broker that handlers of requests for numbered queues need in addition."""

    topics: TopicTable


C_co = TypeVar("C_co", bound=HandlerContext, covariant=True)
H = TypeVar("H", bound="Handlers[NumberedQueuesContext]")

_Answer = Command | Awaitable[Command | None] | None
_NOT_HERE = "{topic}-{number} does not exit in request process of current broker {broker}"
_REMARKS = {
    RequestCode.PULL_MESSAGE: "{topic}-{number} cannot find mapping item in request process of current broker {broker}",
    RequestCode.GET_MIN_OFFSET: "{topic}-{number} is not leader in broker {broker}, request code 31",
}
_SHORT = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)


_preparing = threading.Lock()


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """A broker's own address. ``ip``: for remarks. ``store_host``: address and port packed as in records."""

    ip: str
    store_host: bytes


class Handlers(Answering, Generic[C_co]):
    """The base of classes whose methods answer requests, each marked with `answers`."""

    def __init__(self, context: C_co) -> None:
        super().__init__(context.settings.admin_addresses)
        self._context = context


async def when_published(published: Callable[[], Awaitable[None]], answer: Command) -> Command:
    """Return an answer when the name servers know the created topics: the client may ask the name servers next."""
    await published()
    return answer


def needs_parser() -> bool:
    """Return True if a request with an SQL92 expression has to be answered by `when_prepared`: it is the first of the
    process, and making the parser would block the loop for more than 0.1 s. The parser is not made at the start,
    because few brokers use it.
    """
    return not sql92.is_prepared()


async def when_prepared(connection: Connection, handle: Callable[[], _Answer]) -> Command | None:
    """Return the answer of a handler after a thread has made the SQL92 parser; None if the connection is closed."""
    await asyncio.to_thread(_prepare)
    # Entries for a closed connection would never be removed.
    answer = handle() if connection.is_open else None
    return await answer if isinstance(answer, Awaitable) else answer


def _prepare() -> None:
    with _preparing:  # many clients may come at once: only one of their threads makes the parser
        sql92.prepare()


def by_global_number(
    handler: Callable[[H, Connection, Command], _Answer],
) -> Callable[[H, Connection, Command], _Answer]:
    """Replace global queue numbers in a handler's requests by local ones. This costs nothing without static topics."""

    @functools.wraps(handler)
    def answer(self: H, connection: Connection, command: Command) -> _Answer:
        static = self._context.topics.static
        if static.local:  # without static topics the fields are not decoded
            fields = decode_fields(command)
            topic_name, number_name = ("b", "e") if command.code in _SHORT else ("topic", "queueId")
            # The handler answers invalid fields, with the reference's answer.
            topic, number = fields.get(topic_name, ""), fields.get(number_name, "")
            if topic in static.local and number.removeprefix("-").isdecimal():
                queue_id = static.here(topic, int(number))
                if queue_id is None:
                    remark = _REMARKS.get(RequestCode(command.code), _NOT_HERE)
                    where = remark.format(topic=topic, number=number, broker=self._context.settings.broker_name)
                    return reply(command, ResponseCode.NOT_LEADER_FOR_QUEUE, where)
                command = msgspec.structs.replace(command, fields={**fields, number_name: str(queue_id)})
        return handler(self, connection, command)

    return answer
