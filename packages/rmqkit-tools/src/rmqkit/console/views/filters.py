"""The page that tests a filter, part by part, with entered properties or with the newest messages of a topic."""

from __future__ import annotations

from rmqkit.admin.messages.filters import FilterTest, apply_filter, parse_properties
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Page
from rmqkit.errors import RmqError, SettingsError
from rmqkit.filter import SQL92, TAG
from rmqkit.sentences import _

_COUNT = 50


async def tester(ask: Ask) -> Page:
    """Show the form, and the results of the filter for the properties or the messages."""
    expression, kind, topic = ask.text("expression"), ask.text("type", SQL92), ask.text("topic")
    found: FilterTest | None = None
    trouble = ""
    try:
        if expression and topic:
            found = await ask.admin.filters.test(topic, expression, kind, _COUNT)
        elif expression:
            one = apply_filter(expression, kind, parse_properties(ask.text("properties")))
            found = FilterTest(expression=expression, type=kind, tested=[one])
    except RmqError as error:
        if not isinstance(error, SettingsError) and not topic:
            raise
        trouble = str(error)
    asked = {"expression": expression, "type": kind, "topic": topic, "properties": ask.text("properties")}
    return Page(
        "filter.html",
        _("Filter tester"),
        {"found": found, "trouble": trouble, "differ": found.differ if found is not None else 0},
        {
            "asked": asked,
            "kinds": (SQL92, TAG),
            "topics": sorted(one.name for one in ask.snapshot.topics.values() if one.kind == "normal")[:1_000],
        },
        command=shell("rmq filter test", expression or "EXPRESSION", *(("-t", topic) if topic else ())),
    )
