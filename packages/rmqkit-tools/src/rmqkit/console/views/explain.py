"""The page that explains why a group did not consume a message: a form, and the answer with its evidence."""

from __future__ import annotations

from typing import Any

from rmqkit.admin.diagnosis.timeline import timeline
from rmqkit.admin.explain import At, Explainer, Key
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.errors import RmqError
from rmqkit.sentences import _


async def explain_page(ask: Ask) -> Page:
    """Show the form, and the answer if the address names a message."""
    group, topic = ask.params["g"], ask.text("topic")
    state = ask.snapshot.groups.get(group)
    named = _named(ask)
    values: dict[str, Any] = {"group": group, "topic": topic, "explanation": None, "timeline": [], "trouble": ""}
    page = Page(
        "explain.html", _("Why did {group} not consume it?", group=group), values,
        {"asked": {name: ask.text(name) for name in ("topic", "id", "key", "queue", "offset", "broker")}},
        command=shell("rmq explain", topic or "TOPIC", group, *_words(ask)), crumbs=ask.crumbs("groups", group),
    )  # fmt: skip
    page.more["topics"] = state.topics if state is not None else []
    if named is None:
        return page
    if not topic:
        values["trouble"] = _("which topic? A message is named within its topic")
        page.status = 400
        return page
    try:
        explainer = Explainer(ask.admin, topic, group, hides_bodies=ask.hides_bodies)
        facts = await explainer.facts(named)
        values["explanation"], values["timeline"] = await explainer.judged(facts), timeline(facts)
    except RmqError as error:
        values["trouble"] = str(error)
        page.status = 404
        return page
    page.more["message"] = facts.message or facts.lookup.elsewhere
    return page


def _named(ask: Ask) -> str | Key | At | None:
    """Return the message in the address, or None. Raises Fault: the address names several messages."""
    message, key = ask.text("id"), ask.text("key")
    given = [bool(message), bool(key), bool(ask.text("offset") or ask.text("queue"))]
    if sum(given) > 1:
        raise Fault(400, _("Which message?"), _("give its id, or a key, or its queue and offset"))
    if message:
        return message
    if key:
        return Key(key)
    if given[2]:
        return At(ask.number("queue", 0), ask.number("offset", 0), ask.text("broker") or None)
    return None


def _words(ask: Ask) -> list[str]:
    if ask.text("key"):
        return ["--key", ask.text("key")]
    if ask.text("offset"):
        return ["--queue", ask.text("queue") or "0", "--offset", ask.text("offset")]
    return [ask.text("id") or "ID"]
