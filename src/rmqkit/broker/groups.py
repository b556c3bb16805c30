"""The broker's consumer groups (``SubscriptionGroupManager``), kept in ``config/subscriptionGroup.json``.

Loop only. Source: behaviour.md §2.8; store.md §9.4.
"""

from __future__ import annotations

from pathlib import Path

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.protocol.bodies.clients import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.names import SYSTEM_GROUP_PREFIX, SYSTEM_GROUPS, group_fault
from rmqkit.store.json_files import JsonFile

__all__ = ["GroupTable"]


class GroupTable:
    """Consumer groups by name."""

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock) -> None:
        self._file = JsonFile(folder / "subscriptionGroup.json")
        self._settings = settings
        self._clock = clock
        self._stored = SubscriptionGroupTable()

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
        table = self._stored.subscription_group_table
        config = table.get(group)
        if config is None and self._may_create(group):
            config = table[group] = SubscriptionGroupConfig(group_name=group)
            self._stored.data_version.advance(self._clock.now_ms())
            self.persist()
        return config

    def __contains__(self, group: str) -> bool:
        return group in self._stored.subscription_group_table

    def persist(self) -> None:
        """Write the table."""
        self._file.save(self._stored)

    def _may_create(self, group: str) -> bool:
        allowed = self._settings.auto_create_group or group.startswith(SYSTEM_GROUP_PREFIX)
        return allowed and group_fault(group) is None
