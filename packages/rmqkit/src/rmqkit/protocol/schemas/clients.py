"""Clients at a broker: heartbeats, connections, locks of queues, and requests to running clients (34, 35, 38, 40 to 42,
46, 203, 204, 307, 309, 328).

This module also defines `MessageQueue`, and the two strategies with which both clients and brokers divide queues among
members:

===========================  ============  ====================
8 queues, 3 clients          averagely     averagely_by_circle
===========================  ============  ====================
first, second, third client  012, 345, 67  036, 147, 25
===========================  ============  ====================

Maps with queues as keys need the dialect: write them with `fastjson.dumps`, and read them with `fastjson.decode_as`.
Source: remoting.md §4.3.4, §4.4, §4.5, §6.3, §6.4.4, §6.4.8, §6.4.10 to §6.4.12; behaviour.md §4.15, §8.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, CLIENT, Content, Operation, Right, Server


class MessageQueue(Struct, rename="camel", frozen=True, order=True, gc=False):
    """One queue of a topic on one broker. Queues sort by topic, broker name and queue id.

    Attributes:
        topic: the topic.
        broker_name: the name of the broker.
        queue_id: the number of the queue on this broker, from 0.
    """

    # The order of the fields is the sort order of queues. If members of a group sorted differently, some queues would
    # have two owners and other queues none.
    topic: str
    broker_name: str
    queue_id: Int32


def queue_text(queue: MessageQueue) -> str:
    """Return a queue as readable text."""
    return f"{queue.broker_name}:{queue.queue_id}"


class SubscriptionData(Struct, rename="camel", kw_only=True):
    """The subscription of a group to a topic.

    Attributes:
        sub_string: ``*``, ``A || B`` or an SQL92 text.
        tags_set: the tags of a tag expression.
        code_set: `java_hash` of each tag; the broker filters by these hashes.
        sub_version: ms since the epoch. A newer subscription replaces an older one.
        expression_type: ``TAG`` or ``SQL92``.
    """

    class_filter_mode: bool = False
    topic: str
    sub_string: str = "*"
    tags_set: list[str] = field(default_factory=list)
    code_set: list[Int32] = field(default_factory=list)
    sub_version: Int64 = 0
    # Java treats null as TAG.
    expression_type: str | None = "TAG"


class ConsumerData(Struct, rename="camel", kw_only=True):
    """A consumer group of a client."""

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = field(default_factory=list)
    unit_mode: bool = False


class ProducerData(Struct, rename="camel"):
    """A producer group of a client."""

    group_name: str


class HeartbeatData(Struct, kw_only=True):
    """Body of HEART_BEAT (note the spelling ``clientID``)."""

    clientID: str  # noqa: N815
    producerDataSet: list[ProducerData] = field(default_factory=list)  # noqa: N815
    consumerDataSet: list[ConsumerData] = field(default_factory=list)  # noqa: N815
    # 0 means none, as for all clients before 5.1.
    heartbeatFingerprint: Int32 = 0  # noqa: N815
    # Set only for brokers that answered IS_SUPPORT_HEART_BEAT_V2. An older broker ignores this member, and would
    # conclude that the group has no subscription.
    withoutSub: bool = False  # noqa: N815


class CheckClientBody(Struct, rename="camel", kw_only=True):
    """Body of CHECK_CLIENT_CONFIG."""

    client_id: str = ""
    group: str = ""
    namespace: str = ""
    subscription_data: SubscriptionData | None = None


class ConsumerIds(Struct, rename="camel"):
    """Response to GET_CONSUMER_LIST_BY_GROUP."""

    consumer_id_list: list[str] = field(default_factory=list)


class HeartbeatResponse(Struct, gc=False):
    """The response to HEART_BEAT of 5.x: the broker supports fingerprints, and the fingerprint has changed."""

    is_support_heart_beat_v2: bool | None = field(default=None, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool | None = field(default=None, name="IS_SUB_CHANGE")


class UnregisterClientRequest(Struct, gc=False):
    """UNREGISTER_CLIENT. One of the groups may be missing."""

    clientID: str  # noqa: N815 - the wire spelling
    producerGroup: str | None = None  # noqa: N815
    consumerGroup: str | None = None  # noqa: N815


class ConsumerGroupRequest(Struct, rename="camel", gc=False):
    """GET_CONSUMER_LIST_BY_GROUP, NOTIFY_CONSUMER_IDS_CHANGED and GET_CONSUMER_CONNECTION_LIST."""

    consumer_group: str


class ProducerGroupRequest(Struct, rename="camel", gc=False):
    """GET_PRODUCER_CONNECTION_LIST."""

    producer_group: str


class ClientConnection(Struct, rename="camel", kw_only=True):
    """A client of a group (``Connection``). ``version`` is a protocol version number."""

    client_id: str
    client_addr: str
    language: str = "JAVA"
    version: Int32 = 0


class ProducerConnection(Struct, rename="camel"):
    """Response to GET_PRODUCER_CONNECTION_LIST."""

    connection_set: list[ClientConnection] = field(default_factory=list)


class ConsumerConnection(Struct, rename="camel", kw_only=True):
    """Response to GET_CONSUMER_CONNECTION_LIST: the clients, and the registered data of the group."""

    connection_set: list[ClientConnection] = field(default_factory=list)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)


class ProducerInfo(Struct, rename="camel", kw_only=True):
    """A producer. ``last_update_timestamp`` is the time of its last heartbeat in ms."""

    client_id: str
    # The default name would be remoteIp, which Java does not find.
    remote_ip: str = field(name="remoteIP")
    language: str = "JAVA"
    version: Int32 = 0
    last_update_timestamp: Int64 = 0


class ProducerTable(Struct):
    """Response to GET_ALL_PRODUCER_INFO: group → its producers."""

    data: dict[str, list[ProducerInfo]] = field(default_factory=dict)


class LockBody(Struct, kw_only=True):
    """Body of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    client_id: str = field(name="clientId")
    consumer_group: str = field(name="consumerGroup")
    queues: list[MessageQueue] = field(default_factory=list, name="mqSet")
    only_this_broker: bool = field(default=False, name="onlyThisBroker")


class LockedQueues(Struct):
    """Response to LOCK_BATCH_MQ: the queues for which the client now holds the lock."""

    queues: list[MessageQueue] = field(default_factory=list, name="lockOKMQSet")


class RunningInfoRequest(Struct, rename="camel", gc=False):
    """GET_CONSUMER_RUNNING_INFO."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeDirectlyRequest(Struct, rename="camel", kw_only=True, gc=False):
    """CONSUME_MESSAGE_DIRECTLY. ``msg_id`` is an offset message id. The broker adds the last three fields."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    topic: str | None = None
    broker_name: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None


class ProcessQueueInfo(Struct, rename="camel", kw_only=True, gc=False):
    """The state of a queue in a client. Times are in ms. ``droped`` is the reference's spelling."""

    commit_offset: Int64 = 0
    cached_msg_min_offset: Int64 = 0
    cached_msg_max_offset: Int64 = 0
    cached_msg_count: Int32 = 0
    # The default name would be cachedMsgSizeInMib.
    cached_msg_size_in_mib: Int32 = field(default=0, name="cachedMsgSizeInMiB")
    transaction_msg_min_offset: Int64 = 0
    transaction_msg_max_offset: Int64 = 0
    transaction_msg_count: Int32 = 0
    locked: bool = False
    try_unlock_times: Int64 = 0
    last_lock_timestamp: Int64 = 0
    droped: bool = False
    last_pull_timestamp: Int64 = 0
    last_consume_timestamp: Int64 = 0


class PopProcessQueueInfo(Struct, rename="camel", kw_only=True, gc=False):
    """The state of a queue from which a client pops."""

    wait_ack_count: Int32 = 0
    droped: bool = False
    last_pop_timestamp: Int64 = 0


class ConsumeStatus(Struct, kw_only=True, gc=False):
    """The rates of a topic on a client. ``rt`` is the mean time per call in ms, ``tps`` is messages per second."""

    pull_rt: float = field(default=0.0, name="pullRT")
    pull_tps: float = field(default=0.0, name="pullTPS")
    consume_rt: float = field(default=0.0, name="consumeRT")
    consume_ok_tps: float = field(default=0.0, name="consumeOKTPS")
    consume_failed_tps: float = field(default=0.0, name="consumeFailedTPS")
    consume_failed_msgs: Int64 = field(default=0, name="consumeFailedMsgs")


class ConsumerRunningInfo(Struct, rename="camel", kw_only=True):
    """Response to GET_CONSUMER_RUNNING_INFO. The names in ``properties`` are in remoting.md §6.4.12."""

    properties: dict[str, str] = field(default_factory=dict)
    subscription_set: list[SubscriptionData] = field(default_factory=list)
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] = field(default_factory=dict)
    status_table: dict[str, ConsumeStatus] = field(default_factory=dict)
    user_consumer_info: dict[str, str] = field(default_factory=dict)
    jstack: str | None = None


class ConsumeMessageDirectlyResult(Struct, rename="camel", kw_only=True, gc=False):
    """Response to CONSUME_MESSAGE_DIRECTLY. ``consume_result`` is one of the ``CR_`` names of remoting.md §6.3."""

    order: bool = False
    auto_commit: bool = True
    consume_result: str | None = None
    remark: str | None = None
    # "mills" is the reference's spelling.
    spent_time_mills: Int64 = 0


def averagely(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
    """Return a contiguous block of the queues for a client. The first ``len(queues) % len(client_ids)`` clients get one
    more queue (AVG, the default)."""
    # A member that the broker does not list yet gets no queues. Otherwise it would get queues of other members.
    if own_id not in client_ids:
        return []
    index = client_ids.index(own_id)
    each, more = divmod(len(queues), len(client_ids))
    start = index * each + min(index, more)
    return list(queues[start : start + each + (index < more)])


def averagely_by_circle(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
    """Return the queues of a client, where client ``i % len(client_ids)`` gets queue ``i`` (AVG_BY_CIRCLE)."""
    if own_id not in client_ids:
        return []
    return list(queues[client_ids.index(own_id) :: len(client_ids)])


# fmt: off
OPERATIONS = (
    Operation(Code.HEART_BEAT, 1, BROKER, None, HeartbeatResponse, request_body=HeartbeatData,
              right=Right("Sub", is_body=True)),
    Operation(Code.UNREGISTER_CLIENT, 1, BROKER, UnregisterClientRequest, right=Right("Sub", "consumerGroup-")),
    Operation(Code.GET_CONSUMER_LIST_BY_GROUP, 1, BROKER, ConsumerGroupRequest, response_body=ConsumerIds,
              right=Right("Sub Get", "consumerGroup!"), is_reading=True),
    Operation(Code.NOTIFY_CONSUMER_IDS_CHANGED, 1, CLIENT, ConsumerGroupRequest),
    Operation(Code.LOCK_BATCH_MQ, 1, BROKER, request_body=LockBody, response_body=LockedQueues,
              right=Right("Sub", is_body=True)),
    Operation(Code.UNLOCK_BATCH_MQ, 1, BROKER, request_body=LockBody, right=Right("Sub", is_body=True)),
    Operation(Code.CHECK_CLIENT_CONFIG, 1, BROKER, request_body=CheckClientBody),
    Operation(Code.GET_CONSUMER_CONNECTION_LIST, 2, BROKER, ConsumerGroupRequest, response_body=ConsumerConnection,
              right=Right("Get", "consumerGroup"), is_reading=True),
    Operation(Code.GET_PRODUCER_CONNECTION_LIST, 2, BROKER, ProducerGroupRequest, response_body=ProducerConnection,
              right=Right("Get"), is_reading=True),
    Operation(Code.GET_CONSUMER_RUNNING_INFO, 2, (Server.BROKER, Server.CLIENT), RunningInfoRequest,
              response_body=ConsumerRunningInfo, right=Right("Get", "consumerGroup"), is_reading=True),
    Operation(Code.CONSUME_MESSAGE_DIRECTLY, 2, (Server.BROKER, Server.CLIENT), ConsumeDirectlyRequest,
              request_body=Content.RECORDS, response_body=ConsumeMessageDirectlyResult,
              right=Right("Sub", "consumerGroup topic", message="msgId", message_actions="Sub Get")),
    Operation(Code.GET_ALL_PRODUCER_INFO, 2, BROKER, response_body=ProducerTable, right=Right("Get"),
              is_reading=True),
)
# fmt: on
