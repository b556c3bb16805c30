"""Faults planted on purpose, one at a time: a function of the product is replaced by a copy with a fault. The simulator
must find each within two minutes of one core, and for the right reason. A found fault is shrunk, and printed as a
story::

    python -m tests.simulation.planted              # search for all faults from the first seed on
    python -m tests.simulation.planted timer POP    # the faults with one of these words in their names
    python -m tests.simulation.planted --known      # only the known seed of each, with the fault and without it

The exit code is 1 if a fault is not found, or if a known seed has findings without its fault. The hash seed has to be
0, because the order of sets of names is part of a run.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rmqkit.broker.archive import LogArchive
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.lite.subscriptions import LiteGroup
from rmqkit.broker.pop.read import PopRead
from rmqkit.broker.pop.revive import Revive
from rmqkit.broker.replication.link import Link
from rmqkit.broker.tables.clients import QueueLocks
from rmqkit.broker.transaction.handlers import TransactionHandlers
from rmqkit.client.consumer.consume import ConcurrentConsumeService
from rmqkit.client.consumer.dedupe import RedisDedupe
from rmqkit.client.consumer.poll import PollBuffer
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.store.flush import Flusher
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.queues.consume_queue import ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.replica import log_part
from rmqkit.store.retention import Retention
from tests.simulation.expiry import HOUR_MS
from tests.simulation.ledger import Kind
from tests.simulation.plan import ARCHIVED, MAKERS, Plan, expire, plan_of, renew, with_kinds
from tests.simulation.run import Outcome, Run
from tests.simulation.shrink import shrunk
from tests.simulation.story import told

SECONDS = 120.0
"""The CPU time within which each fault must be found."""
_SHRINK_SECONDS = 60.0
_STORY_LINES = 10


@dataclass(frozen=True, slots=True)
class Planted:
    """A planted fault.

    Attributes:
        name: what is wrong.
        plant: replaces the function while it is entered.
        expects: a pattern that the finding of this fault matches. Other findings do not count.
        seed: a seed that finds it, in a short run.
        focus: changes the plan of each seed so that it uses what is faulty.
    """

    name: str
    plant: Callable[[], Any]
    expects: str
    seed: int
    focus: Callable[[Plan], Plan]

    def plan(self, seed: int) -> Plan:
        """Return the plan of a seed with the focus of this fault, which also adds what it needs."""
        return self.focus(plan_of(seed, has_more=False))

    def finding(self, outcome: Outcome) -> str | None:
        """Return the finding that shows this fault, or None."""
        return next((finding for finding in outcome.findings if re.search(self.expects, finding)), None)


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def find(planted: Planted, *, first: int = 1, seconds: float = SECONDS) -> tuple[Plan, Outcome, float] | None:
    """Run seeds until one shows the fault. Return its plan, its outcome and the CPU seconds spent, or None."""
    began, seed = time.process_time(), first
    while time.process_time() - began < seconds:
        plan = planted.plan(seed)
        with planted.plant():
            outcome = Run(plan).execute()
        # A run that fails in the same way without the fault shows another one.
        if planted.finding(outcome) is not None and planted.finding(Run(plan).execute()) is None:
            return plan, outcome, time.process_time() - began
        seed += 1
    return None


# ---------------------------------------------------------------- the faults


def _flush_answered_early() -> Any:
    original = Flusher.flush_log

    def flush_log(self: Flusher) -> None:
        self.durable_offset = self._store_log.committed_offset
        self._report_durable()
        original(self)

    return _replaced(Flusher, "flush_log", flush_log)


def _checkpoint_ahead() -> Any:
    original = Checkpoint.reach

    def reach(self: Checkpoint, *, physic: int = 0, logics: int = 0, index: int = 0) -> None:
        ahead = 10_000
        original(self, physic=physic and physic + ahead, logics=logics and logics + ahead, index=index)

    return _replaced(Checkpoint, "reach", reach)


def _lock_given_twice() -> Any:
    original = QueueLocks.lock

    def lock(self: QueueLocks, group: str, client_id: str, queues: Any) -> Any:
        wanted = list(queues)
        self.groups.get(group, {}).clear()
        return original(self, group, client_id, wanted)

    return _replaced(QueueLocks, "lock", lock)


def _offset_before_handler() -> Any:
    original = ConcurrentConsumeService.put

    def put(self: ConcurrentConsumeService, process_queue: Any, messages: Any) -> None:
        last = messages[-1].queue_offset
        original(self, process_queue, messages)
        self.offsets.raise_to(process_queue.queue, last + 1)

    return _replaced(ConcurrentConsumeService, "put", put)


class _Unflushed:
    """A store whose whole log is readable, flushed or not."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @property
    def dispatched_offset(self) -> int:
        return int(self._store.max_physical_offset)

    def log_part(self, physical_offset: int, size_max: int) -> memoryview:
        return log_part(self._store.log, self.dispatched_offset, physical_offset, size_max)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _slave_ahead() -> Any:
    original = Link.send

    def send(self: Link) -> bool:
        store = self._store
        self._store = _Unflushed(store)
        try:
            return original(self)
        finally:
            self._store = store

    return _replaced(Link, "send", send)


def _revive_forgets() -> Any:
    original = Revive._put

    def put(self: Revive, pending: Any, record: Any) -> bool:
        if record.queue_offset % 3 == 0 and not pending.topic.startswith("%RETRY%"):
            return True  # as if it were stored
        return original(self, pending, record)

    return _replaced(Revive, "_put", put)


def _slot_off_by_one() -> Any:
    original = Timer._out_ms

    def out_ms(self: Timer, at_ms: int) -> int:
        return original(self, at_ms) - self.state.precision_ms

    return _replaced(Timer, "_out_ms", out_ms)


def _dedupe_key_lost() -> Any:
    original = RedisDedupe.once

    def once(self: RedisDedupe, handler: Any, group: str) -> Any:
        marked = original(self, handler, group)

        async def call(message: Any, *arguments: Any) -> None:
            await marked(message, *arguments)
            name = f"{self._prefix}{group}:{message.topic}:{message.msg_id}"
            await self._client.eval("", 1, name, "done")

        return call

    return _replaced(RedisDedupe, "once", once)


def _held_entries_forgotten() -> Any:
    original = ConsumeQueue._take

    def take(self: ConsumeQueue, entries: bytes, count: int, end: int) -> None:
        is_dirty = self.is_dirty
        original(self, entries, count, end)
        if self.has_held and not is_dirty:
            self._dirty.pop(self, None)
            self.is_dirty = False

    return _replaced(ConsumeQueue, "_take", take)


def _deleted_too_early() -> Any:
    original: Any = LogArchive.kept_from

    def kept_from(self: LogArchive) -> int:
        kept = int(original.fget(self))
        following = next((one for one in self._store.log.queue.files[:-1] if one.start == kept), None)
        return kept if following is None else following.end

    return _replaced(LogArchive, "kept_from", property(kept_from))


def _committed_twice() -> Any:
    def decided(self: TransactionHandlers, *_: Any) -> None:
        """Forget the decision: the broker asks again, and commits again."""

    return _replaced(TransactionHandlers, "_decided", decided)


def _offset_before_check_point() -> Any:
    original = PopRead._pop_queue

    def pop_queue(self: PopRead, header: Any, topic: str, mark: str, queue_id: int) -> None:
        known = len(self.check_points)
        original(self, header, topic, mark, queue_id)
        for one in self.check_points[known:]:
            self._offsets.commit(self._group, topic, queue_id, one.after)

    return _replaced(PopRead, "_pop_queue", pop_queue)


def _buffered_counts_as_consumed() -> Any:
    original = PollBuffer.positions

    def positions(self: PollBuffer) -> Any:
        """Return also the positions of messages that no poll has returned."""
        buffered = {one.queue: messages[-1].queue_offset + 1 for one, messages in self._ready if not one.is_dropped}
        return original(self) | buffered

    return _replaced(PollBuffer, "positions", positions)


def _row_overlooked() -> Any:
    original = ExactlyOnce._not_visible

    def not_visible(self: ExactlyOnce, batch: Any) -> Any:
        return original(self, batch)[1:]

    return _replaced(ExactlyOnce, "_not_visible", not_visible)


def _retention_of_no_hours() -> Any:
    original = Retention._drop_log_files

    def drop_log_files(self: Retention, now_ms: int, dispatched_offset: int) -> int:
        return original(self, now_ms + HOUR_MS, dispatched_offset)

    return _replaced(Retention, "_drop_log_files", drop_log_files)


def _queues_of_deleted_topic_left() -> Any:
    def delete_topic(self: ConsumeQueues, topic: str) -> None:
        """Leave the queues: the topic that is created again has the old messages."""

    return _replaced(ConsumeQueues, "delete_topic", delete_topic)


# ---------------------------------------------------------------- plans that use what is faulty


def _with(**changes: Any) -> Callable[[Plan], Plan]:
    """Return a focus that changes attributes, and leaves out the faults of clients and servers that do not exist."""

    def focus(plan: Plan) -> Plan:
        changed = replace(plan, **changes)
        names = {*changed.servers, *changed.clients, "namesrv-0"}
        return changed.with_faults([fault for fault in changed.faults if set(fault.target.split(">")) <= names])

    return focus


def _with_often_flushed(plan: Plan) -> Plan:
    """Return a plan with kills, many small log files, a checkpoint that moves often, and queues with few messages. A
    recovery restores the entries of a queue with later messages: it notices the gap."""
    settings = {
        **plan.settings,
        "mappedFileSizeCommitLog": 16 << 10,
        "flushIntervalConsumeQueue": 100,
        "flushConsumeQueueThoroughInterval": 200,
        "mappedFileSizeConsumeQueue": 20_000,  # an entry that opens a file is written at once
        "messageIndexEnable": False,  # it would make a recovery read more
    }
    return _with_faults(
        *_KILLS,
        settings=settings,
        body_bytes=6000,
        pace=0.2,
        seconds=20.0,
        brokers=1,
        slaves=0,
        kinds=[*[Kind.PLAIN] * 8, Kind.ORDERED],
    )(plan)


def _lite_batch_acknowledged_at_once() -> Any:
    def ack(self: LiteService, group: LiteGroup, name: str, number: int, pop_time: int) -> None:
        slot = self._table.find(group.parent, name)
        batch = None if slot is None else group.batches.pop(slot, None)
        if slot is not None and batch is not None:
            self.offsets.commit(group.name, slot, batch.numbers[-1] + 1)
            self.mark(group, name)

    return _replaced(LiteService, "ack", ack)


def _with_archive(plan: Plan) -> Plan:
    """Return a plan that is long enough for the first retention, and slow."""
    settings = {key: value for key, value in plan.settings.items() if key not in ARCHIVED} | ARCHIVED
    return _with(
        brokers=1,
        slaves=0,
        settings=settings,
        groups={"G-push": "push"},
        members=1,
        producers=1,
        seconds=66.0,
        pace=0.6,
        body_bytes=6000,
        failing_share=0.0,
        slow_share=0.0,
        faults=[],
    )(plan)


def _with_expiry(plan: Plan) -> Plan:
    """Return a plan in which files expire."""
    changed = _with(slaves=0, brokers=1, executors=0, faults=[])(plan)
    expire(changed, random.Random(f"{plan.seed} expiry"))
    return changed


def _with_renewal(plan: Plan) -> Plan:
    """Return a plan in which a topic is deleted and created again, and kills."""
    changed = _with_faults(*_KILLS, slaves=0, brokers=1, executors=0, seconds=6.0, pace=0.1, kinds=[], groups={})(plan)
    renew(changed, random.Random(f"{plan.seed} renewal"))
    return changed


def _with_faults(*kinds: str, **changes: Any) -> Callable[[Plan], Plan]:
    """Return a focus with many faults of some kinds."""
    assert set(kinds) <= set(MAKERS), "the kinds exist"
    return lambda plan: with_kinds(replace(plan, **changes), list(kinds))


_POWER = ("power", "power at call")
_KILLS = ("kill", "kill at call")
PLANTED = (
    Planted(
        "flush answered before fsync",
        _flush_answered_early,
        "is not there|did not get",
        1,
        _with_faults(*_POWER, slaves=0),
    ),
    Planted(
        "checkpoint ahead of the log",
        _checkpoint_ahead,
        "did not get|queue end: ",
        11,
        _with_faults(*_POWER, slaves=0),
    ),
    Planted(
        "a lock given to two members",
        _lock_given_twice,
        "at once",
        2,
        _with_faults(
            "client restarted",
            groups={"G-ordered": "ordered"},
            kinds=[Kind.ORDERED],
            members=3,
            slow_share=0.5,
            pace=0.1,
        ),
    ),
    Planted(
        "offset committed before the handler",
        _offset_before_handler,
        "was not handled",
        2,
        _with(slow_share=0.1),
    ),
    Planted(
        "slave ahead of the master",
        _slave_ahead,
        "has flushed it up to",
        5,
        _with_faults(
            "slow disk",
            *_POWER,
            slaves=1,
            brokers=1,
            producers=6,
            pace=0.03,
            groups={"G-push": "push"},
            members=1,
            seconds=6.0,
            kinds=[Kind.PLAIN],
        ),
    ),
    Planted(
        "revive forgets one",
        _revive_forgets,
        "G-pop did not get",
        1,
        _with(groups={"G-pop": "pop"}, failing_share=0.3),
    ),
    Planted(
        "timer slot off by one",
        _slot_off_by_one,
        "s early",
        2,
        _with(kinds=[Kind.TIMED, Kind.PLAIN], faults=[], drifts={}),
    ),
    Planted(
        "dedupe key lost",
        _dedupe_key_lost,
        "G-once handled",
        1,
        _with_faults("client restarted", "kill", "cut", groups={"G-once": "once"}, members=3, slow_share=0.3),
    ),
    Planted(
        "held queue entries not noted",
        _held_entries_forgotten,
        "did not get|is stored twice|queue end: ",
        16,
        _with_often_flushed,
    ),
    Planted(
        "archive deletes before its segment is whole",
        _deleted_too_early,
        "and is not there",
        1,
        _with_archive,
    ),
    Planted(
        "half message committed twice",
        _committed_twice,
        r"was committed \d+ times",
        4,
        _with(kinds=[Kind.COMMITTED], faults=[], drifts={}),
    ),
    Planted(
        "POP offset moved before its check point",
        _offset_before_check_point,
        "G-pop did not get",
        16,
        _with_faults("full", "failing", *_KILLS, groups={"G-pop": "pop"}, slaves=0),
    ),
    Planted(
        "a commit of a pull consumer covers its buffer",
        _buffered_counts_as_consumed,
        "G-pull committed .* was not handled",
        3,
        _with(groups={"G-pull": "pull"}, seconds=6.0, members=1, slow_share=0.3, pace=0.1),
    ),
    Planted(
        "a sink that takes over a batch overlooks a row",
        _row_overlooked,
        "is committed, and row .* is stored 0 times",
        1,
        _with(
            groups={}, kinds=[Kind.PLAIN], faults=[], seconds=10.0, pace=1.0, executors=2, hits_share=0.6, rows_per_s=2
        ),
    ),
    Planted(
        "files are deleted an hour too early",
        _retention_of_no_hours,
        "younger than the retention",
        1,
        _with_expiry,
    ),
    Planted(
        "queues of a deleted topic are left",
        _queues_of_deleted_topic_left,
        "of a former life",
        6,
        _with_renewal,
    ),
    Planted(
        "a lite topic's batch acknowledged by one of its messages",
        _lite_batch_acknowledged_at_once,
        "G-lite did not get|G-lite got .* before",
        2,
        _with_faults("client killed", groups={"G-lite": "lite"}, kinds=[Kind.SESSION], members=2, slow_share=0.5),
    ),
)
"""All planted faults."""


def main(words: list[str]) -> int:
    """Search for the faults whose names have one of the words, or for all, and print what was found."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation.planted", *words], environment)
    names = [word for word in words if word != "--known"]
    chosen = [one for one in PLANTED if not names or any(name in one.name for name in names)]
    return _try_known(chosen) if "--known" in words else _search(chosen)


def _try_known(chosen: list[Planted]) -> int:
    """Run the known seed of each fault, with the fault and without it. Print one line for each run."""
    wrong = 0
    for planted in chosen:
        plan = planted.plan(planted.seed)
        with planted.plant():
            outcome = Run(plan).execute()
        without = Run(plan).execute().findings
        finding = planted.finding(outcome)
        wrong += finding is None or bool(without)
        print(f"{planted.name}: seed {planted.seed}: {finding or f'NOT FOUND among {outcome.findings}'}")
        print(f"{planted.name}: seed {planted.seed} without the fault: {'; '.join(without) or 'sound'}", flush=True)
    return int(wrong > 0)


def _search(chosen: list[Planted]) -> int:
    missed = 0
    for planted in chosen:
        found = find(planted)
        if found is None:
            missed += 1
            print(f"{planted.name}: NOT FOUND within {SECONDS:g} s of CPU", flush=True)
            continue
        plan, outcome, seconds = found
        print(f"{planted.name}: seed {plan.seed}, {seconds:.1f} s of CPU: {planted.finding(outcome)}")
        with planted.plant():
            plan = shrunk(plan, outcome.signature, seconds=_SHRINK_SECONDS)
            again = f"python -m tests.simulation.planted {shlex.quote(planted.name)}"
            print(told(plan, lines=_STORY_LINES, again=again), flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
