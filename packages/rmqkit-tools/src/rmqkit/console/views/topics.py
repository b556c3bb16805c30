"""The pages of topics: the list, and one topic with its queues, groups, senders and settings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from rmqkit.admin.cluster.settings import config_rows
from rmqkit.admin.cluster.topics import QueueStatus
from rmqkit.admin.diagnosis.health import TopicState
from rmqkit.admin.messages.senders import LOOKED_AT, Senders, last_senders
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Page, part, rows_of
from rmqkit.console.views import history
from rmqkit.sentences import _

QUEUES_MAX = 1_000
_KINDS = ("normal", "retry", "dlq", "system", "all")

SORTS: dict[str, Callable[[TopicState], Any]] = {
    "name": lambda one: one.name.lower(),
    "in": lambda one: -(one.in_tps or -1),
    "lag": lambda one: -(one.lag or -1),
    "age": lambda one: one.behind_since_ms or 1 << 62,
    "queues": lambda one: -one.write_queues,
    "groups": lambda one: -len(one.groups),
}


async def topics(ask: Ask) -> Page:
    """Show the list of topics in the snapshot."""
    wanted, kind, sort = ask.text("q").lower(), ask.text("kind", "normal"), ask.text("sort", "name")
    kind, sort = kind if kind in (*_KINDS, "unused") else "normal", sort if sort in SORTS else "name"
    everything = list(ask.snapshot.topics.values())
    chosen = [one for one in everything if _is_kind(one, kind)]
    found = [one for one in chosen if wanted in one.name.lower()]
    rows = rows_of(ask, sorted(found, key=lambda one: (SORTS[sort](one), one.name)), len(chosen))
    ask.env.watcher.look(topics=[one.name for one in rows.rows])
    counts = Counter(one.kind for one in everything)
    values = {"topics": rows, "counts": dict(counts), "atMs": ask.snapshot.at_ms}
    more = {
        "sparks": history.sparks(ask, "put", [one.name for one in rows.rows]),
        "q": ask.text("q"),
        "kind": kind,
        "sort": sort,
        "kinds": (*_KINDS[:1], "unused", *_KINDS[1:]),
    }
    return Page("topics.html", _("Topics"), values, more, command="rmq topic list")


def _is_kind(topic: TopicState, kind: str) -> bool:
    if kind == "unused":
        return topic.kind == "normal" and not topic.groups
    return kind in ("all", topic.kind)


async def topic(ask: Ask) -> Page:
    """Show one topic."""
    name = ask.params["t"]
    admin = ask.admin
    await admin.calls.route(name)
    status, config, sent, stats, kept = await asyncio.gather(
        part(admin.topics.status(name)),
        part(admin.topics.config(name)),
        part(last_senders(admin.calls, name, ask.snapshot.clients)),
        part(admin.topics.groups(name)),
        part(admin.stores.reserved_ms(name)),
    )
    queues: list[QueueStatus] = status.value.queues if status.value is not None else []
    stored = sum(queue.max_offset - queue.min_offset for queue in queues) if status.value is not None else None
    found: Senders = sent.value or Senders()
    mean_bytes = found.mean_bytes if stored else 0.0
    number = ask.number("page", 1, 1)
    lags = {lag.group: lag for lag in ask.snapshot.lags if lag.topic == name}
    groups = sorted(set(stats.value or ()) | set(lags))
    ask.env.watcher.look(topics=[name], groups=groups[:50])
    state = ask.snapshot.topics.get(name)
    values = {
        "name": name,
        "state": state,
        "queues": queues[(number - 1) * QUEUES_MAX : number * QUEUES_MAX],
        "queueCount": len(queues),
        "stored": stored,
        "storedBytes": None if stored is None or mean_bytes is None else round(stored * mean_bytes),
        "reservedMs": kept.value,
        "queuesTrouble": status.trouble,
        "groups": [
            {"name": group, "lag": lags.get(group), "state": ask.snapshot.groups.get(group)} for group in groups
        ],
        "groupsTrouble": stats.trouble,
        "senders": found.rows,
        "sendersTrouble": sent.trouble,
        "config": config_rows(config.value or {}),
        "configTrouble": config.trouble,
    }
    marks = await history.marks_of(ask, brokers=state.brokers if state is not None else ())
    wanted: list[history.Wanted] = [("put", [name])] if state is None or state.kind == "normal" else []
    more = {
        "number": number,
        "pages": max(1, -(-len(queues) // QUEUES_MAX)),
        "looked_at": LOOKED_AT,
        "tabs": history.tabs(ask, "topics", name),
        "charts": await history.charts(ask, [*wanted, ("lag", groups)] if groups else wanted, marks),
    }
    return Page("topic.html", name, values, more, command=shell("rmq topic status", name), crumbs=ask.crumbs("topics"))
