"""The declaration of a request: one `Operation` for each code, next to its schemas.

Each module of `rmqkit.protocol.schemas` ends with the `Operation` rows of its requests. `rmqkit.protocol.catalog` joins
the rows. Four readers use the catalog instead of lists of codes:

=============================  =====================================================================
reader                         use
=============================  =====================================================================
handlers (`answers` in a room) the code; a test compares the header that a handler decodes with the
                               declared type
`rmqkit.rights`                `Operation.right`
`rmqkit.admin.read_only`       `Operation.is_reading`
the reference page of codes    everything
=============================  =====================================================================

The declaration is here and not on the handler's method, because `rmq proxy` checks rights and must not import a broker.
Brokers, name servers, clients and proxies all import this layer, so imports point down. A new request needs a number
(`rmqkit.protocol.codes`), a schema with its row, a handler, and a new run of the page generator.
Source: remoting.md §4, §6.5; behaviour.md §9.8.
"""

from __future__ import annotations

import enum
from typing import Any

from msgspec import Struct

from rmqkit.protocol.codes import RequestCode

__all__ = ["BROKER", "CLIENT", "NAME_SERVER", "Content", "Operation", "Right", "Server", "actions_of"]

_ACTIONS = {"Pub", "Sub", "Get", "Create", "Update", "Delete"}


class Server(enum.StrEnum):
    """A program that answers requests."""

    NAME_SERVER = "name server"
    BROKER = "broker"
    CLIENT = "client"
    CONTROLLER = "controller"
    CONTAINER = "broker container"


class Content(enum.StrEnum):
    """A body that is not JSON."""

    MESSAGE = "message body"
    BATCH = "batch"
    RECORDS = "records"
    SETTINGS = "properties text"
    TIMER_CHECKPOINT = "timer checkpoint"


def actions_of(names: str) -> frozenset[str]:
    """Return the actions in a text such as ``Sub Get``."""
    actions = frozenset(names.split())
    assert actions <= _ACTIONS, f"unknown action in {names!r}; known: {sorted(_ACTIONS)}"
    return actions


class Right(Struct, frozen=True):
    """The right that a request requires. `rmqkit.rights` defines the meaning of each form.

    Attributes:
        actions: names of actions; the user needs one of them on every resource.
        fields: header fields with the names of topics and groups, each with its flag; empty for the cluster.
        message: header field with the position of a stored message. The topic of this message is a resource, too.
        message_actions: names of actions; the user needs one of them on the topic of the stored message.
        is_send: the field contains the topic of a sent message.
        is_body: the resources are in the body.
    """

    actions: str
    fields: str = ""
    message: str = ""
    message_actions: str = ""
    is_send: bool = False
    is_body: bool = False


class Operation(Struct, frozen=True):
    """A kind of request.

    Attributes:
        tier: 1 for requests that real clients and registering brokers need; 2 for tools, replication and access
            control; 3 for POP, controller, static topics, cold data and lite topics.
        servers: programs that answer the request; callers try the first program first.
        request_header, response_header: types of ``extFields``; None if there are no specific fields.
        request_body, response_body: a type for `rmqkit.protocol.fastjson.decode_as`, or a `Content`, or None.
            `response_body` is the body of a successful response.
        right: the right that a broker requires; None if every client may send the request.
        is_reading: the request changes nothing, so a connection for reading may send it. A pull is reading
            unless its flags commit an offset.
        is_typed: the four types are declared. False for requests that rmqkit does not use.
    """

    code: RequestCode
    tier: int
    servers: tuple[Server, ...]
    request_header: type[Struct] | None = None
    response_header: type[Struct] | None = None
    request_body: Any = None
    response_body: Any = None
    right: Right | None = None
    is_reading: bool = False
    is_typed: bool = True

    @property
    def name(self) -> str:
        """RocketMQ's name of the request."""
        return self.code.name


BROKER = (Server.BROKER,)
NAME_SERVER = (Server.NAME_SERVER,)
CLIENT = (Server.CLIENT,)
