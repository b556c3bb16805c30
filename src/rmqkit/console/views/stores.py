"""A broker's store: files of the log, retention, and when its disk is full."""

from __future__ import annotations

from rmqkit.admin.stores import Forecast, forecast
from rmqkit.console.asking import Ask, Page
from rmqkit.console.views import history
from rmqkit.console.views.brokers import state_of

_DAY_MS = 86_400_000
_GROWTH_MIN = 0.05
"""Brokers tell whole percent: a day in which the disk filled less is too short to draw a line through."""


async def store(ask: Ask) -> Page:
    """The store of one broker: two requests, and the history of its disk."""
    state = state_of(ask)
    key = ask.params["b"]
    (found,) = await ask.admin.stores.of(state.row.addr)
    values = {
        "store": found,
        "forecasts": [await _forecast(ask, key, limit.ratio) for limit in found.limits],
    }
    return Page(
        template="store.html",
        title=f"Store of {key}",
        values=values,
        more={"charts": await history.charts(ask, [("disk", [key])]), "key": key},
        live_s=60,
        command=f"rmq admin broker store -b {state.row.addr}",
        crumbs=[("Brokers", ask.link("brokers")), (state.row.broker_name, ask.link("brokers", key))],
    )


async def _forecast(ask: Ask, key: str, ratio: float) -> Forecast | None:
    """By how the disk filled in a day, or in a week if that was little."""
    now_ms = ask.console.clock.now_ms()
    _, points = await ask.env.history.read("disk", key, now_ms - _DAY_MS, now_ms)
    known = [value for _, value in points if value is not None]
    if known and abs(known[-1] - known[0]) < _GROWTH_MIN:
        _, points = await ask.env.history.read("disk", key, now_ms - 7 * _DAY_MS, now_ms)
    return forecast(points, ratio, now_ms)
