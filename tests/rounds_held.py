"""The periodic work of a broker at its size limits, and the CPU time for which each task holds the event loop.

A broker is filled with many topics, groups, offsets, locks, half messages and messages in flight. Then each task runs
once. The result is the CPU time of its longest callback on the loop. ``python -m tests.rounds_held`` prints the table
(`make loop-held`); `tests.broker.test_loop_not_held` checks it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rmqkit.broker.context import BrokerContext, Lifecycle
from rmqkit.broker.messages import to_half
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.store.settings import StoreSettings
from tests.loop_held import MAX_SECONDS, Held, table
from tests.set_clock import SetClock
from tests.store.stores import message
from tests.strangers import Callbacks, measured

__all__ = ["rounds_held"]

TOPICS, GROUPS, QUEUES = 20_000, 20_000, 8
HALVES, IN_FLIGHT, BY_POP = 20_000, 100_000, 32
HOUR_MS = 3_600_000


class Rounds(Lifecycle):
    """Collects the periodic work instead of starting it."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[str, Callable[[], object]] = {}

    def every(self, seconds: float, work: Callable[[], object], name: str, first_seconds: float | None = None) -> None:
        self.rounds[name] = work


async def rounds_held(root: Path, *, scale: float = 1.0) -> list[Held]:
    """Return how long each periodic task of a full broker holds the loop, the longest first.

    ``scale``: the fraction of the limits to which the broker is filled."""
    clock, lifecycle = SetClock(), Rounds()
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="b", transaction_timeout_ms=1000)
    broker = Broker(settings, StoreSettings(commit_log_file_bytes=64 << 20), root, clock=clock)
    broker._lifecycle = lifecycle
    await broker.start()
    try:
        await _fill(broker.context, scale)
        clock.ahead_ms = HOUR_MS
        found: list[Held] = []
        with measured() as callbacks:
            for name, work in lifecycle.rounds.items():
                found.append(await _held(callbacks, name, work))
        return sorted(found, reverse=True)
    finally:
        await broker.stop()


async def _held(callbacks: Callbacks, name: str, work: Callable[[], object]) -> Held:
    await asyncio.sleep(0)
    callbacks.reset()

    async def run() -> None:
        done = work()
        if inspect.isawaitable(done):
            await done

    await asyncio.create_task(run(), name=name)
    return Held(callbacks.longest, name, "", callbacks.which)


async def _fill(context: BrokerContext, scale: float) -> None:
    topics, groups, halves, in_flight = (int(count * scale) for count in (TOPICS, GROUPS, HALVES, IN_FLIGHT))
    for number in range(topics):
        context.topics.ensure(f"T{number}", QUEUES, soon=True)
    for number in range(groups):
        context.groups.get(f"G{number}")
        context.offsets.commit(f"G{number}", f"T{number % topics}", number % QUEUES, 1)
        context.statistics.add("GROUP_GET_NUMS", f"T{number % topics}@G{number}")
        context.queue_locks.lock(f"G{number}", "c", [MessageQueue(f"T{number % topics}", "b", 0)])
    for _ in range(halves):
        context.store.put(to_half(message("T0", body=b"half", PGROUP="p")))
    for number in range(halves):
        context.ops.add(0, number)
    await asyncio.sleep(0)
    assert context.pop is not None, "the master serves pop requests"
    context.topics.ensure("Popped", 1)
    for _ in range(in_flight):
        context.store.put(message("Popped", body=b"m"))
    check_points = context.pop.check_points
    for start in range(0, in_flight, BY_POP):
        offsets = list(range(start, min(start + BY_POP, in_flight)))
        popped = {"pop_time": context.clock.now_ms(), "invisible_ms": 1000, "queue": start % 8}
        check_points.add("Popped", "G0", 0, offsets, **popped)


def main() -> int:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as root:
        found = asyncio.run(rounds_held(Path(root)))
    print(table(found, len(found)))
    return int(found[0].seconds > MAX_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
