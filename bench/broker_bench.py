"""Measures our broker and Apache's under the same Java load in one run. Prints JSON.

    python bench/broker_bench.py                     both brokers, interleaved, every load; ours with the compiled core
                                                     and, as "plain", without
    python bench/broker_bench.py --sync              the same under SYNC_FLUSH
    python bench/broker_bench.py --table             a table of the ratios in place of JSON
    python bench/broker_bench.py --only ours         ours alone
    python bench/broker_bench.py --only ours --before ../old   ours of this checkout and of another one, interleaved

Needs Java 17 and Maven, as `tests/interop` does. Both brokers run all the time, one is loaded at a time; CPU times are
user + system of the broker's process per message. A round runs all loads with both brokers; the figures are medians of
the rounds, and those in percent of another checkout are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from rmqkit.core import CORE
from tests.interop.apache import open_store_with_apache
from tests.interop.kit import ApacheKit, default_version, prepare
from tests.interop.standalone import run_standalone

LOADS = {
    "1 thread": ("send 1", 0.2),
    "8 threads": ("send 8", 0.6),
    "64 threads": ("send 64", 0.6),
    "256 in flight": ("inflight 256", 1.0),
    "batches of 32": ("batch 32", 2.0),
}
"""Load → its job, and the share of the messages that it sends."""

APACHE_CONF = {
    "mappedFileSizeCommitLog": 1 << 30,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "brokerFastFailureEnable": "false",
}
"""Apache's defaults, instead of the values of the tests' small broker."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ours", "apache"), help="measure one broker")
    parser.add_argument("--before", type=Path, help="another checkout, whose broker is measured, too")
    parser.add_argument("--sync", action="store_true", help="an answer waits for the disk (SYNC_FLUSH)")
    parser.add_argument("--table", action="store_true", help="print a table, not JSON")
    parser.add_argument("--messages", type=int, default=60_000, help="of the load with 256 in flight")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-seconds", type=int, default=5)
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else ["ours", "apache"]
    if arguments.before is not None:
        names.insert(0, "before")
    elif "ours" in names and not CORE.fault:
        names.insert(1, "plain")
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        kit = replace(prepare(default_version()), is_short_lived=False)
        peers = [stack.enter_context(peer(kit, name, Path(folder), arguments)) for name in names]
        figures = measure(peers, arguments)
        memory = {each.name: anonymous_mb(each.pid) for each in peers}
    machine = {
        "anonymous_mb": memory,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    if arguments.table:
        print("\n".join(table(figures, memory)))
        return
    print(json.dumps({"bench": "broker", "body_bytes": arguments.body_bytes, **machine, "figures": figures}, indent=1))


@dataclass(slots=True)
class Peer:
    """A broker, and the Java program that loads it."""

    name: str
    pid: int
    load: subprocess.Popen[str]

    def run(self, job: str) -> dict[str, float]:
        """Run one job. Return messages, seconds, and microseconds of the broker's CPU per message."""
        user_before, before = user_seconds(self.pid), cpu_seconds(self.pid)
        answer = self.ask(job).split()
        assert answer[0] == "done", f"{self.name}, {job}: {answer}"
        assert answer[1] != "0", f"{self.name}, {job}: {answer}"
        count, seconds = int(answer[1]), float(answer[2])
        told = {name: float(value) for name, _, value in (part.partition("=") for part in answer[3:])}
        cpu, user = cpu_seconds(self.pid) - before, user_seconds(self.pid) - user_before
        costs = {"cpu_us": cpu / count * 1e6, "user_us": user / count * 1e6}
        return {"messages_per_second": count / seconds, **costs, **told}

    def ask(self, job: str) -> str:
        assert self.load.stdin is not None
        assert self.load.stdout is not None
        if job:
            self.load.stdin.write(job + "\n")
            self.load.stdin.flush()
        while True:
            line = self.load.stdout.readline()
            assert line, f"the load on {self.name} ended during {job!r}"
            if line.startswith(("done", "ready")):
                return line


def sources(tree: Path) -> str:
    """Return the folders of a checkout from which Python imports rmqkit, also for a checkout older than the
    packages. Its environment is the last: another version of the compiled core does not fit its sources.
    """
    tree = tree.resolve()
    folders = [*sorted(tree.glob("packages/*/src")), tree / "src", *tree.glob(".venv/lib/python*/site-packages")]
    return os.pathsep.join(map(str, folders))


@contextlib.contextmanager
def peer(kit: ApacheKit, name: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Peer]:
    """Run a broker with an empty store, and its load."""
    work_dir = folder / name
    work_dir.mkdir()
    with contextlib.ExitStack() as stack:
        if name == "apache":
            conf = APACHE_CONF | ({"flushDiskType": "SYNC_FLUSH"} if arguments.sync else {})
            pair = stack.enter_context(open_store_with_apache(kit, work_dir / "store", work_dir, conf))
            namesrv_addr, pid = pair.namesrv_addr, pair.broker.pid
        else:
            if name == "before":
                os.environ["PYTHONPATH"] = sources(arguments.before)
            if name == "plain":
                os.environ["RMQKIT_NATIVE"] = "0"
            options = ["--set", "flushDiskType=SYNC_FLUSH"] if arguments.sync else []
            ours = stack.enter_context(run_standalone(work_dir / "store", work_dir, *options))
            os.environ.pop("PYTHONPATH", None)
            os.environ.pop("RMQKIT_NATIVE", None)
            namesrv_addr, pid = ours.namesrv_addr, ours.process.pid
        running = Peer(name, pid, stack.enter_context(load_of(kit, namesrv_addr, arguments.body_bytes, work_dir)))
        running.ask("")
        yield running


@contextlib.contextmanager
def load_of(kit: ApacheKit, namesrv_addr: str, body_bytes: int, work_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the Java program that sends jobs to the broker of a name server."""
    command = kit.jvm("interop.BrokerLoad", [namesrv_addr, body_bytes], heap_mb=400, work_dir=work_dir)
    load = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield load
    finally:
        load.kill()


def measure(peers: list[Peer], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return median figures by load and broker, and the ratios of ours to Apache's."""
    figures: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for each in peers:
        each.run(f"inflight 256 {arguments.messages}")  # warm up both JVMs
    for turn in range(arguments.rounds):
        sent = 0
        peers.reverse()  # so that other work on the machine disturbs both alike
        for load, (job, share) in LOADS.items():
            count = int(arguments.messages * share)
            sent += count
            for each in peers:
                figures[load][each.name].append(each.run(f"{job} {count}"))
                print(f"{turn} {load} {each.name} {figures[load][each.name][-1]}", file=sys.stderr)
        for each in peers:
            figures["backlog"][each.name].append(each.run(f"consume {sent} reader-{turn}"))
            print(f"{turn} backlog {each.name} {figures['backlog'][each.name][-1]}", file=sys.stderr)
    for rate, _ in itertools.product((200, 1000), range(arguments.rounds)):
        peers.reverse()
        for each in peers:
            latency = each.run(f"latency {rate} {arguments.latency_seconds}")
            figures[f"latency at {rate:,}/s"][each.name].append(latency)
    medians: dict[str, Any] = {
        load: {name: median_of(runs) for name, runs in by_name.items()} for load, by_name in figures.items()
    }
    for load, by_name in medians.items():
        for name in ("ours", "plain"):
            if {name, "apache"} <= by_name.keys():
                ratio = by_name["apache"]["cpu_us"] / by_name[name]["cpu_us"]
                by_name[f"messages_per_cpu_second_{name}_to_apache"] = round(ratio, 2)
        if {"before", "ours"} <= by_name.keys():
            rounds = zip(figures[load]["ours"], figures[load]["before"], strict=True)
            ratio = statistics.median(now["cpu_us"] / before["cpu_us"] for now, before in rounds)
            by_name["cpu_us_percent_of_before"] = round(ratio * 100, 1)
    return medians


def table(figures: dict[str, Any], memory: dict[str, float]) -> Iterator[str]:
    """Yield a row for each load: the CPU of each broker per message with the kernel's part, the latency, the ratios of
    messages per CPU second and of rates to Apache's, and the CPU in percent of another checkout's.
    """
    names = list(memory)
    ours = [name for name in ("ours", "plain") if {name, "apache"} <= memory.keys()]
    ratios = [f"{name} to Apache: CPU; rate" for name in ours]
    if {"before", "ours"} <= memory.keys():
        ratios.append("ours, % of before")
    yield f"| load | {' | '.join([*(f'{name}: us (kernel)' for name in names), *ratios])} |"
    yield "|---" * (1 + len(names) + len(ratios)) + "|"
    for load, by_name in figures.items():
        cells = []
        for name in names:
            one = by_name[name]
            cells.append(f"{one['cpu_us']} ({round(one['cpu_us'] - one['user_us'], 1)})")
            if "p50_us" in one:
                cells[-1] += f"; p50 {one['p50_us'] / 1000:.2f} ms, p99 {one['p99_us'] / 1000:.2f} ms"
        for name in ours:
            cpu = by_name["apache"]["cpu_us"] / by_name[name]["cpu_us"]
            rate = by_name[name]["messages_per_second"] / by_name["apache"]["messages_per_second"]
            cells.append(f"{cpu:.2f}; {rate:.2f}")
        if {"before", "ours"} <= memory.keys():
            cells.append(str(by_name["cpu_us_percent_of_before"]))
        yield f"| {load} | {' | '.join(cells)} |"
    yield f"| anonymous memory, MB | {' | '.join([*(str(memory[name]) for name in names), *('' for _ in ratios)])} |"


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.partition("RssAnon:")[2].split()[0]) / 1024, 1)


def user_seconds(pid: int) -> float:
    """Return the CPU seconds of a process in user mode, counted in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
