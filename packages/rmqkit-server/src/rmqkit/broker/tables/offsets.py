"""Consumer offsets (``ConsumerOffsetManager``), stored in ``config/consumerOffset.json``.

A consumer offset is the offset of the next message to consume. A commit may be smaller than the stored offset. The
table is written every few seconds and at stop, so a crash repeats only the messages of a few seconds. Resets and pull
offsets are only in memory. Use this module only on the event loop.

The log is flushed before the file is written. An offset of POP counts messages as delivered whose check points are in
the log, or as redelivered whose copies are in the log. If a power cut left the offset without these records, the
messages would be lost. If the log cannot be flushed, the file stays as it is.

A reset by an operator is pending until the current owner of the queue follows it. Meanwhile the broker ignores commits
of clients. After a rebalance, the broker may still hold a pull of the former owner. This client ignores the answer, so
the answer alone does not complete a reset:

======================================================  ========================================================
a pull while a reset is pending                         result
======================================================  ========================================================
held before, woken by the reset                         redirected to the target. The reset stays pending
new, from a client that was not redirected yet          redirected to the target. The reset stays pending
new, from a redirected client, at the target            served. The reset is complete
new, from a redirected client, at another offset        redirected again if the client's last pull was held. Otherwise
                                                        served, and the reset is complete: the program manages its
                                                        offsets
new, after a redirected client closed its connection    served. The reset is complete: the program opens a connection
                                                        for each pull, or the owner left and offsets are read again
======================================================  ========================================================

The former owner does not pull the queue any more, so the second pull of a client is a pull of the current owner. In the
reference the first answer to any client completes a reset. A pop completes a reset immediately: popped queues have no
owners.

With light queues (``enableLmq``) the file is ``config/lmqConsumerOffset.json``, which has a separate table for groups
``%LMQ%…``. The first start with light queues reads ``consumerOffset.json``.
Source: behaviour.md §5; store.md §9.2, §9.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rmqkit.broker.tables.files import LazyTable
from rmqkit.clock import Clock
from rmqkit.protocol.names import is_light
from rmqkit.protocol.schemas.offsets import ConsumerOffsets, LightOffsets
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.remoting.connection import Connection
from rmqkit.store.files import JsonFile
from rmqkit.system import disk

__all__ = ["OffsetTable"]

_FILE = "consumerOffset.json"
_VERSION_STEP = 500
_SEPARATOR = "@"


@dataclass(slots=True)
class _Reset:
    """A pending reset.
    ``sent``: the redirected clients. The value is True if the redirected pull was new, False if it was held."""

    offset: int
    sent: dict[Connection, bool] = field(default_factory=dict)


class OffsetTable(LazyTable):
    """The consumer offsets: ``topic@group`` → queue id → next offset.

    Attributes:
        flush_log: makes the log durable before the file is written. It returns False if the disk refuses.
    """

    def __init__(self, folder: Path, clock: Clock, *, has_light: bool = False) -> None:
        super().__init__(folder / ("lmqConsumerOffset.json" if has_light else _FILE))
        self._has_light = has_light
        self._clock = clock
        self._table: dict[str, dict[int, int]] = {}
        self._resets: dict[tuple[str, str, int], _Reset] = {}
        self._pulled: dict[tuple[str, str, int], int] = {}
        self._data_version = DataVersion()
        self._commits = 0
        self._asked_ms: int | None = None
        self._snapshot_asked_ms: int | None = None
        self.flush_log: Callable[[], bool] = lambda: True

    def load(self) -> None:
        kind: type[ConsumerOffsets] = LightOffsets if self._has_light else ConsumerOffsets
        # The time of the file is the time of a snapshot. So the next snapshot writes a missing file.
        stored = self._file.load(kind, restores=False)
        if stored is None and self._has_light:
            stored = JsonFile(self._file.path.with_name(_FILE)).load(kind, restores=False)
        if stored is not None:
            self._is_dirty = not disk.exists(self._file.path)
            self._table = stored.offset_table
            if isinstance(stored, LightOffsets):
                self._table |= {key: {0: offset} for key, offset in stored.lmq_offset_table.items()}
            self._data_version = stored.data_version or DataVersion()

    def begin_copying(self) -> None:
        """Make this the table of a slave, which has the master's commits until the last copy. The file's time is then
        the time of this copy. A broker that becomes master compares the file's time with the times of pops."""
        path = self._file.path
        self._asked_ms = disk.modified_ms(path) if disk.exists(path) else 0

    def write(self, snapshot: ConsumerOffsets) -> None:
        asked_ms, began_ms = self._snapshot_asked_ms, self._clock.monotonic_ms()
        if not self.flush_log():
            self._is_dirty = True
            return
        waited_ms = int(self._clock.monotonic_ms() - began_ms)
        super().write(snapshot)
        # The file's time is the time of the snapshot. After a crash before these lines the file has the current time:
        # messages popped after the snapshot are popped again.
        if asked_ms is not None:
            disk.set_modified_ms(self._file.path, asked_ms)
        elif waited_ms:
            disk.set_modified_ms(self._file.path, disk.modified_ms(self._file.path) - waited_ms)

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return a group's offset, or None. Go and Node clients commit -1 for an empty queue: this is not an offset."""
        offset = self.queues(group, topic).get(queue_id, -1)
        return offset if offset >= 0 else None

    def queues(self, group: str, topic: str) -> Mapping[int, int]:
        return self._table.get(topic + _SEPARATOR + group, {})

    def topics(self, group: str) -> list[str]:
        end = _SEPARATOR + group
        return [key.removesuffix(end) for key in self._table if key.endswith(end)]

    @property
    def topics_by_group(self) -> dict[str, list[str]]:
        """The names of the topics of each group."""
        groups: dict[str, list[str]] = {}
        for key in self._table:
            topic, _, group = key.partition(_SEPARATOR)
            groups.setdefault(group, []).append(topic)
        return groups

    @property
    def all_topics(self) -> set[str]:
        return {key.partition(_SEPARATOR)[0] for key in self._table}

    @property
    def all_groups(self) -> set[str]:
        return {key.partition(_SEPARATOR)[2] for key in self._table}

    def groups(self, topic: str) -> list[str]:
        start = topic + _SEPARATOR
        return [key.removeprefix(start) for key in self._table if key.startswith(start)]

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        # Like the reference, accept a smaller offset: consumers that were reset by hand commit smaller offsets.
        self._table.setdefault(topic + _SEPARATOR + group, {})[queue_id] = offset
        self._is_dirty = True
        self._commits += 1
        # Like the reference, do not advance the version with each commit: slaves copy the table for a new version.
        if self._commits % _VERSION_STEP == 0:
            self._data_version.advance(self._clock.now_ms())

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Reset a group's offset. Pulls of the group are redirected, and commits of its clients are ignored, until the
        owner of the queue follows the reset."""
        assert offset >= 0, f"the offset of a reset, {offset}, is not negative"
        self._resets[group, topic, queue_id] = _Reset(offset)
        self.commit(group, topic, queue_id, offset)  # a restart loses the reset, and an offline group may pull later

    def has_reset(self, group: str, topic: str, queue_id: int) -> bool:
        return (group, topic, queue_id) in self._resets

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Complete a reset. Return its offset, or None if no reset is pending. Source: behaviour.md §5.4."""
        reset = self._resets.pop((group, topic, queue_id), None) if self._resets else None
        return None if reset is None else reset.offset

    def redirect(
        self, client: Connection, group: str, topic: str, queue_id: int, queue_offset: int, *, is_new: bool
    ) -> int | None:
        """Return the offset to which a reset redirects a pull; None if the pull has to be served. The table at the top
        of the module has the rules. ``is_new``: False for a pull that was held."""
        reset = self._resets.get((group, topic, queue_id)) if self._resets else None
        if reset is None:
            return None
        was_new = reset.sent.get(client)
        is_followed = was_new is not None and (was_new or queue_offset == reset.offset)
        if is_new and (is_followed or any(by_new and not one.is_open for one, by_new in reset.sent.items())):
            del self._resets[group, topic, queue_id]
            return None
        reset.sent[client] = is_new
        return reset.offset

    def pulled(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Record the offset of a group's next pull, for operators. It is only in memory."""
        self._pulled[group, topic, queue_id] = offset

    @property
    def pulls(self) -> Mapping[tuple[str, str, int], int]:
        """The offsets of next pulls, by group, topic and queue."""
        return self._pulled

    def pull_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset of a group's next pull; 0 if it is unknown."""
        return self._pulled.get((group, topic, queue_id), 0)

    def clone(self, topic: str, *, source: str, target: str) -> None:
        """Copy the offsets of a group for a topic to another group, if there are any."""
        offsets = self._table.get(topic + _SEPARATOR + source)
        if offsets is not None:
            # Copy the dict, so that commits of one group do not change the other group.
            self._table[topic + _SEPARATOR + target] = dict(offsets)
            self._is_dirty = True

    def merge(self, copied: ConsumerOffsets, *, asked_ms: int) -> None:
        """Adopt the master's offsets. Offsets that only this table has stay. ``asked_ms``: the time of the request.
        Source: behaviour.md §10.1."""
        self._asked_ms = asked_ms
        changed = {key: queues for key, queues in copied.offset_table.items() if self._table.get(key) != queues}
        self._table |= changed
        self._data_version = copied.data_version or self._data_version
        self._is_dirty = self._is_dirty or bool(changed)

    def merge_forward(self, copied: ConsumerOffsets) -> None:
        """Adopt the offsets that are greater in the table of another member, unless the other table is older.
        Source: behaviour.md §10.5."""
        version = copied.data_version or DataVersion()
        if version.timestamp < self._data_version.timestamp:
            return
        for key, queues in copied.offset_table.items():
            own = self._table.setdefault(key, {})
            # Without an own offset a copied -1 stays: as 0 it would be an offset, which its group never committed.
            own |= {queue_id: max(offset, own.get(queue_id, offset)) for queue_id, offset in queues.items()}
        self._data_version = version
        self._is_dirty = True

    def advance_version(self) -> None:
        """Make the version newer than the version of the copied table, because commits continue here."""
        self._data_version.advance(self._clock.now_ms())

    def remove(self, group: str, topic: str) -> None:
        self._remove([topic + _SEPARATOR + group])
        self._forget(lambda key: key[:2] == (group, topic))

    def remove_group(self, *groups: str) -> None:
        removed = set(groups)
        self._remove([key for key in self._table if key.partition(_SEPARATOR)[2] in removed])
        self.forget_pulls(removed)

    def remove_topic(self, *topics: str) -> None:
        removed = set(topics)
        self._remove([key for key in self._table if key.partition(_SEPARATOR)[0] in removed])
        self._forget(lambda key: key[1] in removed)

    def forget_pulls(self, groups: Set[str]) -> None:
        """Remove the recorded offsets of the next pulls of groups."""
        self._forget(lambda key: key[0] in groups)

    def snapshot(self) -> ConsumerOffsets:
        """Return `contents` to write, and mark the table as written."""
        self._is_dirty = False
        self._snapshot_asked_ms = self._asked_ms  # a copy that arrives during the write is not in the file
        contents = self.contents
        if not self._has_light:
            return contents
        light = {key for key in contents.offset_table if is_light(key.partition(_SEPARATOR)[2])}
        return LightOffsets(
            contents.data_version,
            contents.group_topic_map,
            {key: queues for key, queues in contents.offset_table.items() if key not in light},
            lmq_offset_table={key: contents.offset_table[key].get(0, 0) for key in light},
        )

    @property
    def contents(self) -> ConsumerOffsets:
        """A copy of the table, in the form of the file."""
        # Copy all levels: a thread encodes the copy while commits continue.
        groups = self.topics_by_group
        version = msgspec.structs.replace(self._data_version)
        return ConsumerOffsets(version, groups, {key: dict(queues) for key, queues in self._table.items()})

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._table[key]
            self._is_dirty = True

    def _forget(self, is_gone: Callable[[tuple[str, str, int]], bool]) -> None:
        tables: tuple[dict[tuple[str, str, int], Any], ...] = (self._resets, self._pulled)
        for table in tables:
            for key in list(filter(is_gone, table)):
                del table[key]
