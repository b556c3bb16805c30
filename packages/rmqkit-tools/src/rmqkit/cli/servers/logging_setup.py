"""The destination of a server's log: stderr or a file of limited size, as text or as one JSON object per line.

``rmq broker``, ``namesrv`` and ``standalone`` use the same settings (``logLevel`` is hot: a request or SIGHUP can
change it; SIGHUP also reopens the file).
"""

from __future__ import annotations

import enum
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct, field

from rmqkit.errors import SettingsError
from rmqkit.sentences import plain
from rmqkit.settings import Setting

_TEXT = "%(asctime)s %(levelname)s %(shard)s%(name)s: %(message)s"
_LEVELS = {name: logging.getLevelName(name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class LogFormat(enum.Enum):
    """The format of a line of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevels:
    """The lowest logged levels, for all loggers and for single loggers: ``INFO``, ``WARNING,rmqkit.store=DEBUG``.
    Raises ValueError: a part is neither a level nor ``logger=level``."""

    __slots__ = ("_levels", "_text")

    def __init__(self, text: str = "WARNING") -> None:
        self._text = text.strip()
        self._levels = dict(map(_level, filter(None, (part.strip() for part in self._text.split(",")))))

    def __str__(self) -> str:
        return self._text

    def apply(self) -> None:
        """Set these levels; all other loggers get the general level."""
        for name in [*logging.Logger.manager.loggerDict]:
            if name.startswith("rmqkit"):
                logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger().setLevel(logging.WARNING)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)


def _level(part: str) -> tuple[str, int]:
    name, _, level = part.rpartition("=")
    if level.upper() not in _LEVELS:
        raise ValueError(f"{part} is neither one of {', '.join(_LEVELS)} nor logger=LEVEL")
    return name.strip(), _LEVELS[level.upper()]


class LoggingSettings(Struct, kw_only=True):
    """The settings of the log in a configuration file."""

    log_file: Annotated[
        str, Setting("logFile", "log file; its folder is created if necessary; empty means standard error")
    ] = ""
    log_format: Annotated[LogFormat, Setting("logFormat", "format of log lines: text or JSON")] = LogFormat.TEXT
    log_level: Annotated[
        LogLevels,
        Setting(
            "logLevel", "DEBUG, INFO, WARNING or ERROR; with levels for parts: WARNING,rmqkit.store=DEBUG", hot=True
        ),
    ] = field(default_factory=LogLevels)
    log_file_bytes_max: Annotated[
        int, Setting("logFileBytesMax", "size of logFile, in bytes, at which a new file is started", low=4096)
    ] = 64 << 20
    log_file_count: Annotated[
        int, Setting("logFileCount", "number of log files to keep, including logFile", low=2, high=1000)
    ] = 10


class JsonLines(logging.Formatter):
    """A formatter with one JSON object per line: ``time`` (UTC), ``level``, ``logger``, ``message``, ``exception``
    after an error, and ``broker`` in a shard."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": plain(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        if shard := getattr(record, "shard", ""):
            line["broker"] = shard.strip()
        return msgspec.json.encode(line).decode()


def set_up(settings: LoggingSettings) -> None:
    """Set up the log by the settings. Raises SettingsError: the file cannot be opened."""
    handler = _handler(settings)
    handler.setFormatter(
        JsonLines() if settings.log_format is LogFormat.JSON else logging.Formatter(_TEXT, defaults={"shard": ""})
    )
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
        former.close()
    root.addHandler(handler)
    settings.log_level.apply()


def reopen() -> None:
    """Close the log file. The next line opens a file with its name, even if the old file was moved."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()


def _handler(settings: LoggingSettings) -> logging.Handler:
    if not settings.log_file:
        return logging.StreamHandler(sys.stderr)
    from logging.handlers import RotatingFileHandler  # its import also loads much of the network code

    path = Path(settings.log_file).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(
            path, maxBytes=settings.log_file_bytes_max, backupCount=settings.log_file_count - 1, encoding="utf-8"
        )
    except OSError as error:
        raise SettingsError(f"cannot write the log to {path}: {error.strerror}; choose another logFile") from error
