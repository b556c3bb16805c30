"""Notes: small files of ours beside ``checkpoint``, which Apache's broker does not know.

The first line is the CRC-32 of the rest in hex, the rest is JSON. A note is replaced in one step, so that a kill leaves
the former one or the new one.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from rmqkit.store.files import sync_directory, write_durably

__all__ = ["is_note", "read_note", "remove_note", "write_note"]

_log = logging.getLogger(__name__)
_CRC_DIGITS = 8
T = TypeVar("T")


def read_note(path: Path, note_type: type[T], without_it: str) -> T | None:
    """A note, None when there is none or it cannot be read, which is a WARNING.
    ``without_it``: what is not done then.
    Raises OSError: the disk refused."""
    try:
        note = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if is_note(note):
            return msgspec.json.decode(note[_CRC_DIGITS + 1 :], type=note_type)
    except msgspec.DecodeError:
        _log.debug("%s is no note", path)
    _log.warning("%s cannot be read: %s", path, without_it)
    return None


def is_note(note: bytes) -> bool:
    """Whether the content of a file is a whole note, by its CRC."""
    crc, _, content = note.partition(b"\n")
    return crc == b"%08x" % zlib.crc32(content)


def write_note(path: Path, note: object) -> None:
    """Replace a note; when this returns it is on the disk. Raises OSError: the disk refused."""
    content = msgspec.json.encode(note)
    whole = path.with_name(path.name + ".tmp")
    write_durably(whole, b"%08x\n%b" % (zlib.crc32(content), content))
    whole.replace(path)
    sync_directory(path.parent)


def remove_note(path: Path) -> None:
    """Remove a note, if there is one. Raises OSError: the disk refused."""
    if path.exists():
        path.unlink()
        sync_directory(path.parent)
