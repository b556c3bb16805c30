"""QueryRoute and QueryAssignment (``RouteActivity``).

Answers contain the address at which the client reached the endpoint, not the brokers' own addresses, which 5.x SDKs
cannot use. Source: grpc.md §5.1, §5.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.proxy.backend import Backend, BrokerQueues
from rmqkit.proxy.schema.checks import ACCEPTED, check_group, check_topic
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.status import OK, Code, Refused
from rmqkit.proxy.service.receiving import no_route

__all__ = ["Routes"]

_SLICE = 1024
"""Number of queues of an answer after which it yields to other tasks."""

_IPV4, _IPV6, _DOMAIN_NAME = 1, 2, 3
_NONE, _READ, _WRITE, _READ_WRITE = 1, 2, 3, 4

_RouteResponse = message_class("QueryRouteResponse")
_AssignmentResponse = message_class("QueryAssignmentResponse")
_Assignment = message_class("Assignment")
_MessageQueue = message_class("MessageQueue")
_Endpoints = message_class("Endpoints")
_TYPES = {
    value.name: value.number
    for value in _MessageQueue.DESCRIPTOR.fields_by_name["accept_message_types"].enum_type.values
}


class Routes:
    """The routes of topics. ``port``: the port of the endpoint."""

    def __init__(self, backend: Backend, port: int) -> None:
        self._backend = backend
        self._port = port

    async def query(self, asked: Any) -> Any:
        topic = check_topic(asked.topic.name)
        endpoints = self._endpoints(asked.endpoints)
        route = await self._backend.route(topic)
        if route is None:
            raise Refused(Code.TOPIC_NOT_FOUND, no_route(topic))
        types = [_TYPES[name] for name in ACCEPTED.get(route.message_type, ("MESSAGE_TYPE_UNSPECIFIED",))]
        found = _RouteResponse(status=OK)
        for queues in route.brokers:
            one = _MessageQueue(
                topic=asked.topic,
                broker={"name": queues.name, "id": queues.broker_id, "endpoints": endpoints},
                accept_message_types=types,
            )
            for queue_id, permission in _queues(queues):
                one.id, one.permission = queue_id, permission
                found.message_queues.append(one)  # a copy
                # A topic may have tens of thousands of queues, and each queue takes some microseconds.
                if len(found.message_queues) % _SLICE == 0:
                    await asyncio.sleep(0)
        return found

    async def assignment(self, asked: Any) -> Any:
        """Return all queues of a topic to every client of a group, because POP distributes messages, not queues."""
        topic, group = check_topic(asked.topic.name), check_group(asked.group.name)
        endpoints = self._endpoints(asked.endpoints)
        route = await self._backend.route(topic)
        if route is None:
            raise Refused(Code.TOPIC_NOT_FOUND, no_route(topic))
        readable = [
            one
            for one in route.brokers
            if one.broker_id == 0 and one.permission & Permission.READ and one.read_queue_count
        ]
        if not readable:
            raise Refused(Code.FORBIDDEN, "no readable queue")
        config = await self._backend.group(group) or SubscriptionGroupConfig()
        assignments = [
            _Assignment(
                message_queue=_MessageQueue(
                    topic=asked.topic,
                    id=queue_id,
                    permission=_READ_WRITE,
                    broker={"name": one.name, "id": one.broker_id, "endpoints": endpoints},
                )
            )
            for one in readable
            for queue_id in (range(one.read_queue_count) if config.consume_message_orderly else (-1,))
        ]
        return _AssignmentResponse(status=OK, assignments=assignments)

    def _endpoints(self, asked: Any) -> Any:
        """Return the addresses for queues: the addresses at which the client reached the endpoint."""
        if asked.scheme not in (_IPV4, _IPV6, _DOMAIN_NAME):
            text = f"endpoints with address scheme {asked.scheme}: use IPv4, IPv6 or DOMAIN_NAME"
            raise Refused(Code.INTERNAL_SERVER_ERROR, text)
        # The reference returns the port of its own process, which clients of a forwarded port cannot reach.
        endpoints = _Endpoints(scheme=asked.scheme)
        for address in asked.addresses:
            endpoints.addresses.add(host=address.host, port=address.port or self._port)
        return endpoints


def _queues(queues: BrokerQueues) -> Iterator[tuple[int, int]]:
    """Yield id and permission of each queue of a broker. Queues for both reading and writing are first."""
    can_read, can_write = queues.permission & Permission.READ, queues.permission & Permission.WRITE
    reads = queues.read_queue_count if can_read else 0
    writes = queues.write_queue_count if can_write else 0
    for queue_id in range(max(reads, writes)):
        if queue_id < min(reads, writes):
            yield queue_id, _READ_WRITE
        else:
            yield queue_id, _READ if queue_id < reads else _WRITE
    if not can_read and not can_write:
        for queue_id in range(max(queues.read_queue_count, queues.write_queue_count)):
            yield queue_id, _NONE
