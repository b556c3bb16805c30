"""Configuration files of the broker: ``config/X.json`` with its backup ``X.json.bak``.

Writing makes a whole ``X.tmp``, moves ``X`` to ``X.bak``, and ``X.tmp`` to ``X``, each in one step: whenever the
machine stops, one of the two is whole, and neither is torn. Reading takes ``X``; if it is missing, empty or unreadable,
the backup, and says so. Integer map keys are written bare, as old brokers need it; any whitespace and order is read.
Source: store.md §9.1.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rmqkit.errors import BodyError, StoreMismatch, StoreUnavailable
from rmqkit.protocol import fastjson
from rmqkit.store.system_calls import sync_file

__all__ = ["JsonFile", "RowTexts", "decode_file", "make_directory", "naming", "sync_directory", "write_durably"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_INDENT = "\t"
_VERSION = "dataVersion"
_ANYBODY_S = 0o666  # less what the process's mask takes away


class JsonFile:
    """One configuration file and its backup. ``path``: the file; its directory is made when first written.
    ``mode``: who may read it, as of a new file."""

    def __init__(self, path: Path, *, mode: int = _ANYBODY_S) -> None:
        self.path = path
        self._mode = mode
        self.backup = path.with_name(path.name + ".bak")
        self._saving = threading.Lock()

    def load(self, value_type: type[T]) -> T | None:
        """The stored value, or None when neither file holds one.
        Raises StoreMismatch: what there is cannot be read, and no backup can; nothing was changed."""
        try:
            value = _read(self.path, value_type)
            failure = None
        except BodyError as error:
            value, failure = None, error
        if value is not None:
            return value
        try:
            value = _read(self.backup, value_type)
        except BodyError as error:
            failure = failure or error
        if value is None and failure is not None:
            raise StoreMismatch(f"{self.path} and its backup cannot be read ({failure}): repair or remove them")
        if self.path.exists():
            _log.warning("%s cannot be read (%s): taking its backup", self.path, failure or "it is empty")
            self.path.unlink()  # the next save would make it the backup
        elif value is not None:  # also after a kill between the two renames of a save
            _log.warning("%s is missing: taking its backup, which may be older", self.path)
        return value

    def set_aside(self) -> None:
        """Give the file and its backup other names, ``X.json.damaged``, for who wants to look at them.
        Raises OSError: the disk refused."""
        for path in (self.path, self.backup):
            if path.exists():
                path.replace(path.with_name(path.name + ".damaged"))

    def save(self, value: Any) -> None:
        """Replace the file; when this returns the value is on the disk. Any thread, one after the other.
        Raises StoreUnavailable: the disk refused; the former value is still in one of the files."""
        content = fastjson.dumps(value, indent=_INDENT)
        with self._saving:
            self._replace(content)

    def _replace(self, content: bytes) -> None:
        try:
            make_directory(self.path.parent)
            # Its name needs no wait: whichever of the renames a power cut leaves out, one of the two files is whole.
            _write_synced(whole := self.path.with_name(self.path.name + ".tmp"), content, self._mode)
            if self.path.exists():
                self.path.replace(self.backup)
            whole.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self.path}: errno {error.errno} {error.strerror}") from error


class RowTexts:
    """The texts of a table's rows, each made once: what is saved again and again differs in a few rows only.
    A changed row is another object."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Any, msgspec.Raw]] = {}

    def of(self, rows: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
        """The table with texts for rows, to be saved as the table would be."""
        known, self._texts = self._texts, {}
        for name, row in rows.items():
            made = known.get(name)
            if made is None or made[0] is not row:
                made = row, msgspec.Raw(fastjson.dumps(row, indent=_INDENT))
            self._texts[name] = made
        return {name: text for name, (_, text) in self._texts.items()}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError name a file that was open when it came, such as one of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file and wait until it and its name are on the disk."""
    _write_synced(path, content, _ANYBODY_S)
    sync_directory(path.parent)


def _write_synced(path: Path, content: bytes, mode: int) -> None:
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        sync_file(file.fileno())


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing, and wait until their names are on the disk."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Wait until names made, renamed or removed in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, value_type: type[T]) -> T | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return decode_file(content, value_type) if content.strip() else None


def decode_file(content: bytes, value_type: type[T]) -> T:
    """The value in the content of a file.
    Raises BodyError: it holds no such value, or that of another file: one that has nothing of the type."""
    value = fastjson.decode_as(content, value_type)
    if isinstance(value, msgspec.Struct):
        names = {one.encode_name for one in msgspec.structs.fields(value)} - {_VERSION}
        if not any(b'"%b"' % name.encode() in content for name in names):
            others = sorted({*fastjson.loads(content)} - {_VERSION})
            if others:
                raise BodyError(f"it holds {', '.join(others[:3])} and nothing of a {value_type.__name__}")
    return value
