"""The catalog of requests: for every code its tier, who serves it, and the types of its headers and bodies.

One row per code; the reference page ``docs/reference/codes.md`` and the tests of the whole table read it. Tiers: 1 real
clients and registering brokers need it, 2 tools, replication and access control, 3 POP, controller, static topics, cold
data, lite topics.

A body is a type to be read with `fastjson.decode_as`, or one of `Content` when it is not JSON, or None. Requests that
nothing here speaks have no types (`_UNTYPED`). Source: remoting.md §4, §6.5.
"""

from __future__ import annotations

import enum
from typing import Any

from msgspec import Struct

from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.schemas import access, brokers, clients, groups, offsets, pop, pull, send, topics

__all__ = ["CATALOG", "Content", "Operation", "Server"]


class Server(enum.StrEnum):
    """Who answers a request."""

    NAME_SERVER = "name server"
    BROKER = "broker"
    CLIENT = "client"
    CONTROLLER = "controller"
    CONTAINER = "broker container"


class Content(enum.StrEnum):
    """A body that is not JSON."""

    MESSAGE = "message body"
    BATCH = "batch"
    RECORDS = "records"
    SETTINGS = "properties text"
    TIMER_CHECKPOINT = "timer checkpoint"


class Operation(Struct, frozen=True):
    """One kind of request.

    Attributes:
        tier: 1 to 3.
        servers: who answers it; the first one is asked first.
        request_header, response_header: types of ``extFields``; None when there are no fields of its own.
        request_body, response_body: what the bodies are; those of the response when it succeeds.
        is_typed: whether the four types are declared.
    """

    code: Code
    tier: int
    servers: tuple[Server, ...]
    request_header: type[Struct] | None = None
    response_header: type[Struct] | None = None
    request_body: Any = None
    response_body: Any = None
    is_typed: bool = True

    @property
    def name(self) -> str:
        """RocketMQ's name of the request."""
        return self.code.name


_N = (Server.NAME_SERVER,)
_B = (Server.BROKER,)
_C = (Server.CLIENT,)
_K = (Server.CONTROLLER,)
_BC = (Server.BROKER, Server.CLIENT)
_NK = (Server.NAME_SERVER, Server.CONTROLLER)
_BOX = (Server.CONTAINER,)

_Row = tuple[Code, tuple[Server, ...], type[Struct] | None, type[Struct] | None, Any, Any]


# fmt: off
# Columns: code, servers, request header, response header, request body, response body.
_TIER_1: tuple[_Row, ...] = (
    (Code.SEND_MESSAGE, _B, send.SendMessageRequest, send.SendMessageResponse, Content.MESSAGE, None),
    (Code.PULL_MESSAGE, _B, pull.PullMessageRequest, pull.PullMessageResponse, None, Content.RECORDS),
    (Code.QUERY_MESSAGE, _B, pull.QueryMessageRequest, pull.QueryMessageResponse, None, Content.RECORDS),
    (Code.QUERY_CONSUMER_OFFSET, _B, offsets.QueryConsumerOffsetRequest, offsets.OffsetResponse, None, None),
    (Code.UPDATE_CONSUMER_OFFSET, _B, offsets.UpdateConsumerOffsetRequest, None, None, None),
    (Code.UPDATE_AND_CREATE_TOPIC, _B, topics.CreateTopicRequest, None, None, None),
    (Code.SEARCH_OFFSET_BY_TIMESTAMP, _B, offsets.SearchOffsetRequest, offsets.OffsetResponse, None, None),
    (Code.GET_MAX_OFFSET, _B, offsets.QueueRequest, offsets.OffsetResponse, None, None),
    (Code.GET_MIN_OFFSET, _B, offsets.QueueRequest, offsets.OffsetResponse, None, None),
    (Code.GET_EARLIEST_MSG_STORETIME, _B, offsets.QueueRequest, offsets.StoreTimeResponse, None, None),
    (Code.VIEW_MESSAGE_BY_ID, _B, pull.ViewMessageRequest, None, None, Content.RECORDS),
    (Code.HEART_BEAT, _B, None, clients.HeartbeatResponse, clients.HeartbeatData, None),
    (Code.UNREGISTER_CLIENT, _B, clients.UnregisterClientRequest, None, None, None),
    (Code.CONSUMER_SEND_MSG_BACK, _B, send.ConsumerSendBackRequest, None, None, None),
    (Code.END_TRANSACTION, _B, send.EndTransactionRequest, None, None, None),
    (Code.GET_CONSUMER_LIST_BY_GROUP, _B, clients.ConsumerGroupRequest, None, None, clients.ConsumerIds),
    (Code.CHECK_TRANSACTION_STATE, _C, send.CheckTransactionRequest, None, Content.RECORDS, None),
    (Code.NOTIFY_CONSUMER_IDS_CHANGED, _C, clients.ConsumerGroupRequest, None, None, None),
    (Code.LOCK_BATCH_MQ, _B, None, None, clients.LockBody, clients.LockedQueues),
    (Code.UNLOCK_BATCH_MQ, _B, None, None, clients.LockBody, None),
    (Code.CHECK_CLIENT_CONFIG, _B, None, None, clients.CheckClientBody, None),
    (Code.REGISTER_BROKER, _N, brokers.RegisterBrokerRequest, brokers.RegisterBrokerResponse,
     brokers.RegisterBrokerBody, topics.KVTable),
    (Code.UNREGISTER_BROKER, _N, brokers.BrokerIdentity, None, None, None),
    (Code.GET_ROUTEINFO_BY_TOPIC, _N, topics.RouteRequest, None, None, topics.TopicRoute),
    (Code.GET_BROKER_CLUSTER_INFO, _N, None, None, None, topics.ClusterInfo),
    (Code.SEND_MESSAGE_V2, _B, send.SendMessageV2Request, send.SendMessageResponse,
     Content.MESSAGE, None),
    (Code.SEND_BATCH_MESSAGE, _B, send.SendMessageV2Request, send.SendMessageResponse,
     Content.BATCH, None),
    (Code.QUERY_DATA_VERSION, _N, brokers.BrokerIdentity, brokers.DataVersionResponse,
     topics.DataVersion, topics.DataVersion),
    (Code.SEND_REPLY_MESSAGE, _B, send.SendMessageRequest, send.SendMessageResponse,
     Content.MESSAGE, None),
    (Code.SEND_REPLY_MESSAGE_V2, _B, send.SendMessageV2Request, send.SendMessageResponse,
     Content.MESSAGE, None),
    (Code.PUSH_REPLY_MESSAGE_TO_CLIENT, _C, send.PushReplyRequest, None, Content.MESSAGE, None),
    (Code.LITE_PULL_MESSAGE, _B, pull.PullMessageRequest, pull.PullMessageResponse,
     None, Content.RECORDS),
)

_TIER_2: tuple[_Row, ...] = (
    (Code.UPDATE_AND_CREATE_TOPIC_LIST, _B, None, None, topics.TopicConfigList, None),
    (Code.GET_ALL_TOPIC_CONFIG, _B, topics.TopicConfigsRequest, topics.TopicConfigsResponse,
     None, topics.TopicConfigTable),
    (Code.UPDATE_BROKER_CONFIG, _B, None, None, Content.SETTINGS, None),
    (Code.GET_BROKER_CONFIG, _B, None, brokers.BrokerConfigResponse, None, Content.SETTINGS),
    (Code.GET_BROKER_RUNTIME_INFO, _B, None, None, None, topics.KVTable),
    (Code.GET_ALL_CONSUMER_OFFSET, _B, None, None, None, offsets.ConsumerOffsets),
    (Code.GET_ALL_DELAY_OFFSET, _B, None, None, None, brokers.DelayOffsets),
    (Code.GET_TIMER_CHECK_POINT, _B, None, None, None, Content.TIMER_CHECKPOINT),
    (Code.GET_TIMER_METRICS, _B, None, None, None, brokers.TimerMetrics),
    (Code.PUT_KV_CONFIG, _N, topics.KVPut, None, None, None),
    (Code.GET_KV_CONFIG, _N, topics.KVKey, topics.KVValue, None, None),
    (Code.DELETE_KV_CONFIG, _N, topics.KVKey, None, None, None),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, _B, None, None, groups.SubscriptionGroupConfig, None),
    (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, _B, groups.GroupConfigsRequest, groups.GroupConfigsResponse,
     None, groups.SubscriptionGroupTable),
    (Code.GET_TOPIC_STATS_INFO, _B, topics.TopicRequest, None, None, offsets.TopicStatsTable),
    (Code.GET_CONSUMER_CONNECTION_LIST, _B, clients.ConsumerGroupRequest, None, None, clients.ConsumerConnection),
    (Code.GET_PRODUCER_CONNECTION_LIST, _B, clients.ProducerGroupRequest, None,
     None, clients.ProducerConnection),
    (Code.WIPE_WRITE_PERM_OF_BROKER, _N, topics.BrokerNameRequest, topics.WipeWritePermResponse,
     None, None),
    (Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, _N, None, None, None, topics.TopicList),
    (Code.DELETE_SUBSCRIPTIONGROUP, _B, groups.DeleteGroupRequest, None, None, None),
    (Code.GET_CONSUME_STATS, _B, offsets.ConsumeStatsRequest, None, None, offsets.ConsumeStats),
    (Code.DELETE_TOPIC_IN_BROKER, _B, topics.TopicRequest, None, None, None),
    (Code.DELETE_TOPIC_IN_NAMESRV, _N, topics.DeleteTopicRequest, None, None, None),
    (Code.REGISTER_TOPIC_IN_NAMESRV, _N, topics.RegisterTopicRequest, None, topics.TopicRoute, None),
    (Code.GET_KVLIST_BY_NAMESPACE, _N, topics.KVNamespace, None, None, topics.KVTable),
    (Code.RESET_CONSUMER_CLIENT_OFFSET, _C, offsets.ResetClientOffsetRequest, None,
     offsets.ResetOffsetBody, None),
    (Code.GET_CONSUMER_STATUS_FROM_CLIENT, _C, offsets.ConsumerStatusRequest, None,
     None, offsets.ConsumerStatus),
    (Code.INVOKE_BROKER_TO_RESET_OFFSET, _B, offsets.ResetOffsetRequest, None,
     None, offsets.ResetOffsetBody),
    (Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, _B, offsets.ConsumerStatusRequest, None,
     None, offsets.ConsumerStatus),
    (Code.GET_TOPICS_BY_CLUSTER, _N, topics.ClusterRequest, None, None, topics.TopicList),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, _B, None, None, groups.GroupConfigList, None),
    (Code.QUERY_TOPIC_CONSUME_BY_WHO, _B, topics.TopicRequest, None, None, groups.GroupList),
    (Code.QUERY_CONSUME_TIME_SPAN, _B, offsets.TimeSpanRequest, None, None, offsets.ConsumeTimeSpans),
    (Code.GET_SYSTEM_TOPIC_LIST_FROM_NS, _N, None, None, None, topics.TopicList),
    (Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, _B, None, None, None, topics.TopicList),
    (Code.CLEAN_EXPIRED_CONSUMEQUEUE, _B, None, None, None, None),
    (Code.GET_CONSUMER_RUNNING_INFO, _BC, clients.RunningInfoRequest, None,
     None, clients.ConsumerRunningInfo),
    (Code.QUERY_CORRECTION_OFFSET, _B, offsets.CorrectionOffsetRequest, None, None, offsets.CorrectionOffsets),
    (Code.CONSUME_MESSAGE_DIRECTLY, _BC, clients.ConsumeDirectlyRequest, None,
     Content.RECORDS, clients.ConsumeMessageDirectlyResult),
    (Code.GET_UNIT_TOPIC_LIST, _N, None, None, None, topics.TopicList),
    (Code.GET_HAS_UNIT_SUB_TOPIC_LIST, _N, None, None, None, topics.TopicList),
    (Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, _N, None, None, None, topics.TopicList),
    (Code.CLONE_GROUP_OFFSET, _B, offsets.CloneGroupOffsetRequest, None, None, None),
    (Code.VIEW_BROKER_STATS_DATA, _B, offsets.StatsDataRequest, None, None, offsets.BrokerStatsData),
    (Code.CLEAN_UNUSED_TOPIC, _B, None, None, None, None),
    (Code.GET_BROKER_CONSUME_STATS, _B, offsets.AllConsumeStatsRequest, None, None, offsets.ConsumeStatsList),
    (Code.UPDATE_NAMESRV_CONFIG, _N, None, None, Content.SETTINGS, None),
    (Code.GET_NAMESRV_CONFIG, _N, None, None, None, Content.SETTINGS),
    (Code.QUERY_CONSUME_QUEUE, _B, pull.QueryConsumeQueueRequest, None, None, pull.QueryConsumeQueueBody),
    (Code.RESUME_CHECK_HALF_MESSAGE, _B, send.ResumeCheckRequest, None, None, None),
    (Code.ADD_WRITE_PERM_OF_BROKER, _N, topics.BrokerNameRequest, topics.AddWritePermResponse,
     None, None),
    (Code.GET_ALL_PRODUCER_INFO, _B, None, None, None, clients.ProducerTable),
    (Code.DELETE_EXPIRED_COMMITLOG, _B, None, None, None, None),
    (Code.QUERY_TOPICS_BY_CONSUMER, _B, groups.GroupRequest, None, None, topics.TopicList),
    (Code.QUERY_SUBSCRIPTION_BY_CONSUMER, _B, groups.GroupTopicRequest, None, None, groups.GroupSubscription),
    (Code.GET_TOPIC_CONFIG, _B, topics.TopicRequest, None, None, topics.TopicConfig),
    (Code.GET_SUBSCRIPTIONGROUP_CONFIG, _B, groups.GroupRequest, None,
     None, groups.SubscriptionGroupConfig),
    (Code.UPDATE_AND_GET_GROUP_FORBIDDEN, _B, groups.GroupForbiddenRequest, None, None, groups.GroupForbidden),
    (Code.RECALL_MESSAGE, _B, send.RecallMessageRequest, send.RecallMessageResponse, None, None),
    (Code.GET_BROKER_MEMBER_GROUP, _N, brokers.BrokerMemberGroupRequest, None,
     None, brokers.BrokerMemberGroupBody),
    (Code.BROKER_HEARTBEAT, _NK, brokers.BrokerHeartbeat, None, None, None),
    (Code.NOTIFY_MIN_BROKER_ID_CHANGE, _B, brokers.MinBrokerIdChange, None, None, None),
    (Code.EXCHANGE_BROKER_HA_INFO, _B, brokers.HaInfo, brokers.HaInfo, None, None),
    (Code.GET_BROKER_HA_STATUS, _B, None, None, None, brokers.HaRuntimeInfo),
    (Code.RESET_MASTER_FLUSH_OFFSET, _B, brokers.MasterFlushOffsetRequest, None, None, None),
    (Code.AUTH_CREATE_USER, _B, access.UserRequest, None, access.UserInfo, None),
    (Code.AUTH_UPDATE_USER, _B, access.UserRequest, None, access.UserInfo, None),
    (Code.AUTH_DELETE_USER, _B, access.UserRequest, None, None, None),
    (Code.AUTH_GET_USER, _B, access.UserRequest, None, None, access.UserInfo),
    (Code.AUTH_LIST_USER, _B, access.ListUsersRequest, None, None, list[access.UserInfo]),
    (Code.AUTH_CREATE_ACL, _B, access.SubjectRequest, None, access.AclInfo, None),
    (Code.AUTH_UPDATE_ACL, _B, access.SubjectRequest, None, access.AclInfo, None),
    (Code.AUTH_DELETE_ACL, _B, access.DeleteAclRequest, None, None, None),
    (Code.AUTH_GET_ACL, _B, access.SubjectRequest, None, None, access.AclInfo),
    (Code.AUTH_LIST_ACL, _B, access.ListAclsRequest, None, None, list[access.AclInfo]),
)

_TIER_3: tuple[_Row, ...] = (
    (Code.QUERY_ASSIGNMENT, _B, None, None, pop.QueryAssignmentBody, pop.Assignments),
    (Code.SET_MESSAGE_REQUEST_MODE, _B, None, None, pop.MessageRequestMode, None),
    (Code.GET_ALL_MESSAGE_REQUEST_MODE, _B, None, None, None, pop.MessageRequestModes),
    (Code.POP_MESSAGE, _B, pop.PopMessageRequest, pop.PopMessageResponse, None, Content.RECORDS),
    (Code.ACK_MESSAGE, _B, pop.AckMessageRequest, None, None, None),
    (Code.PEEK_MESSAGE, _B, pop.PeekMessageRequest, pop.PopMessageResponse, None, Content.RECORDS),
    (Code.CHANGE_MESSAGE_INVISIBLETIME, _B, pop.ChangeInvisibleTimeRequest, pop.ChangeInvisibleTimeResponse,
     None, None),
    (Code.NOTIFICATION, _B, pop.NotificationRequest, pop.NotificationResponse, None, None),
    (Code.POLLING_INFO, _B, pop.PollingInfoRequest, pop.PollingInfoResponse, None, None),
    (Code.BATCH_ACK_MESSAGE, _B, None, None, pop.BatchAckBody, None),
)

_UNTYPED: tuple[tuple[int, tuple[Server, ...], tuple[int, ...]], ...] = (
    (2, _B, (50, 51, 52, 53, 54)),  # the plain ACL of 4.4 to 5.2
    (3, _B, (354, 355, 513, 1007, 1008, *range(2001, 2005), 5001, 200056, *range(200070, 200073),
          *range(200074, 200080))),
    (3, _C, (200073,)),
    (3, _K, (*range(1001, 1007), *range(1009, 1014))),
    (3, _BOX, (902, 903)),
)
# fmt: on


def _catalog() -> dict[int, Operation]:
    found = [Operation(row[0], tier, *row[1:]) for tier, rows in enumerate(_TIERS, 1) for row in rows]
    found += [
        Operation(Code(code), tier, servers, is_typed=False) for tier, servers, codes in _UNTYPED for code in codes
    ]
    return {int(one.code): one for one in sorted(found, key=lambda one: one.code)}


_TIERS = (_TIER_1, _TIER_2, _TIER_3)
CATALOG = _catalog()
"""Request code → what it is, in the order of codes."""

assert list(CATALOG) == sorted(Code), "every code has one row"
