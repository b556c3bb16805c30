"""Headers of the name server's own requests: routes, KV configuration, permissions, lists. Source: remoting.md §4.2."""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.numbers import Int32


class RouteRequest(Struct, rename="camel", gc=False):
    """GET_ROUTEINFO_BY_TOPIC; with zone mode ``true`` only brokers of the zone are wanted."""

    topic: str
    accept_standard_json_only: bool | None = None
    zone_mode: str | None = field(default=None, name="__ZONE_MODE")
    zone_name: str | None = field(default=None, name="__ZONE_NAME")


class MemberRouteResponse(Struct, gc=False):
    """Answer of our name servers to GET_ROUTEINFO_BY_TOPIC for the topic that names the brokers of a group.

    Attributes:
        registered_from: JSON, from which IP address each ``host:port`` registered; Apache's name servers do not tell.
    """

    registered_from: str | None = field(default=None, name="rmqRegisteredFrom")


class RegisterTopicRequest(Struct, gc=False):
    """REGISTER_TOPIC_IN_NAMESRV."""

    topic: str


class KVPut(Struct, gc=False):
    """PUT_KV_CONFIG; the reference answers a missing namespace or key with a remark of its own."""

    value: str
    namespace: str | None = None
    key: str | None = None


class KVKey(Struct, gc=False):
    """GET_KV_CONFIG and DELETE_KV_CONFIG."""

    namespace: str
    key: str


class KVValue(Struct, gc=False):
    """Answer to GET_KV_CONFIG."""

    value: str


class KVNamespace(Struct, gc=False):
    """GET_KVLIST_BY_NAMESPACE."""

    namespace: str


class BrokerNameRequest(Struct, rename="camel", gc=False):
    """WIPE_WRITE_PERM_OF_BROKER and ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


class WipeWritePermResponse(Struct, rename="camel", gc=False):
    """How many topics of the broker were touched."""

    wipe_topic_count: Int32


class AddWritePermResponse(Struct, rename="camel", gc=False):
    """How many topics of the broker were touched."""

    add_topic_count: Int32


class DeleteTopicRequest(Struct, rename="camel", gc=False):
    """DELETE_TOPIC_IN_NAMESRV; with a cluster only its brokers lose the topic."""

    topic: str
    cluster_name: str | None = None


class ClusterRequest(Struct, gc=False):
    """GET_TOPICS_BY_CLUSTER."""

    cluster: str
