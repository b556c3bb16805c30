"""Faults planted on purpose, one at a time: a function of the product is replaced by a copy with a fault. The simulator
must find each within two minutes of one core (`tests.simulation.test_planted`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.pop.read import PopRead
from rmqkit.broker.pop.revive import Revive
from rmqkit.broker.replication.log_comparison import LogComparison
from rmqkit.broker.tables.clients import QueueLocks
from rmqkit.broker.transaction.handlers import TransactionHandlers
from rmqkit.client.consumer import dedupe
from rmqkit.client.consumer.consume import ConcurrentConsumeService
from rmqkit.store.flush import Flusher
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.queues.table import ConsumeQueues
from tests.simulation.ledger import Kind
from tests.simulation.plan import MAKERS, Plan, plan_of, with_kinds
from tests.simulation.run import Outcome, Run

SECONDS = 120.0
"""The CPU time within which each fault must be found."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A planted fault.

    Attributes:
        name: what is wrong.
        plant: replaces the function while it is entered.
        focus: changes the plan of each seed so that it uses what is faulty.
    """

    name: str
    plant: Callable[[], Any]
    focus: Callable[[Plan], Plan] = lambda plan: plan


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def find(planted: Planted, *, first: int = 1, seconds: float = SECONDS) -> tuple[Plan, Outcome, float] | None:
    """Run seeds until one fails. Return its plan, its outcome and the CPU seconds spent, or None."""
    began, seed = time.process_time(), first
    with planted.plant():
        while time.process_time() - began < seconds:
            plan = planted.focus(plan_of(seed))
            outcome = Run(plan).execute()
            if outcome.findings:
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


def _slave_ahead_unnoticed() -> Any:
    async def compare(self: LogComparison, *_: Any, **__: Any) -> None:
        return None

    return _replaced(LogComparison, "compare", compare)


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
    return _replaced(dedupe, "_DONE", "")


def _held_entries_forgotten() -> Any:
    def write_held(self: ConsumeQueues) -> bool:
        return True

    return _replaced(ConsumeQueues, "write_held", write_held)


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


# ---------------------------------------------------------------- plans that use what is faulty


def _with(**changes: Any) -> Callable[[Plan], Plan]:
    """Return a focus that changes attributes, and leaves out the faults of clients and servers that do not exist."""

    def focus(plan: Plan) -> Plan:
        changed = replace(plan, **changes)
        names = {*changed.servers, *changed.clients, "namesrv-0"}
        return changed.with_faults([fault for fault in changed.faults if set(fault.target.split(">")) <= names])

    return focus


def _with_faults(*kinds: str, **changes: Any) -> Callable[[Plan], Plan]:
    """Return a focus with many faults of some kinds."""
    assert set(kinds) <= set(MAKERS), "the kinds exist"
    return lambda plan: with_kinds(replace(plan, **changes), list(kinds))


_POWER = ("power", "power at call")
_CALLS = ("kill at call", "power at call")
PLANTED = (
    Planted("flush answered before fsync", _flush_answered_early, _with_faults(*_POWER, slaves=0)),
    Planted("checkpoint ahead of the log", _checkpoint_ahead, _with_faults(*_POWER, slaves=0)),
    Planted(
        "a lock given to two members",
        _lock_given_twice,
        _with(groups={"G-ordered": "ordered"}, kinds=[Kind.ORDERED], members=3, slow_share=0.1),
    ),
    Planted("offset committed before the handler", _offset_before_handler, _with(slow_share=0.1)),
    Planted("slave ahead of the master", _slave_ahead_unnoticed, _with_faults(*_POWER, "stall", slaves=1)),
    Planted(
        "revive forgets one",
        _revive_forgets,
        _with(groups={"G-pop": "pop"}, failing_share=0.3),
    ),
    Planted("timer slot off by one", _slot_off_by_one, _with(kinds=[Kind.TIMED, Kind.PLAIN], faults=[], drifts={})),
    Planted(
        "dedupe key lost",
        _dedupe_key_lost,
        _with_faults("client killed", "cut", groups={"G-once": "once"}),
    ),
    Planted("held queue entries not noted", _held_entries_forgotten, _with_faults("kill", "kill at call")),
    Planted(
        "half message committed twice",
        _committed_twice,
        _with(kinds=[Kind.COMMITTED], faults=[], drifts={}),
    ),
    Planted(
        "POP offset moved before its check point",
        _offset_before_check_point,
        _with_faults(*_CALLS, "kill", groups={"G-pop": "pop"}, slaves=0),
    ),
)
"""All planted faults."""

__all__ = ["PLANTED", "SECONDS", "Planted", "find"]
