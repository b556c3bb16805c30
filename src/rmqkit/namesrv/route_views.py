"""What a client sees of a route: acting masters and zones. Pure: a route in, a route out, the tables stay as they are.

An *acting master* is the lowest id of a group that has lost its master: it is shown under id 0, so that clients read
from it and brokers do the master's special services, but only while its queues are not writable. Brokers look up
`SYNC_BROKER_MEMBER_PREFIX` topics to learn the true ids.

A *zone* keeps a client near: groups of other zones are left out, unless they have no master, so that the slaves of a
dead master are read from everywhere. Acting masters are shown first, so their groups count as having one.
Source: behaviour.md §1.6 (6, 7); remoting.md §10.2.
"""

from __future__ import annotations

import msgspec

from rmqkit.namesrv.routes import MASTER_ID
from rmqkit.protocol.names import SYNC_BROKER_MEMBER_PREFIX
from rmqkit.protocol.schemas.namesrv import BrokerData, TopicRoute
from rmqkit.protocol.schemas.topics import Permission

__all__ = ["in_zone", "with_acting_masters"]


def with_acting_masters(topic: str, route: TopicRoute) -> TopicRoute:
    """The route with the lowest id of each masterless, unwritable group that acts as master under id 0."""
    if topic.startswith(SYNC_BROKER_MEMBER_PREFIX):
        return route
    unwritable = {queue.broker_name for queue in route.queue_datas if not queue.perm & Permission.WRITE}
    brokers = [_acting(broker) if broker.broker_name in unwritable else broker for broker in route.broker_datas]
    return msgspec.structs.replace(route, broker_datas=brokers)


def in_zone(route: TopicRoute, zone_name: str) -> TopicRoute:
    """The route without the groups that have their master in another zone."""
    left_out = [broker for broker in route.broker_datas if not _is_near(broker, zone_name)]
    names = {broker.broker_name for broker in left_out}
    addresses = {address for broker in left_out for address in broker.broker_addrs.values()}
    servers = route.filter_server_table
    return msgspec.structs.replace(
        route,
        broker_datas=[broker for broker in route.broker_datas if broker.broker_name not in names],
        queue_datas=[queue for queue in route.queue_datas if queue.broker_name not in names],
        filter_server_table={address: servers[address] for address in servers if address not in addresses},
    )


def _acting(broker: BrokerData) -> BrokerData:
    addresses = broker.broker_addrs
    if not addresses or MASTER_ID in addresses or not broker.enable_acting_master:
        return broker
    lowest = min(addresses)
    shown = {MASTER_ID if broker_id == lowest else broker_id: address for broker_id, address in addresses.items()}
    return msgspec.structs.replace(broker, broker_addrs=shown)


def _is_near(broker: BrokerData, zone_name: str) -> bool:
    if MASTER_ID not in broker.broker_addrs:
        return True
    return isinstance(broker.zone_name, str) and broker.zone_name.lower() == zone_name.lower()
