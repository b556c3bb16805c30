"""Who is connected: 203, 204, 328. Source: remoting.md §6.4.10."""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.bodies.clients import SubscriptionData
from rmqkit.protocol.numbers import Int32, Int64


class ClientConnection(Struct, rename="camel", kw_only=True):
    """One client of a group (``Connection``); ``version`` is a protocol version number."""

    client_id: str
    client_addr: str
    language: str = "JAVA"
    version: Int32 = 0


class ProducerConnection(Struct, rename="camel"):
    """Answer to GET_PRODUCER_CONNECTION_LIST."""

    connection_set: list[ClientConnection] = field(default_factory=list)


class ConsumerConnection(Struct, rename="camel", kw_only=True):
    """Answer to GET_CONSUMER_CONNECTION_LIST: the clients, and what the group is registered with."""

    connection_set: list[ClientConnection] = field(default_factory=list)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)


class ProducerInfo(Struct, rename="camel", kw_only=True):
    """One producer; ``last_update_timestamp`` is its last heartbeat in ms."""

    client_id: str
    remote_ip: str = field(name="remoteIP")
    language: str = "JAVA"
    version: Int32 = 0
    last_update_timestamp: Int64 = 0


class ProducerTable(Struct):
    """Answer to GET_ALL_PRODUCER_INFO: group → its producers."""

    data: dict[str, list[ProducerInfo]] = field(default_factory=dict)
