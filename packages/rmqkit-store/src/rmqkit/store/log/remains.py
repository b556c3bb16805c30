"""The bytes that a recovery finds after the end of the log, and their treatment: no sound record is dropped silently.

A scan stops at the first bytes that are not a record. They may be followed by sound records (with the right magic,
size, checksum and physicalOffset), other bytes, or zeros, as files are preallocated:

==================================================  ===================================================================
bytes after the end                                 treatment
==================================================  ===================================================================
zeros only                                          nothing is logged, unless queues have records there: an ERROR after
                                                    a clean stop, else a WARNING, with the number of bytes
bytes without a sound record, in the same file      the torn end of an unclean stop: they become zeros; a WARNING has
                                                    their number
sound records that were on the disk: the stop was   `StoreDamaged`, with files, records and bytes: the store is damaged.
clean, or the checkpoint's physicMsgTimestamp       ``rmq store repair`` bridges the place and saves the bytes after it
is later than their timestamps
a log file that begins with a record of another     `StoreDamaged`; ``rmq store repair`` gives the file its name back
place: it has the name of another file
other sound records, or later files with content    a power cut lost the bytes before them, or they are stale: all bytes
                                                    are set aside with an ERROR (stale: a WARNING), and the start
                                                    continues
==================================================  ===================================================================

Stale records belong to a log that an Apache broker cut without clearing the bytes after the cut. They were stored
earlier than the last record before the end, and are in the same file. A slave never refuses to start: it sets the bytes
aside, and its master sends the records again.

Bytes are set aside in a directory ``set-aside/OFFSET``, which is a store for the offline tools: its ``commitlog`` has
the files with their names and lengths. The first file lacks the bytes before the end. The directory is never deleted.
Source: store.md §12.3.
"""

from __future__ import annotations

import errno
import logging
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, field

from rmqkit.errors import RecordCorrupt, StoreDamaged
from rmqkit.protocol.record import (
    MAGIC_V1,
    MAGIC_V2,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
    Record,
    encode_record,
    is_blank,
    layout_of,
    pack_host,
)
from rmqkit.store.files import sync_directory
from rmqkit.store.log import scan
from rmqkit.store.log.file_queue import sync_names
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.log.view import data_end
from rmqkit.system import disk

__all__ = [
    "FILLER_BYTES_MAX",
    "FILLER_BYTES_MIN",
    "FILLER_TOPIC",
    "FOLDER",
    "Remains",
    "check_heads",
    "fillers",
    "is_filler",
    "keep_remains",
    "look_behind",
    "place_of",
    "tell_lost_end",
]

FOLDER = "set-aside"
_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_OTHER_PLACE = "has records of another place: files were exchanged or renamed"
_PLACE_AT = layout_of(0).positions["physical_offset"]
HEAD_BYTES = layout_of(0).head_bytes


class Remains(Struct):
    """The bytes after the end of a log.

    Attributes:
        end, path: physical offset of the end of the log, and the file that contains the end.
        reason: the reason why the bytes at the end are not a record.
        files: the log files with content after the end, each with the position where its content ends.
        record_files: the names of the files that contain sound records.
        records, record_bytes: number of sound records, and the sum of their sizes.
        misplaced: the names of files that begin with a record of another offset.
        first_timestamp, oldest_timestamp: storeTimestamp of the first sound record, and the earliest storeTimestamp.
    """

    end: int
    path: Path
    reason: str = ""
    files: list[tuple[MappedFile, int]] = field(default_factory=list)
    record_files: list[str] = field(default_factory=list)
    records: int = 0
    record_bytes: int = 0
    misplaced: list[str] = field(default_factory=list)
    first_timestamp: int = 0
    oldest_timestamp: int = 0

    @property
    def bytes(self) -> int:
        return sum(high - max(0, self.end - file.start) for file, high in self.files)

    @property
    def is_in_one_file(self) -> bool:
        """Return True if no later file has any content."""
        return all(file.start <= self.end for file, _ in self.files)

    def __str__(self) -> str:
        found = f"{self.bytes} bytes in {_counted(len(self.files), 'file')} lie behind"
        if not self.records:
            return f"{found}, without a sound record"
        sound = _counted(self.records, "sound record")
        held = _counted(len(self.record_files), "file")
        return f"{found}, among them {sound} of {self.record_bytes} bytes in {held} from {self.record_files[0]} on"


def look_behind(
    files: tuple[MappedFile, ...], end: int, reason: str, record_at: Callable[[MappedFile, int], Record]
) -> Remains:
    """Examine everything after a physical offset. Nothing is changed.

    Args:
        files: the files of the log, starting with the file that contains the offset.
        record_at: returns the sound record at a position of a file, or raises RecordCorrupt.
    """
    remains = Remains(end, files[0].path, reason)
    for file in files:
        low = max(0, end - file.start)
        high = _content_end(file, low)
        if high > low:
            remains.files.append((file, high))
            if low == 0 and place_of(file.view) not in (None, file.start):
                remains.misplaced.append(file.path.name)
            for record in _sound_records(file, low, high, record_at):
                if not remains.records:
                    remains.first_timestamp = remains.oldest_timestamp = record.store_timestamp
                if remains.record_files[-1:] != [file.path.name]:
                    remains.record_files.append(file.path.name)
                remains.records += 1
                remains.record_bytes += record.size
                remains.oldest_timestamp = min(record.store_timestamp, remains.oldest_timestamp)
    return remains


def place_of(view: memoryview | bytes) -> int | None:
    """Return the physical offset in the first record of a log file, or None if there is no record. The head of the
    record is sufficient."""
    if len(view) < HEAD_BYTES or int.from_bytes(view[4:8], "big", signed=True) not in (MAGIC_V1, MAGIC_V2):
        return None
    return int.from_bytes(view[_PLACE_AT : _PLACE_AT + 8], "big", signed=True)


def check_heads(root: Path, files: tuple[MappedFile, ...], *, is_replica: bool) -> None:
    """Check the first bytes of every log file: a start after a clean stop does not scan most files.
    Log an ERROR, with the size of the file, if a file does not begin with a record but a later file does.

    Raises:
        StoreDamaged: files have the names of other files.
    """
    places: list[int | None] = []
    for file in files:
        head = file.read(0, HEAD_BYTES)
        places.append(file.start if is_blank(head, 0) else place_of(head))
        file.close()
    misplaced = [file for file, place in zip(files, places, strict=True) if place not in (None, file.start)]
    if misplaced and not is_replica:
        names = ", ".join(file.path.name for file in misplaced)
        raise StoreDamaged(str(root), misplaced[0].start, f"{names} {_OTHER_PLACE}")
    last = max((i for i, place in enumerate(places) if place is not None), default=0)
    for file, place in zip(files[:last], places[:last], strict=True):
        if place is None:
            said = "%s begins with no record: messages of up to %d bytes cannot be read; see: rmq store verify %s"
            _log.error(said, file.path, file.size, shlex.quote(str(root)))


def keep_remains(
    root: Path,
    remains: Remains,
    *,
    is_clean: bool,
    is_replica: bool,
    last_timestamp: int,
    flushed_timestamp: int,
    indexed_end: int,
) -> None:
    """Decide about the bytes after the end of the log before the log is cut, and set them aside if necessary.

    Args:
        last_timestamp: storeTimestamp of the last record before the end.
        flushed_timestamp: time before which all stored records were on the disk.
        indexed_end: end of the newest record that has a queue entry.

    Raises:
        StoreDamaged: the cut would remove records that were on the disk. Nothing in the log was changed.
        OSError: the bytes cannot be set aside.
    """
    end = remains.end
    assert all(file.end > end for file, _ in remains.files), "only bytes after the end are set aside"
    is_stale = remains.is_in_one_file and bool(remains.records) and remains.first_timestamp < last_timestamp
    if remains.records and not is_stale:
        was_on_disk = is_clean or remains.oldest_timestamp < flushed_timestamp
    else:
        was_on_disk = is_clean and not remains.is_in_one_file
    if remains.misplaced and not is_replica:
        found = f"{', '.join(remains.misplaced)} {_OTHER_PLACE}"
        raise StoreDamaged(str(root), end, found)
    if was_on_disk and not is_replica:
        raise StoreDamaged(str(root), end, f"{remains.path.name}: {remains.reason}, and {remains}")
    tell_lost_end(root, end, indexed_end, is_clean=is_clean)
    if not remains.files:
        return
    if not remains.records and remains.is_in_one_file:
        _log.warning("store %s: the log is cut at %d (%s): %s", root, end, remains.reason, remains)
        return
    folder = _set_aside(root, remains)
    level = logging.WARNING if is_stale else logging.ERROR
    said = (
        "store %s: the log ends at %d (%s): %s; they are set aside in %s; remove that directory when it is not needed; "
        "to see them, run: rmq store dump %s"
    )
    _log.log(level, said, root, end, remains.reason, remains, folder, shlex.quote(str(folder)))


def tell_lost_end(root: Path, end: int, indexed_end: int, *, is_clean: bool) -> None:
    """Log that queues have records after the end of the log. Log an ERROR after a clean stop, otherwise a WARNING,
    because the records may not have been on the disk."""
    if indexed_end > end:
        said = "store %s: the log ends at %d and queues know records up to %d: these %d bytes of messages are lost"
        _log.log(logging.ERROR if is_clean else logging.WARNING, said, root, end, indexed_end, indexed_end - end)


def _sound_records(
    file: MappedFile, low: int, high: int, record_at: Callable[[MappedFile, int], Record]
) -> Iterator[Record]:
    buffer = file.view.obj
    assert isinstance(buffer, scan.Buffer), "a view belongs to a mapping"
    position = low
    while (position := scan.find_record(buffer, file.start, position, file.size, high)) < file.size:
        try:
            while not is_blank(file.view, position):
                record = record_at(file, position)
                yield record
                position += record.size
            return  # bytes after a blank are undefined
        except RecordCorrupt:
            position += 1


def _content_end(file: MappedFile, low: int) -> int:
    """Return the position after the last byte that is not zero. Return ``low`` if all bytes after it are zero."""
    high = data_end(file.path)
    while high > low:
        start = max(low, high - _CHUNK_BYTES)
        kept = len(file.read(start, high - start).rstrip(b"\0"))
        if kept:
            return start + kept
        high = start
    return low


def _set_aside(root: Path, remains: Remains) -> Path:
    """Copy or move everything after the end to a new directory. The newest file is first, so that a crash leaves no
    gap.
    """
    folder, number = root / FOLDER / f"{remains.end:020d}", 1
    while disk.exists(folder):
        number += 1
        folder = folder.with_name(f"{remains.end:020d}-{number}")
    disk.make_directories(folder / "commitlog")
    for file, high in reversed(remains.files):
        target = folder / "commitlog" / file.path.name
        low = max(0, remains.end - file.start)
        try:
            if file.start > remains.end:  # a file that begins at the end stays, for later appends
                disk.rename(file.path, target)
                continue
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        copy = MappedFile.create(target, file.start, file.size)
        try:
            for position in range(low, high, _CHUNK_BYTES):
                copy.write(position, file.read(position, min(_CHUNK_BYTES, high - position)))
            copy.sync()
        finally:
            copy.close()
        sync_names(copy, 1)
    for directory in (folder / "commitlog", folder, folder.parent, root, remains.files[-1][0].path.parent):
        sync_directory(directory)
    return folder


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


# ---------------------------------------------------------------- filler records
# A repair writes fillers over a part of the log that is not a record, so that the log continues after this part. A
# blank cannot bridge the part, because a blank ends its file. A filler is a record with valid fields that no broker
# dispatches. Its sysFlag is *rollback*, like the transaction markers of old brokers: Apache's broker and rmqkit enter
# it in no queue and not in the index, and it needs no queue offset. Its topic is `FILLER_TOPIC`. Its body consists of
# zeros, because a search for records would find lost records in other bytes. Its storeTimestamp is copied from the
# record after it. Its preparedTransactionOffset is the number of bytes of records that may be lost there: its own size,
# or the bytes up to the end of the file if a blank follows. Fillers have at most `FILLER_BYTES_MAX`, because Apache's
# recovery reads each filler into memory. In a store with fillers, blank entries in queues are valid, because messages
# were lost.
# Source: store.md §3.3, §11, §12.1.

FILLER_TOPIC = "rmq_sys_LOST"
FILLER_BYTES_MAX = 1 << 20
_TOPIC = FILLER_TOPIC.encode()
_FIXED_BYTES = layout_of(0).head_bytes + 1 + 2
_TOPIC_BYTES_MIN = 1
FILLER_BYTES_MIN = _FIXED_BYTES + _TOPIC_BYTES_MIN
"""Smallest size of a lost record."""
_NOBODY = pack_host("0.0.0.0", 0)


def fillers(start: int, size: int, store_timestamp: int, *, lost_bytes: int = 0) -> Iterator[bytes]:
    """Yield records that together fill ``size`` bytes from a physical offset on. The size is at least
    `FILLER_BYTES_MIN`.
    ``lost_bytes``: number of lost bytes, if it is greater than the size of the fillers."""
    assert size >= FILLER_BYTES_MIN, "a record fits"
    left = size
    while left:
        part = left if left <= FILLER_BYTES_MAX else min(FILLER_BYTES_MAX, left - FILLER_BYTES_MIN)
        topic = _TOPIC[: part - _FIXED_BYTES]
        yield encode_record(
            topic=topic,
            queue_id=0,
            flag=0,
            queue_offset=0,
            physical_offset=start + size - left,
            sys_flag=TRANSACTION_ROLLBACK,
            born_timestamp=store_timestamp,
            born_host=_NOBODY,
            store_timestamp=store_timestamp,
            store_host=_NOBODY,
            reconsume_times=0,
            prepared_transaction_offset=lost_bytes or part,
            body=bytes(part - _FIXED_BYTES - len(topic)),
            properties=b"",
        )
        left -= part


def is_filler(record: Record) -> bool:
    """Return True if a record replaces bytes that were lost."""
    is_rollback = record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK
    return is_rollback and bool(record.topic) and FILLER_TOPIC.startswith(record.topic) and not record.properties
