"""Topics and their configuration at a broker: 17, 18, 21, 202, 215, 351, 513; and `DataVersion`, which every table
has.

`TopicConfigTable` is ``topics.json``, too, and the topic part of a registration (`rmqkit.protocol.schemas.brokers`).
Static topics are spread over brokers: `TopicQueueMappingDetail`.
Source: remoting.md §4.3.7, §4.4, §4.6.2, §6.2, §6.4.2, §6.4.3; store.md §9.2.
"""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32


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
    """Requests about one topic: 202, 215, 300, 351."""

    topic: str


class TopicConfigsRequest(Struct, rename="camel", gc=False):
    """GET_ALL_TOPIC_CONFIG; a page of them when a slave of 5.3 or later asks for one."""

    topic_seq: Int32 | None = None
    data_version: str | None = None
    max_topic_num: Int32 | None = None


class TopicConfigsResponse(Struct, rename="camel", gc=False):
    """How many topics there are in all."""

    total_topic_num: Int32 | None = None


class TopicConfigList(Struct, rename="camel"):
    """Body of UPDATE_AND_CREATE_TOPIC_LIST."""

    topic_config_list: list[TopicConfig] = field(default_factory=list)
