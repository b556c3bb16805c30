"""The broker's consumer groups (``SubscriptionGroupManager``), kept in ``config/subscriptionGroup.json``.

A change is on the disk before anybody is told of it; a group that was made because it appeared is written with the
others of that second (after a crash it appears again). Loop only. Source: behaviour.md §2.8; store.md §9.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.protocol.bodies.clients import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.names import SYSTEM_GROUP_PREFIX, SYSTEM_GROUPS, group_fault
from rmqkit.store.json_files import JsonFile

__all__ = ["GroupTable"]

_READ_FORBIDDEN = 1 << 2

V = TypeVar("V")


class GroupTable:
    """Consumer groups by name."""

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock) -> None:
        self._file = JsonFile(folder / "subscriptionGroup.json")
        self._settings = settings
        self._clock = clock
        self._stored = SubscriptionGroupTable()
        self._has_new = False

    def load(self) -> None:
        """Read the file and add the groups every broker has."""
        self._stored = self._file.load(SubscriptionGroupTable) or SubscriptionGroupTable()
        table = self._stored.subscription_group_table
        for name, config in table.items():
            config.group_name = config.group_name or name
        for name in SYSTEM_GROUPS:
            if name not in table:
                table[name] = SubscriptionGroupConfig(group_name=name)

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """A group; an unknown one with a legal name is created when the settings allow it."""
        config = self._stored.subscription_group_table.get(group)
        if config is None and self._may_create(group):
            config = SubscriptionGroupConfig(group_name=group)
            self._stored = self._changed(self._stored.subscription_group_table | {group: config})
            self._has_new = True
        return config

    def __contains__(self, group: str) -> bool:
        return group in self._stored.subscription_group_table

    @property
    def stored(self) -> SubscriptionGroupTable:
        """The whole table, to be read only."""
        return self._stored

    def put(self, *configs: SubscriptionGroupConfig) -> None:
        """Create or change groups; they are on the disk when this returns, and unchanged when it raises."""
        changed = {config.group_name: config for config in configs}
        self._save(self._changed(self._stored.subscription_group_table | changed))

    def remove(self, group: str) -> None:
        """Forget a group and what is forbidden to it; an unknown one is fine."""
        if group in self or group in self._stored.forbidden_table:
            groups = _without(self._stored.subscription_group_table, group)
            self._save(self._changed(groups, _without(self._stored.forbidden_table, group)))

    def forbid_reading(self, group: str, topic: str, *, is_forbidden: bool) -> None:
        """Close a topic to a group, or open it again; neither needs to exist."""
        if self.is_read_forbidden(group, topic) == is_forbidden:
            return
        topics = dict(self._stored.forbidden_table.get(group, {}))
        topics[topic] = topics.get(topic, 0) ^ _READ_FORBIDDEN
        topics = {topic: bits for topic, bits in topics.items() if bits}
        forbidden = _without(self._stored.forbidden_table, group) | ({group: topics} if topics else {})
        self._save(self._changed(self._stored.subscription_group_table, forbidden))

    def is_read_forbidden(self, group: str, topic: str) -> bool:
        """Whether an operator closed a topic to a group (``forbiddenTable``)."""
        forbidden = self._stored.forbidden_table
        return bool(forbidden) and bool(forbidden.get(group, {}).get(topic, 0) & _READ_FORBIDDEN)

    def persist(self) -> None:
        """Write the table."""
        self._save(self._stored)

    def write_new(self) -> None:
        """Write the table if groups appeared since it was written; to be called every second."""
        if self._has_new:
            self.persist()

    def _changed(
        self, groups: dict[str, SubscriptionGroupConfig], forbidden: dict[str, dict[str, int]] | None = None
    ) -> SubscriptionGroupTable:
        """The table with other contents and the next version."""
        version = msgspec.structs.replace(self._stored.data_version)
        version.advance(self._clock.now_ms())
        return SubscriptionGroupTable(version, self._stored.forbidden_table if forbidden is None else forbidden, groups)

    def _save(self, stored: SubscriptionGroupTable) -> None:
        self._file.save(stored)
        self._stored, self._has_new = stored, False

    def _may_create(self, group: str) -> bool:
        allowed = self._settings.auto_create_group or group.startswith(SYSTEM_GROUP_PREFIX)
        return allowed and group_fault(group) is None


def _without(table: dict[str, V], name: str) -> dict[str, V]:
    return {key: value for key, value in table.items() if key != name}
