"""The watcher: a task for each cluster that updates a `Snapshot`. List pages read the snapshot and send no request.

=========================  ===========================  =============================================================
data                       requested from               interval while the console is used
=========================  ===========================  =============================================================
brokers                    a name server                each round: 10 s; 60 s after a minute without use
figures, replication       every broker                 each round
lags of all groups         every master                 each round, but for at most 1 % of the time
name servers               every name server            each round
popped messages            every master                 30 s, within a budget
topics and groups          every master                 30 s
producers, half messages   every master                 30 s
topics without groups      the masters of the topic     in turn, 20 per round, topics of open pages first
members of groups          every master                 in turn, 50 per round, groups of open pages first
=========================  ===========================  =============================================================

A *round* is one call of `Watcher.round`. Alert rules count as use of the console. Consumer statistics also have the
ends of consumed topics, so put rates need no further request. Apache's brokers read their store for each queue of these
statistics. Therefore the pause after an answer is a hundred times the duration of the request.

The budget is 2 requests at a time and 20 per second for each broker, with a timeout of 3 s. Figures without an answer
are *unknown since*, not zero. A snapshot is replaced as a whole. Use this module only on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from rmqkit.admin import Admin
from rmqkit.admin.cluster.brokers import GroupProgress
from rmqkit.admin.cluster.clients import ProducerRow, fleet
from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.cluster.groups import GroupLag, Movement, lags, movements
from rmqkit.admin.diagnosis.health import BrokerState, GroupState, Snapshot, TopicState, clock_skew_ms, topic_kind
from rmqkit.admin.diagnosis.survey import add_popped, name_server_troubles, oldest_half
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol import names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.clients import ConsumerConnection, ConsumerGroupRequest
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.topics import TopicConfig, TopicConfigTable, TopicRequest
from rmqkit.sentences import _

__all__ = ["Watcher"]

ROUND_S, IDLE_ROUND_S = 10.0, 60.0
LOOKED_MS = 60_000
ANSWER_MS = 3_000
TABLES_MS = 30_000
STATS_PAUSE = 100
TOPICS_A_ROUND, GROUPS_A_ROUND = 20, 50
AT_ONCE, PER_SECOND = 2, 20
TREND_MS = 60_000
GONE_MS = 3_600_000
"""The time for which pages show a broker that has left the name servers."""
STEP = 1_000
"""The number of topics or groups that one iteration of the event loop builds."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Tables(Struct):
    """The last answers of a master."""

    topics: dict[str, TopicConfig] = field(default_factory=dict)
    groups: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    producers: list[ProducerRow] = field(default_factory=list)
    progress: list[GroupProgress] = field(default_factory=list)
    progress_at: float = -1e18
    steps: deque[tuple[float, dict[str, Movement]]] = field(default_factory=deque)
    moved: dict[str, Movement] = field(default_factory=dict)
    moved_ms: float = 0.0
    tables_at: float = -1e18
    stats_after: float = -1e18


class _Pace:
    """The limits of requests to one broker, at a time and per second."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._free_at = 0.0

    async def run(self, asking: Callable[[], Awaitable[T]]) -> T:
        async with self._turns:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + 1 / PER_SECOND
            # Do not delay the requests of the first second, because a round is a burst of a few requests.
            if (wait_s := self._free_at - now - 1.0) > 0:
                await asyncio.sleep(wait_s)
            async with asyncio.timeout(ANSWER_MS / 1000):
                return await asking()


class Watcher:
    """The task that updates the snapshot of one cluster.

    Attributes:
        snapshot: the latest snapshot; each round replaces it.
        followers: the functions that are called with each snapshot.
        is_needed: True if rules use the snapshots. Rounds are then frequent even without open pages.
        trouble: the error of the last round, or empty.
    """

    def __init__(self, admin: Admin) -> None:
        self.snapshot = Snapshot()
        self.followers: list[Callable[[Snapshot], Awaitable[None]]] = []
        self.is_needed = False
        self.trouble = ""
        self.admin = admin
        self._clock = admin.calls.clock
        self._tables: dict[str, _Tables] = {}
        self._brokers: dict[str, BrokerState] = {}
        self._counted: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}
        self._ends: dict[str, tuple[int, int]] = {}
        self._name_servers: dict[str, str] = {}
        self._gone: dict[str, tuple[float, BrokerRow]] = {}
        self._popped: dict[str, GroupState] = {}
        self._popped_at = -1e18
        self._dead_last: dict[str, int] = {}
        self._dead_first: dict[str, int] = {}
        self._members: dict[str, ConsumerConnection | None] = {}
        self._paces: dict[str, _Pace] = {}
        self._no_ha: set[str] = set()
        self._troubles: dict[str, str] = {}
        self._wanted_topics: list[str] = []
        self._wanted_groups: list[str] = []
        self._turn_topics: deque[str] = deque()
        self._turn_groups: deque[str] = deque()
        self._looked_ms = -1e18
        self._wake = asyncio.Event()
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- for pages

    def start(self) -> None:
        """Start the task, if it is not running."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="console watcher")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self, *, topics: Iterable[str] = (), groups: Iterable[str] = ()) -> None:
        """Report the use of a page: rounds become frequent, and these topics and groups are requested first."""
        if self._clock.monotonic_ms() - self._looked_ms > LOOKED_MS:
            self._wake.set()
        self._looked_ms = self._clock.monotonic_ms()
        self._wanted_topics = list(topics) or self._wanted_topics
        self._wanted_groups = list(groups) or self._wanted_groups

    def refresh(self) -> None:
        """Start a round that also requests topics and groups, after a change."""
        for tables in self._tables.values():
            tables.tables_at = -1e18
        self._wake.set()

    async def first(self, seconds: float) -> None:
        """Wait for the first snapshot, but at most for some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._known.wait()

    # -- rounds

    async def _run(self) -> None:
        while True:
            # Clear the event before the round: a refresh during the round starts the next round immediately.
            self._wake.clear()
            try:
                await self._round_or_trouble()
            except Exception:  # noqa: BLE001 - the outer edge of the task: pages say how old the snapshot is
                _log.exception("console watcher: a round failed")
                self.trouble = _("the console failed during the request: its log has the reason")
            self._known.set()
            is_looked_at = self._clock.monotonic_ms() - self._looked_ms < LOOKED_MS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S if is_looked_at or self.is_needed else IDLE_ROUND_S):
                    await self._wake.wait()

    async def _round_or_trouble(self) -> None:
        try:
            await self.round()
            self.trouble = ""
        except RmqError as error:
            self.trouble = str(error)
            for state in self._brokers.values():
                state.trouble = state.trouble or str(error)
            await self._publish()

    async def round(self) -> None:
        """Send all due requests, and replace the snapshot. Raises RmqError: no name server answers."""
        calls = self.admin.calls
        # Drop cached routes and clusters, or new brokers would never be found.
        calls.forget()
        rows = await self.admin.clusters.listed()
        addresses = {row.addr for row in rows}
        known = self._brokers
        self._brokers = {row.addr: _next_state(known.get(row.addr), row) for row in rows}
        now_ms = self._clock.monotonic_ms()
        self._gone |= {address: (now_ms, one.row) for address, one in known.items() if address not in addresses}
        self._gone = {
            address: one
            for address, one in self._gone.items()
            if address not in addresses and now_ms - one[0] < GONE_MS
        }
        self._name_servers = await name_server_troubles(self.admin)
        masters = {row.broker_name: row.addr for row in rows if row.broker_id == 0}
        self._tables = {address: self._tables.get(address, _Tables()) for address in masters.values()}
        self._paces = {address: self._paces.get(address) or _Pace() for address in addresses}
        await asyncio.gather(*(self._figures(address) for address in addresses))
        # Send no more requests to a broker without figures. So a hanging broker delays a round by only one timeout.
        alive = {name: address for name, address in masters.items() if not self._brokers[address].trouble}
        await asyncio.gather(
            *(self._replication(address) for address in alive.values()),
            *(self._progress(name, address) for name, address in alive.items()),
            *(self._read_tables(name, address) for name, address in alive.items()),
        )
        await asyncio.gather(self._topics_in_turn(alive), self._groups_in_turn(alive), self._pops(alive))
        await self._publish()

    async def _ask(self, address: str, asking: Callable[[], Awaitable[T]], note: Callable[[str], object]) -> T | None:
        """Return an answer within the budget. After an error, call ``note`` with its text and return None."""
        try:
            return await self._paces[address].run(asking)
        except TimeoutError:
            note(_("no answer within {seconds:g} s", seconds=ANSWER_MS / 1000))
        except RmqError as error:
            note(str(error))
        return None

    async def _figures(self, address: str) -> None:
        state = self._brokers[address]
        troubles: list[str] = []
        asked_ms = self._clock.now_ms()
        figures = await self._ask(address, lambda: self.admin.calls.runtime_info(address), troubles.append)
        state.trouble = troubles[0] if troubles else ""
        if figures is not None:
            self.admin.clusters.fill(state.row, figures)
            state.figures, state.since_ms = dict(sorted(figures.items())), self._clock.now_ms()
            state.skew_ms = clock_skew_ms(figures, (asked_ms + state.since_ms) / 2)

    async def _replication(self, address: str) -> None:
        if address in self._no_ha:
            return
        code, calls = RequestCode.GET_BROKER_HA_STATUS, self.admin.calls

        async def asking() -> HaRuntimeInfo | None:
            try:
                return await calls.fetch(HaRuntimeInfo, address, code)
            except PeerRefused as error:
                # Do not repeat the request: a 4.9 broker logs each unknown request.
                if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:  # before 5.0
                    self._no_ha.add(address)
                raise

        self._brokers[address].ha = await self._ask(address, asking, _silently)

    async def _progress(self, name: str, address: str) -> None:
        tables, now_ms = self._tables[address], self._clock.monotonic_ms()
        if now_ms < tables.stats_after:
            return
        rows = await self._ask(
            address, lambda: self.admin.brokers.consume_stats(address), self._note(_("lags of {name}", name=name))
        )
        took_ms = self._clock.monotonic_ms() - now_ms
        tables.stats_after = now_ms + max(0.9 * ROUND_S * 1000, STATS_PAUSE * took_ms)
        if rows is not None:
            _add_progress(tables, rows, now_ms)
            self._heard(_("lags of {name}", name=name))

    async def _read_tables(self, name: str, address: str) -> None:
        tables, now_ms, calls = self._tables[address], self._clock.monotonic_ms(), self.admin.calls
        if now_ms - tables.tables_at < TABLES_MS:
            return
        code = RequestCode.GET_ALL_TOPIC_CONFIG
        topics = await self._ask(
            address, lambda: calls.fetch(TopicConfigTable, address, code), self._note(_("topics of {name}", name=name))
        )
        if topics is not None:
            tables.topics = dict(topics.topic_config_table)
            tables.tables_at = now_ms
            self._heard(_("topics of {name}", name=name))
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        groups = await self._ask(
            address,
            lambda: calls.fetch(SubscriptionGroupTable, address, code),
            self._note(_("groups of {name}", name=name)),
        )
        if groups is not None:
            tables.groups = groups.subscription_group_table
            self._heard(_("groups of {name}", name=name))
        producers = await self._ask(
            address, lambda: self.admin.clients.all_producers(name), self._note(_("producers of {name}", name=name))
        )
        if producers is not None:
            tables.producers = producers
            self._heard(_("producers of {name}", name=name))
        self._brokers[address].half_since_ms = await self._ask(
            address, lambda: oldest_half(self.admin, name), _silently
        )

    async def _pops(self, alive: dict[str, str]) -> None:
        """Request the numbers of messages that are popped and not acknowledged, by group."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._popped_at < TABLES_MS:
            return
        self._popped_at = now_ms
        known = {group for address in alive.values() for group in self._tables[address].groups}
        found, troubles = {group: GroupState(name=group) for group in known}, dict[str, str]()
        for name, address in alive.items():
            what = _("popped messages of {name}", name=name)
            self._heard(what)
            await self._ask(address, partial(add_popped, self.admin, name, found, troubles), self._note(what))
        self._troubles |= troubles
        is_known = not any(what.startswith("popped messages") for what in self._troubles)
        for group, state in found.items():
            before = self._popped.get(group)
            if before is not None and before.popped is not None and state.popped is not None:
                state.popped_grew = state.popped - before.popped
        self._popped = found if is_known else {}

    async def _topics_in_turn(self, alive: dict[str, str]) -> None:
        consumed = {row.topic for tables in self._tables.values() for row in tables.progress}
        known = {topic for tables in self._tables.values() for topic in tables.topics}
        wanted = [topic for topic in self._wanted_topics if topic in known]
        chosen = _turn(self._turn_topics, known - consumed, wanted, TOPICS_A_ROUND)

        async def one(topic: str) -> None:
            at = [address for address, tables in self._tables.items() if topic in tables.topics]
            if not set(at) <= set(alive.values()):
                return
            code, header, calls = RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic), self.admin.calls

            async def ask(address: str) -> TopicStatsTable | None:
                return await self._ask(address, lambda: calls.fetch(TopicStatsTable, address, code, header), _silently)

            answers = await asyncio.gather(*map(ask, at))
            if at and None not in answers:
                queues = [has for answer in answers if answer is not None for has in answer.offset_table.values()]
                self._ends[topic] = sum(has.min_offset for has in queues), sum(has.max_offset for has in queues)
                self._dead_last[topic] = max((has.last_update_timestamp for has in queues), default=0)

        await asyncio.gather(*map(one, chosen))

    async def _groups_in_turn(self, alive: dict[str, str]) -> None:
        known = {
            group for tables in self._tables.values() for group in tables.groups if not names.is_system_group(group)
        }
        chosen = _turn(self._turn_groups, known, [one for one in self._wanted_groups if one in known], GROUPS_A_ROUND)
        code, calls = RequestCode.GET_CONSUMER_CONNECTION_LIST, self.admin.calls
        gone = set(self._members) - known
        for group in gone:
            del self._members[group]

        async def one(group: str) -> None:
            async def at(address: str) -> ConsumerConnection:
                try:
                    return await calls.fetch(ConsumerConnection, address, code, ConsumerGroupRequest(group))
                except PeerRefused as error:
                    if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
                        return ConsumerConnection()
                    raise

            async def ask(address: str) -> ConsumerConnection | None:
                return await self._ask(address, lambda: at(address), _silently)

            answers = await asyncio.gather(*map(ask, alive.values()))
            self._members[group] = _joined([answer for answer in answers if answer is not None])

        await asyncio.gather(*map(one, chosen))

    def _note(self, what: str) -> Callable[[str], object]:
        return lambda text: self._troubles.__setitem__(what, text)

    def _heard(self, what: str) -> None:
        self._troubles.pop(what, None)

    # -- the snapshot

    async def _publish(self) -> None:
        """Build the next snapshot in steps that yield to the event loop, and call the followers."""
        now_ms, then_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        found = lags(row for tables in self._tables.values() for row in tables.progress)
        await asyncio.sleep(0)
        topics = await self._topics(found, then_ms)
        await asyncio.sleep(0)
        groups = await self._groups(found, topics, then_ms)
        await asyncio.sleep(0)
        producers = [row for tables in self._tables.values() for row in tables.producers]
        consumers = {group: one for group, one in self._members.items() if one is not None}
        brokers = list(self._brokers.values())
        spans = [tables.moved_ms for tables in self._tables.values() if tables.moved_ms]
        self.snapshot = Snapshot(
            at_ms=now_ms, compared_ms=min(spans, default=None), name_servers=dict(self._name_servers),
            gone=[row for __, row in self._gone.values()], brokers=brokers, topics=topics, groups=groups,
            lags=list(found.values()), clients=fleet(producers, consumers), troubles=dict(self._troubles),
        )  # fmt: skip
        for follow in self.followers:
            await asyncio.sleep(0)
            await follow(self.snapshot)

    async def _topics(self, found: dict[tuple[str, str], GroupLag], then_ms: float) -> dict[str, TopicState]:
        topics: dict[str, TopicState] = {}
        own = {word for state in self._brokers.values() for word in (state.row.broker_name, state.row.cluster_name)}
        for state in self._brokers.values():
            async for name, config in _steps(self._tables[state.row.addr].topics.items() if state.is_master else ()):
                topic = topics.get(name)
                kind, order = (config.attributes or {}).get("message.type", ""), config.order
                if topic is None:
                    topic = topics[name] = TopicState(
                        name=name, kind=_kind(name, own), message_type=kind, perm=config.perm, order=order
                    )
                elif (topic.perm, topic.message_type, topic.order) != (config.perm, kind, order):
                    topic.differs = True
                topic.read_queues += config.read_queue_nums
                topic.write_queues += config.write_queue_nums
                topic.brokers.append(state.row.broker_name)
        ends: dict[str, int] = {}
        async for lag in _steps(found.values()):
            if lag.topic in topics:
                ends[lag.topic] = max(ends.get(lag.topic, 0), lag.end)
                topic = topics[lag.topic]
                if not names.is_system_group(lag.group):
                    topic.groups.append(lag.group)
                    consumed = self._rate(f"{lag.group} of {lag.topic}", lag.end - lag.count, then_ms)
                    topic.out_tps = topic.out_tps if consumed is None else (topic.out_tps or 0.0) + consumed
                topic.lag = (topic.lag or 0) + lag.count
                topic.behind_since_ms = _earlier(topic.behind_since_ms, lag.behind_since_ms)
        async for name, topic in _steps(topics.items()):
            low_high = self._ends.get(name)
            topic.end = ends.get(name, low_high[1] if low_high else None)
            topic.stored = low_high[1] - low_high[0] if low_high else None
            topic.groups.sort()
            topic.in_tps = self._rate(name, topic.end, then_ms)
        return topics

    def _rate(self, counted: str, end: int | None, then_ms: float) -> float | None:
        if end is None:
            return None
        before = self._counted.get(counted)
        if before is None or end != before[1] or then_ms - before[0] > TREND_MS:
            self._counted[counted] = then_ms, end
        if before is not None and then_ms > before[0]:
            self._rates[counted] = max(0.0, (end - before[1]) * 1000 / (then_ms - before[0]))
        return self._rates.get(counted)

    async def _groups(
        self, found: dict[tuple[str, str], GroupLag], topics: dict[str, TopicState], then_ms: float
    ) -> dict[str, GroupState]:
        groups: dict[str, GroupState] = {}
        for state in self._brokers.values():
            for name, config in self._tables[state.row.addr].groups.items() if state.is_master else ():
                if not names.is_system_group(name):
                    group = groups.setdefault(name, GroupState(name=name))
                    group.configs[state.row.broker_name] = config
                    group.enabled = group.enabled and config.consume_enable
                    group.orderly = group.orderly or bool(config.consume_message_orderly)
                    group.retry_max = config.retry_max_times
        for lag in found.values():
            if (known := groups.get(lag.group)) is None:
                continue
            known.lag = (known.lag or 0) + lag.count
            known.behind_since_ms = _earlier(known.behind_since_ms, lag.behind_since_ms)
            if topic_kind(lag.topic) != "retry":
                known.topics.append(lag.topic)
        async for __, group in _steps(groups.items()):
            group.topics.sort()
            self._add_members(group)
            self._add_dead(group, topics)
            self._add_movement(group)
        return groups

    def _add_movement(self, group: GroupState) -> None:
        """Add the changes of a group since the earlier samples of its masters, and its popped messages."""
        moved = [(one.moved[group.name], one.moved_ms) for one in self._tables.values() if group.name in one.moved]
        if moved:
            group.late = sum(one.late for one, __ in moved)
            group.trend = sum(one.grew * 1000 / span_ms for one, span_ms in moved)
            group.consumed = sum(one.consumed * 1000 / span_ms for one, span_ms in moved)
        if (popped := self._popped.get(group.name)) is not None:
            group.popped, group.popped_grew = popped.popped, popped.popped_grew
            group.popped_since_ms = popped.popped_since_ms

    def _add_members(self, group: GroupState) -> None:
        if (connection := self._members.get(group.name)) is not None:
            group.members = len(connection.connection_set)
            group.consume_type = connection.consume_type or ""
            group.message_model = connection.message_model or ""

    def _add_dead(self, group: GroupState, topics: dict[str, TopicState]) -> None:
        dead = topics.get(names.dlq_topic(group.name))
        if dead is None:
            if self._tables and not self._troubles:
                group.dead = group.dead_grew = self._dead_first[group.name] = 0
            return
        if dead.stored is not None and dead.end is not None:
            group.dead = dead.stored
            group.dead_last_ms = self._dead_last.get(dead.name) or None
            group.dead_grew = max(0, dead.end - self._dead_first.setdefault(group.name, dead.end))


def _add_progress(tables: _Tables, rows: list[GroupProgress], now_ms: float) -> None:
    """Replace the progress of groups at a master, and add up their changes in the last `TREND_MS`."""
    if tables.progress_at >= 0:
        tables.steps.append((now_ms - tables.progress_at, movements(tables.progress, rows)))
    tables.progress, tables.progress_at = rows, now_ms
    while len(tables.steps) > 1 and sum(span_ms for span_ms, __ in tables.steps) > TREND_MS:
        tables.steps.popleft()
    tables.moved_ms, tables.moved = sum(span_ms for span_ms, __ in tables.steps), {}
    for __, step in tables.steps:
        for group, one in step.items():
            moved = tables.moved.setdefault(group, Movement())
            moved.consumed += one.consumed
            moved.grew += one.grew
            # Use only the last step: a minute would be too long to notice a group that has just stopped.
            moved.late = one.late


async def _steps(things: Collection[T]) -> AsyncIterator[T]:
    """Yield the items, and let the event loop run after each `STEP` items."""
    for number, one in enumerate(things, 1):
        yield one
        if number % STEP == 0:
            await asyncio.sleep(0)


def _silently(_: str) -> None:
    """Ignore the error of a request, because the request will be repeated. Figures without an answer are shown as
    unknown."""


def _next_state(known: BrokerState | None, row: BrokerRow) -> BrokerState:
    """Return a new state for the next snapshot, with the last known figures of the broker."""
    if known is None or known.row.broker_id != row.broker_id:
        return BrokerState(row=row)
    return BrokerState(
        row=replace(known.row), figures=known.figures, ha=known.ha, since_ms=known.since_ms, trouble=known.trouble,
        half_since_ms=known.half_since_ms, skew_ms=known.skew_ms,
    )  # fmt: skip


def _turn(waiting: deque[str], known: set[str], first: list[str], count: int) -> list[str]:
    """Return the next names to request: first the names of open pages, then other names in turn."""
    if not waiting or len(waiting) > 2 * len(known) + 1:
        waiting.clear()
        waiting.extend(sorted(known))
    chosen = dict.fromkeys(first[:count])
    for __ in range(len(waiting)):
        if len(chosen) >= count:
            break
        name = waiting.popleft()
        if name in known:
            chosen[name] = None
    return list(chosen)


def _joined(answers: list[ConsumerConnection]) -> ConsumerConnection | None:
    """Return one answer made from the answers of several brokers about a group; None if no broker answered."""
    if not answers:
        return None
    online = [one for one in answers if one.connection_set] or answers[:1]
    clients = {one.client_id: one for answer in online for one in answer.connection_set}
    table: dict[str, Any] = {topic: one for answer in online for topic, one in answer.subscription_table.items()}
    first = online[0]
    return ConsumerConnection(
        connection_set=[clients[client_id] for client_id in sorted(clients)],
        consume_type=first.consume_type,
        message_model=first.message_model,
        consume_from_where=first.consume_from_where,
        subscription_table=table,
    )


def _kind(topic: str, own: set[str]) -> str:
    """Return the kind of a topic. Topics with the name of a cluster or broker are system topics."""
    return "system" if topic in own or topic.removesuffix("_REPLY_TOPIC") in own else topic_kind(topic)


def _earlier(one: int | None, other: int | None) -> int | None:
    times = [at for at in (one, other) if at is not None]
    return min(times, default=None)
