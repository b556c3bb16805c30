"""Connected clients, the running info of consumers, and the check of a group.

Java's commands are ``consumerConnection``, ``producerConnection``, ``producer``, ``consumerStatus``. Clients send
heartbeats only to the brokers of their own topics. Therefore a request is sent to every master, and the answers are
joined. A master that fails does not hide the answers of the other masters.

A group has no troubles (`Verdict`) if

- all its clients have the same subscriptions. They may differ for a moment while a new version is rolled out.
- every queue of its topics belongs to exactly one client. This is not checked for groups that pop or broadcast, and may
  be wrong for a moment after a rebalance.
- no client holds messages for more than a minute without handling one, and in-order consumers have their locks.

Source: behaviour.md §8.15, §9.9; remoting.md §6.4.10, §6.4.12.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.errors import ConnectFailed, PeerRefused, RmqError, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.schemas.clients import (
    ClientConnection,
    ConsumerConnection,
    ConsumerGroupRequest,
    ConsumerRunningInfo,
    MessageQueue,
    ProcessQueueInfo,
    ProducerConnection,
    ProducerGroupRequest,
    ProducerInfo,
    ProducerTable,
    RunningInfoRequest,
)
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.sentences import _

__all__ = [
    "Clients",
    "FleetRow",
    "GroupStatus",
    "ProducerRow",
    "Verdict",
    "fleet",
    "heard",
    "process_queues",
    "tried",
    "verdict",
]

T = TypeVar("T")

_STUCK_MS = 60_000


class ProducerRow(Struct, rename="camel", kw_only=True):
    """One producer at one broker. ``last_update_timestamp`` is the time of its last heartbeat in ms."""

    group: str
    client_id: str
    client_addr: str
    language: str
    version: int
    last_update_timestamp: int
    broker_name: str


class FleetRow(Struct, rename="camel", kw_only=True):
    """One client, with all its roles.

    Attributes:
        version: the number of its protocol version.
        produces, consumes: its groups.
        addresses: the addresses from which it is connected. Several hosts mean that two processes have the same id.
        topics: the topics to which its consumer groups subscribe.
    """

    client_id: str
    language: str
    version: int
    addresses: list[str]
    produces: list[str] = field(default_factory=list)
    consumes: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)

    @property
    def is_doubled(self) -> bool:
        """Return True if clients on several hosts have this id. Such clients take queues from each other."""
        return len({address.rpartition(":")[0] for address in self.addresses}) > 1


class Verdict(Struct, rename="camel"):
    """The troubles of a group, with one sentence for each trouble. A healthy group has no troubles."""

    same_subscription: bool
    troubles: list[str]


class GroupStatus(Struct, rename="camel", kw_only=True):
    """The registration of a group, the running info of each client (None: it did not answer), and the verdict."""

    group: str
    connection: ConsumerConnection
    clients: dict[str, ConsumerRunningInfo | None]
    verdict: Verdict


class Clients:
    """Operations on connected clients. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def consumers(self, group: str, broker: str | None = None) -> ConsumerConnection:
        """Return the registration of a consumer group, with its members.
        Raises PeerRefused with CONSUMER_NOT_ONLINE: no member is connected."""
        answers = await heard(
            (await self._calls.masters(broker=broker)).values(),
            lambda address: self._calls.fetch(
                ConsumerConnection, address, RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(group)
            ),
            expected=ResponseCode.CONSUMER_NOT_ONLINE,
        )
        first, *others = answers.values()
        for other in others:
            first.connection_set += other.connection_set
            first.subscription_table |= other.subscription_table
        first.connection_set = _once(first.connection_set)
        return first

    async def producers(self, group: str, topic: str = "") -> list[ClientConnection]:
        """Return the members of a producer group at all brokers, or at the brokers of a topic.
        Raises UnknownName: no member is connected."""
        asked = await (self._calls.masters_of_topic(topic) if topic else self._calls.masters())
        try:
            answers = await heard(
                asked.values(),
                lambda address: self._calls.fetch(
                    ProducerConnection, address, RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupRequest(group)
                ),
                expected=ResponseCode.SYSTEM_ERROR,
            )
        except PeerRefused as error:
            if error.code != ResponseCode.SYSTEM_ERROR:
                raise
            known = {row.group for row in await self.all_producers()}
            remedy = _("producers that have sent nothing since they started are not known")
            raise UnknownName(_("producer group"), group, _("the cluster"), known, remedy) from None
        return _once(one for answer in answers.values() for one in answer.connection_set)

    async def all_producers(self, broker: str | None = None, cluster: str | None = None) -> list[ProducerRow]:
        """Return every producer at one broker, at the brokers of a cluster, or at all brokers, sorted by group."""
        masters = await self._calls.masters(cluster, broker)
        answers = await self._calls.fan_out(
            masters.values(),
            lambda address: self._calls.fetch(ProducerTable, address, RequestCode.GET_ALL_PRODUCER_INFO),
        )
        rows = [
            _producer_row(group, one, name)
            for name, address in masters.items()
            for group, members in answers[address].data.items()
            for one in members
        ]
        return sorted(rows, key=lambda row: (row.group, row.client_id, row.broker_name))

    async def running(
        self, group: str, client_id: str | None = None, *, stacks: bool = False
    ) -> dict[str, ConsumerRunningInfo | None]:
        """Return the running info of each member of a group, or of one member. ``stacks``: include stack traces.

        The value is None for a member that does not answer. Raises PeerRefused: no client of the group is connected.
        Raises UnknownName: this client is not connected.
        """
        members = [one.client_id for one in (await self.consumers(group)).connection_set]
        if client_id is not None and client_id not in members:
            raise UnknownName("client", client_id, _("group {group}", group=group), members)
        wanted = members if client_id is None else [client_id]
        return await self._calls.fan_out(wanted, lambda member: self._running(group, member, stacks))

    async def status(self, group: str, client_id: str | None = None, *, stacks: bool = False) -> GroupStatus:
        """Return the members of a group, their running infos, and the verdict. Raises the errors of `running`."""
        connection = await self.consumers(group)
        found = await self.running(group, client_id, stacks=stacks)
        queues: set[MessageQueue] = set()
        if client_id is None:
            for topic in connection.subscription_table:
                queues |= await self._queues(topic)
        judged = verdict(connection, found, queues, self._calls.clock.now_ms())
        return GroupStatus(group=group, connection=connection, clients=found, verdict=judged)

    async def _running(self, group: str, client_id: str, stacks: bool) -> ConsumerRunningInfo | None:
        """Return the running info of a client, through the first broker to which it is connected."""
        header, code = RunningInfoRequest(group, client_id, stacks), RequestCode.GET_CONSUMER_RUNNING_INFO
        for address in (await self._calls.masters()).values():
            try:
                return await self._calls.fetch(ConsumerRunningInfo, address, code, header)
            except (PeerRefused, ConnectFailed) as error:
                if isinstance(error, PeerRefused) and error.code == ResponseCode.CONSUME_MSG_TIMEOUT:
                    return None
            except RmqError:
                return None
        return None

    async def _queues(self, topic: str) -> set[MessageQueue]:
        """Return the readable queues of a topic. The result is empty for a topic that does not exist, because a group
        can subscribe to a topic before the topic exists."""
        try:
            route = await self._calls.route(topic)
        except UnknownName:
            return set()
        return {
            MessageQueue(topic, data.broker_name, queue_id)
            for data in route.queue_datas
            if data.perm & Permission.READ
            for queue_id in range(data.read_queue_nums)
        }


def fleet(producers: Iterable[ProducerRow], consumers: Mapping[str, ConsumerConnection]) -> list[FleetRow]:
    """Return all clients sorted by id, from the rows of producers and the members of consumer groups. This function is
    pure."""
    found: dict[str, FleetRow] = {}

    def row(client_id: str, language: str, version: int, address: str) -> FleetRow:
        known = found.get(client_id)
        if known is None:
            known = FleetRow(client_id=client_id, language=language, version=version, addresses=[])
            found[client_id] = known
        if address not in known.addresses:
            known.addresses.append(address)
        return known

    for one in producers:
        client = row(one.client_id, one.language, one.version, one.client_addr)
        if one.group not in client.produces:
            client.produces.append(one.group)
    for group, connection in consumers.items():
        for member in connection.connection_set:
            client = row(member.client_id, member.language, member.version, member.client_addr)
            client.consumes.append(group)
            client.topics = sorted({*client.topics, *connection.subscription_table})
    return [found[client_id] for client_id in sorted(found)]


async def tried(addresses: Iterable[str], asking: Callable[[str], Awaitable[T]]) -> tuple[dict[str, T], list[RmqError]]:
    """Return the successful answers of several peers by address, and the errors of the other peers."""
    listed = list(addresses)
    answers: dict[str, T] = {}
    failures: list[RmqError] = []
    found = await asyncio.gather(*map(asking, listed), return_exceptions=True)
    for address, answer in zip(listed, found, strict=True):
        if isinstance(answer, RmqError):
            failures.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers[address] = answer
    return answers, failures


async def heard(
    addresses: Iterable[str], asking: Callable[[str], Awaitable[T]], *, expected: int | None = None
) -> dict[str, T]:
    """Return the successful answers of several peers by address. If no peer answers, raise the first error. A refusal
    with the ``expected`` code is raised only if there is no other error."""
    answers, failures = await tried(addresses, asking)
    if not answers:
        failures.sort(key=lambda error: isinstance(error, PeerRefused) and error.code == expected)
        raise failures[0] if failures else RmqError(_("no broker to ask: the name servers know no master"))
    return answers


def verdict(
    connection: ConsumerConnection,
    clients: Mapping[str, ConsumerRunningInfo | None],
    queues: Iterable[MessageQueue],
    now_ms: int,
) -> Verdict:
    """Return the verdict on a group. ``queues`` are the queues that its clients must have."""
    known = {client: info for client, info in clients.items() if info is not None}
    troubles = [_("{client} does not answer", client=client) for client in clients if client not in known]
    different = _differences(known)
    troubles += different
    shares = connection.message_model == "CLUSTERING" and connection.consume_type == "CONSUME_PASSIVELY"
    if shares and len(known) == len(clients) and not any(info.mq_pop_table for info in known.values()):
        troubles += _misplaced(known, queues)
    for client, info in known.items():
        in_order = info.properties.get("PROP_CONSUMEORDERLY") == "true"
        troubles += [
            fault
            for queue, held in sorted(info.mq_table.items())
            if (fault := _fault(client, queue, held, in_order=in_order, now_ms=now_ms))
        ]
    return Verdict(not different, troubles)


def _differences(clients: Mapping[str, ConsumerRunningInfo]) -> list[str]:
    """Return a sentence for each difference between the subscriptions of a client and those of the first client."""
    seen = {client: _subscriptions(info) for client, info in clients.items()}
    first, *others = seen or [""]
    return [
        _(
            "{other} subscribes to {topic} with {seen}, {first} with {theirs}",
            other=other,
            topic=topic,
            seen=seen[other].get(topic, _("nothing")),
            first=first,
            theirs=seen[first].get(topic, _("nothing")),
        )
        for other in others
        for topic in sorted(seen[first].keys() | seen[other].keys())
        if seen[first].get(topic) != seen[other].get(topic)
    ]


def _subscriptions(info: ConsumerRunningInfo) -> dict[str, str]:
    return {one.topic: f"{one.expression_type or 'TAG'} {one.sub_string or '*'}" for one in info.subscription_set}


def _misplaced(clients: Mapping[str, ConsumerRunningInfo], queues: Iterable[MessageQueue]) -> list[str]:
    """Return a sentence for each queue that belongs to no client, or to several."""
    owners: dict[MessageQueue, list[str]] = {queue: [] for queue in queues}
    for client, info in clients.items():
        for queue, held in info.mq_table.items():
            if not held.droped:
                owners.setdefault(queue, []).append(client)
    return [
        _("{queue} is with {several}", queue=_queue(queue), several=" and ".join(several) or _("no client"))
        for queue, several in sorted(owners.items())
        if len(several) != 1 and not queue.topic.startswith(RETRY_PREFIX)
    ]


def _fault(client: str, queue: MessageQueue, held: ProcessQueueInfo, *, in_order: bool, now_ms: int) -> str:
    if held.droped:
        return ""
    where = _queue(queue)
    if in_order and not held.locked:
        return _("{client} has no lock of {queue}", client=client, queue=where)
    idle_ms = now_ms - held.last_consume_timestamp
    if held.cached_msg_count and held.last_consume_timestamp and idle_ms > _STUCK_MS:
        return _(
            "{client} has handled nothing for {seconds} s and holds {count} messages of {queue}",
            client=client,
            seconds=idle_ms // 1000,
            count=held.cached_msg_count,
            queue=where,
        )
    return ""


def _queue(queue: MessageQueue) -> str:
    return _("queue {queue} of {topic} on {broker}", queue=queue.queue_id, topic=queue.topic, broker=queue.broker_name)


def _once(connections: Iterable[ClientConnection]) -> list[ClientConnection]:
    """Return each client once, sorted by id. A client may be connected to several brokers."""
    return sorted({one.client_id: one for one in connections}.values(), key=lambda one: one.client_id)


def _producer_row(group: str, one: ProducerInfo, broker_name: str) -> ProducerRow:
    return ProducerRow(
        group=group,
        client_id=one.client_id,
        # Java writes a slash before the address of a socket.
        client_addr=one.remote_ip.removeprefix("/"),
        language=one.language,
        version=one.version,
        last_update_timestamp=one.last_update_timestamp,
        broker_name=broker_name,
    )


def process_queues(info: ConsumerRunningInfo | None) -> list[dict[str, Any]]:
    """Return a row for each queue that a client pulls or pops. This function is pure."""
    if info is None:
        return []
    names = ("topic", "broker", "queue", "offset", "held", "locked", "lastPullMs", "lastConsumeMs")
    rows: list[tuple[Any, ...]] = [
        (*_place(queue), one.commit_offset, one.cached_msg_count, one.locked, one.last_pull_timestamp,
         one.last_consume_timestamp)
        for queue, one in sorted(info.mq_table.items())
    ]  # fmt: skip
    rows += [
        (*_place(queue), None, one.wait_ack_count, False, one.last_pop_timestamp, 0)
        for queue, one in sorted(info.mq_pop_table.items())
    ]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _place(queue: MessageQueue) -> tuple[str, str, int]:
    return queue.topic, queue.broker_name, queue.queue_id
