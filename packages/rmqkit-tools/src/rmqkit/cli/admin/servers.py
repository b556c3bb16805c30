"""``rmq cluster``, ``rmq broker``, ``rmq namesrv``: lists, figures, settings, cleaning."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.cli.frame.nouns import Broker, BrokerName, Cluster, Key, Named, Noun, Value, View
from rmqkit.errors import ExitCode, UnknownName

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.calls import Done
    from rmqkit.admin.cluster.brokers import GroupProgress, TestSend
    from rmqkit.admin.cluster.clusters import BrokerRow
    from rmqkit.admin.cluster.stores import Store
    from rmqkit.admin.diagnosis.health import Finding
    from rmqkit.protocol.schemas.brokers import HaRuntimeInfo


Amount = Annotated[int, typer.Option("-a", "--amount", min=1, help="Number of messages per topic.")]
BodyBytes = Annotated[int, typer.Option("-s", "--size", min=1, help="Size of each message in bytes.")]
Pause = Annotated[float, typer.Option("-i", "--interval", min=0, help="Pause between messages, in seconds.")]

BROKER = Noun("broker", "Brokers: statistics, settings, replication, cleanup.")


@BROKER.verb("status", watch=True)
async def status(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Show all statistics of a broker."""
    return _by_address(await admin.brokers.status(broker, cluster))


@BROKER.verb("config-get")
async def config_get(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Show all settings of a broker, or of all masters and slaves of a cluster."""
    return _by_address(await admin.brokers.config(broker, cluster))


Only = Annotated[
    str, typer.Option("--only", help="changed: not rmqkit's default; differs: not the same on all servers.")
]


@BROKER.verb("settings")
async def settings(admin: Admin, broker: Broker = None, cluster: Cluster = None, only: Only = "") -> View:
    """Show each setting of brokers with its meaning, its default, its bounds, and whether it may change while the
    broker runs. Secrets are hidden."""
    return described_view(await admin.brokers.config(broker, cluster), only)


def described_view(servers: Mapping[str, Mapping[str, str]], only: str) -> View:
    """Return the view of settings by server, with their meaning."""
    from rmqkit.admin.cluster.settings import compared, described

    if only not in ("", "changed", "differs"):
        raise typer.BadParameter(f"--only {only} must be changed or differs")
    unlike = {one.key for one in compared(servers) if one.differs}
    found = {
        address: [
            row
            for row in described(texts)
            if (only != "changed" or (row.is_known and not row.is_default)) and (only != "differs" or row.key in unlike)
        ]
        for address, texts in servers.items()
    }
    parts: list[object] = []
    for address, rows in found.items():
        shown = [
            {
                "key": row.key,
                "value": row.value,
                "default": row.default,
                "may_be": row.bounds,
                "hot": "hot" if row.hot else "",
                "what_it_does": row.help,
            }
            for row in rows
        ]
        parts += [f"{address}:", shown or "no such setting"]
    return View(found, parts)


@BROKER.verb("config-set")
async def config_set(
    admin: Admin,
    key: Key,
    value: Value,
    broker: Broker = None,
    cluster: Cluster = None,
    update_all: Annotated[
        bool, typer.Option("-a", "--all", help="Change it on every broker of every cluster.")
    ] = False,
) -> list[Done]:
    """Change a setting on running brokers."""
    if not update_all:
        return await admin.brokers.update_config({key: value}, broker, cluster)
    names = sorted((await admin.calls.cluster()).cluster_addr_table)
    return [done for name in names for done in await admin.brokers.update_config({key: value}, None, name)]


@BROKER.verb("perm")
async def permission(
    admin: Admin,
    perm: Annotated[str, Named("-p", "--perm", help="Permission: r (4), w (2) or rw (6).")],
    broker: Broker = None,
    cluster: Cluster = None,
) -> list[Done]:
    """Set whether a broker can be read, written, or both, for all its topics (setting brokerPermission)."""
    from rmqkit.admin.cluster.topics import permission_of

    return await admin.brokers.update_config({"brokerPermission": str(permission_of(perm))}, broker, cluster)


@BROKER.verb("consume-stats", watch=True)
async def consume_stats(
    admin: Admin,
    broker: BrokerName,
    level: Annotated[int, typer.Option("-l", "--level", help="Show only queues with at least this lag.")] = 0,
    order: Annotated[str, typer.Option("-o", "--order", hidden=True)] = "false",
) -> View:
    """Show the progress of every group on every queue of a broker."""
    rows: list[GroupProgress] = await admin.brokers.consume_stats(
        broker, is_order=order.lower() == "true", diff_min=level
    )
    total = sum(row.diff for row in rows)
    return View({"rows": rows, "diffTotal": total}, [rows, f"total lag: {total:,}"])


@BROKER.verb("send-test")
async def send_test(
    admin: Admin,
    broker: BrokerName,
    size: BodyBytes = 128,
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="Number of messages.")] = 50,
) -> View:
    """Send test messages to the topic named after the broker, and measure the round-trip time of each."""
    name = next(iter(await admin.calls.masters(broker=broker)))
    return await round_trips(admin, [name], count, size, 0.0)


@BROKER.verb("ha-status", watch=True)
async def ha_status(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Show how far the slaves of a broker, or of all masters of a cluster, are behind."""
    found = await admin.brokers.ha_status(broker, cluster)
    return View(found, [part for address, status in found.items() for part in _replication(address, status)])


@BROKER.verb("store")
async def store(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> View:
    """Show the files of the log, which of them retention deletes next, and when the disk will be full.

    The estimate uses the rate of the last ten minutes. The console shows a longer trend on its page of the store."""
    found = await admin.stores.of(broker, cluster)
    return View(found, [part for one in found for part in _store(one)])


def _store(one: Store) -> list[object]:
    from rmqkit.cli.frame.printing import time_text

    if one.trouble:
        return [f"{one.broker}: {one.trouble}"]
    facts = {
        "segments": one.segment_count,
        "log": None if one.max_offset is None else f"byte {one.min_offset:,} to {one.max_offset:,}",
        "oldest message": one.oldest_ms and time_text(one.oldest_ms),
        "oldest file expires": one.expires_ms and f"not before {time_text(one.expires_ms)}, at hour {one.delete_when}",
        "disk used": None if one.disk_ratio is None else f"{one.disk_ratio:.0%}",
        "stored": None if one.put_bytes is None else f"{one.put_bytes:,.0f} bytes/s over 10 min",
        "full": one.full and f"{one.full.ratio:.0%} at {time_text(one.full.at_ms)}, if nothing is deleted",
    }
    limits = [{"above": f"{limit.ratio:.0%}", "then": limit.then, "setting": limit.setting} for limit in one.limits]
    known = {name: "unknown" if value is None else value for name, value in facts.items()}
    if one.full is None:
        known["full"] = "not at this rate"
    return [f"{one.broker} ({one.address})", known, limits]


@BROKER.verb("clean-expired-cq")
async def clean_expired_cq(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[Done]:
    """Delete consume queue files whose messages have expired."""
    return await admin.brokers.clean("expired-cq", broker, cluster)


@BROKER.verb("clean-unused-topic")
async def clean_unused_topic(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[Done]:
    """Delete the consume queues of deleted topics."""
    return await admin.brokers.clean("unused-topic", broker, cluster)


@BROKER.verb("delete-expired-commitlog")
async def delete_expired_commitlog(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[Done]:
    """Delete expired files of the commit log."""
    return await admin.brokers.clean("expired-commitlog", broker, cluster)


def _by_address(tables: dict[str, dict[str, str]]) -> View:
    return View(tables, [part for address, table in tables.items() for part in (f"{address}:", table)])


def _replication(address: str, status: HaRuntimeInfo) -> list[object]:
    if not status.master:
        info = status.ha_client_runtime_info
        return [
            f"{address} is a slave of {info.master_addr or 'an unknown master'}; its log ends at {info.max_offset:,}"
        ]
    from msgspec import UNSET

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


CLUSTER = Noun("cluster", "Clusters: their brokers and load.")


@CLUSTER.verb("list", watch=True)
async def list_brokers(
    admin: Admin,
    cluster: Cluster = None,
    more: Annotated[
        bool, typer.Option("-m", "--more", help="Show the message counts of yesterday and today instead.")
    ] = False,
) -> View:
    """List all brokers: address, version, messages per second, age of the oldest message, disk usage."""
    rows = await admin.clusters.brokers(cluster)
    return View(rows, [[_row(row, more=more) for row in rows]])


@CLUSTER.verb("findings", watch=True)
async def findings(
    admin: Admin,
    cluster: Cluster = None,
    apart_s: Annotated[
        float, typer.Option("--apart", min=1, metavar="SECONDS", help="Time between the two looks (default 10).")
    ] = 10.0,
) -> View:
    """Show what is wrong with a cluster, the worst first.

    The command reads the state of the cluster twice, because a single look does not show whether a lag grows. Consumers
    commit their offsets every 5 seconds. If the two looks are less than 6 seconds apart, the command can report a group
    as slow although this group keeps up.

    Checked: name servers, brokers, disks, clocks, slaves, half messages, lags,
    popped messages, dead letters, versions, client ids.

    The exit code is 0 if nothing is wrong, and 8 if there are findings (notes do
    not count) or if a request was not answered."""
    from rmqkit.admin.diagnosis.health import Severity
    from rmqkit.admin.diagnosis.health import findings as found_in
    from rmqkit.admin.diagnosis.survey import survey, well_text

    if sys.stderr.isatty():
        print(f"rmq: looking twice, {apart_s:g} s apart", file=sys.stderr, flush=True)
    snapshot = await survey(admin, cluster, apart_s)
    found: list[Finding] = found_in(snapshot)
    rows = [{"severity": one.severity, "what_is_wrong": one.text, "remedy": one.remedy} for one in found]
    unasked = [f"not known: {what}: {text}" for what, text in snapshot.troubles.items()]
    is_wrong = bool(unasked) or any(one.severity is not Severity.NOTE for one in found)
    return View(
        {"findings": found, "notKnown": snapshot.troubles},
        [rows or well_text(snapshot), *unasked],
        ExitCode.FINDINGS if is_wrong else ExitCode.DONE,
    )


@CLUSTER.verb("clients", watch=True)
async def clients(admin: Admin, cluster: Cluster = None) -> View:
    """List every connected client: language, version, address, and the groups it produces and consumes for."""
    from rmqkit.admin.diagnosis.survey import everybody
    from rmqkit.protocol.codes import version_name

    found = await everybody(admin, cluster)
    rows = [
        {
            "client": one.client_id,
            "language": one.language,
            "version": version_name(one.version),
            "address": " ".join(one.addresses),
            "produces": " ".join(one.produces),
            "consumes": " ".join(one.consumes),
            "trouble": "id twice" if one.is_doubled else "",
        }
        for one in found
    ]
    return View(found, [rows or "no client is connected; producers show after their first send"])


@CLUSTER.verb("rt")
async def round_trip(
    admin: Admin, cluster: Cluster = None, amount: Amount = 10, size: BodyBytes = 128, pause_s: Pause = 0.0
) -> View:
    """Send test messages to the topic named after the cluster, and measure the round-trip time of each."""
    clusters = sorted((await admin.calls.cluster()).cluster_addr_table) if cluster is None else [cluster]
    if cluster is not None:
        await admin.calls.masters(cluster)
    return await round_trips(admin, clusters, amount, size, pause_s)


async def round_trips(admin: Admin, topics: Sequence[str], amount: int, size: int, pause_s: float) -> View:
    """Send test messages to one queue after the other of some topics. Return rows and, for display, a summary."""
    import asyncio

    from rmqkit.client.runtime.routes import PublishQueues, publish_queues

    sends: list[TestSend] = []
    for topic in topics:
        queues = PublishQueues(publish_queues(topic, await admin.calls.route(topic)))
        for number in range(amount):
            queue = queues.pick()
            sends.append(
                await admin.brokers.send_test(queue.broker_name, topic, queue_id=queue.queue_id, body_bytes=size)
            )
            if pause_s and number + 1 < amount:
                await asyncio.sleep(pause_s)
    stored = [sent.rt_ms for sent in sends if sent.result == "SEND_OK"]
    mean_ms = round(sum(stored) / len(stored), 3) if stored else None
    value = {"sends": sends, "stored": len(stored), "failed": len(sends) - len(stored), "meanMs": mean_ms}
    mean = "" if mean_ms is None else f", {mean_ms} ms on average"
    return View(value, [sends, f"{len(stored)} of {len(sends)} stored{mean}"])


def _row(row: BrokerRow, *, more: bool) -> dict[str, object]:
    shown: dict[str, object] = {
        "cluster": row.cluster_name,
        "broker": row.broker_name,
        "id": row.broker_id,
        "address": row.addr,
    }
    if more:
        shown |= {"in_yesterday": row.in_yesterday, "out_yesterday": row.out_yesterday}
        return shown | {"in_today": row.in_today, "out_today": row.out_today, "trouble": row.trouble}
    return shown | {
        "version": row.version,
        "in_tps": f"{row.in_tps:.2f} ({row.send_wait_ms} ms)",
        "out_tps": f"{row.out_tps:.2f} ({row.pull_wait_ms} ms)",
        "hours": f"{row.earliest_hours:.2f}",
        "space": f"{row.disk_ratio:.4f}",
        "active": row.active,
        "trouble": row.trouble,
    }


NAMESRV = Noun("namesrv", "Name servers: settings, key-value pairs, write permission of brokers.")

Namespace = Annotated[str, Named("-s", "--namespace", help="Namespace of the key, such as ORDER_TOPIC_CONFIG.")]


@NAMESRV.verb("config-get")
async def name_server_settings(admin: Admin) -> View:
    """Show all settings of every name server."""
    found = await admin.name_servers.config()
    return View(found, [part for address, table in found.items() for part in (f"{address}:", table)])


@NAMESRV.verb("settings")
async def name_server_settings_described(admin: Admin, only: Only = "") -> View:
    """Show each setting of the name servers with its meaning, its default and its bounds."""
    return described_view(await admin.name_servers.config(), only)


@NAMESRV.verb("config-set")
async def set_name_servers(admin: Admin, key: Key, value: Value) -> list[Done]:
    """Change a setting on all name servers."""
    return await admin.name_servers.update_config({key: value})


@NAMESRV.verb("wipe-write")
async def wipe_write(admin: Admin, broker: BrokerName) -> list[Done]:
    """Stop all writes to a broker: name servers remove it from the routes of producers."""
    from rmqkit.admin.calls import Done

    counts = await admin.name_servers.wipe_write_permission(broker)
    return [Done(address, f"writes to broker {broker} are stopped: {n} topics") for address, n in counts.items()]


@NAMESRV.verb("add-write")
async def add_write(admin: Admin, broker: BrokerName) -> list[Done]:
    """Allow writes to a broker again."""
    from rmqkit.admin.calls import Done

    counts = await admin.name_servers.add_write_permission(broker)
    return [Done(address, f"writes to broker {broker} are allowed again: {n} topics") for address, n in counts.items()]


@NAMESRV.verb("kv-get")
async def kv_get(admin: Admin, namespace: Namespace, key: Key = "") -> dict[str, str]:
    """Show one value, or all values of a namespace."""
    values = await admin.name_servers.values(namespace)
    if key and key not in values:
        raise UnknownName("key", key, f"namespace {namespace}", values)
    return {key: values[key]} if key else values


@NAMESRV.verb("kv-put")
async def kv_put(admin: Admin, namespace: Namespace, key: Key, value: Value) -> list[Done]:
    """Set a value."""
    return await admin.name_servers.put_value(namespace, key, value)


@NAMESRV.verb("kv-delete")
async def kv_delete(admin: Admin, namespace: Namespace, key: Key) -> list[Done]:
    """Delete a value."""
    return await admin.name_servers.delete_value(namespace, key)
