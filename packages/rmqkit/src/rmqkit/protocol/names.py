"""Names of topics and groups: what is allowed, what is reserved, how retry and dead-letter topics are called.

A client's namespace is a part of the names alone (``NamespaceUtil``): ``X`` is ``NS%X``, ``%RETRY%G`` is
``%RETRY%NS%G``; brokers know nothing of it. Source: remoting.md §3.2, §8.4, §8.5; behaviour.md §2.8.
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
DLQ_PREFIX = "%DLQ%"
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
SYNC_BROKER_MEMBER_PREFIX = "rmq_sys_SYNC_BROKER_MEMBER_"
"""With a broker's name behind it: the topic whose route tells the true ids of those who bear it."""

SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"

TOPIC_CHARACTERS_MAX = 127
RETRY_TOPIC_CHARACTERS_MAX = 255
GROUP_CHARACTERS_MAX = 120

assert GROUP_CHARACTERS_MAX + len(RETRY_PREFIX) <= RETRY_TOPIC_CHARACTERS_MAX, "every group has a retry topic"

FORBIDDEN_TO_SEND = frozenset(
    (SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, SELF_TEST_TOPIC, OFFSET_MOVED_EVENT)
)
"""Topics clients may never send to."""

SYSTEM_TOPICS = FORBIDDEN_TO_SEND | {AUTO_CREATE_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC, "CHECKPOINT_TOPIC"}
"""Names of topics that belong to every broker."""

NOT_OF_APPLICATIONS = (SYSTEM_TOPIC_PREFIX, RETRY_PREFIX, DLQ_PREFIX)
"""What further topics begin with that no application sends to by itself."""

TOOLS_GROUP = "TOOLS_CONSUMER"
"""The group of pulls that belong to no group of an application. Nobody joins it, and no offset is saved."""

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
"""Groups every broker has from the start."""

_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)
_LEGAL_TEXT = "^[%|a-zA-Z0-9_-]+$"


NO_LITE_TOPICS = "lite topics are not supported by rmqkit: use a FIFO topic, with a message group for each lite topic"
"""The answer to everything that needs lite topics (RIP-83)."""


def retry_topic(group: str) -> str:
    """The topic that holds a group's messages to be consumed again."""
    return RETRY_PREFIX + group


def pop_retry_topic(group: str, topic: str, separator: str = "_") -> str:
    """The topic that holds a group's popped messages of a topic to be consumed again; version 2 has ``+`` in it."""
    return f"{RETRY_PREFIX}{group}{separator}{topic}"


def group_of_retry_topic(topic: str) -> str:
    """The group of a retry topic; POP's is ``%RETRY%<group>+<topic>``. Source: behaviour.md §3.3."""
    # POP's older spelling cannot be cut: the "_" in it may be a letter of the group or of the topic.
    return topic.removeprefix(RETRY_PREFIX).partition("+")[0]


def dlq_topic(group: str) -> str:
    """The topic that holds a group's messages that were given up."""
    return DLQ_PREFIX + group


def is_light(name: str) -> bool:
    """Return True if a topic is a light queue, or a group one that has its offsets beside the others'
    (``MixAll.isLmq``)."""
    return name.startswith(LIGHT_PREFIX)


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def is_of_applications(topic: str, servers: Collection[str] = ()) -> bool:
    """Return True if applications made a topic by its name: no system topic, no group's retry or dead-letter topic.
    ``servers`` are the names of clusters and brokers: each of them has a topic, and a cluster one for replies."""
    is_of_server = topic in servers or (topic.endswith(_REPLY) and topic.removesuffix(_REPLY) in servers)
    return not (is_of_server or is_system_topic(topic) or topic.startswith(NOT_OF_APPLICATIONS))


_REPLY = "_REPLY_TOPIC"


def with_namespace(namespace: str, name: str) -> str:
    """A topic or group as brokers know it; names of the system and those that have the namespace stay as they are."""
    prefix, bare = _prefix(name)
    if not namespace or not bare or bare.startswith((f"{namespace}%", SYSTEM_GROUP_PREFIX)) or is_system_topic(bare):
        return name
    return f"{prefix}{namespace}%{bare}"


def without_namespace(namespace: str, name: str) -> str:
    """The opposite of `with_namespace`; a name of another namespace stays as it is."""
    prefix, bare = _prefix(name)
    return prefix + bare.removeprefix(f"{namespace}%") if namespace else name


def _prefix(name: str) -> tuple[str, str]:
    """Return the prefix of a retry or dead-letter topic (empty for other names), and the rest of the name."""
    prefix = next((prefix for prefix in (RETRY_PREFIX, DLQ_PREFIX) if name.startswith(prefix)), "")
    return prefix, name.removeprefix(prefix)


def topic_fault(topic: str) -> str | None:
    """The reference's text for what is wrong with a topic name, or None."""
    if not topic.strip():
        return "The specified topic is blank."
    # Not `match` with a `$`: that lets a line end pass behind the name.
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
    """The reference's text for what is wrong with a group name, or None."""
    if not group.strip():
        return "The specified group is blank."
    if len(group) > GROUP_CHARACTERS_MAX:
        return f"The specified group: {group}, is longer than group max length: {GROUP_CHARACTERS_MAX}"
    if not _LEGAL.fullmatch(group):
        return f"The specified group: {group}, contains illegal characters, allowing only {_LEGAL_TEXT}"
    return None
