"""The objects that the table of admin commands needs, in Apache's servers and in ours: the same topics, groups,
messages and clients; and the code that runs a row of the table.

A `Row` is data: a command of mqadmin, our command, and the expected outcome. Rows run in the order of their list, each
in both worlds. A row that destroys an object creates it first, with a name that begins with ``row_``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from typer.testing import CliRunner

from rmqkit import Message, sync
from rmqkit.admin import Admin
from rmqkit.cli import app
from rmqkit.client.runtime.settings import StartFrom
from rmqkit.errors import RmqError, UnknownName, exit_code
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from tests.patience import TIMEOUT_MS, producing, pushing

SECONDS_MAX = 150
QUEUES = 4
MESSAGE_COUNT = 12
TOPIC, EMPTY = "AdminWorld", "AdminWorldEmpty"
GROUP, TWIN, ONLINE, PRODUCERS = "admin_world", "admin_world_twin", "admin_world_online", "admin_world_producers"


@dataclass(frozen=True, slots=True)
class Stored:
    """One message of the world."""

    key: str
    tag: str
    unique_key: str
    message_id: str
    queue_id: int
    queue_offset: int
    store_timestamp: int


@dataclass(slots=True)
class World:
    """Servers with objects for the commands.

    Attributes:
        topic: 4 queues, 12 messages in turn: key-0 … key-11, tag A for even ones, B for odd, body ``message n``.
        empty: a topic with 4 queues and no message.
        group: not online, with offset 1 in every queue of `topic`.
        twin: a group without offsets.
        online: the group of a connected consumer that consumed everything; its client is `client_id`.
        producers: the group of a connected producer.
    """

    side: str
    namesrv: str
    broker: str
    broker_name: str
    cluster: str
    topic: str = TOPIC
    empty: str = EMPTY
    group: str = GROUP
    twin: str = TWIN
    online: str = ONLINE
    producers: str = PRODUCERS
    client_id: str = ""
    messages: list[Stored] = field(default_factory=list)

    def fill(self, text: str) -> list[str]:
        """Return the words of a command, with this world's names and addresses in place of ``{…}``."""
        names = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return [word.format(**names).replace("~", " ") for word in text.split()]

    def ask(self, command: str) -> Any:
        """Return the answer of a command with ``--json``. Raises AssertionError: the command fails."""
        words = [*self.fill(command), "-n", self.namesrv, "--json", "--timeout", str(TIMEOUT_MS)]
        done = CliRunner().invoke(app, words, env={"NAMESRV_ADDR": None})
        error = done.exception
        if isinstance(error, RmqError):
            raise AssertionError(f"exit code {exit_code(error)}: {error}")
        assert done.exit_code == 0, f"exit code {done.exit_code}: {done.output}{error!r}"
        lines = done.stdout.splitlines()
        return json.loads(lines[0]) if len(lines) == 1 else [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Args:
        command: of mqadmin.
        options: of mqadmin; ``{name}`` stands for a member of `World`, ``~`` for a blank within a word.
        ours: our command, without ``rmq``, ``-n`` and ``--json``.
        check: returns True if our answer (from JSON) is right in a world.
        java: returns True if mqadmin's later output with Apache's servers agrees with our answer there; only for
                commands that may be repeated.
        note: a remark for the table.
    """

    command: str
    options: str
    ours: str
    check: Callable[[Any, World], bool]
    java: Callable[[str, Any], bool] | None = None
    note: str = ""


@contextmanager
def open_world(
    side: str, namesrv: str, broker: str, broker_name: str, cluster: str, *, suffix: str = ""
) -> Iterator[World]:
    """Create all objects, and keep the clients connected. ``suffix``: appended to names, if the servers have a world
    already.
    """
    world = World(side, namesrv, broker, broker_name, cluster)
    for name in ("topic", "empty", "group", "twin", "online", "producers"):
        setattr(world, name, getattr(world, name) + suffix)
    asyncio.run(_create(world))
    consumed: set[str] = set()
    settings = pushing(
        start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=100, rebalance_interval_ms=200, take_over_pause_ms=0
    )
    with (
        sync.Producer(world.producers, namesrv, settings=producing()) as producer,
        sync.PushConsumer(world.online, namesrv, settings=settings) as consumer,
    ):
        consumer.subscribe(world.topic, "*", lambda message: consumed.add(message.msg_id))
        sent = [
            producer.send(_message(world.topic, n), queue=MessageQueue(world.topic, broker_name, n % QUEUES))
            for n in range(MESSAGE_COUNT)
        ]
        world.client_id = consumer.status().client_id
        _wait_for(lambda: len(consumed) == MESSAGE_COUNT, "the consumer to have consumed everything")
        asyncio.run(_look_at(world, [one.offset_msg_id for one in sent]))
        yield world


def _message(topic: str, number: int) -> Message:
    tag = "AB"[number % 2]
    return Message(topic=topic, body=f"message {number}".encode(), tags=tag, keys=[f"key-{number}"])


async def _create(world: World) -> None:
    async with Admin(world.namesrv, timeout_ms=TIMEOUT_MS) as admin:
        for topic in (world.topic, world.empty):
            await admin.topics.create(topic, broker=world.broker, read_queues=QUEUES, write_queues=QUEUES)
        for group in (world.group, world.twin, world.online):
            body = msgspec.json.encode(SubscriptionGroupConfig(group_name=group))
            await admin.calls.ask(world.broker, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
        for queue_id in range(QUEUES):
            queue = MessageQueue(world.topic, world.broker_name, queue_id)
            await admin.calls.commit_offset(world.broker, world.group, queue, 1)
        deadline = time.monotonic() + SECONDS_MAX
        while not await _is_known(admin, world):
            assert time.monotonic() < deadline, "the name server knows the topics in time"
            await asyncio.sleep(0.05)


async def _is_known(admin: Admin, world: World) -> bool:
    try:
        for topic in (world.topic, world.empty):
            await admin.topics.route(topic)
    except UnknownName:
        return False
    return True


async def _look_at(world: World, message_ids: list[str]) -> None:
    """Fill `World.messages`, and wait until the broker has the consumer's offsets."""
    async with Admin(world.namesrv, timeout_ms=TIMEOUT_MS) as admin:
        for number, message_id in enumerate(message_ids):
            record = await admin.calls.view_message(world.broker, world.topic, int(message_id[-16:], 16))
            (message,) = read_messages(record, world.broker_name)
            world.messages.append(
                Stored(
                    key=f"key-{number}",
                    tag="AB"[number % 2],
                    unique_key=message.msg_id,
                    message_id=message_id,
                    queue_id=message.queue_id,
                    queue_offset=message.queue_offset,
                    store_timestamp=message.store_timestamp,
                )
            )
        deadline, queues = (
            time.monotonic() + SECONDS_MAX,
            [MessageQueue(world.topic, world.broker_name, n) for n in range(QUEUES)],
        )
        while [await admin.calls.committed_offset(world.broker, world.online, queue) for queue in queues] != [
            3
        ] * QUEUES:
            assert time.monotonic() < deadline, "the consumer commits its offsets in time"
            await asyncio.sleep(0.05)


def _wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, f"waited {SECONDS_MAX} s for {what}"
        time.sleep(0.02)
