"""What is asked of a name server: routes 105, cluster 106, KV configuration 100 to 102 and 219, permissions, lists,
topics.

How brokers register is in `rmqkit.protocol.schemas.brokers`. Source: remoting.md §4.2, §6.4.1, §6.4.6, §6.4.13.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32
from rmqkit.protocol.schemas.topics import TopicQueueMappingInfo


class QueueData(Struct, rename="camel", gc=False):
    """A topic's queues on one broker name. 4.x spells the flag ``topicSynFlag``."""

    broker_name: str
    read_queue_nums: int = 0
    write_queue_nums: int = 0
    perm: int = 0
    topic_sys_flag: int = 0
    topic_syn_flag: int | UnsetType = UNSET


class BrokerData(Struct, rename="camel"):
    """The addresses behind one broker name: broker id → ``ip:port``; id 0 is the master."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str] = field(default_factory=dict)
    zone_name: str | UnsetType | None = UNSET
    enable_acting_master: bool = False


class TopicRoute(Struct, rename="camel"):
    """Answer to GET_ROUTEINFO_BY_TOPIC (``TopicRouteData``)."""

    queue_datas: list[QueueData] = field(default_factory=list)
    broker_datas: list[BrokerData] = field(default_factory=list)
    filter_server_table: dict[str, list[str]] = field(default_factory=dict)
    order_topic_conf: str | UnsetType | None = UNSET
    topic_queue_mapping_by_broker: dict[str, TopicQueueMappingInfo] | UnsetType | None = UNSET


class ClusterInfo(Struct, rename="camel"):
    """Answer to GET_BROKER_CLUSTER_INFO."""

    broker_addr_table: dict[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = field(default_factory=dict)


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


class KVTable(Struct):
    """Text → text: a KV namespace, a broker's runtime information."""

    table: dict[str, str] = field(default_factory=dict)


class TopicList(Struct, rename="camel", omit_defaults=True):
    """A list of topics; ``broker_addr`` comes only with the system topics."""

    topic_list: list[str]
    broker_addr: str | None = None
