"""The brokers of a proxy, over the remoting protocol (``ClusterServiceManager``).

Routes come from name servers, message types and groups from a broker; concurrent requests are shared, and answers are
cached. Brokers also provide users and their permissions (`rmqkit.proxy.remote.users`). Only the proxy knows the
consumers, because POP needs no group members. Brokers send check-backs of half messages to a producer of a group named
like the topic. This producer is the proxy, which passes the check-back to one of its clients.
Source: grpc.md §9, §11.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.errors import PeerRefused, RemotingError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header_leniently, request
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.clients import HeartbeatData, ProducerData
from rmqkit.protocol.schemas.groups import GroupRequest, SubscriptionGroupConfig
from rmqkit.protocol.schemas.lite import NotifyUnsubscribeLiteRequest
from rmqkit.protocol.schemas.pull import ViewMessageRequest
from rmqkit.protocol.schemas.topics import BrokerData, ClusterInfo, Permission, TopicConfig, TopicRequest, TopicRoute
from rmqkit.proxy.backend import (
    ASK_TIMEOUT_MS,
    BackendAtOnce,
    BrokerQueues,
    OnRequest,
    Peer,
    Route,
    Unclaimed,
    Wanted,
    hand_back,
)
from rmqkit.proxy.remote.cache import Cache
from rmqkit.proxy.remote.users import ProxyUserSettings, Users
from rmqkit.remoting.address import split_address
from rmqkit.remoting.authentication import Credentials, inner_credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.tasks import Tasks
from rmqkit.rpc import BrokerCalls, NameServers

__all__ = ["RemoteBackend"]

HEARTBEAT_SECONDS = 20.0
# The timeout of Apache's proxy for routes, topics and groups. A broker that creates a group writes a file before it
# answers.
_CONFIG_TIMEOUT_MS = 3000.0
_PRODUCER_ID = "rmq-proxy-producer-client"
# Topics of other types have no half messages.
_TRANSACTIONAL = ("TRANSACTION", "MIXED", "UNSPECIFIED")

_log = logging.getLogger(__name__)


class RemoteBackend:
    """The brokers of some name servers.

    Args:
        remoting: makes the connections to name servers and brokers, with a router and the credentials for requests.

    Raises SettingsError: the settings for users are not valid.
    """

    def __init__(
        self,
        name_servers: Sequence[str],
        clock: Clock,
        remoting: Callable[[Router, Credentials | None], RemotingClient],
        users: ProxyUserSettings | None = None,
    ) -> None:
        users = users or ProxyUserSettings()
        inner = inner_credentials(users.inner_credentials)
        self._cluster = users.cluster
        self.users = Users(users, inner, self._ask_cluster, clock)
        self.has_policies = self.users.has_policies
        self.at_once: BackendAtOnce | None = None
        router = Router()
        router.register(RequestCode.CHECK_TRANSACTION_STATE, self._check_back)
        router.register(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, self._unsubscribe_lite)
        self.tasks = Tasks()
        self._remoting = remoting(router, inner)
        self._calls = BrokerCalls(self._remoting, _CONFIG_TIMEOUT_MS)
        self._name_servers = NameServers(name_servers, self._calls)
        self._routes = Cache(self._fetch_route, clock)
        self._groups = Cache(self._fetch_group, clock)
        self._clusters = Cache(self._fetch_cluster, clock)
        self._topics = Cache(self._fetch_topic, clock)
        self._named = Cache(self._fetch_master, clock)
        self._all = Cache(self._fetch_names, clock)
        self._masters: dict[str, str] = {}
        self._producers: dict[str, list[_RemotePeer]] = {}
        self._consumers: dict[str, _RemotePeer] = {}
        self._turn = itertools.count()
        self.own: Peer = _RemotePeer(self, lambda command: None, lambda: None)

    async def close(self) -> None:
        """Cancel the pending requests, and close the connections."""
        await self.tasks.close()
        await self._remoting.close()

    # -- called by the endpoint

    async def route(self, topic: str) -> Route | None:
        return await self._routes.find(topic)

    async def group(self, name: str) -> SubscriptionGroupConfig | None:
        return await self._groups.find(name)

    async def has_broker(self, name: str) -> bool:
        if name not in self._masters:
            await self._learn_masters()
        return name in self._masters

    def readable_broker(self, name: str, route: Route) -> str | None:
        readable = [
            one.name
            for one in route.brokers
            if one.broker_id == 0 and one.permission & Permission.READ and one.read_queue_count
        ]
        if name in readable or not readable:
            return name if readable else None
        return readable[next(self._turn) % len(readable)]

    async def message_at(self, broker: str, physical_offset: int) -> Record | None:
        header = ViewMessageRequest(physical_offset)
        answer = await self.call(broker, request(RequestCode.VIEW_MESSAGE_BY_ID, header), ASK_TIMEOUT_MS)
        if answer.code != ResponseCode.SUCCESS:
            return None
        return decode_record(answer.payload)

    def join(self, on_request: OnRequest, on_close: Callable[[], None]) -> Peer:
        return _RemotePeer(self, on_request, on_close)

    async def identify(self, metadata: Mapping[str, str]) -> str | None:
        return await self.users.signer(metadata)

    async def authorize(self, user: str | None, wanted: Sequence[Wanted], addresses: Sequence[str]) -> None:
        await self.users.check(user, wanted, addresses)

    # -- called by the remoting port

    async def topic(self, name: str) -> TopicRoute | None:
        """Return the route of a topic from the name servers. Raises RemotingError."""
        return await self._topics.find(name)

    async def master(self, broker: str) -> str | None:
        """Return the address of a broker's master, or None if name servers know no master. Raises RemotingError."""
        return self._masters.get(broker) or await self._named.find(broker)

    async def brokers(self) -> list[str]:
        """Return the names of all brokers that have a master. Raises RemotingError."""
        return await self._all.find("") or []

    def not_reached(self, broker: str) -> None:
        """Forget the address of a master that cannot be reached. The next request looks up the address again."""
        self._masters.pop(broker, None)

    # -- called by peers

    async def call(self, broker: str, command: Command, timeout_ms: float) -> Command:
        """Send a request to a broker's master, and return the answer.
        Raises RemotingError; PeerRefused: the broker does not exist."""
        if not await self.has_broker(broker):
            raise PeerRefused(ResponseCode.BROKER_NOT_EXIST, f"cannot find broker {broker}", "the name servers")
        command.fields = {**decode_fields(command), "bname": broker}
        return await self._calls.call(self._masters[broker], command, timeout_ms)

    async def produce(self, peer: _RemotePeer, topics: set[str]) -> None:
        """Register the proxy at brokers as a producer of a client's topics."""
        is_new = bool(topics - peer.topics)
        self.forget(peer)
        for topic in topics:
            self._producers.setdefault(topic, []).append(peer)
        peer.topics = topics
        if is_new:
            await self.heartbeat()

    def consume(self, peer: _RemotePeer, client_id: str) -> None:
        """Pass brokers' notices to a consumer by its id to a peer."""
        peer.client_id = client_id
        self._consumers[client_id] = peer

    def forget_consumer(self, peer: _RemotePeer) -> None:
        """Pass no more notices to a consumer."""
        if self._consumers.get(peer.client_id) is peer:
            del self._consumers[peer.client_id]

    def forget(self, peer: _RemotePeer) -> None:
        """Send no more check-backs to a client."""
        for topic in peer.topics:
            self._producers[topic].remove(peer)
            if not self._producers[topic]:
                del self._producers[topic]
        peer.topics = set()

    async def heartbeat(self) -> None:
        """Register the transactional topics of the clients at all masters; called every `HEARTBEAT_SECONDS`."""
        groups: dict[str, list[ProducerData]] = {}
        for topic in list(self._producers):
            route = await self.route(topic)
            if route is not None and route.message_type in _TRANSACTIONAL:
                for queues in route.brokers:
                    groups.setdefault(queues.name, []).append(ProducerData(topic))
        for broker, producers in groups.items():
            if broker in self._masters:
                data = HeartbeatData(clientID=_PRODUCER_ID, producerDataSet=producers)
                try:
                    await self._calls.heartbeat(self._masters[broker], data)
                except (RemotingError, PeerRefused) as error:
                    _log.warning("broker %s does not know the producers here: %s", broker, error)

    # -- inside

    def _check_back(self, connection: Connection, command: Command) -> None:
        """Pass the check-back of a broker to one of the topic's clients, in rotation."""
        group = self._topic_of(command)
        peers = [peer for peer in self._producers.get(group, ()) if peer.is_open]
        if peers:
            peers[next(self._turn) % len(peers)].on_request(command)
        else:
            _log.info("a half message of %s has no producer here", group)

    def _unsubscribe_lite(self, connection: Connection, command: Command) -> None:
        """Pass a broker's notice of a lite topic that another client has taken to the former subscriber."""
        peer = self._consumers.get(decode_header_leniently(command, NotifyUnsubscribeLiteRequest).client_id)
        if peer is not None:
            peer.on_request(command)

    @staticmethod
    def _topic_of(command: Command) -> str:
        return decode_record(command.payload).topic

    async def _fetch_route(self, topic: str) -> Route | None:
        found = await self._fetch_topic(topic)
        if found is None:
            return None
        message_type = await self._message_type(topic, found)
        by_name = {data.broker_name: data for data in found.broker_datas}
        queues = [
            BrokerQueues(
                data.broker_name,
                0,
                split_address(self._masters[data.broker_name])[0],
                data.read_queue_nums,
                data.write_queue_nums,
                data.perm & (Permission.READ | Permission.WRITE),
            )
            for data in found.queue_datas
            if data.broker_name in by_name and 0 in by_name[data.broker_name].broker_addrs
        ]
        return Route(message_type, queues)

    async def _fetch_topic(self, name: str) -> TopicRoute | None:
        found = await self._name_servers.route(name)
        if found is not None:
            self._take_masters(found.broker_datas)
        return found

    async def _fetch_names(self, _: str) -> list[str]:
        brokers = (await self._learn_masters()).broker_addr_table
        return sorted(name for name, data in brokers.items() if 0 in data.broker_addrs)

    async def _fetch_master(self, broker: str) -> str | None:
        await self._learn_masters()
        return self._masters.get(broker)

    async def _message_type(self, topic: str, route: TopicRoute) -> str:
        """Return the value of ``message.type`` at the first broker of the route whose master is known."""
        for data in route.broker_datas:
            if data.broker_name in self._masters:
                address = self._masters[data.broker_name]
                config = await self._calls.fetch(
                    TopicConfig, address, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic)
                )
                return (config.attributes or {}).get("message.type", "NORMAL")
        return "NORMAL"

    async def _fetch_group(self, name: str) -> SubscriptionGroupConfig | None:
        if not self._masters:
            await self._learn_masters()
        for address in self._masters.values():
            code, header = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequest(name)
            try:
                return await self._calls.fetch(SubscriptionGroupConfig, address, code, header)
            except PeerRefused as error:
                if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    raise
        return None

    async def _learn_masters(self) -> ClusterInfo:
        info = await self._name_servers.fetch(ClusterInfo, RequestCode.GET_BROKER_CLUSTER_INFO)
        self._take_masters(info.broker_addr_table.values())
        return info

    async def _ask_cluster(self, code: RequestCode, header: Struct) -> bytes:
        """Send a request to the masters of the proxy's cluster, one after the other, until a master answers. Return the
        body of the answer. Raises RemotingError, PeerRefused."""
        masters = await self._clusters.find(self._cluster) or []
        for number, address in enumerate(masters, 1):
            try:
                return (await self._calls.ask(address, code, header)).payload
            except RemotingError:
                if number == len(masters):
                    raise
        known = f"cluster {self._cluster}" if self._cluster else "any cluster"
        raise PeerRefused(ResponseCode.BROKER_NOT_EXIST, f"no master of {known} is known", "the name servers")

    async def _fetch_cluster(self, name: str) -> list[str] | None:
        """Return the addresses of a cluster's masters, sorted by broker name; an empty name means the only cluster."""
        info = await self._learn_masters()
        clusters = info.cluster_addr_table
        if not name and len(clusters) > 1:
            remark = f"clusters {', '.join(sorted(clusters))} have users: set rocketMQClusterName at the proxy"
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, remark, "the name servers")
        members = clusters.get(name, []) if name else [one for members in clusters.values() for one in members]
        return [self._masters[one] for one in sorted(members) if 0 in info.broker_addr_table[one].broker_addrs] or None

    def _take_masters(self, brokers: Iterable[BrokerData]) -> None:
        for data in brokers:
            if 0 in data.broker_addrs:
                self._masters[data.broker_name] = data.broker_addrs[0]


class _RemotePeer:
    """A client of the proxy. Brokers do not know this client."""

    def __init__(self, backend: RemoteBackend, on_request: OnRequest, on_close: Callable[[], None]) -> None:
        self._backend = backend
        self._on_close = on_close
        self._is_open = True
        self.on_request = on_request
        self.topics: set[str] = set()
        self.client_id = ""
        self.user: str | None = None

    @property
    def is_open(self) -> bool:
        return self._is_open

    def moved_to(self, peername: tuple[str, int]) -> None:
        """Do nothing: records contain the proxy's address."""

    async def ask(self, broker: str, command: Command, timeout_ms: float = ASK_TIMEOUT_MS) -> Command:
        return await self._backend.call(broker, command, timeout_ms)

    async def wait(self, broker: str, command: Command, timeout_ms: float, unclaimed: Unclaimed) -> Command:
        asking = self._backend.tasks.own(self._backend.call(broker, command, timeout_ms), f"request to {broker}")
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The broker does not know that the caller has stopped waiting: release the messages that it still pops.
            # Add the callback only now: while the caller waits, popped messages belong to the caller.
            asking.add_done_callback(partial(hand_back, unclaimed))
            raise

    async def register(self, data: HeartbeatData, language: str, version: int) -> None:
        if data.consumerDataSet:
            self._backend.consume(self, data.clientID)
        await self._backend.produce(self, {producer.group_name for producer in data.producerDataSet})

    async def unregister(self, client_id: str, producer_group: str | None, consumer_group: str | None) -> None:
        if producer_group is not None:
            await self._backend.produce(self, self.topics - {producer_group})
        if consumer_group is not None:
            self._backend.forget_consumer(self)

    def close(self, reason: str = "") -> None:
        if self._is_open:
            self._is_open = False
            self._backend.forget(self)
            self._backend.forget_consumer(self)
            self._on_close()
            self._on_close, self.on_request = _tell_nobody, _ask_nobody  # breaks a reference cycle


def _tell_nobody() -> None:
    """Ignore the second close of a peer."""


def _ask_nobody(command: Command) -> None:
    """Ignore a command to a closed client."""
