"""The identity of a log. Each segment has the identity of its log, so that a broker reads only its own segments.

The identity is 16 random bytes in hex. The first master that archives a log creates the identity before it writes the
first segment. The store has the identity in a note beside ``checkpoint`` (`NOTE`). Each segment has the identity in its
directory.

A store with a note accepts these segments:

=========================================  ============================================================================
segment                                    accepted
=========================================  ============================================================================
has the identity of this log               yes
has the identity of another log            no
has no identity (from an old release)      if the note lists it, or if the log file of its offset still exists and
                                           begins with the same record; the note lists it then
=========================================  ============================================================================

A store without a note learns the identity from the segments that still have their log file (`LogIdentity.settle`):

=========================================  ============================================================================
segments                                   action
=========================================  ============================================================================
one begins with the record of the log      its identity becomes that of the store
they have identities, and no log file      a slave takes the identity, as it reads the archive of its master. A master
is left to compare                         refuses the archive: `adopt` (``rmq archive adopt``) decides
they have no identity, or none exists      a master creates an identity. It lists the segments that no log file
                                           contradicts in the note: older releases had accepted them. A slave waits
=========================================  ============================================================================

A crash leaves the former note or the new one. A lost note has no effect while the log file of a segment still exists.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from rmqkit.errors import StoreError
from rmqkit.store.archive.archive import Found
from rmqkit.store.archive.contents import identity_of
from rmqkit.store.files import read_note, write_note

__all__ = ["NOTE", "LogIdentity", "adopt", "identity_in"]

NOTE = "archiveIdentity"
"""Name of the note in the store directory."""


class _Note(Struct):
    """The content of the note: the identity, the archived end of the log, and the accepted segments without an
    identity, with their digests.
    """

    log: str
    reached: int = 0
    older: dict[str, int] = field(default_factory=dict)


class LogIdentity:
    """The identity of one store's log.

    Args:
        root: the store directory.
        first_record: returns the first record of the log file that begins at an offset, or None if the file is gone.
        makes: whether this broker creates an identity if none exists; True for a master.
    """

    def __init__(self, root: Path, first_record: Callable[[int], bytes | None], *, makes: bool) -> None:
        self.root = root
        self._first_record = first_record
        self._makes = makes
        self._note: _Note | None = None
        self._older: dict[str, int] = {}

    @property
    def log(self) -> str:
        """The identity of the log; empty while it is unknown."""
        return "" if self._note is None else self._note.log

    @property
    def reached(self) -> int:
        """Physical offset up to which the log has ever been archived."""
        return 0 if self._note is None else self._note.reached

    def archived(self, end: int) -> None:
        """Store the archived end of the log. Raises OSError: the note cannot be written."""
        if self._note is not None and end > self._note.reached:
            self._store(_Note(self._note.log, end, self._older))

    def settle(self, found: list[Found], place: str) -> None:
        """Adopt the identity of the segments, or create an identity, if the store has none. Raises StoreError: it is
        unknown whether the segments belong to this log. Raises OSError: the note cannot be written."""
        if self._note is None:
            self._note = read_note(self.root / NOTE, _Note, "the identity is learned from the archive's segments")
            self._older |= {} if self._note is None else self._note.older
        if self._note is None:
            self._learn(found, place)

    def _learn(self, found: list[Found], place: str) -> None:
        own = [one for one in found if self._compared(one) is not False]
        shown = [one for one in own if self._compared(one) and one.directory.log]
        named = sorted({one.directory.log for one in own if one.directory.log})
        if shown:
            log = max(shown, key=lambda one: one.directory.start).directory.log
        elif named and (self._makes or len(named) > 1):
            raise StoreError(
                f"the archive's segments are of log {', '.join(named)}, and store {self.root} has neither the file "
                f"{NOTE} nor a log file that was archived: it is unknown whether the log is the same one. If it is, "
                f"stop the broker and run: rmq archive adopt {shlex.quote(place)} {shlex.quote(str(self.root))}"
            )
        elif named:
            log = named[0]
        elif self._makes:
            log = secrets.token_hex(16)
        else:
            return
        self._older |= {one.name: one.digest for one in own if not one.directory.log}
        self._store(_Note(log, 0, self._older))

    def owns(self, found: Found) -> bool:
        """Return True if a segment belongs to this log."""
        if found.directory.log:
            return found.directory.log == self.log
        is_same, is_listed = self._compared(found), self._older.get(found.name) == found.digest
        # A slave without an identity accepts every segment that no log file contradicts: its master has not created an
        # identity yet.
        is_own = is_listed or self._note is None if is_same is None else is_same
        if is_own and not is_listed:
            # Add it to the note while its log file exists: after a restart the file may be gone.
            self._older[found.name] = found.digest
            if self._note is not None:
                self._store(_Note(self._note.log, self._note.reached, self._older))
        return is_own

    def _compared(self, found: Found) -> bool | None:
        """Return True if a segment begins with the same record as the log file at its offset. Return None if the file
        is gone.
        """
        record = self._first_record(found.directory.start)
        return None if record is None else identity_of(record) == found.directory.identity

    def _store(self, note: _Note) -> None:
        write_note(self.root / NOTE, note)
        self._note = note


def identity_in(root: Path) -> str:
    """Return the identity of a store's log, or an empty string if the log has none yet. Raises OSError: the note cannot
    be read."""
    note = read_note(root / NOTE, _Note, "the store's log is compared with the segments")
    return "" if note is None else note.log


def adopt(root: Path, found: list[Found]) -> str:
    """Store the identity that all segments share as the identity of a store, and return it. Raises StoreError: the
    segments have no identity, or have different ones. Raises OSError: the note cannot be written."""
    named = sorted({one.directory.log for one in found if one.directory.log})
    if len(named) != 1:
        raise StoreError(f"the segments name {len(named)} logs ({', '.join(named)}), not one: nothing is adopted")
    older = {one.name: one.digest for one in found if not one.directory.log}
    write_note(root / NOTE, _Note(named[0], 0, older))
    return named[0]
