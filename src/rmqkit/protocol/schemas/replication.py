"""What slaves and tools ask a master: HA state 906 to 908, delay offsets 45, timer state 60 and 61.

``lagMs`` is rmqkit's own; Java's tools pass over it. The block of GET_TIMER_CHECK_POINT:

======  ====  ==================================================================
offset  size  field (big-endian)
======  ====  ==================================================================
0          8  lastReadTimeMs
8          8  lastTimerLogFlushPos
16         8  lastTimerQueueOffset
24         8  masterTimerQueueOffset
32         8  data version: stateVersion
40         8  data version: timestamp
48         8  data version: counter
======  ====  ==================================================================

The link that carries the log itself is `rmqkit.protocol.ha`. Source: remoting.md §4.4, §6.4.7, §6.4.13.
"""

from __future__ import annotations

import struct

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.errors import BodyError
from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.schemas.topics import DataVersion


class HaInfo(Struct, rename="camel", gc=False):
    """EXCHANGE_BROKER_HA_INFO both ways; an empty request asks, a filled one tells a slave its master."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class MasterFlushOffsetRequest(Struct, rename="camel", gc=False):
    """RESET_MASTER_FLUSH_OFFSET."""

    master_flush_offset: Int64


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


class DelayOffsets(Struct, rename="camel"):
    """Answer to GET_ALL_DELAY_OFFSET: delay level → offset; 4.x sends the table alone."""

    data_version: DataVersion | UnsetType = UNSET
    offset_table: dict[Int32, Int64] = field(default_factory=dict)


_BLOCK = struct.Struct(">7q")
TIMER_CHECKPOINT_BYTES = _BLOCK.size


class TimerCheckpoint(Struct, kw_only=True):
    """How far the timer has come: time in ms, place in the timer log in bytes, offsets in the timer queue."""

    last_read_time_ms: int = 0
    last_timer_log_flush_position: int = 0
    last_timer_queue_offset: int = 0
    master_timer_queue_offset: int = 0
    data_version: DataVersion = field(default_factory=DataVersion)


def encode_timer_checkpoint(checkpoint: TimerCheckpoint) -> bytes:
    version = checkpoint.data_version
    return _BLOCK.pack(
        checkpoint.last_read_time_ms,
        checkpoint.last_timer_log_flush_position,
        checkpoint.last_timer_queue_offset,
        checkpoint.master_timer_queue_offset,
        version.state_version,
        version.timestamp,
        version.counter,
    )


def decode_timer_checkpoint(body: bytes | bytearray | memoryview) -> TimerCheckpoint:
    """The checkpoint in a body. Raises BodyError: it does not have 56 bytes."""
    if len(body) != _BLOCK.size:
        raise BodyError(f"timer checkpoint has {len(body)} bytes: it must have {_BLOCK.size}")
    read_ms, flushed, queue_offset, master_offset, state_version, timestamp, counter = _BLOCK.unpack(body)
    return TimerCheckpoint(
        last_read_time_ms=read_ms,
        last_timer_log_flush_position=flushed,
        last_timer_queue_offset=queue_offset,
        master_timer_queue_offset=master_offset,
        data_version=DataVersion(counter, state_version, timestamp),
    )


class TimingCount(Struct, rename="camel", gc=False):
    """How many timer messages of one topic wait; ``time_stamp`` is the last change in ms."""

    count: Int64 = 0
    time_stamp: Int64 = 0


class TimerMetrics(Struct, rename="camel"):
    """Answer to GET_TIMER_METRICS: topic → waiting messages."""

    data_version: DataVersion = field(default_factory=DataVersion)
    timing_count: dict[str, TimingCount] = field(default_factory=dict)
