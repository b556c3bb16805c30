"""The loads of `rmq bench client`, for clients that block: the same names, counts and bodies."""

import abc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 3
THREADS = 64
SMALL_BODY_BYTES = 100


class Load(abc.ABC):
    """A client for the measured loads."""

    @abc.abstractmethod
    def __init__(self, namesrv: str) -> None: ...

    @abc.abstractmethod
    def send(self, topic: str, body: bytes) -> None: ...

    @abc.abstractmethod
    def send_many(self, topic: str, body: bytes, count: int) -> None: ...

    @abc.abstractmethod
    def consume(self, topic: str, count: int) -> None: ...


def main(kind: Callable[[str], Load]) -> None:
    """Run a client: NAMESRV PREFIX MESSAGES BODY_BYTES. The topics PREFIX and PREFIX-many are for sends. PREFIX-0 … and
    PREFIX-many-0 … hold MESSAGES messages for consumers, a new pair for each round."""
    namesrv, prefix, count, body_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    body = random.Random(1).randbytes(body_bytes)
    small_body = body[:SMALL_BODY_BYTES]
    load = kind(namesrv)
    for topic in (prefix, f"{prefix}-many"):
        load.send(topic, small_body)  # send one first: some clients find no route when many threads request it at once
    works: dict[str, Callable[[int], int | None]] = {
        f"awaited sends in {THREADS} tasks, {body_bytes:,} B": lambda _: sends(load, prefix, body, count),
        f"send_many, {SMALL_BODY_BYTES} B": lambda _: load.send_many(f"{prefix}-many", small_body, count),
        f"consumed, no-op handler, {body_bytes:,} B": lambda turn: load.consume(f"{prefix}-{turn}", count),
        f"consumed, no-op handler, {SMALL_BODY_BYTES} B": lambda turn: load.consume(f"{prefix}-many-{turn}", count),
    }
    best: dict[str, dict[str, Any]] = {}
    for turn in range(ROUNDS):
        for what, work in works.items():
            try:
                figure = timed(what, lambda: work(turn), count)  # noqa: B023
            except Exception as error:  # noqa: BLE001
                print(f"{what}, round {turn}: {error!r}", file=sys.stderr)
                continue
            if what not in best or figure["client_cpu_us"] < best[what]["client_cpu_us"]:
                best[what] = figure
    print(json.dumps({"figures": list(best.values())}), flush=True)
    os._exit(0)  # do not measure the work of the clients' threads at the end of an interpreter


def sends(load: Load, topic: str, body: bytes, count: int) -> int:
    """Send from all threads. Return the number of failures."""
    failed = [0] * THREADS

    def in_a_thread(thread: int) -> None:
        for _ in range(count // THREADS):
            try:
                load.send(topic, body)
            except Exception:  # noqa: BLE001
                failed[thread] += 1

    threads = [threading.Thread(target=in_a_thread, args=(thread,)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(failed)


def timed(what: str, work: Callable[[], int | None], count: int) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    failed = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figure = {"what": what, "client_cpu_us": round(cpu / count * 1e6, 2), "messages_per_second": round(count / wall)}
    return {**figure, "failed": failed} if failed else figure
