"""The search box of every page: a message id, a message key, a topic, a group or a client id.

Names are looked up in the watcher's snapshot, without a request to a broker. Messages are requested as the user
(`rmqkit.admin.messages.lookup`), so brokers check the permissions on each topic. If there is only one exact match, the
browser is redirected to its page.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import RedirectResponse, Response

from rmqkit.admin.messages.lookup import Found, lookup
from rmqkit.console.request.request import Ask, Page
from rmqkit.console.views.messages import message_rows
from rmqkit.sentences import _

_SHOWN, _TEXT_MAX = 20, 255
_KINDS = ("normal", "dlq", "retry")
"""The kinds of topics in which a key is searched, in this order."""
Named = tuple[str, str]  # (name, address of its page)


async def search(ask: Ask) -> Page | Response:
    """Redirect to the page of the only exact match, or show lists of matches by kind."""
    text, only = ask.text("q")[:_TEXT_MAX], ask.text("topic")
    named = _named(ask)
    exact = [place for names in named.values() for name, place in names if name == text and not only]
    found = Found()
    if text and not exact:
        found = await lookup(ask.admin.messages, text, [only] if only else _topics(ask))
        places = ((one.topic, "at", one.broker_name, one.queue_id, one.queue_offset) for one in found.messages)
        exact = [ask.link("topics", *place) for place in places]
    if len(exact) == 1 and ask.text("format") != "json":
        return RedirectResponse(exact[0], 303)
    wanted = text.lower()
    matched = {kind: [one for one in names if wanted and wanted in one[0].lower()] for kind, names in named.items()}
    rows = await message_rows(ask, found.messages)
    values: dict[str, Any] = {
        "text": text,
        "found": {
            kind: {"names": [name for name, __ in names[:_SHOWN]], "matched": len(names)}
            for kind, names in matched.items()
        },
        "messages": [{"topic": one.topic, "row": row} for one, row in zip(found.messages, rows, strict=True)],
        "asked": found.asked,
        "refused": found.refused,
        "left": found.left,
        "trouble": found.trouble,
    }
    more = {"places": {kind: names[:_SHOWN] for kind, names in matched.items()}, "only": only}
    return Page("search.html", _("Search"), values, more)


def _named(ask: Ask) -> dict[str, list[Named]]:
    """Return all names in the snapshot with the addresses of their pages, by kind."""
    snapshot, link = ask.snapshot, ask.link
    return {
        "topics": [(name, link("topics", name)) for name in sorted(snapshot.topics)],
        "groups": [(name, link("groups", name)) for name in sorted(snapshot.groups)],
        "clients": [
            (one.client_id, link("groups", one.consumes[0], "clients", one.client_id))
            if one.consumes
            else (one.client_id, link("clients", q=one.client_id))
            for one in snapshot.clients
        ],
    }


def _topics(ask: Ask) -> list[str]:
    """Return the topics of applications, of dead letters, and of retries, in this order. Empty topics are last."""
    known = [one for one in ask.snapshot.topics.values() if one.kind in _KINDS]
    return [one.name for one in sorted(known, key=lambda one: (one.end == 0, _KINDS.index(one.kind), one.name))]
