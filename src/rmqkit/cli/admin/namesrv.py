"""``rmq admin namesrv``: settings and key-values of name servers, and which brokers may be written to."""

from __future__ import annotations

from typing import Annotated

from rmqkit.admin.api import Admin
from rmqkit.admin.calls import Done
from rmqkit.cli.admin.frame import BrokerName, Key, Named, Noun, Value, View
from rmqkit.errors import UnknownName

noun = Noun("namesrv", "Name servers: settings, key-values, write permission of brokers.")

Namespace = Annotated[str, Named("-s", "--namespace", help="Namespace of the key, as ORDER_TOPIC_CONFIG.")]


@noun.verb("config-get")
async def config_get(admin: Admin) -> View:
    """Every setting of every name server."""
    found = await admin.name_servers.config()
    return View(found, [part for address, table in found.items() for part in (f"{address}:", table)])


@noun.verb("config-set")
async def config_set(admin: Admin, key: Key, value: Value) -> list[Done]:
    """Change a setting of all name servers."""
    return await admin.name_servers.update_config({key: value})


@noun.verb("wipe-write")
async def wipe_write(admin: Admin, broker: BrokerName) -> list[Done]:
    """Have no route name a broker for writing."""
    counts = await admin.name_servers.wipe_write_permission(broker)
    return [Done(address, f"broker {broker} is not written to: {n} topics") for address, n in counts.items()]


@noun.verb("add-write")
async def add_write(admin: Admin, broker: BrokerName) -> list[Done]:
    """Have routes name a broker for writing again."""
    counts = await admin.name_servers.add_write_permission(broker)
    return [Done(address, f"broker {broker} is written to again: {n} topics") for address, n in counts.items()]


@noun.verb("kv-get")
async def kv_get(admin: Admin, namespace: Namespace, key: Key = "") -> dict[str, str]:
    """A value, or all of a namespace."""
    values = await admin.name_servers.values(namespace)
    if key and key not in values:
        raise UnknownName("key", key, f"namespace {namespace}", values)
    return {key: values[key]} if key else values


@noun.verb("kv-put")
async def kv_put(admin: Admin, namespace: Namespace, key: Key, value: Value) -> list[Done]:
    """Put a value."""
    return await admin.name_servers.put_value(namespace, key, value)


@noun.verb("kv-delete")
async def kv_delete(admin: Admin, namespace: Namespace, key: Key) -> list[Done]:
    """Delete a value."""
    return await admin.name_servers.delete_value(namespace, key)
