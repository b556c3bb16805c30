"""The plots of an audit's report, as SVG in the colours of the HTML page.

matplotlib draws with placeholder colours (`_TEXT`, `_LINE`, `_SERIES`). Variables of the page's style sheet replace
them, so that a plot is readable on light and dark backgrounds. Texts are not converted to paths. The size fits a column
of 420 pixels.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Any

from rmqkit.protocol.schemas.brokers import bytes_text
from rmqkit.spark.jobs.audit import Audit, Range, Topic

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_TEXT, _LINE = "#0a0a01", "#0a0a02"
_SERIES = [f"#0a0b0{number}" for number in range(1, 6)]
_INCHES = (5.8, 3.2)
_BARS_MAX = 10
_PERIODS_MAX = 96
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "text.color": _TEXT,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.labelcolor": _TEXT,
}


def has_plots() -> bool:
    """Return True if matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(name: str, audit: Audit) -> str:
    """Return one of `PLOTS` as an SVG element, or an empty text if there is nothing to show."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        if not PLOTS[name](axes, audit):
            return ""
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in {_TEXT: "ink", _LINE: "line"}.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    for number, stand_in in enumerate(_SERIES, 1):
        svg = svg.replace(stand_in, f"var(--series-{number})")
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{escape(name)}">', svg, count=1
    )


def own_topics(audit: Audit) -> list[Topic]:
    """Return the topics of applications, sorted by number of messages, largest first."""
    return sorted((one for one in audit.topics if not one.is_internal), key=lambda one: (-one.messages, one.topic))


def duration_text(ms: float) -> str:
    """Format a duration in a suitable unit: ``12 ms``, ``3.5 s``, ``2 h``."""
    if abs(ms) < 1000:
        return f"{ms:,.0f} ms"
    for unit, length, limit in (("s", 1e3, 120e3), ("min", 60e3, 7200e3), ("h", 3600e3, 172_800e3)):
        if abs(ms) < limit:
            return f"{ms / length:.3g} {unit}"
    return f"{ms / 86_400e3:,.1f} days"


def period_text(seconds: float) -> str:
    """Format the length of a period: ``hour``, ``15 min``."""
    named = {1: "second", 60: "minute", 3600: "hour", 86_400: "day"}
    return named.get(round(seconds)) or duration_text(seconds * 1000)


# ---------------------------------------------------------------- each plot


def _traffic(axes: Axes, audit: Audit) -> bool:
    """Draw bars over time, with the largest topics stacked."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    topics = [one.topic for one in own_topics(audit)]
    rows = [one for one in audit.traffic if one.topic in set(topics)]
    if not rows:
        return False
    begin = min(one.begin for one in rows)
    step = timedelta(seconds=audit.period_seconds)
    count = (max(one.begin for one in rows) - begin) // step + 1
    step *= -(-count // _PERIODS_MAX)
    named = topics[: len(_SERIES) - (len(topics) > len(_SERIES))]
    sums: Counter[tuple[str, datetime]] = Counter()
    for one in rows:
        name = one.topic if one.topic in named else f"{len(topics) - len(named)} others"
        sums[name, begin + (one.begin - begin) // step * step] += one.messages
    times = sorted({time for _, time in sums})
    floor = [0] * len(times)
    for name, colour in zip(dict.fromkeys([*named, *(name for name, _ in sums)]), _SERIES, strict=False):
        heights = [sums[name, time] for time in times]
        axes.bar([time + step / 2 for time in times], heights, 0.86 * step, floor, color=colour, label=_short(name))  # type: ignore[arg-type]
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    locator = AutoDateLocator(minticks=3, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    if len(times) < 3:
        axes.set_xlim(begin - step * 3, begin + step * 4)  # type: ignore[arg-type]
    _finish(axes, "y", f"messages per {period_text(step.total_seconds())}")
    _legend(axes, ncols=3, handlelength=1, columnspacing=1.2)
    return True


def _topic_bars(axes: Axes, audit: Audit) -> bool:
    topics = own_topics(audit)
    return len(topics) > 1 and _bars(axes, [(one.topic, [one.messages]) for one in topics], "messages")


def _latency_by_topic(axes: Axes, audit: Audit) -> bool:
    """Draw a line per topic from the median to the maximum, with marks at the 95th and 99th percentile."""
    topics = [one for one in own_topics(audit) if one.latency_ms_max is not None][:_BARS_MAX]
    for row, one in enumerate(topics):
        values = [
            max(value or 0, 0)
            for value in (one.latency_ms_p50, one.latency_ms_p95, one.latency_ms_p99, one.latency_ms_max)
        ]
        axes.plot([values[0], values[3]], [row, row], color=_LINE, linewidth=5, solid_capstyle="round", zorder=1)
        for value, colour, marker in zip(values, _SERIES, "osD|", strict=False):
            axes.scatter(value, row, 60 if marker != "|" else 150, color=colour, marker=marker, zorder=3)
    if not topics:
        return False
    for label, colour, marker in zip(("half", "95 of 100", "99 of 100", "slowest"), _SERIES, "osD|", strict=False):
        axes.scatter([], [], 45, color=colour, marker=marker, label=label)
    axes.set_yticks(range(len(topics)), [_short(one.topic) for one in topics])
    axes.set_ylim(len(topics) - 0.4, -0.6)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.15, 2 * max(one.latency_ms_max or 0 for one in topics) + 1)
    _times(axes, max(one.latency_ms_max or 0 for one in topics))
    _finish(axes, "x", "")
    _legend(axes, ncols=4, handletextpad=0.2, columnspacing=1)
    return True


def _latency_of_all(axes: Axes, audit: Audit) -> bool:
    sums = _of_own(audit, audit.latency_ms)
    skewed = sum(count for (low, _), count in sums.items() if low < 0)
    counted = [(low, high, count) for (low, high), count in sorted(sums.items()) if low >= 0]
    bars = _filled(counted)
    labels = [("before" if low < 0 else duration_text(low)) for low, _, _ in bars]
    if skewed:
        bars, labels = [(-1, -1, skewed), *bars], ["before", *labels]
    return _columns(axes, bars, labels, "from … on")


def _sizes(axes: Axes, audit: Audit) -> bool:
    sums = _of_own(audit, audit.record_bytes)
    bars = _filled([(low, high, count) for (low, high), count in sorted(sums.items())])
    return _columns(axes, bars, [bytes_text(low).replace(".0", "") for low, _, _ in bars], "from … on")


def _hot_keys(axes: Axes, audit: Audit) -> bool:
    return _bars(
        axes,
        [(f"{_short(one.key, 16)} · {_short(one.topic, 14)}", [one.messages]) for one in audit.hot_keys],
        "messages",
    )


def _lags(axes: Axes, audit: Audit) -> bool:
    sums: Counter[str] = Counter()
    for one in audit.lags:
        sums[one.group] += one.lag
    return _bars(axes, [(group, [lag]) for group, lag in sums.most_common() if lag], "messages behind")


def _retries(axes: Axes, audit: Audit) -> bool:
    sums: dict[str, list[int]] = {}
    for one in audit.retries:
        sums.setdefault(one.group, [0, 0])[one.is_dead] += one.messages
    rows = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return _bars(axes, rows, "messages", ("sent back", "given up"))


PLOTS: dict[str, Callable[[Axes, Audit], bool]] = {
    "Messages stored": _traffic,
    "Messages by topic": _topic_bars,
    "Time taken, by topic": _latency_by_topic,
    "Time taken, all messages": _latency_of_all,
    "Bytes of a record": _sizes,
    "Messages with the same key": _hot_keys,
    "Messages behind, by group": _lags,
    "Sent back and given up, by group": _retries,
}


# ---------------------------------------------------------------- kinds of plots


def _bars(axes: Axes, rows: Sequence[tuple[str, list[int]]], what: str, series: Sequence[str] = ("",)) -> bool:
    """Draw horizontal bars with their numbers. The first row is at the top."""
    rows = rows[:_BARS_MAX]
    if not rows:
        return False
    floor = [0] * len(rows)
    for number, label in enumerate(series):
        widths = [values[number] for _, values in rows]
        axes.barh(range(len(rows)), widths, 0.62, floor, color=_SERIES[number], label=label)
        floor = [low + width for low, width in zip(floor, widths, strict=True)]
    for row, total in enumerate(floor):
        axes.annotate(f"{total:,}", (total, row), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(rows)), [_short(name, 34) for name, _ in rows])
    axes.set_ylim(max(len(rows), 3) - 0.4, -0.6)
    axes.set_xlim(0, max(floor) * 1.16)
    _finish(axes, "x", what)
    if any(series):
        _legend(axes, ncols=2, handlelength=1)
    return True


def _columns(axes: Axes, bars: Sequence[tuple[int, int, int]], labels: Sequence[str], what: str) -> bool:
    """Draw a distribution as vertical bars."""
    if not bars:
        return False
    axes.bar(range(len(bars)), [count for _, _, count in bars], 0.86, color=_SERIES[0])
    axes.set_xticks(
        range(len(bars)), labels, rotation=45 if len(bars) > 7 else 0, ha="right" if len(bars) > 7 else "center"
    )
    axes.set_xlim(min(-0.6, len(bars) / 2 - 3), max(len(bars) - 0.4, len(bars) / 2 + 2))
    _finish(axes, "y", "messages")
    axes.set_xlabel(what)
    return True


def _of_own(audit: Audit, ranges: Sequence[Range]) -> Counter[tuple[int, int]]:
    """Add up the ranges of the topics of applications. All negative values become one range."""
    own = {one.topic for one in own_topics(audit)}
    sums: Counter[tuple[int, int]] = Counter()
    for one in ranges:
        if one.topic in own:
            sums[(-1, -1) if one.low < 0 else (one.low, one.high)] += one.messages
    return sums


def _filled(bars: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Add the empty ranges between the ranges in ``bars``."""
    filled: list[tuple[int, int, int]] = []
    for low, high, count in bars:
        while filled and filled[-1][1] + 1 < low:
            gap = filled[-1][1] + 1
            filled.append((gap, 2 * gap - 1, 0))
        filled.append((low, high, count))
    return filled


def _times(axes: Axes, longest_ms: float) -> None:
    """Set ticks at 0 and at the powers of ten up to the longest time."""
    ticks = list(itertools.takewhile(lambda ms: ms <= 2 * longest_ms, (10**power for power in range(13))))
    axes.set_xticks([0, *ticks], [duration_text(ms) for ms in (0, *ticks)])
    axes.minorticks_off()


def _legend(axes: Axes, **spacing: Any) -> None:
    """Add a legend above the plot."""
    figure: Any = axes.figure
    figure.legend(loc="outside upper left", **spacing)


def _finish(axes: Axes, grid: str, what: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.grid(axis=grid)  # type: ignore[arg-type]
    axes.tick_params(length=0)
    values = axes.yaxis if grid == "y" else axes.xaxis
    if axes.get_xscale() != "symlog":
        values.set_major_locator(MaxNLocator(5, integer=True))
        values.set_major_formatter(EngFormatter(sep=""))
    if grid == "y":
        axes.set_ylabel(what)
    else:
        axes.set_xlabel(what)
    axes.spines["left" if grid == "y" else "bottom"].set_visible(False)


def _short(text: str, chars_max: int = 26) -> str:
    return text if len(text) <= chars_max else f"{text[: chars_max // 2]}…{text[-chars_max // 2 + 1 :]}"
