"""``rmq group``, ``rmq offset``: consumer groups, their progress, and their offsets."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rmqkit.cli.frame.nouns import Broker, Cluster, Group, Named, Noun, Topic, View, Yes, confirm

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.cluster.groups import Moved, QueueMove
    from rmqkit.protocol.schemas.groups import GroupRetryPolicy, SubscriptionGroupConfig


GROUP = Noun("group", "Consumer groups: list, create and configure them, and show their progress.")


class Switch(StrEnum):
    """The words true and false as a value, as in Java's tool."""

    TRUE = "true"
    FALSE = "false"


def _switch(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@GROUP.verb("list")
async def list_groups(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[str]:
    """List all consumer groups."""
    tables = await admin.groups.tables(broker, cluster)
    return sorted({group for table in tables.values() for group in table})


@GROUP.verb("show")
async def show(admin: Admin, group: Group, broker: Broker = None, cluster: Cluster = None) -> View:
    """Show the settings of a group on each broker."""
    return _configs(await admin.groups.configs(group, broker, cluster))


@GROUP.verb("create")
async def create(
    admin: Admin,
    group: Group,
    broker: Broker = None,
    cluster: Cluster = None,
    consume_enable: Annotated[
        Switch | None, _switch("-s", "--consume-enable", text="Allow the group to consume.")
    ] = None,
    consume_from_min_enable: Annotated[
        Switch | None, _switch("-m", "--consume-from-min-enable", text="Allow the group to start at the first message.")
    ] = None,
    consume_broadcast_enable: Annotated[
        Switch | None, _switch("-d", "--consume-broadcast-enable", text="Allow broadcast consumption.")
    ] = None,
    consume_message_orderly: Annotated[
        Switch | None, _switch("-o", "--consume-message-orderly", text="Consume in order (for POP).")
    ] = None,
    retry_queue_nums: Annotated[
        int | None, _switch("-q", "--retry-queues", text="Number of queues of the retry topic.")
    ] = None,
    retry_max_times: Annotated[
        int | None, _switch("-r", "--retries", text="Retries before a message goes to the dead letters.")
    ] = None,
    group_retry_policy: Annotated[
        str | None, _switch("-p", "--retry-policy", text="Pauses between retries, as JSON.")
    ] = None,
    broker_id: Annotated[
        int | None, _switch("-i", "--broker-id", text="Id of the broker to consume from (0 is the master).")
    ] = None,
    which_broker_when_consume_slowly: Annotated[
        int | None,
        _switch("-w", "--broker-when-slow", text="Id of the broker to consume from when the group is far behind."),
    ] = None,
    notify_consumer_ids_changed_enable: Annotated[
        Switch | None, _switch("-a", "--notify-changes", text="Notify clients when members join or leave.")
    ] = None,
    attributes: Annotated[
        str | None, _switch("--attributes", text="Attributes to set (+) or remove (-): +name=value,-name")
    ] = None,
) -> View:
    """Create a group, or change an existing one. Options that you leave out keep their values."""
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
        Switch, typer.Option("-r", "--remove-offset", help="Delete the offsets of the group, too.")
    ] = Switch.TRUE,
    yes: Yes = False,
) -> str:
    """Delete a group. For a whole cluster, delete its retry and dead-letter topics, too. On a terminal, it asks for
    confirmation."""
    await admin.groups.configs(group, broker, cluster)
    confirm(f"delete group {group}, its offsets, retries and dead letters", yes=yes)
    keep = remove_offset is Switch.FALSE
    brokers = await admin.groups.delete(group, broker, cluster, keep_offsets=keep)
    return f"group {group} deleted at {', '.join(brokers)}" + (", its offsets kept" if keep else "")


@GROUP.verb("progress", watch=True)
async def progress(
    admin: Admin,
    group: Group = "",
    topic: Annotated[str, typer.Option("-t", "--topic", help="Show only this topic.", show_default=False)] = "",
    cluster: Cluster = None,
    clients: Annotated[
        Switch, typer.Option("-s", "--clients", help="Show which client owns each queue.")
    ] = Switch.FALSE,
) -> View:
    """Show the lag of a group on each queue. Without a group, show the total lag of every group."""
    if not group:
        summaries = await admin.groups.summaries(cluster)
        return View(summaries, [summaries] if summaries else ["there are no groups except those of the system"])
    found = await admin.groups.progress(group, topic, cluster, clients=clients is Switch.TRUE)
    total = (
        f"{found.consume_tps:.2f} messages/s pulled, {found.diff_total:,} behind, {found.inflight_total:,} in flight"
    )
    return View(found, [found.queues or f"group {group} has no offsets", total])


@GROUP.verb("lags", watch=True)
async def group_lags(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Show the lag of every group on each of its topics, as a count and as an age, the largest first.

    The command sends each master one request. Apache's brokers read their store to answer it."""
    from rmqkit.admin.cluster.groups import lags
    from rmqkit.admin.diagnosis.health import span_text

    masters = await admin.calls.masters(cluster, broker)
    stats = await admin.calls.fan_out(masters.values(), admin.brokers.consume_stats)
    found = sorted(lags(row for rows in stats.values() for row in rows).values(), key=lambda one: -one.count)
    now_ms = admin.calls.clock.now_ms()
    rows = [
        {
            "group": one.group,
            "topic": one.topic,
            "behind": one.count,
            "age": span_text(now_ms - one.behind_since_ms) if one.behind_since_ms else "",
            "queues": one.queues,
        }
        for one in found
    ]
    return View(found, [rows or "no group has offsets"])


@GROUP.verb("mode")
async def mode(
    admin: Admin,
    group: Group,
    topic: Topic,
    mode: Annotated[str, Named("-m", "--mode", help="How the group receives messages: PULL or POP.")],
    share_count: Annotated[
        int,
        typer.Option(
            "-q",
            "--pop-share-queue-num",
            help="For POP: number of members that share the queues of a member; 0 means all.",
        ),
    ] = 0,
    broker: Broker = None,
    cluster: Cluster = None,
) -> str:
    """Switch a group between pull and POP for a topic."""
    if mode.upper() not in ("PULL", "POP"):
        raise typer.BadParameter(f"mode {mode} must be PULL or POP")
    brokers = await admin.groups.set_mode(group, topic, mode.upper(), share_count, broker, cluster)
    return f"group {group} now consumes topic {topic} by {mode.upper()} on {', '.join(brokers)}"


@GROUP.verb("export")
async def export(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Print the topics and groups of each broker with all their settings, as JSON."""
    found = await admin.groups.metadata(broker, cluster)
    return View(found, [msgspec.json.format(msgspec.json.encode(found)).decode()])


def _configs(found: dict[str, SubscriptionGroupConfig]) -> View:
    parts: list[Any] = []
    for broker, one in found.items():
        parts += [f"{broker}:", {key: value for key, value in msgspec.to_builtins(one).items() if value != {}}]
    return View(found, parts)


def _policy(text: str) -> GroupRetryPolicy:
    from rmqkit.protocol.schemas.groups import GroupRetryPolicy

    try:
        return msgspec.json.decode(text, type=GroupRetryPolicy)
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"retry policy {text}: {error}") from None


def _attributes(text: str) -> dict[str, str]:
    """Convert ``+name=value,-name`` to the attributes that brokers accept."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    wrong = [name for name, _, _ in pairs if name[:1] not in ("+", "-")]
    if wrong:
        raise typer.BadParameter(f"attribute {wrong[0]} must be +name=value to set it, or -name to remove it")
    return {name: value for name, _, value in pairs}


OFFSET = Noun("offset", "Consumer offsets: move them to a time, to the end, or copy them from another group.")

Source = Annotated[str, Named("-s", "--source", help="Group to copy the offsets from.")]
Target = Annotated[str, Named("-d", "--target", help="Group to copy the offsets to.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what each queue would skip or repeat; move nothing.")]
To = Annotated[
    str,
    Named(
        "-s",
        "--to",
        help="Target time: now, ms since the epoch, or 2026-01-31T12:00:00. -1 (as -s -1) means the end of the queue.",
    ),
]


@OFFSET.verb("reset")
async def reset_offsets(
    admin: Admin,
    group: Group,
    topic: Topic,
    to: To,
    broker: Broker = None,
    queue_id: Annotated[
        int | None, typer.Option("-q", "--queue", min=0, help="Move only this queue (needs -b).", show_default=False)
    ] = None,
    offset: Annotated[
        int | None, typer.Option("-o", "--offset", min=0, help="Move to this offset (needs -q).", show_default=False)
    ] = None,
    force: Annotated[
        Switch, typer.Option("-f", "--force", help="true: move in both directions. false: only move back.")
    ] = Switch.TRUE,
    dry_run: DryRun = False,
) -> list[Moved] | list[QueueMove]:
    """Move the offsets of a group to a point in time, or one queue to an offset.

    Connected clients continue from there."""
    from rmqkit.admin.cluster.groups import END_MS
    from rmqkit.cli.frame.printing import time_ms

    if (queue_id is not None and broker is None) or (offset is not None and queue_id is None):
        raise typer.BadParameter("a queue needs its broker (-b), and an offset its queue (-q)")
    timestamp_ms = END_MS if to == "-1" else time_ms(to)
    where: dict[str, Any] = {"broker": broker, "queue_id": queue_id, "offset": offset}
    move = admin.offsets.preview if dry_run else admin.offsets.reset
    return await move(group, topic, timestamp_ms, is_forced=force is Switch.TRUE, **where)


@OFFSET.verb("skip")
async def skip_messages(
    admin: Admin,
    group: Group,
    topic: Topic,
    force: Annotated[
        Switch, typer.Option("-f", "--force", hidden=True, help="Accepted for compatibility.")
    ] = Switch.TRUE,
    dry_run: DryRun = False,
) -> list[Moved] | list[QueueMove]:
    """Move a group to the end of each queue. The group skips all messages that it has not consumed yet."""
    from rmqkit.admin.cluster.groups import END_MS

    if dry_run:
        return await admin.offsets.preview(group, topic, END_MS, is_forced=force is Switch.TRUE)
    return await admin.offsets.reset(group, topic, END_MS, is_forced=force is Switch.TRUE)


@OFFSET.verb("clone")
async def clone_offsets(
    admin: Admin, source: Source, target: Target, topic: Topic, dry_run: DryRun = False
) -> list[Moved] | list[QueueMove]:
    """Copy the offsets of one group on a topic to another group."""
    if dry_run:
        return await admin.offsets.preview(target, topic, source=source)
    return await admin.offsets.clone(source, target, topic)
