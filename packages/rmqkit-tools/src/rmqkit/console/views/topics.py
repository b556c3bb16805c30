"""Topics: the list, and one of them with its queues, groups, senders and settings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import asdict

from rmqkit.admin.cluster.topics import QueueStatus
from rmqkit.admin.diagnosis.health import TopicState
from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.tail import Span
from rmqkit.console.request.request import Ask, Page, part, rows_of
from rmqkit.console.views import history
from rmqkit.errors import UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.sentences import _

QUEUES_MAX = 1_000
_SENDERS_LOOKED_AT = 200
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
    """The list, from the snapshot alone."""
    wanted, kind, sort = ask.text("q").lower(), ask.text("kind", "normal"), ask.text("sort", "name")
    kind, sort = kind if kind in (*_KINDS, "unused") else "normal", sort if sort in SORTS else "name"
    everything = list(ask.snapshot.topics.values())
    chosen = [one for one in everything if _is_kind(one, kind)]
    found = [one for one in chosen if wanted in one.name.lower()]
    rows = rows_of(ask, sorted(found, key=lambda one: (SORTS[sort](one), one.name)), len(chosen))
    ask.env.watcher.look(topics=[one.name for one in rows.rows])
    counts = Counter(one.kind for one in everything)
    values = {"topics": rows, "counts": dict(counts), "atMs": ask.snapshot.at_ms}
    more = {"q": ask.text("q"), "kind": kind, "sort": sort, "kinds": (*_KINDS[:1], "unused", *_KINDS[1:])}
    return Page(
        template="topics.html", title=_("Topics"), values=values, more=more, live_s=30, command="rmq admin topic list"
    )


def _is_kind(topic: TopicState, kind: str) -> bool:
    if kind == "unused":
        return topic.kind == "normal" and not topic.groups
    return kind in ("all", topic.kind)


class ConfigRow(Struct, rename="camel"):
    """One setting of a topic at each broker; ``differs``: not all have the same."""

    name: str
    values: dict[str, str]
    differs: bool


class Sender(Struct, rename="camel", kw_only=True):
    """Where messages of a topic came from; ``clients`` and ``groups`` are those of the producers that are still online
    with the connection by which the messages came."""

    host: str
    messages: int = 0
    last_ms: int = 0
    clients: list[str] = []
    groups: list[str] = []


class Sent(Struct):
    """The last messages of a topic: who sent them, and how large they are on the average, in the log."""

    senders: list[Sender]
    mean_bytes: float | None = None


async def topic(ask: Ask) -> Page:
    """One topic."""
    name = ask.params["t"]
    admin = ask.admin
    await admin.calls.route(name)
    status, config, sent, stats, kept = await asyncio.gather(
        part(admin.topics.status(name)),
        part(admin.topics.config(name)),
        part(_sent(ask, name)),
        part(admin.topics.groups(name)),
        part(_reserved_ms(ask, name)),
    )
    queues: list[QueueStatus] = status.value.queues if status.value is not None else []
    stored = sum(queue.max_offset - queue.min_offset for queue in queues) if status.value is not None else None
    found: Sent = sent.value or Sent([])
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
        "senders": found.senders,
        "sendersTrouble": sent.trouble,
        "config": config_rows(config.value or {}),
        "configTrouble": config.trouble,
    }
    marks = await history.marks_of(ask, brokers=state.brokers if state is not None else ())
    wanted: list[history.Wanted] = [("put", [name])] if state is None or state.kind == "normal" else []
    more = {
        "number": number,
        "pages": max(1, -(-len(queues) // QUEUES_MAX)),
        "looked_at": _SENDERS_LOOKED_AT,
        "tabs": history.tabs(ask, "topics", name),
        "charts": await history.charts(ask, [*wanted, ("lag", groups)] if groups else wanted, marks),
    }
    return Page(
        template="topic.html",
        title=name,
        values=values,
        more=more,
        live_s=10,
        command=f"rmq admin topic status {name}",
        crumbs=[(_("Topics"), ask.link("topics"))],
    )


async def _reserved_ms(ask: Ask, name: str) -> int | None:
    """How long the masters of a topic keep messages at least; None: one of them does not say."""
    masters = await ask.admin.calls.masters_of_topic(name)
    code = RequestCode.GET_BROKER_CONFIG
    configs = await asyncio.gather(*(ask.admin.calls.fetch_properties(one, code) for one in masters.values()))
    hours = [one.get("fileReservedTime", "") for one in configs]
    return min(map(int, hours)) * 3_600_000 if hours and all(map(str.isdecimal, hours)) else None


async def _sent(ask: Ask, name: str) -> Sent:
    """The last messages. RocketMQ keeps no list of who sends to a topic."""
    budget = Budget(messages=_SENDERS_LOOKED_AT, body_bytes=8 << 20, ms=1_000)
    try:
        found = await page(ask.admin.calls, name, Span(), count=_SENDERS_LOOKED_AT, budget=budget)
    except UnknownName:
        return Sent([])
    online = {address: one for one in ask.snapshot.clients if one.produces for address in one.addresses}
    senders: dict[str, Sender] = {}
    for message in found.messages:
        host = message.born_host.rpartition(":")[0]
        one = senders.setdefault(host, Sender(host=host))
        one.messages += 1
        one.last_ms = max(one.last_ms, message.store_timestamp)
        if (client := online.get(message.born_host)) is not None and client.client_id not in one.clients:
            one.clients.append(client.client_id)
            one.groups = sorted({*one.groups, *client.produces})
    sizes = [message.store_size for message in found.messages]
    shown = sorted(senders.values(), key=lambda one: -one.messages)[:20]
    return Sent(shown, sum(sizes) / len(sizes) if sizes else None)


def config_rows(configs: Mapping[str, Struct]) -> list[ConfigRow]:
    """Settings of brokers beside each other, those that differ marked."""
    shown = {broker: {key: _text(value) for key, value in asdict(one).items()} for broker, one in configs.items()}
    keys = dict.fromkeys(key for one in shown.values() for key in one if key not in ("topic_name", "group_name"))
    rows = []
    for key in keys:
        values = {broker: one.get(key, "") for broker, one in shown.items()}
        rows.append(ConfigRow(key.replace("_", " "), values, len(set(values.values())) > 1))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, Struct):
        value = {key: one for key, one in asdict(value).items() if one is not None and one is not UNSET}
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in sorted(value.items())) or _("none")
    return _("none") if value is None else str(value).lower() if isinstance(value, bool) else str(value)
