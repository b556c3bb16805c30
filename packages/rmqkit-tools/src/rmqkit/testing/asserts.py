"""Asserts of tests about messages and groups, with messages that explain a failure.

Each assert waits until its condition holds, and fails when ``timeout`` seconds have passed. The asserts read the
brokers' own tables, and request the progress of the group's members (GET_CONSUMER_RUNNING_INFO), because clients save
offsets up to 5 s after they consumed. A message is consumed if its group's offset is past it, and if it is neither in
the retry topic nor in the dead letters. This includes messages that a filter skips. A retried message counts as the
same message.
"""

from __future__ import annotations

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from rmqkit.broker.context import BrokerContext
from rmqkit.errors import ProtocolError, RemotingError, RmqError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.names import TRANSACTION_GROUP
from rmqkit.protocol.op_messages import op_offsets
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.clients import ConsumerRunningInfo, MessageQueue, RunningInfoRequest
from rmqkit.remoting.connection import Connection
from rmqkit.store.settings import parse_delay_levels
from rmqkit.testing.clock import VirtualClock

__all__ = ["Asserts"]

T = TypeVar("T")

_Far = dict[tuple[str, MessageQueue], int]
"""(Group, queue) → the offset up to which the group has consumed the queue."""

TIMEOUT_SECONDS = 15.0
"""More than the interval at which clients commit offsets (5 s)."""
_ASK_TIMEOUT_MS = 500.0
_POLL_SECONDS = 0.02
_SHOWN_MAX = 8
_READ_COUNT = 32


@dataclass(slots=True)
class _Group:
    """The brokers' state of a group and its topics.

    ``begun``: topic, queue and offsets of the remaining messages. ``retried``: the remaining messages that were sent
    back. They may be copies of messages in ``begun``, because offsets are saved later. ``lines``: a text for each
    queue. ``first``: a remaining message.
    """

    held: int = 0
    members: int = 0
    begun: list[tuple[BrokerContext, str, int, int, int]] = field(default_factory=list)
    retried: list[Record] = field(default_factory=list)
    dead: list[Record] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    first: Record | None = None

    @property
    def left(self) -> int:
        """Number of remaining messages, without duplicates."""
        again = {_origin(record) for record in self.retried}
        for context, topic, queue_id, begin, _ in self.begun if again else ():
            again.difference_update(map(_origin, _records(context, topic, queue_id, begin)))
        return sum(end - begin for *_, begin, end in self.begun) + len(again)

    def lines_of(self) -> list[str]:
        dead = [f"dead letter: {_record_text(record)}" for record in self.dead]
        return [*self.lines, *dead, f"members online: {self.members}"]


class Asserts(ABC):
    """The asserts of a cluster. A subclass defines the access to its servers."""

    name_server: str
    clock: VirtualClock

    @abstractmethod
    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a coroutine function on the servers' loop, and return its result."""

    @abstractmethod
    def look(self, work: Callable[[], T]) -> T:
        """Call a function on the servers' loop, and return its result."""

    @abstractmethod
    def masters(self) -> list[BrokerContext]:
        """Return the contexts of the masters."""

    def assert_consumed(
        self, group: str, topic: str, *, count: int | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """Wait until a group has consumed all messages of a topic: exactly ``count``, or at least one.
        Raises AssertionError: messages are left, or the topic has another number of messages. The error lists the
        remaining messages and the cause."""
        __tracebackhide__ = True
        first: Record | None = None

        def fault(far: _Far) -> str:
            nonlocal first
            state, first = _group(self.masters(), group, topic, far), None
            if not state.held or count not in (None, state.held):
                is_there = any(context.topics.get(topic) for context in self.masters())
                found = f"it holds {state.held}" if is_there else "there is no such topic"
                return f"topic {topic} does not hold {count or 'any'} messages: {found}"
            first = state.first
            of = f"{state.held} messages of topic {topic}"
            left = state.left
            if left:
                return _text(f"group {group} has not consumed {left} of {of}", state.lines_of())
            return _text(f"group {group} gave up {len(state.dead)} of {of}", state.lines_of()) if state.dead else ""

        why = lambda: "" if first is None else self._why(group, topic, first)  # noqa: E731
        self._wait(fault, timeout, groups=lambda: [group], why=why)

    def assert_dlq(
        self,
        group: str,
        *,
        topic: str | None = None,
        count: int | None = None,
        keys: Collection[str] = (),
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """Wait until messages are in the dead letters of a group: exactly ``count``, or at least one. With
        ``topic``, only messages of this topic count. Each of ``keys`` must be a key of a message.
        Raises AssertionError: messages are missing."""
        __tracebackhide__ = True

        def fault(far: _Far) -> str:
            state = _group(self.masters(), group, topic, far)
            missing = sorted(set(keys) - {key for record in state.dead for key in _property(record, "KEYS").split()})
            found = len(state.dead)
            if not missing and (found == count or (count is None and found)):
                return ""
            what = f"keys {' '.join(missing)}" if missing else "a message" if count is None else f"{count} messages"
            where = "" if topic is None else f" from topic {topic}"
            return _text(
                f"the dead letters of group {group} do not have {what}{where}: {found} found", state.lines_of()
            )

        self._wait(fault, timeout)

    def assert_nothing_pending(self, *groups: str, timeout: float = TIMEOUT_SECONDS) -> None:
        """Wait until these groups, or all groups, have consumed all messages, no message is delayed, and no transaction
        is open. Dead letters do not count. Raises AssertionError: something is pending."""
        __tracebackhide__ = True

        def wanted() -> Collection[str]:
            return groups or sorted(_groups(self.masters()))

        def fault(far: _Far) -> str:
            masters, lines = self.masters(), []
            for group in wanted():
                state = _group(masters, group, None, far)
                lines += [f"group {group}: {line}" for line in state.lines_of()] if state.left else []
            for context in masters:
                lines += [f"delayed by {seconds:.0f} s: {_record_text(one)}" for one, seconds in _delayed(context)]
                lines += [f"undecided transaction: {_record_text(one)}" for one in _undecided(context)]
            return _text("messages are pending", lines) if lines else ""

        self._wait(fault, timeout, groups=wanted)

    def _wait(
        self,
        fault: Callable[[_Far], str],
        timeout: float,
        *,
        groups: Callable[[], Collection[str]] = lambda: (),
        why: Callable[[], str] = lambda: "",
    ) -> None:
        """Wait until ``fault`` returns an empty text, without or with the progress that members of the groups report.
        The AssertionError has the last text of ``fault``."""
        __tracebackhide__ = True
        if _is_in_coroutine():
            raise RuntimeError("this assert waits and would block the test's loop: await asyncio.to_thread(assert, …)")
        until = time.monotonic() + timeout
        silent: set[Connection] = set()
        while self.look(lambda: fault({})):
            far = self.run(lambda: _how_far(self.masters(), groups(), silent))
            found = self.look(functools.partial(fault, far))
            if not found:
                return
            if time.monotonic() > until:
                raise AssertionError(f"after {timeout:g} s {found}{why()}")
            time.sleep(_POLL_SECONDS)

    def _why(self, group: str, topic: str, left: Record) -> str:
        """Return the explanation of ``rmq explain``."""
        from rmqkit.admin import Admin
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


async def _how_far(masters: list[BrokerContext], groups: Collection[str], silent: set[Connection]) -> _Far:
    """Return the offsets up to which members have consumed. A member that does not answer is added to ``silent``, and
    gets no further request."""
    asked = {
        (group, member.client_id): peer
        for context in masters
        for group in groups
        if (online := context.clients.consumers(group)) is not None and not online.is_broadcasting
        for peer, member in online.members.items()
        if peer not in silent
    }
    found = await asyncio.gather(*(_running(peer, *whom, silent) for whom, peer in asked.items()))
    far: _Far = {}
    for (group, _), info in zip(asked, found, strict=True):
        for queue, one in info.mq_table.items():
            if not one.droped:
                far[group, queue] = max(one.commit_offset, far.get((group, queue), 0))
    return far


async def _running(peer: Connection, group: str, client_id: str, silent: set[Connection]) -> ConsumerRunningInfo:
    asked = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RunningInfoRequest(group, client_id, False))
    try:
        answer = await peer.call(asked, _ASK_TIMEOUT_MS)
        if answer.code == ResponseCode.SUCCESS:
            return decode_as(answer.payload, ConsumerRunningInfo)
    except (RemotingError, ProtocolError):
        silent.add(peer)
    return ConsumerRunningInfo()


def _group(masters: list[BrokerContext], group: str, topic: str | None, far: _Far) -> _Group:
    """Return the masters' state of a group, for one topic or all of its topics."""
    state, retry = _Group(), names.retry_topic(group)
    for context in masters:
        online = context.clients.all_consumers.get(group)
        state.members = max(state.members, 0 if online is None else len(online.members))
        known = {*context.offsets.topics(group), *(() if online is None else online.subscriptions)} - {retry}
        for name in sorted(known if topic is None else {topic}):
            state.held += _add_queues(state, context, group, name, far)
        _add_retried(state, context, group, topic, far)
        for record, seconds in _delayed(context):
            if _property(record, property_names.REAL_TOPIC) == retry and _is_of(record, topic):
                state.retried.append(record)
                state.first = state.first or record
                line = f"to be retried in {seconds:.0f} s: {_record_text(record)}; rmq_clock.advance() makes it sooner"
                state.lines.append(line)
        dead = _records(context, names.dlq_topic(group), 0, 0)
        state.dead += [one for one in dead if _is_of(one, topic)]
    return state


def _add_retried(state: _Group, context: BrokerContext, group: str, topic: str | None, far: _Far) -> None:
    """Add the remaining messages of the retry topic."""
    queues = _Group()
    _add_queues(queues, context, group, names.retry_topic(group), far)
    for one, name, queue_id, begin, _ in queues.begun:
        state.retried += [record for record in _records(one, name, queue_id, begin) if _is_of(record, topic)]
    if state.retried:
        state.lines += queues.lines
        state.first = state.first or state.retried[0]


def _add_queues(state: _Group, context: BrokerContext, group: str, topic: str, far: _Far) -> int:
    """Add the remaining messages in the queues of a topic. Return the number of messages in these queues."""
    config, held, name = context.topics.get(topic), 0, context.settings.broker_name
    for queue_id in range(0 if config is None else config.read_queue_nums):
        end, begin = context.store.max_offset(topic, queue_id), context.store.min_offset(topic, queue_id)
        known = context.offsets.get(group, topic, queue_id)
        known = max(begin if known is None else known, far.get((group, MessageQueue(topic, name, queue_id)), 0))
        offset = min(known, end)
        held += end - begin
        if offset < end:
            record = next(_records(context, topic, queue_id, offset), None)
            after = "" if record is None else f", next is {_record_text(record)}"
            state.lines.append(f"{name} {topic} queue {queue_id}: at {offset} of {end}{after}")
            state.begun.append((context, topic, queue_id, offset, end))
            state.first = state.first or record
    return held


def _groups(masters: list[BrokerContext]) -> set[str]:
    """Return all groups except the system's."""
    found = {group for context in masters for group in context.clients.all_consumers}
    for context in masters:
        found |= {group for topic in context.offsets.all_topics for group in context.offsets.groups(topic)}
    return {group for group in found if not group.startswith(names.SYSTEM_GROUP_PREFIX)}


def _delayed(context: BrokerContext) -> Iterator[tuple[Record, float]]:
    """Yield the delayed messages, with the seconds until their delivery."""
    offsets = context.schedule.offsets().offset_table
    for level, delay_ms in enumerate(parse_delay_levels(context.store_settings.message_delay_level), 1):
        for record in _records(context, names.SCHEDULE_TOPIC, level - 1, offsets.get(level, 0)):
            yield record, max(0, record.store_timestamp + delay_ms - context.clock.now_ms()) / 1000


def _undecided(context: BrokerContext) -> Iterator[Record]:
    """Yield the half messages that are neither committed nor rolled back."""
    position = context.offsets.get(TRANSACTION_GROUP, names.OP_HALF_TOPIC, 0) or 0
    decided = {at for op in _records(context, names.OP_HALF_TOPIC, 0, position) for at in op_offsets(op)}
    begin = context.offsets.get(TRANSACTION_GROUP, names.HALF_TOPIC, 0) or 0
    for half in _records(context, names.HALF_TOPIC, 0, begin):
        at = half.queue_offset
        if at not in decided and not context.ops.holds(0, at) and not context.transactions.is_passed(0, at):
            yield half


def _records(context: BrokerContext, topic: str, queue_id: int, begin: int) -> Iterator[Record]:
    """Yield the messages of a queue from an offset."""
    while begin < context.store.max_offset(topic, queue_id):
        found = context.store.get(topic, queue_id, begin, count_max=_READ_COUNT)
        yield from map(decode_record, found.records)
        if found.next_begin_offset <= begin:
            return
        begin = found.next_begin_offset


def _is_of(record: Record, topic: str | None) -> bool:
    """Return True if a message that was sent back belongs to a topic; None means any topic."""
    return topic in (None, _property(record, property_names.RETRY_TOPIC))


def _origin(record: Record) -> str:
    """Return the common identity of a message and its retries."""
    return _property(record, property_names.UNIQ_KEY) or str(record.physical_offset)


def _property(record: Record, name: str) -> str:
    return decode_properties(record.properties).get(name, "")


def _record_text(record: Record) -> str:
    """Return the description of a message in a failure."""
    of = decode_properties(record.properties)
    marks = {"keys": of.get("KEYS"), "tags": of.get("TAGS"), "id": of.get("UNIQ_KEY")}
    marked = "".join(f", {name} {value}" for name, value in marks.items() if value)
    topic = of.get(property_names.RETRY_TOPIC) or of.get(property_names.REAL_TOPIC) or record.topic
    tried = f", tried {record.reconsume_times} times" if record.reconsume_times else ""
    return f"message {record.queue_offset} of {topic}{marked}{tried}"


def _text(head: str, lines: list[str]) -> str:
    more = [f"... {len(lines) - _SHOWN_MAX} more"] if len(lines) > _SHOWN_MAX else []
    return "\n  ".join([head, *lines[:_SHOWN_MAX], *more])
