"""The replication state of a broker: 907. Source: remoting.md §6.4.13.
``lagMs`` is rmqkit's own; Java's tools pass over it."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.numbers import Int32, Int64


class HaClientInfo(Struct, rename="camel", kw_only=True):
    """A slave's side: times in ms, offsets in bytes of the log."""

    master_addr: str | None = None
    transferred_byte_in_second: Int64 = 0
    max_offset: Int64 = 0
    last_read_timestamp: Int64 = 0
    last_write_timestamp: Int64 = 0
    master_flush_offset: Int64 = 0


class HaConnectionInfo(Struct, rename="camel", kw_only=True):
    """One slave as its master sees it.
    ``diff``: how far it is behind in bytes. ``lag_ms``: the age of the oldest data that it has not acknowledged; an
    Apache master does not say, nor does any when it is not known."""

    addr: str
    slave_ack_offset: Int64 = 0
    diff: Int64 = 0
    in_sync: bool = False
    transferred_byte_in_second: Int64 = 0
    transfer_from_where: Int64 = 0
    lag_ms: Int64 | UnsetType = UNSET


class HaRuntimeInfo(Struct, rename="camel", kw_only=True):
    """Answer to GET_BROKER_HA_STATUS; a slave fills only the client part."""

    master: bool = False
    master_commit_log_max_offset: Int64 = 0
    in_sync_slave_nums: Int32 = 0
    ha_connection_info: list[HaConnectionInfo] = field(default_factory=list)
    ha_client_runtime_info: HaClientInfo = field(default_factory=HaClientInfo)
