"""Topics at a broker: requests for their configuration (17, 18, 21, 202, 215, 351, 513). Topics at a name server:
requests for routes (105), the cluster (106), KV configuration (100 to 102, 219), permissions and lists.

`TopicConfigTable` is also the content of ``topics.json`` and the topic part of a registration
(`rmqkit.protocol.schemas.brokers`). Every table of a broker has a `DataVersion`. `TopicQueueMappingDetail` describes
a static topic, which distributes its queues among brokers.
Source: remoting.md §4.2, §4.3.7, §4.4, §4.6.2, §6.2, §6.4.1 to §6.4.3, §6.4.6, §6.4.13; store.md §9.2.
"""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, NAME_SERVER, Operation, Right


class Permission(enum.IntFlag):
    """Bits of ``perm`` on topics and brokers. Source: remoting.md §8.3."""

    INHERIT = 1
    WRITE = 2
    READ = 4


class DataVersion(Struct, rename="camel", gc=False):
    """The version of a table. Two versions are equal if all three numbers are equal. Source: remoting.md §6.2."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def advance(self, now_ms: int) -> None:
        """Advance the version after a change."""
        self.counter += 1
        self.timestamp = now_ms


class TopicConfig(Struct, rename="camel"):
    """The configuration of a topic on a broker. Missing fields have Java's defaults."""

    topic_name: str = ""
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = Permission.READ | Permission.WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] | None = field(default_factory=dict)

    @property
    def is_batch_queue(self) -> bool:
        """Return True if the queues are BatchConsumeQueues."""
        return (self.attributes or {}).get("queue.type") == "BatchCQ"

    @property
    def is_lite(self) -> bool:
        """Return True if the topic is a parent of lite topics."""
        return (self.attributes or {}).get("message.type") == "LITE"


class TopicQueueMappingInfo(Struct, rename="camel", kw_only=True):
    """The queues of a static topic on the broker ``bname``.
    ``curr_id_map`` maps the number of a queue in the whole topic to its number on this broker."""

    bname: str = ""
    curr_id_map: dict[int, int] | None = field(default_factory=dict)
    dirty: bool = False
    epoch: int = 0
    scope: str = "__global__"
    topic: str = ""
    total_queues: int = 0


class LogicQueueMappingItem(Struct, rename="camel"):
    """A current or former location of a queue of a static topic: queue ``queue_id`` of broker ``bname``. Offset
    ``start_offset`` of this location is offset ``logic_offset`` of the static queue."""

    gen: int = 0
    queue_id: int = 0
    bname: str = ""
    logic_offset: int = 0
    start_offset: int = 0
    end_offset: int = -1
    time_of_start: int = -1
    time_of_end: int = -1


class TopicQueueMappingDetail(TopicQueueMappingInfo, rename="camel", kw_only=True):
    """A static topic on a broker. The keys of ``hosted_queues`` are the numbers of queues in the whole topic. The last
    item of a queue is its current location."""

    hosted_queues: dict[int, list[LogicQueueMappingItem]] = field(default_factory=dict)


class TopicConfigTable(Struct, rename="camel"):
    """The content of ``topics.json`` and the topic part of a registration (``TopicConfigSerializeWrapper``).
    Only registrations contain static topics (``TopicConfigAndMappingSerializeWrapper``, 5.x)."""

    data_version: DataVersion = field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = field(default_factory=dict)
    mapping_data_version: DataVersion | UnsetType | None = UNSET
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo] | UnsetType | None = UNSET
    topic_queue_mapping_detail_map: dict[str, TopicQueueMappingDetail] | UnsetType | None = UNSET


class CreateTopicRequest(Struct, rename="camel", gc=False):
    """UPDATE_AND_CREATE_TOPIC and UPDATE_AND_CREATE_STATIC_TOPIC.
    ``attributes`` is a list such as ``+message.type=DELAY,-reserve.time``."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool = False
    attributes: str | None = None
    force: bool | None = None


class TopicRequest(Struct, gc=False):
    """The header of requests about one topic: 202, 215, 300, 351."""

    topic: str


class TopicConfigsRequest(Struct, rename="camel", gc=False):
    """GET_ALL_TOPIC_CONFIG. Slaves of 5.3 or later may request pages."""

    topic_seq: Int32 | None = None
    data_version: str | None = None
    max_topic_num: Int32 | None = None


class TopicConfigsResponse(Struct, rename="camel", gc=False):
    """The response to a request for a page of topics, with the total number of topics."""

    total_topic_num: Int32 | None = None


class TopicConfigList(Struct, rename="camel"):
    """Body of UPDATE_AND_CREATE_TOPIC_LIST."""

    topic_config_list: list[TopicConfig] = field(default_factory=list)


class QueueData(Struct, rename="camel", gc=False):
    """The queues of a topic on the brokers of one name. 4.x spells the flag ``topicSynFlag``."""

    broker_name: str
    read_queue_nums: int = 0
    write_queue_nums: int = 0
    perm: int = 0
    topic_sys_flag: int = 0
    topic_syn_flag: int | UnsetType = UNSET


class BrokerData(Struct, rename="camel"):
    """The addresses of the brokers of one name: broker id → ``ip:port``. Id 0 is the master."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str] = field(default_factory=dict)
    zone_name: str | UnsetType | None = UNSET
    enable_acting_master: bool = False


class TopicRoute(Struct, rename="camel"):
    """Response to GET_ROUTEINFO_BY_TOPIC (``TopicRouteData``)."""

    queue_datas: list[QueueData] = field(default_factory=list)
    broker_datas: list[BrokerData] = field(default_factory=list)
    filter_server_table: dict[str, list[str]] = field(default_factory=dict)
    order_topic_conf: str | UnsetType | None = UNSET
    topic_queue_mapping_by_broker: dict[str, TopicQueueMappingInfo] | UnsetType | None = UNSET


class ClusterInfo(Struct, rename="camel"):
    """Response to GET_BROKER_CLUSTER_INFO."""

    broker_addr_table: dict[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = field(default_factory=dict)


class RouteRequest(Struct, rename="camel", gc=False):
    """GET_ROUTEINFO_BY_TOPIC. With zone mode ``true`` the route contains only the brokers of the zone."""

    topic: str
    accept_standard_json_only: bool | None = None
    zone_mode: str | None = field(default=None, name="__ZONE_MODE")
    zone_name: str | None = field(default=None, name="__ZONE_NAME")


class MemberRouteResponse(Struct, gc=False):
    """Response of rmqkit's name servers to GET_ROUTEINFO_BY_TOPIC for the topic of a broker name
    (`rmqkit.protocol.names.SYNC_BROKER_MEMBER_PREFIX`).

    Attributes:
        registered_from: JSON with the IP address from which each ``host:port`` registered. Apache's name servers omit
            this field.
    """

    registered_from: str | None = field(default=None, name="rmqRegisteredFrom")


class RegisterTopicRequest(Struct, gc=False):
    """REGISTER_TOPIC_IN_NAMESRV."""

    topic: str


class KVPut(Struct, gc=False):
    """PUT_KV_CONFIG. Namespace and key have defaults, because the reference refuses a request without them with its own
    remark."""

    value: str
    namespace: str | None = None
    key: str | None = None


class KVKey(Struct, gc=False):
    """GET_KV_CONFIG and DELETE_KV_CONFIG."""

    namespace: str
    key: str


class KVValue(Struct, gc=False):
    """Response to GET_KV_CONFIG."""

    value: str


class KVNamespace(Struct, gc=False):
    """GET_KVLIST_BY_NAMESPACE."""

    namespace: str


class BrokerNameRequest(Struct, rename="camel", gc=False):
    """WIPE_WRITE_PERM_OF_BROKER and ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


class WipeWritePermResponse(Struct, rename="camel", gc=False):
    """The number of topics of the broker from which the request removed the write permission."""

    wipe_topic_count: Int32


class AddWritePermResponse(Struct, rename="camel", gc=False):
    """The number of topics of the broker to which the request added the write permission."""

    add_topic_count: Int32


class DeleteTopicRequest(Struct, rename="camel", gc=False):
    """DELETE_TOPIC_IN_NAMESRV. With a cluster, only the routes to brokers of this cluster are deleted."""

    topic: str
    cluster_name: str | None = None


class ClusterRequest(Struct, gc=False):
    """GET_TOPICS_BY_CLUSTER."""

    cluster: str


class KVTable(Struct):
    """A map from text to text: a KV namespace, or the runtime information of a broker."""

    table: dict[str, str] = field(default_factory=dict)


class TopicList(Struct, rename="camel", omit_defaults=True):
    """A list of topics. Only a list of system topics has a ``broker_addr``."""

    topic_list: list[str]
    broker_addr: str | None = None


class TopicNameList(Struct, rename="camel"):
    """Body of DELETE_TOPIC_IN_BROKER_LIST."""

    topic_list: list[str] = field(default_factory=list)


# fmt: off
OPERATIONS = (
    Operation(Code.UPDATE_AND_CREATE_TOPIC, 1, BROKER, CreateTopicRequest, right=Right("Create", "topic")),
    Operation(Code.UPDATE_AND_CREATE_TOPIC_LIST, 2, BROKER, request_body=TopicConfigList),
    Operation(Code.GET_ALL_TOPIC_CONFIG, 2, BROKER, TopicConfigsRequest, TopicConfigsResponse,
              response_body=TopicConfigTable, is_reading=True),
    Operation(Code.PUT_KV_CONFIG, 2, NAME_SERVER, KVPut),
    Operation(Code.GET_KV_CONFIG, 2, NAME_SERVER, KVKey, KVValue, is_reading=True),
    Operation(Code.DELETE_KV_CONFIG, 2, NAME_SERVER, KVKey),
    Operation(Code.GET_ROUTEINFO_BY_TOPIC, 1, NAME_SERVER, RouteRequest, response_body=TopicRoute, is_reading=True),
    Operation(Code.GET_BROKER_CLUSTER_INFO, 1, NAME_SERVER, response_body=ClusterInfo, is_reading=True),
    Operation(Code.WIPE_WRITE_PERM_OF_BROKER, 2, NAME_SERVER, BrokerNameRequest, WipeWritePermResponse),
    Operation(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, 2, NAME_SERVER, response_body=TopicList, is_reading=True),
    Operation(Code.DELETE_TOPIC_IN_BROKER, 2, BROKER, TopicRequest, right=Right("Delete", "topic")),
    Operation(Code.DELETE_TOPIC_IN_BROKER_LIST, 2, BROKER, request_body=TopicNameList,
              right=Right("Delete", is_body=True)),
    Operation(Code.DELETE_TOPIC_IN_NAMESRV, 2, NAME_SERVER, DeleteTopicRequest),
    Operation(Code.REGISTER_TOPIC_IN_NAMESRV, 2, NAME_SERVER, RegisterTopicRequest, request_body=TopicRoute),
    Operation(Code.GET_KVLIST_BY_NAMESPACE, 2, NAME_SERVER, KVNamespace, response_body=KVTable, is_reading=True),
    Operation(Code.GET_TOPICS_BY_CLUSTER, 2, NAME_SERVER, ClusterRequest, response_body=TopicList, is_reading=True),
    Operation(Code.GET_SYSTEM_TOPIC_LIST_FROM_NS, 2, NAME_SERVER, response_body=TopicList, is_reading=True),
    Operation(Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, 2, BROKER, response_body=TopicList, is_reading=True),
    Operation(Code.GET_UNIT_TOPIC_LIST, 2, NAME_SERVER, response_body=TopicList),
    Operation(Code.GET_HAS_UNIT_SUB_TOPIC_LIST, 2, NAME_SERVER, response_body=TopicList),
    Operation(Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, 2, NAME_SERVER, response_body=TopicList),
    Operation(Code.ADD_WRITE_PERM_OF_BROKER, 2, NAME_SERVER, BrokerNameRequest, AddWritePermResponse),
    Operation(Code.GET_TOPIC_CONFIG, 2, BROKER, TopicRequest, response_body=TopicConfig, right=Right("Get", "topic"),
              is_reading=True),
)
# fmt: on
