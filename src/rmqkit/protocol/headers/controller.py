"""Headers of the controller protocol: 1001 to 1013. Source: remoting.md §4.6.3."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64

__all__ = [
    "AlterSyncStateSetRequest",
    "AlterSyncStateSetResponse",
    "ApplyBrokerIdRequest",
    "BrokerName",
    "CleanBrokerDataRequest",
    "ClusterBrokerName",
    "ControllerMetadataResponse",
    "ElectMasterRequest",
    "ElectMasterResponse",
    "NextBrokerIdResponse",
    "RegisterToControllerRequest",
    "RegisterToControllerResponse",
    "ReplicaInfoResponse",
    "RoleChangedRequest",
]


class BrokerName(Struct, rename="camel", gc=False):
    """CONTROLLER_GET_REPLICA_INFO."""

    broker_name: str | None = None


class ClusterBrokerName(Struct, rename="camel", gc=False):
    """CONTROLLER_GET_NEXT_BROKER_ID; also the answer to CONTROLLER_APPLY_BROKER_ID."""

    cluster_name: str | None = None
    broker_name: str | None = None


class AlterSyncStateSetRequest(Struct, rename="camel", gc=False):
    """CONTROLLER_ALTER_SYNC_STATE_SET."""

    broker_name: str | None = None
    master_broker_id: Int64 | None = None
    master_epoch: Int32 | None = None
    invoke_time: Int64 | None = None


class AlterSyncStateSetResponse(Struct, rename="camel", gc=False):
    """The epoch of the set that is in force now."""

    new_sync_state_set_epoch: Int32 = 0


class ElectMasterRequest(Struct, rename="camel", gc=False):
    """CONTROLLER_ELECT_MASTER."""

    cluster_name: str
    broker_name: str
    broker_id: Int64
    designate_elect: bool
    invoke_time: Int64 | None = None


class ElectMasterResponse(Struct, rename="camel", gc=False):
    """Who is master now."""

    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None


class RegisterToControllerRequest(Struct, rename="camel", gc=False):
    """CONTROLLER_REGISTER_BROKER."""

    cluster_name: str | None = None
    broker_name: str | None = None
    broker_id: Int64 | None = None
    broker_address: str | None = None
    invoke_time: Int64 | None = None


class RegisterToControllerResponse(Struct, rename="camel", gc=False):
    """Who is master of the group just joined."""

    cluster_name: str | None = None
    broker_name: str | None = None
    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None


class ReplicaInfoResponse(Struct, rename="camel", gc=False):
    """The master of a group."""

    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 | None = None


class ControllerMetadataResponse(Struct, rename="camel", gc=False):
    """CONTROLLER_GET_METADATA_INFO; ``peers`` is ``n0:ip:port;n1:…``."""

    group: str | None = None
    controller_leader_id: str | None = None
    controller_leader_address: str | None = None
    is_leader: bool = False
    peers: str | None = None


class RoleChangedRequest(Struct, rename="camel", gc=False):
    """NOTIFY_BROKER_ROLE_CHANGED, from the controller."""

    master_address: str | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None
    master_broker_id: Int64 | None = None


class CleanBrokerDataRequest(Struct, rename="camel", kw_only=True, gc=False):
    """CLEAN_BROKER_DATA; ``broker_controller_ids_to_clean`` is separated by ``;``."""

    cluster_name: str | None = None
    broker_name: str
    broker_controller_ids_to_clean: str | None = None
    is_clean_living_broker: bool = False
    invoke_time: Int64 | None = None


class NextBrokerIdResponse(Struct, rename="camel", gc=False):
    """CONTROLLER_GET_NEXT_BROKER_ID."""

    cluster_name: str | None = None
    broker_name: str | None = None
    next_broker_id: Int64 | None = None


class ApplyBrokerIdRequest(Struct, rename="camel", gc=False):
    """CONTROLLER_APPLY_BROKER_ID."""

    cluster_name: str | None = None
    broker_name: str | None = None
    applied_broker_id: Int64 | None = None
    register_check_code: str | None = None
