"""``rmq lite``: lite topics, their groups and clients, and their messages."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmqkit.cli.frame.nouns import Broker, Cluster, Group, Named, Noun, View, Yes, confirm
from rmqkit.cli.frame.printing import columns, time_text
from rmqkit.errors import ExitCode

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.calls import Done
    from rmqkit.admin.cluster.lite import Numbered, ParentRow


LITE = Noun("lite", "Lite topics: list, read and delete them, and see who consumes them.")

Parent = Annotated[str, Named("-p", "--parent", "-t", help="Parent topic of the lite topics.")]
Name = Annotated[str, Named("-l", "--lite-topic", "--liteTopic", help="Name of the lite topic below its parent.")]
OfParent = Annotated[str, typer.Option("-p", "--parent", hidden=True, help="Accepted for compatibility.")]
OptionalName = Annotated[
    str, typer.Option("-l", "--lite-topic", help="Show the group in this lite topic only.", show_default=False)
]
ClientId = Annotated[str, Named("-c", "--client-id", help="Client id.")]
_NONE = "none"
_WITHOUT = "this broker has no lite topics"


def _when(time_ms: int | None) -> str:
    return time_text(time_ms) if time_ms is not None and time_ms > 0 else ""


def _lifetime(minutes: int) -> str:
    return f"{minutes:,} min" if minutes > 0 else "no expiry"


@LITE.verb("parents", watch=True)
async def parents(admin: Admin, cluster: Cluster = None) -> View:
    """List the parent topics, with their numbers of lite topics and their groups."""
    found = await admin.lite.parents(cluster)
    none = "there is no parent topic: create a topic with the attribute message.type=LITE"
    return View(found, [[_parent_row(one) for one in found] or none, *(one.trouble for one in found if one.trouble)])


def _parent_row(one: ParentRow) -> dict[str, Any]:
    return {
        "parent": one.parent,
        "lite topics": one.lite_topics,
        "expire after": _lifetime(one.lifetime_minutes),
        "groups": ", ".join(one.groups) or _NONE,
        "brokers": ", ".join(one.brokers),
    }


@LITE.verb("brokers", watch=True)
async def brokers(
    admin: Admin,
    broker: Broker = None,
    cluster: Cluster = None,
    details: Annotated[bool, typer.Option("-d", "--details", help="Show the parents and their groups, too.")] = False,
) -> View:
    """Show how many lite topics, subscriptions and offsets each broker has."""
    found = await admin.lite.brokers(broker, cluster)
    rows = [
        {
            "broker": name,
            "store": one.store_type,
            "lite topics": one.current_lmq_num,
            "most": one.max_lmq_num,
            "subscriptions": one.lite_subscription_count,
            "batches": one.order_info_count,
            "offsets": one.offset_table_size,
            "clients with events": one.event_map_size,
        }
        for name, one in found.items()
    ]
    more = [
        {
            "broker": name,
            "parent": parent,
            "expire after": _lifetime(minutes),
            "groups": ", ".join(one.group_meta.get(parent, ())) or _NONE,
        }
        for name, one in found.items()
        for parent, minutes in one.topic_meta.items()
    ]
    return View(found, [rows, *([more] if details and more else [])])


@LITE.verb("parent", watch=True)
async def parent_topic(admin: Admin, parent: Parent) -> View:
    """Show a parent topic and its groups."""
    found = await admin.lite.parent(parent)
    groups = await admin.lite.groups(parent)
    rows = [
        {
            "group": one.group,
            "model": one.model,
            "lite topics per client": "no limit" if one.quota < 0 else one.quota,
            "clients": one.clients,
            "lag": one.lag,
        }
        for one in groups
    ]
    none = "no group is bound to it: create a group with the attribute lite.bind.topic"
    troubles = [one.trouble for one in groups if one.trouble]
    return View({"topic": found, "groups": groups}, [[_parent_row(found)], "", rows or none, *troubles])


@LITE.verb("list", watch=True)
async def names(
    admin: Admin,
    parent: Parent,
    prefix: Annotated[str, typer.Option("--prefix", help="List only names that begin with this text.")] = "",
    after: Annotated[str, typer.Option("--after", help="Continue after this name.", show_default=False)] = "",
    count: Annotated[
        int, typer.Option("-m", "--count", min=1, max=1000, help="Maximum number of lite topics per page.")
    ] = 100,
    group: Annotated[str | None, typer.Option("-g", "--group", help="Show the lag of this group.")] = None,
) -> View:
    """List the lite topics of a parent by name, page by page.

    Apache's brokers cannot list lite topics; with them, name one, or see the ones with lag: rmq lite group GROUP"""
    found = await admin.lite.names(parent, prefix=prefix, after=after, count=count, group=group)
    rows = [
        {
            "lite topic": one.lite_topic,
            "broker": one.broker_name,
            "messages": one.depth,
            "next": one.max_offset,
            "lag": "" if one.lag is None else one.lag,
            "unacknowledged": one.unacked_count or "",
            "subscribers": one.subscriber_count,
            "last message": _when(one.last_update_timestamp),
            "expires": _when(one.expires_at),
        }
        for one in found.rows
    ]
    none = [] if found.troubles else ["no lite topic" + (f" begins with {prefix}" if prefix else " here")]
    shown = f"{len(rows):,} of {found.total:,} lite topics of {parent}"
    options = f" --prefix {shlex.quote(prefix)}" if prefix else ""
    options += f" --count {count}" if count != 100 else ""
    options += f" --group {shlex.quote(group)}" if group else ""
    next_page = f"rmq lite list {shlex.quote(parent)}{options} --after {found.next_after}"
    more = [f"the next page: {next_page}"] if found.next_after else []
    return View(found, [*([rows] if rows else none), shown, *more, *found.troubles])


@LITE.verb("show", watch=True)
async def show(
    admin: Admin,
    parent: Parent,
    name: Name,
    show_clients: Annotated[
        str, typer.Option("-s", "--show-client-id", hidden=True, help="Accepted for compatibility.")
    ] = "",
) -> View:
    """Show one lite topic: its messages, its expiry, and the subscribers and the lag of each group."""
    found = await admin.lite.show(parent, name)
    places = [
        {
            "broker": one.broker_name,
            "first": one.min_offset,
            "next": one.max_offset,
            "messages": max(0, one.max_offset - one.min_offset),
            "last message": _when(one.last_update_timestamp),
            "expires": "has expired" if one.is_live is False and one.max_offset else _when(one.expires_at) or "never",
            "life": one.epoch,
            "new messages": "come here" if one.is_chosen else "",
        }
        for one in found.places
    ]
    groups = [
        {
            "group": one.group,
            "broker": one.broker_name,
            "offset": one.consumer_offset,
            "lag": one.lag,
            "unacknowledged": one.unacked_count or "",
            "redelivered": _when(one.free_at),
            "subscribers": ", ".join(one.clients) or _NONE,
        }
        for one in found.groups
    ]
    known = [] if found.is_known else [f"{name} has no messages: it was never written, has expired, or was deleted"]
    return View(found, [places, *known, "", groups or "no group is bound to the parent"])


@LITE.verb("group", watch=True)
async def group(
    admin: Admin,
    group: Group,
    top: Annotated[
        int, typer.Option("-k", "--top", min=1, max=1000, help="Number of lite topics with the largest lags.")
    ] = 20,
    name: OptionalName = "",
    parent: OfParent = "",
    broker: Broker = None,
) -> View:
    """Show the lag of a lite group, the lite topics that are furthest behind, and its clients."""
    found = await admin.lite.group(group, top=top, broker=broker)
    if name:
        one = await admin.lite.show(found.parent, name)
        of_group = [each for each in one.groups if each.group == group]
        return View(of_group, [of_group])
    backlog = [
        {
            "lite topic": one.lite_topic,
            "broker": one.broker_name,
            "lag": one.lag_count,
            "oldest": _when(one.earliest_unconsumed_timestamp),
        }
        for one in found.top
    ]
    clients = [
        {
            "client": one.client_id,
            "broker": one.broker_name,
            "lite topics": one.lite_topic_count,
            "with messages": one.dirty_count,
            "waiting pops": one.waiting_count,
            "taken from it": one.taken_count or "",
            "last request": _when(one.last_access_time),
            "last messages": _when(one.last_consume_time),
        }
        for one in found.clients
    ]
    title = f"group {group} of parent topic {found.parent}: {found.lag:,} messages behind"
    return View(found, [title, backlog or "no lite topic has a lag", "", clients or "no client is connected"])


@LITE.verb("client")
async def client(
    admin: Admin,
    parent: Parent,
    group: Group,
    client_id: ClientId,
    count: Annotated[
        int, typer.Option("-s", "-m", "--count", min=1, max=10_000, help="Maximum number of lite topics to list.")
    ] = 1000,
) -> View:
    """Show the lite topics to which a client subscribes, at each broker."""
    found = await admin.lite.client(parent, group, client_id, count)
    rows = [
        {
            "broker": name,
            "lite topics": one.lite_topic_count,
            "last request": _when(one.last_access_time),
            "last messages": _when(one.last_consume_time),
        }
        for name, one in found.items()
    ]
    names = sorted({name for one in found.values() for name in one.lite_topic_set or ()})
    return View(found, [rows, *names])


@LITE.verb("read")
async def read(
    admin: Admin,
    parent: Parent,
    name: Name,
    start: Annotated[
        str, typer.Option("-s", "--from", help="First message: first, new, a number, or -N for the last N messages.")
    ] = "first",
    count: Annotated[
        int | None, typer.Option("-m", "--count", min=1, help="Maximum number of messages.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for new messages until Ctrl-C.")] = False,
) -> AsyncIterator[View]:
    """Print the messages of a lite topic in order. No group and no consumer is affected.

    With --json, each message is an object in one line."""
    first = None if start == "new" else 0 if start == "first" else _number(start)
    messages = admin.lite.read(parent, name, start=first, count=count, follows=follow or start == "new")
    return (_message(one) async for one in messages)


def _number(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise typer.BadParameter(f"--from {text} must be first, new, a number, or -N for the last N messages")
    return int(text)


def _message(one: Numbered) -> View:
    from rmqkit.cli.admin.message import shown
    from rmqkit.cli.frame.printing import body_text

    message = one.message
    known = {"tags": message.tags or "", "keys": " ".join(message.keys)}
    more = " ".join(f"{name}={text}" for name, text in known.items() if text)
    line = f"{one.number}  {time_text(message.store_timestamp)}  {more}{'  ' if more else ''}{body_text(message.body)}"
    return View({"number": one.number, "message": shown(message)}, [line])


@LITE.verb("delete")
async def delete(admin: Admin, parent: Parent, name: Name, yes: Yes = False) -> list[Done]:
    """Delete a lite topic: its messages, and the offsets of its groups. On a terminal, it asks for confirmation.

    Clients stay subscribed. A new message begins the next life of the lite topic."""
    await admin.lite.holders(parent, name)
    confirm(f"delete lite topic {name} of {parent} with all its messages", yes=yes)
    return await admin.lite.delete(parent, name)


@LITE.verb("reset")
async def reset(
    admin: Admin,
    parent: Parent,
    name: Name,
    group: Group,
    to: Annotated[str, Named("-s", "--to", help="Target: first, end, a number, or a time as 2026-01-31T12:00:00.")],
) -> list[Done]:
    """Set the offset of a group in a lite topic. Clients continue from there."""
    from rmqkit.cli.frame.printing import time_ms

    if to in ("first", "end"):
        return await admin.lite.reset(parent, name, group, None, since_ms=0 if to == "first" else -1)
    if to.isdecimal():
        return await admin.lite.reset(parent, name, group, int(to))
    return await admin.lite.reset(parent, name, group, None, since_ms=time_ms(to))


@LITE.verb("dispatch")
async def dispatch(
    admin: Admin,
    group: Group,
    client_id: Annotated[
        str | None, typer.Option("-c", "--client-id", help="Look for this client only.", show_default=False)
    ] = None,
    parent: OfParent = "",
    broker: Broker = None,
) -> list[Done]:
    """Make brokers look at all lite topics of a group again, and deliver what is there."""
    return await admin.lite.dispatch(group, client_id, broker)


@LITE.verb("explain")
async def explain(
    admin: Admin,
    parent: Parent,
    name: Name,
    group: Group,
    number: Annotated[
        int | None, typer.Option("-o", "--number", min=0, help="Number of a message in it.", show_default=False)
    ] = None,
    client_id: Annotated[
        str | None, typer.Option("-c", "--client-id", help="Client that gets nothing.", show_default=False)
    ] = None,
    user: Annotated[
        str, typer.Option("-u", "--user", help="Check the rights of this user, too.", show_default=False)
    ] = "",
) -> View:
    """Explain why a group gets no messages of a lite topic: the cause, the evidence, and the remedy.

    The exit code is 5 if the parent, the group or the lite topic does not exist."""
    from rmqkit.admin.diagnosis.lite_causes import UNKNOWN_LITE
    from rmqkit.admin.explain_lite import explain_lite
    from rmqkit.cli.admin.message import page

    found = await explain_lite(admin, parent, name, group, number=number, client_id=client_id, user=user)
    code = ExitCode.UNKNOWN if found.cause in UNKNOWN_LITE else ExitCode.DONE
    return View(found, list(page(found, columns())), code)
