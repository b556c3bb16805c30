"""The name servers a client knows: one is chosen and kept, the next one is asked when it does not answer.

Source: behaviour.md §7.1, remoting.md §9.2.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from rmqkit.errors import BodyError, NoNameServer, PeerRefused, RemotingError
from rmqkit.protocol.bodies.namesrv import TopicList
from rmqkit.protocol.bodies.topics import TopicRoute
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.namesrv import RouteRequest
from rmqkit.remoting.client import RemotingClient, expect_success

__all__ = ["NameServers"]

_log = logging.getLogger(__name__)


class NameServers:
    """Asks name servers for routes, each at most ``timeout_ms``; ``addresses`` may change. Loop only."""

    def __init__(self, addresses: Sequence[str], remoting: RemotingClient, timeout_ms: float) -> None:
        self.addresses = addresses
        self._remoting = remoting
        self._timeout_ms = timeout_ms
        self._chosen = random.getrandbits(16)

    async def route(self, topic: str) -> TopicRoute | None:
        """The route of a topic; None when the name server knows no broker with it.
        Raises NoNameServer: no name server answered.
        Raises PeerRefused: one answered with something else than a route."""
        header = RouteRequest(topic, accept_standard_json_only=True)
        answer, address = await self._ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        body = expect_success(answer, address).payload
        try:
            return decode_as(body, TopicRoute)
        except BodyError as error:
            raise PeerRefused(answer.code, f"the route of topic {topic} cannot be read: {error}", address) from None

    async def topics(self) -> list[str]:
        """The names of all topics that a name server knows. Raises NoNameServer, PeerRefused: as `route`."""
        answer, address = await self._ask(Command(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        return sorted(decode_as(expect_success(answer, address).payload, TopicList).topic_list)

    async def _ask(self, command: Command) -> tuple[Command, str]:
        failures: list[RemotingError] = []
        first, addresses = self._chosen, tuple(self.addresses)
        for chosen in range(first, first + len(addresses)):
            address = addresses[chosen % len(addresses)]
            try:
                return await self._remoting.call(address, command, self._timeout_ms), address
            except RemotingError as error:
                failures.append(error)
                self._chosen = chosen + 1
                _log.info("name server %s: %s", address, error)
        raise NoNameServer(failures)
