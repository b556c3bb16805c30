"""``rmq dead``: groups with dead letters, and the kinds of dead letters. ``rmq replay`` sends them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.admin.replay.dead import BY, DeadGroup, Kinds
from rmqkit.cli.frame.nouns import Group, Noun, View
from rmqkit.cli.frame.printing import time_text
from rmqkit.errors import UnknownName
from rmqkit.protocol.names import dlq_topic

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.replay.dead import DeadGroup


DEAD = Noun("dead", "Dead letters: list the groups that have them, and the kinds of messages among them.")


@DEAD.verb("list")
async def list_groups(admin: Admin) -> View:
    """List the groups that have dead letters, with their number and the time of the last one."""
    found: list[DeadGroup] = await admin.dead.groups()
    rows = [{"group": one.group, "dead letters": one.count, "last": time_text(one.last_ms)} for one in found]
    return View(found, [rows or "no group has dead letters"])


@DEAD.verb("kinds")
async def kinds(
    admin: Admin,
    group: Group,
    by: Annotated[str, typer.Option(help=f"Group dead letters by: {', '.join(BY)} or property:NAME.")] = "kind",
) -> View:
    """Show the kinds of dead letters that a group has, and the topics that they came from.

    At most 20,000 messages are examined, the newest first. To replay kind 1: rmq replay --dlq GROUP --kind 1"""
    try:
        found = await admin.dead.kinds(group, by)
    except UnknownName as error:
        if error.name != dlq_topic(group):
            raise
        # The topic does not exist before the first dead letter.
        found = Kinds(group=group, by=by, kinds=[], examined=0, total=0, is_whole=True, troubles=[])
    rows = [
        {
            "no": number,
            "count": one.count,
            "kind": one.kind,
            "from": ", ".join(name or "?" for name in one.targets),
            "last": time_text(one.last_ms),
        }
        for number, one in enumerate(found.kinds, 1)
    ]
    rest = "" if found.is_whole else f"; examined the newest {found.examined:,} of {found.total:,}"
    parts = [rows or f"group {group} has no dead letters; the groups that have: rmq dead list"]
    return View(found, [*parts, f"{len(rows)} kinds{rest}", *found.troubles])
