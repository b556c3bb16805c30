"""``rmq filter``: the test of a tag or SQL92 expression."""

from __future__ import annotations

from typing import Annotated

import typer

from rmqkit.admin import Admin
from rmqkit.admin.messages.filters import MESSAGES_MAX, FilterTest, apply_filter, parse_properties
from rmqkit.cli.frame.nouns import Noun, View
from rmqkit.filter import SQL92
from rmqkit.filter.sql92 import Part

FILTER = Noun("filter", "Filters: try a tag or SQL92 expression on properties or messages.")

Expression = Annotated[str, typer.Argument(help="The expression: SQL92, or tags such as 'A || B'.")]
Kind = Annotated[str, typer.Option("--type", help="SQL92 or TAG.")]
Properties = Annotated[
    list[str] | None, typer.Option("-p", "--property", help="A property as NAME=VALUE, repeatable; TAGS is the tag.")
]
Topic = Annotated[str, typer.Option("-t", "--topic", help="Test the newest messages of this topic instead.")]
Count = Annotated[int, typer.Option("-c", "--count", min=1, max=MESSAGES_MAX, help="Number of messages.")]


@FILTER.verb("test")
async def try_filter(
    admin: Admin, expression: Expression, kind: Kind = SQL92, properties: Properties = None, topic: Topic = "",
    count: Count = 20,
) -> View:  # fmt: skip
    """Show the result of each part of a filter for given properties, or for the newest messages of a topic.

    With a topic, also show which of the messages the broker would deliver."""
    if not topic:
        one = apply_filter(expression, kind, parse_properties("\n".join(properties or ())))
        found = FilterTest(expression=expression, type=kind, tested=[one])
        return View(found, ["delivered" if one.wanted else "not delivered", [*_lines(one.part)]])
    found = await admin.filters.test(topic, expression, kind, count)
    rows = [
        {
            "message": one.place,
            "delivered": _word(one.wanted),
            "broker": "" if one.broker_says is None else _word(one.broker_says),
            "why not": "" if one.wanted else "; ".join(_reasons(one.part)),
        }
        for one in found.tested
    ]
    said = f"no result from the broker: {found.trouble}" if found.trouble else f"the broker differs in {found.differ}"
    return View(found, [rows or f"topic {topic} has no messages", said])


def _word(verdict: bool | None) -> str:
    return "unknown" if verdict is None else "yes" if verdict else "no"


def _outcome_text(part: Part) -> str:
    if part.is_property:
        return "missing" if part.value is None else repr(part.value)
    return part.error or {True: "true", False: "false", None: "unknown"}[part.verdict]


def _lines(part: Part, depth: int = 0) -> list[str]:
    return [f"{'  ' * depth}{part.text}: {_outcome_text(part)}"] + [
        line for one in part.parts for line in _lines(one, depth + 1)
    ]


def _reasons(part: Part) -> list[str]:
    """Return the smallest parts that are not true."""
    inner = [one for one in part.parts if not one.is_property]
    if inner and not part.text.startswith("(NOT "):
        return [line for one in inner if one.verdict is not True for line in _reasons(one)]
    return [f"{part.text} is {_outcome_text(part)}"]
