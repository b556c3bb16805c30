"""Messages that wait inside brokers: delayed and timed messages, half messages of transactions, popped messages.

==============  ====================================================================================================
messages        source
==============  ====================================================================================================
delay levels    stored messages: GET_TOPIC_STATS_INFO of the delay topic; delivered messages: runtime figures
                ``scheduleMessageOffset_N``; due time of the next message: its entry in the delay queue
                (QUERY_CONSUME_QUEUE)
timed messages  numbers by topic and (of rmqkit's brokers) by due time: GET_TIMER_METRICS; the total and the delay of
                the timer: runtime figures; single messages: the timer topic, the newest first
half messages   the half topic from the offset of check-back, without the messages that later op messages name; given
                up: ``TRANS_CHECK_MAX_TIME_TOPIC``
popped          the check points of the revive topic from the offset of reviving, minus the later acks. Messages that
                are popped in order have no check points. Apache's brokers store a check point only after some time
==============  ====================================================================================================

Topics are read with a `Budget`. If the budget is too small for a topic, ``is_whole`` is False and the counts include
only the examined messages. A figure that a broker does not report is None, not 0. No request changes data or saves an
offset.
Source: store.md §18, §19; behaviour.md §4.12, §9.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import msgspec
from msgspec import UNSET, Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.messages.listing import BUDGET, Budget
from rmqkit.admin.messages.messages import Messages
from rmqkit.admin.messages.timed import Timed, TimedList, TimedMessages, still_waiting
from rmqkit.admin.pulls import pull_request
from rmqkit.errors import PeerRefused, RmqError, SettingsError, UnknownName
from rmqkit.protocol import names
from rmqkit.protocol import properties as prop
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.schemas.brokers import TimerMetrics, TimerMetricsRequest
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.pop import PopCheckPoint, StoredAck
from rmqkit.protocol.schemas.pull import QueryConsumeQueueBody, QueryConsumeQueueRequest
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _
from rmqkit.store.settings import parse_delay_levels

__all__ = ["CheckPoint", "Delays", "Half", "Level", "Pops", "Transactions", "Waiting", "pending_pops", "undecided"]

ROWS_MAX = 1_000
_TRANSACTION_GROUP, _REVIVE_GROUP = "CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_REVIVE_GROUP"
_LEVEL = "scheduleMessageOffset_"
_PULL_COUNT = 256


class Level(Struct, rename="camel", kw_only=True):
    """One delay level of a broker.

    Attributes:
        delay_ms: the delay of its messages; None: the broker's settings do not contain the level.
        waiting: the number of messages that are stored and not delivered yet.
        next_due_ms: the due time of the first waiting message; None: no message waits, or the time is not known.
    """

    level: int
    delay_ms: int | None
    delivered: int
    waiting: int
    next_due_ms: int | None = None


class Delays(Struct, rename="camel", kw_only=True):
    """Delayed and timed messages of one broker.

    Attributes:
        timed: the number of waiting timed messages; None: the broker has no timer.
        timed_by_topic: the number of timed messages of each topic.
        due_within_s: the number of messages that become due within a number of seconds, by this number. A message is
            counted only for the lowest number of seconds. None: the broker does not report the numbers.
        due_later: the number of messages that are due now, or due later than the highest number of seconds.
        behind_ms: the delay of the timer.
        trouble: the reason why the figures are missing.
    """

    broker: str
    levels: list[Level] = field(default_factory=list)
    timed: int | None = None
    timed_by_topic: dict[str, int] = field(default_factory=dict)
    due_within_s: dict[int, int] | None = None
    due_later: int | None = None
    behind_ms: int | None = None
    trouble: str = ""


class Half(Struct, rename="camel", kw_only=True):
    """A half message. ``state`` is ``new``, ``asked`` (checked back, without a decision), ``ended`` (decided, but
    check-back has not passed the message) or ``given up``. ``group`` is the producer group."""

    broker: str
    state: str
    topic: str
    group: str
    msg_id: str
    offset_msg_id: str
    queue_offset: int
    stored_ms: int
    asked: int


class Transactions(Struct, rename="camel", kw_only=True):
    """The half messages of a cluster: ``counts`` by state, and rows for all states but ``ended``, the oldest first."""

    counts: dict[str, int]
    rows: list[Half]
    examined: int = 0
    is_whole: bool = True
    troubles: dict[str, str] = field(default_factory=dict)


class CheckPoint(Struct, rename="camel", kw_only=True):
    """The messages of one queue that were popped together and are not all acknowledged.

    ``offsets`` are the offsets of the messages that are not acknowledged. ``due_ms`` is the time of their redelivery.
    ``tries`` is the number of failed redeliveries.
    """

    broker: str
    topic: str
    group: str
    queue_id: int
    offsets: list[int]
    popped_ms: int
    due_ms: int
    tries: int = 0


class Pops(Struct, rename="camel", kw_only=True):
    """The popped messages of a cluster: the numbers of pending check points and messages, and the next check points.

    Attributes:
        by_group: the number of invisible messages, by ``topic group``.
        overdue: the number of messages that are due and not redelivered yet.
    """

    check_points: int
    messages: int
    overdue: int
    by_group: dict[str, int]
    rows: list[CheckPoint]
    examined: int = 0
    is_whole: bool = True
    troubles: dict[str, str] = field(default_factory=dict)


class _Reading(Struct):
    """The budget of one call and the part of it that is used. All queues that the call reads share the budget."""

    left: Budget
    deadline_ms: float
    examined: int = 0
    bytes: int = 0
    is_whole: bool = True

    def is_over(self, now_ms: float) -> bool:
        full = self.examined >= self.left.messages or self.bytes >= self.left.body_bytes
        return full or now_ms >= self.deadline_ms


class Waiting:
    """Operations on waiting messages. Each raises the errors of `AdminCalls`. The error of a single broker is in
    ``trouble`` or ``troubles`` of the result instead."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls
        self.timers = TimedMessages(Messages(calls))

    # -- delays

    async def delays(self, broker: str | None = None) -> list[Delays]:
        """Return the delayed and timed messages of each master."""
        masters = await self._calls.masters(broker=broker)
        return list(await asyncio.gather(*(self._delays(name, address) for name, address in masters.items())))

    async def _delays(self, name: str, address: str) -> Delays:
        try:
            return await self._delays_of(name, address)
        except RmqError as error:
            return Delays(broker=name, trouble=str(error))

    async def _delays_of(self, name: str, address: str) -> Delays:
        calls = self._calls
        figures, config = await asyncio.gather(
            calls.runtime_info(address), calls.fetch_properties(address, RequestCode.GET_BROKER_CONFIG)
        )
        try:
            delays_ms = parse_delay_levels(config.get("messageDelayLevel", ""))
        except SettingsError:
            delays_ms = ()
        found = Delays(broker=name)
        header = TopicRequest(names.SCHEDULE_TOPIC)
        bounds = await calls.fetch(TopicStatsTable, address, RequestCode.GET_TOPIC_STATS_INFO, header)
        for queue, has in sorted(bounds.offset_table.items()):
            level = queue.queue_id + 1
            # A level without delivered messages is missing in the figures.
            delivered = int(figures.get(f"{_LEVEL}{level}", str(has.min_offset)).partition(",")[0])
            found.levels.append(
                Level(
                    level=level,
                    delay_ms=delays_ms[level - 1] if level <= len(delays_ms) else None,
                    delivered=delivered,
                    waiting=max(0, has.max_offset - delivered),
                )
            )
        waiting = [one for one in found.levels if one.waiting]
        dues = await asyncio.gather(*(self._due(address, one) for one in waiting))
        for one, due_ms in zip(waiting, dues, strict=True):
            one.next_due_ms = due_ms
        await self._add_timer(found, address, figures)
        return found

    async def _due(self, address: str, level: Level) -> int | None:
        """Return the due time of the next message of a level. Entries of delay queues have it in place of a tag."""
        header = QueryConsumeQueueRequest(
            topic=names.SCHEDULE_TOPIC, queue_id=level.level - 1, index=level.delivered, count=1
        )
        answer = await self._calls.call(address, request(RequestCode.QUERY_CONSUME_QUEUE, header))
        if answer.code != ResponseCode.SUCCESS or not answer.payload:
            return None
        entries = decode_as(answer.payload, QueryConsumeQueueBody).queue_data
        return entries[0].tags_code if entries else None

    async def _add_timer(self, found: Delays, address: str, figures: dict[str, str]) -> None:
        try:
            code, header = RequestCode.GET_TIMER_METRICS, TimerMetricsRequest(due_within=True)
            metrics = await self._calls.fetch(TimerMetrics, address, code, header)
        except PeerRefused:  # a broker without a timer, or of 4.x
            return
        found.timed_by_topic = {topic: one.count for topic, one in metrics.timing_count.items() if one.count}
        found.timed = int(figures["timerCongestNum"]) if "timerCongestNum" in figures else None
        found.behind_ms = int(figures["timerReadBehind"]) * 1000 if "timerReadBehind" in figures else None
        if metrics.due_within_s is not UNSET:
            found.due_within_s = metrics.due_within_s
            found.due_later = max(0, (found.timed or 0) - sum(metrics.due_within_s.values()))

    async def timed(self, broker: str | None = None, topic: str = "", budget: Budget = BUDGET) -> TimedList:
        """Return the timed messages of one topic, or of all topics, sorted by due time."""
        masters, reading, troubles = await self._calls.masters(broker=broker), self._reading(budget), dict[str, str]()
        found: list[Timed] = []
        for name, address in masters.items():
            try:
                records = [
                    one async for one in self._read_back(address, MessageQueue(names.TIMER_TOPIC, name, 0), reading)
                ]
                found += still_waiting(name, records, self._calls.clock.now_ms())
            except RmqError as error:
                troubles[name] = str(error)
        wanted = sorted((one for one in found if topic in ("", one.topic)), key=lambda one: one.due_ms)
        return TimedList(
            rows=wanted[:ROWS_MAX],
            matched=len(wanted),
            examined=reading.examined,
            is_whole=reading.is_whole,
            troubles=troubles,
        )

    # -- transactions

    async def transactions(self, broker: str | None = None, budget: Budget = BUDGET) -> Transactions:
        """Return the half messages of one broker or of all brokers, with their states."""
        masters = await self._calls.masters(broker=broker)
        reading, troubles = self._reading(budget), dict[str, str]()
        rows: list[Half] = []
        given_up = 0
        for name, address in masters.items():
            try:
                rows += await self._halves(name, address, reading)
                given, count = await self._given_up(name, address, reading)
                rows += given
                given_up += count
            except RmqError as error:
                troubles[name] = str(error)
        counts = {state: sum(one.state == state for one in rows) for state in ("new", "asked", "ended")}
        shown = sorted((one for one in rows if one.state != "ended"), key=lambda one: one.stored_ms)
        return Transactions(
            counts=counts | {"given up": given_up},
            rows=shown[:ROWS_MAX],
            examined=reading.examined,
            is_whole=reading.is_whole,
            troubles=troubles,
        )

    async def _halves(self, name: str, address: str, reading: _Reading) -> list[Half]:
        halves, ops = (MessageQueue(topic, name, 0) for topic in (names.HALF_TOPIC, names.OP_HALF_TOPIC))
        positions = [
            await self._calls.committed_offset(address, _TRANSACTION_GROUP, queue, is_stored=True) or 0
            for queue in (halves, ops)
        ]
        ended = [one async for one in self._read(address, ops, positions[1], reading)]
        open_ = [one async for one in self._read(address, halves, positions[0], reading)]
        return undecided(name, open_, ended)

    async def _given_up(self, name: str, address: str, reading: _Reading) -> tuple[list[Half], int]:
        queue = MessageQueue(names.TRANS_CHECK_MAX_TIME_TOPIC, name, 0)
        try:
            low, high = await self._calls.min_offset(address, queue), await self._calls.max_offset(address, queue)
        except PeerRefused:  # the topic does not exist before its first message
            return [], 0
        newest = self._read(address, queue, max(low, high - ROWS_MAX), reading)
        return [_half(name, one, _("given up")) async for one in newest], high - low

    # -- pops

    async def pops(self, broker: str | None = None, budget: Budget = BUDGET) -> Pops:
        """Return the popped messages that are not acknowledged."""
        masters, now_ms = await self._calls.masters(broker=broker), self._calls.clock.now_ms()
        reading, troubles = self._reading(budget), dict[str, str]()
        found: list[CheckPoint] = []
        for name, address in masters.items():
            try:
                found += await self._pops_of(name, address, reading)
            except RmqError as error:
                troubles[name] = str(error)
        by_group: dict[str, int] = {}
        for one in found:
            key = f"{one.topic} {one.group}"
            by_group[key] = by_group.get(key, 0) + len(one.offsets)
        found.sort(key=lambda one: one.due_ms)
        return Pops(
            check_points=len(found),
            messages=sum(len(one.offsets) for one in found),
            overdue=sum(len(one.offsets) for one in found if one.due_ms < now_ms),
            by_group=dict(sorted(by_group.items(), key=lambda one: -one[1])),
            rows=found[:ROWS_MAX],
            examined=reading.examined,
            is_whole=reading.is_whole,
            troubles=troubles,
        )

    async def _pops_of(self, name: str, address: str, reading: _Reading) -> list[CheckPoint]:
        config = await self._calls.fetch_properties(address, RequestCode.GET_BROKER_CONFIG)
        topic = f"rmq_sys_REVIVE_LOG_{config.get('brokerClusterName', '')}"
        if "reviveQueueNum" not in config:
            raise UnknownName(_("POP of broker"), name, address, remedy=_("brokers before 5.0 have none"))
        records: list[ReceivedMessage] = []
        for queue_id in range(int(config["reviveQueueNum"])):
            queue = MessageQueue(topic, name, queue_id)
            begin = await self._calls.committed_offset(address, _REVIVE_GROUP, queue, is_stored=True) or 0
            records += [one async for one in self._read(address, queue, begin, reading)]
        return pending_pops(name, records)

    # -- reading

    def _reading(self, budget: Budget) -> _Reading:
        return _Reading(budget, self._calls.clock.monotonic_ms() + budget.ms)

    async def _read_back(self, address: str, queue: MessageQueue, reading: _Reading) -> AsyncIterator[ReceivedMessage]:
        """Yield the messages of a queue, the newest first, within the budget."""
        low, high = await self._calls.min_offset(address, queue), await self._calls.max_offset(address, queue)
        while high > low:
            begin = max(low, high - _PULL_COUNT)
            block = [one async for one in self._read(address, queue, begin, reading, end=high)]
            for one in reversed(block):
                yield one
            if not reading.is_whole:
                return
            high = begin

    async def _read(
        self, address: str, queue: MessageQueue, begin: int, reading: _Reading, *, end: int | None = None
    ) -> AsyncIterator[ReceivedMessage]:
        """Yield the messages of a queue from an offset to its end or to ``end``, within the budget."""
        calls, clock = self._calls, self._calls.clock
        at = max(begin, await calls.min_offset(address, queue))
        end = await calls.max_offset(address, queue) if end is None else end
        while at < end:
            if reading.is_over(clock.monotonic_ms()):
                reading.is_whole = False
                return
            header = pull_request(queue, at, "*", clock.now_ms(), max_count=min(_PULL_COUNT, end - at))
            pulled = await calls.pull(address, header, calls.timeout_ms)
            got = read_messages(pulled.body, queue.broker_name) if pulled.status is PullStatus.FOUND else []
            for one in got:
                reading.examined += 1
                reading.bytes += len(one.body)
                yield one
            after = got[-1].queue_offset + 1 if got else pulled.next_begin_offset
            if after <= at:
                return
            at = after


def undecided(broker: str, halves: Iterable[ReceivedMessage], ops: Iterable[ReceivedMessage]) -> list[Half]:
    """Return half messages with their states, from the op messages that name the ended half messages. Each check-back
    stores another copy of a half message. Only the last copy is returned. This function is pure."""
    ended = {
        int(piece)
        for op in ops
        if op.tags == "d"
        for piece in op.body.split(b",")
        if piece.isdigit() and len(piece) < 20
    }
    found: dict[str, Half] = {}
    for one in halves:
        original = one.properties.get(prop.TRANSACTION_PREPARED_QUEUE_OFFSET, "")
        numbers = {one.queue_offset, int(original) if original.isdecimal() and len(original) < 20 else -1}
        asked = one.properties.get(prop.TRANSACTION_CHECK_TIMES, "0")
        half = _half(broker, one, "ended" if numbers & ended else "asked" if asked not in ("0", "") else "new")
        before = found.pop(half.msg_id, None)
        if before is not None and before.state == "ended":
            half.state = "ended"
        found[half.msg_id] = half
    return list(found.values())


def _half(broker: str, one: ReceivedMessage, state: str) -> Half:
    asked = one.properties.get(prop.TRANSACTION_CHECK_TIMES, "0")
    return Half(
        broker=broker,
        state=state,
        topic=one.properties.get(prop.REAL_TOPIC, one.topic),
        group=one.properties.get(prop.PRODUCER_GROUP, ""),
        msg_id=one.properties.get(prop.UNIQ_KEY, one.msg_id),
        offset_msg_id=one.offset_msg_id,
        queue_offset=one.queue_offset,
        stored_ms=one.store_timestamp,
        asked=int(asked) if asked.isdecimal() and len(asked) < 10 else 0,
    )


def pending_pops(broker: str, records: Iterable[ReceivedMessage]) -> list[CheckPoint]:
    """Return the check points with unacknowledged messages, from the records of a revive topic in order. Unreadable
    records are skipped. This function is pure."""
    points: dict[tuple[str, str, int, int, int], PopCheckPoint] = {}
    left: dict[tuple[str, str, int, int, int], set[int]] = {}
    for record in records:
        try:
            if record.tags == "ck":
                point = msgspec.json.decode(record.body, type=PopCheckPoint)
                key = point.topic, point.group, point.queue_id, point.start_offset, point.pop_time
                points[key], left[key] = point, point.offsets_left
            elif record.tags in ("ack", "bAck"):
                ack = msgspec.json.decode(record.body, type=StoredAck)
                key = ack.topic, ack.group, ack.queue_id, ack.start_offset, ack.pop_time
                gone = ack.ack_offsets if isinstance(ack.ack_offsets, list) else [ack.ack_offset]
                left.get(key, set[int]()).difference_update(gone)
        except msgspec.MsgspecError:
            continue
    return [
        CheckPoint(
            broker=broker,
            topic=one.topic,
            group=one.group,
            queue_id=one.queue_id,
            offsets=sorted(left[key]),
            popped_ms=one.pop_time,
            due_ms=one.pop_time + one.invisible_time,
            tries=int(one.tries) if isinstance(one.tries, str) and one.tries.isdecimal() else 0,
        )
        for key, one in points.items()
        if left[key]
    ]
