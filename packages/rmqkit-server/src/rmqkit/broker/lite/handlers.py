"""POP_LITE_MESSAGE and LITE_SUBSCRIPTION_CTL (``PopLiteMessageProcessor``, ``LiteSubscriptionCtlProcessor``), and the
parts of ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME for lite topics.

The checks run in the reference's order with its codes and remarks. Source: lite.md §6, §7, §8.
"""

from __future__ import annotations

from functools import partial

from rmqkit.broker.durability import Refusal
from rmqkit.broker.handlers import Handlers, OwnAddress, answers
from rmqkit.broker.lite.offset_options import start_of
from rmqkit.broker.lite.service import LITE_REVIVE_QUEUE, AckRefused, LiteContext, LiteService, PoppedLite
from rmqkit.broker.lite.subscriptions import BINDING, LiteClient, LiteGroup, is_exclusive
from rmqkit.broker.lite.waiting import WaitingLitePop
from rmqkit.errors import PeerRefused
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply, request
from rmqkit.protocol.ids import decode_pop_handle, encode_lite_counts
from rmqkit.protocol.names import is_light, lite_topic_fault, split_lite_queue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.lite import (
    ADD,
    COMPLETE_ADD,
    COMPLETE_REMOVE,
    REMOVE,
    LiteSubscription,
    LiteSubscriptionCtlBody,
    NotifyUnsubscribeLiteRequest,
    PopLiteMessageRequest,
    PopLiteMessageResponse,
)
from rmqkit.protocol.schemas.pop import AckMessageRequest, ChangeInvisibleTimeRequest, ChangeInvisibleTimeResponse
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body, failure

__all__ = ["LiteHandlers", "ack_lite", "change_lite"]

CLIENTS_MAX = 100_000
"""Maximum number of clients of all lite groups, about 100 MB. Silent ones are forgotten after three minutes."""
_COUNT_MAX = 32
_LATE_MS = 500
_READ = int(Permission.READ)
_NOTHING = "NO_MESSAGE_IN_QUEUE"
_RESYNC = "resync"
_JAVA_STATE = "java.lang.IllegalStateException: "
_NO_ACK = "ack offset illegal."


class LiteHandlers(Handlers[LiteContext]):
    """The handlers of lite consumers."""

    def __init__(self, context: LiteContext, identity: OwnAddress) -> None:
        super().__init__(context)
        assert context.lite is not None, "a master serves lite topics"
        self._lite: LiteService = context.lite
        self._ip = identity.ip

    # ---- pops

    @answers(RequestCode.POP_LITE_MESSAGE)
    def pop(self, connection: Connection, command: Command) -> Command | None:
        """Return messages of the lite topics of a client, or wait for one."""
        header = decode_header_leniently(command, PopLiteMessageRequest, drops_unreadable=False)
        refusal = self._pop_refusal(header)
        if refusal is not None:
            return reply(command, *refusal, header=PopLiteMessageResponse())
        return self._pop(connection, command, header, may_hold=True)

    def _pop_refusal(self, header: PopLiteMessageRequest) -> Refusal | None:
        now_ms = self._context.clock.now_ms()
        header.born_time = header.born_time or now_ms
        if now_ms - header.born_time - header.poll_time > _LATE_MS:
            return ResponseCode.POLLING_TIMEOUT, f"the broker[{self._ip}] pop message is timeout too much"
        if not self._context.settings.broker_permission & _READ:
            return ResponseCode.NO_PERMISSION, f"the broker[{self._ip}] pop message is forbidden"
        if header.max_msg_num > _COUNT_MAX:
            remark = f"the broker[{self._ip}] pop message's num is greater than {_COUNT_MAX}"
            return ResponseCode.INVALID_PARAMETER, remark
        return self._place_refusal(header.topic, header.consumer_group)

    def _place_refusal(self, name: str, group: str) -> Refusal | None:
        """Return the reason why topic or group do not allow a pop, or None. Both can change while it waits."""
        topic = self._context.topics.get(name)
        if topic is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"The topic {name} not exist, apply first please! {FAQ}"
        if not topic.perm & _READ:
            return ResponseCode.NO_PERMISSION, f"the topic[{name}] peeking message is forbidden"
        if not topic.is_lite:
            return ResponseCode.INVALID_PARAMETER, f"the topic [{name}] message type not match"
        config = self._context.groups.get(group)
        if config is None:
            return ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist, {FAQ}"
        if not config.consume_enable:
            return ResponseCode.NO_PERMISSION, f"subscription group no permission, {group}"
        if _binding(config) != name:
            return ResponseCode.INVALID_PARAMETER, f"subscription bind topic not match, {group}"
        return None

    def _pop(
        self, connection: Connection, command: Command, header: PopLiteMessageRequest, *, may_hold: bool
    ) -> Command | None:
        config = self._context.groups.get(header.consumer_group)
        assert config is not None, "the group was checked"
        group = self._lite.group(header.consumer_group, config)
        client = group.clients.get(header.client_id)
        if client is None and header.resync:
            return reply(command, ResponseCode.ILLEGAL_OPERATION, _RESYNC, header=PopLiteMessageResponse())
        if client is None:
            client = self._new_client(group, header.client_id, connection)
        found = self._lite.pop(
            group,
            client,
            count_max=max(1, header.max_msg_num),
            invisible_ms=header.invisible_time,
            attempt_id=header.attempt_id,
        )
        if found is not None:
            return self._answer(connection, command, header, found)
        left_ms = header.born_time + header.poll_time - self._context.clock.now_ms()
        if not may_hold or left_ms <= 0:
            return reply(command, ResponseCode.POLLING_TIMEOUT, _NOTHING, header=_nothing(header))
        retry = partial(self._retry, connection, command, header)
        held = WaitingLitePop(client, connection, 0.0, retry)
        if self._lite.waiting.hold(held, min(left_ms, header.poll_time) / 1000):
            return None
        return reply(command, ResponseCode.POLLING_FULL, _NOTHING, header=_nothing(header))

    def _retry(self, connection: Connection, command: Command, header: PopLiteMessageRequest, may_hold: bool) -> None:
        """Pop again for a pop that waited, and send its answer."""
        refusal = self._place_refusal(header.topic, header.consumer_group)
        if refusal is not None:
            connection.send(reply(command, *refusal, header=PopLiteMessageResponse()))
            return
        try:
            answer = self._pop(connection, command, header, may_hold=may_hold)
        except PeerRefused as error:
            answer = failure(connection, command, error)
        if answer is not None:
            connection.send(answer)

    def _answer(
        self, connection: Connection, command: Command, header: PopLiteMessageRequest, found: PoppedLite
    ) -> Command:
        answer = PopLiteMessageResponse(
            pop_time=found.pop_time,
            invisible_time=header.invisible_time,
            revive_qid=LITE_REVIVE_QUEUE,
            order_count_info=encode_lite_counts(found.counts),
        )
        context = self._context
        ms = context.clock.monotonic_ms() - connection.active_ms
        context.statistics.given(header.topic, header.consumer_group, 0, len(found.records), found.size, ms)
        return reply(command, remark="FOUND", header=answer, body=[*found.records])

    # ---- subscriptions

    @answers(RequestCode.LITE_SUBSCRIPTION_CTL)
    def subscribe(self, connection: Connection, command: Command) -> Command:
        """Change the lite topics of clients."""
        if not command.payload:
            return reply(command, ResponseCode.ILLEGAL_OPERATION, "Request body is null.")
        changes = decode_body(command, LiteSubscriptionCtlBody).subscription_set
        if not changes:
            return reply(command, ResponseCode.ILLEGAL_OPERATION, "LiteSubscriptionCtlRequestBody is empty.")
        for change in changes:
            if not all(text and text.strip() for text in (change.client_id, change.group, change.topic)):
                continue
            self._apply(connection, change)
        return reply(command)

    def _apply(self, connection: Connection, change: LiteSubscription) -> None:
        """Apply one change. Raises PeerRefused: the change is not allowed."""
        name, client_id = change.group or "", change.client_id or ""
        config = self._context.groups.get(name)
        if config is None:
            raise PeerRefused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group [{name}] not exist.", self._ip)
        if not config.consume_enable:
            self._illegal("Consumer group is not allowed to consume.")
        if _binding(config) != change.topic:
            remark = f"lite group {name} is expected to bind topic {_binding(config)}, but actual is {change.topic}"
            raise PeerRefused(ResponseCode.INVALID_PARAMETER, remark.replace("None", "null"), self._ip)
        names = self._names(change)
        group = self._lite.group(name, config)
        client = group.clients.get(client_id)
        if change.action == COMPLETE_REMOVE:
            if client is not None:
                self._lite.remove_client(group, client)
            return
        if change.action == ADD and group.is_wildcard:
            self._illegal("subscribe lite operation is not supported for this group")
        if client is None:
            client = self._new_client(group, client_id, connection)
        client.connection, client.accessed_ms = connection, self._context.clock.now_ms()
        if change.action == ADD:
            self._check_quota(group, client, config, {*client.names, *names})
            self._add(group, client, config, names, change)
        elif change.action == REMOVE:
            self._remove(group, client, config, names)
        elif change.action == COMPLETE_ADD:
            self._complete(group, client, config, names)
        else:
            remark = f"No enum constant org.apache.rocketmq.common.lite.LiteSubscriptionAction.{change.action}"
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, remark, self._ip)

    def _new_client(self, group: LiteGroup, client_id: str, connection: Connection) -> LiteClient:
        """Return a new client of a group. Raises PeerRefused: there are too many clients."""
        if sum(len(one.clients) for one in self._lite.groups.values()) >= CLIENTS_MAX:
            remark = f"lite subscription quota exceeded: {CLIENTS_MAX} clients"
            raise PeerRefused(ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED, remark, self._ip)
        client = group.clients[client_id] = LiteClient(client_id, connection)
        client.accessed_ms = self._context.clock.now_ms()
        return client

    def _names(self, change: LiteSubscription) -> set[str]:
        """Return the lite topics of a change. Raises PeerRefused: a name is not allowed."""
        names: set[str] = set()
        for given in change.lite_topic_set or ():
            place = split_lite_queue(given) if is_light(given) else None
            name = given if place is None or place[0] != change.topic else place[1]
            fault = lite_topic_fault(name)
            if fault is not None:
                raise PeerRefused(ResponseCode.INVALID_PARAMETER, fault, self._ip)
            names.add(name)
        return names

    def _illegal(self, text: str) -> None:
        raise PeerRefused(ResponseCode.ILLEGAL_OPERATION, f"{_JAVA_STATE}{text}", self._ip)

    def _check_quota(
        self, group: LiteGroup, client: LiteClient, config: SubscriptionGroupConfig, wanted: set[str]
    ) -> None:
        """Raises PeerRefused: the client, or all clients of the broker together, would have too many lite topics."""
        quota = config.lite_quota
        if 0 <= quota < len(wanted):
            remark = f"lite subscription quota exceeded: {quota}"
            raise PeerRefused(ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED, remark, self._ip)
        more = len(wanted) - len(client.names)
        limit = self._context.settings.lite_subscriptions_max
        if more > 0 and self._lite.subscription_count + more > limit:
            remark = f"lite subscription quota exceeded: {limit}"
            raise PeerRefused(ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED, remark, self._ip)

    def _add(
        self,
        group: LiteGroup,
        client: LiteClient,
        config: SubscriptionGroupConfig,
        names: set[str],
        change: LiteSubscription,
    ) -> None:
        exclusive, resets = is_exclusive(config), _is_set(config, "lite.sub.reset.offset.exclusive")
        for name in names:
            client.tombstones.discard(name)
            if exclusive:
                for other in [one for one in group.subscribers(name) if one is not client]:
                    self._take_over(group, other, name)
                    if resets:
                        self._reset_to_first(group, name)
            group.subscribe(client, name)
            if change.offset_option is not None:
                queue = self._lite.queue(group.parent, name)
                start = None if queue is None else start_of(change.offset_option, queue)
                if start is not None:
                    self._lite.reset(group, name, start)
                    continue
            self._lite.mark(group, name)

    def _take_over(self, group: LiteGroup, loser: LiteClient, name: str) -> None:
        group.unsubscribe(loser, name)
        loser.tombstones.add(name)
        self._notify(group, loser, name)

    def _notify(self, group: LiteGroup, client: LiteClient, name: str) -> None:
        """Notify a client that another client has taken a lite topic."""
        header = NotifyUnsubscribeLiteRequest(lite_topic=name, consumer_group=group.name, client_id=client.client_id)
        client.connection.send(request(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, header, one_way=True))

    def _reset_to_first(self, group: LiteGroup, name: str) -> None:
        queue = self._lite.queue(group.parent, name)
        if queue is not None:
            self._lite.reset(group, name, queue.min_offset)

    def _remove(self, group: LiteGroup, client: LiteClient, config: SubscriptionGroupConfig, names: set[str]) -> None:
        resets = _is_set(config, "lite.sub.reset.offset.unsubscribe")
        for name in names:
            client.tombstones.discard(name)
            if group.unsubscribe(client, name) and resets:
                self._reset_to_first(group, name)

    def _complete(self, group: LiteGroup, client: LiteClient, config: SubscriptionGroupConfig, names: set[str]) -> None:
        """Make the lite topics of a client equal to a set, without those that another client has taken."""
        if group.is_wildcard:
            if not client.has_joined:
                client.has_joined = True
                self._lite.mark_all(group)
            return
        if names == client.names and not client.tombstones:
            return  # the regular case, every 30 seconds
        self._check_quota(group, client, config, names - client.tombstones)
        client.tombstones &= names
        for name in sorted(client.tombstones):
            self._notify(group, client, name)
        exclusive = is_exclusive(config)
        for name in client.names - names:
            group.unsubscribe(client, name)
        for name in names - client.names - client.tombstones:
            if exclusive and any(one is not client for one in group.subscribers(name)):
                client.tombstones.add(name)  # after a restart of the broker, the first of two subscribers owns it
                self._notify(group, client, name)
                continue
            group.subscribe(client, name)
            self._lite.mark(group, name)


# ---- acks, for the handlers of POP


def ack_lite(context: LiteContext, header: AckMessageRequest) -> Refusal:
    """Acknowledge a message of a lite topic. Return code and remark of the answer.
    Raises PeerRefused: the group is not bound to the topic."""
    lite, group, name = _lite_group(context, header)
    queue = lite.queue(group.parent, name)
    if queue is not None and header.offset > queue.max_offset:
        return ResponseCode.NO_MESSAGE, _NO_ACK
    handle = decode_pop_handle(header.extra_info)
    if header.queue_id or handle.revive_queue_id != LITE_REVIVE_QUEUE:
        return ResponseCode.INVALID_PARAMETER, "ack queue illegal."
    try:
        lite.ack(group, name, header.offset, handle.pop_time)
    except AckRefused:
        return ResponseCode.MESSAGE_ILLEGAL, _NO_ACK
    return ResponseCode.SUCCESS, ""


def change_lite(
    context: LiteContext, header: ChangeInvisibleTimeRequest
) -> tuple[Refusal, ChangeInvisibleTimeResponse]:
    """Set the time at which a message of a lite topic is delivered again. Return the answer.
    Raises PeerRefused: the group is not bound to the topic."""
    nothing = ChangeInvisibleTimeResponse()
    lite, group, name = _lite_group(context, header)
    handle = decode_pop_handle(header.extra_info)
    try:
        visible_at = lite.change(
            group, name, header.offset, handle.pop_time, header.invisible_time, suspends=bool(header.suspend)
        )
    except AckRefused:
        return (ResponseCode.MESSAGE_ILLEGAL, _NO_ACK), nothing
    if not visible_at:
        return (ResponseCode.SUCCESS, ""), nothing
    answer = ChangeInvisibleTimeResponse(
        pop_time=handle.pop_time, invisible_time=visible_at - handle.pop_time, revive_qid=LITE_REVIVE_QUEUE
    )
    return (ResponseCode.SUCCESS, ""), answer


def _lite_group(context: LiteContext, header: AckMessageRequest) -> tuple[LiteService, LiteGroup, str]:
    config, lite, name = context.groups.get(header.consumer_group), context.lite, header.lite_topic
    if config is None or lite is None or name is None or _binding(config) != header.topic:
        remark = "group type or bind topic not match."
        raise PeerRefused(ResponseCode.INVALID_PARAMETER, remark, context.settings.broker_ip1)
    return lite, lite.group(header.consumer_group, config), name


def _binding(config: SubscriptionGroupConfig) -> str | None:
    return (config.attributes or {}).get(BINDING)


def _is_set(config: SubscriptionGroupConfig, name: str) -> bool:
    return (config.attributes or {}).get(name) == "true"


def _nothing(header: PopLiteMessageRequest) -> PopLiteMessageResponse:
    return PopLiteMessageResponse(invisible_time=header.invisible_time, revive_qid=LITE_REVIVE_QUEUE)
