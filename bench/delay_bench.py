"""Measures delayed messages: a million pending, a thousand becoming due every second. Prints JSON.

    python bench/delay_bench.py                                  against an `rmq standalone` started here
    python bench/delay_bench.py --pending 100000 --seconds 10    smaller and shorter

The pending messages lie over nine levels of an hour and more; the stream that becomes due meanwhile comes over nine
levels of 2 to 10 s. The error of a delivery is the store time of the delivered copy minus the time the message was sent
and its delay (so it counts the send, too); a consumer that waits with long polling sees it arrive a little later.
RSS is that of the server's process: all of it, and without the pages of mapped files (``RssAnon``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvloop

from rmqkit.protocol.codes import CURRENT_VERSION, RequestCode, ResponseCode, version_name
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.headers.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.headers.send import SendMessageV2Request
from rmqkit.protocol.record import iter_records
from rmqkit.remoting.client import RemotingClient

DUE_SECONDS = range(2, 11)
LEVELS = " ".join([f"{seconds}s" for seconds in DUE_SECONDS] + [f"{hours}h" for hours in range(1, 10)])
TOPIC, QUEUES, IN_FLIGHT = "BenchDelay", 4, 256
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pending", type=int, default=1_000_000, help="messages that wait all the time")
    parser.add_argument("--rate", type=int, default=1000, help="messages that become due in a second")
    parser.add_argument("--seconds", type=int, default=30, help="for which messages become due")
    parser.add_argument("--body-bytes", type=int, default=100)
    arguments = parser.parse_args()
    with server() as (broker, pid):
        figures = uvloop.run(measure(broker, pid, arguments))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    asked = {"version": version_name(CURRENT_VERSION), **vars(arguments)}
    print(json.dumps({"bench": "delay", **machine, **asked, "figures": figures}, indent=1))


@contextlib.contextmanager
def server() -> Iterator[tuple[str, int]]:
    """A standalone; its broker's address and its process."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        config = Path(folder) / "broker.conf"
        config.write_text(f"messageDelayLevel={LEVELS}\n")
        command = [sys.executable, "-m", "rmqkit", "standalone", "--host", "127.0.0.1", "--port", "0"]
        command += ["--namesrv-port", "0", "--store", str(Path(folder) / "store"), "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None, "stdout is piped"
            yield dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])["broker"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def measure(broker: str, pid: int, arguments: argparse.Namespace) -> dict[str, object]:
    client = RemotingClient()
    body = os.urandom(arguments.body_bytes)
    await send(client, broker, 0, body)
    empty = memory(pid)
    started = time.monotonic()
    await fill(client, broker, arguments.pending, body)
    filled_seconds = time.monotonic() - started
    pending = memory(pid)
    total = arguments.rate * arguments.seconds
    sending = asyncio.create_task(stream(client, broker, arguments.rate, total, body))
    errors: list[float] = []
    seen: list[float] = []
    cpu, highest = cpu_seconds(pid), dict(pending)
    async with asyncio.timeout(arguments.seconds + 60):
        async for due_ms, stored_ms, now_ms in arriving(client, broker, total):
            errors.append(stored_ms - due_ms)
            seen.append(now_ms - due_ms)
            if len(errors) % arguments.rate == 0:
                highest = {name: max(value, highest[name]) for name, value in memory(pid).items()}
    await sending
    cpu = cpu_seconds(pid) - cpu
    await client.close()
    return {
        "pending_sent_per_second": round(arguments.pending / filled_seconds) if arguments.pending else None,
        "delivery_error_ms": percentiles(errors),
        "seen_by_consumer_ms": percentiles(seen),
        "server_cpu_us_per_message": round(cpu / total * 1e6, 1),
        "rss_mb": {"empty": empty["VmRSS"], "with pending": pending["VmRSS"], "highest": highest["VmRSS"]},
        "rss_growth_mb": round(highest["VmRSS"] - empty["VmRSS"], 1),
        "anonymous_growth_mb": round(highest["RssAnon"] - empty["RssAnon"], 1),
    }


async def send(client: RemotingClient, broker: str, level: int, body: bytes, number: int = 0) -> None:
    """One message of a level; its body begins with the time it is due."""
    now_ms = time.time_ns() / 1e6
    delay_ms = DUE_SECONDS[level - 1] * 1000 if 0 < level <= len(DUE_SECONDS) else 0
    header = SendMessageV2Request(
        "bench", TOPIC, "TBW102", QUEUES, number % QUEUES, 0, int(now_ms), 0, properties=f"DELAY\x01{level}\x02"
    )
    due = f"{now_ms + delay_ms:017.3f}".encode()
    answer = await client.call(broker, request(RequestCode.SEND_MESSAGE_V2, header, due + body[len(due) :]), 30_000)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


async def fill(client: RemotingClient, broker: str, count: int, body: bytes) -> None:
    """Messages that wait for hours."""
    left = iter(range(count))
    first = len(DUE_SECONDS) + 1

    async def one_after_the_other() -> None:
        for number in left:
            await send(client, broker, first + number % 9, body, number)

    await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))


async def stream(client: RemotingClient, broker: str, rate: int, total: int, body: bytes) -> None:
    """A steady stream of messages that become due soon, over all the short levels."""
    start = time.monotonic()
    for first in range(0, total, 10):
        await asyncio.sleep(start + first / rate - time.monotonic())
        batch = range(first, min(first + 10, total))
        await asyncio.gather(*(send(client, broker, 1 + number % 9, body, number) for number in batch))


async def arriving(client: RemotingClient, broker: str, total: int) -> AsyncIterator[tuple[float, float, float]]:
    """Due, stored and seen, in ms, of the messages that are delivered."""
    arrivals: asyncio.Queue[tuple[float, float, float]] = asyncio.Queue()
    pulls = [asyncio.create_task(pull(client, broker, number, arrivals)) for number in range(QUEUES)]
    try:
        for _ in range(total):
            yield await arrivals.get()
    finally:
        for one in pulls:
            one.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)


async def pull(
    client: RemotingClient, broker: str, queue_id: int, arrivals: asyncio.Queue[tuple[float, float, float]]
) -> None:
    offset = 1 if queue_id == 0 else 0  # the first message made the topic
    while True:
        found = await client.call(broker, _pull_request(queue_id, offset), 30_000)
        now_ms = time.time_ns() / 1e6
        offset = decode_header(found, PullMessageResponse).next_begin_offset
        if found.code == ResponseCode.SUCCESS:
            for record in iter_records(found.payload):
                arrivals.put_nowait((float(record.body[:17]), record.store_timestamp, now_ms))


def _pull_request(queue_id: int, offset: int) -> Command:
    header = PullMessageRequest(
        consumer_group="bench",
        topic=TOPIC,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND,
        commit_offset=0,
        suspend_timeout_millis=15_000,
        sub_version=0,
        subscription="*",
    )
    return request(RequestCode.PULL_MESSAGE, header)


def memory(pid: int) -> dict[str, float]:
    """Resident memory of a process in MB: all of it, and without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if "Rss" in name or "VmRSS" in name
    }
    return {name: round(kilobytes[name] / 1024, 1) for name in ("VmRSS", "RssAnon")}


def cpu_seconds(pid: int) -> float:
    """User + system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


if __name__ == "__main__":
    main()
