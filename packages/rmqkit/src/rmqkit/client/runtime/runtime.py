"""The client runtime: id, connections, routes and heartbeats of one client instance (``MQClientInstance``).

====================  ==========================================================================================
periodic task         when
====================  ==========================================================================================
route refresh         every 30 s; sooner after a failed send and while a subscribed topic does not exist (1, 2, 4 …
                      30 s), so that a consumer can be started before the first message of a topic is sent
heartbeat             every 30 s to every broker of the routes (only to masters if it only produces);
                      immediately if a subscription changed, a connection to a broker was lost, or the broker has
                      no data of this client any more
====================  ==========================================================================================

Brokers send their own requests over these connections, and `dispatch` answers them (`handlers`). Use this module only
on the event loop.
Source: behaviour.md §7.1, §8.15; remoting.md §4.5, §9.1–9.3.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from rmqkit.client.runtime import process
from rmqkit.client.runtime.handlers import ClientRequestHandlers, GroupConsumer, PendingReplies
from rmqkit.client.runtime.namespace import NamespaceClient, remove_namespace
from rmqkit.client.runtime.routes import MASTER_ID, ClientRouteTable
from rmqkit.client.runtime.settings import ClientSettings, name_server_list
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, NoNameServer, NoRoute, RemotingError, RmqError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_header
from rmqkit.protocol.ids import UniqueKeys
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.names import without_namespace
from rmqkit.protocol.properties import PRODUCER_GROUP
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.clients import HeartbeatData, ProducerData
from rmqkit.protocol.schemas.lite import NotifyUnsubscribeLiteRequest
from rmqkit.protocol.schemas.send import CheckTransactionRequest
from rmqkit.remoting.address import advertised_ip
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.tasks import Tasks, keep_doing
from rmqkit.remoting.tls import ClientTls
from rmqkit.rpc import BrokerCalls, NameServers
from rmqkit.system import process as system_process

_MISSING_TOPIC_PAUSE_MS = 1000.0
_REFRESH_GAP_MS = 500.0
"""The minimum pause between two refreshes in ms, independent of the number of failed sends."""
_READY_PAUSE_MS = 200

_DISCOVERY_INTERVAL_MS = 120_000.0
_PORT_BYTES = 4

_log = logging.getLogger(__name__)
_instances = itertools.count()


AnswerCheck = Callable[[str, CheckTransactionRequest, ReceivedMessage], None]
"""A function that is called when a broker checks a transaction, with the broker's address, the header and the half
message.
"""


class Absences:
    """The log of unreachable brokers: one line after a broker has become unreachable, and one line after it is
    reachable again.

    Pulls, heartbeats and saves of offsets report here, so that a broker with many queues does not flood the log.
    Brokers are identified by address, or by name if no address is known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ms: dict[str, float] = {}

    def lost(self, address: str, error: Exception, what: str) -> None:
        """Report that a request to a broker failed."""
        if address in self._since_ms:
            _log.debug("%s: %s", what, error)
            return
        self._since_ms[address] = self._clock.monotonic_ms()
        _log.warning("broker %s is down, trying again until it is back; %s: %s", address, what, error)

    def answers(self, address: str) -> None:
        """Report that a broker answered."""
        if self._since_ms:
            since_ms = self._since_ms.pop(address, None)
            if since_ms is not None:
                _log.info("broker %s is back after %.1f s", address, (self._clock.monotonic_ms() - since_ms) / 1000)


class ClientRuntime:
    """The parts that several producers and consumers can share: connections, route refresh, heartbeats.
    ``name_servers``: the same as for `name_server_list`. Raises SettingsError: an address is not ``host:port``.

    Attributes:
        namespace: the prefix of all names on brokers; names inside the client do not have it.
        client_id: ``<ip>@<pid>#<nanoseconds>``, followed by the unit name if it is set.
        name_servers: the addresses of the name servers.
        keys: the generator of unique keys for messages.
        calls: typed requests to brokers.
        broker_versions: the protocol version of each broker that has answered a heartbeat, by address.
        lite_members: by the id of a lite consumer, the function that is called with a lite topic that another member
            of its group has taken.
        absences: the brokers that cannot be reached.
        dispatch: the router for requests of brokers; further codes can be registered before `start`.
    """

    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        *,
        settings: ClientSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        settings = settings or ClientSettings()
        self.name_servers = name_server_list(name_servers, domain=settings.name_server_domain)
        self._has_to_discover = not self.name_servers
        self._settings = settings
        self.namespace = settings.namespace
        self.clock = clock
        self._name_process()
        self.replies = PendingReplies(clock)
        self.absences = Absences(clock)
        self.dispatch = Router()
        self.dispatch.register(RequestCode.CHECK_TRANSACTION_STATE, self._check_transaction)
        self.dispatch.register(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self.replies.accept_reply)
        self.dispatch.register(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, self._lite_topic_taken)
        self.lite_members: dict[str, Callable[[str], None]] = {}
        # Most clients have none of these settings, so their requests must not check for them.
        is_plain = not (settings.namespace or settings.namespace_v2 or settings.vip_channel)
        self.remoting = (RemotingClient if is_plain else functools.partial(NamespaceClient, settings))(
            self.dispatch,
            clock=clock,
            on_close=self._connection_closed,
            tls=None if settings.tls is None else ClientTls(settings.tls),
            credentials=settings.auth,
        )
        self.calls = BrokerCalls(self.remoting, settings.api_timeout_ms)
        # Share the list object, because discovery replaces its contents in place.
        self._name_servers = NameServers(self.name_servers, self.calls, first=random.getrandbits(16))
        self.routes = ClientRouteTable(self._name_servers, self._route_changed)
        self._producers: dict[str, AnswerCheck | None] = {}
        self._consumers: dict[str, GroupConsumer] = {}
        self.broker_versions: dict[str, int] = {}
        ClientRequestHandlers(self._consumers, self.namespace).register(self.dispatch)
        self._tasks = Tasks()
        self._refresh = asyncio.Event()
        self._beat = asyncio.Event()
        self._beats_under_way: set[asyncio.Task[None]] = set()
        self._missing_pause_ms = _MISSING_TOPIC_PAUSE_MS
        self._is_running = False
        self._is_from_parent = False
        process.register_after_fork(self, ClientRuntime._forked)

    @property
    def is_running(self) -> bool:
        """Return True if the runtime was started and is not closed."""
        return self._is_running

    def check_process(self) -> None:
        """Check the process. Raises ClientError: the runtime was started in a parent process, before a fork."""
        if self._is_from_parent:
            raise ClientError(
                f"client {self.client_id} was started before this process was forked, its connections belong to "
                "the parent: create a new client here"
            )

    async def start(self) -> None:
        """Start to refresh routes and to send heartbeats. A second call has no effect.
        Raises ClientError: the same as for `check_process`. Raises NoRoute: no web server returns the name servers."""
        self.check_process()
        if self._is_running:
            return
        self._is_running = True
        if self._has_to_discover:
            try:
                await self._discover()
                # Reset this, so that a program can start the runtime again when the web server answers.
            except BaseException:
                self._is_running = False
                raise
            discovery = f"discovery of name servers of client {self.client_id}"
            self._tasks.start(keep_doing(self._discover, wake=asyncio.Event(), name=discovery), discovery)
        name = f"of client {self.client_id}"
        self._tasks.start(
            keep_doing(self._refresh_routes, wake=self._refresh, name=f"route refresh {name}", gap_ms=_REFRESH_GAP_MS),
            f"routes {name}",
        )
        self._tasks.start(keep_doing(self._heartbeat, wake=self._beat, name=f"heartbeat {name}"), f"heartbeat {name}")

    async def reach(self, wait_ms: float = 0) -> None:
        """Check that a name server answers. With ``wait_ms``, wait at most this time until a name server answers and
        knows a broker.
        Raises NoRoute: no name server answered, or none knew a broker."""
        deadline_ms = self.clock.monotonic_ms() + wait_ms
        while True:
            error: NoRoute
            try:
                answer = await self._name_servers.brokers()
                if not wait_ms or answer is None or answer.broker_addr_table:
                    return
                error = NoRoute(f"name servers {', '.join(self.name_servers)} know no broker: start one")
            except NoNameServer as failed:
                error = failed
            if self.clock.monotonic_ms() >= deadline_ms:
                raise error
            await asyncio.sleep(_READY_PAUSE_MS / 1000)

    async def close(self) -> None:
        """Stop everything that `start` began, and close every connection. The groups must be unregistered before
        this.
        """
        if self._is_from_parent:
            return
        # Set this before the connections close. Otherwise each closed connection would request a heartbeat and a route
        # refresh.
        self._is_running = False
        await self._tasks.close()
        await self.remoting.close()

    # -- groups

    def register_producer(self, group: str, answer_check: AnswerCheck | None = None) -> None:
        """Announce a producer group in heartbeats. ``answer_check`` gets the broker's checks of its transactions.
        Raises ClientError: the instance already has a producer of this group."""
        if group in self._producers:
            raise ClientError(f"producer group {group} exists in client {self.client_id}: choose another group")
        self._producers[group] = answer_check
        self.heartbeat_soon()

    def register_consumer(self, group: str, consumer: GroupConsumer) -> None:
        """Announce a consumer group in heartbeats, and let it rebalance when members or routes change.
        Raises ClientError: the instance already has a consumer of this group."""
        if group in self._consumers:
            raise ClientError(f"consumer group {group} exists in client {self.client_id}: choose another group")
        self._consumers[group] = consumer

    async def unregister_producer(self, group: str) -> None:
        """Leave a producer group at all brokers. If a broker does not answer, it notices later that heartbeats are
        missing."""
        self._producers.pop(group, None)
        await self._unregister_everywhere(
            lambda address: self.calls.unregister(address, self.client_id, producer_group=group)
        )

    async def unregister_consumer(self, group: str) -> None:
        """Leave a consumer group at all brokers, in the same way as `unregister_producer`."""
        # Remove the group from the table first, so that the next heartbeat does not join the group again.
        self._consumers.pop(group, None)
        await self._unregister_everywhere(
            lambda address: self.calls.unregister(address, self.client_id, consumer_group=group)
        )

    # -- requested actions

    def heartbeat_soon(self) -> None:
        self._beat.set()

    def refresh_routes_soon(self) -> None:
        """Refresh the routes soon, for example because a broker did not answer."""
        self._missing_pause_ms = _MISSING_TOPIC_PAUSE_MS
        self._refresh.set()

    async def heartbeat(self) -> None:
        """Send heartbeats with the groups of this client to all brokers. Brokers that do not answer are logged."""
        data = HeartbeatData(
            clientID=self.client_id,
            producerDataSet=[ProducerData(group) for group in sorted(self._producers)],
            consumerDataSet=[
                data for consumer in self._consumers.values() if (data := consumer.consumer_data()) is not None
            ],
        )
        if data.producerDataSet or data.consumerDataSet:
            beating = self._ask_all_brokers(functools.partial(self._beat_once, data), "heartbeat")
            beat = self._tasks.start(beating, f"one heartbeat of client {self.client_id}")
            self._beats_under_way.add(beat)
            beat.add_done_callback(self._beats_under_way.discard)
            await asyncio.shield(beat)  # a cancelled caller must not stop it halfway

    # -- internals

    async def _beat_once(self, data: HeartbeatData, address: str) -> None:
        self.broker_versions[address] = await self.calls.heartbeat(address, data)

    def _forked(self) -> bool:
        """Assign a new client id in the child of a fork if the runtime was not started before.

        Return True if it was started before.
        """
        self._is_from_parent = self._is_from_parent or self._is_running
        if not self._is_from_parent:
            self._name_process()
        return self._is_from_parent

    def _name_process(self) -> None:
        settings = self._settings
        ip = settings.client_ip or advertised_ip("")
        # This is computed again after a fork: brokers would consider two processes with one client id as one member.
        self.client_id = _client_id(ip, settings, self.clock.now_ms())
        self.keys = UniqueKeys(pack_host(ip, 0)[:-_PORT_BYTES], system_process.number(), random.getrandbits(32))

    async def _discover(self) -> float:
        from rmqkit.client.runtime.routes import discover  # few programs need it

        self.name_servers[:] = await discover(self._settings)
        return _DISCOVERY_INTERVAL_MS

    async def _heartbeat(self) -> float:
        await self.heartbeat()
        return self._settings.heartbeat_interval_ms

    async def _refresh_routes(self) -> float:
        known = set(self._broker_addresses())
        all_exist = await self.routes.refresh_all()
        # Drop a connection to an address that is in no route, because it would never be used again.
        for address in known - set(self._broker_addresses()):
            self.remoting.drop(address)
        interval_ms = float(self._settings.route_interval_ms)
        if all_exist:
            return interval_ms
        # The first pause is short, because a topic is often created shortly after its consumer. Then the pauses grow.
        pause_ms = min(self._missing_pause_ms, interval_ms)
        self._missing_pause_ms = min(pause_ms * 2, interval_ms)
        return pause_ms

    async def _unregister_everywhere(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Leave a group at all brokers when no heartbeat is in flight."""
        # If a heartbeat were handled after the unregistration, this client would be a member again. Its queues would
        # not be read until the broker misses further heartbeats, 120 s later.
        if self._beats_under_way:
            await asyncio.wait(self._beats_under_way)
        await self._ask_all_brokers(call, "unregistering")

    async def _ask_all_brokers(self, call: Callable[[str], Awaitable[None]], what: str) -> None:
        addresses = self._broker_addresses()
        results = await asyncio.gather(*(call(address) for address in addresses), return_exceptions=True)
        for address, result in zip(addresses, results, strict=True):
            if isinstance(result, RemotingError):
                self.absences.lost(address, result, what)
            elif isinstance(result, RmqError):
                _log.warning("%s at broker %s: %s", what, address, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                self.absences.answers(address)

    async def master_addresses(self) -> list[str]:
        """Return the addresses of all registered masters. Raises NoRoute: no name server answers."""
        found = await self._name_servers.brokers()
        table = {} if found is None else found.broker_addr_table
        return [address for one in table.values() if (address := one.broker_addrs.get(MASTER_ID)) is not None]

    def _broker_addresses(self) -> list[str]:
        """Return the addresses to which heartbeats are sent."""
        return [
            address
            for ids in self.routes.brokers.values()
            for broker_id, address in ids.items()
            if self._consumers or broker_id == MASTER_ID
        ]

    def _route_changed(self, topic: str) -> None:
        self.heartbeat_soon()  # the route may have brokers that do not know this client
        for consumer in self._consumers.values():
            consumer.rebalance_soon()

    def _connection_closed(self, address: str, connection: Connection) -> None:
        # A broker forgets a client when its connection is lost. It pushes and notifies again only after a heartbeat.
        if self._is_running and address in self._broker_addresses():
            self.heartbeat_soon()
            self.refresh_routes_soon()

    def _lite_topic_taken(self, connection: Connection, command: Command) -> None:
        header = decode_header(command, NotifyUnsubscribeLiteRequest)
        notify = self.lite_members.get(header.client_id)
        if notify is not None:
            notify(header.lite_topic)

    def _check_transaction(self, connection: Connection, command: Command) -> None:
        header = decode_header(command, CheckTransactionRequest)
        messages = read_messages(command.payload, header.bname)
        remove_namespace(self.namespace, messages)
        for message in messages:
            group = without_namespace(self.namespace, message.properties.get(PRODUCER_GROUP, ""))
            answer_check = self._producers.get(group)
            if answer_check is None:
                _log.warning("transaction %s of group %r: no transaction producer here", message.msg_id, group)
            else:
                answer_check(connection.peer, header, message)


def _client_id(ip: str, settings: ClientSettings, now_ms: int) -> str:
    """Return a new client id. The ids of one process differ, even if they are created in the same millisecond."""
    name = settings.instance_name
    if name == "DEFAULT" and not settings.keeps_instance_name:
        name = f"{system_process.number()}#{now_ms * 1_000_000 + next(_instances)}"
    return "@".join(part for part in (ip, name, settings.unit_name) if part)
