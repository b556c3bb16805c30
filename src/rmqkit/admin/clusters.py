"""Clusters: who is in them and how busy they are, and round trips of test messages (``clusterList``, ``clusterRT``).

Source: behaviour.md §9.9, §9.10.
"""

from __future__ import annotations

from msgspec import Struct

from rmqkit.admin.calls import AdminCalls
from rmqkit.errors import RmqError, UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.schemas.topics import KVTable

__all__ = ["BrokerRow", "Clusters"]

_TODAY, _NOW, _YESTERDAY = "TodayMorning", "TodayNow", "YesterdayMorning"


class BrokerRow(Struct, rename="camel", kw_only=True):
    """One broker of a cluster, with figures of its runtime information; rates are messages per second of the last
    10 s. ``trouble`` says why there are no figures."""

    cluster_name: str
    broker_name: str
    broker_id: int
    addr: str
    version: str = ""
    in_tps: float = 0.0
    out_tps: float = 0.0
    send_wait_ms: int = 0
    pull_wait_ms: int = 0
    page_cache_lock_ms: int = 0
    earliest_hours: float = 0.0
    disk_ratio: float = 0.0
    active: bool = False
    in_today: int = 0
    out_today: int = 0
    in_yesterday: int = 0
    out_yesterday: int = 0
    trouble: str = ""


class Clusters:
    """Operations on clusters; each raises what `AdminCalls` raises."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def brokers(self, cluster: str | None = None) -> list[BrokerRow]:
        """All brokers, masters and slaves, of one cluster or of all. Raises UnknownName: there is no such cluster."""
        info = await self._calls.cluster()
        if cluster is not None and cluster not in info.cluster_addr_table:
            raise UnknownName("cluster", cluster, "the name server", info.cluster_addr_table)
        rows = [
            BrokerRow(cluster_name=name, broker_name=broker, broker_id=number, addr=address)
            for name in sorted(info.cluster_addr_table if cluster is None else [cluster])
            for broker in sorted(info.cluster_addr_table[name])
            for number, address in sorted(info.broker_addr_table[broker].broker_addrs.items())
        ]
        rows_at: dict[str, list[BrokerRow]] = {}
        for row in rows:
            rows_at.setdefault(row.addr, []).append(row)
        for address, figures in (await self._calls.fan_out(rows_at, self._figures)).items():
            for row in rows_at[address]:
                self._fill(row, figures)
        return rows

    async def _figures(self, address: str) -> dict[str, str] | RmqError:
        """Figures of a broker; one that does not answer must not hide the others."""
        try:
            return (await self._calls.fetch(KVTable, address, RequestCode.GET_BROKER_RUNTIME_INFO)).table
        except RmqError as error:
            return error

    def _fill(self, row: BrokerRow, figures: dict[str, str] | RmqError) -> None:
        if isinstance(figures, RmqError):
            row.trouble = str(figures)
            return
        number = Figures(figures)
        row.version = figures.get("brokerVersionDesc", "")
        row.in_tps, row.out_tps = number("putTps"), number("getTransferredTps")
        row.send_wait_ms = int(number("sendThreadPoolQueueHeadWaitTimeMills"))
        row.pull_wait_ms = int(number("pullThreadPoolQueueHeadWaitTimeMills"))
        row.page_cache_lock_ms = int(number("pageCacheLockTimeMills"))
        earliest_ms = number("earliestMessageTimeStamp")
        row.earliest_hours = (self._calls.clock.now_ms() - earliest_ms) / 3_600_000 if earliest_ms > 0 else 0.0
        row.disk_ratio = number("commitLogDiskRatio")
        row.active = figures.get("brokerActive") == "true"
        puts, gets = "msgPutTotal", "msgGetTotal"
        row.in_today = int(number(puts + _NOW) - number(puts + _TODAY))
        row.out_today = int(number(gets + _NOW) - number(gets + _TODAY))
        row.in_yesterday = int(number(puts + _TODAY) - number(puts + _YESTERDAY))
        row.out_yesterday = int(number(gets + _TODAY) - number(gets + _YESTERDAY))


class Figures:
    """Numbers in a broker's runtime information: the first of several, 0 when it has no such key."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table

    def __call__(self, key: str) -> float:
        try:
            return float(self._table.get(key, "").split()[0])
        except (IndexError, ValueError):
            return 0.0
