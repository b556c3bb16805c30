"""The operator of a simulated cluster: requests of `rmqkit.admin` while clients work and faults happen. A request that
fails is not repeated: an operator sees the error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rmqkit.admin import Admin
from rmqkit.errors import RmqError
from tests.simulation.clients import TOPICS_OF

if TYPE_CHECKING:
    from tests.simulation.run import Run

HOT_SETTINGS = (
    ("flushIntervalCommitLog", "50"),
    ("flushConsumeQueueThoroughInterval", "300"),
    ("maxTransferCountOnMessageInMemory", "3"),
    ("maxTransferBytesOnMessageInMemory", "2000"),
    ("syncFlushTimeout", "1000"),
)
"""Settings that a broker takes while it runs."""


def reset(run: Run, group: str) -> None:
    """Move a group to the beginning of its topics."""

    async def work(admin: Admin) -> None:
        for topic in sorted(TOPICS_OF[run.plan.groups[group]]):
            await admin.offsets.reset(group, topic, 0)

    ask(run, f"reset of {group}", work)


def widen(run: Run, topic: str, queues: int) -> None:
    """Give a topic more queues. It never gets fewer: nobody would read the messages in the others."""
    queues = run.widest[topic] = max(queues, run.widest.get(topic, 0))

    async def work(admin: Admin) -> None:
        for master in run.cluster.masters:
            name = str(master.settings["brokerName"])
            await admin.topics.create(topic, broker=name, read_queues=queues, write_queues=queues)

    ask(run, f"{queues} queues for {topic}", work)


def configure(run: Run, broker: str, index: int) -> None:
    """Change one of `HOT_SETTINGS`."""
    key, value = HOT_SETTINGS[index % len(HOT_SETTINGS)]
    ask(run, f"{key}={value} at {broker}", lambda admin: admin.brokers.update_config({key: value}, broker))


def expire(run: Run, broker: str) -> None:
    """Let a broker delete expired files."""
    ask(run, f"expired files of {broker}", lambda admin: admin.brokers.clean("expired-commitlog", broker))


def ask(run: Run, what: str, work: Callable[[Admin], Awaitable[object]]) -> None:
    """Let an operator do something. Note a failure in the story."""

    async def main() -> None:
        try:
            async with Admin(run.cluster.addresses, timeout_ms=3000) as admin:
                await work(admin)
            run.world.note("operator", what, "done")
        except RmqError as error:
            run.world.note("operator", what, error)

    run.world.process("operator", main)
