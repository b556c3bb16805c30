"""Compares messaging systems for a choice between them: rmqkit, Apache RocketMQ, Kafka and NATS JetStream, each with
its usual asyncio client, one after the other in one run. Prints JSON; `--table` also prints rows for a page on standard
error.

    python bench/chooser_bench.py --rounds 3

Kafka (KRaft, one process) comes from Maven, NATS from Go modules, aiokafka and nats-py from `requirements/choosers.txt`
into a separate environment. A system that cannot be installed is reported with the reason. Every server runs with its
default settings: it acknowledges messages in the page cache, and flushes them to the disk a little later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.broker_bench import APACHE_CONF
from tests.interop.apache import HOST, open_store_with_apache
from tests.interop.go_and_node import cached, complete, find_tool
from tests.interop.kit import (
    Unavailable,
    cache_folder,
    default_version,
    fetch_jars,
    find_java,
    move_into_place,
    prepare,
)
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import RMQ
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "bench" / "peers"
SYSTEMS = {
    "rmqkit": "rmqkit",
    "rmqkit, auto_batch": "rmqkit-batching",
    "Apache RocketMQ 5.4.0, rmqkit's client": "rmqkit",
    "Kafka 4.2.2, aiokafka": "kafka",
    "NATS JetStream 2.14.8, nats-py": "nats",
}
RUN_SECONDS_MAX = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=list(SYSTEMS))
    parser.add_argument("--table", action="store_true", help="print rows for a page, too")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(SYSTEMS)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for turn in range(arguments.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            try:
                runs[name].append(run_of(name, arguments))
            except Unavailable as reason:
                missing[name] = str(reason)
            print(f"{turn} {name}: {runs[name][-1] if runs[name] else missing[name]}", file=sys.stderr)
    told = {name: middle(found) for name, found in runs.items() if found}
    if arguments.table:
        print(table(told), file=sys.stderr)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    options = {"messages": arguments.messages, "body_bytes": arguments.body_bytes, "rounds": arguments.rounds}
    print(json.dumps({"bench": "chooser", **options, **machine, "systems": told, "missing": missing}, indent=1))


def run_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one system on an empty store."""
    kind = SYSTEMS[name]
    python = Path(sys.executable) if kind.startswith("rmqkit") else environment()
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder, contextlib.ExitStack() as stack:
        since = time.time()
        address, pids = stack.enter_context(SERVERS[name](Path(folder)))
        command = [python, PEERS / "chooser.py", kind, address, ",".join(map(str, pids))]
        command += [arguments.messages, arguments.body_bytes]
        pipe = subprocess.PIPE
        with subprocess.Popen(list(map(str, command)), stdin=pipe, stdout=pipe, text=True) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            ready = client.stdout.readline().split()
            assert ready, f"{name}: the client ended before the server was ready"
            at_rest = sum(map(anonymous_mb, pids))
            client.stdin.write("go\n")
            client.stdin.flush()
            output, _ = client.communicate(timeout=RUN_SECONDS_MAX)
        figures: dict[str, Any] = json.loads(output)
        memory = {"ready_s": round(float(ready[1]) - since, 2), "memory_mb": round(at_rest)}
        return {"server": {**memory, "memory_after_mb": round(sum(map(anonymous_mb, pids)))}, **figures}


# ---------------------------------------------------------------- servers: address and pids


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[tuple[str, list[int]]]:
    command = [RMQ, "standalone", "--namesrv-port", "0", "--port", "0", "--store", folder / "store"]
    with ServerProcess([*command, "--set", "grpcServerPort=-1"], folder / "log") as process:
        yield process.wait_ready(r"^ready namesrv=(?P<at>\S+)", 60)["at"], [process.pid]


@contextlib.contextmanager
def apache(folder: Path) -> Iterator[tuple[str, list[int]]]:
    kit = replace(prepare(default_version()), is_short_lived=False)  # with both compilers, as by default
    with open_store_with_apache(kit, folder / "store", folder, APACHE_CONF) as pair:
        yield pair.namesrv_addr, [pair.broker.pid, pair.name_server.pid]


@contextlib.contextmanager
def kafka(folder: Path) -> Iterator[tuple[str, list[int]]]:
    java, lib = find_java(), cache_folder() / "kafka"
    if not lib.is_dir():
        cache_folder().mkdir(parents=True, exist_ok=True)
        fetch_jars("", lib, PEERS / "kafka" / "pom.xml")
    port, controller = free_port(), free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "log.dirs": folder / "data",
        "num.partitions": 4,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "group.initial.rebalance.delay.ms": 0,
    }
    conf = folder / "server.properties"
    conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    program = [str(java), "-Xmx1g", "-cp", f"{lib}/*"]
    format_it = [*program, "kafka.tools.StorageTool", "format", "-t", "rmqkitBenchChooser0000A", "-c", str(conf)]
    subprocess.run(format_it, check=True, stdout=subprocess.DEVNULL)
    with ServerProcess([*program, "kafka.Kafka", str(conf)], folder / "log") as process:
        yield f"{HOST}:{port}", [process.pid]


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[tuple[str, list[int]]]:
    port = free_port()
    command = [nats_server(), "-a", HOST, "-p", str(port), "-js", "-sd", folder / "data"]
    with ServerProcess(command, folder / "log") as process:
        yield f"{HOST}:{port}", [process.pid]


SERVERS = dict(zip(SYSTEMS, (ours, ours, apache, kafka, nats), strict=True))


def nats_server() -> Path:
    """Return the server in the version of `peers/nats/go.mod`. Raises Unavailable."""
    folder = PEERS / "nats"
    program = cached("nats-server", sorted(folder.glob("*")))
    if not program.exists():
        go = find_tool("go")
        with tempfile.TemporaryDirectory(dir=program.parent, prefix="building-") as objects:
            command = [go, "build", "-mod=readonly", "-o", f"{objects}/program", "github.com/nats-io/nats-server/v2"]
            env = {"GOTOOLCHAIN": "local", "GOFLAGS": "-modcacherw -buildvcs=false"}
            done = complete(command, folder, env, RUN_SECONDS_MAX)
            if done.returncode != 0:
                raise Unavailable(f"nats-server does not build: {done.stderr.strip()[-300:]}")
            move_into_place(Path(objects, "program"), program)
    return program


def environment() -> Path:
    """Return the interpreter that has the other clients. Raises Unavailable."""
    venv = ROOT / ".cache" / "bench-choosers"
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        wanted = ROOT / "requirements" / "choosers.txt"
        install = [python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", wanted]
        if subprocess.run(install, check=False).returncode != 0:
            shutil.rmtree(venv)
            raise Unavailable("requirements/choosers.txt does not install here")
    return python


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure."""
    return {
        load: {name: statistics.median(run[load][name] for run in runs) for name in figures}
        for load, figures in runs[0].items()
    }


ROWS = (
    ("ready after, s", "server", ("ready_s",)),
    ("memory of the server: ready, after the load, MB", "server", ("memory_mb", "memory_after_mb")),
    ("one at a time: messages a second", "one at a time", ("messages_per_second",)),
    ("one at a time: median, 99th percentile, ms", "one at a time", ("acknowledged_p50_ms", "acknowledged_p99_ms")),
    ("256 in flight: messages a second", "256 in flight", ("messages_per_second",)),
    ("256 in flight: CPU of client, of server, us", "256 in flight", ("client_cpu_us", "server_cpu_us")),
    ("backlog: messages a second", "backlog", ("messages_per_second",)),
    ("backlog: CPU of client, of server, us", "backlog", ("client_cpu_us", "server_cpu_us")),
    ("end to end: median, 99th percentile, ms", "end to end at 200/s", ("end_to_end_p50_ms", "end_to_end_p99_ms")),
)


def table(told: dict[str, dict[str, Any]]) -> str:
    """Return rows for a page: one for each kind of figures, with a column for each system."""
    lines = ["| | " + " | ".join(told) + " |", "|---|" + "---|" * len(told)]
    for label, load, names in ROWS:
        cells = [", ".join(f"{found[load][name]:,}" for name in names) for found in told.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
