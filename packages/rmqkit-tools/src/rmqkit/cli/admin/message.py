"""``rmq message`` finds, lists, sends and traces messages. ``rmq explain`` explains why a group did not consume it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET, Struct, UnsetType

from rmqkit.cli.frame.nouns import Broker, Group, Named, Noun, Topic, View, command_of
from rmqkit.cli.frame.printing import columns, time_ms, wrapped
from rmqkit.errors import ExitCode, UnknownName

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.diagnosis.causes import Explanation
    from rmqkit.admin.pulls import Span
    from rmqkit.protocol.message import ReceivedMessage


MESSAGE = Noun("message", "Messages: find, list, send and trace them, or hand one to a consumer.")

_LISTED_MAX = 128

Id = Annotated[str, Named("-i", "--id", help="Message id: the unique key or the offset message id.")]
Key = Annotated[str, Named("-k", "--key", help="Message key.")]
QueueId = Annotated[int | None, typer.Option("-i", "--queue", min=0, help="Use only this queue.", show_default=False)]
Begin = Annotated[
    str,
    typer.Option("-b", "--from", "--begin", help="Only messages stored at or after this time: ms, ISO time, or now."),
]
End = Annotated[
    str, typer.Option("-e", "--to", "--end", help="Only messages stored at or before this time.", show_default=False)
]
Tags = Annotated[str, typer.Option("-s", "--tags", help="Only messages with these tags: A || B.")]
Sql = Annotated[
    str,
    typer.Option(
        "--sql", help="Only messages that match this SQL92 expression over their properties.", show_default=False
    ),
]
OnBroker = Annotated[
    str | None, typer.Option("-a", "--broker", help="Only messages on this broker.", show_default=False)
]
Ignored = Annotated[str, typer.Option("-d", "--print-body", hidden=True)]


class Shown(Struct, rename="camel", kw_only=True):
    """A message for JSON; a body that is not UTF-8 is ``bodyBase64``."""

    msg_id: str
    offset_msg_id: str
    topic: str
    broker_name: str | None
    queue_id: int
    queue_offset: int
    tags: str | None
    keys: list[str]
    store_timestamp: int
    born_timestamp: int
    store_host: str
    born_host: str
    physical_offset: int
    store_size: int
    reconsume_times: int
    flag: int
    sys_flag: int
    prepared_transaction_offset: int
    properties: dict[str, str]
    body: str | UnsetType = UNSET
    body_base64: bytes | UnsetType = UNSET


@MESSAGE.verb("show")
async def show(
    admin: Admin,
    id: Id,  # noqa: A002 - the word people see
    topic: Topic = "",
    kind: Annotated[
        str, typer.Option("--kind", help="How to read an ambiguous id: offset or key.", show_default=False)
    ] = "",
    group: Annotated[
        str,
        typer.Option("-g", "--group", help="Consumer group that handles the message (needs -d).", show_default=False),
    ] = "",
    client_id: Annotated[str, typer.Option("-d", "--client-id", help="Client of that group.", show_default=False)] = "",
    send: Annotated[str, typer.Option("-s", "--send", hidden=True, help="true: send the message again.")] = "",
) -> object:
    """Show a message by its id. With -g and -d, pass it to a consumer to handle."""
    if kind not in ("", "offset", "key"):
        raise typer.BadParameter(f"--kind {kind} must be offset or key")
    message = await admin.messages.find(id, topic, kind)
    if send.lower() == "true":
        return await admin.messages.resend(message)
    if group or client_id:
        return await _push(admin, message, group, client_id)
    return View(shown(message), [_facts(message), *_body(message)])


@MESSAGE.verb("by-key")
async def by_key(
    admin: Admin,
    topic: Topic,
    key: Key,
    begin: Begin = "0",
    end: End = "",
    count: Annotated[int, typer.Option("-m", "--count", min=1, help="Maximum number of messages per broker.")] = 64,
) -> View:
    """Show the messages with a key."""
    found = await admin.messages.by_key(topic, key, begin_ms=time_ms(begin), end_ms=_end_ms(end), count_max=count)
    if not found:
        raise UnknownName("message with key", key, f"topic {topic}", remedy="keys and the span of time must be exact")
    return View([shown(one) for one in found], [_line(one) for one in found])


@MESSAGE.verb("at")
async def at(
    admin: Admin,
    topic: Topic,
    broker: Annotated[str, Named("-b", "--broker", help="Broker name.")],
    queue_id: Annotated[str, Named("-i", "--queue", help="Queue id.")],
    offset: Annotated[str, Named("-o", "--offset", help="Queue offset.")],
    route_topic: Annotated[
        str, typer.Option("-r", "--route-topic", help="Not needed: the broker is found by its name, not by a route.")
    ] = "",
) -> View:
    """Show the message at a queue offset. The topic may be a light queue (%LMQ%…) with queue id 0."""
    message = await admin.messages.at(topic, broker, _number(queue_id, "queue"), _number(offset, "offset"))
    return View(shown(message), [_facts(message), *_body(message)])


@MESSAGE.verb("list")
async def list_messages(
    admin: Admin,
    topic: Topic,
    begin: Begin = "0",
    end: End = "",
    tags: Tags = "*",
    sql: Sql = "",
    broker: OnBroker = None,
    queue_id: QueueId = None,
    limit: Annotated[
        int | None, typer.Option("-l", "--limit", min=1, show_default=False, help="Maximum number of messages.")
    ] = None,
    print_body: Ignored = "",
    print_message: Annotated[str, typer.Option("-p", hidden=True)] = "",
) -> AsyncIterator[View]:
    """List the stored messages of a topic, from all its queues, oldest first."""
    from rmqkit.admin.pulls import Span

    span = Span(begin_ms=time_ms(begin), end_ms=_end_ms(end), broker=broker, queue_id=queue_id, tags=tags, sql=sql)
    return _listed(admin, topic, span, limit)


@MESSAGE.verb("page")
async def page_of_messages(
    admin: Admin,
    topic: Topic,
    begin: Begin = "0",
    end: End = "",
    tags: Tags = "*",
    sql: Sql = "",
    broker: OnBroker = None,
    queue_id: QueueId = None,
    offset: Annotated[int, typer.Option("-o", "--offset", min=0, help="Start at this offset of each queue.")] = 0,
    limit: Annotated[int, typer.Option("-l", "--limit", min=1, max=1000, help="Maximum number of messages.")] = 50,
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Show the oldest messages first.")] = False,
    cursor: Annotated[
        str, typer.Option("--cursor", help="Continue after a page; it printed this cursor last.", show_default=False)
    ] = "",
) -> View:
    """Show one page of a topic's messages, the newest first.

    The command reads at most 20,000 messages, 64 MiB or 3 s, and then prints where it stopped. Use `rmq message list`
    to see all messages."""
    from rmqkit.admin.messages.listing import page
    from rmqkit.admin.pulls import Span

    span = Span(
        begin_ms=time_ms(begin),
        end_ms=_end_ms(end),
        broker=broker,
        queue_id=queue_id,
        begin_offset=offset,
        tags=tags,
        sql=sql,
    )
    found = await page(admin.calls, topic, span, newest_first=not oldest_first, count=limit, cursor=cursor)
    value = {name: getattr(found, name) for name in ("examined", "total", "stopped", "cursor", "troubles")}
    value |= {"messages": [shown(one) for one in found.messages], "reachedMs": found.reached_ms}
    looked = f"looked at {found.examined:,} of {found.total:,} messages"
    more = [f"continue with --cursor {found.cursor}"] if found.cursor else []
    return View(value, [*map(_line, found.messages), *(f"not read: {one}" for one in found.troubles), looked, *more])


@MESSAGE.verb("timeline")
async def timeline_of(
    admin: Admin,
    topic: Topic,
    id: Id,  # noqa: A002
    group: Annotated[
        str,
        typer.Option("-g", "--group", help="Show retries, dead letter and progress of this group.", show_default=False),
    ] = "",
) -> View:
    """Show a message's life from its stored copies: sent, delayed, stored, retried, given up. This needs no traces.

    With a group, also show the delivery attempts of the group."""
    from rmqkit.admin.diagnosis.timeline import timeline
    from rmqkit.admin.explain import Explainer
    from rmqkit.cli.frame.printing import time_text

    explainer = Explainer(admin, topic, group)
    found = await (explainer.facts(id) if group else explainer.stored(await admin.messages.find(id, topic)))
    events = timeline(found)
    rows = [
        {
            "when": time_text(one.at_ms),
            "what": f"{one.what} (to come)" if one.is_due else one.what,
            "where": one.where,
            "who": one.who,
            "told_by": one.source,
        }
        for one in events
    ]
    explain = shlex.join(["rmq", "explain", topic, group or "GROUP", id])
    return View(events, [rows or f"no copy of message {id} is stored; to see why, run: {explain}"])


@MESSAGE.verb("consume")
async def consume(
    admin: Admin,
    topic: Topic,
    broker: Broker = None,
    queue_id: QueueId = None,
    offset: Annotated[int, typer.Option("-o", "--offset", min=0, help="Start at this offset of each queue.")] = 0,
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="Maximum number of messages.")] = _LISTED_MAX,
    begin: Annotated[str, typer.Option("-s", "--from", help="Only messages stored at or after this time.")] = "0",
    end: Annotated[
        str, typer.Option("-e", "--to", help="Only messages stored at or before this time.", show_default=False)
    ] = "",
    group: Annotated[str, typer.Option("-g", "--group", hidden=True)] = "",
) -> AsyncIterator[View]:
    """Print messages, starting at an offset. No offset is saved."""
    from rmqkit.admin.pulls import Span

    span = Span(begin_ms=time_ms(begin), end_ms=_end_ms(end), broker=broker, queue_id=queue_id, begin_offset=offset)
    return _listed(admin, topic, span, count)


@MESSAGE.verb("send")
async def send(
    admin: Admin,
    topic: Topic,
    body: Annotated[str, Named("-p", "--body", help="Message body, as text.")],
    keys: Annotated[
        str, typer.Option("-k", "--keys", help="Message keys, separated by spaces.", show_default=False)
    ] = "",
    tags: Annotated[str, typer.Option("-c", "--tags", help="Message tag.", show_default=False)] = "",
    broker: Broker = None,
    queue_id: QueueId = None,
    trace: Annotated[str, typer.Option("-m", "--msg-trace", hidden=True)] = "",
) -> object:
    """Send one message. Use `rmq send` to send many."""
    from rmqkit.protocol.message import Message

    message = Message(topic=topic, body=body.encode(), keys=keys.split(), tags=tags or None)
    return await admin.messages.send(message, broker=broker, queue_id=queue_id)


@MESSAGE.verb("resend")
async def resend(admin: Admin, id: Id, topic: Topic = "") -> object:  # noqa: A002
    """Send a stored message to its topic again, with the same unique key."""
    return await admin.messages.resend(await admin.messages.find(id, topic))


@MESSAGE.verb("push")
async def push(
    admin: Admin,
    id: Id,  # noqa: A002
    topic: Topic,
    group: Group,
    client_id: Annotated[str, Named("-d", "--client-id", help="Client of that group.")],
) -> object:
    """Hand a message to one client of a consumer group, which handles it now."""
    return await _push(admin, await admin.messages.find(id, topic), group, client_id)


@MESSAGE.verb("resume")
async def resume(admin: Admin, id: Id) -> str:  # noqa: A002
    """Check a half message again: ask its producer for the outcome, although the broker gave up."""
    found = await admin.messages.resume(id)
    return f"half message {found.msg_id} at {found.store_host} will be checked again"


@MESSAGE.verb("trace")
async def trace(
    admin: Admin,
    id: Annotated[str, Named("-i", "--id", help="Unique key of the message.")],  # noqa: A002
    trace_topic: Annotated[
        str, typer.Option("-t", "--trace-topic", help="Topic that clients send their traces to.")
    ] = "RMQ_SYS_TRACE_TOPIC",
) -> object:
    """Show the trace of a message: who sent it, who handled it, and with what result."""
    from rmqkit.admin.messages.messages import traces_of

    return await traces_of(admin.messages, id, trace_topic)


@MESSAGE.verb("entries")
async def entries(
    admin: Admin,
    topic: Topic,
    queue_id: Annotated[str, Named("-q", "--queue", help="Queue id.")],
    index: Annotated[str, Named("-i", "--index", help="First queue offset.")],
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="Number of entries.")] = 10,
    broker: Broker = None,
    group: Annotated[
        str,
        typer.Option(
            "-g", "--group", help="Show whether the filter of this group accepts each entry.", show_default=False
        ),
    ] = "",
) -> View:
    """Show consume queue entries: log position, size, tag code, and the result of a filter."""
    first = _number(index, "index")
    found = await admin.messages.entries(topic, _number(queue_id, "queue"), first, count, broker=broker, group=group)
    low, end = found.min_queue_index, found.max_queue_index
    bounds = f"the queue has {low} to {end - 1}" if low < end else f"the queue is empty; its next message gets {end}"
    return View(found, [found.queue_data, bounds, found.filter_data or ""])


def shown(message: ReceivedMessage) -> Shown:
    """Return a message for JSON."""
    fields = {name: getattr(message, name) for name in Shown.__struct_fields__ if not name.startswith("body")}
    try:
        return Shown(**fields, body=message.body.decode())
    except UnicodeDecodeError:
        return Shown(**fields, body_base64=message.body)


async def _push(admin: Admin, message: ReceivedMessage, group: str, client_id: str) -> object:
    if not (group and client_id):
        raise typer.BadParameter("to hand the message to a consumer, give its group (-g) and client id (-d)")
    return await admin.messages.push(message, group, client_id)


def _end_ms(text: str) -> int | None:
    return time_ms(text) if text else None


async def _listed(admin: Admin, topic: str, span: Span, limit: int | None) -> AsyncIterator[View]:
    from rmqkit.admin.pulls import listed

    count = 0
    async for message in listed(admin.calls, topic, span):
        yield View(shown(message), [_line(message)])
        count += 1
        if count == limit:
            break
    if not count:  # no error, but the user should see a line
        print(f"rmq: topic {topic} has no matching message", file=sys.stderr)


def _line(message: ReceivedMessage) -> str:
    from rmqkit.cli.frame.printing import body_text, time_text

    place = f"{message.broker_name}:{message.queue_id} {message.queue_offset}"
    words = [f"tags={message.tags}"] if message.tags else []
    words += [f"keys={' '.join(message.keys)}"] if message.keys else []
    return " ".join([time_text(message.store_timestamp), place, message.msg_id, *words, body_text(message.body)])


def _facts(message: ReceivedMessage) -> dict[str, Any]:
    """Return the fields of a message for display, without its body."""
    return {
        "topic": message.topic,
        "queue": f"{message.broker_name}:{message.queue_id}",
        "queue offset": message.queue_offset,
        "tags": message.tags,
        "keys": message.keys,
        "unique key": message.msg_id,
        "offset message id": message.offset_msg_id,
        "born timestamp": message.born_timestamp,
        "store timestamp": message.store_timestamp,
        "born host": message.born_host,
        "store host": message.store_host,
        "log offset": message.physical_offset,
        "store bytes": message.store_size,
        "reconsume times": message.reconsume_times,
        "system flag": message.sys_flag,
        "properties": {name: value for name, value in message.properties.items() if name not in ("KEYS", "TAGS")},
    }


def _body(message: ReceivedMessage) -> list[str]:
    """Return the body, if it is text."""
    try:
        return [f"body ({len(message.body):,} bytes):", message.body.decode()]
    except UnicodeDecodeError:
        return [f"body: {len(message.body):,} bytes that are not UTF-8 text; use --json to get them as base64"]


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise typer.BadParameter(f"{what} {text} must be a number, 0 or more")
    return int(text)


_VALUE_WIDTH_MIN = 20

_MessageId = Annotated[str, Named("-i", "--id", help="Message id: the unique key or the offset message id.")]

app = typer.Typer(name="explain", add_completion=False)


async def _explain(
    admin: Admin,
    topic: Topic,
    group: Group,
    message: _MessageId = "",
    key: Annotated[
        str, typer.Option("-k", "--key", help="Find the message by one of its keys instead of its id.")
    ] = "",
    queue: Annotated[
        int | None,
        typer.Option("-q", "--queue", min=0, help="Find the message by queue id (with -o) instead of its id."),
    ] = None,
    offset: Annotated[
        int | None, typer.Option("-o", "--offset", min=0, help="Queue offset of the message (with -q).")
    ] = None,
    broker: Broker = None,
) -> View:
    """Explain why a group has not consumed a message: the cause, the evidence, and the remedy.

    The exit code is 5 if the group or the message does not exist."""
    if bool(message) + bool(key) + (offset is not None) != 1 or (queue is None) != (offset is None):
        raise typer.BadParameter("which message? give its id, or --key, or --queue and --offset")
    from rmqkit.admin.diagnosis.causes import UNKNOWN
    from rmqkit.admin.explain import At, Key, explain

    named = Key(key) if key else message if queue is None or offset is None else At(queue, offset, broker)
    found = await explain(admin, topic, group, named)
    return View(found, list(page(found, columns())), ExitCode.UNKNOWN if found.cause in UNKNOWN else ExitCode.DONE)


def page(found: Explanation, width: int) -> Iterator[str]:
    """Yield the lines of an explanation, wrapped at ``width``."""
    yield from wrapped(f"{found.cause}: {found.sentence}", width)
    yield ""
    rows = [(one.name, str(one.value), one.source) for one in found.evidence]
    names, values, sources = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else (0, 0, 0)
    room = min(values, max(width - names - sources - 4, _VALUE_WIDTH_MIN))
    for name, value, source in rows:
        first, *rest = wrapped(value, room) or [""]
        yield f"{name:<{names}}  {first:<{room}}  {source}"
        yield from (f"{'':<{names}}  {line}" for line in rest)
    yield ""
    yield from wrapped(f"Remedy: {found.remedy}", width)


app.command("explain", help=_explain.__doc__)(command_of(_explain, watch=False))
