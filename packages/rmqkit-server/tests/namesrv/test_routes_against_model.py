"""The route table against a model that stores only the latest registrations, over any order of events.

The model has one rule per table. An address belongs to the broker that last registered it. A topic has the queues of
its master's last registration with a new version. A broker name without addresses has no topics.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rmqkit.namesrv.routes import BrokerRegistration, Departure, RouteTable
from rmqkit.protocol.schemas.topics import DataVersion, TopicConfig, TopicConfigTable
from tests.examples import examples

NAMES = ("a", "b")
ADDRESSES = tuple(f"10.0.0.{number}:1" for number in range(1, 5))
TOPICS = ("T", "U", "V")
CLUSTER = "C"
TIMEOUT_MS = 1000


@dataclass
class Process:
    """A broker process as it last registered."""

    name: str
    broker_id: int
    version: int
    seen_ms: float
    connection: int


@dataclass
class Model:
    """The registered processes by address, and each topic's queue counts by broker name."""

    processes: dict[str, Process] = field(default_factory=dict)
    queues: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def members(self, name):
        return {process.broker_id: address for address, process in self.processes.items() if process.name == name}

    def remove(self, address):
        process = self.processes.pop(address, None)
        if process is None:
            return
        left = self.members(process.name)
        if 0 in left:
            return
        for topic, name in [key for key in self.queues if key[1] == process.name]:
            if left:
                count, perm = self.queues[topic, name]
                self.queues[topic, name] = (count, perm & ~2)
            else:
                del self.queues[topic, name]


class Routes(RuleBasedStateMachine):
    """Rules that register, unregister, break connections and let time pass."""

    def __init__(self):
        super().__init__()
        self.ms = 0.0
        self.routes = RouteTable(lambda: self.ms)
        self.model = Model()
        self.connections = 0

    @rule(
        address=st.sampled_from(ADDRESSES),
        name=st.sampled_from(NAMES),
        broker_id=st.integers(0, 2),
        version=st.integers(1, 3),
        topics=st.sets(st.sampled_from(TOPICS)),
        count=st.integers(1, 9),
    )
    def register(self, address, name, broker_id, version, topics, count):
        holder = self.model.members(name).get(broker_id)
        known = self.model.processes.get(address)
        if holder is not None and holder != address:
            return  # two processes with one id: what becomes of the first is tested by example
        self.connections += 1
        table = {topic: TopicConfig(topic, count, count, 6) for topic in topics}
        accepted = self.routes.register(
            BrokerRegistration(
                cluster=CLUSTER,
                address=address,
                broker_name=name,
                broker_id=broker_id,
                ha_address=None,
                timeout_ms=TIMEOUT_MS,
                enable_acting_master=True,
                topics=TopicConfigTable(DataVersion(version), table),
                connection=self.connections,
            )
        ).is_accepted
        is_first = holder is None
        assert accepted == (not is_first or len(topics) != 1)
        if not accepted:
            return
        if known is not None and known.name != name:
            self.model.remove(address)
            known = None
        self.model.processes[address] = Process(name, broker_id, version, self.ms, self.connections)
        is_prime = broker_id == min(self.model.members(name))
        if broker_id == 0 or is_prime:
            for topic in topics:
                if is_first or known is None or known.version != version or (topic, name) not in self.model.queues:
                    self.model.queues[topic, name] = (count, 6 if broker_id == 0 else 4)

    @rule(address=st.sampled_from(ADDRESSES))
    def say_good_bye(self, address):
        known = self.model.processes.get(address)
        name = known.name if known is not None else "a"
        self.routes.unregister([Departure(CLUSTER, address, name)])
        self.model.remove(address)

    @rule(address=st.sampled_from(ADDRESSES))
    def break_connection(self, address):
        known = self.model.processes.get(address)
        if known is not None:
            self.routes.unregister(self.routes.registered_over(known.connection))
            self.model.remove(address)

    @rule(address=st.sampled_from(ADDRESSES))
    def beat(self, address):
        known = self.model.processes.get(address)
        if known is not None:
            assert self.routes.refresh((CLUSTER, address)) == DataVersion(known.version)
            known.seen_ms = self.ms

    @rule(ms=st.sampled_from((1, TIMEOUT_MS // 2, TIMEOUT_MS, TIMEOUT_MS + 1)))
    def pass_time(self, ms):
        self.ms += ms
        silent = {address for address, known in self.model.processes.items() if known.seen_ms + TIMEOUT_MS < self.ms}
        departures = self.routes.silent()
        assert {departure.address for departure in departures} == silent
        self.routes.unregister(departures)
        for departure in departures:
            self.model.remove(departure.address)

    @rule(topic=st.sampled_from(TOPICS))
    def delete_topic(self, topic):
        self.routes.delete_topic(topic)
        for key in [key for key in self.model.queues if key[0] == topic]:
            del self.model.queues[key]

    @invariant()
    def members_agree(self):
        for name in NAMES:
            assert dict(self.routes.members(name)) == self.model.members(name)

    @invariant()
    def clusters_are_those_of_the_members(self):
        present = {name for name in NAMES if self.model.members(name)}
        assert self.routes.clusters().cluster_addr_table == ({CLUSTER: sorted(present)} if present else {})
        assert set(self.routes.clusters().broker_addr_table) == present

    @invariant()
    def queues_agree(self):
        assert self.routes.topics() == sorted({topic for topic, _ in self.model.queues})
        for topic in self.routes.topics():
            route = self.routes.route(topic)
            assert {queue.broker_name: (queue.read_queue_nums, queue.perm) for queue in route.queue_datas} == {
                name: queues for (known, name), queues in self.model.queues.items() if known == topic
            }
            assert {broker.broker_name for broker in route.broker_datas} == {
                queue.broker_name for queue in route.queue_datas
            }


TestRoutes = Routes.TestCase
TestRoutes.settings = examples(150, stateful_step_count=40)
