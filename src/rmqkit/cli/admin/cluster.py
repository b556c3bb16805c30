"""``rmq admin cluster``: who is in a cluster, and how long a message takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.admin.api import Admin
from rmqkit.admin.clusters import BrokerRow
from rmqkit.cli.admin.frame import Cluster, Noun, View

if TYPE_CHECKING:
    from rmqkit.admin.brokers import TestSend

Amount = Annotated[int, typer.Option("-a", "--amount", min=1, help="Messages to each topic.")]
BodyBytes = Annotated[int, typer.Option("-s", "--size", min=1, help="Bytes of each message.")]
Pause = Annotated[float, typer.Option("-i", "--interval", min=0, help="Seconds between two messages.")]

noun = Noun("cluster", "Clusters: who is in them, and how busy they are.")


@noun.verb("list", watch=True)
async def list_brokers(
    admin: Admin,
    cluster: Cluster = None,
    more: Annotated[bool, typer.Option("-m", "--more", help="Messages of yesterday and today instead.")] = False,
) -> View:
    """All brokers: addresses, versions, messages per second, age of the oldest message, disk."""
    rows = await admin.clusters.brokers(cluster)
    return View(rows, [[_row(row, more=more) for row in rows]])


@noun.verb("rt")
async def round_trip(
    admin: Admin, cluster: Cluster = None, amount: Amount = 10, size: BodyBytes = 128, pause_s: Pause = 0.0
) -> View:
    """Send test messages to the topic that is named as the cluster, and take the time of each."""
    clusters = sorted((await admin.calls.cluster()).cluster_addr_table) if cluster is None else [cluster]
    if cluster is not None:
        await admin.calls.masters(cluster)
    return await round_trips(admin, clusters, amount, size, pause_s)


async def round_trips(admin: Admin, topics: Sequence[str], amount: int, size: int, pause_s: float) -> View:
    """Test messages to topics, to their queues in turn; rows and, for people, how they did in all."""
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
