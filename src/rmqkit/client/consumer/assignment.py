"""Sharing a topic's queues among a group's clients (``RebalanceImpl``).

Per topic: the queues of its route and the client ids of the group, from one broker, both sorted, go through the
allocation strategy; every client computes the same answer for itself. Queues that are not in it are given up, new
ones are taken. What cannot be found out leaves everything as it is until the next round.

This is the computing only; when it happens, and what giving up and taking mean, is the `Membership`'s.
Source: behaviour.md §8.4.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rmqkit.client.consumer.context import Member
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.codes import ResponseCode

if TYPE_CHECKING:
    from rmqkit.client.consumer.group import Membership

__all__ = ["Rebalance"]

_log = logging.getLogger(__name__)


class Rebalance:
    """Computes who gets what; everybody gets everything in broadcasting."""

    def __init__(self, member: Member, owner: Membership) -> None:
        self._runtime = member.runtime
        self._group = member.group
        self._allocate = None if member.settings.is_broadcasting else member.allocate
        self._owner = owner

    async def share_out(self, topics: Iterable[str]) -> bool:
        """One round over all subscribed topics; whether it could be completed."""
        wanted: set[MessageQueue] = set()
        is_complete, is_shared = True, False
        held = self._owner.held_queues()
        for topic in topics:
            try:
                queues, members = await self._queues_of(topic)
            except RmqError as error:
                _log.info("queues of topic %s for group %s stay as they are: %s", topic, self._group, error)
                wanted |= {queue for queue in held if queue.topic == topic}
                is_complete = False
            else:
                wanted |= queues
                is_shared = is_shared or members > 1
                is_complete = is_complete and members > 0
        taken, given_up = sorted(wanted - held), sorted(held - wanted)
        if taken or given_up:
            await self._owner.change_queues(taken, given_up, is_shared=is_shared)
        return is_complete

    async def _queues_of(self, topic: str) -> tuple[set[MessageQueue], int]:
        """Our queues of a topic and how many clients the group has; a topic that does not exist has none."""
        queues = self._runtime.routes.subscribe_queues(topic)
        if not queues or self._allocate is None:
            return set(queues), 1
        client_ids = await self._client_ids(topic)
        own_id = self._runtime.client_id
        if own_id not in client_ids:  # the broker forgot us, or has never seen us
            await self._runtime.heartbeat()
            client_ids = await self._client_ids(topic)
        if own_id not in client_ids:
            return set(), 0
        return set(self._allocate(queues, client_ids, own_id)), len(client_ids)

    async def _client_ids(self, topic: str) -> list[str]:
        """The clients of the group as one of the topic's brokers knows them; none when it knows no such group."""
        address = self._some_broker(topic)
        try:
            return sorted(set(await self._runtime.calls.consumer_ids(address, self._group)))
        except PeerRefused as error:
            if error.code == ResponseCode.SYSTEM_ERROR:
                return []
            raise

    def _some_broker(self, topic: str) -> str:
        routes = self._runtime.routes
        found = routes.any_address(random.choice(routes.brokers_of(topic)))
        assert found is not None, "a broker of a route has an address"
        return found[1]
