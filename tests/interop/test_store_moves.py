"""Store directories move from our broker to Apache's and back, cleanly stopped or killed, and every message with them.

| Store | Written by | Left by | Then opened by |
|---|---|---|---|
| clean | ours | a clean stop | Apache's broker, which takes more messages and is killed: the next two |
| recovered | ours, under load | kill -9, then recovered and stopped by ours | Apache's broker |
| killed | ours, under load | kill -9 | Apache's broker, which recovers |
| theirs-killed | ours and Apache's | Apache's kill -9 | ours, which recovers |
| theirs-recovered | ours and Apache's | Apache's recovery after its kill -9, and its clean stop | ours |

A broker that opens a store truncates nothing: the ends of log and queues do not change, and neither do the bytes of the
files (a recovery may rewrite the newest index file). A real consumer then reads everything. Two Apache brokers run at a
time, because a stop takes 15 seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rmqkit import Message, Producer, PullConsumer
from rmqkit.errors import NoRoute, RmqError
from tests.interop.apache import BROKER_CONF, log_end
from tests.interop.kit import ApacheKit
from tests.interop.probe import run_probe
from tests.interop.standalone import Standalone, run_standalone
from tests.interop.store_files import (
    DERIVED_AND_LOG,
    files,
    has_topic,
    log_bytes,
    opened_by_apache,
    without_new_blank,
)
from tests.patience import producing, pulling

TOPIC = "Moving"
COUNT = 300
SENDERS = 16
CONF: Mapping[str, object] = {
    **BROKER_CONF,
    "brokerName": "mover",
    "brokerClusterName": "MovingCluster",
    "mappedFileSizeCommitLog": 65536,
    "mappedFileSizeConsumeQueue": 600,
}

Messages = dict[tuple[int, int], tuple[str, str, str | None, str]]
"""(queue, offset) → id of the place in the log, hash of the body, tag, keys."""


@dataclass
class Seen:
    """A broker's view of a store, and the store's files while the broker had it open."""

    log_max: int
    bounds: dict[int, tuple[int, int]]
    messages: Messages
    files: dict[str, bytes] = field(repr=False)


def message(mark: str, i: int) -> Message:
    return Message(
        topic=TOPIC, body=b"%d" % i * (i % 40 + 1), tags=mark, keys=[f"{mark}-{i}"], properties={"i": str(i)}
    )


async def send(namesrv: str, mark: str) -> None:
    async with Producer("movers", namesrv, settings=producing()) as producer:
        await producer.send(message(mark, 0))
        await asyncio.gather(*(producer.send(message(mark, i)) for i in range(1, COUNT)))
        await producer.send_batch([message(f"{mark}-batch", i) for i in range(20)])


SENT_BY_SEND = COUNT + 20


async def send_until_killed(running: Standalone) -> set[tuple[int, int]]:
    """Send from many clients at once, and kill the broker (SIGKILL) during the load. Return the acknowledged places."""
    acknowledged: set[tuple[int, int]] = set()

    async def one(producer: Producer, number: int) -> None:
        while True:
            try:
                result = await producer.send(message("load", number))
            except RmqError:
                return
            acknowledged.add((result.queue.queue_id, result.queue_offset))
            # Apache's broker reads the topic from its file, which follows the journal after a second.
            if len(acknowledged) >= 2 * COUNT and has_topic(running.store_dir, TOPIC):
                running.process.kill()

    async with Producer("movers", running.namesrv_addr, settings=producing(retries=0)) as producer:
        await producer.send(message("load", 0))
        await asyncio.gather(*(one(producer, number) for number in range(SENDERS)))
    return acknowledged


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def read(namesrv: str) -> tuple[dict[int, tuple[int, int]], Messages]:
    """Return the bounds of every queue, and all messages."""
    bounds: dict[int, tuple[int, int]] = {}
    found: Messages = {}
    async with PullConsumer("reader", namesrv, settings=pulling()) as consumer:
        async with asyncio.timeout(150):
            while True:
                try:
                    queues = await consumer.queues(TOPIC)
                    break
                except NoRoute:
                    await asyncio.sleep(0.2)
        for queue in queues:
            offset = await consumer.min_offset(queue)
            end = await consumer.max_offset(queue)
            bounds[queue.queue_id] = offset, end
            while offset < end:
                result = await consumer.pull(queue, offset)
                for m in result.messages:
                    place = m.queue_id, m.queue_offset
                    found[place] = m.offset_msg_id, digest(m.body), m.tags, " ".join(m.keys)
                offset = result.next_begin_offset
    return bounds, found


def look(namesrv_addr: str, broker_addr: str, store: Path) -> Seen:
    bounds, messages = asyncio.run(read(namesrv_addr))
    return Seen(log_end(broker_addr), bounds, messages, files(store, *DERIVED_AND_LOG))


def look_with_ours(store: Path, work_dir: Path) -> Seen:
    """Open a store with our broker, read it, and stop the broker cleanly."""
    with run_standalone(store, work_dir, "-c", str(work_dir / "ours.conf")) as ours:
        seen = look(ours.namesrv_addr, ours.broker_addr, store)
        ours.stop()
    return seen


def new_folder(root: Path) -> Path:
    root.mkdir()
    (root / "ours.conf").write_text("".join(f"{key}={value}\n" for key, value in CONF.items()))
    return root


@dataclass
class Move:
    """A store of ours, before Apache's broker opens it and while it is open."""

    folder: Path
    before: Seen
    after: Seen | None = None
    consumed: Messages = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Move]:
    """Return the stores that our broker left."""
    root = tmp_path_factory.mktemp("moves")
    clean, recovered, killed = (new_folder(root / name) for name in ("clean", "recovered", "killed"))
    with run_standalone(clean / "store", clean, "-c", str(clean / "ours.conf")) as running:
        asyncio.run(send(running.namesrv_addr, "ours"))
        before = look(running.namesrv_addr, running.broker_addr, clean / "store")
        running.stop()
    before.files = files(clean / "store", *DERIVED_AND_LOG)
    assert len(before.messages) == SENT_BY_SEND
    with run_standalone(recovered / "store", recovered, "-c", str(recovered / "ours.conf")) as running:
        acknowledged = asyncio.run(send_until_killed(running))
    assert (recovered / "store/abort").exists()
    shutil.copytree(recovered / "store", killed / "store")
    after_kill = look_with_ours(recovered / "store", recovered)
    assert acknowledged <= after_kill.messages.keys()
    after_kill.files = files(recovered / "store", *DERIVED_AND_LOG)
    return {
        "clean": Move(clean, before),
        "recovered": Move(recovered, after_kill),
        "killed": Move(killed, after_kill),
    }


@dataclass
class Returned:
    """Two stores of Apache's broker: after its kill -9, and after it recovered and stopped cleanly."""

    killed: Path
    recovered: Path
    seen: Seen


def visit(kit: ApacheKit, move: Move, *, send_more: bool = False) -> None:
    """Open a store with Apache's broker, read it, let a Java consumer read everything, and kill the broker."""
    with opened_by_apache(kit, move.store, move.folder, CONF) as theirs:
        move.after = look(theirs.namesrv_addr, theirs.broker_addr, move.store)
        run = run_probe(
            kit,
            "consume",
            namesrv=theirs.namesrv_addr,
            topic=TOPIC,
            work_dir=move.folder,
            consumers={"java": f"*:{len(move.before.messages)}"},
        )
        assert run.exit_code == 0, run.outcome
        for m in run.received:
            move.consumed[m.queue_id, m.queue_offset] = m.offset_msg_id, m.body_sha256, m.tags, m.keys or ""
        if send_more:
            asyncio.run(send(theirs.namesrv_addr, "theirs"))


def visit_twice(kit: ApacheKit, move: Move) -> Returned:
    """Visit a store and send more messages. Then Apache's broker recovers from its kill, and stops cleanly."""
    visit(kit, move, send_more=True)
    killed = new_folder(move.folder.with_name("theirs-killed"))
    shutil.copytree(move.store, killed / "store")
    with opened_by_apache(kit, move.store, move.folder, CONF) as theirs:
        seen = look(theirs.namesrv_addr, theirs.broker_addr, move.store)
        theirs.stop_broker()
    return Returned(killed, move.folder, seen)


@pytest.fixture(scope="module")
def visits(apache_kit: ApacheKit, ours: dict[str, Move]) -> Returned:
    """Run all visits with Apache's broker, the long one in parallel to the others."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        returned = pool.submit(visit_twice, apache_kit, ours["clean"])
        for name in ("recovered", "killed"):
            visit(apache_kit, ours[name])
        return returned.result()


@pytest.fixture
def at_apache(ours: dict[str, Move], visits: Returned) -> dict[str, Move]:
    """Return the stores that our broker left, after their visit."""
    return ours


@pytest.fixture
def returned(visits: Returned) -> Returned:
    """Return the stores that Apache's broker left."""
    return visits


@pytest.mark.parametrize("name", ["clean", "recovered", "killed"])
def test_apache_s_broker_truncates_nothing_of_ours(at_apache: dict[str, Move], name: str) -> None:
    before, after = at_apache[name].before, at_apache[name].after
    assert after is not None
    assert (after.log_max, after.bounds) == (before.log_max, before.bounds)
    assert after.messages == before.messages


@pytest.mark.parametrize("name", ["clean", "recovered"])
def test_apache_s_broker_changes_no_byte_of_ours(at_apache: dict[str, Move], name: str) -> None:
    before, after = at_apache[name].before, at_apache[name].after
    assert after is not None
    assert without_new_blank(after.files, before.files) == before.files


def test_apache_s_broker_recovers_what_ours_recovers(at_apache: dict[str, Move]) -> None:
    before, after = at_apache["killed"].before, at_apache["killed"].after
    assert after is not None

    def without_index(found: dict[str, bytes]) -> dict[str, bytes]:
        return {path: content for path, content in found.items() if not path.startswith("index/")}

    assert without_index(without_new_blank(after.files, before.files)) == without_index(before.files)


@pytest.mark.parametrize("name", ["clean", "recovered", "killed"])
def test_a_java_consumer_reads_everything_from_our_store(at_apache: dict[str, Move], name: str) -> None:
    assert at_apache[name].consumed == at_apache[name].before.messages


def test_nothing_is_lost_by_apache_s_kill(at_apache: dict[str, Move], returned: Returned) -> None:
    messages = returned.seen.messages
    assert len(messages) == 2 * SENT_BY_SEND
    assert messages.items() > at_apache["clean"].before.messages.items()


@pytest.mark.parametrize("which", ["killed", "recovered"])
def test_our_broker_truncates_nothing_of_theirs(returned: Returned, which: str) -> None:
    folder: Path = getattr(returned, which)
    before = files(folder / "store", *DERIVED_AND_LOG)
    log = log_bytes(folder / "store", returned.seen.log_max)
    seen = look_with_ours(folder / "store", folder)
    assert (seen.log_max, seen.bounds) == (returned.seen.log_max, returned.seen.bounds)
    assert seen.messages == returned.seen.messages
    assert log_bytes(folder / "store", seen.log_max) == log
    if which == "recovered":
        assert without_new_blank(files(folder / "store", *DERIVED_AND_LOG), before) == before
    with run_standalone(folder / "store", folder, "-c", str(folder / "ours.conf")) as running:
        asyncio.run(send(running.namesrv_addr, "again"))
        _, messages = asyncio.run(read(running.namesrv_addr))
        running.stop()
    assert len(messages) == 3 * SENT_BY_SEND and messages.items() > seen.messages.items()
