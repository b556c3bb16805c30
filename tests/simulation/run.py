"""One run of a plan: a cluster and clients under faults, healed at the end, and judged by the oracles.

======================  ================================================================================================
phase                   what happens
======================  ================================================================================================
start                   the servers start, topics are created, the clients start
work                    the producers send, and the faults of the plan befall servers, clients, links and disks
healing                 all faults end, all servers and clients run; everything must be served within a bound
stop                    clients stop, then slaves, masters and name servers; the oracles read the disks
======================  ================================================================================================
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.log.mapped_file import BytesLost
from rmqkit.testing.simulation import BrokerServer, Cluster, Server, World
from tests.simulation import lives, operators, oracles, sinking
from tests.simulation.clients import CHATS, ORDERED, TOPICS, TOPICS_OF, ClientProcess, Keys, consumer_main, produce
from tests.simulation.expiry import Expiry
from tests.simulation.ledger import Ledger, State
from tests.simulation.plan import Fault, Plan, plan_of
from tests.simulation.pulling import pull_main
from tests.simulation.sessions import session_main

_MAINS = {"pull": pull_main, "lite": session_main}
_START_SECONDS = 30.0
_HEALING_SECONDS = 240.0
_STOP_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_QUEUES = 2


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    seed: int
    findings: list[str]
    simulated_seconds: float
    messages: int
    arrivals: int
    faults: int
    events: int
    trace: str
    story: list[str] = field(default_factory=list)

    @property
    def signature(self) -> str:
        """The first finding without numbers: runs with the same signature failed in the same way."""
        first = self.findings[0] if self.findings else ""
        return " ".join("#" if any(c.isdigit() for c in word) else word for word in first.split())[:90]


class Run:
    """One run.

    Attributes:
        is_sending, is_healed: whether producers send, and whether all faults have ended.
        healed_at: when they ended.
        query: the query that writes to a topic exactly once, if the plan has one.
        expiry: the messages that brokers deleted because of their age.
        lives: the topic and the group that an operator deletes.
    """

    def __init__(self, plan: Plan, *, keeps_story: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, keeps_story=keeps_story)
        self.ledger = Ledger()
        self.keys = Keys(self)
        self.findings: list[str] = []
        self.is_sending = True
        self.is_healed = False
        self.healed_at = 0.0
        self.query = sinking.Query(self)
        self.expiry = Expiry(self)
        self.lives = lives.Lives(self)
        self.befallen = 0
        self.diverged: set[str] = set()
        self.widest: dict[str, int] = {}
        self.lost: dict[str, BytesLost] = {}

    def execute(self) -> Outcome:
        """Run everything, and return the outcome."""
        with tempfile.TemporaryDirectory(prefix="simulation-") as folder:
            with self.world as world:
                self.cluster = Cluster(
                    world, brokers=self.plan.brokers, slaves=self.plan.slaves, settings=self.plan.settings
                )
                for name, (skew_ms, drift) in self.plan.drifts.items():
                    world.machine(name).skew_ms, world.machine(name).drift = skew_ms, drift
                self.clients = self._clients()
                self.watch = oracles.Watch(self)
                is_complete = self._start() and self._work() and self._heal() and self._stop()
                for server in self.cluster.brokers if is_complete else ():
                    server.machine.disk.copy_to(Path(folder, server.name))
            if is_complete:  # outside: the checks read real files
                self.findings += oracles.judge_disks(self, Path(folder))
        for part in (self.expiry, self.lives, self.ledger, self.watch):
            self.findings += part.findings[:3]
        self.findings += world.errors[:3]
        return Outcome(
            self.plan.seed,
            self.findings,
            world.now,
            len(self.ledger.sent),
            sum(map(len, self.ledger.arrivals.values())),
            self.befallen,
            world.events,
            world.trace,
            world.story or [],
        )

    def _clients(self) -> dict[str, ClientProcess]:
        found = {}
        for number in range(self.plan.producers):
            found[f"producer-{number}"] = ClientProcess(self, f"producer-{number}", produce)
        for group, kind in self.plan.groups.items():
            for number in range(self.plan.members):
                main = _MAINS[kind](group) if kind in _MAINS else consumer_main(group, kind)
                found[f"{group}-{number}"] = ClientProcess(self, f"{group}-{number}", main)
        for name in self.plan.sink:
            found[name] = ClientProcess(self, name, sinking.drive if name == "spark-driver" else sinking.execute)
        return found

    # ---- phases

    def _start(self) -> bool:
        world, cluster = self.world, self.cluster
        cluster.start()
        if not self._wait(
            lambda: all(server.broker is not None for server in cluster.brokers), _START_SECONDS, "start"
        ):
            self.findings += [f"{server.name}: {server.failures[-1]}" for server in cluster.servers if server.failures]
            return False
        for master in cluster.masters:
            for topic in sorted(TOPICS | self._more_topics()):
                queues = 4 if topic == ORDERED else _QUEUES
                master.on_loop(lambda broker, topic=topic, queues=queues: create_topic(broker, topic, queues))
        world.run(until=world.now + 1)
        for client in self.clients.values():
            client.start()
        world.run(until=world.now + 1)
        return True

    def _more_topics(self) -> set[str]:
        found = {sinking.TOPIC} if self.plan.sink else set()
        found |= {lives.TOPIC} if lives.GROUP in self.plan.groups else set()
        return found | ({CHATS} if "lite" in self.plan.groups.values() else set())

    def _work(self) -> bool:
        world, begin = self.world, self.world.now
        for fault in self.plan.faults:
            world.at(begin + fault.at, lambda fault=fault: self._befall(fault))
        self.watch.begin()
        world.run(until=begin + self.plan.seconds)
        self.is_sending = False
        return True

    def _heal(self) -> bool:
        """End all faults, and wait until everything is served."""
        world, network = self.world, self.world.network
        self.is_healed, self.healed_at = True, world.now
        network.heal()
        for machine in world.machines.values():
            machine.disk.heal()
            for process in machine.processes:
                process.calls_left = None
                process.paused_until = min(process.paused_until, world.now)
        world.note("healed")
        for one in (*self.cluster.servers, *self.clients.values()):
            one.start()
        healed = self._wait(self._is_quiet, _HEALING_SECONDS, "")
        if not healed:
            self.findings += self.watch.unserved()
        return healed

    def _is_quiet(self) -> bool:
        if self._restart_lost() or not all(server.broker is not None for server in self.cluster.brokers):
            return False
        if any(
            self.ledger.missing(group, TOPICS_OF[kind])
            for group, kind in self.plan.groups.items()
            if kind not in oracles.INCOMPLETE
        ):
            return False
        return self.query.is_settled and self._logs_equal() and not self._is_anything_being_sent()

    def _restart_lost(self) -> bool:
        """Restart brokers whose page cache dropped bytes, as their logs ask for. Return True until they stop."""
        has_lost = False
        for server in self.cluster.brokers:
            failure = None if server.broker is None else server.broker.context.store.failure
            if not isinstance(failure, BytesLost):
                continue
            has_lost = True
            if self.lost.get(server.name) is not failure:
                self.lost[server.name] = failure
                server.stop()
                server.start_when_stopped()
        return has_lost

    def _is_anything_being_sent(self) -> bool:
        alive = {f"{process.name} {process.number}" for process in self.world.processes if process.is_alive}
        return any(one.state is State.RUNNING and one.sender in alive for one in self.ledger.sent.values())

    def _stop(self) -> bool:
        self.watch.end()
        for client in self.clients.values():
            client.stop()
        if not self._wait_stopped(list(self.clients.values())):
            return False
        if not self._wait(self._logs_equal, _STOP_SECONDS, "equal logs of masters and slaves"):
            return False
        self._note_divergence()
        stops = self._stop_brokers(self.cluster.masters) and self._stop_brokers(self.cluster.slaves)
        for server in self.cluster.name_servers:
            server.stop()
        return stops and self._wait_stopped(list(self.cluster.name_servers))

    def _stop_brokers(self, brokers: list[BrokerServer]) -> bool:
        """Stop brokers. Start and stop a broker again if its last flush found that bytes were dropped."""
        stores = [(one, one.broker.context.store) for one in brokers if one.broker is not None]
        for one in brokers:
            one.stop()
        if not self._wait_stopped(list(brokers)):
            return False
        lost = [one for one, store in stores if isinstance(store.failure, BytesLost)]
        for one in lost:
            one.start()
        slaves = [one for one in self.cluster.slaves if oracles.master_of(self.cluster, one) in lost]
        have_started = self._wait(lambda: all(one.broker is not None for one in lost), _START_SECONDS, "second start")
        if not have_started or not self._wait(lambda: self._have_equal_logs(slaves), _STOP_SECONDS, "equal logs"):
            return False
        self._note_divergence()
        return not lost or self._stop_brokers(lost)

    def _note_divergence(self) -> None:
        self.diverged |= {one.name for one in self.cluster.slaves if oracles.reports_divergence(self, one)}

    def _logs_equal(self) -> bool:
        return self._have_equal_logs(self.cluster.slaves)

    def _have_equal_logs(self, slaves: list[BrokerServer]) -> bool:
        """Return True if each slave has the log of its master, or reports that it cannot."""
        return all(oracles.has_caught_up(self.cluster, one) or oracles.reports_divergence(self, one) for one in slaves)

    def _wait_stopped(self, ones: list[ClientProcess] | list[Server]) -> bool:
        names = ", ".join(one.name for one in ones)
        return self._wait(lambda: not any(one.is_running for one in ones), _STOP_SECONDS, f"a clean stop of {names}")

    def _wait(self, is_true: Callable[[], bool], seconds: float, what: str) -> bool:
        """Run until a condition is true. Enter a finding if it is not true in time."""
        world = self.world
        end = world.now + seconds
        while not is_true():
            if world.now >= end:
                if what:
                    self.findings.append(f"no {what} within {seconds:g} s")
                return False
            world.run(until=min(end, world.now + _LOOK_SECONDS))
        return True

    # ---- faults

    def _befall(self, fault: Fault) -> None:
        if self.is_healed:
            return
        self.befallen += 1
        self.world.note("FAULT", fault)
        _BEFALL[fault.kind](self, fault)

    def server(self, name: str) -> Server:
        return next(server for server in self.cluster.servers if server.name == name)

    def hosts(self, pair: str) -> tuple[str, str]:
        one, other = pair.split(">")
        return self.world.machine(one).host, self.world.machine(other).host


def run_seed(seed: int) -> Outcome:
    """Run the plan of a seed."""
    return Run(plan_of(seed)).execute()


async def create_topic(broker: object, topic: str, queues: int) -> None:
    """Create a topic on a broker."""
    context = broker.context  # type: ignore[attr-defined]
    attributes = {"message.type": "LITE"} if topic == CHATS else {}
    context.topics.put(TopicConfig(topic, queues, queues, attributes=attributes))
    await context.topics_published()


def _kill_at_call(run: Run, fault: Fault) -> None:
    server = run.server(fault.target)
    if server.process is not None and server.process.is_alive:
        server.process.die_at_call(int(fault.values[0]), then=lambda: server.died(fault.values[1]))


def _power_at_call(run: Run, fault: Fault) -> None:
    server = run.server(fault.target)
    if server.process is not None and server.process.is_alive:
        server.process.die_at_call(int(fault.values[0]), then=lambda: server.lose_power(fault.values[1]))


def _restart(run: Run, fault: Fault) -> None:
    server = run.server(fault.target)
    server.stop()
    # The healing starts all servers. A later start would run beside the clean stop at the end, and leave an abort file.
    run.world.after(fault.values[0] + 0.5, lambda: None if run.is_healed else server.start_when_stopped())


def _client_restarted(run: Run, fault: Fault) -> None:
    client = run.clients[fault.target]
    client.ask_to_stop()
    client.restart_after(fault.values[0])


def _pause(run: Run, fault: Fault) -> None:
    one = run.clients.get(fault.target) or run.server(fault.target)
    if one.process is not None:
        one.process.pause(fault.values[0])


def _stall(run: Run, fault: Fault) -> None:
    one, other = run.hosts(fault.target)
    run.world.network.stall(one, other, fault.values[0])
    if fault.kind == "stall":
        run.world.network.stall(other, one, fault.values[0])


def _clock(run: Run, fault: Fault) -> None:
    run.world.machine(fault.target).skew_ms += fault.values[0]


_BEFALL: dict[str, Callable[[Run, Fault], object]] = {
    "kill": lambda run, fault: run.server(fault.target).kill(fault.values[0]),
    "kill at call": _kill_at_call,
    "power": lambda run, fault: run.server(fault.target).lose_power(fault.values[0]),
    "power at call": _power_at_call,
    "restart": _restart,
    "pause": _pause,
    "client killed": lambda run, fault: run.clients[fault.target].kill(fault.values[0]),
    "client restarted": _client_restarted,
    "cut": lambda run, fault: run.world.network.cut(*run.hosts(fault.target)),
    "stall": _stall,
    "half stall": _stall,
    "slow": lambda run, fault: run.world.network.slow(*run.hosts(fault.target), *fault.values),
    "refuse": lambda run, fault: run.world.network.refuse(run.world.machine(fault.target).host, fault.values[0]),
    "full": lambda run, fault: run.world.machine(fault.target).disk.fill(fault.values[0]),
    "failing": lambda run, fault: run.world.machine(fault.target).disk.fail(
        fault.values[0], writes=bool(fault.values[1])
    ),
    "slow disk": lambda run, fault: run.world.machine(fault.target).disk.slow(fault.values[0]),
    "clock": _clock,
    "age": lambda run, fault: run.expiry.age(fault.target),
    "expire": lambda run, fault: operators.expire(run, fault.target),
    "renewed": lambda run, _: operators.ask(run, f"{lives.TOPIC} is renewed", run.lives.renew),
    "group deleted": lambda run, _: operators.ask(run, f"{lives.GROUP} is deleted", run.lives.delete_group),
    "reset": lambda run, fault: operators.reset(run, fault.target),
    "queues": lambda run, fault: operators.widen(run, fault.target, int(fault.values[0])),
    "settings": lambda run, fault: operators.configure(run, fault.target, int(fault.values[0])),
}
"""What each kind of fault does with its values: seconds until a restart or the end, or a number of calls."""
