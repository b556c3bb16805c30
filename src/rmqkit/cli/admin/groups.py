"""``rmq admin group``, ``rmq admin offset``: consumer groups, how far they are, and moving them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from rmqkit.admin import Admin
from rmqkit.admin.groups import END_MS, Moved
from rmqkit.cli.admin.frame import Broker, Cluster, Group, Named, Noun, Topic, View
from rmqkit.cli.printing import time_ms
from rmqkit.protocol.schemas.groups import GroupRetryPolicy, SubscriptionGroupConfig

GROUP = Noun("group", "Consumer groups: how they are set up, and how far they are.")


class Switch(StrEnum):
    """A yes or no that is given as a word, as Java's tool takes it."""

    TRUE = "true"
    FALSE = "false"


def _switch(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@GROUP.verb("list")
async def list_groups(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[str]:
    """All groups that brokers have."""
    tables = await admin.groups.tables(broker, cluster)
    return sorted({group for table in tables.values() for group in table})


@GROUP.verb("show")
async def show(admin: Admin, group: Group, broker: Broker = None, cluster: Cluster = None) -> View:
    """All settings of a group, at each broker."""
    return _configs(await admin.groups.configs(group, broker, cluster))


@GROUP.verb("create")
async def create(
    admin: Admin,
    group: Group,
    broker: Broker = None,
    cluster: Cluster = None,
    consume_enable: Annotated[Switch | None, _switch("-s", "--consume-enable", text="May consume.")] = None,
    consume_from_min_enable: Annotated[
        Switch | None, _switch("-m", "--consume-from-min-enable", text="May begin at the first message.")
    ] = None,
    consume_broadcast_enable: Annotated[
        Switch | None, _switch("-d", "--consume-broadcast-enable", text="May broadcast.")
    ] = None,
    consume_message_orderly: Annotated[
        Switch | None, _switch("-o", "--consume-message-orderly", text="Consumes in order (for pop).")
    ] = None,
    retry_queue_nums: Annotated[int | None, _switch("-q", "--retry-queues", text="Queues of its retry topic.")] = None,
    retry_max_times: Annotated[int | None, _switch("-r", "--retries", text="Retries before a dead letter.")] = None,
    group_retry_policy: Annotated[str | None, _switch("-p", "--retry-policy", text="Pauses, as JSON.")] = None,
    broker_id: Annotated[int | None, _switch("-i", "--broker-id", text="Broker id to consume from.")] = None,
    which_broker_when_consume_slowly: Annotated[
        int | None, _switch("-w", "--broker-when-slow", text="Broker id to consume from when far behind.")
    ] = None,
    notify_consumer_ids_changed_enable: Annotated[
        Switch | None, _switch("-a", "--notify-changes", text="Tells clients of each other.")
    ] = None,
    attributes: Annotated[str | None, _switch("--attributes", text="+name=value,-name")] = None,
) -> View:
    """Create a group, or change it: what is not given stays as it is."""
    given: dict[str, Any] = {
        "consume_enable": consume_enable,
        "consume_from_min_enable": consume_from_min_enable,
        "consume_broadcast_enable": consume_broadcast_enable,
        "consume_message_orderly": consume_message_orderly,
        "retry_queue_nums": retry_queue_nums,
        "retry_max_times": retry_max_times,
        "group_retry_policy": None if group_retry_policy is None else _policy(group_retry_policy),
        "broker_id": broker_id,
        "which_broker_when_consume_slowly": which_broker_when_consume_slowly,
        "notify_consumer_ids_changed_enable": notify_consumer_ids_changed_enable,
        "attributes": None if attributes is None else _attributes(attributes),
    }
    changes = {
        name: value is Switch.TRUE if isinstance(value, Switch) else value
        for name, value in given.items()
        if value is not None
    }
    return _configs(await admin.groups.update(group, changes, broker, cluster))


@GROUP.verb("delete")
async def delete(
    admin: Admin,
    group: Group,
    broker: Broker = None,
    cluster: Cluster = None,
    remove_offset: Annotated[
        Switch, typer.Option("-r", "--remove-offset", help="Whether its offsets go, too.")
    ] = Switch.TRUE,
) -> str:
    """Delete a group; of a whole cluster its retry and dead-letter topics, too."""
    keep = remove_offset is Switch.FALSE
    brokers = await admin.groups.delete(group, broker, cluster, keep_offsets=keep)
    return f"group {group} deleted at {', '.join(brokers)}" + (", its offsets kept" if keep else "")


@GROUP.verb("progress", watch=True)
async def progress(
    admin: Admin,
    group: Group = "",
    topic: Annotated[str, typer.Option("-t", "--topic", help="Only this topic.", show_default=False)] = "",
    cluster: Cluster = None,
    clients: Annotated[Switch, typer.Option("-s", "--clients", help="Which client has each queue.")] = Switch.FALSE,
) -> View:
    """How far a group is behind on each queue, or each group in all."""
    if not group:
        summaries = await admin.groups.summaries(cluster)
        return View(summaries, [summaries] if summaries else ["no group but those of the system"])
    found = await admin.groups.progress(group, topic, cluster, clients=clients is Switch.TRUE)
    total = (
        f"{found.consume_tps:.2f} messages/s consumed, {found.diff_total:,} behind, {found.inflight_total:,} in flight"
    )
    return View(found, [found.queues or f"group {group} has no offsets", total])


@GROUP.verb("mode")
async def mode(
    admin: Admin,
    group: Group,
    topic: Topic,
    mode: Annotated[str, Named("-m", "--mode", help="PULL or POP.")],
    share_count: Annotated[int, typer.Option("-q", "--pop-share-queue-num", help="Queues that clients share.")] = 0,
    broker: Broker = None,
    cluster: Cluster = None,
) -> str:
    """Have a group pop a topic, or pull it."""
    if mode.upper() not in ("PULL", "POP"):
        raise typer.BadParameter(f"mode {mode} must be PULL or POP")
    brokers = await admin.groups.set_mode(group, topic, mode.upper(), share_count, broker, cluster)
    return f"group {group} gets topic {topic} by {mode.upper()} from {', '.join(brokers)}"


@GROUP.verb("export")
async def export(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Topics and groups of each broker with all their settings, as JSON."""
    found = await admin.groups.metadata(broker, cluster)
    return View(found, [msgspec.json.format(msgspec.json.encode(found)).decode()])


def _configs(found: dict[str, SubscriptionGroupConfig]) -> View:
    parts: list[Any] = []
    for broker, one in found.items():
        parts += [f"{broker}:", {key: value for key, value in msgspec.to_builtins(one).items() if value != {}}]
    return View(found, parts)


def _policy(text: str) -> GroupRetryPolicy:
    try:
        return msgspec.json.decode(text, type=GroupRetryPolicy)
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"retry policy {text}: {error}") from None


def _attributes(text: str) -> dict[str, str]:
    """``+name=value,-name`` as brokers take it."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    wrong = [name for name, _, _ in pairs if name[:1] not in ("+", "-")]
    if wrong:
        raise typer.BadParameter(f"attribute {wrong[0]} must be +name=value to set it, or -name to remove it")
    return {name: value for name, _, value in pairs}


OFFSET = Noun("offset", "Offsets: move a group to a time, to the end, or to where another one is.")

Source = Annotated[str, Named("-s", "--source", help="Group that has the offsets.")]
Target = Annotated[str, Named("-d", "--target", help="Group that gets them.")]
To = Annotated[
    str, Named("-s", "--to", help="now, ms since the epoch, 2026-01-31T12:00:00, or -1 (as -s -1): behind the last.")
]


@OFFSET.verb("reset")
async def reset_offsets(
    admin: Admin,
    group: Group,
    topic: Topic,
    to: To,
    broker: Broker = None,
    queue_id: Annotated[
        int | None, typer.Option("-q", "--queue", min=0, help="Only this queue (with -b).", show_default=False)
    ] = None,
    offset: Annotated[
        int | None, typer.Option("-o", "--offset", min=0, help="To this offset (with -q).", show_default=False)
    ] = None,
    force: Annotated[Switch, typer.Option("-f", "--force", help="Also forward.")] = Switch.TRUE,
) -> list[Moved]:
    """Move a group to the messages of a time, or a queue to an offset; clients that are online follow."""
    if (queue_id is not None and broker is None) or (offset is not None and queue_id is None):
        raise typer.BadParameter("a queue needs its broker (-b), and an offset its queue (-q)")
    timestamp_ms = END_MS if to == "-1" else time_ms(to)
    return await admin.offsets.reset(
        group, topic, timestamp_ms, broker=broker, queue_id=queue_id, offset=offset, is_forced=force is Switch.TRUE
    )


@OFFSET.verb("skip")
async def skip_messages(
    admin: Admin,
    group: Group,
    topic: Topic,
    force: Annotated[Switch, typer.Option("-f", "--force", hidden=True, help="As Java's tool has it.")] = Switch.TRUE,
) -> list[Moved]:
    """Move a group behind the last message of each queue: what it has not consumed is left out."""
    return await admin.offsets.reset(group, topic, END_MS, is_forced=force is Switch.TRUE)


@OFFSET.verb("clone")
async def clone_offsets(admin: Admin, source: Source, target: Target, topic: Topic) -> list[Moved]:
    """Give a group the offsets that another one has on a topic."""
    return await admin.offsets.clone(source, target, topic)
