"""PULL_MESSAGE and LITE_PULL_MESSAGE (``PullMessageProcessor``).

The checks run in the reference's order with its codes and remarks. Messages are sent as slices of the log, without
copying or decoding. A pull that finds no message is held if the request asks for it. When the broker wakes a held pull,
it checks and reads again as for a new pull, and answers with the result.

A consumer group that reads old messages slows down other groups, and can be stopped (``protectBroker``). With
``disableConsumeIfConsumerReadSlowly`` the broker measures every three minutes how many bytes of the log are after the
next message that each online group pulls from a queue. A group with more than ``consumerFallbehindThreshold`` bytes
gets ``consumeEnable=false``, on disk: its pulls and pops are refused with NO_PERMISSION until an operator enables it
again.
Source: behaviour.md §2.3, §4.1–§4.4; remoting.md §4.3.2.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from rmqkit.broker.durability import REJECTED
from rmqkit.broker.handlers import (
    Handlers,
    OwnAddress,
    answers,
    by_global_number,
    needs_parser,
    of_lite_topic,
    when_prepared,
)
from rmqkit.broker.older import Fetched, Missing, OlderMessages, read_when_fetched
from rmqkit.broker.pull.long_polling import LongPolling, WaitingPull
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import CONSUME_ACTIVELY, ClientTable
from rmqkit.broker.tables.filters import FilterTable, PullFilter, inline_filter
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import HeaderError
from rmqkit.filter import SQL92, is_tag_type
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.names import RETRY_PREFIX, split_lite_queue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.pull import ForbiddenType, PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.protocol.templates import pulled_frame
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED
from rmqkit.store.message_store import GetResult, GetStatus, MessageStore
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = ["SLOW_ROUND_SECONDS", "PullHandlers", "stop_slow_groups"]

SLOW_ROUND_SECONDS = 180.0
"""The time between two checks for slow groups."""


_CODES: Mapping[GetStatus, ResponseCode] = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
"""The response code for each store status. The codes of the two other statuses depend on the offset (`_code_of`)."""

_READ, _COMMIT = Permission.READ.value, PullFlag.COMMIT_OFFSET.value
_SUSPEND, _SUBSCRIPTION = PullFlag.SUSPEND.value, PullFlag.SUBSCRIPTION.value
"""The flags as plain numbers: ``&`` of enumeration members takes a microsecond, and every pull needs five."""
_SLAVE, _OFFSET_MOVED = BrokerRole.SLAVE, ResponseCode.PULL_OFFSET_MOVED
_FOUND, _NOT_IN_LOG = GetStatus.FOUND, GetStatus.NOT_IN_LOG
_LITE_PULL = RequestCode.LITE_PULL_MESSAGE.value
# Up to this size a copy costs less than a write of several pieces.
_COPIED_BYTES_MAX = 256 << 10

_MAY_MISS = {"commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0"}
LITE_TOPIC_EXPIRED = "lite topic expired"
_NO_GROUP_INFO = f"the consumer's group info not exist{FAQ}"

_log = logging.getLogger(__name__)


class PullContext(Protocol):
    """The parts of the broker that pulls and queries use."""

    clients: ClientTable
    clock: Clock
    counts: Counts | None
    filters: FilterTable
    groups: GroupTable
    identity: OwnAddress
    long_polling: LongPolling

    @property
    def may_serve(self) -> Callable[[], bool]: ...

    @property
    def older(self) -> OlderMessages | None: ...

    def min_offset(self, topic: str, queue_id: int) -> int: ...

    offsets: OffsetTable
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    store_settings: StoreSettings
    topics: TopicTable


class _Refused(Exception):
    """A failed check. The handler turns it into the reply."""

    def __init__(self, code: ResponseCode, remark: str, forbidden: ForbiddenType | None = None) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
        self.forbidden = forbidden


class PullHandlers(Handlers[PullContext]):
    """The handler of pulls."""

    @answers(RequestCode.PULL_MESSAGE)
    @answers(RequestCode.LITE_PULL_MESSAGE)
    @by_global_number
    def pull(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Read messages. If there are none, hold the request if it asks for it."""
        try:
            # Decode strictly first: this is one call, and it accepts the headers of all clients. The Java broker
            # accepts more headers.
            header = decode_header(command, PullMessageRequest)
        except HeaderError:
            header = decode_header_leniently(command, PullMessageRequest, missing=_MAY_MISS, drops_unreadable=False)
        header = of_lite_topic(header)
        if header.expression_type == SQL92 and needs_parser():
            return when_prepared(connection, lambda: self._pull(connection, command, header, may_hold=True))
        return self._pull(connection, command, header, may_hold=True)

    # -- inside

    @property
    def _is_slave(self) -> bool:
        return self._context.settings.broker_role is _SLAVE

    def _pull(
        self, connection: Connection, command: Command, header: PullMessageRequest, *, may_hold: bool
    ) -> Command | Awaitable[Command | None] | None:
        context = self._context
        if self._is_slave and not (context.settings.slave_read and context.may_serve()):
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        try:
            config = self._check_group(command.code, group)
            topic_config = self._check_queue(connection, header, context.topics.get(topic))
            wanted = self._wanted(connection, header, config)
        except _Refused as refused:
            why = None if refused.forbidden is None else {"forbiddenType": str(refused.forbidden.value)}
            return reply(command, refused.code, refused.remark, fields=why)
        if header.lite_epoch is not None and (gone := self._gone(header, header.lite_epoch)) is not None:
            return reply(command, ResponseCode.QUERY_NOT_FOUND, LITE_TOPIC_EXPIRED, fields={"epoch": str(gone)})
        # Redirect before the read: otherwise an old client would ignore a reset, and read and commit its old offset.
        reset_to = context.offsets.redirect(connection, group, topic, queue_id, header.queue_offset, is_new=may_hold)
        if reset_to is not None:
            return self._moved(command, header, reset_to)
        found = context.store.get(
            topic,
            queue_id,
            header.queue_offset,
            count_max=header.max_msg_nums,
            codes=wanted.codes,
            accept=wanted.accept,
            accept_entry=wanted.accept_entry,
            joins=True,
        )
        if found.status is _NOT_IN_LOG:
            if may_hold:
                if header.sys_flag & _COMMIT:
                    context.offsets.commit(group, topic, queue_id, header.commit_offset)
                return self._pull_fetched(connection, command, header, wanted, topic_config, config)
            # Answer a woken pull without messages: its client pulls again immediately, and the new pull fetches.
            found = GetResult(GetStatus.NO_MATCHED_MESSAGE, header.queue_offset, found.min_offset, found.max_offset)
        context.offsets.pulled(group, topic, queue_id, found.next_begin_offset)
        is_found = bool(found.records)
        if is_found:
            # Measure only new pulls: the request of a woken pull arrived long ago.
            ms = context.clock.monotonic_ms() - connection.active_ms if may_hold else 0.0
            context.statistics.given(topic, group, queue_id, found.count, found.size, ms)
        else:
            context.statistics.pulls_missed += 1
        # Commit only for a new pull: while a pull is held, the group may commit a greater offset on another connection.
        if may_hold:
            if header.sys_flag & _COMMIT:
                context.offsets.commit(group, topic, queue_id, header.commit_offset)
            if not is_found and header.sys_flag & _SUSPEND and _code_of(found, header) == ResponseCode.PULL_NOT_FOUND:
                return self._hold(connection, command, header, wanted)
        return self._answer(connection, command, header, found, topic_config, config)

    def _gone(self, header: PullMessageRequest, epoch: int) -> int | None:
        """Return the present life of a lite topic if the requested life is over, else None. Source: lite.md §5."""
        lite = self._context.store.lite
        queue, place = lite.queue(header.topic), split_lite_queue(header.topic)
        if place is None:
            return None
        parent = lite.table.parents.get(place[0])
        present = queue.epoch if queue is not None else 1 if parent is None else parent.first_epoch
        is_live = queue is not None and lite.table.is_live(queue.slot)
        return None if present == epoch and is_live else present + (queue is not None and not is_live)

    def _hold(
        self, connection: Connection, command: Command, header: PullMessageRequest, wanted: PullFilter
    ) -> Command | None:
        if self._context.long_polling.is_full:
            return reply(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
        wait_ms = (
            header.suspend_timeout_millis
            if self._context.settings.long_polling
            else self._context.settings.short_polling_ms
        )

        def retry() -> None:
            # Check and read as for a new pull: topic, group and filter may have changed during the wait.
            answer = self._pull(connection, command, header, may_hold=False)
            assert not isinstance(answer, Awaitable), "a woken pull fetches nothing"
            if answer is not None:
                connection.send(answer)

        until_ms = self._context.clock.monotonic_ms() + wait_ms
        held = WaitingPull(
            connection, header.queue_offset, wanted.codes, until_ms, retry, wanted.wants, header.consumer_group
        )
        self._context.long_polling.hold(header.topic, header.queue_id, held)
        return None

    def _answer(
        self,
        connection: Connection,
        command: Command,
        header: PullMessageRequest,
        found: GetResult,
        topic: TopicConfig,
        group: SubscriptionGroupConfig,
    ) -> Command | None:
        """Return the answer, or None if it was already sent. Nearly every answer with records is sent here."""
        context, settings, records = self._context, self._context.settings, found.records
        assert not records or found.status is _FOUND, "a result with records has the status FOUND"
        code = ResponseCode.SUCCESS if records else _code_of(found, header)
        following, broker_id = found.next_begin_offset, 0
        if settings.slave_read:
            broker_id = group.which_broker_when_consume_slowly if found.suggest_slave else group.broker_id
        if not records and self._is_slave and code == _OFFSET_MOVED and not settings.offset_check_in_slave:
            # A slave that lags behind its master must not move consumers: they pull again, or from another broker.
            code, following = ResponseCode.PULL_RETRY_IMMEDIATELY, header.queue_offset
        answer = PullMessageResponse(
            broker_id,
            following,
            found.min_offset,
            found.max_offset,
            topic.topic_sys_flag,
            group.group_sys_flag,
            offset_delta=self._offset_delta(header.topic),
        )
        if records and context.counts is None and not command.flag and answer.offset_delta is None:
            frame = pulled_frame(command.opaque, answer, found.size)
            if found.size > _COPIED_BYTES_MAX:
                connection.send_frame(frame, *records)
            else:
                connection.send_frame(b"".join((frame, *records)))
            return None
        return reply(command, code, found.status.name, header=answer, body=[*records])

    def _pull_fetched(
        self,
        connection: Connection,
        command: Command,
        header: PullMessageRequest,
        wanted: PullFilter,
        topic: TopicConfig,
        group: SubscriptionGroupConfig,
    ) -> Awaitable[Command | None]:
        """Fetch the messages of a pull from another place, then answer the pull.
        The awaitable raises PeerRefused, StoreError, OSError: the messages cannot be fetched."""
        context, name, queue_id = self._context, header.consumer_group, header.queue_id
        began_ms = context.clock.monotonic_ms()

        def read(fetched: Fetched) -> Command | Missing | None:
            found = fetched.found
            assert found.next_begin_offset >= header.queue_offset, "a fetch never moves the offset backwards"
            context.offsets.pulled(name, header.topic, queue_id, found.next_begin_offset)
            if found.records:
                ms = context.clock.monotonic_ms() - began_ms
                context.statistics.given(header.topic, name, queue_id, found.count, found.size, ms)
            return self._answer(connection, command, header, found, topic, group)

        assert context.older is not None, "missing messages can be fetched from another place"
        missing = Missing(header.topic, queue_id, header.queue_offset, header.max_msg_nums, wanted)
        return read_when_fetched(context.older, connection, missing, read)

    def _moved(self, command: Command, header: PullMessageRequest, offset: int) -> Command:
        """Return the answer that redirects a pull after a reset. The request's commit offset is ignored."""
        low = self._context.min_offset(header.topic, header.queue_id)
        high = self._context.store.max_offset(header.topic, header.queue_id)
        answer = PullMessageResponse(0, offset, low, high, offset_delta=self._offset_delta(header.topic))
        return reply(command, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET", header=answer)

    def _offset_delta(self, topic: str) -> int | None:
        """Return the number that a client adds to offsets of a static topic; None for other topics. The number is 0,
        because the queues were never on another broker."""
        return 0 if topic in self._context.topics.static.local else None

    def _check_group(self, code: int, name: str) -> SubscriptionGroupConfig:
        settings = self._context.settings
        if not settings.broker_permission & _READ:
            remark = f"the broker[{self._context.identity.ip}] pulling message is forbidden"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.BROKER)
        if code == _LITE_PULL and not settings.lite_pull:
            remark = f"the broker[{self._context.identity.ip}] for lite pull consumer is forbidden"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.BROKER)
        group = self._context.groups.get(name)
        if group is None:
            remark = f"subscription group [{name}] does not exist, {FAQ}"
            raise _Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if not group.consume_enable:
            remark = f"subscription group no permission, {name}"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.GROUP)
        return group

    def _check_queue(
        self, connection: Connection, header: PullMessageRequest, topic: TopicConfig | None
    ) -> TopicConfig:
        if topic is None:
            remark = f"topic[{header.topic}] not exist, apply first please! {FAQ}"
            raise _Refused(ResponseCode.TOPIC_NOT_EXIST, remark)
        if not topic.perm & _READ:
            remark = f"the topic[{header.topic}] pulling message is forbidden"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.TOPIC)
        if not 0 <= header.queue_id < topic.read_queue_nums:
            remark = (
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{connection.peer}]"
            )
            raise _Refused(ResponseCode.INVALID_PARAMETER, remark)
        return topic

    def _wanted(self, connection: Connection, header: PullMessageRequest, group: SubscriptionGroupConfig) -> PullFilter:
        if header.sys_flag & _SUBSCRIPTION:
            wanted = self._inline(header)
        else:
            wanted = self._registered(header, group)
        settings = self._context.settings
        if settings.reject_pull_consumers:
            online = self._context.clients.consumers(header.consumer_group)
            if online is None or online.consume_type == CONSUME_ACTIVELY or connection not in online.members:
                raise _Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, _NO_GROUP_INFO)
        if settings.filter_retries and header.topic.startswith(RETRY_PREFIX) and wanted.accept is None:
            return self._context.filters.retry_filter(header.topic.removeprefix(RETRY_PREFIX), wanted.codes)
        return wanted

    def _inline(self, header: PullMessageRequest) -> PullFilter:
        self._check_type(header.expression_type)
        try:
            wanted = inline_filter(header.subscription, header.expression_type)
        except ValueError:
            remark = "parse the consumer's subscription failed"
            raise _Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark) from None
        self._context.clients.compensate(
            header.consumer_group, header.topic, header.subscription, header.expression_type
        )
        return wanted

    def _registered(self, header: PullMessageRequest, group: SubscriptionGroupConfig) -> PullFilter:
        name, topic = header.consumer_group, header.topic
        online = self._context.clients.consumers(name)
        if online is None:
            raise _Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, _NO_GROUP_INFO)
        if online.is_broadcasting and not group.consume_broadcast_enable:
            remark = f"the consumer group[{name}] can not consume by broadcast way"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.BROADCAST)
        if self._context.groups.is_read_forbidden(name, topic):
            remark = f"the consumer group[{name}] is forbidden for topic[{topic}]"
            raise _Refused(ResponseCode.NO_PERMISSION, remark, ForbiddenType.SUBSCRIPTION)
        subscribed = online.subscriptions.get(topic)
        if subscribed is None:
            raise _Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{FAQ}")
        if subscribed.data.sub_version < header.sub_version:
            raise _Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        if subscribed.tags is not None:
            return subscribed.tags
        registered = self._context.filters.get(topic, name)
        if registered is None:
            remark = "The broker's consumer filter data is not exist!Your expression may be wrong!"
            raise _Refused(ResponseCode.FILTER_DATA_NOT_EXIST, remark)
        # Refuse an older filter: it would skip messages that the new filter accepts, and the group would lose them.
        if registered.data.client_version < header.sub_version:
            raise _Refused(ResponseCode.FILTER_DATA_NOT_LATEST, "the consumer's consumer filter data not latest")
        self._check_type(subscribed.data.expression_type)
        return registered.pull_filter

    def _check_type(self, expression_type: str | None) -> None:
        if not is_tag_type(expression_type) and not self._context.settings.property_filter:
            remark = f"The broker does not support consumer to filter message by {expression_type}"
            raise _Refused(ResponseCode.SYSTEM_ERROR, remark)


def _code_of(found: GetResult, header: PullMessageRequest) -> ResponseCode:
    code = _CODES.get(found.status)
    if code is not None:
        return code
    # A client waits at offset 0 of an empty queue. If the offset were illegal, the client would drop and restart the
    # queue again and again.
    return ResponseCode.PULL_OFFSET_MOVED if header.queue_offset else ResponseCode.PULL_NOT_FOUND


async def stop_slow_groups(context: PullContext) -> None:
    """Disable the groups that lag too far. The broker calls this every `SLOW_ROUND_SECONDS`.
    Raises StoreUnavailable: the disk refused."""
    store, settings = context.store, context.settings
    positions: dict[str, int] = {}
    for (group, topic, queue_id), offset in list(context.offsets.pulls.items()) if settings.stops_slow_groups else ():
        if group in context.clients.all_consumers:
            for _, position, _, _ in store.entries(topic, queue_id, offset, count_max=1):
                positions[group] = min(position, positions.get(group, position))
    assert all(position >= 0 for position in positions.values()), "an entry has a position in the log"
    slow = []
    for group, position in positions.items():
        config, behind_bytes = context.groups.get(group), store.max_physical_offset - position
        if config is not None and config.consume_enable and behind_bytes > settings.slow_group_bytes:
            _log.warning("group %s reads %d bytes behind the end of the log: disabled", group, behind_bytes)
            slow.append(replace(config, consume_enable=False))
    if slow:
        await context.groups.put_shared(*slow)
