"""The namespace client. It adds a client's namespace to requests, and sends some requests to the broker's VIP port.

================  ===============================================================================================
setting           effect on a request
================  ===============================================================================================
``namespace``     topics and groups have the names ``NS%name``; the rest of the client, and programs, use bare names
``namespace_v2``  has ``nsd=true`` and ``ns=<namespace>``, for proxies that separate namespaces themselves
``vip_channel``   goes to the broker's port - 2 if its code is in `VIP_CODES`; that port serves no pulls
================  ===============================================================================================

Requests of brokers and the topics of received messages contain the full names. `ClientRequestHandlers` and the readers
of messages remove the namespace (`remove_namespace`). Source: remoting.md §3.1, §3.2, §4.2, §9.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from rmqkit.client.runtime.settings import ClientSettings, Tracing
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import with_namespace, without_namespace
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.address import join_address, split_address
from rmqkit.remoting.client import RemotingClient

V = TypeVar("V")

VIP_CODES = frozenset(
    (
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.QUERY_MESSAGE,
        RequestCode.VIEW_MESSAGE_BY_ID,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
        RequestCode.CHECK_CLIENT_CONFIG,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.QUERY_ASSIGNMENT,
    )
)
_NAMED = ("topic", "consumerGroup", "producerGroup", "group", "originTopic")
_SHORT_NAMED = ("a", "b")
_NAMED_MEMBERS = frozenset(("topic", "group", "groupName", "consumerGroup", "c", "t"))
"""The members of bodies that contain a topic or a group. The short names are the names in `BatchAck`."""

_BODIES = frozenset(
    (
        RequestCode.HEART_BEAT,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.CHECK_CLIENT_CONFIG,
        RequestCode.QUERY_ASSIGNMENT,
        RequestCode.BATCH_ACK_MESSAGE,
    )
)
_ANSWERS = (RequestCode.LOCK_BATCH_MQ, RequestCode.QUERY_ASSIGNMENT)
_SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)

_Name = Callable[[str], str]


class NamespaceClient(RemotingClient):
    """A remoting client for a client that uses one of the settings above. The arguments are the same as for
    `RemotingClient`."""

    def __init__(self, settings: ClientSettings, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings
        self._trace_topic = (settings.trace or Tracing()).topic

    async def call(self, address: str, command: Command, timeout_ms: float) -> Command:
        answer = await super().call(self._address(address, command), self._dressed(command), timeout_ms)
        # Only these responses contain topics. Messages are renamed where they are decoded.
        if command.code in _ANSWERS and answer.code == ResponseCode.SUCCESS:
            namespace = self.settings.namespace
            answer.body = _renamed_body(answer.payload, lambda name: without_namespace(namespace, name))
        return answer

    async def send_one_way(self, address: str, command: Command, timeout_ms: float) -> None:
        await super().send_one_way(self._address(address, command), self._dressed(command), timeout_ms)

    def drop(self, address: str) -> None:
        """Drop the connections to a broker, including the connection to its VIP port."""
        super().drop(address)
        super().drop(vip_address(address))

    def _address(self, address: str, command: Command) -> str:
        return vip_address(address) if self.settings.vip_channel and command.code in VIP_CODES else address

    def _dressed(self, command: Command) -> Command:
        """Replace the names in a request by the full names that brokers use."""
        settings, fields = self.settings, decode_fields(command)
        if settings.namespace:
            # Send headers have one-letter keys: ``a`` is the group, ``b`` is the topic.
            for field in _SHORT_NAMED if command.code in _SENDS else _NAMED:
                if field in fields:
                    fields[field] = self._full(fields[field])
            if command.code in _BODIES:
                command.body = _renamed_body(command.payload, self._full)
        if settings.namespace_v2:
            fields |= {"nsd": "true", "ns": settings.namespace_v2}
        command.fields = fields
        return command

    def _full(self, name: str) -> str:
        """Return the full name of a topic or a group. The trace topic has no namespace."""
        return name if name == self._trace_topic else with_namespace(self.settings.namespace, name)


def vip_address(address: str) -> str:
    """Return the address of a broker's second port. Requests to this port do not wait behind pulls."""
    host, port = split_address(address)
    # The reference computes the port in the same way (brokerVIPChannel).
    return join_address(host, port - 2)


def remove_namespace(namespace: str, messages: Iterable[ReceivedMessage]) -> None:
    """Remove a client's namespace from the topics of received messages."""
    if namespace:
        for message in messages:
            message.topic = without_namespace(namespace, message.topic)


def rename_topics(table: Mapping[MessageQueue, V], name: _Name) -> dict[MessageQueue, V]:
    """Copy a table of queues, and replace the topic names by the results of ``name``."""
    return {replace(queue, topic=name(queue.topic)): value for queue, value in table.items()}


def _renamed_body(body: bytes, name: _Name) -> bytes:
    """Replace the names of topics and groups in a JSON body."""
    return msgspec.json.encode(_renamed_members(loads(body), name))


def _renamed_members(value: Any, name: _Name) -> Any:
    if isinstance(value, list):
        return [_renamed_members(one, name) for one in value]
    if isinstance(value, dict):
        return {
            key: name(one) if key in _NAMED_MEMBERS and isinstance(one, str) else _renamed_members(one, name)
            for key, one in value.items()
        }
    return value
