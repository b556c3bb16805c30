"""Requests that any one name server answers: routes, topics, clusters (``NameServerAddressManager`` of a client).

A name server that does not answer is not asked first again: the next request begins with the one after it.
Source: behaviour.md §7.1; remoting.md §4.2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct

from rmqkit.errors import BodyError, NoNameServer, PeerRefused, RemotingError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.topics import RouteRequest, TopicList, TopicRoute
from rmqkit.remoting.client import expect_success
from rmqkit.rpc.brokers import BrokerCalls

_log = logging.getLogger(__name__)

T = TypeVar("T")


class NameServers:
    """Asks name servers in turn until one answers. Loop only.

    Every method raises NoNameServer when none answers, PeerRefused when one answers with something else.

    Args:
        addresses: may change while it is used.
        calls: sends the requests.
        first: number of the one to begin with, counted around; clients choose by chance to spread themselves.
    """

    def __init__(self, addresses: Sequence[str], calls: BrokerCalls, *, first: int = 0) -> None:
        self.addresses = addresses
        self._calls = calls
        self._chosen = first

    async def call(self, code: int, header: Struct | None = None) -> tuple[Command, str]:
        """The answer, whatever its code, and the address of who gave it."""
        failures: list[RemotingError] = []
        # A copy: discovery may replace the addresses while one of them is asked.
        first, addresses = self._chosen, tuple(self.addresses)
        for chosen in range(first, first + len(addresses)):
            address = addresses[chosen % len(addresses)]
            try:
                return await self._calls.call(address, request(code, header)), address
            except RemotingError as error:
                failures.append(error)
                self._chosen = chosen + 1  # kept for the next request: do not wait for the same one again
                _log.info("name server %s: %s", address, error)
        raise NoNameServer(failures)

    async def fetch(self, kind: type[T], code: int, header: Struct | None = None) -> T:
        """The body of a successful answer. Raises BodyError: it cannot be read."""
        answer, address = await self.call(code, header)
        return decode_as(expect_success(answer, address).payload, kind)

    async def route(self, topic: str) -> TopicRoute | None:
        """GET_ROUTEINFO_BY_TOPIC: where a topic is; None when the name server knows no broker with it."""
        header = RouteRequest(topic, accept_standard_json_only=True)
        answer, address = await self.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        body = expect_success(answer, address).payload
        try:
            return decode_as(body, TopicRoute)
        except BodyError as error:
            raise PeerRefused(answer.code, f"the route of topic {topic} cannot be read: {error}", address) from None

    async def topics(self) -> list[str]:
        """GET_ALL_TOPIC_LIST_FROM_NAMESERVER: the names of all topics, sorted."""
        return sorted((await self.fetch(TopicList, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)).topic_list)
