"""The note of the log's start: where the first log file began, so that a missing one is not taken for retention.

``logstart``, beside ``checkpoint``; Apache's broker does not know it. It has one field, ``start``: the physical offset
of the first byte of the log. Unlike the note of queue ends it is there while a broker runs and after a kill:

=====================================  ================================================================================
when                                   the note
=====================================  ================================================================================
a store was opened                     says where the log begins; an empty log begins at 0, a slave's empty log has none
retention is about to delete files     says where the log begins without them
a slave's empty log gets a first file  says where that begins
=====================================  ================================================================================

A log that begins behind the noted offset lost its first files: another broker's retention deleted them, or they are
lost. Nobody can tell which, so the next start says so in a WARNING, once, and ``rmq store verify`` until then.
A disk that refuses the note costs only the comparison, or makes a start tell of files that retention deleted.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec import Struct

from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.mapped_file import file_name
from rmqkit.store.note_files import read_note, remove_note, write_note

__all__ = ["LogStart", "gone_files", "noted_start"]

_log = logging.getLogger(__name__)
_NAME = "logstart"


class _Note(Struct):
    start: int


def noted_start(root: Path) -> int | None:
    """Where the log of a store began, None when that is not known. Raises OSError: the disk refused."""
    note = read_note(root / _NAME, _Note, "where the log began is not compared with it")
    return None if note is None else note.start


def gone_files(noted: int, start: int) -> str:
    """What is gone of a log that began at an offset and begins at a later one now."""
    return (
        f"{start - noted} bytes from {file_name(noted)} to before {file_name(start)} are gone: deleted by the "
        "retention of another broker, or lost"
    )


class LogStart:
    """The note of a store. Owner thread only.

    Args:
        is_replica: whether the store is a slave's, whose log begins where its master says.
    """

    def __init__(self, root: Path, log: CommitLog, *, is_replica: bool = False) -> None:
        self._root = root
        self._commit_log = log
        self._is_replica = is_replica
        self._noted: int | None = None

    def compare(self) -> None:
        """Read the note when the files were loaded, and tell of first files that are gone."""
        self._noted = noted_start(self._root)
        start = self._commit_log.min_offset
        if self._noted is not None and start > self._noted:
            said = "store %s: the log began at %d and begins at %d: %s"
            _log.warning(said, self._root, self._noted, start, gone_files(self._noted, start))

    def renew(self) -> None:
        """Note where the log begins, when a start recovered it."""
        start = self._commit_log.min_offset
        if start >= 0 or not self._is_replica:
            self.note(max(0, start))
            return
        self._noted = None
        try:
            remove_note(self._root / _NAME)
        except OSError as error:
            self._tell_refusal(error)

    def note(self, start: int) -> bool:
        """Note where the log is about to begin; whether that is on the disk."""
        if start == self._noted:
            return True
        try:
            write_note(self._root / _NAME, _Note(start))
        except OSError as error:
            self._tell_refusal(error)
            return False
        self._noted = start
        return True

    def _tell_refusal(self, error: OSError) -> None:
        said = "%s cannot be written, the next start may tell of log files that retention deleted: %s"
        _log.warning(said, self._root / _NAME, error)
