"""A broker that is stopped under a hundred clients of Apache's SDKs, ``make kill T=sdks``: they must receive again
within 5 s, and no answered message may be lost.

Each program runs ``load`` of `tests.interop.sdks`: a producer, a push consumer and a simple consumer with a topic and
groups of their own. Each language has the same number of programs, ``--clients`` in all. The result for each language
is that of its slowest consumer: seconds from the broker's ready line to the first message that was sent after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path

from rmqkit.admin import Admin
from tests.faults.grpc_broker import GrpcBroker
from tests.interop.kit import Unavailable
from tests.interop.sdks.programs import LOAD, SDKS, Program, Running
from tests.interop.server_process import wait_until

CLIENTS_EACH = 1 + len(LOAD)
SECONDS_MAX = 200.0
WANTED_SECONDS = 5.0


def programs(names: list[str]) -> dict[str, Program]:
    """Return the programs that this machine can run, and print why it cannot run the others."""
    found = {}
    for language in names:
        try:
            found[language] = SDKS[language]()
        except Unavailable as reason:
            print(f"sdk-restart: no {language}: {reason}", flush=True)
    return found


async def make(broker: GrpcBroker, prefixes: list[str]) -> None:
    async with Admin(broker.name_server) as admin:
        for prefix in prefixes:
            how = {"read_queues": 2, "write_queues": 2, "attributes": "+message.type=NORMAL"}
            await admin.topics.create(f"{prefix}-load", broker=broker.broker, **how)


def restart(folder: Path, clients: int, languages: dict[str, Program]) -> dict[str, dict[str, float]]:
    """Return the seconds by language and kind of consumer, and the number of answered messages that did not arrive."""
    each = max(1, clients // CLIENTS_EACH // len(languages))
    names = {language: [f"{language}-{number}" for number in range(each)] for language in languages}
    with ExitStack() as stack:
        broker = GrpcBroker(folder, {"brokerName": "broker-a"})
        stack.callback(broker.kill)
        broker.start()
        asyncio.run(make(broker, [prefix for prefixes in names.values() for prefix in prefixes]))
        running = {
            prefix: stack.enter_context(Running(languages[language], folder / prefix, broker.address, prefix, "load"))
            for language, prefixes in names.items()
            for prefix in prefixes
        }
        count = len(running) * CLIENTS_EACH
        print(f"sdk-restart: {count} clients of {', '.join(languages)}", flush=True)

        def all_receive(sent_ms: float) -> bool:
            return all(one.first_since(sent_ms).keys() == set(LOAD) for one in running.values())

        try:
            wait_until(lambda: all_receive(0), SECONDS_MAX, "the first message of every consumer")
        except TimeoutError:
            for prefix, one in running.items():
                if without := sorted(set(LOAD) - one.first_since(0).keys()):
                    print(f"sdk-restart: {prefix} had no message: {', '.join(without)}", flush=True)
            raise
        stopped = time.monotonic()
        broker.stop()
        broker.start()
        ready, ready_ms = time.monotonic(), time.time() * 1000
        print(f"sdk-restart: the broker was away for {ready - stopped:.1f} s", flush=True)
        with suppress(TimeoutError):  # the report below shows the late consumers
            wait_until(lambda: all_receive(ready_ms), SECONDS_MAX, "a message of every consumer")
        outcome: dict[str, dict[str, float]] = {}
        for language, prefixes in names.items():
            seconds: defaultdict[str, list[float]] = defaultdict(list)
            for prefix in prefixes:
                for way in LOAD:
                    at = running[prefix].first_since(ready_ms).get(way)
                    seconds[way].append(SECONDS_MAX if at is None else at - ready)
            outcome[language] = {way: round(max(found), 2) for way, found in seconds.items()}
        for one in running.values():
            one.end_load()
        for language, prefixes in names.items():
            for prefix in prefixes:
                wait_until(lambda prefix=prefix: running[prefix].has_told("load"), SECONDS_MAX, "the end of the load")
            lost = [running[prefix].facts("load") for prefix in prefixes]
            outcome[language]["lost"] = sum(sum(one.values()) if "error" not in one else 1 for one in lost)
        return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.faults.sdk_restart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100, help="(100)")
    parser.add_argument("--languages", default=",".join(SDKS), help=f"({','.join(SDKS)})")
    given = parser.parse_args()
    languages = programs(given.languages.split(","))
    if not languages:
        return 1
    with tempfile.TemporaryDirectory(prefix="rmq-sdk-restart-") as folder:
        outcome = restart(Path(folder), given.clients, languages)
    print(json.dumps(outcome))
    lost = sum(found["lost"] for found in outcome.values())
    late = [name for name, found in outcome.items() if max(found[way] for way in LOAD) > WANTED_SECONDS]
    print(f"sdk-restart: {lost:.0f} LOST" if lost else "sdk-restart: nothing answered was lost")
    print(f"sdk-restart: later than {WANTED_SECONDS:.0f} s: {', '.join(late) or 'none'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
