"""The broker's consumer groups (``SubscriptionGroupManager``), kept in ``config/subscriptionGroup.json``.

A change is on the disk before anybody hears of it, written in a thread with those that come together; a group that
was made because it appeared is written with the others of that second (after a crash it appears again), and goes away
again when nobody uses it.

With ``autoCreateSubscriptionGroup`` every name that a client says becomes a group with a retry topic; Apache's broker
keeps them for ever, whoever made them up. Here one goes when all of this holds (`drop_unused_groups`):

- this broker made it since it started, `BrokerSettings.unused_group_keep_ms` ago or earlier;
- no client of it is connected;
- it has no offset: who pulled and committed nothing, or popped nothing, has nothing to lose;
- nothing was ever stored in its retry topic, and it has no dead letters;
- no operator changed it.

Once one of these has not held for a reason that lasts (an offset, a message), the group is not looked at any more. A
group that comes back after it went is created again as before: its members send heartbeats first. What a former run of
this broker created stays. Loop only. Source: behaviour.md §2.8; store.md §9.4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.files import Changes, SharedWrite
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import StoreUnavailable
from rmqkit.protocol.names import SYSTEM_GROUP_PREFIX, SYSTEM_GROUPS, dlq_topic, group_fault, is_light, retry_topic
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.tasks import Slice
from rmqkit.store.files import JsonFile, RowTexts
from rmqkit.store.message_store import MessageStore

_READ_FORBIDDEN = 1 << 2

V = TypeVar("V")


class Appeared(msgspec.Struct):
    """A group that was made because it appeared.

    Attributes:
        config: as it was made; another object in the table is another's.
        since_ms: monotonic time at which it was made.
        retry: the retry topic that was made for it, if one was.
    """

    config: SubscriptionGroupConfig
    since_ms: float
    retry: TopicConfig | None = None


class GroupTable:
    """Consumer groups by name. ``has_light``: whether every ``%LMQ%…`` is a group, which no table holds.
    ``file``: where the table is stored."""

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock, *, has_light: bool = False) -> None:
        self._has_light = has_light
        self.file = JsonFile(folder / "subscriptionGroup.json")
        self._settings = settings
        self._clock = clock
        self._stored = SubscriptionGroupTable()
        self._rows = RowTexts()
        self._shared = SharedWrite(self.file, self._write_shared)
        self._appeared: dict[str, Appeared] = {}

    def load(self) -> None:
        """Read the file and add the groups every broker has."""
        self._stored = self.file.load(SubscriptionGroupTable) or SubscriptionGroupTable()
        _name_all(self._stored)
        table = self._stored.subscription_group_table
        for name in SYSTEM_GROUPS:
            if name not in table:
                table[name] = SubscriptionGroupConfig(group_name=name)

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """A group; an unknown one with a legal name is created when the settings allow it."""
        config = self._stored.subscription_group_table.get(group)
        if config is None and self._has_light and is_light(group):
            return SubscriptionGroupConfig(group_name=group)
        if config is None and self._may_create(group):
            config = SubscriptionGroupConfig(group_name=group)
            self._appeared[group] = Appeared(config, self._clock.monotonic_ms())
            # Written with the others of that second: anybody can make up names, and each must not cost an fsync.
            self._change_soon(group, config)
        return config

    def _change_soon(self, group: str, config: SubscriptionGroupConfig | None) -> None:
        """Add or remove one group, in constant time; `write_new` writes it with the others of that second."""
        groups = self._stored.subscription_group_table
        if config is None:
            del groups[group]
        else:
            groups[group] = config
        self._stored = self._changed(groups)
        self._shared.is_due = True

    def appeared_before(self, monotonic_ms: float) -> dict[str, Appeared]:
        """The groups that were made because they appeared, that long ago, and that nobody is known to have used."""
        return {group: one for group, one in self._appeared.items() if one.since_ms <= monotonic_ms}

    def keep(self, group: str) -> None:
        """A group that appeared is used: it stays."""
        self._appeared.pop(group, None)

    def remove_unused(self, group: str) -> Appeared | None:
        """Forget a group that appeared, unless an operator has changed it since; what it was, or None."""
        one = self._appeared.pop(group)
        # If an operator has put the group again it is another object, even if nothing is different.
        is_as_made = self._stored.subscription_group_table.get(group) is one.config
        if not is_as_made or group in self._stored.forbidden_table:
            return None
        self._change_soon(group, None)
        return one

    def __contains__(self, group: str) -> bool:
        return group in self._stored.subscription_group_table or (self._has_light and is_light(group))

    def made_retry_topic(self, group: str, config: TopicConfig) -> None:
        """Note that a group's retry topic was made because the group appeared."""
        assert config.topic_name, "the topic is found again by its name"
        if group in self._appeared:
            self._appeared[group].retry = config

    @property
    def stored(self) -> SubscriptionGroupTable:
        """The whole table, to be read only."""
        return self._stored

    async def put_shared(self, *configs: SubscriptionGroupConfig) -> None:
        """Create or change groups, in one write with all that is put before it begins; they are on the disk when this
        returns, and all unchanged when it raises."""
        assert all(config.group_name for config in configs), "a group is kept by its name"
        changed = {config.group_name: config for config in configs}
        self._replace_groups(self._shared.changed(self._stored.subscription_group_table, changed))
        await self._shared.done()

    async def _write_shared(self, changes: Changes[SubscriptionGroupConfig]) -> None:
        """The version is a new one when it is known that they stay."""
        known, stored = self._stored.data_version, self._changed(self._stored.subscription_group_table)
        try:
            await self._shared.save_aside(self._content(stored))
        except StoreUnavailable:
            self._replace_groups(self._shared.taken_back(self._stored.subscription_group_table, changes))
            raise
        if self._stored.data_version is known:
            self._stored = msgspec.structs.replace(self._stored, data_version=stored.data_version)
        else:  # others used it up, with their own
            self._stored = self._changed(self._stored.subscription_group_table)
            self._shared.is_due = True

    def _replace_groups(self, groups: dict[str, SubscriptionGroupConfig]) -> None:
        self._stored = msgspec.structs.replace(self._stored, subscription_group_table=groups)

    def remove(self, group: str) -> None:
        """Forget a group and what is forbidden to it; an unknown one is fine."""
        self._appeared.pop(group, None)
        if group in self or group in self._stored.forbidden_table:
            groups = _without(self._stored.subscription_group_table, group)
            self._save(self._changed(groups, _without(self._stored.forbidden_table, group)))

    def replace_with(self, copied: SubscriptionGroupTable) -> bool:
        """Become the master's table unless its version is the own one; groups it does not have are gone.
        Returns whether it was another; on the disk then. Source: behaviour.md §10.1."""
        if copied.data_version == self._stored.data_version:
            return False
        _name_all(copied)
        self._save(copied)
        self._appeared.clear()  # what is left of them is the master's, or the next to go
        return True

    def forbid_reading(self, group: str, topic: str, *, is_forbidden: bool) -> None:
        """Close a topic to a group, or open it again; neither needs to exist."""
        if self.is_read_forbidden(group, topic) == is_forbidden:
            return  # no new version: slaves would copy the table for nothing
        topics = dict(self._stored.forbidden_table.get(group, {}))
        topics[topic] = topics.get(topic, 0) ^ _READ_FORBIDDEN
        topics = {topic: bits for topic, bits in topics.items() if bits}
        forbidden = _without(self._stored.forbidden_table, group) | ({group: topics} if topics else {})
        self._save(self._changed(self._stored.subscription_group_table, forbidden))

    def is_read_forbidden(self, group: str, topic: str) -> bool:
        """Return True if an operator closed a topic to a group (``forbiddenTable``)."""
        forbidden = self._stored.forbidden_table
        return bool(forbidden) and bool(forbidden.get(group, {}).get(topic, 0) & _READ_FORBIDDEN)

    def persist(self) -> None:
        self._save(self._stored)

    async def write_new(self) -> None:
        """Write the table if groups appeared since it was written, in a thread; to be called every second."""
        if self._shared.is_due:
            await self._shared.save_aside(self._content(self._stored))

    def _changed(
        self, groups: dict[str, SubscriptionGroupConfig], forbidden: dict[str, dict[str, int]] | None = None
    ) -> SubscriptionGroupTable:
        """The table with other contents and the next version."""
        version = msgspec.structs.replace(self._stored.data_version)
        version.advance(self._clock.now_ms())
        return SubscriptionGroupTable(version, self._stored.forbidden_table if forbidden is None else forbidden, groups)

    def _save(self, stored: SubscriptionGroupTable) -> None:
        self._shared.save(self._content(stored))  # first: when the disk refuses, nothing has changed
        self._stored = stored

    def _content(self, stored: SubscriptionGroupTable) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the file's content from the table as it is now."""
        groups = dict(stored.subscription_group_table)
        rest = {"dataVersion": stored.data_version, "forbiddenTable": stored.forbidden_table}
        return lambda: {**rest, "subscriptionGroupTable": self._rows.of(groups)}

    def _may_create(self, group: str) -> bool:
        allowed = self._settings.auto_create_group or group.startswith(SYSTEM_GROUP_PREFIX)
        return allowed and len(self._appeared) < self._settings.unused_groups_max and group_fault(group) is None


def request_modes_file(root: Path) -> JsonFile:
    """Which groups pop which topics (`MessageRequestModes`), in a store directory: kept for brokers that need it."""
    return JsonFile(root / "config" / "messageRequestMode.json")


def _name_all(stored: SubscriptionGroupTable) -> None:
    for name, config in stored.subscription_group_table.items():
        config.group_name = config.group_name or name


def _without(table: dict[str, V], name: str) -> dict[str, V]:
    return {key: value for key, value in table.items() if key != name}


ROUND_SECONDS = 60.0

_log = logging.getLogger(__name__)


class UnusedGroupsContext(Protocol):
    """The parts of the broker that the round that drops unused groups may touch."""

    clients: ClientTable
    clock: Clock
    groups: GroupTable
    offsets: OffsetTable
    settings: BrokerSettings
    store: MessageStore
    topics: TopicTable


async def drop_unused_groups(context: UnusedGroupsContext) -> int:
    """Drop the groups that nobody used; returns how many."""
    before_ms = context.clock.monotonic_ms() - context.settings.unused_group_keep_ms
    candidates = context.groups.appeared_before(before_ms)
    if not candidates or not context.settings.auto_create_group:
        return 0  # without that setting they could not come back
    with_offsets, now, dropped = context.offsets.all_groups, Slice(), set[str]()
    for group in candidates:
        if group in with_offsets or group not in context.groups or _has_messages(context, group):
            context.groups.keep(group)
        # Online without an offset is no use yet: a consumer that has just started commits in a few seconds.
        elif context.clients.consumers(group) is None and _drop(context, group):
            dropped.add(group)
        await now.pause_if_over()
    if dropped:
        context.offsets.forget_pulls(dropped)
        _log.info("deleted %d groups that were created automatically and never used", len(dropped))
    return len(dropped)


def _has_messages(context: UnusedGroupsContext, group: str) -> bool:
    config = context.topics.get(retry_topic(group))
    queues = range(config.read_queue_nums if config is not None else 0)
    return (
        any(context.store.max_offset(retry_topic(group), queue_id) for queue_id in queues)
        or context.topics.get(dlq_topic(group)) is not None
    )


def _drop(context: UnusedGroupsContext, group: str) -> bool:
    one = context.groups.remove_unused(group)
    if one is not None and one.retry is not None:
        context.topics.remove_unused(retry_topic(group), one.retry)
    return one is not None
