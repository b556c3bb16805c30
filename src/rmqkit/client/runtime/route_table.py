"""The routes of the topics in use: fetched when first needed, refreshed from time to time, kept when nobody answers.

A topic that no broker has is given the queues of the template topic (TBW102) for sending, so that the broker creates
it; readers get no queues for it until it exists. A route once known is kept when a name server no longer has it, as
the reference does: brokers go on serving without name servers. Loop only. Source: behaviour.md §7.1, §7.2.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import defaultdict
from collections.abc import Callable

from rmqkit.client.runtime.name_servers import NameServers
from rmqkit.client.runtime.routes import (
    MASTER_ID,
    NOT_REGISTERED,
    PublishQueues,
    broker_addresses,
    from_template,
    lacks_master,
    logical_queues,
    publish_queues,
    subscribe_queues,
)
from rmqkit.errors import ClientError, ConnectFailed, NoRoute, PeerRefused, ProtocolError
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.bodies.topics import TopicRoute
from rmqkit.protocol.names import topic_fault

__all__ = ["RouteTable"]

_log = logging.getLogger(__name__)


class RouteTable:
    """Topics, their queues, and where brokers are; ``on_change`` is told the topic whose route is new or different.
    ``brokers`` is broker name → broker id → address, of all routes together."""

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
        """The queues to send to, when they are known already."""
        return self._publish.get(topic)

    def lacks_master(self, topic: str) -> bool:
        """Whether brokers would take messages of a topic if only they had a master, as one that restarts soon will."""
        route = self._routes.get(topic)
        return route is not None and lacks_master(route)

    def has_known(self, broker_name: str) -> bool:
        """Whether a route names this broker, or once named it."""
        return broker_name in self._seen

    async def publish_queues(self, topic: str, template_topic: str, template_queue_count: int) -> PublishQueues:
        """The queues to send to.
        Raises NoRoute: no name server answered, or neither the topic nor the template topic can be written to."""
        asking = self._asking.get(topic)
        if asking is None:  # whoever else wants to know waits for the same answer, or error
            asking = self._asking[topic] = asyncio.create_task(
                self._ask_publish_queues(topic, template_topic, template_queue_count), name=f"route of topic {topic}"
            )
            asking.add_done_callback(functools.partial(self._asked, topic))
        return await asyncio.shield(asking)

    async def _ask_publish_queues(self, topic: str, template_topic: str, template_queue_count: int) -> PublishQueues:
        async with self._fetching:
            if topic not in self._publish:
                await self._fetch(topic)
            if topic not in self._publish:
                await self._use_template(topic, template_topic, template_queue_count)
        known = self._publish.get(topic)
        if known is None:
            raise NoRoute(
                f"no broker takes messages for topic {topic}, asked name servers "
                f"{', '.join(self._name_servers.addresses)}: create the topic, or start a broker with "
                "autoCreateTopicEnable=true"
            )
        return known

    def subscribe_queues(self, topic: str) -> list[MessageQueue]:
        """The queues to read from, sorted; none while the topic does not exist."""
        return subscribe_queues(topic, self._routes[topic]) if self._exists(topic) else []

    async def readable_queues(self, topic: str) -> list[MessageQueue]:
        """The queues to read from, asked for when they are not known.
        Raises ClientError: the topic's name is not legal.
        Raises NoRoute: it does not exist, or no name server answered."""
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
        """The names of all topics there are. Raises NoRoute: no name server answered."""
        return await self._name_servers.topics()

    def watch(self, topic: str, group: str) -> None:
        """Have `refresh_all` look for a topic that a group wants, whether it exists or not."""
        self._watched[topic].add(group)

    def unwatch(self, topic: str, group: str) -> None:
        self._watched[topic].discard(group)
        if not self._watched[topic]:
            del self._watched[topic]

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        return self.brokers.get(broker_name, {}).get(broker_id)

    def broker_of(self, queue: MessageQueue) -> str:
        """The name of the broker that a queue is at: one of a static topic does not say it."""
        return self._logical.get(queue, queue.broker_name) if self._logical else queue.broker_name

    def any_address(self, broker_name: str, broker_id: int = MASTER_ID) -> tuple[int, str] | None:
        """Where the wanted broker is, else the next slave, else any of that name; with the id that was found."""
        addresses = self.brokers.get(broker_name)
        if not addresses:
            return None
        for candidate in (broker_id, broker_id + 1):
            if candidate in addresses:
                return candidate, addresses[candidate]
        return next(iter(sorted(addresses.items())))

    async def find_address(self, broker_name: str, topic: str, broker_id: int = MASTER_ID) -> str:
        """The address as `any_address` has it, after a look at a topic's route if it has none.
        Raises ConnectFailed: no route names a broker of that name. Raises NoRoute: no name server answered."""
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
        """Ask for the route of one topic; whether it exists. Raises NoRoute: no name server answered."""
        async with self._fetching:
            await self._fetch(topic)
            return self._exists(topic)

    async def refresh_all(self) -> bool:
        """Ask for the routes of all topics in use; whether all that are watched exist.
        Raises NoRoute: no name server answered."""
        for topic in sorted(self._watched.keys() | self._routes.keys()):
            try:
                await self.refresh(topic)
            except (PeerRefused, ProtocolError) as error:
                _log.warning("route of topic %s stays as it is: %s", topic, error)
        return all(self._exists(topic) for topic in self._watched)

    def _exists(self, topic: str) -> bool:
        return topic in self._routes and topic not in self._templates

    async def _fetch(self, topic: str) -> None:
        route = await self._name_servers.route(topic)
        if route is not None and route.broker_datas:
            self._take(topic, route)
        elif topic in self._templates:  # a broker may be elsewhere by now
            await self._use_template(topic, *self._templates[topic])

    async def _use_template(self, topic: str, template_topic: str, queue_count: int) -> None:
        template = await self._name_servers.route(template_topic)
        if template is None or not template.broker_datas or self._exists(topic):
            return
        self._templates[topic] = template_topic, queue_count
        route = from_template(template, queue_count)
        if route != self._routes.get(topic):
            self._put(topic, route)

    def _take(self, topic: str, route: TopicRoute) -> None:
        route.queue_datas.sort(key=lambda data: data.broker_name)
        route.broker_datas.sort(key=lambda broker: broker.broker_name)
        if route == self._routes.get(topic) and topic not in self._templates:
            return
        self._templates.pop(topic, None)
        self._put(topic, route)
        _log.info("route of topic %s: %d queues", topic, len(subscribe_queues(topic, route)))

    def _asked(self, topic: str, asking: asyncio.Task[PublishQueues]) -> None:
        """Forget a question that was answered; an error may have nobody left who waits for it."""
        del self._asking[topic]
        if not asking.cancelled():
            asking.exception()

    def _put(self, topic: str, route: TopicRoute) -> None:
        self._routes.pop(topic, None)
        self._routes[topic] = route  # the last one: where it says brokers are is newer than what others say
        queues = publish_queues(topic, route)
        if queues:
            self._publish[topic] = PublishQueues(queues, random.randrange(len(queues)))
        else:
            self._publish.pop(topic, None)
        self._logical = {queue: name for queue, name in self._logical.items() if queue.topic != topic}
        self._logical |= logical_queues(topic, route)
        self.brokers = {name: ids for known in self._routes.values() for name, ids in broker_addresses(known).items()}
        self._seen |= self.brokers.keys()
        self._on_change(topic)
