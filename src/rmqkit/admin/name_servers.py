"""Name servers: settings, key-values, and which brokers may be written to (``getNamesrvConfig``, ``wipeWritePerm`` …).

Changes go to every name server; each has its own tables.
Source: behaviour.md §1.7, §9.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct

from rmqkit.admin.calls import AdminCalls, Done
from rmqkit.errors import PeerRefused
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
from rmqkit.settings import properties_line

__all__ = ["ORDER_TOPIC_CONFIG", "NameServers"]

H = TypeVar("H", bound=Struct)

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""Namespace of the queues of ordered topics."""


class NameServers:
    """Operations on all name servers; each raises what `AdminCalls` raises."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def config(self) -> dict[str, dict[str, str]]:
        """The settings of each, by its address."""
        code, addresses = RequestCode.GET_NAMESRV_CONFIG, self._calls.name_servers
        return await self._calls.fan_out(addresses, lambda address: self._calls.fetch_properties(address, code))

    async def update_config(self, changes: Mapping[str, str]) -> list[Done]:
        """Change settings. Raises PeerRefused: one may not be changed (NO_PERMISSION)."""
        body = "\n".join(properties_line(key, value) for key, value in changes.items()).encode()
        told = ", ".join(f"{key}={value}" for key, value in changes.items())
        return await self.everywhere(RequestCode.UPDATE_NAMESRV_CONFIG, told, body=body)

    async def wipe_write_permission(self, broker: str) -> dict[str, int]:
        """Have no route name a broker for writing; by address, how many topics that concerned.
        Raises UnknownName: there is no such broker."""
        answers = await self._at_broker(broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER, WipeWritePermResponse)
        return {address: answer.wipe_topic_count for address, answer in answers.items()}

    async def add_write_permission(self, broker: str) -> dict[str, int]:
        """Take `wipe_write_permission` back; counts and errors as there."""
        answers = await self._at_broker(broker, RequestCode.ADD_WRITE_PERM_OF_BROKER, AddWritePermResponse)
        return {address: answer.add_topic_count for address, answer in answers.items()}

    async def _at_broker(self, broker: str, code: int, kind: type[H]) -> dict[str, H]:
        header = BrokerNameRequest(await self._calls.broker_name(broker))
        return await self._calls.fan_out(
            self._calls.name_servers, lambda address: self._calls.fetch_header(kind, address, code, header)
        )

    async def value(self, namespace: str, key: str) -> str | None:
        """A key's value, at the first name server that answers."""
        answer, address = await self._calls.call_name_server(RequestCode.GET_KV_CONFIG, KVKey(namespace, key))
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return decode_header(expect_success(answer, address), KVValue).value

    async def values(self, namespace: str) -> dict[str, str]:
        """All keys of a namespace; none when it does not exist."""
        code = RequestCode.GET_KVLIST_BY_NAMESPACE
        try:
            return (await self._calls.fetch_from_name_server(KVTable, code, KVNamespace(namespace))).table
        except PeerRefused as refusal:
            if refusal.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            return {}

    async def put_value(self, namespace: str, key: str, value: str) -> list[Done]:
        header = KVPut(value, namespace, key)
        return await self.everywhere(RequestCode.PUT_KV_CONFIG, f"{namespace} {key}={value}", header)

    async def delete_value(self, namespace: str, key: str) -> list[Done]:
        """Delete a key; nothing happens when it is not there."""
        header = KVKey(namespace, key)
        return await self.everywhere(RequestCode.DELETE_KV_CONFIG, f"{namespace} {key} deleted", header)

    async def everywhere(self, code: int, told: str, header: Struct | None = None, body: bytes = b"") -> list[Done]:
        """Ask every name server the same; ``told`` says what each has done."""
        for address in self._calls.name_servers:
            await self._calls.ask(address, code, header, body=body)
        return [Done(address, told) for address in self._calls.name_servers]
