"""The pages of brokers: the list, one broker with its store and settings, replication; and name servers."""

from __future__ import annotations

import asyncio
from typing import Any

from rmqkit.admin.cluster.runtime import grouped
from rmqkit.admin.cluster.settings import Compared, SettingRow, compared, described
from rmqkit.admin.cluster.stores import Forecast, forecast
from rmqkit.admin.diagnosis.health import BrokerState
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Page, Part, part
from rmqkit.console.views import history
from rmqkit.errors import UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.sentences import _

_HOUR_MS = 3_600_000
_WINDOWS_MS = (_HOUR_MS, 24 * _HOUR_MS, 7 * 24 * _HOUR_MS)
_GROWTH_MIN = 0.02
"""The minimum growth of the used share for a forecast, because brokers report only whole percent."""


async def brokers(ask: Ask) -> Page:
    """Show the list of brokers in the snapshot."""
    states = ask.snapshot.brokers
    values = {
        "brokers": [one.row for one in states],
        "troubles": {one.row.addr: one.trouble for one in states if one.trouble},
        "since": {one.row.addr: one.since_ms for one in states},
        "replication": {one.row.addr: _replication(one) for one in states},
        "atMs": ask.snapshot.at_ms,
    }
    return Page("brokers.html", _("Brokers"), values, command="rmq cluster list")


def _replication(state: BrokerState) -> str:
    if not state.is_master:
        return _("slave")
    if state.ha is None:
        return ""
    slaves = state.ha.ha_connection_info
    return (
        _("{synced} of {count} in sync", synced=state.ha.in_sync_slave_nums, count=len(slaves))
        if slaves
        else _("no slave")
    )


def state_of(ask: Ask) -> BrokerState:
    """Return the broker in the address. A name stands for a master, ``name:id`` for a slave.
    Raises UnknownName: there is no such broker."""
    name, __, number = ask.params["b"].rpartition(":")
    name, number = (name, number) if number.isdecimal() and name else (ask.params["b"], "0")
    for state in ask.snapshot.brokers:
        if state.row.broker_name == name and str(state.row.broker_id) == number:
            return state
    known = [one.row.broker_name for one in ask.snapshot.brokers]
    raise UnknownName("broker", ask.params["b"], _("the name servers"), known)


async def broker(ask: Ask) -> Page:
    """Show the last known runtime figures of one broker."""
    state = state_of(ask)
    name = state.row.broker_name
    groups, others = grouped(state.figures)
    values = {
        "row": state.row,
        "trouble": state.trouble,
        "sinceMs": state.since_ms,
        "figures": state.figures,
        "groups": groups,
        "replication": state.ha,
    }
    key = name if state.is_master else f"{name}:{state.row.broker_id}"
    wanted: list[history.Wanted] = [("disk", [key])]
    if state.is_master:
        wanted = [("in", [name]), ("out", [name]), *wanted]
        if slaves := ask.env.history.names("slave", f"{name}@"):
            wanted.append(("slave", slaves))
    charts = await history.charts(ask, wanted, await history.marks_of(ask, brokers=[key]))
    return Page(
        "broker.html",
        name if state.is_master else _("{name}, slave {id}", name=name, id=state.row.broker_id),
        values,
        {
            "charts": charts,
            "others": others,
            "key": ask.params["b"],
            "tabs": history.tabs(ask, "brokers", ask.params["b"]),
        },
        command=shell("rmq broker status -b", state.row.addr),
        crumbs=ask.crumbs("brokers"),
    )


async def settings(ask: Ask) -> Page:
    """Show the settings of one broker with their meaning, and compare them with the settings of the other brokers."""
    state = state_of(ask)
    others = [one.row.addr for one in ask.snapshot.brokers]
    answers = dict(zip(others, await asyncio.gather(*(part(_config(ask, address)) for address in others)), strict=True))
    labels = {one.row.addr: _label(one) for one in ask.snapshot.brokers}
    title = _("Settings of {label}", label=_label(state))
    crumbs = [(_("Brokers"), ask.link("brokers")), (state.row.broker_name, ask.link("brokers", ask.params["b"]))]
    command = shell("rmq broker settings -b", state.row.addr)
    page = _page(ask, answers, state.row.addr, labels, title, command)
    page.crumbs = crumbs
    return page


def _label(state: BrokerState) -> str:
    name = state.row.broker_name
    return name if state.is_master else f"{name}:{state.row.broker_id}"


async def _config(ask: Ask, address: str) -> dict[str, str]:
    return (await ask.admin.brokers.config(address))[address]


async def name_servers(ask: Ask) -> Page:
    """Show the settings of the first name server that answers, and compare them with the other name servers."""
    calls, addresses = ask.admin.calls, list(ask.admin.calls.name_servers)
    asked = (part(calls.fetch_properties(one, RequestCode.GET_NAMESRV_CONFIG)) for one in addresses)
    answers = dict(zip(addresses, await asyncio.gather(*asked), strict=True))
    shown = next((one for one in addresses if answers[one].value is not None), addresses[0])
    return _page(ask, answers, shown, {}, _("Name servers"), "rmq namesrv settings")


def _page(ask: Ask, answers: dict[str, Part], address: str, labels: dict[str, str], title: str, command: str) -> Page:
    """Return the page with the settings of one server, compared with the other servers."""
    wanted, only = ask.text("q").lower(), ask.text("only", "all")
    texts = {one: found.value for one, found in answers.items() if found.value is not None}
    rows: list[SettingRow] = described(texts.get(address, {}))
    beside: dict[str, Compared] = {one.key: one for one in compared(texts)}
    found = [
        row
        for row in rows
        if (wanted in row.key.lower() or wanted in row.help.lower())
        and (only != "changed" or (row.is_known and not row.is_default))
        and (only != "differs" or beside[row.key].differs)
    ]
    values: dict[str, Any] = {
        "address": address,
        "settings": found,
        "differs": {row.key: _named(beside[row.key], labels) for row in found if beside[row.key].differs},
        "total": len(rows),
        "servers": list(answers),
        "troubles": {one: answer.trouble for one, answer in answers.items() if answer.trouble},
    }
    more = {"q": ask.text("q"), "only": only if only in ("changed", "differs") else "all"}
    return Page("settings.html", title, values, more, command=command)


def _named(found: Compared, labels: dict[str, str]) -> dict[str, str | None]:
    return {labels.get(address, address): text for address, text in found.values.items()}


async def ha(ask: Ask) -> Page:
    """Show the replication of each master with its slaves."""
    rows = []
    slaves = {(one.row.broker_name, one.row.broker_id): one for one in ask.snapshot.brokers if not one.is_master}
    for state in ask.snapshot.brokers:
        if state.is_master:
            registered = [one.row for (name, __), one in slaves.items() if name == state.row.broker_name]
            rows.append({"row": state.row, "ha": state.ha, "slaves": registered, "trouble": state.trouble})
    masters = {one.row.broker_name for one in ask.snapshot.brokers if one.is_master}
    orphans = [one.row for one in slaves.values() if one.row.broker_name not in masters]
    values = {"masters": rows, "orphans": orphans, "atMs": ask.snapshot.at_ms}
    return Page("ha.html", _("Replication"), values, command="rmq broker ha-status")


async def store(ask: Ask) -> Page:
    """Show the store of one broker (from two requests), and the history of its disk."""
    state = state_of(ask)
    key = ask.params["b"]
    (found,) = await ask.admin.stores.of(state.row.addr)
    values = {"store": found, "forecasts": [await _forecast(ask, key, limit.ratio) for limit in found.limits]}
    return Page(
        "store.html", _("Store of {key}", key=key), values,
        {"charts": await history.charts(ask, [("disk", [key])]), "key": key},
        command=shell("rmq broker store -b", state.row.addr),
        crumbs=[(_("Brokers"), ask.link("brokers")), (state.row.broker_name, ask.link("brokers", key))],
    )  # fmt: skip


async def _forecast(ask: Ask, key: str, ratio: float) -> Forecast | None:
    """Return the earliest forecast of three: from the last hour, the last day and the last week."""
    now_ms = ask.console.clock.now_ms()
    found: list[Forecast] = []
    for window_ms in _WINDOWS_MS:
        __, points = await ask.env.history.read("disk", key, now_ms - window_ms, now_ms)
        known = [value for __, value in points if value is not None]
        if known and known[-1] - known[0] >= _GROWTH_MIN and (one := forecast(points, ratio, now_ms)) is not None:
            found.append(one)
    return min(found, key=lambda one: one.at_ms, default=None)
