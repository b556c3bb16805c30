"""The audit: a JSON line before each change (``intent``), after each change (``done``, ``failed``), and for each
refused request. No line has a body or a secret.

The lines are in 5 rotated files of at most 64 MB, which only the owner can read. The last 1,000 lines are in memory for
the page. Use this module only on the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec
from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.errors import SettingsError
from rmqkit.sentences import _, plain

FILE_BYTES, FILES = 64_000_000, 5
SHOWN_MAX = 1_000
_TAIL_BYTES = 1 << 20


class AuditLine(Struct, rename="camel", kw_only=True, omit_defaults=True):
    """One line of the audit.

    Attributes:
        at: the time, in ms since the epoch.
        outcome: ``intent``, ``done``, ``failed`` or ``refused``.
        action: the kind of change, such as ``send``.
        target: the name of the changed object, such as a topic.
        detail: a description, or the reason of a failure or refusal.
    """

    at: int
    user: str
    address: str
    env: str
    action: str
    target: str
    outcome: str
    detail: str = ""


class _OwnFile(RotatingFileHandler):
    """A handler for a rotated file that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        close_to_others(Path(self.baseFilename))
        for number in range(1, FILES):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.baseFilename}.{number}").chmod(OWNER_ONLY)
        return super()._open()


OWNER_ONLY = 0o600


def close_to_others(path: Path) -> None:
    """Create a file if it is missing, and let only its owner read it. Raises OSError: the system refuses."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, OWNER_ONLY)
    try:
        os.fchmod(descriptor, OWNER_ONLY)
    finally:
        os.close(descriptor)


class Audit:
    """The audit of a console. Raises SettingsError: the file cannot be written."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._clock = clock
        self._last: deque[AuditLine] = deque(maxlen=SHOWN_MAX)
        self._file: RotatingFileHandler | None = None
        self.path = path
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = _OwnFile(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
                self._last.extend(_tail(path))
            except OSError as error:
                why = _(
                    "audit file {path}: {strerror}: name another one with --audit", path=path, strerror=error.strerror
                )
                raise SettingsError(why) from None

    def write(
        self, user: str, address: str, env: str, action: str, target: str, outcome: str, detail: str = ""
    ) -> None:
        """Write a line to the file. Raises OSError: the line is not written, so the caller must not make the change."""
        line = AuditLine(
            at=self._clock.now_ms(), user=user, address=address, env=env, action=action, target=target,
            outcome=outcome, detail=detail,
        )  # fmt: skip
        if self._file is not None:
            text = msgspec.json.encode(line, enc_hook=plain).decode()
            record = logging.LogRecord("audit", logging.INFO, "", 0, text, None, None)
            if self._file.shouldRollover(record):
                self._file.doRollover()
            if self._file.stream is None:
                raise OSError(_("audit file {path} is closed", path=self.path))
            self._file.stream.write(text + "\n")
            self._file.stream.flush()
        self._last.append(line)

    def lines(self, wanted: str = "") -> list[AuditLine]:
        """Return the last lines that contain a text, the newest first."""
        text = wanted.lower()
        return [
            line
            for line in reversed(self._last)
            if not text or text in msgspec.json.encode(line, enc_hook=plain).decode().lower()
        ]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _tail(path: Path) -> list[AuditLine]:
    """Return the last lines of a file. Unreadable lines are skipped."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        texts = file.read().splitlines()[-SHOWN_MAX:]
    found = []
    for text in texts:
        try:
            found.append(msgspec.json.decode(text, type=AuditLine))
        except msgspec.MsgspecError:
            continue
    return found
