"""Lite topics: parents, names, groups, clients, messages (``getBrokerLiteInfo`` … ``triggerLiteDispatch``).

A lite topic is stored at the broker to which its name hashes; after a change of the brokers it may be at several. So
every master of the parent is asked, and the answers are joined. Requests 200074 to 200079 work at Apache's brokers from
5.5.0 on, too. Two things only rmqkit's brokers know: the names below a parent, page by page, and the clients of a group
that sent no heartbeat. `NO_LIST` is the sentence for brokers without the list.

A lite topic is deleted by DELETE_TOPIC_IN_BROKER with the name of its light queue: brokers of Apache delete this queue,
too. Source: lite.md §5, §9, §11.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from msgspec import UNSET, Struct, field

from rmqkit.admin.calls import AdminCalls, Done
from rmqkit.errors import PeerRefused, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.names import TOOLS_GROUP, lite_queue, lite_topic_fault, split_lite_queue
from rmqkit.protocol.properties import lite_number
from rmqkit.protocol.schemas.clients import ConsumerConnection, ConsumerGroupRequest
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.lite import (
    BrokerLiteInfo,
    LiteClientInfo,
    LiteClientRequest,
    LiteClientRow,
    LiteGroupInfo,
    LiteGroupRequest,
    LiteLag,
    LiteTopicInfo,
    LiteTopicRequest,
    LiteTopicRow,
    ParentTopicInfo,
    ParentTopicRequest,
    TriggerLiteDispatchRequest,
)
from rmqkit.protocol.schemas.offsets import ResetOffsetBody, ResetOffsetRequest
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _, marked

__all__ = [
    "NO_LIST",
    "ROWS_MAX",
    "GroupAt",
    "GroupRow",
    "Lite",
    "LiteAt",
    "LiteGroupView",
    "LiteRow",
    "LiteView",
    "Names",
    "Numbered",
    "ParentRow",
    "short_name",
]

ROWS_MAX = 1000
"""Maximum number of rows of a page. Brokers send no more."""
NO_LIST = marked("broker {broker} cannot list lite topics, only rmqkit's brokers can: name one, or see those with lag")
_CLIENTS_MAX = 1000
_PULL_COUNT = 32
_HELD_MS = 5_000
_PAUSE_SECONDS = 1.0
_MINUTE_MS = 60_000
_NOT_SERVED = (
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    ResponseCode.INVALID_PARAMETER,
)

T = TypeVar("T")
S = TypeVar("S", bound=Struct)


class ParentRow(Struct, rename="camel", kw_only=True):
    """A parent topic. ``lifetime_minutes``: time after the newest message after which a lite topic expires, -1: never.
    ``trouble``: the reason why brokers do not report it."""

    parent: str
    lite_topics: int = 0
    lifetime_minutes: int = -1
    groups: list[str] = field(default_factory=list)
    brokers: list[str] = field(default_factory=list)
    trouble: str = ""


class LiteRow(LiteTopicRow, rename="camel", kw_only=True):
    """A lite topic at a broker, see `LiteTopicRow`."""

    broker_name: str

    @property
    def depth(self) -> int:
        """Number of stored messages."""
        return max(0, self.max_offset - self.min_offset)

    @property
    def lag(self) -> int | None:
        """Number of messages that the requested group has not consumed; None without a group."""
        return None if self.consumer_offset is None else max(0, self.max_offset - self.consumer_offset)


class Names(Struct, rename="camel", kw_only=True):
    """A page of the lite topics of a parent. ``next_after`` is empty on the last page."""

    parent: str
    rows: list[LiteRow]
    total: int = 0
    next_after: str = ""
    troubles: list[str] = field(default_factory=list)


class GroupAt(Struct, rename="camel", kw_only=True):
    """A group in a lite topic at a broker. ``unacked_count`` and ``free_at`` are as in `LiteTopicRow`."""

    group: str
    broker_name: str
    consumer_offset: int = 0
    lag: int = 0
    unacked_count: int | None = None
    free_at: int | None = None
    clients: list[str] = field(default_factory=list)


class LiteAt(Struct, rename="camel", kw_only=True):
    """A lite topic at a broker. ``expires_at`` is -1 if it never expires. ``epoch`` and ``is_live`` are None at a
    broker that does not report lives. ``is_chosen``: new messages go to this broker. ``has_lists``: the broker lists
    names and lives, which only rmqkit's brokers do."""

    broker_name: str
    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0
    expires_at: int = -1
    epoch: int | None = None
    is_live: bool | None = None
    is_chosen: bool = True
    has_lists: bool = True


class LiteView(Struct, rename="camel", kw_only=True):
    """One lite topic: its places, and its groups there."""

    parent: str
    lite_topic: str
    places: list[LiteAt] = field(default_factory=list)
    groups: list[GroupAt] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Return True if a broker has, or had, messages of it."""
        return any(one.max_offset or one.is_live for one in self.places)


class GroupRow(Struct, rename="camel", kw_only=True):
    """A lite group. ``quota``: maximum number of lite topics of a client. ``clients`` is None if no broker lists
    them."""

    group: str
    model: str
    quota: int
    lag: int = 0
    clients: int | None = None
    trouble: str = ""


class ClientAt(LiteClientRow, rename="camel", kw_only=True):
    """A client of a lite group at a broker."""

    broker_name: str


class LagAt(LiteLag, rename="camel", kw_only=True):
    """The lag of a group in a lite topic at a broker."""

    broker_name: str


class LiteGroupView(Struct, rename="camel", kw_only=True):
    """A lite group: its lag, the lite topics with the largest lags, and its clients."""

    group: str
    parent: str
    lag: int = 0
    top: list[LagAt] = field(default_factory=list)
    clients: list[ClientAt] = field(default_factory=list)
    client_count: int = 0


class Numbered(Struct, rename="camel"):
    """A message with its number in its lite topic."""

    number: int
    broker_name: str
    message: ReceivedMessage


def short_name(name: str) -> str:
    """Return the name of a lite topic from the name of its light queue."""
    place = split_lite_queue(name)
    return name if place is None else place[1]


def model_of(config: SubscriptionGroupConfig) -> str:
    """Return the model of a lite group: Shared, Exclusive or Wildcard."""
    attributes = config.attributes or {}
    if attributes.get("lite.sub.wildcard", "false") not in ("", "false"):
        return "Wildcard"
    return attributes.get("lite.sub.model", "Shared")


class Lite:
    """Operations on lite topics. Each raises the errors of `AdminCalls`, and UnknownName for a missing parent."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    # -- brokers and parents

    async def brokers(self, broker: str | None = None, cluster: str | None = None) -> dict[str, BrokerLiteInfo]:
        """Return the counts of each master that serves lite topics, by broker name (``getBrokerLiteInfo``)."""
        masters = await self._calls.masters(cluster, broker)
        code = RequestCode.GET_BROKER_LITE_INFO
        found = await self._served(masters, lambda address: self._calls.fetch(BrokerLiteInfo, address, code))
        for one in found.values():
            one.topic_meta = dict(sorted(one.topic_meta.items()))
        return found

    async def parents(self, cluster: str | None = None) -> list[ParentRow]:
        """Return all parent topics with their numbers of lite topics."""
        rows: dict[str, ParentRow] = {}
        for broker, info in (await self.brokers(cluster=cluster)).items():
            for parent in info.topic_meta:
                rows.setdefault(parent, ParentRow(parent=parent)).brokers.append(broker)
        return [await self._parent_row(row) for __, row in sorted(rows.items())]

    async def parent(self, parent: str) -> ParentRow:
        """Return a parent topic (``getParentTopicInfo``)."""
        brokers = [*await self._calls.masters_of_topic(parent)]
        row = await self._parent_row(ParentRow(parent=parent, brokers=brokers))
        if row.trouble:
            raise SettingsError(row.trouble)
        return row

    async def _parent_row(self, row: ParentRow) -> ParentRow:
        """Add the facts of its brokers to a row."""
        for broker in row.brokers:
            try:
                info = await self._info(await self._calls.address(broker), ParentTopicRequest(topic=row.parent))
            except PeerRefused as error:
                row.trouble = str(error)
                continue
            row.lite_topics += info.lite_topic_count
            row.lifetime_minutes = info.ttl if info.ttl > 0 else -1
            row.groups = sorted({*row.groups, *info.groups})
        return row

    async def names(
        self, parent: str, *, prefix: str = "", after: str = "", count: int = 100, group: str | None = None
    ) -> Names:
        """Return a page of lite topics by name, with the offsets of a group.
        Raises SettingsError: the count is not from 1 to `ROWS_MAX`."""
        if not 1 <= count <= ROWS_MAX:
            raise SettingsError(_("count {count} must be from 1 to {most}", count=count, most=ROWS_MAX))
        header = ParentTopicRequest(topic=parent, max_count=count, prefix=prefix, after=after, group=group)
        masters = await self._calls.masters_of_topic(parent)
        infos = await self._calls.fan_out(masters.values(), lambda address: self._info(address, header))
        page = Names(parent=parent, rows=[])
        has_more = False
        for broker, address in masters.items():
            info = infos[address]
            page.total += info.lite_topic_count
            if info.lite_topics is UNSET:
                page.troubles.append(_(NO_LIST, broker=broker))
                continue
            has_more |= info.next_after is not UNSET
            page.rows += [_with(LiteRow, row, broker) for row in info.lite_topics]
        page.rows.sort(key=lambda one: (one.lite_topic, one.broker_name))
        # A broker's page may end before the names of another one: names after the first end are on the next page.
        ends = [one.next_after for one in infos.values() if isinstance(one.next_after, str)]
        names = sorted({row.lite_topic for row in page.rows})
        last = min([*ends, *names[count - 1 : count]], default="")
        if last:
            page.rows = [row for row in page.rows if row.lite_topic <= last]
            page.next_after = last if has_more or names[-1] > last else ""
        return page

    # -- one lite topic

    async def show(self, parent: str, name: str) -> LiteView:
        """Return a lite topic at each broker of its parent, with its groups (``getLiteTopicInfo``). A name without
        messages has zeros.
        Raises SettingsError: the name is not allowed."""
        _check_name(name)
        view = LiteView(parent=parent, lite_topic=name)
        for broker, address in (await self._calls.masters_of_topic(parent)).items():
            place, clients = await self.place_at(broker, address, parent, name)
            view.places.append(place)
            for group, ids in clients.items():
                view.groups.append(await self.group_at(broker, address, parent, name, group, ids))
        return view

    async def place_at(self, broker: str, address: str, parent: str, name: str) -> tuple[LiteAt, dict[str, list[str]]]:
        """Return a lite topic at one broker, and its subscribers by group, for each group of the parent."""
        code, header = RequestCode.GET_LITE_TOPIC_INFO, LiteTopicRequest(parent, name)
        info = await self._calls.fetch(LiteTopicInfo, address, code, header)
        about = await self._info(address, _one(parent, name))
        row = _row_of(about, name)
        offsets = info.topic_offset
        place = LiteAt(
            broker_name=broker,
            min_offset=offsets.min_offset,
            max_offset=offsets.max_offset,
            last_update_timestamp=offsets.last_update_timestamp,
            is_chosen=info.sharding_to_broker,
            has_lists=about.lite_topics is not UNSET,
        )
        if about.ttl > 0 and offsets.last_update_timestamp > 0:
            place.expires_at = offsets.last_update_timestamp + about.ttl * _MINUTE_MS
        if row is not None:
            place.expires_at, place.epoch, place.is_live = row.expires_at, row.epoch, row.is_live
        clients: dict[str, list[str]] = {group: [] for group in about.groups}
        for one in info.subscriber:
            clients.setdefault(one.group, []).append(one.client_id)
        return place, {group: sorted(ids) for group, ids in clients.items()}

    async def group_at(
        self, broker: str, address: str, parent: str, name: str, group: str, clients: list[str]
    ) -> GroupAt:
        """Return a group in a lite topic at one broker."""
        info = await self._group_info(address, LiteGroupRequest(group=group, lite_topic=name, top_k=1))
        found = GroupAt(group=group, broker_name=broker, lag=info.total_lag_count, clients=clients)
        if info.lite_topic_offset_wrapper is not None:
            found.consumer_offset = info.lite_topic_offset_wrapper.consumer_offset
        row = _row_of(await self._info(address, _one(parent, name, group)), name)
        if row is not None:
            found.unacked_count, found.free_at = row.unacked_count, row.free_at
        return found

    async def holders(self, parent: str, name: str) -> dict[str, str]:
        """Return the addresses of the brokers that have messages of a lite topic, by broker name.
        Raises UnknownName: no broker has one."""
        _check_name(name)
        found: dict[str, str] = {}
        masters = await self._calls.masters_of_topic(parent)
        for broker, address in masters.items():
            code, header = RequestCode.GET_LITE_TOPIC_INFO, LiteTopicRequest(parent, name)
            offsets = (await self._calls.fetch(LiteTopicInfo, address, code, header)).topic_offset
            if offsets.max_offset > offsets.min_offset:
                found[broker] = address
        if not found:
            remedy = _("it was never written, has expired, or was deleted")
            asked = _("parent topic {parent} on {brokers}", parent=parent, brokers=", ".join(masters))
            raise UnknownName(_("lite topic"), name, asked, remedy=remedy)
        return found

    async def read(
        self, parent: str, name: str, *, start: int | None = 0, count: int | None = None, follows: bool = False
    ) -> AsyncIterator[Numbered]:
        """Yield the stored messages of a lite topic from a number on, the oldest first, without a group.

        Args:
            start: the first number; a negative one counts from the end; None: only messages stored from now on.
            count: maximum number of messages; None: no limit.
            follows: wait for new messages. Otherwise stop at the end that the lite topic had at first.

        Raises UnknownName: no broker has messages of it, and ``follows`` is False.
        """
        try:
            holders = await self.holders(parent, name)
        except UnknownName:
            if not follows:
                raise
            holders = await self._chosen(parent, name)
        left = count if count is not None else -1
        for broker, address in holders.items():
            is_last = address == [*holders.values()][-1]
            async for one in self._read_at(broker, address, parent, name, start, follows=follows and is_last):
                if left == 0:
                    return
                left -= 1
                yield one
                if left == 0:
                    return

    async def _chosen(self, parent: str, name: str) -> dict[str, str]:
        """Return the broker to which new messages of a lite topic go."""
        places = (await self.show(parent, name)).places
        chosen = next((one for one in places if one.is_chosen), places[0])
        return {chosen.broker_name: await self._calls.address(chosen.broker_name)}

    async def _read_at(
        self, broker: str, address: str, parent: str, name: str, start: int | None, *, follows: bool
    ) -> AsyncIterator[Numbered]:
        calls = self._calls
        pulled = await calls.pull(address, _pull(parent, name, 0, 0), calls.timeout_ms)
        end = pulled.max_offset
        number = end if start is None else end + start if start < 0 else start
        number = max(number, pulled.min_offset)
        while follows or number < end:
            held_ms = _HELD_MS if follows and number >= end else 0
            header = _pull(parent, name, number, held_ms)
            pulled = await calls.pull(address, header, calls.timeout_ms + held_ms)
            end = pulled.max_offset if follows else end
            for message in read_messages(pulled.body, broker) if pulled.status is PullStatus.FOUND else ():
                yield Numbered(lite_number(message.properties), broker, message)
            if pulled.next_begin_offset > number:
                number = pulled.next_begin_offset
            elif pulled.status is PullStatus.OFFSET_ILLEGAL:
                number = pulled.max_offset
            elif not follows:
                return
            elif not held_ms:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def newest(self, parent: str, name: str, count: int) -> list[Numbered]:
        """Return the newest messages of a lite topic, the newest first. A name without messages has none."""
        found: list[Numbered] = []
        try:
            async for one in self.read(parent, name, start=-count):
                found.append(one)
                if len(found) >= 2 * count:
                    break
        except UnknownName as error:
            if error.name != name:
                raise
        return sorted(found, key=lambda one: (one.message.store_timestamp, one.number))[::-1][:count]

    async def delete(self, parent: str, name: str) -> list[Done]:
        """Delete the messages of a lite topic and the offsets of its groups. Subscriptions stay.
        Raises UnknownName: no broker has messages of it."""
        done = []
        for broker, address in (await self.holders(parent, name)).items():
            header = TopicRequest(lite_queue(parent, name))
            await self._calls.ask(address, RequestCode.DELETE_TOPIC_IN_BROKER, header)
            done.append(Done(broker, _("lite topic {name} of {parent} deleted", name=name, parent=parent)))
        return done

    # -- groups and clients

    async def groups(self, parent: str) -> list[GroupRow]:
        """Return the groups that are bound to a parent, with their lags and numbers of clients."""
        masters = await self._calls.masters_of_topic(parent)
        rows: dict[str, GroupRow] = {}
        for address in masters.values():
            for group, config in (await self._configs(address)).items():
                if config.lite_parent != parent:
                    continue
                row = rows.setdefault(group, GroupRow(group=group, model=model_of(config), quota=config.lite_quota))
                try:
                    info = await self._group_info(address, LiteGroupRequest(group=group, top_k=1, max_clients=0))
                except PeerRefused as error:
                    row.trouble = str(error)
                    continue
                row.lag += info.total_lag_count
                if info.client_count is not None:
                    row.clients = max(row.clients or 0, info.client_count)
        return [row for __, row in sorted(rows.items())]

    async def group(self, group: str, *, top: int = 20, broker: str | None = None) -> LiteGroupView:
        """Return a lite group: its lag, the lite topics with the largest lags, and its clients (``getLiteGroupInfo``).
        Raises PeerRefused: no broker has the group, or it is no lite group."""
        masters = await self._calls.masters(broker=broker)
        header = LiteGroupRequest(group=group, top_k=top, max_clients=_CLIENTS_MAX)
        view = LiteGroupView(group=group, parent="")
        for name, info in (await self._of_group(masters, header)).items():
            view.parent = info.parent_topic
            view.lag += info.total_lag_count
            for lag in info.lag_count_top_k or ():
                lag.lite_topic = short_name(lag.lite_topic)
                view.top.append(_with(LagAt, lag, name))
            rows = info.clients
            if rows is None:
                rows = await self._heard(masters[name], group, info.parent_topic)
            view.clients += [_with(ClientAt, row, name) for row in rows]
        view.client_count = len({one.client_id for one in view.clients})
        view.top = sorted(view.top, key=lambda one: (-one.lag_count, one.lite_topic))[:top]
        return view

    async def _of_group(self, masters: Mapping[str, str], header: LiteGroupRequest) -> dict[str, LiteGroupInfo]:
        """Return the answers of the brokers that have a lite group. Raises PeerRefused: no broker has it."""
        return await self._served(masters, lambda address: self._group_info(address, header))

    async def _heard(self, address: str, group: str, parent: str) -> list[LiteClientRow]:
        """Return the clients of a group that sent heartbeats to a broker that does not list clients."""
        try:
            code, header = RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(group)
            connection = await self._calls.fetch(ConsumerConnection, address, code, header)
        except PeerRefused as error:
            if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                raise
            return []
        rows = []
        for client_id in sorted(one.client_id for one in connection.connection_set)[:_CLIENTS_MAX]:
            info = await self.client_at(address, parent, group, client_id, 1)
            row = LiteClientRow(client_id=client_id, lite_topic_count=max(0, info.lite_topic_count))
            row.last_access_time, row.last_consume_time = max(0, info.last_access_time), info.last_consume_time
            rows.append(row)
        return rows

    async def client(self, parent: str, group: str, client_id: str, count: int = 1000) -> dict[str, LiteClientInfo]:
        """Return the lite topics of a client by broker name, without the brokers that do not know it
        (``getLiteClientInfo``). Raises UnknownName: no broker knows the client."""
        found = {}
        masters = await self._calls.masters_of_topic(parent)
        for broker, address in masters.items():
            info = await self.client_at(address, parent, group, client_id, count)
            if info.lite_topic_count >= 0:
                info.lite_topic_set = sorted(short_name(one) for one in info.lite_topic_set or ())
                found[broker] = info
        if not found:
            asked = _("lite group {group} on {brokers}", group=group, brokers=", ".join(masters))
            raise UnknownName(
                "client", client_id, asked, remedy=_("see its clients: rmq lite group {group}", group=group)
            )
        return found

    async def reset(self, parent: str, name: str, group: str, target: int | None, *, since_ms: int = -1) -> list[Done]:
        """Set a group's offset in a lite topic: to a number, or else to the first message since a time (-1: to the
        end). Messages that it has not acknowledged are delivered again from there.
        Raises UnknownName: no broker has messages of it. Raises PeerRefused: there is no such number or group."""
        done = []
        for broker, address in (await self.holders(parent, name)).items():
            header = ResetOffsetRequest(
                topic=lite_queue(parent, name),
                group=group,
                timestamp=since_ms,
                is_force=True,
                queue_id=0,
                offset=target,
            )
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            table = (await self._calls.fetch(ResetOffsetBody, address, code, header)).offset_table
            at = next(iter(table.values()), target)
            done.append(
                Done(broker, _("group {group} continues at number {at} of {name}", group=group, at=at, name=name))
            )
        return done

    async def dispatch(self, group: str, client_id: str | None = None, broker: str | None = None) -> list[Done]:
        """Make brokers look again for messages of a lite group (``triggerLiteDispatch``).
        Raises PeerRefused: no broker has the group, or it is no lite group."""
        masters = await self._calls.masters(broker=broker)
        done = []
        for name in await self._of_group(masters, LiteGroupRequest(group=group, top_k=1)):
            header = TriggerLiteDispatchRequest(group=group, client_id=client_id)
            await self._calls.ask(masters[name], RequestCode.TRIGGER_LITE_DISPATCH, header)
            done.append(Done(name, _("the lite topics of group {group} are looked at again", group=group)))
        return done

    # -- requests

    async def _served(self, masters: Mapping[str, str], asking: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """Return the answers of the brokers that serve a request and have its subject, by broker name.
        Raises PeerRefused: a broker refuses for another reason, or none serves it."""
        found: dict[str, T] = {}
        refusal: PeerRefused | None = None
        for name, address in masters.items():
            try:
                found[name] = await asking(address)
            except PeerRefused as error:
                if error.code not in _NOT_SERVED:
                    raise
                refusal = error
        if not found and refusal is not None:
            raise refusal
        return found

    async def _info(self, address: str, header: ParentTopicRequest) -> ParentTopicInfo:
        return await self._calls.fetch(ParentTopicInfo, address, RequestCode.GET_PARENT_TOPIC_INFO, header)

    async def _group_info(self, address: str, header: LiteGroupRequest) -> LiteGroupInfo:
        return await self._calls.fetch(LiteGroupInfo, address, RequestCode.GET_LITE_GROUP_INFO, header)

    async def client_at(self, address: str, parent: str, group: str, client_id: str, count: int) -> LiteClientInfo:
        """Return the lite topics of a client at one broker. An unknown client has the count -1."""
        code = RequestCode.GET_LITE_CLIENT_INFO
        header = LiteClientRequest(parent_topic=parent, group=group, client_id=client_id, max_count=count)
        return await self._calls.fetch(LiteClientInfo, address, code, header)

    async def _configs(self, address: str) -> dict[str, SubscriptionGroupConfig]:
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        return (await self._calls.fetch(SubscriptionGroupTable, address, code)).subscription_group_table


def _with(kind: type[S], row: Struct, broker: str) -> S:
    """Return a row of a broker with the broker's name."""
    fields: dict[str, Any] = {name: getattr(row, name) for name in row.__struct_fields__}
    return kind(**fields, broker_name=broker)


def _one(parent: str, name: str, group: str | None = None) -> ParentTopicRequest:
    """Return the request for the row of one lite topic, live or expired."""
    return ParentTopicRequest(topic=parent, max_count=1, prefix=name, with_expired=True, group=group)


def _row_of(info: ParentTopicInfo, name: str) -> LiteTopicRow | None:
    """Return the row of a lite topic; None if the broker does not know the name, or has no lists."""
    first = None if info.lite_topics is UNSET or not info.lite_topics else info.lite_topics[0]
    return first if first is not None and first.lite_topic == name else None


def _check_name(name: str) -> None:
    """Check the name of a lite topic. Raises SettingsError: the name is not allowed."""
    fault = lite_topic_fault(name)
    if fault is not None:
        raise SettingsError(_("lite topic {name!r}: {fault}", name=name, fault=fault))


def _pull(parent: str, name: str, number: int, held_ms: int) -> PullMessageRequest:
    """Return a pull from a lite topic, without a commit. The broker may wait ``held_ms`` for a message."""
    return PullMessageRequest(
        consumer_group=TOOLS_GROUP,
        topic=parent,
        queue_id=0,
        queue_offset=number,
        max_msg_nums=_PULL_COUNT,
        sys_flag=int(PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if held_ms else 0)),
        commit_offset=0,
        suspend_timeout_millis=held_ms,
        sub_version=0,
        subscription="*",
        expression_type="TAG",
        lite_topic=name,
    )
