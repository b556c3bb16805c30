"""The search for the reason why a group did not consume a message: `explain` finds the facts, `causes` judges them.

=============================  =========================================================================================
fact                           requests
=============================  =========================================================================================
the message by id, key, place  VIEW_MESSAGE_BY_ID, QUERY_MESSAGE, QUERY_CONSUME_QUEUE at the brokers of its topic
its copies, by unique key      QUERY_MESSAGE in the topics of retries, dead letters, delays, half messages, traces
its delivery time              QUERY_CONSUME_QUEUE (entries of delay queues have the time), or a property of the timer
the group's progress           QUERY_CONSUMER_OFFSET, and its clients
deliveries to the group        VIEW_BROKER_STATS_DATA
the group and its clients      GET_ALL_SUBSCRIPTIONGROUP_CONFIG (352 might create it), `admin.cluster.clients`
=============================  =========================================================================================

The requests change nothing. Facts that a broker does not report are missing from the evidence.
Source: behaviour.md §9.9.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.causes import Explanation, Facts, Place, Transaction, judge
from rmqkit.admin.explain_lite import explain_lite
from rmqkit.admin.messages.messages import traces_of
from rmqkit.admin.pulls import readers
from rmqkit.errors import PeerRefused, ProtocolError, RemotingError, SettingsError, UnknownName
from rmqkit.protocol import names
from rmqkit.protocol import properties as prop
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.properties import lite_number
from rmqkit.protocol.schemas.clients import ConsumerConnection, ConsumerRunningInfo, MessageQueue
from rmqkit.protocol.schemas.groups import SubscriptionGroupTable
from rmqkit.protocol.schemas.offsets import StatsDataRequest
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import TopicConfig, TopicRequest
from rmqkit.remoting.address import join_address
from rmqkit.sentences import _

__all__ = ["At", "Explainer", "Key", "explain"]

_BEFORE = (names.SCHEDULE_TOPIC, names.TIMER_TOPIC, names.HALF_TOPIC, names.TRANS_CHECK_MAX_TIME_TOPIC)
"""The topics in which a message may be before it reaches its own topic."""
_TOPICS_MAX = 500
_AT_ONCE = 16
_OP_PULLS_MAX = 16
_READ_FORBIDDEN = 1 << 2
_PORT_MAX = 65_535
_LOG_BYTES_MAX = 1 << 48
"""The maximum offset in an offset message id. No log is longer, so an id with a larger offset is a unique key."""

T = TypeVar("T")


class Key(Struct):
    """A message, identified by one of its keys."""

    text: str


class At(Struct):
    """A message, identified by its queue offset. The broker (name or address) is optional if only one has the topic."""

    queue_id: int
    offset: int
    broker: str | None = None


async def explain(admin: Admin, topic: str, group: str, message: str | Key | At) -> Explanation:
    """Return the reason why a group has not consumed a message. CONSUMED is a possible result. If ``message`` is a
    text, it is an offset message id or a unique key.
    Raises UnknownName: there is no such topic. Raises SettingsError: several messages match. Also raises the errors of
    `AdminCalls`."""
    return await Explainer(admin, topic, group).explain(message)


class Explainer:
    """A search for causes, for one topic and one group. The data of the group are requested only once.
    ``hides_bodies``: hide the reasons of dead letters, because they often quote bodies."""

    def __init__(self, admin: Admin, topic: str, group: str, *, hides_bodies: bool = False) -> None:
        self._admin = admin
        self._calls = admin.calls
        self._topic = topic
        self._group = group
        self._hides_bodies = hides_bodies
        self._known: dict[object, asyncio.Future[Any]] = {}

    async def explain(self, message: str | Key | At) -> Explanation:
        """Return the explanation for a message, like the function `explain`."""
        return await self.judged(await self.facts(message))

    async def judged(self, facts: Facts) -> Explanation:
        """Return the cause that the facts show. A lite group gets the message as one of a lite topic."""
        message = facts.message
        if message is None or message.lite_topic is None or facts.config is None or facts.config.lite_parent is None:
            return judge(facts)
        if facts.dead_letter is not None:
            return judge(facts)
        number = lite_number(message.properties)
        return await explain_lite(self._admin, self._topic, message.lite_topic, self._group, number=number)

    async def facts(self, message: str | Key | At) -> Facts:
        """Return all facts about a message and the group, for `judge` and `timeline`. Raises the errors of
        `explain`."""
        facts = self._facts("")
        match message:
            case Key(text):
                unique_key = await self._by_key(facts, text)
            case At():
                unique_key = await self._by_place(facts, message)
            case _:
                unique_key = await self._by_id(facts, message)
        if unique_key:
            await self._add_copies(facts, unique_key)
        if facts.message is not None or facts.copies:
            facts.lookup.elsewhere = None
        elif facts.place is None:
            facts.lookup.brokers = list(await readers(self._calls, self._topic))
            if unique_key:
                await self._look_elsewhere(facts, unique_key)
        await self._add_standing(facts)
        return facts

    async def stored(self, message: ReceivedMessage) -> Facts:
        """Return the facts of a message that was already found, without the state of the group."""
        facts = self._facts(message.msg_id)
        facts.message = message
        if unique_key := message.properties.get(prop.UNIQ_KEY):
            await self._add_copies(facts, unique_key)
        return facts

    def _facts(self, asked: str) -> Facts:
        now_ms, hides_bodies = self._calls.clock.now_ms(), self._hides_bodies
        return Facts(topic=self._topic, group=self._group, asked=asked, now_ms=now_ms, hides_bodies=hides_bodies)

    # -- the message

    async def _by_id(self, facts: Facts, text: str) -> str:
        """Find a message by its unique key or its offset message id. Return its unique key."""
        facts.asked = _("message {text}", text=text)
        with contextlib.suppress(ValueError):
            ip, port, physical_offset = decode_offset_id(text)
            if 0 < port <= _PORT_MAX and 0 <= physical_offset < _LOG_BYTES_MAX:
                record = await self._by_offset_id(facts, join_address(ip, port), physical_offset)
                if record is not None:
                    text = record.properties.get(prop.UNIQ_KEY, record.msg_id)
                    if record.topic == self._topic:
                        facts.message = record
                        return text
                    facts.lookup.elsewhere = record
        facts.message = next(iter(await self._query(self._topic, text)), None)
        return text

    async def _by_offset_id(self, facts: Facts, address: str, physical_offset: int) -> ReceivedMessage | None:
        """Return the message at a physical offset of the broker that an offset message id names."""
        known = facts.lookup
        known.address, known.physical_offset = address, physical_offset
        brokers = (await self._calls.cluster()).broker_addr_table.items()
        name = next((name for name, data in brokers if address in data.broker_addrs.values()), None)
        if name is None:
            return None
        known.is_known = True
        for found in await self._admin.messages.at_place(address, physical_offset):
            if found.physical_offset == physical_offset:  # Apache's brokers have a message at offset 0, too
                found.broker_name = name
                return found
        if (status := await self._status(address)) is not None:
            known.log_min, known.log_max = int(status["commitLogMinOffset"]), int(status["commitLogMaxOffset"])
        return None

    async def _by_key(self, facts: Facts, key: str) -> str:
        facts.asked = _("the message with key {key}", key=key)
        found = await self._query(self._topic, key, is_unique=False)
        facts.message = found[0] if found else None
        for topic in _BEFORE if not found else ():
            found += [one for one in await self._query(topic, key, is_unique=False) if self._is_copy(one)]
        ids = list(dict.fromkeys(one.msg_id for one in found))
        if len(ids) > 1:
            shown = ", ".join(ids[:5])
            raise SettingsError(
                _(
                    "key {key} is that of {count} messages in {topic}; explain one: {shown}",
                    key=key,
                    count=len(ids),
                    topic=self._topic,
                    shown=shown,
                )
            )
        return next(iter(ids), "")

    async def _by_place(self, facts: Facts, at: At) -> str:
        brokers = await readers(self._calls, self._topic)
        named = [name for name, address in brokers.items() if at.broker in (None, name, address)]
        if len(named) != 1:
            raise SettingsError(
                _(
                    "on which broker? topic {topic} is on {brokers}: name one of them",
                    topic=self._topic,
                    brokers=", ".join(brokers),
                )
            )
        name = named[0]
        facts.asked = _("the message at offset {offset:,} of queue {queue}", offset=at.offset, queue=at.queue_id)
        facts.place = place = await self._place(name, self._topic, at.queue_id, at.offset)
        if not place.min_offset <= at.offset < place.max_offset:
            return ""
        facts.message = await self._admin.messages.at(self._topic, name, at.queue_id, at.offset)
        return facts.message.properties.get(prop.UNIQ_KEY, "")

    async def _add_copies(self, facts: Facts, unique_key: str) -> None:
        """Search for copies in the topics of messages that are not delivered yet, and of messages that the group failed
        to consume."""
        topics = [names.retry_topic(self._group), names.dlq_topic(self._group)]
        topics += _BEFORE if facts.message is None else (names.SCHEDULE_TOPIC,)
        topics += [names.pop_retry_topic(self._group, self._topic, separator) for separator in "_+"]
        found = await asyncio.gather(*(self._query(topic, unique_key) for topic in topics))
        facts.copies = [one for several in found for one in several if self._is_copy(one)]
        if (copy := facts.scheduled) is not None:
            facts.due_ms = await self._due(copy)
        halves = [one for one in facts.copies if one.topic in _BEFORE[2:]]
        if facts.message is None and halves:
            facts.transaction = await self._transaction(unique_key, halves)
        with contextlib.suppress(UnknownName):
            await self._once(names.TRACE_TOPIC, lambda: self._calls.route(names.TRACE_TOPIC))
            records = await traces_of(self._admin.messages, unique_key)
            facts.traces = [one for one in records if one.kind == "Sub" and one.group in ("", self._group)]

    def _is_copy(self, one: ReceivedMessage) -> bool:
        """Return True if a message with the same unique key belongs to the topic, and, if scheduled, to the group."""
        targets = (self._topic, names.retry_topic(self._group))
        if one.topic == self._topic or one.properties.get(prop.RETRY_TOPIC, self._topic) != self._topic:
            return False
        return one.topic not in _BEFORE or one.properties.get(prop.REAL_TOPIC, self._topic) in targets

    async def _due(self, copy: ReceivedMessage) -> int | None:
        if copy.topic == names.TIMER_TOPIC:
            return int(copy.properties.get(prop.TIMER_OUT_MS, "0")) or None
        asking = self._admin.messages.entries(copy.topic, copy.queue_id, copy.queue_offset, 1, broker=copy.broker_name)
        entries = await self._maybe(asking)
        return entries.queue_data[0].tags_code if entries is not None and entries.queue_data else None

    async def _look_elsewhere(self, facts: Facts, unique_key: str) -> None:
        """Search for other meanings of the name: a key in the topic, or the id of a message in another topic."""
        known = facts.lookup
        known.as_key = await self._query(self._topic, unique_key, is_unique=False)
        if known.as_key or known.elsewhere is not None or known.address:
            return
        topics = [name for name in await self._calls.topic_names() if not names.is_system_topic(name)][:_TOPICS_MAX]
        masters, permits = await self._calls.masters(), asyncio.Semaphore(_AT_ONCE)

        async def look(topic: str) -> list[ReceivedMessage]:
            async with permits:
                return await self._admin.messages.by_key(topic, unique_key, is_unique=True, brokers=masters)

        found = await asyncio.gather(*map(look, topics))
        known.topics_searched = len(topics)
        known.elsewhere = next((one for several in found for one in several), None)

    # -- transactions

    async def _transaction(self, unique_key: str, halves: list[ReceivedMessage]) -> Transaction:
        latest = _latest(halves)
        found = Transaction(half=latest, is_given_up=any(one.topic != names.HALF_TOPIC for one in halves))
        address = await self._address(latest.broker_name)
        config = await self._maybe(self._admin.brokers.config(address))
        if config is not None:
            found.checks_max = int(config[address].get("transactionCheckMax", found.checks_max))
        try:
            group = latest.properties.get(prop.PRODUCER_GROUP, "")
            found.producers = len(await self._admin.clients.producers(group))
        except UnknownName:
            found.producers = 0
        while not found.is_given_up and not found.is_ended and await self._is_ended(address, found.half):
            # A check stores the half message again, and passes the copy that was found before the check.
            queries = await asyncio.gather(*(self._query(topic, unique_key) for topic in _BEFORE[2:]))
            copies = [one for several in queries for one in several if self._is_copy(one)]
            latest = _latest([found.half, *copies])
            found.is_given_up = any(one.topic != names.HALF_TOPIC for one in copies)
            found.is_ended = latest is found.half
            found.half = latest
        found.is_ended |= found.is_given_up
        return found

    async def _is_ended(self, address: str, half: ReceivedMessage) -> bool:
        """Return True if the check-back service is past a half message, or an op record names it."""
        calls, halves = self._calls, MessageQueue(half.topic, half.broker_name or "", half.queue_id)
        done = await calls.committed_offset(address, names.TRANSACTION_GROUP, halves, is_stored=True)
        if done is not None and done > half.queue_offset:
            return True
        ops = replace(halves, topic=names.OP_HALF_TOPIC)
        at = await calls.search_offset(address, ops, half.store_timestamp)
        flags = PullFlag.SUBSCRIPTION
        for __ in range(_OP_PULLS_MAX):
            header = PullMessageRequest(TOOLS_GROUP, ops.topic, ops.queue_id, at, 32, flags, 0, 0, 0, "*", "TAG")
            pulled = await calls.pull(address, header, calls.timeout_ms)
            ended = [offset for op in read_messages(pulled.body) for offset in op.body.split(b",")]
            if b"%d" % half.queue_offset in ended:
                return True
            if not ended:
                break
            at = pulled.next_begin_offset
        return False

    # -- the group

    async def _add_standing(self, facts: Facts) -> None:
        """Add the group's progress in the queue of the message, and its online members."""
        current = facts.retry or facts.message
        if current is not None:
            place = (current.broker_name or "", current.topic, current.queue_id, current.queue_offset)
            facts.place = await self._place(*place)
        if facts.place is None:
            return
        address = await self._address(facts.place.broker)
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await self._once((code, address), lambda: self._calls.fetch(SubscriptionGroupTable, address, code))
        facts.config = table.subscription_group_table.get(self._group)
        forbidden = table.forbidden_table.get(self._group, {}).get(self._topic, 0)
        facts.is_read_forbidden = bool(forbidden & _READ_FORBIDDEN)
        facts.connection, facts.members = await self._once("members", self._members)
        if facts.is_past and facts.message is not None and facts.retry is None:
            status = await self._status(address)
            if status is not None and int(status.get("bootTimestamp", facts.now_ms)) <= facts.message.store_timestamp:
                queue_id = facts.message.queue_id
                key = (address, queue_id)
                facts.is_fetched = await self._once(key, lambda: self._maybe(self._is_fetched(*key)))

    async def _members(self) -> tuple[ConsumerConnection | None, dict[str, ConsumerRunningInfo | None]]:
        try:
            connection = await self._admin.clients.consumers(self._group)
            return connection, await self._admin.clients.running(self._group)
        except PeerRefused as error:
            if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                raise
            return None, {}

    async def _place(self, broker: str, topic: str, queue_id: int, offset: int) -> Place:
        address, queue = await self._address(broker), MessageQueue(topic, broker, queue_id)
        code, header, calls = RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic), self._calls
        lowest, highest, committed, config = await asyncio.gather(
            calls.min_offset(address, queue),
            calls.max_offset(address, queue),
            calls.committed_offset(address, self._group, queue, is_stored=True),
            self._once((address, topic), lambda: self._maybe(calls.fetch(TopicConfig, address, code, header))),
        )
        config = config or TopicConfig(topic, read_queue_nums=queue_id + 1)  # older brokers do not report it
        perm, counts = (
            config.perm & await self._routed(broker, topic),
            (config.read_queue_nums, config.write_queue_nums),
        )
        return Place(broker, topic, queue_id, offset, lowest, highest, committed, perm, *counts)

    async def _routed(self, broker: str, topic: str) -> int:
        """Return the permission of a broker in the route, which includes its ``brokerPermission`` for all topics."""
        queues = (await self._calls.route(topic)).queue_datas if topic == self._topic else ()
        return next((data.perm for data in queues if data.broker_name == broker), ~0)

    async def _is_fetched(self, address: str, queue_id: int) -> bool | None:
        """Return True if a broker has delivered messages of a queue (or its topic) to the group since the broker's
        start.

        None: the broker does not count, or it has slaves, which may have delivered messages.
        """
        brokers = (await self._calls.cluster()).broker_addr_table.values()
        is_alone = any([*data.broker_addrs.values()] == [address] for data in brokers)
        topic, queue = self._topic, f"{self._topic}@{queue_id}"
        if not (is_alone and await self._is_counted(address, "TOPIC_PUT_NUMS", topic)):
            return None
        if not await self._is_counted(address, "GROUP_GET_NUMS", f"{topic}@{self._group}"):
            return False
        if not await self._is_counted(address, "QUEUE_PUT_NUMS", queue):
            return True
        return await self._is_counted(address, "QUEUE_GET_NUMS", f"{queue}@{self._group}")

    async def _is_counted(self, address: str, name: str, key: str) -> bool:
        try:
            await self._calls.ask(address, RequestCode.VIEW_BROKER_STATS_DATA, StatsDataRequest(name, key))
        except PeerRefused as error:
            if error.code != ResponseCode.SYSTEM_ERROR:
                raise
            return False
        return True

    # -- asking

    async def _query(self, topic: str, key: str, *, is_unique: bool = True) -> list[ReceivedMessage]:
        """Return messages by unique key or key, the oldest first, from the brokers of the topic in the question."""
        brokers = await readers(self._calls, self._topic)
        return await self._admin.messages.by_key(topic, key, is_unique=is_unique, brokers=brokers)

    async def _address(self, broker: str | None) -> str:
        """Return the address of a broker. The broker of a message may be missing in the current route of the topic."""
        known = await readers(self._calls, self._topic)
        return known.get(broker or "") or await self._calls.address(broker or "")

    async def _status(self, address: str) -> dict[str, str] | None:
        found = await self._once(("status", address), lambda: self._maybe(self._admin.brokers.status(address)))
        return None if found is None else found[address]

    async def _maybe(self, asking: Awaitable[T]) -> T | None:
        """Return an answer, or None after an error."""
        try:
            return await asking
        except (PeerRefused, RemotingError, ProtocolError, UnknownName):
            return None

    async def _once(self, key: object, asking: Callable[[], Awaitable[T]]) -> T:
        """Return an answer or raise its error. The request for a key is sent only once."""
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(asking())
        answer: T = await self._known[key]
        return answer


def _latest(halves: list[ReceivedMessage]) -> ReceivedMessage:
    """Return the last copy of a half message, or the copy of a transaction that was given up if no other is left."""
    return max(halves, key=lambda one: (one.topic == names.HALF_TOPIC, one.queue_offset))
