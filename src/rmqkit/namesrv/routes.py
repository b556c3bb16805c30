"""The route table (``RouteInfoManager``): topics, broker names, clusters and which brokers are alive.

=============  ==========================================================  ==========================================
table          key → value                                                 written by
=============  ==========================================================  ==========================================
queues         topic → broker name → queue counts, permission              register, unregister
brokers        broker name → cluster and addresses by id (0 = master)      register, unregister
clusters       cluster → broker names                                      register, unregister
live           (cluster, address) → last sign of life, data version, …     register, data-version query, heartbeat
=============  ==========================================================  ==========================================

Everything is memory only and touched on the loop only; name servers never talk to each other. A broker is removed when
its connection closes, when it says so, or when it was silent for its time-out (120 s unless it asked for another).
Source: behaviour.md §1.2–1.6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rmqkit.protocol.bodies.topics import (
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicConfigTable,
    TopicRoute,
)

__all__ = ["BROKER_TIMEOUT_MS", "MASTER_ID", "BrokerKey", "LiveBroker", "Registration", "RouteTable"]

BROKER_TIMEOUT_MS = 120_000
MASTER_ID = 0

BrokerKey = tuple[str, str]
"""Cluster and address of one broker process."""


@dataclass(slots=True)
class LiveBroker:
    """What is known of a broker process that registered.

    Attributes:
        broker_name, broker_id: what it registered as.
        seen_ms: monotonic time of its last sign of life.
        timeout_ms: how long it may be silent.
        connection: the connection it registered over.
    """

    broker_name: str
    broker_id: int
    seen_ms: float
    timeout_ms: int
    data_version: DataVersion
    connection: object
    ha_address: str | None


@dataclass(frozen=True, slots=True)
class Registration:
    """One REGISTER_BROKER."""

    cluster: str
    address: str
    broker_name: str
    broker_id: int
    ha_address: str | None
    timeout_ms: int | None
    enable_acting_master: bool | None
    topics: TopicConfigTable
    connection: object


class RouteTable:
    """The tables and their transitions; loop only.

    Args:
        monotonic_ms: the clock for signs of life.
    """

    def __init__(self, monotonic_ms: Callable[[], float]) -> None:
        self._monotonic_ms = monotonic_ms
        self._queues: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[BrokerKey, LiveBroker] = {}

    # -- registration

    def register(self, registration: Registration) -> bool:
        """Take in a broker and, from a master, its topics.

        Returns:
            False when it was refused: a table of one topic only from a broker id that is not known yet.
        """
        broker = self._broker_entry(registration)
        addresses = broker.broker_addrs
        for other_id in [i for i, address in addresses.items() if address == registration.address]:
            if other_id != registration.broker_id:
                del addresses[other_id]
        if self._is_outdated(registration, addresses):
            return True
        key = (registration.cluster, registration.address)
        table = registration.topics.topic_config_table
        if registration.broker_id not in addresses and len(table) == 1:
            return False
        is_first = registration.broker_id not in addresses
        addresses[registration.broker_id] = registration.address
        if registration.broker_id == MASTER_ID:
            known = self._live.get(key)
            is_changed = known is None or known.data_version != registration.topics.data_version
            self._take_topics(registration.broker_name, table, overwrite=is_first or is_changed)
        self._live[key] = LiveBroker(
            broker_name=registration.broker_name,
            broker_id=registration.broker_id,
            seen_ms=self._monotonic_ms(),
            timeout_ms=registration.timeout_ms or BROKER_TIMEOUT_MS,
            data_version=registration.topics.data_version,
            connection=registration.connection,
            ha_address=registration.ha_address,
        )
        return True

    def master_of(self, cluster: str, broker_name: str) -> tuple[str, str | None] | None:
        """Address and HA address of the living master behind a broker name."""
        broker = self._brokers.get(broker_name)
        address = broker.broker_addrs.get(MASTER_ID) if broker is not None else None
        live = self._live.get((cluster, address)) if address is not None else None
        return (address, live.ha_address) if address is not None and live is not None else None

    def unregister(self, keys: Iterable[BrokerKey]) -> None:
        """Forget brokers; their queues go when the last address of a broker name has gone."""
        gone: set[str] = set()
        for cluster, address in keys:
            live = self._live.pop((cluster, address), None)
            name = live.broker_name if live is not None else self._name_at(cluster, address)
            broker = self._brokers.get(name) if name is not None else None
            if broker is None:
                continue
            for broker_id in [i for i, a in broker.broker_addrs.items() if a == address]:
                del broker.broker_addrs[broker_id]
            if not broker.broker_addrs:
                gone.add(broker.broker_name)
                del self._brokers[broker.broker_name]
                self._leave_cluster(broker)
        if gone:
            self._drop_queues_of(gone)

    def refresh(self, key: BrokerKey) -> DataVersion | None:
        """Note a sign of life of a known broker; returns its stored data version."""
        live = self._live.get(key)
        if live is None:
            return None
        live.seen_ms = self._monotonic_ms()
        return live.data_version

    def silent(self) -> list[tuple[BrokerKey, LiveBroker]]:
        """The brokers that were silent for longer than their time-out."""
        now_ms = self._monotonic_ms()
        return [(key, live) for key, live in self._live.items() if live.seen_ms + live.timeout_ms < now_ms]

    def registered_over(self, connection: object) -> list[BrokerKey]:
        """The brokers that registered over a connection."""
        return [key for key, live in self._live.items() if live.connection is connection]

    # -- look-up

    def route(self, topic: str) -> TopicRoute | None:
        """Queues and brokers of a topic; None when nobody that is known has it."""
        queues = self._queues.get(topic)
        if not queues:
            return None
        brokers = [copy.deepcopy(self._brokers[name]) for name in queues if name in self._brokers]
        return TopicRoute(queue_datas=list(queues.values()), broker_datas=brokers) if brokers else None

    def clusters(self) -> ClusterInfo:
        """All clusters and brokers."""
        return ClusterInfo(
            broker_addr_table=dict(self._brokers),
            cluster_addr_table={cluster: sorted(names) for cluster, names in self._clusters.items()},
        )

    def topics(self) -> list[str]:
        """All topics known."""
        return sorted(self._queues)

    # -- inside

    def _broker_entry(self, registration: Registration) -> BrokerData:
        self._clusters.setdefault(registration.cluster, set()).add(registration.broker_name)
        broker = self._brokers.get(registration.broker_name)
        if broker is None:
            broker = BrokerData(cluster=registration.cluster, broker_name=registration.broker_name)
            self._brokers[registration.broker_name] = broker
        broker.enable_acting_master = bool(registration.enable_acting_master)
        return broker

    def _is_outdated(self, registration: Registration, addresses: Mapping[int, str]) -> bool:
        """Whether another living process holds this id with a newer state version; the newcomer is then forgotten."""
        holder = addresses.get(registration.broker_id)
        if holder is None or holder == registration.address:
            return False
        live = self._live.get((registration.cluster, holder))
        if live is None or live.data_version.state_version <= registration.topics.data_version.state_version:
            return False
        self._live.pop((registration.cluster, registration.address), None)
        return True

    def _take_topics(self, broker_name: str, table: Mapping[str, TopicConfig], *, overwrite: bool) -> None:
        for topic, config in table.items():
            queues = self._queues.setdefault(topic, {})
            if overwrite or broker_name not in queues:
                queues[broker_name] = QueueData(
                    broker_name=broker_name,
                    read_queue_nums=config.read_queue_nums,
                    write_queue_nums=config.write_queue_nums,
                    perm=config.perm,
                    topic_sys_flag=config.topic_sys_flag,
                )

    def _name_at(self, cluster: str, address: str) -> str | None:
        for name, broker in self._brokers.items():
            if broker.cluster == cluster and address in broker.broker_addrs.values():
                return name
        return None

    def _leave_cluster(self, broker: BrokerData) -> None:
        names = self._clusters.get(broker.cluster, set())
        names.discard(broker.broker_name)
        if not names:
            self._clusters.pop(broker.cluster, None)

    def _drop_queues_of(self, broker_names: set[str]) -> None:
        for topic in list(self._queues):
            queues = self._queues[topic]
            for name in broker_names.intersection(queues):
                del queues[name]
            if not queues:
                del self._queues[topic]
