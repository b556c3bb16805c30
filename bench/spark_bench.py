"""What reading a commit log costs, with and without Spark, in CPU seconds of this process and its children.

    .venv/bin/python bench/spark_bench.py [--mib 256] [--body 1024] [--repeats 3] [--no-spark]

Prints JSON: per case the least CPU seconds of the repeats, messages and MiB per CPU second, and ratios. Cases of one
group run interleaved, so that a busy machine disturbs them alike; compare ratios, not numbers of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rmqkit.protocol.message import messages_of_record
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import decode_record, encode_record, pack_host
from rmqkit.spark.reader import read_split
from rmqkit.spark.splits import Split
from rmqkit.spark.store_source import read_plan, store_options, store_splits
from rmqkit.store import scan

_SEED = 7
_HOST = pack_host("127.0.0.1", 10911)


def main() -> None:
    """Make a store, measure every case, print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the commit log")
    parser.add_argument("--body", type=int, default=1024, help="bytes of a body")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-spark", action="store_true", help="only what needs no Java")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        count = write_store(root, asked.mib << 20, asked.body)
        cases = plain_cases(root)
        measured = measure(cases, asked.repeats)
        if not asked.no_spark:
            measured |= measure_spark(root, asked.repeats)
    report = {name: rates(seconds, count, asked.mib) for name, seconds in measured.items()}
    about = {"python": platform.python_version(), "cpus": os.cpu_count(), "seed": _SEED, "messages": count}
    json.dump({"about": about | vars(asked), "cases": report}, sys.stdout, indent=1)
    print()


def write_store(root: Path, size: int, body_bytes: int) -> int:
    """One full commit log file of messages with unique bodies; returns how many."""
    rng = random.Random(_SEED)
    data = bytearray()
    count = 0
    while len(data) < size:
        properties = {"KEYS": f"key-{count}", "UNIQ_KEY": f"{count:032X}", "WAIT": "true", "TAGS": f"Tag{count % 5}"}
        data += encode_record(
            topic=b"topic-%d" % (count % 8), queue_id=count % 4, flag=0, queue_offset=count // 32,
            physical_offset=len(data), sys_flag=0, born_timestamp=1_700_000_000_000 + count, born_host=_HOST,
            store_timestamp=1_700_000_000_001 + count, store_host=_HOST, reconsume_times=0,
            prepared_transaction_offset=0, body=rng.randbytes(body_bytes), properties=encode_properties(properties),
        )  # fmt: skip
        count += 1
    (root / "commitlog").mkdir()
    (root / "commitlog" / f"{0:020d}").write_bytes(data)
    return count


def plain_cases(root: Path) -> dict[str, Callable[[], object]]:
    """The kernels in this process, on one core."""
    path = next((root / "commitlog").iterdir())
    whole = Split(str(path), 0, 0, path.stat().st_size)
    columns = [c for c in read_plan(store_options({"path": str(root)}), []).columns if c.name != "properties"]

    def read(*names: str, **given: str) -> Callable[[], object]:
        plan = read_plan(store_options({"path": str(root), **given}), names)
        return lambda: sum(batch.num_rows for batch in read_split(whole, plan))

    return {
        "plain decoder": lambda: sum(1 for _ in plain_messages(path)),
        "walk": lambda: sum(len(part) for part in scan.walk(path.read_bytes(), 0) if isinstance(part, scan.Records)),
        "read all columns": read(),
        "read all but the properties map": read(*(c.name for c in columns)),
        "read all but body": read(includeBody="false"),
        "read 3 numbers": read("queueId", "queueOffset", "storeSize"),
        "read all, check CRC": read(verifyCrc="fail"),
        "plan splits": lambda: store_splits(store_options({"path": str(root)})),
    }


def plain_messages(path: Path) -> Iterator[object]:
    """What the kernels replace: one record, one message, one dict at a time."""
    data = path.read_bytes()
    position = 0
    while position < len(data):
        record = decode_record(data, position)
        position += record.size
        yield from messages_of_record(record)


def measure_spark(root: Path, repeats: int) -> dict[str, float]:
    """The same inside Spark on local[2], JVM and workers included, to a sink that throws rows away."""
    from rmqkit.spark import spark_session

    spark = spark_session("bench", "local[2]")

    def scan_of(**options: str) -> Callable[[], object]:
        reader = spark.read.format("rocketmq-store").options(splitBytes="64m", **options)
        return lambda: reader.load(str(root)).write.format("noop").mode("overwrite").save()

    def filtered(pushdown: str) -> Callable[[], object]:
        reader = spark.read.format("rocketmq-store").options(splitBytes="64m", filterPushdown=pushdown)
        condition = "topic = 'topic-3' and queueId = 3"
        return lambda: reader.load(str(root)).where(condition).write.format("noop").mode("overwrite").save()

    cases = {
        "spark all columns": scan_of(),
        "spark all but body": scan_of(includeBody="false"),
        "spark 3 numbers": scan_of(columns="queueId,queueOffset,storeSize"),
        "spark filter of 1/8, in spark": filtered("false"),
        "spark filter of 1/8, in the reader": filtered("true"),
    }
    cases["spark all columns"]()  # starts the workers
    clock = java_and_children(spark)
    measured = measure(cases, repeats, clock)
    spark.stop()
    return measured


def java_and_children(spark: Any) -> Callable[[], float]:
    """CPU seconds so far of this process, the JVM below it and the Python workers below that."""
    java = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    ticks = os.sysconf("SC_CLK_TCK")

    def seconds() -> float:
        total = 0.0
        parents: dict[int, int] = {}
        used: dict[int, float] = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            process = int(status.parent.name)
            parents[process] = int(fields[1])
            used[process] = sum(map(int, fields[11:15])) / ticks  # its own and its reaped children's
        for process in used:
            ancestor = process
            while ancestor not in (0, java):
                ancestor = parents.get(ancestor, 0)
            total += used[process] if ancestor == java else 0.0
        return total + own_cpu()

    return seconds


def own_cpu() -> float:
    """User and system seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(
    cases: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = own_cpu
) -> dict[str, float]:
    """The least CPU seconds of each case, the cases taking turns."""
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(repeats):
        for name, case in cases.items():
            start = clock()
            case()
            least[name] = min(least[name], clock() - start)
    return least


def rates(seconds: float, messages: int, mib: int) -> dict[str, float]:
    """CPU seconds as a rate."""
    return {
        "cpu_s": round(seconds, 3),
        "messages_per_cpu_s": round(messages / seconds),
        "mib_per_cpu_s": round(mib / seconds),
    }


if __name__ == "__main__":
    main()
