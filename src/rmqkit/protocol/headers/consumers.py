"""Headers of what is asked of running consumers, mostly through a broker: 220, 221, 222, 223, 307, 309.

Source: remoting.md §4.4, §4.5, §10.6.
"""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64


class ResetOffsetRequest(Struct, rename="camel", kw_only=True, gc=False):
    """INVOKE_BROKER_TO_RESET_OFFSET; ``timestamp`` in ms, -1 for the end; ``queue_id`` -1 means every queue."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool
    queue_id: Int32 = -1
    offset: Int64 | None = None


class ResetClientOffsetRequest(Struct, rename="camel", kw_only=True, gc=False):
    """RESET_CONSUMER_CLIENT_OFFSET, pushed to clients."""

    topic: str
    group: str
    timestamp: Int64 | None = None
    is_force: bool | None = None


class ConsumerStatusRequest(Struct, rename="camel", gc=False):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS and GET_CONSUMER_STATUS_FROM_CLIENT; ``client_addr`` is a client id."""

    topic: str
    group: str
    client_addr: str | None = None


class RunningInfoRequest(Struct, rename="camel", gc=False):
    """GET_CONSUMER_RUNNING_INFO."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeDirectlyRequest(Struct, rename="camel", kw_only=True, gc=False):
    """CONSUME_MESSAGE_DIRECTLY; ``msg_id`` is an offset message id. The broker adds the last three."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    topic: str | None = None
    broker_name: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
