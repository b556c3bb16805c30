"""``rmq admin broker``: figures, settings, replication and cleaning of brokers."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import UNSET

from rmqkit.admin.api import Admin
from rmqkit.admin.brokers import GroupProgress
from rmqkit.admin.calls import Done
from rmqkit.admin.topics import permission_of
from rmqkit.cli.admin.cluster import BodyBytes, round_trips
from rmqkit.cli.admin.frame import Broker, BrokerName, Cluster, Key, Named, Noun, Value, View
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo

noun = Noun("broker", "Brokers: figures, settings, replication, cleaning.")


@noun.verb("status", watch=True)
async def status(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Every figure a broker has of itself."""
    return _by_address(await admin.brokers.status(broker, cluster))


@noun.verb("config-get")
async def config_get(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Every setting; of a cluster, masters and slaves."""
    return _by_address(await admin.brokers.config(broker, cluster))


@noun.verb("config-set")
async def config_set(
    admin: Admin,
    key: Key,
    value: Value,
    broker: Broker = None,
    cluster: Cluster = None,
    update_all: Annotated[bool, typer.Option("-a", "--all", help="At every broker of every cluster.")] = False,
) -> list[Done]:
    """Change a setting of brokers that run."""
    if not update_all:
        return await admin.brokers.update_config({key: value}, broker, cluster)
    names = sorted((await admin.calls.cluster()).cluster_addr_table)
    return [done for name in names for done in await admin.brokers.update_config({key: value}, None, name)]


@noun.verb("perm")
async def permission(
    admin: Admin,
    perm: Annotated[str, Named("-p", "--perm", help="2 or w (write), 4 or r (read), 6 or rw (both).")],
    broker: Broker = None,
    cluster: Cluster = None,
) -> list[Done]:
    """Let a broker be read, written, or both, for all of its topics (its setting brokerPermission)."""
    return await admin.brokers.update_config({"brokerPermission": str(permission_of(perm))}, broker, cluster)


@noun.verb("consume-stats", watch=True)
async def consume_stats(
    admin: Admin,
    broker: BrokerName,
    level: Annotated[int, typer.Option("-l", "--level", help="Only where a group is at least so far behind.")] = 0,
    order: Annotated[str, typer.Option("-o", "--order", hidden=True)] = "false",
) -> View:
    """How far every group is in every queue of a broker."""
    rows: list[GroupProgress] = await admin.brokers.consume_stats(
        broker, is_order=order.lower() == "true", diff_min=level
    )
    total = sum(row.diff for row in rows)
    return View({"rows": rows, "diffTotal": total}, [rows, f"behind in all: {total:,}"])


@noun.verb("send-test")
async def send_test(
    admin: Admin,
    broker: BrokerName,
    size: BodyBytes = 128,
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="Messages.")] = 50,
) -> View:
    """Send messages to the topic that is named as the broker, and take the time of each."""
    name = next(iter(await admin.calls.masters(broker=broker)))
    return await round_trips(admin, [name], count, size, 0.0)


@noun.verb("ha-status", watch=True)
async def ha_status(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """How far slaves of a broker, or of a cluster's masters, are behind."""
    found = await admin.brokers.ha_status(broker, cluster)
    return View(found, [part for address, told in found.items() for part in _replication(address, told)])


@noun.verb("clean-expired-cq")
async def clean_expired_cq(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[Done]:
    """Delete queue files whose messages expired."""
    return await admin.brokers.clean("expired-cq", broker, cluster)


@noun.verb("clean-unused-topic")
async def clean_unused_topic(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[Done]:
    """Delete queues of topics that are no more."""
    return await admin.brokers.clean("unused-topic", broker, cluster)


@noun.verb("delete-expired-commitlog")
async def delete_expired_commitlog(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[Done]:
    """Delete files of the log that expired."""
    return await admin.brokers.clean("expired-commitlog", broker, cluster)


def _by_address(tables: dict[str, dict[str, str]]) -> View:
    return View(tables, [part for address, table in tables.items() for part in (f"{address}:", table)])


def _replication(address: str, status: HaRuntimeInfo) -> list[object]:
    if not status.master:
        told = status.ha_client_runtime_info
        return [f"{address} is a slave of {told.master_addr or 'nobody yet'}; its log ends at {told.max_offset:,}"]
    slaves = status.ha_connection_info
    in_sync = f"{status.in_sync_slave_nums} of {len(slaves)} slaves in sync"
    line = f"{address} is a master; its log ends at {status.master_commit_log_max_offset:,}; {in_sync}"
    rows = [
        {
            "slave": slave.addr,
            "acknowledged": slave.slave_ack_offset,
            "lag": f"{slave.diff:,} B",
            "lag_ms": None if slave.lag_ms is UNSET else slave.lag_ms,
            "speed": f"{slave.transferred_byte_in_second:,} B/s",
            "in_sync": slave.in_sync,
        }
        for slave in slaves
    ]
    return [line, rows] if rows else [line]
