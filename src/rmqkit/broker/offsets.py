"""Consumer offsets (``ConsumerOffsetManager``), kept in ``config/consumerOffset.json``.

An offset is the next one to consume. A smaller value than the stored one is accepted. The table is written every few
seconds and at stop, so a crash repeats at most those seconds' messages. Loop only.
Source: behaviour.md §5; store.md §9.3.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rmqkit.clock import Clock
from rmqkit.protocol.bodies.queues import ConsumerOffsets
from rmqkit.protocol.bodies.topics import DataVersion
from rmqkit.store.json_files import JsonFile

__all__ = ["OffsetTable"]

_VERSION_STEP = 500
_SEPARATOR = "@"


class OffsetTable:
    """``topic@group`` → queue id → next offset."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._file = JsonFile(folder / "consumerOffset.json")
        self._clock = clock
        self._table: dict[str, dict[int, int]] = {}
        self._data_version = DataVersion()
        self._commits = 0
        self._is_dirty = False

    def load(self) -> None:
        """Read the file."""
        stored = self._file.load(ConsumerOffsets)
        if stored is not None:
            self._table = stored.offset_table
            self._data_version = stored.data_version or DataVersion()

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset, or None."""
        return self._table.get(topic + _SEPARATOR + group, {}).get(queue_id)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Remember how far a group has come."""
        self._table.setdefault(topic + _SEPARATOR + group, {})[queue_id] = offset
        self._is_dirty = True
        self._commits += 1
        if self._commits % _VERSION_STEP == 0:
            self._data_version.advance(self._clock.now_ms())

    def persist(self) -> None:
        """Write the table."""
        self.write(self.snapshot())

    @property
    def is_dirty(self) -> bool:
        """Whether something was committed since the last `snapshot`."""
        return self._is_dirty

    def snapshot(self) -> ConsumerOffsets:
        """A copy of the table as it is now, to be written elsewhere."""
        self._is_dirty = False
        groups: dict[str, list[str]] = {}
        for key in self._table:
            topic, _, group = key.partition(_SEPARATOR)
            groups.setdefault(group, []).append(topic)
        version = msgspec.structs.replace(self._data_version)
        return ConsumerOffsets(version, groups, {key: dict(queues) for key, queues in self._table.items()})

    def write(self, snapshot: ConsumerOffsets) -> None:
        """Write a snapshot; may be called from another thread, one call at a time.

        Raises:
            OSError: the file could not be written; the next snapshot is written in its place.
        """
        try:
            self._file.save(snapshot)
        except OSError:
            self._is_dirty = True
            raise
