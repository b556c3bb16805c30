"""The pages of clients: producers and consumers by client id, and the running info of one member of a group."""

from __future__ import annotations

from collections import Counter

from rmqkit.admin.cluster.clients import process_queues
from rmqkit.admin.cluster.runtime import release
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Page, Part, part, rows_of
from rmqkit.errors import UnknownName
from rmqkit.protocol.codes import version_name
from rmqkit.protocol.schemas.clients import ConsumerRunningInfo
from rmqkit.sentences import _


async def clients(ask: Ask) -> Page:
    """Show the list of clients in the snapshot."""
    wanted = ask.text("q").lower()
    everything = ask.snapshot.clients
    found = [
        one
        for one in everything
        if wanted in " ".join((one.client_id, one.language, *one.addresses, *one.produces, *one.consumes)).lower()
    ]
    rows = rows_of(ask, found, len(everything))
    kinds = Counter(f"{one.language} {release(version_name(one.version))}" for one in everything)
    values = {
        "clients": rows,
        "kinds": dict(kinds.most_common(20)),
        "asked": sum(one.members is not None for one in ask.snapshot.groups.values()),
        "groups": len(ask.snapshot.groups),
        "atMs": ask.snapshot.at_ms,
    }
    more = {"q": ask.text("q"), "version_name": version_name}
    return Page("clients.html", _("Clients"), values, more, command="rmq cluster clients")


async def client(ask: Ask) -> Page:
    """Show the running info of one member of a group. ``stacks=1``: include its stack traces."""
    name, client_id = ask.params["g"], ask.params["c"]
    with_stacks = ask.text("stacks") == "1"
    found: Part = await part(ask.admin.clients.running(name, client_id, stacks=with_stacks))
    is_known = found.value is not None or any(one.client_id == client_id for one in ask.snapshot.clients)
    if not is_known:
        raise UnknownName("client", client_id, _("group {name}", name=name), remedy=found.trouble)
    info: ConsumerRunningInfo | None = (found.value or {}).get(client_id)
    values = {
        "group": name,
        "client": client_id,
        "trouble": found.trouble or ("" if info is not None else _("{client} does not answer", client=client_id)),
        "properties": dict(sorted(info.properties.items())) if info is not None else {},
        "queues": process_queues(info),
        "rates": dict(sorted(info.status_table.items())) if info is not None else {},
        "subscriptions": info.subscription_set if info is not None else [],
        "stacks": info.jstack if info is not None and with_stacks else None,
    }
    return Page(
        "client.html", client_id, values, {"with_stacks": with_stacks},
        command=shell("rmq consumer status", name, "-i", client_id, *(["-s"] if with_stacks else [])),
        crumbs=ask.crumbs("groups", name),
    )  # fmt: skip
