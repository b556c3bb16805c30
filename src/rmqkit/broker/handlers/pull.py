"""PULL_MESSAGE and LITE_PULL_MESSAGE (``PullMessageProcessor``).

The checks come in the reference's order with its codes and remarks; what is found leaves as slices of the log, neither
copied nor decoded. A pull that finds nothing new is held when it asks for that.
Source: behaviour.md §4.1–§4.4; remoting.md §4.3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from rmqkit.broker.clients import ClientTable
from rmqkit.broker.groups import GroupTable
from rmqkit.broker.long_polling import Held, LongPolling
from rmqkit.broker.offsets import OffsetTable
from rmqkit.broker.own_address import OwnAddress
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.filter.subscription import codes_of, is_tag_type, subscription
from rmqkit.protocol.bodies.topics import Permission, TopicConfig
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.pull import ForbiddenType, PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import OVERLOADED, Dispatch
from rmqkit.store.message_store import GetResult, GetStatus, MessageStore

__all__ = ["PullHandlers"]

_CODES: Mapping[GetStatus, ResponseCode] = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
"""Store status → response code; the two "nothing in the queue" statuses depend on the offset (`_code_of`)."""

_SEE = FAQ.strip()


class _Refused(Exception):
    """A check failed; becomes the reply."""

    def __init__(self, code: ResponseCode, remark: str, forbidden: ForbiddenType | None = None) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
        self.forbidden = forbidden


class PullHandlers:
    """Hands out messages."""

    def __init__(
        self,
        settings: BrokerSettings,
        identity: OwnAddress,
        *,
        store: MessageStore,
        topics: TopicTable,
        groups: GroupTable,
        clients: ClientTable,
        offsets: OffsetTable,
        long_polling: LongPolling,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._store = store
        self._topics = topics
        self._groups = groups
        self._clients = clients
        self._offsets = offsets
        self._long_polling = long_polling
        self._clock = clock

    def register(self, dispatch: Dispatch) -> None:
        """Answer the pull codes."""
        dispatch.register(RequestCode.PULL_MESSAGE, self.pull)
        dispatch.register(RequestCode.LITE_PULL_MESSAGE, self.pull)

    def pull(self, connection: Connection, command: Command) -> Command | None:
        """Read, and hold the request when nothing is there and it says so."""
        header = decode_header(command, PullMessageRequest)
        try:
            codes = self._check(connection, header)
        except _Refused as refused:
            answer = PullMessageResponse(0, 0, 0, 0, forbidden_type=refused.forbidden)
            return reply(command, refused.code, refused.remark, header=answer)
        if header.sys_flag & PullFlag.COMMIT_OFFSET:
            self._offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        found = self._read(header, codes)
        if _code_of(found, header) == ResponseCode.PULL_NOT_FOUND and header.sys_flag & PullFlag.SUSPEND:
            if self._long_polling.is_full:
                return reply(command, ResponseCode.SYSTEM_BUSY, OVERLOADED, header=PullMessageResponse(0, 0, 0, 0))
            self._hold(connection, command, header, codes)
            return None
        return self._answer(command, header, found)

    # -- inside

    def _read(self, header: PullMessageRequest, codes: frozenset[int] | None) -> GetResult:
        return self._store.get(
            header.topic, header.queue_id, header.queue_offset, count_max=header.max_msg_nums, codes=codes
        )

    def _hold(
        self, connection: Connection, command: Command, header: PullMessageRequest, codes: frozenset[int] | None
    ) -> None:
        wait_ms = header.suspend_timeout_millis if self._settings.long_polling else self._settings.short_polling_ms

        def retry() -> None:
            connection.send(self._answer(command, header, self._read(header, codes)))

        held = Held(connection, header.queue_offset, codes, self._clock.monotonic_ms() + wait_ms, retry)
        self._long_polling.hold(header.topic, header.queue_id, held)

    def _answer(self, command: Command, header: PullMessageRequest, found: GetResult) -> Command:
        topic = self._topics.get(header.topic)
        group = self._groups.get(header.consumer_group)
        answer = PullMessageResponse(
            suggest_which_broker_id=group.broker_id if group is not None else 0,
            next_begin_offset=found.next_begin_offset,
            min_offset=found.min_offset,
            max_offset=found.max_offset,
            topic_sys_flag=topic.topic_sys_flag if topic is not None else 0,
            group_sys_flag=group.group_sys_flag if group is not None else 0,
        )
        return reply(command, _code_of(found, header), found.status.name, header=answer, body=[*found.records])

    def _check(self, connection: Connection, header: PullMessageRequest) -> frozenset[int] | None:
        """The tag codes to filter by, after every check has passed."""
        if not self._settings.broker_permission & Permission.READ:
            remark = f"the broker[{self._identity.ip}] pulling message is forbidden"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.BROKER)
        group = self._groups.get(header.consumer_group)
        if group is None:
            remark = f"subscription group [{header.consumer_group}] does not exist, {_SEE}"
            raise _Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if not group.consume_enable:
            remark = f"subscription group no permission, {header.consumer_group}"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.GROUP)
        self._check_queue(connection, header, self._topics.get(header.topic))
        if header.sys_flag & PullFlag.SUBSCRIPTION:
            return self._inline_codes(header)
        return self._registered_codes(header, broadcast_allowed=group.consume_broadcast_enable)

    def _check_queue(self, connection: Connection, header: PullMessageRequest, topic: TopicConfig | None) -> None:
        if topic is None:
            remark = f"topic[{header.topic}] not exist, apply first please!{FAQ}"
            raise _Refused(ResponseCode.TOPIC_NOT_EXIST, remark)
        if not topic.perm & Permission.READ:
            remark = f"the topic[{header.topic}] pulling message is forbidden"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.TOPIC)
        if not 0 <= header.queue_id < topic.read_queue_nums:
            remark = (
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[{connection.peer}]"
            )
            raise _Refused(ResponseCode.INVALID_PARAMETER, remark)

    def _inline_codes(self, header: PullMessageRequest) -> frozenset[int] | None:
        self._check_type(header.expression_type)
        try:
            return codes_of(subscription(header.topic, header.subscription))
        except ValueError:
            remark = "parse the consumer's subscription failed"
            raise _Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark) from None

    def _registered_codes(self, header: PullMessageRequest, *, broadcast_allowed: bool) -> frozenset[int] | None:
        online = self._clients.consumers(header.consumer_group)
        if online is None:
            raise _Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist{FAQ}")
        if online.is_broadcasting and not broadcast_allowed:
            remark = f"the consumer group[{header.consumer_group}] can not consume by broadcast way"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.BROADCAST)
        subscribed = online.subscriptions.get(header.topic)
        if subscribed is None:
            raise _Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{FAQ}")
        if subscribed.data.sub_version < header.sub_version:
            raise _Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        self._check_type(subscribed.data.expression_type)
        return subscribed.codes

    def _check_type(self, expression_type: str | None) -> None:
        if not is_tag_type(expression_type):
            remark = f"The broker does not support consumer to filter message by {expression_type}"
            raise _Refused(ResponseCode.SYSTEM_ERROR, remark)


def _code_of(found: GetResult, header: PullMessageRequest) -> ResponseCode:
    code = _CODES.get(found.status)
    if code is not None:
        return code
    return ResponseCode.PULL_OFFSET_MOVED if header.queue_offset else ResponseCode.PULL_NOT_FOUND
