"""Headers of PULL_MESSAGE 11 and LITE_PULL_MESSAGE 361. Source: remoting.md §4.3.2."""

from __future__ import annotations

import enum

from msgspec import Struct

__all__ = ["ForbiddenType", "PullFlag", "PullMessageRequest", "PullMessageResponse"]


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
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int
    suspend_timeout_millis: int
    sub_version: int
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: int | None = None
    bname: str | None = None


class PullMessageResponse(Struct, rename="camel", gc=False):
    """Goes with every pull reply, also those without messages: Java clients need all four numbers."""

    suggest_which_broker_id: int
    next_begin_offset: int
    min_offset: int
    max_offset: int
    topic_sys_flag: int | None = None
    group_sys_flag: int | None = None
    forbidden_type: int | None = None
