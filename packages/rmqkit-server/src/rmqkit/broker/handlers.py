"""The base of all request handlers of a broker, and the queue numbers of static topics.

The handlers of a room see the broker's context as the Protocol of the room, and use no other parts. A request for a
static topic has the number of a queue in the whole topic. `by_global_number` replaces this number by the queue's number
on this broker before the handler runs.
Source: remoting.md §4.6.2.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.filter import sql92
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.protocol.names import lite_queue
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Answering, answers
from rmqkit.system import threads

__all__ = [
    "Handlers",
    "OwnAddress",
    "answers",
    "by_global_number",
    "needs_parser",
    "of_lite_topic",
    "when_prepared",
    "when_published",
]


class HandlerContext(Protocol):
    """The parts of the broker that all handlers need."""

    settings: BrokerSettings


class NumberedQueuesContext(HandlerContext, Protocol):
    """The parts of the broker that handlers with queue numbers need in addition."""

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


_preparing = threads.Lock()  # of the module: nothing inside it uses the disk or waits


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """A broker's own address. ``ip``: the IP address as a text, for remarks. ``store_host``: address and port, packed
    as in records."""

    ip: str
    store_host: bytes


class Handlers(Answering, Generic[C_co]):
    """The base of classes with request handlers. A handler is a method that is marked with `answers`."""

    def __init__(self, context: C_co) -> None:
        super().__init__(context.settings.admin_addresses)
        self._context = context


class LiteHeader(Protocol):
    """A header that names a queue, or a lite topic of a parent topic."""

    topic: str
    lite_topic: str | None


L = TypeVar("L", bound=LiteHeader)


def of_lite_topic(header: L) -> L:
    """Return a header that names the light queue, if it names a lite topic. Its queue id is 0 then.
    Source: lite.md §5."""
    if header.lite_topic:
        header.topic = lite_queue(header.topic, header.lite_topic)
        header.queue_id = 0  # type: ignore[attr-defined]
    return header


async def when_published(published: Callable[[], Awaitable[None]], answer: Command) -> Command:
    """Return an answer when the name servers know the created topics, because the client may request a route next."""
    await published()
    return answer


def needs_parser() -> bool:
    """Return True if a request with an SQL92 expression has to be answered by `when_prepared`.

    This is the case until the process has a parser: making the parser would block the loop for more than 0.1 s. The
    parser is not made at the start, because few brokers use it.
    """
    return not sql92.is_prepared()


async def when_prepared(connection: Connection, handle: Callable[[], _Answer]) -> Command | None:
    """Make the SQL92 parser in a thread, then return the answer of a handler. Return None if the connection is
    closed."""
    await asyncio.to_thread(_prepare)
    # Do not handle a request of a closed connection: its entries in tables would never be removed.
    answer = handle() if connection.is_open else None
    return await answer if isinstance(answer, Awaitable) else answer


def _prepare() -> None:
    with _preparing:  # many requests may arrive together: only one thread makes the parser
        sql92.prepare()


def by_global_number(
    handler: Callable[[H, Connection, Command], _Answer],
) -> Callable[[H, Connection, Command], _Answer]:
    """Replace global queue numbers in a handler's requests by local numbers. Without static topics this costs almost
    nothing."""

    @functools.wraps(handler)
    def answer(self: H, connection: Connection, command: Command) -> _Answer:
        static = self._context.topics.static
        if static.local:  # without static topics the fields are not decoded
            fields = decode_fields(command)
            topic_name, number_name = ("b", "e") if command.code in _SHORT else ("topic", "queueId")
            # Leave invalid fields to the handler, which has the reference's answer.
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
