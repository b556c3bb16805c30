"""`Anchors` tell records from bytes in a body that look like one: an entry of a consume queue points at a record.

A sender that foresees where its message will lie can write a body with a record in it that is right in every part. A
walk from the start of a file steps over it, a search from the middle does not. But the head of a record says its topic,
queue and queue offset, so one read of 20 bytes finds the entry that has to be there, and only a broker writes entries.

No entry is found for topics that were deleted, for batch queues, and where a store has no queues. That says nothing.
Source: store.md §4; spark.md §3.
"""

from __future__ import annotations

import bisect
import functools
import re
from contextlib import suppress

from rmqkit.arrow.fs import StoredFile, StoreFile, above, exists, join, list_files
from rmqkit.errors import StoreError
from rmqkit.protocol.record import Record
from rmqkit.store.queues.consume_queue import ENTRY, ENTRY_BYTES

_QUEUE_FILE = re.compile(r"\d{20}")


class Anchors:
    """The consume queues of the store that has a file of a log in ``commitlog``."""

    def __init__(self, log_file: str) -> None:
        self._folder = join(above(log_file, 2), "consumequeue")
        self._files: dict[tuple[str, int], list[StoredFile]] = {}

    @functools.cached_property
    def exist(self) -> bool:
        """Whether the store has queues. Raises StoreError: that cannot be learnt."""
        return exists(self._folder)

    def point_at(self, record: Record) -> bool:
        """Whether the record's queue has an entry for its place."""
        # The topic of what only looks like a record may be any text.
        if record.queue_offset < 0 or "/" in record.topic or "\0" in record.topic or record.topic in ("", ".", ".."):
            return False
        at = record.queue_offset * ENTRY_BYTES
        with suppress(StoreError):  # retention was quicker, or the file may not be read: that says nothing, too
            files = self._of_queue(record.topic, record.queue_id)
            number = bisect.bisect_right(files, at, key=lambda file: int(file.names[-1])) - 1
            low = at - int(files[number].names[-1]) if number >= 0 else 0
            if number >= 0 and low + ENTRY_BYTES <= files[number].size:
                file = StoreFile(files[number].path)
                file.fetch(low, low + ENTRY_BYTES)
                return ENTRY.unpack_from(file.buffer, low)[:2] == (record.physical_offset, record.size)
        return False

    def _of_queue(self, topic: str, queue_id: int) -> list[StoredFile]:
        key = topic, queue_id
        if key not in self._files:
            files = list_files(self._folder, topic, str(queue_id))
            self._files[key] = [file for file in files if _QUEUE_FILE.fullmatch(file.names[-1])]
        return self._files[key]
