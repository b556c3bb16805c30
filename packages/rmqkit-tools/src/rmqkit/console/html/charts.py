"""Line charts as SVG. They work without JavaScript, with screen readers, in print, and in both colour schemes.

A chart has a title, a description, axes with units, and a table of the same figures. Colours and widths are classes of
the style sheet, because the content policy allows no styles in attributes. A line has a gap where the figure was
unknown. All functions here are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from markupsafe import Markup
from msgspec import Struct

from rmqkit.sentences import _

POINTS_MAX = 240
_WIDTH, _HEIGHT = 640, 168
_RIGHT, _TOP, _BOTTOM = 12, 16, 26
_LETTER, _LEFT_MIN = 11.5, 40
"""The largest width of a letter beside the axis in the style sheet, and the minimum space left of the axis."""
_TABLE_ROWS_MAX = 12

Point = tuple[int, float | None]


class Line(Struct):
    """One line: its name, and its points. A point has a time in ms and a value (None: unknown)."""

    name: str
    points: Sequence[Point]


def thinned(points: Sequence[Point], count_max: int = POINTS_MAX) -> list[Point]:
    """Return at most ``count_max`` points. The lowest and the highest point of each section remain, so peaks stay."""
    if len(points) <= count_max:
        return list(points)
    stretch = math.ceil(2 * len(points) / count_max)
    found: list[Point] = []
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        known = [point for point in part if point[1] is not None]
        if not known:
            found.append(part[0])
            continue
        ends = {min(known, key=_value), max(known, key=_value)}
        found += sorted(ends)
    return found


class _Area(Struct):
    """The drawing area: the times from ``begin`` to ``end``, values from 0 to ``top``, right of ``left``."""

    begin: int
    end: int
    top: float
    left: int

    def x(self, at: int) -> str:
        return f"{self.left + (at - self.begin) * (_WIDTH - self.left - _RIGHT) / max(1, self.end - self.begin):.1f}"

    def y(self, value: float) -> str:
        return f"{_TOP + (1 - min(value, self.top) / self.top) * (_HEIGHT - _TOP - _BOTTOM):.1f}"


class Mark(Struct):
    """An event that the chart marks at a time."""

    at: int
    text: str


# Long: it is one drawing, from its axis to its table.
def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    show: Callable[[float], str],
    *,
    top_of: Callable[[float], float],
    span: tuple[int, int] | None = None,
    marks: Sequence[Mark] = (),
    note: Markup | str = "",
    say: Callable[[str], str] = str,
) -> Markup:
    """Return a figure with the chart and its table, or a sentence if fewer than two points are known. ``show`` returns
    a value with its unit, ``top_of`` returns the end of the axis for the highest value. ``span`` has the first and the
    last time, ``note`` is shown beside the title, ``say`` translates a sentence."""
    title, unit = say(title), say(unit)
    known = [point for line in lines for point in line.points if point[1] is not None]
    if len({at for at, __ in known}) < 2:
        few = _(
            "{title}: not enough figures of this time. The console samples once a minute, "
            "and every 10 s while a page is open.",
            title=title,
        )
        return Markup('<p class="empty">{} {}</p>').format(say(few), note)
    begin, end = span if span and span[0] < span[1] else (min(at for at, __ in known), max(at for at, __ in known))
    marks = [one for one in marks if begin <= one.at <= end]
    top = top_of(max(_value(point) for point in known))
    heights = [(top * share, show(top * share)) for share in (0.0, 0.5, 1.0)]
    left = max(_LEFT_MIN, round(6 + _LETTER * max(len(text) for __, text in heights)))
    area = _Area(begin, end, top, left)
    parts = [_frame(area, heights)]
    for number, line in enumerate(lines):
        parts += _paths(line, number, area)
    parts += (_mark(one, number, area) for number, one in enumerate(marks, 1))
    described = "; ".join(f"{line.name}: {say(_summary(line, show))}" for line in lines)
    label = _(
        "{title}, {unit}, from {begin} to {end} UTC. {text}",
        title=title,
        unit=unit,
        begin=_clock(begin, end - begin),
        end=_clock(end, end - begin),
        text=described,
    )
    shape = Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{label}"'
        ' data-begin="{first}" data-end="{last}" data-left="{left}" data-right="{right}">{parts}</svg>'
    ).format(
        w=_WIDTH,
        h=_HEIGHT,
        label=say(label),
        first=begin,
        last=end,
        left=left,
        right=_WIDTH - _RIGHT,
        parts=Markup("").join(parts),
    )
    keys = Markup("").join(
        Markup('<li class="key-{}">{} <b>{}</b></li>').format(number, line.name, say(_last(line, show)))
        for number, line in enumerate(lines)
    )
    return Markup(
        '<figure class="chart-figure"><figcaption>{} <span class="unit">{}</span> {}</figcaption>'
        '{}<ul class="keys">{}</ul>{}{}</figure>'
    ).format(
        title, unit, note, shape, keys, _marks(marks, end - begin, say), _table(title, lines, show, end - begin, say)
    )


def sparkline(values: Sequence[float | None]) -> Markup:
    """Return a small line without axes for a row of a list, from the first known value on. The result is empty if no
    two consecutive values are known. Screen readers skip the line, because the cell has the last value as text."""
    values = values[next((x for x, value in enumerate(values) if value is not None), 0) :]
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    runs: list[list[str]] = [[]]
    for x, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x},{15 - 14 * value / top:.1f}")
    drawn = Markup("").join(Markup('<polyline points="{}"/>').format(" ".join(run)) for run in runs if len(run) > 1)
    shape = Markup('<svg class="spark" viewBox="0 0 {} 16" preserveAspectRatio="none" aria-hidden="true">{}</svg>')
    return shape.format(max(1, len(values) - 1), drawn) if drawn else Markup("")


def _frame(area: _Area, heights: Sequence[tuple[float, str]]) -> Markup:
    """Return the axes, with texts at some heights and at three times."""
    parts = []
    for value, text in heights:
        y = area.y(value)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
                '<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(area.left, _WIDTH - _RIGHT, area.left - 6, f"{float(y) + 4:.1f}", text, y=y)
        )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        span = area.end - area.begin
        at = area.begin + round(span * share)
        text = _clock(at, span) + (" UTC" if share == 1.0 else "")
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                area.x(at), _HEIGHT - 8, anchor, text
            )
        )
    return Markup("").join(parts)


def _mark(mark: Mark, number: int, area: _Area) -> Markup:
    x = area.x(mark.at)
    return Markup(
        '<line class="mark" x1="{x}" x2="{x}" y1="{}" y2="{}"/><text class="tick" x="{}" y="{}">{}</text>'
    ).format(_TOP, _HEIGHT - _BOTTOM, f"{float(x) + 3:.1f}", _TOP + 9, number, x=x)


def _marks(marks: Sequence[Mark], span: int, say: Callable[[str], str]) -> Markup:
    """Return a numbered list with the texts of the marks."""
    if not marks:
        return Markup("")
    items = Markup("").join(Markup("<li>{} UTC: {}</li>").format(_clock(one.at, span), say(one.text)) for one in marks)
    return Markup('<ol class="marks">{}</ol>').format(items)


def _paths(line: Line, number: int, area: _Area) -> Iterable[Markup]:
    runs: list[list[str]] = [[]]
    for at, value in thinned(line.points):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{area.x(at)},{area.y(value)}")
    for run in runs:
        if len(run) == 1:
            x, __, y = run[0].partition(",")
            yield Markup('<circle class="line-{}" cx="{}" cy="{}" r="2"/>').format(number, x, y)
        elif run:
            yield Markup('<polyline class="line-{}" points="{}"/>').format(number, " ".join(run))


def _table(
    title: str, lines: Sequence[Line], show: Callable[[float], str], span: int, say: Callable[[str], str]
) -> Markup:
    times = sorted({at for line in lines for at, __ in line.points})
    step = max(1, math.ceil(len(times) / _TABLE_ROWS_MAX))
    chosen = times[::-step]
    values = [dict(line.points) for line in lines]
    heads = Markup("").join(Markup('<th scope="col" class="n">{}</th>').format(line.name) for line in lines)
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            _clock(at, span),
            Markup("").join(
                Markup('<td class="n">{}</td>').format(say(_shown(known.get(at), show))) for known in values
            ),
        )
        for at in chosen
    )
    return Markup(
        '<details class="chart-table"><summary>{}</summary><div class="scroll"><table>'
        '<caption>{}</caption><thead><tr><th scope="col">UTC</th>{}</tr></thead><tbody>{}</tbody>'
        "</table></div></details>"
    ).format(say(_("The same as a table")), title, heads, rows)


def _summary(line: Line, show: Callable[[float], str]) -> str:
    known = [_value(point) for point in line.points if point[1] is not None]
    if not known:
        return _("unknown")
    return _("{low} to {high}, now {last}", low=show(min(known)), high=show(max(known)), last=_last(line, show))


def _last(line: Line, show: Callable[[float], str]) -> str:
    return _shown(line.points[-1][1] if line.points else None, show)


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return _("unknown") if value is None else show(value)


def _value(point: Point) -> float:
    return point[1] or 0.0


def _clock(at: int, span: int) -> str:
    """Return a time as text, with a precision that depends on the length of the axis."""
    form = "%H:%M:%S" if span <= 2 * 3_600_000 else "%H:%M" if span <= 86_400_000 else "%m-%d %H:%M"
    return f"{datetime.fromtimestamp(at / 1000, UTC):{form}}"
