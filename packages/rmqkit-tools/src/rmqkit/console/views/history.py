"""The charts of figures over time for other pages, and the pages of one series and of the stored history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup
from msgspec.structs import asdict

from rmqkit.console.html.charts import Line, Mark, line_chart, sparkline
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.console.views.messages import time_of
from rmqkit.console.watch.figures import BOOT, FIGURES
from rmqkit.sentences import _

LINES_MAX, MARKS_MAX, SAMPLES_MIN = 6, 9, 20
_HOUR_MS = 3_600_000
RANGES = {"1h": 1, "6h": 6, "24h": 24, "7d": 7 * 24, "30d": 30 * 24, "90d": 90 * 24}
"""The allowed ranges in addresses, with their hours."""
_NOT_ACTIONS = frozenset({"login", "refused"})

Wanted = tuple[str, Sequence[str]]
"""A figure, and the names of the lines in its chart."""


def span_of(ask: Ask) -> tuple[int, int]:
    """Return the first and the last time of charts, from ``range`` and ``until`` (by default now).
    Raises Fault: a parameter is not valid."""
    hours = RANGES.get(ask.text("range", "1h"))
    if hours is None:
        reason = _("range={text} must be one of {ranges}", text=ask.text("range"), ranges=", ".join(RANGES))
        raise Fault(400, _("Not a range"), reason)
    until = time_of(ask, "until")
    now_ms = ask.console.clock.now_ms()
    end = max(ask.snapshot.at_ms, now_ms - 60_000) if until is None else max(hours * _HOUR_MS, min(until, now_ms))
    return end - hours * _HOUR_MS, end


async def charts(ask: Ask, wanted: Iterable[Wanted], marks: Sequence[Mark] = ()) -> list[Markup]:
    """Return a chart for each figure."""
    return await asyncio.gather(*(_chart(ask, figure, names, marks) for figure, names in wanted))


async def _chart(ask: Ask, figure: str, names: Sequence[str], marks: Sequence[Mark]) -> Markup:
    known, (begin, end), history = FIGURES[figure], span_of(ask), ask.env.history
    shown = names[:LINES_MAX]
    found = await asyncio.gather(*(history.read(figure, name, begin, end) for name in shown))
    lines = [Line(name, points) for name, (__, points) in zip(shown, found, strict=True)]
    if not ask.text("range") and not ask.text("until"):
        # Begin the axis at the first figure. Otherwise the chart of a new console would be almost empty.
        firsts = [line.points[0][0] for line in lines if line.points]
        begin = max(begin, min(firsts, default=begin))
    query = {"range": ask.text("range"), "until": ask.text("until")}
    alone = [
        Markup('<a href="{}" aria-label="{}">{}</a>').format(
            ask.link("history", figure, name, **query),
            ask.say(_("Open the chart of {title} of {name}", title=known.title, name=name)),
            name if len(shown) > 1 else ask.say(_("Open")),
        )
        for name in shown
        if ask.params.get("figure") != figure
    ]
    note = Markup('<span class="alone">{}</span>').format(Markup(" ").join(alone)) if alone else ""
    if len(names) > len(shown):
        first = _("first {shown} of {all}", shown=len(shown), all=len(names))
        note += Markup(' <span class="unit">{}</span>').format(ask.say(first))
    return line_chart(
        known.title, known.unit, lines, known.show, top_of=known.top, span=(begin, end), marks=marks, note=note,
        say=ask.say,
    )  # fmt: skip


def sparks(ask: Ask, figure: str, names: Iterable[str]) -> dict[str, Markup]:
    """Return a small line with the last hour of a figure, for each name."""
    return {name: sparkline(ask.env.history.last_hour(figure, name)) for name in names}


async def shares(ask: Ask, figure: str, name: str) -> list[float] | None:
    """Return the 50th, 95th and 99th percentile of a figure in the range of the charts; None: too few samples."""
    __, points = await ask.env.history.read(figure, name, *span_of(ask))
    values = sorted(value for __, value in points if value is not None)
    return [values[int(len(values) * share)] for share in (0.5, 0.95, 0.99)] if len(values) >= SAMPLES_MIN else None


def tabs(ask: Ask, *parts: str) -> Markup:
    """Return links to the other ranges of a page, and to the times before and after its range."""
    begin, end = span_of(ask)
    chosen, until = ask.text("range", "1h"), ask.text("until")
    links = [
        Markup('<a href="{}"{}>{}</a>').format(
            ask.link(*parts, range=name, until=until), Markup(' aria-current="true"') if name == chosen else "", name
        )
        for name in RANGES
    ]
    others: list[tuple[str, int | None]] = [(_("earlier"), begin)]
    if until:
        others += [(_("later"), 2 * end - begin), (_("now"), None)]
    links += [
        Markup('<a href="{}">{}</a>').format(ask.link(*parts, range=chosen, until=at), ask.say(text))
        for text, at in others
    ]
    label = ask.say(_("Time of the charts"))
    return Markup('<nav class="tabs range" aria-label="{}">{}</nav>').format(label, Markup("").join(links))


async def marks_of(ask: Ask, *, group: str = "", brokers: Sequence[str] = ()) -> list[Mark]:
    """Return the last `MARKS_MAX` events in the range: restarts of brokers, changed members, audited changes."""
    begin, end = span_of(ask)
    marks: dict[tuple[int, str], Mark] = {}
    for name in brokers:
        __, points = await ask.env.history.read(BOOT, name, begin, end)
        boots = {int(value) for __, value in points if value}
        marks |= {(at, name): Mark(at, _("{name} started", name=name)) for at in boots if begin <= at <= end}
    if group:
        before: float | None = None
        for at, value in (await ask.env.history.read("members", group, begin, end))[1]:
            if value is not None and before is not None and value != before:
                way = (
                    _("{value:g} joined", value=value - before)
                    if value > before
                    else _("{before:g} left", before=before - value)
                )
                marks[at, "members"] = Mark(at, _("{way}: {value:g} online", way=way, value=value))
            before = value if value is not None else before
        for line in ask.console.audit.lines(group):
            is_own = line.target == group and line.env == ask.env.name and line.outcome == "done"
            if is_own and begin <= line.at <= end and line.action not in _NOT_ACTIONS:
                marks[line.at, "audit"] = Mark(line.at, _("{action}, by {user}", action=line.action, user=line.user))
    return [marks[key] for key in sorted(marks)][-MARKS_MAX:]


async def series(ask: Ask) -> Page:
    """Show the chart of one series, or its points as JSON."""
    figure, name = ask.params["figure"], ask.params["name"]
    known = FIGURES.get(figure)
    if known is None or not known.is_kept:
        kept = ", ".join(key for key, one in FIGURES.items() if one.is_kept)
        reason = _("there is no history of {figure}: there is one of {kept}", figure=figure, kept=kept)
        raise Fault(404, _("No such figure"), reason)
    if name not in ask.env.history.names(figure):
        reason = _("nothing is known of {title} of {of} {name}", title=known.title, of=_(known.of), name=name)
        raise Fault(404, _("No such history"), reason)
    begin, end = span_of(ask)
    step, points = await ask.env.history.read(figure, name, begin, end)
    marks = await marks_of(ask, group=name if known.of == "group" else "", brokers=_brokers(ask, known.of, name))
    values = {
        "figure": figure,
        "name": name,
        "unit": known.unit,
        "stepMs": step,
        "fromMs": begin,
        "untilMs": end,
        "points": points,
        "marks": marks,
        "trouble": ask.env.history.trouble,
    }
    place, where = f"{known.of}s", name.partition("@")[0]
    return Page(
        "series.html", _("{title}: {name}", title=known.title, name=name), values,
        {"charts": await charts(ask, [(figure, [name])], marks), "tabs": tabs(ask, "history", figure, name)},
        command=shell("rmq group progress", name) if known.of == "group" else "",
        crumbs=[(place.capitalize(), ask.link(place)), (where, ask.link(place, where))],
    )  # fmt: skip


def _brokers(ask: Ask, of: str, name: str) -> list[str]:
    if of == "broker":
        return [name.partition("@")[0]]
    state = ask.snapshot.groups.get(name) if of == "group" else ask.snapshot.topics.get(name)
    return sorted(getattr(state, "configs", None) or getattr(state, "brokers", None) or ())


def _title(figure: str) -> str:
    """Return the title of a figure. Add the kind of object if another figure has the same title."""
    known = FIGURES[figure]
    is_shared = sum(one.title == known.title for one in FIGURES.values()) > 1
    return _("{title} ({of})", title=known.title, of=_(known.of)) if is_shared else known.title


async def kept(ask: Ask) -> Page:
    """Show the stored history: its series, its file, and its oldest time."""
    found = await ask.env.history.kept()
    names = {key: len(ask.env.history.names(key)) for key, one in FIGURES.items() if one.is_kept}
    wanted, figure = ask.text("q").lower(), ask.text("figure", "lag")
    figure = figure if figure in names else "lag"
    matched = [name for name in ask.env.history.names(figure) if wanted in name.lower()]
    values: dict[str, Any] = {
        **{key: value for key, value in asdict(found).items() if key != "trouble"},
        "trouble": found.trouble,
        "counts": names,
        "figure": figure,
        "names": matched[:200],
        "matched": len(matched),
    }
    more = {"q": ask.text("q"), "titles": {key: _title(key) for key in names}}
    return Page("history.html", _("History"), values, more)
