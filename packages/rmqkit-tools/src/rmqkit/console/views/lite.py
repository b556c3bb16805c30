"""The pages of lite topics: the names below a parent, one lite topic with its messages, its deletion, its groups."""

from __future__ import annotations

from typing import Any

from rmqkit.admin.cluster.lite import LiteAt, LiteView
from rmqkit.admin.explain_lite import explain_lite
from rmqkit.console.access.confirmations import Review
from rmqkit.console.html.render import shell
from rmqkit.console.request.forms import Form, change
from rmqkit.console.request.request import ROWS, Ask, Page, part
from rmqkit.console.views.messages import message_rows
from rmqkit.protocol.names import lite_queue
from rmqkit.sentences import _

NEWEST = 50


def _state_of(place: LiteAt) -> str:
    """Return the state of a lite topic at a broker: live, expired or empty."""
    if place.is_live is False and place.max_offset:
        return "expired"
    return "live" if place.max_offset else "empty"


def _binding(parent_name: str) -> str:
    """Return the command that creates a group of a parent topic."""
    return shell("rmq group create", "GROUP", "--attributes", f"+lite.bind.topic={parent_name}")


async def parent(ask: Ask) -> Page:
    """Show the names below a parent topic, by prefix, page by page, with the lag of one group."""
    name, prefix, after, group = ask.params["t"], ask.text("q"), ask.text("after"), ask.text("group")
    lite = ask.admin.lite
    about = await lite.parent(name)
    group = group if group in about.groups else next(iter(about.groups), "")
    found = await part(lite.names(name, prefix=prefix, after=after, count=ROWS, group=group or None))
    groups = await part(lite.groups(name))
    page = found.value
    values: dict[str, Any] = {
        "name": name,
        "about": about,
        "prefix": prefix,
        "group": group,
        "rows": [] if page is None else page.rows,
        "total": about.lite_topics,
        "nextAfter": "" if page is None else page.next_after,
        "troubles": [] if page is None else page.troubles,
        "trouble": found.trouble,
        "groups": groups.value or [],
        "groupsTrouble": groups.trouble,
    }
    words = [*(("--prefix", prefix) if prefix else ()), *(("--group", group) if group else ())]
    return Page(
        "lite.html", _("Lite topics of {topic}", topic=name), values, {"after": after, "bind": _binding(name)},
        command=shell("rmq lite list", name, *words), crumbs=ask.crumbs("topics", name),
    )  # fmt: skip


async def lite_topic(ask: Ask) -> Page:
    """Show one lite topic: its bounds, its groups, and its newest messages, which follow it live."""
    name, lite_name = ask.params["t"], ask.params["n"]
    lite = ask.admin.lite
    view = await lite.show(name, lite_name)
    newest = await part(lite.newest(name, lite_name, NEWEST))
    rows = await message_rows(ask, [one.message for one in newest.value or ()])
    values: dict[str, Any] = {
        "name": name,
        "liteTopic": lite_name,
        "isKnown": view.is_known,
        "places": [{"at": place, "state": _state_of(place)} for place in view.places],
        "groups": view.groups,
        "messages": [{"number": one.number, "row": row} for one, row in zip(newest.value or (), rows, strict=True)],
        "messagesTrouble": newest.trouble,
        "stored": sum(place.max_offset - place.min_offset for place in view.places),
    }
    return Page(
        "lite_topic.html", lite_name, values, {"bind": _binding(name)},
        command=shell("rmq lite show", name, lite_name), crumbs=_crumbs(ask, name),
    )  # fmt: skip


def _crumbs(ask: Ask, parent_name: str, *lite_names: str) -> list[tuple[str, str]]:
    """Return the crumbs of a page below the names of a parent."""
    own = [(one, ask.link("topics", parent_name, "lite", one)) for one in lite_names]
    return [*ask.crumbs("topics", parent_name), (_("Lite topics"), ask.link("topics", parent_name, "lite")), *own]


async def why(ask: Ask) -> Page:
    """Show why a group gets no messages of a lite topic."""
    name, lite_name, group = ask.params["t"], ask.params["n"], ask.text("group")
    number = ask.number("number", -1, -1)
    values: dict[str, Any] = {"name": name, "liteTopic": lite_name, "group": group, "explanation": None, "trouble": ""}
    about = await ask.admin.lite.parent(name)
    if group:
        wanted, client = number if number >= 0 else None, ask.text("client") or None
        found = await part(explain_lite(ask.admin, name, lite_name, group, number=wanted, client_id=client))
        values["explanation"], values["trouble"] = found.value, found.trouble
    more = {"groups": about.groups, "client": ask.text("client"), "number": number if number >= 0 else ""}
    return Page(
        "lite_explain.html", _("Why does {group} get nothing?", group=group or _("a group")), values, more,
        command=shell("rmq lite explain", name, lite_name, group or "GROUP"), crumbs=_crumbs(ask, name, lite_name),
        status=404 if values["trouble"] else 200,
    )  # fmt: skip


async def delete(ask: Ask) -> Page:
    """Delete a lite topic with its messages."""
    name, lite_name, lite = ask.params["t"], ask.params["n"], ask.admin.lite
    view = await lite.show(name, lite_name)
    holders = [one for one in view.places if one.max_offset > one.min_offset]
    stored = sum(one.max_offset - one.min_offset for one in holders)
    about = [
        (_("Lite topic"), lite_name),
        (_("Parent topic"), name),
        (_("Brokers"), ", ".join(one.broker_name for one in holders) or _("none has it")),
        (_("Stored"), _("{stored:,} messages", stored=stored)),
        (_("Groups"), ", ".join(sorted({one.group for one in view.groups})) or _("none reads it")),
    ]
    back = ask.link("topics", name, "lite", lite_name)
    form = Form(
        title=_("Delete {name}", name=lite_name), action=_("delete lite topic"), target=f"{name}/{lite_name}",
        fields=[], about=about, back=back, command=shell("rmq lite delete", name, lite_name),
        crumbs=_crumbs(ask, name, lite_name),
        warning=_("nobody can read its messages below its name any more; subscriptions stay, and a new message begins "
                  "its next life"),
    )  # fmt: skip

    async def look() -> dict[str, str]:
        return _seen(await lite.show(name, lite_name))

    async def plan(given: dict[str, str]) -> Review:
        requests = [
            _("DELETE_TOPIC_IN_BROKER (215) for {queue} to {broker}", queue=lite_queue(name, lite_name),
              broker=one.broker_name) for one in holders
        ]  # fmt: skip
        return Review(
            about, requests, lambda: lite.delete(name, lite_name), back=ask.link("topics", name, "lite"), look=look,
            seen=_seen(view), typed=lite_name,
        )  # fmt: skip

    return await change(ask, form, plan)


def _seen(view: LiteView) -> dict[str, str]:
    """Return the lives of a lite topic by broker: a deletion is for the life that the user saw."""
    return {_("life at {broker}", broker=one.broker_name): str(one.epoch) for one in view.places}
