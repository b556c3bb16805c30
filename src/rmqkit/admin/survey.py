"""One look at a whole cluster, for `rmqkit.admin.health.findings`: every broker is asked once, and nothing is kept.

`survey` makes a `Snapshot` of brokers, replication, groups with their lags and members, and clients. It knows no
topics, no dead letters, and no trend: those need a second look. The web console keeps such a snapshot and asks in turn
(`rmqkit.console.watch`). What does not answer is noted in ``troubles`` and does not hide the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from rmqkit.admin import Admin
from rmqkit.admin.clients import FleetRow, ProducerRow, fleet
from rmqkit.admin.clusters import BrokerRow
from rmqkit.admin.groups import GroupLag, lags
from rmqkit.admin.health import BrokerState, GroupState, Snapshot
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol import names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.clients import ConsumerConnection

__all__ = ["everybody", "survey"]

_AT_ONCE = 4

T = TypeVar("T")


async def survey(admin: Admin, cluster: str | None = None) -> Snapshot:
    """How a cluster is now, or all of them. Raises UnknownName: there is no such cluster.
    Raises NoNameServer: none answers."""
    troubles: dict[str, str] = {}
    states = await asyncio.gather(*(_state(admin, row) for row in await admin.clusters.listed(cluster)))
    masters = {one.row.broker_name: one.row.addr for one in states if one.is_master and not one.trouble}
    groups: dict[str, GroupState] = {}
    for name, table in (await _told(masters, admin.groups.table, "groups", troubles)).items():
        for group, config in table.items():
            if not names.is_system_group(group):
                groups.setdefault(group, GroupState(name=group)).configs[name] = config
    stats = await _told(masters, admin.brokers.consume_stats, "lags", troubles)
    found = lags(row for rows in stats.values() for row in rows)
    for lag in found.values():
        if lag.group in groups:
            _add_lag(groups[lag.group], lag)
    members = await _members(admin, groups, troubles)
    for group, connection in members.items():
        groups[group].members = len(connection.connection_set)
    producers = await _told(masters, admin.clients.all_producers, "producers", troubles)
    return Snapshot(
        at_ms=admin.calls.clock.now_ms(),
        brokers=list(states),
        groups=groups,
        lags=list(found.values()),
        clients=fleet((row for rows in producers.values() for row in rows), members),
        troubles=troubles,
    )


async def everybody(admin: Admin, cluster: str | None = None) -> list[FleetRow]:
    """Every client that is connected, producers and members of groups. Raises as `AdminCalls`."""
    tables = await admin.groups.tables(None, cluster)
    groups = sorted({group for table in tables.values() for group in table if not names.is_system_group(group)})
    producers: list[ProducerRow] = await admin.clients.all_producers(None, cluster)
    troubles: dict[str, str] = {}
    members = await _members(admin, groups, troubles)
    if troubles:
        raise RmqError("; ".join(f"{what}: {text}" for what, text in list(troubles.items())[:3]))
    return fleet(producers, members)


async def _state(admin: Admin, row: BrokerRow) -> BrokerState:
    """A broker's figures and, of a master, its replication."""
    state = BrokerState(row=row)
    try:
        state.figures = await admin.calls.runtime_info(row.addr)
    except RmqError as error:
        state.trouble = row.trouble = str(error)
        return state
    admin.clusters.fill(row, state.figures)
    state.since_ms = admin.calls.clock.now_ms()
    if state.is_master:
        try:
            state.ha = await admin.calls.fetch(HaRuntimeInfo, row.addr, RequestCode.GET_BROKER_HA_STATUS)
        except PeerRefused:  # brokers before 5.0 do not know the request
            state.ha = None
        except RmqError as error:
            state.trouble = str(error)
    return state


async def _told(
    masters: dict[str, str], asking: Callable[[str], Awaitable[T]], what: str, troubles: dict[str, str]
) -> dict[str, T]:
    """What masters answer, by broker name; who does not is noted."""

    async def one(name: str, address: str) -> tuple[str, T] | None:
        try:
            return name, await asking(address)
        except RmqError as error:
            troubles[f"{what} of {name}"] = str(error)
            return None

    return dict(filter(None, await asyncio.gather(*(one(*item) for item in masters.items()))))


async def _members(admin: Admin, groups: Iterable[str], troubles: dict[str, str]) -> dict[str, ConsumerConnection]:
    """The members of groups, a few asked at a time; a group that nobody is in has an empty answer."""
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
