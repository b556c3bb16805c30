"""Names of topics and groups: allowed and reserved names, and the names of retry and dead-letter topics.

A client's namespace is a prefix in the names (``NamespaceUtil``): ``X`` becomes ``NS%X``, ``%RETRY%G`` becomes
``%RETRY%NS%G``. Brokers do not know namespaces. Source: remoting.md §3.2, §8.4, §8.5; behaviour.md §2.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection

AUTO_CREATE_TOPIC = "TBW102"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
TRANS_CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
TIMER_TOPIC = "rmq_sys_wheel_timer"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT = "OFFSET_MOVED_EVENT"
BENCHMARK_TOPIC = "BenchmarkTest"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
RETRY_PREFIX = "%RETRY%"
LIGHT_PREFIX = "%LMQ%"
LITE_QUEUE_PREFIX = "%LMQ%$"
DLQ_PREFIX = "%DLQ%"
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
SYNC_BROKER_MEMBER_PREFIX = "rmq_sys_SYNC_BROKER_MEMBER_"
"""The prefix of a topic name that ends with a broker name. The route of this topic contains the true ids of the brokers
with this name."""

SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"

TOPIC_CHARACTERS_MAX = 127
RETRY_TOPIC_CHARACTERS_MAX = 255
GROUP_CHARACTERS_MAX = 120
LITE_TOPIC_BYTES_MAX = 64

assert GROUP_CHARACTERS_MAX + len(RETRY_PREFIX) <= RETRY_TOPIC_CHARACTERS_MAX, "every group has a retry topic"

FORBIDDEN_TO_SEND = frozenset(
    (SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, SELF_TEST_TOPIC, OFFSET_MOVED_EVENT)
)
"""Topics to which clients may never send."""

SYSTEM_TOPICS = FORBIDDEN_TO_SEND | {AUTO_CREATE_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC, "CHECKPOINT_TOPIC"}
"""Names of topics that every broker has."""

NOT_OF_APPLICATIONS = (SYSTEM_TOPIC_PREFIX, RETRY_PREFIX, DLQ_PREFIX)
"""Prefixes of further topics to which no application sends directly."""

TOOLS_GROUP = "TOOLS_CONSUMER"
"""The group for pulls without a group of an application. No client joins this group, and its offsets are not saved."""

SYSTEM_GROUPS = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    TRANSACTION_GROUP,
)
"""Groups that every broker has from the start."""

_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)
_LEGAL_TEXT = "^[%|a-zA-Z0-9_-]+$"
_LEGAL_LITE = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)


def retry_topic(group: str) -> str:
    """Return the retry topic of a group, which contains the messages to redeliver to the group."""
    return RETRY_PREFIX + group


def pop_retry_topic(group: str, topic: str, separator: str = "_") -> str:
    """Return the retry topic for messages that a group popped from a topic. Names of version 2 have a ``+`` as
    separator."""
    return f"{RETRY_PREFIX}{group}{separator}{topic}"


def group_of_retry_topic(topic: str) -> str:
    """Return the group of a retry topic ``%RETRY%<group>`` or, with POP, ``%RETRY%<group>+<topic>``.
    Source: behaviour.md §3.3."""
    # POP's older spelling cannot be split: the "_" may be a character of the group or of the topic.
    return topic.removeprefix(RETRY_PREFIX).partition("+")[0]


def dlq_topic(group: str) -> str:
    """Return the topic of a group's dead letters."""
    return DLQ_PREFIX + group


def is_light(name: str) -> bool:
    """Return True if the name belongs to a light queue, or to a group with separately stored offsets
    (``MixAll.isLmq``)."""
    return name.startswith(LIGHT_PREFIX)


def lite_queue(parent: str, lite_topic: str) -> str:
    """Return the name of the light queue of a lite topic. Source: lite.md §1."""
    return f"{LIGHT_PREFIX}${parent}${lite_topic}"


def split_lite_queue(name: str) -> tuple[str, str] | None:
    """Return parent and lite topic of a light queue ``%LMQ%$parent$lite``. Return None for any other name: the light
    queue of no lite topic. Source: lite.md §3."""
    prefix, *parts = name.split("$")
    return (parts[0], parts[1]) if prefix == LIGHT_PREFIX and len(parts) == 2 and all(parts) else None


def lite_topic_fault(lite_topic: str) -> str | None:
    """Return the fault of a lite topic's name, in the words of the reference, or None if the name is valid.
    Source: lite.md §3."""
    # Valid names first, because clients repeat thousands of names every 30 seconds.
    if len(lite_topic) <= LITE_TOPIC_BYTES_MAX and _LEGAL_LITE.fullmatch(lite_topic):
        return None
    if not lite_topic.strip():
        return "lite topic cannot be the char sequence of whitespace"
    if len(lite_topic.encode("utf-8", "replace")) > LITE_TOPIC_BYTES_MAX:
        return f"lite topic exceed the max size {LITE_TOPIC_BYTES_MAX}"
    return "lite topic can only contain alphanumeric characters, hyphens(-), and underscores(_)"


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def is_of_applications(topic: str, servers: Collection[str] = ()) -> bool:
    """Return True if the name of a topic belongs to an application: it is no system, retry, dead-letter or server
    topic.
    ``servers``: the names of clusters and brokers. Each has a topic with its name, and a cluster also a reply topic."""
    is_of_server = topic in servers or (topic.endswith(_REPLY) and topic.removesuffix(_REPLY) in servers)
    return not (is_of_server or is_system_topic(topic) or topic.startswith(NOT_OF_APPLICATIONS))


_REPLY = "_REPLY_TOPIC"


def with_namespace(namespace: str, name: str) -> str:
    """Return the full name of a topic or group. System names, and names that have the namespace already, are returned
    unchanged."""
    prefix, bare = _prefix(name)
    if not namespace or not bare or bare.startswith((f"{namespace}%", SYSTEM_GROUP_PREFIX)) or is_system_topic(bare):
        return name
    return f"{prefix}{namespace}%{bare}"


def without_namespace(namespace: str, name: str) -> str:
    """Return a name without its namespace. A name of another namespace is returned unchanged."""
    prefix, bare = _prefix(name)
    return prefix + bare.removeprefix(f"{namespace}%") if namespace else name


def _prefix(name: str) -> tuple[str, str]:
    """Return the prefix of a retry or dead-letter topic (empty for other names), and the rest of the name."""
    prefix = next((prefix for prefix in (RETRY_PREFIX, DLQ_PREFIX) if name.startswith(prefix)), "")
    return prefix, name.removeprefix(prefix)


def topic_fault(topic: str) -> str | None:
    """Return the fault of a topic name, in the words of the reference, or None if the name is valid."""
    if not topic.strip():
        return "The specified topic is blank."
    # Do not use `match` with a `$`: it would accept a line end after the name.
    if not _LEGAL.fullmatch(topic):
        return f"The specified topic: {topic}, contains illegal characters, allowing only {_LEGAL_TEXT}"
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        if len(topic) > RETRY_TOPIC_CHARACTERS_MAX:
            return (
                f"The specified topic is DLQ or Retry topic: {topic}, and it's longer than topic max length: "
                f"{RETRY_TOPIC_CHARACTERS_MAX}"
            )
    elif len(topic) > TOPIC_CHARACTERS_MAX:
        return f"The specified topic: {topic}, is longer than topic max length: {TOPIC_CHARACTERS_MAX}"
    return None


def group_fault(group: str) -> str | None:
    """Return the fault of a group name, in the words of the reference, or None if the name is valid."""
    if not group.strip():
        return "The specified group is blank."
    if len(group) > GROUP_CHARACTERS_MAX:
        return f"The specified group: {group}, is longer than group max length: {GROUP_CHARACTERS_MAX}"
    if not _LEGAL.fullmatch(group):
        return f"The specified group: {group}, contains illegal characters, allowing only {_LEGAL_TEXT}"
    return None
