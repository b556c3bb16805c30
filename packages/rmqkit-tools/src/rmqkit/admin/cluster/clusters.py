"""Clusters and their name servers (``clusterList``, ``clusterRT``, ``getNamesrvConfig``, ``wipeWritePerm`` …).

`Clusters` lists brokers and their load. `NameServers` reads and changes settings, key-values and the write permission
of brokers. A change is sent to every name server, because each name server has its own tables.
Source: behaviour.md §1.7, §9.9, §9.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct

from rmqkit.admin.calls import AdminCalls, Done
from rmqkit.errors import PeerRefused, RmqError, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.schemas.topics import (
    AddWritePermResponse,
    BrokerNameRequest,
    KVKey,
    KVNamespace,
    KVPut,
    KVTable,
    KVValue,
    WipeWritePermResponse,
)
from rmqkit.remoting.client import expect_success
from rmqkit.sentences import _
from rmqkit.settings import properties_line

_TODAY, _NOW, _YESTERDAY = "TodayMorning", "TodayNow", "YesterdayMorning"

__all__ = ["ORDER_TOPIC_CONFIG", "BrokerRow", "Clusters", "NameServers"]


class BrokerRow(Struct, rename="camel", kw_only=True):
    """One broker of a cluster, with figures from its runtime information. Rates are messages per second over the last
    10 s. ``trouble`` is the reason why the figures are missing, or empty."""

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
    """Operations on clusters. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def listed(self, cluster: str | None = None) -> list[BrokerRow]:
        """Return all masters and slaves of one cluster, or of all clusters, without figures.
        Raises UnknownName: there is no such cluster."""
        info = await self._calls.cluster()
        if cluster is not None and cluster not in info.cluster_addr_table:
            raise UnknownName("cluster", cluster, _("the name server"), info.cluster_addr_table)
        return [
            BrokerRow(cluster_name=name, broker_name=broker, broker_id=number, addr=address)
            for name in sorted(info.cluster_addr_table if cluster is None else [cluster])
            for broker in sorted(info.cluster_addr_table[name])
            for number, address in sorted(info.broker_addr_table[broker].broker_addrs.items())
        ]

    async def brokers(self, cluster: str | None = None) -> list[BrokerRow]:
        """Return the rows of `listed` with the figures of each broker. Raises UnknownName: there is no such cluster."""
        rows = await self.listed(cluster)
        rows_at: dict[str, list[BrokerRow]] = {}
        for row in rows:
            rows_at.setdefault(row.addr, []).append(row)
        for address, figures in (await self._calls.fan_out(rows_at, self._figures)).items():
            for row in rows_at[address]:
                self.fill(row, figures)
        return rows

    async def _figures(self, address: str) -> dict[str, str] | RmqError:
        """Return the figures of a broker, or the error. The error of one broker must not hide the other brokers."""
        try:
            return await self._calls.runtime_info(address)
        except RmqError as error:
            return error

    def fill(self, row: BrokerRow, figures: dict[str, str] | RmqError) -> None:
        """Store the figures of a broker in its row, or the error as the reason why the figures are missing."""
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
    """The numbers in the runtime information of a broker. A call returns the first number of a value, or 0."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table

    def __call__(self, key: str) -> float:
        try:
            return float(self._table.get(key, "").split()[0])
        except (IndexError, ValueError):
            return 0.0


H = TypeVar("H", bound=Struct)

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""The namespace in which name servers store the queues of ordered topics."""


class NameServers:
    """Operations on all name servers. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def config(self) -> dict[str, dict[str, str]]:
        """Return the settings of each name server, by address."""
        code, addresses = RequestCode.GET_NAMESRV_CONFIG, self._calls.name_servers
        return await self._calls.fan_out(addresses, lambda address: self._calls.fetch_properties(address, code))

    async def update_config(self, changes: Mapping[str, str]) -> list[Done]:
        """Change settings. Raises PeerRefused: a setting must not be changed (NO_PERMISSION)."""
        body = "\n".join(properties_line(key, value) for key, value in changes.items()).encode()
        text = ", ".join(f"{key}={value}" for key, value in changes.items())
        return await self.everywhere(RequestCode.UPDATE_NAMESRV_CONFIG, text, body=body)

    async def wipe_write_permission(self, broker: str) -> dict[str, int]:
        """Remove the write permission of a broker from all routes. Return the number of changed topics by address.
        Raises UnknownName: there is no such broker."""
        answers = await self._at_broker(broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER, WipeWritePermResponse)
        return {address: answer.wipe_topic_count for address, answer in answers.items()}

    async def add_write_permission(self, broker: str) -> dict[str, int]:
        """Undo `wipe_write_permission`. The result and the errors are the same."""
        answers = await self._at_broker(broker, RequestCode.ADD_WRITE_PERM_OF_BROKER, AddWritePermResponse)
        return {address: answer.add_topic_count for address, answer in answers.items()}

    async def _at_broker(self, broker: str, code: int, kind: type[H]) -> dict[str, H]:
        header = BrokerNameRequest(await self._calls.broker_name(broker))
        return await self._calls.fan_out(
            self._calls.name_servers, lambda address: self._calls.fetch_header(kind, address, code, header)
        )

    async def value(self, namespace: str, key: str) -> str | None:
        """Return the value of a key from the first name server that answers; None if the key does not exist."""
        answer, address = await self._calls.any_name_server.call(RequestCode.GET_KV_CONFIG, KVKey(namespace, key))
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return decode_header(expect_success(answer, address), KVValue).value

    async def values(self, namespace: str) -> dict[str, str]:
        """Return all keys and values of a namespace. The result is empty if the namespace does not exist."""
        code = RequestCode.GET_KVLIST_BY_NAMESPACE
        try:
            return (await self._calls.any_name_server.fetch(KVTable, code, KVNamespace(namespace))).table
        except PeerRefused as refusal:
            if refusal.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            return {}

    async def put_value(self, namespace: str, key: str, value: str) -> list[Done]:
        header = KVPut(value, namespace, key)
        return await self.everywhere(RequestCode.PUT_KV_CONFIG, f"{namespace} {key}={value}", header)

    async def delete_value(self, namespace: str, key: str) -> list[Done]:
        """Delete a key, if it exists."""
        header = KVKey(namespace, key)
        return await self.everywhere(
            RequestCode.DELETE_KV_CONFIG, _("{namespace} {key} deleted", namespace=namespace, key=key), header
        )

    async def everywhere(self, code: int, text: str, header: Struct | None = None, body: bytes = b"") -> list[Done]:
        """Send the same request to every name server. Return ``text`` with the address of each name server."""
        for address in self._calls.name_servers:
            await self._calls.ask(address, code, header, body=body)
        return [Done(address, text) for address in self._calls.name_servers]
