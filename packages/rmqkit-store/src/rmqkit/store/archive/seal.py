"""The process that writes one segment. Writing costs seconds of CPU, which would block the event loop of a broker.

``python -m rmqkit.store.archive.seal`` reads one line of JSON (`Work`) from its standard input: the arguments of a
process are public, and must not show credentials. The process writes the segment, reads the segment back, compares
every record with the log, adds the segment to the table of the catalog (`rmqkit.store.archive.catalog`), and prints one
line of JSON (`Sealed`). A kill at any time leaves no valid segment, and the
next process starts from the beginning.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from rmqkit.errors import RmqError, StoreError
from rmqkit.store.archive.archive import segment_name
from rmqkit.store.archive.places import Place, place_of
from rmqkit.store.archive.segment import SegmentFile, blocks_of
from rmqkit.system import disk

__all__ = ["Sealed", "Work", "answer", "seal", "work_on"]

_NICE = 10


class Work(Struct):
    """A segment to write: path and start of the log file, the archive and the folder in it, whether TAGS is a key, and
    the identity of the log. Without a path, no segment is written, and only the table of the catalog is completed.
    ``catalog`` and ``table``: the Iceberg table that lists the segments; empty if there is none."""

    path: str
    start: int
    archive: str
    below: str
    with_tags: bool
    log_id: str = ""
    catalog: str = ""
    table: str = ""


class Sealed(Struct):
    """The result of sealing a file: the segment's name, length, records and other bytes, or an error.
    ``catalog_error``: the reason why the table of the catalog lacks segments; empty if it has all of them."""

    name: str = ""
    size: int = 0
    records: int = 0
    other_bytes: int = 0
    error: str = ""
    catalog_error: str = ""


def seal(work: Work, place: Place) -> Sealed:
    """Write a segment and compare it with the log.
    Raises OSError: the log cannot be read, or the place cannot be written.
    Raises StoreError: the written segment differs from the log, or a segment of another log has the same name."""
    from rmqkit.store.archive.writing import write_segment  # it needs pyarrow, and a broker without archive does not

    name = segment_name(work.start)
    with _mapped(Path(work.path)) as log:
        _refuse_another_log(work, place, name)
        with place.writing(name) as out:
            assert out is not None, "a place opens a file"
            directory = write_segment(
                log, work.start, out, with_tags=work.with_tags, log_id=work.log_id, broker_name=place.name
            )
        # Read the segment by its name after the publication, like consumers do after the log file is deleted.
        size = place.names().get(name, 0)
        segment = SegmentFile(name, lambda position, count: place.read(name, position, count), size)
        if segment.directory != directory:
            raise StoreError(f"archive {place}: {name} was written and reads back with another directory")
        segment.check_footer()
        compare(segment, log)
    return Sealed(name, size, directory.record_count, directory.other_bytes)


@contextmanager
def _mapped(path: Path) -> Iterator[disk.Mapped]:
    """Map a whole file. Raises OSError: the file is missing or empty."""
    descriptor = disk.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = disk.size_of(descriptor)
        if not size:
            raise OSError(errno.EINVAL, "the log file is empty", str(path))
        # Do not close the mapping: its last view does. After an error, the frames of the traceback have views, and a
        # BufferError would hide the error.
        yield disk.map_file(descriptor, size)
    finally:
        disk.close(descriptor)


def work_on(work: Work, place: Place) -> Sealed:
    """Write the segment, if the work has one, and add the missing segments to the table of the catalog. Raises the
    errors of `seal`."""
    sealed = seal(work, place) if work.path else Sealed()
    if work.catalog:
        from rmqkit.store.archive.catalog import add_segments

        try:
            add_segments(place, work.catalog, work.table, work.log_id)
        except (OSError, RmqError) as error:
            sealed.catalog_error = " ".join(str(error).split())
    return sealed


def _refuse_another_log(work: Work, place: Place, name: str) -> None:
    """Raise StoreError if a segment of another log has the name: a write would replace its only copy."""
    size = place.names().get(name)
    if size is None:
        return
    try:
        other = SegmentFile(name, lambda position, count: place.read(name, position, count), size).directory
    except StoreError:
        return  # a damaged segment, which the caller writes again
    if other.log and other.log != work.log_id:
        raise StoreError(f"archive {place} has {name} of log {other.log}, and this is log {work.log_id}: remove it, or "
                         "give another archive")  # fmt: skip


def compare(segment: SegmentFile, log: disk.Mapped) -> None:
    """Compare the whole content of a segment with its log file. Raises StoreError: the content differs."""
    directory, seen = segment.directory, 0
    for offsets, positions, content in blocks_of(segment):
        ends = [*positions[1:], len(content)]
        logged = [
            log[offset - directory.start : offset - directory.start + end - at]
            for offset, at, end in zip(offsets, positions, ends, strict=True)
        ]
        if b"".join(logged) != content:
            differing = (
                one
                for one, at, end, part in zip(offsets, positions, ends, logged, strict=True)
                if part != content[at:end]
            )
            raise StoreError(f"{segment.name} reads back with another record at {next(differing)}")
        seen += len(content)
    if seen != directory.records_end - directory.start:
        raise StoreError(f"{segment.name} reads back with {seen} bytes of {directory.records_end - directory.start}")


def answer(line: bytes) -> bytes:
    """Return the line that the process prints, for the line that it reads."""
    work = msgspec.json.decode(line, type=Work)
    try:
        sealed = work_on(work, place_of(work.archive, work.below))
    except (OSError, RmqError) as error:
        sealed = Sealed(error=f"{type(error).__name__}: {error}")
    return msgspec.json.encode(sealed) + b"\n"


def main(lines: BinaryIO) -> int:
    """Seal the file that the standard input describes, and print the result."""
    line = lines.readline()
    if not line.endswith(b"\n"):
        return 1  # the broker died before it sent the work
    if hasattr(os, "nice"):
        os.nice(_NICE)
    answered = answer(line)
    with suppress(BrokenPipeError):  # the broker died; its next process finds the segment
        # Do not print: print writes to a buffer, and the flush at the exit would raise outside of this ``with``.
        os.write(sys.stdout.fileno(), answered)
    return int(bool(msgspec.json.decode(answered, type=Sealed).error))


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer))
