"""From a topic's route to the queues a client may send to and read from (``topicRouteData2TopicPublishInfo``).

===========================  ==================================================================================
queues to publish to         those of ``orderTopicConf`` exactly as it lists them; else, per writable queue data whose
                             broker has a master: 0 … writeQueueNums - 1; sorted by broker name
queues to subscribe to       per readable queue data: 0 … readQueueNums - 1; no master needed
queues of a static topic     for both: 0 … totalQueues - 1 of broker ``__syslo__global__``, wherever each of them is
===========================  ==================================================================================

The last rule makes members of one group agree on the order of queues while these move (`logical_queues`).

Pure functions and one counter. Who asks the name servers: `runtime`. Source: behaviour.md §7.2, §7.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.bodies.topics import Permission, TopicRoute

__all__ = [
    "LOGICAL_BROKER_PREFIX",
    "MASTER_ID",
    "NOT_REGISTERED",
    "PublishQueues",
    "broker_addresses",
    "from_template",
    "lacks_master",
    "logical_queues",
    "publish_queues",
    "subscribe_queues",
]

MASTER_ID = 0
LOGICAL_BROKER_PREFIX = "__syslo__"
NOT_REGISTERED = "look whether it runs and registers with these name servers"
"""What to do about a broker that is in no route."""


class PublishQueues:
    """The queues a topic is sent to, handed out in turn (``TopicPublishInfo``, ``sendWhichQueue``).
    ``start`` is where the turn begins: a random number spreads producers."""

    __slots__ = ("_next", "queues")

    def __init__(self, queues: Sequence[MessageQueue], start: int = 0) -> None:
        assert queues, "a topic without queues has no route"
        self.queues = tuple(queues)
        self._next = start

    def pick(self, avoid_broker: str | None = None) -> MessageQueue:
        """The next queue, on another broker than ``avoid_broker`` where there is one."""
        chosen = self.first(lambda queue: queue.broker_name != avoid_broker) or self.first(lambda _: True)
        assert chosen is not None, "there is at least one queue"
        return chosen

    def first(self, is_wanted: Callable[[MessageQueue], bool]) -> MessageQueue | None:
        """The next queue that is wanted; the turn moves past those that are not."""
        for _ in self.queues:
            queue = self.queues[self._next % len(self.queues)]
            self._next += 1
            if is_wanted(queue):
                return queue
        return None


def publish_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a topic may be sent to; none when no broker takes writes."""
    order = route.order_topic_conf
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
    """Whether a broker with queues to write to has no master."""
    return not {data.broker_name for data in route.queue_datas if data.perm & Permission.WRITE} <= _with_master(route)


def _with_master(route: TopicRoute) -> set[str]:
    return {broker.broker_name for broker in route.broker_datas if MASTER_ID in broker.broker_addrs}


def subscribe_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a topic may be read from, sorted as rebalancing needs them."""
    physical = {
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        if data.perm & Permission.READ
        for queue_id in range(data.read_queue_nums)
    }
    return sorted(logical_queues(topic, route) or physical)


def logical_queues(topic: str, route: TopicRoute) -> dict[MessageQueue, str]:
    """The queues of a static topic and the broker that each is at; none of another topic. One that no broker claims is
    at a broker that does not exist. Source: remoting.md §4.6.2."""
    queues: dict[MessageQueue, str] = {}
    infos = route.topic_queue_mapping_by_broker
    for info in sorted(infos.values() if isinstance(infos, dict) else (), key=lambda info: info.epoch):
        mock = LOGICAL_BROKER_PREFIX + info.scope.removeprefix("__")
        for number in range(info.total_queues):
            queues.setdefault(MessageQueue(topic, mock, number), f"{LOGICAL_BROKER_PREFIX}none__")
        for number in info.curr_id_map or {}:
            queues[MessageQueue(topic, mock, number)] = info.bname
    return queues


def from_template(template: TopicRoute, queue_count: int) -> TopicRoute:
    """The route an unknown topic is going to have: the template topic's, with at most ``queue_count`` queues.

    Its read count limits it, as the broker creates the topic by the same rule (behaviour.md §3.2).
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
    """Broker name → broker id → address."""
    return {broker.broker_name: dict(broker.broker_addrs) for broker in route.broker_datas}


def _ordered_queues(topic: str, order: str) -> list[MessageQueue]:
    """``broker-a:4;broker-b:2``; what cannot be read is left out."""
    queues: list[MessageQueue] = []
    for part in order.split(";"):
        broker_name, found, count = part.strip().rpartition(":")
        if found and count.isdecimal():
            queues += [MessageQueue(topic, broker_name, queue_id) for queue_id in range(int(count))]
    return queues
