"""Measures replication: the cost of a slave for its master, its lag, and its speed of catching up.

    python bench/ha_bench.py                     ours, and two Apache brokers (needs Java 17 and Maven)
    python bench/ha_bench.py --only ours
    python bench/ha_bench.py --gib 10            a slave that was stopped 10 GiB ago

=====================  ===============================================================================================
figure                 how it is taken
=====================  ===============================================================================================
rate with a slave      ASYNC_MASTER, 256 sends in flight on 8 connections, with one slave and without, in turn
lag                    at half that rate, every 2 ms: the master is asked for its log's end and the slave's acknowledged
                       end (GET_BROKER_HA_STATUS). The slave is behind by the time since the master was last asked and
                       its end was not beyond what the slave has now: at least the true lag, by up to one sample
synchronous rate       SYNC_MASTER, inSyncReplicas 2, 64 connections with one send in flight each, and ASYNC_MASTER;
                       messages per CPU second of master and slave together, beside Apache's
catch-up               a slave is killed, its master takes so much more, the slave comes back: bytes acknowledged by
                       the seconds from its connection on, asked every 10 ms; and until its queues are as its master's
=====================  ===============================================================================================

First our brokers run alone: on a small machine idle Java brokers use CPU time that a slave needs. Then Apache's start
too. One master is loaded at a time. A round runs all of them, every second round backwards; the first round is a
warm-up and not counted. The figures are medians, and medians of the rounds' ratios. CPU is user + system of the
brokers, each of which is one process, and of the loading thread. Prints JSON; progress and tables go to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.broker_bench import APACHE_CONF
from bench.commands.loaded import cpu_seconds
from bench.ha_load import QUEUES, TOPIC, Load
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from tests.faults.spark.servers import set_queues
from tests.interop.apache import HOST, ask, run_apache_broker, run_apache_name_server
from tests.interop.kit import ApacheKit, default_version, prepare
from tests.interop.server_process import ServerProcess, wait_until
from tests.interop.standalone import run_broker, run_name_server
from tests.ports import free_ports

IN_SYNC_SECONDS = 120.0
CATCH_UP_SECONDS = 600.0
TOP, SENDERS = (8, 32), (64, 1)
"""Number of connections, and of concurrent sends on each."""

CONF: Mapping[str, object] = {"brokerIP1": HOST, "brokerIP2": HOST, "slaveReadEnable": "true"}
SYNC: Mapping[str, object] = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2}
ASYNC: Mapping[str, object] = {"brokerRole": "ASYNC_MASTER"}

Running = tuple[ServerProcess, str]


# -- brokers


@dataclass
class Group:
    """A master, and perhaps its slave.

    Attributes:
        start_slave: starts the slave over its previous store.
    """

    name: str
    master: Running
    start_slave: Callable[[], AbstractContextManager[Running]] | None = None
    slave: Running | None = None
    _held: ExitStack = field(default_factory=ExitStack)

    @property
    def address(self) -> str:
        return self.master[1]

    def attach(self) -> str:
        """Start the slave and wait until it is in sync. Return its address."""
        address = self.begin_to_attach()
        wait_until(self.is_in_sync, IN_SYNC_SECONDS, f"slave of {self.name} in sync")
        return address

    def begin_to_attach(self) -> str:
        """Start the slave. Return its address."""
        assert self.start_slave is not None, f"{self.name} has a slave"
        self.slave = self._held.enter_context(self.start_slave())
        return self.slave[1]

    def detach(self) -> None:
        """Kill the slave (SIGKILL)."""
        self._held.close()
        self.slave = None

    def is_in_sync(self) -> bool:
        """Return True if the slave has the whole log."""
        state = self.replication()
        return [one.slave_ack_offset for one in state.ha_connection_info] == [state.master_commit_log_max_offset]

    def replication(self) -> HaRuntimeInfo:
        """Return the master's state of itself and its slave."""
        return decode_as(ask(self.address, Command(RequestCode.GET_BROKER_HA_STATUS)).payload, HaRuntimeInfo)

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU seconds of master and slave."""
        return cpu_seconds(self.master[0].pid), cpu_seconds(self.slave[0].pid) if self.slave else 0.0


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[list[Group]]:
    """Run our brokers: without a slave, with one, and synchronous."""
    with ExitStack() as stack:
        _, namesrv = stack.enter_context(run_name_server(folder))
        run = partial(run_ours, folder, namesrv)
        alone = stack.enter_context(group(run, "ours, no slave", ASYNC, has_slave=False))
        yield [alone, *(stack.enter_context(group(run, f"ours, {name}", role)) for name, role in ROLES.items())]


@contextlib.contextmanager
def apache(folder: Path) -> Iterator[list[Group]]:
    """Run Apache's brokers: with a slave, and synchronous."""
    kit = replace(prepare(default_version()), is_short_lived=False)
    home = folder / "apache-namesrv"
    home.mkdir()
    with ExitStack() as stack:
        _, namesrv = stack.enter_context(run_apache_name_server(kit, home))
        run = partial(run_apache, kit, folder, namesrv)
        yield [stack.enter_context(group(run, f"apache, {name}", role)) for name, role in ROLES.items()]


ROLES = {"async": ASYNC, "sync": SYNC}


def run_ours(folder: Path, namesrv: str, conf: Mapping[str, object]) -> AbstractContextManager[Running]:
    home = _home(folder, conf)
    _, port, ha_port = free_ports()
    ports = {"listenPort": port, "haListenPort": ha_port}
    return run_broker(home / "store", home, namesrv, {**CONF, **conf, **ports})


def run_apache(
    kit: ApacheKit, folder: Path, namesrv: str, conf: Mapping[str, object]
) -> AbstractContextManager[Running]:
    home = _home(folder, conf)
    return run_apache_broker(kit, home / "store", home, namesrv, {**APACHE_CONF, **CONF, **conf})


def _home(folder: Path, conf: Mapping[str, object]) -> Path:
    home = folder / f"{conf['brokerName']}-{conf['brokerId']}"
    home.mkdir(exist_ok=True)
    return home


@contextlib.contextmanager
def group(
    run: Callable[[Mapping[str, object]], AbstractContextManager[Running]],
    name: str,
    role: Mapping[str, object],
    *,
    has_slave: bool = True,
) -> Iterator[Group]:
    """Run the brokers of a group, with the topic."""
    conf = {"brokerName": name.replace(", ", "-").replace(" ", "-"), "brokerClusterName": "Bench"}
    with run({**conf, **role, "brokerId": 0}) as master:
        set_queues(master[1], TOPIC, QUEUES)
        running = Group(name, master)
        if has_slave:
            slave = {**conf, "brokerRole": "SLAVE", "brokerId": 1}
            running.start_slave = partial(run, slave)
            set_queues(running.attach(), TOPIC, QUEUES)
        try:
            yield running
        finally:
            running.detach()


# -- figures


RATE, PER_CPU = "messages_per_second", "messages_per_cpu_second"
RATIOS = [
    ("256 under way", "ours, async", "ours, no slave", RATE),
    ("64 senders", "ours, sync", "ours, async", RATE),
    ("64 senders", "ours, sync", "apache, sync", PER_CPU),
    ("256 under way", "ours, sync", "apache, sync", PER_CPU),
    ("256 under way", "ours, async", "apache, async", PER_CPU),
]
"""Load, the two groups of the ratio, and the figure. The first three have goals."""

COLUMNS = {RATE: 21, "master_cpu_us": 15, "slave_cpu_us": 14, "load_cpu_us": 13, PER_CPU: 25}
RATIO_GOALS = (0.8, 0.5, 1.0)
LAG_MS_MAX, CATCH_UP_MB_MIN = 50, 300


def measure(
    load: Load, everybody: list[Group], arguments: argparse.Namespace, newcomers: Sequence[Group] = ()
) -> dict[str, Any]:
    """Return rates and ratios of all groups, and lag and catch-up of the newcomers."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(arguments.rounds + 1):
        for what, shape, share in (("256 under way", TOP, 1.0), ("64 senders", SENDERS, 0.5)):
            for each in everybody[:: 1 if turn % 2 else -1]:
                figure = rate(load, each, int(arguments.messages * share), shape)
                tell(f"round {turn}, {what}, {each.name}: {figure}")
                if turn:
                    runs[what][each.name].append(figure)
    rates = {what: {name: medians(them) for name, them in by_name.items()} for what, by_name in runs.items()}
    ratios = {
        f"{what}, {name}: {one} / {other}": ratio(by_name, one, other, name)
        for what, one, other, name in RATIOS
        if (by_name := runs[what]).keys() >= {one, other}
    }
    lags, catch_ups = {}, {}
    for each in newcomers:
        if each.name.endswith("async"):
            half = rates["256 under way"][each.name][RATE] / 2
            lags[each.name] = load.paced(each.address, half, arguments.lag_seconds)
            tell(f"lag, {each.name}: {lags[each.name]}")
            catch_ups[each.name] = catch_up(load, each, int(arguments.gib * (1 << 30)))
            tell(f"catch-up, {each.name}: {catch_ups[each.name]}")
    return {"rates": rates, "ratios": ratios, "lag at half the rate": lags, "catch-up": catch_ups}


def rate(load: Load, group: Group, count: int, shape: tuple[int, int]) -> dict[str, float]:
    """Run once. Return messages per second, and microseconds of CPU per message."""
    if group.slave:
        wait_until(group.is_in_sync, IN_SYNC_SECONDS, f"slave of {group.name} in sync")
    before, own = group.cpu_seconds(), time.thread_time()
    seconds = load.run(group.address, count, *shape)
    load_us = (time.thread_time() - own) / count * 1e6
    if group.slave:  # the slave's remaining work belongs to these messages
        wait_until(group.is_in_sync, IN_SYNC_SECONDS, f"slave of {group.name} in sync")
    master_us, slave_us = ((after - b) / count * 1e6 for after, b in zip(group.cpu_seconds(), before, strict=True))
    return {
        "messages_per_second": round(count / seconds),
        "master_cpu_us": round(master_us, 2),
        "slave_cpu_us": round(slave_us, 2),
        "load_cpu_us": round(load_us, 2),
        "messages_per_cpu_second": round(1e6 / (master_us + slave_us)),
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


def ratio(by_name: Mapping[str, list[dict[str, float]]], one: str, other: str, name: str) -> float:
    """Return the median of the rounds' ratios, each of two groups measured at nearly the same time."""
    pairs = zip(by_name[one], by_name[other], strict=True)
    return round(statistics.median(left[name] / right[name] for left, right in pairs), 2)


def catch_up(load: Load, group: Group, size: int) -> dict[str, float]:
    """Stop the slave, send this number of bytes to its master, start the slave, and measure its progress."""
    wait_until(group.is_in_sync, IN_SYNC_SECONDS, f"slave of {group.name} in sync")
    group.detach()
    goal = group.replication().master_commit_log_max_offset + size
    while (end := group.replication().master_commit_log_max_offset) < goal:
        load.run(group.address, max(1000, min(200_000, (goal - end) // 1400)), *TOP)
    started = time.perf_counter()
    slave_address = group.begin_to_attach()
    told: list[tuple[float, int, tuple[float, float]]] = []

    def has_all() -> bool:
        cpu_seconds = group.cpu_seconds()
        copied = [one.slave_ack_offset for one in group.replication().ha_connection_info if one.slave_ack_offset > 0]
        told.extend((time.perf_counter(), offset, cpu_seconds) for offset in copied)
        return bool(told) and told[-1][1] == end

    wait_until(has_all, CATCH_UP_SECONDS, f"whole log at the slave of {group.name}")
    (first, begin, before), (last, _, after) = told[0], told[-1]
    count = end - begin
    master_ms, slave_ms = (1000 * (b - a) / (count / (1 << 30)) for a, b in zip(before, after, strict=True))
    queue_ends = _queue_ends(group.address)
    wait_until(
        lambda: _queue_ends(slave_address) == queue_ends, CATCH_UP_SECONDS, f"queues at the slave of {group.name}"
    )
    return {
        "mib": round(count / (1 << 20)),
        "mb_per_second": round(count / 1e6 / (last - first)),
        "seconds": round(last - first, 2),
        "seconds_from_start": round(last - started, 2),
        "seconds_until_readable": round(time.perf_counter() - first, 2),
        "master_cpu_ms_per_gib": round(master_ms),
        "slave_cpu_ms_per_gib": round(slave_ms),
    }


def _queue_ends(address: str) -> list[int]:
    headers = [{"topic": TOPIC, "queueId": str(queue_id)} for queue_id in range(QUEUES)]
    answers = [ask(address, Command(RequestCode.GET_MAX_OFFSET, fields=fields)) for fields in headers]
    return [int(decode_fields(answer).get("offset", -1)) for answer in answers]


def goals(phases: Mapping[str, Any]) -> list[tuple[str, float, str, bool]]:
    """Return the goals: name, value, bound, and True if it is reached."""
    found: list[tuple[str, float, str, bool]] = []
    for phase in phases.values():
        known = {name for name, *_ in found}
        for (what, one, other, name), least in zip(RATIOS, RATIO_GOALS, strict=False):
            key = f"{what}, {name}: {one} / {other}"
            if key in phase["ratios"] and key not in known:
                found.append((key, phase["ratios"][key], f">= {least}", phase["ratios"][key] >= least))
        if "ours, async" in phase["catch-up"]:
            lag_ms = phase["lag at half the rate"]["ours, async"]["lag_p99_ms"]
            found.append(("lag p99 at half the rate, ms", lag_ms, f"<= {LAG_MS_MAX}", lag_ms <= LAG_MS_MAX))
            caught_up = phase["catch-up"]["ours, async"]["mb_per_second"]
            found.append(("catch-up, MB/s", caught_up, f">= {CATCH_UP_MB_MIN}", caught_up >= CATCH_UP_MB_MIN))
    return found


def table(name: str, phase: Mapping[str, Any]) -> str:
    """Return the table of one phase."""
    lines = [f"== {name}"]
    for what, by_name in phase["rates"].items():
        lines.append(f"{what:24}" + "".join(f"{column:>{width}}" for column, width in COLUMNS.items()))
        for who, one in by_name.items():
            figures = "".join(f"{one[column]:>{width}.1f}" for column, width in COLUMNS.items())
            lines.append(f"  {who:22}{figures}")
    for what in ("lag at half the rate", "catch-up"):
        for who, one in phase[what].items():
            lines.append(f"{what}, {who}: " + ", ".join(f"{key} {value}" for key, value in one.items()))
    return "\n".join(lines + [f"  {key:78}{value:8.2f}" for key, value in phase["ratios"].items()])


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ours", "apache"), help="measure one of both")
    parser.add_argument("--messages", type=int, default=100_000, help="of a run with 256 under way (100000)")
    parser.add_argument("--body-bytes", type=int, default=1024, help="(1024)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (5)")
    parser.add_argument("--lag-seconds", type=float, default=10.0, help="(10)")
    parser.add_argument("--gib", type=float, default=0.5, help="that a stopped slave has to catch up (0.5)")
    arguments = parser.parse_args()
    load, phases = Load(arguments.body_bytes), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name, ExitStack() as stack:
        own: list[Group] = []
        if arguments.only != "apache":
            own = stack.enter_context(ours(Path(name)))
            phases["ours"] = measure(load, own, arguments, own)
        if arguments.only != "ours":
            others = stack.enter_context(apache(Path(name)))
            phases["side by side"] = measure(load, own + others, arguments, others)
    for phase, figures in phases.items():
        tell(table(phase, figures))
    reached = {}
    for what, value, bound, is_met in goals(phases):
        tell(f"{'met   ' if is_met else 'MISSED'} {what:78}{value:8.2f}  {bound}")
        reached[what] = {"value": value, "bound": bound, "met": is_met}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    print(json.dumps({"bench": "ha", **vars(arguments), **machine, "phases": phases, "goals": reached}, indent=1))


if __name__ == "__main__":
    main()
