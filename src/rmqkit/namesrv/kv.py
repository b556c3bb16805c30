"""The KV configuration (``KVConfigManager``): namespace → key → value, kept in ``kvConfig.json``.

The one table of a name server that outlives it, and the one way to tell brokers which topics are ordered: namespace
`ORDER_TOPIC_CONFIG`, key topic, value ``brokerA:4;brokerB:2``. Every change rewrites the file completely; it is
answered, and seen by others, only when it is on the disk. The file is Java's::

    {"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:4"}}}

Loop only; the disk is waited for in a thread. Source: behaviour.md §1.1, §1.7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from rmqkit.errors import StoreUnavailable
from rmqkit.store.json_files import JsonFile

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"


class _Stored(Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = field(default_factory=dict)


class KeyValues:
    """The namespaces and their file; its directory is made when first written."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)
        self._table: dict[str, dict[str, str]] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Read the file; a missing one is an empty table.
        Raises StoreMismatch: neither the file nor its backup holds a table.
        Raises StoreUnavailable: the disk refused to read one of them."""
        try:
            stored = self._file.load(_Stored)
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self._file.path}: errno {error.errno} {error.strerror}") from error
        self._table = stored.config_table if stored is not None else {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """All of a namespace; empty when everything in it was deleted, None when there never was anything."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises StoreUnavailable: the disk refused; nothing was changed."""
        async with self._writing:
            await self._replace(namespace, {**self._table.get(namespace, {}), key: value})

    async def delete(self, namespace: str, key: str) -> None:
        """Remove a value if it is there. Raises StoreUnavailable: the disk refused; nothing was changed."""
        async with self._writing:
            known = self._table.get(namespace)
            if known is not None:
                await self._replace(namespace, {name: value for name, value in known.items() if name != key})

    async def _replace(self, namespace: str, values: dict[str, str]) -> None:
        table = {**self._table, namespace: values}
        await asyncio.to_thread(self._file.save, _Stored(table))
        self._table = table
