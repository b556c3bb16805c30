"""The pages of messages: a search with a budget, a tail of new messages, and the send of a test message."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import RedirectResponse, Response

from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.messages.listing import Page as Listed
from rmqkit.admin.pulls import Span
from rmqkit.client.consumer.reader import Wanted
from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.html import render
from rmqkit.console.html.render import shell
from rmqkit.console.request import live
from rmqkit.console.request.forms import Form, change, pairs
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.filter import subscription
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.sentences import _

ROWS, SAVED_MAX = 50, 1_000
_BODY_SHOWN = 160
_BODY_BYTES_MAX = 4 << 20
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_STOPS = {
    "messages": _("one request may examine no more messages"),
    "bytes": _("one request may read no more bytes"),
    "time": _("one request may take no longer"),
    "count": _("the page is full"),
}
_LAST_SENT_MAX = 1_000


class Row(Struct, rename="camel", kw_only=True):
    """A message in a list."""

    msg_id: str
    broker: str
    queue: int
    offset: int
    store_ms: int
    born_host: str
    tags: str
    keys: list[str]
    body_bytes: int
    body: str
    retries: int


async def message_rows(ask: Ask, messages: Sequence[ReceivedMessage]) -> list[Row]:
    """Return messages as rows. A row has the beginning of the body, decoded by hooks."""
    texts = await ask.console.hooks.decode([] if ask.hides_bodies else messages)
    return [_row(ask, one, text) for one, text in zip_longest(messages, texts)]


def _row(ask: Ask, message: ReceivedMessage, decoded: str | None) -> Row:
    return Row(
        msg_id=message.msg_id, broker=message.broker_name or "", queue=message.queue_id, offset=message.queue_offset,
        store_ms=message.store_timestamp, born_host=message.born_host, tags=message.tags or "", keys=message.keys,
        body_bytes=len(message.body),
        body="" if ask.hides_bodies else beginning(message.body if decoded is None else decoded.encode()),
        retries=message.reconsume_times,
    )  # fmt: skip


def beginning(body: bytes, chars: int = _BODY_SHOWN) -> str:
    """Return the beginning of a body as one line of text."""
    try:
        text = body[: 4 * chars].decode("utf-8", "strict" if len(body) <= 4 * chars else "ignore")
    except UnicodeDecodeError:
        return body[:24].hex(" ") + (" …" if len(body) > 24 else "")
    flat = " ".join(render.clean(text).split())
    return flat[:chars] + ("…" if len(flat) > chars or len(body) > 4 * chars else "")


async def search(ask: Ask) -> Page | Response:
    """Show messages, the newest or the oldest first, or return them as a file."""
    topic, wanted = ask.params["t"], ask.text("id")
    if wanted:
        return RedirectResponse(ask.link("topics", topic, "m", wanted), 303)
    saved = ask.text("format") if ask.text("format") in ("jsonl", "csv") else ""
    count = SAVED_MAX if saved else ROWS
    key = ask.text("key")
    queue = ask.number("queue", -1, -1)
    newest_first = ask.text("order", "newest") != "oldest"
    span = Span(
        begin_ms=time_of(ask, "from") or 0,
        end_ms=time_of(ask, "to"),
        broker=ask.text("broker") or None,
        queue_id=queue if queue >= 0 else None,
        begin_offset=ask.number("offset", 0),
        tags=ask.text("tags") or "*",
        sql=ask.text("sql"),
    )
    more: dict[str, Any] = {"asked": ask.query, "newest_first": newest_first, "stops": _STOPS}
    if key:
        messages = await ask.admin.messages.by_key(topic, key, begin_ms=span.begin_ms, end_ms=span.end_ms, count_max=64)
        found = Listed(messages=[one for one in messages if span.test()(one)], examined=len(messages))
    else:
        found = await page(
            ask.admin.calls,
            topic,
            span,
            newest_first=newest_first,
            count=count,
            cursor=ask.text("cursor"),
            budget=Budget(),
        )
    values: dict[str, Any] = {
        "name": topic,
        "messages": await message_rows(ask, found.messages),
        "examined": found.examined,
        "total": None if key else found.total,
        "reachedMs": found.reached_ms,
        "stopped": found.stopped,
        "troubles": found.troubles,
        "cursor": found.cursor,
    }
    if saved:
        return _saved(ask, topic, found.messages, saved)
    return Page(
        "messages.html", _("Messages of {topic}", topic=topic), values, more,
        command=shell("rmq message by-key", topic, key) if key else shell("rmq message page", topic),
        crumbs=ask.crumbs("topics", topic),
    )  # fmt: skip


def time_of(ask: Ask, name: str) -> int | None:
    """Return a time in the query (ms, or ISO text, by default in UTC), or None. Raises Fault: it is not a time."""
    text = ask.text(name)
    if not text:
        return None
    if text.isdecimal() and len(text) < 16:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        reason = _("{name}={text} must be ms since the epoch, or like 2026-01-31T12:00 (UTC)", name=name, text=text)
        raise Fault(400, _("Not a time"), reason) from None


def _saved(ask: Ask, topic: str, messages: list[ReceivedMessage], form: str) -> Response:
    """Return the messages as a file."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", topic)
    lines = _csv(ask, messages) if form == "csv" else _json_lines(ask, messages)
    headers = {"content-disposition": f'attachment; filename="{name}.{form}"'}
    return Response("".join(lines), media_type="text/csv" if form == "csv" else "application/x-ndjson", headers=headers)


def _json_lines(ask: Ask, messages: list[ReceivedMessage]) -> Iterator[str]:
    for one in messages:
        values = msgspec.structs.asdict(one) | {"tags": one.tags, "keys": one.keys}
        if ask.hides_bodies:
            values["body"] = None
        yield render.as_json(values).decode() + "\n"


def _csv(ask: Ask, messages: list[ReceivedMessage]) -> Iterator[str]:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow((_("store time"), "broker", "queue", "offset", "id", "tags", "keys", "body"))
    for one in messages:
        body = "" if ask.hides_bodies else one.body.decode("utf-8", "backslashreplace")
        cells = (one.store_timestamp, one.broker_name, one.queue_id, one.queue_offset, one.msg_id, one.tags or "")
        writer.writerow([_cell(cell) for cell in (*cells, " ".join(one.keys), body)])
    yield file.getvalue()


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet reads as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


# -- tail


async def tail(ask: Ask) -> Page:
    """Show the last messages. A script of the page adds new messages."""
    topic = ask.params["t"]
    _wanted(ask)
    span = Span(tags=ask.text("tags") or "*", sql=ask.text("sql"))
    found = await page(ask.admin.calls, topic, span, count=20, budget=Budget(messages=2_000, ms=1_000))
    values = {"name": topic, "messages": await message_rows(ask, found.messages)}
    filters = {name: ask.text(name) for name in ("tags", "sql", "key", "queue")}
    after = live.offsets_text(found.ends)
    more = {"asked": ask.query, "stream": ask.link("topics", topic, "tail", "events", after=after, **filters)}
    return Page(
        "tail.html", _("Tail of {topic}", topic=topic), values, more, command=shell("rmq tail", topic),
        crumbs=ask.crumbs("topics", topic),
    )  # fmt: skip


def _wanted(ask: Ask) -> Wanted:
    """Return the filter of a tail. Raises Fault: there are both tags and SQL92, or the tags are not valid."""
    tags, sql = ask.text("tags"), ask.text("sql")
    if tags and sql:
        raise Fault(400, _("Tags or SQL92"), _("give tags or SQL92: write TAGS into the SQL92 text"))
    try:
        subscription("*", tags or "*")
    except ValueError as error:
        raise Fault(400, _("Not a filter"), str(error)) from None
    queue = ask.text("queue")
    return Wanted(
        sql or tags or "*", "SQL92" if sql else "TAG", tuple(ask.text("key").split()), (queue,) if queue else ()
    )


async def tail_events(ask: Ask) -> Response:
    """Return a stream with the new rows of a tail."""
    topic = ask.params["t"]
    await ask.admin.calls.route(topic)

    async def rows(messages: list[ReceivedMessage]) -> str:
        shown = await message_rows(ask, messages)
        return render.html("tail_rows.html", {"messages": shown, "name": topic, "link": ask.link, "lang": ask.language})

    return live.tail_rows(ask, topic, _wanted(ask), rows)


# -- sending


async def send(ask: Ask) -> Page:
    """Show the form for a message, then its review."""
    topic = ask.params["t"]
    await ask.admin.calls.route(topic)  # a send to a topic without a route may create the topic
    key = (ask.user.name, ask.env.name, topic)
    kept = ask.form or ask.console.last_sent.get(key, {})
    shown = {name: kept.get(name, "") for name in ("body", "tags", "keys", "properties", "queue", "delay", "at")}
    form = Form(
        title=_("Send to {topic}", topic=topic), action=_("send"), target=topic, fields=[], right=Right.SEND,
        back=ask.link("topics", topic, "send"), command=shell("rmq send", topic, "BODY"),
        crumbs=ask.crumbs("topics", topic), template="send.html", values={"name": topic, "form": shown},
    )  # fmt: skip
    admin = ask.admin

    async def plan(given: dict[str, str]) -> Review:
        message, queue_id = _message(topic, ask.form)
        message.wire_properties()
        _remember(ask.console.last_sent, key, ask.form)
        body = _body(ask.form)
        where = _("any queue") if queue_id is None else _("queue {queue}", queue=queue_id)
        rows = [(_("Topic"), topic), (_("Queue"), where), (_("Tags"), message.tags or _("none"))]
        rows += [(_("Keys"), " ".join(message.keys) or _("none"))]
        rows += [(_("Property {name}", name=name), value) for name, value in message.properties.items()]
        rows += [(_("Delivered"), _delay_text(message))] if message.is_delayed else []
        rows += [(_("Size"), _("{count:,} bytes", count=len(body))), (_("Body"), beginning(body, 400))]
        requests = [_("SEND_MESSAGE_V2 (310) to {where} of {topic}", where=where, topic=topic)]
        command = shell("rmq send", topic, "BODY", *(("--tags", message.tags) if message.tags else ()))
        return Review(rows, requests, lambda: admin.messages.send(message, queue_id=queue_id), command=command)

    return await change(ask, form, plan)


def _message(topic: str, form: dict[str, str]) -> tuple[Message, int | None]:
    """Return the message in a form, and its queue. Raises ValueError: a field is not valid. The text names it."""
    body = _body(form)
    if not body:
        raise ValueError(_("the body is empty: a message has at least one byte"))
    if len(body) > _BODY_BYTES_MAX:
        raise ValueError(_("the body has {count:,} bytes: {most:,} can be sent", count=len(body), most=_BODY_BYTES_MAX))
    queue, delay, at = (form.get(name, "").strip() for name in ("queue", "delay", "at"))
    if queue and not queue.isdecimal():
        raise ValueError(_("queue {queue} must be a number from 0 on", queue=queue))
    message = Message(
        topic=topic,
        body=body,
        tags=form.get("tags", "").strip() or None,
        keys=form.get("keys", "").split(),
        properties=pairs(form.get("properties", ""), _("property")),
    )
    if delay:
        try:
            message.delay = float(delay)
        except ValueError:
            raise ValueError(_("delay {delay} must be seconds", delay=delay)) from None
    if at:
        try:
            when = datetime.fromisoformat(at)
        except ValueError:
            raise ValueError(_("time {at} must be like 2026-01-31T12:00 (UTC)", at=at)) from None
        message.deliver_at = when if when.tzinfo else when.replace(tzinfo=UTC)
    return message, int(queue) if queue else None


def _body(form: dict[str, str]) -> bytes:
    return form.get("body", "").replace("\r\n", "\n").encode("utf-8", "replace")


def _delay_text(message: Message) -> str:
    if isinstance(at := message.deliver_at, datetime):
        at = at.astimezone(UTC)
        return _("at {time} UTC", time=f"{at:%Y-%m-%d %H:%M:%S}")
    return _("{seconds:g} s after the broker receives it", seconds=message.delay or 0)


def _remember(
    kept: dict[tuple[str, str, str], dict[str, str]], key: tuple[str, str, str], form: dict[str, str]
) -> None:
    """Store the values of a form, so that the next form of the user shows them."""
    kept.pop(key, None)
    kept[key] = {name: text[:65_536] for name, text in form.items()}
    while len(kept) > _LAST_SENT_MAX:
        del kept[next(iter(kept))]
