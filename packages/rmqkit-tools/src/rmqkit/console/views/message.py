"""The page of one message: its body, properties, place and timeline, and the verdict for each group."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from rmqkit.admin.diagnosis.causes import Cause, Explanation, Facts
from rmqkit.admin.diagnosis.lite_causes import LiteCause
from rmqkit.admin.diagnosis.timeline import Event, merged, timeline
from rmqkit.admin.explain import At, Explainer
from rmqkit.admin.messages.messages import traces_of
from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.html import render
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Fault, Page, part
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.properties import OF_DEAD_LETTERS, copied_properties
from rmqkit.sentences import _

GROUPS_MAX, GROUPS_AT_ONCE = 20, 4
BODY_SHOWN = 64 << 10
_HEX_SHOWN = 4 << 10
_UNDER_WAY = frozenset(
    (
        *(Cause.WAITING, Cause.RETRYING, Cause.DELAYED, Cause.TRANSACTION_PENDING, Cause.POPPED, Cause.NO_OWNER),
        *(LiteCause.WAITING, LiteCause.UNACKED, LiteCause.NOT_SUBSCRIBED),
    )
)


class Body(Struct, rename="camel", kw_only=True):
    """A body for a page. ``form`` is ``json``, ``text``, ``hex``, ``MessagePack``, ``decoded`` or ``hidden``."""

    form: str
    text: str
    bytes: int
    is_cut: bool = False


class Verdict(Struct, rename="camel", kw_only=True):
    """The verdict on a message and a group, or the reason why the verdict is missing."""

    group: str
    explanation: Explanation | None = None
    trouble: str = ""


async def by_id(ask: Ask) -> Page | Response:
    """Show a message by its unique key or offset message id."""
    return await _shown(ask, await ask.admin.messages.find(ask.params["id"], ask.params["t"]))


async def by_place(ask: Ask) -> Page | Response:
    """Show a message by broker, queue and offset."""
    queue, offset = ask.params["queue"], ask.params["offset"]
    if not (queue.isdecimal() and offset.isdecimal()) or len(queue) > 9 or len(offset) > 18:
        reason = _("queue {queue}, offset {offset}: both are numbers from 0 on", queue=queue, offset=offset)
        raise Fault(404, _("No such place"), reason)
    message = await ask.admin.messages.at(ask.params["t"], ask.params["broker"], int(queue), int(offset))
    return await _shown(ask, message)


async def _shown(ask: Ask, message: ReceivedMessage) -> Page | Response:
    topic, admin = message.topic, ask.admin
    if ask.request.method == "POST":
        return await _acted(ask, message)
    if ask.text("download") == "1":
        return _download(ask, message)
    groups, traces = await asyncio.gather(
        part(admin.topics.groups(topic)), part(traces_of(admin.messages, message.msg_id))
    )
    names: list[str] = groups.value or []
    shown = names if ask.text("groups") == "all" else names[:GROUPS_MAX]
    facts, verdicts = await _verdicts(ask, message, shown)
    if not facts:
        found = await part(Explainer(admin, topic, "", hides_bodies=ask.hides_bodies).stored(message))
        facts = [found.value] if found.value is not None else []
    is_under_way = any(one.explanation is not None and one.explanation.cause in _UNDER_WAY for one in verdicts)
    values: dict[str, Any] = {
        "id": message.msg_id,
        "offsetId": message.offset_msg_id,
        "topic": topic,
        "broker": message.broker_name,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "storeMs": message.store_timestamp,
        "bornMs": message.born_timestamp,
        "storeHost": message.store_host,
        "bornHost": message.born_host,
        "storeBytes": message.store_size,
        "retries": message.reconsume_times,
        "tags": message.tags,
        "keys": message.keys,
        **_properties(ask, message),
        "body": await _body(ask, message),
        "timeline": merged(timeline(one) for one in facts) if facts else [],
        "groups": verdicts,
        "groupsTrouble": groups.trouble,
        "groupsMore": max(0, len(names) - len(shown)),
        "traces": traces.value or [],
    }
    more = {
        "place": ask.link("topics", topic, "at", message.broker_name, message.queue_id, message.queue_offset),
        "members": {name: _members(ask, name) for name in shown},
        "is_future": lambda event: isinstance(event, Event) and event.is_due,
    }
    return Page(
        "message.html", _("Message {id}", id=message.msg_id), values, more, live_s=5 if is_under_way else 0,
        command=shell("rmq message show", message.msg_id, "-t", topic),
        crumbs=[*ask.crumbs("topics", topic), (_("Messages"), ask.link("topics", topic, "messages"))],
    )  # fmt: skip


def _members(ask: Ask, group: str) -> list[str]:
    """Return some members of a group in the snapshot. A message can be pushed to them."""
    return [one.client_id for one in ask.snapshot.clients if group in one.consumes][:50]


def _properties(ask: Ask, message: ReceivedMessage) -> dict[str, dict[str, str]]:
    """Return the properties of a message and, separately, its reason as a dead letter, which may be hidden."""
    hidden = dict.fromkeys(OF_DEAD_LETTERS[:2], _("hidden from you here")) if ask.hides_bodies else {}
    shown = message.properties | {name: hidden[name] for name in message.properties.keys() & hidden.keys()}
    why = {name.removeprefix("rmqkit_"): shown.get(name, "") for name in OF_DEAD_LETTERS}
    return {"why": why, "properties": dict(sorted(shown.items()))}


async def _verdicts(ask: Ask, message: ReceivedMessage, groups: list[str]) -> tuple[list[Facts], list[Verdict]]:
    turns = asyncio.Semaphore(GROUPS_AT_ONCE)
    place = At(message.queue_id, message.queue_offset, message.broker_name)

    async def one(group: str) -> tuple[Facts | None, Verdict]:
        async with turns:
            explainer = Explainer(ask.admin, message.topic, group, hides_bodies=ask.hides_bodies)
            try:
                facts = await explainer.facts(place)
                return facts, Verdict(group=group, explanation=await explainer.judged(facts))
            except RmqError as error:
                return None, Verdict(group=group, trouble=str(error))

    found = await asyncio.gather(*map(one, groups))
    return [facts for facts, __ in found if facts is not None], [verdict for __, verdict in found]


async def _body(ask: Ask, message: ReceivedMessage) -> Body:
    """Return the body of a message for the page, decoded by a hook if a hook knows it."""
    (text,) = [None] if ask.hides_bodies else await ask.console.hooks.decode([message])
    if text is None:
        return body_of(message.body, hidden=ask.hides_bodies)
    text, size = render.clean(text), len(message.body)
    return Body(form="decoded", text=text[:BODY_SHOWN], bytes=size, is_cut=len(text) > BODY_SHOWN)


def body_of(body: bytes, *, hidden: bool = False) -> Body:
    """Return a body as text, as formatted JSON (for JSON or MessagePack), or as hexadecimal bytes."""
    if hidden:
        return Body(form="hidden", text="", bytes=len(body))
    head = body[:BODY_SHOWN]
    is_cut = len(body) > BODY_SHOWN
    try:
        text = head.decode("utf-8", "ignore" if is_cut else "strict")
    except UnicodeDecodeError:
        if not is_cut and (unpacked := _unpacked(body)):
            return Body(form="MessagePack", text=render.clean(unpacked), bytes=len(body))
        return Body(form="hex", text=_hex(body[:_HEX_SHOWN]), bytes=len(body), is_cut=len(body) > _HEX_SHOWN)
    if "\x00" in text:
        return Body(form="hex", text=_hex(body[:_HEX_SHOWN]), bytes=len(body), is_cut=len(body) > _HEX_SHOWN)
    if not is_cut and text.lstrip()[:1] in ("{", "["):
        try:
            laid_out = msgspec.json.format(body, indent=2).decode()
            return Body(form="json", text=render.clean(laid_out), bytes=len(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return Body(form="text", text=render.clean(text), bytes=len(body), is_cut=is_cut)


def _unpacked(body: bytes) -> str:
    """Return a MessagePack map or list as formatted JSON; "" for other values, because any bytes may decode."""
    try:
        found = msgspec.msgpack.decode(body)
        return (
            msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if isinstance(found, dict | list) else ""
        )
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return ""


def _hex(body: bytes) -> str:
    """Return lines with the offset, the bytes, and the printable characters of a body."""
    lines = []
    for at in range(0, len(body), 16):
        part_of = body[at : at + 16]
        text = "".join(chr(one) if 32 <= one < 127 else "." for one in part_of)
        lines.append(f"{at:06x}  {part_of.hex(' '):<47}  {text}")
    return "\n".join(lines)


def _download(ask: Ask, message: ReceivedMessage) -> Response:
    if ask.hides_bodies:
        raise Fault(403, _("Not allowed"), _("bodies are hidden from you here"))
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", message.msg_id)[:100]
    headers = {"content-disposition": f'attachment; filename="{name}.bin"'}
    return Response(message.body, media_type="application/octet-stream", headers=headers)


async def _acted(ask: Ask, message: ReceivedMessage) -> Page:
    """Return the review that sends a message again, copies it to another topic, or pushes it to a client."""
    action = ask.form.get("action", "")
    if action not in _REVIEWS:
        raise Fault(400, _("What?"), _("action {action!r} must be resend, copy or push", action=action))
    stored = _(
        "{topic}, {broker} queue {queue} offset {offset:,}",
        topic=message.topic,
        broker=message.broker_name,
        queue=message.queue_id,
        offset=message.queue_offset,
    )
    about = [(_("Message"), message.msg_id), (_("Stored in"), stored)]
    back = ask.link("topics", message.topic, "at", message.broker_name, message.queue_id, message.queue_offset)
    proposed = await _REVIEWS[action](ask, message)
    rows = [*about, *proposed.pop("rows")]
    return ask.review(Review(back=back, rows=rows, right=Right.SEND, **proposed))


async def _resend(ask: Ask, message: ReceivedMessage) -> dict[str, Any]:
    ask.require_change(_("send again"), message.topic, Right.SEND)
    return {
        "action": _("send again"),
        "target": message.topic,
        "rows": [
            (_("To"), _("any queue of {topic}", topic=message.topic)),
            (_("Unique key"), _("{id}, the same as before", id=message.msg_id)),
        ],
        "requests": [
            _("SEND_MESSAGE_V2 (310) to {topic}: every group of the topic gets it again", topic=message.topic)
        ],
        "command": shell("rmq message resend", message.msg_id, "-t", message.topic),
        "run": lambda: ask.admin.messages.resend(message),
    }


async def _copy(ask: Ask, message: ReceivedMessage) -> dict[str, Any]:
    target = ask.form.get("to", "").strip()
    ask.require_change(_("copy"), target, Right.SEND)
    await ask.admin.calls.route(target)  # a send to a topic without a route may create the topic
    copy = Message(
        topic=target,
        body=message.body,
        tags=message.tags,
        keys=message.keys,
        properties=copied_properties(message.properties),
    )
    return {
        "action": _("copy"),
        "target": target,
        "rows": [(_("To"), _("any queue of {target}, with a new unique key", target=target))],
        "requests": [_("SEND_MESSAGE_V2 (310) to {target}", target=target)],
        "command": shell("rmq replay", message.topic, "--to", target),
        "run": lambda: ask.admin.messages.send(copy),
    }


async def _push(ask: Ask, message: ReceivedMessage) -> dict[str, Any]:
    group, __, client = ask.form.get("client", "").partition(" ")
    ask.require_change(_("handle by a consumer"), f"{group} {client}", Right.SEND)
    if not group or not client:
        raise Fault(400, _("Which client?"), _("choose a client of a group that is online"))
    asked = _(
        "CONSUME_MESSAGE_DIRECTLY (309) to {broker}, which asks {client}", broker=message.broker_name, client=client
    )
    return {
        "action": _("handle by a consumer"),
        "target": f"{group} {client}",
        "rows": [(_("Group"), group), (_("Client"), client), (_("Its handler"), _("runs now, once; no offset moves"))],
        "requests": [asked],
        "command": shell("rmq message push", message.msg_id, message.topic, group, "-d", client),
        "run": lambda: ask.admin.messages.push(message, group, client),
    }


_REVIEWS: dict[str, Callable[[Ask, ReceivedMessage], Awaitable[dict[str, Any]]]] = {
    "resend": _resend,
    "copy": _copy,
    "push": _push,
}
