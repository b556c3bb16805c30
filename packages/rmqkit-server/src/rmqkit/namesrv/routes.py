"""The route table (``RouteInfoManager``): topics, broker names, clusters and which brokers are alive.

===============  ========================================================  ==========================================
table            key → value                                               written by
===============  ========================================================  ==========================================
queues           topic → broker name → queue counts, permission            register, register a topic, unregister,
                                                                           delete a topic, wipe or add write permission
brokers          broker name → cluster, zone, addresses by id (0 = master) register, unregister
clusters         cluster → broker names                                    register, unregister
live             (cluster, address) → last sign of life, data version, …   register, data-version query, heartbeat
filter servers   (cluster, address) → addresses; legacy, empty since 5.0   register, unregister
mappings         topic → broker name → queues of a static topic            register; gone with the queues
===============  ========================================================  ==========================================

Everything is memory only and touched on the loop only; name servers never talk to each other. A broker is removed when
its connection closes, when it says so, or when it was silent for its time-out (120 s unless it asked for another).

Only one broker of a name writes queues: its master, or the *prime slave*, the lowest id while there is no master.
Queues that a prime slave with acting master writes, or that a leaving master leaves behind, lose their write bit: the
group can be read from, and written to again when a master registers.

A registration costs O(topics sent); wiping and leaving cost O(topics known).

What one client sees of a route is a pure function below the table. `with_acting_masters`: the lowest id of a group that
has lost its master is shown under id 0, so that clients read from it and brokers do the master's special services, but
only while its queues are not writable; brokers look up `SYNC_BROKER_MEMBER_PREFIX` topics to learn the true ids.
`in_zone` keeps a client near: groups of other zones are left out, unless they have no master, so that the slaves of a
dead master are read from everywhere. Acting masters are shown first, so their groups count as having one.
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
    """The state of a registered broker process; ``seen_ms`` is the monotonic time of its last sign of life."""

    broker_name: str
    seen_ms: float
    timeout_ms: int
    data_version: DataVersion
    connection: object
    ha_address: str | None


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """One REGISTER_BROKER. None stands for the usual ``timeout_ms``, for ``enable_acting_master`` from a broker too old
    to know of it, and for ``filter_servers`` that stay as they are."""

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
        """Return where the tables have it."""
        return self.cluster, self.address


@dataclass(frozen=True, slots=True)
class Departure:
    """A broker process that leaves; without ``connection`` it said good-bye itself.
    One that has registered over another connection than this since stays."""

    cluster: str
    address: str
    broker_name: str
    connection: object = None


@dataclass(frozen=True, slots=True)
class MemberChange:
    """The lowest id of a broker name changed: who is left or there now, by id.
    ``offline_address`` is who went away, or None when somebody joined; ``ha_address`` belongs to who joined."""

    broker_name: str
    members: dict[int, str]
    offline_address: str | None
    ha_address: str | None


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of a registration: ``master`` is address and HA address of the living master, for a slave.

    ``change`` is the change about which the members of the group may be notified.
    """

    is_accepted: bool = True
    master: tuple[str, str | None] | None = None
    change: MemberChange | None = None


@dataclass(slots=True)
class _Changes:
    """Broker names that lost their last address, and those that lost another one."""

    removed: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)


class RouteTable:
    """The tables and their transitions; loop only. What look-ups return is shared: read it, do not change it."""

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
        """Take in a broker and, from a master or prime slave, its topics.
        A table of one topic from a broker id that is not known yet is refused: an increment needs the whole first. So
        is, silently, an id that a living broker with a newer state version holds. With ``forget_missing`` topics that
        the broker had and no longer sends are removed, by a whole table only: every broker has SELF_TEST_TOPIC, and an
        increment has not. (Apache's forgets with any, so its brokers need ``enableSingleTopicRegister`` then.)"""
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
        """`register`, topic by topic, for others to have their turn; a broker that leaves meanwhile has left."""
        if self._is_increment_without_base(registration):
            return Registered(is_accepted=False)
        self._leave_former_name(registration)
        # From here to the topics nothing waits: who asks in between sees the group before or after, never half of it.
        addresses = self._broker_entry(registration).broker_addrs
        is_new_lowest = bool(addresses) and registration.broker_id < min(addresses)
        # A broker whose id changed, as a slave's that became master, must not be found under both.
        for other_id in [i for i, address in addresses.items() if address == registration.address]:
            if other_id != registration.broker_id:
                del addresses[other_id]
        if self._is_outdated(registration, addresses):
            self._live.pop(registration.key, None)
            return Registered()
        assert list(addresses.values()).count(registration.address) <= 1, "one address has one id"
        is_first = registration.broker_id not in addresses
        addresses[registration.broker_id] = registration.address
        # Before it is replaced: its version says whether the topics have to be taken over.
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
        # A copy: the notice goes out later, and names the group as it is now.
        change = MemberChange(registration.broker_name, dict(addresses), None, registration.ha_address)
        return Registered(master=self._master_for(registration), change=change if is_new_lowest else None)

    def register_topic(self, topic: str, queue_datas: Iterable[QueueData]) -> None:
        """Merge the queues of one topic (REGISTER_TOPIC_IN_NAMESRV).
        The first broker name that is not registered ends it; a topic that is new is then not added at all."""
        known = self._queues.get(topic)
        queues = {} if known is None else known
        for queue in queue_datas:
            if queue.broker_name not in self._brokers:
                return
            queues[queue.broker_name] = queue
        if queues:
            self._queues[topic] = queues

    def living(self, address: str) -> list[LiveBroker]:
        """The broker processes that are known by an address, in all clusters."""
        return [live for (_, at), live in self._live.items() if at == address]

    def refresh(self, key: BrokerKey) -> DataVersion | None:
        """Note a sign of life of a known broker; returns its stored data version."""
        live = self._live.get(key)
        if live is None:
            return None
        live.seen_ms = self._monotonic_ms()  # any sign will do: 4.9 brokers have no heartbeats, and ask for versions
        return live.data_version

    # -- leaving

    def unregister(self, departures: Iterable[Departure]) -> list[MemberChange]:
        """Forget brokers; their queues go when the last address of a broker name has gone.
        Returns the groups with acting master whose lowest id went away, for those who are left."""
        changes = _Changes()
        lowest_gone: list[MemberChange] = []
        for departure in departures:
            live = self._live.get((departure.cluster, departure.address))
            if departure.connection is not None and (live is None or live.connection is not departure.connection):
                continue  # it came back over another connection before its turn to be forgotten
            change = self._leave(departure, changes)
            if change is not None:
                lowest_gone.append(change)
        self._clean_queues(changes)
        return [change for change in lowest_gone if change.broker_name in self._brokers]

    def silent(self) -> list[Departure]:
        """The brokers that were silent for longer than their time-out."""
        now_ms = self._monotonic_ms()
        return self._departures(lambda live: live.seen_ms + live.timeout_ms < now_ms)

    def registered_over(self, connection: object) -> list[Departure]:
        """The brokers that registered over a connection."""
        return self._departures(lambda live: live.connection is connection)

    # -- look-up

    def route(self, topic: str) -> TopicRoute | None:
        """Queues and brokers of a topic; None when nobody that is known has it."""
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
        """The addresses of a broker name by id; empty when it is not known."""
        broker = self._brokers.get(broker_name)
        return broker.broker_addrs if broker is not None else {}

    def topics(self) -> list[str]:
        return sorted(self._queues)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """The topics that brokers of a cluster have."""
        names = self._clusters.get(cluster, set())
        return sorted(topic for topic, queues in self._queues.items() if not names.isdisjoint(queues))

    def topics_with_flags(self, wanted: Callable[[int], bool]) -> list[str]:
        """The topics whose flags, on the broker that has been known longest, are as wanted."""
        return sorted(
            topic for topic, queues in self._queues.items() if wanted(next(iter(queues.values())).topic_sys_flag)
        )

    # -- what operators change

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, on all brokers or on those of a cluster; until a broker registers it again."""
        names = set(self._queues.get(topic, ())) if cluster is None else self._clusters.get(cluster, set())
        self._drop_queues(topic, names)

    def wipe_write_perm(self, broker_name: str) -> int:
        """Take the write bit from every topic on a broker; returns how many it has."""
        return self._change_perm(broker_name, lambda perm: perm & ~Permission.WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Make every topic on a broker readable and writable; returns how many it has."""
        return self._change_perm(broker_name, lambda perm: _READ_WRITE)

    # -- inside: registration

    def _is_increment_without_base(self, registration: BrokerRegistration) -> bool:
        is_known = registration.broker_id in self.members(registration.broker_name)
        return not is_known and len(registration.topics.topic_config_table) == 1

    def _leave_former_name(self, registration: BrokerRegistration) -> None:
        """One address has one broker name: nothing else would remove the former one."""
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
        """Return True if another living process holds this id with a newer state version."""
        # The state version counts elections of a controller: the former master may register again after the new master.
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
        # An acting master takes no messages: producers see its queues as unwritable, regardless of its table.
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
            return None  # it was no member: whoever says good-bye for it changes nothing
        lowest = min(addresses)
        for broker_id in gone:
            del addresses[broker_id]
        if addresses:
            changes.reduced.add(name)
            if lowest in addresses or not broker.enable_acting_master:
                return None
            return MemberChange(name, dict(addresses), departure.address, None)
        # Of one batch both may be true of a name: first it lost one address, then the last.
        assert not broker.broker_addrs, "a broker name goes with its last address"
        changes.removed.add(name)
        changes.reduced.discard(name)
        del self._brokers[name]
        self._leave_clusters(name)
        assert all(self._clusters.values()), "a cluster without brokers is forgotten with its last one"
        return None

    def _leave_clusters(self, broker_name: str) -> None:
        for cluster, names in list(self._clusters.items()):
            names.discard(broker_name)
            if not names:
                del self._clusters[cluster]

    def _clean_queues(self, changes: _Changes) -> None:
        assert changes.removed.isdisjoint(changes.reduced), "a broker name is left, or some of its addresses are"
        assert changes.removed.isdisjoint(self._brokers), "queues go after the broker names that had them"
        masterless = [
            name
            for name in changes.reduced
            if self._brokers[name].enable_acting_master and MASTER_ID not in self._brokers[name].broker_addrs
        ]
        # Its slave goes on, and takes no messages: producers must not wait for their time-out to learn that.
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
        # An empty topic is no topic: its route would be one without brokers, which clients take for a broken cluster.
        if not queues:
            self._queues.pop(topic, None)
        if not mappings:
            self._mappings.pop(topic, None)

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        count = 0
        for queues in self._queues.values():
            queue = queues.get(broker_name)
            if queue is not None:
                # Replaced, not changed: a route that was handed out may still be encoded.
                queues[broker_name] = msgspec.structs.replace(queue, perm=change(queue.perm))
                count += 1
        return count

    def _filter_servers_of(self, brokers: Iterable[BrokerData]) -> dict[str, list[str]]:
        if not self._filter_servers:
            return {}
        keys = [(broker.cluster, address) for broker in brokers for address in broker.broker_addrs.values()]
        return {key[1]: self._filter_servers[key] for key in keys if key in self._filter_servers}


def _writes_queues(registration: BrokerRegistration, addresses: Mapping[int, str]) -> bool:
    """Return True if the registrant is its group's master or prime slave."""
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
    """The route with the lowest id of each masterless, unwritable group that acts as master under id 0."""
    if topic.startswith(SYNC_BROKER_MEMBER_PREFIX):
        return route  # brokers ask by it who is there: they want true ids
    unwritable = {queue.broker_name for queue in route.queue_datas if not queue.perm & Permission.WRITE}
    brokers = [_acting(broker) if broker.broker_name in unwritable else broker for broker in route.broker_datas]
    return msgspec.structs.replace(route, broker_datas=brokers)


def in_zone(route: TopicRoute, zone_name: str) -> TopicRoute:
    """The route without the groups that have their master in another zone."""
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
