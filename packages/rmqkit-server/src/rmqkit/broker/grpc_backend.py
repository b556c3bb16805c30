"""The backend of the gRPC endpoint in the broker's process. It calls the broker's tables and handlers without a socket.

Routes contain only the queues of this broker, because the endpoint answers calls itself. Source: grpc.md §11.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import msgspec

from rmqkit.broker.context import BrokerContext
from rmqkit.errors import ConnectionLost, HeaderError, RecordCorrupt, RequestTimedOut
from rmqkit.protocol.codes import RequestCode, request_name
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.core import AckedPop
from rmqkit.protocol.names import topic_fault
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.clients import HeartbeatData, UnregisterClientRequest
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.pop import AckMessageRequest
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.proxy.backend import (
    ASK_TIMEOUT_MS,
    Answered,
    BackendAtOnce,
    BrokerQueues,
    GrpcRefusal,
    OnRequest,
    Peer,
    Route,
    Unclaimed,
    Wanted,
    hand_back,
)
from rmqkit.proxy.local import LocalConnection
from rmqkit.proxy.schema.status import Code, Refused
from rmqkit.remoting.authentication import Authentication
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router

__all__ = ["LocalBackend"]


_READ_WRITE = int(Permission.READ | Permission.WRITE)
# Requests that store messages. Those that arrive together are written together.
_GATHERED = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)


@lru_cache(maxsize=1024)
def _route(
    name: str, broker_id: int, ip: str, read_queue_count: int, write_queue_count: int, permission: int, kind: str
) -> Route:
    return Route(kind, [BrokerQueues(name, broker_id, ip, read_queue_count, write_queue_count, permission)])


class LocalBackend:
    """The backend of one broker.

    Args:
        router: has the broker's handlers. It accepts all clients, because the endpoint has checked them.
        authentication: checks signatures. None: all calls are accepted.
        authorize: returns the remark for a forbidden call, or None for an allowed call. None: all calls are allowed.
        on_closed: called with the connection of a client that left.
    """

    def __init__(
        self,
        context: BrokerContext,
        router: Router,
        *,
        authentication: Authentication | None,
        authorize: GrpcRefusal | None,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._context = context
        self._router = router
        self._authentication = authentication
        self._authorize = authorize
        self.has_policies = authorize is not None
        self._on_closed = on_closed
        self._name = context.settings.broker_name
        self._gathering: set[LocalConnection] = set()
        self.at_once: BackendAtOnce | None = self
        self.own: Peer = self.join(lambda command: None, lambda: None)

    async def route(self, topic: str) -> Route | None:
        return self.route_at_once(topic)

    def route_at_once(self, topic: str) -> Route | None:
        config = self._context.topics.get(topic)
        if config is None or topic_fault(topic) is not None:
            return None
        # Use integers: combining enumeration members takes microseconds.
        permission = int(config.perm) & int(self._context.settings.broker_permission) & _READ_WRITE
        kind = config.attributes.get("message.type", "NORMAL") if config.attributes else "NORMAL"
        broker_id = self._context.settings.broker_id
        ip = self._context.identity.ip
        return _route(self._name, broker_id, ip, config.read_queue_nums, config.write_queue_nums, permission, kind)

    async def group(self, name: str) -> SubscriptionGroupConfig | None:
        return self._context.groups.stored.subscription_group_table.get(name)

    async def has_broker(self, name: str) -> bool:
        return name == self._name

    def is_broker(self, name: str) -> bool:
        return name == self._name

    def gather_send(self, peer: Peer, header: tuple[bytes, bytes], body: bytes, answered: Answered) -> None:
        assert isinstance(peer, _LocalPeer), "made by `join`"
        self._gathering.add(peer)
        peer.gather(header, body, answered)

    def gather_ack(self, peer: Peer, pop: AckedPop, offset: int, text: str, answered: Answered) -> None:
        assert isinstance(peer, _LocalPeer), "made by `join`"
        self._gathering.add(peer)
        peer.gather_ack(pop, offset, text, answered)

    def handle_gathered(self) -> None:
        if self._gathering:
            # Empty the set first: requests that arrive during the loop below belong to the next tick.
            gathering, self._gathering = self._gathering, set()
            for peer in gathering:
                peer.handle_gathered()

    def readable_broker(self, name: str, route: Route) -> str | None:
        queues = route.brokers[0]
        return self._name if queues.permission & Permission.READ and queues.read_queue_count else None

    async def message_at(self, broker: str, physical_offset: int) -> Record | None:
        self._context.store.dispatch()
        raw = self._context.store.log.record_at(physical_offset) if physical_offset >= 0 else None
        try:
            return None if raw is None else decode_record(raw)
        except RecordCorrupt:
            return None

    def join(self, on_request: OnRequest, on_close: Callable[[], None]) -> Peer:
        return _LocalPeer(self._context, self._router, on_request, partial(self._closed, on_close))

    async def identify(self, metadata: Mapping[str, str]) -> str | None:
        return self.signer(metadata)

    def signer(self, metadata: Mapping[str, str]) -> str | None:
        if self._authentication is None:
            return None
        try:
            return self._authentication.grpc_signer(metadata.get("x-mq-date-time"), metadata.get("authorization"))
        except HeaderError as error:
            raise Refused(Code.UNAUTHORIZED, str(error)) from None

    async def authorize(self, user: str | None, wanted: Sequence[Wanted], addresses: Sequence[str]) -> None:
        assert self._authorize is not None, "the broker has policies"
        remark = self._authorize(user, wanted, addresses)
        if remark is not None:
            raise Refused(Code.UNAUTHORIZED, remark)

    def _closed(self, on_close: Callable[[], None], connection: Connection) -> None:
        self._on_closed(connection)
        on_close()


class _LocalPeer(LocalConnection):
    """The broker's connection for one client of the endpoint."""

    def __init__(
        self,
        context: BrokerContext,
        router: Router,
        on_request: OnRequest,
        on_close: Callable[[Connection], None],
    ) -> None:
        super().__init__(router, clock=context.clock, on_request=on_request, on_close=on_close)
        self._context = context
        self._acks_at_once = router.acks_at_once
        self._peername: tuple[str, int] | None = None
        self._gathered_acks: dict[AckedPop, list[tuple[int, str, int]]] = {}

    def moved_to(self, peername: tuple[str, int]) -> None:
        # Check first: every gRPC call runs this, and the address rarely changes.
        if self._peername != peername:
            self._peername = peername
            super().moved_to(peername)

    def gather_ack(self, pop: AckedPop, offset: int, text: str, answered: Answered) -> None:
        if not self.is_open:
            answered(ConnectionLost(self.peer, self._closed_because))
            return
        self._gathered_acks.setdefault(pop, []).append((offset, text, self._ask(answered)))

    def handle_gathered(self) -> None:
        super().handle_gathered()
        if not self._gathered_acks:
            return
        gathered, self._gathered_acks = self._gathered_acks, {}
        pops = [(*pop, [one[0] for one in acks], [one[2] for one in acks]) for pop, acks in gathered.items()]
        # Handle the acks one by one only after False, which means that no ack was accepted.
        if self._acks_at_once(self, pops):
            return
        for (topic, group, queue_id, *_), acks in gathered.items():
            for offset, text, opaque in acks:
                header = AckMessageRequest(
                    consumer_group=group, topic=topic, queue_id=queue_id, extra_info=text, offset=offset
                )
                command = request(RequestCode.ACK_MESSAGE, header)
                command.opaque = opaque
                self._router.handle(self, command)

    async def ask(self, broker: str, command: Command, timeout_ms: float = ASK_TIMEOUT_MS) -> Command:
        # Use no timer, as for a client of the port: each wait of a handler has its own limit.
        return await self.request(command, gathers=command.code in _GATHERED)

    async def wait(self, broker: str, command: Command, timeout_ms: float, unclaimed: Unclaimed) -> Command:
        # Use a separate connection: closing it ends only this wait of the client.
        waiting = LocalConnection(self._router, clock=self._context.clock)
        waiting.peer, waiting.peer_host, waiting.hops = self.peer, self.peer_host, self.hops
        waiting.addresses, waiting.user = self.addresses, self.user
        # Use one future and a timer: a shielded future with a timeout would cost three loop ticks instead of one.
        loop = asyncio.get_running_loop()
        came: asyncio.Future[Command] = loop.create_future()
        waiting.request_soon(command, partial(_arrived, came, unclaimed))
        timer = loop.call_later(timeout_ms / 1000.0, _time_out, came, broker, command.code, timeout_ms)
        try:
            return await came
        except asyncio.CancelledError:
            hand_back(unclaimed, came)  # the answer arrived in the tick in which the caller was cancelled
            raise
        finally:
            timer.cancel()
            if self._context.pop is not None:
                self._context.pop.connection_closed(waiting)
            if self._context.lite is not None:
                self._context.lite.connection_closed(waiting)

    async def register(self, data: HeartbeatData, language: str, version: int) -> None:
        command = request(RequestCode.HEART_BEAT, body=msgspec.json.encode(data))
        command.language, command.version = language, version
        await self.ask("", command)

    async def unregister(self, client_id: str, producer_group: str | None, consumer_group: str | None) -> None:
        header = UnregisterClientRequest(client_id, producer_group, consumer_group)
        await self.ask("", request(RequestCode.UNREGISTER_CLIENT, header))


def _arrived(came: asyncio.Future[Command], unclaimed: Unclaimed, outcome: Command | ConnectionLost) -> None:
    """Handle the answer to a held request. The answer to a pop may arrive after the caller has given up, when the check
    points are durable. Pass such an answer to ``unclaimed``: otherwise its messages would be hidden for their whole
    invisible time. So the connection stays open, and only its held requests are dropped."""
    if not came.done():
        if isinstance(outcome, ConnectionLost):
            came.set_exception(outcome)
        else:
            came.set_result(outcome)
    elif isinstance(outcome, Command):
        unclaimed(outcome)


def _time_out(came: asyncio.Future[Command], broker: str, code: int, timeout_ms: float) -> None:
    if not came.done():
        came.set_exception(RequestTimedOut(broker, code, timeout_ms, request_name(code)))
