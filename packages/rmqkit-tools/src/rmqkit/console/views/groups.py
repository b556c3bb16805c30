"""The pages of consumer groups: the list, and one group with its lag, queues, members and verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict

from rmqkit.admin.cluster.clients import GroupStatus
from rmqkit.admin.cluster.groups import GroupProgress
from rmqkit.admin.cluster.settings import config_rows
from rmqkit.admin.diagnosis.health import GroupState, group_findings
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Page, part, rows_of
from rmqkit.console.views import history
from rmqkit.console.views.topics import QUEUES_MAX
from rmqkit.errors import PeerRefused
from rmqkit.protocol.codes import ResponseCode, version_name
from rmqkit.sentences import _, joined

SORTS: dict[str, Callable[[GroupState], Any]] = {
    "lag": lambda one: -(one.lag if one.lag is not None else -1),
    "age": lambda one: one.behind_since_ms or 1 << 62,
    "name": lambda one: one.name.lower(),
    "members": lambda one: -(one.members if one.members is not None else -1),
    "dead": lambda one: -(one.dead if one.dead is not None else -1),
    "trend": lambda one: -(one.trend or 0.0),
}


async def groups(ask: Ask) -> Page:
    """Show the list of groups in the snapshot, by default the largest lag first."""
    wanted, sort = ask.text("q").lower(), ask.text("sort", "lag")
    sort = sort if sort in SORTS else "lag"
    everything = list(ask.snapshot.groups.values())
    found = [one for one in everything if wanted in one.name.lower()]
    rows = rows_of(ask, sorted(found, key=lambda one: (SORTS[sort](one), one.name)), len(everything))
    ask.env.watcher.look(groups=[one.name for one in rows.rows])
    plain = [{**asdict(one), "configs": sorted(one.configs)} for one in rows.rows]
    values = {"groups": {**asdict(rows), "rows": plain}, "atMs": ask.snapshot.at_ms}
    more = {
        "sparks": history.sparks(ask, "lag", [one.name for one in rows.rows]),
        "rows": rows,
        "q": ask.text("q"),
        "sort": sort,
    }
    return Page("groups.html", _("Groups"), values, more, command="rmq group lags")


async def group(ask: Ask) -> Page:
    """Show one group."""
    name = ask.params["g"]
    ask.env.watcher.look(groups=[name])
    admin = ask.admin
    state = ask.snapshot.groups.get(name)
    if state is None:
        await admin.groups.configs(name)  # its error lists the existing groups
    progress, status = await asyncio.gather(part(admin.groups.progress(name)), part(_status(ask, name)))
    queues = progress.value.queues if isinstance(progress.value, GroupProgress) else []
    number, found = ask.number("page", 1, 1), status.value
    owners = _owners(found)
    shown = queues[(number - 1) * QUEUES_MAX : number * QUEUES_MAX]
    members = found.connection.connection_set if found is not None else []
    values = {
        "name": name,
        "state": None if state is None else {**asdict(state), "configs": sorted(state.configs)},
        "queues": [
            {**asdict(one), "client": owners.get((one.topic, one.broker_name, one.queue_id), "")} for one in shown
        ],
        "queueCount": len(queues),
        "lag": progress.value.diff_total if progress.value else None,
        "inFlight": progress.value.inflight_total if progress.value else None,
        "consumed": state.consumed if state is not None else None,
        "findings": group_findings(ask.snapshot, name),
        "compared": ask.snapshot.compared_ms is not None,
        "ageShares": await history.shares(ask, "age", name),
        "queuesTrouble": progress.trouble,
        "members": [
            {
                "id": one.client_id,
                "address": one.client_addr,
                "language": one.language,
                "version": version_name(one.version),
                "answers": found is not None and found.clients.get(one.client_id) is not None,
            }
            for one in members
        ],
        "membersTrouble": status.trouble,
        "subscriptions": found.connection.subscription_table if found is not None else {},
        "kind": _kind(found),
        "verdict": found.verdict if found is not None else None,
        "config": config_rows(state.configs if state is not None else {}),
    }
    marks = await history.marks_of(ask, group=name, brokers=sorted(state.configs) if state is not None else ())
    more = {
        "number": number,
        "pages": max(1, -(-len(queues) // QUEUES_MAX)),
        "tabs": history.tabs(ask, "groups", name),
        "charts": await history.charts(ask, [("lag", [name]), ("age", [name])], marks),
    }
    return Page(
        "group.html", name, values, more, command=shell("rmq group progress", name), crumbs=ask.crumbs("groups")
    )


async def _status(ask: Ask, name: str) -> GroupStatus | None:
    """Return the members and the verdict; None if no client is online."""
    try:
        return await ask.admin.clients.status(name)
    except PeerRefused as error:
        if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
            raise
        return None


def _kind(found: GroupStatus | None) -> str:
    if found is None:
        return ""
    one = found.connection
    words = [one.message_model, one.consume_type, one.consume_from_where]
    return joined(", ", [_(word.replace("CONSUME_", "").replace("_", " ").lower()) for word in words if word])


def _owners(found: GroupStatus | None) -> dict[tuple[str, str, int], str]:
    owners: dict[tuple[str, str, int], list[str]] = {}
    for client, info in found.clients.items() if found is not None else ():
        for queue in (*info.mq_table, *info.mq_pop_table) if info is not None else ():
            owners.setdefault((queue.topic, queue.broker_name, queue.queue_id), []).append(client)
    return {place: ", ".join(clients) for place, clients in owners.items()}
