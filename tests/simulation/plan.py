"""The plan of a run: the shape of the cluster, its clients, and the faults with their times. It depends on the seed
alone, and is a list of values: a run with a part of the faults is a run of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rmqkit.testing.simulation.disk import ROOT
from tests.simulation import expiry, lives
from tests.simulation.ledger import Kind

_SENTENCES = {
    "kill": "{target} is killed, and starts again after {0:g} s",
    "kill at call": "{target} is killed at call {0:g} of its disk, and starts again after {1:g} s",
    "power": "the machine of {target} loses power, and starts again after {0:g} s",
    "power at call": "the machine of {target} loses power at call {0:g} of its disk, and starts again after {1:g} s",
    "restart": "{target} is stopped cleanly, and starts again after {0:g} s",
    "pause": "{target} stands still for {0:g} s",
    "client killed": "{target} is killed, and starts again after {0:g} s",
    "client restarted": "{target} is closed, and starts again after {0:g} s",
    "cut": "the connections between {one} and {other} are reset",
    "stall": "nothing passes between {one} and {other} for {0:g} s",
    "half stall": "nothing passes from {one} to {other} for {0:g} s",
    "slow": "everything from {one} to {other} takes {0:g} s longer, for {1:g} s",
    "refuse": "{target} refuses new connections for {0:g} s",
    "full": "the disk of {target} is full for {0:g} s",
    "failing": "the disk of {target} fails (EIO) for {0:g} s; writes, too: {1:g}",
    "slow disk": "syncs of the disk of {target} are late for {0:g} s",
    "clock": "the wall clock of {target} is set by {0:g} ms",
    "reset": "an operator moves {target} to the beginning of its topics",
    "queues": "an operator gives {target} {0:g} queues",
    "age": "an hour, which is the retention, passes on the wall clock of {target}",
    "expire": "an operator lets {target} delete expired files",
    "renewed": "an operator deletes {target}, and creates it again",
    "group deleted": "an operator deletes {target}",
    "settings": "an operator changes setting {0:g} of {target}",
}
"""A sentence for each kind of fault."""


_KINDS = [kind for kind in Kind if kind not in (Kind.PLAIN, Kind.FLEETING, Kind.SESSION)]
"""The kinds of sends that a plan has or has not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``target``: a server, a client, or a pair ``a>b``."""

    at: float
    kind: str
    target: str
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        one, _, other = self.target.partition(">")
        return (
            f"{self.at:7.3f} s  {_SENTENCES[self.kind].format(*self.values, target=self.target, one=one, other=other)}"
        )


@dataclass(slots=True)
class Plan:
    """Everything about a run that is not the programs'.

    Attributes:
        settings: of all brokers.
        kinds: the kinds of sends.
        groups: the consumer groups: name → ``push``, ``ordered``, ``pop``, ``broadcast``, ``pull``, ``once``: push with
            a dedupe, or ``fleeting``: push of a topic that is deleted and created again.
        members: the number of members of each group.
        seconds: the time of sends and faults. Afterwards everything is healed.
        pace: seconds between two sends of a producer.
        failing_share: the share of the calls of handlers that fail.
        executors: the number of executors of a query that writes to a topic exactly once; 0: no query.
        hits_share: the share of the commits and tasks of this query that a kill or a pause hits.
        rows_per_s: the limit of its commits; 0: no limit.
    """

    seed: int
    brokers: int
    slaves: int
    settings: dict[str, object]
    kinds: list[Kind]
    groups: dict[str, str]
    members: int
    producers: int
    seconds: float
    pace: float
    body_bytes: int
    failing_share: float
    slow_share: float
    drifts: dict[str, tuple[float, float]]
    faults: list[Fault] = field(default_factory=list)
    executors: int = 0
    hits_share: float = 0.0
    rows_per_s: int = 0

    def with_faults(self, faults: list[Fault]) -> Plan:
        """Return the plan with other faults."""
        return replace(self, faults=faults)

    def shortened(self, seconds: float) -> Plan:
        """Return the plan with a shorter time of sends, and the faults within it."""
        return replace(self, seconds=seconds, faults=[fault for fault in self.faults if fault.at <= seconds])

    @property
    def servers(self) -> list[str]:
        masters = [f"broker-{number}" for number in range(self.brokers)]
        return masters + [f"{name}-slave-{number + 1}" for name in masters for number in range(self.slaves)]

    @property
    def clients(self) -> list[str]:
        names = [f"producer-{number}" for number in range(self.producers)]
        names += [f"{group}-{number}" for group in self.groups for number in range(self.members)]
        return names + self.sink

    @property
    def sink(self) -> list[str]:
        """The processes of the query."""
        executors = [f"spark-executor-{number}" for number in range(self.executors)]
        return ["spark-driver", *executors] if executors else []


def plan_of(seed: int, *, has_more: bool = True) -> Plan:
    """Return the plan of a seed. ``has_more``: with the parts that `_add_more` adds."""
    chance = random.Random(f"{seed} plan")
    slaves = chance.choice([0, 0, 0, 1])
    kinds = [Kind.PLAIN, *(kind for kind in _KINDS if chance.random() < 0.5)]
    others = {"G-ordered": "ordered", "G-pop": "pop", "G-all": "broadcast", "G-once": "once"}
    groups = {"G-push": "push"} | {name: kind for name, kind in others.items() if chance.random() < 0.5}
    plan = Plan(
        seed=seed,
        brokers=chance.choice([1, 1, 2]),
        slaves=slaves,
        settings=_settings(chance, slaves),
        kinds=kinds,
        groups=groups,
        members=chance.choice([1, 2, 2, 3]),
        producers=chance.choice([1, 2]),
        seconds=chance.choice([6.0, 10.0, 20.0]),
        pace=chance.choice([0.03, 0.1, 0.3]),
        body_bytes=chance.choice([10, 100, 1000, 6000]),
        failing_share=chance.choice([0.0, 0.0, 0.05, 0.3]),
        slow_share=chance.choice([0.0, 0.1]),
        drifts={},
    )
    plan.drifts = {
        name: (chance.uniform(-2000, 2000), chance.uniform(-1e-4, 1e-4))
        for name in plan.servers
        if chance.random() < 0.3
    }
    plan.faults = _faults(plan, chance)
    if has_more:
        _add_more(plan, random.Random(f"{seed} more"))
    if has_more and not any(fault.kind in _LOSING for fault in plan.faults) and chance.random() < 0.3:
        plan.settings["flushDiskType"] = "ASYNC_FLUSH"
    return plan


def _add_more(plan: Plan, chance: random.Random) -> None:
    """Add groups, and faults of their members. This has a generator of its own: it leaves the rest of a plan alone."""
    if chance.random() < 0.33:
        plan.groups["G-pull"] = "pull"
        plan.faults = _merged(plan, _faults_of([f"G-pull-{i}" for i in range(plan.members)], plan, chance))
    if chance.random() < 0.2:
        plan.executors, plan.hits_share = chance.choice([1, 2, 2]), chance.choice([0.1, 0.3, 0.6])
        plan.rows_per_s = chance.choice([0, 2])
        plan.faults = _merged(plan, _faults_of(plan.sink, plan, chance))
    elif not plan.slaves and chance.random() < 0.12:
        expire(plan, chance)
    elif not plan.slaves and chance.random() < 0.25:
        renew(plan, chance)
    elif not plan.slaves and plan.brokers == 1 and chance.random() < 0.3:
        archive(plan)
    if plan.settings.get("fileReservedTime") is None and chance.random() < 0.25:
        plan.groups["G-lite"] = "lite"
        plan.kinds = [*plan.kinds, Kind.SESSION]
        plan.faults = _merged(plan, _faults_of([f"G-lite-{i}" for i in range(plan.members)], plan, chance))


def archive(plan: Plan) -> None:
    """Let the broker archive and delete log files of any age. It gives up half messages of any age, so there are
    none."""
    plan.kinds = [kind for kind in plan.kinds if kind not in (Kind.COMMITTED, Kind.ROLLED_BACK)]
    plan.settings |= ARCHIVED
    plan.body_bytes = 6000


def expire(plan: Plan, chance: random.Random) -> None:
    """Let files expire during the run. Only messages whose place is known are sent, so that deleted ones are known. Now
    and then the members of a group are dead while the broker deletes."""
    plan.kinds = [kind for kind in plan.kinds if kind in (Kind.PLAIN, Kind.BATCH, Kind.ORDERED)]
    plan.groups = {name: kind for name, kind in plan.groups.items() if kind in ("push", "ordered", "pull")}
    plan.settings |= expiry.SETTINGS
    plan.seconds, plan.pace, plan.body_bytes, plan.failing_share = expiry.SECONDS, 0.6, 6000, 0.0
    faults = []
    for server in plan.servers:
        at = chance.uniform(20.0, 55.0)
        faults.append(Fault(round(at, 3), "age", server))
        faults += [Fault(round(late, 3), "expire", server) for late in (at + 1, 59.0, 62.0, 64.0)]
    if chance.random() < 0.5:
        group = chance.choice(sorted(plan.groups))
        faults += [Fault(15.0, "client killed", f"{group}-{i}", (50.0,)) for i in range(plan.members)]
    known = {*plan.servers, *plan.clients, *plan.groups, "namesrv-0", "Plain"}
    plan.faults = [fault for fault in plan.faults if set(fault.target.split(">")) <= known]
    plan.faults = _merged(plan, faults)


def renew(plan: Plan, chance: random.Random) -> None:
    """Add a topic that is deleted and created again, and a group that is deleted while its members are dead."""
    plan.kinds = [*plan.kinds, Kind.FLEETING]
    plan.groups[lives.GROUP] = "fleeting"
    faults = [Fault(round(chance.uniform(1.0, plan.seconds), 3), "renewed", lives.TOPIC) for _ in range(2)]
    if chance.random() < 0.5:
        at = round(chance.uniform(1.0, plan.seconds), 3)
        faults += [Fault(at, "client killed", f"{lives.GROUP}-{i}", (4.0,)) for i in range(plan.members)]
        faults.append(Fault(at + 1.0, "group deleted", lives.GROUP))
    plan.faults = _merged(plan, faults)


def _faults_of(clients: list[str], plan: Plan, chance: random.Random) -> list[Fault]:
    """Return faults of some clients."""
    times = [round(chance.uniform(1.0, plan.seconds), 3) for _ in range(chance.choice([0, 0, 2, 5]))]
    return [chance.choice(_CLIENT_FAULTS)(plan, chance, at, chance.choice(clients)) for at in times]


def _merged(plan: Plan, faults: list[Fault]) -> list[Fault]:
    """Return the faults of a plan and others, in the order of their times."""
    return sorted([*plan.faults, *faults], key=lambda fault: fault.at)


def _settings(chance: random.Random, slaves: int) -> dict[str, object]:
    settings: dict[str, object] = {
        "flushDiskType": "SYNC_FLUSH",
        "mappedFileSizeCommitLog": chance.choice([16 << 10, 64 << 10, 256 << 10]),
        "mappedFileSizeConsumeQueue": chance.choice([400, 2000, 20_000]),
        "maxHashSlotNum": chance.choice([50, 500]),
        "maxIndexNum": chance.choice([50, 400, 2000]),
        "defaultTopicQueueNums": chance.choice([1, 2, 4]),
        "timerFlushIntervalMs": chance.choice([100, 1000]),
        "flushIntervalConsumeQueue": chance.choice([100, 1000]),
        "flushConsumeQueueThoroughInterval": chance.choice([500, 5000, 60_000]),
        "flushConsumerOffsetInterval": chance.choice([500, 5000]),
        "transactionTimeOut": 2000,
        "transactionCheckInterval": 3000,
        "transactionCheckMax": 200,  # each round counts, also one without a producer to ask
        "messageIndexEnable": chance.random() < 0.8,
        "enabledAppendPropCRC": chance.random() < 0.2,
        "cleanFileForciblyEnable": False,  # else a full disk deletes what nobody has read
    }
    if chance.random() < 0.3:
        settings["enablePopBufferMerge"] = True
    if slaves and chance.random() < 0.6:
        settings |= {"brokerRole": "SYNC_MASTER"}
    return settings


# ---------------------------------------------------------------- faults

ARCHIVED: dict[str, object] = {
    "archive": f"{ROOT}/broker-0/archive",
    "mappedFileSizeCommitLog": 16 << 10,
    "fileReservedTime": 0,
    "deleteWhen": ";".join(map(str, range(24))),
    "cleanResourceInterval": 500,
}
"""The settings of a broker that archives its log as soon as a file is full."""

_LOSING = ("power", "power at call", "failing")
"""The faults that may lose what is acknowledged and not flushed."""

Maker = Callable[[Plan, random.Random, float], Fault]


def _server(plan: Plan, chance: random.Random) -> str:
    return chance.choice([*plan.servers, *plan.servers, "namesrv-0"])


def _anyone(plan: Plan, chance: random.Random) -> str:
    return chance.choice([*plan.servers, *plan.clients])


def _pair(plan: Plan, chance: random.Random) -> str:
    return f"{chance.choice(plan.servers)}>{chance.choice([*plan.clients, *plan.servers, 'namesrv-0'])}"


def _soon(chance: random.Random, most: float) -> float:
    """Return a time that is mostly short."""
    return round(most * chance.random() ** 2, 3)


MAKERS: dict[str, Maker] = {
    "kill": lambda p, c, at: Fault(at, "kill", _server(p, c), (_soon(c, 5) + 0.1,)),
    "kill at call": lambda p, c, at: Fault(
        at, "kill at call", c.choice(p.servers), (c.randint(1, 60), _soon(c, 5) + 0.1)
    ),
    "power": lambda p, c, at: Fault(at, "power", c.choice(p.servers), (_soon(c, 5) + 0.1,)),
    "power at call": lambda p, c, at: Fault(
        at, "power at call", c.choice(p.servers), (c.randint(1, 60), _soon(c, 5) + 0.1)
    ),
    "restart": lambda p, c, at: Fault(at, "restart", _server(p, c), (_soon(c, 3) + 0.1,)),
    "pause": lambda p, c, at: Fault(at, "pause", _anyone(p, c), (_soon(c, 15),)),
    "client killed": lambda p, c, at: Fault(at, "client killed", c.choice(p.clients), (_soon(c, 5) + 0.1,)),
    "client restarted": lambda p, c, at: Fault(at, "client restarted", c.choice(p.clients), (_soon(c, 5) + 0.1,)),
    "cut": lambda p, c, at: Fault(at, "cut", _pair(p, c)),
    "stall": lambda p, c, at: Fault(at, "stall", _pair(p, c), (_soon(c, 20),)),
    "half stall": lambda p, c, at: Fault(at, "half stall", _pair(p, c), (_soon(c, 20),)),
    "slow": lambda p, c, at: Fault(at, "slow", _pair(p, c), (_soon(c, 2), _soon(c, 10))),
    "refuse": lambda p, c, at: Fault(at, "refuse", _server(p, c), (_soon(c, 10),)),
    "full": lambda p, c, at: Fault(at, "full", c.choice(p.servers), (_soon(c, 5),)),
    "failing": lambda p, c, at: Fault(at, "failing", c.choice(p.servers), (_soon(c, 3), c.choice([0.0, 1.0]))),
    "slow disk": lambda p, c, at: Fault(at, "slow disk", c.choice(p.servers), (_soon(c, 10),)),
    "clock": lambda p, c, at: Fault(at, "clock", c.choice(p.servers), (c.choice([-1, 1]) * c.choice([200, 5000]),)),
}
"""The kinds of faults. The values of each are explained in `tests.simulation.run`."""

_CLIENT_FAULTS: tuple[Callable[[Plan, random.Random, float, str], Fault], ...] = (
    lambda p, c, at, one: Fault(at, "client killed", one, (_soon(c, 5) + 0.1,)),
    lambda p, c, at, one: Fault(at, "client restarted", one, (_soon(c, 5) + 0.1,)),
    lambda p, c, at, one: Fault(at, "pause", one, (_soon(c, 15),)),
    lambda p, c, at, one: Fault(at, "cut", f"{c.choice(p.servers)}>{one}"),
    lambda p, c, at, one: Fault(at, "half stall", f"{c.choice(p.servers)}>{one}", (_soon(c, 20),)),
)
"""The faults of one client."""

ACTIONS: dict[str, Maker] = {
    "reset": lambda p, c, at: Fault(at, "reset", c.choice(list(p.groups))),
    "queues": lambda p, c, at: Fault(at, "queues", "Plain", (c.randint(2, 6),)),
    "settings": lambda p, c, at: Fault(at, "settings", f"broker-{c.randrange(p.brokers)}", (c.randrange(5),)),
}
"""The actions of an operator, which are in a plan beside the faults."""


def _faults(plan: Plan, chance: random.Random) -> list[Fault]:
    """Return faults of a random subset of the kinds, in the order of their times."""
    kinds = [kind for kind in MAKERS if chance.random() < chance.choice([0.15, 0.5])]
    faults = _some_faults(plan, chance, kinds, chance.choice([0, 3, 8, 20]) if kinds else 0)
    actions = _some_faults(plan, chance, list(ACTIONS), chance.choice([0, 0, 1, 3]))
    return sorted([*faults, *actions], key=lambda fault: fault.at)


def _some_faults(plan: Plan, chance: random.Random, kinds: list[str], count: int) -> list[Fault]:
    makers, times = MAKERS | ACTIONS, [round(chance.uniform(1.0, plan.seconds), 3) for _ in range(count)]
    return sorted((makers[chance.choice(kinds)](plan, chance, at) for at in times), key=lambda fault: fault.at)


def with_kinds(plan: Plan, kinds: list[str], count: int = 8) -> Plan:
    """Return the plan with faults of some kinds only, and with SYNC_FLUSH."""
    faults = _some_faults(plan, random.Random(f"{plan.seed} focus"), kinds, count)
    return replace(plan, faults=faults, settings={**plan.settings, "flushDiskType": "SYNC_FLUSH"})


def shape_of(plan: Plan) -> dict[str, Any]:
    """Return the plan without its faults, for a story."""
    return {
        "brokers": plan.brokers,
        "slaves": plan.slaves,
        "kinds": ", ".join(kind.value for kind in plan.kinds),
        "groups": ", ".join(f"{name} ({kind})" for name, kind in plan.groups.items()),
        "executors": f"{plan.executors}, {plan.hits_share:g} of their steps hit, {plan.rows_per_s} rows/s",
        "members": plan.members,
        "producers": plan.producers,
        "seconds": plan.seconds,
        "settings": ", ".join(f"{key}={value}" for key, value in plan.settings.items()),
    }
