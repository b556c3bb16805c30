"""The cost of metrics in a broker: one `rmq standalone` without and one with metrics, loaded in turn. Prints JSON.

    python bench/metrics_bench.py [--rounds 60] [--messages 5000] [--body-bytes 1024]
    python bench/metrics_bench.py --instructions [--repetitions 2] [--messages 2048] [--body-bytes 1024]

| Figure | Meaning |
|---|---|
| ``cpu_us`` | user + system time of the process per message, the median of all rounds, without and with metrics |
| ``per_second`` | messages per second, the same way; requests are ready bytes, so that the broker sets the pace |
| ``cost_percent`` | the increase in CPU time with metrics: the median of the rounds' ratios, and their quartiles |
| ``scrape`` | milliseconds of CPU time and bytes of one read of ``/metrics``, which the loads do not include |

There are many short rounds and the sides take turns, so that other work on the machine affects both. Still the rounds
vary by far more than the cost. ``--instructions`` counts the executed instructions with valgrind's callgrind, which no
other process changes:

| Figure | Meaning |
|---|---|
| ``instructions`` | per message, from the read of a socket to the write of the answer, of each repetition |
| ``cost_percent`` | the increase with metrics; each repetition has new processes |

That is 98 % of a message's cost. The rest is uvloop's waiting, periodic work, which does not depend on the load, and
one callback for each read with requests other than plain sends, which is too little to measure. Under callgrind a
broker is about fifty times slower, so its work must not depend on time: its monotonic clock advances by some µs at each
call, and there is no index, whose keys are added every second. This makes the share of metrics larger.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, encode_command, request
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.send import SendMessageV2Request
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ

TOPIC, BATCH, PULL, QUEUES = "BenchMetrics", 32, 32, 4
SENDS = {"sends, 1 in flight": (1, 0.15), "sends, 8 in flight": (8, 0.5), "sends, 256 in flight": (256, 1.0)}
"""Load → number of concurrent sends, and the share of the messages."""
CONFS = {"off": "", "on": "metricsExporterType=PROM\nmetricsPromExporterPort=0\n"}
FIXED = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
EVEN_CLOCK = """
import random, sys, time
from itertools import accumulate, cycle
numbers = random.Random(0)
steps = cycle([numbers.expovariate(1e5) for _ in range(10_007)])
time.monotonic = accumulate(steps, initial=time.monotonic()).__next__
from rmqkit.__main__ import main
sys.exit(main())
"""
CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--toggle-collect=uv__read")


@dataclass
class Side:
    """A broker and its measurements."""

    pid: int
    connection: socket.socket
    metrics: str
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    per_second: dict[str, list[float]] = field(default_factory=dict)

    def talk(self, requests: bytes, count: int) -> None:
        """Send requests and read as many answers. Raises RuntimeError: an answer is not a success."""
        self.connection.sendall(requests)
        while count:
            for frame in self.splitter.feed(self.connection.recv(1 << 20)):
                answer = decode_command(frame) if count == 1 else None
                count -= 1
                if answer is not None and answer.code:
                    raise RuntimeError(f"the broker answered {answer.code}: {answer.remark}")

    def measure(self, load: str, requests: bytes, at_a_time: int, rounds: int, messages_each: int = 1) -> None:
        cpu, started = cpu_seconds(self.pid), time.perf_counter()
        for _ in range(rounds):
            self.talk(requests, at_a_time)
        messages = rounds * at_a_time * messages_each
        self.per_second.setdefault(load, []).append(messages / (time.perf_counter() - started))
        self.cpu_us.setdefault(load, []).append((cpu_seconds(self.pid) - cpu) / messages * 1e6)


@contextmanager
def serve(work: Path, conf: str, *under: str | Path) -> Iterator[Side]:
    """Run a server. ``under``: the command that replaces `rmq`."""
    work.mkdir()
    config = work / "broker.conf"
    config.write_text(conf)
    ports = ("--host", "127.0.0.1", "--namesrv-port", "0", "--port", "0")
    command = [*(under or (RMQ,)), "standalone", *ports, "--store", work / "store", "-c", config]
    with ServerProcess(command, work / "log", {**os.environ, **FIXED} if under else None) as process:
        line = process.wait_ready(r"^ready .*$", READY_SECONDS)[0]
        told = dict(word.split("=", 1) for word in line.split()[1:])
        host, _, port = told["broker"].rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Side(process.pid, connection, told.get("metrics", ",").split(",")[-1])


def frames(commands: list[Command]) -> bytes:
    for opaque, command in enumerate(commands):
        command.opaque = opaque
    return b"".join(bytes(part) for command in commands for part in encode_command(command))


def send(number: int, body: bytes, *, is_batch: bool = False) -> Command:
    properties = f"UNIQ_KEY\x017F000001{number:024X}\x02TAGS\x01TagA\x02WAIT\x01true\x02"
    header = SendMessageV2Request(
        "bench", TOPIC, "TBW102", QUEUES, number % QUEUES, 0, 1_700_000_000_000, 0, properties, 0, batch=is_batch
    )
    return request(RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2, header, body)


def pull() -> Command:
    header = PullMessageRequest("bench", TOPIC, 0, 0, PULL, PullFlag.SUBSCRIPTION, 0, 0, 0, "*")
    return request(RequestCode.PULL_MESSAGE, header)


def measure_all(sides: list[Side], rounds: int, messages: int, body: bytes) -> None:
    """Run every load with both sides, whose order changes from round to round."""
    batch = frames([send(0, encode_batch([BatchEntry(body, b"", 0)] * BATCH), is_batch=True)])
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            for load, (at_a_time, part) in SENDS.items():
                requests = frames([send(n, body) for n in range(at_a_time)])
                side.measure(load, requests, at_a_time, max(1, int(messages * part) // at_a_time))
            side.measure(f"sends in batches of {BATCH}", batch, 1, max(1, messages // BATCH), BATCH)
            side.measure(f"pulls of {PULL}", frames([pull() for _ in range(8)]), 8, max(1, messages // PULL // 2), PULL)
    for side in sides:  # the first round warms up
        for figures in (side.cpu_us, side.per_second):
            for values in figures.values():
                del values[0]


def figure(load: str, off: Side, on: Side) -> dict[str, object]:
    ratios = [b / a for a, b in zip(off.cpu_us[load], on.cpu_us[load], strict=True)]
    low, middle, high = (round((ratio - 1) * 100, 2) for ratio in statistics.quantiles(ratios, n=4))
    return {
        "load": load,
        "cpu_us": {name: round(statistics.median(side.cpu_us[load]), 2) for name, side in (("off", off), ("on", on))},
        "per_second": {
            name: round(statistics.median(side.per_second[load])) for name, side in (("off", off), ("on", on))
        },
        "cost_percent": {"median": middle, "quartiles": [low, high]},
    }


def scrape(side: Side, count: int = 10) -> dict[str, float]:
    cpu = cpu_seconds(side.pid)
    for _ in range(count):
        with urllib.request.urlopen(f"http://{side.metrics}/metrics") as answer:
            size = len(answer.read())
    return {"cpu_ms": round((cpu_seconds(side.pid) - cpu) / count * 1e3, 2), "bytes": size}


def callgrind(pid: int, *options: str) -> str:
    return subprocess.run(["callgrind_control", *options, str(pid)], capture_output=True, text=True, check=True).stdout


def executed(pid: int) -> int:
    return sum(int(count.replace(",", "")) for count in re.findall(r"(?m)^ +Th \d+ +([\d,]+)", callgrind(pid, "-e")))


def count(side: Side, messages: int, body: bytes) -> dict[str, float]:
    """Return load → instructions per message."""
    batch = frames([send(0, encode_batch([BatchEntry(body, b"", 0)] * BATCH), is_batch=True)])
    loads = {load: (frames([send(n, body) for n in range(many)]), many, 1) for load, (many, _) in SENDS.items()}
    loads[f"sends in batches of {BATCH}"] = batch, 1, BATCH
    loads[f"pulls of {PULL}"] = frames([pull() for _ in range(8)]), 8, PULL
    for requests, at_a_time, _ in loads.values():  # topics are created, headers cached, code is specialized
        for _ in range(max(4, 256 // at_a_time)):
            side.talk(requests, at_a_time)
    callgrind(side.pid, "-i", "on")
    found: dict[str, float] = {}
    for load, (requests, at_a_time, each) in loads.items():
        side.talk(requests, at_a_time)
        before, rounds = executed(side.pid), max(4, messages // at_a_time // each)
        for _ in range(rounds):
            side.talk(requests, at_a_time)
        found[load] = (executed(side.pid) - before) / (rounds * at_a_time * each)
    return found


def count_all(folder: Path, repetitions: int, messages: int, body: bytes) -> list[dict[str, object]]:
    """Return the figures of each load, of brokers that run under callgrind one after the other."""
    counted: dict[str, list[dict[str, float]]] = {name: [] for name in CONFS}
    for number in range(repetitions):
        for name, conf in CONFS.items():
            work = folder / f"{name}-{number}"
            told = f"--callgrind-out-file={work}.told"
            under = (*CALLGRIND, told, sys.executable, "-c", EVEN_CLOCK)
            with serve(work, f"{conf}messageIndexEnable=false\n", *under) as side:
                counted[name].append(count(side, messages, body))
    return [
        {
            "load": load,
            "instructions": {name: [round(one[load]) for one in found] for name, found in counted.items()},
            "cost_percent": [
                round((on[load] / off[load] - 1) * 100, 2)
                for off, on in zip(counted["off"], counted["on"], strict=True)
            ],
        }
        for load in counted["off"][0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--messages", type=int, help="default 5000, with --instructions 2048")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    options.messages = options.messages or (2048 if options.instructions else 5000)
    chosen = ("repetitions" if options.instructions else "rounds", "messages", "body_bytes")
    told = {"machine": platform.machine(), "python": platform.python_version()}
    told |= {name: getattr(options, name) for name in chosen}
    body = bytes(options.body_bytes)
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder, ExitStack() as stack:
        if options.instructions:
            loads = count_all(Path(folder), options.repetitions, options.messages, body)
            print(json.dumps({**told, "loads": loads}, indent=1))
            return
        off, on = (stack.enter_context(serve(Path(folder) / name, conf)) for name, conf in CONFS.items())
        measure_all([off, on], options.rounds, options.messages, body)
        loads = [figure(load, off, on) for load in off.cpu_us]
        print(json.dumps({**told, "loads": loads, "scrape": scrape(on)}, indent=1))


if __name__ == "__main__":
    main()
