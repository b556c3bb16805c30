"""Programs that run for minutes or hours, with one command for each kind: ``make kill T=ha``, ``make soak T=grpc``,
``make bench T=pop``. Without ``T`` the command lists the names. All words after the name are passed to the program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["KINDS", "Program", "arguments", "listing"]

_ROOT = Path(__file__).parents[1]
_APACHE = "needs Java 17 and Maven"


class Program(NamedTuple):
    """A module or a script, with its first arguments, and what it does in one line."""

    place: str
    text: str
    words: tuple[str, ...] = ()


KINDS: dict[str, dict[str, Program]] = {
    "kill": {
        "store": Program(
            "tests.faults.crash", "2,000 simulated power cuts and 500 SIGKILLs under the store; 10 minutes"
        ),
        "ha": Program("tests.faults.ha.crash", "100 SIGKILLs for master and slave with bad links; 5 minutes"),
        "disk": Program("tests.faults.refusing", "a disk that refuses each operation on each kind of file; 10 minutes"),
        "damage": Program("tests.faults.damage", "500 random damages to stopped stores: nothing is lost silently"),
        "archive": Program("tests.faults.archive", "200 SIGKILLs while a store archives its log; 5 minutes"),
        "archive-mixed": Program("tests.faults.archive_mixed", "50 SIGKILLs for a broker with an archive; 6 minutes"),
        "archive-damage": Program(
            "tests.faults.archive_damage", "200 rounds of damage to archived segments under consumers; 4 minutes"
        ),
        "console": Program("tests.console.killed", "10,000 dead letters replayed by a console that is killed 3 times"),
        "grpc": Program("tests.faults.grpc_restart", "100 gRPC clients while the broker is killed 20 times"),
        "sse": Program(
            "tests.faults.sse", "1,000 chats in browsers under 10 kills of broker, writer and gateway; 2 minutes"
        ),
        "sdks": Program("tests.faults.sdk_restart", "100 clients of Apache's SDKs while the broker restarts"),
        "beside-kafka": Program(
            "tests.interop.streams.beside", f"streams of ours and of Spark's Kafka source in 37 situations; {_APACHE}"
        ),
        "streams": Program("tests.faults.spark.streams", "2,000,000 messages through a Spark stream under kills"),
        "eos": Program(
            "tests.faults.spark.eos", "200 kills under the transactional Spark sink, ours and Apache's broker"
        ),
        "cluster": Program(
            "tests.faults.spark.eos",
            "20 kills each of driver, executor, worker, broker: from topic to topic on a Spark cluster; 40 minutes",
            ("--each", "20", "--source", "topic", "--server", "rmqkit"),
        ),
    },
    "soak": {
        "clients": Program("tests.faults.soak", "clients of every kind under load; --seconds 1800"),
        "grpc": Program("tests.faults.grpc_soak", "gRPC clients that come and go; --minutes 60"),
    },
    "bench": {
        "start": Program("rmqkit", "this machine: send, pull, a store, Spark; a minute", ("bench", "start")),
        "broker": Program("bench/broker_bench.py", f"our broker and Apache's under the same Java load; {_APACHE}"),
        "pop": Program("bench/beside_apache.py", f"pops and acks at our broker and at Apache's; {_APACHE}", ("pop",)),
        "timer": Program("bench/beside_apache.py", f"a million timed messages at both brokers; {_APACHE}", ("timer",)),
        "chooser": Program("bench/chooser_bench.py", f"rmqkit beside Apache RocketMQ, Kafka and NATS; {_APACHE}, Go"),
        "grpc": Program(
            "bench/grpc_bench.py",
            f"gRPC at our broker, at rmq proxy and at Apache's proxy; {_APACHE}",
            ("--out", "bench/figures/grpc.json"),
        ),
        "grpc-cpu": Program("bench/grpc_cpu.py", "CPU of a send, a receive and an ack of gRPC in one process"),
        "ha": Program("bench/ha_bench.py", f"masters with slaves: rates, lag, catch-up, beside Apache's; {_APACHE}"),
        "spark": Program("rmqkit", "the Spark pipeline beside other ways; 15 minutes", ("bench", "spark")),
        "spark-kafka": Program(
            "bench/spark_kafka.py", f"a stream of a million messages beside Spark's Kafka source; {_APACHE}"
        ),
        "lite": Program(
            "bench/lite_bench.py", "a million lite topics, appends, waiting readers, 10,000 sessions; 20 minutes"
        ),
        "recovery": Program("bench/recovery_bench.py", "seconds until a killed store is ready: 16,000 queues, 2 GiB"),
        "archive": Program("bench.archive_bench", "reading from an archive beside the log it was made of"),
    },
}


def listing(kind: str) -> str:
    """Return the programs of a kind, one in each line."""
    return "\n".join(f"  make {kind} T={name:15} {program.text}" for name, program in KINDS[kind].items())


def arguments(kind: str, name: str, rest: list[str]) -> list[str]:
    """Return the command line of a program.

    Raises LookupError: the kind has no program of that name. The text lists the names."""
    if (program := KINDS[kind].get(name)) is None:
        raise LookupError(f"make {kind}: no program {name!r}; there are:\n{listing(kind)}")
    start = [program.place] if program.place.endswith(".py") else ["-m", program.place]
    return [sys.executable, *start, *program.words, *rest]


def main() -> None:
    kind, name, *rest = [*sys.argv[1:], ""][: max(2, len(sys.argv) - 1)]
    if not name:
        print(listing(kind))
        return
    try:
        command = arguments(kind, name, rest)
    except LookupError as error:
        sys.exit(str(error))
    os.chdir(_ROOT)
    os.execve(sys.executable, command, os.environ | {"GRPC_VERBOSITY": "ERROR"})


if __name__ == "__main__":
    main()
