"""Bodies of the controller protocol, of static topics and of cold data: 513, 1001 to 1008, 2003.

Source: remoting.md §4.6.2, §4.6.3, §4.6.4.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from rmqkit.protocol.bodies.namesrv import BrokerMemberGroup
from rmqkit.protocol.numbers import Int32, Int64

__all__ = [
    "BrokerReplicas",
    "CheckQueueProgress",
    "ColdDataInfo",
    "ElectMasterBody",
    "EpochCache",
    "EpochEntry",
    "LogicQueueMapping",
    "Replica",
    "ReplicasInfo",
    "SyncStateSet",
    "TopicQueueMappingDetail",
]


class SyncStateSet(Struct, rename="camel"):
    """The brokers that have everything that was acknowledged."""

    sync_state_set: list[Int64] = field(default_factory=list)
    sync_state_set_epoch: Int32 = 0


class ElectMasterBody(Struct, rename="camel"):
    """Answer to CONTROLLER_ELECT_MASTER."""

    broker_member_group: BrokerMemberGroup | None = None
    sync_state_set: list[Int64] = field(default_factory=list)


class Replica(Struct, rename="camel", kw_only=True):
    """One broker of a group."""

    broker_name: str | None = None
    broker_id: Int64 | None = None
    broker_address: str | None = None
    alive: bool = False


class BrokerReplicas(Struct, rename="camel", kw_only=True):
    """One group: its master and who is in sync."""

    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None
    in_sync_replicas: list[Replica] = field(default_factory=list)
    not_in_sync_replicas: list[Replica] = field(default_factory=list)


class ReplicasInfo(Struct, rename="camel"):
    """Answer to CONTROLLER_GET_SYNC_STATE_DATA: broker name → group."""

    replicas_info_table: dict[str, BrokerReplicas] = field(default_factory=dict)


class EpochEntry(Struct, rename="camel"):
    """Where a master's epoch begins and ends in the log, in bytes."""

    epoch: Int32
    start_offset: Int64
    end_offset: Int64 = (1 << 63) - 1


class EpochCache(Struct, rename="camel", kw_only=True):
    """Answer to GET_BROKER_EPOCH_CACHE."""

    cluster_name: str | None = None
    broker_name: str | None = None
    broker_id: Int64 = 0
    epoch_list: list[EpochEntry] = field(default_factory=list)
    max_offset: Int64 = 0


class LogicQueueMapping(Struct, rename="camel", kw_only=True):
    """One piece of a logical queue: where it lies and which offsets it covers."""

    gen: Int32 = 0
    queue_id: Int32 = 0
    bname: str | None = None
    logic_offset: Int64 = 0
    start_offset: Int64 = 0
    end_offset: Int64 = -1
    time_of_start: Int64 = -1
    time_of_end: Int64 = -1


class TopicQueueMappingDetail(Struct, rename="camel", kw_only=True):
    """Body of UPDATE_AND_CREATE_STATIC_TOPIC: `TopicQueueMappingInfo` and the pieces of the queues it hosts."""

    topic: str
    scope: str | None = "__global__"
    total_queues: Int32 = 0
    bname: str | None = None
    epoch: Int64 = 0
    dirty: bool = False
    curr_id_map: dict[Int32, Int32] | None = None
    hosted_queues: dict[Int32, list[LogicQueueMapping]] = field(default_factory=dict)


class ColdDataInfo(Struct, rename="camel"):
    """Answer to GET_COLD_DATA_FLOW_CTR_INFO; amounts in bytes."""

    runtime_table: dict[str, Any] = field(default_factory=dict)
    config_table: dict[str, Any] = field(default_factory=dict)
    cg_cold_read_threshold: Int64 = 0
    global_cold_read_threshold: Int64 = 0
    global_acc: Int64 = 0


class CheckQueueProgress(Struct, rename="camel"):
    """Answer to CHECK_ROCKSDB_CQ_WRITE_PROGRESS; status 0 all there, 1 not yet, 2 running, 3 failed."""

    check_status: Int32 = 0
    check_result: str | None = None
