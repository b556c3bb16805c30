"""The name servers a client knows: one is chosen and kept, the next one is asked when it does not answer.

Source: behaviour.md §7.1, remoting.md §9.2.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from rmqkit.errors import NoRoute, PeerRefused, RemotingError
from rmqkit.protocol.bodies.topics import TopicRoute
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.namesrv import RouteRequest
from rmqkit.remoting.client import RemotingClient, expect_success

__all__ = ["NameServers"]

_log = logging.getLogger(__name__)


class NameServers:
    """Asks name servers for routes, at least one, each at most ``timeout_ms``; loop only."""

    def __init__(self, addresses: Sequence[str], remoting: RemotingClient, timeout_ms: float) -> None:
        assert addresses, "a client needs a name server"
        self.addresses = tuple(addresses)
        self._remoting = remoting
        self._timeout_ms = timeout_ms
        self._chosen = random.randrange(len(self.addresses))

    async def route(self, topic: str) -> TopicRoute | None:
        """The route of a topic; None when the name server knows no broker with it.
        Raises NoRoute: no name server answered.
        Raises PeerRefused: one answered with something else than a route.
        Raises BodyError: the route cannot be read."""
        header = RouteRequest(topic, accept_standard_json_only=True)
        answer, address = await self._ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        body = expect_success(answer, address).payload
        if not body:
            raise PeerRefused(answer.code, f"the route of topic {topic} has no body", address)
        return decode_as(body, TopicRoute)

    async def _ask(self, command: Command) -> tuple[Command, str]:
        failures: list[str] = []
        for _ in self.addresses:
            address = self.addresses[self._chosen]
            try:
                return await self._remoting.call(address, command, self._timeout_ms), address
            except RemotingError as error:
                failures.append(str(error))
                self._chosen = (self._chosen + 1) % len(self.addresses)
                _log.info("name server %s: %s", address, error)
        raise NoRoute(f"no name server answered, check the addresses: {'; '.join(failures)}")
