"""QUERY_ASSIGNMENT (400), SET_MESSAGE_REQUEST_MODE (401): the broker assigns queues to clients, to pop or to pull.

===================================  =================================================================================
a client of a group that             gets
===================================  =================================================================================
broadcasts                           every queue, to pull
pulls                                its share of the queues of all brokers, by AVG or AVG_BY_CIRCLE
pops, sharing with all (default)     queue -1 of every broker, which means all of its queues
pops, ``popShareQueueNum`` n         its share and the shares of the next n members
===================================  =================================================================================

The file ``messageRequestMode.json`` stores the modes. Retry topics are always pulled. A client that this broker does
not know gets an answer without a list of queues. Source: behaviour.md §4.15; remoting.md §4.6.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.pop.service import PopContext
from rmqkit.broker.settings import RequestMode
from rmqkit.broker.tables.groups import request_modes_file
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.schemas.clients import MessageQueue, averagely, averagely_by_circle
from rmqkit.protocol.schemas.pop import (
    Assignment,
    Assignments,
    MessageRequestMode,
    MessageRequestModes,
    QueryAssignmentBody,
)
from rmqkit.protocol.schemas.topics import Permission, TopicRoute
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body

__all__ = ["PopAssignmentHandlers"]

_ANY_QUEUE = -1
_STRATEGIES = {"AVG": averagely, "AVG_BY_CIRCLE": averagely_by_circle}
_Routes = Callable[[str], Awaitable[list[TopicRoute]]]


class PopAssignmentHandlers(Handlers[PopContext]):
    """The handlers of queue assignments. ``routes`` returns the routes of a topic from the name servers."""

    def __init__(self, context: PopContext, routes: _Routes) -> None:
        super().__init__(context)
        self._routes = routes
        self._file = request_modes_file(context.store.root)

    @answers(RequestCode.QUERY_ASSIGNMENT)
    async def assignments(self, connection: Connection, command: Command) -> Command:
        """Return the queues of one client of a group."""
        asked = decode_body(command, QueryAssignmentBody)
        group = self._context.clients.consumers(asked.consumer_group)
        # Sorted: all brokers, and clients that assign queues themselves, have to use the same order.
        client_ids = sorted({member.client_id for member in group.members.values()}) if group is not None else []
        strategy = _STRATEGIES.get(asked.strategy_name)
        if strategy is None:
            remark = f"strategy {asked.strategy_name} is not supported: use {' or '.join(_STRATEGIES)}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        if asked.client_id not in client_ids:
            # Send no list: without a list Apache's client keeps its queues. For an empty list it drops all queues.
            return reply(command, body=b"{}")
        wanted = self._mode(asked.topic, asked.consumer_group)
        queues, is_pop = await self._queues(asked.topic), wanted.mode == RequestMode.POP.value
        if group is not None and group.is_broadcasting:
            mine, is_pop = queues, False
        elif is_pop:
            mine = self._popped(queues, client_ids, asked, wanted.pop_share_queue_num)
        else:
            mine = strategy(queues, client_ids, asked.client_id)
        mode = (RequestMode.POP if is_pop else RequestMode.PULL).value
        body = Assignments([Assignment(message_queue=queue, mode=mode) for queue in mine])
        return reply(command, body=msgspec.json.encode(body))

    @answers(RequestCode.SET_MESSAGE_REQUEST_MODE, admins_only=True)
    def set_mode(self, connection: Connection, command: Command) -> Command:
        """Set whether a group pops or pulls a topic. The broker writes the file before it answers."""
        wanted = decode_body(command, MessageRequestMode)
        if wanted.topic.startswith(RETRY_PREFIX):
            return reply(command, ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        if self._context.topics.get(wanted.topic) is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"topic[{wanted.topic}] not exist")
        if self._context.groups.get(wanted.consumer_group) is None:
            remark = f"subscription group [{wanted.consumer_group}] does not exist"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        modes = self._modes()
        modes.message_request_mode_map.setdefault(wanted.topic, {})[wanted.consumer_group] = wanted
        self._file.save(modes)
        return reply(command)

    # -- inside

    def _modes(self) -> MessageRequestModes:
        return self._file.load(MessageRequestModes) or MessageRequestModes()

    def _mode(self, topic: str, group: str) -> MessageRequestMode:
        """Return the mode in which a group reads a topic. Retry topics are always pulled."""
        if topic.startswith(RETRY_PREFIX):
            return MessageRequestMode(topic=topic, consumer_group=group)
        known = self._modes().message_request_mode_map.get(topic, {}).get(group)
        return known or MessageRequestMode(
            topic=topic,
            consumer_group=group,
            mode=self._context.settings.request_mode.value,
            pop_share_queue_num=self._context.settings.pop_share_queue_count,
        )

    async def _queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic at all brokers that the name servers know, and at this broker."""
        counts = {data.broker_name: data for route in await self._routes(topic) for data in route.queue_datas}
        found = {name: data.read_queue_nums for name, data in counts.items() if data.perm & Permission.READ}
        # The broker's own table is newer: name servers receive a change with the next registration.
        own = self._context.topics.get(topic)
        if own is not None and own.perm & Permission.READ:
            found[self._context.settings.broker_name] = own.read_queue_nums
        return sorted(MessageQueue(topic, name, number) for name, count in found.items() for number in range(count))

    def _popped(
        self, queues: list[MessageQueue], client_ids: Sequence[str], asked: QueryAssignmentBody, share: int
    ) -> list[MessageQueue]:
        if share <= 0 or share >= len(client_ids) - 1:
            return sorted({MessageQueue(queue.topic, queue.broker_name, _ANY_QUEUE) for queue in queues})
        own = client_ids.index(asked.client_id)
        if len(client_ids) > len(queues):
            return [queues[own % len(queues)]] if queues else []
        strategy = _STRATEGIES[asked.strategy_name]
        ids = [client_ids[(own + i) % len(client_ids)] for i in range(share + 1)]
        return sorted({queue for one in ids for queue in strategy(queues, client_ids, one)})
