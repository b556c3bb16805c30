"""What the log still holds of deleted topics: queues of their names leave it out, also after a restart.

``config/deletedTopics.json`` has the newest record of each, ``{topic: [physicalOffset, size, storeTimestamp]}``; it is
on the disk before the topic's queues go. Recovery dispatches again what the log holds: without the file a topic made
again would begin with messages of the old one, as it does at Apache's brokers, which do not know it. An entry counts
while the log holds that very record: when it expired so did all before it, and a log that was cut and went on in
another way holds new messages there. A power cut that takes the record takes the entry, too.
Owner thread only. Source: store.md §4.5, §12.
"""

from __future__ import annotations

from pathlib import Path

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.record import decode_record
from rmqkit.store.files import JsonFile
from rmqkit.store.log.commit_log import CommitLog

__all__ = ["DeletedTopics", "deleted_topics_path"]

_Newest = tuple[int, int, int]


def deleted_topics_path(root: Path) -> Path:
    return root / "config" / "deletedTopics.json"


class DeletedTopics:
    """``ends``: physical offset, by topic, before which its records are those of a deleted one."""

    def __init__(self, root: Path, log: CommitLog) -> None:
        self.ends: dict[str, int] = {}
        self._file = JsonFile(deleted_topics_path(root))
        self._log = log
        self._newest: dict[str, _Newest] = {}

    def load(self) -> None:
        """Read the file, when the log was loaded. Raises StoreMismatch: it cannot be read, nor its backup."""
        stored = self._file.load(dict[str, _Newest]) or {}
        self._take({topic: newest for topic, newest in stored.items() if self._is_there(*newest)})

    def add(self, newest: dict[str, _Newest]) -> None:
        """Note what topics end with that are about to be deleted; on the disk when this returns.
        Raises StoreUnavailable: the disk refused; nothing is noted."""
        if newest:
            kept = {topic: one for topic, one in self._newest.items() if one[0] >= self._log.min_offset}
            self._file.save(kept | newest)
            self._take(kept | newest)

    def cut(self, end: int) -> None:
        """Forget what lies at or behind a physical offset, where the log ends now: other messages come there."""
        self._take({topic: one for topic, one in self._newest.items() if sum(one[:2]) <= end})

    def _take(self, newest: dict[str, _Newest]) -> None:
        self._newest = newest
        self.ends.clear()
        self.ends.update((topic, at + size) for topic, (at, size, _) in newest.items())

    def _is_there(self, physical_offset: int, size: int, store_timestamp: int) -> bool:
        try:
            record = decode_record(self._log.slice(physical_offset, size) or b"")
        except RecordCorrupt:
            return False
        return (record.physical_offset, record.size, record.store_timestamp) == (physical_offset, size, store_timestamp)
