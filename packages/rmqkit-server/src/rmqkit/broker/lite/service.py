"""Lite topics at one broker: who gets which messages, and for how long a lite topic lives (``LiteEventDispatcher``,
``LiteSubscriptionRegistry``, ``PopLiteMessageProcessor``, ``LiteLifecycleManager``).

==================  ===================================================================================================
`subscriptions`     groups, clients, and their lite topics
`batches`           the messages that a group has received and not acknowledged
`waiting`           pops that found nothing
`offsets`           the offsets of groups, and their files
`LiteService`       joins them
==================  ===================================================================================================

A new message marks its lite topic as dirty for its subscribers, and wakes a pop that waits. A pop takes dirty lite
topics in turn, an equal share of messages from each. So nothing is scanned, neither for delivery nor for expiry.
Only a master serves lite topics; a slave has the messages, and its lite topics expire by the same rule.
Use this module only on the event loop. Source: lite.md §6 to §9.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from rmqkit.broker.lite.batches import LiteBatch
from rmqkit.broker.lite.offsets import LiteOffsets
from rmqkit.broker.lite.subscriptions import BINDING, LiteClient, LiteGroup, is_wildcard
from rmqkit.broker.lite.waiting import LiteWaiting
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.protocol.names import is_light, lite_queue, split_lite_queue
from rmqkit.protocol.record import record_properties
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.remoting.connection import Connection
from rmqkit.store.light import light_numbers
from rmqkit.store.lite.lite_queues import LiteQueue
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings

__all__ = ["LITE_REVIVE_QUEUE", "AckRefused", "LiteContext", "LiteService", "PoppedLite"]

LITE_REVIVE_QUEUE = 999
"""The number of a revive queue in handles of lite topics, as for ordered pops."""
_SLICE = 200
_DUE_MIN = 10_000
_MINUTE_MS = 60_000

_log = logging.getLogger(__name__)


class LiteContext(Protocol):
    """The parts of the broker that lite topics use."""

    clock: Clock
    groups: GroupTable
    lite: LiteService | None
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    store_settings: StoreSettings
    topics: TopicTable


class AckRefused(ValueError):
    """The refusal of an ack or of a new invisible time: the batch does not have the message."""


class PoppedLite(Struct):
    """The messages of one pop, of one or more lite topics. ``counts``: for each message, its number in its lite topic,
    and the number of its earlier deliveries."""

    records: list[memoryview]
    counts: list[tuple[int, int]]
    pop_time: int

    @property
    def size(self) -> int:
        return sum(map(len, self.records))


class _Taken(Struct):
    """The messages of one lite topic for a pop."""

    slot: int
    name: str
    numbers: list[int]
    records: list[memoryview]
    before: LiteBatch | None


class LiteService:
    """The lite topics of one broker.

    Attributes:
        groups: the lite groups with clients or batches, by name.
        offsets: the offsets of groups.
        waiting: pops that wait for a message.
    """

    def __init__(
        self, store: MessageStore, topics: TopicTable, groups: GroupTable, settings: BrokerSettings, clock: Clock
    ) -> None:
        self._store = store
        self._topics = topics
        self._configs = groups
        self._settings = settings
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._table = store.lite.table
        self._by_parent: dict[str, list[LiteGroup]] = {}
        self._due: list[tuple[int, int, LiteGroup, int, LiteBatch]] = []
        self._due_max = _DUE_MIN
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self.groups: dict[str, LiteGroup] = {}
        self.offsets = LiteOffsets(store.root, self._table)
        self.waiting = LiteWaiting(settings)
        store.lite.on_arrival = self._arrived
        store.lite.on_removed = self._removed

    def load(self) -> None:
        """Read the offsets. The store is open. Raises StoreUnavailable: a file cannot be read."""
        self.offsets.load()
        self._set_lifetimes()

    # ---- groups

    def group(self, name: str, config: SubscriptionGroupConfig) -> LiteGroup:
        """Return a lite group. Its clients are forgotten if its binding or its model has changed."""
        parent = (config.attributes or {})[BINDING]
        known = self.groups.get(name)
        if known is not None and (known.parent, known.is_wildcard) == (parent, is_wildcard(config)):
            return known
        if known is not None:
            self.forget_group(name)
        made = self.groups[name] = LiteGroup(name, parent, is_wildcard=is_wildcard(config))
        self._by_parent.setdefault(parent, []).append(made)
        return made

    def forget_group(self, name: str) -> None:
        """Forget clients and batches of a group."""
        known = self.groups.pop(name, None)
        if known is not None:
            self._by_parent[known.parent].remove(known)

    def delete_groups(self, names: Iterable[str]) -> None:
        """Forget groups that were deleted, with their offsets."""
        for name in names:
            self.forget_group(name)
            self.offsets.forget_group(name)

    def bound_to(self, parent: str) -> list[str]:
        """Return the names of the groups that are bound to a parent topic, by their configuration."""
        table = self._configs.stored.subscription_group_table
        return sorted(name for name, one in table.items() if (one.attributes or {}).get(BINDING) == parent)

    @property
    def subscription_count(self) -> int:
        return sum(group.subscription_count for group in self.groups.values())

    # ---- events

    def _arrived(self, places: Iterable[tuple[str, str]]) -> None:
        """Mark the lite topics of new messages. ``places``: parent and lite topic of each message."""
        if not self._by_parent:
            return
        for parent, name in dict.fromkeys(places):
            for group in self._by_parent.get(parent, ()):
                self.waiting.wake(group.mark(name))

    def _removed(self, slots: Sequence[int]) -> None:
        """Forget what groups have of lite topics that expired. Their subscriptions stay: the names may live again."""
        for slot in slots:
            self.offsets.forget(slot)
            for group in self._by_parent.get(self._table.parent_of(slot).name, ()):
                group.batches.pop(slot, None)

    def mark(self, group: LiteGroup, name: str) -> None:
        """Mark a lite topic as dirty for a group, if it has messages for the group, and wake a pop."""
        slot = self._table.find(group.parent, name)
        if slot is not None and self._table.ends[slot] > self.offset_of(group, slot):
            self.waiting.wake(group.mark(name))

    def mark_all(self, group: LiteGroup) -> None:
        """Mark all lite topics of a wildcard group's parent, or of its clients, in slices."""
        parent = self._table.parents.get(group.parent)
        subscribed = {name for client in group.clients.values() for name in client.names}
        names = iter(list(parent.slots) if group.is_wildcard and parent is not None else subscribed)
        self._mark_slice(group, names)

    def _mark_slice(self, group: LiteGroup, names: Iterator[str]) -> None:
        for name in itertools.islice(names, _SLICE):
            self.mark(group, name)
        following = next(names, None)
        if following is not None and self.groups.get(group.name) is group:
            self._loop.call_soon(self._mark_slice, group, itertools.chain([following], names))

    def offset_of(self, group: LiteGroup, slot: int) -> int:
        """Return the number of the next message of a lite topic for a group: its offset, or the first message."""
        return max(self.offsets.get(group.name, slot), self._store.lite.min_offset(slot))

    # ---- delivery

    def pop(
        self, group: LiteGroup, client: LiteClient, *, count_max: int, invisible_ms: int, attempt_id: str | None
    ) -> PoppedLite | None:
        """Pop messages of the lite topics that are dirty for a client. Return None without messages."""
        now = self._clock.now_ms()
        dirty = group.dirty if group.is_wildcard else client.dirty
        share = max(1, -(-count_max // len(dirty))) if dirty else 0
        taken: list[_Taken] = []
        left = count_max
        for name in list(itertools.islice(dirty, count_max)):
            del dirty[name]
            one = self._take(group, name, min(share, left), now, attempt_id)
            if one is not None:
                taken.append(one)
                left -= len(one.records)
                if left <= 0:
                    break
        if attempt_id is not None and not taken:
            taken = self._take_again(group, count_max, now, attempt_id)
        if not taken:
            return None
        pop_time = max([now, *(one.before.pop_time + 1 for one in taken if one.before is not None)])
        popped = PoppedLite([], [], pop_time)
        for one in taken:
            tries = {} if one.before is None else one.before.next_tries(one.numbers, attempt_id)
            batch = LiteBatch(
                one.numbers, pop_time=pop_time, invisible_ms=invisible_ms, attempt_id=attempt_id, tries=tries
            )
            group.batches[one.slot] = batch
            self._plan(group, one.slot, batch)
            popped.records += one.records
            popped.counts += [(number, tries.get(number, 0)) for number in one.numbers]
        client.consumed_ms = now
        return popped

    def _take(self, group: LiteGroup, name: str, count_max: int, now: int, attempt_id: str | None) -> _Taken | None:
        """Return the next messages of a lite topic, or None if it has none or a batch is out."""
        slot = self._table.find(group.parent, name)
        if slot is None or not self._table.is_live(slot):
            return None
        before = group.batches.get(slot)
        if before is not None and before.free_at > now and not before.is_repeated_by(attempt_id):
            return None  # it becomes dirty again when the batch is free
        light = lite_queue(group.parent, name)
        found = self._store.get(light, 0, self.offset_of(group, slot), count_max=count_max)
        numbers = [_number(record, group.parent, light) for record in found.records]
        if not numbers:
            return None
        return _Taken(slot, name, numbers, found.records, before)

    def _take_again(self, group: LiteGroup, count_max: int, now: int, attempt_id: str) -> list[_Taken]:
        """Return the messages of batches of the same attempt, whose answer the client did not get."""
        slots = [slot for slot, batch in group.batches.items() if batch.is_repeated_by(attempt_id)]
        taken: list[_Taken] = []
        for slot in slots:
            one = self._take(group, self._table.names[slot], count_max, now, attempt_id) if count_max > 0 else None
            if one is not None:
                taken.append(one)
                count_max -= len(one.records)
        return taken

    def _plan(self, group: LiteGroup, slot: int, batch: LiteBatch) -> None:
        """Look at a batch again when it may be free."""
        at = batch.free_at
        heapq.heappush(self._due, (at, next(self._numbers), group, slot, batch))
        if len(self._due) > self._due_max:
            # Acknowledged batches stay in the heap until their time: drop them before they need much memory.
            self._due = [one for one in self._due if one[2].batches.get(one[3]) is one[4]]
            heapq.heapify(self._due)
            self._due_max = max(_DUE_MIN, 2 * len(self._due))
        if self._timer is None or at < self._timer_at:
            self._set_timer(at)

    def _set_timer(self, at: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0, at - self._clock.now_ms()) / 1000, self._free_due)

    def _free_due(self) -> None:
        """Mark the lite topics whose batches are free."""
        self._timer = None
        now = self._clock.now_ms()
        while self._due and self._due[0][0] <= now:
            _, _, group, slot, batch = heapq.heappop(self._due)
            if group.batches.get(slot) is not batch or self.groups.get(group.name) is not group:
                continue
            if batch.first is not None and batch.free_at <= now:
                self.mark(group, self._table.names[slot])
        if self._due:
            self._set_timer(self._due[0][0])

    def ack(self, group: LiteGroup, name: str, number: int, pop_time: int) -> None:
        """Acknowledge a message. An ack of an earlier delivery has no effect.
        Raises AckRefused: the group has not received the message."""
        slot = self._table.find(group.parent, name)
        if slot is None or number < self.offsets.get(group.name, slot):
            return
        batch = group.batches.get(slot)
        if batch is None:
            # After a restart only the next message of the group can be acknowledged: earlier ones may be missing.
            if number != self.offset_of(group, slot):
                raise AckRefused(f"message {number} of lite topic {name} is in no batch")
            self.offsets.commit(group.name, slot, number + 1)
            return
        if batch.pop_time != pop_time:
            return
        try:
            first = batch.ack(number)
        except ValueError as error:
            raise AckRefused(str(error)) from None
        self.offsets.commit(group.name, slot, batch.numbers[-1] + 1 if first is None else first)
        if first is None:
            del group.batches[slot]
            self.mark(group, name)
        elif first > number:  # the batch may be free earlier, or now
            self._plan(group, slot, batch)

    def change(
        self, group: LiteGroup, name: str, number: int, pop_time: int, invisible_ms: int, *, suspends: bool
    ) -> int:
        """Set the time at which a message is delivered again. Return this time, or 0 if the message was acknowledged or
        delivered again meanwhile. Raises AckRefused: the group has not received the message."""
        slot = self._table.find(group.parent, name)
        batch = None if slot is None else group.batches.get(slot)
        if slot is None or batch is None or batch.pop_time != pop_time or number < self.offsets.get(group.name, slot):
            return 0
        visible_at = self._clock.now_ms() + invisible_ms
        try:
            batch.change(number, visible_at, suspends=suspends)
        except ValueError as error:
            raise AckRefused(str(error)) from None
        self._plan(group, slot, batch)
        return visible_at

    def reset(self, group: LiteGroup, name: str, number: int) -> None:
        """Set a group's offset in a lite topic, take its batch back, and deliver from there."""
        slot = self._table.find(group.parent, name)
        if slot is not None:
            group.batches.pop(slot, None)
            self.offsets.commit(group.name, slot, number)
            self.mark(group, name)

    def committed(self, group: str, light: str) -> int | None:
        """Return the offset of a lite group in a light queue; None if the group or the queue is no lite one, or if
        there is no offset."""
        slot = self._slot_of(group, light)
        offset = -1 if slot is None else self.offsets.get(group, slot)
        return offset if offset >= 0 else None

    def commit(self, group: str, light: str, offset: int) -> bool:
        """Set the offset of a lite group in a light queue. Return False if the group or the queue is no lite one."""
        slot = self._slot_of(group, light)
        if slot is None:
            return False
        self.offsets.commit(group, slot, offset)
        return True

    def _slot_of(self, group: str, light: str) -> int | None:
        place = split_lite_queue(light) if is_light(light) else None
        config = self._configs.stored.subscription_group_table.get(group) if place is not None else None
        if place is None or config is None or (config.attributes or {}).get(BINDING) != place[0]:
            return None
        return self._table.find(*place)

    def queue(self, parent: str, name: str) -> LiteQueue | None:
        """Return the queue of a lite topic, or None."""
        return self._store.lite.queue(lite_queue(parent, name))

    # ---- rounds

    def _set_lifetimes(self) -> None:
        least = -(-self._settings.lite_lifetime_min_ms // _MINUTE_MS)
        for name in self._table.parents:
            config = self._topics.get(name)
            text = (config.attributes or {}).get("lite.topic.expiration", "-1") if config is not None else "-1"
            minutes = int(text)
            self._store.lite.set_lifetime(name, max(least, minutes) if minutes > 0 else None)

    async def expire(self) -> None:
        """Remove the lite topics whose lifetime is over, in slices. The broker calls this regularly."""
        self._set_lifetimes()
        for i, _ in enumerate(self._store.lite.expire(self._clock.now_ms()), 1):
            if i % _SLICE == 0:
                await asyncio.sleep(0)

    def drop_silent(self) -> None:
        """Forget clients without a subscription request for a while."""
        before = self._clock.now_ms() - self._settings.lite_client_timeout_ms
        for group in list(self.groups.values()):
            for client in [one for one in group.clients.values() if one.accessed_ms < before]:
                _log.info("lite client %s of group %s is silent: its subscriptions are removed", client.client_id,
                          group.name)  # fmt: skip
                self.remove_client(group, client)

    def remove_client(self, group: LiteGroup, client: LiteClient) -> None:
        """Forget a client. The other subscribers of its lite topics have them dirty as well."""
        group.remove_client(client)

    def connection_closed(self, connection: Connection) -> None:
        self.waiting.connection_closed(connection)

    def save(self) -> None:
        """Write changed names and offsets, if any. Raises StoreUnavailable: the disk refused."""
        self._store.lite.save()
        self.offsets.save()

    def close(self) -> None:
        """Answer the waiting pops."""
        self.waiting.close()
        if self._timer is not None:
            self._timer.cancel()


def _number(record: memoryview, parent: str, light: str) -> int:
    """Return the number of a stored record in a light queue."""
    return light_numbers(parent, record_properties(record))[light]
