"""``rmq admin offset``: moving consumer groups."""

from __future__ import annotations

from typing import Annotated

import typer

from rmqkit.admin.api import Admin
from rmqkit.admin.offsets import END_MS, Moved
from rmqkit.cli.admin.frame import Broker, Group, Named, Noun, Topic
from rmqkit.cli.admin.group import Switch
from rmqkit.cli.times import time_ms

noun = Noun("offset", "Offsets: move a group to a time, to the end, or to where another one is.")

Source = Annotated[str, Named("-s", "--source", help="Group that has the offsets.")]
Target = Annotated[str, Named("-d", "--target", help="Group that gets them.")]
To = Annotated[
    str, Named("-s", "--to", help="now, ms since the epoch, 2026-01-31T12:00:00, or -1 (as -s -1): behind the last.")
]


@noun.verb("reset")
async def reset(
    admin: Admin,
    group: Group,
    topic: Topic,
    to: To,
    broker: Broker = None,
    queue_id: Annotated[
        int | None, typer.Option("-q", "--queue", min=0, help="Only this queue (with -b).", show_default=False)
    ] = None,
    offset: Annotated[
        int | None, typer.Option("-o", "--offset", min=0, help="To this offset (with -q).", show_default=False)
    ] = None,
    force: Annotated[Switch, typer.Option("-f", "--force", help="Also forward.")] = Switch.TRUE,
) -> list[Moved]:
    """Move a group to the messages of a time, or a queue to an offset; clients that are online follow."""
    if (queue_id is not None and broker is None) or (offset is not None and queue_id is None):
        raise typer.BadParameter("a queue needs its broker (-b), and an offset its queue (-q)")
    timestamp_ms = END_MS if to == "-1" else time_ms(to)
    return await admin.offsets.reset(
        group, topic, timestamp_ms, broker=broker, queue_id=queue_id, offset=offset, is_forced=force is Switch.TRUE
    )


@noun.verb("skip")
async def skip(
    admin: Admin,
    group: Group,
    topic: Topic,
    force: Annotated[Switch, typer.Option("-f", "--force", hidden=True, help="As Java's tool has it.")] = Switch.TRUE,
) -> list[Moved]:
    """Move a group behind the last message of each queue: what it has not consumed is left out."""
    return await admin.offsets.reset(group, topic, END_MS, is_forced=force is Switch.TRUE)


@noun.verb("clone")
async def clone(admin: Admin, source: Source, target: Target, topic: Topic) -> list[Moved]:
    """Give a group the offsets that another one has on a topic."""
    return await admin.offsets.clone(source, target, topic)
