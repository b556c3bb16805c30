"""The base of all request handlers of a broker, and queues that requests name by their number in a static topic.

A room's handlers get the broker's context as that room's Protocol and touch nothing else of it. Requests for queues of
static topics name a queue by its number in the whole topic: handlers below `by_global_number` get the number that the
queue has here. Source: remoting.md §4.6.2.
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
    """A broker's own address. ``ip``: as remarks name it. ``store_host``: address and port packed as in records."""

    ip: str
    store_host: bytes


class Handlers(Answering, Generic[C_co]):
    """Methods that answer requests, each marked with `answers`."""

    def __init__(self, context: C_co) -> None:
        super().__init__(context.settings.admin_addresses)
        self._context = context


async def when_published(published: Callable[[], Awaitable[None]], answer: Command) -> Command:
    """An answer that waits until the name servers know the topics that were made: the client may ask them next."""
    await published()
    return answer


def needs_parser() -> bool:
    """Return True if a request with an expression of SQL92 has to be answered by `when_prepared`: it is the first of
    the process, and making the parser would hold the loop for more than 0.1 s. No start waits for what few brokers
    use.
    """
    return not sql92.is_prepared()


async def when_prepared(connection: Connection, handle: Callable[[], _Answer]) -> Command | None:
    """Return the answer of a handler after a thread has made the parser of SQL92; None if the client has gone."""
    await asyncio.to_thread(_prepare)
    # Nobody would take out again what is entered for a client that has gone.
    answer = handle() if connection.is_open else None
    return await answer if isinstance(answer, Awaitable) else answer


def _prepare() -> None:
    with _preparing:  # as many clients may come at once: one of their threads makes it
        sql92.prepare()


def by_global_number(
    handler: Callable[[H, Connection, Command], _Answer],
) -> Callable[[H, Connection, Command], _Answer]:
    """Have a handler's requests name queues as they are numbered here; costs nothing without static topics."""

    @functools.wraps(handler)
    def answer(self: H, connection: Connection, command: Command) -> _Answer:
        static = self._context.topics.static
        if static.local:  # nearly never: then not even the fields are read here
            fields = decode_fields(command)
            topic_name, number_name = ("b", "e") if command.code in _SHORT else ("topic", "queueId")
            # What cannot be read is left to the handler, whose answer is the reference's.
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
