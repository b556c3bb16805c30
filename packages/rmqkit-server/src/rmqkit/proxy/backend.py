"""The interface of the endpoint to brokers: routes, groups, permissions, and requests in the name of a client.

In a broker, `rmqkit.broker.grpc_backend` implements the interface. In a proxy, `remote_backend` implements it.
Source: grpc.md §11.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from rmqkit.policies import Actions, Resource
from rmqkit.protocol.command import Command
from rmqkit.protocol.core import AckedPop
from rmqkit.protocol.record import Record
from rmqkit.protocol.schemas.clients import HeartbeatData
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.proxy.local import Answered

__all__ = [
    "ASK_TIMEOUT_MS",
    "Answered",
    "Backend",
    "BackendAtOnce",
    "BrokerQueues",
    "GrpcRefusal",
    "OnRequest",
    "Peer",
    "Route",
    "Unclaimed",
    "Wanted",
    "hand_back",
]

ASK_TIMEOUT_MS = 2000.0
"""The time limit for a broker's answer. Pops have a longer limit, because the broker holds them."""

OnRequest = Callable[[Command], "asyncio.Future[Command] | None"]
"""Handles a notice or request of a broker to a client. Returns the future of the answer to a request."""

Unclaimed = Callable[[Command], None]

Wanted = tuple[Resource, Actions]
"""A resource such as ``Topic:T``, and actions such as ``Pub``, ``Sub``. Permission for one of the actions is enough."""

GrpcRefusal = Callable[["str | None", Iterable[Wanted], Sequence[str]], "str | None"]
"""Checks the permissions of a user. Returns the remark of the refusal, or None if the user has all permissions.
The last argument has the addresses of the caller."""


class BrokerQueues(Struct, frozen=True):
    """The queues of a topic on one broker; ``permission``: the bits of ``perm``; ``host``: its advertised host."""

    name: str
    broker_id: int
    host: str
    read_queue_count: int
    write_queue_count: int
    permission: int


class Route(Struct, frozen=True):
    """The brokers of a topic, and the type of its messages: the value of ``message.type``."""

    message_type: str = "NORMAL"
    brokers: list[BrokerQueues] = field(default_factory=list)


class Peer(Protocol):
    """One client of the endpoint, for requests to brokers in its name."""

    user: str | None

    @property
    def is_open(self) -> bool:
        """Return True if requests can be sent for the client. Brokers close clients that are silent for too long."""

    def moved_to(self, peername: tuple[str, int]) -> None:
        """Store the new address of the client."""

    async def ask(self, broker: str, command: Command, timeout_ms: float = ASK_TIMEOUT_MS) -> Command:
        """Send a request and return the answer, with any response code. Raises RemotingError: no answer in time."""

    async def wait(self, broker: str, command: Command, timeout_ms: float, unclaimed: Unclaimed) -> Command:
        """Send a request that the broker may hold, and return the answer. ``unclaimed`` is called with an answer that
        arrives after a cancellation."""

    async def register(self, data: HeartbeatData, language: str, version: int) -> None:
        """Register the client's groups at brokers. Raises RemotingError."""

    async def unregister(self, client_id: str, producer_group: str | None, consumer_group: str | None) -> None:
        """Unregister a group of the client at brokers. Raises RemotingError."""

    def close(self, reason: str = "") -> None:
        """Unregister the client at brokers."""


class BackendAtOnce(Protocol):
    """A broker in this process, which answers without waiting. `gather_send` and `gather_ack` collect the requests of
    one read. ``answered`` is called with the answer to a request, in `handle_gathered` or later."""

    def route_at_once(self, topic: str) -> Route | None:
        """Return the route of a topic, like `Backend.route`."""

    def is_broker(self, name: str) -> bool:
        """Return True if the broker exists, like `Backend.has_broker`."""

    def signer(self, metadata: Mapping[str, str]) -> str | None:
        """Return the user who signed a call, like `Backend.identify`."""

    def gather_send(self, peer: Peer, header: tuple[bytes, bytes], body: bytes, answered: Answered) -> None:
        """Collect a send. ``header``: the JSON before and after the opaque."""

    def gather_ack(self, peer: Peer, pop: AckedPop, offset: int, text: str, answered: Answered) -> None:
        """Collect the ack of one message of a pop. ``text``: its receipt handle."""

    def handle_gathered(self) -> None:
        """Handle the collected requests in the broker."""


class Backend(Protocol):
    """The brokers behind an endpoint."""

    at_once: BackendAtOnce | None
    """The interface for calls without waiting; None if the broker is in another process."""

    own: Peer
    """The peer for requests of the endpoint itself."""

    has_policies: bool
    """True if policies limit the requests of users."""

    async def route(self, topic: str) -> Route | None:
        """Return the route of a topic, or None if no broker has the topic."""

    async def group(self, name: str) -> SubscriptionGroupConfig | None:
        """Return the configuration of a group, or None if it has none yet."""

    async def has_broker(self, name: str) -> bool:
        """Return True if requests can be sent to the broker of this name."""

    async def message_at(self, broker: str, physical_offset: int) -> Record | None:
        """Return the message at a physical offset, or None."""

    def readable_broker(self, name: str, route: Route) -> str | None:
        """Return the name of the broker to receive from: ``name`` if this broker is readable, or else the next readable
        broker of the route. Return None if no broker is readable."""

    def join(self, on_request: OnRequest, on_close: Callable[[], None]) -> Peer:
        """Register a client, and return its peer. ``on_close`` is called when the peer is closed."""

    async def identify(self, metadata: Mapping[str, str]) -> str | None:
        """Return the user who signed a call, or None if authentication is off. Raises Refused."""

    async def authorize(self, user: str | None, wanted: Sequence[Wanted], addresses: Sequence[str]) -> None:
        """Check permissions; called if ``has_policies``. Raises Refused: the user lacks a permission."""


def hand_back(unclaimed: Unclaimed, done: asyncio.Future[Command]) -> None:
    """Call ``unclaimed`` with an answer that arrived after a cancellation."""
    if not done.cancelled() and done.exception() is None:
        unclaimed(done.result())
