"""The senders of a topic's last messages.

RocketMQ has no list of the producers of a topic, and a message does not name its producer. The address in each message
is therefore looked up in the connections of the online producers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.cluster.clients import FleetRow
from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.pulls import Span
from rmqkit.errors import UnknownName

__all__ = ["LOOKED_AT", "Sender", "Senders", "last_senders"]

LOOKED_AT = 200
_SHOWN = 20


class Sender(Struct, rename="camel", kw_only=True):
    """A host that sent messages. ``clients`` and ``groups`` belong to its producers with an open connection."""

    host: str
    messages: int = 0
    last_ms: int = 0
    clients: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


class Senders(Struct, kw_only=True):
    """The senders of the last messages, and the mean size of these messages in the log (None: no messages)."""

    rows: list[Sender] = field(default_factory=list)
    mean_bytes: float | None = None


async def last_senders(calls: AdminCalls, topic: str, clients: Sequence[FleetRow]) -> Senders:
    """Return the senders of the last `LOOKED_AT` messages, the most frequent host first."""
    budget = Budget(messages=LOOKED_AT, body_bytes=8 << 20, ms=1_000)
    try:
        found = await page(calls, topic, Span(), count=LOOKED_AT, budget=budget)
    except UnknownName:
        return Senders()
    online = {address: one for one in clients if one.produces for address in one.addresses}
    senders: dict[str, Sender] = {}
    for message in found.messages:
        host = message.born_host.rpartition(":")[0]
        one = senders.setdefault(host, Sender(host=host))
        one.messages += 1
        one.last_ms = max(one.last_ms, message.store_timestamp)
        client = online.get(message.born_host)
        if client is not None and client.client_id not in one.clients:
            one.clients.append(client.client_id)
            one.groups = sorted({*one.groups, *client.produces})
    sizes = [message.store_size for message in found.messages]
    rows = sorted(senders.values(), key=lambda one: -one.messages)[:_SHOWN]
    return Senders(rows=rows, mean_bytes=sum(sizes) / len(sizes) if sizes else None)
