"""Topics, routes and registration bodies. Source: remoting.md §6.4.1, §6.4.2, §6.4.3, §6.4.6, store.md §9.2."""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.numbers import Int32


class Permission(enum.IntFlag):
    """Bits of ``perm`` on topics and brokers. Source: remoting.md §8.3."""

    INHERIT = 1
    WRITE = 2
    READ = 4


class DataVersion(Struct, rename="camel", gc=False):
    """Version of a table; two are equal when all three numbers are. Source: remoting.md §6.2."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def advance(self, now_ms: int) -> None:
        """Mark a change made now."""
        self.counter += 1
        self.timestamp = now_ms


class TopicConfig(Struct, rename="camel"):
    """One topic on one broker; absent fields have Java's defaults."""

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
        """Whether its queues are BatchConsumeQueues."""
        return (self.attributes or {}).get("queue.type") == "BatchCQ"


class TopicQueueMappingInfo(Struct, rename="camel", kw_only=True):
    """Where the queues of a static topic are on the broker name ``bname``.
    ``curr_id_map`` leads from the number of a queue in the whole topic to its number on this broker."""

    bname: str = ""
    curr_id_map: dict[int, int] | None = field(default_factory=dict)
    dirty: bool = False
    epoch: int = 0
    scope: str = "__global__"
    topic: str = ""
    total_queues: int = 0


class LogicQueueMappingItem(Struct, rename="camel"):
    """Where a queue of a static topic is, or was: offsets from ``start_offset`` on of queue ``queue_id`` at broker
    ``bname`` are the queue's from ``logic_offset`` on."""

    gen: int = 0
    queue_id: int = 0
    bname: str = ""
    logic_offset: int = 0
    start_offset: int = 0
    end_offset: int = -1
    time_of_start: int = -1
    time_of_end: int = -1


class TopicQueueMappingDetail(TopicQueueMappingInfo, rename="camel", kw_only=True):
    """A static topic at one broker: its queues there by their number in the whole topic, the last item is current."""

    hosted_queues: dict[int, list[LogicQueueMappingItem]] = field(default_factory=dict)


class TopicConfigTable(Struct, rename="camel"):
    """``topics.json`` and the topic part of a registration (``TopicConfigSerializeWrapper``).
    Only registrations carry the static topics (``TopicConfigAndMappingSerializeWrapper``, 5.x)."""

    data_version: DataVersion = field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = field(default_factory=dict)
    mapping_data_version: DataVersion | UnsetType | None = UNSET
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo] | UnsetType | None = UNSET
    topic_queue_mapping_detail_map: dict[str, TopicQueueMappingDetail] | UnsetType | None = UNSET


class RegisterBrokerBody(Struct, rename="camel"):
    """Body of REGISTER_BROKER; a filter server list that is null leaves the known one as it is."""

    filter_server_list: list[str] | None = field(default_factory=list)
    topic_config_serialize_wrapper: TopicConfigTable = field(default_factory=TopicConfigTable)


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
