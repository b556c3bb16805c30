"""The first page of a cluster: faults, then brokers, rates, the largest lags, dead letters and disks."""

from __future__ import annotations

from rmqkit.admin.diagnosis.health import Snapshot, findings
from rmqkit.console.request.request import Ask, Page
from rmqkit.console.views import alerts, history
from rmqkit.sentences import _

_SHOWN = 10


async def overview(ask: Ask) -> Page:
    """Show the overview of a cluster."""
    snapshot = ask.snapshot
    worst = sorted((one for one in snapshot.groups.values() if one.lag), key=lambda one: -(one.lag or 0))
    ask.env.watcher.look(groups=[one.name for one in worst[:_SHOWN]])
    dead = [one for one in snapshot.groups.values() if one.dead]
    values = {
        "findings": findings(snapshot),
        "compared": snapshot.compared_ms is not None,
        "totals": totals(snapshot),
        "brokers": [one.row for one in snapshot.brokers],
        "troubles": {one.row.addr: one.trouble for one in snapshot.brokers if one.trouble},
        "worst": worst[:_SHOWN],
        "dead": sorted(dead, key=lambda one: -(one.dead or 0))[:_SHOWN],
        "atMs": snapshot.at_ms,
        "trouble": ask.env.watcher.trouble,
        "unasked": snapshot.troubles,
    }
    masters = sorted(one.row.broker_name for one in snapshot.brokers if one.is_master)
    firing = [one for one in ask.env.alerts.alerts.values() if one.state == "firing"]
    values["alerts"] = sorted(firing, key=lambda one: one.fired_ms)
    more = {
        "charts": await history.charts(ask, [("in", masters), ("out", masters)]),
        "tabs": history.tabs(ask),
        "rules": ask.env.alerts.rules,
        "limit": alerts.limit,
    }
    return Page("overview.html", _("Overview"), values, more, command="rmq cluster findings")


def totals(snapshot: Snapshot) -> dict[str, float | None]:
    """Return the totals of the cluster. A total is None if a broker has not reported the figure."""
    masters = [one for one in snapshot.brokers if one.is_master]
    is_whole = bool(masters) and not any(one.trouble for one in masters)
    lags = [one.lag for one in snapshot.groups.values() if one.lag is not None]
    dead = [one.dead for one in snapshot.groups.values()]
    return {
        "brokers": len(snapshot.brokers),
        "masters": len(masters),
        "silent": sum(bool(one.trouble) for one in snapshot.brokers),
        "topics": sum(one.kind == "normal" for one in snapshot.topics.values()),
        "groups": len(snapshot.groups),
        "inTps": sum(one.row.in_tps for one in masters) if is_whole else None,
        "outTps": sum(one.row.out_tps for one in masters) if is_whole else None,
        "lag": sum(lags) if lags or not snapshot.groups else None,
        "dead": None if None in dead else sum(one or 0 for one in dead),
        "deadGrew": sum(one.dead_grew or 0 for one in snapshot.groups.values()),
        "clients": len(snapshot.clients),
    }
