"""``rmq admin producer``: who produces."""

from __future__ import annotations

from typing import Annotated

import typer

from rmqkit.admin.api import Admin
from rmqkit.admin.clients import ProducerRow
from rmqkit.cli.admin.consumer import connection_rows
from rmqkit.cli.admin.frame import Broker, Cluster, Named, Noun, View

noun = Noun("producer", "Producers online.")

ProducerGroup = Annotated[str, Named("-g", "--group", help="Name of a producer group.")]


@noun.verb("list", watch=True)
async def list_producers(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[ProducerRow]:
    """All producers that are connected, with their groups."""
    return await admin.clients.all_producers(broker, cluster)


@noun.verb("connections", watch=True)
async def connections(
    admin: Admin,
    group: ProducerGroup,
    topic: Annotated[
        str, typer.Option("-t", "--topic", help="Ask only the brokers of this topic.", show_default=False)
    ] = "",
) -> View:
    """The clients of a producer group that are connected."""
    found = await admin.clients.producers(group, topic)
    return View(found, [connection_rows(found)])
