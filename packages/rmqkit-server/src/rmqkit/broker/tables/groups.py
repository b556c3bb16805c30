"""The broker's consumer groups (``SubscriptionGroupManager``), stored in ``config/subscriptionGroup.json``.

A change is on the disk before the broker answers: it is appended to the table's journal (`JournaledTable`). A thread
writes changes that arrive together. Groups that are created automatically are written together once a second. A group
that a crash loses is created again.

With ``autoCreateSubscriptionGroup`` every group name in a request becomes a group with a retry topic. Apache's broker
never deletes these groups. This broker drops a group if all these conditions hold (`drop_unused_groups`):

- this broker created it since its start, and at least `BrokerSettings.unused_group_keep_ms` ago;
- none of its clients is connected;
- it has no offset, so no progress can be lost;
- no message was ever stored in its retry topic, and it has no dead letters;
- no operator changed it.

A group with an offset or a message is never checked again. If the clients of a dropped group return, their first
heartbeats create the group again. Groups from earlier runs of this broker are not dropped.
Use this module only on the event loop. Source: behaviour.md §2.8; store.md §9.4.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.files import JournaledTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.protocol.names import SYSTEM_GROUP_PREFIX, SYSTEM_GROUPS, dlq_topic, group_fault, is_light, retry_topic
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.tasks import Slice
from rmqkit.store.files import JsonFile
from rmqkit.store.message_store import MessageStore

_READ_FORBIDDEN = 1 << 2
_MEMBER, _FORBIDDEN = "subscriptionGroupTable", "forbiddenTable"


class Appeared(msgspec.Struct):
    """A group that was created automatically.

    Attributes:
        config: the created row. If the table has another object, an operator changed the group.
        since_ms: the monotonic time of the creation.
        retry: the retry topic that was created with the group, or None.
    """

    config: SubscriptionGroupConfig
    since_ms: float
    retry: TopicConfig | None = None


class GroupTable:
    """The consumer groups by name. ``has_light``: True if every name ``%LMQ%…`` is a group, without a row in the table.
    ``saved``: the rows with their files."""

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock, *, has_light: bool = False) -> None:
        self._has_light = has_light
        self._settings = settings
        self._clock = clock
        types = {_FORBIDDEN: dict[str, int], _MEMBER: SubscriptionGroupConfig}
        self.saved = JournaledTable(folder / "subscriptionGroup.json", types, clock)
        self._groups: dict[str, SubscriptionGroupConfig] = self.saved.members[_MEMBER]
        self._forbidden: dict[str, dict[str, int]] = self.saved.members[_FORBIDDEN]
        self._appeared: dict[str, Appeared] = {}

    def load(self) -> None:
        """Read the file and its journal, and add the system groups that every broker has."""
        stored = self.saved.file.load(SubscriptionGroupTable, restores=False) or SubscriptionGroupTable()
        _name_all(stored)
        self.saved.load(stored.data_version, _members(stored))
        missing = [name for name in SYSTEM_GROUPS if name not in self._groups]
        self.saved.add_missing({(_MEMBER, name): SubscriptionGroupConfig(group_name=name) for name in missing})

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """Return a group. Create a missing group if the name is valid and the settings allow it."""
        config = self._groups.get(group)
        if config is None and self._has_light and is_light(group):
            return SubscriptionGroupConfig(group_name=group)
        if config is None and self._may_create(group):
            config = SubscriptionGroupConfig(group_name=group)
            self._appeared[group] = Appeared(config, self._clock.monotonic_ms())
            # Write the new groups of a second together: clients can invent names, and a name must not cost an fsync.
            self.saved.change_soon({(_MEMBER, group): config})
        return config

    def appeared_before(self, monotonic_ms: float) -> dict[str, Appeared]:
        """Return the groups that were created automatically before a time, without groups that are known to be used."""
        return {group: one for group, one in self._appeared.items() if one.since_ms <= monotonic_ms}

    def keep(self, group: str) -> None:
        """Record that an automatically created group is used. Such a group is never dropped."""
        self._appeared.pop(group, None)

    def remove_unused(self, group: str) -> Appeared | None:
        """Remove a group that was created automatically, unless an operator has changed it. Return the removed group,
        or None."""
        one = self._appeared.pop(group)
        # Compare the objects: if an operator has put the group, the table has another object, even if it is equal.
        is_as_made = self._groups.get(group) is one.config
        if not is_as_made or group in self._forbidden:
            return None
        self.saved.change_soon({(_MEMBER, group): None})
        return one

    def __contains__(self, group: str) -> bool:
        return group in self._groups or (self._has_light and is_light(group))

    def made_retry_topic(self, group: str, config: TopicConfig) -> None:
        """Record that a group's retry topic was created with the group."""
        assert config.topic_name, "a topic has a name"
        if group in self._appeared:
            self._appeared[group].retry = config

    @property
    def stored(self) -> SubscriptionGroupTable:
        """The whole table, read-only. Later changes are visible in its rows."""
        return SubscriptionGroupTable(self.saved.version, self._forbidden, self._groups)

    async def put_shared(self, *configs: SubscriptionGroupConfig) -> None:
        """Create or change groups. One write contains all changes that arrive before it begins. When this returns, the
        groups are on the disk. When this raises, they are unchanged."""
        assert all(config.group_name for config in configs), "a group has a name"
        await self.saved.change_shared({(_MEMBER, config.group_name): config for config in configs})

    def remove(self, *groups: str) -> None:
        """Remove groups and their forbidden topics, if they exist, with one write."""
        removed = set(groups)
        for group in removed:
            self._appeared.pop(group, None)
        known = [group for group in removed if group in self or group in self._forbidden]
        if known:
            self.saved.change({(kind, group): None for group in known for kind in (_MEMBER, _FORBIDDEN)})

    def replace_with(self, copied: SubscriptionGroupTable) -> bool:
        """Replace the table by the master's table, unless the versions are equal. Groups that the master does not have
        are removed. Only the differences are written. Return True if the table was replaced.
        Source: behaviour.md §10.1."""
        if copied.data_version == self.saved.version:
            return False
        _name_all(copied)
        self.saved.replace(_members(copied), copied.data_version)
        self._appeared.clear()  # the groups of the table are the master's now
        return True

    def forbid_reading(self, group: str, topic: str, *, is_forbidden: bool) -> None:
        """Forbid or allow a group to read a topic. Group and topic need not exist."""
        if self.is_read_forbidden(group, topic) == is_forbidden:
            return  # a new version would make slaves copy the unchanged table
        topics = dict(self._forbidden.get(group, {}))
        topics[topic] = topics.get(topic, 0) ^ _READ_FORBIDDEN
        self.saved.change({(_FORBIDDEN, group): {topic: bits for topic, bits in topics.items() if bits} or None})

    def is_read_forbidden(self, group: str, topic: str) -> bool:
        """Return True if an operator forbade a group to read a topic (``forbiddenTable``)."""
        forbidden = self._forbidden
        return bool(forbidden) and bool(forbidden.get(group, {}).get(topic, 0) & _READ_FORBIDDEN)

    def persist(self) -> None:
        self.saved.persist()

    async def write_new(self) -> None:
        """Write the groups that were created automatically, and the file if it is time. The broker calls this every
        second."""
        await self.saved.write_new()

    def _may_create(self, group: str) -> bool:
        allowed = self._settings.auto_create_group or group.startswith(SYSTEM_GROUP_PREFIX)
        return allowed and len(self._appeared) < self._settings.unused_groups_max and group_fault(group) is None


def request_modes_file(root: Path) -> JsonFile:
    """Return the file of a store in which the request modes are stored (`MessageRequestModes`)."""
    return JsonFile(root / "config" / "messageRequestMode.json")


def _members(stored: SubscriptionGroupTable) -> dict[str, dict[str, Any]]:
    return {_FORBIDDEN: stored.forbidden_table, _MEMBER: stored.subscription_group_table}


def _name_all(stored: SubscriptionGroupTable) -> None:
    for name, config in stored.subscription_group_table.items():
        config.group_name = config.group_name or name


ROUND_SECONDS = 60.0

_log = logging.getLogger(__name__)


class UnusedGroupsContext(Protocol):
    """The parts of the broker that `drop_unused_groups` uses."""

    clients: ClientTable
    clock: Clock
    groups: GroupTable
    offsets: OffsetTable
    settings: BrokerSettings
    store: MessageStore
    topics: TopicTable


async def drop_unused_groups(context: UnusedGroupsContext) -> int:
    """Drop unused groups. Return the number of dropped groups."""
    before_ms = context.clock.monotonic_ms() - context.settings.unused_group_keep_ms
    candidates = context.groups.appeared_before(before_ms)
    if not candidates or not context.settings.auto_create_group:
        return 0  # without automatic creation a dropped group could not be created again
    with_offsets, now, dropped = context.offsets.all_groups, Slice(), set[str]()
    for group in candidates:
        if group in with_offsets or group not in context.groups or _has_messages(context, group):
            context.groups.keep(group)
        # An online group without an offset is checked again later: a new consumer commits within a few seconds.
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
