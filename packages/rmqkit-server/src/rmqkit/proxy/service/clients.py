"""Calls of the service, and the clients of the endpoint by their id: streams, groups, requests to clients
(``GrpcClientChannel``, ``ClientActivity``).

Clients are identified by their id: calls of several connections with the same id belong to one client. While a client
is known, its id belongs to the user of its first call, and calls of other users with this id are refused. A client
without calls is forgotten after the time that brokers wait for a heartbeat. Use this module only on the event loop.

Clients can invent ids, so the table is bounded for each *origin*: the user who signs, or the address if authentication
is off.

==========================  =========================  ================================================================
clients                     limit of an origin         at the limit
==========================  =========================  ================================================================
hold nothing: no settings,  `PASSING_OF_ORIGIN_MAX`    the client that called least recently is forgotten; if all have
no group, no topic                                     active calls, the new client is refused
hold something              `HOLDING_OF_ORIGIN_MAX`    the settings, or the registration, are refused
all together                `CLIENTS_MAX` in total     a client that holds nothing is forgotten, from the origin with
                                                       most such clients; otherwise the new client is refused
==========================  =========================  ================================================================

A forgotten client that calls again is added again, and loses nothing.
Source: grpc.md §2.1, §7, §10, §12.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from rmqkit.clock import Clock
from rmqkit.errors import RemotingError
from rmqkit.filter import subscription
from rmqkit.protocol.codes import CURRENT_VERSION
from rmqkit.protocol.command import Command
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData, ProducerData
from rmqkit.proxy.backend import Backend, OnRequest, Peer
from rmqkit.proxy.local import Answered
from rmqkit.proxy.schema.checks import sql_or_tags
from rmqkit.proxy.schema.status import Code, Refused
from rmqkit.proxy.service.client_settings import LITE_CONSUMERS, PUSH_CONSUMER, SIMPLE_CONSUMER

__all__ = ["AnswerWith", "Call", "CallEnded", "Client", "Clients", "LiteSet", "Stream"]

CLIENT_SILENT_MS_MAX = 120_000.0
CLIENTS_MAX = 50_000
HOLDING_OF_ORIGIN_MAX = 10_000
PASSING_OF_ORIGIN_MAX = 1024
CALLS_MAX = 1024
"""Maximum number of active calls of one client, including held receives."""

_COMMANDS_WAITING_MAX = 256
_RELAY_SECONDS = 5.0
_CONSUME_TYPES = {PUSH_CONSUMER: "CONSUME_PASSIVELY", SIMPLE_CONSUMER: "CONSUME_ACTIVELY"}

_log = logging.getLogger(__name__)

_Origin = tuple[str, str]
"""``user`` or ``address``, and its name."""

AnswerWith = Callable[[Callable[[Command], tuple[Code, bytes]]], Answered]
"""Makes the callback for a broker's answer. The argument converts the answer to a code and an encoded message."""


class CallEnded(Exception):
    """No more messages can be written: the caller has disconnected, or its deadline has passed."""


class Call(Protocol):
    """One gRPC call."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The headers that SDKs send with each call, such as ``x-mq-client-id``, with keys in lower case."""

    @property
    def peername(self) -> tuple[str, int]:
        """Address and port of the peer."""

    def seconds_left(self) -> float | None:
        """Return the time until the caller's deadline; None without a deadline."""


class Stream:
    """A client's Telemetry stream, with a queue of commands that are not written yet."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._is_ending = False

    def send(self, command: Any) -> bool:
        """Queue a command. Return False, and drop the command, if the queue is full: the client does not read."""
        if len(self._waiting) >= _COMMANDS_WAITING_MAX:
            return False
        self._waiting.append(command)
        self._arrived.set()
        return True

    async def write_all(self, write: Callable[[Any], Awaitable[None]]) -> None:
        """Write the commands, until `end` is called or the task is cancelled."""
        while not self._is_ending or self._waiting:
            while self._waiting:
                await write(self._waiting.popleft())
            # No await since the queue was empty, so a later command sets the event again.
            self._arrived.clear()
            if not self._is_ending:
                await self._arrived.wait()

    def end(self) -> None:
        """Let `write_all` return after all commands are written."""
        self._is_ending = True
        self._arrived.set()


class LiteSet:
    """The lite topics of a lite consumer, below one parent topic. ``names`` is stored as one text: a tenth of a set."""

    __slots__ = ("_text", "group", "topic")

    def __init__(self, topic: str, group: str) -> None:
        self.topic = topic
        self.group = group
        self._text = ""

    @property
    def names(self) -> set[str]:
        return set(self._text.split(",")) if self._text else set()

    @names.setter
    def names(self, names: set[str]) -> None:
        self._text = ",".join(sorted(names))


class Client:
    """One client.

    Attributes:
        user: the user who signed the client's first call; None if authentication is off.
        origin: the user, or the address of the first call if authentication is off.
        settings: the settings that the client sent, or None.
        stream: the newest Telemetry stream on which settings were accepted, or None.
        producers: the topics for which the client is registered as a producer.
        group: the consumer group in which the client is registered, or None.
        lite: the lite topics of a lite consumer, or None.
        lite_order: held while a change of ``lite`` is sent to brokers.
        calls: number of active calls.
        seen_ms: monotonic time of the last call.
    """

    def __init__(self, client_id: str, clients: Clients, user: str | None, origin: _Origin) -> None:
        self.id = client_id
        self.user = user
        self.origin = origin
        self.clients = clients
        self.settings: Any = None
        self.stream: Stream | None = None
        self.language = "OTHER"
        self.version = CURRENT_VERSION
        self.producers: set[str] = set()
        self.group: str | None = None
        self.lite: LiteSet | None = None
        self.lite_order = asyncio.Lock()
        self.calls = 0
        self.seen_ms = 0.0
        self.peer: Peer | None = None
        self._relays: dict[str, asyncio.Future[Any]] = {}
        self._settings_came = asyncio.Event()
        self._may_send_settings = True

    def set_settings(self, settings: Any) -> None:
        self.settings = settings
        self._settings_came.set()

    def forget_settings(self) -> None:
        self.settings = None
        self._settings_came.clear()

    async def wait_for_settings(self, seconds: float) -> None:
        """Wait for the settings. Only the first call waits: a client that sends no settings until then never will."""
        if self._may_send_settings:
            self._may_send_settings = False
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._settings_came.wait()

    @property
    def is_online(self) -> bool:
        """Return True if brokers know the client as a member of its group."""
        return self.peer is not None and self.peer.is_open and self.group is not None

    @property
    def is_lite(self) -> bool:
        """Return True if the client consumes lite topics."""
        return self.settings is not None and self.settings.client_type in LITE_CONSUMERS

    @property
    def is_fifo(self) -> bool:
        return self.settings is not None and self.settings.subscription.fifo

    async def relay(self, command: Any, nonce: str) -> Any:
        """Send a command over the client's stream, and return the answer.
        Raises TimeoutError; Refused: the client has no stream."""
        if self.stream is None or not self.stream.send(command):
            raise Refused(Code.INTERNAL_SERVER_ERROR, f"client {self.id} has no open Telemetry stream")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._relays[nonce] = answer
        try:
            async with asyncio.timeout(_RELAY_SECONDS):
                return await answer
        finally:
            del self._relays[nonce]

    def answered(self, nonce: str, answer: Any) -> None:
        """Pass the client's answer to the waiting `relay`. Ignore an unknown nonce, for example of a late answer."""
        asked = self._relays.get(nonce)
        if asked is not None and not asked.done():
            asked.set_result(answer)


_NONE: OrderedDict[str, Client] = OrderedDict()
"""An empty table, for origins that are not in `Clients.passing`."""


class Clients:
    """All clients.

    ``on_request``: handles notices and requests of brokers to a client.
    ``passing``: clients without settings or registration, by origin.
    ``holding``: the number of the other clients, by origin.
    ``on_gone``: called with the id of a client that left or was silent for too long.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        on_request: Callable[[Client], OnRequest],
        on_gone: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._on_request = on_request
        self._on_gone = on_gone
        self._clients: dict[str, Client] = {}
        self.passing: dict[_Origin, OrderedDict[str, Client]] = {}
        self.holding: Counter[_Origin] = Counter()

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def find(self, client_id: str) -> Client | None:
        return self._clients.get(client_id)

    def called(self, client_id: str, peername: tuple[str, int], user: str | None) -> Client:
        """Return the client of a call; the first call creates the client.
        Raises Refused: the id belongs to another user, or there are too many clients, or too many calls of the client.
        """
        client = self._clients.get(client_id)
        if client is None:
            origin = ("address", peername[0]) if user is None else ("user", user)
            self._make_room(origin)
            client = self._clients[client_id] = Client(client_id, self, user, origin)
            self.passing.setdefault(origin, OrderedDict())[client_id] = client
        else:
            self.check_user(client, user)
            if client_id in (passing := self.passing.get(client.origin, _NONE)):
                passing.move_to_end(client_id)
        if client.calls >= CALLS_MAX:
            raise Refused(Code.TOO_MANY_REQUESTS, "flow limit")
        client.seen_ms = self._clock.monotonic_ms()
        # Update the address with each call: the client may use another connection.
        peer = self.peer_of(client)
        peer.moved_to(peername)
        peer.user = user
        return client

    @staticmethod
    def check_user(client: Client, user: str | None) -> None:
        """Raise Refused if a client belongs to another user. Without this check, a user could call with the id of
        another client, and receive the brokers' requests to that client, including half messages."""
        if client.user != user:
            raise Refused(Code.UNAUTHORIZED, f"client id {client.id} belongs to another user")

    def _make_room(self, origin: _Origin) -> None:
        """Forget a client that holds nothing if a limit is reached. Raises Refused: no client can be forgotten."""
        passing = self.passing.get(origin, _NONE)
        if len(passing) >= PASSING_OF_ORIGIN_MAX and not self._forget_one(passing):
            text = f"flow limit: {PASSING_OF_ORIGIN_MAX} clients of {' '.join(origin)} have calls under way"
            raise Refused(Code.TOO_MANY_REQUESTS, text)
        if len(self._clients) >= CLIENTS_MAX and not self._forget_one(
            max(self.passing.values(), key=len, default=_NONE)
        ):
            raise Refused(Code.TOO_MANY_REQUESTS, f"flow limit: {CLIENTS_MAX} clients are known")

    def _forget_one(self, passing: OrderedDict[str, Client]) -> bool:
        """Forget a client that has no active call: the client with the oldest last call. Return False if all clients
        have active calls."""
        for client in passing.values():
            if not client.calls and client.stream is None:
                self._forget(client, f"{len(passing)} clients of {' '.join(client.origin)} hold nothing")
                return True
        return False

    def _forget(self, client: Client, why: str) -> None:
        del self._clients[client.id]
        self._let_go(client)
        passing = self.passing[client.origin]
        del passing[client.id]
        if not passing:
            del self.passing[client.origin]
        if client.peer is not None and client.peer.is_open:
            client.peer.close(why)

    def hold(self, client: Client) -> None:
        """Record that a client has settings, or is registered.
        Raises Refused: too many clients of its origin are registered."""
        if client.id not in (passing := self.passing.get(client.origin, _NONE)):
            return
        if self.holding[client.origin] >= HOLDING_OF_ORIGIN_MAX:
            text = f"flow limit: {HOLDING_OF_ORIGIN_MAX} clients of {' '.join(client.origin)} are registered"
            raise Refused(Code.TOO_MANY_REQUESTS, text)
        del passing[client.id]
        if not passing:
            del self.passing[client.origin]
        self.holding[client.origin] += 1

    def _let_go(self, client: Client) -> None:
        """Record that a client has no settings and no registration any more."""
        passing = self.passing.setdefault(client.origin, OrderedDict())
        if client.id not in passing:
            passing[client.id] = client
            self.holding[client.origin] -= 1
            if not self.holding[client.origin]:
                del self.holding[client.origin]

    def peer_of(self, client: Client) -> Peer:
        """Return the peer of a client at brokers. Join again if brokers have closed the last peer."""
        if client.peer is None or not client.peer.is_open:
            client.group, client.producers = None, set()
            client.peer = self._backend.join(self._on_request(client), lambda: self._closed(client))
        return client.peer

    def drop_silent(self) -> None:
        """Forget clients that have neither a recent nor an active call. A client with an open stream is not forgotten,
        but unregistered at brokers."""
        oldest_ms = self._clock.monotonic_ms() - CLIENT_SILENT_MS_MAX
        for client in [one for one in self._clients.values() if not one.calls and one.seen_ms < oldest_ms]:
            why = f"no call for {CLIENT_SILENT_MS_MAX:.0f} ms"
            if client.stream is None:
                self._forget(client, why)
            elif client.peer is not None and client.peer.is_open:
                client.peer.close(why)

    def close(self) -> None:
        """Unregister all clients at brokers."""
        clients, self._clients = self._clients, {}
        self.passing.clear()
        self.holding.clear()
        for client in clients.values():
            if client.peer is not None:
                client.peer.close("the endpoint closes")

    # -- registration

    async def take_settings(self, client: Client, settings: Any) -> None:
        """Register a client by its settings. Raises RemotingError."""
        topics, group = set[str](), None
        if settings.HasField("publishing"):
            topics = {topic.name for topic in settings.publishing.topics}
        else:
            group = settings.subscription.group.name
        peer = self.peer_of(client)
        for topic in client.producers - topics:
            await peer.unregister(client.id, topic, None)
        if client.group not in (None, group):
            await peer.unregister(client.id, None, client.group)
        await self.register(client, topics, group)

    async def register(self, client: Client, topics: Iterable[str], group: str | None, client_type: int = 0) -> None:
        """Register a client at brokers, or renew its registration. Raises RemotingError."""
        data = HeartbeatData(clientID=client.id, producerDataSet=[ProducerData(topic) for topic in topics])
        if group is not None:
            settings = client.settings
            client_type = settings.client_type if settings is not None else client_type
            consumer = ConsumerData(group_name=group, consume_type=_CONSUME_TYPES.get(client_type, "CONSUME_PASSIVELY"))
            if settings is not None:
                now_ms = self._clock.now_ms()
                for entry in settings.subscription.subscriptions:
                    kind, text = sql_or_tags(entry.expression)
                    wanted = subscription(entry.topic.name, text, expression_type=kind, version=now_ms)
                    consumer.subscription_data_set.append(wanted)
            data.consumerDataSet.append(consumer)
        if not data.producerDataSet and not data.consumerDataSet:
            return
        self.hold(client)
        peer = self.peer_of(client)
        # Set before the request to the broker: a client that leaves meanwhile must be unregistered from these groups.
        client.producers = {producer.group_name for producer in data.producerDataSet}
        client.group = group
        await peer.register(data, client.language, client.version)

    async def leave(self, client: Client) -> None:
        """Remove a client from its groups, and drop its settings."""
        client.forget_settings()
        self._let_go(client)
        peer = client.peer
        if peer is None or not peer.is_open:
            return
        try:
            for topic in client.producers:
                await peer.unregister(client.id, topic, None)
            if client.group is not None:
                await peer.unregister(client.id, None, client.group)
        except RemotingError as error:
            _log.warning("cannot unregister client %s at a broker: %s", client.id, error)
        client.producers, client.group = set(), None
        self._on_gone(client.id)

    def _closed(self, client: Client) -> None:
        """Handle the end of a client's peer, which a broker or this endpoint closed."""
        client.producers, client.group = set(), None
        self._on_gone(client.id)
