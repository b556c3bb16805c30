"""What the endpoint needs of brokers: routes, groups, rights, and somebody to ask in a client's name.

Inside a broker it is the broker itself (`rmqkit.broker.grpc_backend`), in a proxy others (`remote_backend`).
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
"""What a broker may take to answer, but for pops, which wait."""

OnRequest = Callable[[Command], "asyncio.Future[Command] | None"]
"""Takes what a broker tells or asks a client; the future of the answer where it asks."""

Unclaimed = Callable[[Command], None]

Wanted = tuple[Resource, Actions]
"""A resource such as ``Topic:T``, and the actions of which any one is enough: ``Pub``, ``Sub``."""

GrpcRefusal = Callable[["str | None", Iterable[Wanted], Sequence[str]], "str | None"]
"""The remark for what a user may not do, or None; its last argument are the addresses the call came through."""


class BrokerQueues(Struct, frozen=True):
    """The queues of a topic on one broker; ``permission``: the bits of ``perm``; ``host``: where it says it is."""

    name: str
    broker_id: int
    host: str
    read_queue_count: int
    write_queue_count: int
    permission: int


class Route(Struct, frozen=True):
    """Where a topic is, and what it takes: the value of ``message.type``."""

    message_type: str = "NORMAL"
    brokers: list[BrokerQueues] = field(default_factory=list)


class Peer(Protocol):
    """One client as brokers know it."""

    user: str | None

    @property
    def is_open(self) -> bool:
        """Return True if it can be asked with; brokers close who is silent for too long."""

    def moved_to(self, peername: tuple[str, int]) -> None:
        """Take the address that the client has now."""

    async def ask(self, broker: str, command: Command, timeout_ms: float = ASK_TIMEOUT_MS) -> Command:
        """The answer, whatever its code. Raises RemotingError: there is none in time."""

    async def wait(self, broker: str, command: Command, timeout_ms: float, unclaimed: Unclaimed) -> Command:
        """`ask` with a request that is held. ``unclaimed``: takes the answer that comes behind a cancellation."""

    async def register(self, data: HeartbeatData, language: str, version: int) -> None:
        """Have brokers know the client's groups. Raises RemotingError."""

    async def unregister(self, client_id: str, producer_group: str | None, consumer_group: str | None) -> None:
        """Have brokers forget one of them. Raises RemotingError."""

    def close(self, reason: str = "") -> None:
        """Have brokers forget the client."""


class BackendAtOnce(Protocol):
    """A broker in this process, which answers without waiting. `gather_send` and `gather_ack` collect the requests of
    one read. ``answered`` gets the answer to each: in `handle_gathered`, or later."""

    def route_at_once(self, topic: str) -> Route | None:
        """`Backend.route`."""

    def is_broker(self, name: str) -> bool:
        """`Backend.has_broker`."""

    def signer(self, metadata: Mapping[str, str]) -> str | None:
        """`Backend.identify`."""

    def gather_send(self, peer: Peer, header: tuple[bytes, bytes], body: bytes, answered: Answered) -> None:
        """Collect a send. ``header``: its JSON before and after the opaque."""

    def gather_ack(self, peer: Peer, pop: AckedPop, offset: int, text: str, answered: Answered) -> None:
        """Collect the ack of one message of a pop. ``text``: its receipt handle."""

    def handle_gathered(self) -> None:
        """Have the broker handle the requests that were collected."""


class Backend(Protocol):
    """The brokers behind an endpoint."""

    at_once: BackendAtOnce | None
    """The same where the broker is in this process."""

    own: Peer
    """Who asks where no client does."""

    has_policies: bool
    """Whether users may do only what policies allow."""

    async def route(self, topic: str) -> Route | None:
        """Return where a topic is; None when it is nowhere."""

    async def group(self, name: str) -> SubscriptionGroupConfig | None:
        """A group's configuration; None when it has none yet."""

    async def has_broker(self, name: str) -> bool:
        """Return True if a broker can be asked by its name."""

    async def message_at(self, broker: str, physical_offset: int) -> tuple[str, int, int]:
        """Topic, queue and offset of what lies at a place in a broker's log; of nothing they are empty and negative."""

    def readable_broker(self, name: str, route: Route) -> str | None:
        """The broker to receive from: the one asked for if it is known, else any in turn; None: nowhere."""

    def join(self, on_request: OnRequest, on_close: Callable[[], None]) -> Peer:
        """Enter a client."""

    async def identify(self, metadata: Mapping[str, str]) -> str | None:
        """Who signed a call; None where nobody has to. Raises Refused."""

    async def authorize(self, user: str | None, wanted: Sequence[Wanted], addresses: Sequence[str]) -> None:
        """Raises Refused: the user may not do all of it. Asked where there are policies."""


def hand_back(unclaimed: Unclaimed, done: asyncio.Future[Command]) -> None:
    """Pass on an answer, if there is one, that came behind a cancellation."""
    if not done.cancelled() and done.exception() is None:
        unclaimed(done.result())
