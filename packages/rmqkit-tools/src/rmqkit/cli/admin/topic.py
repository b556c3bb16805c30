"""``rmq topic``: the routes, settings and contents of topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.cli.admin.servers import Amount, BodyBytes, Pause, round_trips
from rmqkit.cli.frame.nouns import Broker, Cluster, Named, Noun, Topic, View, Yes, confirm

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.calls import Done
    from rmqkit.admin.cluster.topics import Assigned, TopicStats


TOPIC = Noun("topic", "Topics: list, create, configure and inspect them.")

Permission = Annotated[str, Named("-p", "--perm", help="Permission: r (4), w (2) or rw (6).")]


@TOPIC.verb("list", watch=True)
async def names(
    admin: Admin,
    uses: Annotated[
        bool, typer.Option("-c", "--uses", help="Show the clusters and consumer groups of each topic, too.")
    ] = False,
    system: Annotated[bool, typer.Option("--system", help="List system, retry and dead-letter topics, too.")] = False,
) -> object:
    """List the topics of applications."""
    if system:
        return await admin.topics.uses() if uses else await admin.topics.names()
    own = await admin.calls.own_topic_names()
    return [use for use in await admin.topics.uses() if use.topic in own] if uses else own


@TOPIC.verb("route")
async def route(
    admin: Admin,
    topic: Topic,
    listed: Annotated[bool, typer.Option("-l", "--list", hidden=True, help="Accepted for compatibility.")] = False,
) -> View:
    """Show which brokers have a topic, and its queues on each."""
    found = await admin.topics.route(topic)
    addresses = {
        broker.broker_name: " ".join(f"{number}:{address}" for number, address in sorted(broker.broker_addrs.items()))
        for broker in found.broker_datas
    }
    queues = sorted(found.queue_datas, key=lambda data: data.broker_name)
    rows = [
        {
            "broker": data.broker_name,
            "read_queues": data.read_queue_nums,
            "write_queues": data.write_queue_nums,
            "perm": data.perm,
            "addresses": addresses.get(data.broker_name, ""),
        }
        for data in queues
    ]
    order = [f"order: {found.order_topic_conf}"] if isinstance(found.order_topic_conf, str) else []
    return View(found, [rows, *order])


@TOPIC.verb("status", watch=True)
async def status(admin: Admin, topic: Topic, cluster: Cluster = None) -> View:
    """Show the offsets of each queue, and when the queue last changed."""
    found = await admin.topics.status(topic, cluster)
    return View(found, [found.queues, f"put: {found.put_tps:.2f} messages/s"])


@TOPIC.verb("clusters")
async def clusters(admin: Admin, topic: Topic) -> list[str]:
    """List the clusters that have a topic."""
    return await admin.topics.clusters(topic)


@TOPIC.verb("config")
async def config(admin: Admin, topic: Topic, broker: Broker = None) -> View:
    """Show the settings of a topic on each broker."""
    found = await admin.topics.config(topic, broker)
    return View(found, [part for name, one in found.items() for part in (f"{name}:", one)])


@TOPIC.verb("create")
async def create(
    admin: Admin,
    topic: Topic,
    broker: Broker = None,
    cluster: Cluster = None,
    read_queues: Annotated[int, typer.Option("-r", "--read-queues", min=1, help="Number of queues to read from.")] = 8,
    write_queues: Annotated[int, typer.Option("-w", "--write-queues", min=1, help="Number of queues to write to.")] = 8,
    perm: Annotated[str, typer.Option("-p", "--perm", help="Permission: r (4), w (2) or rw (6).")] = "rw",
    order: Annotated[
        str,
        typer.Option(
            "-o", "--order", help="true: name servers keep the queue numbers of this topic, for strict order."
        ),
    ] = "false",
    unit: Annotated[str, typer.Option("-u", "--unit", hidden=True)] = "false",
    unit_sub: Annotated[str, typer.Option("-s", "--unit-sub", hidden=True)] = "false",
    attributes: Annotated[
        str | None,
        typer.Option(
            "-a",
            "--attributes",
            help="Attributes to set (+) or remove (-): +message.type=DELAY,-reserve.time",
            show_default=False,
        ),
    ] = None,
) -> list[Done]:
    """Create a topic, or change an existing one."""
    from rmqkit.admin.cluster.topics import permission_of

    return await admin.topics.create(
        topic,
        broker=broker,
        cluster=cluster,
        read_queues=read_queues,
        write_queues=write_queues,
        perm=permission_of(perm),
        order=_truth(order),
        unit=_truth(unit),
        unit_sub=_truth(unit_sub),
        attributes=attributes,
    )


@TOPIC.verb("delete")
async def delete(admin: Admin, topic: Topic, cluster: Cluster = None, yes: Yes = False) -> list[Done]:
    """Delete a topic and its messages, on brokers and name servers. On a terminal, it asks for confirmation."""
    await admin.topics.route(topic)
    confirm(f"delete topic {topic} with all its messages", yes=yes)
    return await admin.topics.delete(topic, cluster)


@TOPIC.verb("perm")
async def perm(
    admin: Admin, topic: Topic, perm: Permission, broker: Broker = None, cluster: Cluster = None
) -> list[Done]:
    """Set whether a topic can be read, written, or both."""
    from rmqkit.admin.cluster.topics import permission_of

    return await admin.topics.set_permission(topic, permission_of(perm), broker=broker, cluster=cluster)


@TOPIC.verb("order")
async def order(
    admin: Admin,
    topic: Topic,
    method: Annotated[str, typer.Option("-m", "--method", help="Action: get, put or delete.")] = "get",
    value: Annotated[
        str,
        typer.Option("-v", "--value", help="Number of queues per broker: broker-a:4;broker-b:4", show_default=False),
    ] = "",
) -> object:
    """Show or set the queue numbers that name servers keep for an ordered topic."""
    match method:
        case "get":
            return {"topic": topic, "order": await admin.topics.order(topic)}
        case "put":
            return await admin.topics.set_order(topic, value)
        case "delete":
            return await admin.topics.delete_order(topic)
    raise typer.BadParameter(f"-m {method} must be get, put or delete")


@TOPIC.verb("allocate")
async def allocate(
    admin: Admin, topic: Topic, clients: Annotated[str, Named("-i", "--ip", help="Client ids, separated by commas.")]
) -> list[Assigned]:
    """Show which client would get which queue, by the averaging strategy."""
    named = [name.strip() for name in clients.split(",") if name.strip()]
    if not named:
        raise typer.BadParameter("give at least one client: a,b")
    return await admin.topics.allocate(topic, named)


@TOPIC.verb("stats", watch=True)
async def stats(
    admin: Admin,
    topic: Topic = "",
    active: Annotated[
        bool, typer.Option("-a", "--active", help="Show only topics with messages in the last day.")
    ] = False,
) -> list[TopicStats]:
    """Show messages per second and per day, and the lag of each group."""
    return await admin.topics.stats(topic or None, active_only=active)


@TOPIC.verb("rt")
async def round_trip(
    admin: Admin, topic: Topic, amount: Amount = 10, size: BodyBytes = 128, pause_s: Pause = 0.0
) -> View:
    """Send test messages to a topic, and measure the round-trip time of each."""
    return await round_trips(admin, [topic], amount, size, pause_s)


def _truth(text: str) -> bool:
    """Convert the word ``true`` or ``false``, as in boolean options of Java's tool."""
    if text.lower() not in ("true", "false"):
        raise typer.BadParameter(f"{text} must be true or false")
    return text.lower() == "true"
