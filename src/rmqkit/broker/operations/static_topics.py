"""Requests for queues of static topics, which name a queue by its number in the whole topic.

Handlers below `by_global_number` get them with the number the queue has here; nothing is looked at while there are no
static topics. Source: remoting.md §4.6.2.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from rmqkit.broker.answers import Handlers
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.remoting.connection import Connection

__all__ = ["by_global_number"]

H = TypeVar("H", bound=Handlers)
_Answer = Command | Awaitable[Command | None] | None
_NOT_HERE = "{topic}-{number} does not exit in request process of current broker {broker}"
_REMARKS = {
    RequestCode.PULL_MESSAGE: "{topic}-{number} cannot find mapping item in request process of current broker {broker}",
    RequestCode.GET_MIN_OFFSET: "{topic}-{number} is not leader in broker {broker}, request code 31",
}
_SHORT = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)


def by_global_number(
    handler: Callable[[H, Connection, Command], _Answer],
) -> Callable[[H, Connection, Command], _Answer]:
    """Have a handler's requests name queues as they are numbered here."""

    @functools.wraps(handler)
    def answer(self: H, connection: Connection, command: Command) -> _Answer:
        static = self._topics.static
        if static.local:
            fields = decode_fields(command)
            topic_name, number_name = ("b", "e") if command.code in _SHORT else ("topic", "queueId")
            topic, number = fields.get(topic_name, ""), fields.get(number_name, "")
            if topic in static.local and number.removeprefix("-").isdecimal():
                queue_id = static.here(topic, int(number))
                if queue_id is None:
                    remark = _REMARKS.get(RequestCode(command.code), _NOT_HERE)
                    where = remark.format(topic=topic, number=number, broker=self._settings.broker_name)
                    return reply(command, ResponseCode.NOT_LEADER_FOR_QUEUE, where)
                command = msgspec.structs.replace(command, fields={**fields, number_name: str(queue_id)})
        return handler(self, connection, command)

    return answer
