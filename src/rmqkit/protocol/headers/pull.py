"""Headers of PULL_MESSAGE 11 and LITE_PULL_MESSAGE 361. Source: remoting.md §4.3.2."""

from __future__ import annotations

import enum

from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64


class PullFlag(enum.IntFlag):
    """Bits of a pull request's ``sysFlag``."""

    COMMIT_OFFSET = 1
    SUSPEND = 2
    SUBSCRIPTION = 4
    CLASS_FILTER = 8
    LITE = 16


class ForbiddenType(enum.IntEnum):
    """Why a pull got NO_PERMISSION."""

    BROKER = 1
    GROUP = 2
    TOPIC = 3
    BROADCAST = 4
    SUBSCRIPTION = 5


class PullMessageRequest(Struct, rename="camel", gc=False):
    """Where to read, how much, and whether to wait (``suspend_timeout_millis``) when nothing is there."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None
    bname: str | None = None
    request_source: Int32 | None = None
    proxy_froward_client_id: str | None = None  # the reference's spelling


class PullMessageResponse(Struct, rename="camel", gc=False):
    """Goes with every pull reply, also those without messages: Java clients need all four numbers."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None
    offset_delta: Int64 | None = None
