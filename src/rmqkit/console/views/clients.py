"""Everybody who is connected: producers and consumers by client id."""

from __future__ import annotations

from collections import Counter

from rmqkit.console.asking import Ask, Page, rows_of
from rmqkit.protocol.codes import version_name


async def clients(ask: Ask) -> Page:
    """The list, from the snapshot alone."""
    wanted = ask.text("q").lower()
    everything = ask.snapshot.clients
    found = [
        one
        for one in everything
        if wanted in " ".join((one.client_id, one.language, *one.addresses, *one.produces, *one.consumes)).lower()
    ]
    rows = rows_of(ask, found, len(everything))
    kinds = Counter(f"{one.language} {version_name(one.version)}" for one in everything)
    values = {
        "clients": rows,
        "kinds": dict(kinds.most_common(20)),
        "asked": sum(one.members is not None for one in ask.snapshot.groups.values()),
        "groups": len(ask.snapshot.groups),
        "atMs": ask.snapshot.at_ms,
    }
    more = {"q": ask.text("q"), "version_name": version_name}
    return Page(
        template="clients.html",
        title="Clients",
        values=values,
        more=more,
        live_s=60,
        command="rmq admin cluster clients",
    )
