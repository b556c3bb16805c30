"""Consumer offsets (``ConsumerOffsetManager``), kept in ``config/consumerOffset.json``.

An offset is the next one to consume. A smaller value than the stored one is accepted. The table is written every few
seconds and at stop, so a crash repeats at most those seconds' messages. A reset by an operator stands until the next
pull takes it; meanwhile what clients commit is ignored. Resets and pull offsets are in memory only. Loop only.
Source: behaviour.md §5; store.md §9.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from rmqkit.broker.lazy_table import LazyTable
from rmqkit.clock import Clock
from rmqkit.protocol.bodies.queues import ConsumerOffsets
from rmqkit.protocol.bodies.topics import DataVersion

__all__ = ["OffsetTable"]

_VERSION_STEP = 500
_SEPARATOR = "@"


class OffsetTable(LazyTable):
    """``topic@group`` → queue id → next offset."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder / "consumerOffset.json")
        self._clock = clock
        self._table: dict[str, dict[int, int]] = {}
        self._resets: dict[tuple[str, str, int], int] = {}
        self._pulled: dict[tuple[str, str, int], int] = {}
        self._data_version = DataVersion()
        self._commits = 0

    def load(self) -> None:
        """Read the file."""
        stored = self._file.load(ConsumerOffsets)
        if stored is not None:
            self._table = stored.offset_table
            self._data_version = stored.data_version or DataVersion()

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset, or None."""
        return self.queues(group, topic).get(queue_id)

    def queues(self, group: str, topic: str) -> Mapping[int, int]:
        """The committed offsets on a topic by queue id."""
        return self._table.get(topic + _SEPARATOR + group, {})

    def topics(self, group: str) -> list[str]:
        """The topics on which a group has offsets."""
        end = _SEPARATOR + group
        return [key.removesuffix(end) for key in self._table if key.endswith(end)]

    @property
    def all_topics(self) -> set[str]:
        """The topics on which some group has offsets."""
        return {key.partition(_SEPARATOR)[0] for key in self._table}

    def groups(self, topic: str) -> list[str]:
        """The groups that have offsets on a topic."""
        start = topic + _SEPARATOR
        return [key.removeprefix(start) for key in self._table if key.startswith(start)]

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Remember how far a group has come."""
        self._table.setdefault(topic + _SEPARATOR + group, {})[queue_id] = offset
        self._is_dirty = True
        self._commits += 1
        if self._commits % _VERSION_STEP == 0:
            self._data_version.advance(self._clock.now_ms())

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Move a group: its next pull is sent to the offset, what its clients commit before that is void."""
        self._resets[group, topic, queue_id] = offset
        self.commit(group, topic, queue_id, offset)

    def has_reset(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether a reset waits for a pull."""
        return (group, topic, queue_id) in self._resets

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset that a reset by an operator has for a pull, once; None when there is none. Source: §5.4."""
        return self._resets.pop((group, topic, queue_id), None) if self._resets else None

    def pulled(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Remember where a group's next pull begins: shown to operators, kept in memory only."""
        self._pulled[group, topic, queue_id] = offset

    def pull_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Where a group's next pull begins, as far as it is known; else 0."""
        return self._pulled.get((group, topic, queue_id), 0)

    def clone(self, topic: str, *, source: str, target: str) -> None:
        """Give a group the offsets that another one has on a topic; without any nothing changes."""
        offsets = self._table.get(topic + _SEPARATOR + source)
        if offsets is not None:
            self._table[topic + _SEPARATOR + target] = dict(offsets)
            self._is_dirty = True

    def remove(self, group: str, topic: str) -> None:
        """Forget a group on a topic."""
        self._remove([topic + _SEPARATOR + group])
        self._forget(lambda key: key[:2] == (group, topic))

    def remove_group(self, group: str) -> None:
        """Forget a group on every topic."""
        self._remove([topic + _SEPARATOR + group for topic in self.topics(group)])
        self._forget(lambda key: key[0] == group)

    def remove_topic(self, topic: str) -> None:
        """Forget a topic for every group."""
        self._remove([topic + _SEPARATOR + group for group in self.groups(topic)])
        self._forget(lambda key: key[1] == topic)

    def snapshot(self) -> ConsumerOffsets:
        """`contents`, to be written elsewhere."""
        self._is_dirty = False
        return self.contents

    @property
    def contents(self) -> ConsumerOffsets:
        """A copy of the table."""
        groups: dict[str, list[str]] = {}
        for key in self._table:
            topic, _, group = key.partition(_SEPARATOR)
            groups.setdefault(group, []).append(topic)
        version = msgspec.structs.replace(self._data_version)
        return ConsumerOffsets(version, groups, {key: dict(queues) for key, queues in self._table.items()})

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._table[key]
            self._is_dirty = True

    def _forget(self, is_gone: Callable[[tuple[str, str, int]], bool]) -> None:
        for table in (self._resets, self._pulled):
            for key in list(filter(is_gone, table)):
                del table[key]
