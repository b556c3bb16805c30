"""``rmq consumer``, ``rmq producer``: connected clients, and the check of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from rmqkit.cli.frame.nouns import Broker, Cluster, Group, Named, Noun, View

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.cluster.clients import GroupStatus, ProducerRow
    from rmqkit.protocol.schemas.clients import ClientConnection, ConsumerConnection, ConsumerRunningInfo, MessageQueue


CONSUMER = Noun("consumer", "Connected consumers: list them, show their state, check a group for problems.")


class _ConnectionRow(Struct):
    client: str
    address: str
    language: str
    version: str


class _SubscriptionRow(Struct):
    topic: str
    type: str
    expression: str


class _QueueRow(Struct):
    topic: str
    broker: str
    queue: int
    commit_offset: int | None
    held: int
    locked: bool
    dropped: bool
    pull_timestamp: int
    consume_timestamp: int | None


class _RateRow(Struct):
    topic: str
    pull_rt: float
    pull_tps: float
    consume_rt: float
    ok_tps: float
    failed_tps: float
    failed_last_hour: int


@CONSUMER.verb("connections", watch=True)
async def connections(admin: Admin, group: Group, broker: Broker = None) -> View:
    """List the connected clients of a group and their subscriptions."""
    found = await admin.clients.consumers(group, broker)
    return View(found, _connection_parts(found))


@CONSUMER.verb("status", watch=True)
async def status(
    admin: Admin,
    group: Group,
    client_id: Annotated[
        str | None, typer.Option("-i", "--client-id", help="Show only this client.", show_default=False)
    ] = None,
    stacks: Annotated[bool, typer.Option("-s", "--jstack", help="Show the stacks of its threads, too.")] = False,
) -> View:
    """Show the state of each client of a group, and check the group for problems.

    A healthy group has the same subscriptions on all clients, one client for
    every queue, and no stuck client."""
    found = await admin.clients.status(group, client_id, stacks=stacks)
    parts = _connection_parts(found.connection)
    for client, info in found.clients.items():
        parts += [f"\n{client}" + ("" if info else " does not answer"), *(_running_parts(info) if info else ())]
    return View(_plain(found), [*parts, "", _verdict(found)])


def connection_rows(connections: list[ClientConnection]) -> list[_ConnectionRow]:
    from rmqkit.protocol.codes import version_name

    return [
        _ConnectionRow(one.client_id, one.client_addr, one.language, version_name(one.version)) for one in connections
    ]


def _connection_parts(found: ConsumerConnection) -> list[Any]:
    subscriptions = [
        _SubscriptionRow(topic, one.expression_type or "TAG", one.sub_string)
        for topic, one in sorted(found.subscription_table.items())
    ]
    how = f"{found.consume_type}, {found.message_model}, {found.consume_from_where}"
    return [connection_rows(found.connection_set), subscriptions, how]


def _place(queue: MessageQueue) -> tuple[str, str, int]:
    return queue.topic, queue.broker_name, queue.queue_id


def _running_parts(info: ConsumerRunningInfo) -> list[Any]:
    held = [
        _QueueRow(
            *_place(queue),
            one.commit_offset,
            one.cached_msg_count,
            one.locked,
            one.droped,
            one.last_pull_timestamp,
            one.last_consume_timestamp,
        )
        for queue, one in sorted(info.mq_table.items())
    ]
    popped = [
        _QueueRow(*_place(queue), None, one.wait_ack_count, False, one.droped, one.last_pop_timestamp, None)
        for queue, one in sorted(info.mq_pop_table.items())
    ]
    rates = [
        _RateRow(
            topic,
            one.pull_rt,
            one.pull_tps,
            one.consume_rt,
            one.consume_ok_tps,
            one.consume_failed_tps,
            one.consume_failed_msgs,
        )
        for topic, one in sorted(info.status_table.items())
    ]
    return [dict(sorted(info.properties.items())), held + popped, rates, info.jstack or []]


def _plain(found: GroupStatus) -> dict[str, Any]:
    """Return the status for JSON. Queues are keys in the protocol, and rows here."""
    return {
        "group": found.group,
        "connection": found.connection,
        "clients": {client: info and _plain_info(info) for client, info in found.clients.items()},
        "verdict": found.verdict,
    }


def _plain_info(info: ConsumerRunningInfo) -> dict[str, Any]:
    return {
        "properties": info.properties,
        "subscriptionSet": info.subscription_set,
        "mqTable": [{"queue": queue, "held": held} for queue, held in sorted(info.mq_table.items())],
        "mqPopTable": [{"queue": queue, "held": held} for queue, held in sorted(info.mq_pop_table.items())],
        "statusTable": info.status_table,
        "userConsumerInfo": info.user_consumer_info,
        "jstack": info.jstack,
    }


def _verdict(found: GroupStatus) -> list[str]:
    same = "the same subscriptions" if found.verdict.same_subscription else "DIFFERENT SUBSCRIPTIONS"
    if not found.verdict.troubles:
        # The verdict is only about clients: their running infos do not show if the group keeps up with its topics.
        return [
            f"clients in order: {same}, no stuck client; to see whether the group keeps up, run: rmq cluster findings"
        ]
    return [f"NOT in order ({same}):", *(f"- {trouble}" for trouble in found.verdict.troubles)]


PRODUCER = Noun("producer", "Connected producers.")

ProducerGroup = Annotated[str, Named("-g", "--group", help="Producer group name.")]


@PRODUCER.verb("list", watch=True)
async def list_producers(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> list[ProducerRow]:
    """List all connected producers with their groups."""
    return await admin.clients.all_producers(broker, cluster)


@PRODUCER.verb("connections", watch=True)
async def producer_connections(
    admin: Admin,
    group: ProducerGroup,
    topic: Annotated[
        str, typer.Option("-t", "--topic", help="Ask only the brokers of this topic.", show_default=False)
    ] = "",
) -> View:
    """List the connected clients of a producer group."""
    found = await admin.clients.producers(group, topic)
    return View(found, [connection_rows(found)])
