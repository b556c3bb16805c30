"""The timer wheel's state as slaves fetch it: the block of GET_TIMER_CHECK_POINT 60 and the metrics of 61.

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

Source: remoting.md §4.4.
"""

from __future__ import annotations

import struct

from msgspec import Struct, field

from rmqkit.errors import BodyError
from rmqkit.protocol.bodies.topics import DataVersion
from rmqkit.protocol.numbers import Int64

__all__ = [
    "TIMER_CHECKPOINT_BYTES",
    "TimerCheckpoint",
    "TimerMetrics",
    "TimingCount",
    "decode_timer_checkpoint",
    "encode_timer_checkpoint",
]

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
