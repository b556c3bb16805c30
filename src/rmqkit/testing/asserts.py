"""What tests say about messages and groups, and what they are told when it is not so.

Each assert waits until what it says holds, and fails when ``timeout`` seconds have passed: consumers commit offsets
some time after they consumed. They read the brokers' own tables. A message counts as consumed when its group's offset
is past it and neither its retry topic nor its dead letters have it; messages that a filter passes over count, too.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from rmqkit.broker.parts import Parts
from rmqkit.broker.transaction import TRANSACTION_GROUP, op_offsets
from rmqkit.errors import RmqError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import Record, decode_record
from rmqkit.store.delay_levels import parse_delay_levels
from rmqkit.testing.clock import VirtualClock

__all__ = ["Asserts"]

T = TypeVar("T")

TIMEOUT_SECONDS = 15.0
"""Longer than clients take to commit offsets (5 s)."""
_POLL_SECONDS = 0.02
_SHOWN_MAX = 8
_READ_COUNT = 32


@dataclass(slots=True)
class _Group:
    """What the brokers know of a group and its topics.
    ``lines``: what is left, for people. ``first``: a message that is left."""

    held: int = 0
    left: int = 0
    members: int = 0
    dead: list[Record] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    first: Record | None = None

    def told(self) -> list[str]:
        dead = [f"dead letter: {_told(record)}" for record in self.dead]
        return [*self.lines, *dead, f"members online: {self.members}"]


class Asserts(ABC):
    """The asserts of a cluster, which says how its servers are reached."""

    name_server: str
    clock: VirtualClock

    @abstractmethod
    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await something on the servers' loop."""

    @abstractmethod
    def look(self, work: Callable[[], T]) -> T:
        """Call something on the servers' loop."""

    @abstractmethod
    def masters(self) -> list[Parts]:
        """What the masters are made of."""

    def assert_consumed(
        self, group: str, topic: str, *, count: int | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """A group has consumed everything that a topic holds: ``count`` messages, or else at least one.
        Raises AssertionError: it has not, or the topic holds another number; the text says which are left, and why."""
        __tracebackhide__ = True
        first: Record | None = None

        def fault() -> str:
            nonlocal first
            state, first = _group(self.masters(), group, topic), None
            if not state.held or count not in (None, state.held):
                is_there = any(parts.topics.get(topic) for parts in self.masters())
                found = f"it holds {state.held}" if is_there else "there is no such topic"
                return f"topic {topic} does not hold {count or 'any'} messages: {found}"
            first = state.first
            of = f"{state.held} messages of topic {topic}"
            if state.left:
                return _text(f"group {group} has not consumed {state.left} of {of}", state.told())
            return _text(f"group {group} gave up {len(state.dead)} of {of}", state.told()) if state.dead else ""

        self._wait(fault, timeout, why=lambda: "" if first is None else self._why(group, topic, first))

    def assert_dlq(
        self,
        group: str,
        *,
        topic: str | None = None,
        count: int | None = None,
        keys: Collection[str] = (),
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """Messages of a group are in its dead letters: ``count`` of them, or else at least one; of a topic, and with
        these keys among them, where that is said. Raises AssertionError: they are not."""
        __tracebackhide__ = True

        def fault() -> str:
            state = _group(self.masters(), group, topic)
            missing = sorted(set(keys) - {key for record in state.dead for key in _property(record, "KEYS").split()})
            found = len(state.dead)
            if not missing and (found == count or (count is None and found)):
                return ""
            what = f"keys {' '.join(missing)}" if missing else "a message" if count is None else f"{count} messages"
            where = "" if topic is None else f" from topic {topic}"
            return _text(f"the dead letters of group {group} do not have {what}{where}: {found} found", state.told())

        self._wait(fault, timeout)

    def assert_nothing_pending(self, *groups: str, timeout: float = TIMEOUT_SECONDS) -> None:
        """These groups, or all that there are, have consumed everything; no message is delayed, no transaction open.
        Dead letters are not pending. Raises AssertionError: something is."""
        __tracebackhide__ = True

        def fault() -> str:
            masters, lines = self.masters(), []
            for group in groups or sorted(_groups(masters)):
                state = _group(masters, group, None)
                lines += [f"group {group}: {line}" for line in state.told()] if state.left else []
            for parts in masters:
                lines += [f"delayed by {seconds:.0f} s: {_told(one)}" for one, seconds in _delayed(parts)]
                lines += [f"undecided transaction: {_told(one)}" for one in _undecided(parts)]
            return _text("messages are pending", lines) if lines else ""

        self._wait(fault, timeout)

    def _wait(self, fault: Callable[[], str], timeout: float, why: Callable[[], str] = lambda: "") -> None:
        """Wait until there is no fault; the last one is the assertion's text."""
        __tracebackhide__ = True
        if _is_in_coroutine():
            raise RuntimeError("this assert waits and would block the test's loop: await asyncio.to_thread(assert, …)")
        until = time.monotonic() + timeout
        while found := self.look(fault):
            if time.monotonic() > until:
                raise AssertionError(f"after {timeout:g} s {found}{why()}")
            time.sleep(_POLL_SECONDS)

    def _why(self, group: str, topic: str, left: Record) -> str:
        """What ``rmq explain`` says."""
        from rmqkit.admin.api import Admin
        from rmqkit.admin.explain import explain

        async def ask() -> str:
            async with Admin(self.name_server, clock=self.clock) as admin:
                found = await explain(admin, topic, group, _property(left, property_names.UNIQ_KEY))
                return f"{found.sentence} Remedy: {found.remedy}"

        try:
            return f"\n  why: {self.run(ask)}"
        except RmqError as error:
            return f"\n  why is not known: {error}"


def _is_in_coroutine() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _group(masters: list[Parts], group: str, topic: str | None) -> _Group:
    """What the masters know of a group, for one topic or all of its topics."""
    state, retry = _Group(), names.retry_topic(group)
    for parts in masters:
        online = parts.clients.all_consumers.get(group)
        state.members = max(state.members, 0 if online is None else len(online.members))
        known = {*parts.offsets.topics(group), *(() if online is None else online.subscriptions)} - {retry}
        for name in sorted(known if topic is None else {topic}):
            state.held += _add_queues(state, parts, group, name)
        _add_queues(state, parts, group, retry)
        for record, seconds in _delayed(parts):
            if _property(record, property_names.REAL_TOPIC) == retry:
                state.left += 1
                state.first = state.first or record
                line = f"to be retried in {seconds:.0f} s: {_told(record)}; rmq_clock.advance() makes it sooner"
                state.lines.append(line)
        dead = _records(parts, names.dlq_topic(group), 0, 0)
        state.dead += [one for one in dead if topic in (None, _property(one, property_names.RETRY_TOPIC))]
    return state


def _add_queues(state: _Group, parts: Parts, group: str, topic: str) -> int:
    """Say how far a group is in the queues of a topic; how many messages they have."""
    config, held = parts.topics.get(topic), 0
    for queue_id in range(0 if config is None else config.read_queue_nums):
        end, begin = parts.store.max_offset(topic, queue_id), parts.store.min_offset(topic, queue_id)
        known = parts.offsets.get(group, topic, queue_id)
        offset = min(begin if known is None else known, end)
        held += end - begin
        if offset < end:
            record = next(_records(parts, topic, queue_id, offset), None)
            after = "" if record is None else f", next is {_told(record)}"
            state.lines.append(f"{parts.settings.broker_name} {topic} queue {queue_id}: at {offset} of {end}{after}")
            state.left += end - offset
            state.first = state.first or record
    return held


def _groups(masters: list[Parts]) -> set[str]:
    """All groups but the system's own."""
    found = {group for parts in masters for group in parts.clients.all_consumers}
    for parts in masters:
        found |= {group for topic in parts.offsets.all_topics for group in parts.offsets.groups(topic)}
    return {group for group in found if not group.startswith(names.SYSTEM_GROUP_PREFIX)}


def _delayed(parts: Parts) -> Iterator[tuple[Record, float]]:
    """Messages that wait for their time, and for how many seconds."""
    offsets = parts.schedule.offsets().offset_table
    for level, delay_ms in enumerate(parse_delay_levels(parts.store_settings.message_delay_level), 1):
        for record in _records(parts, names.SCHEDULE_TOPIC, level - 1, offsets.get(level, 0)):
            yield record, max(0, record.store_timestamp + delay_ms - parts.clock.now_ms()) / 1000


def _undecided(parts: Parts) -> Iterator[Record]:
    """Half messages that are neither committed nor rolled back."""
    position = parts.offsets.get(TRANSACTION_GROUP, names.OP_HALF_TOPIC, 0) or 0
    decided = {at for op in _records(parts, names.OP_HALF_TOPIC, 0, position) for at in op_offsets(op)}
    begin = parts.offsets.get(TRANSACTION_GROUP, names.HALF_TOPIC, 0) or 0
    for half in _records(parts, names.HALF_TOPIC, 0, begin):
        if half.queue_offset not in decided and not parts.ops.holds(0, half.queue_offset):
            yield half


def _records(parts: Parts, topic: str, queue_id: int, begin: int) -> Iterator[Record]:
    """The messages of a queue from an offset on."""
    while begin < parts.store.max_offset(topic, queue_id):
        found = parts.store.get(topic, queue_id, begin, count_max=_READ_COUNT)
        yield from map(decode_record, found.records)
        if found.next_begin_offset <= begin:
            return
        begin = found.next_begin_offset


def _property(record: Record, name: str) -> str:
    return decode_properties(record.properties).get(name, "")


def _told(record: Record) -> str:
    """A message as a failure tells it."""
    of = decode_properties(record.properties)
    marks = {"keys": of.get("KEYS"), "tags": of.get("TAGS"), "id": of.get("UNIQ_KEY")}
    told = "".join(f", {name} {value}" for name, value in marks.items() if value)
    topic = of.get(property_names.RETRY_TOPIC) or of.get(property_names.REAL_TOPIC) or record.topic
    tried = f", tried {record.reconsume_times} times" if record.reconsume_times else ""
    return f"message {record.queue_offset} of {topic}{told}{tried}"


def _text(head: str, lines: list[str]) -> str:
    more = [f"... {len(lines) - _SHOWN_MAX} more"] if len(lines) > _SHOWN_MAX else []
    return "\n  ".join([head, *lines[:_SHOWN_MAX], *more])
