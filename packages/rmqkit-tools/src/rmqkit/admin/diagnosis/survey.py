"""Two samples of a whole cluster for `rmqkit.admin.diagnosis.health`, without stored state.

`look` makes a `Snapshot` of name servers, brokers, replication, half messages, groups and clients. The state of a group
includes its lag, its dead letters, its popped messages and its members. `survey` takes two snapshots and compares them,
because only a comparison shows if a group keeps up. The web console updates one snapshot periodically
(`rmqkit.console.watch.watcher`). If a request fails, its error is stored in ``troubles``, and the other answers are
used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from msgspec import Struct

from rmqkit.admin import Admin
from rmqkit.admin.cluster.brokers import GroupProgress
from rmqkit.admin.cluster.clients import FleetRow, ProducerRow, fleet
from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.cluster.groups import GroupLag, lags, movements
from rmqkit.admin.diagnosis.health import BrokerState, GroupState, Snapshot, add_movement, clock_skew_ms, span_text
from rmqkit.admin.messages.listing import Budget
from rmqkit.admin.replay.dead import DeadGroup
from rmqkit.errors import PeerRefused, RmqError, UnknownName
from rmqkit.protocol import names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.clients import ConsumerConnection, MessageQueue
from rmqkit.protocol.schemas.topics import ClusterInfo

__all__ = [
    "APART_S",
    "POP_BUDGET",
    "Look",
    "add_popped",
    "compare",
    "everybody",
    "look",
    "name_server_troubles",
    "oldest_half",
    "survey",
    "well_text",
]

APART_S = 10.0
"""The seconds between the two samples. Consumers commit offsets every 5 s, so every consumer commits in between."""
POP_BUDGET = Budget(ms=2_000.0, messages=20_000)

_AT_ONCE = 4
_pause = asyncio.sleep

T = TypeVar("T")


class Look(Struct):
    """A sample: the snapshot, and the progress of every group in every queue."""

    snapshot: Snapshot
    progress: list[GroupProgress]
    taken_ms: float


async def survey(admin: Admin, cluster: str | None = None, apart_s: float = APART_S) -> Snapshot:
    """Take two samples of a cluster, or of all clusters, compare them, and return the second snapshot.
    Raises UnknownName: there is no such cluster.
    Raises NoNameServer: no name server answers."""
    before = await look(admin, cluster)
    await _pause(apart_s)
    admin.calls.forget()
    now = await look(admin, cluster)
    compare(before, now)
    return now.snapshot


def compare(before: Look, now: Look) -> None:
    """Add the changes since the first sample to the second snapshot."""
    span_ms = now.taken_ms - before.taken_ms
    snapshot, old = now.snapshot, before.snapshot
    snapshot.compared_ms = span_ms
    listed = {(one.row.broker_name, one.row.broker_id) for one in snapshot.brokers}
    snapshot.gone = [one.row for one in old.brokers if (one.row.broker_name, one.row.broker_id) not in listed]
    moved = movements(before.progress, now.progress)
    for name, group in snapshot.groups.items():
        earlier = old.groups.get(name)
        if earlier is None:
            continue
        if name in moved and earlier.lag is not None:
            add_movement(group, moved[name], span_ms)
        if group.dead is not None and earlier.dead is not None:
            group.dead_grew = max(0, group.dead - earlier.dead)
        if group.popped is not None and earlier.popped is not None:
            group.popped_grew = group.popped - earlier.popped


async def look(admin: Admin, cluster: str | None = None) -> Look:
    """Take one sample. Raises UnknownName: there is no such cluster. Raises NoNameServer: no name server answers."""
    troubles: dict[str, str] = {}
    name_servers = await name_server_troubles(admin)
    states = await asyncio.gather(*(_state(admin, row, troubles) for row in await admin.clusters.listed(cluster)))
    masters = {one.row.broker_name: one.row.addr for one in states if one.is_master and not one.trouble}
    groups: dict[str, GroupState] = {}
    for name, table in (await _answers(masters, admin.groups.table, "groups", troubles)).items():
        for group, config in table.items():
            if not names.is_system_group(group):
                groups.setdefault(group, GroupState(name=group)).configs[name] = config
    taken_ms = admin.calls.clock.monotonic_ms()
    stats = await _answers(masters, admin.brokers.consume_stats, "lags", troubles)
    progress = [row for rows in stats.values() for row in rows]
    found = lags(progress)
    for lag in found.values():
        if lag.group in groups:
            _add_lag(groups[lag.group], lag)
    await _add_dead(admin, groups, troubles)
    for name in masters:
        await add_popped(admin, name, groups, troubles)
    members = await _members(admin, groups, troubles)
    for group, connection in members.items():
        groups[group].members = len(connection.connection_set)
    producers = await _answers(masters, admin.clients.all_producers, "producers", troubles)
    snapshot = Snapshot(
        at_ms=admin.calls.clock.now_ms(),
        name_servers=name_servers,
        brokers=list(states),
        groups=groups,
        lags=list(found.values()),
        clients=fleet((row for rows in producers.values() for row in rows), members),
        troubles=troubles,
    )
    return Look(snapshot, progress, taken_ms)


async def name_server_troubles(admin: Admin) -> dict[str, str]:
    """Return the reason why each name server does not answer, or an empty text if it answers."""

    async def one(address: str) -> str:
        try:
            await admin.calls.fetch(ClusterInfo, address, RequestCode.GET_BROKER_CLUSTER_INFO)
        except RmqError as error:
            return str(error)
        return ""

    addresses = admin.calls.name_servers
    return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


async def _add_dead(admin: Admin, groups: dict[str, GroupState], troubles: dict[str, str]) -> None:
    try:
        dead: dict[str, DeadGroup] = {one.group: one for one in await admin.dead.groups()}
    except RmqError as error:
        troubles["dead letters"] = str(error)
        return
    for name, group in groups.items():
        has = dead.get(name)
        group.dead, group.dead_last_ms = (has.count, has.last_ms) if has is not None else (0, None)


async def add_popped(admin: Admin, broker: str, groups: dict[str, GroupState], troubles: dict[str, str]) -> None:
    """Add to each group the number of messages that its clients have popped from a broker and not acknowledged."""
    try:
        pops = await admin.waiting.pops(broker, POP_BUDGET)
    except RmqError as error:
        troubles[f"popped messages of {broker}"] = str(error)
        return
    if pops.troubles or not pops.is_whole:
        is_without = any("before 5.0" in text for text in pops.troubles.values())
        if not is_without:
            why = next(iter(pops.troubles.values()), f"there are more than {POP_BUDGET.messages:,} records to read")
            troubles[f"popped messages of {broker}"] = why
        return
    for group in groups.values():
        group.popped = group.popped or 0
    for key, count in pops.by_group.items():
        name = key.rpartition(" ")[2]
        if name in groups:
            groups[name].popped = (groups[name].popped or 0) + count
    for row in pops.rows:
        if row.group in groups:
            since_ms = groups[row.group].popped_since_ms
            groups[row.group].popped_since_ms = min(row.popped_ms, since_ms or row.popped_ms)


async def oldest_half(admin: Admin, broker: str) -> int:
    """Return the born time of the half message that a broker's check-back reads next, or 0 if there is no such
    message."""
    queue, calls = MessageQueue(names.HALF_TOPIC, broker, 0), admin.calls
    at = await calls.committed_offset(await calls.address(broker), names.TRANSACTION_GROUP, queue, is_stored=True)
    try:
        return (await admin.messages.at(queue.topic, broker, queue.queue_id, at or 0)).born_timestamp
    except UnknownName:
        return 0


def well_text(snapshot: Snapshot) -> str:
    """Return a summary of the healthy parts, for a cluster without findings."""
    if snapshot.compared_ms is None:
        return "nothing is wrong at a first look; whether groups keep up needs a second one"
    known = [one for one in snapshot.groups.values() if one.late is not None]
    shown = [f"{len(snapshot.brokers)} broker{'s' * (len(snapshot.brokers) != 1)} and their clocks, disks and slaves"]
    if known:
        shown.append(f"the lag of {len(known)} group{'s' * (len(known) != 1)}")
    apart = span_text(snapshot.compared_ms)
    rest = "; some requests failed" if snapshot.troubles else ""
    return f"nothing is wrong with {' and '.join(shown)}, by two looks {apart} apart{rest}"


async def everybody(admin: Admin, cluster: str | None = None) -> list[FleetRow]:
    """Return every connected client, producers and members of groups. Raises the errors of `AdminCalls`."""
    tables = await admin.groups.tables(None, cluster)
    groups = sorted({group for table in tables.values() for group in table if not names.is_system_group(group)})
    producers: list[ProducerRow] = await admin.clients.all_producers(None, cluster)
    troubles: dict[str, str] = {}
    members = await _members(admin, groups, troubles)
    if troubles:
        raise RmqError("; ".join(f"{what}: {text}" for what, text in list(troubles.items())[:3]))
    return fleet(producers, members)


async def _state(admin: Admin, row: BrokerRow, troubles: dict[str, str]) -> BrokerState:
    """Return the state of a broker. The state of a master includes its replication and half messages."""
    state, clock = BrokerState(row=row), admin.calls.clock
    asked_ms = clock.now_ms()
    try:
        state.figures = await admin.calls.runtime_info(row.addr)
    except RmqError as error:
        state.trouble = row.trouble = str(error)
        return state
    admin.clusters.fill(row, state.figures)
    state.since_ms = clock.now_ms()
    state.skew_ms = clock_skew_ms(state.figures, (asked_ms + state.since_ms) / 2)
    if state.is_master:
        try:
            state.half_since_ms = await oldest_half(admin, row.broker_name)
        except RmqError as error:
            troubles[f"half messages of {row.broker_name}"] = str(error)
        try:
            state.ha = await admin.calls.fetch(HaRuntimeInfo, row.addr, RequestCode.GET_BROKER_HA_STATUS)
        except PeerRefused:  # brokers before 5.0 do not know this request
            state.ha = None
        except RmqError as error:
            state.trouble = str(error)
    return state


async def _answers(
    masters: dict[str, str], asking: Callable[[str], Awaitable[T]], what: str, troubles: dict[str, str]
) -> dict[str, T]:
    """Return the answers of masters by broker name. Errors of failed requests are added to ``troubles``."""

    async def one(name: str, address: str) -> tuple[str, T] | None:
        try:
            return name, await asking(address)
        except RmqError as error:
            troubles[f"{what} of {name}"] = str(error)
            return None

    return dict(filter(None, await asyncio.gather(*(one(*item) for item in masters.items()))))


async def _members(admin: Admin, groups: Iterable[str], troubles: dict[str, str]) -> dict[str, ConsumerConnection]:
    """Return the members of groups, which may be none. At most `_AT_ONCE` requests run at the same time. Errors of
    failed requests are added to ``troubles``."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(group: str) -> tuple[str, ConsumerConnection] | None:
        async with turns:
            try:
                return group, await admin.clients.consumers(group)
            except PeerRefused as error:
                if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
                    return group, ConsumerConnection()
                troubles[f"members of {group}"] = str(error)
            except RmqError as error:
                troubles[f"members of {group}"] = str(error)
            return None

    return dict(filter(None, await asyncio.gather(*map(one, groups))))


def _add_lag(group: GroupState, lag: GroupLag) -> None:
    group.topics = sorted({*group.topics, lag.topic})
    group.lag = (group.lag or 0) + lag.count
    times = [at for at in (group.behind_since_ms, lag.behind_since_ms) if at is not None]
    group.behind_since_ms = min(times, default=None)
