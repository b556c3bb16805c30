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

from rmqkit.protocol.bodies import access as access_bodies
from rmqkit.protocol.bodies import clients as client_bodies
from rmqkit.protocol.bodies import connections, consumers, groups, namesrv, queues, replication, stats
from rmqkit.protocol.bodies import pop as pop_bodies
from rmqkit.protocol.bodies import timer as timer_bodies
from rmqkit.protocol.bodies import topics as topic_bodies
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.headers import access, brokers, clients, offsets, pop, queries, registration, topics
from rmqkit.protocol.headers import consumers as consumer_headers
from rmqkit.protocol.headers import groups as group_headers
from rmqkit.protocol.headers import namesrv as namesrv_headers
from rmqkit.protocol.headers import pull as pull_headers
from rmqkit.protocol.headers import send as send_headers
from rmqkit.protocol.headers import transactions as transaction_headers

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
    (Code.SEND_MESSAGE, _B, send_headers.SendMessageRequest, send_headers.SendMessageResponse, Content.MESSAGE, None),
    (Code.PULL_MESSAGE, _B, pull_headers.PullMessageRequest, pull_headers.PullMessageResponse, None, Content.RECORDS),
    (Code.QUERY_MESSAGE, _B, queries.QueryMessageRequest, queries.QueryMessageResponse, None, Content.RECORDS),
    (Code.QUERY_CONSUMER_OFFSET, _B, offsets.QueryConsumerOffsetRequest, offsets.OffsetResponse, None, None),
    (Code.UPDATE_CONSUMER_OFFSET, _B, offsets.UpdateConsumerOffsetRequest, None, None, None),
    (Code.UPDATE_AND_CREATE_TOPIC, _B, topics.CreateTopicRequest, None, None, None),
    (Code.SEARCH_OFFSET_BY_TIMESTAMP, _B, offsets.SearchOffsetRequest, offsets.OffsetResponse, None, None),
    (Code.GET_MAX_OFFSET, _B, offsets.QueueRequest, offsets.OffsetResponse, None, None),
    (Code.GET_MIN_OFFSET, _B, offsets.QueueRequest, offsets.OffsetResponse, None, None),
    (Code.GET_EARLIEST_MSG_STORETIME, _B, offsets.QueueRequest, offsets.StoreTimeResponse, None, None),
    (Code.VIEW_MESSAGE_BY_ID, _B, clients.ViewMessageRequest, None, None, Content.RECORDS),
    (Code.HEART_BEAT, _B, None, clients.HeartbeatResponse, client_bodies.HeartbeatData, None),
    (Code.UNREGISTER_CLIENT, _B, clients.UnregisterClientRequest, None, None, None),
    (Code.CONSUMER_SEND_MSG_BACK, _B, clients.ConsumerSendBackRequest, None, None, None),
    (Code.END_TRANSACTION, _B, transaction_headers.EndTransactionRequest, None, None, None),
    (Code.GET_CONSUMER_LIST_BY_GROUP, _B, clients.ConsumerGroupRequest, None, None, client_bodies.ConsumerIds),
    (Code.CHECK_TRANSACTION_STATE, _C, transaction_headers.CheckTransactionRequest, None, Content.RECORDS, None),
    (Code.NOTIFY_CONSUMER_IDS_CHANGED, _C, clients.ConsumerGroupRequest, None, None, None),
    (Code.LOCK_BATCH_MQ, _B, None, None, queues.LockBody, queues.LockedQueues),
    (Code.UNLOCK_BATCH_MQ, _B, None, None, queues.LockBody, None),
    (Code.CHECK_CLIENT_CONFIG, _B, None, None, client_bodies.CheckClientBody, None),
    (Code.REGISTER_BROKER, _N, registration.RegisterBrokerRequest, registration.RegisterBrokerResponse,
     topic_bodies.RegisterBrokerBody, namesrv.KVTable),
    (Code.UNREGISTER_BROKER, _N, registration.BrokerIdentity, None, None, None),
    (Code.GET_ROUTEINFO_BY_TOPIC, _N, namesrv_headers.RouteRequest, None, None, topic_bodies.TopicRoute),
    (Code.GET_BROKER_CLUSTER_INFO, _N, None, None, None, topic_bodies.ClusterInfo),
    (Code.SEND_MESSAGE_V2, _B, send_headers.SendMessageV2Request, send_headers.SendMessageResponse,
     Content.MESSAGE, None),
    (Code.SEND_BATCH_MESSAGE, _B, send_headers.SendMessageV2Request, send_headers.SendMessageResponse,
     Content.BATCH, None),
    (Code.QUERY_DATA_VERSION, _N, registration.BrokerIdentity, registration.DataVersionResponse,
     topic_bodies.DataVersion, topic_bodies.DataVersion),
    (Code.SEND_REPLY_MESSAGE, _B, send_headers.SendMessageRequest, send_headers.SendMessageResponse,
     Content.MESSAGE, None),
    (Code.SEND_REPLY_MESSAGE_V2, _B, send_headers.SendMessageV2Request, send_headers.SendMessageResponse,
     Content.MESSAGE, None),
    (Code.PUSH_REPLY_MESSAGE_TO_CLIENT, _C, send_headers.PushReplyRequest, None, Content.MESSAGE, None),
    (Code.LITE_PULL_MESSAGE, _B, pull_headers.PullMessageRequest, pull_headers.PullMessageResponse,
     None, Content.RECORDS),
)

_TIER_2: tuple[_Row, ...] = (
    (Code.UPDATE_AND_CREATE_TOPIC_LIST, _B, None, None, groups.TopicConfigList, None),
    (Code.GET_ALL_TOPIC_CONFIG, _B, topics.TopicConfigsRequest, topics.TopicConfigsResponse,
     None, topic_bodies.TopicConfigTable),
    (Code.UPDATE_BROKER_CONFIG, _B, None, None, Content.SETTINGS, None),
    (Code.GET_BROKER_CONFIG, _B, None, brokers.BrokerConfigResponse, None, Content.SETTINGS),
    (Code.GET_BROKER_RUNTIME_INFO, _B, None, None, None, namesrv.KVTable),
    (Code.GET_ALL_CONSUMER_OFFSET, _B, None, None, None, queues.ConsumerOffsets),
    (Code.GET_ALL_DELAY_OFFSET, _B, None, None, None, queues.DelayOffsets),
    (Code.GET_TIMER_CHECK_POINT, _B, None, None, None, Content.TIMER_CHECKPOINT),
    (Code.GET_TIMER_METRICS, _B, None, None, None, timer_bodies.TimerMetrics),
    (Code.PUT_KV_CONFIG, _N, namesrv_headers.KVPut, None, None, None),
    (Code.GET_KV_CONFIG, _N, namesrv_headers.KVKey, namesrv_headers.KVValue, None, None),
    (Code.DELETE_KV_CONFIG, _N, namesrv_headers.KVKey, None, None, None),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, _B, None, None, client_bodies.SubscriptionGroupConfig, None),
    (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, _B, group_headers.GroupConfigsRequest, group_headers.GroupConfigsResponse,
     None, client_bodies.SubscriptionGroupTable),
    (Code.GET_TOPIC_STATS_INFO, _B, topics.TopicRequest, None, None, stats.TopicStatsTable),
    (Code.GET_CONSUMER_CONNECTION_LIST, _B, clients.ConsumerGroupRequest, None, None, connections.ConsumerConnection),
    (Code.GET_PRODUCER_CONNECTION_LIST, _B, group_headers.ProducerGroupRequest, None,
     None, connections.ProducerConnection),
    (Code.WIPE_WRITE_PERM_OF_BROKER, _N, namesrv_headers.BrokerNameRequest, namesrv_headers.WipeWritePermResponse,
     None, None),
    (Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, _N, None, None, None, namesrv.TopicList),
    (Code.DELETE_SUBSCRIPTIONGROUP, _B, group_headers.DeleteGroupRequest, None, None, None),
    (Code.GET_CONSUME_STATS, _B, group_headers.ConsumeStatsRequest, None, None, stats.ConsumeStats),
    (Code.DELETE_TOPIC_IN_BROKER, _B, topics.TopicRequest, None, None, None),
    (Code.DELETE_TOPIC_IN_NAMESRV, _N, namesrv_headers.DeleteTopicRequest, None, None, None),
    (Code.REGISTER_TOPIC_IN_NAMESRV, _N, namesrv_headers.RegisterTopicRequest, None, topic_bodies.TopicRoute, None),
    (Code.GET_KVLIST_BY_NAMESPACE, _N, namesrv_headers.KVNamespace, None, None, namesrv.KVTable),
    (Code.RESET_CONSUMER_CLIENT_OFFSET, _C, consumer_headers.ResetClientOffsetRequest, None,
     consumers.ResetOffsetBody, None),
    (Code.GET_CONSUMER_STATUS_FROM_CLIENT, _C, consumer_headers.ConsumerStatusRequest, None,
     None, consumers.ConsumerStatus),
    (Code.INVOKE_BROKER_TO_RESET_OFFSET, _B, consumer_headers.ResetOffsetRequest, None,
     None, consumers.ResetOffsetBody),
    (Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, _B, consumer_headers.ConsumerStatusRequest, None,
     None, consumers.ConsumerStatus),
    (Code.GET_TOPICS_BY_CLUSTER, _N, namesrv_headers.ClusterRequest, None, None, namesrv.TopicList),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, _B, None, None, groups.GroupConfigList, None),
    (Code.QUERY_TOPIC_CONSUME_BY_WHO, _B, topics.TopicRequest, None, None, groups.GroupList),
    (Code.QUERY_CONSUME_TIME_SPAN, _B, group_headers.TimeSpanRequest, None, None, stats.ConsumeTimeSpans),
    (Code.GET_SYSTEM_TOPIC_LIST_FROM_NS, _N, None, None, None, namesrv.TopicList),
    (Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, _B, None, None, None, namesrv.TopicList),
    (Code.CLEAN_EXPIRED_CONSUMEQUEUE, _B, None, None, None, None),
    (Code.GET_CONSUMER_RUNNING_INFO, _BC, consumer_headers.RunningInfoRequest, None,
     None, consumers.ConsumerRunningInfo),
    (Code.QUERY_CORRECTION_OFFSET, _B, group_headers.CorrectionOffsetRequest, None, None, queues.CorrectionOffsets),
    (Code.CONSUME_MESSAGE_DIRECTLY, _BC, consumer_headers.ConsumeDirectlyRequest, None,
     Content.RECORDS, consumers.ConsumeMessageDirectlyResult),
    (Code.GET_UNIT_TOPIC_LIST, _N, None, None, None, namesrv.TopicList),
    (Code.GET_HAS_UNIT_SUB_TOPIC_LIST, _N, None, None, None, namesrv.TopicList),
    (Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, _N, None, None, None, namesrv.TopicList),
    (Code.CLONE_GROUP_OFFSET, _B, group_headers.CloneGroupOffsetRequest, None, None, None),
    (Code.VIEW_BROKER_STATS_DATA, _B, queries.StatsDataRequest, None, None, stats.BrokerStatsData),
    (Code.CLEAN_UNUSED_TOPIC, _B, None, None, None, None),
    (Code.GET_BROKER_CONSUME_STATS, _B, group_headers.AllConsumeStatsRequest, None, None, stats.ConsumeStatsList),
    (Code.UPDATE_NAMESRV_CONFIG, _N, None, None, Content.SETTINGS, None),
    (Code.GET_NAMESRV_CONFIG, _N, None, None, None, Content.SETTINGS),
    (Code.QUERY_CONSUME_QUEUE, _B, queries.QueryConsumeQueueRequest, None, None, queues.QueryConsumeQueueBody),
    (Code.RESUME_CHECK_HALF_MESSAGE, _B, transaction_headers.ResumeCheckRequest, None, None, None),
    (Code.ADD_WRITE_PERM_OF_BROKER, _N, namesrv_headers.BrokerNameRequest, namesrv_headers.AddWritePermResponse,
     None, None),
    (Code.GET_ALL_PRODUCER_INFO, _B, None, None, None, connections.ProducerTable),
    (Code.DELETE_EXPIRED_COMMITLOG, _B, None, None, None, None),
    (Code.QUERY_TOPICS_BY_CONSUMER, _B, group_headers.GroupRequest, None, None, namesrv.TopicList),
    (Code.QUERY_SUBSCRIPTION_BY_CONSUMER, _B, group_headers.GroupTopicRequest, None, None, groups.GroupSubscription),
    (Code.GET_TOPIC_CONFIG, _B, topics.TopicRequest, None, None, topic_bodies.TopicConfig),
    (Code.GET_SUBSCRIPTIONGROUP_CONFIG, _B, group_headers.GroupRequest, None,
     None, client_bodies.SubscriptionGroupConfig),
    (Code.UPDATE_AND_GET_GROUP_FORBIDDEN, _B, group_headers.GroupForbiddenRequest, None, None, groups.GroupForbidden),
    (Code.RECALL_MESSAGE, _B, brokers.RecallMessageRequest, brokers.RecallMessageResponse, None, None),
    (Code.GET_BROKER_MEMBER_GROUP, _N, registration.BrokerMemberGroupRequest, None,
     None, namesrv.BrokerMemberGroupBody),
    (Code.BROKER_HEARTBEAT, _NK, registration.BrokerHeartbeat, None, None, None),
    (Code.NOTIFY_MIN_BROKER_ID_CHANGE, _B, registration.MinBrokerIdChange, None, None, None),
    (Code.EXCHANGE_BROKER_HA_INFO, _B, brokers.HaInfo, brokers.HaInfo, None, None),
    (Code.GET_BROKER_HA_STATUS, _B, None, None, None, replication.HaRuntimeInfo),
    (Code.RESET_MASTER_FLUSH_OFFSET, _B, brokers.MasterFlushOffsetRequest, None, None, None),
    (Code.AUTH_CREATE_USER, _B, access.UserRequest, None, access_bodies.UserInfo, None),
    (Code.AUTH_UPDATE_USER, _B, access.UserRequest, None, access_bodies.UserInfo, None),
    (Code.AUTH_DELETE_USER, _B, access.UserRequest, None, None, None),
    (Code.AUTH_GET_USER, _B, access.UserRequest, None, None, access_bodies.UserInfo),
    (Code.AUTH_LIST_USER, _B, access.ListUsersRequest, None, None, list[access_bodies.UserInfo]),
    (Code.AUTH_CREATE_ACL, _B, access.SubjectRequest, None, access_bodies.AclInfo, None),
    (Code.AUTH_UPDATE_ACL, _B, access.SubjectRequest, None, access_bodies.AclInfo, None),
    (Code.AUTH_DELETE_ACL, _B, access.DeleteAclRequest, None, None, None),
    (Code.AUTH_GET_ACL, _B, access.SubjectRequest, None, None, access_bodies.AclInfo),
    (Code.AUTH_LIST_ACL, _B, access.ListAclsRequest, None, None, list[access_bodies.AclInfo]),
)

_TIER_3: tuple[_Row, ...] = (
    (Code.QUERY_ASSIGNMENT, _B, None, None, pop_bodies.QueryAssignmentBody, pop_bodies.Assignments),
    (Code.SET_MESSAGE_REQUEST_MODE, _B, None, None, pop_bodies.MessageRequestMode, None),
    (Code.GET_ALL_MESSAGE_REQUEST_MODE, _B, None, None, None, pop_bodies.MessageRequestModes),
    (Code.POP_MESSAGE, _B, pop.PopMessageRequest, pop.PopMessageResponse, None, Content.RECORDS),
    (Code.ACK_MESSAGE, _B, pop.AckMessageRequest, None, None, None),
    (Code.PEEK_MESSAGE, _B, pop.PeekMessageRequest, pop.PopMessageResponse, None, Content.RECORDS),
    (Code.CHANGE_MESSAGE_INVISIBLETIME, _B, pop.ChangeInvisibleTimeRequest, pop.ChangeInvisibleTimeResponse,
     None, None),
    (Code.NOTIFICATION, _B, pop.NotificationRequest, pop.NotificationResponse, None, None),
    (Code.POLLING_INFO, _B, pop.PollingInfoRequest, pop.PollingInfoResponse, None, None),
    (Code.BATCH_ACK_MESSAGE, _B, None, None, pop_bodies.BatchAckBody, None),
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
