"""What telling metrics costs a broker: one `rmq standalone` without and one with, loaded by turns. Prints JSON.

    python bench/metrics_bench.py [--rounds 60] [--messages 5000] [--body-bytes 1024]

| Figure | What it is |
|---|---|
| ``cpu_us`` | user + system time of the process per message, the median of all rounds, without and with metrics |
| ``per_second`` | messages per second, the same way; requests are ready bytes, so that the broker sets the pace |
| ``cost_percent`` | how much more CPU time with metrics: the median of the rounds' ratios, and their quartiles |
| ``scrape`` | milliseconds of CPU time and bytes of one read of ``/metrics``, which the loads do not include |

Rounds are short and many and the sides take turns, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_command, encode_command, request
from rmqkit.protocol.frame import FrameSplitter
from rmqkit.protocol.headers.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.headers.send import SendMessageV2Request
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ

TOPIC, BATCH, PULL, QUEUES = "BenchMetrics", 32, 32, 4
SENDS = {"sends, 1 in flight": (1, 0.15), "sends, 8 in flight": (8, 0.5), "sends, 256 in flight": (256, 1.0)}
"""Load → how many at a time, and the part of the messages that are sent so."""


@dataclass
class Side:
    """A broker and what it was measured with."""

    pid: int
    connection: socket.socket
    metrics: str
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    per_second: dict[str, list[float]] = field(default_factory=dict)

    def talk(self, requests: bytes, count: int) -> None:
        """Send requests and read as many answers. Raises RuntimeError: one is no success."""
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


def cpu_seconds(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)


@contextmanager
def serve(work: Path, conf: str) -> Iterator[Side]:
    work.mkdir()
    config = work / "broker.conf"
    config.write_text(conf)
    ports = ("--host", "127.0.0.1", "--namesrv-port", "0", "--port", "0")
    with ServerProcess([RMQ, "standalone", *ports, "--store", work / "store", "-c", config], work / "log") as process:
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
    """Every load at both sides, whose order changes from round to round."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--body-bytes", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder, ExitStack() as stack:
        confs = {"off": "", "on": "metricsExporterType=PROM\nmetricsPromExporterPort=0\n"}
        off, on = (stack.enter_context(serve(Path(folder) / name, conf)) for name, conf in confs.items())
        measure_all([off, on], options.rounds, options.messages, bytes(options.body_bytes))
        loads = [figure(load, off, on) for load in off.cpu_us]
        told = {"machine": platform.machine(), "python": platform.python_version(), **vars(options)}
        print(json.dumps({**told, "loads": loads, "scrape": scrape(on)}, indent=1))


if __name__ == "__main__":
    main()
