"""The main job from end to end, for a person to watch: ``make demo``.

A name server and a broker start, 10,000 messages go through them, the broker is stopped and started again, and a Spark
job reads the broker's files. Everything lives in a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rmqkit import Message, Producer, PullConsumer, PushConsumer, ReceivedMessage

TOPIC = "Orders"
TAGS = ("created", "paid", "shipped", "cancelled")
IN_FLIGHT = 256
SECONDS_MAX = 60

console = Console(highlight=False)


@dataclass
class Standalone:
    """A running ``rmq standalone``."""

    process: subprocess.Popen[str]
    ready: str

    @property
    def namesrv(self) -> str:
        return dict(word.split("=", 1) for word in self.ready.split()[1:])["namesrv"]


@contextmanager
def standalone(store: Path) -> Iterator[Standalone]:
    """Start ``rmq standalone`` on free ports; stop it with SIGTERM."""
    command = [
        sys.executable,
        "-m",
        "rmqkit",
        "standalone",
        "--namesrv-port",
        "0",
        "--port",
        "0",
        "--store",
        str(store),
    ]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "stdout is piped"
    ready = process.stdout.readline().strip()
    if not ready.startswith("ready "):
        raise SystemExit(f"demo: the broker did not start (exit code {process.wait()}): see its message above")
    console.print(f"  {ready}  [dim]({(time.perf_counter() - started) * 1000:.0f} ms)[/dim]", soft_wrap=True)
    try:
        yield Standalone(process, ready)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=SECONDS_MAX)
        left = "an abort file is left" if (store / "abort").exists() else "no abort file left"
        console.print(f"  stopped by SIGTERM: exit code {code}, {left}")


def progress() -> Progress:
    return Progress(
        TextColumn("  {task.description:<10}"), BarColumn(40), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        console=console,
    )  # fmt: skip


async def produce_and_consume(namesrv: str, count: int) -> set[str]:
    """Send and receive at the same time; returns the ids of what was acknowledged."""
    sent: set[str] = set()
    received: Counter[str] = Counter()
    complete = asyncio.Event()
    consumer = PushConsumer("demo-billing", namesrv)
    with progress() as bars:
        sending, receiving = (bars.add_task(name, total=count, rate="") for name in ("produced", "consumed"))

        async def consume(message: ReceivedMessage) -> None:
            if message.msg_id == opening.msg_id:
                return
            received[message.msg_id] += 1
            bars.update(receiving, completed=len(received))
            if len(received) == count:
                complete.set()

        async def produce(producer: Producer, numbers: Iterator[int]) -> None:
            for i in numbers:
                message = Message(topic=TOPIC, body=b"%d" % i * 40, tags=TAGS[i % 4], keys=[f"order-{i}"])
                sent.add((await producer.send(message)).msg_id)
                bars.update(sending, completed=len(sent))

        consumer.subscribe(TOPIC, "*", consume)
        async with Producer("demo-shop", namesrv) as producer:
            opening = await producer.send(TOPIC, b"the first one makes the topic", tags="opening")
            started = time.perf_counter()
            numbers = iter(range(count))
            async with consumer:
                await asyncio.gather(*(produce(producer, numbers) for _ in range(IN_FLIGHT)))
                bars.update(sending, rate=f"{count / (time.perf_counter() - started):,.0f}/s")
                async with asyncio.timeout(SECONDS_MAX):
                    await complete.wait()
                bars.update(receiving, rate=f"{count / (time.perf_counter() - started):,.0f}/s")
    missing = sent - received.keys()
    console.print(f"  {len(sent):,} acknowledged, {len(missing)} of them not consumed")
    return sent


async def read_again(namesrv: str) -> set[str]:
    """The ids of everything in the topic, read queue by queue from the beginning."""
    found: set[str] = set()
    async with PullConsumer("demo-audit", namesrv) as consumer:
        for queue in await consumer.queues(TOPIC):
            offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
            while offset < end:
                result = await consumer.pull(queue, offset)
                found.update(message.msg_id for message in result.messages)
                offset = result.next_begin_offset
    return found


def spark_pipeline(store: Path, report: Path) -> None:
    """Print the results of ``rmq pipeline summary``, ``verify`` and ``audit`` from one Spark session over the files."""
    from rmqkit.spark import spark_session
    from rmqkit.spark.commands.session import collect, show
    from rmqkit.spark.jobs.audit import audit
    from rmqkit.spark.jobs.audit_report import findings, write_report
    from rmqkit.spark.jobs.summary import summary
    from rmqkit.spark.jobs.verify import verify

    with console.status("  starting Spark"):
        spark = spark_session("rmqkit demo", master="local[2]")
        rows = collect(summary(spark, str(store)))
    show(rows, as_json=False)
    with console.status("  verifying and auditing"):
        verified = verify(spark, str(store))
        found = audit(spark, str(store), period_seconds=1)
        spark.stop()
    looked_at = ", ".join(f"{count:,} {what}" for what, count in verified.checked.items())
    console.print(
        f"  verified: [bold]{'sound' if verified.is_sound else 'damaged'}[/bold], {looked_at}", soft_wrap=True
    )
    for title, finding in findings(found)[:3]:
        console.print(f"  {title.lower()}: {finding}", soft_wrap=True)
    write_report(found, report)
    console.print(f"  all of it, with plots: {report}", soft_wrap=True)


def headline(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    count = parser.parse_args().messages
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rmq-demo-") as folder:
        store = Path(folder) / "store"
        headline("1  A name server and a broker start")
        with standalone(store) as server:
            headline(f"2  {count:,} messages with {len(TAGS)} tags go through, {IN_FLIGHT} in flight")
            sent = asyncio.run(produce_and_consume(server.namesrv, count))
            headline("3  The broker stops and starts again on the same files")
        with standalone(store) as server:
            lost = sent - asyncio.run(read_again(server.namesrv))
            console.print(f"  read again from the beginning: {len(sent) - len(lost):,} of {len(sent):,} found, "
                          f"[bold]{len(lost)} lost[/bold]")  # fmt: skip
        headline("4  Spark reads the store's files: counts, a check of everything, an audit")
        spark_pipeline(store, Path(tempfile.gettempdir()) / "rmq-demo-audit.html")
    if lost:
        raise SystemExit(f"demo: {len(lost)} acknowledged messages were lost")
    console.print(f"\nDone in {time.perf_counter() - started:.0f} s. Go on: start .venv/bin/rmq standalone, then run "
                  f"the client example of README.md.", soft_wrap=True)  # fmt: skip


if __name__ == "__main__":
    main()
