"""Routes: the queues of a topic, and the addresses of their brokers (``topicRouteData2TopicPublishInfo``).

`ClientRouteTable` contains the routes of the topics in use. It fetches a route when the route is first needed, and
refreshes all routes periodically. If no name server answers, it keeps the last known route, because brokers continue to
serve without name servers. It uses `NameServers`, which uses one name server until this name server does not answer. If
a program passes no name servers, `discover` requests them from a web server (``TopAddressing``), at the start and then
every 2 minutes.

===========================  ==================================================================================
queues to publish to         the queues in ``orderTopicConf``, exactly in its order; otherwise, for each writable
                             queue data of a broker with a master: 0 … writeQueueNums - 1; sorted by broker name
queues to subscribe to       for each readable queue data: 0 … readQueueNums - 1; no master is needed
queues of a static topic     for both: 0 … totalQueues - 1 of broker ``__syslo__global__``, on any broker
queues of a topic that no    to publish to: the queues of the template topic (TBW102), so that a broker creates the
broker has                   topic; to subscribe to: none until the topic exists
===========================  ==================================================================================

Because of the third row, the members of a group have the same order of queues while queues move (`logical_queues`). Use
this module only on the event loop. Source: behaviour.md §7.1, §7.2, §7.5; remoting.md §9.2.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rmqkit.client.runtime.settings import ClientSettings
from rmqkit.errors import (
    ClientError,
    ConnectFailed,
    NoRoute,
    PeerRefused,
    ProtocolError,
)
from rmqkit.protocol.names import topic_fault
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.topics import Permission, TopicRoute
from rmqkit.remoting.address import split_addresses
from rmqkit.rpc import NameServers

_log = logging.getLogger(__name__)
MASTER_ID = 0
LOGICAL_BROKER_PREFIX = "__syslo__"
NOT_REGISTERED = "check whether it runs and registers with these name servers"
"""The advice in the error about a broker that is in no route."""

_BYTES_MAX = 1 << 20


class PublishQueues:
    """The publish queues of a topic, returned one after the other (``TopicPublishInfo``, ``sendWhichQueue``). ``start``
    is the index of the first queue to return. A random number distributes producers over the queues."""

    __slots__ = ("_next", "queues")

    def __init__(self, queues: Sequence[MessageQueue], start: int = 0) -> None:
        assert queues, "a topic without queues has no route"
        self.queues = tuple(queues)
        self._next = start

    def pick(self, avoid_broker: str | None = None) -> MessageQueue:
        """Return the next queue. If possible, its broker is not ``avoid_broker``."""
        chosen = self.first(lambda queue: queue.broker_name != avoid_broker) or self.first(lambda _: True)
        assert chosen is not None, "there is at least one queue"
        return chosen

    def first(self, is_wanted: Callable[[MessageQueue], bool]) -> MessageQueue | None:
        """Return the next queue that matches, or None if no queue matches."""
        for _ in self.queues:
            queue = self.queues[self._next % len(self.queues)]
            self._next += 1
            if is_wanted(queue):
                return queue
        return None


def publish_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """Return the queues to which messages of a topic can be sent. The list is empty if no broker accepts writes."""
    order = route.order_topic_conf
    # An ordered topic also lists brokers that are down, because its messages must not move to other queues.
    if isinstance(order, str) and order:
        return _ordered_queues(topic, order)
    if logical := logical_queues(topic, route):
        return sorted(logical)
    with_master = _with_master(route)
    return [
        MessageQueue(topic, data.broker_name, queue_id)
        for data in sorted(route.queue_datas, key=lambda data: data.broker_name)
        if data.perm & Permission.WRITE and data.broker_name in with_master
        for queue_id in range(data.write_queue_nums)
    ]


def lacks_master(route: TopicRoute) -> bool:
    """Return True if a broker with writable queues has no master."""
    return not {data.broker_name for data in route.queue_datas if data.perm & Permission.WRITE} <= _with_master(route)


def _with_master(route: TopicRoute) -> set[str]:
    return {broker.broker_name for broker in route.broker_datas if MASTER_ID in broker.broker_addrs}


def subscribe_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """Return the queues from which a topic can be read, in the order that rebalancing requires."""
    physical = {
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        if data.perm & Permission.READ
        # While a topic shrinks, more queues are read than written, because the messages in the other queues must be
        # consumed.
        for queue_id in range(data.read_queue_nums)
    }
    return sorted(logical_queues(topic, route) or physical)


def logical_queues(topic: str, route: TopicRoute) -> dict[MessageQueue, str]:
    """Return the queues of a static topic with the names of their brokers. The result is empty for any other topic. If
    no broker claims a queue, its broker name is that of a broker that does not exist. Source: remoting.md §4.6.2."""
    queues: dict[MessageQueue, str] = {}
    infos = route.topic_queue_mapping_by_broker
    # Sort by epoch. If two brokers claim a moving queue, the newer claim wins.
    for info in sorted(infos.values() if isinstance(infos, dict) else (), key=lambda info: info.epoch):
        mock = LOGICAL_BROKER_PREFIX + info.scope.removeprefix("__")
        for number in range(info.total_queues):
            queues.setdefault(MessageQueue(topic, mock, number), f"{LOGICAL_BROKER_PREFIX}none__")
        for number in info.curr_id_map or {}:
            queues[MessageQueue(topic, mock, number)] = info.bname
    return queues


def from_template(template: TopicRoute, queue_count: int) -> TopicRoute:
    """Return the route that an unknown topic will have after its creation: the route of the template topic with at most
    ``queue_count`` queues.

    The template's read count is an upper limit, because the broker creates the topic by the same rule (behaviour.md
    §3.2).
    """
    datas = [
        replace(
            data,
            read_queue_nums=min(queue_count, data.read_queue_nums),
            write_queue_nums=min(queue_count, data.read_queue_nums),
        )
        for data in template.queue_datas
    ]
    return replace(template, queue_datas=datas)


def broker_addresses(route: TopicRoute) -> dict[str, dict[int, str]]:
    """Return broker name → broker id → address."""
    return {broker.broker_name: dict(broker.broker_addrs) for broker in route.broker_datas}


def _ordered_queues(topic: str, order: str) -> list[MessageQueue]:
    """Return the queues of a text such as ``broker-a:4;broker-b:2``. Unreadable parts are skipped."""
    queues: list[MessageQueue] = []
    for part in order.split(";"):
        broker_name, found, count = part.strip().rpartition(":")
        if found and count.isdecimal():
            queues += [MessageQueue(topic, broker_name, queue_id) for queue_id in range(int(count))]
    return queues


async def discover(settings: ClientSettings) -> list[str]:
    """Request the name servers from the web server. Raises NoRoute: the server does not answer, or its answer is
    invalid.
    """
    url = address_url(settings)
    try:
        # Use a thread, because urllib blocks, also while it resolves the name.
        return split_addresses(await asyncio.to_thread(_get, url, settings.api_timeout_ms / 1000.0))
    except (OSError, ValueError) as error:
        raise NoRoute(f"{url} does not return addresses of name servers: {error}") from None


def address_url(settings: ClientSettings) -> str:
    """Return the URL of the list of name servers. The port is 8080 unless the domain contains a port."""
    domain = settings.name_server_domain
    host = domain if ":" in domain else f"{domain}:8080"
    unit = f"-{settings.unit_name}?nofix=1" if settings.unit_name else ""
    return f"http://{host}/rocketmq/{settings.name_server_subgroup}{unit}"


def _get(url: str, timeout_seconds: float) -> str:
    import urllib.request  # few programs need it, and the import takes 20 ms

    with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
        text: str = answer.read(_BYTES_MAX).decode()
    return text.strip()


class ClientRouteTable:
    """The topics, their queues and the addresses of brokers. ``on_change`` is called with each topic after its route
    has changed.
    ``brokers`` maps a broker name to a broker id to an address, for all routes together."""

    def __init__(self, name_servers: NameServers, on_change: Callable[[str], None]) -> None:
        self._name_servers = name_servers
        self._on_change = on_change
        self._routes: dict[str, TopicRoute] = {}
        self._templates: dict[str, tuple[str, int]] = {}
        self._publish: dict[str, PublishQueues] = {}
        self._watched: defaultdict[str, set[str]] = defaultdict(set)
        self._fetching = asyncio.Lock()
        self._asking: dict[str, asyncio.Task[PublishQueues]] = {}
        self._logical: dict[MessageQueue, str] = {}
        self._seen: set[str] = set()
        self.brokers: dict[str, dict[int, str]] = {}

    def known_publish_queues(self, topic: str) -> PublishQueues | None:
        """Return the queues to which messages can be sent if the route is known, otherwise None."""
        return self._publish.get(topic)

    def lacks_master(self, topic: str) -> bool:
        """Return True if a broker of a topic has no master, so that waiting for a restart may help."""
        route = self._routes.get(topic)
        return route is not None and lacks_master(route)

    def has_known(self, broker_name: str) -> bool:
        """Return True if the broker is or was in a route."""
        return broker_name in self._seen

    async def publish_queues(self, topic: str, template_topic: str, template_queue_count: int) -> PublishQueues:
        """Return the queues to which messages of a topic can be sent.
        Raises NoRoute: no name server answered, or neither the topic nor the template topic is writable."""
        asking = self._asking.get(topic)
        if asking is None:  # other callers wait for the same response or error
            # The task is shielded below, because a cancelled caller must not cancel the request of the others.
            asking = self._asking[topic] = asyncio.create_task(
                self._ask_publish_queues(topic, template_topic, template_queue_count), name=f"route of topic {topic}"
            )
            asking.add_done_callback(functools.partial(self._end_question, topic))
        return await asyncio.shield(asking)

    async def _ask_publish_queues(self, topic: str, template_topic: str, template_queue_count: int) -> PublishQueues:
        async with self._fetching:
            # Check this while holding the lock, because its previous holder may have fetched the route.
            if topic not in self._publish:
                await self._fetch(topic)
            if topic not in self._publish:
                await self._use_template(topic, template_topic, template_queue_count)
        known = self._publish.get(topic)
        if known is None:
            raise NoRoute(
                f"no broker accepts messages for topic {topic}, asked name servers "
                f"{', '.join(self._name_servers.addresses)}: create the topic, or start a broker with "
                "autoCreateTopicEnable=true"
            )
        return known

    def subscribe_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues from which the topic can be read, sorted. The list is empty while the topic does not
        exist.
        """
        return subscribe_queues(topic, self._routes[topic]) if self._exists(topic) else []

    async def readable_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues from which the topic can be read. Fetch the route if it is unknown.
        Raises ClientError: the topic's name is not valid.
        Raises NoRoute: the topic does not exist, or no name server answered."""
        fault = topic_fault(topic)
        if fault is not None:
            raise ClientError(fault)
        if not self.subscribe_queues(topic):
            await self.refresh(topic)
        queues = self.subscribe_queues(topic)
        if not queues:
            raise NoRoute(f"no broker lets topic {topic} be read: create it, or send a message to it first")
        return queues

    async def topics(self) -> list[str]:
        """Return the names of all topics. Raises NoRoute: no name server answered."""
        return await self._name_servers.topics()

    def watch(self, topic: str, group: str) -> None:
        """Let `refresh_all` fetch the route of a topic that a group needs, even if the topic does not exist yet."""
        self._watched[topic].add(group)

    def unwatch(self, topic: str, group: str) -> None:
        self._watched[topic].discard(group)
        if not self._watched[topic]:
            del self._watched[topic]

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        return self.brokers.get(broker_name, {}).get(broker_id)

    def broker_of(self, queue: MessageQueue) -> str:
        """Return the name of the broker of a queue. The queue of a static topic does not contain this name."""
        return self._logical.get(queue, queue.broker_name) if self._logical else queue.broker_name

    def any_address(self, broker_name: str, broker_id: int = MASTER_ID) -> tuple[int, str] | None:
        """Return the id and the address of a broker with this name: the broker with this id, otherwise the broker with
        the next id, otherwise any broker."""
        addresses = self.brokers.get(broker_name)
        if not addresses:
            return None
        # Try the next id first, as the reference does.
        for candidate in (broker_id, broker_id + 1):
            if candidate in addresses:
                return candidate, addresses[candidate]
        return next(iter(sorted(addresses.items())))

    def broker_for(self, queue: MessageQueue, broker_id: int = MASTER_ID) -> tuple[int, str]:
        """Return the id and the address of the broker of a queue, chosen in the same way as by `any_address`.
        Raises ConnectFailed: no route has a broker with this name."""
        found = self.any_address(self.broker_of(queue), broker_id)
        if found is None:
            raise ConnectFailed(queue.broker_name, "no route names a broker of that name", NOT_REGISTERED)
        return found

    async def find_address(self, broker_name: str, topic: str, broker_id: int = MASTER_ID) -> str:
        """Return an address chosen in the same way as by `any_address`. If there is none, refresh the topic's route
        first.
        Raises ConnectFailed: no route has a broker with this name. Raises NoRoute: no name server answered."""
        # The route may be older than the broker. Refresh it only once, because the caller has its own timeout.
        if self.any_address(broker_name, broker_id) is None:
            await self.refresh(topic)
        found = self.any_address(broker_name, broker_id)
        if found is None:
            missing = f"no route of topic {topic} names a broker of that name"
            raise ConnectFailed(broker_name, missing, NOT_REGISTERED)
        return found[1]

    def brokers_of(self, topic: str) -> list[str]:
        route = self._routes.get(topic)
        return [] if route is None else [broker.broker_name for broker in route.broker_datas]

    async def refresh(self, topic: str) -> bool:
        """Fetch the route of one topic. Return True if the topic exists. Raises NoRoute: no name server answered."""
        async with self._fetching:
            await self._fetch(topic)
            return self._exists(topic)

    async def refresh_all(self) -> bool:
        """Fetch the routes of all topics in use. Return True if all watched topics exist.
        Raises NoRoute: no name server answered."""
        for topic in sorted(self._watched.keys() | self._routes.keys()):
            try:
                await self.refresh(topic)
            except (PeerRefused, ProtocolError) as error:
                # One unreadable route must not prevent the refresh of the others.
                _log.warning("cannot refresh the route of topic %s: %s", topic, error)
        return all(self._exists(topic) for topic in self._watched)

    def _exists(self, topic: str) -> bool:
        return topic in self._routes and topic not in self._templates

    async def _fetch(self, topic: str) -> None:
        route = await self._name_servers.route(topic)
        # Ignore a route without brokers, because the known route has more information.
        if route is not None and route.broker_datas:
            self._accept_route(topic, route)
        elif topic in self._templates:  # a broker may be elsewhere by now
            await self._use_template(topic, *self._templates[topic])

    async def _use_template(self, topic: str, template_topic: str, queue_count: int) -> None:
        template = await self._name_servers.route(template_topic)
        if template is None or not template.broker_datas or self._exists(topic):
            return
        self._templates[topic] = template_topic, queue_count
        route = from_template(template, queue_count)
        if route != self._routes.get(topic):
            self._store_route(topic, route)

    def _accept_route(self, topic: str, route: TopicRoute) -> None:
        # Name servers list brokers in the order of their hash maps. Without sorting, an unchanged route would often
        # seem to be new, and each new route causes a heartbeat to all brokers and a rebalance.
        route.queue_datas.sort(key=lambda data: data.broker_name)
        route.broker_datas.sort(key=lambda broker: broker.broker_name)
        if route == self._routes.get(topic) and topic not in self._templates:
            return
        self._templates.pop(topic, None)
        self._store_route(topic, route)
        _log.info("route of topic %s: %d queues", topic, len(subscribe_queues(topic, route)))

    def _end_question(self, topic: str, asking: asyncio.Task[PublishQueues]) -> None:
        """Remove a finished request. Retrieve its error, because there may be no caller that does so."""
        del self._asking[topic]
        if not asking.cancelled():
            asking.exception()

    def _store_route(self, topic: str, route: TopicRoute) -> None:
        assert route.broker_datas, "a stored route has brokers"
        self._routes.pop(topic, None)
        self._routes[topic] = route  # last, because its broker addresses are newer than those of the other routes
        queues = publish_queues(topic, route)
        if queues:
            # Start at a random queue. Otherwise, producers that start together would all send to the same broker.
            self._publish[topic] = PublishQueues(queues, random.randrange(len(queues)))
        else:
            self._publish.pop(topic, None)
        # The queues of a static topic move between brokers, so remove the queues of the old route.
        self._logical = {queue: name for queue, name in self._logical.items() if queue.topic != topic}
        self._logical |= logical_queues(topic, route)
        self.brokers = {name: ids for known in self._routes.values() for name, ids in broker_addresses(known).items()}
        self._seen |= self.brokers.keys()
        self._on_change(topic)
