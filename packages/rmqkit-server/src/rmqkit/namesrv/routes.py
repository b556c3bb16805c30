"""The route table (``RouteInfoManager``): topics, broker names, clusters and live brokers.

===============  ========================================================  ==========================================
table            key → value                                               written by
===============  ========================================================  ==========================================
queues           topic → broker name → queue counts, permission            register, register a topic, unregister,
                                                                           delete a topic, wipe or add write permission
brokers          broker name → cluster, zone, addresses by id (0 = master) register, unregister
clusters         cluster → broker names                                    register, unregister
live             (cluster, address) → last request, data version, …        register, data-version query, heartbeat
filter servers   (cluster, address) → addresses; legacy, empty since 5.0   register, unregister
mappings         topic → broker name → queues of a static topic            register; gone with the queues
===============  ========================================================  ==========================================

The tables are only in memory, and used only on the loop; name servers do not communicate with each other. A broker is
removed when its connection closes, when it unregisters, or when it was silent for its timeout (default 120 s).

Only one broker of a name sets queues: its master, or without a master the *prime slave*, which has the lowest id. If
acting masters are enabled, queues lose their write bit when a prime slave sets them or the master leaves. The group can
then only be read, until a master registers.

A registration costs O(sent topics); wiping permissions and leaving cost O(known topics).

Pure functions adapt a route for a client. `with_acting_masters` shows the lowest id of a group without a master as id
0, while the group's queues are not writable. Clients then read from this broker, and it does the master's special work.
Brokers query `SYNC_BROKER_MEMBER_PREFIX` topics for the real ids. `in_zone` removes the groups of other zones. It does
not remove a group without a master, so that clients of all zones can read from the slaves of a dead master. Acting
masters are applied first, so that a group with an acting master counts as a group with a master.
Source: behaviour.md §1.2–§1.7; remoting.md §10.2.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from rmqkit.protocol.names import SELF_TEST_TOPIC, SYNC_BROKER_MEMBER_PREFIX
from rmqkit.protocol.schemas.topics import (
    BrokerData,
    ClusterInfo,
    DataVersion,
    Permission,
    QueueData,
    TopicConfig,
    TopicConfigTable,
    TopicQueueMappingInfo,
    TopicRoute,
)

BROKER_TIMEOUT_MS = 120_000
MASTER_ID = 0

# Cluster and address of one broker process.
BrokerKey = tuple[str, str]

_READ_WRITE = int(Permission.READ | Permission.WRITE)


@dataclass(slots=True)
class LiveBroker:
    """The state of a registered broker process; ``seen_ms`` is the monotonic time of its last request."""

    broker_name: str
    seen_ms: float
    timeout_ms: int
    data_version: DataVersion
    connection: object
    ha_address: str | None


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """One REGISTER_BROKER. If ``timeout_ms`` is None, the default is used. ``enable_acting_master`` is None for old
    brokers. If ``filter_servers`` is None, the stored addresses do not change."""

    cluster: str
    address: str
    broker_name: str
    broker_id: int
    ha_address: str | None
    timeout_ms: int | None
    enable_acting_master: bool | None
    topics: TopicConfigTable
    connection: object
    filter_servers: list[str] | None = None
    zone_name: str | None = None

    @property
    def key(self) -> BrokerKey:
        """Key of the broker in the tables."""
        return self.cluster, self.address


@dataclass(frozen=True, slots=True)
class Departure:
    """A broker process that leaves. ``connection``: the connection of its registration; None if it has unregistered.
    A broker that has registered again, over another connection, is not removed."""

    cluster: str
    address: str
    broker_name: str
    connection: object = None


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A change of the lowest id of a broker name, with the remaining or new members by id.
    ``offline_address`` is the broker that left, or None if a broker joined; ``ha_address`` is the HA address of a
    broker that joined."""

    broker_name: str
    members: dict[int, str]
    offline_address: str | None
    ha_address: str | None


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of a registration. ``master`` is address and HA address of the live master, for a slave.

    ``change`` is a change of the group's lowest id. Members may be notified of the change.
    """

    is_accepted: bool = True
    master: tuple[str, str | None] | None = None
    change: MemberChange | None = None


@dataclass(slots=True)
class _Changes:
    """The broker names that lost their last address, and the broker names that lost another address."""

    removed: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)


class RouteTable:
    """The tables and their transitions. Use it only on the event loop. Callers must not change returned objects, which
    are shared."""

    def __init__(self, monotonic_ms: Callable[[], float]) -> None:
        self._monotonic_ms = monotonic_ms
        self._queues: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[BrokerKey, LiveBroker] = {}
        self._filter_servers: dict[BrokerKey, list[str]] = {}
        self._mappings: dict[str, dict[str, TopicQueueMappingInfo]] = {}

    # -- registration

    def register(self, registration: BrokerRegistration, *, forget_missing: bool = False) -> Registered:
        """Register a broker and, if it is a master or prime slave, its topics.
        A table with one topic from an unknown broker id is refused: an increment needs a full table first. A
        registration is ignored if another live broker has the same id and a newer state version. With
        ``forget_missing`` a full table removes the broker's topics that are not in the table. A full table contains
        SELF_TEST_TOPIC, an increment does not. (Apache's name server removes topics with any table, so its brokers then
        need ``enableSingleTopicRegister``.)"""
        steps = self.register_in_steps(registration, forget_missing=forget_missing)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                registered: Registered = done.value
                return registered

    def register_in_steps(
        self, registration: BrokerRegistration, *, forget_missing: bool = False
    ) -> Generator[None, None, Registered]:
        """Register like `register`, but yield after each topic, so that other tasks can run. If the broker leaves
        meanwhile, the registration stops."""
        if self._is_increment_without_base(registration):
            return Registered(is_accepted=False)
        self._leave_former_name(registration)
        # No yield from here to the topics, so a concurrent query sees the old or the new group, never a mixture.
        addresses = self._broker_entry(registration).broker_addrs
        is_new_lowest = bool(addresses) and registration.broker_id < min(addresses)
        # A broker whose id has changed (a slave that became master) must not have two ids.
        for other_id in [i for i, address in addresses.items() if address == registration.address]:
            if other_id != registration.broker_id:
                del addresses[other_id]
        if self._is_outdated(registration, addresses):
            self._live.pop(registration.key, None)
            return Registered()
        assert list(addresses.values()).count(registration.address) <= 1, "one address has one id"
        is_first = registration.broker_id not in addresses
        addresses[registration.broker_id] = registration.address
        # The old entry's data version shows if the topics have changed.
        before = self._live.get(registration.key)
        live = self._live[registration.key] = LiveBroker(
            broker_name=registration.broker_name,
            seen_ms=self._monotonic_ms(),
            timeout_ms=BROKER_TIMEOUT_MS if registration.timeout_ms is None else registration.timeout_ms,
            data_version=registration.topics.data_version,
            connection=registration.connection,
            ha_address=registration.ha_address,
        )
        if _writes_queues(registration, addresses):
            is_same = before is not None and before.data_version == registration.topics.data_version
            overwrite = is_first or not is_same
            for _ in self._enter_topics(registration, overwrite=overwrite, forget_missing=forget_missing):
                yield
                # The broker left, or registered again, in between: the rest of this registration is outdated.
                if self._live.get(registration.key) is not live:
                    return Registered()
        self._enter_filter_servers(registration)
        # A copy, because the notice is sent later, and must contain the current group.
        change = MemberChange(registration.broker_name, dict(addresses), None, registration.ha_address)
        return Registered(master=self._master_for(registration), change=change if is_new_lowest else None)

    def register_topic(self, topic: str, queue_datas: Iterable[QueueData]) -> None:
        """Merge the queues of one topic (REGISTER_TOPIC_IN_NAMESRV).
        Stops at the first broker name that is not registered; a new topic is then not added."""
        known = self._queues.get(topic)
        queues = {} if known is None else known
        for queue in queue_datas:
            if queue.broker_name not in self._brokers:
                return
            queues[queue.broker_name] = queue
        if queues:
            self._queues[topic] = queues

    def living(self, address: str) -> list[LiveBroker]:
        """Return the broker processes with an address, in all clusters."""
        return [live for (_, at), live in self._live.items() if at == address]

    def refresh(self, key: BrokerKey) -> DataVersion | None:
        """Record that a known broker is alive, and return its stored data version."""
        live = self._live.get(key)
        if live is None:
            return None
        live.seen_ms = self._monotonic_ms()  # 4.9 brokers send version queries instead of heartbeats
        return live.data_version

    # -- leaving

    def unregister(self, departures: Iterable[Departure]) -> list[MemberChange]:
        """Remove brokers; the queues of a broker name are removed with its last address.
        Return a change for each group with acting masters whose lowest id has left, to notify the remaining brokers."""
        changes = _Changes()
        lowest_gone: list[MemberChange] = []
        for departure in departures:
            live = self._live.get((departure.cluster, departure.address))
            if departure.connection is not None and (live is None or live.connection is not departure.connection):
                continue  # the broker has registered over another connection meanwhile
            change = self._leave(departure, changes)
            if change is not None:
                lowest_gone.append(change)
        self._clean_queues(changes)
        return [change for change in lowest_gone if change.broker_name in self._brokers]

    def silent(self) -> list[Departure]:
        """Return the brokers that were silent for longer than their timeout."""
        now_ms = self._monotonic_ms()
        return self._departures(lambda live: live.seen_ms + live.timeout_ms < now_ms)

    def registered_over(self, connection: object) -> list[Departure]:
        """Return the brokers that registered over a connection."""
        return self._departures(lambda live: live.connection is connection)

    # -- look-up

    def route(self, topic: str) -> TopicRoute | None:
        """Return queues and brokers of a topic, or None if no known broker has the topic."""
        queues = self._queues.get(topic)
        if not queues:
            return None
        brokers = [self._brokers[name] for name in queues if name in self._brokers]
        if not brokers:
            return None
        return TopicRoute(
            queue_datas=list(queues.values()),
            broker_datas=brokers,
            filter_server_table=self._filter_servers_of(brokers),
            topic_queue_mapping_by_broker=self._mappings.get(topic, UNSET),
        )

    def clusters(self) -> ClusterInfo:
        return ClusterInfo(
            broker_addr_table=dict(self._brokers),
            cluster_addr_table={cluster: sorted(names) for cluster, names in self._clusters.items()},
        )

    def members(self, broker_name: str) -> Mapping[int, str]:
        """Return the addresses of a broker name by id; empty if the name is unknown."""
        broker = self._brokers.get(broker_name)
        return broker.broker_addrs if broker is not None else {}

    def topics(self) -> list[str]:
        return sorted(self._queues)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the topics on brokers of a cluster."""
        names = self._clusters.get(cluster, set())
        return sorted(topic for topic, queues in self._queues.items() if not names.isdisjoint(queues))

    def topics_with_flags(self, wanted: Callable[[int], bool]) -> list[str]:
        """Return the topics whose flags, on the broker that registered first, satisfy ``wanted``."""
        return sorted(
            topic for topic, queues in self._queues.items() if wanted(next(iter(queues.values())).topic_sys_flag)
        )

    # -- changes by operators

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic from all brokers, or from the brokers of a cluster, until a broker registers it again."""
        names = set(self._queues.get(topic, ())) if cluster is None else self._clusters.get(cluster, set())
        self._drop_queues(topic, names)

    def wipe_write_perm(self, broker_name: str) -> int:
        """Remove the write bit of every topic on a broker, and return the number of topics."""
        return self._change_perm(broker_name, lambda perm: perm & ~Permission.WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Make every topic on a broker readable and writable, and return the number of topics."""
        return self._change_perm(broker_name, lambda perm: _READ_WRITE)

    # -- inside: registration

    def _is_increment_without_base(self, registration: BrokerRegistration) -> bool:
        is_known = registration.broker_id in self.members(registration.broker_name)
        return not is_known and len(registration.topics.topic_config_table) == 1

    def _leave_former_name(self, registration: BrokerRegistration) -> None:
        """Remove the former broker name of an address, because an address has only one name."""
        live = self._live.get(registration.key)
        if live is not None and live.broker_name != registration.broker_name:
            self.unregister([Departure(registration.cluster, registration.address, live.broker_name)])

    def _broker_entry(self, registration: BrokerRegistration) -> BrokerData:
        self._clusters.setdefault(registration.cluster, set()).add(registration.broker_name)
        broker = self._brokers.get(registration.broker_name)
        if broker is None:
            broker = BrokerData(cluster=registration.cluster, broker_name=registration.broker_name)
            self._brokers[registration.broker_name] = broker
        broker.enable_acting_master = bool(registration.enable_acting_master)
        broker.zone_name = UNSET if registration.zone_name is None else registration.zone_name
        return broker

    def _is_outdated(self, registration: BrokerRegistration, addresses: Mapping[int, str]) -> bool:
        """Return True if another live process has this id with a newer state version."""
        # The state version counts elections by a controller: the former master may register after the new master.
        holder = addresses.get(registration.broker_id)
        if holder is None or holder == registration.address:
            return False
        live = self._live.get((registration.cluster, holder))
        return live is not None and live.data_version.state_version > registration.topics.data_version.state_version

    def _enter_topics(
        self, registration: BrokerRegistration, *, overwrite: bool, forget_missing: bool
    ) -> Iterator[None]:
        name, table = registration.broker_name, registration.topics.topic_config_table
        mappings = registration.topics.topic_queue_mapping_info_map or {}
        if forget_missing and not mappings and SELF_TEST_TOPIC in table:
            for topic in [topic for topic, queues in self._queues.items() if name in queues and topic not in table]:
                self._drop_queues(topic, {name})
                yield
        # An acting master accepts no messages, so its queues are not writable, even if its table differs.
        is_acting = registration.broker_id != MASTER_ID and bool(registration.enable_acting_master)
        for topic, config in table.items():
            queues = self._queues.setdefault(topic, {})
            if overwrite or name not in queues:
                queues[name] = _queue_data(name, config, config.perm & ~Permission.WRITE if is_acting else config.perm)
            yield
        if overwrite:
            for topic, mapping in mappings.items():
                self._mappings.setdefault(topic, {})[mapping.bname] = mapping
                yield

    def _enter_filter_servers(self, registration: BrokerRegistration) -> None:
        if registration.filter_servers:
            self._filter_servers[registration.key] = registration.filter_servers
        elif registration.filter_servers is not None:
            self._filter_servers.pop(registration.key, None)

    def _master_for(self, registration: BrokerRegistration) -> tuple[str, str | None] | None:
        address = self.members(registration.broker_name).get(MASTER_ID)
        live = self._live.get((registration.cluster, address)) if address is not None else None
        if address is None or live is None or registration.broker_id == MASTER_ID:
            return None
        return address, live.ha_address

    # -- inside: leaving

    def _departures(self, leaves: Callable[[LiveBroker], bool]) -> list[Departure]:
        return [
            Departure(cluster, address, live.broker_name, live.connection)
            for (cluster, address), live in self._live.items()
            if leaves(live)
        ]

    def _leave(self, departure: Departure, changes: _Changes) -> MemberChange | None:
        key = departure.cluster, departure.address
        live = self._live.pop(key, None)
        self._filter_servers.pop(key, None)
        name = departure.broker_name if live is None else live.broker_name
        broker = self._brokers.get(name)
        addresses = broker.broker_addrs if broker is not None else {}
        gone = [broker_id for broker_id, address in addresses.items() if address == departure.address]
        if broker is None or not gone:
            return None  # the address is not a member
        lowest = min(addresses)
        for broker_id in gone:
            del addresses[broker_id]
        if addresses:
            changes.reduced.add(name)
            if lowest in addresses or not broker.enable_acting_master:
                return None
            return MemberChange(name, dict(addresses), departure.address, None)
        # In one batch, a name may first lose one address, and then its last address.
        assert not broker.broker_addrs, "a removed broker name has no address"
        changes.removed.add(name)
        changes.reduced.discard(name)
        del self._brokers[name]
        self._leave_clusters(name)
        assert all(self._clusters.values()), "every cluster has a broker"
        return None

    def _leave_clusters(self, broker_name: str) -> None:
        for cluster, names in list(self._clusters.items()):
            names.discard(broker_name)
            if not names:
                del self._clusters[cluster]

    def _clean_queues(self, changes: _Changes) -> None:
        assert changes.removed.isdisjoint(changes.reduced), "a broker name is either removed or reduced"
        assert changes.removed.isdisjoint(self._brokers), "removed broker names are not in the table"
        masterless = [
            name
            for name in changes.reduced
            if self._brokers[name].enable_acting_master and MASTER_ID not in self._brokers[name].broker_addrs
        ]
        # The slave continues, but accepts no messages. Without this change producers would notice only by timeouts.
        for name in masterless:
            self.wipe_write_perm(name)
        if changes.removed:
            for topic in list(self._queues):
                self._drop_queues(topic, changes.removed)

    # -- inside: queues

    def _drop_queues(self, topic: str, broker_names: Set[str]) -> None:
        queues = self._queues.get(topic, {})
        mappings = self._mappings.get(topic, {})
        for name in broker_names:
            queues.pop(name, None)
            mappings.pop(name, None)
        # Remove a topic without queues: clients would treat its route without brokers as a broken cluster.
        if not queues:
            self._queues.pop(topic, None)
        if not mappings:
            self._mappings.pop(topic, None)

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        count = 0
        for queues in self._queues.values():
            queue = queues.get(broker_name)
            if queue is not None:
                # Replace the object instead of changing it: a returned route may still be encoded.
                queues[broker_name] = msgspec.structs.replace(queue, perm=change(queue.perm))
                count += 1
        return count

    def _filter_servers_of(self, brokers: Iterable[BrokerData]) -> dict[str, list[str]]:
        if not self._filter_servers:
            return {}
        keys = [(broker.cluster, address) for broker in brokers for address in broker.broker_addrs.values()]
        return {key[1]: self._filter_servers[key] for key in keys if key in self._filter_servers}


def _writes_queues(registration: BrokerRegistration, addresses: Mapping[int, str]) -> bool:
    """Return True if the broker is the master or prime slave of its group."""
    if registration.broker_id == MASTER_ID:
        return True
    return registration.enable_acting_master is not None and registration.broker_id == min(addresses)


def _queue_data(broker_name: str, config: TopicConfig, perm: int) -> QueueData:
    return QueueData(
        broker_name=broker_name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=int(perm),
        topic_sys_flag=config.topic_sys_flag,
    )


def with_acting_masters(topic: str, route: TopicRoute) -> TopicRoute:
    """Return the route with acting masters: in each unwritable group without a master, the lowest id becomes id 0."""
    if topic.startswith(SYNC_BROKER_MEMBER_PREFIX):
        return route  # brokers query this topic for the real ids
    unwritable = {queue.broker_name for queue in route.queue_datas if not queue.perm & Permission.WRITE}
    brokers = [_acting(broker) if broker.broker_name in unwritable else broker for broker in route.broker_datas]
    return msgspec.structs.replace(route, broker_datas=brokers)


def in_zone(route: TopicRoute, zone_name: str) -> TopicRoute:
    """Return the route without the groups whose master is in another zone."""
    left_out = [broker for broker in route.broker_datas if not _is_near(broker, zone_name)]
    names = {broker.broker_name for broker in left_out}
    addresses = {address for broker in left_out for address in broker.broker_addrs.values()}
    servers = route.filter_server_table
    return msgspec.structs.replace(
        route,
        broker_datas=[broker for broker in route.broker_datas if broker.broker_name not in names],
        queue_datas=[queue for queue in route.queue_datas if queue.broker_name not in names],
        filter_server_table={address: servers[address] for address in servers if address not in addresses},
    )


def _acting(broker: BrokerData) -> BrokerData:
    addresses = broker.broker_addrs
    if not addresses or MASTER_ID in addresses or not broker.enable_acting_master:
        return broker
    lowest = min(addresses)
    shown = {MASTER_ID if broker_id == lowest else broker_id: address for broker_id, address in addresses.items()}
    return msgspec.structs.replace(broker, broker_addrs=shown)


def _is_near(broker: BrokerData, zone_name: str) -> bool:
    if MASTER_ID not in broker.broker_addrs:
        return True
    return isinstance(broker.zone_name, str) and broker.zone_name.lower() == zone_name.lower()
